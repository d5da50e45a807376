"""The optimizer's worker in a simulation: optim/pipeline.py and tiers/ring.py without the bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from infinity.planner.lanes import Lanes, Process, Task, Until
from infinity.planner.step_work import TileWork, UnitWork
from infinity.schedule.update_queue import UpdateQueue

OPTIMIZER, READ, WRITE = "optimizer", "read", "write"
_Key = tuple[int, int]  # unit, tile


@dataclass(eq=False)
class Ticket:
    """An update.

    Attributes:
        tiles: the remaining ones, by index.
        ready: tasks that it waits for.
        needed: time of the unit's next use.
    """

    unit: int
    tiles: deque[tuple[int, TileWork]]
    ready: list[Task]
    needed: int
    awaited: bool = False
    chosen: bool = False
    begun: bool = False
    computed: bool = False
    writes: list[Task] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.computed and all(write.done for write in self.writes)


class Worker:
    """Update the queued units tile by tile, and prefetch.

    Attributes:
        queue: filled by the compute thread.

    Args:
        slots: of the ring.
    """

    def __init__(self, units: Sequence[UnitWork], lanes: Lanes, slots: int) -> None:
        self._units = units
        self._lanes = lanes
        self._free = slots
        self.queue = UpdateQueue[Ticket]()
        self._arriving: dict[_Key, Task] = {}
        self._leaving: deque[tuple[_Key, Task]] = deque()

    def run(self) -> Process:
        """Run until the simulation ends."""
        while True:
            yield Until(self._has_work, OPTIMIZER)
            self._reap()
            self._read_ahead()
            ticket = self.queue.next(self._distance)
            if ticket is not None:
                ticket.chosen = True
                yield from self._advance(ticket)

    def _has_work(self) -> bool:
        if self.queue:
            return True
        self._reap()
        return self._free > 0 and next(self._unread(), None) is not None

    def _reap(self) -> None:
        while self._leaving and self._leaving[0][1].done:
            self._leaving.popleft()
            self._free += 1

    def _upcoming(self) -> Iterator[tuple[_Key, TileWork]]:
        for unit, ticket in self.queue.upcoming():
            tiles = enumerate(self._units[unit].tiles) if ticket is None else ticket.tiles
            for index, tile in tiles:
                yield (unit, index), tile

    def _unread(self) -> Iterator[tuple[_Key, TileWork]]:
        """Yield the tiles to read next, up to the first that is still being written."""
        written = {key for key, _ in self._leaving}
        for key, tile in self._upcoming():
            if key in written:
                return
            if tile.is_stored and key not in self._arriving:
                yield key, tile

    def _read_ahead(self) -> None:
        if self._free:
            for key, tile in self._unread():
                self._read(key, tile, urgent=False)
                if not self._free:
                    return

    def _read(self, key: _Key, tile: TileWork, *, urgent: bool) -> None:
        self._free -= 1
        self._arriving[key] = self._lanes.put(READ, tile.read_s, urgent=urgent)

    def _distance(self, ticket: Ticket) -> int:
        if not all(task.done for task in ticket.ready):
            return 1
        if not ticket.tiles or not ticket.tiles[0][1].is_stored:
            return 0
        read = self._arriving.get((ticket.unit, ticket.tiles[0][0]))
        return 2 if read is None else int(not read.done)

    def _advance(self, ticket: Ticket) -> Process:
        yield Until(lambda: all(task.done for task in ticket.ready), OPTIMIZER)
        if ticket.tiles:
            index, tile = ticket.tiles[0]
            yield from self._update(ticket, (ticket.unit, index), tile)
            ticket.tiles.popleft()
            if not ticket.begun:
                self.queue.begin(ticket)
        if not ticket.tiles:
            ticket.computed = True
            self.queue.remove(ticket)

    def _update(self, ticket: Ticket, key: _Key, tile: TileWork) -> Process:
        if tile.is_stored:
            yield from self._hold(key, tile)
        update = self._lanes.put(OPTIMIZER, tile.update_s)
        yield Until(lambda: update.done, OPTIMIZER)
        if tile.is_stored:
            del self._arriving[key]
            write = self._lanes.put(WRITE, tile.write_s)
            self._leaving.append((key, write))
            ticket.writes.append(write)
        if tile.params_s:
            ticket.writes.append(self._lanes.put(WRITE, tile.params_s))

    def _hold(self, key: _Key, tile: TileWork) -> Process:
        """Wait for a tile. Read it if that has not begun."""
        if key not in self._arriving:
            while any(other == key for other, _ in self._leaving) or not self._free:
                if self._leaving:
                    oldest = self._leaving[0][1]
                    yield Until(lambda: oldest.done, WRITE)  # noqa: B023  (the wait is over before the next one)
                    self._reap()
                else:  # all slots have tiles that are needed later
                    del self._arriving[next(reversed(self._arriving))]
                    self._free += 1
            self._read(key, tile, urgent=True)
        read = self._arriving[key]
        self._lanes.hurry(READ, read)
        yield Until(lambda: read.done, READ)
