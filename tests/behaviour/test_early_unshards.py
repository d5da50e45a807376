"""Units are gathered as far ahead as bytes allow: the same ones in the same order on all ranks, within the budget."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.zero.ranks import Ranks
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, batches, tiny_gpt2, train_on

STEPS = 3


@dataclass
class Ran:
    """What a rank has done.

    Attributes:
        gathered: unit and step of every gather, in order.
        most_ahead: units that were gathered ahead at once.
        peak_bytes, capacity_bytes: of parameters.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    gathered: list[str] = field(default_factory=list)
    most_ahead: int = 0
    peak_bytes: int = 0
    capacity_bytes: int = 0


def train_ahead(numel: int, placement: Placement, schedule: str, budgets: list[str | None]) -> Ran:
    """Train in this rank's budget."""
    rank = dist.get_rank()
    ran = Ran([], {})
    config = Recipe("bf16", accumulation=2).config(placement)
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = numel
    config["tiering"]["update_schedule"] = schedule
    if budgets[rank] is not None:
        config["tiering"]["host_memory"] = budgets[rank]
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        gathering = engine._runtime.executor.gathering
        gather = Ranks.all_gather

        def noted(self: Ranks, flat: Any, pieces: Any, unit: str) -> Any:
            ran.gathered.append(unit)
            ran.most_ahead = max(ran.most_ahead, len(gathering.early) + 1)
            return gather(self, flat, pieces, unit)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ranks, "all_gather", noted)
            ran.losses = train_on(engine, batches(2 * STEPS * dist.get_world_size())[rank :: dist.get_world_size()])
        parameters = engine._runtime.host.parts["parameters"]
        ran.peak_bytes, ran.capacity_bytes = parameters.peak_bytes, parameters.capacity_bytes
        ran.weights = dict(engine.named_parameters())
    return ran


def train_each(cases: list[tuple[Any, ...]]) -> list[Ran]:
    return [train_ahead(*case) for case in cases]


def test_prefetched_units_are_the_same_on_all_ranks_and_within_the_budget(tmp_path: Path) -> None:
    """Whatever the budgets of the ranks, wherever the shards are, and when they are updated."""
    (tmp_path / "swap").mkdir()
    swap = Placement("nvme", "nvme", tmp_path / "swap", "64KiB")
    free, tight = [None, None], ["1GiB", "1100KiB"]
    cases: list[tuple[Any, ...]] = [
        (0, Placement(), "deferred", free),
        (10**6, Placement(), "deferred", free),
        (0, swap, "backward", free),
        (10**6, swap, "backward", free),
        (10**6, swap, "deferred", tight),
    ]
    first, second = run_ranks(2, train_each, cases, path=tmp_path)
    for ours, theirs in zip(first, second, strict=True):
        assert ours.gathered == theirs.gathered
        for ran in (ours, theirs):
            assert 0 < ran.peak_bytes <= ran.capacity_bytes
    one, ahead, one_swapped, ahead_swapped, within = first
    assert (one.most_ahead, one_swapped.most_ahead) == (1, 1)
    assert min(ahead.most_ahead, ahead_swapped.most_ahead) > 2
    for ran in (ahead, ahead_swapped, within):
        assert sorted(ran.gathered) == sorted(one.gathered), "sooner, and no more of them"
        assert ran.losses == one.losses
        for name, weight in ran.weights.items():
            assert torch.equal(weight, one.weights[name]), name


class Penalty(nn.Module):
    """The root, which has no parameters of its own, reads all of them in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean() + 1e-2 * sum(parameter.square().sum() for parameter in self.parameters())


def train_with_room(numel: int | None) -> list[float]:
    """Return the losses."""
    config = Recipe("fp32").config(Placement("cpu", "cpu"))
    if numel is not None:
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = numel
    losses = []
    with infinity.initialize(model=Penalty(), config=config)[0] as engine:
        for x in torch.randn(STEPS, 4, 64, generator=torch.Generator().manual_seed(0)):
            engine.backward(loss := engine(x))
            losses.append(loss.item())
            engine.step()
    return losses


def train_as_told() -> list[float]:
    """Return the losses with the room that the refusal names."""
    with pytest.raises(infinity.CapacityError, match=r"blocks.0, blocks.1.* are in use together") as refused:
        train_with_room(None)
    told = re.search(r"raise zero_optimization.stage3_prefetch_bucket_size to (\d+) elements", str(refused.value))
    assert told is not None, refused.value
    return train_with_room(int(told[1]))


def test_units_that_are_used_together_get_the_room_that_the_refusal_names(tmp_path: Path) -> None:
    """Memory is not what limits gathered units, and more of it would not help."""
    alone = train_with_room(None)
    for losses in run_ranks(2, train_as_told, path=tmp_path):
        assert losses == pytest.approx(alone, rel=1e-5)
