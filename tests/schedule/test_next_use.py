"""The look-ahead beside a search of the trace written out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.schedule import NextUse

traces = st.lists(st.integers(0, 5), min_size=1, max_size=20)


@given(traces, st.integers(0, 60))
def test_the_next_use_is_the_first_one_later_in_the_endless_repetition(uses: list[int], time: int) -> None:
    next_use = NextUse(uses)
    endless = uses * (time // len(uses) + 3)
    for unit in set(uses):
        assert next_use.after(unit, time) == endless.index(unit, time + 1)
    assert next_use.at(time) == endless[time]


@given(traces, st.integers(0, 19))
def test_first_and_last_are_those_of_one_cycle(uses: list[int], position: int) -> None:
    next_use = NextUse(uses)
    for unit in range(7):
        assert next_use.first(unit) == (uses.index(unit) if unit in uses else len(uses))
        assert next_use.is_last(unit, position) == (unit not in uses[position + 1 :])


@given(traces, traces)
def test_the_cursor_follows_the_trace_up_to_the_first_difference(uses: list[int], cycle: list[int]) -> None:
    next_use = NextUse(uses)
    next_use.begin()
    for index, unit in enumerate(cycle):
        agrees = cycle[:index] == uses[:index]
        assert next_use.expected == (next(iter(uses[index:]), None) if agrees else None)
        assert next_use.advance(unit) == (cycle[: index + 1] == uses[: index + 1])
    next_use.end()
    assert next_use.expected is None
    assert not next_use.advance(uses[0])


def test_an_empty_trace_expects_nothing() -> None:
    next_use = NextUse()
    next_use.begin()
    assert next_use.expected is None
    assert next_use.first(3) == 0
    assert next_use.is_last(3, 0)
    assert not next_use.advance(3)
    with pytest.raises(KeyError):
        next_use.after(3, 0)
