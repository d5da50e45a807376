"""What several ranks collect and reduce takes no more memory than `collecting_bytes` says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from infinity.memory import StableMemory, scratch, stable_memory
from infinity.schedule.needs import collecting_bytes
from infinity.schedule.rules import Rules
from infinity.telemetry import Counters
from infinity.tiers import WHOLE, Sharding
from infinity.zero.groups import Groups
from infinity.zero.partition import ParamInfo, UnitLayout
from infinity.zero.ranks import ALONE, Path, Ranks
from infinity.zero.reduction import Addend, Reduction, ReductionRules
from infinity.zero.unit import Unit, UnitPass, UnitTotal

NUMELS = [256, 64, 128, 64, 512, 64]  # the last is used by several modules
SHARED = 5


class Meter:
    """Counts memory that is there at once."""

    def __init__(self) -> None:
        self.held_bytes = self.peak_bytes = 0

    def make(self, nbytes: int, device: torch.device) -> StableMemory:
        return cast(StableMemory, Metered(stable_memory(nbytes, device), self))


class Metered:
    def __init__(self, memory: StableMemory, meter: Meter) -> None:
        self._memory = memory
        self._meter = meter
        self.nbytes = memory.nbytes

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self._memory.tensor(dtype, numel)

    def allocate(self) -> None:
        self._memory.allocate()
        self._meter.held_bytes += self.nbytes
        self._meter.peak_bytes = max(self._meter.peak_bytes, self._meter.held_bytes)

    def free(self) -> None:
        self._memory.free()
        self._meter.held_bytes -= self.nbytes


class Late:
    """A collective that writes its result when it is waited for; the other rank has the same gradients."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._source = target, source

    def wait(self) -> None:
        self._target.copy_(2 * self._source)


class Same:
    """The greatest of what both ranks have, which is the same."""

    def wait(self) -> None:
        pass


class OneOfTwo:
    size = 2
    path = Path()

    def any_of(self, flags: torch.Tensor) -> Same:
        return Same()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """This rank is the one that is heard."""

    def all_reduce(self, flat: torch.Tensor, unit: str) -> Late:
        return Late(flat, flat)

    def reduce_scatter(self, shard: torch.Tensor, flat: torch.Tensor, unit: str) -> Late:
        return Late(shard, flat[: shard.numel()])


@dataclass(eq=False)
class Row:
    index: int
    layout: UnitLayout
    total: UnitTotal
    running: UnitPass


def unit(index: int, numel: int, *, trained: bool = True) -> Unit:
    half = numel // 2
    infos = tuple(ParamInfo(f"{index}.{n}", (half,), half, n * half, trained, 0) for n in range(2))
    layout = UnitLayout(index, str(index), infos, numel if trained else 0, numel, persistent=False)
    return cast(Unit, Row(index, layout, UnitTotal(layout.trained), UnitPass()))


def backward(source: Reduction, units: list[Unit], value: float) -> Iterator[Addend]:
    """The last module first; the shared unit's first gradient comes with the last module's."""
    for row in [units[SHARED], *reversed(units[:SHARED])]:
        for parameter in range(2):
            grad = torch.full((NUMELS[row.index] // 2,), value, dtype=torch.bfloat16)
            row.running.arrived.add(parameter)
            addend = source.take(row, parameter, grad)
            assert addend is None
        yield from source.leave(row)
    yield from source.end_pass()


def groups(sharding: Sharding, replicas: int) -> Groups:
    """Two ranks that share, two that have the same, or both."""
    other = cast(Ranks, OneOfTwo())
    return Groups(other, other if sharding.count > 1 else ALONE, other if replicas > 1 else ALONE)


@pytest.mark.parametrize("collect", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("travel", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sharding", "replicas"), [(WHOLE, 2), (Sharding(0, 2), 1), (Sharding(0, 2), 2)])
@pytest.mark.parametrize("every_pass", [True, False])
def test_what_is_collected_stays_within_its_bytes(collect, travel, sharding, replicas, every_pass, monkeypatch) -> None:
    meter = Meter()
    monkeypatch.setattr(scratch, "stable_memory", meter.make)
    units = [unit(index, numel) for index, numel in enumerate(NUMELS)]
    rules = ReductionRules(sharding, every_pass, collect, travel, flags_early=every_pass)
    source = Reduction(units, groups(sharding, replicas), rules, {SHARED}, torch.device("cpu"), Counters())
    grads = SimpleNamespace(reduces=True, collects_all=not every_pass, stream=False)
    rules = cast(Rules, SimpleNamespace(sharding=sharding, replicas=replicas, grads=grads))
    most_bytes = collecting_bytes(rules, NUMELS, {SHARED}, collect, travel, collect)
    sums: dict[int, float] = {}
    for _ in range(2):  # steps
        for micro_batch in range(2):
            source.begin_pass(last=micro_batch == 1)
            for addend in backward(source, units, 1.0 + micro_batch):
                assert len(set(addend.values.tolist())) == 1
                assert addend.values.numel() == NUMELS[addend.unit.index] // sharding.count
                sums[addend.unit.index] = sums.get(addend.unit.index, 0) + float(addend.values[0])
    assert sums == dict.fromkeys(range(len(units)), 2 * sharding.count * replicas * 3.0)
    assert not source.has_unreduced
    assert 0.6 * most_bytes <= meter.peak_bytes <= most_bytes


def test_a_pass_that_is_given_up_leaves_no_memory_that_a_collective_still_fills() -> None:
    units = [unit(0, 64), unit(1, 64)]
    rules = ReductionRules(
        Sharding(0, 2), every_pass=True, collect_dtype=torch.float32, dtype=torch.float32, flags_early=True
    )
    source = Reduction(units, groups(Sharding(0, 2), 1), rules, (), torch.device("cpu"), Counters())
    source.begin_pass(last=True, uses=[units[1], units[0]])
    for parameter in range(2):
        source.take(units[0], parameter, torch.ones(32))
    assert list(source.leave(units[0])) == []
    late: Any = source._scattering
    source.clear()
    source.begin_pass(last=True)
    for parameter in range(2):
        source.take(units[0], parameter, torch.ones(32))
    for pending in late.pending:
        pending.wait()
    (addend,) = source.complete(units[0])
    assert addend.values.tolist() == [2.0] * 32


def test_a_frozen_unit_has_no_part_in_the_order() -> None:
    """Else the ranks would exchange an order after every pass."""
    units = [unit(0, 64), unit(1, 64, trained=False)]
    rules = ReductionRules(
        Sharding(0, 2), every_pass=True, collect_dtype=torch.float32, dtype=torch.float32, flags_early=True
    )
    source = Reduction(units, groups(Sharding(0, 2), 1), rules, (), torch.device("cpu"), Counters())
    source.begin_pass(last=True, uses=units)
    assert list(source.leave(units[1])) == []
    source.take(units[0], 0, torch.ones(32))
    assert list(source.leave(units[0])) == []
    assert source._scattering is not None
    assert len(list(source.end_pass())) == 1
    assert source._order.suits
