"""The running cycle, one forward and backward pass: the units that it has used so far, and the plan that it follows.

The plan is only advice. If a cycle differs from the last one, it leaves the plan, and its later units are fetched on
demand. The next plan is made from the new uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infinity.schedule.next_use import NextUse
from infinity.schedule.plan import MOST_AHEAD, Plan, PlanStep, make_plan
from infinity.schedule.unit_state import UnitState


class Cursor:
    """Follows a cycle in a trace, as long as it repeats the trace.

    Attributes:
        trace: the uses of the last cycle.
        position: number of uses in the running cycle; None if none runs or it has left the trace.
        expected: the unit that the running cycle uses next; None at its end, or if unknown.
    """

    def __init__(self, uses: Sequence[int] = ()) -> None:
        self.trace = NextUse(uses)
        self._expected = (*uses, None)  # by position
        self.position: int | None = None
        self.expected: int | None = None

    def begin(self) -> None:
        self.position, self.expected = 0, self._expected[0]

    def end(self) -> None:
        """Stop following the cycle: it is over, or has left the trace."""
        self.position = self.expected = None

    def advance(self, unit: int) -> bool:
        """Record a use. Return False, and leave the trace, if another unit was expected."""
        if self.position is None or self.expected != unit:
            self.end()
            return False
        self.position += 1
        self.expected = self._expected[self.position]
        return True


class Cycle:
    """Record the uses of units, and predict the next ones from the last cycle.

    Args:
        sizes: bytes of each unit.
        capacity_bytes: memory for the units that are fetched and evicted.
        ahead_bytes: memory for units that are gathered early, beyond the next one.

    Attributes:
        plan: None before the first training step.
        recorded: the uses of the running cycle; None between two cycles.
    """

    def __init__(self, sizes: Sequence[int], capacity_bytes: int, ahead_bytes: int = 0) -> None:
        self.plan: Plan | None = None
        self.capacity_bytes = capacity_bytes
        self.ahead_bytes = ahead_bytes
        self._sizes = tuple(sizes)
        self.recorded: list[UnitState] | None = None
        self._last = Cursor()  # of all units
        self._course = Cursor()  # of the units that are fetched and evicted, as in the plan

    def expect(self, uses: Sequence[int], plan: Plan) -> None:
        """Set the expected uses and the plan, as if a training step with these uses had ended."""
        self.plan = plan
        self._last = Cursor(uses)
        self._course = Cursor([step.unit for step in plan.steps])

    def begin(self) -> None:
        self.recorded = []
        self._last.begin()
        if self.plan is not None:
            self._course.begin()

    def end(self, *, learn: bool) -> bool:
        """End the cycle, after its backward pass or after a forward pass without one.

        Args:
            learn: whether it was a training step. The next cycles are expected to repeat it.

        Returns:
            Whether there is a new plan.
        """
        recorded, self.recorded = self.recorded or [], None
        self._last.end()
        self._course.end()
        if not learn:
            return False
        uses = tuple(row.index for row in recorded)
        if uses != self._last.trace.uses:
            self._last = Cursor(uses)
        moving = tuple(row.index for row in recorded if row.offloaded)
        if self.plan is not None and moving == self._course.trace.uses:
            return False
        self.plan = make_plan(moving, self._sizes, self.capacity_bytes, self.ahead_bytes)
        self._course = Cursor(moving)
        return True

    def use(self, row: UnitState) -> PlanStep | None:
        """Record a use. Return the plan's step for it; None if the unit is never evicted or the plan was left."""
        if self.recorded is not None:
            self.recorded.append(row)
            self._last.advance(row.index)
        if self.plan is None or not row.offloaded or not self._course.advance(row.index):
            return None
        assert self._course.position is not None
        return self.plan.steps[self._course.position - 1]

    @property
    def follows_plan(self) -> bool:
        """Whether the cycle has repeated the last one so far."""
        return self._course.position is not None

    @property
    def expected(self) -> int | None:
        """The unit that is probably used next; None if unknown."""
        return self._last.expected

    @property
    def upcoming(self) -> tuple[int, ...]:
        """A few units that are probably used next, in order; empty if unknown."""
        position = self._last.position
        if position is None:
            return ()
        return self._last.trace.uses[position : position + (MOST_AHEAD if self.ahead_bytes else 1)]

    def unexpected(self, rows: Iterable[UnitState]) -> list[int]:
        """Return the units, among `rows`, that the plan does not expect in memory when it begins."""
        return [] if self.plan is None else [row.index for row in rows if row.index not in self.plan.resident]

    def first_use(self, row: UnitState) -> int:
        """Return the position of the unit's first use in the next cycle; the number of all uses if none is known."""
        trace = self._last.trace
        return trace.first.get(row.index, len(trace.uses))

    def is_evicted_next(self, row: UnitState) -> bool:
        """Whether the plan evicts the unit, and this cycle has had its last use."""
        position = self._course.position
        if self.plan is None or position is None or row.index not in self.plan.evicted:
            return False
        return self._course.trace.last.get(row.index, -1) < position

    def may_be_evicted(self, row: UnitState) -> bool:
        """Whether the unit may be evicted before its next change. Its update must then be written home."""
        return row.offloaded and (self.plan is None or row.index in self.plan.evicted)
