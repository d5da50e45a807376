"""In which order all ranks reduce units, whatever each of them has run.

[Note: one order on all ranks]
Collectives do not say whose they are, so ranks must begin the same ones in the same order. What backward leaves first
is a local matter: the batch of one rank may use a part of the model that another rank's does not. So units are reduced
in an order that all ranks know before the pass begins. A unit that backward has left early waits for those before it.
One that this rank's forward has not used adds zeros, as in `DistributedDataParallel`, and holds nobody up.

The order costs no exchange: at first it is that of rank 0's forward, reversed, then the one in which rank 0's backward
left the units when an exchange that takes place anyway said that the order did not suit some rank. Units that had a
gradient on no rank for some passes drop out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

_PATIENCE = 8  # passes without a gradient on any rank after which a unit drops out


class ReductionOrder:
    """The units of one pass after another, in the order in which they are reduced.

    Args:
        order: all units that backward may leave.
    """

    def __init__(self, order: Iterable[int]) -> None:
        self.order = list(order)
        self._passes = 0
        self._used: dict[int, int] = {}  # the last pass in which some rank had a gradient
        self.begin(None)

    def begin(self, uses: Collection[int] | None) -> None:
        """A pass begins.

        Args:
            uses: units that its forward has used on this rank; None if that is not known.
        """
        self._passes += 1
        self._uses = uses
        self._position = 0
        self._waiting: set[int] = set()  # left by backward, behind units that have not been left
        self._over: set[int] = set()
        self.left: list[int] = []  # by backward on this rank
        self.skipped: set[int] = set()  # reduced without a use on this rank
        self.suits = True

    def leave(self, unit: int) -> Iterator[int]:
        """Backward has left the unit, and this rank adds no more to it; the units that are reduced now."""
        if unit in self.left:
            return
        self.left.append(unit)
        if unit not in self.order:
            self.suits = False
            return
        self._waiting.add(unit)
        while self._position < len(self.order):
            due = self.order[self._position]
            if due not in self._waiting and due not in self._over:
                if self._uses is None or due in self._uses:
                    return
                self.skipped.add(due)
            yield from self._advance()

    def complete(self, unit: int) -> None:
        """All ranks have reduced the unit out of turn."""
        self._over.add(unit)

    def rest(self) -> Iterator[int]:
        """Backward is over; the units that are still to be reduced."""
        self.suits &= not self._waiting
        while self._position < len(self.order):
            yield from self._advance()

    def _advance(self) -> Iterator[int]:
        unit = self.order[self._position]
        self._position += 1
        self._waiting.discard(unit)
        if unit not in self._over:
            self._over.add(unit)
            yield unit

    def learn(self, order: Iterable[int]) -> None:
        """From now on units are reduced in this order, which all ranks have been told, and the others behind them."""
        self.order = list(dict.fromkeys([*order, *self.order]))

    def note_used(self, units: Iterable[int]) -> None:
        """Some rank had a gradient of these units in this pass, and of no others."""
        self._used.update(dict.fromkeys(units, self._passes))
        self.order = [unit for unit in self.order if self._passes - self._used.get(unit, -_PATIENCE) < _PATIENCE]
