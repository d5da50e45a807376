"""Which units are updated on the device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import load_config
from infinity.errors import ConfigError
from infinity.schedule.on_device import (
    as_far_as_fits,
    first_to_stay,
    may_fill,
    promotion_order,
    share_on_device,
    why_not_filled,
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
    """Between two units that have gone lie no more than twice as many others as there would be if all were equal.

    Of the two that come first, which are neighbours, one does not count.
    """
    taken = min(taken, units)
    chosen = sorted(promotion_order([1] * units, [])[:taken])
    gaps = [high - low for low, high in zip(chosen, [*chosen[1:], units], strict=True)]
    assert max(gaps) <= 2 * -(-units // max(1, taken - 1))


def test_what_backward_comes_to_last_goes_before_the_rest() -> None:
    """The next forward pass begins with it, so that little hides its updates."""
    order = promotion_order([1] * 34, [0])
    assert order[:3] == [0, 1, 2]
    assert order[3:5] == [33, 17], "then as far from one another as can be"


def test_the_share_is_what_the_ratio_leaves() -> None:
    def share(stage: int = 2, *, discrete: bool = True, exact: bool = True, ratio: object = 0.25) -> float:
        section = {"stage": stage, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
        return share_on_device(load_config({"zero_optimization": section}), discrete=discrete, exact=exact)

    assert share() == share(stage=3) == 0.75
    assert share(ratio="auto") == share(ratio=1) == share(discrete=False) == 0
    with pytest.raises(ConfigError, match="rounds moments, as only the kernels"):
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
    with pytest.raises(ConfigError, match="stage 3 with 2 ranks the parameters of these states"):
        fills(3, 2)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=10), st.integers(-5, 100))
def test_what_stays_for_its_states_to_come_is_all_of_the_first_or_none(sizes, free) -> None:
    numels = [size << 22 for size in sizes]
    first = [0, len(numels) - 1] if len(numels) > 1 else [0]
    stay = first_to_stay(first, numels, bytes_per_param=2, free_bytes=free << 22)
    trained = sum(sizes[unit] for unit in first)
    assert stay == frozenset(unit for unit in first if sizes[unit] and 4 <= trained <= free / 2)


@pytest.mark.parametrize(
    ("changes", "facts", "reason"),
    [
        ({}, {}, ""),
        ({"offload": {"device": "nvme"}, "nvme": [{"path": "/drive"}]}, {}, ""),
        ({"offload": {"device": "cpu", "ratio": "auto"}}, {}, ""),
        ({"update_schedule": "deferred"}, {}, ""),
        ({}, {"discrete": False}, "computes on the CPU"),
        ({"offload": {"device": "none"}}, {}, "offload_optimizer.device is none"),
        ({"offload": {"device": "cpu", "ratio": 1.0}}, {}, "ratio 1 says how much stays"),
        ({"state_format": "int8"}, {"exact": False}, "state_format int8 rounds moments"),
        (
            {"offload": {"device": "nvme"}, "nvme": [{"path": "/drive"}], "crash_consistent": True},
            {},
            "crash_consistent writes through",
        ),
        ({"update_schedule": "speculative"}, {}, "update_schedule is speculative"),
        ({}, {"ranks": 2}, "2 ranks train together"),
        ({"stage": 3}, {"ranks": 2}, "2 ranks train together"),
    ],
)
def test_by_default_the_device_is_filled_where_it_can_be(changes, facts, reason) -> None:
    """And where it cannot, nothing is raised."""
    tiering = dict(changes)
    section = {"stage": tiering.pop("stage", 2), "offload_optimizer": tiering.pop("offload", {"device": "cpu"})}
    asked = {"ranks": 1, "discrete": True, "exact": True} | facts
    config = load_config({"zero_optimization": section, "tiering": tiering}, world_size=asked["ranks"])
    found = why_not_filled(config, **asked)
    assert (reason in found) if reason else not found
    assert may_fill(config, **asked) == (not reason)
    never = load_config({"zero_optimization": section, "tiering": tiering | {"fill_device": False}}, world_size=2)
    assert not may_fill(never, **asked)
