"""The order in which the optimizer's worker computes updates and prefetches optimizer states.

First come updates that a thread waits for; then, during backward, updates that have begun, because they release the
memory of their gradients; then updates of the units that the next forward pass uses first. So the updates still queued
after backward are of units used last, and run during the forward pass.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class Update(Protocol):
    """The properties of an update that decide about its turn.

    Attributes:
        awaited: a thread waits for this update.
        begun: a tile has been updated.
    """

    awaited: bool
    begun: bool

    @property
    def unit(self) -> int: ...

    @property
    def needed(self) -> int:
        """Time of the unit's next use."""
        ...


UpdateT = TypeVar("UpdateT", bound=Update)


class UpdateQueue(Generic[UpdateT]):
    """Submitted updates in the order of their turns, and units whose updates are expected next.

    One thread at a time changes it; another may iterate over it meanwhile.

    Attributes:
        updates: in the order of computation; equals in the order of submission.
        expected: units, in order.
    """

    def __init__(self) -> None:
        self.updates: list[UpdateT] = []
        self.expected: dict[int, None] = {}
        self._prefers_begun = True

    def __bool__(self) -> bool:
        return bool(self.updates)

    def expect(self, units: Sequence[int]) -> None:
        """Set the units that will be submitted next, in order."""
        self.expected = dict.fromkeys(units)

    def submit(self, update: UpdateT) -> None:
        insort(self.updates, update, key=self._rank)
        self.expected.pop(update.unit, None)

    def remove(self, update: UpdateT) -> None:
        self.updates.remove(update)

    def hurry(self, update: UpdateT) -> None:
        """Note that a thread waits for this update now."""
        update.awaited = True
        self._sort()

    def begin(self, update: UpdateT) -> None:
        self.updates.remove(update)
        update.begun = True
        insort(self.updates, update, key=self._rank)

    def prefer(self, *, begun: bool) -> None:
        """Set whether updates that have begun go before others, to release the memory of their gradients.

        Once all gradients have come, only the order of the next forward pass counts.
        """
        if begun is not self._prefers_begun:
            self._prefers_begun = begun
            self._sort()

    def next(self, distance: Callable[[UpdateT], int]) -> UpdateT | None:
        """Return the update to continue with: the nearest to being computed; among equals, the first in its turn.

        Args:
            distance: the delay of an update's next tile: 0 for none, higher for longer delays.
        """
        nearest: tuple[int, UpdateT] | None = None
        for update in self.updates:
            far = distance(update)
            if far == 0:
                return update
            if nearest is None or far < nearest[0]:
                nearest = far, update
        return None if nearest is None else nearest[1]

    def upcoming(self) -> Iterator[tuple[int, UpdateT | None]]:
        """Yield the units whose tiles are needed next, in about this order, with their updates if submitted."""
        queued = set()
        for update in self.updates:
            queued.add(update.unit)
            yield update.unit, update
        for unit in self.expected.copy():
            if unit not in queued:
                yield unit, None

    def _sort(self) -> None:
        self.updates = sorted(self.updates, key=self._rank)  # one assignment: an interrupt must not lose an update

    def _rank(self, update: UpdateT) -> tuple[bool, bool, int]:
        return not update.awaited, not (update.begun and self._prefers_begun), update.needed
