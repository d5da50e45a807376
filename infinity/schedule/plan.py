"""Turn a trace, unit sizes and a budget into a fixed plan of prefetches and evictions.

The trace is cyclic: training repeats it. Two pure passes make the plan:

1. *What to replace.* During each use, the next unit must be fetched. The unit that is needed farthest ahead is evicted
   for it (Belady's MIN; the unit in use and the next one are not candidates). Each decision is made as late as
   possible, so that a policy that looks one unit ahead moves the fewest bytes. If units are gathered earlier (see
   infinity/zero/gathering.py), further units, up to a number of bytes, must be fetched, too.
2. *When to start.* Each fetch is then moved to an earlier time: right after the last use of its victims. The order of
   operations, and so the content of memory after each of them, stays the same; the disk only starts earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from infinity.schedule.next_use import NextUse

MOST_AHEAD = 16  # uses
_MAX_CYCLES = 8  # two or three reach a steady state; longer searches only serve degenerate traces


@dataclass(frozen=True)
class PlanStep:
    """The actions at one use.

    Attributes:
        unit: the unit that is used.
        before: units to evict, in order, before `unit` is fetched for this use; None if a fetch was started earlier.
        actions: ("evict" | "prefetch", unit), to be started in this order during the use.
    """

    unit: int
    before: tuple[int, ...] | None
    actions: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Plan:
    """One cycle of operations in steady state.

    Attributes:
        steps: one entry a use, in the trace's order.
        resident: units that are in memory, or being fetched, before the first use of the cycle.
        evicted: units that are evicted during the cycle; their changes must reach their home.
        most_bytes: peak of bytes in memory or being fetched. Usually less than the capacity, which units do not fill
            exactly.
    """

    steps: tuple[PlanStep, ...]
    resident: frozenset[int]
    evicted: frozenset[int]
    most_bytes: int


@dataclass(frozen=True)
class AheadLimit:
    """How far ahead of their use units are fetched: the next one if it fits, and more within a number of bytes.

    The plan and the gathers use this rule, so that they have the same units in memory.

    Attributes:
        capacity_bytes: memory for units that are fetched and evicted.
        bytes: limit for units ahead of their use, if these are more than the next one.
        largest_bytes: size of the largest unit that is fetched and evicted. Units beyond the next one leave memory for
            one more unit. Otherwise nothing could be read while a unit is computed on.
    """

    capacity_bytes: int
    bytes: int
    largest_bytes: int

    def allows(self, steps: int, nbytes: int, in_use_bytes: int, ahead_bytes: int) -> bool:
        """Whether a unit may be fetched `steps` uses ahead, in addition to the unit in use and the units ahead."""
        total_bytes = in_use_bytes + ahead_bytes + nbytes
        if steps == 1:
            return total_bytes <= self.capacity_bytes
        return ahead_bytes + nbytes <= self.bytes and total_bytes + self.largest_bytes <= self.capacity_bytes


@dataclass(frozen=True)
class _Fetch:
    """One decision of the first pass: `unit` must be in memory at time `needed`, in the place of `victims`.

    `start` is the first time at which the victims are no longer needed. `on_the_spot` means that the unit is fetched at
    the use that needs it, and not ahead.
    """

    unit: int
    victims: tuple[int, ...]
    start: int
    needed: int
    on_the_spot: bool


class _Replacement:
    """The first pass: walk the trace, and decide which units to fetch and to evict."""

    def __init__(self, uses: Sequence[int], sizes: Sequence[int], capacity_bytes: int, ahead_bytes: int = 0) -> None:
        self._next_use = NextUse(uses)
        self._sizes = sizes
        self._ahead_limit = AheadLimit(capacity_bytes, ahead_bytes, max((sizes[unit] for unit in uses), default=0))
        self._capacity_bytes = self._free_bytes = capacity_bytes
        self.most_bytes = 0  # peak of bytes in memory
        self._last_use: dict[int, int] = {}
        self._last_start = 0  # fetches must stay in order
        # Residents with their next uses, farthest ahead first. Each use of a unit adds an entry. The entries before it
        # have times in the past, so they stay at the bottom of the heap.
        self._by_need: list[tuple[int, int]] = []
        self.resident: set[int] = set()
        self.fetches: list[_Fetch] = []

    def use(self, time: int) -> None:
        """Handle the use at time `time`: fetch its unit if it is not in memory, then the next units that fit."""
        unit = self._next_use.at(time)
        if unit not in self.resident:
            self._fetch(unit, time, time, keep={unit})
        self._last_use[unit] = time
        self._push(unit, time)
        kept, ahead_bytes = {unit}, 0
        for steps in range(1, MOST_AHEAD + 1):
            following = self._next_use.at(time + steps)
            if following in kept:
                continue
            if not self._ahead_limit.allows(steps, self._sizes[following], self._sizes[unit], ahead_bytes):
                return
            if following not in self.resident:
                self._fetch(following, time, time + steps, keep=kept)
                self._push(following, time)
            kept.add(following)
            ahead_bytes += self._sizes[following]

    def _push(self, unit: int, time: int) -> None:
        heappush(self._by_need, (-self._next_use.after(unit, time), unit))

    def _fetch(self, unit: int, time: int, needed: int, keep: set[int]) -> None:
        victims = self._victims(unit, keep)
        on_the_spot = needed == time
        start = time if on_the_spot else self._last_start
        for victim in victims:
            start = max(start, self._last_use.get(victim, -1) + 1)
            self._free_bytes += self._sizes[victim]
        self.resident.difference_update(victims)
        self.resident.add(unit)
        self._free_bytes -= self._sizes[unit]
        self.most_bytes = max(self.most_bytes, self._capacity_bytes - self._free_bytes)
        self._last_start = start
        self.fetches.append(_Fetch(unit, tuple(victims), start, needed, on_the_spot))

    def _victims(self, unit: int, keep: set[int]) -> list[int]:
        """Choose the units that are needed farthest ahead. Keep small ones that a larger victim makes unnecessary."""
        missing_bytes = self._sizes[unit] - self._free_bytes
        taken, spared = [], []
        while missing_bytes > 0:
            entry = heappop(self._by_need)
            if entry[1] in keep:
                spared.append(entry)
            else:
                taken.append(entry)
                missing_bytes -= self._sizes[entry[1]]
        victims: list[int] = []
        for entry in reversed(taken):
            size = self._sizes[entry[1]]
            if missing_bytes + size <= 0:
                spared.append(entry)
                missing_bytes += size
            else:
                victims.append(entry[1])
        for entry in spared:
            heappush(self._by_need, entry)
        return victims[::-1]


def make_plan(uses: Sequence[int], sizes: Sequence[int], capacity_bytes: int, ahead_bytes: int = 0) -> Plan:
    """Plan one steady cycle.

    Args:
        uses: unit indices in order of use.
        sizes: bytes of each unit, by index.
        capacity_bytes: room for resident units; must hold the largest used unit.
        ahead_bytes: bytes of units that must be in memory before their use, beyond the next one.

    Raises:
        ValueError: `capacity_bytes` does not hold the largest used unit.
    """
    largest = max((sizes[unit] for unit in uses), default=0)
    if largest > capacity_bytes:
        raise ValueError(f"capacity of {capacity_bytes} bytes cannot hold a unit of {largest} bytes")
    if not uses:
        return Plan((), frozenset(), frozenset(), 0)
    replacement = _Replacement(uses, sizes, capacity_bytes, ahead_bytes)
    length = len(uses)
    seen: list[frozenset[int]] = []
    while len(seen) < _MAX_CYCLES and frozenset(replacement.resident) not in seen[-1:]:
        seen.append(frozenset(replacement.resident))
        for position in range(length):
            replacement.use((len(seen) - 1) * length + position)
    cycle = len(seen)  # the first cycle that is known to start like the one before it
    for position in range(2 * length):  # a fetch for the next cycle may start in this one
        replacement.use(cycle * length + position)
    return _second_pass(uses, replacement, cycle * length)


def _second_pass(uses: Sequence[int], replacement: _Replacement, origin: int) -> Plan:
    """Distribute the fetches that start in the cycle that begins at time `origin` over its uses."""
    length = len(uses)
    resident: set[int] = set()
    before: dict[int, tuple[int, ...]] = {}
    actions: list[list[tuple[str, int]]] = [[] for _ in uses]
    evicted: set[int] = set()
    start: frozenset[int] | None = None
    for fetch in replacement.fetches:
        if fetch.start >= origin and start is None:
            start = frozenset(resident)
        if fetch.start >= origin + length:
            break
        resident.difference_update(fetch.victims)
        resident.add(fetch.unit)
        if fetch.start < origin:
            continue
        position = fetch.start - origin
        evicted.update(fetch.victims)
        if fetch.on_the_spot:
            before[position] = fetch.victims
        else:
            actions[position] += [("evict", victim) for victim in fetch.victims] + [("prefetch", fetch.unit)]
    start = frozenset(resident) if start is None else start
    steps = tuple(PlanStep(unit, before.get(position), tuple(actions[position])) for position, unit in enumerate(uses))
    return Plan(steps, start, frozenset(evicted), replacement.most_bytes)
