"""Layer-major micro-batches on several ranks: the plain loop's numbers, with one exchange a unit and pass of a step."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.zero.ranks import Ranks
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import ARCHITECTURES, Placement, Recipe, Result, batches, tiny_llama
from tests.behaviour.test_ranks import Case, plainly

MICRO_BATCHES = 3
STEPS = 3
RECIPES = [
    Recipe("fp32", MICRO_BATCHES, steps=STEPS),
    Recipe("fp32", MICRO_BATCHES, 0.5, steps=STEPS),
    Recipe("bf16", MICRO_BATCHES, 0.5, steps=STEPS),
]


def config_of(case: Case, order: str = "layer") -> dict[str, Any]:
    config = case.config()
    config["tiering"]["accumulation"] = order
    return config


def inputs(case: Case) -> list[dict[str, torch.Tensor]]:
    """This rank's micro-batches: every rank takes each `size`-th."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data = batches(case.recipe.steps * case.recipe.accumulation * size)
    return [{"input_ids": ids, "labels": ids} for ids in data[rank::size]]


def train_here(case: Case, order: str = "layer") -> Result:
    model = ARCHITECTURES[case.architecture](seed=dist.get_rank())  # rank 0's values count
    data = iter(inputs(case))
    with infinity.initialize(model=model, config=config_of(case, order))[0] as engine:
        losses = [engine.train_batch(data).item() for _ in range(case.recipe.steps)]
        return Result(losses, dict(engine.named_parameters()))


def train_all(cases: list[Case]) -> list[Result]:
    return [train_here(case) for case in cases]


def train_both(cases: list[Case]) -> list[tuple[Result, Result]]:
    return [(train_here(case), train_here(case, "micro_batch")) for case in cases]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_every_stage_follows_the_plain_loop(architecture, tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    on_nvme = Placement("nvme", "nvme", tmp_path / "swap", "64KiB", "2MB")
    homes = [*((stage, Placement()) for stage in range(4)), (3, on_nvme)]
    odd = architecture == "llama"  # each has every other case, and so all pairs with a stage and with a recipe
    cases = [
        Case(stage, placement, recipe, architecture)
        for home, (stage, placement) in enumerate(homes)
        for index, recipe in enumerate(RECIPES)
        if (home + index) % 2 == odd
    ]
    for case, *results in zip(cases, *run_ranks(2, train_all, cases, path=tmp_path), strict=True):
        expected = plainly(case, 2)
        tolerance = 1e-4 if case.recipe.precision == "fp32" else 3e-2
        near = {"rtol": tolerance, "atol": tolerance}
        losses = torch.tensor([result.losses for result in results]).mean(0)
        means = torch.tensor(expected.losses).view(STEPS, -1).mean(1)
        torch.testing.assert_close(losses, means, **near, msg=f"{case}")
        for result in results:
            for name, weight in result.weights.items():
                torch.testing.assert_close(weight.float(), expected.weights[name].float(), **near, msg=f"{case} {name}")


def test_where_gradients_are_reduced_once_a_step_anyway_the_bits_are_those_of_the_ordinary_order(tmp_path) -> None:
    cases = [Case(stage, recipe=recipe, architecture="llama") for stage in (0, 1) for recipe in RECIPES]
    for results in run_ranks(2, train_both, cases, path=tmp_path):
        for case, (ours, ordinary) in zip(cases, results, strict=True):
            assert ours.losses == ordinary.losses, case
            for name, weight in ours.weights.items():
                assert torch.equal(weight, ordinary.weights[name]), (case, name)


def exchanges_of_a_step(case: Case) -> dict[str, Counter[str]]:
    """How often each unit is gathered and reduced in the last step."""
    counted = {"all_gather": Counter[str](), "reduce_scatter": Counter[str]()}

    def counting(name: str) -> Any:
        unchanged = getattr(Ranks, name)

        def count(self: Ranks, first: torch.Tensor, second: Any, unit: str) -> Any:
            counted[name][unit] += 1
            return unchanged(self, first, second, unit)

        return count

    for name in counted:
        setattr(Ranks, name, counting(name))  # this process ends with the test
    data = iter(inputs(case))
    with infinity.initialize(model=tiny_llama(), config=config_of(case))[0] as engine:
        for _ in range(STEPS):
            for counter in counted.values():
                counter.clear()
            engine.train_batch(data)
    return counted


def test_a_unit_is_gathered_for_forward_and_for_backward_and_reduced_once(tmp_path: Path) -> None:
    case = Case(3, recipe=RECIPES[1], architecture="llama")
    first, second = run_ranks(2, exchanges_of_a_step, case, path=tmp_path)
    assert first == second
    *blocks, last = sorted(name for name in first["all_gather"] if ".layers." in name)
    assert blocks
    assert all(first["all_gather"][name] <= 2 for name in blocks), first
    assert first["all_gather"][last] <= MICRO_BATCHES + 1, first  # a micro-batch turns there while others wait
    assert set(first["reduce_scatter"].values()) == {1}, first


def fails_on_rank_1(case: Case) -> tuple[str, int]:
    """The error of a step in which rank 1's second micro-batch fails in the second block; the threads left after it."""
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise ValueError("on purpose")

    engine = infinity.initialize(model=tiny_llama(), config=config_of(case))[0]
    engine.module.model.layers[1].register_forward_hook(fail)
    try:
        engine.train_batch(inputs(case))
    except (ValueError, infinity.InfinityError) as error:
        message = f"{type(error).__name__}: {error}"
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the end of the test
    left = [thread for thread in threading.enumerate() if thread.name == "infinity-coroutine"]
    return message, len(left)


def test_a_rank_that_fails_ends_the_step_of_the_others(tmp_path: Path) -> None:
    (first, left), (second, left_there) = run_ranks(2, fails_on_rank_1, Case(3, recipe=RECIPES[0]), path=tmp_path)
    assert second == "ValueError: on purpose"
    assert first.startswith("RankError")
    assert left == left_there == 0
