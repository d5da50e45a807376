"""Performs what the scheduler asks for: the only caller of fetch, evict and write back.

[Note: what the compute thread waits for]
`enter` returns when a unit may be computed on: fetched, and updated if an update was pending. Everything else is
started and left running. What is in flight is looked at again on every event (`settle`): finished updates give
their gradients and pins back, and the scheduler is told that memory may have been freed. The thread blocks for memory
only when the unit that it needs now has none.

[Note: what a parameter shows]
The model's parameters show a unit's values while these are in memory, the newest, and whole; at all other times NaN.
A unit whose update has begun is hidden until the new values are there, so nobody reads old ones. An update also counts
as a change in place, for autograd: a backward pass through a graph that was made with the old values raises torch's own
error, where it would compute with the new ones.

[Note: values at rest]
A unit that comes and goes shows its values while something uses it, and NaN between two steps, also while it happens to
be in memory: what a training loop would write there is gone when the unit leaves memory, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from infinity.errors import StorageError
from infinity.io import Priority
from infinity.optim.jobs import Segment
from infinity.optim.pipeline import UpdatePipeline
from infinity.schedule import Cycle
from infinity.schedule.actions import (
    Action,
    AwaitAnyUpdate,
    AwaitFetch,
    AwaitGradients,
    AwaitNewest,
    AwaitSpill,
    AwaitUpdate,
    Event,
    Evict,
    Fetch,
    GradientsNeedRoom,
    GradientsRest,
    MemoryFreed,
    OldParametersNeeded,
    ParametersMade,
    ParametersNeeded,
    ParametersStale,
    PassBegins,
    PassEnds,
    RoomNeeded,
    Spill,
    Submit,
    SubmitAhead,
    UpdateDue,
    UpdateForeseen,
    UpdateOnDevice,
    UseBegins,
)
from infinity.schedule.scheduler import Scheduler
from infinity.telemetry import Counters
from infinity.tiers import GradStore, Params, Residency
from infinity.zero.gathering import Gathering
from infinity.zero.in_flight import InFlight
from infinity.zero.ranks import ALONE, Ranks
from infinity.zero.unit import Foreseen, Unit
from infinity.zero.views import ModelViews


class Executor:
    """Performs the scheduler's actions: moves units and submits their updates.

    Args:
        units: the rows, by index.
        views: what those of all units share.
        grads: gradients of units that are updated in host memory.
        in_flight: carries updates out.
        cycle: what is used, and the plan.
        ranks: those whose shards make a unit whole.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        views: ModelViews,
        params: Params,
        grads: GradStore,
        in_flight: InFlight,
        pipeline: UpdatePipeline,
        cycle: Cycle,
        counters: Counters,
        ranks: Ranks = ALONE,
    ) -> None:
        self.views = views
        self.units = tuple(units)
        self._params = params
        self._grads = grads
        self._pipeline = pipeline
        self._cycle = cycle
        self._in_flight = in_flight
        self._gathering = Gathering(params, ranks, cycle.capacity_bytes, counters, cycle.ahead_bytes)
        self._scheduler = Scheduler(
            units,
            cycle,
            params.ledger,
            params.budget,
            len(grads.slots),
            grads.leased,
            writes_all=params.keeps_steps,
            writes_unreconstructable=params.has_slots,
        )
        self._step_is_over = True  # else units that are updated already do not show it, as in torch before `step()`

    # Uses #

    def enter(self, units: tuple[int, ...]) -> None:
        """Wait until the units may be computed on, and start what the plan says; after an exception none is in use."""
        if self._in_flight.speculative:
            self.undo(*units)
        if self._gathering.ahead:
            self._gathering.make_way(units)
        for unit in units:
            self._params.pin(unit)  # before anything is evicted for another of them
        entered: list[int] = []
        try:
            for unit in units:
                self.settle()
                self._do(UseBegins(unit))
                entered.append(unit)
                self.gather_owed(unit)
                self._gathering.enter(unit)
                self._look_ahead()
                self.units[unit].views.show()
        except BaseException as error:
            if isinstance(error, StorageError):
                self._params.handing_over.tear()  # an update has failed, and is not looked at again
            for unit in units:
                self._params.unpin(unit)
            for unit in entered:
                self._gathering.leave(unit, self._cycle.expected)
            raise

    def _do(self, event: Event) -> bool:
        """Perform what the scheduler asks for because of an event; False if that is nothing."""
        action = None
        for action in self._scheduler.on(event):
            _PERFORMERS[type(action)](self, action)
        return action is not None

    def gather_owed(self, unit: int | None = None) -> None:
        """Gather what all ranks gather before this unit; None before they exchange something that is no unit."""
        for other in self._gathering.owed(unit):
            self._do(ParametersNeeded(other))
            self._gathering.gather(other)

    def follow(self, order: Sequence[int]) -> None:
        """Gather units that stay in this order, which all ranks know."""
        self._gathering.follow(order)

    def _look_ahead(self) -> None:
        """Start to gather what is used next, in its order."""
        while (unit := self._gathering.due(self._cycle.upcoming)) is not None:
            self.undo(unit)
            self._params.pin(unit)
            try:
                self._do(ParametersNeeded(unit))
                self._gathering.look_ahead(unit)
            except BaseException:
                self._params.unpin(unit)
                raise

    def leave(self, units: tuple[int, ...]) -> None:
        """The units may be evicted again."""
        for unit in units:
            self._params.unpin(unit)
            self._gathering.leave(unit, self._cycle.expected)
        self.settle()

    # Actions #

    def _fetch(self, action: Fetch) -> None:
        unit, priority = action.unit, Priority.DEMAND if action.urgent else Priority.PREFETCH
        self._params.fetch_start(unit, priority, updated=self.units[unit].update_is_due)

    def _await_fetch(self, action: AwaitFetch | AwaitNewest) -> None:
        if self.units[action.unit].params.residency is Residency.FETCHING:
            self._params.fetch_wait(action.unit)

    def _evict(self, action: Evict) -> None:
        unit, row = action.unit, self.units[action.unit]
        if row.params.is_dirty():  # the plan has updates write through, so this is the exception
            self._in_flight.open_host(row)
            try:
                self._params.host_wait(unit)
                row.params.write_home()
            finally:
                self._params.close_host(unit)
        row.views.hide()
        self._params.evict(unit)

    def _await_any_update(self, _: AwaitAnyUpdate) -> None:
        self._in_flight.finish_one()

    def _await_update(self, action: AwaitUpdate) -> None:
        self._in_flight.finish(self.units[action.unit])

    def _submit(self, action: Submit) -> None:
        self._in_flight.submit(self.units[action.unit], action.write, action.needed)

    def _submit_ahead(self, action: SubmitAhead) -> None:
        row = self.units[action.unit]
        if self._in_flight.can_run_ahead(row, action.write, action.needed):
            row.views.cover()
            self._in_flight.run_ahead(row, action.write, action.needed)

    def _update_on_device(self, action: UpdateOnDevice) -> None:
        self._in_flight.update_on_device(self.units[action.unit])

    def _await_gradients(self, action: AwaitGradients) -> None:
        self._grads.await_moves(action.unit)

    def _spill(self, action: Spill) -> None:
        self._grads.spill(action.unit)

    def _await_spill(self, action: AwaitSpill) -> None:
        self._grads.await_spill(action.unit)

    def _await_newest(self, action: AwaitNewest) -> None:
        unit, row = action.unit, self.units[action.unit]
        self._in_flight.wait_computed(row)
        self._await_fetch(action)
        self._params.await_update(unit)
        if self._gathering.is_whole(unit):
            row.views.show()

    # The plan #

    def begin_cycle(self) -> None:
        """A forward pass begins: follow the plan from its start, and record what is used."""
        self._do(PassBegins())
        self.views.read.clear()
        self._gathering.begin_cycle()
        self.settle()

    @property
    def uses(self) -> Sequence[int] | None:
        """The units that the running cycle has used, in their order; None between two cycles."""
        return self._cycle.recorded

    def end_cycle(self, *, learn: bool) -> None:
        """The backward pass is over, or the forward pass had none.

        Args:
            learn: it was a training step; what follows will probably be like it.
        """
        self._gathering.end_cycle()
        self._params.keep_pins(
            {row.index for row in self._in_flight.submitted}
        )  # an exception may have kept a use from being left
        self._do(PassEnds(learn))
        self.rest()

    def rest(self) -> None:
        """No module uses anything for now, see [Note: values at rest]."""
        for row in self._scheduler.in_memory:
            self.units[row.index].views.hide()

    def _rest(self, row: Unit) -> None:
        """The read access to a unit ended."""
        if self._rests(row):
            row.views.hide()

    @staticmethod
    def _rests(row: Unit) -> bool:
        """Whether the unit comes and goes, and is not in use."""
        return row.moves and not row.is_pinned

    def forward_order(self, units: Sequence[int]) -> list[int]:
        """The units in the order in which the next cycle will probably use them first."""
        return sorted(units, key=self._cycle.first_use)

    # Updates #

    def prefer_updates(self, *, begun: bool) -> None:
        """See `UpdatePipeline.prefer`."""
        self._pipeline.prefer(begun=begun)

    def expect_updates(self, units: Sequence[int]) -> None:
        """Read the optimizer states of these units ahead."""
        self._pipeline.expect(units)

    def update(self, unit: int, segments: tuple[Segment, ...], slots: Collection[int]) -> None:
        """Update the unit as soon as its values are in memory: now if they are, else when they are fetched.

        Args:
            slots: what is updated. The rest of the pass that is running may still compute with the others.
        """
        row = self.units[unit]
        self._in_flight.ask(row, segments)
        self._gathering.changed(unit)
        row.views.outdate(slots)
        if self._params.is_at_hand(unit):
            self._do(UpdateDue(unit))

    # Updates that run ahead of the norm, see [Note: updates ahead] in in_flight.py #

    def ran_ahead(self, unit: int) -> tuple[Segment, ...] | None:
        """What an update of the unit has done ahead; None if there was none."""
        ahead = self.units[unit].ahead
        return None if ahead is None else ahead.segments

    def begin_ahead(self) -> None:
        """Updates of the step that comes may run ahead: what is there now stays until it is over."""
        self.write_changed()
        self._params.begin_ahead()

    def gather_anew(self, unit: int) -> None:
        """What all ranks have of the unit is old, or will be on some of them.

        Whether its update runs ahead follows each rank's own memory and drives; what the ranks gather must not.
        """
        self._gathering.changed(unit)

    def run_ahead(self, unit: int, segments: tuple[Segment, ...], *, may_leave: bool) -> bool:
        """Update of a unit what can be undone; False if that is nothing.

        Args:
            may_leave: nobody looks at its gradients until they are wanted.
        """
        each = self.units[unit]
        before, each.foreseen = each.ahead, Foreseen(segments, may_leave)
        try:
            self._do(UpdateForeseen(unit))
        finally:
            each.foreseen = None
        return each.ahead is not before

    def confirm(self, unit: int, slots: Collection[int]) -> None:
        """What ran ahead is the unit's update, of these slots, which is finished as any other."""
        row = self.units[unit]
        row.views.outdate(slots)
        self._in_flight.confirm(row)
        if not row.update_is_submitted:
            self._in_flight.finished.append(row)
        if row.residency is not Residency.STORED:
            self._do(UpdateDue(unit))

    def undo(self, *units: int, grads: bool = True) -> None:
        """Those of the units that were updated ahead have the values from before it again.

        Args:
            grads: they have their gradients, too, else they may have none any more.

        Raises:
            InfinityError: a module uses one of them.
            StorageError: they cannot be read again.
        """
        ahead = [row for row in map(self.units.__getitem__, units) if row.ahead is not None]
        if not ahead or self._params.handing_over.torn:  # nothing goes on from an engine that is torn
            return
        for row in ahead:
            if row.residency is Residency.FETCHING:  # the plan wants it next
                self._do(OldParametersNeeded(row.index))
        away = [row for row in ahead if row.residency is Residency.STORED and self._in_flight.needs_memory(row)]
        here = [row for row in ahead if row not in away]
        behind = self._in_flight.undo(here, self._free_gradients, grads=grads)
        self._spill_ahead()
        for row in away:  # one by one, since there may not be room for all of them
            self._do(OldParametersNeeded(row.index))
            self._in_flight.undo([row], self._free_gradients, grads=grads)
        self._spill_ahead()
        for row in ahead:
            self._gathering.changed(row.index)
            if row in behind:
                self._do(ParametersStale(row.index))

    def undo_all(self, *, grads: bool = True) -> bool:
        """As `undo`, of all units; returns whether there were any."""
        rows = self._in_flight.ahead
        self.undo(*(row.index for row in rows), grads=grads)
        return bool(rows)

    def gradient_comes(self, unit: int) -> None:
        """A gradient of the unit is about to be added: an update that has run ahead of it is not confirmed.

        Between uses: if something waits for memory and an update has ended, it may have given some back.
        """
        row = self.units[unit]
        if row.ahead is not None:
            self._in_flight.finish_ahead(row, self._free_gradients)
            self._spill_ahead()
        if self._scheduler.waits_for_memory and self._in_flight.some_ended:
            self.settle()

    @property
    def awaits_updates(self) -> bool:
        """Some updates are not finished, or wait for their units."""
        return bool(self._in_flight)

    def free_gradients(self, unit: int) -> bool:
        """Free memory that the unit's gradients may take: what can be on the drive, or an update has; False if none."""
        return self._free_gradients(self.units[unit])

    def _free_gradients(self, row: Unit) -> bool:
        freed = self._do(GradientsNeedRoom(row.index))
        self._show_finished()
        return freed

    def gradients_rest(self, unit: int) -> None:
        """Nothing is added to the unit's gradients for a while: if they may spill, they or others do so ahead."""
        if self.units[unit].spills:
            self._do(GradientsRest())

    def _spill_ahead(self) -> None:
        """As `gradients_rest`, of gradients that updates have given back."""
        if self._in_flight.some_rest:
            self._in_flight.some_rest = False
            self._do(GradientsRest())

    def settle(self) -> None:
        """Take note of finished updates and use the memory that they gave back."""
        if self._params.handing_over.torn:
            return
        self._in_flight.settle()
        self._spill_ahead()
        if self._scheduler.waits_for_memory:
            self._do(MemoryFreed())
        self._show_finished()
        for unit in self._params.passing:
            if not (self.units[unit].update_is_submitted or self.units[unit].update_is_due):
                self._params.advance(unit)

    def begin_step(self) -> None:
        """Parameters are about to be updated, from the first unit to the last."""
        self._step_is_over = False

    def end_step(self) -> None:
        """All units have this step's update, or will have."""
        self._step_is_over = True
        self._show_finished()

    def _show_finished(self) -> None:
        """Units whose updates are over have their values again."""
        while self._step_is_over and self._in_flight.finished:
            row = self._in_flight.finished.pop()
            # What has ended may be the last step's update, behind which this step's is submitted: it pins the unit.
            behind = row.params.coming is not None or row.is_updating
            if behind or self._rests(row):
                continue  # shown when it is used
            if row.params.residency is Residency.RESIDENT and self._gathering.is_whole(row.index):
                row.views.show()

    @property
    def all_computed(self) -> bool:
        """No update is still to be computed."""
        return self._in_flight.all_computed

    def _start_pending(self) -> None:
        for row in self._in_flight.due:
            self._params.pin(row.index)
            self._do(ParametersNeeded(row.index))
            self._params.unpin(row.index)

    def compute_all(self) -> None:
        """Have every pending update computed; some may still be on their way home."""
        self._start_pending()
        for row in self._in_flight.submitted:
            self._in_flight.wait_computed(row)

    def write_changed(self) -> None:
        """Write what somebody else than an update has changed, where updates are to find it on the drives."""
        for unit in self._params.unwritten():
            row = self.units[unit]
            if self._scheduler.is_written(row) and not row.update_is_submitted:
                with self.resident(unit):
                    row.params.write_home()

    def drain(self) -> None:
        """Carry out every pending update and wait for all of them; those that only run ahead are undone."""
        self.undo_all()
        self._start_pending()
        while self._in_flight.finish_one():
            pass
        self.settle()
        for state in self._scheduler.in_memory:
            self._rest(self.units[state.index])

    def move_states(self, unit: int, *, there: bool) -> None:
        """Have the unit's optimizer states live on the device, or below again; every update is done.

        Raises:
            torch.OutOfMemoryError: the device has no memory for them; they stay where they are.
            StorageError: they cannot be read, or written.
        """
        refused: torch.OutOfMemoryError | None = None
        with self._params.handing_over:  # some tiles may have moved and others not
            try:
                self._pipeline.move_states(unit, there=there)
            except torch.OutOfMemoryError as error:
                refused = error
        if refused is not None:
            raise refused

    def show_newest(self) -> None:
        """Carry out every update and have the parameters that never leave show their values; all ranks together."""
        self.drain()
        for row in self._scheduler.staying:
            self._params.await_update(row.index)
            self._gathering.gather(row.index)
            self.units[row.index].views.show()

    # Values outside of a step #

    @contextmanager
    def gathered(self, unit: int) -> Iterator[torch.Tensor]:
        """The unit's flat parameters on the compute device, up to date and whole, for as long as the context lasts.

        All ranks call this together.
        """
        self.undo(unit)
        self._gathering.drop_ahead()  # where a pass of the model is under way
        self._params.pin(unit)
        try:
            self._do(ParametersNeeded(unit))
            self._gathering.gather(unit)
            self.units[unit].views.show()
            yield self._params.tensor(unit)
        finally:
            self._gathering.let_go(unit)
            self._params.unpin(unit)
            self._rest(self.units[unit])

    @contextmanager
    def resident(self, unit: int) -> Iterator[torch.Tensor]:
        """This rank's shard of the unit in host memory, up to date, to look at while the context lasts."""
        self.undo(unit)
        self._params.pin(unit)
        try:
            self._do(ParametersNeeded(unit))
            self._in_flight.open_host(self.units[unit])
            try:
                self._params.host_wait(unit)
                yield self._params.host_tensor(unit)
            finally:
                self._params.close_host(unit)
        finally:
            self._params.unpin(unit)
            self._rest(self.units[unit])

    @contextmanager
    def changing(self, unit: int) -> Iterator[torch.Tensor]:
        """As `resident`, to write to: what is there at the end, after an exception too, is the unit's newest value."""
        with self.resident(unit) as flat:
            for move in self._params.begin_change(unit):
                move.transfer.result()
            try:
                yield flat
            finally:
                self._params.end_change(unit)
                self._params.await_update(unit)
                self._gathering.changed(unit)
                self.units[unit].views.outdate()
                if self._gathering.is_whole(unit):
                    self.units[unit].views.show()

    def take_over(self) -> None:
        """All values are those that an earlier process has left on the drives; all ranks call this, between steps.

        Raises:
            StorageError: they cannot be read; some have changed then.
        """
        for unit, params in enumerate(self._params.units):
            if params.written:  # not where it is in somebody's files
                with self.changing(unit):
                    params.read_found()
        self._pipeline.take_over()

    def refresh(self, unit: int) -> None:
        """Let the model's parameters of the unit be what they are for it again: its memory, or NaN while it is away."""
        row = self.units[unit]
        row.views.forget()
        self._params.await_update(unit)
        behind = row.is_updating or self.views.detached
        whole = row.residency is Residency.RESIDENT and self._gathering.is_whole(unit)
        if whole and not behind and not self._rests(row):
            row.views.show()
        else:
            row.views.hide()

    def take_back(self, unit: int, slot: int) -> None:
        """The model's parameter, which was lent, is what its unit is again."""
        self.units[unit].views.take_back(slot)
        self.refresh(unit)

    def detach_views(self) -> None:
        """Leave the model's parameters without memory, before the memory goes."""
        self.views.detached = True
        for row in self.units:
            row.views.detach()

    @contextmanager
    def created(self, unit: int) -> Iterator[torch.Tensor]:
        """Memory for a unit that has no values yet; what is written becomes its values."""
        while not self._params.create(unit):
            self._do(RoomNeeded(unit))
        self._params.pin(unit)
        try:
            yield self._params.host_tensor(unit)
            self._params.create_done(unit)
        except BaseException:
            self._params.create_failed(unit)
            raise
        finally:
            self._params.unpin(unit)
        if self.units[unit].residency is Residency.RESIDENT:
            self._do(ParametersMade(unit))
        self.refresh(unit)


# Of the class, so that an executor that nobody refers to goes at once.
_PERFORMERS: dict[type[Action], Callable[[Executor, Any], None]] = {
    Fetch: Executor._fetch,
    AwaitFetch: Executor._await_fetch,
    AwaitGradients: Executor._await_gradients,
    AwaitSpill: Executor._await_spill,
    AwaitUpdate: Executor._await_update,
    Evict: Executor._evict,
    Spill: Executor._spill,
    Submit: Executor._submit,
    SubmitAhead: Executor._submit_ahead,
    UpdateOnDevice: Executor._update_on_device,
    AwaitNewest: Executor._await_newest,
    AwaitAnyUpdate: Executor._await_any_update,
}
