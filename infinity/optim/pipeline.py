"""The optimizer step as a pipeline of tiles: while one tile is updated, the next are read and the last are written.

One worker thread updates the units whose gradients are final: first what somebody waits for, then what it has begun,
which gives the memory of its gradients back, then what the next forward pass needs first. What is still queued when
backward ends is then needed last, and updated under the forward pass. Tiles are read into the slots of a ring in that
order, unless they live in host memory, and then ahead for the units that are expected next, so that the disk is busy
before their gradients are there. The worker chooses anew for every tile, and takes the first in that order whose next
tile is in memory. It runs the fused kernel over the tile and starts writing the fields, and the parameters where their
home is below, without waiting.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from infinity.errors import InfinityError
from infinity.io import IoFuture, Priority
from infinity.io.threads import start_thread
from infinity.kernels import Dither, Rule
from infinity.memory import Lease
from infinity.optim.formats import StateLayout, update
from infinity.telemetry import Counters, StallCause, Waits
from infinity.tiers import Arrival
from infinity.tiers.states import StateStore, Tile, tile_buffer

# At the least one tile is read, one updated, one written, and one is slack between the rates. But a drive is busy for
# as long as requests wait for it, and a worker on a busy machine is late by milliseconds, which many small tiles in
# flight bridge: on two cores 16 of 4 MiB kept a drive busy for 98% of the time, 4 of 16 MiB for 88%.
LEAST_SLOTS, MOST_SLOTS = 4, 16

_LEAVE_S = 10.0  # a tile takes milliseconds; a drive that hangs must not keep the process from ending

WriteParams = Callable[[int, int, int], "IoFuture | None"]  # (unit, start, numel)


@dataclass(frozen=True)
class Segment:
    """A run of elements of a shard that one kernel call may cover."""

    start: int
    stop: int
    rule: Rule


@dataclass(frozen=True)
class UpdateJob:
    """One unit's update.

    Attributes:
        unit: index of the unit.
        param: the shard's trainable elements in compute dtype, in host memory; updated in place.
        grad: gradients, same length.
        segments: what to update, and how; elements outside are left alone.
        ready: what `param` and `grad` still wait for.
        write_back: also write the updated parameters to their home.
        seed: of this update's stochastic rounding.
        first: position of the shard's first element in the unit; shards of several ranks round differently.
        needed: when the unit is needed next; the lowest goes first among units that nobody waits for yet.
    """

    unit: int
    param: torch.Tensor
    grad: torch.Tensor
    segments: tuple[Segment, ...]
    ready: tuple[Arrival, ...]
    write_back: bool
    seed: int = 0
    first: int = 0
    needed: int = 0


@dataclass(eq=False)
class UpdateTicket:
    """Progress of one job. `computed` resolves when the new values are in memory; writes may still be in flight.

    Attributes:
        tiles: those of the unit that are not updated yet, in order.
        missing: arrivals that the update still has to wait for.
        awaited: somebody waits for this update and no other.
        begun: a tile has been updated.
    """

    job: UpdateJob
    tiles: deque[Tile]
    missing: tuple[Arrival, ...]
    awaited: bool = False
    begun: bool = False
    computed: Future[None] = field(default_factory=Future)
    writes: list[IoFuture] = field(default_factory=list)

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Lowest goes first. What is begun is finished, since that gives back the memory of its gradients."""
        return not self.awaited, not self.begun, self.job.needed

    def finished(self) -> bool:
        return self.computed.done() and all(write.done() for write in self.writes)

    def wait(self) -> None:
        """Block until everything is computed and written.

        Raises:
            StorageError: a read or write of this job failed.
        """
        self.computed.result()
        for write in self.writes:
            write.result()


