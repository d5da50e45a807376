"""Makes units whole that several ranks share, ahead of the computation.

[Note: when a unit is gathered]
Of a unit that several ranks share, what is fetched and updated is this rank's shard; an all-gather makes it whole: a
field of its own, whose one copy is made of all ranks' shards. All ranks must take part, so whether one is due may
depend only on what they do alike: a unit is gathered for a use, and stays whole until its last use ends (or, if its
parameters stay on the device, until the next update), or through to its next use where that follows at once. It must
not depend on residency, which follows each rank's own disk and memory. What the last cycle did says which units come
next: the all-gather of the next one runs under the use before, and those of more, in their order, as far as
`Ahead` allows, which knows bytes alone and those of the smallest rank. A cycle that does something else is served on
the spot, on all ranks alike.

Where no unit comes and goes, ranks may use different units: those that an update has changed are gathered in an order
that all ranks know, each with all before it, and the rest before any other collective begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.schedule import Ahead
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
    """Which units are whole, and which ones will be. A unit of one rank alone always is.

    Args:
        capacity_bytes: memory for units that come and go; the same on all ranks.
        ahead_bytes: of those that are gathered ahead of their use, beyond the next one.
    """

    def __init__(
        self, params: Params, ranks: Ranks, capacity_bytes: int, counters: Counters, ahead_bytes: int = 0
    ) -> None:
        self._ahead: dict[int, None] = {}  # units that are pinned and gathered for their next use, in its order
        self._params = params
        self._ranks = ranks
        self._counters = counters
        self._moving_bytes = [spec.nbytes if spec.offloaded else 0 for spec in params.specs]
        self._may_be_ahead = Ahead(capacity_bytes, ahead_bytes, max(self._moving_bytes, default=0))
        shared = (unit for unit, spec in enumerate(params.specs) if spec.sharding.count > 1)
        self._whole = {unit: Field(f"whole {params.specs[unit].name}", [_DEVICE]) for unit in shared}
        for field in self._whole.values():
            field.outdate()  # there is a value, and it is not whole
        self._order = [] if any(self._moving_bytes) else list(self._whole)
        self._in_forward = False
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
        if unit in self._ahead:
            while (first := next(iter(self._ahead))) != unit:
                self._drop(first)
            self._take(unit)
        elif not self.is_whole(unit):
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
        if expected == unit and unit not in self._ahead and self.is_whole(unit) and self._moving_bytes[unit]:
            self._params.pin(unit)
            self._ahead = {unit: None, **self._ahead}
        elif unit not in self._ahead:
            self.let_go(unit)

    def begin_cycle(self) -> None:
        """A forward pass begins."""
        self._in_forward = bool(self._order)

    def end_cycle(self) -> None:
        """Nothing more is used for now."""
        self.drop_ahead()
        for unit in list(self._uses):  # an exception has kept them from being left
            self._uses[unit] = 1
            self.leave(unit, None)

    def due(self, upcoming: Sequence[int]) -> int | None:
        """The unit that is to be gathered next, under the use that begins; None if there is none, or no room for it.

        Args:
            upcoming: units that are used next, in their order.
        """
        if self._order:
            if not self._in_forward:  # updates begin, and nobody uses their units before the next pass
                return None
            upcoming = [unit for unit in self._order if not self.is_whole(unit)][: len(upcoming)]
        passed: list[int] = []
        for steps, unit in enumerate(upcoming, 1):
            # Between two uses of a unit that comes and goes it is let go, unless one follows the other at once: what
            # comes behind the second is gathered behind it.
            if (
                self._moving_bytes[unit]
                and passed[-1:] != [unit]
                and (unit in passed or (steps > 1 and unit in self._uses))
            ):
                return None
            passed.append(unit)
            if not self.is_whole(unit) and unit not in self._ahead:
                return unit if self._has_room(unit, steps) else None
        return None

    def _has_room(self, unit: int, steps: int) -> bool:
        """A unit that is used so many uses from now has room beside all that is in use and comes before it."""
        if self._moving_bytes[unit]:
            ahead_bytes = sum(self._moving_bytes[other] for other in self._ahead)
            return self._may_be_ahead.may_be(steps, self._moving_bytes[unit], self._in_use_bytes, ahead_bytes)
        specs = self._params.specs
        whole_bytes = sum(specs[other].nbytes for other in (*self._ahead, unit))
        return steps == 1 or whole_bytes <= self._may_be_ahead.bytes

    def look_ahead(self, unit: int) -> None:
        """Start to gather a resident unit that is pinned; it is unpinned when it is taken or dropped."""
        self._start(unit)
        self._ahead[unit] = None

    def changed(self, unit: int) -> None:
        """The unit's values are others now, or will be.

        A gathering under way ends first: it may write the old values, this rank's own among them, until it is over.
        """
        if unit in self._whole:
            if unit in self._ahead:
                self._drop(unit)
            self._outdate(unit)

    def let_go(self, unit: int) -> None:
        """Nobody needs the unit whole for now, unless it is in use; what stays on the device does stay whole."""
        if self._moving_bytes[unit] and unit not in self._uses:
            self.changed(unit)

    def gather(self, unit: int) -> None:
        """All ranks make a resident unit whole now, unless it is."""
        if unit in self._ahead:
            self._take(unit)
        if not self.is_whole(unit):
            self._start(unit)
            self._wait(unit)

    def owed(self, unit: int | None = None) -> list[int]:
        """Units that are gathered before this one, or before another collective, whoever uses them."""
        if not self._in_forward or (unit is not None and self.is_whole(unit)):
            return []
        self._in_forward = unit is not None
        stop = None if unit is None else self._order.index(unit)
        return [other for other in self._order[:stop] if not self.is_whole(other)]

    def follow(self, order: Sequence[int]) -> None:
        """All ranks gather in this order from now on, behind what is not in it; they call this together."""
        if self._order:
            others = [unit for unit in self._order if unit not in order]
            self._order = others + [unit for unit in order if unit in self._whole]

    def drop_ahead(self) -> None:
        """What was gathered ahead is not used next."""
        while self._ahead:
            self._drop(next(iter(self._ahead)))

    def _drop(self, unit: int) -> None:
        self._take(unit)
        self.let_go(unit)

    def _take(self, unit: int) -> None:
        """What was gathered ahead is whole now."""
        del self._ahead[unit]
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
