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
        rows: of all units.
        capacity_bytes: memory for units that are evicted and fetched; the same on all ranks.
        ahead_bytes: memory for units that are gathered early, beyond the next one.

    Attributes:
        has_shared_units: whether ranks share any unit; if not, no unit is ever gathered.
        early: units that are pinned and gathered for their next use, in order.
    """

    def __init__(
        self, rows: Sequence[Unit], ranks: Ranks, capacity_bytes: int, counters: Counters, ahead_bytes: int = 0
    ) -> None:
        self._ranks = ranks
        self._counters = counters
        self._shared = [row for row in rows if row.shared is not None]
        self.has_shared_units = bool(self._shared)
        moving_bytes = [row.params.spec.moving_bytes for row in rows]
        self._ahead_limit = AheadLimit(capacity_bytes, ahead_bytes, max(moving_bytes, default=0))
        self.early: dict[Unit, None] = {}
        self._order = [] if any(moving_bytes) else list(self._shared)
        self._gathers_in_order = False  # from the begin of a forward pass to the first collective after it
        self._in_use_bytes = 0  # of units in use that can be evicted

    @staticmethod
    def is_whole(row: Unit) -> bool:
        """Whether the newest shards of all ranks are in the unit's memory."""
        return row.shared is None or row.shared.is_whole

    def drop_unexpected(self, rows: Sequence[Unit]) -> None:
        """Drop the early gathers if a unit that is used now was not expected and is stale: it needs their room."""
        for row in rows:
            if row in self.early:
                return
            if not self.is_whole(row):
                self.drop_early()
                return

    def enter(self, row: Unit) -> None:
        """Begin a use: unshard a resident unit, and end the early gathers before it. Pairs with `leave`."""
        shared = row.shared
        if shared is None:
            return
        if not shared.uses:
            self._in_use_bytes += shared.moving_bytes
        shared.uses += 1  # before anything that can fail: after an error, `leave` is called, too
        if row in self.early:
            while (first := next(iter(self.early))) is not row:
                self._drop(first)
            self._take(row)
        elif not shared.is_whole:
            self.drop_early()
        self.gather(row)

    def leave(self, row: Unit, expected: int | None) -> None:
        """End a use. Do nothing if `enter` was not called for it.

        Args:
            expected: index of the unit that is used next; None if unknown.
        """
        shared = row.shared
        if shared is None or not shared.uses:
            return
        shared.uses -= 1
        if shared.uses:
            return
        self._in_use_bytes -= shared.moving_bytes
        if expected == row.index and row not in self.early and shared.is_whole and shared.moving_bytes:
            row.params.compute_copy.pin()
            self.early = {row: None, **self.early}
        elif row not in self.early:
            self.reshard(row)

    def begin_cycle(self) -> None:
        """Begin a forward pass."""
        self._gathers_in_order = bool(self._order)

    def end_cycle(self) -> None:
        """Drop early gathers and end all uses."""
        self.drop_early()
        for row in self._shared:
            if row.shared is not None and row.shared.uses:  # an exception may have skipped `leave`
                row.shared.uses = 1
                self.leave(row, None)

    def next_to_gather(self, upcoming: Sequence[Unit]) -> Unit | None:
        """Return the next unit to gather early, or None. Called when a use begins, until it returns None.

        Args:
            upcoming: units that are used next, in order.
        """
        if self._order:
            if not self._gathers_in_order:  # the stale units are updated ones, which only the next forward pass uses
                return None
            upcoming = [row for row in self._order if not self.is_whole(row)][: len(upcoming)]
        passed: list[Unit] = []
        for steps, row in enumerate(upcoming, 1):
            shared = row.shared
            # An evictable unit is resharded between two uses that are not adjacent. So its second use needs a gather of
            # its own, which can only begin after the first use, and the units behind it wait for that.
            if (
                shared is not None
                and shared.moving_bytes
                and passed[-1:] != [row]
                and (row in passed or (steps > 1 and shared.uses))
            ):
                return None
            passed.append(row)
            if shared is not None and not shared.is_whole and row not in self.early:
                return row if self._has_room(row, shared.moving_bytes, steps) else None
        return None

    def _has_room(self, row: Unit, moving_bytes: int, steps: int) -> bool:
        """Whether there is room to gather a unit `steps` uses ahead, beside the units in use and the early gathers."""
        if moving_bytes:
            ahead_bytes = sum(other.params.spec.moving_bytes for other in self.early)
            return self._ahead_limit.allows(steps, moving_bytes, self._in_use_bytes, ahead_bytes)
        whole_bytes = sum(other.params.spec.nbytes for other in (*self.early, row))
        return steps == 1 or whole_bytes <= self._ahead_limit.bytes

    def gather_early(self, row: Unit) -> None:
        """Start to gather a resident, pinned unit for its next use. It is unpinned when it is used or dropped."""
        assert row.shared is not None
        self._start(row, row.shared)
        self.early[row] = None

    def changed(self, row: Unit) -> None:
        """Mark the unsharded copy as stale, because the shard changes or will change.

        A running gather is waited for first: until its end it may write the old values, including this rank's own.
        """
        if row.shared is None:
            return
        if row in self.early:
            self._drop(row)
        self._wait(row.shared)
        row.shared.whole.invalidate()

    def reshard(self, row: Unit) -> None:
        """Reshard the unit, unless it is in use or its parameters stay on the device."""
        shared = row.shared
        if shared is not None and shared.moving_bytes and not shared.uses:
            self.changed(row)

    def gather(self, row: Unit) -> None:
        """Unshard a resident unit now, on all ranks together."""
        if row in self.early:
            self._take(row)
        if row.shared is not None and not row.shared.is_whole:
            self._start(row, row.shared)
            self._wait(row.shared)

    def preceding(self, row: Unit | None) -> list[Unit]:
        """Return the units that must be gathered before this one, even if this rank does not use them.

        They are the stale units before it in `_order`; with None all stale units, because another collective follows.
        """
        if not self._gathers_in_order or (row is not None and self.is_whole(row)):
            return []
        self._gathers_in_order = row is not None
        before = self._order if row is None else self._order[: self._order.index(row)]
        return [each for each in before if not self.is_whole(each)]

    def set_order(self, order: Sequence[int]) -> None:
        """Set `_order`. Units that `order` does not contain come first. All ranks call this together."""
        place = {unit: position for position, unit in enumerate(order)}
        self._order.sort(key=lambda row: place.get(row.index, -1))

    def drop_early(self) -> None:
        """Drop all early gathers."""
        while self.early:
            self._drop(next(iter(self.early)))

    def _drop(self, row: Unit) -> None:
        self._take(row)
        self.reshard(row)

    def _take(self, row: Unit) -> None:
        """Wait for an early gather, and unpin the unit."""
        assert row.shared is not None
        del self.early[row]
        try:
            self._wait(row.shared)
        finally:
            row.params.compute_copy.unpin()

    def _start(self, row: Unit, shared: Shared) -> None:
        spec, whole = row.params.spec, shared.whole
        gathers = self._ranks.all_gather(row.params.tensor, spec.pieces, spec.name)
        whole.begin_move(None, _DEVICE, _Gather(gathers), StallCause.COLLECTIVE, at=whole.version)

    def _wait(self, shared: Shared) -> None:
        move = shared.whole.arriving(_DEVICE)
        if move is not None:
            with self._counters.stalled(move.cause):
                shared.whole.finish_move(move)
