"""Decide which units are fetched, evicted and updated, and whose gradients spill: events in, actions out.

[Note: actions]
A *row* is the state of one unit. `on(event)` yields actions one at a time. The executor finishes each action before it
asks for the next one, and the rows show the result. For example, a unit is still STORED after `Fetch` if there was no
memory for it. So each decision sees the state after the last action, and waiting is an action, too. The scheduler sees
no tensor, file, thread or clock. The same events and rows give the same actions: in training, in `infinity plan` and
in tests.

[Note: what is evicted]
The plan expects a cycle like the last one. For each use of a unit, it lists the units to evict and to prefetch. These
actions run in order. An action that must wait, for memory or until a unit is unpinned, delays all later ones. It is
tried again when memory may be free. A unit that the plan does not expect is fetched when it is used, and the least
recently used unit is evicted for it.

[Note: blocked updates]
An update is submitted as soon as it is due, its unit is in memory, and its gradients have room. Without room it is
*blocked*, and tried again whenever memory may be free. The thread waits for that room only if it needs the unit's
newest parameters, or needs the unit's memory for another unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, NoReturn

from infinity.config.sizes import format_size
from infinity.errors import CapacityError
from infinity.memory import Budget
from infinity.schedule import actions
from infinity.schedule.actions import Action, Actions, Event
from infinity.schedule.cycle import Cycle
from infinity.schedule.unit_state import Residency, UnitState
from infinity.tiers.copies import State

_STORED, _RESIDENT = Residency.STORED, Residency.RESIDENT  # an Enum look-up takes 0.2 us
_NOW = -1  # a next use before all others, for a unit that the plan evicts next: its update must end before


def free_slots_wanted(slots: int) -> int:
    """Return how many gradient slots should be free or being spilled once a unit's gradients are complete.

    Two, so that a write may take as long as the next unit computes; with fewer than three slots, one.
    """
    return max(1, min(2, slots - 1))


class Scheduler:
    """The rows of all units, and the decisions about them.

    Args:
        rows: by index of the unit.
        cycle: the uses in the running cycle (one forward and backward pass), and the plan that it follows.
        budget: the ledger of memory for units that are evicted and fetched; the executor updates it.
        advice: takes a number of bytes, and returns a sentence that names the setting to raise by it.
        gradient_slots: number of slots. A slot is memory for the gradients of any one of the units that may spill.
        in_slots: units whose gradients are in a slot, the longest first; the executor updates it.
        writes_all: whether to write each update to NVMe.
        writes_unreconstructable: whether to write each update whose old parameters cannot be reconstructed from the
            optimizer states, because a rollback then needs the old version on NVMe.

    Attributes:
        in_memory: evictable units whose parameters are in memory, the least recently used first.
        planned: actions of the plan that are due but not possible yet, in order.
        blocked: units in memory whose updates had no room for their gradients, the longest first.
    """

    def __init__(
        self,
        rows: Sequence[UnitState],
        cycle: Cycle,
        budget: Budget,
        advice: Callable[[int], str],
        gradient_slots: int,
        in_slots: Collection[int],
        *,
        writes_all: bool = False,
        writes_unreconstructable: bool = False,
    ) -> None:
        self.rows = tuple(rows)
        self.cycle = cycle
        self.in_memory: dict[UnitState, None] = {}
        self._fetching: dict[UnitState, None] = {}  # the oldest first
        self.planned: deque[tuple[str, int]] = deque()
        self.blocked: dict[UnitState, None] = {}
        self._budget = budget
        self._advice = advice
        self._gradient_slots = gradient_slots
        self._in_slots = in_slots
        self._writes_all = writes_all
        self._writes_unreconstructable = writes_unreconstructable

    def on(self, event: Event) -> Actions:
        """Yield the actions for an event, see [Note: actions].

        Raises:
            CapacityError: during the iteration, if units that are in use together do not fit.
        """
        return _HANDLERS[type(event)](self, event)

    @property
    def waits_for_memory(self) -> bool:
        """Whether an action of the plan or an update waits for memory, so that `MemoryFreed` must follow each poll."""
        return bool(self.planned or self.blocked)

    # Cycles #

    def _begin_cycle(self, _: actions.CycleBegins) -> Actions:
        self.cycle.begin()
        self.planned.extend(("evict", unit) for unit in self.cycle.unexpected(self.in_memory))
        yield from ()

    def _end_cycle(self, event: actions.CycleEnds) -> Actions:
        if self.cycle.end(learn=event.learn) or not event.learn:
            self.planned.clear()
        yield from ()

    def _use(self, event: actions.UseBegins) -> Actions:
        row = event.unit
        plan_step = self.cycle.use(row)
        if plan_step is None:
            if not self.cycle.follows_plan:
                self.planned.clear()
        elif plan_step.before is not None:
            self.planned.extend(("evict", victim) for victim in plan_step.before)
            yield from self._follow_plan()
        yield from self._bring(row)
        if plan_step is not None:
            self.planned.extend(plan_step.actions)
            yield from self._follow_plan()

    def _memory_freed(self, _: actions.MemoryFreed) -> Actions:
        yield from self._retry_updates()
        yield from self._follow_plan()

    def _follow_plan(self) -> Actions:
        """Perform the planned actions in order.

        Stop at the first that is not possible yet: the eviction of a pinned unit, or a prefetch without room.
        """
        while self.planned:
            action, unit = self.planned[0]
            row = self.rows[unit]
            if action == "evict" and row.residency is _RESIDENT:
                if row.is_pinned:
                    return
                yield from self._evict(row)
            if action == "prefetch" and row.residency is _STORED:
                if not (yield from self._fetch(row, urgent=False)):
                    return
                yield from self._try_update(row)
            self.planned.popleft()

    # Parameters #

    def _bring(self, row: UnitState) -> Actions:
        """Bring the unit's newest parameters into memory."""
        if row.residency is _STORED:
            yield from self._fetch_now(row)
        if row.due is not None:
            yield from self._update_now(row)
        yield actions.AwaitNewest(row)
        self._arrived(row)

    def _bring_old(self, row: UnitState) -> Actions:
        """Bring the unit's parameters into memory, without running its update if one is due."""
        yield from self._fetch_now(row)
        yield actions.AwaitFetch(row)
        self._arrived(row)

    def _made(self, row: UnitState) -> Actions:
        self._arrived(row)
        yield from ()

    def _drop_stale(self, row: UnitState) -> Actions:
        if row.residency is _RESIDENT:
            yield from self._evict(row)

    def _arrived(self, row: UnitState) -> None:
        """Note that the unit is in memory and the most recently used."""
        self._fetching.pop(row, None)
        if row.offloaded:
            self.in_memory.pop(row, None)
            self.in_memory[row] = None

    def _fetch(self, row: UnitState, *, urgent: bool) -> Generator[Action, None, bool]:
        """Start to fetch a unit. Return False if it has no room now."""
        if not self._budget.fits(row.nbytes):
            return False
        yield actions.Fetch(row, urgent)
        if row.residency is _STORED:  # there was no host memory for it to pass through
            return False
        self._fetching[row] = None
        return True

    def _fetch_now(self, row: UnitState) -> Actions:
        while row.residency is _STORED and not (yield from self._fetch(row, urgent=True)):
            yield from self._make_room(row)

    def _evict(self, row: UnitState) -> Actions:
        yield actions.Evict(row)
        self.in_memory.pop(row, None)
        self._fetching.pop(row, None)  # still listed if it was fetched for its update, and not used

    def _make_room(self, row: UnitState) -> Actions:
        """Take one step towards room for a unit that is needed now.

        The first of these that is possible: evict the least recently used unpinned unit; wait for one update; wait for
        one prefetch, so that a later call can evict its unit.

        Raises:
            CapacityError: the units that are in use leave too little memory.
        """
        for other in self.in_memory:
            if other.residency is _RESIDENT and not other.is_pinned:
                yield from self._evict(other)
                return
        if any(other.ticket is not None for other in self.rows):
            yield actions.AwaitAnyUpdate()
            return
        for other in self._fetching:  # prefetched, and not used
            if not other.is_pinned:
                if other.due is not None:
                    yield from self._update_now(other)
                else:
                    yield actions.AwaitFetch(other)
                    self._arrived(other)
                return
        self._refuse(row)

    def _refuse(self, row: UnitState) -> NoReturn:
        others = {
            other.name: other.nbytes for other in self.rows if other is not row and other.offloaded and other.is_pinned
        }
        more_bytes = row.nbytes + sum(others.values())
        raise CapacityError(
            f"unit `{row.name}` needs {format_size(row.nbytes)} but {', '.join(others)} are in use together and fill "
            f"the {format_size(self.cycle.capacity_bytes)} for parameters: {self._advice(more_bytes)}"
        )

    # Updates #

    def _try_update(self, row: UnitState) -> Actions:
        """Submit the unit's update if one is due, or mark it as blocked, see [Note: blocked updates]."""
        if row.due is None:
            return
        if row.is_updated_on_device:
            yield actions.UpdateOnDevice(row)
            return
        if row.ticket is not None:
            if row.begun is not None:  # the speculative part of the same update is still in the pipeline
                self.blocked[row] = None
                return
            yield actions.AwaitUpdate(row)  # the update of the last step: computed, but not completely written yet
        if row.gradients_have_room:
            yield actions.Submit(row, *self._write_and_next_use(row))
            self.blocked.pop(row, None)
        else:
            self.blocked[row] = None

    def _update_now(self, row: UnitState) -> Actions:
        """Submit the unit's due update. Wait for room if necessary."""
        if row.begun is not None and row.ticket is not None:
            yield actions.AwaitUpdate(row)
        while row.due is not None:
            yield from self._try_update(row)
            if row.due is not None and not (yield from self._free_gradients(row)):
                raise CapacityError(
                    f"no host memory is left for the gradients of unit `{row.name}`: raise tiering.host_memory"
                )

    def _try_speculative(self, row: UnitState) -> Actions:
        """Submit the expected update as a speculative one, if the unit and its gradients are in memory and idle."""
        at_rest = not (row.is_updating or row.is_updated_on_device) and row.residency is _RESIDENT
        if at_rest and row.gradients_have_room:
            yield actions.SubmitSpeculative(row, *self._write_and_next_use(row))

    def _retry_updates(self) -> Actions:
        """Submit blocked updates, the longest first. Stop at the first without room: the others need the same room."""
        for row in list(self.blocked):
            if row.due is None or row.residency is _STORED:
                del self.blocked[row]
            elif row.begun is None or row.ticket is None:
                yield from self._try_update(row)
                if row.due is not None:
                    return

    def _write_and_next_use(self, row: UnitState) -> tuple[bool, int]:
        """Return `write` and `next_use` for the unit's update, see `actions.Submit`."""
        next_use = _NOW if self.cycle.is_evicted_next(row) else self.cycle.first_use(row)
        return self.cycle.may_be_evicted(row) or self.writes_updates(row), next_use

    def writes_updates(self, row: UnitState) -> bool:
        """Whether each update of the unit is written, for crash consistency or because a rollback needs both slots."""
        return self._writes_all or (self._writes_unreconstructable and not row.is_reconstructable)

    # Gradients #

    def _free_gradients(self, row: UnitState) -> Generator[Action, None, bool]:
        """Free memory for the unit's gradients, by a spill or a wait for an update. Return False if neither can."""
        if row.is_updated_on_device:
            return False
        if row.spills and not row.gradients_are_used:
            for state in (State.LEAVING, State.VALID, State.ARRIVING, State.WRITING):  # the shortest wait first
                other = self._first_in_slot(state)
                if other is not None:
                    if state is State.ARRIVING:
                        yield actions.AwaitGradients(other)
                    if state is not State.LEAVING:
                        yield actions.Spill(other)
                    yield actions.AwaitSpill(other)
                    return True
        if any(other.ticket is not None for other in self.rows):
            yield actions.AwaitAnyUpdate()
            return True
        return False

    def _spill_early(self, _event: actions.GradientsPause) -> Actions:
        """Start spills until enough slots for the next units are free or being written, see `free_slots_wanted`."""
        leaving = sum(self.rows[unit].gradients is State.LEAVING for unit in self._in_slots)
        free = self._gradient_slots - len(self._in_slots)
        for _ in range(free_slots_wanted(self._gradient_slots) - free - leaving):
            oldest = self._first_in_slot(State.VALID)
            if oldest is None:
                return
            yield actions.Spill(oldest)

    def _first_in_slot(self, state: State) -> UnitState | None:
        """Return the unit in this state that has been in a slot longest, unless an update reads its gradients."""
        for unit in self._in_slots:
            row = self.rows[unit]
            if row.spills and row.gradients is state and not row.gradients_are_used:
                return row
        return None


# Unbound methods: bound ones would form a cycle, and an unreferenced scheduler would stay until a garbage collection.
_HANDLERS: dict[type[Event], Callable[[Scheduler, Any], Actions]] = {
    actions.CycleBegins: Scheduler._begin_cycle,
    actions.CycleEnds: Scheduler._end_cycle,
    actions.UseBegins: Scheduler._use,
    actions.MemoryFreed: Scheduler._memory_freed,
    actions.ParametersNeeded: lambda scheduler, event: scheduler._bring(event.unit),
    actions.OldParametersNeeded: lambda scheduler, event: scheduler._bring_old(event.unit),
    actions.ParametersMade: lambda scheduler, event: scheduler._made(event.unit),
    actions.ParametersStale: lambda scheduler, event: scheduler._drop_stale(event.unit),
    actions.RoomNeeded: lambda scheduler, event: scheduler._make_room(event.unit),
    actions.UpdateDue: lambda scheduler, event: scheduler._try_update(event.unit),
    actions.UpdateExpected: lambda scheduler, event: scheduler._try_speculative(event.unit),
    actions.GradientsNeedRoom: lambda scheduler, event: scheduler._free_gradients(event.unit),
    actions.GradientsPause: Scheduler._spill_early,
}
