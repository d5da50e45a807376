"""When each unit is used next, if training repeats the uses of the last cycle (the trace) without end.

`time` counts uses in this repetition, `position` counts uses within one cycle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class NextUse:
    """Queries on one trace. A query takes at most logarithmic time in the number of the unit's uses.

    Args:
        uses: units in the order in which the last cycle used them.

    Attributes:
        first, last: position of each used unit's first and last use in a cycle.
    """

    def __init__(self, uses: Sequence[int] = ()) -> None:
        self.uses = tuple(uses)
        self._positions: dict[int, list[int]] = {}
        for position, unit in enumerate(self.uses):
            self._positions.setdefault(unit, []).append(position)
        self.first = {unit: positions[0] for unit, positions in self._positions.items()}
        self.last = {unit: positions[-1] for unit, positions in self._positions.items()}

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
