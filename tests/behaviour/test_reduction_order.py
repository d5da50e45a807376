"""Ranks reduce units in one order, whatever backward leaves on each of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.zero.reduction_order import ReductionOrder

UNITS = list(range(6))
paths = st.lists(st.sampled_from(UNITS), unique=True)


def reduced(order: ReductionOrder[int], path: list[int]) -> list[int]:
    """What a rank reduces whose backward leaves these units."""
    order.begin(set(path))
    return [unit for left in path for unit in order.leave(left)] + list(order.rest())


@given(st.lists(st.tuples(paths, paths), max_size=12), st.permutations(UNITS))
def test_ranks_reduce_the_same_in_the_same_order(passes, first) -> None:
    orders = [ReductionOrder(first), ReductionOrder(first)]
    for of_ranks in passes:
        found = [reduced(order, path) for order, path in zip(orders, of_ranks, strict=True)]
        assert found[0] == found[1]
        assert len(set(found[0])) == len(found[0])
        suits, told = all(order.suits for order in orders), list(orders[0].left)
        for order in orders:
            if not suits:
                order.learn(told)
            order.note_used({unit for path in of_ranks for unit in path})
        assert orders[0].order == orders[1].order


@given(st.permutations(UNITS), st.permutations(UNITS))
def test_what_all_ranks_repeat_is_reduced_as_it_is_left(first, path) -> None:
    order = ReductionOrder(first)
    reduced(order, path)
    order.learn(list(order.left))
    order.begin(set(path))
    for unit in path:
        assert list(order.leave(unit)) == [unit]
    assert list(order.rest()) == []
    assert order.suits


def test_a_unit_without_a_use_holds_nobody_up_and_drops_out() -> None:
    order = ReductionOrder([2, 1, 0])
    order.begin({0, 2})
    assert list(order.leave(2)) == [2, 1]
    assert order.skipped == {1}
    assert list(order.leave(0)) == [0]
    order.note_used({0, 1, 2})
    for _ in range(8):
        order.begin({0, 2})
        order.note_used({0, 2})
    assert order.order == [2, 0]
    order.begin({0, 1, 2})
    assert list(order.leave(2)) == [2]
    assert list(order.leave(1)) == []
    assert not order.suits
