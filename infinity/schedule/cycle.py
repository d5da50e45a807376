"""The cycle that is running, one forward and backward pass: what it has used, and the plan that it follows.

The plan is advice. A cycle that does something else than the last one leaves it, is served on demand from there on, and
is what the next plan is made from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infinity.schedule.ahead import MOST_AHEAD
from infinity.schedule.next_use import NextUse
from infinity.schedule.plan import Plan, PlanStep, make_plan


class Cycle:
    """Records uses, and answers from those of the last cycle.

    Args:
        sizes: bytes of each unit.
        moving: which of them come and go.
        capacity_bytes: memory for these.
        ahead_bytes: of those that are gathered ahead of their use, beyond the next one.

    Attributes:
        plan: None before the first training step.
        recorded: the uses of the cycle that is running; None between two cycles.
    """

    def __init__(self, sizes: Sequence[int], moving: Sequence[bool], capacity_bytes: int, ahead_bytes: int = 0) -> None:
        self.plan: Plan | None = None
        self.capacity_bytes = capacity_bytes
        self.ahead_bytes = ahead_bytes
        self._sizes = tuple(sizes)
        self._moving = tuple(moving)
        self.recorded: list[int] | None = None
        self._last = NextUse()  # all uses
        self._course = NextUse()  # those of the plan

    def expect(self, uses: Sequence[int], plan: Plan) -> None:
        """Cycles will have these uses and follow this plan, as after a training step that had them."""
        self.plan = plan
        self._last = NextUse(uses)
        self._course = NextUse([unit for unit in uses if self._moving[unit]])

    def begin(self) -> None:
        """A forward pass begins."""
        self.recorded = []
        self._last.begin()
        if self.plan is not None:
            self._course.begin()

    def end(self, *, learn: bool) -> bool:
        """The backward pass is over, or the forward pass had none.

        Args:
            learn: it was a training step; what follows will probably be like it.

        Returns:
            Whether there is a new plan.
        """
        uses, self.recorded = tuple(self.recorded or ()), None
        self._last.end()
        self._course.end()
        if not learn:
            return False
        if uses != self._last.uses:
            self._last = NextUse(uses)
        moving = tuple(unit for unit in uses if self._moving[unit])
        if self.plan is not None and moving == self._course.uses:
            return False
        self.plan = make_plan(moving, self._sizes, self.capacity_bytes, self.ahead_bytes)
        self._course = NextUse(moving)
        return True

    def use(self, unit: int) -> PlanStep | None:
        """A unit is used: the plan's step for it, or None once the cycle has left the plan."""
        if self.recorded is not None:
            self.recorded.append(unit)
            self._last.advance(unit)
        if self.plan is None or not self._moving[unit] or not self._course.advance(unit):
            return None
        assert self._course.position is not None
        return self.plan.steps[self._course.position - 1]

    @property
    def follows_plan(self) -> bool:
        """The cycle has done what the last one did, as far as it goes."""
        return self._course.position is not None

    @property
    def expected(self) -> int | None:
        """The unit that will probably be used next; None where nobody knows."""
        return self._last.expected

    @property
    def upcoming(self) -> tuple[int, ...]:
        """The units that will probably be used next, in their order, a few; none where nobody knows."""
        return self._last.upcoming(MOST_AHEAD if self.ahead_bytes else 1)

    def strangers(self, units: Iterable[int]) -> list[int]:
        """Those of the units that the plan does not begin with."""
        return [] if self.plan is None else [unit for unit in units if unit not in self.plan.resident]

    def first_use(self, unit: int) -> int:
        """When the next cycle will probably use the unit first."""
        return self._last.first(unit)

    def is_leaving(self, unit: int) -> bool:
        """The plan evicts the unit after a use, and this cycle has had the last one."""
        position = self._course.position
        if self.plan is None or position is None or unit not in self.plan.evicted:
            return False
        return self._course.is_last(unit, position - 1)

    def leaves_memory(self, unit: int) -> bool:
        """The unit may leave memory before it is changed again: what changes in it must reach its home."""
        return self._moving[unit] and (self.plan is None or unit in self.plan.evicted)
