"""The optimizer's worker: takes updates in the order of the engine's own queue, and updates them tile by tile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from infinity.errors import InfinityError, StorageError
from infinity.optim.reading import Reading
from infinity.schedule.update_queue import UpdateQueue
from infinity.simulation.clock import Clock, Operation
from infinity.simulation.invariants import violate
from infinity.simulation.rows import Due, Row
from infinity.simulation.states import States
from infinity.tiers.states import Tile


@dataclass(eq=False)
class Ticket:
    """An update in the queue.

    Attributes:
        tiles: those that are left.
        ready: what it waits for.
        write: each tile is written home once it is updated.
        keeps: its gradients may be of use again.
        logs: its old states may be, too: nobody has decided on it yet.
        drops_grads: both slots of the states tell the gradients, so that their memory serves others.
        images: tiles of the undo log that it takes.
        chosen: the worker is at it, or has been.
    """

    row: Row
    due: Due
    tiles: deque[Tile]
    ready: list[Operation]
    next_use: int
    write: bool
    keeps: bool = False
    logs: bool = False
    drops_grads: bool = False
    images: int = 0
    awaited: bool = False
    begun: bool = False
    chosen: bool = False
    computed: bool = False
    error: StorageError | None = None
    writes: list[Operation] = field(default_factory=list)

    @property
    def unit(self) -> int:
        return self.row.index

    @property
    def done(self) -> bool:
        return self.computed and all(write.done for write in self.writes)

    def has_inputs(self) -> bool:
        return all(each.done for each in self.ready)


class Worker:
    """Works whenever the clock says.

    Attributes:
        queue: the engine's.
        ended: tickets that are computed, and that nobody has taken note of.
    """

    def __init__(self, clock: Clock, states: States) -> None:
        self.queue = UpdateQueue[Ticket]()
        self.ended: list[Ticket] = []
        self.at: Ticket | None = None
        self.states = states
        self._reading = Reading(self.queue, states.ring, states.store)
        self._tasks: list[Callable[[], object]] = []
        self._clock = clock
        self._wakes = False

    def expect(self, units: Sequence[int]) -> None:
        self.queue.expect(units)
        self._wake()

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

        def stop() -> None:
            for ticket in tickets:
                if ticket in self.queue.updates:
                    self._finish(ticket)

        self.between_tiles(stop)

    def between_tiles(self, task: Callable[[], object]) -> None:
        """Have the worker call a function between two tiles, and wait for that."""
        self._tasks.append(task)
        self._wake()
        while task in self._tasks:
            self._clock.wait_for_next()

    def park(self) -> None:
        """Wait until nothing is done any more, and nothing is read ahead; no update may be in the queue."""
        if self.queue:
            violate("legal", "optimizer states are moved while updates are queued")
        self.queue.expect(())
        while self._wakes or self.at is not None:
            self._clock.wait_for_next()
        self.states.ring.clear()

    def _wake(self) -> None:
        has_work = self._tasks or self.queue or self._can_read_ahead()
        if has_work and not self._wakes and self.at is None:
            self._wakes = True
            self._clock.start("pick", -1, self._pick)

    def _pick(self, _: Operation | None = None) -> None:
        """What the engine's worker does between two tiles."""
        self._wakes = True  # as long as it waits for the drive
        self.states.ring.reap()
        while self._tasks:
            self._tasks[0]()
            del self._tasks[0]
        try:
            self._read_ahead()
        except InfinityError:  # of the drive, or of a tile whose write has failed; its update raises it again
            self.queue.expect(())
        self.at = self._reading.next()
        self._wakes = False
        if self.at is None:
            if not self.queue:  # else a wake would repeat what has just led to nothing
                self._wake()
            return
        self.at.chosen = True
        self._begin()

    def _can_read_ahead(self) -> bool:
        return self._reading.can_read_ahead()

    def _read_ahead(self) -> None:
        self._reading.read_ahead()

    def _begin(self) -> None:
        """Begin the next tile, or wait for what it needs."""
        ticket = self.at
        assert ticket is not None
        missing = next((each for each in ticket.ready if not each.done), None)
        if missing is None and ticket.tiles:
            missing = self._arriving(ticket.tiles[0])
        if missing is not None:
            missing.then = self._begin
            return
        failed = next((each for each in ticket.ready if each.failed), None)
        if failed is not None:
            self._finish(ticket, failed.error)
        elif ticket.tiles:
            self._check_may_update(ticket)
            try:
                self.states.begin(ticket.tiles[0])
            except StorageError as error:
                self._finish(ticket, error)
                return
            ticket.row.updating_tile = ticket.tiles[0].index
            self._clock.start("update", ticket.unit, partial(self._updated, ticket), (ticket.tiles[0].index,))
        else:
            self._finish(ticket)

    def _arriving(self, tile: Tile) -> Operation | None:
        """Return the operation that the tile waits for, or None."""
        return self.states.arriving(tile)

    @staticmethod
    def _check_may_update(ticket: Ticket) -> None:
        row, tile = ticket.row, ticket.tiles[0].index
        if row.computing:
            violate("race", f"{row.name} is updated while a module computes on it")
        found = row.memory.value(row)
        if row.gradients_are_used is False or found != ticket.due.grad:
            violate("once", f"{row.name} is updated with gradients {found}, and {ticket.due.grad} are due")
        if row.mem[tile] != ticket.due.target - 1:
            violate("once", f"tile {tile} of {row.name} is at {row.mem[tile]}, and becomes {ticket.due.target}")

    def _updated(self, ticket: Ticket, update: Operation) -> None:
        row, states = ticket.row, ticket.tiles[0]
        row.updating_tile = None
        if update.failed:
            self.states.release(states)
            self._finish(ticket, update.error)
            return
        self._check_may_update(ticket)
        tile = states.index
        row.mem[tile] = ticket.due.target
        if row.spec.host:
            row.home[tile] = ticket.due.target
        ticket.writes += self.states.end(states, ticket.due.states, keeps=ticket.logs)
        if ticket.write:
            ticket.writes.append(row.write_home(self._clock, {tile: ticket.due.target}))
        ticket.tiles.popleft()
        if not ticket.begun:
            self.queue.begin(ticket)
        if ticket.tiles:
            self.at = None
            self._pick()
        else:
            self._finish(ticket)

    def _finish(self, ticket: Ticket, error: StorageError | None = None) -> None:
        for tile in ticket.tiles:
            self.states.ring.give_up(tile)
        self.queue.remove(ticket)
        ticket.error = error
        self.at = None
        self._end(ticket)
        self._wake()

    def _end(self, ticket: Ticket) -> None:
        if ticket.tiles:
            ticket.drops_grads = False
        ticket.computed = True
        self.ended.append(ticket)
