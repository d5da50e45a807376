"""Carries out the plan: the only caller of fetch, evict and write back.

[Note: what the compute thread waits for]
`enter` returns when a unit may be computed on: fetched, and updated if an update was pending. Everything else is
started and left running. What is in flight is looked at again on every event (`_settle`): finished updates give
their gradients and pins back, and actions of the plan that had to wait for memory are tried again. The thread
blocks for memory only when the unit that it needs now has none.

[Note: what a parameter shows]
The model's parameters show a unit's values while these are in memory, the newest, and whole; at all other times NaN.
A unit whose update has begun is hidden until the new values are there, so nobody reads old ones. An update also counts
as a change in place, for autograd: a backward pass through a graph that was made with the old values raises torch's own
error, where it would compute with the new ones.

[Note: hand-overs]
An exception may come between any two lines (Ctrl-C). While an update passes from one owner to the next, it is in
neither's books: `torn` is set before that and cleared behind it, without `finally`, so that it stays if the hand-over
was left half way. Then some update is lost, or its values are not known to be newer than the home's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from infinity.errors import CapacityError, StorageError
from infinity.io import Priority
from infinity.optim.pipeline import Segment, UpdateJob, UpdatePipeline, UpdateTicket
from infinity.schedule import Plan, PlanStep, Trace, make_plan
from infinity.telemetry import Counters, StallCause
from infinity.tiers import GradLease, GradStore, ParamStore, Residency
from infinity.zero.callbacks import weakly
from infinity.zero.gathering import Gathering
from infinity.zero.model_parts import local_part, set_local_part
from infinity.zero.partition import Partition
from infinity.zero.ranks import ALONE, Ranks

_NOW = -1  # when an update is needed that keeps its unit from leaving memory


class Executor:
    """Moves units and starts their updates.

    Args:
        capacity_bytes: memory for the parameters of units that are not persistent.
    """

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        params: ParamStore,
        grads: GradStore,
        pipeline: UpdatePipeline,
        capacity_bytes: int,
        counters: Counters,
        ranks: Ranks = ALONE,
    ) -> None:
        self._params = params
        self._pipeline = pipeline
        self._capacity_bytes = capacity_bytes
        self._counters = counters
        self._views = _ParameterViews(model, partition, params)
        self._grads = grads
        self._gathering = Gathering(params, ranks, weakly(self._bring), capacity_bytes, counters)
        # The cycle that is running, and the plan that it should follow.
        self._trace = Trace()
        self._recording = False
        self._last_uses: list[int] = []
        self._first_uses: dict[int, int] = {}  # position of each unit's first use in the last cycle
        self._plan: Plan | None = None
        self._plan_ends: dict[int, int] = {}  # each unit's last step in it
        self._position: int | None = None  # None: the cycle has left the plan
        self._todo: deque[tuple[str, int]] = deque()
        self._fetching: set[int] = set()
        self._recency: dict[int, None] = {}  # least recently used first
        # Updates: pending ones wait for their unit to be fetched, tickets are in the pipeline.
        self._pending: dict[int, tuple[Segment, ...]] = {}
        self._tickets: dict[int, tuple[UpdateTicket, GradLease]] = {}
        self.torn = False  # see [Note: hand-overs]

    # Uses #

    def enter(self, units: tuple[int, ...]) -> None:
        """Wait until the units may be computed on, and start what the plan says; after an exception none is in use."""
        for unit in units:
            self._params.pin(unit)  # before anything is evicted for another of them
        entered: list[int] = []
        try:
            for unit in units:
                self._ready(unit)
                entered.append(unit)
                self._gathering.enter(unit)
                self._views.show(unit)
        except BaseException as error:
            self.torn |= isinstance(error, StorageError)  # an update has failed, and is not looked at again
            for unit in units:
                self._params.unpin(unit)
            for unit in entered:
                self._gathering.leave(unit)
            raise

    def _ready(self, unit: int) -> None:
        """Have the unit resident and up to date, as the plan says."""
        self._settle()
        step = self._follow(unit)
        if step is not None and step.before is not None:
            self._todo.extend(("evict", victim) for victim in step.before)
            self._work_off()
        self._bring(unit)
        if step is not None:
            self._todo.extend(step.actions)
            self._work_off()

    def leave(self, units: tuple[int, ...]) -> None:
        """The units may be evicted again."""
        for unit in units:
            self._params.unpin(unit)
            self._gathering.leave(unit)
        self._settle()

    def _bring(self, unit: int) -> None:
        """Have the unit resident and up to date."""
        if self._params.residency(unit) is Residency.STORED:
            self._fetch_now(unit)
        self._start_pending(unit)
        if unit in self._tickets:
            ticket, _ = self._tickets[unit]
            with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
                self._pipeline.wait_computed(ticket)
            self._params.publish(unit)
        if self._params.residency(unit) is Residency.FETCHING:
            self._params.fetch_wait(unit)
            self._fetching.discard(unit)
        if self._is_whole(unit):
            self._views.show(unit)
        self._touch(unit)

    def _is_whole(self, unit: int) -> bool:
        """What is resident of the unit is all of it."""
        return self._params.specs[unit].sharding.count == 1 or self._gathering.is_whole(unit)

    def _touch(self, unit: int) -> None:
        """The unit was used last."""
        if self._params.specs[unit].offloaded:
            self._recency.pop(unit, None)
            self._recency[unit] = None

    def _fetch_now(self, unit: int) -> None:
        while not self._params.fetch_start(unit, Priority.DEMAND, updated=unit in self._pending):
            self._make_room(unit)
        self._fetching.add(unit)

    # The plan #

    def begin_cycle(self) -> None:
        """A forward pass begins: follow the plan from its start, and record what is used."""
        self._trace = Trace()
        self._recording = True
        self._gathering.begin_cycle(self._last_uses)
        self._position = 0 if self._plan is not None else None
        if self._plan is not None:
            strangers = [unit for unit in self._recency if unit not in self._plan.resident]
            self._todo.extend(("evict", unit) for unit in strangers)
        self._settle()

    def end_cycle(self, *, learn: bool) -> None:
        """The backward pass is over, or the forward pass had none.

        Args:
            learn: it was a training step; what follows will probably be like it.
        """
        self._recording = False
        self._position = None
        self._gathering.end_cycle()
        self._params.keep_pins(self._tickets)  # an exception may have kept a use from being left
        if learn:
            self._replan(self._trace)
            self._last_uses = self._trace.uses
            self._first_uses = {unit: index for index, unit in reversed(list(enumerate(self._last_uses)))}
        else:
            self._todo.clear()

    def _replan(self, trace: Trace) -> None:
        specs = self._params.specs
        uses = [unit for unit in trace.uses if specs[unit].offloaded]
        if self._plan is None or [step.unit for step in self._plan.steps] != uses:
            self._plan = make_plan(uses, [spec.nbytes for spec in specs], self._capacity_bytes)
            self._plan_ends = {step.unit: index for index, step in enumerate(self._plan.steps)}
            self._todo.clear()

    def _follow(self, unit: int) -> PlanStep | None:
        """The plan's step for this use; None once the cycle has left the plan."""
        if self._recording:
            self._trace.use(unit)
        if self._plan is None or self._position is None or not self._params.specs[unit].offloaded:
            return None
        steps = self._plan.steps
        if self._position < len(steps) and steps[self._position].unit == unit:
            self._position += 1
            return steps[self._position - 1]
        self._position = None  # the trace is advice; the rest of this cycle is served on demand
        self._todo.clear()
        return None

    def _work_off(self) -> None:
        """Do what the plan asks for, in its order, up to the first action that must wait for memory."""
        while self._todo:
            action, unit = self._todo[0]
            if action == "evict" and not self._try_evict(unit):
                return
            if action == "prefetch" and self._params.residency(unit) is Residency.STORED:
                if not self._params.fetch_start(unit, Priority.PREFETCH, updated=unit in self._pending):
                    return
                self._fetching.add(unit)
                self._try_pending(unit)
            self._todo.popleft()

    def _try_evict(self, unit: int) -> bool:
        """Evict the unit unless it is away already; False if it is still needed or being written."""
        if self._params.residency(unit) is not Residency.RESIDENT:
            return True
        if self._params.is_pinned(unit):
            return False
        if self._params.is_dirty(unit):
            self._write_back(unit)
        self._views.hide(unit)
        self._params.evict(unit)
        self._recency.pop(unit, None)
        return True

    def _write_back(self, unit: int) -> None:
        """Write a dirty unit home and wait; the plan has updates write through, so this is the exception."""
        self._host_open(unit)
        try:
            self._params.host_wait(unit)
            write = self._params.write_tile(unit, 0, self._params.specs[unit].shard_numel)
            if write is not None:
                with self._counters.stalled(StallCause.DISK_WRITE):
                    write.result()
        finally:
            self._params.host_close(unit)
        self._params.set_dirty(unit, False)

    def _host_open(self, unit: int) -> None:
        while not self._params.host_open(unit):
            if not self.finish_an_update():
                raise CapacityError(
                    f"no host memory is left for the values of unit `{self._params.specs[unit].name}` on their way: "
                    "raise tiering.host_memory"
                )

    def _make_room(self, unit: int) -> None:
        """Free memory for a unit that is needed now: what was used longest ago first."""
        for other in list(self._recency):
            if self._params.residency(other) is Residency.RESIDENT and not self._params.is_pinned(other):
                self._try_evict(other)
                return
        if self.finish_an_update():
            return
        for other in range(len(self._params.specs)):  # fetched ahead for a use that did not come
            if self._params.residency(other) is Residency.FETCHING and not self._params.is_pinned(other):
                if other in self._pending:
                    self._start_pending(other)
                    return
                self._params.fetch_wait(other)
                self._fetching.discard(other)
                self._touch(other)
                return
        spec = self._params.specs[unit]
        pinned = [s.name for i, s in enumerate(self._params.specs) if self._params.is_pinned(i) and s.offloaded]
        raise CapacityError(
            f"unit `{spec.name}` needs {spec.nbytes} bytes but {', '.join(pinned)} are in use together and fill the "
            f"{self._capacity_bytes} bytes for parameters: raise tiering.host_memory (or device_memory)"
        )

    def forward_order(self, units: Sequence[int]) -> list[int]:
        """The units in the order in which the next cycle will probably use them first."""
        return sorted(units, key=self._needed)

    def _needed(self, unit: int) -> int:
        """When the next cycle will probably use the unit first."""
        return self._first_uses.get(unit, len(self._last_uses))

    def _is_leaving(self, unit: int) -> bool:
        """The plan evicts the unit after a use, and this cycle has had the last one."""
        if self._plan is None or self._position is None or unit not in self._plan.evicted:
            return False
        return self._position > self._plan_ends[unit]

    # Updates #

    def expect_updates(self, units: Sequence[int]) -> None:
        """Read the optimizer states of these units ahead."""
        self._pipeline.expect(units)

    def update(self, unit: int, segments: tuple[Segment, ...]) -> None:
        """Update the unit as soon as its values are in memory: now if they are, else when they are fetched."""
        self._pending[unit] = segments
        self._gathering.changed(unit)
        self._views.outdate(unit, trained=True)
        if self._params.residency(unit) is not Residency.STORED:
            self._try_pending(unit)

    @property
    def awaits_updates(self) -> bool:
        """Some updates are not finished, or wait for their units."""
        return bool(self._pending or self._tickets)

    def _try_pending(self, unit: int) -> None:
        """Start the unit's update, unless its gradients have no room yet; it is tried again on every event."""
        if unit in self._pending:
            if unit in self._tickets:  # last step's values are computed, but not all written yet
                self._wait_update(unit)
            if self._grads.can_hand_over(unit):
                self.torn = True
                self._host_open(unit)
                self._submit(unit, self._grads.hand_over(unit))
                self.torn = False

    def _start_pending(self, unit: int) -> None:
        """Start the unit's update, if one is pending."""
        while unit in self._pending:
            self._try_pending(unit)
            if unit in self._pending and not self._grads.make_room(unit) and not self.finish_an_update():
                raise CapacityError(
                    f"no host memory is left for the gradients of unit `{self._params.specs[unit].name}`: "
                    "raise tiering.host_memory"
                )

    def _submit(self, unit: int, lease: GradLease) -> None:
        segments = self._pending.pop(unit)
        spec = self._params.specs[unit]
        trained = spec.trainable_numel // spec.sharding.count
        values = self._params.host_ready(unit)
        job = UpdateJob(
            unit=unit,
            param=self._params.host_tensor(unit)[:trained],
            grad=lease.tensor,
            segments=segments,
            ready=tuple(arrival for arrival in (values, lease.arrival) if arrival is not None),
            write_back=spec.offloaded and (self._plan is None or unit in self._plan.evicted),
            # The same for every placement, and after a resume; there are none where a rank has padding alone.
            seed=segments[0].rule.step << 24 | unit if segments else 0,
            first=spec.sharding.rank * trained,
            needed=_NOW if self._is_leaving(unit) else self._needed(unit),
        )
        self._tickets[unit] = (self._pipeline.submit(job), lease)

    def finish_an_update(self) -> bool:
        """Wait for one update, whichever is the first to be done; False if there is none."""
        if not self._tickets:
            return False
        with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
            ticket = self._pipeline.first_computed([ticket for ticket, _ in self._tickets.values()])
        self._wait_update(ticket.job.unit)
        return True

    def _wait_update(self, unit: int) -> None:
        ticket, _ = self._tickets[unit]
        with self._counters.stalled(StallCause.OPTIMIZER, self._pipeline.waits):
            self._pipeline.wait_computed(ticket)
        with self._counters.stalled(StallCause.DISK_WRITE):
            ticket.wait()
        self._finish_update(unit)

    def _settle(self) -> None:
        """Take note of finished updates and use the memory that they gave back."""
        if self.torn:
            return
        for unit in [unit for unit, (ticket, _) in self._tickets.items() if ticket.finished()]:
            self._finish_update(unit)
        for unit in list(self._pending):
            if self._params.residency(unit) is not Residency.STORED:
                self._try_pending(unit)
        for unit in self._fetching:
            if unit not in self._tickets and unit not in self._pending:
                self._params.advance(unit)
        self._work_off()

    def _finish_update(self, unit: int) -> None:
        within, self.torn = self.torn, True
        ticket, lease = self._tickets.pop(unit)
        lease.release()
        self._params.host_close(unit)
        ticket.wait()  # raises what went wrong
        self._params.set_dirty(unit, not ticket.job.write_back)
        if self._is_whole(unit) and unit not in self._pending and self._params.residency(unit) is Residency.RESIDENT:
            self._views.show(unit)
        self.torn = within

    def drain(self) -> None:
        """Carry out every pending update and wait for all of them."""
        for unit in list(self._pending):
            self._params.pin(unit)
            self._bring(unit)
            self._params.unpin(unit)
        while self.finish_an_update():
            pass
        self._settle()

    def show_newest(self) -> None:
        """Carry out every update and have the parameters that never leave show their values; all ranks together."""
        self.drain()
        for unit, spec in enumerate(self._params.specs):
            if not spec.offloaded:
                if not self._is_whole(unit):
                    self._gathering.gather(unit)
                self._views.show(unit)

    # Values outside of a step #

    @contextmanager
    def gathered(self, unit: int) -> Iterator[torch.Tensor]:
        """The unit's flat parameters, up to date, for as long as the context lasts; all ranks call this together."""
        if self._params.specs[unit].sharding.count == 1:
            with self.resident(unit) as flat:
                yield flat
            return
        self._params.pin(unit)
        try:
            self._bring(unit)
            self._gathering.gather(unit)
            self._views.show(unit)
            yield self._params.tensor(unit)
        finally:
            if self._params.specs[unit].offloaded:
                self._gathering.changed(unit)
            self._params.unpin(unit)

    @contextmanager
    def resident(self, unit: int) -> Iterator[torch.Tensor]:
        """This rank's shard of the unit in host memory, up to date, for as long as the context lasts."""
        self._params.pin(unit)
        try:
            self._bring(unit)
            self._host_open(unit)
            try:
                self._params.host_wait(unit)
                yield self._params.host_tensor(unit)
            finally:
                self._params.host_close(unit)
        finally:
            self._params.unpin(unit)

    def refresh(self, unit: int) -> None:
        """Let the model's parameters of the unit be what they are for it again: its memory, or NaN while it is away."""
        self._views.forget(unit)
        behind = unit in self._pending or unit in self._tickets or self._views.detached
        if self._params.residency(unit) is Residency.RESIDENT and not behind and self._is_whole(unit):
            self._views.show(unit)
        else:
            self._views.hide(unit)

    @property
    def detached(self) -> bool:
        """The memory is gone, or about to go."""
        return self._views.detached

    def lend(self, unit: int, slot: int, values: torch.Tensor) -> None:
        """The model's parameter lies in `values` until `take_back`, wherever its unit goes meanwhile."""
        self._views.lend(unit, slot, values)

    def take_back(self, unit: int, slot: int) -> None:
        """The model's parameter is what its unit is again."""
        self._views.lent[unit].discard(slot)
        self.refresh(unit)

    def lent(self, unit: int, slot: int) -> torch.Tensor | None:
        """What the parameter lies in while it is lent; None if it is not."""
        return self._views.values(unit, slot) if slot in self._views.lent[unit] else None

    @property
    def lends(self) -> bool:
        """Some parameter is lent."""
        return any(self._views.lent)

    @contextmanager
    def created(self, unit: int) -> Iterator[torch.Tensor]:
        """Memory for a unit that has no values yet; what is written becomes its values."""
        while not self._params.create(unit):
            self._make_room(unit)
        self._params.pin(unit)
        try:
            yield self._params.host_tensor(unit)
            self._params.create_done(unit)
        except BaseException:
            self._params.create_failed(unit)
            raise
        finally:
            self._params.unpin(unit)
        if self._params.residency(unit) is Residency.RESIDENT:
            self._touch(unit)
        self.refresh(unit)

    def detach(self) -> None:
        """Leave the model's parameters without memory, before the memory goes."""
        self._views.hide_all()

    def mark_changed(self, unit: int) -> None:
        """The values were written from outside."""
        self._params.set_dirty(unit, True)
        self._gathering.changed(unit)
        self._views.outdate(unit, trained=False)
        if self._is_whole(unit):
            self._views.show(unit)


