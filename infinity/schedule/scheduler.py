"""Decides which units are fetched and evicted, and when their updates are submitted: events in, actions out.

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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

from infinity.errors import CapacityError
from infinity.memory import Budget
from infinity.schedule.actions import (
    Action,
    Actions,
    AwaitAnyUpdate,
    AwaitFetch,
    AwaitNewest,
    Event,
    Evict,
    Fetch,
    MemoryFreed,
    OldParametersNeeded,
    ParametersMade,
    ParametersNeeded,
    ParametersStale,
    PassBegins,
    PassEnds,
    RoomNeeded,
    Submit,
    UpdateDue,
    UseBegins,
)
from infinity.schedule.cycle import Cycle
from infinity.schedule.unit_state import UnitState
from infinity.tiers import Residency

_STORED, _RESIDENT = Residency.STORED, Residency.RESIDENT  # a look-up in an Enum takes 0.2 us
_NOW = -1  # when an update is needed that keeps its unit from leaving memory


class Scheduler:
    """Rows of all units, and what is to be done next.

    Args:
        rows: of all units.
        cycle: what is used, and the plan.
        budget: the ledger of memory for units that come and go, kept by whoever performs fetches and evictions.
        budget_key: the configuration's name for it.
        writes_all: each update is written to the drives.
        writes_unreconstructable: so are updates of units whose old parameters the optimizer state cannot reconstruct.

    Attributes:
        staying: units that never leave memory.
        in_memory: units that come and go, of which memory has the parameters; the least recently used first.
    """

    def __init__(
        self,
        rows: Sequence[UnitState],
        cycle: Cycle,
        budget: Budget,
        budget_key: str,
        *,
        writes_all: bool = False,
        writes_unreconstructable: bool = False,
    ) -> None:
        self.rows = tuple(rows)
        self.staying = tuple(row for row in self.rows if not row.moves)
        self.cycle = cycle
        self.in_memory: dict[UnitState, None] = {}
        self._fetching: dict[UnitState, None] = {}  # the oldest first
        self._todo: deque[tuple[str, int]] = deque()  # of the plan, in its order
        self._budget = budget
        self._budget_key = budget_key
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
        """Some action of the plan has to wait until memory is freed."""
        return bool(self._todo)

    # Passes #

    def _begin_pass(self, _: PassBegins) -> Actions:
        self.cycle.begin()
        self._todo.extend(("evict", unit) for unit in self.cycle.strangers(row.index for row in self.in_memory))
        yield from ()

    def _end_pass(self, event: PassEnds) -> Actions:
        if self.cycle.end(learn=event.learn) or not event.learn:
            self._todo.clear()
        yield from ()

    def _use(self, event: UseBegins) -> Actions:
        row = self.rows[event.unit]
        step = self.cycle.use(row.index)
        if step is None:
            if not self.cycle.follows_plan:
                self._todo.clear()
        elif step.before is not None:
            self._todo.extend(("evict", victim) for victim in step.before)
            yield from self._follow_plan()
        yield from self._bring(row)
        if step is not None:
            self._todo.extend(step.actions)
            yield from self._follow_plan()

    def _follow_plan(self, _: MemoryFreed | None = None) -> Actions:
        """Do what the plan asks for, in its order, up to the first action that must wait for memory."""
        while self._todo:
            action, unit = self._todo[0]
            row = self.rows[unit]
            if action == "evict" and row.residency is _RESIDENT:
                if row.is_pinned:
                    return
                yield from self._evict(row)
            if action == "prefetch" and row.residency is _STORED:
                if not (yield from self._fetch(row, urgent=False)):
                    return
                yield from self._try_update(row)
            self._todo.popleft()

    # Parameters #

    def _bring(self, row: UnitState) -> Actions:
        """Have the unit's newest parameters in memory."""
        if row.residency is _STORED:
            yield from self._fetch_now(row)
        if row.update_is_due:
            yield self._submission(row, waits=True)
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
                    yield self._submission(other, waits=True)
                else:
                    yield AwaitFetch(other.index)
                    self._arrived(other)
                return
        self._refuse(row)

    def _refuse(self, row: UnitState) -> NoReturn:
        others = {
            other.name: other.nbytes for other in self.rows if other is not row and other.moves and other.is_pinned
        }
        raise CapacityError(
            f"unit `{row.name}` needs {row.nbytes} bytes but {', '.join(others)} are in use together and fill the "
            f"{self.cycle.capacity_bytes} bytes for parameters: raise {self._budget_key} by "
            f"{row.nbytes + sum(others.values())} bytes, of which parameters get a part"
        )

    # Updates #

    def _try_update(self, row: UnitState) -> Actions:
        if row.update_is_due:
            yield self._submission(row, waits=False)

    def _submission(self, row: UnitState, *, waits: bool) -> Submit:
        return Submit(row.index, *self.urgency(row), waits)

    def urgency(self, row: UnitState) -> tuple[bool, int]:
        """How an update of the unit is carried out: whether it is written home, and when the unit is needed next."""
        needed = _NOW if self.cycle.is_leaving(row.index) else self.cycle.first_use(row.index)
        return self.cycle.leaves_memory(row.index) or self.is_written(row), needed

    def is_written(self, row: UnitState) -> bool:
        """What changes in the unit is written in any case: each step is to stay, or is what a rollback needs."""
        return self._writes_all or (self._writes_unreconstructable and not row.is_reconstructable)


# Of the class, so that a scheduler that nobody refers to goes at once.
_HANDLERS: dict[type[Event], Callable[[Scheduler, Any], Actions]] = {
    PassBegins: Scheduler._begin_pass,
    PassEnds: Scheduler._end_pass,
    UseBegins: Scheduler._use,
    MemoryFreed: Scheduler._follow_plan,
    ParametersNeeded: lambda scheduler, event: scheduler._bring(scheduler.rows[event.unit]),
    OldParametersNeeded: lambda scheduler, event: scheduler._bring_old(scheduler.rows[event.unit]),
    ParametersMade: lambda scheduler, event: scheduler._made(scheduler.rows[event.unit]),
    ParametersStale: lambda scheduler, event: scheduler._drop_stale(scheduler.rows[event.unit]),
    RoomNeeded: lambda scheduler, event: scheduler._make_room(scheduler.rows[event.unit]),
    UpdateDue: lambda scheduler, event: scheduler._try_update(scheduler.rows[event.unit]),
}
