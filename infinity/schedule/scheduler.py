"""Decides which units are fetched, evicted and updated, and whose gradients spill: events in, actions out.

[Note: actions]
`on(event)` yields actions one after the other. Whoever performs them finishes one before asking for the next, and the
rows show what came of it: a unit that was to be fetched is STORED still if there was no memory for it. So a decision
sees the world as the last action left it, and a wait is an action like any other. Nothing here sees a tensor, a file, a
thread or a clock; the same events and the same rows give the same actions, in training, in `infinity plan` and in a
test.

[Note: what is evicted]
The plan says what to evict and to prefetch at each use of a training step that is like the last one. Its actions are
performed in their order; one that has to wait for memory stops those behind it, and is tried again when memory may have
been freed. What the plan does not foresee is fetched when it is needed, and what was used longest ago makes room.

[Note: blocked updates]
An update is submitted as soon as it is due, its unit is in memory, and there is room for its gradients. One that has no
room is *blocked*: it is tried again whenever memory may have been freed. Only who needs the unit's newest parameters
waits for that room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, NoReturn

from infinity.config.sizes import format_size, size_to_set
from infinity.errors import CapacityError
from infinity.memory import Budget
from infinity.schedule.actions import (
    Action,
    Actions,
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
from infinity.schedule.cycle import Cycle
from infinity.schedule.unit_state import UnitState
from infinity.tiers import Residency
from infinity.tiers.copies import State

_STORED, _RESIDENT = Residency.STORED, Residency.RESIDENT  # a look-up in an Enum takes 0.2 us
_NOW = -1  # when an update is needed that keeps its unit from leaving memory


def spilled_ahead(slots: int) -> int:
    """How many of these slots are free, or are being written, once a unit's gradients are complete: two, so that one
    write has as long as the next unit computes; of the others at least one."""
    return max(1, min(2, slots - 1))


class Scheduler:
    """Rows of all units, and what is to be done next.

    Args:
        rows: of all units.
        cycle: what is used, and the plan.
        budget: the ledger of memory for units that come and go, kept by whoever performs fetches and evictions.
        budget_key: the configuration's name for it.
        gradient_slots: how many units' gradients have memory at once, of those that may spill.
        in_slots: units whose gradients have such memory, the longest first; kept by whoever performs.
        writes_all: each update is written to the drives.
        writes_unreconstructable: so are updates of units whose old parameters the optimizer state cannot reconstruct.

    Attributes:
        staying: units that never leave memory.
        in_memory: units that come and go, of which memory has the parameters; the least recently used first.
        planned: actions of the plan that have to wait until memory is freed, in its order.
        blocked: units in memory whose updates had no room, the longest first.
    """

    def __init__(
        self,
        rows: Sequence[UnitState],
        cycle: Cycle,
        budget: Budget,
        budget_key: str,
        gradient_slots: int = 0,
        in_slots: Collection[int] = (),
        *,
        writes_all: bool = False,
        writes_unreconstructable: bool = False,
    ) -> None:
        self.rows = tuple(rows)
        self.staying = tuple(row for row in self.rows if not row.moves)
        self.cycle = cycle
        self.in_memory: dict[UnitState, None] = {}
        self._fetching: dict[UnitState, None] = {}  # the oldest first
        self.planned: deque[tuple[str, int]] = deque()
        self.blocked: dict[UnitState, None] = {}
        self._budget = budget
        self._budget_key = budget_key
        self._gradient_slots = gradient_slots
        self._in_slots = in_slots
        self._writes_all = writes_all
        self._writes_unreconstructable = writes_unreconstructable

    def on(self, event: Event) -> Actions:
        """What is to be done because of an event, see [Note: actions].

        Raises:
            CapacityError: units that are in use together do not fit; while the actions are iterated over.
        """
        return _HANDLERS[type(event)](self, event)

    @property
    def waits_for_memory(self) -> bool:
        """Some action of the plan, or an update, has to wait until memory is freed."""
        return bool(self.planned or self.blocked)

    # Passes #

    def _begin_pass(self, _: PassBegins) -> Actions:
        self.cycle.begin()
        self.planned.extend(("evict", unit) for unit in self.cycle.strangers(row.index for row in self.in_memory))
        yield from ()

    def _end_pass(self, event: PassEnds) -> Actions:
        if self.cycle.end(learn=event.learn) or not event.learn:
            self.planned.clear()
        yield from ()

    def _use(self, event: UseBegins) -> Actions:
        row = self.rows[event.unit]
        step = self.cycle.use(row.index)
        if step is None:
            if not self.cycle.follows_plan:
                self.planned.clear()
        elif step.before is not None:
            self.planned.extend(("evict", victim) for victim in step.before)
            yield from self._follow_plan()
        yield from self._bring(row)
        if step is not None:
            self.planned.extend(step.actions)
            yield from self._follow_plan()

    def _memory_freed(self, _: MemoryFreed) -> Actions:
        yield from self._retry_updates()
        yield from self._follow_plan()

    def _follow_plan(self) -> Actions:
        """Do what the plan asks for, in its order, up to the first action that must wait for memory."""
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
        """Have the unit's newest parameters in memory."""
        if row.residency is _STORED:
            yield from self._fetch_now(row)
        if row.update_is_due:
            yield from self._update_now(row)
        yield AwaitNewest(row.index)
        self._arrived(row)

    def _bring_old(self, row: UnitState) -> Actions:
        yield from self._fetch_now(row)
        yield AwaitFetch(row.index)
        self._arrived(row)

    def _made(self, row: UnitState) -> Actions:
        self._arrived(row)
        yield from ()

    def _drop_stale(self, row: UnitState) -> Actions:
        if row.residency is _RESIDENT:
            yield from self._evict(row)

    def _arrived(self, row: UnitState) -> None:
        """The unit is in memory, and was used last."""
        self._fetching.pop(row, None)
        if row.moves:
            self.in_memory.pop(row, None)
            self.in_memory[row] = None

    def _fetch(self, row: UnitState, *, urgent: bool) -> Generator[Action, None, bool]:
        """Start to fetch a unit; False if there is no room now."""
        if not self._budget.fits(row.nbytes):
            return False
        yield Fetch(row.index, urgent)
        if row.residency is _STORED:  # memory on the way is used up
            return False
        self._fetching[row] = None
        return True

    def _fetch_now(self, row: UnitState) -> Actions:
        while row.residency is _STORED and not (yield from self._fetch(row, urgent=True)):
            yield from self._make_room(row)

    def _evict(self, row: UnitState) -> Actions:
        yield Evict(row.index)
        self.in_memory.pop(row, None)
        self._fetching.pop(row, None)  # an update may have waited for its values, and nobody else

    def _make_room(self, row: UnitState) -> Actions:
        """Free memory for a unit that is needed now: what was used longest ago first."""
        for other in self.in_memory:
            if other.residency is _RESIDENT and not other.is_pinned:
                yield from self._evict(other)
                return
        if any(other.update_is_submitted for other in self.rows):
            yield AwaitAnyUpdate()
            return
        for other in self._fetching:  # fetched ahead for a use that did not come
            if not other.is_pinned:
                if other.update_is_due:
                    yield from self._update_now(other)
                else:
                    yield AwaitFetch(other.index)
                    self._arrived(other)
                return
        self._refuse(row)

    def _refuse(self, row: UnitState) -> NoReturn:
        others = {
            other.name: other.nbytes for other in self.rows if other is not row and other.moves and other.is_pinned
        }
        more_bytes = row.nbytes + sum(others.values())
        raise CapacityError(
            f"unit `{row.name}` needs {format_size(row.nbytes)} but {', '.join(others)} are in use together and fill "
            f"the {format_size(self.cycle.capacity_bytes)} for parameters: raise {self._budget_key} by "
            f"{more_bytes} bytes ({size_to_set(more_bytes)}), of which parameters get a part"
        )

    # Updates #

    def _try_update(self, row: UnitState) -> Actions:
        """Submit the unit's update if one is due; it is blocked if it has no room, see [Note: blocked updates]."""
        if not row.update_is_due:
            return
        if row.is_updated_on_device:
            yield UpdateOnDevice(row.index)
            return
        if row.update_is_submitted:
            if row.update_has_begun:  # with this step's
                self.blocked[row] = None
                return
            yield AwaitUpdate(row.index)  # the last step's: computed, but not all written yet
        if row.gradients_have_room:
            yield Submit(row.index, *self._urgency(row))
            self.blocked.pop(row, None)
        else:
            self.blocked[row] = None

    def _update_now(self, row: UnitState) -> Actions:
        """Submit the unit's update, which is due, waiting for room."""
        if row.update_has_begun and row.update_is_submitted:
            yield AwaitUpdate(row.index)
        while row.update_is_due:
            yield from self._try_update(row)
            if row.update_is_due and not (yield from self._free_gradients(row)):
                raise CapacityError(
                    f"no host memory is left for the gradients of unit `{row.name}`: raise tiering.host_memory"
                )

    def _try_ahead(self, row: UnitState) -> Actions:
        """Submit the update that is foreseen, if the unit and its gradients are in memory and at rest."""
        at_rest = not (row.is_updating or row.is_updated_on_device) and row.residency is _RESIDENT
        if at_rest and row.gradients_have_room:
            yield SubmitAhead(row.index, *self._urgency(row))

    def _retry_updates(self) -> Actions:
        """Submit what was blocked, the longest first, up to the first that still has no room: others need as much."""
        for row in list(self.blocked):
            if not row.update_is_due or row.residency is _STORED:
                del self.blocked[row]
            elif not (row.update_has_begun and row.update_is_submitted):
                yield from self._try_update(row)
                if row.update_is_due:
                    return

    def _urgency(self, row: UnitState) -> tuple[bool, int]:
        """How an update of the unit is carried out: whether it is written home, and when the unit is needed next."""
        needed = _NOW if self.cycle.is_leaving(row.index) else self.cycle.first_use(row.index)
        return self.cycle.leaves_memory(row.index) or self.is_written(row), needed

    def is_written(self, row: UnitState) -> bool:
        """What changes in the unit is written in any case: each step is to stay, or is what a rollback needs."""
        return self._writes_all or (self._writes_unreconstructable and not row.is_reconstructable)

    # Gradients #

    def _free_gradients(self, row: UnitState) -> Generator[Action, None, bool]:
        """Free memory that the unit's gradients may take: what can be on the drive, or an update has; False if none."""
        if row.is_updated_on_device:
            return False
        if row.spills and not row.gradients_are_used:
            for state in (State.LEAVING, State.VALID, State.ARRIVING, State.WRITING):
                other = self._first_in_slot(state)
                if other is not None:
                    if state is State.ARRIVING:
                        yield AwaitGradients(other.index)
                    if state is not State.LEAVING:
                        yield Spill(other.index)
                    yield AwaitSpill(other.index)
                    return True
        if any(other.update_is_submitted for other in self.rows):
            yield AwaitAnyUpdate()
            return True
        return False

    def _spill_ahead(self, _event: GradientsRest) -> Actions:
        """Have the next units find a slot: one that is free, or will soon be."""
        leaving = sum(self.rows[unit].gradients is State.LEAVING for unit in self._in_slots)
        free = self._gradient_slots - len(self._in_slots)
        for _ in range(spilled_ahead(self._gradient_slots) - free - leaving):
            oldest = self._first_in_slot(State.VALID)
            if oldest is None:
                return
            yield Spill(oldest.index)

    def _first_in_slot(self, state: State) -> UnitState | None:
        """Which of the units in slots has been there longest, of those in this state that no update has."""
        rows = (self.rows[unit] for unit in self._in_slots)
        return next((row for row in rows if row.gradients is state and not row.gradients_are_used), None)


