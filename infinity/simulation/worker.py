"""The optimizer's worker: takes updates in the order of the engine's own queue, and performs them tile by tile."""

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
        tiles: the remaining tiles.
        ready: operations that it waits for.
        write: each tile is written home once it is updated.
        keeps: its gradients are kept, for a rollback.
        logs: it is speculative and undecided, so its old states are kept, too.
        drops_grads: the memory of its gradients is freed: they can be reconstructed from both slots of the states.
        images: tiles that it takes in the undo log.
        chosen: whether the worker has begun it.
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
    """Performs updates, in turns that the clock starts.

    Attributes:
        queue: the engine's queue.
        ended: tickets that are computed, until the compute thread finishes them.
        at: the ticket of the present tile, or None.
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
        """Cancel an update. Return False if the worker has begun it."""
        if ticket.chosen:
            return False
        self.queue.remove(ticket)
        self._end(ticket)
        return True

    def stop(self, tickets: Sequence[Ticket]) -> None:
        """End these updates after the present tile."""

        def stop() -> None:
            for ticket in tickets:
                if ticket in self.queue.updates:
                    self._finish(ticket)

        self.between_tiles(stop)

    def between_tiles(self, task: Callable[[], object]) -> None:
        """Let the worker call a function between two tiles, and wait until it has."""
        self._tasks.append(task)
        self._wake()
        while task in self._tasks:
            self._clock.wait_for_next()

    def park(self) -> None:
        """Wait until the worker is idle, and drop tiles that were read ahead. The queue must be empty."""
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
        """Run tasks, read tiles ahead, and choose the next tile, as the engine's worker does between two tiles."""
        self._wakes = True  # while it waits for the drive
        self.states.ring.reap()
        while self._tasks:
            self._tasks[0]()
            del self._tasks[0]
        try:
            self._read_ahead()
        except InfinityError:  # the tile's update will raise it again
            self.queue.expect(())
        self.at = self._reading.next()
        self._wakes = False
        if self.at is None:
            if not self.queue:  # else the worker would wake up and find nothing to do again
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
