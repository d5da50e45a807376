"""Several ranks train what one process would on the same global batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import ARCHITECTURES, Placement, Recipe, Result, batches, loss_of, train_plainly

STEPS = 6


@dataclass(frozen=True)
class Case:
    """One training run on several ranks."""

    stage: int = 3
    placement: Placement = field(default_factory=Placement)
    recipe: Recipe = field(default_factory=lambda: Recipe(steps=STEPS))
    architecture: str = "gpt2"

    def config(self) -> dict[str, Any]:
        config = self.recipe.config(self.placement)
        config["zero_optimization"]["stage"] = self.stage
        if self.stage < 3:
            del config["zero_optimization"]["offload_param"]
        if self.stage == 0:
            del config["zero_optimization"]["offload_optimizer"]
        return config


def train_here(case: Case) -> Result:
    """This rank's part: every rank takes each `size`-th micro-batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = ARCHITECTURES[case.architecture](seed=rank)  # rank 0's values count
    data = batches(case.recipe.steps * case.recipe.accumulation * size)
    losses = []
    with infinity.initialize(model=model, config=case.config())[0] as engine:
        for ids in data[rank::size]:
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return Result(losses, dict(engine.named_parameters()))


def train_all(cases: list[Case]) -> list[Result]:
    return [train_here(case) for case in cases]


def run_cases(size: int, cases: list[Case], path: Path) -> list[list[Result]]:
    """Results by case, then by rank."""
    return list(zip(*run_ranks(size, train_all, cases, path=path), strict=True))


def plainly(case: Case, size: int) -> Result:
    """The plain loop with the ranks' micro-batches one after the other."""
    recipe = dataclasses.replace(case.recipe, accumulation=case.recipe.accumulation * size)
    return train_plainly(ARCHITECTURES[case.architecture](seed=0), recipe)


def assert_follows(case: Case, results: list[Result], size: int) -> None:
    expected = plainly(case, size)
    losses = [loss for step in zip(*(result.losses for result in results), strict=True) for loss in step]
    tolerance = 1e-4 if case.recipe.precision == "fp32" else 3e-2
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), rtol=tolerance, atol=tolerance)
    for result in results:
        for name, weight in result.weights.items():
            torch.testing.assert_close(
                weight.float(), expected.weights[name].float(), rtol=tolerance, atol=tolerance, msg=name
            )


@pytest.mark.parametrize("size", [2, 3])
def test_every_stage_follows_the_plain_loop(size, tmp_path) -> None:
    recipes = [
        Recipe(steps=STEPS),
        Recipe(accumulation=2, clipping=0.5, steps=STEPS),
        Recipe("bf16", clipping=0.5, steps=STEPS),
    ]
    cases = [Case(stage, recipe=recipe) for stage in range(4) for recipe in recipes]
    for case, results in zip(cases, run_cases(size, cases, tmp_path), strict=True):
        assert_follows(case, results, size)


@pytest.mark.parametrize(("precision", "clipping"), [("fp32", 0.5), ("bf16", 0.0), ("fp16", 0.0)])
def test_placements_give_the_same_bits(precision, clipping, tmp_path) -> None:
    """On two ranks, wherever the shards live and whenever they are updated."""
    recipe = Recipe(precision, accumulation=2, clipping=clipping, steps=STEPS)
    (tmp_path / "swap").mkdir()
    schedule = "deferred" if clipping or precision == "fp16" else "backward"
    placements = [
        Placement(),
        Placement("cpu", "cpu", schedule="barrier"),
        Placement("none", "nvme", tmp_path / "swap", "64KiB"),
        Placement("nvme", "nvme", tmp_path / "swap", "64KiB", "1MB", schedule),
    ]
    cases = [Case(3, placement, recipe, "llama") for placement in placements]
    cases += [Case(stage, recipe=recipe, architecture="llama") for stage in (1, 2)]
    reference, *others = run_cases(2, cases, tmp_path)
    for case, results in zip(cases[1:], others, strict=True):
        for expected, result in zip(reference, results, strict=True):
            if case.stage == 3:
                assert result.losses == expected.losses, case.placement
            for name, weight in result.weights.items():
                # stages 1 and 2 sum micro-batches and ranks in another order
                tolerance = 0 if case.stage == 3 else {"fp32": 1e-4}.get(precision, 3e-2)
                torch.testing.assert_close(weight, expected.weights[name], rtol=tolerance, atol=tolerance)
    assert not list((tmp_path / "swap").iterdir())
