"""A run that was saved, ended and resumed is the run that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import infinity
from infinity.checkpoint import latest_tag, save
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_llama, train_on
from tests.checkpoint.common import make_engine

PLACEMENTS = [pytest.param(("none", "none"), id="memory"), pytest.param(("nvme", "nvme"), id="nvme")]


@pytest.mark.parametrize("saved_in", PLACEMENTS)
@pytest.mark.parametrize("resumed_in", PLACEMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resuming_continues_bit_for_bit(saved_in, resumed_in, precision, tmp_path) -> None:
    recipe = Recipe(precision, clipping=0.5)
    data = batches(16)
    swap = tmp_path / "swap"
    swap.mkdir()
    with make_engine(Placement(*saved_in, swap), recipe) as engine:
        train_on(engine, data[:6])
        engine.save_checkpoint(tmp_path / "saved", client_state={"epoch": 3})
        uninterrupted = train_on(engine, data[6:])
    # another seed: every value must come from the checkpoint
    with make_engine(Placement(*resumed_in, swap, tile_size="64KiB"), recipe, seed=5) as engine:
        path, client_state = engine.load_checkpoint(tmp_path / "saved")
        assert path == tmp_path / "saved" / "global_step6"
        assert client_state == {"epoch": 3}
        assert engine.global_steps == 6
        assert train_on(engine, data[6:]) == uninterrupted


def test_frozen_parameters_are_saved(tmp_path) -> None:
    def build(seed: int) -> torch.nn.Module:
        model = tiny_llama(seed)
        model.model.embed_tokens.weight.requires_grad_(False)
        return model

    with make_engine(Placement(), build=build) as engine:
        engine.save_checkpoint(tmp_path)
        saved = dict(engine.named_parameters())
    with make_engine(Placement(), build=build, seed=5) as engine:
        engine.load_checkpoint(tmp_path)
        for name, value in engine.named_parameters():
            assert torch.equal(value, saved[name]), name


def test_any_tool_can_open_the_tensors(tmp_path) -> None:
    with make_engine(Placement()) as engine:
        train_on(engine, batches(2))
        path = engine.save_checkpoint(tmp_path, tag="two")
        weights = dict(engine.named_parameters())
    seen = set()
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                field, _, name = key.partition(".")
                if field == "master":
                    seen.add(name)
                    master = tensors.get_tensor(key)
                    tie = master.view(torch.int32) & 0xFFFF == 0x8000  # `split` rounds these away from zero
                    assert torch.equal(master.bfloat16()[~tie], weights[name][~tie])
    assert seen == weights.keys()


def test_an_empty_directory_has_no_checkpoint(tmp_path) -> None:
    with make_engine(Placement()) as engine:
        assert engine.load_checkpoint(tmp_path) == (None, None)
        with pytest.raises(infinity.CheckpointError, match="is no checkpoint"):
            engine.load_checkpoint(tmp_path, tag="missing")


def test_the_last_saved_one_is_loaded_and_an_older_one_by_its_tag(tmp_path) -> None:
    with make_engine(Placement()) as engine:
        engine.save_checkpoint(tmp_path)
        train_on(engine, batches(2))
        engine.save_checkpoint(tmp_path)
        assert latest_tag(tmp_path) == "global_step2"
        engine.load_checkpoint(tmp_path, tag="global_step0")
        assert engine.global_steps == 0
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2


# Parts of a checkpoint #


def llama_with_frozen_embeddings(seed: int) -> torch.nn.Module:
    model = tiny_llama(seed)
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [
        (tiny_llama, tiny_llama),
        (tiny_llama, llama_with_frozen_embeddings),
        (llama_with_frozen_embeddings, tiny_llama),
    ],
)
def test_weights_alone_start_a_new_run(saved_as, loaded_as, placement, tmp_path) -> None:
    """The run that follows is the one of a model that has these weights from the start."""
    with make_engine(Placement(), build=saved_as) as engine:
        train_on(engine, batches(5))
        engine.save_checkpoint(tmp_path / "saved")
        weights = {name: value.float() for name, value in engine.named_parameters()}
    swap = tmp_path / "swap"
    swap.mkdir()
    with make_engine(Placement(*placement, swap), seed=5, build=loaded_as) as engine:
        train_on(engine, batches(2))  # leaves moments, which must go
        before = (engine.global_steps, engine.get_lr())
        engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
        assert (engine.global_steps, engine.get_lr()) == before
        for name, value in engine.named_parameters():
            assert torch.equal(value.float(), weights[name]), name
        engine.save_checkpoint(tmp_path / "fresh")
    for file in (tmp_path / "fresh" / "global_step2").glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                assert not key.startswith("exp_avg") or not tensors.get_tensor(key).any(), key


def test_other_trainability_is_refused_unless_weights_are_taken_alone(tmp_path) -> None:
    with make_engine(Placement(), build=tiny_llama) as engine:
        engine.save_checkpoint(tmp_path)
    with (
        make_engine(Placement(), build=llama_with_frozen_embeddings) as engine,
        pytest.raises(infinity.CheckpointError, match=r"is frozen, but in .* it was trained: load with load_module_o"),
    ):
        engine.load_checkpoint(tmp_path)


def test_optimizer_and_schedule_may_start_afresh(tmp_path) -> None:
    data = batches(9)
    with make_engine(Placement()) as engine:
        train_on(engine, data[:4])
        engine.save_checkpoint(tmp_path)
        with_all = train_on(engine, data[4:])
        lr = engine.get_lr()
    losses = {}
    for kept in ("optimizer", "lr_scheduler"):
        with make_engine(Placement(), seed=5) as engine:
            engine.load_checkpoint(tmp_path, **{f"load_{kept}_states": False})
            assert engine.global_steps == 4
            losses[kept] = train_on(engine, data[4:])
            assert (engine.get_lr() == lr) == (kept == "optimizer")
        assert losses[kept][0] == with_all[0]
        assert losses[kept][1:] != with_all[1:]


def test_a_checkpoint_may_be_left_out_of_what_is_loaded_by_default(tmp_path) -> None:
    with make_engine(Placement()) as engine:
        engine.save_checkpoint(tmp_path, tag="first")
        engine.save_checkpoint(tmp_path, tag="second", save_latest=False)
        assert latest_tag(tmp_path) == "first"
        engine.load_checkpoint(tmp_path, tag="second")


@pytest.mark.parametrize(("saved_with", "loaded_with"), [(1, 2), (2, 3), (3, 1)])
def test_another_number_of_micro_batches_starts_at_a_whole_step(saved_with, loaded_with, tmp_path) -> None:
    with make_engine(Placement(), Recipe(accumulation=saved_with)) as engine:
        train_on(engine, batches(saved_with))
        engine.save_checkpoint(tmp_path)
    with make_engine(Placement(), Recipe(accumulation=loaded_with)) as engine:
        engine.load_checkpoint(tmp_path)
        train_on(engine, batches(loaded_with - 1))
        assert engine.global_steps == 1
        train_on(engine, batches(1))
        assert engine.global_steps == 2
        engine.save_checkpoint(tmp_path)


# What is refused #


def test_client_state_that_would_not_be_loaded_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(save, "MAX_BYTES", 1 << 20)  # a gigabyte takes long
    told = r"are 2\.01 MiB, and .* loaded with 1\.00 MiB of them"
    with make_engine(Placement()) as engine, pytest.raises(infinity.CheckpointError, match=told):
        engine.save_checkpoint(tmp_path, client_state={"queue": torch.zeros(1 << 19)})
    assert not list(tmp_path.iterdir())


def test_client_state_with_code_is_refused(tmp_path) -> None:
    with make_engine(Placement()) as engine, pytest.raises(infinity.CheckpointError, match="client_state"):
        engine.save_checkpoint(tmp_path, client_state={"path": Path("/")})
    assert not list(tmp_path.iterdir())


def test_saving_in_the_middle_of_a_step_is_refused(tmp_path) -> None:
    with make_engine(Placement(), Recipe(accumulation=2)) as engine:
        engine.backward(loss_of(engine, batches(1)[0]))
        engine.step()
        with pytest.raises(infinity.InfinityError, match="middle of a step"):
            engine.save_checkpoint(tmp_path)


@pytest.mark.parametrize("empty", ["", None, 3])
@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint", "save_16bit_model"])
def test_an_empty_name_is_not_the_working_directory(call, empty, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with make_engine(Placement()) as engine:
        with pytest.raises(infinity.ConfigError, match=f"{call}: the directory is {empty!r}; give its path"):
            getattr(engine, call)(empty)
        engine.save_checkpoint(".")
    assert (tmp_path / "latest").exists()


def test_what_is_no_client_state_or_file_name_is_refused(tmp_path) -> None:
    with make_engine(Placement()) as engine:
        with pytest.raises(infinity.ConfigError, match="client_state is a int; give a dict"):
            engine.save_checkpoint(tmp_path, client_state=3)  # type: ignore[arg-type]
        with pytest.raises(infinity.ConfigError, match="save_filename 3 must be the plain name"):
            engine.save_16bit_model(tmp_path, save_filename=3)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_tag_that_leads_elsewhere_is_refused(tmp_path) -> None:
    with make_engine(Placement()) as engine:
        for tag in ("../up", "a/b", ".hidden", "latest"):
            with pytest.raises(infinity.ConfigError, match="plain directory name"):
                engine.save_checkpoint(tmp_path, tag=tag)
