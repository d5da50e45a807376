"""Makes units whole that several ranks share, one unit ahead of the computation.

[Note: when a unit is gathered]
Of a unit that several ranks share, what is fetched and updated is this rank's shard; an all-gather makes it whole: a
field of its own, whose one copy is made of all ranks' shards. All ranks must take part, so whether one is due may
depend only on what they do alike: a unit is gathered for a use, and stays whole until its last use ends (or, if its
parameters stay on the device, until the next update), or through to its next use where that follows at once. It must
not depend on residency, which follows each rank's own disk and memory. What the last cycle did says which unit comes
next; its all-gather runs under the use before. A cycle that does something else is served on the spot, on all ranks
alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.telemetry import Counters, StallCause, Times
from infinity.tiers import Field, Memory, Params
from infinity.zero.ranks import Pending, Ranks

_DEVICE = Memory.DEVICE


class _Gather:
    """All-gathers of one unit, as one transfer."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    def done(self) -> bool:
        return False  # nobody asks before waiting: all ranks wait at the same place

    def result(self) -> None:
        for pending in self._pending:
            pending.wait()

    def times(self) -> Times | None:
        return None


class Gathering:
    """Which units are whole, and which one will be. A unit of one rank alone always is.

    Args:
        capacity_bytes: memory for units that come and go; the same on all ranks.

    Attributes:
        ahead: the unit that is pinned and gathered for its next use.
    """

    def __init__(self, params: Params, ranks: Ranks, capacity_bytes: int, counters: Counters) -> None:
        self.ahead: int | None = None
        self._params = params
        self._ranks = ranks
        self._capacity_bytes = capacity_bytes
        self._counters = counters
        self._moving_bytes = [spec.nbytes if spec.offloaded else 0 for spec in params.specs]
        shared = (unit for unit, spec in enumerate(params.specs) if spec.sharding.count > 1)
        self._whole = {unit: Field(f"whole {params.specs[unit].name}", [_DEVICE]) for unit in shared}
        for field in self._whole.values():
            field.outdate()  # there is a value, and it is not whole
        self._uses: dict[int, int] = {}  # of units that are in use
        self._in_use_bytes = 0  # those of them that come and go

    def is_whole(self, unit: int) -> bool:
        """All ranks' pieces of the unit are here, and the newest."""
        return unit not in self._whole or self._whole[unit].is_newest(_DEVICE)

    def enter(self, unit: int) -> None:
        """Have a resident unit whole."""
        if unit not in self._whole:
            return
        if unit not in self._uses:
            self._in_use_bytes += self._moving_bytes[unit]
        self._uses[unit] = self._uses.get(unit, 0) + 1  # first, because `leave` follows whatever happens here
        if self.ahead == unit:
            self._take_ahead()
        else:
            self.drop_ahead()
        self.gather(unit)

    def leave(self, unit: int, expected: int | None) -> None:
        """A use is over; one that failed before its `enter` is none.

        Args:
            expected: the unit that is used next.
        """
        if unit not in self._uses:
            return
        self._uses[unit] -= 1
        if self._uses[unit]:
            return
        del self._uses[unit]
        self._in_use_bytes -= self._moving_bytes[unit]
        if expected == unit and self.ahead is None and self.is_whole(unit) and self._moving_bytes[unit]:
            self._params.pin(unit)
            self.ahead = unit
        elif self.ahead != unit:
            self.let_go(unit)

    def end_cycle(self) -> None:
        """Nothing more is used for now."""
        self.drop_ahead()
        for unit in list(self._uses):  # an exception has kept them from being left
            self._uses[unit] = 1
            self.leave(unit, None)

    def may_look_ahead(self, unit: int) -> bool:
        """The unit, which is used next, can be gathered under the use that begins: there is room for both."""
        if self.ahead is not None or unit not in self._whole or self.is_whole(unit):
            return False
        moving_bytes = self._moving_bytes[unit]
        return not moving_bytes or self._in_use_bytes + moving_bytes <= self._capacity_bytes

    def look_ahead(self, unit: int) -> None:
        """Start to gather a resident unit that is pinned; it is unpinned when it is taken or dropped."""
        self._start(unit)
        self.ahead = unit

    def changed(self, unit: int) -> None:
        """The unit's values are others now, or will be.

        A gathering under way ends first: it may write the old values, this rank's own among them, until it is over.
        """
        if unit in self._whole:
            if self.ahead == unit:
                self.drop_ahead()
            self._outdate(unit)

    def let_go(self, unit: int) -> None:
        """Nobody needs the unit whole for now; what stays on the device does stay whole."""
        if self._moving_bytes[unit]:
            self.changed(unit)

    def gather(self, unit: int) -> None:
        """All ranks make a resident unit whole now, unless it is."""
        if not self.is_whole(unit):
            self._start(unit)
            self._wait(unit)

    def drop_ahead(self) -> None:
        """What was gathered ahead is not used next."""
        unit = self.ahead
        if unit is not None:
            self._take_ahead()
            if unit not in self._uses:
                self.let_go(unit)

    def _take_ahead(self) -> None:
        """What was gathered ahead is whole now."""
        unit, self.ahead = self.ahead, None
        if unit is not None:
            try:
                self._wait(unit)
            finally:
                self._params.unpin(unit)

    def _start(self, unit: int) -> None:
        spec, field = self._params.specs[unit], self._whole[unit]
        gathers = self._ranks.all_gather(self._params.tensor(unit), spec.pieces, spec.name)
        field.begin_move(None, _DEVICE, _Gather(gathers), StallCause.COLLECTIVE, at=field.version)

    def _wait(self, unit: int) -> None:
        move = self._whole[unit].arriving(_DEVICE)
        if move is not None:
            with self._counters.stalled(move.cause):
                self._whole[unit].finish_move(move)

    def _outdate(self, unit: int) -> None:
        self._wait(unit)
        self._whole[unit].outdate()
