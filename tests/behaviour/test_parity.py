"""Every placement gives the same bits as the in-memory one, and that one follows plain PyTorch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.behaviour.reference import (
    ARCHITECTURES,
    Placement,
    Recipe,
    Result,
    assert_same_bits,
    least_memory,
    tiny_llama,
    train,
    train_plainly,
)

STEPS = 4

# Every recipe once, and every pair of its parts with an architecture and a device.
CASES = [
    pytest.param(
        list(ARCHITECTURES)[(p + a + c) % len(ARCHITECTURES)],
        ("cpu", "nvme")[(p + a) % 2],
        Recipe(precision, accumulation, clipping, STEPS),
        id=f"{precision}-accumulate{accumulation}-clip{clipping:g}",
    )
    for p, precision in enumerate(("fp32", "bf16", "fp16"))
    for a, accumulation in enumerate((1, 4))
    for c, clipping in enumerate((0.0, 0.5))
]
RELATIVE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}


@cache
def in_memory(architecture: str, precision: str, accumulation: int, clipping: float) -> Result:
    return train(ARCHITECTURES[architecture](), Recipe(precision, accumulation, clipping, STEPS), Placement())


@pytest.mark.parametrize(("architecture", "device", "recipe"), CASES)
def test_in_memory_follows_plain_torch_and_a_placement_gives_its_bits(
    architecture, device, recipe, tmp_path: Path
) -> None:
    plain = train_plainly(ARCHITECTURES[architecture](), recipe)
    ours = in_memory(architecture, recipe.precision, recipe.accumulation, recipe.clipping)
    assert ours.losses == pytest.approx(plain.losses, rel=RELATIVE[recipe.precision])
    assert ours.losses[-1] < ours.losses[0]
    placed = train(ARCHITECTURES[architecture](), recipe, Placement(device, device, tmp_path))
    assert_same_bits(placed, ours)
    assert not list(tmp_path.iterdir()), "a swap file is left behind"


@pytest.mark.parametrize(
    ("params", "optimizer"), [("none", "nvme"), ("nvme", "none"), ("cpu", "nvme"), ("nvme", "cpu")]
)
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_mixed_placements_give_the_same_bits(params, optimizer, clipping, tmp_path: Path) -> None:
    placed = train(ARCHITECTURES["gpt2"](), Recipe("bf16", 1, clipping, STEPS), Placement(params, optimizer, tmp_path))
    assert_same_bits(placed, in_memory("gpt2", "bf16", 1, clipping))


@pytest.mark.parametrize(
    ("tile_size", "host_memory", "clipping"),
    [  # all pairs
        (tile_size, host_memory, (0.0, 0.5)[(t + h) % 2])
        for t, tile_size in enumerate([20480, "64KiB", "16MiB"])
        for h, host_memory in enumerate(["tightest", "tight", "1GiB"])
    ],
)
def test_budgets_and_tile_sizes_give_the_same_bits(tile_size, host_memory, clipping, tmp_path: Path) -> None:
    recipe = Recipe("bf16", 1, clipping, STEPS)
    if host_memory != "1GiB":
        least = least_memory(tiny_llama(), recipe.config(Placement("nvme", "nvme", tmp_path, tile_size)))
        host_memory = least if host_memory == "tightest" else least + 100_000
    placement = Placement("nvme", "nvme", tmp_path, tile_size, host_memory)
    assert_same_bits(train(tiny_llama(), recipe, placement), in_memory("llama", "bf16", 1, clipping))


@pytest.mark.parametrize("schedule", ["backward", "deferred", "barrier"])
@pytest.mark.parametrize("device", ["none", "nvme"])
def test_update_schedules_give_the_same_bits(schedule, device, tmp_path: Path) -> None:
    placement = Placement(device, device, tmp_path, schedule=schedule)
    placed = train(ARCHITECTURES["gpt2"](), Recipe("bf16", steps=STEPS), placement)
    assert_same_bits(placed, in_memory("gpt2", "bf16", 1, 0.0))
