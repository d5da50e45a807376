"""In which order the optimizer's worker computes updates, and reads optimizer states ahead.

First what somebody waits for, then, under backward, what is begun, which gives the memory of its gradients back, then
what the next forward pass needs first. What is still queued when backward ends is then needed last, and updated under
the forward pass.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class Update(Protocol):
    """An update, as far as its turn depends on it.

    Attributes:
        awaited: somebody waits for this update and no other.
        begun: a tile has been updated.
    """

    awaited: bool
    begun: bool

    @property
    def unit(self) -> int: ...

    @property
    def needed(self) -> int:
        """When the unit is needed next."""
        ...


UpdateT = TypeVar("UpdateT", bound=Update)


class UpdateQueue(Generic[UpdateT]):
    """Submitted updates in the order of their turns, and units whose updates are expected next.

    One thread at a time changes it; another may iterate over it meanwhile.

    Attributes:
        updates: the first to be computed first; of equals, what was submitted first.
        expected: units, in their order.
    """

    def __init__(self) -> None:
        self.updates: list[UpdateT] = []
        self.expected: dict[int, None] = {}
        self._prefers_begun = True

    def __bool__(self) -> bool:
        return bool(self.updates)

    def expect(self, units: Sequence[int]) -> None:
        """These will be submitted next, in this order."""
        self.expected = dict.fromkeys(units)

    def submit(self, update: UpdateT) -> None:
        insort(self.updates, update, key=self._rank)
        self.expected.pop(update.unit, None)

    def remove(self, update: UpdateT) -> None:
        self.updates.remove(update)

    def hurry(self, update: UpdateT) -> None:
        """Somebody waits for this update now."""
        update.awaited = True
        self._sort()

    def begin(self, update: UpdateT) -> None:
        """A tile of the update has been updated."""
        self.updates.remove(update)
        update.begun = True
        insort(self.updates, update, key=self._rank)

    def prefer(self, *, begun: bool) -> None:
        """Whether updates that are begun are finished before others, which gives the memory of their gradients back.

        Else, as once all gradients have come, what the next forward pass needs first is all that counts.
        """
        if begun is not self._prefers_begun:
            self._prefers_begun = begun
            self._sort()

    def next(self, distance: Callable[[UpdateT], int]) -> UpdateT | None:
        """The update to go on with: the nearest to being computed, and of those the first in its turn.

        Args:
            distance: what keeps an update's next tile from being updated: 0 nothing, else the more the farther.
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
        """Units whose tiles are needed next, in about that order, with their updates if these are submitted."""
        queued = set()
        for update in self.updates:
            queued.add(update.unit)
            yield update.unit, update
        for unit in self.expected.copy():
            if unit not in queued:
                yield unit, None

    def _sort(self) -> None:
        self.updates = sorted(self.updates, key=self._rank)  # in one: an interrupt must not lose what is moved

    def _rank(self, update: UpdateT) -> tuple[bool, bool, int]:
        return not update.awaited, not (update.begun and self._prefers_begun), update.needed
