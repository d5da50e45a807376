"""The look-ahead beside a search of the trace written out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.schedule.cycle import Cursor
from infinity.schedule.next_use import NextUse

traces = st.lists(st.integers(0, 5), min_size=1, max_size=20)


@given(traces, st.integers(0, 60))
def test_the_next_use_is_the_first_one_later_in_the_endless_repetition(uses: list[int], time: int) -> None:
    next_use = NextUse(uses)
    endless = uses * (time // len(uses) + 3)
    for unit in set(uses):
        assert next_use.after(unit, time) == endless.index(unit, time + 1)
    assert next_use.at(time) == endless[time]


@given(traces)
def test_first_and_last_are_those_of_one_cycle(uses: list[int]) -> None:
    next_use = NextUse(uses)
    assert next_use.first == {unit: uses.index(unit) for unit in uses}
    assert next_use.last == {unit: position for position, unit in enumerate(uses)}


@given(traces, traces)
def test_the_cursor_follows_the_trace_up_to_the_first_difference(uses: list[int], cycle: list[int]) -> None:
    cursor = Cursor(uses)
    cursor.begin()
    for index, unit in enumerate(cycle):
        agrees = cycle[:index] == uses[:index]
        assert cursor.expected == (next(iter(uses[index:]), None) if agrees else None)
        assert cursor.advance(unit) == (cycle[: index + 1] == uses[: index + 1])
    cursor.end()
    assert cursor.expected is None
    assert not cursor.advance(uses[0])


def test_an_empty_trace_expects_nothing() -> None:
    cursor = Cursor()
    cursor.begin()
    assert cursor.expected is None
    assert not cursor.advance(3)
    with pytest.raises(KeyError):
        cursor.trace.after(3, 0)
