"""Several ranks, each with a device of its own, train what they train on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.tiers import grads
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, Result, assert_same_bits, batches, loss_of
from tests.behaviour.test_ranks import Case
from tests.device import simdev, target
from tests.device.staged_group import staged_group
from tests.device.training import SPEEDS, tiny

pytestmark = target.emulated_only

RANKS = 2
RECIPES = {"clipped": Recipe("bf16", 2, 0.5, steps=3), "in_backward": Recipe("bf16", steps=3)}


@dataclass(frozen=True)
class Shared(Case):
    """With devices, a share of the states stays on them; all of them where nothing is offloaded."""

    ratio: float = 1.0
    fills: bool = False

    @property
    def some_stay(self) -> bool:
        return self.ratio < 1 or self.placement.optimizer == "none"

    def config(self) -> dict[str, Any]:
        config = super().config()
        if self.ratio < 1:
            config["zero_optimization"]["offload_optimizer"]["ratio"] = self.ratio
        config["tiering"]["fill_device"] = self.fills
        return config


def train_here(case: Shared, speed: str | None) -> tuple[Result, int]:
    """This rank's part, and the races that its device saw; on the CPU if there is no speed."""
    group = None
    if speed is not None:
        simdev.load()
        simdev.configure(check=1, **SPEEDS[speed])
        grads.to_host = _refused  # gradients leave while the device computes on
        group = staged_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    data = batches(case.recipe.steps * case.recipe.accumulation * size)
    device = "cpu" if speed is None else "simdev"
    losses = []
    model = tiny(seed=rank)  # rank 0's values count
    with infinity.initialize(model=model, config=case.config(), device=device, process_group=group)[0] as engine:
        assert engine._runtime.states.some_are_on_device == (speed is not None and case.some_stay)
        for ids in data[rank::size]:
            loss = loss_of(engine, ids.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if speed is not None and case.fills and len(losses) == 2 * case.recipe.accumulation:
                engine._step._filling._move_back(1, "to test it")
        if speed is not None and case.fills:
            assert engine._step._filling is not None
            assert engine._step._filling.came
        weights = {name: param.detach().cpu() for name, param in engine.named_parameters()}
    return Result(losses, weights), 0 if speed is None else simdev.counts()["races"]


def _refused(*_: Any) -> torch.Tensor:
    raise AssertionError("a gradient is waited for")


def train(case: Case, speed: str | None, path: Path, ranks: int = RANKS) -> list[tuple[Result, int]]:
    path.mkdir()
    return run_ranks(ranks, train_here, case, speed, path=path, timeout_s=120)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory) -> Callable[[int, str], list[Result]]:
    """What each rank has after the same training on the CPU, by stage and recipe."""

    @cache
    def trained(stage: int, recipe: str) -> list[Result]:
        ran = train(Shared(stage, Placement(), RECIPES[recipe]), None, tmp_path_factory.mktemp("cpu") / "ranks")
        return [result for result, _ in ran]

    return trained


@pytest.mark.parametrize(
    ("speed", "stage", "tier", "recipe", "more"),
    [
        ("slow_kernels", 0, "none", "clipped", {}),
        ("slow_link", 1, "none", "in_backward", {}),
        ("slow_kernels", 2, "none", "clipped", {}),
        ("slow_link", 1, "nvme", "clipped", {}),
        ("slow_kernels", 2, "cpu", "clipped", {"ratio": 0.5, "fills": True}),
        ("slow_link", 1, "cpu", "in_backward", {"fills": True}),
        # test_device_shards.py has stage 3 without offload at both speeds.
        ("slow_link", 3, "none", "clipped", {}),
        ("slow_kernels", 3, "none", "in_backward", {}),
        ("slow_kernels", 3, "cpu", "clipped", {"ratio": 0.5}),
        ("slow_link", 3, "nvme", "in_backward", {"ratio": 0.7}),
        ("slow_kernels", 3, "cpu", "in_backward", {}),
        ("slow_link", 3, "cpu", "in_backward", {}),
        ("slow_kernels", 3, "nvme", "clipped", {}),
        ("slow_link", 3, "nvme", "clipped", {}),
        ("slow_kernels", 3, "nvme", "in_backward", {}),
    ],
)
def test_two_ranks_have_the_bits_of_two_ranks_on_the_cpu(speed, stage, tier, recipe, more, on_cpu, tmp_path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    case = Shared(stage, Placement(tier, tier, swap, "64KiB"), RECIPES[recipe], **more)
    placed = train(case, speed, tmp_path / "ranks")
    for (there, races), here in zip(placed, on_cpu(stage, recipe), strict=True):
        assert races == 0
        assert_same_bits(there, here)


def test_two_groups_of_two_have_the_bits_of_those_on_the_cpu(tmp_path) -> None:
    """The replicas' sums are made on the device, each under the scatter of the next unit."""
    recipe = Recipe("bf16", 1, 0.5, steps=2, extra={"communication": {"shard_size": 2}})
    case = Shared(3, Placement("cpu", "cpu"), recipe)
    here = train(case, None, tmp_path / "cpu", 2 * RANKS)
    for (there, races), (expected, _) in zip(
        train(case, "slow_link", tmp_path / "device", 2 * RANKS), here, strict=True
    ):
        assert races == 0
        assert_same_bits(there, expected)
