"""Updates from the moment that they are due until their values are in memory and written.

[Note: updates ahead]
Where the norm of all gradients decides on an update (clipping, a step that is skipped), it may *run ahead* of it, as if
the norm were small: on those of a unit's tiles that have another slot on the drives, in which what they were before
stays (slots.py), or for which there is room for a before-image (before_images.py). When the norm is known the update is
*confirmed*, and what is left of the unit updated, or *undone*. Until then the unit keeps its gradients, or they can be
*recovered* (see [Note: lost gradients] in csrc/adam/kernels.cpp): both slots of all its states together tell them, so
that their memory serves other units. They tell its parameters, too, so that those that stay in memory need no slots,
and are not written. Whoever wants its values, or its gradients, has the update undone first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from queue import SimpleQueue

import torch

from infinity.errors import CapacityError, InfinityError
from infinity.optim.before_images import Image
from infinity.optim.jobs import Segment, UpdateJob, UpdateTicket
from infinity.optim.pipeline import UpdatePipeline
from infinity.telemetry import Counters, StallCause
from infinity.tiers import GradStore, Memory, Move, Params, Residency
from infinity.zero.on_device import OnDevice


@dataclass
class _HandedOver:
    """An update in the pipeline.

    Attributes:
        write: the writing of the new parameters to their home, if they are written.
        keeps: its gradients may be of use again.
    """

    ticket: UpdateTicket
    write: Move | None
    keeps: bool


class _OldParams(Enum):
    """Where a unit's parameters are that an update ahead replaces."""

    SLOTS = auto()  # of their own on the drives
    STATES = auto()  # which have two slots there, and tell them
    IMAGES = auto()  # in memory
    NOWHERE = auto()


@dataclass(frozen=True)
class _Ahead:
    """An update that runs ahead, or has done so.

    Attributes:
        segments: what it does to the tiles in `tiles`.
    """

    segments: tuple[Segment, ...]
    tiles: frozenset[int]
    ticket: UpdateTicket
    old_params: _OldParams


