"""Updates, from the moment they are due until their values are in memory and written.

[Note: updates ahead]
If the global norm decides on an update (clipping, skipped steps), the update may run *speculatively*, before the norm
is known, as if the norm were small. It runs on the tiles of a unit whose old version stays in another slot on NVMe
(slots.py) or fits into the undo log (undo_log.py). Once the norm is known, the update is *committed*, and the
remaining tiles are updated, or it is *rolled back*. Until then the unit keeps its gradients, unless they can be
*reconstructed* from the two versions of all its states (see [Note: lost gradients] in csrc/adam/recovery.h): then
their memory serves other units. Parameters can be reconstructed in the same way, so parameters that stay in memory need
no slots and no write. Access to the unit's values or gradients from outside rolls the update back first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import torch

from infinity.errors import CapacityError, InfinityError
from infinity.kernels import update_on_device
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.ticket import Segment, UpdateTicket
from infinity.optim.undo_log import Image
from infinity.telemetry import Counters, StallCause
from infinity.tiers import DeviceGrads, Fields, GradStore, Memory, Params, StateStore
from infinity.tiers.state_layout import StateLayout
from infinity.zero.unit import Ahead, OldParams, Unit

FreeGradients = Callable[[Unit], bool]


class InFlight:
    """The units whose updates are due, in the pipeline, or finished.

    Args:
        device_grads: gradients of units whose states are on the device; None if there are no such units.

    Attributes:
        finished: units whose updates are finished; the reader removes them.
        speculative: units with speculative updates, in order of submission. After an interrupt it may contain a unit
            without such an update, which `ahead` skips.
        gradients_returned: whether a speculative update has ended and returned its gradients, which may spill now; the
            reader resets it.
    """

    def __init__(
        self,
        params: Params,
        grads: GradStore,
        device_grads: DeviceGrads | None,
        states: StateStore,
        pipeline: UpdatePipeline,
        counters: Counters,
    ) -> None:
        self.finished: list[Unit] = []
        self.gradients_returned = False
        self.speculative: dict[Unit, None] = {}
        self._params = params
        self._critical = params.critical
        self._grads = grads
        self._pipeline = pipeline
        self._counters = counters
        self._device_grads = device_grads
        self._states = states
        self._ended: SimpleQueue[int] = SimpleQueue()  # units whose updates are computed or have failed
        # The containers below keep only the order of units. The rows have the state: after an interrupt, an entry may
        # contradict its row.
        self._due: dict[Unit, None] = {}
        self._submitted: dict[int, Unit] = {}
        self._computed: dict[Unit, None] = {}  # subset of `_submitted`; their writes may be in flight

    @property
    def is_busy(self) -> bool:
        """Whether any update is unfinished, or waits for its unit."""
        return bool(self._due or self._submitted)

    @property
    def due(self) -> list[Unit]:
        """Units whose updates are due and not submitted, the longest due first."""
        return [row for row in self._due if row.due is not None]

    @property
    def submitted(self) -> list[Unit]:
        return list(self._submitted.values())

    def ask(self, row: Unit, segments: tuple[Segment, ...]) -> None:
        """Set the unit's update of this step; `submit` or `update_on_device` takes it."""
        self._due[row] = None
        row.ask(segments)

    # Into the pipeline #

    def update_on_device(self, row: Unit) -> None:
        """Run the due update of a unit whose states are on the device.

        The kernels are queued on the compute stream. Later work on that stream follows them, so no thread waits.
        """
        with self._critical:
            assert self._device_grads is not None
            segments = self._take_due(row)
            param, grad = self._params.begin_device_change(row.params), self._device_grads.tensor(row.grads)
            with self._states.changing_there(row.index) as fields:
                for segment in segments:
                    _update_segment(self._pipeline.layout, segment, param, grad, fields)
            self._params.end_device_change(row.params)
            self._device_grads.drop(row.grads)
            self.finished.append(row)

    def submit(self, row: Unit, write: bool, needed: int) -> None:
        """Submit the due update of a unit in memory. Its gradients have room, and its last update is finished.

        Args:
            write: write the new parameters home, tile by tile as they are updated.
            needed: time of the unit's next use; among updates that no thread waits for, the lowest goes first.
        """
        # The home of a dirty unit is stale, and this update may overwrite only a part of it.
        write = write and not row.params.is_dirty()
        with self._critical:
            self.open_host(row)
            tiles = None if row.begun is None else row.states.indices - row.begun
            self._submit_job(row, self._take_due(row), write=write, needed=needed, tiles=tiles)

    def _take_due(self, row: Unit) -> tuple[Segment, ...]:
        segments = row.take_due()
        self._due.pop(row, None)
        return segments

    def _submit_job(
        self,
        row: Unit,
        segments: tuple[Segment, ...],
        *,
        write: bool,
        needed: int,
        tiles: frozenset[int] | None,
        before: Mapping[int, Image] | None = None,
        reconstructs_grads: bool = False,
        reconstructs_param: bool = False,
    ) -> UpdateTicket:
        """Submit an update to the pipeline.

        Args:
            before: the update's images of the undo log, by tile; None if the update is not speculative.
        """
        unit, params = row.index, row.params
        grad, arriving = self._grads.take_for_update(row.grads)
        touching = self._params.begin_update(params)
        spec = params.spec
        trained = spec.trainable_numel // spec.sharding.count
        ticket = UpdateTicket(
            unit=unit,
            param=params.shard[:trained],
            grad=grad,
            segments=segments,
            missing=(*touching, *arriving),
            write=params.write if write else None,
            # For equal bits, the seed depends on neither placement nor resume. A rank's shard may be only padding.
            seed=segments[0].rule.step << 24 | unit if segments else 0,
            first=spec.sharding.rank * trained,
            needed=needed,
            only=tiles,
            before=before or {},
            reconstructs_grads=reconstructs_grads,
            reconstructs_param=reconstructs_param,
        )
        self._pipeline.submit(ticket)
        ticket.computed.add_done_callback(partial(_note_ended, self._ended, unit))
        written = params.write_through(ticket) if write else None
        reconstructable = self._pipeline.rollback.can_recover_param(segments, self._grads.dtype)
        self._submitted[unit] = row
        row.submit(ticket, written, keeps=before is not None, reconstructable=reconstructable)
        return ticket

    # Speculative updates, see [Note: updates ahead] #

    @property
    def ahead(self) -> list[Unit]:
        """Units with speculative updates, in the pipeline or finished."""
        return [row for row in self.speculative if row.ahead is not None]

    def needs_memory(self, row: Unit) -> bool:
        """Whether the unit must be in memory for a rollback, because its old parameters are reconstructed there."""
        assert row.ahead is not None
        on_drive = row.params.home is Memory.NVME
        return on_drive and row.ahead.old_params is OldParams.STATES

    def can_speculate(self, row: Unit, write: bool, needed: int) -> bool:
        """Whether the expected update of the unit can be speculative, for at least one tile.

        The unit and its gradients must be in memory and idle. If the undo log is full, this withdraws speculative
        updates that have not started, of units that the next forward pass uses later. So the updates that remain when
        the norm is known belong to the units that are used last.
        """
        old_params = self._old_params(row, write)
        if self._can_roll_back(row, old_params):
            return True
        later = self._needed_later(needed)
        if not self._can_roll_back(row, old_params, without=[ticket for _, ticket in later]):
            return False
        while not (can_roll_back := self._can_roll_back(row, old_params)) and later:
            self._withdraw(*later.pop())
        return bool(can_roll_back)

    def _needed_later(self, needed: int) -> list[tuple[Unit, UpdateTicket]]:
        """Return speculative updates in the undo log whose units are used after `needed`, the latest use last."""
        found = [
            (row, row.ticket)
            for row in self.speculative
            if row.ticket is not None and row.ahead is not None and row.ahead.old_params is OldParams.IMAGES
        ]
        return sorted((pair for pair in found if pair[1].needed > needed), key=lambda pair: pair[1].needed)

    def _withdraw(self, row: Unit, ticket: UpdateTicket) -> None:
        """Cancel a speculative update, unless the worker has already chosen it."""
        with self._critical:
            if self._pipeline.withdraw(ticket):
                self._clear_ahead(row)
                self.finish(row)

    def _clear_ahead(self, row: Unit) -> None:
        """Clear the unit's speculative update."""
        row.decide()
        self.speculative.pop(row, None)

    def _old_params(self, row: Unit, write: bool) -> OldParams:
        """Return where the expected update would keep the unit's old parameters.

        Args:
            write: whether the update writes the parameters home in any case; the other slot is then preferred.
        """
        params, rollback, foreseen = row.params, self._pipeline.rollback, row.foreseen
        assert foreseen is not None
        can_roll_back, can_put_back = params.can_roll_back(), params.can_put_back()
        if can_roll_back and write:
            return OldParams.SLOTS
        is_reconstructable = can_put_back or (params.is_double_buffered and not self._params.keeps_steps)
        if (
            is_reconstructable
            and rollback.can_recover_param(foreseen.segments, self._grads.dtype)
            and rollback.keeps_all(row.states)
        ):
            return OldParams.STATES
        if can_roll_back:
            return OldParams.SLOTS
        return OldParams.IMAGES if can_put_back else OldParams.NOWHERE

    def _can_roll_back(
        self, row: Unit, old_params: OldParams, without: Collection[UpdateTicket] = ()
    ) -> frozenset[int]:
        """Return the indices of tiles whose update could be rolled back if the updates in `without` were withdrawn."""
        if old_params is OldParams.NOWHERE:
            return frozenset()
        return self._pipeline.can_roll_back(row.states, param=old_params is OldParams.IMAGES, without=without)

    def speculate(self, row: Unit, write: bool, needed: int) -> None:
        """Submit the speculative update of a unit that `can_speculate`.

        Args:
            write: see `submit`. If it is False, the parameters may still be written, so that the old ones stay in the
                other slot.
        """
        foreseen = row.foreseen
        assert foreseen is not None
        segments = foreseen.segments
        with self._critical:
            self.open_host(row)
            old_params = self._old_params(row, write)
            tiles = self._can_roll_back(row, old_params)
            before = self._pipeline.rollback.keep_before(row.states, tiles, param=old_params is OldParams.IMAGES)
            reconstructs_grads = (
                foreseen.grads_may_leave
                and not before
                and row.spills
                and tiles == row.states.indices
                and self._pipeline.rollback.can_recover(segments, self._grads.dtype)
            )
            ticket = self._submit_job(
                row,
                segments,
                write=old_params is OldParams.SLOTS,
                needed=needed,
                tiles=tiles,
                before=before,
                reconstructs_grads=reconstructs_grads,
                reconstructs_param=old_params is OldParams.STATES,
            )
            self.speculative[row] = None
            row.speculate(Ahead(segments, tiles, ticket, old_params))

    def commit(self, row: Unit) -> None:
        """Commit the speculative update. If it left out tiles, their update is due now."""
        with self._critical:
            in_part = row.ahead is not None and row.ahead.tiles != row.states.indices
            if in_part:
                self._due[row] = None
            ahead = row.commit(in_part=in_part)
            self.speculative.pop(row, None)
            if row.ticket is not None and not in_part:
                row.keeps = False
            elif not in_part:
                self._grads.drop(row.grads)
            self._pipeline.rollback.forget_before(ahead.ticket)

    def roll_back(self, rows: Sequence[Unit], free_gradients: FreeGradients, *, grads: bool = True) -> list[Unit]:
        """Roll back speculative updates: restore parameters and optimizer states.

        Args:
            free_gradients: frees memory for a unit's gradients; returns False if there is none to free.
            grads: restore the gradients, too. If False, gradients that would have to be reconstructed are dropped.

        Returns:
            Units whose parameters were restored from their slots on NVMe. Their resident copy is stale.

        Raises:
            InfinityError: a module uses one of the units.
            StorageError: the old values cannot be read.
            CapacityError: host memory has no room for the gradients.
        """
        for row in rows:
            if row.params.computed_on.pins > int(row.ticket is not None):
                raise InfinityError(
                    f"the values of unit `{row.name}` are asked for while backward uses it, after its update has "
                    'begun: set tiering.update_schedule to "deferred"'
                )
        with self._critical:
            aheads = [row.ahead for row in rows]
            tickets = [ahead.ticket for ahead in aheads if ahead is not None]
            submitted = [row for row in self._submitted.values() if row in rows]
            for row in submitted:
                assert row.ticket is not None
                row.ticket.recovers = False  # its gradients are still in memory
            self._pipeline.stop(tickets)
            for row in submitted:
                self.finish(row)
            for row in rows:
                self._recover(row, free_gradients, grads=grads, param=True)
            self._pipeline.roll_back(tickets)
            stale: list[Unit] = []
            for row in rows:
                assert row.ahead is not None
                if row.ahead.old_params is OldParams.SLOTS:
                    self._params.roll_back(row.params)
                    stale.append(row)
                elif row.ahead.old_params is OldParams.IMAGES:
                    self._restore_from_undo_log(row)
                self._pipeline.rollback.forget_before(row.ahead.ticket)
                self._clear_ahead(row)
        return stale

    def _recover(self, row: Unit, free_gradients: FreeGradients, *, grads: bool, param: bool) -> None:
        """Reconstruct the old values that a speculative update has not kept.

        Args:
            grads: reconstruct the gradients, if they were not kept; if False, drop them.
            param: reconstruct the parameters, if they were not kept.
        """
        held, ahead = row.grads, row.ahead
        assert ahead is not None
        param = param and ahead.old_params is OldParams.STATES
        if held.is_elsewhere and not grads:
            self._grads.drop(held)
        grads = held.is_elsewhere
        if not grads and not param:
            return
        with self._critical:
            buffer = self._room_for_grads(row, free_gradients) if grads else None
            with self._changing(row) if param else nullcontext() as flat:
                self._pipeline.recover(ahead.ticket, grad=buffer, param=flat)
            if grads:
                self._grads.rest(held)
                self.gradients_returned = True

    def _room_for_grads(self, row: Unit, free_gradients: FreeGradients) -> torch.Tensor:
        while (buffer := self._grads.restore(row.grads)) is None:
            if not free_gradients(row):
                raise CapacityError(
                    f"no host memory is left for the gradients of unit `{row.name}`, whose update is rolled back: "
                    "raise tiering.host_memory"
                )
        assert row.ahead is not None
        # Parameters without a gradient and the padding are not reconstructed, but the norm of a shard includes them.
        end = 0
        for segment in sorted(row.ahead.ticket.segments, key=lambda each: each.start):
            buffer[end : segment.start].zero_()
            end = segment.stop
        buffer[end:].zero_()
        return buffer

    def _restore_from_undo_log(self, row: Unit) -> None:
        """Restore the parameters from the undo log."""
        assert row.ahead is not None
        with self._changing(row) as flat:
            for start, values in self._pipeline.rollback.params_before(row.ahead.ticket):
                flat[start : start + values.numel()].copy_(values)

    @contextmanager
    def _changing(self, row: Unit) -> Iterator[torch.Tensor]:
        """Yield this rank's shard of the parameters, in the memory in which updates change it."""
        self.open_host(row)
        self._params.host_wait(row.params)
        for move in self._params.begin_update(row.params):
            move.wait(self._counters)
        yield row.params.shard
        self._params.close_host(row.params)

    def finish_ahead(self, row: Unit, free_gradients: FreeGradients) -> None:
        """Wait for a speculative update whose gradients are about to change, and mark it for rollback."""
        if row.ticket is not None:
            self.finish(row)
        self._recover(row, free_gradients, grads=True, param=False)
        assert row.ahead is not None
        row.ahead = replace(row.ahead, segments=())

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
        for params in self._params.passing:
            if params not in due:
                self._params.fetch_wait(params)
                return True
        return False

    @property
    def all_computed(self) -> bool:
        """Whether all updates are computed and none has failed. Writes may be in flight."""
        tickets = [row.ticket for row in self._submitted.values() if row.ticket is not None]
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
            with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
                sends = params.send_part if params.can_send_parts() else None
                self._pipeline.wait_computed(ticket, sends)
            self._params.end_change(params)

    def finish_one(self) -> bool:
        """Block until one update, the first to end, is computed and written. Return False if there is none."""
        self._read_ended()
        while self._submitted and not self._computed:
            # An interrupt may have lost an entry of `_ended`, so look at the tickets first.
            self._computed |= {row: None for row in self._submitted.values() if self._is_computed(row)}
            if not self._computed:
                with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
                    unit = self._ended.get()
                self._note_computed(unit)
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
            self._note_computed(self._ended.get())

    def _note_computed(self, unit: int) -> None:
        row = self._submitted.get(unit)
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
        with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
            self._pipeline.wait_computed(ticket)
        with self._counters.stalled(StallCause.DISK_WRITE):
            ticket.result()
        self._close(row)

    def _close(self, row: Unit) -> None:
        """Take an ended update off the row, and release its gradients and parameters. Raises if the update failed."""
        with self._critical:
            ticket, write = row.finish()
            self._submitted.pop(row.index, None)
            self._computed.pop(row, None)
            for move in ticket.missing:  # a withdrawn update has not waited for its inputs
                move.wait(self._counters)
            if not row.keeps:
                self._grads.used(row.grads)
            elif ticket.recovers:
                self._grads.left(row.grads)
            else:
                self._grads.returned(row.grads)
                self.gradients_returned = True
            self._params.close_host(row.params, changed=ticket.chosen)  # a withdrawn update changes nothing
            if write is not None:
                row.params.field.finish_move(write)
            ticket.result()  # raises if the update failed
            self.finished.append(row)


def _update_segment(
    layout: StateLayout, segment: Segment, param: torch.Tensor, grad: torch.Tensor, fields: Fields
) -> None:
    """Update a segment of a unit on the device."""
    here, part = slice(segment.start, segment.stop), layout.narrow(fields, segment.start, segment.stop)
    update_on_device(
        segment.rule,
        param[here],
        grad[here],
        master=None if layout.master is None else part[layout.master],
        first=None if layout.first is None else part[layout.first],
        second=None if layout.second is None else part[layout.second],
    )


def _note_ended(ended: SimpleQueue[int], unit: int, _: Future[None]) -> None:
    """Report an ended update by the unit's number. With the row, row, ticket and callback would form a cycle."""
    ended.put(unit)
