"""Follow each update from the moment it is due until its new values are in memory and written."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from weakref import ReferenceType, ref

import torch

from infinity.errors import CapacityError
from infinity.kernels import update_on_device
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.ticket import Segment, UpdateTicket
from infinity.optim.undo_log import Image
from infinity.telemetry import Counters, StallCause
from infinity.tiers import Fields, GradStore, Params
from infinity.tiers.state_layout import StateLayout
from infinity.zero.unit import Unit


class InFlight:
    """The units whose updates are due, in the pipeline, or finished.

    Attributes:
        finished: units whose updates are finished; the executor removes them.
        gradients_may_spill: whether a speculative update has stopped using its gradients, so that they may spill; the
            executor resets it.
    """

    def __init__(
        self,
        params: Params,
        grads: GradStore,
        pipeline: UpdatePipeline,
        counters: Counters,
    ) -> None:
        self.finished: list[Unit] = []
        self.gradients_may_spill = False
        self._params = params
        self._critical = params.critical
        self._grads = grads
        self._pipeline = pipeline
        self._counters = counters
        self._computing = counters.stalled(StallCause.OPTIMIZER, pipeline.waits)  # the context of waits for the worker
        # Units whose updates are computed or have failed. Weak, because row, ticket and callback would form a cycle.
        self._ended: SimpleQueue[ReferenceType[Unit]] = SimpleQueue()
        # The containers below keep only the order of units. The rows have the state: after an interrupt, an entry may
        # contradict its row.
        self._due: dict[Unit, None] = {}
        self._submitted: dict[Unit, None] = {}
        self._computed: dict[Unit, None] = {}  # subset of `_submitted`; their writes may be in flight

    @property
    def is_busy(self) -> bool:
        """Whether any update is unfinished, or waits for its unit."""
        return bool(self._due or self._submitted)

    @property
    def due(self) -> list[Unit]:
        """Units whose updates are due and not submitted, the oldest first."""
        return [row for row in self._due if row.due is not None]

    @property
    def submitted(self) -> list[Unit]:
        return list(self._submitted)

    def add_due(self, row: Unit, segments: tuple[Segment, ...]) -> None:
        """Set the unit's update of this step; `submit` or `update_on_device` takes it."""
        self._due[row] = None
        row.set_due(segments)

    # Into the pipeline #

    def update_on_device(self, row: Unit) -> None:
        """Run the due update of a unit whose states are on the device.

        The kernels are queued on the compute stream. Later work on that stream follows them, so no thread waits.
        """
        with self._critical:
            segments = self._take_due(row)
            param, grad = self._params.begin_device_change(row.params), row.grads_store.tensor(row.grads)
            with row.states.changing_on_device() as fields:
                for segment in segments:
                    _update_segment(self._pipeline.layout, segment, param, grad, fields)
            self._params.end_device_change(row.params)
            row.grads_store.drop(row.grads)
            self.finished.append(row)

    def submit(self, row: Unit, write: bool, next_use: int) -> None:
        """Submit the due update of a unit in memory. Its gradients have room, and its last update is finished.

        Args:
            write: write the new parameters home, tile by tile as they are updated.
            next_use: position of the unit's next use; the lowest is updated first, unless a thread waits for another.
        """
        # The home of a dirty unit has old values, and the tiles of this update may be only a part of the unit.
        write = write and not row.params.is_dirty()
        with self._critical:
            self.open_host(row)
            tiles = None if row.begun is None else row.states.indices - row.begun
            self.enqueue(row, self._take_due(row), write=write, next_use=next_use, tiles=tiles)

    def _take_due(self, row: Unit) -> tuple[Segment, ...]:
        segments = row.take_due()
        self._due.pop(row, None)
        return segments

    def enqueue(
        self,
        row: Unit,
        segments: tuple[Segment, ...],
        *,
        write: bool,
        next_use: int,
        tiles: frozenset[int] | None,
        before: Mapping[int, Image] | None = None,
        reconstructs_grads: bool = False,
        reconstructs_param: bool = False,
    ) -> UpdateTicket:
        """Submit an update to the pipeline.

        Args:
            before: memory of the undo log for old values, by tile; None if the update is not speculative.
        """
        params = row.params
        grad, arriving = self._grads.take_for_update(row.grads)
        touching = self._params.begin_update(params)
        spec = params.spec
        trained = spec.trainable_numel // spec.sharding.count
        ticket = UpdateTicket(
            unit=row.index,
            param=params.shard[:trained],
            grad=grad,
            segments=segments,
            inputs=(*touching, *arriving),
            write=params.write if write else None,
            # For equal bits, the seed depends on neither placement nor resume. A rank's shard may be only padding.
            seed=segments[0].rule.step << 24 | row.index if segments else 0,
            first=spec.sharding.rank * trained,
            next_use=next_use,
            only=tiles,
            before=before or {},
            reconstructs_grads=reconstructs_grads,
            reconstructs_param=reconstructs_param,
        )
        self._pipeline.submit(ticket)
        ticket.computed.add_done_callback(partial(_note_ended, self._ended, ref(row)))
        written = params.write_through(ticket) if write else None
        rollback, double_buffered = self._pipeline.rollback, self._params.is_double_buffered
        reconstructable = double_buffered and rollback.can_reconstruct_param(segments, self._grads.dtype)
        self._submitted[row] = None
        row.submit(ticket, written, keeps_grads=before is not None, reconstructable=reconstructable)
        return ticket

    def open_host(self, row: Unit) -> None:
        """Start to bring the unit's parameters to the memory in which updates change them.

        Blocks if that memory is full, until an update or a fetch frees some.

        Raises:
            CapacityError: it is full, and no update or fetch is unfinished.
        """
        while not self._params.open_host(row.params):
            if not self.finish_one() and not self._finish_fetch():
                raise CapacityError(
                    f"no host memory is left to stage the parameters of unit `{row.name}`: access fewer units at a "
                    "time, or raise tiering.host_memory"
                )

    def _finish_fetch(self) -> bool:
        """Block until one fetch through host memory ends. Return False if there is none."""
        due = {row.params for row in self.due}
        for params in self._params.through_host:
            if params not in due:
                self._params.fetch_wait(params)
                return True
        return False

    @property
    def all_computed(self) -> bool:
        """Whether all updates are computed and none has failed. Writes may be in flight."""
        tickets = [row.ticket for row in self._submitted if row.ticket is not None]
        return not self._due and all(each.computed.done() and each.computed.exception() is None for each in tickets)

    @staticmethod
    def _is_computed(row: Unit) -> bool:
        return row.ticket is not None and row.ticket.computed.done()

    # Completion #

    def wait_computed(self, row: Unit) -> None:
        """Block until the unit's update is computed. Writes home may be in flight.

        On a device, parts of the new values are uploaded while the rest is computed.
        """
        ticket, params = row.ticket, row.params
        if ticket is not None:
            with self._computing:
                sends = params.upload_part if params.can_upload_parts() else None
                self._pipeline.wait_computed(ticket, sends)
            self._params.end_change(params)

    def finish_one(self) -> bool:
        """Block until one update, the first to end, is computed and written. Return False if there is none."""
        self._read_ended()
        while self._submitted and not self._computed:
            # An interrupt may have lost an entry of `_ended`, so look at the tickets first.
            self._computed |= {row: None for row in self._submitted if self._is_computed(row)}
            if not self._computed:
                with self._computing:
                    ended = self._ended.get()
                self._note_computed(ended())
        for row in self._computed:
            self.finish(row)
            return True
        return False

    @property
    def some_ended(self) -> bool:
        """Whether finished updates may wait for `poll`."""
        return bool(self._computed) or not self._ended.empty()

    def _read_ended(self) -> None:
        while not self._ended.empty():
            self._note_computed(self._ended.get()())

    def _note_computed(self, row: Unit | None) -> None:
        if row is not None and self._is_computed(row):  # else the entry is of an earlier update of the unit
            self._computed[row] = None

    def poll(self) -> None:
        """Poll completions: close updates that are computed and written. Does not block."""
        if not self._computed and self._ended.empty():
            return
        self._read_ended()
        for row in list(self._computed):
            if row.ticket is not None and row.ticket.done():
                self._close(row)

    def finish(self, row: Unit) -> None:
        """Block until the unit's submitted update is computed and written."""
        ticket = row.ticket
        assert ticket is not None
        with self._computing:
            self._pipeline.wait_computed(ticket)
        with self._counters.stalled(StallCause.DISK_WRITE):
            ticket.result()
        self._close(row)

    def _close(self, row: Unit) -> None:
        """End a computed and written update: release its gradients and parameters. Raises if the update failed."""
        with self._critical:
            ticket, write = row.finish()
            self._submitted.pop(row, None)
            self._computed.pop(row, None)
            for move in ticket.inputs:  # a withdrawn update has not waited for its inputs
                move.wait(self._counters)
            if not row.keeps_grads:
                self._grads.drop_after_update(row.grads)
            elif ticket.drops_grads:
                self._grads.drop_reconstructable(row.grads)
            else:
                self._grads.keep_after_update(row.grads)
                self.gradients_may_spill = True
            self._params.close_host(row.params, changed=ticket.chosen)  # a withdrawn update changes nothing
            # Either call raises if the update failed, because the ticket is the transfer of the move `write`.
            if write is None:
                ticket.result()
            else:
                row.params.field.finish_move(write)
            self.finished.append(row)


def _update_segment(
    layout: StateLayout, segment: Segment, param: torch.Tensor, grad: torch.Tensor, fields: Fields
) -> None:
    """Update a segment of a unit whose states are on the device."""
    here, part = slice(segment.start, segment.stop), layout.narrow(fields, segment.start, segment.stop)
    update_on_device(
        segment.rule,
        param[here],
        grad[here],
        master=None if layout.master is None else part[layout.master],
        first=None if layout.first is None else part[layout.first],
        second=None if layout.second is None else part[layout.second],
    )


def _note_ended(ended: SimpleQueue[ReferenceType[Unit]], row: ReferenceType[Unit], _: Future[None]) -> None:
    ended.put(row)
