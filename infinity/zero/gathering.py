"""Unshard units that several ranks share, ahead of the computation.

[Note: when a unit is gathered]
If several ranks share a unit, each fetches and updates its own shard, and an all-gather unshards the unit. The
unsharded copy is a field of its own, with one copy made of all ranks' shards. All ranks must take part, so whether an
all-gather is due may depend only on events that are alike on all ranks: a unit is gathered for a use, and stays
unsharded until its last use ends (or, if its parameters stay on the device, until the next update), or until its next
use if that follows at once. It must not depend on residency, which follows each rank's own disk and memory. The last
cycle predicts the next units: the all-gather of the next one runs during the use before, and those of further units
follow in order, as far as `Ahead` allows, which uses byte counts only, of the smallest rank. If a cycle differs, units
are gathered on the spot, on all ranks alike.

If no unit is ever evicted, ranks may use different units. Units changed by an update are then gathered in an order that
all ranks know: each after all units before it, and the remaining ones before any other collective begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.schedule import Ahead
from infinity.telemetry import Counters, StallCause, Times
from infinity.tiers import Field, Memory
from infinity.tiers.unit_params import UnitParams
from infinity.zero.ranks import Pending, Ranks

_DEVICE = Memory.DEVICE


class _Gather:
    """All-gathers of one unit, as one transfer."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    def done(self) -> bool:
        return False  # never asked before a wait: all ranks wait at the same place

    def result(self) -> None:
        for pending in self._pending:
            pending.wait()

    def times(self) -> Times | None:
        return None


class _Shared:
    """A unit that several ranks share.

    Attributes:
        params: its parameters on this rank.
        whole: its one copy has all ranks' shards.
        moving_bytes: of the unsharded unit; 0 if it is never evicted.
        uses: number of modules that compute on it now.
    """

    __slots__ = ("moving_bytes", "params", "unit", "uses", "whole")

    def __init__(self, unit: int, params: UnitParams) -> None:
        spec = params.spec
        self.params = params
        self.unit = unit
        self.moving_bytes = spec.moving_bytes
        self.uses = 0
        self.whole = Field(f"whole {spec.name}", [_DEVICE])
        self.whole.outdate()  # a value exists, but not unsharded

    @property
    def is_whole(self) -> bool:
        return self.whole.is_newest(_DEVICE)


