"""The optimizer step as a pipeline of tiles: while one tile is updated, the next are read and the last are written.

One worker thread updates the units whose gradients are final, in the order of schedule/update_queue.py. Tiles are read
into the slots of a ring in that order, unless they live in host memory, and then ahead for the units that are expected
next, so that the disk is busy before their gradients are there. The worker chooses anew for every tile, and takes the
first in that order whose next tile is in memory. It runs the fused kernel over the tile and starts writing the fields,
and the parameters where their home is below, without waiting.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from infinity.errors import InfinityError
from infinity.io.threads import start_thread
from infinity.kernels import Dither, Rule, bind_this_thread
from infinity.memory import Lease
from infinity.optim.before_images import BeforeImages, Image
from infinity.optim.formats import StateLayout, update
from infinity.optim.jobs import UpdateJob, UpdateTicket, parts_of
from infinity.optim.tile_fields import TileFields
from infinity.optim.undo import Undo
from infinity.schedule.update_queue import UpdateQueue
from infinity.telemetry import Counters, Waits
from infinity.tiers.copies import Memory, Transfer
from infinity.tiers.ring import Ring
from infinity.tiers.states import StateStore, Tile

# At the least one tile is read, one updated, one written, and one is slack between the rates. But a drive is busy for
# as long as requests wait for it, and a worker on a busy machine is late by milliseconds, which many small tiles in
# flight bridge: on two cores 16 of 4 MiB kept a drive busy for 98% of the time, 4 of 16 MiB for 88%.
LEAST_SLOTS, MOST_SLOTS = 4, 16

_HOST = Memory.HOST  # a look-up in an Enum takes 0.2 us
_LEAVE_S = 10.0  # a tile takes milliseconds; a drive that hangs must not keep the process from ending

# (unit, tile, the parameters of the whole shard, the tile's fields): looks at what is about to be updated
BeforeUpdate = Callable[[int, Tile, torch.Tensor, "dict[str, torch.Tensor]"], None]


class UpdatePipeline:
    """Runs update jobs, see schedule/update_queue.py.

    Attributes:
        waits: what the worker waited for; who waits for a ticket waits for that too.
        undoing: what there was before updates that may be undone.
        before_update: called by the worker for every tile of a job before any of it is updated, in their order; never
            raises. Set while no job is queued.

    Args:
        slots: of the ring, each as large as a full tile; empty where every tile lives in host memory.
        images: room for what updates replace that may be undone; closed with the pipeline.
    """

    def __init__(
        self,
        layout: StateLayout,
        states: StateStore,
        slots: Sequence[Lease],
        counters: Counters,
        images: BeforeImages | None = None,
    ) -> None:
        self._layout = layout
        self._states = states
        self._counters = counters
        self.waits = Waits(counters.timeline)
        self.before_update: BeforeUpdate | None = None
        self._ring = Ring(states, slots, self.waits)
        self._fields = TileFields(layout)
        self.undoing = Undo(layout, states, self._fields, self._ring, len(slots), images or BeforeImages(0))
        self._queue = UpdateQueue[UpdateTicket]()
        self._errands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._leaving = False
        self._owner = os.getpid()
        self._idle = True
        self._thread = start_thread(self._run, "infinity-update")
        atexit.register(self._leave)

    # Called from the compute thread #

    def expect(self, units: Sequence[int]) -> None:
        """Say which units will be submitted next, in order; their tiles are read ahead into free slots."""
        with self._wake:
            self._queue.expect(units)
            self._wake.notify()

    def submit(self, job: UpdateJob) -> UpdateTicket:
        """Queue a job; its tensors must stay valid until the ticket is finished."""
        ticket = UpdateTicket(job, deque(self._tiles_of(job)), job.ready)
        with self._wake:
            if self._closing:
                raise InfinityError("the optimizer pipeline is closed")
            self._queue.submit(ticket)
            self._wake.notify()
        return ticket

    def _tiles_of(self, job: UpdateJob) -> Iterator[Tile]:
        return (tile for tile in self._states.tiles(job.unit) if job.tiles is None or tile.index in job.tiles)

    def wait_computed(self, ticket: UpdateTicket, reached: Callable[[int], None] | None = None) -> None:
        """Wait until this update is computed, which now goes before all others.

        Args:
            reached: called now and then with the first element that has not been updated yet.

        Raises:
            StorageError: a read of this job failed.
        """
        if not ticket.computed.done():
            with self._wake:
                self._queue.hurry(ticket)
        if reached is not None:
            for element in self._progress(ticket):
                reached(element)
        ticket.computed.result()

    def _progress(self, ticket: UpdateTicket) -> Iterator[int]:
        """How far the update of an awaited ticket has come, whenever it has come further, until it is over."""
        seen = 0
        while not ticket.computed.done():
            with self._wake:
                while ticket.reached == seen and not ticket.computed.done():
                    self._wake.wait()
                seen = ticket.reached
            yield seen

    def prefer(self, *, begun: bool) -> None:
        """See `UpdateQueue.prefer`."""
        with self._wake:
            self._queue.prefer(begun=begun)

    def all_tiles(self, unit: int) -> frozenset[int]:
        """Indices of the unit's tiles."""
        return frozenset(range(len(self._states.tiles(unit))))

    def can_undo(self, unit: int, *, param: bool, without: Collection[UpdateTicket] = ()) -> frozenset[int]:
        """See `Undo.can_undo`: none while somebody looks on `before_update`, and is to see the tiles in their order."""
        if self.before_update is not None:
            return frozenset()
        return self.undoing.can_undo(unit, param=param, without=[each for each in without if not each.chosen])

    def withdraw(self, ticket: UpdateTicket) -> bool:
        """Have an update that runs ahead not take place, and its room be others'; False if the worker is at it, or has
        been."""
        with self._wake:
            if ticket.chosen:
                return False
            self._queue.remove(ticket)
            ticket.recovers = False
        self.undoing.forget_before(ticket)
        ticket.computed.set_result(None)
        return True

    def undo(self, tickets: Sequence[UpdateTicket]) -> None:
        """Have the states be what they were before these updates, which are not under way; waits for that.

        Only of tiles that `can_undo` has named before they were submitted. Parameters are not put back:
        `Undo.params_before` has them.

        Raises:
            StorageError: they cannot be read again.
        """
        self._send(partial(self._undo_all, tickets))

    def recover(self, ticket: UpdateTicket, *, grad: torch.Tensor | None, param: torch.Tensor | None) -> None:
        """Have what there was before an update that is to be undone, and is not under way.

        Args:
            grad: of the whole shard; filled, with what the update `recovers`.
            param: of the whole shard as well, which the update has changed as far as it has come.

        Raises:
            StorageError: what was before the update cannot be read.
        """
        self._send(partial(self._recover, ticket, grad, param))

    def stop(self, tickets: Sequence[UpdateTicket]) -> None:
        """Have these updates go no further."""
        self._send(partial(self._stop_all, tickets))

    def _send(self, errand: Callable[[], None]) -> None:
        """Have the worker do something between two tiles, and wait for it; raises what that raises."""
        done: Future[None] = Future()
        with self._wake:
            if self._closing:
                raise InfinityError("the optimizer pipeline is closed")
            self._errands.append((errand, done))
            self._wake.notify()
        done.result()

    def tiles(
        self, unit: int, *, writable: bool, fresh: bool = False
    ) -> Iterator[tuple[Tile, dict[str, torch.Tensor]]]:
        """Visit a unit's optimizer states tile by tile while no job is queued.

        Args:
            writable: store what the visitor wrote into the tensors when the iteration moves on.
            fresh: do not read the tiles first; their content is about to be overwritten.

        Yields:
            The tile, and its fields as 1-D tensors by name.
        """
        self._park()
        writes: list[Transfer] = []
        for tile in self._states.tiles(unit):
            self._ring.hold(tile, fresh=fresh)
            try:
                if writable:
                    tile.begin_write(_HOST)  # of what is held nothing moves
                yield tile, self._fields.of(tile)
                if writable:
                    tile.end_write(_HOST)
            finally:
                write = self._ring.let_go(tile)
            if write is not None:
                writes.append(write)
        self._ring.clear()
        for write in writes:
            write.result()

    def move_states(self, unit: int, *, there: bool) -> None:
        """Have the unit's states live on the device, or below again, while no job is queued.

        Raises:
            torch.OutOfMemoryError: the device has no memory for them; they stay where they are.
            StorageError: they cannot be read, or written.
        """
        self._park()
        tiles = self._states.tiles(unit)
        if there:
            self._states.make_room_there(unit)
            for tile in tiles:
                self._ring.move_there(tile)
        else:
            for write in [self._ring.move_back(tile) for tile in tiles]:
                if write is not None:
                    write.result()
        self._ring.clear()
        self._states.note_homes(unit)

    def take_over(self) -> None:
        """All states are those that an earlier process has left on the drives; no job may be queued.

        Raises:
            StorageError: they cannot be read.
        """
        self._park()
        self._states.take_over()

    def geometry(self, unit: int) -> list[tuple[int, int]]:
        """First element and elements of every tile of a unit."""
        return [(tile.start, tile.numel) for tile in self._states.tiles(unit)]

    def is_worker(self) -> bool:
        """This thread is the worker."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Finish what is queued and stop the worker."""
        self._stop()
        atexit.unregister(self._leave)
        self._ring.clear()
        self.undoing.close()
        self._fields.clear()

    def _leave(self) -> None:
        """At exit, stop the worker after the tile that it is at; what is queued fails.

        The interpreter ends a thread that comes back from native code once there is no interpreter left to come back
        to, and that ends the process with SIGABRT.
        """
        if os.getpid() == self._owner:  # a child has no such thread
            self._leaving = True
            self._stop(_LEAVE_S)

    def _stop(self, timeout_s: float | None = None) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _park(self) -> None:
        """Wait for the worker to be idle and drop what it has read ahead."""
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
            self._run_errand()
            self._read_ahead()
            ticket = self._next_ticket()
            if ticket is not None:
                self._advance(ticket)
        for ticket in tuple(self._queue.updates):
            self._end(ticket, InfinityError("the process ends before this update is done; close the engine first"))
        for _, done in self._errands:
            done.set_exception(InfinityError("the engine was closed before an update was undone"))

    def _has_work(self) -> bool:
        """Wait until there is something to do; False if there never will be again."""
        with self._wake:
            while not (self._queue or self._errands or self._closing or self._could_read_ahead()):
                self._idle = True
                self._wake.notify_all()
                self._wake.wait()
            self._idle = self._closing and (self._leaving or not (self._queue or self._errands))
            if self._idle:
                self._wake.notify_all()
            return not self._idle

    def _run_errand(self) -> None:
        if not self._errands:
            return
        errand, done = self._errands.popleft()
        try:
            errand()
        except BaseException as error:  # whoever waits gets it
            done.set_exception(error)
        else:
            done.set_result(None)

    def _stop_all(self, tickets: Sequence[UpdateTicket]) -> None:
        for ticket in tickets:
            if ticket in self._queue.updates:
                self._end(ticket)

    def _undo_all(self, tickets: Sequence[UpdateTicket]) -> None:
        for ticket in tickets:
            for tile in self._tiles_of(ticket.job):
                self.undoing.undo(ticket, tile)

    def _recover(self, ticket: UpdateTicket, grad: torch.Tensor | None, param: torch.Tensor | None) -> None:
        updated = [tile for tile in self._tiles_of(ticket.job) if tile not in ticket.tiles]
        self.undoing.recover(ticket, updated, grad, param)

    def _next_ticket(self) -> UpdateTicket | None:
        """The one to go on with: the nearest to being updated, and of those the first in rank."""
        with self._wake:
            ticket = self._queue.next(self._distance)
            if ticket is not None:
                ticket.chosen = True
            return ticket

    def _distance(self, ticket: UpdateTicket) -> int:
        """What keeps the ticket's next tile from being updated: 0 nothing, 1 a transfer, 2 one that is not begun."""
        if ticket.missing and not all(move.done() for move in ticket.missing):
            return 1
        if not ticket.tiles or self._ring.is_here(ticket.tiles[0]):
            return 0
        return 1 if self._ring.has(ticket.tiles[0]) else 2

    def _advance(self, ticket: UpdateTicket) -> None:
        """Update one more tile of a unit."""
        try:
            for move in ticket.missing:
                with self.waits.waiting(move.cause):
                    move.transfer.result()
            ticket.missing = ()
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
        except BaseException as error:  # whoever waits for the ticket gets it
            self._end(ticket, error)
        else:
            if not ticket.tiles:
                self._end(ticket)

    def _end(self, ticket: UpdateTicket, error: BaseException | None = None) -> None:
        for tile in ticket.tiles:
            self._ring.give_up(tile)
            ticket.recovers = False
        with self._wake:  # first: whoever waits for the ticket may visit the states next
            self._queue.remove(ticket)
        if error is None:
            ticket.computed.set_result(None)
        else:
            ticket.computed.set_exception(error)
        with self._wake:
            self._wake.notify_all()

    def _update(self, ticket: UpdateTicket, tile: Tile) -> None:
        job = ticket.job
        self._ring.hold(tile)
        try:
            if self.before_update is not None:
                self.before_update(job.unit, tile, job.param, self._fields.of(tile))
            touched = self._compute(ticket, tile)
        finally:
            write = self._ring.let_go(tile)
        if write is not None:
            ticket.writes.append(write)
        if touched and job.write is not None and (write := job.write(job.unit, tile.start, tile.numel)) is not None:
            ticket.writes.append(write)

    def _compute(self, ticket: UpdateTicket, tile: Tile) -> bool:
        """Update what the job's segments have of a tile; False if that is nothing."""
        job = ticket.job
        parts = list(parts_of(job, tile))
        if not parts:
            return False
        begun_s = time.perf_counter()
        image = self.undoing.begin_keeping(ticket, tile)
        tile.begin_write(_HOST)  # of what is held nothing moves
        self._apply(ticket, tile, parts, image)
        if image is not None:
            self.undoing.end_keeping(ticket, tile, image)
        tile.end_write(_HOST)
        self._counters.updated(job.unit, tile.nbytes, begun_s)
        return True

    def _apply(
        self, ticket: UpdateTicket, tile: Tile, parts: Sequence[tuple[int, int, Rule]], image: Image | None
    ) -> None:
        job, fields = ticket.job, self._fields.of(tile)
        old_param = new_fields = None
        if image is not None:
            old_param = image.old_param(job.param.dtype, tile.numel)
            if image.fields is not None:
                new_fields = self._fields.at(image.fields, tile)
                if sum(stop - start for start, stop, _ in parts) < tile.numel:
                    for name, values in new_fields.items():  # what is not updated comes along
                        values.copy_(fields[name])
        for start, stop, rule in parts:
            here = slice(start - tile.start, stop - tile.start)
            aside = (
                None if old_param is None else old_param[here],
                None if new_fields is None else self._fields.part(new_fields, tile, start, stop),
            )
            lost = update(
                self._layout,
                job.param[start:stop],
                self._fields.part(fields, tile, start, stop),
                job.grad[start:stop],
                rule,
                Dither(job.seed, job.first + start),
                aside if image is not None else None,
                recoverably=job.tells_grads or job.tells_param,
                params=job.tells_param,
            )
            if lost is not None:
                self.undoing.note_lost(ticket, start, lost)

    # Reading ahead #

    def _upcoming(self) -> Iterator[Tile]:
        """Stored tiles in about the order in which they will be needed: the queue may change meanwhile."""
        for unit, ticket in self._queue.upcoming():
            if ticket is None:
                yield from self._states.stored(unit)
            elif ticket.tiles:
                yield from self._states.stored(unit, ticket.tiles[0].index)

    def _could_read_ahead(self) -> bool:
        """Something expected could be read now, or once a write is done."""
        return self._ring.will_have_room and not all(self._ring.has(tile) for tile in self._upcoming())

    def _read_ahead(self) -> None:
        """Fill the free slots with the tiles that are needed next; with nothing to update, wait for slots."""
        try:
            self._ring.read_ahead(self._upcoming(), wait=not self._queue)
        except BaseException:  # it comes again when the tile is updated, and then there is somebody to tell
            with self._wake:
                self._queue.expect(())
