"""Saved activations: the engine's own store, on a simulated link and drive that move one number for each tensor.

The number is the first element of the tensor, in the memory that the store has leased for it. If this memory is
released too early, it contains another number when the tensor is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from ctypes import c_float
from itertools import takewhile
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import torch

from infinity.io import Priority, Span
from infinity.memory import FreeList
from infinity.simulation.clock import Clock, Operation, Transfer
from infinity.simulation.invariants import violate
from infinity.tiers import Link
from infinity.tiers.activations import ActivationStore, _Entry, _Packed
from infinity.tiers.copies import Memory
from infinity.tiers.striping import Piece

SAVED_BYTES = 32 << 10  # bytes of a tensor of size 1; the store does not offload smaller tensors
_TORN = -1.0
_DRIVE_BYTES = 1 << 40


def _number(address: int) -> c_float:
    return c_float.from_address(address)


class _Copy(Transfer):
    """A copy over the link.

    Attributes:
        ordered: whether later computation waits for it.
        target: the target of an upload.
        expected: the number that a module expects in the target, once it uses it.
    """

    ordered = False
    target: Callable[[], torch.Tensor | None]
    expected: float | None = None


class _Carrier:
    """Starts operations that copy numbers between addresses."""

    closed = False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def start(self, kind: str, source: Callable[[], float], end: Callable[[float], None]) -> _Copy:
        number = source()

        def arrive(copy: Operation) -> None:
            if self.closed:
                violate("race", f"a {kind} continues after the end")
            if source() != number:
                violate("race", f"a saved tensor changes during its {kind}")
            end(_TORN if copy.failed else number)

        return _Copy(self._clock, self._clock.start(kind, -1, arrive))


class _Link(Link, _Carrier):
    """The link to a device."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.uploads: list[_Copy] = []  # uploads in flight

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: object = None) -> _Copy:
        here, there = _number(source.data_ptr()), ref(target)
        target[0] = _TORN

        def end(number: float) -> None:
            self.uploads.remove(copy)
            if (tensor := there()) is not None:
                tensor[0] = number
            elif not copy.ordered:
                violate("race", "a tensor is released while it is uploaded")
            if copy.expected not in (None, number):
                violate("newest", f"saved tensor {copy.expected} has the values of {number}")

        copy = self.start("upload", lambda: here.value, end)
        copy.target = there
        self.uploads.append(copy)
        return copy

    def download(self, target: torch.Tensor, source: torch.Tensor, after: object = None) -> _Copy:
        there, number, here = _number(target.data_ptr()), float(source[0]), ref(source)
        there.value = _TORN

        def end(number: float) -> None:
            there.value = number

        return self.start("download", lambda: number if here() is not None else _TORN, end)

    def compute_waits(self, token: Any) -> None:
        token.ordered = True

    def check_used(self, tensor: torch.Tensor, number: float) -> None:
        """Check that a module that uses the tensor, after its upload, finds the right number."""
        copy = next((each for each in self.uploads if each.target() is tensor), None)
        if copy is None:
            if float(tensor[0]) != number:
                violate("newest", f"saved tensor {number} has the values of {float(tensor[0])}")
        elif not copy.ordered:
            violate("race", f"saved tensor {number} is used while it is uploaded")
        else:
            copy.expected = number


class _Drive(_Carrier):
    """Replaces the engine's `ActivationFiles`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.used_bytes = 0
        self._free = FreeList(_DRIVE_BYTES)
        self._numbers: dict[int, float] = {}

    def take(self, nbytes: int) -> Piece:
        offset = self._free.take(nbytes)
        assert offset is not None
        self.used_bytes += nbytes
        self._numbers[offset] = _TORN
        return Piece(0, offset, nbytes)

    def give(self, place: Piece) -> None:
        self._free.give(place.offset, place.nbytes)
        self.used_bytes -= place.nbytes

    def write(self, place: Piece, span: Span) -> Transfer:
        here = _number(span.address)

        def end(number: float) -> None:
            self._numbers[place.offset] = number

        return self.start("activation write", lambda: here.value, end)

    def read(self, place: Piece, span: Span, _: Priority) -> Transfer:
        there = _number(span.address)
        there.value = _TORN

        def end(number: float) -> None:
            there.value = number

        return self.start("activation read", lambda: self._numbers[place.offset], end)

    def close(self) -> None:
        self.closed = True


class _Store(ActivationStore):
    """The engine's store, with a check of which tensor leaves memory first."""

    def _leave_arena(self, entry: _Entry) -> None:
        failed = sys.exc_info()[0] is not None
        for other in takewhile(lambda other: other is not entry, () if failed else self._here):
            if other.is_newest(Memory.HOST) and other.is_newest(Memory.NVME) and not other.moves():
                violate("order", "a saved tensor leaves memory although another one is needed later")
        super()._leave_arena(entry)


