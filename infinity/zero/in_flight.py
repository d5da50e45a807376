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
from infinity.optim.formats import StateLayout
from infinity.optim.jobs import Segment, UpdateJob, UpdateTicket
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.undo_log import Image
from infinity.telemetry import Counters, StallCause
from infinity.tiers import DeviceGrads, Fields, GradStore, Memory, Params, StateStore
from infinity.zero.unit import Ahead, OldParams, Unit

FreeGradients = Callable[[Unit], bool]


class InFlight:
    """The units whose updates are due, in the pipeline, or finished.

    Args:
        there: gradients of units whose states are on the device; None if there are no such units.

    Attributes:
        finished: units whose updates are finished; the reader removes them.
        speculative: units with speculative updates, in order of submission; only entries whose row agrees count.
        some_rest: an update that may be rolled back has given back gradients, which may spill; the reader resets it.
    """

    def __init__(
        self,
        params: Params,
        grads: GradStore,
        there: DeviceGrads | None,
        states: StateStore,
        pipeline: UpdatePipeline,
        counters: Counters,
    ) -> None:
        self.finished: list[Unit] = []
        self.some_rest = False
        self.speculative: dict[Unit, None] = {}
        self._params = params
        self._handing_over = params.handing_over
        self._grads = grads
        self._pipeline = pipeline
        self._counters = counters
        self._there = there
        self._states = states
        self._ended: SimpleQueue[int] = SimpleQueue()  # units whose updates are computed or have failed
        # These give the order of units; their state is in the rows. An interrupt may leave a stale entry here.
        self._due: dict[Unit, None] = {}
        self._submitted: dict[int, Unit] = {}
        self._computed: dict[Unit, None] = {}  # subset of `_submitted`; their writes may be in flight

    def __bool__(self) -> bool:
        return bool(self._due or self._submitted)

    @property
    def due(self) -> list[Unit]:
        """Units whose updates are due and not submitted, in the order of `ask`."""
        return [each for each in self._due if each.due is not None]

    @property
    def submitted(self) -> list[Unit]:
        return list(self._submitted.values())

    def ask(self, each: Unit, segments: tuple[Segment, ...]) -> None:
        self._due[each] = None
        each.ask(segments)

    # Into the pipeline #

    def update_on_device(self, each: Unit) -> None:
        """Run the due update of a unit whose states are on the device.

        It is queued on the compute stream, before all later computation, so that nobody needs to wait for it.
        """
        with self._handing_over:
            assert self._there is not None
            segments = self._take_due(each)
            param, grad = self._params.begin_device_change(each.params), self._there.tensor(each.grads)
            with self._states.changing_there(each.index) as fields:
                for segment in segments:
                    _update_there(self._pipeline.layout, segment, param, grad, fields)
            self._params.end_device_change(each.params)
            self._there.drop(each.grads)
            self.finished.append(each)

    def submit(self, each: Unit, write: bool, needed: int) -> None:
        """Submit the due update of a unit in memory. Its gradients have room, and its last update is finished.

        Args:
            write: write the new parameters home, tile by tile as they are updated.
            needed: time of the unit's next use; among updates that no thread waits for, the lowest goes first.
        """
        # The home of a dirty unit is stale, and this update may overwrite only a part of it.
        write = write and not each.params.is_dirty()
        with self._handing_over:
            self.open_host(each)
            tiles = None if each.begun is None else self._pipeline.all_tiles(each.index) - each.begun
            self._hand_over(each, self._take_due(each), write=write, needed=needed, tiles=tiles)

    def _take_due(self, each: Unit) -> tuple[Segment, ...]:
        segments = each.take_due()
        self._due.pop(each, None)
        return segments

    def _hand_over(
        self,
        each: Unit,
        segments: tuple[Segment, ...],
        *,
        write: bool,
        needed: int,
        tiles: frozenset[int] | None,
        before: Mapping[int, Image] | None = None,
        tells_grads: bool = False,
        tells_param: bool = False,
    ) -> UpdateTicket:
        """Submit an update to the pipeline. `before` is its room in the undo log; None for an update that is not
        speculative."""
        unit, params = each.index, each.params
        grad, arriving = self._grads.hand_over(each.grads)
        touching = self._params.begin_update(params)
        spec = params.spec
        trained = spec.trainable_numel // spec.sharding.count
        job = UpdateJob(
            unit=unit,
            param=params.shard[:trained],
            grad=grad,
            segments=segments,
            ready=(*touching, *arriving),
            write=params.write if write else None,
            # Independent of placement and resume, for equal bits. A rank that holds only padding has no segments.
            seed=segments[0].rule.step << 24 | unit if segments else 0,
            first=spec.sharding.rank * trained,
            needed=needed,
            tiles=tiles,
            before=before or {},
            tells_grads=tells_grads,
            tells_param=tells_param,
        )
        ticket = self._pipeline.submit(job)
        ticket.computed.add_done_callback(partial(_put, self._ended, unit))
        written = params.write_through(ticket) if write else None
        reconstructable = self._pipeline.undoing.can_recover_param(segments, self._grads.dtype)
        self._submitted[unit] = each
        each.submit(ticket, written, keeps=before is not None, reconstructable=reconstructable)
        return ticket

    # Speculative updates, see [Note: updates ahead] #

    @property
    def ahead(self) -> list[Unit]:
        """Units with speculative updates, in the pipeline or finished."""
        return [each for each in self.speculative if each.ahead is not None]

    def needs_memory(self, each: Unit) -> bool:
        """Whether a rollback needs the unit in memory: its parameters live on NVMe and have to be reconstructed."""
        assert each.ahead is not None
        on_drive = each.params.home is Memory.NVME
        return on_drive and each.ahead.old_params is OldParams.STATES

    def can_run_ahead(self, each: Unit, write: bool, needed: int) -> bool:
        """Whether at least one tile of the unit can have the expected update speculatively.

        The unit and its gradients must be in memory and idle. If the undo log is full, speculative updates of units
        that the next forward pass needs later are withdrawn, as long as they have not started: so the updates that
        remain once the norm is known are of the units used last.
        """
        old_params = self._old_params(each, write)
        if self._can_undo(each, old_params):
            return True
        later = self._needed_later(needed)
        if not self._can_undo(each, old_params, without=[ticket for _, ticket in later]):
            return False
        while not (can_undo := self._can_undo(each, old_params)) and later:
            self._withdraw(*later.pop())
        return bool(can_undo)

    def _needed_later(self, needed: int) -> list[tuple[Unit, UpdateTicket]]:
        """Speculative updates that use the undo log and are needed later than `needed`, the latest last."""
        found = [
            (each, each.ticket)
            for each in self.speculative
            if each.ticket is not None and each.ahead is not None and each.ahead.old_params is OldParams.IMAGES
        ]
        return sorted((pair for pair in found if pair[1].job.needed > needed), key=lambda pair: pair[1].job.needed)

    def _withdraw(self, each: Unit, ticket: UpdateTicket) -> None:
        """Cancel a speculative update unless the worker has chosen it already."""
        with self._handing_over:
            if self._pipeline.withdraw(ticket):
                self._decide(each)
                self.finish(each)

    def _decide(self, each: Unit) -> Ahead:
        """Clear the unit's speculative update, and return it."""
        ahead = each.decide()
        self.speculative.pop(each, None)
        return ahead

    def _old_params(self, each: Unit, write: bool) -> OldParams:
        """Return where the expected update would keep the unit's old parameters.

        Args:
            write: prefer a write to reconstruction: the unit leaves memory, or its home must stay up to date.
        """
        params, undoing, foreseen = each.params, self._pipeline.undoing, each.foreseen
        assert foreseen is not None
        can_undo, can_put_back = params.can_undo(), params.can_put_back()
        if can_undo and write:
            return OldParams.SLOTS
        may_be_told = can_put_back or (params.is_double_buffered and not self._params.keeps_steps)
        if (
            may_be_told
            and undoing.can_recover_param(foreseen.segments, self._grads.dtype)
            and undoing.keeps_all(each.index)
        ):
            return OldParams.STATES
        if can_undo:
            return OldParams.SLOTS
        return OldParams.IMAGES if can_put_back else OldParams.NOWHERE

    def _can_undo(self, each: Unit, old_params: OldParams, without: Collection[UpdateTicket] = ()) -> frozenset[int]:
        """Indices of the tiles whose update can be rolled back, with the updates in `without` withdrawn."""
        if old_params is OldParams.NOWHERE:
            return frozenset()
        return self._pipeline.can_undo(each.index, param=old_params is OldParams.IMAGES, without=without)

    def run_ahead(self, each: Unit, write: bool, needed: int) -> None:
        """Submit the speculative update of a unit that `can_run_ahead`.

        Args:
            write: see `submit`; the parameters may also be written only to keep the old ones in the other slot.
        """
        unit, foreseen = each.index, each.foreseen
        assert foreseen is not None
        segments = foreseen.segments
        with self._handing_over:
            self.open_host(each)
            old_params = self._old_params(each, write)
            tiles = self._can_undo(each, old_params)
            before = self._pipeline.undoing.keep_before(unit, tiles, param=old_params is OldParams.IMAGES)
            tells_grads = (
                foreseen.grads_may_leave
                and not before
                and each.spills
                and tiles == self._pipeline.all_tiles(unit)
                and self._pipeline.undoing.can_recover(segments, self._grads.dtype)
            )
            ticket = self._hand_over(
                each,
                segments,
                write=old_params is OldParams.SLOTS,
                needed=needed,
                tiles=tiles,
                before=before,
                tells_grads=tells_grads,
                tells_param=old_params is OldParams.STATES,
            )
            self.speculative[each] = None
            each.run_ahead(Ahead(segments, tiles, ticket, old_params))

    def confirm(self, each: Unit) -> None:
        """Commit the speculative update; if it left out tiles, their update is due."""
        with self._handing_over:
            in_part = each.ahead is not None and each.ahead.tiles != self._pipeline.all_tiles(each.index)
            if in_part:
                self._due[each] = None
            ahead = each.commit(in_part=in_part)
            self.speculative.pop(each, None)
            if each.ticket is not None and not in_part:
                each.keeps = False
            elif not in_part:
                self._grads.drop(each.grads)
            self._pipeline.undoing.forget_before(ahead.ticket)

    def undo(self, rows: Sequence[Unit], free_gradients: FreeGradients, *, grads: bool = True) -> list[Unit]:
        """Roll back speculative updates: restore parameters and optimizer states.

        Args:
            free_gradients: frees memory for a unit's gradients; False if there is none to free.
            grads: restore the gradients, too. If False, gradients that would have to be reconstructed are dropped.

        Returns:
            Units whose parameters were restored from their slots on NVMe. Their resident copy is stale.

        Raises:
            InfinityError: a module uses one of the units.
            StorageError: the old values cannot be read.
            CapacityError: host memory has no room for the gradients.
        """
        for each in rows:
            if each.params.computed_on.pins > int(each.ticket is not None):
                raise InfinityError(
                    f"the values of unit `{each.name}` are asked for while backward uses it, after its update has "
                    'begun: set tiering.update_schedule to "deferred"'
                )
        with self._handing_over:
            aheads = [each.ahead for each in rows]
            tickets = [ahead.ticket for ahead in aheads if ahead is not None]
            submitted = [each for each in self._submitted.values() if each in rows]
            for each in submitted:
                assert each.ticket is not None
                each.ticket.recovers = False  # its gradients are still in memory
            self._pipeline.stop(tickets)
            for each in submitted:
                self.finish(each)
            for each in rows:
                self._recover(each, free_gradients, grads=grads, param=True)
            self._pipeline.undo(tickets)
            behind: list[Unit] = []
            for each in rows:
                assert each.ahead is not None
                if each.ahead.old_params is OldParams.SLOTS:
                    self._params.undo(each.params)
                    behind.append(each)
                elif each.ahead.old_params is OldParams.IMAGES:
                    self._put_back(each)
                self._pipeline.undoing.forget_before(each.ahead.ticket)
                self._decide(each)
        return behind

    def _recover(self, each: Unit, free_gradients: FreeGradients, *, grads: bool, param: bool) -> None:
        """Reconstruct the gradients and parameters that a speculative update has not kept.

        Args:
            grads: the gradients, into host memory, from which they may spill; if False, drop them.
            param: the parameters.
        """
        held, ahead = each.grads, each.ahead
        assert ahead is not None
        param = param and ahead.old_params is OldParams.STATES
        if held.is_elsewhere and not grads:
            self._grads.drop(held)
        grads = held.is_elsewhere
        if not grads and not param:
            return
        with self._handing_over:
            buffer = self._room_for_grads(each, free_gradients) if grads else None
            with self._changing(each) if param else nullcontext() as flat:
                self._pipeline.recover(ahead.ticket, grad=buffer, param=flat)
            if grads:
                self._grads.rest(held)
                self.some_rest = True

    def _room_for_grads(self, each: Unit, free_gradients: FreeGradients) -> torch.Tensor:
        while (buffer := self._grads.restore(each.grads)) is None:
            if not free_gradients(each):
                raise CapacityError(
                    f"no host memory is left for the gradients of unit `{each.name}`, whose update is undone: raise "
                    "tiering.host_memory"
                )
        return buffer

    def _put_back(self, each: Unit) -> None:
        """Restore the parameters from the undo log."""
        assert each.ahead is not None
        with self._changing(each) as flat:
            for start, values in self._pipeline.undoing.params_before(each.ahead.ticket):
                flat[start : start + values.numel()].copy_(values)

    @contextmanager
    def _changing(self, each: Unit) -> Iterator[torch.Tensor]:
        """Yield the unit's flat parameters where updates change them."""
        self.open_host(each)
        self._params.host_wait(each.params)
        for move in self._params.begin_update(each.params):
            move.wait(self._counters)
        yield each.params.shard
        self._params.close_host(each.params)

    def finish_ahead(self, each: Unit, free_gradients: FreeGradients) -> None:
        """Wait for a speculative update whose gradients are about to change, and mark it for rollback."""
        if each.ticket is not None:
            self.finish(each)
        self._recover(each, free_gradients, grads=True, param=False)
        assert each.ahead is not None
        each.ahead = replace(each.ahead, segments=())

    def open_host(self, each: Unit) -> None:
        """Start to bring the unit's parameters to where they are changed. Block for memory that updates or fetches
        hold.

        Raises:
            CapacityError: they hold none.
        """
        while not self._params.open_host(each.params):
            if not self.finish_one() and not self._finish_fetch():
                raise CapacityError(
                    f"no host memory is left for the values of unit `{each.name}` on their way: "
                    "look at fewer units at once, or raise tiering.host_memory"
                )

    def _finish_fetch(self) -> bool:
        """Wait for a fetch through host memory. Return False if there is none."""
        due = {each.params for each in self.due}
        for params in self._params.passing:
            if params not in due:
                self._params.fetch_wait(params)
                return True
        return False

    @property
    def all_computed(self) -> bool:
        """Whether no update is still to be computed and none has failed. Writes may be in flight."""
        tickets = [each.ticket for each in self._submitted.values() if each.ticket is not None]
        return not self._due and all(each.computed.done() and each.computed.exception() is None for each in tickets)

    @staticmethod
    def _is_computed(each: Unit) -> bool:
        return each.ticket is not None and each.ticket.computed.done()

    # Out of it #

    def wait_computed(self, each: Unit) -> None:
        """Block until the unit's update is computed, and upload the new values as they come. Writes home may be in
        flight."""
        ticket, params = each.ticket, each.params
        if ticket is not None:
            with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
                sends = params.send_part if params.can_send_parts() else None
                self._pipeline.wait_computed(ticket, sends)
            self._params.end_change(params)

    def finish_one(self) -> bool:
        """Wait for one update, the first to end. Return False if there is none."""
        self._take_ended()
        while self._submitted and not self._computed:
            # an interrupt may have lost an entry of `_ended`
            self._computed |= {each: None for each in self._submitted.values() if self._is_computed(each)}
            if not self._computed:
                with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
                    unit = self._ended.get()
                self._note_computed(unit)
        for each in self._computed:
            self.finish(each)
            return True
        return False

    @property
    def some_ended(self) -> bool:
        """Whether finished updates may wait for `settle`."""
        return bool(self._computed) or not self._ended.empty()

    def _take_ended(self) -> None:
        while not self._ended.empty():
            self._note_computed(self._ended.get())

    def _note_computed(self, unit: int) -> None:
        each = self._submitted.get(unit)
        if each is not None and self._is_computed(each):  # and the queue's word is not of an earlier update
            self._computed[each] = None

    def settle(self) -> None:
        """Note updates that are computed and written."""
        if not self._computed and self._ended.empty():
            return
        self._take_ended()
        for each in list(self._computed):
            if each.ticket is not None and each.ticket.done():
                self._note(each)

    def finish(self, each: Unit) -> None:
        """Block until the unit's submitted update is computed and written."""
        ticket = each.ticket
        assert ticket is not None
        with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
            self._pipeline.wait_computed(ticket)
        with self._counters.stalled(StallCause.DISK_WRITE):
            ticket.result()
        self._note(each)

    def _note(self, each: Unit) -> None:
        with self._handing_over:
            ticket, write = each.finish()
            self._submitted.pop(each.index, None)
            self._computed.pop(each, None)
            for move in ticket.missing:  # a withdrawn update has not waited for its inputs
                move.wait(self._counters)
            if not each.keeps:
                self._grads.used(each.grads)
            elif ticket.recovers:
                self._grads.left(each.grads)
            else:
                self._grads.returned(each.grads)
                self.some_rest = True
            self._params.close_host(each.params, changed=ticket.chosen)  # a withdrawn update changes nothing
            if write is not None:
                each.params.field.finish_move(write)
            ticket.result()  # raises if the update failed
            self.finished.append(each)


def _update_there(
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


def _put(ended: SimpleQueue[int], unit: int, _: Future[None]) -> None:
    """Not given the row: the row leads to the update's ticket, the ticket to this callback."""
    ended.put(unit)
