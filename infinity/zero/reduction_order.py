"""The order in which all ranks reduce units, whichever modules each of them has run.

[Note: one order on all ranks]
Collectives carry no names, so ranks must start the same ones in the same order. The order in which backward leaves
modules is local: the batch of one rank may use a part of the model that another rank's does not. So units are reduced
in an order that all ranks know before the pass. A unit that backward leaves early waits for the units before it. A unit
that this rank's forward has not used adds zeros, as in `DistributedDataParallel`, and delays no other unit.

The order needs no exchange of its own: at first it is that of rank 0's forward, reversed. If the exchange at the end of
a pass says that it did not suit some rank, the order in which rank 0's backward left the units replaces it. Units that
had a gradient on no rank for some passes drop out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Generic, TypeVar

_PATIENCE = 8  # passes without a gradient on any rank after which a unit drops out


UnitT = TypeVar("UnitT")  # a unit, or its number


class ReductionOrder(Generic[UnitT]):
    """The units of each pass, in the order of their reduction.

    Args:
        order: all units that backward may leave.

    Attributes:
        left: units that backward has left on this rank, in its order.
        over: units that are reduced; the caller adds those that all ranks have reduced out of turn.
        skipped: units that are reduced without a use on this rank.
        suits: whether units could be reduced as backward left them.
    """

    def __init__(self, order: Iterable[UnitT]) -> None:
        self.order = list(order)
        self._passes = 0
        self._used: dict[UnitT, int] = {}  # the last pass in which some rank had a gradient
        self.begin(None)

    def begin(self, uses: Collection[UnitT] | None) -> None:
        """Begin a pass.

        Args:
            uses: units that its forward has used on this rank; None if unknown.
        """
        self._passes += 1
        self._uses = uses
        self._position = 0
        self._waiting: set[UnitT] = set()  # left by backward, but behind units that are not
        self.over: set[UnitT] = set()
        self.left: list[UnitT] = []
        self.skipped: set[UnitT] = set()
        self.suits = True

    def leave(self, unit: UnitT) -> Iterator[UnitT]:
        """Note that backward has left the unit and this rank adds no more to it. Yield the units to reduce now."""
        if unit in self.left:
            return
        self.left.append(unit)
        if unit not in self.order:
            self.suits = False
            return
        self._waiting.add(unit)
        while self._position < len(self.order):
            due = self.order[self._position]
            if due not in self._waiting and due not in self.over:
                if self._uses is None or due in self._uses:
                    return
                self.skipped.add(due)
            yield from self._advance()

    def rest(self) -> Iterator[UnitT]:
        """End the backward pass. Yield the units that are still to be reduced."""
        self.suits &= not self._waiting
        while self._position < len(self.order):
            yield from self._advance()

    def _advance(self) -> Iterator[UnitT]:
        unit = self.order[self._position]
        self._position += 1
        self._waiting.discard(unit)
        if unit not in self.over:
            self.over.add(unit)
            yield unit

    def learn(self, order: Iterable[UnitT]) -> None:
        """Reduce units in this order from now on; all ranks have it. Others follow behind."""
        self.order = list(dict.fromkeys([*order, *self.order]))

    def note_used(self, units: Iterable[UnitT]) -> None:
        """Note the units with a gradient on some rank in this pass. Units without one for some passes drop out."""
        self._used.update(dict.fromkeys(units, self._passes))
        self.order = [unit for unit in self.order if self._passes - self._used.get(unit, -_PATIENCE) < _PATIENCE]
