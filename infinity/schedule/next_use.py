"""Predict when each unit is used next, from the uses of the last cycle (the trace).

Training repeats itself, so the trace is treated as repeated without end. `time` counts uses in this repetition,
`position` counts uses within one cycle. A cursor follows the running cycle, until it differs from the trace.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class NextUse:
    """Queries on one trace. A query takes at most logarithmic time in the number of the unit's uses.

    Args:
        uses: units in the order in which the last cycle used them.

    Attributes:
        position: the cursor: number of uses in the running cycle; None if none runs or it has left the trace.
        expected: the unit that the running cycle uses next; None at its end, or if unknown.
    """

    def __init__(self, uses: Sequence[int] = ()) -> None:
        self.uses = tuple(uses)
        self.position: int | None = None
        self.expected: int | None = None
        self._positions: dict[int, list[int]] = {}
        for position, unit in enumerate(self.uses):
            self._positions.setdefault(unit, []).append(position)

    # The trace #

    def at(self, time: int) -> int:
        """Return the unit that is used at this time. The trace must not be empty."""
        return self.uses[time % len(self.uses)]

    def after(self, unit: int, time: int) -> int:
        """Return the time of the first use of `unit` after `time`.

        Raises:
            KeyError: no cycle uses it.
        """
        positions, length = self._positions[unit], len(self.uses)
        cycle, phase = divmod(time, length)
        index = bisect_right(positions, phase)
        if index < len(positions):
            return cycle * length + positions[index]
        return (cycle + 1) * length + positions[0]

    def first(self, unit: int) -> int:
        """Return the position of the unit's first use in a cycle; the cycle's length if it does not use the unit."""
        positions = self._positions.get(unit)
        return len(self.uses) if positions is None else positions[0]

    def is_last(self, unit: int, position: int) -> bool:
        """Whether the cycle does not use the unit after this position."""
        positions = self._positions.get(unit)
        return positions is None or positions[-1] <= position

    # The cursor #

    def begin(self) -> None:
        self._move_to(0)

    def end(self) -> None:
        """Stop following the cycle: it is over, or has left the trace."""
        self.position = self.expected = None

    def advance(self, unit: int) -> bool:
        """Record a use. Return False, and leave the trace, if another unit was expected."""
        if self.position is None or self.expected != unit:
            self.end()
            return False
        self._move_to(self.position + 1)
        return True

    def upcoming(self, count: int) -> tuple[int, ...]:
        """Return at most `count` of the units that the running cycle uses next; none if unknown."""
        return () if self.position is None else self.uses[self.position : self.position + count]

    def _move_to(self, position: int) -> None:
        self.position = position
        self.expected = self.uses[position] if position < len(self.uses) else None
