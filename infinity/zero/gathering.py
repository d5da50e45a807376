"""Unshard units that several ranks share: for a use, or early, during the use before it.

[Note: when a unit is gathered]
If several ranks share a unit, each fetches and updates its own shard, and an all-gather unshards the unit. The
unsharded unit is a field of its own (`Shared.whole`), because a rank's shard may be newer than it. A unit is gathered
for a use, and stays unsharded

- until its last use ends, if it can be evicted. If the next use is of the same unit, the unit stays unsharded for it;
- until the next update, if its parameters stay on the device.

All ranks take part in an all-gather, so it may follow only from events that are alike on all ranks. It must not depend
on what a rank has in memory, because that differs between ranks. The last cycle predicts the next units. The
all-gather of the next unit runs during the use before it. Those of further units follow in order, as far as
`AheadLimit` allows. Its limits are those of the rank with the least memory, so all ranks gather equally far ahead. If a
cycle differs from the last one, units are gathered when they are used, on all ranks alike.

If no unit is ever evicted, ranks may use different units. In a forward pass, units changed by an update are then
gathered in one order (`_order`), the same on all ranks. To gather a unit, a rank first gathers all units that precede
it. Before any other collective, it gathers the remaining units.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.schedule import AheadLimit
from infinity.telemetry import Counters, StallCause, Times
from infinity.tiers import Memory
from infinity.zero.ranks import Pending, Ranks
from infinity.zero.unit import Shared, Unit

_DEVICE = Memory.DEVICE


class _Gather:
    """All-gathers of one unit, as one transfer."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    def done(self) -> bool:
        return False  # a poll must not end a gather: all ranks must see its end at the same point of their program

    def result(self) -> None:
        for pending in self._pending:
            pending.wait()

    def times(self) -> Times | None:
        return None


