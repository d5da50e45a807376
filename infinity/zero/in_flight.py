"""Updates from the moment that they are due until their values are in memory and written.

[Note: updates ahead]
Where the norm of all gradients decides on an update (clipping, a step that is skipped), it may *run ahead* of it, as if
the norm were small: on those of a unit's tiles that have another slot on the drives, in which what they were before
stays (slots.py), or for which there is room for a before-image (before_images.py). When the norm is known the update is
*confirmed*, and what is left of the unit updated, or *undone*. Until then the unit keeps its gradients, or they can be
*recovered* (see [Note: lost gradients] in csrc/adam/recovery.h): both slots of all its states together tell them, so
that their memory serves other units. They tell its parameters, too, so that those that stay in memory need no slots,
and are not written. Whoever wants its values, or its gradients, has the update undone first.
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
from infinity.optim.before_images import Image
from infinity.optim.jobs import Segment, UpdateJob, UpdateTicket
from infinity.optim.pipeline import UpdatePipeline
from infinity.telemetry import Counters, StallCause
from infinity.tiers import GradStore, Memory, Params
from infinity.zero.on_device import OnDevice
from infinity.zero.unit import Ahead, OldParams, Submitted, Unit

FreeGradients = Callable[[Unit], bool]


class InFlight:
    """Which units' updates are due, which are in the pipeline, and which have been finished.

    Args:
        device: carries out the updates of units whose states are there; None where there can be none.

    Attributes:
        finished: units whose updates are over; whoever looks at them takes them out.
        speculative: units whose updates run ahead of the norm, or have done so, as far as their rows say so.
        some_rest: an update that may be undone has given gradients back, which may spill; whoever is told resets it.
    """

    def __init__(
        self,
        params: Params,
        grads: GradStore,
        pipeline: UpdatePipeline,
        counters: Counters,
        device: OnDevice | None = None,
    ) -> None:
        self.finished: list[Unit] = []
        self.some_rest = False
        self.speculative: dict[Unit, None] = {}
        self._params = params
        self._handing_over = params.handing_over
        self._grads = grads
        self._pipeline = pipeline
        self._counters = counters
        self._device = device
        self._ended: SimpleQueue[Unit] = SimpleQueue()  # units whose updates are computed, or have failed
        # Orders of units. What is so of a unit its row says: one may have been left here by an interrupt.
        self._due: dict[Unit, None] = {}
        self._submitted: dict[Unit, None] = {}
        self._computed: dict[Unit, None] = {}  # of those that are submitted; their writes may be under way

    def __bool__(self) -> bool:
        return bool(self._due or self._submitted)

    @property
    def due(self) -> list[Unit]:
        """Units whose updates are due and not submitted, in the order in which they were asked for."""
        return [each for each in self._due if each.due is not None]

    @property
    def submitted(self) -> list[Unit]:
        """Units whose updates are in the pipeline."""
        return list(self._submitted)

    def ask(self, each: Unit, segments: tuple[Segment, ...]) -> None:
        """This step's update of the unit is due."""
        self._due[each] = None
        each.ask(segments)

    # Into the pipeline #

    def update_on_device(self, each: Unit) -> None:
        """Carry out the due update of a unit whose states are on the device; it takes no time that anybody sees."""
        with self._handing_over:
            assert self._device is not None
            self._device.update(each.index, self._take_due(each))
            self.finished.append(each)

    def submit(self, each: Unit, write: bool, needed: int) -> None:
        """Submit the due update of a unit in memory, whose gradients have room, and whose last update is finished.

        Args:
            write: the new parameters are written to their home, tile by tile as they are updated.
            needed: when the unit is needed next; of those that nobody waits for the lowest goes first.
        """
        # Of a unit whose home has older values, those that this update leaves alone would stay as old there.
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
        """Hand an update to the pipeline; with `before`, one that may be undone."""
        unit = each.index
        grad, arriving = self._grads.hand_over(unit)
        touching = self._params.begin_update(unit)
        spec = self._params.specs[unit]
        trained = spec.trainable_numel // spec.sharding.count
        job = UpdateJob(
            unit=unit,
            param=self._params.host_tensor(unit)[:trained],
            grad=grad,
            segments=segments,
            ready=(*touching, *arriving),
            write=self._params.write_tile if write else None,
            # The same for every placement, and after a resume; there are none where a rank has padding alone.
            seed=segments[0].rule.step << 24 | unit if segments else 0,
            first=spec.sharding.rank * trained,
            needed=needed,
            tiles=tiles,
            before=before or {},
            tells_grads=tells_grads,
            tells_param=tells_param,
        )
        ticket = self._pipeline.submit(job)
        ticket.computed.add_done_callback(partial(_put, self._ended, each))
        written = each.params.write_through(ticket) if write else None
        reconstructable = self._pipeline.undoing.can_recover_param(segments, self._grads.dtype)
        self._submitted[each] = None
        each.submit(Submitted(ticket, written, keeps=before is not None), reconstructable=reconstructable)
        return ticket

    # Ahead of what decides on it, see [Note: updates ahead] #

    @property
    def ahead(self) -> list[Unit]:
        """Units whose updates run ahead, or have done so."""
        return [each for each in self.speculative if each.ahead is not None]

    def needs_memory(self, each: Unit) -> bool:
        """An update ahead is undone where the unit's values are in memory."""
        assert each.ahead is not None
        on_drive = each.params.home is Memory.NVME
        return on_drive and each.ahead.old_params is OldParams.STATES

    def can_run_ahead(self, each: Unit, write: bool, needed: int) -> bool:
        """Something of the update that is foreseen can be undone; the unit and its gradients are at rest.

        What has not begun of units that are needed later makes way for it: what is left of the updates when the norm is
        known is then what the next forward pass comes to last.
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
        """Updates ahead of units in memory that are needed later, and may not have begun; the last one last."""
        found = [
            (each, each.submitted.ticket)
            for each in self.speculative
            if each.submitted is not None and each.ahead is not None and each.ahead.old_params is OldParams.IMAGES
        ]
        return sorted((pair for pair in found if pair[1].job.needed > needed), key=lambda pair: pair[1].job.needed)

    def _withdraw(self, each: Unit, ticket: UpdateTicket) -> None:
        """Have an update not run ahead, unless it has begun."""
        with self._handing_over:
            if self._pipeline.withdraw(ticket):
                self._decide(each)
                self.finish(each)

    def _decide(self, each: Unit) -> Ahead:
        """The unit's speculative update is none any more."""
        ahead = each.roll_back()
        self.speculative.pop(each, None)
        return ahead

    def _old_params(self, each: Unit, write: bool) -> OldParams:
        """Where the update that is foreseen would leave what the unit's parameters are.

        Args:
            write: they are better written than told: they leave memory, or are to stay on the drive.
        """
        params, undoing, foreseen = each.params, self._pipeline.undoing, each.foreseen
        assert foreseen is not None
        can_undo, can_put_back = params.can_undo(), params.can_put_back()
        if can_undo and write:
            return OldParams.SLOTS
        may_be_told = can_put_back or (params.has_slots and not self._params.keeps_steps)
        if (
            may_be_told
            and undoing.can_recover_param(foreseen.segments, self._grads.dtype)
            and undoing.has_slots(each.index)
        ):
            return OldParams.STATES
        if can_undo:
            return OldParams.SLOTS
        return OldParams.IMAGES if can_put_back else OldParams.NOWHERE

    def _can_undo(self, each: Unit, old_params: OldParams, without: Collection[UpdateTicket] = ()) -> frozenset[int]:
        """Indices of the tiles whose update can be undone, and that of their parameters, `without` these others."""
        if old_params is OldParams.NOWHERE:
            return frozenset()
        return self._pipeline.can_undo(each.index, param=old_params is OldParams.IMAGES, without=without)

    def run_ahead(self, each: Unit, write: bool, needed: int) -> None:
        """Update what can be undone of a unit that `can_run_ahead`.

        Args:
            write: see `submit`; it may be written for its slots alone.
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
                and self._grads.shares(unit)
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
        """What ran ahead is the unit's update; what is left of it is due."""
        with self._handing_over:
            in_part = each.ahead is not None and each.ahead.tiles != self._pipeline.all_tiles(each.index)
            if in_part:
                self._due[each] = None
            ahead = each.commit(in_part=in_part)
            self.speculative.pop(each, None)
            if each.submitted is not None and not in_part:
                each.submitted.keeps = False
            elif not in_part:
                self._grads.drop(each.index)
            self._pipeline.undoing.forget_before(ahead.ticket)

    def undo(self, rows: Sequence[Unit], free_gradients: FreeGradients, *, grads: bool = True) -> list[Unit]:
        """The units are what they were before they were updated ahead.

        Args:
            free_gradients: frees memory for a unit's gradients; False if there is none.
            grads: they have their gradients again, too; else those that an update has are nothing any more.

        Returns:
            Those that are so on the drives alone: what is computed on is to be read again.

        Raises:
            InfinityError: a module uses one of them.
            StorageError: what they were cannot be read again.
            CapacityError: there is no room for their gradients.
        """
        for each in rows:
            if self._params.is_pinned(each.index, times=int(each.submitted is not None)):
                raise InfinityError(
                    f"the values of unit `{each.name}` are asked for while backward uses it, after its update has "
                    'begun: set tiering.update_schedule to "deferred"'
                )
        with self._handing_over:
            aheads = [each.ahead for each in rows]
            tickets = [ahead.ticket for ahead in aheads if ahead is not None]
            submitted = [each for each in self._submitted if each in rows]
            for each in submitted:
                assert each.submitted is not None
                each.submitted.ticket.recovers = False  # its gradients are still here
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
                    self._params.undo(each.index)
                    behind.append(each)
                elif each.ahead.old_params is OldParams.IMAGES:
                    self._put_back(each)
                self._pipeline.undoing.forget_before(each.ahead.ticket)
                self._decide(each)
        return behind

    def _recover(self, each: Unit, free_gradients: FreeGradients, *, grads: bool, param: bool) -> None:
        """Have what the states tell of before an update that ran ahead, which it has not left anywhere.

        Args:
            grads: the unit's gradients, in memory or on their way to the drive; else they are nothing any more.
            param: its parameters.
        """
        unit, ahead = each.index, each.ahead
        assert ahead is not None
        param = param and ahead.old_params is OldParams.STATES
        if self._grads.is_elsewhere(unit) and not grads:
            self._grads.drop(unit)
        grads = self._grads.is_elsewhere(unit)
        if not grads and not param:
            return
        with self._handing_over:
            buffer = self._room_for_grads(each, free_gradients) if grads else None
            with self._changing(each) if param else nullcontext() as flat:
                self._pipeline.recover(ahead.ticket, grad=buffer, param=flat)
            if grads:
                self._grads.rest(unit)
                self.some_rest = True

    def _room_for_grads(self, each: Unit, free_gradients: FreeGradients) -> torch.Tensor:
        while (buffer := self._grads.restore(each.index)) is None:
            if not free_gradients(each):
                raise CapacityError(
                    f"no host memory is left for the gradients of unit `{each.name}`, whose update is undone: raise "
                    "tiering.host_memory"
                )
        return buffer

    def _put_back(self, each: Unit) -> None:
        """Change the parameters to what they were before they were updated ahead."""
        assert each.ahead is not None
        with self._changing(each) as flat:
            for start, values in self._pipeline.undoing.params_before(each.ahead.ticket):
                flat[start : start + values.numel()].copy_(values)

    @contextmanager
    def _changing(self, each: Unit) -> Iterator[torch.Tensor]:
        """The unit's flat parameters where updates change them."""
        unit = each.index
        self.open_host(each)
        self._params.host_wait(unit)
        for move in self._params.begin_update(unit):
            move.wait(self._counters)
        yield self._params.host_tensor(unit)
        self._params.close_host(unit)

    def finish_ahead(self, each: Unit, free_gradients: FreeGradients) -> None:
        """Wait for an update that runs ahead: what it was made with is about to change."""
        if each.submitted is not None:
            self.finish(each)
        self._recover(each, free_gradients, grads=True, param=False)
        assert each.ahead is not None
        each.ahead = replace(each.ahead, segments=())

    def open_host(self, each: Unit) -> None:
        """Have the unit's values on their way to where they are changed; waits for memory that updates or fetches hold.

        Raises:
            CapacityError: they hold none.
        """
        while not self._params.open_host(each.index):
            if not self.finish_one() and not self._finish_fetch():
                raise CapacityError(
                    f"no host memory is left for the values of unit `{each.name}` on their way: "
                    "look at fewer units at once, or raise tiering.host_memory"
                )

    def _finish_fetch(self) -> bool:
        """Wait for a fetch that passes host memory on its way to the device; False if there is none."""
        due = {each.index for each in self.due}
        for unit in self._params.passing:
            if unit not in due:
                self._params.fetch_wait(unit)
                return True
        return False

    @property
    def all_computed(self) -> bool:
        """No update is still to be computed, and none has failed; some may still be on their way home."""
        tickets = [each.submitted.ticket for each in self._submitted if each.submitted is not None]
        return not self._due and all(each.computed.done() and each.computed.exception() is None for each in tickets)

    @staticmethod
    def _is_computed(each: Unit) -> bool:
        return each.submitted is not None and each.submitted.ticket.computed.done()

    # Out of it #

    def wait_computed(self, each: Unit) -> None:
        """Wait until the unit's new values are in memory, whence they go up as they come; they may still be on their
        way home."""
        submitted, params = each.submitted, each.params
        if submitted is not None:
            with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
                sends = params.send_part if params.can_send_parts() else None
                self._pipeline.wait_computed(submitted.ticket, sends)
            self._params.end_change(each.index)

    def finish_one(self) -> bool:
        """Wait for one update, whichever is the first to be done; False if there is none."""
        self._take_ended()
        while self._submitted and not self._computed:
            # An interrupt may have lost the word of one.
            self._computed |= {each: None for each in self._submitted if self._is_computed(each)}
            if not self._computed:
                with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
                    each = self._ended.get()
                self._note_computed(each)
        for each in self._computed:
            self.finish(each)
            return True
        return False

    @property
    def some_ended(self) -> bool:
        """Updates may be over of which nobody has taken note."""
        return bool(self._computed) or not self._ended.empty()

    def _take_ended(self) -> None:
        while not self._ended.empty():
            self._note_computed(self._ended.get())

    def _note_computed(self, each: Unit) -> None:
        if self._is_computed(each):  # and not an update of before
            self._computed[each] = None

    def settle(self) -> None:
        """Take note of updates that are over."""
        if not self._computed and self._ended.empty():
            return
        self._take_ended()
        for each in list(self._computed):
            if each.submitted is not None and each.submitted.ticket.done():
                self._note(each)

    def finish(self, each: Unit) -> None:
        """Wait until the unit's submitted update is over: computed, and written."""
        assert each.submitted is not None
        ticket = each.submitted.ticket
        with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
            self._pipeline.wait_computed(ticket)
        with self._counters.stalled(StallCause.DISK_WRITE):
            ticket.result()
        self._note(each)

    def _note(self, each: Unit) -> None:
        with self._handing_over:
            submitted, unit = each.finish(), each.index
            self._submitted.pop(each, None)
            self._computed.pop(each, None)
            for move in submitted.ticket.missing:  # for which an update that did not take place has not waited
                move.wait(self._counters)
            if not submitted.keeps:
                self._grads.used(unit)
            elif submitted.ticket.recovers:
                self._grads.left(unit)
            else:
                self._grads.returned(unit)
                self.some_rest = True
            self._params.close_host(unit)
            if submitted.write is not None:
                each.params.field.finish_move(submitted.write)
            submitted.ticket.result()  # raises what went wrong
            self.finished.append(each)


def _put(ended: SimpleQueue[Unit], each: Unit, _: Future[None]) -> None:
    ended.put(each)