class InFlight:
    """Which units' updates are due, which are in the pipeline, and which have been finished.

    Args:
        device: carries out the updates of units whose states are there; None where there can be none.

    Attributes:
        pending: they wait for their unit to be in memory.
        finished: units whose updates are over; whoever looks at them takes them out.
    """

    def __init__(
        self,
        params: Params,
        grads: GradStore,
        pipeline: UpdatePipeline,
        counters: Counters,
        device: OnDevice | None = None,
    ) -> None:
        self.pending: dict[int, tuple[Segment, ...]] = {}
        self.finished: list[int] = []
        self._params = params
        self._handing_over = params.handing_over
        self._grads = grads
        self._pipeline = pipeline
        self._counters = counters
        self._device = device
        self._handed: dict[int, _HandedOver] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()  # units whose updates are computed, or have failed
        self._computed: dict[int, None] = {}  # units of these, whose writes may be under way
        self._stuck: dict[int, tuple[bool, int]] = {}  # in memory, but they have to wait for room or another update
        self._ahead: dict[int, _Ahead] = {}
        self._begun: dict[int, frozenset[int]] = {}  # tiles of pending units that have had the update already
        self._told: set[int] = set()  # units whose states tell their parameters, as their last updates were

    def __contains__(self, unit: int) -> bool:
        """The unit's update is in the pipeline."""
        return unit in self._handed

    def __bool__(self) -> bool:
        return bool(self.pending or self._handed)

    @property
    def units(self) -> frozenset[int]:
        """Units whose updates are in the pipeline."""
        return frozenset(self._handed)

    # Into the pipeline #

    def try_start(self, unit: int, write: bool, needed: int) -> None:
        """Start the pending update of a unit in memory, unless its gradients have no room: it is tried again then.

        Args:
            write: the new parameters are written to their home, tile by tile as they are updated.
            needed: when the unit is needed next; of those that nobody waits for the lowest goes first.
        """
        if unit not in self.pending:
            return
        if self._device is not None and self._device.has(unit):  # it takes no time that anybody sees
            with self._handing_over:
                self._device.update(unit, self.pending.pop(unit))
                self.finished.append(unit)
            return
        if unit in self._handed:
            if unit in self._begun:  # with this step's
                self._stuck[unit] = write, needed
                return
            self._finish(unit)  # last step's values are computed, but not all written yet
        if not self._grads.can_hand_over(unit):
            self._stuck[unit] = write, needed
            return
        self._stuck.pop(unit, None)
        # Of a unit whose home has older values, those that this update leaves alone would stay as old there.
        write = write and not self._params.units[unit].is_dirty()
        with self._handing_over:
            self.open_host(unit)
            begun = self._begun.pop(unit, None)
            tiles = None if begun is None else self._pipeline.all_tiles(unit) - begun
            self._hand_over(unit, self.pending.pop(unit), write=write, needed=needed, tiles=tiles)

    def _hand_over(
        self,
        unit: int,
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
        self._told.discard(unit)
        if self._pipeline.undoing.can_recover_param(segments, self._grads.dtype):
            self._told.add(unit)
        ticket.computed.add_done_callback(partial(_put, self._ended, unit))
        written = self._params.units[unit].write_through(ticket) if write else None
        self._handed[unit] = _HandedOver(ticket, written, keeps=before is not None)
        return ticket

    # Ahead of what decides on it, see [Note: updates ahead] #

    @property
    def ahead(self) -> Collection[int]:
        """Units whose updates run ahead, or have done so."""
        return self._ahead.keys()

    def ran_ahead(self, unit: int) -> tuple[Segment, ...] | None:
        """What an update of the unit has done ahead, to some of its tiles; None if there was none."""
        ahead = self._ahead.get(unit)
        return None if ahead is None else ahead.segments

    def is_told(self, unit: int) -> bool:
        """The unit's states tell its parameters, if its next update is like the last one."""
        return unit in self._told

    def needs_memory(self, unit: int) -> bool:
        """An update ahead is undone where the unit's values are in memory."""
        on_drive = self._params.units[unit].home is Memory.NVME
        return on_drive and self._ahead[unit].old_params is _OldParams.STATES

    def can_run_ahead(self, unit: int, segments: tuple[Segment, ...], write: bool, needed: int) -> bool:
        """The unit and its gradients have memory and are at rest, and something of it can be updated and be undone.

        What has not begun of units that are needed later makes way for it: what is left of the updates when the norm is
        known is then what the next forward pass comes to last.
        """
        busy = unit in self.pending or unit in self._handed or unit in self._ahead or self._is_there(unit)
        at_rest = not busy and self._params.residency(unit) is Residency.RESIDENT
        if not at_rest or not self._grads.can_hand_over(unit):
            return False
        old_params = self._old_params(unit, segments, write)
        if self._can_undo(unit, old_params):
            return True
        later = self._needed_later(needed)
        if not self._can_undo(unit, old_params, without=later):
            return False
        while not (can_undo := self._can_undo(unit, old_params)) and later:
            self._withdraw(later.pop())
        return bool(can_undo)

    def _needed_later(self, needed: int) -> list[UpdateTicket]:
        """Updates ahead of units in memory that are needed later, and may not have begun; the last one last."""
        in_images = [ahead.ticket for ahead in self._ahead.values() if ahead.old_params is _OldParams.IMAGES]
        later = [ticket for ticket in in_images if ticket.job.unit in self._handed and ticket.job.needed > needed]
        return sorted(later, key=lambda ticket: ticket.job.needed)

    def _withdraw(self, ticket: UpdateTicket) -> None:
        """Have an update not run ahead, unless it has begun."""
        with self._handing_over:
            if self._pipeline.withdraw(ticket):
                del self._ahead[ticket.job.unit]
                self._finish(ticket.job.unit)

    def _old_params(self, unit: int, segments: tuple[Segment, ...], write: bool) -> _OldParams:
        """Where an update that is handed over now would leave what the unit's parameters are.

        Args:
            write: they are better written than told: they leave memory, or are to stay on the drive.
        """
        each, undoing = self._params.units[unit], self._pipeline.undoing
        can_undo, can_put_back = each.can_undo(), each.can_put_back()
        if can_undo and write:
            return _OldParams.SLOTS
        may_be_told = can_put_back or (each.has_slots and not self._params.keeps_steps)
        if may_be_told and undoing.can_recover_param(segments, self._grads.dtype) and undoing.has_slots(unit):
            return _OldParams.STATES
        if can_undo:
            return _OldParams.SLOTS
        return _OldParams.IMAGES if can_put_back else _OldParams.NOWHERE

    def _can_undo(self, unit: int, old_params: _OldParams, without: Collection[UpdateTicket] = ()) -> frozenset[int]:
        """Indices of the tiles whose update can be undone, and that of their parameters, `without` these others."""
        if old_params is _OldParams.NOWHERE:
            return frozenset()
        return self._pipeline.can_undo(unit, param=old_params is _OldParams.IMAGES, without=without)

    def run_ahead(self, unit: int, segments: tuple[Segment, ...], write: bool, needed: int, *, may_leave: bool) -> None:
        """Update what can be undone of a unit that `can_run_ahead`, and whose gradients are in memory.

        Args:
            write: see `try_start`; it may be written for its slots alone.
            may_leave: nobody looks at its gradients until they are wanted.
        """
        with self._handing_over:
            self.open_host(unit)
            old_params = self._old_params(unit, segments, write)
            tiles = self._can_undo(unit, old_params)
            before = self._pipeline.undoing.keep_before(unit, tiles, param=old_params is _OldParams.IMAGES)
            tells_grads = (
                may_leave
                and not before
                and self._grads.shares(unit)
                and tiles == self._pipeline.all_tiles(unit)
                and self._pipeline.undoing.can_recover(segments, self._grads.dtype)
            )
            ticket = self._hand_over(
                unit,
                segments,
                write=old_params is _OldParams.SLOTS,
                needed=needed,
                tiles=tiles,
                before=before,
                tells_grads=tells_grads,
                tells_param=old_params is _OldParams.STATES,
            )
            self._ahead[unit] = _Ahead(segments, tiles, ticket, old_params)

    def confirm(self, unit: int) -> None:
        """What ran ahead is the unit's update; `pending` is what is left of it."""
        with self._handing_over:
            ahead, handed = self._ahead.pop(unit), self._handed.get(unit)
            if ahead.tiles != self._pipeline.all_tiles(unit):
                self._begun[unit], self.pending[unit] = ahead.tiles, ahead.segments
            elif handed is None:
                self._grads.drop(unit)
            else:
                handed.keeps = False
            self._pipeline.undoing.forget_before(ahead.ticket)

    def undo(self, units: Sequence[int], *, grads: bool = True) -> frozenset[int]:
        """The units are what they were before they were updated ahead.

        Args:
            grads: they have their gradients again, too; else those that an update has are nothing any more.

        Returns:
            Those that are so on the drives alone: what is computed on is to be read again.

        Raises:
            InfinityError: a module uses one of them.
            StorageError: what they were cannot be read again.
            CapacityError: there is no room for their gradients.
        """
        for unit in units:
            if self._params.is_pinned(unit, times=int(unit in self._handed)):
                raise InfinityError(
                    f"the values of unit `{self._params.specs[unit].name}` are asked for while backward uses it, after "
                    'its update has begun: set tiering.update_schedule to "deferred"'
                )
        with self._handing_over:
            old_params = {unit: self._ahead[unit].old_params for unit in units}
            tickets = [self._ahead[unit].ticket for unit in units]
            for unit in self._handed.keys() & units:
                self._handed[unit].ticket.recovers = False  # its gradients are still here
            self._pipeline.stop(tickets)
            for unit in self._handed.keys() & units:
                self._finish(unit)
            for unit in units:
                self._recover(unit, grads=grads, param=True)
            self._pipeline.undo(tickets)
            for unit, ticket in zip(units, tickets, strict=True):
                if old_params[unit] is _OldParams.SLOTS:
                    self._params.undo(unit)
                elif old_params[unit] is _OldParams.IMAGES:
                    self._put_back(unit)
                self._pipeline.undoing.forget_before(ticket)
                del self._ahead[unit]
        return frozenset(unit for unit in units if old_params[unit] is _OldParams.SLOTS)

    def _recover(self, unit: int, *, grads: bool, param: bool) -> None:
        """Have what the states tell of before an update that ran ahead, which it has not left anywhere.

        Args:
            grads: the unit's gradients, in memory or on their way to the drive; else they are nothing any more.
            param: its parameters.
        """
        ahead = self._ahead[unit]
        param = param and ahead.old_params is _OldParams.STATES
        if self._grads.is_elsewhere(unit) and not grads:
            self._grads.drop(unit)
        grads = self._grads.is_elsewhere(unit)
        if not grads and not param:
            return
        with self._handing_over:
            buffer = self._room_for_grads(unit) if grads else None
            with self._changing(unit) if param else nullcontext() as flat:
                self._pipeline.recover(ahead.ticket, grad=buffer, param=flat)
            if grads:
                self._grads.rest(unit)

    def _room_for_grads(self, unit: int) -> torch.Tensor:
        while (buffer := self._grads.restore(unit)) is None:
            if not self.free_gradients(unit):
                raise CapacityError(
                    f"no host memory is left for the gradients of unit `{self._params.specs[unit].name}`, whose update "
                    "is undone: raise tiering.host_memory"
                )
        return buffer

    def _put_back(self, unit: int) -> None:
        """Change the parameters to what they were before they were updated ahead."""
        with self._changing(unit) as flat:
            for start, values in self._pipeline.undoing.params_before(self._ahead[unit].ticket):
                flat[start : start + values.numel()].copy_(values)

    @contextmanager
    def _changing(self, unit: int) -> Iterator[torch.Tensor]:
        """The unit's flat parameters where updates change them."""
        self.open_host(unit)
        self._params.host_wait(unit)
        for move in self._params.begin_update(unit):
            move.wait(self._counters)
        yield self._params.host_tensor(unit)
        self._params.close_host(unit)

    def finish_ahead(self, unit: int) -> None:
        """Wait for an update that runs ahead: what it was made with is about to change."""
        if unit in self._handed:
            self._finish(unit)
        self._recover(unit, grads=True, param=False)
        self._ahead[unit] = replace(self._ahead[unit], segments=())

    def start(self, unit: int, write: bool, needed: int) -> None:
        """As `try_start`, waiting for room."""
        if unit in self._begun and unit in self._handed:
            self._finish(unit)
        while unit in self.pending:
            self.try_start(unit, write, needed)
            if unit in self.pending and not self.free_gradients(unit):
                raise CapacityError(
                    f"no host memory is left for the gradients of unit `{self._params.specs[unit].name}`: "
                    "raise tiering.host_memory"
                )

    def free_gradients(self, unit: int) -> bool:
        """Free memory that the unit's gradients may take: what can be on the drive, or an update has; False if none."""
        return not self._is_there(unit) and (self._grads.make_room(unit) or self.finish_one())

    def _is_there(self, unit: int) -> bool:
        return self._device is not None and self._device.has(unit)

    def open_host(self, unit: int) -> None:
        """Have the unit's values on their way to where they are changed, waiting for memory that updates hold.

        Raises:
            CapacityError: they hold none.
        """
        while not self._params.open_host(unit):
            if not self.finish_one():
                raise CapacityError(
                    f"no host memory is left for the values of unit `{self._params.specs[unit].name}` on their way: "
                    "look at fewer units at once, or raise tiering.host_memory"
                )

    @property
    def all_computed(self) -> bool:
        """No update is still to be computed; some may still be on their way home."""
        return not self.pending and all(handed.ticket.computed.done() for handed in self._handed.values())

    # Out of it #

    def wait_computed(self, unit: int) -> None:
        """Wait until the unit's new values are in memory, whence they go up as they come; they may still be on their
        way home."""
        if unit in self._handed:
            params = self._params.units[unit]
            with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
                sends = params.send_part if params.can_send_parts() else None
                self._pipeline.wait_computed(self._handed[unit].ticket, sends)
            self._params.end_change(unit)

    def finish_one(self) -> bool:
        """Wait for one update, whichever is the first to be done; False if there is none."""
        self._take_ended()
        while self._handed and not self._computed:
            # An interrupt may have lost the word of one.
            self._computed |= {unit: None for unit, handed in self._handed.items() if handed.ticket.computed.done()}
            if not self._computed:
                with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
                    unit = self._ended.get()
                self._note_computed(unit)
        for unit in self._computed:
            self._finish(unit)
            return True
        return False

    @property
    def some_ended(self) -> bool:
        """Updates may be over of which nobody has taken note."""
        return bool(self._computed) or not self._ended.empty()

    def _take_ended(self) -> None:
        while not self._ended.empty():
            self._note_computed(self._ended.get())

    def _note_computed(self, unit: int) -> None:
        if unit in self._handed and self._handed[unit].ticket.computed.done():  # and not an update of before
            self._computed[unit] = None

    def settle(self) -> None:
        """Take note of updates that are over, and start what they have made room for."""
        self._take_ended()
        for unit in [unit for unit in self._computed if self._handed[unit].ticket.done()]:
            self._note(unit)
        for unit, (write, needed) in list(self._stuck.items()):
            if self._params.residency(unit) is Residency.STORED:
                del self._stuck[unit]
                continue
            if unit in self._begun and unit in self._handed:
                continue
            self.try_start(unit, write, needed)
            if unit in self._stuck:
                break  # the others need as much

    def _finish(self, unit: int) -> None:
        ticket = self._handed[unit].ticket
        with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
            self._pipeline.wait_computed(ticket)
        with self._counters.stalled(StallCause.DISK_WRITE):
            ticket.result()
        self._note(unit)

    def _note(self, unit: int) -> None:
        with self._handing_over:
            handed = self._handed.pop(unit)
            self._computed.pop(unit, None)
            for move in handed.ticket.missing:  # for which an update that did not take place has not waited
                move.wait(self._counters)
            if not handed.keeps:
                self._grads.used(unit)
            elif handed.ticket.recovers:
                self._grads.left(unit)
            else:
                self._grads.returned(unit)
            self._params.close_host(unit)
            if handed.write is not None:
                self._params.units[unit].field.finish_move(handed.write)
            handed.ticket.result()  # raises what went wrong
            self.finished.append(unit)


def _put(ended: SimpleQueue[int], unit: int, _: Future[None]) -> None:
    ended.put(unit)