class Gathering:
    """Decide when units are unsharded, and unshard them. A unit that no other rank shares is always unsharded.

    Args:
        units: by index.
        capacity_bytes: memory for units that are evicted and fetched; the same on all ranks.
        ahead_bytes: memory for units that are gathered early, beyond the next one.

    Attributes:
        has_shared_units: whether ranks share any unit; if not, no unit is ever gathered.
        early: units that are pinned and gathered for their next use, in order.
    """

    def __init__(
        self, units: Sequence[Unit], ranks: Ranks, capacity_bytes: int, counters: Counters, ahead_bytes: int = 0
    ) -> None:
        self._ranks = ranks
        self._counters = counters
        self._shared = [unit for unit in units if unit.shared is not None]
        self.has_shared_units = bool(self._shared)
        moving_bytes = [unit.params.spec.moving_bytes for unit in units]
        self._ahead_limit = AheadLimit(capacity_bytes, ahead_bytes, max(moving_bytes, default=0))
        self.early: dict[Unit, None] = {}
        self._order = [] if any(moving_bytes) else list(self._shared)
        self._gathers_in_order = False  # from the begin of a forward pass to the first collective after it
        self._in_use_bytes = 0  # of units in use that can be evicted

    @staticmethod
    def is_whole(unit: Unit) -> bool:
        """Whether the newest shards of all ranks are in the unit's memory."""
        return unit.shared is None or unit.shared.is_whole

    def drop_unexpected(self, units: Sequence[Unit]) -> None:
        """Drop the early gathers if a unit that is used now was not expected and is stale: it needs their room."""
        for unit in units:
            if unit in self.early:
                return
            if not self.is_whole(unit):
                self.drop_early()
                return

    def enter(self, unit: Unit) -> None:
        """Begin a use: unshard a resident unit, and end the early gathers before it. Pairs with `leave`."""
        shared = unit.shared
        if shared is None:
            return
        if not shared.uses:
            self._in_use_bytes += shared.moving_bytes
        shared.uses += 1  # before anything that can fail: after an error, `leave` is called, too
        if unit in self.early:
            while (first := next(iter(self.early))) is not unit:
                self._drop(first)
            self._take(unit)
        elif not shared.is_whole:
            self.drop_early()
        self.gather(unit)

    def leave(self, unit: Unit, expected: int | None) -> None:
        """End a use. Do nothing if `enter` was not called for it.

        Args:
            expected: index of the unit that is used next; None if unknown.
        """
        shared = unit.shared
        if shared is None or not shared.uses:
            return
        shared.uses -= 1
        if shared.uses:
            return
        self._in_use_bytes -= shared.moving_bytes
        if expected == unit.index and unit not in self.early and shared.is_whole and shared.moving_bytes:
            unit.params.compute_copy.pin()
            self.early = {unit: None, **self.early}
        elif unit not in self.early:
            self.reshard(unit)

    def begin_cycle(self) -> None:
        """Begin a forward pass."""
        self._gathers_in_order = bool(self._order)

    def end_cycle(self) -> None:
        """Drop early gathers and end all uses."""
        self.drop_early()
        for unit in self._shared:
            if unit.shared is not None and unit.shared.uses:  # an exception may have skipped `leave`
                unit.shared.uses = 1
                self.leave(unit, None)

    def next_to_gather(self, upcoming: Sequence[Unit]) -> Unit | None:
        """Return the next unit to gather early, or None. Called when a use begins, until it returns None.

        Args:
            upcoming: units that are used next, in order.
        """
        if self._order:
            if not self._gathers_in_order:  # the stale units are updated ones, which only the next forward pass uses
                return None
            upcoming = [unit for unit in self._order if not self.is_whole(unit)][: len(upcoming)]
        passed: list[Unit] = []
        for steps, unit in enumerate(upcoming, 1):
            shared = unit.shared
            # An evictable unit is resharded between two uses that are not adjacent. So its second use needs a gather of
            # its own, which can only begin after the first use, and the units behind it wait for that.
            if (
                shared is not None
                and shared.moving_bytes
                and passed[-1:] != [unit]
                and (unit in passed or (steps > 1 and shared.uses))
            ):
                return None
            passed.append(unit)
            if shared is not None and not shared.is_whole and unit not in self.early:
                return unit if self._has_room(unit, shared.moving_bytes, steps) else None
        return None

    def _has_room(self, unit: Unit, moving_bytes: int, steps: int) -> bool:
        """Whether there is room to gather a unit `steps` uses ahead, beside the units in use and the early gathers."""
        if moving_bytes:
            ahead_bytes = sum(other.params.spec.moving_bytes for other in self.early)
            return self._ahead_limit.allows(steps, moving_bytes, self._in_use_bytes, ahead_bytes)
        whole_bytes = sum(other.params.spec.nbytes for other in (*self.early, unit))
        return steps == 1 or whole_bytes <= self._ahead_limit.bytes

    def gather_early(self, unit: Unit) -> None:
        """Start to gather a resident, pinned unit for its next use. It is unpinned when it is used or dropped."""
        assert unit.shared is not None
        self._start(unit, unit.shared)
        self.early[unit] = None

    def changed(self, unit: Unit) -> None:
        """Mark the unsharded copy as stale, because the shard changes or will change.

        A running gather is waited for first: until its end it may write the old values, including this rank's own.
        """
        if unit.shared is None:
            return
        if unit in self.early:
            self._drop(unit)
        self._wait(unit.shared)
        unit.shared.whole.invalidate()

    def reshard(self, unit: Unit) -> None:
        """Reshard the unit, unless it is in use or its parameters stay on the device."""
        shared = unit.shared
        if shared is not None and shared.moving_bytes and not shared.uses:
            self.changed(unit)

    def gather(self, unit: Unit) -> None:
        """Unshard a resident unit now, on all ranks together."""
        if unit in self.early:
            self._take(unit)
        if unit.shared is not None and not unit.shared.is_whole:
            self._start(unit, unit.shared)
            self._wait(unit.shared)

    def preceding(self, unit: Unit | None) -> list[Unit]:
        """Return the units that must be gathered before this one, even if this rank does not use them.

        They are the stale units before it in `_order`; with None all stale units, because another collective follows.
        """
        if not self._gathers_in_order or (unit is not None and self.is_whole(unit)):
            return []
        self._gathers_in_order = unit is not None
        before = self._order if unit is None else self._order[: self._order.index(unit)]
        return [each for each in before if not self.is_whole(each)]

    def set_order(self, order: Sequence[int]) -> None:
        """Set `_order`. Units that `order` does not contain come first. All ranks call this together."""
        place = {index: position for position, index in enumerate(order)}
        self._order.sort(key=lambda unit: place.get(unit.index, -1))

    def drop_early(self) -> None:
        """Drop all early gathers."""
        while self.early:
            self._drop(next(iter(self.early)))

    def _drop(self, unit: Unit) -> None:
        self._take(unit)
        self.reshard(unit)

    def _take(self, unit: Unit) -> None:
        """Wait for an early gather, and unpin the unit."""
        assert unit.shared is not None
        del self.early[unit]
        try:
            self._wait(unit.shared)
        finally:
            unit.params.compute_copy.unpin()

    def _start(self, unit: Unit, shared: Shared) -> None:
        spec, whole = unit.params.spec, shared.whole
        gathers = self._ranks.all_gather(unit.params.tensor, spec.pieces, spec.name)
        whole.begin_move(None, _DEVICE, _Gather(gathers), StallCause.COLLECTIVE, at=whole.version)

    def _wait(self, shared: Shared) -> None:
        move = shared.whole.arriving(_DEVICE)
        if move is not None:
            with self._counters.stalled(move.cause):
                shared.whole.finish_move(move)
