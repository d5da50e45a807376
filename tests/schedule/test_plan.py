"""Properties of the plan, on traces that hypothesis makes up."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.schedule import AheadLimit, Plan, make_plan
from infinity.schedule.plan import MOST_AHEAD


@st.composite
def problems(draw: st.DrawFn, max_units: int = 6, max_uses: int = 16) -> tuple[list[int], list[int], int]:
    """(uses, sizes, capacity) in which any unit fits."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=max_units))
    uses = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=max_uses))
    capacity = draw(st.integers(max(sizes), sum(sizes) + 3))
    return uses, sizes, capacity


@st.composite
def passes(draw: st.DrawFn, max_units: int = 6) -> tuple[list[int], list[int], int]:
    """(uses, sizes, capacity) of forward and backward through units of different sizes."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=2, max_size=max_units))
    uses = [*range(len(sizes)), *reversed(range(len(sizes)))]
    return uses, sizes, draw(st.integers(sum(sorted(sizes)[-2:]), sum(sizes) + 1))


def replay(plan: Plan, sizes: list[int], capacity: int) -> int:
    """Run a cycle of the plan, checking every step; returns the bytes fetched."""
    resident = set(plan.resident)
    assert sum(sizes[u] for u in resident) <= capacity
    left: set[int] = set()
    fetched = 0

    def evict(unit: int, in_use: int) -> None:
        assert unit in resident
        assert unit != in_use
        resident.remove(unit)
        left.add(unit)

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
    assert (resident == plan.resident) == is_steady(plan)
    assert left == plan.evicted, "updates write what is in `evicted` home: what leaves is in it, or would be lost"
    return fetched


def fetched_bytes(plan: Plan, sizes: list[int]) -> int:
    """Bytes fetched in one cycle."""
    on_the_spot = sum(sizes[step.unit] for step in plan.steps if step.before is not None)
    return on_the_spot + sum(sizes[unit] for step in plan.steps for kind, unit in step.actions if kind == "prefetch")


def is_steady(plan: Plan) -> bool:
    """Whether the cycle ends with the units it began with, so that repeating it repeats its traffic."""
    resident = set(plan.resident)
    for step in plan.steps:
        resident = resident - set(step.before or ()) | {step.unit}
        for kind, unit in step.actions:
            (resident.discard if kind == "evict" else resident.add)(unit)
    return resident == plan.resident


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


def steady_optimum(uses: list[int], sizes: list[int], capacity: int) -> int:
    """Fewest bytes of a cycle that ends with what it began with, of any policy that hides its fetches as ours does."""
    length = len(uses)

    def needed(time: int) -> frozenset[int]:
        both = frozenset((uses[time % length], uses[(time + 1) % length]))
        return both if total(both) <= capacity else frozenset((uses[time % length],))

    def total(units: frozenset[int]) -> int:
        return sum(sizes[unit] for unit in units)

    def kept(units: frozenset[int], beside: frozenset[int]) -> list[frozenset[int]]:
        """Every choice of `units` that fits beside what is needed, with it."""
        members = sorted(units - beside)
        choices = (
            frozenset(m for i, m in enumerate(members) if mask >> i & 1) | beside for mask in range(1 << len(members))
        )
        return [choice for choice in choices if total(choice) <= capacity]

    best = None
    for start in kept(frozenset(uses), needed(length - 1)):
        costs = {start: 0}
        for time in range(length):
            after: dict[frozenset[int], int] = {}
            for resident, cost in costs.items():
                reached = cost + total(needed(time) - resident)
                for choice in kept(resident, needed(time)):
                    after[choice] = min(after.get(choice, reached), reached)
            costs = after
        if start in costs:
            best = costs[start] if best is None else min(best, costs[start])
    assert best is not None
    return best


@settings(max_examples=300)
@given(problems() | passes())
def test_no_plan_exceeds_its_budget_and_every_fetch_precedes_its_use(problem) -> None:
    uses, sizes, capacity = problem
    plan = make_plan(uses, sizes, capacity)
    assert [step.unit for step in plan.steps] == uses
    assert plan.most_bytes <= capacity
    assert replay(plan, sizes, plan.most_bytes) == fetched_bytes(plan, sizes)


@settings(max_examples=300)
@given(problems() | passes())
def test_what_a_plan_leaves_free_is_of_no_use_to_it(problem) -> None:
    uses, sizes, capacity = problem
    plan = make_plan(uses, sizes, capacity)
    again = make_plan(uses, sizes, max(plan.most_bytes, max(sizes)))
    assert fetched_bytes(again, sizes) == fetched_bytes(plan, sizes)


@settings(max_examples=300)
@given(problems() | passes())
def test_the_next_unit_is_prefetched_wherever_both_fit(problem) -> None:
    uses, sizes, capacity = problem
    for index, step in enumerate(make_plan(uses, sizes, capacity).steps):
        if step.before is not None:
            pair = {uses[index - 1], step.unit}
            assert sum(sizes[unit] for unit in pair) > capacity


@settings(max_examples=300)
@given(problems() | passes())
def test_nothing_leaves_without_need(problem) -> None:
    """Each of those that make room for a unit is too large to have stayed beside it."""
    uses, sizes, capacity = problem
    plan = make_plan(uses, sizes, capacity)
    resident = set(plan.resident)
    for step in plan.steps:
        groups = [] if step.before is None else [(step.before, step.unit)]
        victims: list[int] = []
        for kind, unit in step.actions:
            if kind == "evict":
                victims.append(unit)
            else:
                groups.append((tuple(victims), unit))
                victims = []
        assert not victims, "something makes room for nothing"
        for leaving, coming in groups:
            resident = resident - set(leaving) | {coming}
            free = capacity - sum(sizes[unit] for unit in resident)
            assert all(sizes[unit] > free for unit in leaving)


@settings(max_examples=200)
@given(problems(), st.integers(1, 9), st.integers(1, 6))
def test_equal_units_move_no_more_bytes_than_lru_in_the_same_room(problem, size, room) -> None:
    uses, sizes, _ = problem
    sizes = [size] * len(sizes)
    plan = make_plan(uses, sizes, room * size)
    slack = 0 if is_steady(plan) else size  # its cycles may alternate between two costs
    assert fetched_bytes(plan, sizes) <= lru_bytes(uses, sizes, room * size) + slack


@settings(max_examples=300, derandomize=True)
@given(passes())
def test_passes_over_unequal_units_move_no_more_bytes_than_lru_in_the_same_room(problem) -> None:
    """Of orders at random with unequal sizes, one in tens of thousands is better served by LRU."""
    uses, sizes, capacity = problem
    assert fetched_bytes(make_plan(uses, sizes, capacity), sizes) <= lru_bytes(uses, sizes, capacity)


@settings(max_examples=150)
@given(st.integers(2, 5), st.integers(1, 4), st.data())
def test_equal_units_reach_the_optimum_exactly_in_steady_state(units, room, data) -> None:
    uses = data.draw(st.lists(st.integers(0, units - 1), min_size=1, max_size=8))
    plan = make_plan(uses, [3] * units, 3 * room)
    if is_steady(plan):
        assert fetched_bytes(plan, [3] * units) == steady_optimum(uses, [3] * units, 3 * room)


@settings(max_examples=100)
@given(problems(max_units=4, max_uses=7) | passes(max_units=4))
def test_no_plan_is_better_than_the_optimum(problem) -> None:
    """It would have counted too little, or not fetched something ahead."""
    uses, sizes, capacity = problem
    plan = make_plan(uses, sizes, capacity)
    if is_steady(plan):
        assert fetched_bytes(plan, sizes) >= steady_optimum(uses, sizes, capacity)


@settings(max_examples=150)
@given(st.integers(2, 5), st.integers(1, 4), st.data())
def test_equal_units_reach_the_optimum(units, room, data) -> None:
    uses = data.draw(st.lists(st.integers(0, units - 1), min_size=1, max_size=6))
    sizes = [1] * units
    steady = optimal_bytes(uses, sizes, room, 6) - optimal_bytes(uses, sizes, room, 5)
    assert fetched_bytes(make_plan(uses, sizes, room), sizes) <= steady + 1  # cycles may alternate between two costs


def test_a_model_that_fits_is_fetched_never() -> None:
    plan = make_plan([0, 1, 2, 2, 1, 0], [4, 4, 4], 12)
    assert fetched_bytes(plan, [4, 4, 4]) == 0
    assert not plan.evicted


def test_forward_and_backward_over_half_the_memory_fetches_the_other_half_twice() -> None:
    units = 8
    uses = [*range(units), *reversed(range(units))]
    assert fetched_bytes(make_plan(uses, [1] * units, units // 2), [1] * units) == 2 * (units - units // 2)


def test_a_cyclic_scan_keeps_what_fits_where_lru_keeps_nothing() -> None:
    units, room = 8, 5
    uses = list(range(units))
    assert lru_bytes(uses, [1] * units, room) == units
    assert fetched_bytes(make_plan(uses, [1] * units, room), [1] * units) <= units - room + 2


def test_every_fetch_is_a_prefetch_where_two_units_fit() -> None:
    uses = [*range(6), *reversed(range(6))]
    plan = make_plan(uses, [1] * 6, 2)
    assert all(step.before is None for step in plan.steps)


def test_a_unit_larger_than_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        make_plan([0], [5], 4)


# Further ahead #


def wanted(uses: list[int], sizes: list[int], rule: AheadLimit, index: int) -> set[int]:
    """The units that are to be in memory at a use: its own, and those of the next ones that the rule allows."""
    held, ahead_bytes = {uses[index]}, 0
    for steps in range(1, MOST_AHEAD + 1):
        unit = uses[(index + steps) % len(uses)]
        if unit in held:
            continue
        if not rule.allows(steps, sizes[unit], sizes[uses[index]], ahead_bytes):
            break
        held.add(unit)
        ahead_bytes += sizes[unit]
    return held


@settings(max_examples=300)
@given(problems() | passes(), st.integers(1, 30))
def test_units_within_the_prefetched_bytes_arrive_in_time_and_within_the_budget(problem, ahead_bytes) -> None:
    uses, sizes, capacity = problem
    plan = make_plan(uses, sizes, capacity, ahead_bytes)
    assert [step.unit for step in plan.steps] == uses
    assert replay(plan, sizes, capacity) == fetched_bytes(plan, sizes)
    rule = AheadLimit(capacity, ahead_bytes, max(sizes[unit] for unit in uses))
    resident = set(plan.resident)
    for index, step in enumerate(plan.steps):
        resident = (resident - set(step.before or ())) | {step.unit}
        for kind, unit in step.actions:
            (resident.remove if kind == "evict" else resident.add)(unit)
        assert wanted(uses, sizes, rule, index) <= resident


@given(problems())
def test_without_prefetched_bytes_only_the_next_unit_comes_early(problem) -> None:
    uses, sizes, capacity = problem
    assert make_plan(uses, sizes, capacity, 0) == make_plan(uses, sizes, capacity)


def test_prefetched_units_leave_room_for_one_that_is_fetched_meanwhile() -> None:
    rule = AheadLimit(capacity_bytes=12, bytes=9, largest_bytes=3)
    assert rule.allows(1, 3, 3, 0)
    assert rule.allows(2, 3, 3, 3)
    assert not rule.allows(3, 3, 3, 6), "nothing could be read while the unit is computed on"
    assert not AheadLimit(100, 5, 3).allows(2, 3, 3, 3), "more than the bytes ahead"
    assert AheadLimit(6, 0, 3).allows(1, 3, 3, 0), "the next one whatever they are"
