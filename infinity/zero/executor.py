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

    def enter(self, rows: Sequence[Unit]) -> None:
        """Block until the units are resident, up to date and unsharded, and start the next actions of the plan.

        If this raises, none of these units stays pinned.
        """
        if self.speculation.units:
            self.roll_back(*rows)
        if self.gathering.early:
            self.gathering.drop_unexpected(rows)
        for row in rows:
            row.params.compute_copy.pin()  # pin all first: the fetch of one must not evict another
        entered: list[Unit] = []
        try:
            for row in rows:
                self.poll()
                self._report(actions.UseBegins(row))
                entered.append(row)
                if self.gathering.has_shared_units:
                    self._gather_for_use(row)
                row.views.show()
        except BaseException as error:
            if isinstance(error, StorageError):
                self._params.critical.mark_interrupted()  # an update that failed is not run again: poison the engine
            for row in rows:
                row.params.compute_copy.unpin()
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

    def gather_preceding(self, row: Unit | None = None) -> None:
        """Gather the updated units that all ranks gather before this one; with None, before another collective."""
        for other in self.gathering.preceding(row):
            self._report(actions.ParametersNeeded(other))
            self.gathering.gather(other)

    def _gather_for_use(self, row: Unit) -> None:
        """Unshard a resident unit that a module is about to use, and start to gather the units that are used next."""
        self.gather_preceding(row)
        self.gathering.enter(row)
        self._gather_upcoming()

    def _gather_upcoming(self) -> None:
        """Start to gather the units that are used next, in their order."""
        while (row := self.gathering.next_to_gather([self.units[unit] for unit in self.cycle.upcoming])) is not None:
            self.roll_back(row)
            row.params.compute_copy.pin()
            try:
                self._report(actions.ParametersNeeded(row))
                self.gathering.gather_early(row)
            except BaseException:
                row.params.compute_copy.unpin()
                raise

    def leave(self, rows: Sequence[Unit]) -> None:
        """End uses: unpin the units, and poll completions."""
        for row in rows:
            row.params.compute_copy.unpin()
        if self.gathering.has_shared_units:
            self._end_uses(rows)
        self.poll()

    def _end_uses(self, rows: Sequence[Unit]) -> None:
        for row in rows:
            self.gathering.leave(row, self.cycle.expected)

    # Actions #

    def _fetch(self, row: Unit, action: actions.Fetch) -> None:
        priority = Priority.DEMAND if action.urgent else Priority.PREFETCH
        self._params.fetch_start(row.params, priority, for_update=row.due is not None)

    def _await_fetch(self, row: Unit) -> None:
        if row.residency is Residency.FETCHING:
            self._params.fetch_wait(row.params)

    def _evict(self, row: Unit) -> None:
        if row.params.is_dirty():  # rare: the update of a unit that the plan evicts has written it home
            with self._in_host_memory(row):
                row.params.write_home()
        row.views.hide()
        self._params.evict(row.params)

    @contextmanager
    def _in_host_memory(self, row: Unit) -> Iterator[None]:
        """Keep this rank's shard of a pinned or resident unit in host memory in this context."""
        self.in_flight.open_host(row)
        try:
            self._params.host_wait(row.params)
            yield
        finally:
            self._params.close_host(row.params)

    def _submit_speculative(self, row: Unit, action: actions.SubmitSpeculative) -> None:
        if self.speculation.can_speculate(row, action.write, action.next_use):
            row.views.hide_trained()
            self.speculation.speculate(row, action.write, action.next_use)

    def _await_newest(self, row: Unit, _: actions.AwaitNewest) -> None:
        self.in_flight.wait_computed(row)
        self._await_fetch(row)
        self._params.await_update(row.params)

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
        self._params.reset_pins({row.params for row in self.in_flight.submitted})
        self._report(actions.CycleEnds(learn))
        self.hide_evictable()

    def hide_evictable(self) -> None:
        """Hide all units that can be evicted, see [Note: values at rest]."""
        for row in self._scheduler.in_memory:
            self.units[row.index].views.hide()

    def _hide_if_evictable(self, row: Unit) -> None:
        if self._is_evictable(row):
            row.views.hide()

    @staticmethod
    def _is_evictable(row: Unit) -> bool:
        """Whether the unit can be evicted and is not pinned."""
        return row.offloaded and not row.is_pinned

    # Updates #

    def update(self, row: Unit, segments: tuple[Segment, ...], indices: Collection[int]) -> None:
        """Update the unit once its parameters are in memory: now, or after their fetch.

        Args:
            segments: the elements of this rank's shard to update, with their rules.
            indices: indices of the parameters that the update changes. The running pass may still use the others.
        """
        self.in_flight.add_due(row, segments)
        self.gathering.changed(row)
        row.views.mark_stale(indices)
        if row.can_update():
            self._report(actions.UpdateDue(row))

    # Speculative updates, see [Note: speculative updates] in speculation.py #

    def begin_speculation(self) -> None:
        """From now on, write parameters to the other slot on NVMe, so that the current version of each unit stays."""
        self.write_changed()
        self._params.begin_speculation()

    def speculate(self, row: Unit, segments: tuple[Segment, ...], *, may_drop_grads: bool) -> bool:
        """Submit a speculative update of the tiles that can be rolled back. Return False if there are none.

        Args:
            may_drop_grads: whether the memory of the gradients may be freed, if they can be reconstructed. Their norm
                must be known: after that, only a rollback or a user needs them.
        """
        before, row.expected = row.speculative, ExpectedUpdate(segments, may_drop_grads)
        try:
            self._report(actions.UpdateExpected(row))
        finally:
            row.expected = None
        return row.speculative is not before

    def commit(self, row: Unit, indices: Collection[int]) -> None:
        """Commit the speculative update, which changed these parameters. The update of its other tiles is due now."""
        row.views.mark_stale(indices)
        self.speculation.commit(row)
        if row.ticket is None:  # finished already, but its new values were not to be shown before the commit
            self.in_flight.finished.append(row)
        if row.residency is not Residency.STORED:
            self._report(actions.UpdateDue(row))

    def roll_back(self, *rows: Unit, grads: bool = True) -> None:
        """Roll back the speculative updates of these units.

        Args:
            grads: restore the gradients, too. If False, gradients that would have to be reconstructed are dropped.

        Raises:
            InfinityError: a module uses one of the units.
            StorageError: the old values cannot be read.
        """
        updated = [row for row in rows if row.speculative is not None]
        if not updated or self._params.critical.interrupted:  # a poisoned engine must not touch its states
            return
        for row in updated:
            if row.residency is Residency.FETCHING:  # prefetched by the plan
                self._report(actions.OldParametersNeeded(row))
        to_fetch = [row for row in updated if row.residency is Residency.STORED and self.speculation.needs_memory(row)]
        others = [row for row in updated if row not in to_fetch]
        with self._params.critical:  # until no copy in memory has values that were rolled back
            restored_on_nvme = self.speculation.roll_back(others, self.free_gradients, grads=grads)
            self._spill_early()
            for row in to_fetch:  # one by one: there may not be room for all of them
                self._report(actions.OldParametersNeeded(row))
                self.speculation.roll_back([row], self.free_gradients, grads=grads)
            self._spill_early()
            for row in updated:
                self.gathering.changed(row)
                if row in restored_on_nvme:
                    self._report(actions.ParametersStale(row))
                else:
                    self._show_at_rest(row)  # now: a backward pass through an older graph may read it without `enter`

    def roll_back_all(self, *, grads: bool = True) -> bool:
        """Roll back all speculative updates. Return whether there were any."""
        rows = self.speculation.undecided
        self.roll_back(*rows, grads=grads)
        return bool(rows)

    def prepare_for_gradients(self, row: Unit) -> None:
        """Block until gradients can be added to the unit's present ones, because no update uses these.

        A speculative update will be rolled back, so its gradients are restored. If another update has ended, also
        retry actions that wait for memory.
        """
        if row.due is not None:  # the last step's update: this pass has not used the unit, but ranks sum zeros for it
            self._report(actions.ParametersNeeded(row))
        if row.speculative is not None:
            self.speculation.mark_for_rollback(row, self.free_gradients)
            self._spill_early()
        if self._scheduler.waits_for_memory and self.in_flight.some_ended:
            self.poll()

    def free_gradients(self, row: Unit) -> bool:
        """Free memory for the unit's gradients, by a spill or a wait for an update. Return False if neither can."""
        freed = self._report(actions.GradientsNeedRoom(row))
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
            row = self.units[params.index]
            if row.ticket is None and row.due is None:
                self._params.advance(params)

    def end_step(self) -> None:
        """Show finished units again: all units have this step's update, or have it queued."""
        self.step_is_over = True
        self._show_finished()

    def _show_finished(self) -> None:
        """Show the new values of units whose updates have finished."""
        while self.step_is_over and self.in_flight.finished:
            row = self.in_flight.finished.pop()
            # The finished update may be the last step's: if this step's is submitted already, the values are stale.
            is_stale = row.params.update_upload is not None or row.is_updating
            if not is_stale:
                self._show_at_rest(row)

    def _show_at_rest(self, row: Unit) -> None:
        """Show the unit's values, unless it can be evicted: then its next use shows them."""
        if self._is_evictable(row):
            return
        if row.residency is Residency.RESIDENT and self.gathering.is_whole(row):
            row.views.show()

    def _submit_due(self) -> None:
        """Fetch the unit of every due update, and submit the update."""
        for row in self.in_flight.due:
            row.params.compute_copy.pin()
            try:
                self._report(actions.ParametersNeeded(row))
            finally:
                row.params.compute_copy.unpin()

    def compute_all(self) -> None:
        """Block until every due or submitted update is computed. Writes of new values home may still be running."""
        self._submit_due()
        for row in self.in_flight.submitted:
            self.in_flight.wait_computed(row)

    def write_changed(self) -> None:
        """Write units that were modified outside of the optimizer to NVMe, where updates expect the newest values."""
        for row in self.units:
            if row.params.is_nvme_stale() and self._scheduler.writes_updates(row) and row.ticket is None:
                with self.resident(row):
                    row.params.write_home()

    def drain(self) -> None:
        """Block until every update is computed and written. Speculative updates are rolled back."""
        self.roll_back_all()
        self._submit_due()
        while self.in_flight.finish_one():
            pass
        self.poll()
        for row in self._scheduler.in_memory:
            self._hide_if_evictable(self.units[row.index])

    def move_states(self, unit: int, *, to_device: bool) -> None:
        """Move the unit's optimizer states to the device (`to_device`), or back. No update may be unfinished.

        Raises:
            torch.OutOfMemoryError: the device has no memory for the states; they stay where they are.
            StorageError: they cannot be read or written.
        """
        refused: torch.OutOfMemoryError | None = None
        with self._params.critical:  # any other error poisons the engine: some tiles have moved, others have not
            try:
                self._pipeline.move_states(unit, to_device=to_device)
            except torch.OutOfMemoryError as error:
                refused = error
        if refused is not None:
            raise refused

    def show_newest(self) -> None:
        """Finish every update and show the parameters that are never evicted. All ranks call this together."""
        self.drain()
        for row in self.units:
            if not row.offloaded:
                self._params.await_update(row.params)
                self.gathering.gather(row)
                row.views.show()

    # Access from outside of a step #

    @contextmanager
    def gathered(self, row: Unit) -> Iterator[torch.Tensor]:
        """Yield the unit's flat parameters on the compute device, up to date and unsharded, while the context lasts.

        All ranks call this together.
        """
        self.roll_back(row)
        self.gathering.drop_early()  # the early gathers of a running pass may leave no room
        row.params.compute_copy.pin()
        try:
            self._report(actions.ParametersNeeded(row))
            self.gathering.gather(row)
            row.views.show()
            yield row.params.tensor
        finally:
            self.gathering.reshard(row)
            row.params.compute_copy.unpin()
            self._hide_if_evictable(row)

    @contextmanager
    def resident(self, row: Unit) -> Iterator[torch.Tensor]:
        """Yield this rank's shard of the unit in host memory, up to date and read only, while the context lasts."""
        self.roll_back(row)
        row.views.check()  # first stores values that the user has set with `param.data = values`
        row.params.compute_copy.pin()
        try:
            self._report(actions.ParametersNeeded(row))
            with self._in_host_memory(row):
                yield row.params.shard
        finally:
            row.params.compute_copy.unpin()
            self._hide_if_evictable(row)

    @contextmanager
    def changing(self, row: Unit) -> Iterator[torch.Tensor]:
        """Yield the shard as `resident` does, for writing.

        The values at the end of the context become the newest values of the unit, also after an exception.
        """
        with self.resident(row) as flat:
            for move in self._params.begin_change(row.params):
                move.transfer.result()
            try:
                yield flat
            finally:
                self._params.end_change(row.params)
                self._params.await_update(row.params)
                self.gathering.changed(row)
                row.views.mark_stale()
                if self.gathering.is_whole(row):
                    row.views.show()

    def take_over(self) -> None:
        """Read all values that an earlier process has left on NVMe. All ranks call this together, between steps.

        Raises:
            StorageError: values cannot be read; some have been replaced by then.
        """
        for row in self.units:
            if row.params.has_nvme_copy:
                with self.changing(row):
                    row.params.read_found()
        self._pipeline.take_over()

    def refresh(self, row: Unit) -> None:
        """Point the model's parameters of the unit at its memory again, or at NaN if it is not resident."""
        row.views.forget()
        self._params.await_update(row.params)
        is_stale = row.is_updating or self.views.detached
        whole = row.residency is Residency.RESIDENT and self.gathering.is_whole(row)
        if whole and not is_stale and not self._is_evictable(row):
            row.views.show()
        else:
            row.views.hide()

    def take_back(self, row: Unit, index: int) -> None:
        """Take back a lent parameter, see [Note: lent parameters] in param_access.py: let it show its unit's memory."""
        row.views.take_back(index)
        self.refresh(row)

    def detach_views(self) -> None:
        """Detach the model's parameters from the memory, before it is freed."""
        self.views.detached = True
        for row in self.units:
            row.views.detach()

    @contextmanager
    def created(self, row: Unit) -> Iterator[torch.Tensor]:
        """Yield memory for the first values of a unit, which the caller fills in the context."""
        params = row.params
        while not self._params.create(params):
            self._report(actions.RoomNeeded(row))
        params.compute_copy.pin()
        try:
            yield params.shard
            self._params.create_done(params)
        except BaseException:
            self._params.create_failed(params)
            raise
        finally:
            params.compute_copy.unpin()
        if row.residency is Residency.RESIDENT:
            self._report(actions.ParametersMade(row))
        self.refresh(row)


# Unbound, because bound methods would form a cycle: an unreferenced executor would stay until a garbage collection.
_PERFORMERS: dict[type[Action], Callable[[Executor, Any, Any], object]] = {
    actions.Fetch: Executor._fetch,
    actions.AwaitFetch: lambda executor, row, _: executor._await_fetch(row),
    actions.AwaitGradients: lambda executor, row, _: executor._grads.finish_moves(row.grads),
    actions.AwaitSpill: lambda executor, row, _: executor._grads.await_spill(row.grads),
    actions.AwaitUpdate: lambda executor, row, _: executor.in_flight.finish(row),
    actions.Evict: lambda executor, row, _: executor._evict(row),
    actions.Spill: lambda executor, row, _: executor._grads.spill(row.grads),
    actions.Submit: lambda executor, row, action: executor.in_flight.submit(row, action.write, action.next_use),
    actions.SubmitSpeculative: Executor._submit_speculative,
    actions.UpdateOnDevice: lambda executor, row, _: executor.in_flight.update_on_device(row),
    actions.AwaitNewest: Executor._await_newest,
}
