"""A run that was saved, ended and resumed is the run that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import infinity
from infinity.checkpoint import latest_tag
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_llama
from tests.checkpoint.common import make_engine, run

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
        run(engine, data[:6])
        engine.save_checkpoint(tmp_path / "saved", client_state={"epoch": 3})
        uninterrupted = run(engine, data[6:])
    # another seed: every value must come from the checkpoint
    with make_engine(Placement(*resumed_in, swap, tile_size="64KiB"), recipe, seed=5) as engine:
        path, client_state = engine.load_checkpoint(tmp_path / "saved")
        assert path == tmp_path / "saved" / "global_step6"
        assert client_state == {"epoch": 3}
        assert engine.global_steps == 6
        assert run(engine, data[6:]) == uninterrupted


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
        run(engine, batches(2))
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
        run(engine, batches(2))
        engine.save_checkpoint(tmp_path)
        assert latest_tag(tmp_path) == "global_step2"
        engine.load_checkpoint(tmp_path, tag="global_step0")
        assert engine.global_steps == 0
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2


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


def test_a_tag_that_leads_elsewhere_is_refused(tmp_path) -> None:
    with make_engine(Placement()) as engine:
        for tag in ("../up", "a/b", ".hidden", "latest"):
            with pytest.raises(infinity.ConfigError, match="plain directory name"):
                engine.save_checkpoint(tmp_path, tag=tag)