class Activations:
    """The saved activations of one rank.

    Args:
        memory: size of the store's memory, in tensors of size 1; 0 if nothing is offloaded.
        on_drive: whether tensors that do not fit go to a drive; otherwise they stay on the device.
    """

    def __init__(self, clock: Clock, memory: int, *, on_drive: bool) -> None:
        self._link, self._drive = _Link(clock), _Drive(clock)
        counters: Any = SimpleNamespace(moved=lambda *_, **__: None, stalled=lambda _: nullcontext())
        files = cast(Any, self._drive) if on_drive else None
        self.store = _Store(self._link, memory * SAVED_BYTES, files, (), counters) if memory else None
        self._held: dict[Hashable, list[tuple[_Packed, float]]] = {}  # tensors that autograd holds, by use
        self._count = self._saved_before = 0
        self._last: _Entry | None = None

    def take_turn(self, round_index: int, micro_batch: int) -> None:
        if self.store is not None:
            self.store.take_turn(round_index, micro_batch)

    def save(self, use: Hashable, sizes: Iterable[int]) -> None:
        """Save tensors of these sizes for the backward of a use, as autograd does."""
        if self.store is None:
            return
        held = self._held.setdefault(use, [])
        for size in sizes:
            self._count += 1
            tensor = torch.empty(size * SAVED_BYTES // 4)
            tensor[0] = self._count
            held.append((self.store._pack(tensor), float(self._count)))
        self.check()

    def begin_uses(self) -> None:
        """Begin backward: from now on, all saved tensors are used in the order that the store expects."""
        self._saved_before, self._last = self._count, None

    def use(self, use: Hashable) -> None:
        """Unpack and free the tensors of a use, the last one first, as its backward does."""
        held = self._held.pop(use, [])
        while held and self.store is not None:
            packed, number = held.pop()
            if packed.entry is not None and number <= self._saved_before:
                if self._last is not None and not packed.entry < self._last:
                    violate("order", f"saved tensor {number} is used before one that the store expects earlier")
                self._last = packed.entry
            self._link.check_used(self.store._unpack(packed), number)
            self.check()

    def forget(self) -> None:
        """Drop all tensors, as if the graph were freed."""
        self._held.clear()

    def check(self) -> None:
        """Check that memory and drive hold exactly the tensors that autograd holds and those in flight."""
        store = self.store
        if store is None:
            return
        entries = [*store._here, *store._away, *store._leaving, *store._dropped]
        alive = {id(entry): entry for entry in entries}.values()
        leased_bytes = sum(entry.lease.nbytes for entry in alive if entry.lease is not None)
        if leased_bytes != store.arena.used_bytes:
            violate("ledger", f"{store.arena.used_bytes} bytes are used by saved tensors of {leased_bytes}")
        placed_bytes = sum(entry.place.nbytes for entry in alive if entry.place is not None)
        if placed_bytes != self._drive.used_bytes:
            violate("ledger", f"the drive has {self._drive.used_bytes} bytes of saved tensors of {placed_bytes}")
        ahead_bytes = sum(entry.nbytes for entry in alive if entry.ahead is not None)
        if ahead_bytes != store._ahead_bytes or ahead_bytes > 2 * store._largest_bytes:
            violate("ledger", f"{ahead_bytes} bytes are uploaded ahead, {store._ahead_bytes} counted")

    def check_over(self) -> None:
        """Check after backward that it has used all saved tensors."""
        if self._held or (self.store is not None and self.store.count):
            violate("closed", f"tensors saved for {list(self._held)} are left after backward")

    def close(self) -> None:
        """Release all memory, including that of tensors that autograd still holds."""
        if self.store is not None:
            self.store.close()
        self._link.closed = True
