"""Gradients of units in host memory, from the first one that backward produces until the update has used them.

[Note: gradients that spill]
A unit's gradients are one field, see [Note: copies]. Their copy in host memory is WRITING while gradients are added to
it, VALID while it is idle and may spill, pinned while an update uses it, and ABSENT after the update. If host memory
cannot hold the gradients of all units, some units keep theirs in memory. They are spread evenly among the other units,
which share a few slots. The scheduler decides which of these are written, and when. They are read again for the next
micro-batch or for the update. Backward needs them in the same order in every micro-batch, so a fixed choice of the
units in memory is as good as any other.

[Note: gradients that stream]
Gradients that are complete are downloaded while the device computes on. The downloads of a unit's gradients are one
move: the copy in host memory is ARRIVING until the last download has ended. The norm of each gradient is measured on
the device, and downloaded after it. Until then the gradients keep their memory on the device, so only a few units may
be on their way.

[Note: room for gradients]
Units without their own memory share a part of the arena. Several ranks must agree on when it is full, since all of them
take part in the collectives that free it. So the decision follows from the sizes of the open gradients, which are equal
on all ranks, and never from their addresses, which depend on when updates ended. If the sizes fit, `_close_gaps` makes
sure that there is a contiguous place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from infinity.errors import StorageError
from infinity.io import IoFuture, Priority
from infinity.kernels import GradStats, grad_stats, grad_store
from infinity.memory import Arena, Lease
from infinity.telemetry import Counters, StallCause, Times
from infinity.tiers.copies import Field, Memory, Move, State, Transfer
from infinity.tiers.link import to_host
from infinity.tiers.norms import ArrivingStats, Measures, Norms
from infinity.tiers.slots import Extent
from infinity.tiers.swap import SwapSpace

_HOST, _NVME = Memory.HOST, Memory.NVME
_WRITING = State.WRITING  # a look-up in an Enum takes 0.2 us, and every parameter needs one

ARRIVING_UNITS = 3  # the most units whose gradients may be on their way from the device at once


@dataclass(frozen=True)
class GradHomes:
    """Memory for the gradients of units; a unit in neither list leases memory while there is room.

    Attributes:
        own: units with their own memory.
        spilled: units that share `slots` slots, and have a place on the drive.
    """

    own: tuple[int, ...]
    spilled: tuple[int, ...] = ()
    slots: int = 0


class Arrival:
    """A unit's gradients on their way from the device: successive copies, as one transfer.

    It keeps the source of each copy until the copy ends, since the device would reuse its memory.

    Attributes:
        open: more copies may follow.
    """

    def __init__(self) -> None:
        self.open = True
        self._copies: deque[tuple[Transfer, torch.Tensor]] = deque()  # in the order of one stream

    def add(self, copy: Transfer, source: torch.Tensor) -> None:
        while self._copies and self._copies[0][0].done():
            self._copies.popleft()
        self._copies.append((copy, source))

    def has_come(self) -> bool:
        """Whether all copies that were added have ended."""
        return all(copy.done() for copy, _ in self._copies)

    def done(self) -> bool:
        return not self.open and self.has_come()

    def result(self) -> None:
        self.open = False
        for copy, _ in reversed(tuple(self._copies)):  # once the last one has ended, all have
            copy.result()
        self._copies = deque()  # the update's ticket keeps this object, which must not keep the device's memory

    def times(self) -> Times | None:
        return None


@dataclass(eq=False)
class UnitGrads:
    """One unit's gradients, and the places where they may be.

    Attributes:
        numel: trainable elements, padded.
        nbytes: of the gradients in host memory; 0 if the unit's gradients stay on the device from the start.
        field, host: all copies, and the one in host memory.
        own: the unit's own memory; None for a unit that leases memory.
        lease: the leased memory, or a slot; None while it has none.
        tensor: the flat gradients in host memory; None while the unit has no memory for them.
        extent: its place on the drive; None for a unit that does not spill.
        arrival: the copies on their way from the device.
        needs_reconstruction: the gradients have no copy, and can only be reconstructed from the optimizer state.
        first: number of its first part among the parts of all units. A part is a parameter, or the unit if ranks reduce
            it as one, and has a norm.
        device_tensor: the flat gradients on the device, if they stay on it, see device_grads.py; None while there are
            none.
        measured: the copy of the last norm of `device_tensor`.
        sum: memory on the device for sums over micro-batches, see `DeviceSums`; None if there is none.
        sums: the sums of this step so far, by part; views of `sum`. Removed by the reader, so that the next gradient
            begins a new one.
    """

    unit: int
    numel: int
    nbytes: int
    own: Lease | None = None
    lease: Lease | None = None
    tensor: torch.Tensor | None = None
    extent: Extent | None = None
    arrival: Arrival | None = None
    needs_reconstruction: bool = False
    first: int = 0
    device_tensor: torch.Tensor | None = None
    measured: Transfer | None = None
    sum: torch.Tensor | None = None
    sums: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.field = Field(f"the gradients of unit {self.unit}", (_NVME, _HOST))
        self.host = self.field.copies[_HOST]

    @property
    def spills(self) -> bool:
        """Whether the unit shares its memory for gradients with other units, and has a place on the drive."""
        return self.extent is not None

    def number(self, part: int) -> int:
        """Return the number of a part, given as the index of a parameter or -1, among the parts of all units."""
        return self.first + max(part, 0)


class GradStore:
    """Flat gradient buffers, one for each unit.

    Args:
        numels: trainable elements of each unit, padded.
        below: as `numels` for units whose gradients are kept in host memory; 0 for the others.
        capacity_bytes: the most that may be leased at once.
        swap: space for the extents of units that spill.
        norms: of parameters' gradients, measured on the device; empty if the host measures them.

    Attributes:
        streams: the first gradients of a step are downloaded while the device computes, which measures them.
        units: all units, by index.
        dtype: dtype in which gradients are held (float32 if they are accumulated over micro-batches).
        leased: units that lease memory, or have a slot, for their copies, by number; the longest first.
    """

    def __init__(
        self,
        numels: Sequence[int],
        below: Sequence[int],
        dtype: torch.dtype,
        arena: Arena,
        capacity_bytes: int,
        homes: GradHomes,
        counters: Counters,
        swap: SwapSpace,
        norms: Norms,
        *,
        streams: bool = False,
    ) -> None:
        self.streams = streams
        self.units = units = tuple(
            UnitGrads(unit, numel, here * dtype.itemsize)
            for unit, (numel, here) in enumerate(zip(numels, below, strict=True))
        )
        own, spilled = [units[unit] for unit in homes.own], [units[unit] for unit in homes.spilled]
        self.dtype = dtype
        self._critical = arena.critical
        self._counters = counters
        self._swap = swap
        self.norms = norms
        for each in own:
            if each.nbytes:
                each.own = arena.lease(each.nbytes)
                each.tensor = each.own.tensor(dtype)
        slot_bytes = max((each.nbytes for each in spilled), default=0)
        self.slots = tuple(arena.lease(slot_bytes) for _ in range(homes.slots))
        for each in spilled:
            each.extent = swap.reserve(each.nbytes)
        self._shared_bytes = 0 if spilled else capacity_bytes - sum(each.nbytes for each in own)
        self._shared = arena.part(self._shared_bytes, counts_leases=True)
        self._largest_bytes = max((each.nbytes for each in self.units if each.own is None), default=0)
        self.leased: dict[int, UnitGrads] = {}
        self._leased_bytes = 0
        self._arriving: dict[UnitGrads, None] = {}  # units with gradients on their way from the device, oldest first

    # Adding #

    def add(self, each: UnitGrads, part: int, place: slice, grad: torch.Tensor, stats: Measures, *, last: bool) -> bool:
        """Add gradients of a part of the unit, and measure them. Return False, and add nothing, while there is no room.

        Args:
            place: their elements in the unit's gradients.
            stats: of the unit's parts so far. A part without an entry has no gradients yet.
            last: the result is final, unless more comes for the same part.
        """
        if self.streams and part not in stats and self.can_receive(each):
            coming = self.receive(each, place.start, grad.view(-1), each.number(part))
            if coming is not None:
                stats[part] = coming
            return coming is not None
        buffer = self.open(each)
        if buffer is None:
            return False
        here = grad if grad.is_cpu else to_host(grad, self._counters)
        stats[part] = grad_store(buffer[place], here, accumulate=part in stats)
        return True

    def measure(self, each: UnitGrads, part: int, values: torch.Tensor) -> GradStats:
        """Measure these gradients of a part of the unit."""
        return grad_stats(values)

    def open(self, each: UnitGrads) -> torch.Tensor | None:
        """Return the unit's gradients for accumulation; the content is undefined if it has none yet.

        Returns:
            None while there is no room, or while an update still uses the unit's last gradients.

        Raises:
            StorageError: spilled gradients cannot be read.
        """
        if each.needs_reconstruction:
            raise RuntimeError(f"the gradients of unit {each.unit} were dropped and must be restored first")
        host = each.host
        if host.state is not _WRITING:
            if host.pins or not self._bring(each, Priority.DEMAND):
                return None
            if each.extent is not None or each.arrival is not None:
                self.finish_moves(each)
            each.field.begin_write(_HOST)
        return each.tensor

    def can_receive(self, each: UnitGrads) -> bool:
        """Whether `receive` may be used: no gradient of this step has been added in host memory, by `open`.

        The unit's gradients of the last step may still be in use by their update.
        """
        return each.host.pins > 0 or each.arrival is not None or not (each.field.version or each.host.state is _WRITING)

    def receive(self, each: UnitGrads, start: int, grad: torch.Tensor, index: int) -> ArrivingStats | None:
        """Start downloading gradients, and their norm after them; see `can_receive`.

        Args:
            start: offset in the unit's gradients.
            index: index of the norm in `norms`.

        Returns:
            The norm; None while there is no room, or while an update still uses the unit's last gradients.
        """
        if each.host.pins:
            return None
        if each.arrival is None:
            self._finish_arrivals(ARRIVING_UNITS - 1)
            if not self._bring(each, Priority.DEMAND):
                return None
            each.field.invalidate()  # the newest value is on the device, where this field has no copy
            self._arriving[each] = None
            each.arrival = Arrival()
            each.field.begin_move(None, _HOST, each.arrival, StallCause.HOST_LINK, at=each.field.version)
        grad = grad.to(self.dtype)
        with self._critical:
            assert each.tensor is not None
            coming = self.norms.bring(index, grad, each.tensor[start : start + grad.numel()])
            each.arrival.add(coming.copy, grad)
        self._counters.moved("device_to_host", grad.nbytes, coming.copy, each.unit, "gradients")
        return coming

    def tensor(self, each: UnitGrads) -> torch.Tensor:
        """Return the buffer of the unit's gradients, which are in host memory or on their way to it."""
        assert each.tensor is not None
        return each.tensor

    def has_come(self, each: UnitGrads) -> bool:
        """Whether no gradients of the unit are on their way from the device."""
        return each.arrival is None or each.arrival.has_come()

    def _finish_arrivals(self, most: int) -> None:
        """Process ended arrivals. Block until at most `most` whole units, which use device memory, are arriving."""
        closed = [each for each in self._arriving if each.arrival is not None and not each.arrival.open]
        for left, each in zip(range(len(closed), 0, -1), closed, strict=True):
            if left <= most and each.arrival is not None and not each.arrival.done():
                break
            self.finish_moves(each)

    def pause(self, each: UnitGrads) -> None:
        """End accumulation for now: the unit's gradients may spill, if the unit has a place on the drive."""
        if each.arrival is not None:
            each.arrival.open = False
            self._finish_arrivals(ARRIVING_UNITS)
        if each.extent is not None:
            self._end_write(each)

    def holds(self, each: UnitGrads) -> bool:
        """Whether the unit has gradients that no update uses."""
        return not each.host.pins and (each.field.version > 0 or each.host.state is not State.ABSENT)

    def drop(self, each: UnitGrads) -> None:
        """Drop the unit's gradients."""
        each.needs_reconstruction = False
        with suppress(StorageError):  # the outcome no longer matters
            self.finish_moves(each)
        self._end_write(each)
        each.field.consume()
        self._give_back(each)

    # Room #

    def lacks_capacity(self, each: UnitGrads) -> bool:
        """Whether open gradients leave too little memory for the unit's gradients."""
        return each.own is None and each.nbytes > self._shared_bytes - self._leased_bytes

    # Updates #

    def can_submit(self, each: UnitGrads) -> bool:
        """Whether the unit's gradients are in memory, or there is room to read them."""
        return each.extent is None or each.host.state is not State.ABSENT or self._memory_for(each) is not None

    def take_for_update(self, each: UnitGrads) -> tuple[torch.Tensor, tuple[Move, ...]]:
        """Give the gradients to the unit's update, which must wait for the returned moves.

        Pairs with `drop_after_update`, `drop_reconstructable` or `keep_after_update`.
        """
        self._end_write(each)
        if each.arrival is not None:
            each.arrival.open = False
        if not self._bring(each, Priority.PREFETCH):
            raise RuntimeError(f"the gradients of unit {each.unit} are given to an update, but have no room")
        each.host.pin()
        assert each.tensor is not None
        return each.tensor, tuple(each.host.moves)

    def drop_after_update(self, each: UnitGrads) -> None:
        """Drop the gradients after the update has used them."""
        each.host.unpin()
        self.drop(each)

    def drop_reconstructable(self, each: UnitGrads) -> None:
        """Like `drop_after_update`, but the gradients can still be reconstructed from the optimizer state.

        Until `restore` or `drop`, `open` refuses the unit.
        """
        self.drop_after_update(each)
        each.needs_reconstruction = True

    def restore(self, each: UnitGrads) -> torch.Tensor | None:
        """Return memory to reconstruct the unit's gradients in, to be filled at once; None while there is no room."""
        buffer, each.needs_reconstruction = None, False
        try:
            buffer = self.open(each)
        finally:
            each.needs_reconstruction = buffer is None
        return buffer

    def keep_after_update(self, each: UnitGrads) -> None:
        """Keep the gradients after an update that was cancelled or may be rolled back; replaces `drop_after_update`."""
        each.host.unpin()
        self.pause(each)

    # Memory #

    def _bring(self, each: UnitGrads, priority: Priority) -> bool:
        """Make the unit's copy VALID or ARRIVING in host memory. Return False while there is no room."""
        if each.host.state is State.LEAVING:
            each.field.keep(_HOST)
        if each.host.state is State.ABSENT and each.own is None:
            lease = self._memory_for(each)
            if lease is None:
                return False
            self.leased[each.unit] = each
            each.lease = lease
            self._leased_bytes += each.nbytes
            self._place(each, lease)
            if each.field.version:
                self._move(each, _NVME, _HOST, priority)
        return True

    def _place(self, each: UnitGrads, lease: Lease) -> None:
        each.tensor = lease.tensor(self.dtype, each.nbytes // self.dtype.itemsize)

    def _memory_for(self, each: UnitGrads) -> Lease | None:
        """Return memory for the unit's copy, a free slot or a new lease; None if there is none."""
        if each.extent is not None:
            return self._free_slot()
        if self.lacks_capacity(each):
            return None
        small = each.nbytes < self._largest_bytes
        lease = self._shared.try_lease(each.nbytes, at_end=small)
        if lease is None and self._close_gaps():
            lease = self._shared.try_lease(each.nbytes)
        return lease

    def _close_gaps(self) -> bool:
        """Close gaps between leases, see [Note: room for gradients]. Return False while an update uses one."""
        leased = tuple(self.leased.values())
        if any(each.host.pins for each in leased):
            return False
        for each in leased:
            self.finish_moves(each)
        leases = {each: each.lease for each in leased if each.lease is not None}
        self._shared.close_gaps(list(leases.values()))
        for each, lease in leases.items():
            self._place(each, lease)
        return True

    def _free_slot(self) -> Lease | None:
        """Return a free slot, or None. If no slot is free, take the one of the first unit whose write has ended."""
        if len(self.leased) == len(self.slots):
            for each in self.leased.values():
                written = each.host.state is State.LEAVING and all(move.transfer.done() for move in each.host.moves)
                if written or each.host.state is State.ABSENT:  # ABSENT after a read that failed
                    self.await_spill(each)
                    break
        taken = [each.lease for each in self.leased.values()]
        for slot in self.slots:
            if slot not in taken:
                return slot
        return None

    def _give_back(self, each: UnitGrads) -> None:
        lease, each.lease = each.lease, None
        if lease is not None:
            self.leased.pop(each.unit, None)
            self._leased_bytes = self._leased_bytes - each.nbytes if self.leased else 0
            if lease not in self.slots:
                lease.release()

    # The drive #

    def _end_write(self, each: UnitGrads) -> None:
        if each.host.state is _WRITING:
            each.field.end_write(_HOST)

    def spill(self, each: UnitGrads) -> None:
        """Start writing the unit's idle gradients to the drive; their slot is free once that is done."""
        self._end_write(each)
        if not each.field.is_newest(_NVME) and not each.field.copies[_NVME].moves:
            self._move(each, _HOST, _NVME, Priority.WRITE_BACK)
        each.field.drop(_HOST)

    def await_spill(self, each: UnitGrads) -> None:
        """Block until the unit's gradients are written, and free their slot."""
        self.finish_moves(each)
        each.field.gone(_HOST)
        self._give_back(each)

    def _move(self, each: UnitGrads, source: Memory, target: Memory, priority: Priority) -> None:
        assert each.lease is not None
        assert each.extent is not None
        span = each.lease.span(0, each.nbytes)
        future: IoFuture
        with self._critical:
            if target is _HOST:
                route, cause = "nvme_read", StallCause.DISK_READ
                future = self._swap.read(each.extent, span, priority=priority)
            else:
                route, cause = "nvme_write", StallCause.DISK_WRITE
                future = self._swap.write(each.extent, span)
            each.field.begin_move(source, target, future, cause)
        self._counters.moved(route, each.nbytes, future, each.unit, "grads")

    def finish_moves(self, each: UnitGrads) -> None:
        """Block until no gradients of the unit are in flight."""
        # Both copies: a write may be over for its source, which is free already, but not be processed for its target.
        for copy in each.field.copies.values():
            for move in tuple(copy.moves):
                with self._counters.stalled(move.cause):
                    each.field.finish_move(move)
        each.arrival = None
        self._arriving.pop(each, None)

    def close(self) -> None:
        """Wait for gradients on their way from the device, and free the memory of the norms."""
        for each in self.units:
            if each.arrival is not None:
                each.arrival.result()
            each.arrival = None
            each.host.moves.clear()  # they refer to the copy: a cycle
        self._arriving.clear()
        self.norms.close()
