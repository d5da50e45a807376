"""The one look-ahead: when each unit is used next, from what the last cycle used.

Training repeats itself, so the order of the last cycle is read as one that repeats endlessly. `time` counts uses in
that repetition, `position` within one cycle. A cursor follows the cycle that runs; one that does something else leaves
the trace, and is served on demand from there on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class NextUse:
    """Answers for one trace, each in the logarithm of a unit's uses at most.

    Args:
        uses: units in the order in which the last cycle used them.

    Attributes:
        position: the cursor: uses of the running cycle so far; None when none runs, or it has left the trace.
        expected: the unit that the running cycle uses next; None at its end, or if nobody knows.
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
        """The unit that is used then; the trace has uses."""
        return self.uses[time % len(self.uses)]

    def after(self, unit: int, time: int) -> int:
        """First use of `unit` strictly later than `time`.

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
        """When the next cycle uses the unit first, as a position; behind all others if it does not."""
        positions = self._positions.get(unit)
        return len(self.uses) if positions is None else positions[0]

    def is_last(self, unit: int, position: int) -> bool:
        """The cycle does not use the unit after this position."""
        positions = self._positions.get(unit)
        return positions is None or positions[-1] <= position

    # The cursor #

    def begin(self) -> None:
        """A cycle begins."""
        self._move_to(0)

    def end(self) -> None:
        """The cycle is over, or is not to be followed any further."""
        self.position = self.expected = None

    def advance(self, unit: int) -> bool:
        """The running cycle uses a unit; False if it is not the one that was expected: the cycle has left the trace."""
        if self.position is None or self.expected != unit:
            self.end()
            return False
        self._move_to(self.position + 1)
        return True

    def upcoming(self, count: int) -> tuple[int, ...]:
        """At most so many of the units that the running cycle uses next; none if nobody knows."""
        return () if self.position is None else self.uses[self.position : self.position + count]

    def _move_to(self, position: int) -> None:
        self.position = position
        self.expected = self.uses[position] if position < len(self.uses) else None
