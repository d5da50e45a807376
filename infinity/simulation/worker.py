"""The optimizer's worker: takes updates in the order of the engine's own queue, and updates them tile by tile."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from infinity.errors import StorageError
from infinity.schedule.update_queue import UpdateQueue
from infinity.simulation.clock import Clock, Operation
from infinity.simulation.invariants import violate
from infinity.simulation.rows import Due, Row


@dataclass(eq=False)
class Ticket:
    """An update in the queue.

    Attributes:
        tiles: those that are left.
        ready: what it waits for.
        write: each tile is written home once it is updated.
        keeps: its gradients may be of use again.
        recovers: both slots of the states tell the gradients, so that their memory serves others.
        images: of room for before-images that it takes.
        chosen: the worker is at it, or has been.
        stops: it goes no further than the tile that it is at.
    """

    row: Row
    due: Due
    tiles: deque[int]
    ready: list[Operation]
    needed: int
    write: bool
    keeps: bool = False
    recovers: bool = False
    images: int = 0
    awaited: bool = False
    begun: bool = False
    chosen: bool = False
    stops: bool = False
    computed: bool = False
    error: StorageError | None = None
    writes: list[Operation] = field(default_factory=list)

    @property
    def unit(self) -> int:
        return self.row.index

    @property
    def done(self) -> bool:
        return self.computed and all(write.done for write in self.writes)

    def is_ready(self) -> bool:
        return all(each.done for each in self.ready)


class Worker:
    """Works whenever the clock says.

    Attributes:
        queue: the engine's.
        ended: tickets that are computed, and that nobody has taken note of.
    """

    def __init__(self, clock: Clock) -> None:
        self.queue = UpdateQueue[Ticket]()
        self.ended: list[Ticket] = []
        self.at: Ticket | None = None
        self._clock = clock
        self._wakes = False

    def submit(self, ticket: Ticket) -> None:
        self.queue.submit(ticket)
        self._wake()

    def withdraw(self, ticket: Ticket) -> bool:
        """Have an update not take place; False if the worker is at it, or has been."""
        if ticket.chosen:
            return False
        self.queue.remove(ticket)
        self._end(ticket)
        return True

    def stop(self, tickets: Sequence[Ticket]) -> None:
        """Have these updates go no further."""
        for ticket in tickets:
            if not ticket.computed:
                ticket.stops = True
                if ticket is not self.at:
                    self.queue.remove(ticket)
                    self._end(ticket)
        while self.at is not None and self.at.stops:
            self._clock.wait_for_next()

    def _wake(self) -> None:
        if not self._wakes and self.at is None:
            self._wakes = True
            self._clock.start("pick", -1, self._pick)

    def _pick(self) -> None:
        self._wakes = False
        ticket = self.queue.next(lambda each: 0 if each.is_ready() else 1)
        if ticket is None:
            return
        ticket.chosen = True
        self.at = ticket
        self._begin()

    def _begin(self) -> None:
        """Begin the next tile, or wait for what it needs."""
        ticket = self.at
        if ticket is None:
            return
        if ticket.stops:
            self._finish(ticket)
            return
        missing = next((each for each in ticket.ready if not each.done), None)
        if missing is not None:
            missing.then = self._begin
            return
        failed = next((each for each in ticket.ready if each.failed), None)
        if failed is not None:
            self._finish(ticket, failed.error)
        elif ticket.tiles:
            self._check_may_update(ticket)
            ticket.row.updating_tile = ticket.tiles[0]
            tile = self._clock.start("update", ticket.unit)
            tile.end = lambda: self._updated(ticket, tile)
        else:
            self._finish(ticket)

    @staticmethod
    def _check_may_update(ticket: Ticket) -> None:
        row, tile = ticket.row, ticket.tiles[0]
        if row.computing:
            violate("race", f"{row.name} is updated while a module computes on it")
        if row.gradients_are_used is False or row.grad_host != ticket.due.grad:
            violate("once", f"{row.name} is updated with gradients {row.grad_host}, and {ticket.due.grad} are due")
        if row.mem[tile] != ticket.due.target - 1:
            violate("once", f"tile {tile} of {row.name} is at {row.mem[tile]}, and becomes {ticket.due.target}")

    def _updated(self, ticket: Ticket, update: Operation) -> None:
        row, tile = ticket.row, ticket.tiles[0]
        row.updating_tile = None
        if update.failed:
            self._finish(ticket, update.error)
            return
        self._check_may_update(ticket)
        row.mem[tile] = ticket.due.target
        if row.spec.host:
            row.home[tile] = ticket.due.target
        if ticket.write:
            ticket.writes.append(row.write_home(self._clock, {tile: ticket.due.target}))
        ticket.tiles.popleft()
        if not ticket.begun and not ticket.stops:
            self.queue.begin(ticket)
        if ticket.stops or not ticket.tiles:
            self._finish(ticket)
        else:
            self.at = None
            self._pick()

    def _finish(self, ticket: Ticket, error: StorageError | None = None) -> None:
        self.queue.remove(ticket)
        ticket.error = error
        self.at = None
        self._end(ticket)
        if self.queue:
            self._wake()

    def _end(self, ticket: Ticket) -> None:
        if ticket.tiles:
            ticket.recovers = False
        ticket.computed = True
        self.ended.append(ticket)
