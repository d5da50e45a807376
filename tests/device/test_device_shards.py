"""At stage 3 without offload each rank's shards lie on its device, which updates them: nothing crosses the link."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.integrations.deepspeed.values import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from infinity.tiers import AcceleratorLink, Params, grads
from infinity.tiers.unit_params import UnitParams
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, assert_same_weights, batches, loss_of, named_budget
from tests.device import simdev, target
from tests.device.staged_group import staged_group
from tests.device.training import SPEEDS, tiny

pytestmark = target.emulated_only

STEPS = 3
CLIPPED = Recipe("bf16", 1, 0.5, STEPS)
# Micro-batches, clipping, and whether parts of the model are frozen: each pair of these values meets.
CASES = [(1, 0.0, False), (1, 0.5, True), (2, 0.0, True), (2, 0.5, False)]
_NORM_BYTES = torch.float64.itemsize

Run = Callable[..., Any]


def on_two_ranks(function: Run, *args: Any, path: Path, ranks: int = 2) -> list[Any]:
    path.mkdir(exist_ok=True)
    return run_ranks(ranks, function, *args, path=path, timeout_s=200)


def begin(speed: str | None = "slow_kernels") -> dist.ProcessGroup:
    """Give this rank an emulated device, and return the group of all ranks' devices."""
    simdev.load()
    simdev.configure(check=1, **(SPEEDS[speed] if speed else {}))
    grads.to_host = _refused
    return staged_group()


def _refused(*_: Any) -> torch.Tensor:
    raise AssertionError("a gradient is waited for")


def frozen(model: nn.Module) -> nn.Module:
    """Freeze one unit, and a part of another."""
    model.transformer.wpe.requires_grad_(False)
    model.transformer.h[1].mlp.requires_grad_(False)
    return model


