"""Gradients that host memory cannot hold go to the NVMe tier until they are added to, or used.

[Note: gradients that spill]
Some units' gradients stay in memory, spread evenly among the others; those of the others share a few slots. A unit's
gradients are written when the slot is needed, and read again for the next micro-batch or for the update. Backward needs
them in the same order in every micro-batch, so a fixed choice of what stays serves as well as any other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from infinity.io import IoFuture, Priority
from infinity.memory import Arena, Lease
from infinity.telemetry import Counters, StallCause
from infinity.tiers.grads import GradLease, GradStore
from infinity.tiers.params import Arrival
from infinity.tiers.states import stay_in_memory
from infinity.tiers.swap import Extent, SwapSpace

_SLOTS = 3  # one filled, one written, one read


@dataclass(frozen=True)
class SpillChoice:
    """Which gradients spill.

    Attributes:
        own: units with memory of their own.
        spilled: the others, which share `slots` slots.
    """

    own: tuple[int, ...]
    spilled: tuple[int, ...]
    slots: int


def choose_spilled(sizes: Sequence[int], standing: Collection[int], capacity_bytes: int) -> SpillChoice:
    """Divide units with gradients of these sizes; `standing` always have memory of their own."""
    others = [unit for unit in range(len(sizes)) if unit not in standing and sizes[unit]]
    spare = capacity_bytes - sum(sizes[unit] for unit in standing)
    largest = max(sizes[unit] for unit in others)
    slots = max(1, min(_SLOTS, spare // largest))
    stay = stay_in_memory([sizes[unit] for unit in others], max(0, spare - slots * largest))
    own = {*standing, *(unit for unit, stays in zip(others, stay, strict=True) if stays)}
    return SpillChoice(tuple(sorted(own)), tuple(unit for unit in others if unit not in own), slots)


class SpillingGradStore(GradStore):
    """See [Note: gradients that spill].

    Args:
        numels, dtype, arena, standing: as for `GradStore`.
        capacity_bytes: enough for `standing` and the largest unit.
        swap: where the extents are reserved.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        arena: Arena,
        capacity_bytes: int,
        standing: Collection[int],
        swap: SwapSpace,
        counters: Counters,
    ) -> None:
        sizes = [numel * dtype.itemsize for numel in numels]
        choice = choose_spilled(sizes, standing, capacity_bytes)
        super().__init__(numels, dtype, arena, sum(sizes[unit] for unit in choice.own), choice.own)
        slot_bytes = max(sizes[unit] for unit in choice.spilled)
        self._free = [arena.lease(slot_bytes) for _ in range(choice.slots)]
        self._swap = swap
        self._counters = counters
        self._extents: dict[int, Extent] = {unit: swap.reserve(sizes[unit]) for unit in choice.spilled}
        self._spilled: set[int] = set()  # units whose gradients are on the drive, or on their way there
        self._writing: dict[int, tuple[Lease, IoFuture]] = {}  # oldest first
        self._resting: dict[int, None] = {}  # open units that nothing is added to for now, oldest first

    def holds(self, unit: int) -> bool:
        return unit in self._spilled or super().holds(unit)

    def try_open(self, unit: int) -> torch.Tensor | None:
        if unit not in self._extents:
            return super().try_open(unit)
        if unit in self._lent:
            return None
        future: IoFuture | None
        if unit in self._writing:  # its content is still there
            slot, future = self._writing.pop(unit)
            cause = StallCause.DISK_WRITE
        else:
            taken = self._take_slot()
            if taken is None:
                return None
            slot, cause = taken, StallCause.DISK_READ
            future = self._read(unit, slot, Priority.DEMAND) if unit in self._spilled else None
        try:
            if future is not None:
                self._wait(future, cause)
        except BaseException:
            self._free.append(slot)
            raise
        self._spilled.discard(unit)
        return self._opened(unit, slot).tensor

    def rest(self, unit: int) -> None:
        if unit in self._extents and unit in self._open:
            self._resting[unit] = None
            if self._take_slot(keep=True) is None:
                self._spill(next(iter(self._resting)))

    def make_room(self, unit: int) -> bool:
        if unit not in self._extents or unit in self._lent:
            return False
        if not self._writing:
            open_units = [other for other in (*self._resting, *self._open) if other in self._extents]
            if not open_units:
                return False
            self._spill(open_units[0])
        self._settle_oldest()
        return True

    def can_hand_over(self, unit: int) -> bool:
        return unit not in self._spilled or unit in self._writing or self._take_slot(keep=True) is not None

    def hand_over(self, unit: int) -> GradLease:
        if unit not in self._spilled:
            self._resting.pop(unit, None)
            return super().hand_over(unit)
        if unit in self._writing:
            slot, write = self._writing.pop(unit)  # the update only reads what is written
            arrival = Arrival(write, StallCause.DISK_WRITE)
        else:
            taken = self._take_slot()
            if taken is None:
                raise RuntimeError("gradients are handed over although there is no room for them")
            slot, arrival = taken, Arrival(self._read(unit, taken, Priority.PREFETCH), StallCause.DISK_READ)
        self._spilled.discard(unit)
        lease = self._opened(unit, slot, arrival)
        del self._open[unit]
        return lease

    def drop(self, unit: int) -> None:
        if unit in self._spilled:
            self._spilled.discard(unit)  # what is being written gives its slot back by itself
        else:
            self._resting.pop(unit, None)
            super().drop(unit)

    def _opened(self, unit: int, slot: Lease, arrival: Arrival | None = None) -> GradLease:
        self._lent.add(unit)
        tensor = slot.tensor(self._dtype, self._sizes[unit] // self._dtype.itemsize)
        self._open[unit] = GradLease(self, unit, slot, tensor, arrival)
        return self._open[unit]

    def _give_back(self, unit: int, memory: Lease) -> None:
        if unit not in self._extents:
            super()._give_back(unit, memory)
            return
        self._lent.discard(unit)
        self._free.append(memory)

    # Slots #

    def _take_slot(self, *, keep: bool = False) -> Lease | None:
        """A free slot, which stays free if it is to be kept; None while there is none."""
        while self._writing and next(iter(self._writing.values()))[1].done():
            self._settle_oldest()
        if not self._free:
            return None
        return self._free[-1] if keep else self._free.pop()

    def _spill(self, unit: int) -> None:
        """Start writing an open unit's gradients."""
        self._resting.pop(unit, None)
        lease = self._open.pop(unit)
        self._lent.discard(unit)
        nbytes = self._sizes[unit]
        write = self._swap.write(self._extents[unit], lease.memory.span(0, nbytes))
        self._counters.moved("nvme_write", nbytes, write, unit, "grads")
        self._writing[unit] = (lease.memory, write)
        self._spilled.add(unit)

    def _read(self, unit: int, slot: Lease, priority: Priority) -> IoFuture:
        nbytes = self._sizes[unit]
        read = self._swap.read(self._extents[unit], slot.span(0, nbytes), priority=priority)
        self._counters.moved("nvme_read", nbytes, read, unit, "grads")
        return read

    def _settle_oldest(self) -> None:
        unit = next(iter(self._writing))
        slot, write = self._writing.pop(unit)
        self._free.append(slot)
        self._wait(write, StallCause.DISK_WRITE)

    def _wait(self, future: IoFuture, cause: StallCause) -> None:
        with self._counters.stalled(cause):
            future.result()
