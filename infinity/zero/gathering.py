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


class _Shared:
    """A unit that several ranks share.

    Attributes:
        whole: its one copy has all ranks' shards.
        moving_bytes: of the whole unit, if it comes and goes; else 0.
        uses: modules that compute on it now.
    """

    __slots__ = ("moving_bytes", "unit", "uses", "whole")

    def __init__(self, unit: int, name: str, moving_bytes: int) -> None:
        self.unit = unit
        self.moving_bytes = moving_bytes
        self.uses = 0
        self.whole = Field(f"whole {name}", [_DEVICE])
        self.whole.outdate()  # there is a value, and it is not whole

    @property
    def is_whole(self) -> bool:
        return self.whole.is_newest(_DEVICE)


class Gathering:
    """Which units are whole, and which ones will be. A unit of one rank alone always is.

    Args:
        capacity_bytes: memory for units that come and go; the same on all ranks.
        ahead_bytes: of those that are gathered ahead of their use, beyond the next one.

    Attributes:
        ahead: units that are pinned and gathered for their next use, in its order.
    """

    def __init__(
        self, params: Params, ranks: Ranks, capacity_bytes: int, counters: Counters, ahead_bytes: int = 0
    ) -> None:
        self._params = params
        self._ranks = ranks
        self._counters = counters
        moving_bytes = [spec.nbytes if spec.offloaded else 0 for spec in params.specs]
        self._shared = [
            _Shared(unit, spec.name, moving_bytes[unit]) if spec.sharding.count > 1 else None
            for unit, spec in enumerate(params.specs)
        ]
        self._may_be_ahead = Ahead(capacity_bytes, ahead_bytes, max(moving_bytes, default=0))
        self.ahead: dict[_Shared, None] = {}
        self._order = [] if any(moving_bytes) else [each for each in self._shared if each is not None]
        self._in_forward = False
        self._in_use_bytes = 0  # of units that are in use, and come and go

    def is_whole(self, unit: int) -> bool:
        """All ranks' pieces of the unit are here, and the newest."""
        each = self._shared[unit]
        return each is None or each.is_whole

    def make_way(self, units: Sequence[int]) -> None:
        """A module is about to use these: what was gathered ahead for a use that does not come goes first."""
        for unit in units:
            each = self._shared[unit]
            if each in self.ahead:
                return
            if each is not None and not each.is_whole:
                self.drop_ahead()
                return

    def enter(self, unit: int) -> None:
        """Have a resident unit whole."""
        each = self._shared[unit]
        if each is None:
            return
        if not each.uses:
            self._in_use_bytes += each.moving_bytes
        each.uses += 1  # first, because `leave` follows whatever happens here
        if each in self.ahead:
            while (first := next(iter(self.ahead))) is not each:
                self._drop(first)
            self._take(each)
        elif not each.is_whole:
            self.drop_ahead()
        self._gather(each)

    def leave(self, unit: int, expected: int | None) -> None:
        """A use is over; one that failed before its `enter` is none.

        Args:
            expected: the unit that is used next.
        """
        each = self._shared[unit]
        if each is None or not each.uses:
            return
        each.uses -= 1
        if each.uses:
            return
        self._in_use_bytes -= each.moving_bytes
        if expected == unit and each not in self.ahead and each.is_whole and each.moving_bytes:
            self._params.pin(unit)
            self.ahead = {each: None, **self.ahead}
        elif each not in self.ahead:
            self._let_go(each)

    def begin_cycle(self) -> None:
        """A forward pass begins."""
        self._in_forward = bool(self._order)

    def end_cycle(self) -> None:
        """Nothing more is used for now."""
        self.drop_ahead()
        for each in self._shared:
            if each is not None and each.uses:  # an exception has kept it from being left
                each.uses = 1
                self.leave(each.unit, None)

    def due(self, upcoming: Sequence[int]) -> int | None:
        """The unit that is to be gathered next, under the use that begins; None if there is none, or no room for it.

        Args:
            upcoming: units that are used next, in their order.
        """
        if self._order:
            if not self._in_forward:  # updates begin, and nobody uses their units before the next pass
                return None
            upcoming = [each.unit for each in self._order if not each.is_whole][: len(upcoming)]
        passed: list[int] = []
        for steps, unit in enumerate(upcoming, 1):
            each = self._shared[unit]
            # Between two uses of a unit that comes and goes it is let go, unless one follows the other at once: what
            # comes behind the second is gathered behind it.
            if (
                each is not None
                and each.moving_bytes
                and passed[-1:] != [unit]
                and (unit in passed or (steps > 1 and each.uses))
            ):
                return None
            passed.append(unit)
            if each is not None and not each.is_whole and each not in self.ahead:
                return unit if self._has_room(each, steps) else None
        return None

    def _has_room(self, each: _Shared, steps: int) -> bool:
        """A unit that is used so many uses from now has room beside all that is in use and comes before it."""
        if each.moving_bytes:
            ahead_bytes = sum(other.moving_bytes for other in self.ahead)
            return self._may_be_ahead.may_be(steps, each.moving_bytes, self._in_use_bytes, ahead_bytes)
        specs = self._params.specs
        whole_bytes = sum(specs[other.unit].nbytes for other in (*self.ahead, each))
        return steps == 1 or whole_bytes <= self._may_be_ahead.bytes

    def look_ahead(self, unit: int) -> None:
        """Start to gather a resident unit that is pinned; it is unpinned when it is taken or dropped."""
        each = self._shared[unit]
        assert each is not None
        self._start(each)
        self.ahead[each] = None

    def changed(self, unit: int) -> None:
        """The unit's values are others now, or will be.

        A gathering under way ends first: it may write the old values, this rank's own among them, until it is over.
        """
        each = self._shared[unit]
        if each is not None:
            self._change(each)

    def _change(self, each: _Shared) -> None:
        if each in self.ahead:
            self._drop(each)
        self._wait(each)
        each.whole.outdate()

    def let_go(self, unit: int) -> None:
        """Nobody needs the unit whole for now, unless it is in use; what stays on the device does stay whole."""
        each = self._shared[unit]
        if each is not None:
            self._let_go(each)

    def _let_go(self, each: _Shared) -> None:
        if each.moving_bytes and not each.uses:
            self._change(each)

    def gather(self, unit: int) -> None:
        """All ranks make a resident unit whole now, unless it is."""
        each = self._shared[unit]
        if each is not None:
            self._gather(each)

    def _gather(self, each: _Shared) -> None:
        if each in self.ahead:
            self._take(each)
        if not each.is_whole:
            self._start(each)
            self._wait(each)

    def owed(self, unit: int | None = None) -> list[int]:
        """Units that are gathered before this one, or before another collective, whoever uses them."""
        if not self._in_forward or (unit is not None and self.is_whole(unit)):
            return []
        self._in_forward = unit is not None
        owed = []
        for each in self._order:
            if each.unit == unit:
                break
            if not each.is_whole:
                owed.append(each.unit)
        return owed

    def follow(self, order: Sequence[int]) -> None:
        """All ranks gather in this order from now on, behind what is not in it; they call this together."""
        if self._order:
            others = [each for each in self._order if each.unit not in order]
            shared = [self._shared[unit] for unit in order]
            self._order = others + [each for each in shared if each is not None]

    def drop_ahead(self) -> None:
        """What was gathered ahead is not used next."""
        while self.ahead:
            self._drop(next(iter(self.ahead)))

    def _drop(self, each: _Shared) -> None:
        self._take(each)
        self._let_go(each)

    def _take(self, each: _Shared) -> None:
        """What was gathered ahead is whole now."""
        del self.ahead[each]
        try:
            self._wait(each)
        finally:
            self._params.unpin(each.unit)

    def _start(self, each: _Shared) -> None:
        spec, field = self._params.specs[each.unit], each.whole
        gathers = self._ranks.all_gather(self._params.tensor(each.unit), spec.pieces, spec.name)
        field.begin_move(None, _DEVICE, _Gather(gathers), StallCause.COLLECTIVE, at=field.version)

    def _wait(self, each: _Shared) -> None:
        move = each.whole.arriving(_DEVICE)
        if move is not None:
            with self._counters.stalled(move.cause):
                each.whole.finish_move(move)