class _ParameterViews:
    """Points the model's parameters at their unit's memory, or at a NaN of the right shape while it is away.

    A parameter that is read while its unit is stored is then NaN: loud, of the right shape, and free. Parameters that
    are lent stay as they are.

    Attributes:
        lent: slots of each unit.
        detached: the units' memory is about to go, so that no parameter may lie in it any more.
    """

    def __init__(self, model: nn.Module, partition: Partition, params: ParamStore) -> None:
        self._params = params
        self._units = partition.units
        self._parameters = [[model.get_parameter(slot.name) for slot in unit.slots] for unit in partition.units]
        # Made when the unit is first in memory (a view of freed storage cannot be made), then kept.
        self._views: dict[int, list[torch.Tensor]] = {}
        self._shown: list[bool | None] = [None] * len(partition.units)  # None: neither values nor NaN of ours
        self.lent: list[set[int]] = [set() for _ in partition.units]
        self.detached = False

    def forget(self, unit: int) -> None:
        """Somebody else has written to the parameters' `data`."""
        self._shown[unit] = None

    @torch.inference_mode(False)
    def outdate(self, unit: int, *, trained: bool) -> None:
        """The unit's values are old, or those of its trained parameters; see [Note: what a parameter shows].

        The rest of a backward pass may still need the others.
        """
        slots = self._units[unit].slots
        old = [index for index, slot in enumerate(slots) if slot.trainable or not trained]
        if self._shown[unit] is not False:
            self._set(unit, old, self._nothing(unit))
            self._shown[unit] = None
        torch.autograd.graph.increment_version([self._parameters[unit][index] for index in old])

    def values(self, unit: int, slot: int) -> torch.Tensor:
        """What the parameter lies in."""
        return local_part(self._parameters[unit][slot]).detach()

    @torch.inference_mode(False)
    def lend(self, unit: int, slot: int, values: torch.Tensor) -> None:
        self.lent[unit].add(slot)
        set_local_part(self._parameters[unit][slot], values)

    @torch.inference_mode(False)  # a parameter must not become an inference tensor, which cannot be trained
    def show(self, unit: int) -> None:
        if self._shown[unit]:
            return
        if unit not in self._views:
            flat = self._params.tensor(unit)
            self._views[unit] = [
                flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self._units[unit].slots
            ]
        self._set(unit, range(len(self._views[unit])), self._views[unit])
        self._shown[unit] = True

    @torch.inference_mode(False)
    def hide(self, unit: int) -> None:
        if self._shown[unit] is False:
            return
        self._set(unit, range(len(self._parameters[unit])), self._nothing(unit))
        self._shown[unit] = False

    def _nothing(self, unit: int) -> list[torch.Tensor]:
        flat = self._params.tensor(unit)
        nothing = torch.full((), float("nan"), dtype=flat.dtype, device=flat.device)
        return [nothing.expand(slot.shape) for slot in self._units[unit].slots]

    def _set(self, unit: int, slots: Iterable[int], values: Sequence[torch.Tensor]) -> None:
        for slot in slots:
            if slot not in self.lent[unit]:
                set_local_part(self._parameters[unit][slot], values[slot])

    def hide_all(self) -> None:
        self.detached = True
        self._views.clear()
        for unit in range(len(self._units)):
            self.hide(unit)
