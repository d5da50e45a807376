"""The optimizer step as a pipeline: while one tile is updated, the next ones are read and the last ones are written.

One worker thread updates the units whose gradients are final, in the order of schedule/update_queue.py. In that order,
it reads tiles whose home is not host memory into the slots of a ring (tiers/ring.py). Into the slots that are left, it
reads tiles of units that are expected next, so that the drive is busy before their gradients are final. Before every
tile, the worker chooses again: it continues with the first update in that order whose next tile is in memory. It runs
the fused kernel on the tile, and starts to write the fields, and the parameters if `UpdateTicket.write` is set.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future

import torch

from infinity.errors import InfinityError
from infinity.io.threads import start_thread
from infinity.kernels import Dither, Rule, bind_this_thread
from infinity.memory import Lease
from infinity.optim.formats import TileFields, update
from infinity.optim.reading import Reading
from infinity.optim.rollback import Rollback
from infinity.optim.ticket import UpdateTicket, parts_of
from infinity.optim.undo_log import Image, UndoLog
from infinity.schedule.update_queue import UpdateQueue
from infinity.telemetry import Counters, Waits
from infinity.tiers.copies import Memory, Transfer
from infinity.tiers.ring import Ring
from infinity.tiers.state_layout import StateLayout
from infinity.tiers.states import StateStore, Tile, UnitStates

# Of the ring. At least four: one tile is read, one is updated, one is written, and one compensates for different rates.
# With many small tiles, a drive stays busy even if the worker is late by milliseconds, as on a busy machine: on two
# cores, 16 tiles of 4 MiB kept a drive busy for 98% of the time, 4 tiles of 16 MiB for 88%.
LEAST_SLOTS, MOST_SLOTS = 4, 16

_HOST = Memory.HOST  # a look-up in an Enum takes 0.2 us
_EXIT_S = 10.0  # far longer than a tile takes; the process must end even if a drive hangs

# Called with (unit, tile, the parameters of the whole shard, the tile's fields) before the tile is updated.
BeforeUpdate = Callable[[int, Tile, torch.Tensor, "dict[str, torch.Tensor]"], None]


class UpdatePipeline:
    """Update units in host memory, tile by tile, on a thread of its own: the worker.

    Attributes:
        waits: waiting times of the worker, by cause. A thread that waits for a ticket counts its time by these causes.
        rollback: keeps and restores old values.
        before_update: called by the worker for every tile before its update, in the order of the tiles; must not raise.
            May be set only while no update is queued.

    Args:
        slots: slots of the ring, each as large as a full tile; empty if the home of every tile is host memory.
        undo_log: memory for the old values of speculative updates; closed with the pipeline.
    """

    def __init__(
        self,
        layout: StateLayout,
        states: StateStore,
        slots: Sequence[Lease],
        counters: Counters,
        undo_log: UndoLog | None = None,
    ) -> None:
        self.layout = layout
        self._states = states
        self._counters = counters
        self.waits = Waits(counters.timeline)
        self.before_update: BeforeUpdate | None = None
        self._ring = Ring(states, slots, self.waits)
        self._fields = TileFields(layout)
        self.rollback = Rollback(layout, states, self._fields, self._ring, len(slots), undo_log or UndoLog(0))
        self._queue = UpdateQueue[UpdateTicket]()
        self._reading = Reading(self._queue, self._ring, states)
        self._tasks: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._exits = False
        self._pid = os.getpid()
        self._idle = True
        self._thread = start_thread(self._run, "infinity-update")
        atexit.register(self._exit)

    # Called by the compute thread #

    def expect(self, units: Sequence[int]) -> None:
        """Set the units that will be submitted next, in order; their tiles are read ahead into free slots."""
        with self._wake:
            self._queue.expect(units)
            self._wake.notify()

    def submit(self, ticket: UpdateTicket) -> None:
        """Queue an update; its tensors must stay valid until it is finished."""
        ticket.tiles.extend(self._tiles_of(ticket))
        ticket.drops_grads = ticket.reconstructs_grads
        with self._wake:
            if self._closing:
                raise InfinityError("the optimizer pipeline is closed")
            self._queue.submit(ticket)
            self._wake.notify()

    def _tiles_of(self, ticket: UpdateTicket) -> Iterator[Tile]:
        tiles = self._states.units[ticket.unit].tiles
        return (tile for tile in tiles if ticket.only is None or tile.index in ticket.only)

    def wait_computed(self, ticket: UpdateTicket, reached: Callable[[int], None] | None = None) -> None:
        """Raise this update to the highest priority and block until its new values are in memory.

        Args:
            reached: called after each tile with the first element that has not been updated yet.

        Raises:
            StorageError: a read of this update failed.
        """
        if not ticket.computed.done():
            with self._wake:
                self._queue.hurry(ticket)
        if reached is not None:
            for element in self._progress(ticket):
                reached(element)
        ticket.computed.result()

    def _progress(self, ticket: UpdateTicket) -> Iterator[int]:
        """Yield the first element that is not updated yet, each time that it changes, until the ticket is computed."""
        seen = 0
        while not ticket.computed.done():
            with self._wake:
                while ticket.reached == seen and not ticket.computed.done():
                    self._wake.wait()
                seen = ticket.reached
            yield seen

    def prefer(self, *, begun: bool) -> None:
        """Set whether updates that have begun go before others, see `UpdateQueue.prefer`."""
        with self._wake:
            self._queue.prefer(begun=begun)

    def reversible_tiles(
        self, states: UnitStates, *, param: bool, without: Collection[UpdateTicket] = ()
    ) -> frozenset[int]:
        """Return the indices of the tiles whose update could be rolled back, see `Rollback.reversible_tiles`.

        Empty if `before_update` is set: it must see a unit's tiles in order, and a speculative update may skip some.
        """
        if self.before_update is not None:
            return frozenset()
        waiting = [each for each in without if not each.chosen]
        return self.rollback.reversible_tiles(states, param=param, without=waiting)

    def withdraw(self, ticket: UpdateTicket) -> bool:
        """Cancel a speculative update and free its part of the undo log.

        Return False if the worker has already chosen it: some of its tiles may be updated.
        """
        with self._wake:
            if ticket.chosen:
                return False
            self._queue.remove(ticket)
            ticket.drops_grads = False  # the gradients cannot be reconstructed: the states have one version only
        self.rollback.forget_before(ticket)
        ticket.computed.set_result(None)
        return True

    def roll_back(self, tickets: Sequence[UpdateTicket]) -> None:
        """Roll back the states of these updates, which must not be in progress. Blocks.

        Only tiles that `reversible_tiles` returned before the submission can be rolled back. The caller restores the
        parameters, from `Rollback.params_before` or with `reconstruct`.

        Raises:
            StorageError: the old states cannot be read.
        """

        def task() -> None:
            for ticket in tickets:
                for tile in self._tiles_of(ticket):
                    self.rollback.roll_back(ticket, tile)

        self._run_in_worker(task)

    def reconstruct(self, ticket: UpdateTicket, *, grad: torch.Tensor | None, param: torch.Tensor | None) -> None:
        """Reconstruct values from before a stopped update, before `roll_back` restores its states. Blocks.

        Args:
            grad: of the whole shard; filled with the gradients. None if they were kept.
            param: of the whole shard; its new parameters are replaced by the old ones. None if the old ones were kept.

        Raises:
            StorageError: the old states cannot be read.
        """

        def task() -> None:
            updated = [tile for tile in self._tiles_of(ticket) if tile not in ticket.tiles]
            self.rollback.reconstruct(ticket, updated, grad, param)

        self._run_in_worker(task)

    def stop(self, tickets: Sequence[UpdateTicket]) -> None:
        """Stop these updates after their current tile, and block until they have stopped."""

        def task() -> None:
            for ticket in tickets:
                if ticket in self._queue.updates:
                    self._end(ticket)

        self._run_in_worker(task)

    def _run_in_worker(self, task: Callable[[], None]) -> None:
        """Let the worker call a function between two tiles, and block until it returns. Raise the function's error."""
        done: Future[None] = Future()
        with self._wake:
            if self._closing:
                raise InfinityError("the optimizer pipeline is closed")
            self._tasks.append((task, done))
            self._wake.notify()
        done.result()

    def tiles(
        self, unit: int, *, writable: bool, fresh: bool = False
    ) -> Iterator[tuple[Tile, dict[str, torch.Tensor]]]:
        """Visit a unit's optimizer states tile by tile while no update is queued.

        Args:
            writable: store the visitor's changes of the tensors when the iteration continues.
            fresh: do not read the tiles, because the visitor overwrites their content.

        Yields:
            The tile, and its fields as 1-D tensors by name.
        """
        self._park()
        writes: list[Transfer] = []
        for tile in self._states.units[unit].tiles:
            self._ring.hold(tile, fresh=fresh)
            try:
                if writable:
                    tile.begin_write(_HOST)  # no move touches a held tile
                yield tile, self._fields.of(tile)
                if writable:
                    tile.end_write(_HOST)
            finally:
                write = self._ring.release(tile)
            if write is not None:
                writes.append(write)
        self._ring.clear()
        for write in writes:
            write.result()

    def move_states(self, unit: int, *, to_device: bool) -> None:
        """Make the device the home of the unit's states, or host memory and NVMe again, while no update is queued.

        Raises:
            torch.OutOfMemoryError: the device has no memory for them; their home does not change.
            StorageError: they cannot be read or written.
        """
        self._park()
        states = self._states.units[unit]
        if to_device:
            self._states.make_device_room(states)
            for tile in states.tiles:
                self._ring.move_to_device(tile)
        else:
            for write in [self._ring.move_back(tile) for tile in states.tiles]:
                if write is not None:
                    write.result()
        self._ring.clear()
        states.note_homes()

    def take_over(self) -> None:
        """Load all states that an earlier process left on NVMe; no update may be queued.

        Raises:
            StorageError: they cannot be read.
        """
        self._park()
        self._states.take_over()

    def is_worker(self) -> bool:
        """Whether this thread is the worker."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Finish queued updates and stop the worker."""
        self._stop()
        atexit.unregister(self._exit)
        self._ring.clear()
        self.rollback.log.close()
        self._fields.clear()

    def _exit(self) -> None:
        """Called at exit: stop the worker after its current tile. Queued updates fail.

        A thread that returns from native code after the interpreter has ended would end the process with SIGABRT.
        """
        if os.getpid() == self._pid:  # after a fork, the child process has no worker
            self._exits = True
            self._stop(_EXIT_S)

    def _stop(self, timeout_s: float | None = None) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _park(self) -> None:
        """Wait until the worker is idle, and drop tiles that it has read ahead."""
        with self._wake:
            if self._queue:
                raise RuntimeError("optimizer states cannot be visited while updates are queued")
            self._queue.expect(())
            while not self._idle:
                self._wake.wait()
        self._ring.clear()

    # The worker #

    def _run(self) -> None:
        bind_this_thread()
        while self._has_work():
            self._ring.reap()
            self._run_task()
            self._read_ahead()
            ticket = self._next_ticket()
            if ticket is not None:
                self._advance(ticket)
        for ticket in tuple(self._queue.updates):
            self._end(
                ticket, InfinityError("the process exits while updates are queued: call engine.close() before it ends")
            )
        for _, done in self._tasks:
            done.set_exception(InfinityError("the engine was closed while an update was being rolled back"))

    def _has_work(self) -> bool:
        """Block until there is work. Return False if the pipeline is closing and no work is left."""
        with self._wake:
            while not (self._queue or self._tasks or self._closing or self._reading.can_read_ahead()):
                self._idle = True
                self._wake.notify_all()
                self._wake.wait()
            self._idle = self._closing and (self._exits or not (self._queue or self._tasks))
            if self._idle:  # the pipeline is closing, so the worker ends
                self._wake.notify_all()
            return not self._idle

    def _run_task(self) -> None:
        if not self._tasks:
            return
        task, done = self._tasks.popleft()
        try:
            task()
        except BaseException as error:  # raised in the thread that waits
            done.set_exception(error)
        else:
            done.set_result(None)

    def _next_ticket(self) -> UpdateTicket | None:
        with self._wake:
            ticket = self._reading.next()
            if ticket is not None:
                ticket.chosen = True
            return ticket

    def _advance(self, ticket: UpdateTicket) -> None:
        """Update the next tile of a unit."""
        try:
            for move in ticket.inputs:
                with self.waits.waiting(move.cause):
                    move.transfer.result()
            ticket.inputs = ()
            if ticket.tiles:
                self._update(ticket, ticket.tiles[0])
                ticket.tiles.popleft()
                if ticket.tiles:
                    ticket.reached = ticket.tiles[0].start
                if ticket.awaited:
                    with self._wake:
                        self._wake.notify_all()
                if not ticket.begun:
                    with self._wake:
                        self._queue.begin(ticket)
        except BaseException as error:  # raised in the thread that waits for the ticket
            self._end(ticket, error)
        else:
            if not ticket.tiles:
                self._end(ticket)

    def _end(self, ticket: UpdateTicket, error: BaseException | None = None) -> None:
        for tile in ticket.tiles:  # not updated, so their gradients cannot be reconstructed
            self._ring.give_up(tile)
            ticket.drops_grads = False
        with self._wake:  # before the ticket is completed: whoever waits for it may visit the states, see `_park`
            self._queue.remove(ticket)
        if error is None:
            ticket.computed.set_result(None)
        else:
            ticket.computed.set_exception(error)
        with self._wake:
            self._wake.notify_all()

    def _update(self, ticket: UpdateTicket, tile: Tile) -> None:
        self._ring.hold(tile)
        try:
            if self.before_update is not None:
                self.before_update(ticket.unit, tile, ticket.param, self._fields.of(tile))
            touched = self._compute(ticket, tile)
        finally:
            write = self._ring.release(tile)
        if write is not None:
            ticket.writes.append(write)
        if touched and ticket.write is not None and (write := ticket.write(tile.start, tile.numel)) is not None:
            ticket.writes.append(write)

    def _compute(self, ticket: UpdateTicket, tile: Tile) -> bool:
        """Update the parts of a tile that the update's segments cover. Return False if there are none."""
        parts = list(parts_of(ticket, tile))
        if not parts:
            return False
        begun_s = time.perf_counter()
        image = self.rollback.begin_keeping(ticket, tile)
        tile.begin_write(_HOST)  # no move touches a held tile
        self._apply(ticket, tile, parts, image)
        if image is not None:
            self.rollback.end_keeping(ticket, tile, image)
        tile.end_write(_HOST)
        self._counters.updated(ticket.unit, tile.nbytes, begun_s)
        return True

    def _apply(
        self, ticket: UpdateTicket, tile: Tile, parts: Sequence[tuple[int, int, Rule]], image: Image | None
    ) -> None:
        fields = self._fields.of(tile)
        old_param = new_fields = None  # memory of the undo log for these
        if image is not None:
            old_param = image.old_param(ticket.param.dtype, tile.numel)
            if image.fields is not None:
                new_fields = self._fields.at(image.fields, tile)
                if sum(stop - start for start, stop, _ in parts) < tile.numel:
                    for name, values in new_fields.items():  # elements without an update are copied
                        values.copy_(fields[name])
        for start, stop, rule in parts:
            here = slice(start - tile.start, stop - tile.start)
            aside = (
                None if old_param is None else old_param[here],
                None if new_fields is None else self._fields.part(new_fields, tile, start, stop),
            )
            lost = update(
                self.layout,
                ticket.param[start:stop],
                self._fields.part(fields, tile, start, stop),
                ticket.grad[start:stop],
                rule,
                Dither(ticket.seed, ticket.first + start),
                aside if image is not None else None,
                report_lost=ticket.reconstructs_grads or ticket.reconstructs_param,
                params=ticket.reconstructs_param,
            )
            if lost is not None:
                self.rollback.note_lost(ticket, start, lost)

    def _read_ahead(self) -> None:
        try:
            self._reading.read_ahead()
        except BaseException:  # not lost: the update of this tile reads it again, and its ticket gets the error
            with self._wake:
                self._queue.expect(())
