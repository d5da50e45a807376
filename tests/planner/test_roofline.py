"""The paper's formulas, at points whose answers it prints."""

from __future__ import annotations

import pytest

from infinity.planner import bandwidth_for, efficiency, intensity

PEAK = 70e12  # what the paper reckons a V100 to reach


def test_seventy_gigabytes_a_second_are_half_the_peak_for_the_smallest_batch() -> None:
    assert efficiency(intensity(1, 1024, 8192).params_and_grads, 70e9, PEAK) == pytest.approx(0.5, abs=0.01)


def test_optimizer_states_need_four_times_the_bandwidth_of_parameters() -> None:
    one = intensity(2, 1024, 8192)
    ratio = bandwidth_for(0.5, one.optimizer_states, PEAK) / bandwidth_for(0.5, one.params_and_grads, PEAK)
    assert ratio == pytest.approx(4)
    # "nearly 1.5 TB/s" for 90% with two samples a GPU
    assert bandwidth_for(0.9, one.optimizer_states, PEAK) == pytest.approx(1.5e12, rel=0.2)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_bandwidth_and_efficiency_are_inverse(share) -> None:
    assert efficiency(100.0, bandwidth_for(share, 100.0, PEAK), PEAK) == pytest.approx(share)