def start(
    group: dist.ProcessGroup | None,
    recipe: Recipe = CLIPPED,
    *,
    freezes: bool = False,
    ahead: int = 0,
    ratio: float = 0.0,
    **tiering: Any,
) -> infinity.Engine:
    """Return an engine on the device if the ranks have a group for it, else on the CPU.

    Args:
        ahead: elements that may be unsharded early; with enough of them, all units stay unsharded.
        ratio: the share of states that is offloaded; with 0 nothing is.
    """
    config = recipe.config(Placement("none", "cpu" if ratio else "none"))
    if ratio:
        config["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
    config["tiering"] |= tiering
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = ahead
    model = tiny(seed=dist.get_rank())  # rank 0's values count
    device = "cpu" if group is None else "simdev"
    engine = infinity.initialize(
        model=frozen(model) if freezes else model, config=config, device=device, process_group=group
    )[0]
    moving = [spec for spec in engine._runtime.sizing.specs if spec.offloaded]
    there = [spec for spec in moving if spec.has_device_shard]
    assert bool(there) == (group is not None)
    assert (there == moving) == (group is not None and not ratio)
    if not (ratio or ahead):
        assert engine._runtime.executor.cycle.capacity_bytes < sum(spec.nbytes for spec in moving)
    return engine


def step(engine: infinity.Engine, ids: torch.Tensor) -> float:
    loss = loss_of(engine, ids.to(engine.device))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def mine(count: int) -> list[torch.Tensor]:
    """Return this rank's micro-batches."""
    return batches(count * dist.get_world_size())[dist.get_rank() :: dist.get_world_size()]


def weights(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    return {name: param.detach().cpu() for name, param in engine.named_parameters()}


def compared(script: Run, path: Path, speed: str = "slow_kernels", ranks: int = 2) -> None:
    """Check that a script gives the same on devices as on the CPU. Its argument is the devices' group, or None."""
    for losses, ours, expected, theirs, races in on_two_ranks(_both, script, speed, path=path, ranks=ranks):
        assert losses == expected
        assert_same_weights(ours, theirs)
        assert races == 0


def _both(script: Run, speed: str) -> tuple[Any, ...]:
    group = begin(speed)
    return (*script(group), *script(None), simdev.counts()["races"])


# Training #


@contextmanager
def counting() -> Iterator[list[int]]:
    """Yield a list that grows by the bytes of every copy over the link."""
    copies: list[int] = []
    plain = AcceleratorLink._copy

    def counted(self: AcceleratorLink, stream: Any, pairs: Any, *more: Any) -> Any:
        copies.extend(target.nbytes for target, _ in pairs)
        return plain(self, stream, pairs, *more)

    AcceleratorLink._copy = counted
    try:
        yield copies
    finally:
        AcceleratorLink._copy = plain


def train(group: dist.ProcessGroup | None, recipe: Recipe, freezes: bool) -> tuple[list[float], dict[str, Any]]:
    ahead = 0 if freezes else 1 << 20
    with start(group, recipe, freezes=freezes, ahead=ahead) as engine, counting() as copies:
        losses = [step(engine, ids) for ids in mine(STEPS * recipe.accumulation)]
        # Only norms cross the link: of each unit's gradients, at most once a micro-batch.
        units = len(engine._runtime.partition.units)
        assert all(nbytes == _NORM_BYTES for nbytes in copies)
        assert len(copies) <= len(losses) * (units + 1)
        assert group is None or not engine.stats().tier_bytes
        return losses, weights(engine)


def compare_all(precision: str, speeds: list[str]) -> None:
    group = begin(speed=None)
    for accumulation, clipping, freezes in CASES:
        recipe = Recipe(precision, accumulation, clipping, STEPS)
        expected, theirs = train(None, recipe, freezes)
        for speed in speeds:
            with simdev.configured(**SPEEDS[speed]):
                losses, ours = train(group, recipe, freezes)
            assert losses == expected
            assert_same_weights(ours, theirs)
            assert simdev.counts()["races"] == 0


@pytest.mark.parametrize(
    ("precision", "speeds"), [("bf16", [*SPEEDS]), ("fp32", ["slow_link"]), ("fp16", ["slow_kernels"])]
)
def test_same_bits_as_on_the_cpu_and_nothing_on_the_link(precision, speeds, tmp_path) -> None:
    on_two_ranks(compare_all, precision, speeds, path=tmp_path / "ranks")


def layer_major(group: dist.ProcessGroup | None) -> tuple[list[float], dict[str, Any]]:
    recipe = Recipe("bf16", 2, 0.5, STEPS)
    with start(group, recipe, accumulation="layer") as engine:
        data = [{"input_ids": ids.to(engine.device), "labels": ids.to(engine.device)} for ids in mine(2 * STEPS)]
        losses = [engine.train_batch(iter(data[2 * each : 2 * each + 2])).item() for each in range(STEPS)]
        return losses, weights(engine)


def test_layer_major_micro_batches(tmp_path) -> None:
    compared(layer_major, tmp_path)


def in_groups(group: dist.ProcessGroup | None) -> tuple[list[float], dict[str, Any]]:
    recipe = Recipe("bf16", 2, 0.5, 2, {"communication": {"shard_size": 2}})
    with start(group, recipe) as engine:
        return [step(engine, ids) for ids in mine(4)], weights(engine)


def test_the_replicas_of_two_groups_add_up_once_a_step(tmp_path) -> None:
    compared(in_groups, tmp_path, ranks=4)


def within_the_least(group: dist.ProcessGroup) -> None:
    with pytest.raises(infinity.CapacityError, match="device_memory is 64") as refused:
        start(group, device_memory="64KiB")
    least = named_budget(refused.value)
    with start(group, device_memory=least) as engine:
        shards = sum(spec.shard_nbytes for spec in engine._runtime.sizing.specs if spec.has_device_shard)
        stays = engine._runtime.device.parts["parameters that stay"].capacity_bytes
        assert shards <= stays < shards + 20_000, "shards are counted, in addition to small parameters"
        for ids in mine(2):
            step(engine, ids)
            assert not engine._runtime.executor.in_flight.is_busy, "updates do not wait for unsharded units"
        assert engine._runtime.device.peak_bytes <= least


def _within_the_least() -> int:
    within_the_least(begin())
    return simdev.counts()["races"]


def test_the_device_budget_counts_the_shards(tmp_path) -> None:
    assert on_two_ranks(_within_the_least, path=tmp_path) == [0, 0]


# API calls #


def train_with_api_calls(group: dist.ProcessGroup | None, ratio: float) -> tuple[list[float], dict[str, Any]]:
    losses = []
    first, *data = mine(6)
    with start(group, ratio=ratio) as engine:
        model, block = engine.module, engine.module.transformer.h[0]
        ids = first.to(engine.device)
        engine.backward(loss_of(engine, ids))
        engine.zero_grad()  # drops these gradients
        losses.append(step(engine, data[0]))
        with torch.inference_mode():
            losses.append(float(loss_of(engine, ids).item()))
        with infinity.zero.GatheredParameters([model.transformer.wte.weight], modifier_rank=0):
            model.transformer.wte.weight.data.mul_(0.75)
        losses.append(step(engine, data[1]))
        state = model.state_dict()
        state["transformer.h.1.ln_1.weight"] = state["transformer.h.1.ln_1.weight"] * 0.5
        model.load_state_dict(state)
        for param in (block.attn.c_attn.weight, block.ln_1.weight):
            safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 1.01)
            safe_set_full_optimizer_state(param, safe_get_full_optimizer_state(param, "exp_avg") * 2, "exp_avg")
        losses.append(float(sum(param.double().sum().item() for param in engine.parameters())))
        loss = loss_of(engine, data[2].to(engine.device))
        engine.backward(loss)
        safe_set_full_grad(block.mlp.c_fc.weight, torch.full(block.mlp.c_fc.weight.shape, 1e-3))
        engine.step()
        losses.append(safe_get_full_fp32_param(block.attn.c_attn.weight).double().sum().item())
        losses.append(step(engine, data[3]))
        values = {name: value.cpu() for name, value in model.state_dict().items()}
        assert_same_weights(values, weights(engine) | head(model))
        return losses, weights(engine)


def head(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tied parameter that the state dict has twice."""
    state = model.state_dict()
    return {"lm_head.weight": state["transformer.wte.weight"].cpu()}


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_api_calls_read_and_write_the_newest_values(ratio, tmp_path) -> None:
    compared(partial(train_with_api_calls, ratio=ratio), tmp_path, "slow_link")


def overflowing(group: dist.ProcessGroup | None) -> tuple[list[float], dict[str, Any]]:
    recipe = Recipe("fp16", 1, 0.5, 8, {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}})
    with start(group, recipe) as engine:
        losses, skipped = [], 0
        before = weights(engine)
        for ids in mine(8):
            losses.append(step(engine, ids))
            if engine.skipped_steps > skipped:
                assert_same_weights(weights(engine), before)
            skipped, before = engine.skipped_steps, weights(engine)
        assert 0 < skipped < 8
        return losses, before


def test_steps_that_overflow_are_skipped(tmp_path) -> None:
    compared(overflowing, tmp_path)


def _refuse_what_is_not_finite() -> None:
    with start(begin(), Recipe("bf16", 1, 0.0)) as engine:
        engine.module.transformer.h[1].mlp.c_fc.weight.register_hook(lambda grad: grad * float("inf"))
        with pytest.raises(infinity.NonFiniteError, match="is not finite"):
            step(engine, mine(1)[0])


def test_a_gradient_that_is_not_finite_is_refused(tmp_path) -> None:
    on_two_ranks(_refuse_what_is_not_finite, path=tmp_path)


# Checkpoints #


def save(directory: Path, there: bool, background: bool) -> tuple[list[float], dict[str, Any]]:
    with start(begin() if there else None, freezes=True) as engine:
        losses = [step(engine, ids) for ids in mine(4)[:2]]
        engine.save_checkpoint(directory, blocking=not background)
        losses += [step(engine, ids) for ids in mine(4)[2:]]
        return losses, weights(engine)


def load(directory: Path, there: bool) -> tuple[list[float], dict[str, Any]]:
    with start(begin() if there else None, freezes=True) as engine:
        engine.load_checkpoint(directory)
        return [step(engine, ids) for ids in mine(4)[2:]], weights(engine)


@pytest.mark.parametrize(
    ("saved", "loaded", "background"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_checkpoint_moves_between_device_and_cpu(saved, loaded, background, tmp_path) -> None:
    before = on_two_ranks(save, tmp_path / "saved", saved, background, path=tmp_path / "a")
    after = on_two_ranks(load, tmp_path / "saved", loaded, path=tmp_path / "b")
    for (losses, ours), (rest, theirs) in zip(before, after, strict=True):
        assert losses[2:] == rest
        assert_same_weights(ours, theirs)


def values_of(directory: Path, resaved: Path) -> dict[str, torch.Tensor]:
    """Load a checkpoint, save it again, and return its values."""
    with start(begin(), freezes=True) as engine:
        engine.load_checkpoint(directory)
        engine.save_checkpoint(resaved)
        return weights(engine)


def alone(directory: Path, resaved: Path) -> dict[str, torch.Tensor]:
    """Do the same on one rank."""
    recipe = CLIPPED.config(Placement())
    with infinity.initialize(model=frozen(tiny()), config=recipe, device="simdev")[0] as engine:
        engine.load_checkpoint(directory)
        engine.save_checkpoint(resaved)
        return weights(engine)


def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_back(tmp_path) -> None:
    on_two_ranks(save, tmp_path / "two", True, False, path=tmp_path / "a")
    here = alone(tmp_path / "two", tmp_path / "one")
    for values in on_two_ranks(values_of, tmp_path / "one", tmp_path / "again", path=tmp_path / "b"):
        assert_same_weights(values, here)
    assert_same_weights(alone(tmp_path / "again", tmp_path / "last"), here)


# Interrupts and ends #


@contextmanager
def interrupting(owner: type, name: str, call: int) -> Iterator[None]:
    """The `call`-th call of a method is interrupted before it does anything, on all ranks."""
    plain, calls = getattr(owner, name), iter(range(1 << 30))

    def interrupted(*args: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return plain(*args)

    setattr(owner, name, interrupted)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def interrupted(group: dist.ProcessGroup | None) -> tuple[list[float], dict[str, Any]]:
    """A fetch is interrupted."""
    data = mine(3)
    with start(group) as engine:
        losses = [step(engine, data[0])]
        if group is not None:
            with pytest.raises(KeyboardInterrupt), interrupting(UnitParams, "copy_shard_to_tensor", 0):
                loss_of(engine, data[1].to(engine.device))
        losses += [step(engine, ids) for ids in data[1:]]
        return losses, weights(engine)


def test_after_an_interrupted_fetch_nothing_has_happened(tmp_path) -> None:
    compared(interrupted, tmp_path)


def _interrupt_an_update() -> None:
    group, data = begin(), mine(2)
    with start(group) as engine, contextlib.suppress(infinity.InfinityError):
        step(engine, data[0])
        with pytest.raises(KeyboardInterrupt), interrupting(Params, "end_device_change", 1):
            step(engine, data[1])
        with pytest.raises(infinity.InfinityError, match="stopped"):
            step(engine, data[1])
        with pytest.raises(infinity.InfinityError, match="stopped"):
            engine.save_checkpoint("/nowhere")
    shards = [unit.device_shard for unit in engine._runtime.params.units]
    assert not any(shard.numel() for shard in shards)


def test_after_an_interrupted_update_the_engine_has_stopped(tmp_path) -> None:
    on_two_ranks(_interrupt_an_update, path=tmp_path)