# Of the class, so that a scheduler that nobody refers to goes at once.
_HANDLERS: dict[type[Event], Callable[[Scheduler, Any], Actions]] = {
    PassBegins: Scheduler._begin_pass,
    PassEnds: Scheduler._end_pass,
    UseBegins: Scheduler._use,
    MemoryFreed: Scheduler._memory_freed,
    ParametersNeeded: lambda scheduler, event: scheduler._bring(scheduler.rows[event.unit]),
    OldParametersNeeded: lambda scheduler, event: scheduler._bring_old(scheduler.rows[event.unit]),
    ParametersMade: lambda scheduler, event: scheduler._made(scheduler.rows[event.unit]),
    ParametersStale: lambda scheduler, event: scheduler._drop_stale(scheduler.rows[event.unit]),
    RoomNeeded: lambda scheduler, event: scheduler._make_room(scheduler.rows[event.unit]),
    UpdateDue: lambda scheduler, event: scheduler._try_update(scheduler.rows[event.unit]),
    UpdateForeseen: lambda scheduler, event: scheduler._try_ahead(scheduler.rows[event.unit]),
    GradientsNeedRoom: lambda scheduler, event: scheduler._free_gradients(scheduler.rows[event.unit]),
    GradientsRest: Scheduler._spill_ahead,
}
