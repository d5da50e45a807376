"""Parameters that are frozen at `initialize` and trained later: as those of an engine that had states for them before.

The reference has all parameters trained at `initialize` and frozen right after it, which leaves them and their states
as they are; `tests/api/test_training_calls.py` holds that against torch.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import ConfigError, InfinityError
from infinity.checkpoint.unfreezing import check_possible
from infinity.integrations import pretrained_model
from infinity.zero import materialize
from infinity.zero.ranks import Ranks
from tests.api.placements import PLACEMENTS, config_of
from tests.api.small_models import CONFIG, Heads
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Recipe, batches, loss_of, tiny_gpt2, tiny_llama, train_on

STEPS = 3  # before and after
DATA = batches(4 * STEPS)


def llama() -> nn.Module:
    """Every value is one of each 16-bit precision, in which frozen parameters are kept."""
    return tiny_llama().half().bfloat16().float()


def lower(model: Any) -> list[nn.Parameter]:
    """The embeddings, a block, and a part of the next one."""
    modules = (model.model.embed_tokens, model.model.layers[0], model.model.layers[1].mlp)
    return [param for module in modules for param in module.parameters()]


def freeze(model: nn.Module, frozen: bool = True) -> None:
    for param in lower(model):
        param.requires_grad_(not frozen)


def torchs(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    groups = [{"params": list(model.parameters())[::2]}, {"params": list(model.parameters())[1::2], "lr": 3e-3}]
    if kind == "SGD":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2) if kind == "AdamW" else torch.optim.Adagrad(groups, lr=1e-2)


def engine_for(
    placement: str, path: Path, *, late: bool, kind: str = "AdamW", recipe: Recipe | None = None, **more: Any
) -> infinity.Engine:
    """An engine whose lower part is frozen: since before `initialize`, or since after it."""
    model = llama()
    if late:
        freeze(model)
    config = config_of(placement, path, recipe, **more)
    del config["optimizer"]
    engine = infinity.initialize(model=model, config=config, optimizer=torchs(model, kind))[0]
    freeze(model)
    return engine


def trained(engine: infinity.Engine, accumulation: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    with engine:
        losses = train_on(engine, DATA[: STEPS * accumulation])
        freeze(engine.module, False)
        losses += train_on(engine, DATA[STEPS * accumulation : 2 * STEPS * accumulation])
        assert engine.global_steps == 2 * STEPS
        return losses, dict(engine.named_parameters())


def alike(one: tuple[Any, dict[str, torch.Tensor]], other: tuple[Any, dict[str, torch.Tensor]]) -> None:
    assert one[0] == other[0]
    for name, values in one[1].items():
        assert torch.equal(values, other[1][name]), name


@pytest.mark.parametrize(
    ("precision", "accumulation", "kind", "placement"),
    [  # all pairs
        (precision, accumulation, kind, PLACEMENTS[(k + p) % 2])
        for p, (precision, accumulation) in enumerate([("fp32", 1), ("bf16", 2), ("fp16", 1)])
        for k, kind in enumerate(["AdamW", "SGD", "Adagrad"])
    ],
)
def test_states_are_made_when_a_parameter_is_unfrozen(precision, accumulation, kind, placement, tmp_path) -> None:
    recipe = Recipe(precision, accumulation, clipping=0.5)
    late, before = (
        trained(engine_for(placement, tmp_path, late=late, kind=kind, recipe=recipe), accumulation)
        for late in (True, False)
    )
    alike(late, before)
    assert not list(tmp_path.iterdir())


def test_a_drive_that_holds_nothing_need_not_exist(tmp_path) -> None:
    drives = {"tiering": {"nvme": [{"path": str(tmp_path / "new")}]}}
    late, before = (trained(engine_for("stays", tmp_path, late=late, **drives)) for late in (True, False))
    alike(late, before)


@pytest.mark.parametrize("stage", [1, 2])
def test_states_are_made_below_stage_3(stage, tmp_path) -> None:
    zero = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    late, before = (trained(engine_for("stays", tmp_path, late=late, **zero)) for late in (True, False))
    alike(late, before)


def test_what_an_engine_is_goes_on(tmp_path, caplog) -> None:
    """Its schedule, its random states, its counts, and what it says of the last step."""
    with engine_for("moves", tmp_path, late=True) as engine:
        engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
        optimizer, scheduler = engine.optimizer, engine.lr_scheduler
        train_on(engine, DATA[:2])
        freeze(engine.module, False)
        norm, lr, state = engine.get_global_grad_norm(), engine.get_lr(), torch.get_rng_state()
        with caplog.at_level(logging.WARNING):
            loss = loss_of(engine, DATA[2])
        assert (engine.optimizer, engine.lr_scheduler, engine.get_lr()) == (optimizer, scheduler, lr)
        assert (engine.global_steps, engine.micro_steps, engine.get_global_grad_norm()) == (2, 2, norm)
        assert torch.equal(torch.get_rng_state(), state)
        assert any("begin with fresh optimizer states" in record.getMessage() for record in caplog.records)
        engine.backward(loss)
        engine.step()
        engine.save_checkpoint(tmp_path / "saved")
        freeze(engine.module)
        losses = train_on(engine, DATA[3:5])
        freeze(engine.module, False)
        engine.load_checkpoint(tmp_path / "saved")
        freeze(engine.module)
        assert train_on(engine, DATA[3:5]) == losses


def test_parameters_may_be_unfrozen_one_after_the_other(tmp_path) -> None:
    ends = []
    for late in (True, False):
        with engine_for("moves", tmp_path, late=late) as engine:
            losses = []
            for index, param in enumerate(lower(engine.module)):
                if index % 5 == 0:
                    param.requires_grad_(True)
                    losses += train_on(engine, DATA[index : index + 1])
            ends.append((losses, dict(engine.named_parameters())))
    alike(*ends)


def test_what_is_paused_meanwhile_trains_again(tmp_path) -> None:
    ends = []
    for late in (True, False):
        with engine_for("moves", tmp_path, late=late) as engine:
            head = engine.module.lm_head.weight
            losses = train_on(engine, DATA[:2])
            head.requires_grad_(False)
            losses += train_on(engine, DATA[2:4])
            freeze(engine.module, False)
            losses += train_on(engine, DATA[4:6])
            assert not head.requires_grad
            head.requires_grad_(True)
            ends.append((losses + train_on(engine, DATA[6:8]), dict(engine.named_parameters())))
    alike(*ends)


def test_micro_batches_of_which_nothing_is_left_stay_counted(tmp_path) -> None:
    ends = []
    for late in (True, False):
        with engine_for("stays", tmp_path, late=late, recipe=Recipe("fp32", accumulation=2)) as engine:
            train_on(engine, DATA[:1])
            engine.zero_grad()
            freeze(engine.module, False)
            losses = train_on(engine, DATA[1:2])
            assert (engine.micro_steps, engine.global_steps) == (2, 1)
            ends.append((losses, dict(engine.named_parameters())))
    alike(*ends)


def test_a_base_in_its_files_is_unfrozen_in_part(tmp_path) -> None:
    ends = []
    (tmp_path / "swap").mkdir()
    tiny_gpt2().bfloat16().save_pretrained(tmp_path / "base")
    for late in (True, False):
        model, weights = pretrained_model(tmp_path / "base", in_place=True)
        model.requires_grad_(False)
        model.transformer.ln_f.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if not late:
            model.transformer.h[1].requires_grad_(True)
        config = config_of("moves", tmp_path / "swap")
        del config["optimizer"]
        with infinity.initialize(model=model, config=config, optimizer=optimizer, weights=weights)[0] as engine:
            engine.module.transformer.h[1].requires_grad_(False)
            losses = train_on(engine, DATA[:2])
            engine.module.transformer.h[1].requires_grad_(True)
            ends.append((losses + train_on(engine, DATA[2:5]), dict(engine.named_parameters())))
    alike(*ends)


def on_ranks(path: Path) -> list[bool]:
    found = []
    for stage in (1, 3):
        ends = []
        for late in (True, False):
            torch.manual_seed(0)
            model = Heads()
            if late:
                model.mix.requires_grad_(False)
            config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
            config |= {"zero_optimization": {"stage": stage}, "tiering": {"nvme": [{"path": str(path)}]}}
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with infinity.initialize(model=model, config=config, optimizer=optimizer, device="cpu")[0] as engine:
                engine.module.mix.requires_grad_(False)
                for step in range(6):
                    if step == 3:
                        engine.module.mix.requires_grad_(True)
                    data = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + engine.global_rank))
                    engine.backward(engine(data).square().mean())
                    engine.step()
                ends.append(dict(engine.named_parameters()))
        found += [torch.equal(ends[0][name], ends[1][name]) for name in ends[0]]
    return found


def test_ranks_unfreeze_together(tmp_path) -> None:
    (tmp_path / "drive").mkdir()
    for found in run_ranks(2, on_ranks, tmp_path / "drive", path=tmp_path):
        assert found == [True] * 8


# Refused, and the engine is as it was #


def test_unfreezing_belongs_between_two_steps(tmp_path) -> None:
    recipe = Recipe("fp32", accumulation=2)
    with engine_for("moves", tmp_path, late=True, recipe=recipe) as engine:
        loss = loss_of(engine, DATA[0])
        freeze(engine.module, False)
        with pytest.raises(InfinityError, match=r"requires a gradient since a forward pass whose backward is to come"):
            loss_of(engine, DATA[0])
        freeze(engine.module)
        engine.backward(loss)
        engine.step()
        freeze(engine.module, False)
        with pytest.raises(InfinityError, match=r"creating states for `model.embed_tokens.weight`.* in the middle of"):
            loss_of(engine, DATA[1])
        freeze(engine.module)
        train_on(engine, DATA[1:2])
        freeze(engine.module, False)
        train_on(engine, DATA[2:4])
        assert engine.global_steps == 2


def test_a_model_that_is_called_past_the_engine_makes_no_states(tmp_path) -> None:
    with engine_for("stays", tmp_path, late=True) as engine:
        train_on(engine, DATA[:1])
        freeze(engine.module, False)
        with pytest.raises(InfinityError, match=r"`model.embed_tokens.weight` requires a gradient since .* call the"):
            loss_of(engine.module, DATA[1]).backward()
        train_on(engine, DATA[1:2])


def test_states_that_a_later_process_could_go_on_from_stay_as_they_are(tmp_path) -> None:
    (tmp_path / "drive").mkdir(mode=0o700)
    config = config_of("moves", tmp_path / "drive")
    config["tiering"]["crash_consistent"] = True
    with engine_for("moves", tmp_path / "drive", late=True, tiering=config["tiering"]) as engine:
        train_on(engine, DATA[:1])
        freeze(engine.module, False)
        with pytest.raises(ConfigError, match=r"`model.embed_tokens.weight` was frozen at init.*crash_consistent"):
            loss_of(engine, DATA[1])
        freeze(engine.module)
        train_on(engine, DATA[1:2])
        engine.end_run()


def without_unfreezing(path: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    with engine_for("moves", path, late=True) as engine:
        return train_on(engine, DATA[: 2 * STEPS]), dict(engine.named_parameters())


def with_failure(path: Path, failure: type[InfinityError], match: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    with engine_for("moves", path, late=True) as engine:
        losses = train_on(engine, DATA[:STEPS])
        freeze(engine.module, False)
        with pytest.raises(failure, match=match):
            loss_of(engine, DATA[STEPS])
        freeze(engine.module)
        return losses + train_on(engine, DATA[STEPS : 2 * STEPS]), dict(engine.named_parameters())


def test_too_little_memory_leaves_the_engine_as_it_was(tmp_path, monkeypatch) -> None:
    calls = []
    real = materialize.build_runtime

    def once(*args: Any, **more: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise infinity.CapacityError("tiering.host_memory is too small")
        return real(*args, **more)

    monkeypatch.setattr(materialize, "build_runtime", once)
    alike(with_failure(tmp_path, infinity.CapacityError, "host_memory is too small"), without_unfreezing(tmp_path))
    assert len(calls) == 2
    assert not list(tmp_path.iterdir())


def test_a_full_drive_leaves_the_engine_as_it_was(tmp_path, monkeypatch) -> None:
    def full(*args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("infinity.checkpoint.session.write_shards", full)
        ends = with_failure(tmp_path, infinity.StorageError, "No space left")
    alike(ends, without_unfreezing(tmp_path))
    assert not list(tmp_path.iterdir())


# Over a checkpoint #


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_checkpoint_is_taken_where_more_is_trained(placement, tmp_path) -> None:
    """The engine that loads it goes on as the one that saved it, once that has unfrozen the same."""
    with engine_for(placement, tmp_path, late=True) as engine:
        train_on(engine, DATA[:STEPS])
        engine.save_checkpoint(tmp_path / "saved")
        freeze(engine.module, False)
        losses = train_on(engine, DATA[STEPS : 2 * STEPS])
    with engine_for(placement, tmp_path, late=False) as engine:
        freeze(engine.module, False)
        train_on(engine, DATA[:1])  # leaves moments, which must go
        engine.load_checkpoint(tmp_path / "saved")
        assert train_on(engine, DATA[STEPS : 2 * STEPS]) == losses


def test_ranks_on_several_machines_are_told_to_go_by_a_checkpoint() -> None:
    config = infinity.load_config(dict(CONFIG))
    with pytest.raises(ConfigError, match=r"`head` was frozen at initialize.* several machines.*save a ch"):
        check_possible("head", config, Ranks(size=2, neighbours=1))
    check_possible("head", config, Ranks(size=2, neighbours=2))


def test_a_monitor_goes_on_where_new_tiers_cannot_be_filled(tmp_path, monkeypatch) -> None:
    calls = []
    real = materialize.materialize_zeros

    def once(runtime: Any) -> None:
        calls.append(runtime)
        if len(calls) == 1:
            raise infinity.CapacityError("tiering.host_memory is too small")
        real(runtime)

    monkeypatch.setattr(materialize, "materialize_zeros", once)
    csv = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}}
    with engine_for("stays", tmp_path, late=True, **csv) as engine:
        train_on(engine, DATA[:1])
        freeze(engine.module, False)
        with pytest.raises(infinity.CapacityError, match="host_memory is too small"):
            loss_of(engine, DATA[1])
        freeze(engine.module)
        assert engine.monitor.writes
        train_on(engine, DATA[1:2])
