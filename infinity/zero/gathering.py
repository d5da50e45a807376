"""Makes units whole that several ranks share, one unit ahead of the computation.

[Note: when a unit is gathered]
Of a unit that several ranks share, what is fetched and updated is this rank's shard; an all-gather makes it whole.
All ranks must take part, so whether one is due may depend only on what they do alike: a unit is gathered for a use,
and stays whole until its last use ends (or, if its parameters stay on the device, until the next update), or through
to its next use where that follows at once. It must not depend on residency, which follows each rank's own disk and
memory. What the last cycle did says which unit comes next; its all-gather runs under the use before. A cycle that does
something else is served on the spot, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.telemetry import Counters, StallCause
from infinity.tiers import ParamStore
from infinity.zero.ranks import Pending, Ranks


@dataclass(frozen=True)
class _Ahead:
    """A unit that is pinned and gathered for its next use; nothing is pending where it was whole already."""

    unit: int
    pending: Sequence[Pending]


class Gathering:
    """Which units are whole, and which one will be.

    Args:
        bring: has a unit of this rank's resident and up to date.
        capacity_bytes: memory for units that come and go; the same on all ranks.
    """

    def __init__(
        self,
        params: ParamStore,
        ranks: Ranks,
        bring: Callable[[int], None],
        capacity_bytes: int,
        counters: Counters,
    ) -> None:
        self._params = params
        self._ranks = ranks
        self._bring = bring
        self._capacity_bytes = capacity_bytes
        self._counters = counters
        self._uses = [0] * len(params.specs)
        self._whole: set[int] = set()
        self._expected: Sequence[int] = ()
        self._position: int | None = None  # in what is expected; None: the cycle does something else
        self._ahead: _Ahead | None = None

    def begin_cycle(self, expected: Sequence[int]) -> None:
        """A cycle begins that will probably use these units in this order."""
        self._expected = expected
        self._position = 0

    def end_cycle(self) -> None:
        """Nothing more is used for now."""
        self._position = None
        self._drop_ahead()
        for unit, uses in enumerate(self._uses):
            if uses:  # an exception has kept it from being left
                self._uses[unit] = 1
                self.leave(unit)

    def is_whole(self, unit: int) -> bool:
        """All ranks' pieces of the unit are here, and the newest."""
        return unit in self._whole

    def enter(self, unit: int) -> None:
        """Have a resident unit whole, and start to gather the one that is used next."""
        self._uses[unit] += 1  # first, because `leave` follows whatever happens here
        if self._ahead is not None and self._ahead.unit == unit:
            self._take_ahead()
        else:
            self._drop_ahead()
        if unit not in self._whole:
            self.gather(unit)
        self._advance(unit)
        if self._ahead is None and self._position is not None and self._position < len(self._expected):
            self._look_ahead(self._expected[self._position])

    def leave(self, unit: int) -> None:
        """A use is over; one that failed before its `enter` is none."""
        if not self._uses[unit]:
            return
        self._uses[unit] -= 1
        if self._uses[unit] or not self._params.specs[unit].offloaded:
            return
        again = self._position is not None and self._expected[self._position : self._position + 1] == [unit]
        if again and self._ahead is None and unit in self._whole:
            self._params.pin(unit)
            self._ahead = _Ahead(unit, ())
        elif self._ahead is None or self._ahead.unit != unit:
            self._whole.discard(unit)

    def changed(self, unit: int) -> None:
        """The unit's values are others now, or will be.

        A gathering under way ends first: it may write the old values, this rank's own among them, until it is over.
        """
        if self._ahead is not None and self._ahead.unit == unit:
            self._drop_ahead()
        self._whole.discard(unit)

    def gather(self, unit: int) -> None:
        """All ranks make a resident unit whole now."""
        self._wait(unit, self._start(unit))

    def _wait(self, unit: int, gathers: Sequence[Pending]) -> None:
        if gathers:
            try:
                with self._counters.stalled(StallCause.COLLECTIVE):
                    for pending in gathers:
                        pending.wait()
            except BaseException:
                self._whole.discard(unit)
                raise

    def _start(self, unit: int) -> list[Pending]:
        """Start to gather a unit, which counts as whole from now on: who uses it waits first."""
        spec = self._params.specs[unit]
        gathers = []
        if spec.sharding.count > 1:
            gathers = self._ranks.all_gather(self._params.tensor(unit), spec.pieces, spec.name)
        self._whole.add(unit)
        return gathers

    def _advance(self, unit: int) -> None:
        if self._position is None:
            return
        if self._position < len(self._expected) and self._expected[self._position] == unit:
            self._position += 1
        else:
            self._position = None

    def _look_ahead(self, unit: int) -> None:
        """Gather the next unit under the use that begins, if there is room for both."""
        specs = self._params.specs
        if unit in self._whole or specs[unit].sharding.count == 1:
            return
        if specs[unit].offloaded:
            in_use = sum(
                specs[other].nbytes for other, uses in enumerate(self._uses) if uses and specs[other].offloaded
            )
            if in_use + specs[unit].nbytes > self._capacity_bytes:
                return
        self._params.pin(unit)
        try:
            self._bring(unit)
            self._ahead = _Ahead(unit, self._start(unit))
        except BaseException:
            self._params.unpin(unit)
            raise

    def _take_ahead(self) -> None:
        """What was gathered ahead is whole now."""
        if self._ahead is None:
            return
        ahead, self._ahead = self._ahead, None
        try:
            self._wait(ahead.unit, ahead.pending)
        finally:
            self._params.unpin(ahead.unit)

    def _drop_ahead(self) -> None:
        """What was gathered ahead is not used next."""
        if self._ahead is None:
            return
        unit = self._ahead.unit
        self._take_ahead()
        if not self._uses[unit] and self._params.specs[unit].offloaded:
            self._whole.discard(unit)
