"""What one of 8, 64 or 512 ranks sends in a step, counted at the one file that calls collectives.

torch's fake process group stands in for the other ranks: its collectives return at once. So one process goes through
the steps of rank 0 as in a run of that size, and everything that it would send is seen; the sums are not those of one.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import infinity
from infinity.tiers import Piece, Sharding
from infinity.zero.partition import Alignment, UnitLayout, make_partition
from infinity.zero.ranks import Pending, Ranks
from tests.behaviour.reference import Placement, Recipe, batches, tiny_gpt2, train_on

ITEM_BYTES = 2  # bf16
SIZES = (8, 64, 512)
SMALL_BYTES = 4096  # of agreements and norms, in a step: what no model notices


@dataclass
class Sent:
    """What rank 0 has sent since `clear`.

    Attributes:
        gathers, reduces: collectives by unit.
        elements: of the whole tensors, by kind.
        small_bytes: of what is agreed on, in `small` collectives.
    """

    gathers: Counter[str] = field(default_factory=Counter)
    reduces: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)
    small: int = 0
    small_bytes: int = 0

    def clear(self) -> None:
        """Begin to count anew."""
        for counter in (self.gathers, self.reduces, self.elements):
            counter.clear()
        self.small = self.small_bytes = 0


@dataclass(frozen=True)
class CountedRanks(Ranks):
    """Ranks that note what they send."""

    sent: Sent = field(default_factory=Sent)

    def all_gather(self, flat: torch.Tensor, pieces: Sequence[Piece], unit: str) -> list[Pending]:
        self.sent.gathers[unit] += 1
        self.sent.elements["gather"] += sum(piece.numel for piece in pieces) * self.size
        assert flat.itemsize == ITEM_BYTES
        return super().all_gather(flat, pieces, unit)

    def reduce_scatter(self, shard: torch.Tensor, flat: torch.Tensor, unit: str) -> Pending:
        self.sent.reduces[unit] += 1
        self.sent.elements["reduce-scatter"] += flat.numel()
        assert (flat.itemsize, shard.numel() * self.size) == (ITEM_BYTES, flat.numel())
        return super().reduce_scatter(shard, flat, unit)

    def all_reduce(self, flat: torch.Tensor, unit: str) -> Pending:
        self.sent.reduces[unit] += 1
        self.sent.elements["all-reduce"] += flat.numel()
        assert flat.itemsize == ITEM_BYTES
        return super().all_reduce(flat, unit)

    def _combine(self, values: torch.Tensor, operation: Any, what: str) -> Pending:
        self.sent.small += 1
        self.sent.small_bytes += values.nbytes
        return super()._combine(values, operation, what)


@pytest.fixture(params=SIZES)
def ranks(request, monkeypatch) -> Iterator[CountedRanks]:
    """Rank 0 of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    try:
        group = dist.group.WORLD
        found = CountedRanks(0, request.param, group, group)
        monkeypatch.setattr("infinity.setup.join_ranks", lambda *_: found)
        yield found
    finally:
        dist.destroy_process_group()


def gathers_of(unit: UnitLayout, stage: int, tied: str) -> int:
    """Stage 3 gathers a unit for its forward and for its backward; what the first and the last module use, before the
    first, from the last one's forward through its backward, and for the first one's backward; what stays, once."""
    if stage < 3 or unit.persistent:
        return int(stage > 0)
    return 3 if unit.name == tied else 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_sends_what_theory_says(stage, ranks) -> None:
    config = Recipe("bf16", clipping=1.0).config(Placement(), stage)
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        units = engine._runtime.partition.units
        train_on(engine, batches(2))
        sent = ranks.sent
        sent.clear()
        train_on(engine, batches(1))
    expected = {unit.name: gathers_of(unit, stage, "transformer.wte") for unit in units}
    assert sent.gathers == Counter({name: count for name, count in expected.items() if count})
    assert sent.reduces == Counter({unit.name: 1 for unit in units})
    assert any(unit.persistent for unit in units)
    kind = "reduce-scatter" if stage else "all-reduce"
    wanted = {"gather": sum(expected[unit.name] * unit.numel for unit in units), kind: sum(u.numel for u in units)}
    assert sent.elements == Counter({name: count for name, count in wanted.items() if count})
    if stage:  # every shard is a whole number of pages
        assert all(unit.numel % (2048 * ranks.size) == 0 for unit in units)
    assert sent.small <= 3, "which parameters have a gradient, and the norm: nothing once a unit"
    assert sent.small_bytes < SMALL_BYTES


def test_micro_batches_are_reduced_each_from_stage_2_on(ranks) -> None:
    """And parameters are fetched for each."""
    counted = {}
    for stage in (1, 2, 3):
        recipe = Recipe("bf16", accumulation=2, extra={"data_types": {"grad_accum_dtype": "bf16"}})
        with infinity.initialize(model=tiny_gpt2(), config=recipe.config(Placement(), stage))[0] as engine:
            train_on(engine, batches(4))
            ranks.sent.clear()
            train_on(engine, batches(2))
            counted[stage] = ranks.sent.reduces["transformer.h.1"], ranks.sent.gathers["transformer.h.1"]
    assert counted == {1: (1, 1), 2: (2, 1), 3: (2, 4)}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Linear(width, 4 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)


@pytest.mark.parametrize("size", SIZES)
def test_padding_and_planning_do_not_grow_with_the_ranks(size) -> None:
    """70 billion parameters, small ones that stay and tied embeddings among them: what is sent is the parameters'."""
    with torch.device("meta"):
        model = nn.Module()
        model.blocks = nn.ModuleList([Block(8192) for _ in range(80)])
        model.embed, model.norm = nn.Embedding(32000, 8192), nn.LayerNorm(8192)
        model.head = nn.Linear(8192, 32000, bias=False)
    model.head.weight = model.embed.weight
    groups = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    sharding = Sharding(size - 1, size)
    tracemalloc.start()
    try:
        partition = make_partition(
            model, groups, align=Alignment(2048), persistence_threshold=100_000, offloaded=True, sharding=sharding
        )
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    total = sum(param.numel() for param in model.parameters())
    assert total > 64e9
    assert sum(unit.numel for unit in partition.units) <= total * 1.02
    assert peak_bytes < 2 << 20