class UpdatePipeline:
    """Runs update jobs in the order of `UpdateTicket.rank`; of equals, in the order of submission.

    Attributes:
        waits: what the worker waited for; who waits for a ticket waits for that too.

    Args:
        slots: ring of leases, each as large as a full tile; empty where every tile lives in host memory.
        write_params: starts writing a range of a unit's parameters to their home.
    """

    def __init__(
        self,
        layout: StateLayout,
        states: StateStore,
        slots: Sequence[Lease],
        write_params: WriteParams,
        counters: Counters,
    ) -> None:
        self._layout = layout
        self._states = states
        self._write_params = write_params
        self._counters = counters
        self.waits = Waits(counters.timeline)
        self._free = deque(slots)
        self._writing: deque[tuple[Tile, Lease, IoFuture]] = deque()
        self._reads: dict[tuple[int, int], tuple[Lease, IoFuture]] = {}
        self._queue: list[UpdateTicket] = []  # in the order of their ranks
        self._views: dict[tuple[Lease, int], dict[str, torch.Tensor]] = {}  # of that many elements in a lease
        self._expected: tuple[int, ...] = ()
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
            self._expected = tuple(units)
            self._wake.notify()

    def submit(self, job: UpdateJob) -> UpdateTicket:
        """Queue a job; its tensors must stay valid until the ticket is finished."""
        ticket = UpdateTicket(job, deque(self._states.tiles(job.unit)), job.ready)
        with self._wake:
            if self._closing:
                raise InfinityError("the optimizer pipeline is closed")
            self._queue.append(ticket)
            self._sort()
            self._expected = tuple(unit for unit in self._expected if unit != job.unit)
            self._wake.notify()
        return ticket

    def wait_computed(self, ticket: UpdateTicket) -> None:
        """Wait until this update is computed, which now goes before all others.

        Raises:
            StorageError: a read of this job failed.
        """
        if not ticket.computed.done():
            ticket.awaited = True
            self._sort()
        ticket.computed.result()

    def first_computed(self, tickets: Sequence[UpdateTicket]) -> UpdateTicket:
        """Wait until one of these updates is computed, or has failed, and return it."""
        with self._wake:
            while True:
                for ticket in tickets:
                    if ticket.computed.done():
                        return ticket
                self._wake.wait()

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
        writes: list[IoFuture] = []
        for tile in self._states.tiles(unit):
            if isinstance(tile.home, Lease):
                yield tile, self._fields(tile.home, tile)
                continue
            slot = self._take_slot()
            try:
                if not fresh:
                    self._states.read(tile, slot, Priority.DEMAND).result()
                yield tile, self._fields(slot, tile)
            except BaseException:
                self._free.append(slot)
                raise
            if writable:
                writes.append(self._states.write(tile, slot))
                self._writing.append((tile, slot, writes[-1]))
            else:
                self._free.append(slot)
        for write in writes:
            write.result()
        self._settle_writes()

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
        for key in list(self._reads):
            self._give_up_read(key)
        self._settle_writes()
        self._views.clear()  # they hold on to the memory

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
            self._expected = ()
            while not self._idle:
                self._wake.wait()
        for key in list(self._reads):
            self._give_up_read(key)

    # The worker #

    def _run(self) -> None:
        while self._has_work():
            self._settle_writes(all_of_them=False)
            self._read_ahead()
            ticket = self._next_ticket()
            if ticket is not None:
                self._advance(ticket)
        for ticket in tuple(self._queue):
            self._end(ticket, InfinityError("the process ends before this update is done; close the engine first"))

    def _has_work(self) -> bool:
        """Wait until there is something to do; False if there never will be again."""
        with self._wake:
            while not self._queue and not self._closing and not self._could_read_ahead():
                self._idle = True
                self._wake.notify_all()
                self._wake.wait()
            self._idle = self._closing and (self._leaving or not self._queue)
            if self._idle:
                self._wake.notify_all()
            return not self._idle

    def _next_ticket(self) -> UpdateTicket | None:
        """The one to go on with: the nearest to being updated, and of those the first in rank."""
        with self._wake:
            return min(self._queue, key=self._distance, default=None)

    def _sort(self) -> None:
        """There is another ticket, or one's rank has changed."""
        with self._wake:
            self._queue.sort(key=attrgetter("rank"))

    def _distance(self, ticket: UpdateTicket) -> int:
        """What keeps the ticket's next tile from being updated: 0 nothing, 1 a transfer, 2 one that is not begun."""
        if not all(arrival.future.done() for arrival in ticket.missing):
            return 1
        if not ticket.tiles or isinstance(ticket.tiles[0].home, Lease):
            return 0
        if (held := self._reads.get(_key(ticket.tiles[0]))) is None:
            return 2
        return 0 if held[1].done() else 1

    def _advance(self, ticket: UpdateTicket) -> None:
        """Update one more tile of a unit."""
        try:
            for arrival in ticket.missing:
                with self.waits.waiting(arrival.cause):
                    arrival.future.result()
            ticket.missing = ()
            if ticket.tiles:
                self._update(ticket, ticket.tiles[0])
                ticket.tiles.popleft()
                if not ticket.begun:
                    ticket.begun = True
                    self._sort()
        except BaseException as error:  # whoever waits for the ticket gets it
            self._end(ticket, error)
        else:
            if not ticket.tiles:
                self._end(ticket)

    def _end(self, ticket: UpdateTicket, error: BaseException | None = None) -> None:
        for tile in ticket.tiles:
            self._give_up_read(_key(tile))
        if error is None:
            ticket.computed.set_result(None)
        else:
            ticket.computed.set_exception(error)
        with self._wake:
            self._queue.remove(ticket)
            self._wake.notify_all()

    def _update(self, ticket: UpdateTicket, tile: Tile) -> None:
        job = ticket.job
        place = tile.home if isinstance(tile.home, Lease) else self._slot_with(tile)
        write: IoFuture | None = None
        try:
            with self._counters.updating(job.unit, tile.nbytes):
                touched = self._compute(job, tile, self._fields(place, tile))
            if touched and place is not tile.home:
                write = self._states.write(tile, place)
        finally:
            if write is not None:
                self._writing.append((tile, place, write))
                ticket.writes.append(write)
            elif place is not tile.home:
                self._free.append(place)
        if touched and job.write_back:
            param_write = self._write_params(job.unit, tile.start, tile.numel)
            if param_write is not None:
                ticket.writes.append(param_write)

    def _compute(self, job: UpdateJob, tile: Tile, fields: dict[str, torch.Tensor]) -> bool:
        touched = False
        stop = tile.start + tile.numel
        for segment in job.segments:
            low, high = max(segment.start, tile.start), min(segment.stop, stop)
            if low >= high:
                continue
            touched = True
            whole = high - low == tile.numel
            local = fields if whole else self._layout.narrow(fields, low - tile.start, high - tile.start)
            dither = Dither(job.seed, job.first + low)
            update(self._layout, job.param[low:high], local, job.grad[low:high], segment.rule, dither)
        return touched

    def _fields(self, place: Lease, tile: Tile) -> dict[str, torch.Tensor]:
        """The tile's fields where it lies."""
        key = (place, tile.numel)
        if key not in self._views:
            self._views[key] = self._layout.views(tile_buffer(place, tile), tile.numel)
        return self._views[key]

    # Slots #

    def _slot_with(self, tile: Tile) -> Lease:
        """The slot that holds `tile`, reading it now if nothing did so ahead."""
        if _key(tile) not in self._reads:
            if self._is_written(tile):
                self._settle_writes()
            self._start_read(tile, self._take_slot(), Priority.DEMAND)
        slot, read = self._reads.pop(_key(tile))
        try:
            with self.waits.waiting(StallCause.DISK_READ):
                read.result()
        except BaseException:
            self._free.append(slot)
            raise
        return slot

    def _start_read(self, tile: Tile, slot: Lease, priority: Priority = Priority.PREFETCH) -> None:
        try:
            self._reads[_key(tile)] = (slot, self._states.read(tile, slot, priority))
        except BaseException:
            self._free.append(slot)
            raise

    def _take_slot(self) -> Lease:
        """A free slot, waiting for the oldest write, or giving up the farthest read, if there is none."""
        self._settle_writes(all_of_them=False)
        if not self._free and self._writing:
            self._settle_oldest()
        if not self._free and self._reads:
            with self.waits.waiting(StallCause.DISK_READ):
                self._give_up_read(next(reversed(self._reads)))
        return self._free.popleft()

    def _settle_writes(self, all_of_them: bool = True) -> None:
        """Return the slots of finished writes to the ring; wait for the unfinished if asked to."""
        while self._writing and (all_of_them or self._writing[0][2].done()):
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        _, slot, write = self._writing.popleft()
        self._free.append(slot)
        with self.waits.waiting(StallCause.DISK_WRITE):
            _quietly(write)  # whoever waits for the ticket gets the error

    def _is_written(self, tile: Tile) -> bool:
        """A write of this tile is in flight; a read could overtake it."""
        return any(written is tile for written, _, _ in self._writing)

    def _give_up_read(self, key: tuple[int, int]) -> None:
        if key in self._reads:
            slot, read = self._reads.pop(key)
            _quietly(read)
            self._free.append(slot)

    # Reading ahead #

    def _upcoming(self) -> Iterator[Tile]:
        """Stored tiles that are not in memory, nor on their way, in the order in which they will be needed."""
        with self._wake:
            places = [(ticket.job.unit, ticket.tiles[0].index) for ticket in self._queue if ticket.tiles]
            queued = {ticket.job.unit for ticket in self._queue}
            places += [(unit, 0) for unit in self._expected if unit not in queued]
        for unit, first in places:
            for tile in self._states.stored(unit, first):
                if _key(tile) not in self._reads:
                    yield tile

    def _could_read_ahead(self) -> bool:
        """Something expected could be read now, or once a write is done."""
        return bool(self._free or self._writing) and next(self._upcoming(), None) is not None

    def _read_ahead(self) -> None:
        """Fill the free slots with the tiles that are needed next; with nothing to update, wait for slots."""
        idle = not self._queue
        if idle and self._writing and not self._free:
            self._settle_oldest()
        for tile in self._upcoming() if self._free else ():
            if self._is_written(tile):
                if not idle:
                    return
                self._settle_writes()
            try:
                self._start_read(tile, self._free.popleft())
            except BaseException:  # it comes again when the tile is updated, and then there is somebody to tell
                with self._wake:
                    self._expected = ()
                return
            if not self._free:
                return


def _key(tile: Tile) -> tuple[int, int]:
    return tile.unit, tile.index


def _quietly(future: IoFuture) -> None:
    """Wait for a request whose outcome no longer matters."""
    with contextlib.suppress(Exception):
        future.result()
