"""Simulated host memory and drive, with one value for each lease and each extent instead of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from infinity.io import Priority, Span
from infinity.simulation.clock import Clock, Operation, Transfer
from infinity.simulation.invariants import violate
from infinity.simulation.rows import TORN
from infinity.tiers.slots import Extent, Part, SlotExtent, Slots


class Memory:
    """A lease, which is also its tensor.

    Attributes:
        value: the version of states, or the step and count of gradients; TORN while a read fills it.
    """

    value: Any = 0

    def tensor(self, *_: object) -> Memory:
        return self

    def __getitem__(self, _: slice) -> Memory:
        return self

    def span(self, _offset: int = 0, nbytes: int = 1) -> Span:
        return Span(0, nbytes, self)

    def release(self) -> None:
        pass


class Drive:
    """Replaces the engine's `SwapSpace`.

    Args:
        read, write: names of its kinds of operations.
        units: the unit of each extent, in the order in which extents are reserved. If empty, operations carry the
            number of the extent instead.
    """

    def __init__(self, clock: Clock, read: str, write: str, units: Sequence[int] = ()) -> None:
        self.slots = Slots()
        self._values: list[Any] = []
        self._clock = clock
        self._read, self._write = read, write
        self._units = units

    def reserve(self, nbytes: int) -> Extent:
        self._values.append(0)
        return Extent((cast(Any, len(self._values) - 1),), nbytes)

    def reserve_slots(self, nbytes: int, bounds: Sequence[int]) -> SlotExtent:
        extent = SlotExtent((self.reserve(nbytes), self.reserve(nbytes)), tuple(bounds))
        self.slots.extents.append(extent)
        return extent

    def value(self, extent: Extent) -> Any:
        return self._values[self._at(extent)]

    @staticmethod
    def _at(extent: Extent) -> int:
        return cast(int, extent.pieces[0])

    def _unit(self, at: int) -> int:
        return self._units[at] if self._units else at

    def read(self, extent: Extent | SlotExtent, span: Span, *, priority: Priority) -> Transfer:
        if isinstance(extent, SlotExtent):
            return self.read_parts(extent.parts(extent.newest, span, 0), priority)
        at, memory = self._at(extent), cast(Memory, span.owner)
        memory.value = TORN

        def end(read: Operation) -> None:
            if self._values[at] == TORN:
                violate("race", f"a {self._read} reads a place that is being written")
            memory.value = TORN if read.failed else self._values[at]

        return Transfer(self._clock, self._clock.start(self._read, self._unit(at), end))

    def read_parts(self, parts: Sequence[Part], priority: Priority) -> Transfer:
        (part,) = parts
        return self.read(part.extent, part.span, priority=priority)

    def write(self, extent: Extent | SlotExtent, span: Span) -> Transfer:
        if isinstance(extent, SlotExtent):
            (part,) = self.slots.to_write(extent, span, 0)
            return self.write(part.extent, span)
        at, memory = self._at(extent), cast(Memory, span.owner)
        value, self._values[at] = memory.value, TORN

        def end(write: Operation) -> None:
            if memory.value != value:
                violate("race", f"memory changes during a {self._write}")
            self._values[at] = TORN if write.failed else value

        return Transfer(self._clock, self._clock.start(self._write, self._unit(at), end))
