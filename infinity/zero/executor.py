"""Perform the scheduler's actions: fetch and evict units, and submit their updates.

No other file calls `Params.fetch_start` or `Params.evict`.

[Note: what the compute thread waits for]
`enter` returns when the units are resident, up to date and unsharded. All other operations are only started. `enter`
and `leave` call `poll`, which checks whether they have ended: finished updates release their gradients and pins, and
the scheduler is told that memory may be free. The thread blocks for memory only if a unit that it needs now has none.

[Note: what a parameter shows]
A model parameter is a view of its unit's memory while the unit is resident, up to date and unsharded. At all other
times it is *hidden*: NaN, expanded to the parameter's shape. A unit is hidden from the start of its update until the
new values are in memory, so that no code reads old values. For autograd an update is an in-place change: a backward
pass through a graph of the old values raises torch's own error instead of computing with the new ones.

[Note: values at rest]
A unit that can be evicted is also hidden between two steps, even while it is in memory. Otherwise the training loop
could write to it, and a later eviction would discard the write without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from infinity.errors import StorageError
from infinity.io import Priority
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.ticket import Segment
from infinity.schedule import Cycle, actions
from infinity.schedule.actions import Action, Event
from infinity.schedule.scheduler import Scheduler
from infinity.schedule.unit_state import Residency
from infinity.telemetry import Counters
from infinity.tiers import GradStore, Params
from infinity.zero.gathering import Gathering
from infinity.zero.in_flight import InFlight
from infinity.zero.ranks import Ranks
from infinity.zero.speculation import Speculation
from infinity.zero.unit import ExpectedUpdate, Unit
from infinity.zero.views import ModelViews


class Executor:
    """Perform the scheduler's actions: move units and submit their updates.

    Args:
        units: by index; the scheduler calls them rows.
        views: state shared by the views of all units.
        params: parameters of all units.
        grads: gradients of units that are updated in host memory.
        in_flight: runs the updates.
        pipeline: the optimizer's queue.
        cycle: the uses of units in the running cycle (one forward and backward pass), and the plan that it follows.
        advice: takes a number of bytes, and returns a sentence that names the setting to raise by it.
        ranks: the ranks among which units are sharded.

    Attributes:
        gathering: unshards units that several ranks share.
        speculation: the speculative updates.
        step_is_over: whether `step()` has ended. Before that, updated units stay hidden: torch shows new values then.
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
        advice: Callable[[int], str],
        ranks: Ranks,
    ) -> None:
        self.views = views
        self.units = tuple(units)
        self._params = params
        self._grads = grads
        self._pipeline = pipeline
        self.cycle = cycle
        self.in_flight = in_flight
        self.speculation = Speculation(params, grads, in_flight, pipeline, counters)
        self.gathering = Gathering(units, ranks, cycle.capacity_bytes, counters, cycle.ahead_bytes)
        self._scheduler = Scheduler(
            units,
            cycle,
            params.ledger,
            advice,
            len(grads.slots),
            grads.leased,
            writes_all=params.writes_every_update,
            writes_unreconstructable=params.is_double_buffered,
        )
        self.step_is_over = True

    # Uses #

    def enter(self, units: Sequence[Unit]) -> None:
        """Block until the units are resident, up to date and unsharded, and start the next actions of the plan.

        If this raises, none of these units stays pinned.
        """
        if self.speculation.units:
            self.roll_back(*units)
        if self.gathering.early:
            self.gathering.drop_unexpected(units)
        for unit in units:
            unit.params.compute_copy.pin()  # pin all first: the fetch of one must not evict another
        entered: list[Unit] = []
        try:
            for unit in units:
                self.poll()
                self._report(actions.UseBegins(unit))
                entered.append(unit)
                if self.gathering.has_shared_units:
                    self._gather_for_use(unit)
                unit.views.show()
        except BaseException as error:
            if isinstance(error, StorageError):
                self._params.critical.mark_interrupted()  # an update that failed is not run again: poison the engine
            for unit in units:
                unit.params.compute_copy.unpin()
            self._end_uses(entered)
            raise

    def _report(self, event: Event) -> bool:
        """Report an event to the scheduler and perform the actions that follow. Return whether there were any."""
        action = None
        for action in self._scheduler.on(event):
            if isinstance(action, actions.AwaitAnyUpdate):
                self.in_flight.finish_one()
            else:
                _PERFORMERS[type(action)](self, action.unit, action)
        return action is not None

    def gather_preceding(self, unit: Unit | None = None) -> None:
        """Gather the updated units that all ranks gather before this one; with None, before another collective."""
        for other in self.gathering.preceding(unit):
            self._report(actions.ParametersNeeded(other))
            self.gathering.gather(other)

    def _gather_for_use(self, unit: Unit) -> None:
        """Unshard a resident unit that a module is about to use, and start to gather the units that are used next."""
        self.gather_preceding(unit)
        self.gathering.enter(unit)
        self._gather_upcoming()

    def _gather_upcoming(self) -> None:
        """Start to gather the units that are used next, in their order."""
        while (unit := self.gathering.next_to_gather([self.units[index] for index in self.cycle.upcoming])) is not None:
            self.roll_back(unit)
            unit.params.compute_copy.pin()
            try:
                self._report(actions.ParametersNeeded(unit))
                self.gathering.gather_early(unit)
            except BaseException:
                unit.params.compute_copy.unpin()
                raise

    def leave(self, units: Sequence[Unit]) -> None:
        """End uses: unpin the units, and poll completions."""
        for unit in units:
            unit.params.compute_copy.unpin()
        if self.gathering.has_shared_units:
            self._end_uses(units)
        self.poll()

    def _end_uses(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self.gathering.leave(unit, self.cycle.expected)

    # Actions #

    def _fetch(self, unit: Unit, action: actions.Fetch) -> None:
        priority = Priority.DEMAND if action.urgent else Priority.PREFETCH
        self._params.fetch_start(unit.params, priority, for_update=unit.due is not None)

    def _await_fetch(self, unit: Unit) -> None:
        if unit.residency is Residency.FETCHING:
            self._params.fetch_wait(unit.params)

    def _evict(self, unit: Unit) -> None:
        if unit.params.is_dirty():  # rare: the update of a unit that the plan evicts has written it home
            with self._in_host_memory(unit):
                unit.params.write_home()
        unit.views.hide()
        self._params.evict(unit.params)

    @contextmanager
    def _in_host_memory(self, unit: Unit) -> Iterator[None]:
        """Keep this rank's shard of a pinned or resident unit in host memory in this context."""
        self.in_flight.open_host(unit)
        try:
            self._params.host_wait(unit.params)
            yield
        finally:
            self._params.close_host(unit.params)

    def _submit_speculative(self, unit: Unit, action: actions.SubmitSpeculative) -> None:
        if self.speculation.can_speculate(unit, action.write, action.next_use):
            unit.views.hide_trained()
            self.speculation.speculate(unit, action.write, action.next_use)

    def _await_newest(self, unit: Unit, _: actions.AwaitNewest) -> None:
        self.in_flight.wait_computed(unit)
        self._await_fetch(unit)
        self._params.await_update(unit.params)

    # The plan #

    def begin_cycle(self) -> None:
        """Begin a cycle with its forward pass: follow the plan from its start, and record the uses."""
        self._report(actions.CycleBegins())
        self.views.lent_in_pass.clear()  # parameters whose copies a user could read, see param_access.py
        self.gathering.begin_cycle()
        self.poll()

    def end_cycle(self, *, learn: bool) -> None:
        """End the cycle, after its backward pass or after a forward pass without one.

        Args:
            learn: whether it was a training step. The next cycles are expected to repeat it.
        """
        self.gathering.end_cycle()
        # Remove all pins, except those of updates: an exception may have skipped a `leave`.
        self._params.reset_pins({unit.params for unit in self.in_flight.submitted})
        self._report(actions.CycleEnds(learn))
        self.hide_evictable()

    def hide_evictable(self) -> None:
        """Hide all units that can be evicted, see [Note: values at rest]."""
        for unit in self._scheduler.in_memory:
            self.units[unit.index].views.hide()

    def _hide_if_evictable(self, unit: Unit) -> None:
        if self._is_evictable(unit):
            unit.views.hide()

    @staticmethod
    def _is_evictable(unit: Unit) -> bool:
        """Whether the unit can be evicted and is not pinned."""
        return unit.offloaded and not unit.is_pinned

    # Updates #

    def update(self, unit: Unit, segments: tuple[Segment, ...], indices: Collection[int]) -> None:
        """Update the unit once its parameters are in memory: now, or after their fetch.

        Args:
            segments: the elements of this rank's shard to update, with their rules.
            indices: indices of the parameters that the update changes. The running pass may still use the others.
        """
        self.in_flight.add_due(unit, segments)
        self.gathering.changed(unit)
        unit.views.mark_stale(indices)
        if unit.can_update():
            self._report(actions.UpdateDue(unit))

    # Speculative updates, see [Note: speculative updates] in speculation.py #

    def begin_speculation(self) -> None:
        """From now on, write parameters to the other slot on NVMe, so that the current version of each unit stays."""
        self.write_changed()
        self._params.begin_speculation()

    def speculate(self, unit: Unit, segments: tuple[Segment, ...], *, may_drop_grads: bool) -> bool:
        """Submit a speculative update of the tiles that can be rolled back. Return False if there are none.

        Args:
            may_drop_grads: whether the memory of the gradients may be freed, if they can be reconstructed. Their norm
                must be known: after that, only a rollback or a user needs them.
        """
        before, unit.expected = unit.speculative, ExpectedUpdate(segments, may_drop_grads)
        try:
            self._report(actions.UpdateExpected(unit))
        finally:
            unit.expected = None
        return unit.speculative is not before

    def commit(self, unit: Unit, indices: Collection[int]) -> None:
        """Commit the speculative update, which changed these parameters. The update of its other tiles is due now."""
        unit.views.mark_stale(indices)
        self.speculation.commit(unit)
        if unit.ticket is None:  # finished already, but its new values were not to be shown before the commit
            self.in_flight.finished.append(unit)
        if unit.residency is not Residency.STORED:
            self._report(actions.UpdateDue(unit))

    def roll_back(self, *units: Unit, grads: bool = True) -> None:
        """Roll back the speculative updates of these units.

        Args:
            grads: restore the gradients, too. If False, gradients that would have to be reconstructed are dropped.

        Raises:
            InfinityError: a module uses one of the units.
            StorageError: the old values cannot be read.
        """
        updated = [unit for unit in units if unit.speculative is not None]
        if not updated or self._params.critical.interrupted:  # a poisoned engine must not touch its states
            return
        for unit in updated:
            if unit.residency is Residency.FETCHING:  # prefetched by the plan
                self._report(actions.OldParametersNeeded(unit))
        stored = [unit for unit in updated if unit.residency is Residency.STORED]
        to_fetch = [unit for unit in stored if self.speculation.needs_memory(unit)]
        others = [unit for unit in updated if unit not in to_fetch]
        with self._params.critical:  # until no copy in memory has values that were rolled back
            restored_on_nvme = self.speculation.roll_back(others, self.free_gradients, grads=grads)
            self._spill_early()
            for unit in to_fetch:  # one by one: there may not be room for all of them
                self._report(actions.OldParametersNeeded(unit))
                self.speculation.roll_back([unit], self.free_gradients, grads=grads)
            self._spill_early()
            for unit in updated:
                self.gathering.changed(unit)
                if unit in restored_on_nvme:
                    self._report(actions.ParametersStale(unit))
                else:
                    self._show_at_rest(unit)  # now: a backward pass through an older graph may read it without `enter`

    def roll_back_all(self, *, grads: bool = True) -> bool:
        """Roll back all speculative updates. Return whether there were any."""
        units = self.speculation.undecided
        self.roll_back(*units, grads=grads)
        return bool(units)

    def prepare_for_gradients(self, unit: Unit) -> None:
        """Block until gradients can be added to the unit's present ones, because no update uses these.

        A speculative update will be rolled back, so its gradients are restored. If another update has ended, also
        retry actions that wait for memory.
        """
        if unit.due is not None:  # the last step's update: this pass has not used the unit, but ranks sum zeros for it
            self._report(actions.ParametersNeeded(unit))
        if unit.speculative is not None:
            self.speculation.mark_for_rollback(unit, self.free_gradients)
            self._spill_early()
        if self._scheduler.waits_for_memory and self.in_flight.some_ended:
            self.poll()

    def free_gradients(self, unit: Unit) -> bool:
        """Free memory for the unit's gradients, by a spill or a wait for an update. Return False if neither can."""
        freed = self._report(actions.GradientsNeedRoom(unit))
        self._show_finished()
        return freed

    def gradients_pause(self) -> None:
        """Tell the scheduler that the gradients of a unit do not change for a while, so that they may spill early."""
        self._report(actions.GradientsPause())

    def _spill_early(self) -> None:
        """Let the scheduler spill early, if the gradients of a speculative update may spill again."""
        if self.in_flight.gradients_may_spill:
            self.in_flight.gradients_may_spill = False
            self._report(actions.GradientsPause())

    def poll(self) -> None:
        """Poll completions: record finished updates, and use the memory that they have released."""
        if self._params.critical.interrupted:
            return
        in_flight = self.in_flight
        in_flight.poll()
        if in_flight.gradients_may_spill:
            self._spill_early()
        if self._scheduler.waits_for_memory:
            self._report(actions.MemoryFreed())
        if in_flight.finished:
            self._show_finished()
        for params in self._params.through_host:
            unit = self.units[params.index]
            if unit.ticket is None and unit.due is None:
                self._params.advance(params)

    def end_step(self) -> None:
        """Show finished units again: all units have this step's update, or have it queued."""
        self.step_is_over = True
        self._show_finished()

    def _show_finished(self) -> None:
        """Show the new values of units whose updates have finished."""
        while self.step_is_over and self.in_flight.finished:
            unit = self.in_flight.finished.pop()
            # The finished update may be the last step's: if this step's is submitted already, the values are stale.
            is_stale = unit.params.update_upload is not None or unit.is_updating
            if not is_stale:
                self._show_at_rest(unit)

    def _show_at_rest(self, unit: Unit) -> None:
        """Show the unit's values, unless it can be evicted: then its next use shows them."""
        if self._is_evictable(unit):
            return
        if unit.residency is Residency.RESIDENT and self.gathering.is_whole(unit):
            unit.views.show()

    def _submit_due(self) -> None:
        """Fetch the unit of every due update, and submit the update."""
        for unit in self.in_flight.due:
            unit.params.compute_copy.pin()
            try:
                self._report(actions.ParametersNeeded(unit))
            finally:
                unit.params.compute_copy.unpin()

    def compute_all(self) -> None:
        """Block until every due or submitted update is computed. Writes of new values home may still be running."""
        self._submit_due()
        for unit in self.in_flight.submitted:
            self.in_flight.wait_computed(unit)

    def write_changed(self) -> None:
        """Write units that were modified outside of the optimizer to NVMe, where updates expect the newest values."""
        for unit in self.units:
            if unit.params.is_nvme_stale() and self._scheduler.writes_updates(unit) and unit.ticket is None:
                with self.resident(unit):
                    unit.params.write_home()

    def drain(self) -> None:
        """Block until every update is computed and written. Speculative updates are rolled back."""
        self.roll_back_all()
        self._submit_due()
        while self.in_flight.finish_one():
            pass
        self.poll()
        for unit in self._scheduler.in_memory:
            self._hide_if_evictable(self.units[unit.index])

    def move_states(self, index: int, *, to_device: bool) -> None:
        """Move the unit's optimizer states to the device (`to_device`), or back. No update may be unfinished.

        Raises:
            torch.OutOfMemoryError: the device has no memory for the states; they stay where they are.
            StorageError: they cannot be read or written.
        """
        refused: torch.OutOfMemoryError | None = None
        with self._params.critical:  # any other error poisons the engine: some tiles have moved, others have not
            try:
                self._pipeline.move_states(index, to_device=to_device)
            except torch.OutOfMemoryError as error:
                refused = error
        if refused is not None:
            raise refused

    def show_newest(self) -> None:
        """Finish every update and show the parameters that are never evicted. All ranks call this together."""
        self.drain()
        for unit in self.units:
            if not unit.offloaded:
                self._params.await_update(unit.params)
                self.gathering.gather(unit)
                unit.views.show()

    # Access from outside of a step #

    @contextmanager
    def gathered(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Yield the unit's flat parameters on the compute device, up to date and unsharded, while the context lasts.

        All ranks call this together.
        """
        self.roll_back(unit)
        self.gathering.drop_early()  # the early gathers of a running pass may leave no room
        unit.params.compute_copy.pin()
        try:
            self._report(actions.ParametersNeeded(unit))
            self.gathering.gather(unit)
            unit.views.show()
            yield unit.params.tensor
        finally:
            self.gathering.reshard(unit)
            unit.params.compute_copy.unpin()
            self._hide_if_evictable(unit)

    @contextmanager
    def resident(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Yield this rank's shard of the unit in host memory, up to date and read only, while the context lasts."""
        self.roll_back(unit)
        unit.views.check()  # first stores values that the user has set with `param.data = values`
        unit.params.compute_copy.pin()
        try:
            self._report(actions.ParametersNeeded(unit))
            with self._in_host_memory(unit):
                yield unit.params.shard
        finally:
            unit.params.compute_copy.unpin()
            self._hide_if_evictable(unit)

    @contextmanager
    def changing(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Yield the shard as `resident` does, for writing.

        The values at the end of the context become the newest values of the unit, also after an exception.
        """
        with self.resident(unit) as flat:
            for move in self._params.begin_change(unit.params):
                move.transfer.result()
            try:
                yield flat
            finally:
                self._params.end_change(unit.params)
                self._params.await_update(unit.params)
                self.gathering.changed(unit)
                unit.views.mark_stale()
                if self.gathering.is_whole(unit):
                    unit.views.show()

    def take_over(self) -> None:
        """Read all values that an earlier process has left on NVMe. All ranks call this together, between steps.

        Raises:
            StorageError: values cannot be read; some have been replaced by then.
        """
        for unit in self.units:
            if unit.params.has_nvme_copy:
                with self.changing(unit):
                    unit.params.read_found()
        self._pipeline.take_over()

    def refresh(self, unit: Unit) -> None:
        """Point the model's parameters of the unit at its memory again, or at NaN if it is not resident."""
        unit.views.forget()
        self._params.await_update(unit.params)
        is_stale = unit.is_updating or self.views.detached
        whole = unit.residency is Residency.RESIDENT and self.gathering.is_whole(unit)
        if whole and not is_stale and not self._is_evictable(unit):
            unit.views.show()
        else:
            unit.views.hide()

    def take_back(self, unit: Unit, index: int) -> None:
        """Take back a lent parameter, see [Note: lent parameters] in param_access.py: let it show its unit's memory."""
        unit.views.take_back(index)
        self.refresh(unit)

    def detach_views(self) -> None:
        """Detach the model's parameters from the memory, before it is freed."""
        self.views.detached = True
        for unit in self.units:
            unit.views.detach()

    @contextmanager
    def created(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Yield memory for the first values of a unit, which the caller fills in the context."""
        params = unit.params
        while not self._params.create(params):
            self._report(actions.RoomNeeded(unit))
        params.compute_copy.pin()
        try:
            yield params.shard
            self._params.create_done(params)
        except BaseException:
            self._params.create_failed(params)
            raise
        finally:
            params.compute_copy.unpin()
        if unit.residency is Residency.RESIDENT:
            self._report(actions.ParametersMade(unit))
        self.refresh(unit)


# Unbound, because bound methods would form a cycle: an unreferenced executor would stay until a garbage collection.
_PERFORMERS: dict[type[Action], Callable[[Executor, Any, Any], object]] = {
    actions.Fetch: Executor._fetch,
    actions.AwaitFetch: lambda executor, unit, _: executor._await_fetch(unit),
    actions.AwaitGradients: lambda executor, unit, _: executor._grads.finish_moves(unit.grads),
    actions.AwaitSpill: lambda executor, unit, _: executor._grads.await_spill(unit.grads),
    actions.AwaitUpdate: lambda executor, unit, _: executor.in_flight.finish(unit),
    actions.Evict: lambda executor, unit, _: executor._evict(unit),
    actions.Spill: lambda executor, unit, _: executor._grads.spill(unit.grads),
    actions.Submit: lambda executor, unit, action: executor.in_flight.submit(unit, action.write, action.next_use),
    actions.SubmitSpeculative: Executor._submit_speculative,
    actions.UpdateOnDevice: lambda executor, unit, _: executor.in_flight.update_on_device(unit),
    actions.AwaitNewest: Executor._await_newest,
}
