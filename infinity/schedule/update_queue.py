"""The order in which the optimizer's worker computes updates and prefetches optimizer states.

1. Updates that a thread waits for.
2. During backward, updates that have begun, because their end frees the memory of their gradients.
3. Updates of the units that the next forward pass uses first.

So the updates that remain in the queue after backward belong to the units that are used last. They run during the next
forward pass.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class Update(Protocol):
    """The properties of an update that determine its position in the queue.

    Attributes:
        awaited: whether a thread waits for this update.
        begun: whether a tile has been updated.
    """

    awaited: bool
    begun: bool

    @property
    def unit(self) -> int: ...

    @property
    def next_use(self) -> int:
        """Position of the unit's next use; the lowest is updated first."""
        ...


UpdateT = TypeVar("UpdateT", bound=Update)


class UpdateQueue(Generic[UpdateT]):
    """Submitted updates in the order of computation, and units whose updates are expected next.

    One thread at a time changes the queue. Another thread may iterate over it at the same time.

    Attributes:
        updates: in the order of computation; updates of equal rank in the order of submission.
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
        """Record that a thread now waits for this update."""
        update.awaited = True
        self._sort()

    def begin(self, update: UpdateT) -> None:
        self.updates.remove(update)
        update.begun = True
        insort(self.updates, update, key=self._rank)

    def prefer(self, *, begun: bool) -> None:
        """Set whether updates that have begun go before others, to free the memory of their gradients.

        When all gradients are complete, only the order of the next forward pass counts.
        """
        if begun is not self._prefers_begun:
            self._prefers_begun = begun
            self._sort()

    def next(self, distance: Callable[[UpdateT], int]) -> UpdateT | None:
        """Return the update to continue with: the one with the least `distance`; among equals, the first in the queue.

        Args:
            distance: returns how long the next tile of an update must be waited for: 0 if it is ready, else more.
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
        """Yield the units whose tiles are needed next, approximately in order, each with its update if submitted."""
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
        return not update.awaited, not (update.begun and self._prefers_begun), update.next_use
