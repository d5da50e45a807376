"""The optimizer step as a pipeline of tiles: while one tile is updated, the next are read and the last are written.

One worker thread takes the units whose gradients are final, that first which the next forward pass needs first: what
is still queued when backward ends is then needed last, and updated under the forward pass. For every tile of a unit the
worker reads the optimizer's fields into a slot of the ring (unless they live in host memory), runs the fused kernel
over it, and starts writing the fields, and the parameters where their home is below, without waiting. Reads run ahead
into the units that are expected next, so that the disk is busy before their gradients are there.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from infinity.errors import InfinityError
from infinity.io import IoFuture, Priority
from infinity.kernels import Dither, Rule
from infinity.memory import Lease
from infinity.optim.formats import StateLayout, update
from infinity.telemetry import Counters, StallCause, Waits
from infinity.tiers import Arrival
from infinity.tiers.states import StateStore, Tile, tile_buffer

RING_SLOTS = 4  # one tile read, one updated, one written, and one of slack between the rates

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
        needed: when the unit is needed next, among those that are queued; the lowest goes first.
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


@dataclass
class UpdateTicket:
    """Progress of one job. `computed` resolves when the new values are in memory; writes may still be in flight."""

    job: UpdateJob
    computed: Future[None] = field(default_factory=Future)
    writes: list[IoFuture] = field(default_factory=list)

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
    """Runs update jobs in the order in which they are needed; of equals, in the order of submission.

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
        self._queue: list[UpdateTicket] = []  # with the one that is being carried out
        self._expected: tuple[int, ...] = ()
        self._wake = threading.Condition()
        self._closing = False
        self._idle = True
        self._thread = threading.Thread(target=self._run, name="infinity-update", daemon=True)
        self._thread.start()

    # Called from the compute thread #

    def expect(self, units: Sequence[int]) -> None:
        """Say which units will be submitted next, in order; their tiles are read ahead into free slots."""
        with self._wake:
            self._expected = tuple(units)
            self._wake.notify()

    def submit(self, job: UpdateJob) -> UpdateTicket:
        """Queue a job; its tensors must stay valid until the ticket is finished."""
        ticket = UpdateTicket(job)
        with self._wake:
            if self._closing:
                raise InfinityError("the optimizer pipeline is closed")
            self._queue.append(ticket)
            self._expected = tuple(unit for unit in self._expected if unit != job.unit)
            self._wake.notify()
        return ticket

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
                yield tile, self._layout.views(tile_buffer(tile.home, tile), tile.numel)
                continue
            slot = self._take_slot()
            try:
                if not fresh:
                    self._states.read(tile, slot, Priority.DEMAND).result()
                yield tile, self._layout.views(tile_buffer(slot, tile), tile.numel)
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

    def close(self) -> None:
        """Finish what is queued and stop the worker."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._discard_reads()
        while self._writing:
            self._settle_oldest()

    def _park(self) -> None:
        """Wait for the worker to be idle and drop what it has read ahead."""
        with self._wake:
            if self._queue:
                raise RuntimeError("optimizer states cannot be visited while updates are queued")
            self._expected = ()
            while not self._idle:
                self._wake.wait()
        self._discard_reads()

    # The worker #

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing and not self._has_read_ahead():
                    self._idle = True
                    self._wake.notify_all()
                    self._wake.wait()
                if not self._queue and self._closing:
                    self._idle = True
                    self._wake.notify_all()
                    return
                self._idle = False
                ticket = self._in_order(self._queue)[0] if self._queue else None
            if ticket is None:
                self._read_ahead(None, 0)
                continue
            try:
                self._update(ticket)
            except BaseException as error:  # whoever waits for the ticket gets it
                ticket.computed.set_exception(error)
            else:
                ticket.computed.set_result(None)
            with self._wake:
                self._queue.remove(ticket)
                self._wake.notify_all()

    def _in_order(self, tickets: Sequence[UpdateTicket]) -> list[UpdateTicket]:
        """What is needed first goes first, behind what is being read already."""
        begun = {unit for unit, _ in self._reads}
        return sorted(tickets, key=lambda ticket: (ticket.job.unit not in begun, ticket.job.needed))

    def _update(self, ticket: UpdateTicket) -> None:
        job = ticket.job
        tiles = self._states.tiles(job.unit)
        for position, tile in enumerate(tiles):
            self._read_ahead(ticket, position)
            if position == 0:  # before a slot is taken, which an error would keep
                for arrival in job.ready:
                    with self.waits.waiting(arrival.cause):
                        arrival.future.result()
            slot = tile.home if isinstance(tile.home, Lease) else self._tile_in_memory(tile)
            with self._counters.updating(job.unit, tile.nbytes):
                fields = self._layout.views(tile_buffer(slot, tile), tile.numel)
                touched = self._update_tile(job, tile, fields)
            if slot is not tile.home:
                if touched:
                    write = self._states.write(tile, slot)
                    self._writing.append((tile, slot, write))
                    ticket.writes.append(write)
                else:
                    self._free.append(slot)
            if touched and job.write_back:
                param_write = self._write_params(job.unit, tile.start, tile.numel)
                if param_write is not None:
                    ticket.writes.append(param_write)

    def _update_tile(self, job: UpdateJob, tile: Tile, fields: dict[str, torch.Tensor]) -> bool:
        touched = False
        stop = tile.start + tile.numel
        for segment in job.segments:
            low, high = max(segment.start, tile.start), min(segment.stop, stop)
            if low >= high:
                continue
            touched = True
            local = self._layout.narrow(fields, low - tile.start, high - tile.start)
            dither = Dither(job.seed, job.first + low)
            update(self._layout, job.param[low:high], local, job.grad[low:high], segment.rule, dither)
        return touched

    # Slots #

    def _tile_in_memory(self, tile: Tile) -> Lease:
        """The slot that holds `tile`, reading it now if nothing did so ahead."""
        key = (tile.unit, tile.index)
        if key not in self._reads:
            if self._is_written(tile):
                self._settle_writes()
            slot = self._take_slot()
            self._reads[key] = (slot, self._states.read(tile, slot, Priority.DEMAND))
        slot, read = self._reads.pop(key)
        try:
            with self.waits.waiting(StallCause.DISK_READ):
                read.result()
        except BaseException:
            self._free.append(slot)
            raise
        return slot

    def _take_slot(self) -> Lease:
        """A free slot, waiting for the oldest write, or giving up the farthest read, if there is none."""
        self._settle_writes(all_of_them=False)
        if not self._free and self._writing:
            self._settle_oldest()
        if not self._free and self._reads:
            slot, read = self._reads.pop(next(reversed(self._reads)))
            with self.waits.waiting(StallCause.DISK_READ):
                _quietly(read)
            self._free.append(slot)
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

    def _discard_reads(self) -> None:
        for slot, read in self._reads.values():
            _quietly(read)
            self._free.append(slot)
        self._reads.clear()

    # Reading ahead #

    def _upcoming(self, current: UpdateTicket | None, position: int) -> Iterator[Tile]:
        """Stored tiles in the order in which they will be needed."""
        with self._wake:
            others = [ticket for ticket in self._queue if ticket is not current]
            queued = [ticket.job.unit for ticket in self._in_order(others)]
            expected = [unit for unit in self._expected if unit not in queued]
        if current is not None:
            yield from self._states.stored(current.job.unit, position)
            expected = [unit for unit in expected if unit != current.job.unit]
        for unit in (*queued, *expected):
            yield from self._states.stored(unit)

    def _next_read(self, current: UpdateTicket | None, position: int) -> Tile | None:
        for tile in self._upcoming(current, position):
            if (tile.unit, tile.index) not in self._reads:
                return tile
        return None

    def _read_ahead(self, current: UpdateTicket | None, position: int) -> None:
        """Fill the free slots with the tiles that are needed next; with no job to run, wait for slots."""
        self._settle_writes(all_of_them=False)
        if current is None and self._writing and not self._free:
            self._settle_oldest()
        while self._free:
            tile = self._next_read(current, position)
            if tile is None:
                return
            if self._is_written(tile):
                if current is not None:
                    return
                self._settle_writes()
            slot = self._free.popleft()
            self._reads[tile.unit, tile.index] = (slot, self._states.read(tile, slot))

    def _has_read_ahead(self) -> bool:
        """Something expected could be read now, or once a write is done."""
        return bool(self._free or self._writing) and self._next_read(None, 0) is not None


def _quietly(future: IoFuture) -> None:
    """Wait for a request whose outcome no longer matters."""
    with contextlib.suppress(OSError):
        future.result()