class Gathering:
    """The units that are unsharded now or will be. A unit of one rank alone always is.

    Args:
        units: the parameters of all units, by index.
        capacity_bytes: memory for units that are evicted and fetched; the same on all ranks.
        ahead_bytes: memory for units that are gathered early, beyond the next one.

    Attributes:
        shares: several ranks share some unit; else no unit is ever gathered.
        ahead: units that are pinned and gathered for their next use, in order.
    """

    def __init__(
        self, units: Sequence[UnitParams], ranks: Ranks, capacity_bytes: int, counters: Counters, ahead_bytes: int = 0
    ) -> None:
        self._ranks = ranks
        self._counters = counters
        self._shared = [
            _Shared(unit, params) if params.spec.sharding.count > 1 else None for unit, params in enumerate(units)
        ]
        self.shares = any(each is not None for each in self._shared)
        moving_bytes = [params.spec.moving_bytes for params in units]
        self._may_be_ahead = Ahead(capacity_bytes, ahead_bytes, max(moving_bytes, default=0))
        self.ahead: dict[_Shared, None] = {}
        self._order = [] if any(moving_bytes) else [each for each in self._shared if each is not None]
        self._in_forward = False
        self._in_use_bytes = 0  # of units in use that can be evicted

    def is_whole(self, unit: int) -> bool:
        """Whether the newest shards of all ranks are in the unit's memory."""
        each = self._shared[unit]
        return each is None or each.is_whole

    def make_way(self, units: Sequence[int]) -> None:
        """Drop units that were gathered for a use that does not come, before a module uses these units."""
        for unit in units:
            each = self._shared[unit]
            if each in self.ahead:
                return
            if each is not None and not each.is_whole:
                self.drop_ahead()
                return

    def enter(self, unit: int) -> None:
        """Unshard a resident unit."""
        each = self._shared[unit]
        if each is None:
            return
        if not each.uses:
            self._in_use_bytes += each.moving_bytes
        each.uses += 1  # first, because `leave` follows in any case
        if each in self.ahead:
            while (first := next(iter(self.ahead))) is not each:
                self._drop(first)
            self._take(each)
        elif not each.is_whole:
            self.drop_ahead()
        self._gather(each)

    def leave(self, unit: int, expected: int | None) -> None:
        """End a use. Does nothing if `enter` was not reached.

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
            each.params.pin()
            self.ahead = {each: None, **self.ahead}
        elif each not in self.ahead:
            self._let_go(each)

    def begin_cycle(self) -> None:
        self._in_forward = bool(self._order)

    def end_cycle(self) -> None:
        """Drop early gathers and end all uses."""
        self.drop_ahead()
        for each in self._shared:
            if each is not None and each.uses:  # an exception may have skipped `leave`
                each.uses = 1
                self.leave(each.unit, None)

    def due(self, upcoming: Sequence[int]) -> int | None:
        """Return the unit that is to be gathered next, during the use that begins; None if there is none, or no room
        for it.

        Args:
            upcoming: units that are used next, in order.
        """
        if self._order:
            if not self._in_forward:  # updates begin, and no module uses their units before the next pass
                return None
            upcoming = [each.unit for each in self._order if not each.is_whole][: len(upcoming)]
        passed: list[int] = []
        for steps, unit in enumerate(upcoming, 1):
            each = self._shared[unit]
            # An evictable unit is resharded between two uses, unless they are adjacent. Units behind the second use are
            # gathered after it.
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
        """Whether a unit needed `steps` uses from now has room beside the units in use and those needed before it."""
        if each.moving_bytes:
            ahead_bytes = sum(other.moving_bytes for other in self.ahead)
            return self._may_be_ahead.may_be(steps, each.moving_bytes, self._in_use_bytes, ahead_bytes)
        whole_bytes = sum(other.params.spec.nbytes for other in (*self.ahead, each))
        return steps == 1 or whole_bytes <= self._may_be_ahead.bytes

    def look_ahead(self, unit: int) -> None:
        """Start to gather a resident, pinned unit. `_take` unpins it, when it is used or dropped."""
        each = self._shared[unit]
        assert each is not None
        self._start(each)
        self.ahead[each] = None

    def changed(self, unit: int) -> None:
        """Mark the unsharded copy as stale, because the shard changes or will change.

        A running gather is waited for first: until its end it may write the old values, including this rank's own.
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
        """Reshard the unit, unless it is in use or its parameters stay on the device."""
        each = self._shared[unit]
        if each is not None:
            self._let_go(each)

    def _let_go(self, each: _Shared) -> None:
        if each.moving_bytes and not each.uses:
            self._change(each)

    def gather(self, unit: int) -> None:
        """Unshard a resident unit now, on all ranks together."""
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
        """Return the units that must be gathered before this one, or before another collective, whether used or not."""
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
        """Gather in this order from now on, behind units that it does not contain. All ranks call this together."""
        if self._order:
            others = [each for each in self._order if each.unit not in order]
            shared = [self._shared[unit] for unit in order]
            self._order = others + [each for each in shared if each is not None]

    def drop_ahead(self) -> None:
        while self.ahead:
            self._drop(next(iter(self.ahead)))

    def _drop(self, each: _Shared) -> None:
        self._take(each)
        self._let_go(each)

    def _take(self, each: _Shared) -> None:
        """Wait for an early gather, and unpin the unit."""
        del self.ahead[each]
        try:
            self._wait(each)
        finally:
            each.params.unpin()

    def _start(self, each: _Shared) -> None:
        spec, field = each.params.spec, each.whole
        gathers = self._ranks.all_gather(each.params.tensor, spec.pieces, spec.name)
        field.begin_move(None, _DEVICE, _Gather(gathers), StallCause.COLLECTIVE, at=field.version)

    def _wait(self, each: _Shared) -> None:
        move = each.whole.arriving(_DEVICE)
        if move is not None:
            with self._counters.stalled(move.cause):
                each.whole.finish_move(move)
