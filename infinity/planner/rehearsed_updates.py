"""The optimizer's worker and its ring in a rehearsal: optim/pipeline.py and tiers/ring.py without the bytes."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from infinity.planner.lanes import Machine, Process, Task, Until
from infinity.planner.step_work import TileWork, UnitWork

OPTIMIZER, READ, WRITE = "optimizer", "read", "write"
_Key = tuple[int, int]  # unit, tile


@dataclass(eq=False)
class Ticket:
    """An update.

    Attributes:
        tiles: those that are left, by index.
        ready: what it waits for.
        needed: when the unit is needed next.
    """

    unit: int
    tiles: deque[tuple[int, TileWork]]
    ready: list[Task]
    needed: int
    awaited: bool = False
    begun: bool = False
    computed: bool = False
    writes: list[Task] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.computed and all(write.done for write in self.writes)


class Worker:
    """Updates tile by tile what is in its queue, and reads ahead.

    Args:
        slots: of the ring.
    """

    def __init__(self, units: Sequence[UnitWork], machine: Machine, slots: int) -> None:
        self._units = units
        self._machine = machine
        self._free = slots
        self._queue: list[Ticket] = []
        self._expected: dict[int, None] = {}
        self._arriving: dict[_Key, Task] = {}
        self._leaving: deque[tuple[_Key, Task]] = deque()
        self._prefers_begun = True

    # Called by the compute thread #

    def expect(self, units: Sequence[int]) -> None:
        """These are submitted next."""
        self._expected = dict.fromkeys(units)

    def submit(self, ticket: Ticket) -> None:
        insort(self._queue, ticket, key=self._rank)
        self._expected.pop(ticket.unit, None)

    def hurry(self, ticket: Ticket) -> None:
        """Somebody waits for this one."""
        ticket.awaited = True
        self._queue.sort(key=self._rank)

    def prefer(self, *, begun: bool) -> None:
        """Whether what is begun goes before what is needed first."""
        self._prefers_begun = begun
        self._queue.sort(key=self._rank)

    def _rank(self, ticket: Ticket) -> tuple[bool, bool, int]:
        return not ticket.awaited, not (ticket.begun and self._prefers_begun), ticket.needed

    # The worker #

    def run(self) -> Process:
        """Work until nobody asks any more."""
        while True:
            yield Until(self._has_work, OPTIMIZER)
            self._reap()
            self._read_ahead()
            ticket = self._next()
            if ticket is not None:
                yield from self._advance(ticket)

    def _has_work(self) -> bool:
        if self._queue:
            return True
        self._reap()
        return self._free > 0 and next(self._unread(), None) is not None

    def _reap(self) -> None:
        while self._leaving and self._leaving[0][1].done:
            self._leaving.popleft()
            self._free += 1

    def _upcoming(self) -> Iterator[tuple[_Key, TileWork]]:
        for ticket in self._queue:
            for index, tile in ticket.tiles:
                yield (ticket.unit, index), tile
        queued = {ticket.unit for ticket in self._queue}
        for unit in self._expected:
            if unit not in queued:
                for index, tile in enumerate(self._units[unit].tiles):
                    yield (unit, index), tile

    def _unread(self) -> Iterator[tuple[_Key, TileWork]]:
        """What is to be read next; nothing behind a tile that is still being written."""
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
        self._arriving[key] = self._machine.put(READ, tile.read_s, urgent=urgent)

    def _next(self) -> Ticket | None:
        """The nearest to being updated, and of those the first in rank."""
        return min(self._queue, key=self._distance, default=None)

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
                ticket.begun = True
                self._queue.sort(key=self._rank)
        if not ticket.tiles:
            ticket.computed = True
            self._queue.remove(ticket)

    def _update(self, ticket: Ticket, key: _Key, tile: TileWork) -> Process:
        if tile.is_stored:
            yield from self._hold(key, tile)
        update = self._machine.put(OPTIMIZER, tile.update_s)
        yield Until(lambda: update.done, OPTIMIZER)
        if tile.is_stored:
            del self._arriving[key]
            write = self._machine.put(WRITE, tile.write_s)
            self._leaving.append((key, write))
            ticket.writes.append(write)
        if tile.params_s:
            ticket.writes.append(self._machine.put(WRITE, tile.params_s))

    def _hold(self, key: _Key, tile: TileWork) -> Process:
        """Wait for a tile, which nobody may have begun to read."""
        if key not in self._arriving:
            while any(other == key for other, _ in self._leaving) or not self._free:
                if self._leaving:
                    oldest = self._leaving[0][1]
                    yield Until(lambda: oldest.done, WRITE)  # noqa: B023  (the wait is over before the next one)
                    self._reap()
                else:  # all slots have what is needed later
                    del self._arriving[next(reversed(self._arriving))]
                    self._free += 1
            self._read(key, tile, urgent=True)
        read = self._arriving[key]
        self._machine.hurry(READ, read)
        yield Until(lambda: read.done, READ)
