"""Gradients that host memory cannot hold go through NVMe: the numbers stay, and the least budget falls."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest

import infinity
from infinity.config import load_config
from infinity.planner import plan_training
from tests.behaviour.reference import (
    Placement,
    Recipe,
    Result,
    assert_same_bits,
    batches,
    least_memory,
    loss_of,
    tiny_llama,
    train,
)

STEPS = 4


@cache
def in_memory(precision: str, accumulation: int, clipping: float) -> Result:
    return train(tiny_llama(), Recipe(precision, accumulation, clipping, STEPS), Placement())


def spilling(recipe: Recipe, path: Path, schedule: str = "auto", room: int = 0) -> Placement:
    placement = Placement("nvme", "nvme", path, "64KiB", schedule=schedule)
    return dataclasses.replace(placement, host_memory=least_memory(tiny_llama(), recipe.config(placement)) + room)


USES = [(3, 0.0, "backward"), (1, 0.5, "deferred"), (3, 0.5, "deferred"), (2, 0.5, "barrier")]


@pytest.mark.parametrize(
    ("accumulation", "clipping", "schedule", "room", "precision"),
    [  # all pairs
        (*use, room, ("fp32", "bf16")[(u + r) % 2])
        for u, use in enumerate(USES)
        for r, room in enumerate([0, 150_000, 400_000])  # beyond the least
    ],
)
def test_the_numbers_are_those_of_memory(accumulation, clipping, schedule, precision, room, tmp_path) -> None:
    recipe = Recipe(precision, accumulation, clipping, STEPS)
    placement = spilling(recipe, tmp_path, schedule, room)
    assert_same_bits(train(tiny_llama(), recipe, placement), in_memory(precision, accumulation, clipping))


def test_the_least_budget_is_that_of_one_unit_and_the_plan_says_so(tmp_path) -> None:
    recipe = Recipe("fp32", clipping=1.0)
    config = recipe.config(spilling(recipe, tmp_path))
    plan = plan_training(tiny_llama(), load_config(config))
    largest = max(unit.nbytes for unit in plan.units)  # fp32: a unit's gradients are as large as its parameters
    standing = next(unit.nbytes for unit in plan.units if not unit.offloaded)
    assert plan.needs.grads_min_bytes == largest + standing < plan.needs.grads_bytes / 3
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        for ids in batches(STEPS):
            engine.backward(loss_of(engine, ids))
            engine.step()
        assert engine.stats().peak_bytes["nvme"] == plan.nvme_bytes
        written = engine.stats().tier_bytes["nvme_write"]
    assert written == pytest.approx(plan.traffic.write_bytes, rel=0.15)
