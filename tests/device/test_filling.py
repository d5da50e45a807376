"""Moving optimizer states to the device and back between steps changes no bit."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import infinity
from infinity import ConfigError
from infinity.schedule import on_device
from infinity.schedule import rules as rules_module
from infinity.zero.filling import Filling
from tests.behaviour.reference import Placement, Recipe, Result, assert_same_bits, batches
from tests.behaviour.test_speculation import SOMETIMES, middle_norm
from tests.device import simdev, target
from tests.device.training import SPEEDS, engine_on, on_cpu, on_cpu_like, speculates_always, tiny, train_over

STEPS = 6
FEW = 3  # one before states come to the device, and two after it
# A tiny model's parameters take 0.35 MB, its states 1.65, what updates them 2; a step 0.86 times the batch's length.
ROOM, HEADROOM = 5_750_000, 840_000
CLIPPED = Recipe("bf16", 1, 0.5, STEPS)


def filled(recipe: Recipe, placement: Placement, **tiering: Any) -> Any:
    return engine_on(target.DEVICE, tiny(), recipe, placement, fill_device=True, **tiering)


def there(engine: Any) -> list[int]:
    states = engine._runtime.states
    return [unit.index for unit in engine._runtime.partition.units if states.units[unit.index].are_on_device]


@pytest.mark.parametrize(
    ("speed", "recipe", "tier"),
    [
        ("slow_kernels", Recipe("bf16", 1, 0.0, STEPS), "cpu"),
        ("slow_kernels", Recipe("bf16", 1, 0.5, STEPS), "nvme"),
        ("slow_link", Recipe("bf16", 1, 0.5, STEPS), "nvme"),
        ("slow_link", Recipe("bf16", 3, 0.5, STEPS), "cpu"),
        ("slow_kernels", Recipe("fp16", 1, 0.5, STEPS), "nvme"),
        ("slow_link", Recipe("fp32", 2, 0.0, STEPS), "cpu"),
        ("slow_kernels", Recipe("bf16", 1, SOMETIMES, STEPS), "cpu"),
        ("slow_link", Recipe("bf16", 2, SOMETIMES, STEPS), "cpu"),
        ("slow_link", Recipe("bf16", 1, SOMETIMES, STEPS), "nvme"),
    ],
)
def test_any_order_of_moving_states_to_the_device_and_back_has_the_same_bits(
    speed, recipe, tier, tmp_path, monkeypatch
) -> None:
    """Random units move after every step, instead of those that the policy would move.

    With `SOMETIMES` the updates in host memory are speculative, and some are rolled back.
    """
    monkeypatch.setattr(rules_module, "_DEVICE_TILE_BYTES", 0)  # several tiles a unit
    ahead: list[int] = []
    if recipe.clipping == SOMETIMES:
        recipe = replace(recipe, clipping=middle_norm("gpt2", recipe.precision, recipe.accumulation))
        ahead = speculates_always(monkeypatch)
    sometimes = recipe.clipping not in (0.0, 0.5)
    chance = random.Random(f"{recipe}{tier}")
    data = batches(recipe.steps * recipe.accumulation)
    losses = []
    with (
        target.configured(**SPEEDS[speed]),
        filled(recipe, Placement("none", tier, tmp_path, "64KiB"), tile_size="64KiB") as engine,
    ):
        filling, runtime = engine._step._filling, engine._runtime
        filling._filled = True  # chance decides
        assert max(len(runtime.states.units[unit.index].tiles) for unit in runtime.partition.units) > 1
        for step in range(recipe.steps):
            losses += train_over(engine, data[step * recipe.accumulation :][: recipe.accumulation])
            runtime.executor.drain()
            for unit in chance.sample(range(len(runtime.partition.units)), 3):
                comes = unit not in filling.came
                runtime.executor.move_states(unit, to_device=comes)
                (filling.came.append if comes else filling.came.remove)(unit)
                filling._count(runtime.states.units[unit].nbytes * (1 if comes else -1))
            assert there(engine) == sorted(filling.came)
        assert bool(ahead) == sometimes
        weights = {name: param.detach().cpu() for name, param in engine.named_parameters()}
    cpu = on_cpu("gpt2", recipe.precision, recipe.accumulation, recipe.clipping, recipe.steps)
    assert losses == cpu.losses
    assert all(torch.equal(values, cpu.weights[name]) for name, values in weights.items())


@pytest.fixture
def small_device() -> Iterator[float]:
    """Give the device room for a tiny model and little more. Return HEADROOM as a share of its memory."""
    gc.collect()
    torch.accelerator.synchronize()
    capacity = torch.accelerator.memory_allocated() + ROOM
    torch.accelerator.reset_peak_memory_stats()
    with target.configured(capacity=capacity):
        yield HEADROOM / capacity


def train_steps(device: str, steps: list[tuple[int, int]], **tiering: Any) -> tuple[list[float], list[int]]:
    """Train one step for each (seed, factor on the number of samples).

    Returns:
        The loss of each step, NaN if it ran out of memory, and the number of units on the device after each step.
    """
    losses, held = [], []
    with engine_on(device, tiny(), CLIPPED, Placement("none", "cpu"), **tiering) as engine:
        for seed, samples in steps:
            try:
                losses += train_over(engine, [torch.cat([batches(1, seed)[0]] * samples)])
            except torch.OutOfMemoryError:
                losses.append(math.nan)
            held.append(len(there(engine)))
    return losses, held


def test_spare_device_memory_is_filled_after_the_first_step(small_device) -> None:
    with filled(CLIPPED, Placement("none", "cpu"), device_headroom=small_device) as engine:
        device, empty = engine._runtime.device, engine._runtime.device.capacity_bytes
        for step, ids in enumerate(batches(3)):
            train_over(engine, [ids])
            assert bool(there(engine)), step
        assert there(engine)[0] == 0  # which the next forward pass needs first
        came = sum(engine._runtime.states.units[unit].nbytes for unit in there(engine))
        assert device.parts["optimizer states that came later"].used_bytes == came
        assert device.capacity_bytes >= empty + came
        assert torch.accelerator.max_memory_allocated() <= simdev.load().simdev_get(b"capacity")
        assert not engine._step._filling._spare_bytes(engine._runtime.link.level()) < 0


def test_a_budget_that_is_given_is_kept_to() -> None:
    with filled(CLIPPED, Placement("none", "cpu"), device_memory="3MB") as engine:
        device = engine._runtime.device
        before = device.shares_bytes
        train_over(engine, batches(2))
        assert 0 < len(there(engine)) < len(engine._runtime.partition.units)
        assert before < device.shares_bytes <= device.capacity_bytes == 3_000_000


@pytest.mark.parametrize("fills", [True, "auto"])
@pytest.mark.parametrize("lengths", [[1, 1, 4, 1], [1, 1, 5, 5, 1]])
def test_a_longer_batch_moves_states_back(lengths, fills, small_device, monkeypatch) -> None:
    """After a step that used the headroom, or after one that ran out of memory, so that it can be repeated."""
    monkeypatch.setattr(Filling, "before_forward", lambda *_, **__: None)  # as if what grows were no input
    steps = list(enumerate(lengths))
    losses, held = train_steps(target.DEVICE, steps, fill_device=fills, device_headroom=small_device)
    assert held[:2] == [6, 6]
    assert 0 < held[2] < 6
    assert set(held[2:]) == {held[2]}
    assert [index for index, loss in enumerate(losses) if math.isnan(loss)] == ([2] if 5 in lengths else [])
    done = [index for index, loss in enumerate(losses) if not math.isnan(loss)]
    assert [losses[index] for index in done] == train_steps(target.REFERENCE, [steps[index] for index in done])[0]


@pytest.mark.parametrize(("samples", "accumulation"), [(4, 1), (5, 1), (5, 2)])
def test_states_move_back_before_the_forward_pass_of_a_longer_batch(samples, accumulation, small_device) -> None:
    """So 5 times as many samples, which had no room beside the states, are trained on without a failed step.

    How many units stay then depends on the peak of the first steps, and so on how fast gradients left the device.
    """
    recipe = replace(CLIPPED, accumulation=accumulation)
    lengths = [1] * 2 * accumulation + [samples] * accumulation + [1] * accumulation
    data = [torch.cat([ids] * length) for ids, length in zip(batches(len(lengths)), lengths, strict=True)]
    config = recipe.config(Placement("none", "cpu"))
    config["tiering"]["device_headroom"] = small_device
    with infinity.initialize(model=tiny(), config=config, device=target.DEVICE)[0] as engine:
        losses, held = [], []
        for step in range(4):
            losses += train_over(engine, data[step * accumulation :][:accumulation])
            held.append(len(there(engine)))
    assert held[0] == held[1] > held[2] == held[3]
    assert held[2] or samples > 4
    with engine_on("cpu", tiny(), recipe, Placement()) as engine:
        assert train_over(engine, data) == losses


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_checkpoints_are_of_what_has_come_too(tier, small_device, tmp_path) -> None:
    data = batches(4)
    with filled(CLIPPED, Placement("none", tier, tmp_path / "swap", "64KiB")) as engine:
        losses = train_over(engine, data[:1])
        assert there(engine)
        engine.save_checkpoint(tmp_path / "one", blocking=False)
        losses += train_over(engine, data[1:])
        engine.load_checkpoint(tmp_path / "one")
        assert train_over(engine, data[1:]) == losses[1:]
        engine._step._filling._move_back(1, "to test what went back")
        engine.load_checkpoint(tmp_path / "one")
        assert train_over(engine, data[1:]) == losses[1:]


def test_a_save_in_the_background_is_finished_before_anything_comes(small_device, tmp_path) -> None:
    data = batches(4)
    with filled(CLIPPED, Placement("none", "cpu")) as engine:
        engine.save_checkpoint(tmp_path, blocking=False)
        losses = train_over(engine, data[:1])
        assert bool(there(engine)) == (engine._runtime.pipeline.before_update is None)
        engine.wait_checkpoint()
        losses += train_over(engine, data[1:])
        assert there(engine)
        engine.load_checkpoint(tmp_path)
        assert train_over(engine, data) == losses


def test_what_cannot_be_filled_is_refused() -> None:
    for tiering, words in (
        ({"state_format": "int8"}, "rounds moments, as only the kernels of the host"),
        ({"update_schedule": "speculative"}, 'set it to "auto", which can choose'),
    ):
        with pytest.raises(ConfigError, match=words):
            filled(CLIPPED, Placement("none", "cpu"), **tiering)
    with infinity.initialize(model=tiny(), config=CLIPPED.config(Placement("none", "cpu")), device="cpu")[0] as engine:
        assert engine._step._filling is None


def test_what_the_process_took_before_is_no_step_s(small_device) -> None:
    """A model that was on the device before `initialize`, say."""
    with filled(CLIPPED, Placement("none", "cpu"), device_headroom=small_device) as engine:
        train_over(engine, batches(1))
        expected = there(engine)
    gc.collect()
    del engine
    torch.empty(ROOM * 9 // 10, dtype=torch.uint8, device=target.DEVICE)
    with filled(CLIPPED, Placement("none", "cpu"), device_headroom=small_device) as engine:
        train_over(engine, batches(1))
        assert there(engine) == expected


# By default #


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize(
    ("architecture", "recipe", "params", "tier"),
    [
        ("gpt2", Recipe("bf16", 1, 0.0, FEW), "none", "cpu"),
        ("llama", Recipe("bf16", 1, 0.5, FEW), "none", "cpu"),
        ("gpt2", Recipe("bf16", 3, 0.5, FEW), "none", "cpu"),
        ("llama", Recipe("fp16", 1, 0.5, FEW), "none", "cpu"),
        ("gpt2", Recipe("fp32", 2, 0.0, FEW), "none", "cpu"),
        ("llama", Recipe("bf16", 1, 0.5, FEW), "none", "nvme"),
        ("gpt2", Recipe("bf16", 1, 0.5, FEW), "cpu", "cpu"),
        ("llama", Recipe("bf16", 2, 0.0, FEW), "nvme", "nvme"),
    ],
)
def test_the_device_is_filled_after_the_first_step(
    architecture, recipe, params, tier, speed, tmp_path, monkeypatch
) -> None:
    """If parameters are evicted, only the units whose updates nothing hides stay on the device."""
    monkeypatch.setattr(on_device, "_WORTH_NUMEL", 1)
    config = recipe.config(Placement(params, tier, tmp_path, "64KiB"))
    with (
        simdev.configured(**SPEEDS[speed]),
        infinity.initialize(model=tiny(architecture), config=config, device=target.DEVICE)[0] as engine,
    ):
        assert not there(engine)
        data = batches(recipe.steps * recipe.accumulation)
        losses = train_over(engine, data[: recipe.accumulation])
        trained = [unit.index for unit in engine._runtime.partition.units if unit.trainable_numel]
        came = there(engine)
        assert came == trained if params == "none" else 0 in came and set(came) < set(trained)
        losses += train_over(engine, data[recipe.accumulation :])
        weights = {name: param.detach().cpu() for name, param in engine.named_parameters()}
    assert_same_bits(Result(losses, weights), on_cpu_like(recipe, architecture))


@pytest.mark.parametrize(
    ("zero", "tiering"),
    [
        ({}, {"fill_device": False}),
        ({}, {"state_format": "int8"}),
        ({}, {"state_format": "bf16"}),
        ({}, {"update_schedule": "speculative"}),
        ({"offload_optimizer": {"device": "cpu", "ratio": 1.0}}, {}),
        ({"offload_optimizer": {"device": "nvme"}}, {"crash_consistent": True}),
    ],
)
def test_where_it_cannot_be_filled_or_is_not_to_be_nothing_is_said(zero, tiering, tmp_path, caplog) -> None:
    config = CLIPPED.config(Placement("none", "cpu", tmp_path))
    config["zero_optimization"] |= zero
    config["tiering"] |= tiering | {"nvme": [{"path": str(tmp_path)}]}
    with infinity.initialize(model=tiny(), config=config, device=target.DEVICE)[0] as engine:
        assert engine._step._filling is None
        train_over(engine, batches(2))
        assert not there(engine)
    assert "fill_device" not in caplog.text


@pytest.mark.usefixtures("small_device")
def test_a_headroom_that_leaves_no_room_keeps_states_in_host_memory() -> None:
    with engine_on(
        target.DEVICE, tiny(), CLIPPED, Placement("none", "cpu"), fill_device="auto", device_headroom=0.9
    ) as engine:
        train_over(engine, batches(2))
        assert not there(engine)
