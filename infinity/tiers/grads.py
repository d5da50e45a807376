"""Gradients of a unit in host memory, from the first one that backward produces until the update has used them.

[Note: gradients that spill]
A unit's gradients are one field, see [Note: copies]: its copy in host memory is WRITING while gradients are added to
it, VALID while it rests and may spill, pinned while an update uses it, and nothing once they were used. Where host
memory cannot hold the gradients of all units, those of some stay, spread evenly among the others, which share a few
slots. They are written when the slot is needed, and read again for the next micro-batch or for the update. Backward
needs them in the same order in every micro-batch, so a fixed choice of what stays serves as well as any other.

[Note: gradients that stream]
What a device has computed, and nothing is added to, leaves it while it computes on: the copies of a unit's gradients
are one move, ARRIVING until the last of them is there, and the norm of each, measured on the device, follows it. The
device keeps their memory meanwhile, so that no more than a few units may be on their way.

[Note: room for gradients]
Units without memory of their own share a part of the arena, and several ranks must agree on when it is full: each of
them takes part in the collectives that free it. So the sizes of what is open decide, which are alike on all ranks, and
never where it lies, which depends on when updates ended. `_close_gaps` makes that true: what fits by its size fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from infinity.errors import StorageError
from infinity.io import IoFuture, Priority
from infinity.memory import Arena, Lease
from infinity.telemetry import Counters, StallCause, Times
from infinity.tiers.copies import Field, Memory, Move, State, Transfer
from infinity.tiers.link import Link
from infinity.tiers.norms import Norms
from infinity.tiers.swap import SwapSpace

_HOST, _NVME = Memory.HOST, Memory.NVME
_WRITING = State.WRITING  # a look-up in an Enum takes 0.2 us, and every parameter needs it

ARRIVING_UNITS = 3  # whose gradients may be on their way from the device at once


@dataclass(frozen=True)
class GradHomes:
    """Where units have memory for their gradients; one that is in neither leases it while there is room.

    Attributes:
        own: units with memory of their own.
        spilled: units that share `slots` slots, and have a place on the drive.
    """

    own: tuple[int, ...]
    spilled: tuple[int, ...] = ()
    slots: int = 0


def spilled_ahead(slots: int) -> int:
    """How many of these slots are free, or are being written, once a unit's gradients are complete: two, so that one
    write has as long as the next unit computes; of the others at least one."""
    return max(1, min(2, slots - 1))


class Arrival:
    """A unit's gradients on their way from the device, one copy after the other, as one transfer.

    What is copied is kept until it has come, since the device would use its memory again.

    Attributes:
        open: more may follow.
    """

    def __init__(self) -> None:
        self.open = True
        self._copies: deque[tuple[Transfer, torch.Tensor]] = deque()  # one after the other, as a stream has them

    def add(self, copy: Transfer, source: torch.Tensor) -> None:
        while self._copies and self._copies[0][0].done():
            self._copies.popleft()
        self._copies.append((copy, source))

    def has_come(self) -> bool:
        """All that was added is here."""
        return all(copy.done() for copy, _ in self._copies)

    def done(self) -> bool:
        return not self.open and self.has_come()

    def result(self) -> None:
        self.open = False
        for copy, _ in reversed(tuple(self._copies)):  # once the last one is here, so are the others
            copy.result()
        self._copies = deque()  # the worker's job keeps this object, and should not keep the device's memory

    def times(self) -> Times | None:
        return None


class GradStore:
    """Flat gradient buffers, one a unit.

    Args:
        numels: trainable elements of each unit, padded.
        dtype: dtype in which gradients are held (float32 where they are accumulated over micro-batches).
        capacity_bytes: most that may be leased at once.
        swap: where units that spill have their extents.
        link: to where gradients are computed.
        norms: of parameters' gradients, measured there; those of none where the host measures them.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        arena: Arena,
        capacity_bytes: int,
        homes: GradHomes,
        counters: Counters,
        swap: SwapSpace,
        link: Link,
        norms: Norms,
    ) -> None:
        self._sizes = [numel * dtype.itemsize for numel in numels]
        self._dtype = dtype
        self._handing_over = arena.handing_over
        self._counters = counters
        self._swap = swap
        self._link = link
        self.norms = norms
        self._fields = [Field(f"the gradients of unit {unit}", (_NVME, _HOST)) for unit in range(len(numels))]
        self._hosts = [field.copies[_HOST] for field in self._fields]
        self._own = {unit: arena.lease(self._sizes[unit]) for unit in homes.own if self._sizes[unit]}
        self._tensors = {unit: lease.tensor(dtype) for unit, lease in self._own.items()}  # of copies in host memory
        slot_bytes = max((self._sizes[unit] for unit in homes.spilled), default=0)
        self._slots = tuple(arena.lease(slot_bytes) for _ in range(homes.slots))
        self._extents = {unit: swap.reserve(self._sizes[unit]) for unit in homes.spilled}
        own_bytes = sum(self._sizes[unit] for unit in homes.own)
        self._shared_bytes = 0 if homes.spilled else capacity_bytes - own_bytes
        self._shared = arena.part(self._shared_bytes, counts_leases=True)
        self._largest_bytes = max((size for unit, size in enumerate(self._sizes) if unit not in self._own), default=0)
        self._leases: dict[int, Lease] = {}  # memory of the other units' copies, oldest first
        self._leased_bytes = 0
        self._elsewhere: set[int] = set()  # units whose gradients the optimizer states tell
        self._arrivals: dict[int, Arrival] = {}  # of units whose gradients come from the device, oldest first

    # Adding #

    def open(self, unit: int) -> torch.Tensor | None:
        """The unit's gradients, to be added to; without a meaning if it has none yet.

        Returns:
            None while there is no room, or an update still has the unit's last ones.

        Raises:
            StorageError: they cannot be read again.
        """
        if unit in self._elsewhere:
            raise RuntimeError(f"the gradients of unit {unit} are asked for, which its update has")
        return self._open(unit)

    def _open(self, unit: int) -> torch.Tensor | None:
        host = self._hosts[unit]
        if host.state is not _WRITING:
            if host.pins or not self._bring(unit, Priority.DEMAND):
                return None
            if unit in self._extents or unit in self._arrivals:
                self._finish_moves(unit)
            self._fields[unit].begin_write(_HOST)
        return self._tensors[unit]

    def can_receive(self, unit: int) -> bool:
        """All that the unit's gradients have in this step is on its way from the device, if they have anything."""
        return unit in self._arrivals or not (self._fields[unit].version or self._hosts[unit].state is _WRITING)

    def receive(self, unit: int, start: int, grad: torch.Tensor, index: int) -> Transfer | None:
        """Start to copy a part's gradients from the device, and behind them their norm; see `can_receive`.

        Args:
            start: where it goes in the unit's gradients.
            index: where its norm goes in `norms`.

        Returns:
            The last of the copies; None while there is no room.
        """
        arrival = self._arrivals.get(unit)
        if arrival is None:
            self._finish_arrivals(ARRIVING_UNITS - 1)
            if not self._bring(unit, Priority.DEMAND):
                return None
            field = self._fields[unit]
            field.outdate()  # the newest value is on the device, which is no copy of ours
            arrival = self._arrivals[unit] = Arrival()
            field.begin_move(None, _HOST, arrival, StallCause.HOST_LINK, at=field.version)
        grad = grad.to(self._dtype)
        with self._handing_over:
            arrival.add(self._link.download(self._tensors[unit][start : start + grad.numel()], grad), grad)
            copy = self.norms.bring(index, grad)
            arrival.add(copy, grad)
        self._counters.moved("device_to_host", grad.nbytes, copy, unit, "gradients")
        return copy

    def tensor(self, unit: int) -> torch.Tensor:
        """What the unit's gradients lie in while they are in host memory, or on their way to it."""
        return self._tensors[unit]

    def has_come(self, unit: int) -> bool:
        """Nothing of the unit's gradients is on its way from the device."""
        return unit not in self._arrivals or self._arrivals[unit].has_come()

    def _finish_arrivals(self, most: int) -> None:
        """Take note of what has come, and have no more whole units than this on their way, whose memory the device
        keeps."""
        closed = [unit for unit, arrival in self._arrivals.items() if not arrival.open]
        for left, unit in zip(range(len(closed), 0, -1), closed, strict=True):
            if left <= most and not self._arrivals[unit].done():
                break
            self._finish_moves(unit)

    def rest(self, unit: int) -> None:
        """Nothing is added to the unit's gradients for a while: if they may spill, they or others do so ahead."""
        if unit in self._arrivals:
            self._arrivals[unit].open = False
            self._finish_arrivals(ARRIVING_UNITS)
        if unit in self._extents:
            self._end_write(unit)
            self._spill_ahead()

    def holds(self, unit: int) -> bool:
        """The unit has gradients that no update has."""
        host = self._hosts[unit]
        return not host.pins and (self._fields[unit].version > 0 or host.state is not State.ABSENT)

    def drop(self, unit: int) -> None:
        """The unit's gradients are nothing any more."""
        self._elsewhere.discard(unit)
        with suppress(StorageError):  # of no interest now
            self._finish_moves(unit)
        self._end_write(unit)
        self._fields[unit].consume()
        self._give_back(unit)

    # Room #

    def shares(self, unit: int) -> bool:
        """Memory in which the unit's gradients do not lie is other units'."""
        return unit in self._extents

    @property
    def dtype(self) -> torch.dtype:
        """In which gradients are held."""
        return self._dtype

    def lacks_capacity(self, unit: int) -> bool:
        """What is open takes the memory that the unit's gradients would need."""
        return unit not in self._own and self._sizes[unit] > self._shared_bytes - self._leased_bytes

    def make_room(self, unit: int) -> bool:
        """Free room in which the unit's gradients could be; False if that is not the way."""
        if unit not in self._extents or self._hosts[unit].pins:
            return False
        for state in (State.LEAVING, State.VALID, State.ARRIVING, State.WRITING):
            other = self._first_in(state)
            if other is not None:
                if state is State.ARRIVING:
                    self._finish_moves(other)
                if state is not State.LEAVING:
                    self._spill(other)
                self._leave(other)
                return True
        return False

    # Updates #

    def can_hand_over(self, unit: int) -> bool:
        """There is room for the unit's gradients, if they are elsewhere."""
        here = unit not in self._extents or self._hosts[unit].state is not State.ABSENT
        return here or self._memory_for(unit) is not None

    def hand_over(self, unit: int) -> tuple[torch.Tensor, tuple[Move, ...]]:
        """The gradients are the unit's update's, once these moves are over; pairs with `used`."""
        self._end_write(unit)
        if unit in self._arrivals:
            self._arrivals[unit].open = False
        if not self._bring(unit, Priority.PREFETCH):
            raise RuntimeError("gradients are handed over although there is no room for them")
        self._fields[unit].pin(_HOST)
        return self._tensors[unit], tuple(self._hosts[unit].moves)

    def used(self, unit: int) -> None:
        """The update has used the gradients."""
        self._fields[unit].unpin(_HOST)
        self.drop(unit)

    def left(self, unit: int) -> None:
        """As `used`, but the update may be asked for the gradients: until it has them `restore`, or they are of no use
        any more, nobody else can."""
        self.used(unit)
        self._elsewhere.add(unit)

    def is_elsewhere(self, unit: int) -> bool:
        """An update has the unit's gradients, which has `left` them."""
        return unit in self._elsewhere

    def restore(self, unit: int) -> torch.Tensor | None:
        """Where the unit's gradients are to be again, filled at once; None while there is no room."""
        buffer = self._open(unit)
        if buffer is not None:
            self._elsewhere.discard(unit)
        return buffer

    def returned(self, unit: int) -> None:
        """The update does not use the gradients any more, and they may be of use again; in place of `used`."""
        self._fields[unit].unpin(_HOST)
        self.rest(unit)

    # Memory #

    def _bring(self, unit: int, priority: Priority) -> bool:
        """Have the unit's copy in host memory, or on its way there; False while there is no room."""
        field, host = self._fields[unit], self._hosts[unit]
        if host.state is State.LEAVING:
            field.keep(_HOST)
        if host.state is State.ABSENT and unit not in self._own:
            lease = self._memory_for(unit)
            if lease is None:
                return False
            self._leases[unit] = lease
            self._leased_bytes += self._sizes[unit]
            self._tensors[unit] = lease.tensor(self._dtype, self._sizes[unit] // self._dtype.itemsize)
            if field.version:
                self._move(unit, _NVME, _HOST, priority)
        return True

    def _memory_for(self, unit: int) -> Lease | None:
        """What the unit's copy may lie in: a free slot, or a new lease."""
        if unit in self._extents:
            return self._free_slot()
        if self.lacks_capacity(unit):
            return None
        nbytes = self._sizes[unit]
        small = nbytes < self._largest_bytes
        lease = self._shared.try_lease(nbytes, at_end=small)
        if lease is None and self._close_gaps():
            lease = self._shared.try_lease(nbytes)
        return lease

    def _close_gaps(self) -> bool:
        """Move what shares memory together, see [Note: room for gradients]; False while an update uses some of it."""
        if any(self._hosts[unit].pins for unit in self._leases):
            return False
        for unit in self._leases:
            self._finish_moves(unit)
        self._shared.close_gaps(list(self._leases.values()))
        for unit, lease in self._leases.items():
            self._tensors[unit] = lease.tensor(self._dtype, self._sizes[unit] // self._dtype.itemsize)
        return True

    def _free_slot(self) -> Lease | None:
        """One that nobody has; else that of what was written first, which may be of use where it is until then."""
        if len(self._leases) == len(self._slots):
            for unit in self._leases:
                host = self._hosts[unit]
                written = host.state is State.LEAVING and all(move.done() for move in host.moves)
                if written or host.state is State.ABSENT:  # the latter if it could not be read
                    self._leave(unit)
                    break
        return next((slot for slot in self._slots if slot not in self._leases.values()), None)

    def _give_back(self, unit: int) -> None:
        lease = self._leases.pop(unit, None)
        if lease is not None:
            self._leased_bytes = self._leased_bytes - self._sizes[unit] if self._leases else 0
            if lease not in self._slots:
                lease.release()

    # The drive #

    def _spill_ahead(self) -> None:
        """Have the next units find a slot: one that is free, or will soon be."""
        leaving = sum(self._hosts[unit].state is State.LEAVING for unit in self._leases)
        for _ in range(spilled_ahead(len(self._slots)) - (len(self._slots) - len(self._leases)) - leaving):
            oldest = self._first_in(State.VALID)
            if oldest is None:
                return
            self._spill(oldest)

    def _first_in(self, state: State) -> int | None:
        """Which of the units in slots has been there longest, of those in this state that no update has."""
        return next((u for u in self._leases if self._hosts[u].state is state and not self._hosts[u].pins), None)

    def _end_write(self, unit: int) -> None:
        if self._hosts[unit].state is _WRITING:
            self._fields[unit].end_write(_HOST)

    def _spill(self, unit: int) -> None:
        """Start writing the unit's gradients; what they lie in is free once that is done."""
        self._end_write(unit)
        field = self._fields[unit]
        if not field.is_newest(_NVME) and not field.copies[_NVME].moves:
            self._move(unit, _HOST, _NVME, Priority.WRITE_BACK)
        field.drop(_HOST)

    def _leave(self, unit: int) -> None:
        """Wait until the unit's gradients are written, and give back what they lay in."""
        self._finish_moves(unit)
        self._fields[unit].gone(_HOST)
        self._give_back(unit)

    def _move(self, unit: int, source: Memory, target: Memory, priority: Priority) -> None:
        nbytes, extent = self._sizes[unit], self._extents[unit]
        span = self._leases[unit].span(0, nbytes)
        future: IoFuture
        with self._handing_over:
            if target is _HOST:
                route, cause = "nvme_read", StallCause.DISK_READ
                future = self._swap.read(extent, span, priority=priority)
            else:
                route, cause = "nvme_write", StallCause.DISK_WRITE
                future = self._swap.write(extent, span)
            self._fields[unit].begin_move(source, target, future, cause)
        self._counters.moved(route, nbytes, future, unit, "grads")

    def _finish_moves(self, unit: int) -> None:
        field = self._fields[unit]
        # A write that is done may have left its source already, and its target waits to hear how it ended.
        for move in dict.fromkeys(move for copy in field.copies.values() for move in copy.moves):
            with self._counters.stalled(move.cause):
                field.finish_move(move)
        self._arrivals.pop(unit, None)

    def close(self) -> None:
        """Nothing may come any more from the device: its memory and the host's go."""
        for arrival in self._arrivals.values():
            arrival.result()
        self._arrivals.clear()
        for host in self._hosts:
            host.moves.clear()  # they lead back to the copy
        self.norms.close()
