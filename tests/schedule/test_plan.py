"""Properties of the plan, on traces that hypothesis makes up."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.schedule import Plan, make_plan


@st.composite
def problems(draw: st.DrawFn, max_units: int = 6, max_uses: int = 16) -> tuple[list[int], list[int], int]:
    """(uses, sizes, capacity) in which any unit fits."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=max_units))
    uses = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=max_uses))
    capacity = draw(st.integers(max(sizes), sum(sizes) + 3))
    return uses, sizes, capacity


def replay(plan: Plan, sizes: list[int], capacity: int) -> int:
    """Run a cycle of the plan, checking every step; returns the bytes fetched."""
    resident = set(plan.resident)
    fetched = 0

    def evict(unit: int, in_use: int) -> None:
        assert unit in resident
        assert unit != in_use
        resident.remove(unit)

    def fetch(unit: int) -> int:
        assert unit not in resident
        resident.add(unit)
        assert sum(sizes[u] for u in resident) <= capacity
        return sizes[unit]

    for step in plan.steps:
        if step.before is not None:
            for victim in step.before:
                evict(victim, step.unit)
            fetched += fetch(step.unit)
        assert step.unit in resident, "a unit is used that was not fetched"
        for kind, unit in step.actions:
            if kind == "evict":
                evict(unit, step.unit)
            else:
                fetched += fetch(unit)
    if plan.is_steady:
        assert resident == plan.resident
    return fetched


def lru_bytes(uses: list[int], sizes: list[int], capacity: int, cycles: int = 4) -> int:
    """Bytes that LRU on demand fetches in the last of several cycles."""
    resident: list[int] = []
    fetched = 0
    for _ in range(cycles):
        fetched = 0
        for unit in uses:
            if unit in resident:
                resident.remove(unit)
            else:
                while sum(sizes[u] for u in resident) + sizes[unit] > capacity:
                    resident.pop(0)
                fetched += sizes[unit]
            resident.append(unit)
    return fetched


def optimal_bytes(uses: list[int], sizes: list[int], capacity: int, cycles: int) -> int:
    """Fewest bytes of any policy over several cycles from empty memory, by exhaustive search.

    The policy must hide its fetches as ours does: during each use the next unit is in memory too, if both fit.
    """
    long_uses = tuple(uses) * cycles

    @cache
    def fewest(time: int, resident: frozenset[int]) -> int:
        if time == len(long_uses):
            return 0
        needed = {long_uses[time]}
        after = {*needed, *long_uses[time + 1 : time + 2]}
        if sum(sizes[u] for u in after) <= capacity:
            needed = after
        cost = sum(sizes[u] for u in needed - resident)
        members = sorted(resident - needed)
        best = None
        for mask in range(1 << len(members)):
            kept = frozenset(m for i, m in enumerate(members) if mask >> i & 1) | needed
            if sum(sizes[m] for m in kept) <= capacity:
                total = cost + fewest(time + 1, kept)
                best = total if best is None else min(best, total)
        assert best is not None
        return best

    return fewest(0, frozenset())


@settings(max_examples=300, deadline=None)
@given(problems())
def test_no_plan_exceeds_its_budget_and_every_fetch_precedes_its_use(problem) -> None:
    uses, sizes, capacity = problem
    plan = make_plan(uses, sizes, capacity)
    assert [step.unit for step in plan.steps] == uses
    assert replay(plan, sizes, capacity) == plan.fetched_bytes


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(1, 9), st.integers(2, 6))
def test_equal_units_move_no_more_bytes_than_lru(problem, size, room) -> None:
    """LRU fetches on demand, ours ahead: the unit that is on its way takes the place of one that LRU may keep."""
    uses, sizes, _ = problem
    sizes = [size] * len(sizes)
    assert make_plan(uses, sizes, (room + 1) * size).fetched_bytes <= lru_bytes(uses, sizes, room * size)


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.data())
def test_equal_units_reach_the_optimum(units, room, data) -> None:
    uses = data.draw(st.lists(st.integers(0, units - 1), min_size=1, max_size=6))
    sizes = [1] * units
    steady = optimal_bytes(uses, sizes, room, 6) - optimal_bytes(uses, sizes, room, 5)
    assert make_plan(uses, sizes, room).fetched_bytes <= steady + 1  # cycles may alternate between two costs


def test_a_model_that_fits_is_fetched_never() -> None:
    plan = make_plan([0, 1, 2, 2, 1, 0], [4, 4, 4], 12)
    assert plan.fetched_bytes == 0
    assert not plan.evicted


def test_forward_and_backward_over_half_the_memory_fetches_the_other_half_twice() -> None:
    units = 8
    uses = [*range(units), *reversed(range(units))]
    assert make_plan(uses, [1] * units, units // 2).fetched_bytes == 2 * (units - units // 2)


def test_a_cyclic_scan_keeps_what_fits_where_lru_keeps_nothing() -> None:
    units, room = 8, 5
    uses = list(range(units))
    assert lru_bytes(uses, [1] * units, room) == units
    assert make_plan(uses, [1] * units, room).fetched_bytes <= units - room + 2


def test_every_fetch_is_ahead_of_its_use_where_two_units_fit() -> None:
    uses = [*range(6), *reversed(range(6))]
    plan = make_plan(uses, [1] * 6, 2)
    assert all(step.before is None for step in plan.steps)


def test_a_unit_larger_than_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        make_plan([0], [5], 4)
