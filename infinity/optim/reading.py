"""Decide which update the optimizer's worker continues with, and which stored tiles it reads ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from infinity.schedule.update_queue import Update, UpdateQueue
from infinity.tiers.ring import Ring
from infinity.tiers.states import StateStore, Tile


class TileUpdate(Update, Protocol):
    """An update whose tiles come through the ring.

    Attributes:
        tiles: tiles that are not updated yet, in order.
    """

    tiles: deque[Tile]

    def has_inputs(self) -> bool:
        """Whether the parameters and gradients have arrived."""


UpdateT = TypeVar("UpdateT", bound=TileUpdate)


class Reading(Generic[UpdateT]):
    def __init__(self, queue: UpdateQueue[UpdateT], ring: Ring, states: StateStore) -> None:
        self._queue = queue
        self._ring = ring
        self._states = states

    def next(self) -> UpdateT | None:
        """Return the update to continue with: the one with the least distance; among equals, the first in the queue."""
        return self._queue.next(self._distance)

    def _distance(self, update: UpdateT) -> int:
        """Return 0 if the next tile can be updated, 1 if it waits for a transfer, 2 if its read is not started."""
        if not update.has_inputs():
            return 1
        if not update.tiles or self._ring.is_here(update.tiles[0]):
            return 0
        return 1 if self._ring.has(update.tiles[0]) else 2

    def _upcoming(self) -> Iterator[Tile]:
        """Yield stored tiles approximately in the order in which they are needed. The queue may change during this."""
        for unit, update in self._queue.upcoming():
            if update is None:
                yield from self._states.units[unit].stored
            elif update.tiles:
                yield from self._states.units[unit].stored_from(update.tiles[0].index)

    def can_read_ahead(self) -> bool:
        """Whether an expected tile could be read now, or after a write has ended."""
        return self._ring.will_have_room and not all(self._ring.has(tile) for tile in self._upcoming())

    def read_ahead(self) -> None:
        """Read the tiles that are needed next into free slots; without queued updates, wait for slots.

        Raises:
            InfinityError: a tile cannot be read. This recurs when the tile is updated.
        """
        self._ring.read_ahead(self._upcoming(), wait=not self._queue)
