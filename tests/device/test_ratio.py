"""A share of the optimizer states lives on the device, and the rest below: the bits are those of the CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import infinity
from infinity import ConfigError
from tests.behaviour.reference import Placement, Recipe, Result, assert_same_bits, batches
from tests.device import target
from tests.device.training import SPEEDS, STEPS, on_cpu_like, tiny, train_here, train_over

CLIPPED = Recipe("bf16", 1, 0.5, STEPS)


def engine_with(ratio: float, recipe: Recipe, placement: Placement, device: str = target.DEVICE, **more: Any) -> Any:
    config = recipe.config(placement)
    config["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
    config["zero_optimization"] |= more.pop("zero", {})
    config["tiering"] |= more
    return infinity.initialize(model=tiny(), config=config, device=device)[0]


def parted(engine: Any) -> tuple[int, int]:
    """Trained elements of units that are updated on the device, and of the others."""
    states, units = engine._runtime.states, engine._runtime.partition.units
    there = sum(unit.trainable_numel for unit in units if states.units[unit.index].are_on_device)
    return there, sum(unit.trainable_numel for unit in units) - there


@pytest.mark.parametrize(
    ("speed", "recipe", "params", "optimizer", "ratio"),
    [
        ("slow_kernels", Recipe("bf16", 1, 0.0, STEPS), "none", "cpu", 0.5),
        ("slow_link", Recipe("bf16", 1, 0.0, STEPS), "none", "cpu", 0.5),
        ("slow_kernels", Recipe("bf16", 4, 0.5, STEPS), "none", "cpu", 0.3),
        ("slow_link", Recipe("bf16", 4, 0.5, STEPS), "none", "nvme", 0.7),
        ("slow_kernels", Recipe("bf16", 1, 0.0, STEPS), "cpu", "cpu", 0.5),
        ("slow_link", Recipe("fp32", 2, 0.0, STEPS), "nvme", "nvme", 0.5),
        ("slow_kernels", Recipe("fp16", 1, 0.5, STEPS), "cpu", "nvme", 0.7),
        ("slow_link", CLIPPED, "none", "cpu", 0.0),
    ],
)
def test_same_bits_wherever_a_unit_is_updated(speed, recipe, params, optimizer, ratio, tmp_path) -> None:
    placement = Placement(params, optimizer, tmp_path, "64KiB")
    with target.configured(**SPEEDS[speed]), engine_with(ratio, recipe, placement) as engine:
        there, below = parted(engine)
        assert 0 < there <= (1 - ratio) * (there + below)
        assert bool(below) == bool(ratio)
        ours = train_here(engine, recipe)
    assert_same_bits(ours, on_cpu_like(recipe))


@pytest.mark.parametrize("schedule", ["backward", "barrier"])
def test_only_gradients_of_units_in_host_memory_cross_the_link(schedule) -> None:
    recipe = Recipe("bf16", 1, 0.0, STEPS)
    with target.configured(launch_us=100), engine_with(0.5, recipe, Placement("none", "cpu", schedule=schedule)) as e:
        moved: Counter[str] = Counter()
        losses = []
        for ids in batches(STEPS):
            losses += train_over(e, [ids])
            moved += Counter(e.stats().tier_bytes)
        ours = Result(losses, {name: param.detach().cpu() for name, param in e.named_parameters()})
        step_bytes = parted(e)[1] * torch.bfloat16.itemsize
    assert_same_bits(ours, on_cpu_like(recipe))
    # Values may go up in their update's step or in the next one: those of the last may come after it.
    assert (STEPS - 1) * step_bytes <= moved["host_to_device"] <= STEPS * step_bytes
    assert moved["device_to_host"] <= STEPS * 2 * step_bytes  # with the parameters that they update


@pytest.mark.parametrize(("saved_with", "loaded_with"), [(0.5, 1.0), (1.0, 0.3), (0.3, 0.7)])
def test_a_checkpoint_goes_on_with_another_ratio(saved_with, loaded_with, tmp_path) -> None:
    data = batches(STEPS)
    placement = Placement("none", "nvme", tmp_path / "swap", "64KiB")
    with engine_with(saved_with, CLIPPED, placement) as engine:
        losses = train_over(engine, data[:1])
        engine.save_checkpoint(tmp_path / "saved", blocking=False)
        losses += train_over(engine, data[1:])
    with engine_with(loaded_with, CLIPPED, placement) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert train_over(engine, data[1:]) == losses[1:]
    assert losses == on_cpu_like(CLIPPED).losses


@target.emulated_only
def test_on_the_cpu_it_changes_nothing() -> None:
    with engine_with(0.3, CLIPPED, Placement("none", "cpu"), device="cpu") as engine:
        assert parted(engine)[0] == 0
        assert_same_bits(train_here(engine, CLIPPED), on_cpu_like(CLIPPED))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"zero": {"offload_optimizer": {"device": "none", "ratio": 0.5}}},
            "its device is none, which offloads nothing",
        ),
        ({"state_format": "int8"}, "rounds moments, as only the kernels of the host"),
        ({"crash_consistent": True}, "ratio below 1 or tiering.fill_device, states are updated on the device"),
    ],
)
def test_what_cannot_be_is_refused(changes, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_with(0.5, CLIPPED, Placement("none", "nvme", tmp_path), **changes)
