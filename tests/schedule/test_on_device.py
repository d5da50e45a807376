"""Which units are updated on the device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import load_config
from infinity.errors import ConfigError
from infinity.schedule.on_device import (
    as_far_as_fits,
    first_there,
    may_fill,
    promotion_order,
    share_there,
    spare_bytes,
)


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(0, 200))
def test_each_trained_unit_goes_once_and_what_goes_fits(numels, capacity) -> None:
    first = [0, len(numels) - 1] if len(numels) > 1 else []
    order = promotion_order(numels, first)
    assert sorted(order) == [unit for unit, numel in enumerate(numels) if numel]
    assert order[: len(first)] == [unit for unit in first if numels[unit]] or not all(numels[unit] for unit in first)
    taken = as_far_as_fits(order, numels, capacity)
    held = sum(numels[unit] for unit in taken)
    assert held <= capacity
    assert all(numels[unit] > capacity - held for unit in order if unit not in taken)


@given(st.integers(1, 64), st.integers(1, 64))
def test_any_beginning_is_spread_evenly(units, taken) -> None:
    """Between two units that have gone lie no more than twice as many others as there would be if all were equal."""
    taken = min(taken, units)
    chosen = sorted(promotion_order([1] * units, [])[:taken])
    gaps = [high - low for low, high in zip(chosen, [*chosen[1:], units], strict=True)]
    assert max(gaps) <= 2 * -(-units // taken)


def test_the_share_is_what_the_ratio_leaves() -> None:
    def share(stage: int = 2, *, discrete: bool = True, exact: bool = True, ratio: object = 0.25) -> float:
        section = {"stage": stage, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
        return share_there(load_config({"zero_optimization": section}), discrete=discrete, exact=exact)

    assert share() == share(stage=3) == 0.75
    assert share(ratio="auto") == share(ratio=1) == share(discrete=False) == 0
    with pytest.raises(ConfigError, match="is rounded as only the kernels"):
        share(exact=False)
    for wrong in (-0.1, 1.5):
        with pytest.raises(ConfigError, match="ratio"):
            share(ratio=wrong)


def test_parameters_that_are_in_shards_do_not_come_later() -> None:
    def fills(stage: int, ranks: int, *, discrete: bool = True) -> bool:
        config = {"zero_optimization": {"stage": stage}, "tiering": {"fill_device": True}}
        return may_fill(load_config(config, world_size=ranks), ranks, discrete=discrete, exact=True)

    assert fills(2, 2)
    assert fills(3, 1)
    assert not fills(3, 2, discrete=False)
    with pytest.raises(ConfigError, match="stage 3 with 2 ranks the parameters of what is filled"):
        fills(3, 2)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=10), st.integers(0, 100))
def test_what_stays_unasked_is_all_of_the_first_or_none(sizes, spare) -> None:
    numels = [size << 22 for size in sizes]
    first = [0, len(numels) - 1] if len(numels) > 1 else [0]
    there = first_there(first, numels, bytes_per_param=1, spare_bytes=spare << 22)
    trained = sum(sizes[unit] for unit in first)
    assert there == frozenset(unit for unit in first if sizes[unit] and 4 <= trained <= spare)


def test_room_is_spared_for_one_rank_with_a_device_that_nobody_has_divided() -> None:
    def spare(
        ranks: int = 1, *, discrete: bool = True, exact: bool = True, states: object = "cpu", **more: object
    ) -> int:
        ratio = {key: more.pop(key) for key in ("ratio",) if key in more}
        section = {"stage": 2, "offload_optimizer": {"device": states, **ratio}}
        config = load_config({"zero_optimization": section, "tiering": more}, world_size=ranks)
        return spare_bytes(config, ranks, 1000, discrete=discrete, exact=exact)

    assert spare() == 100
    assert spare(ratio="auto") == 100
    assert spare(ratio=1.0) == spare(ratio=0.5) == spare(states="none") == 0
    assert spare(2) == spare(discrete=False) == spare(exact=False) == 0
