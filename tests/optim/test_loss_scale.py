"""The scale moves as DeepSpeed's does: reference values are those of DeepSpeed 0.19.8's DynamicLossScaler."""

from __future__ import annotations

import pytest

from infinity.config import Fp16Config
from infinity.errors import NonFiniteError
from infinity.optim.loss_scale import LossScale


def scale(**changes: float) -> LossScale:
    values = {
        "loss_scale": 0.0,
        "initial_scale_power": 4,
        "loss_scale_window": 3,
        "hysteresis": 1,
        "min_loss_scale": 1.0,
        "consecutive_hysteresis": False,
    }
    return LossScale.of(Fp16Config(**(values | changes)))  # type: ignore[arg-type]


def run(subject: LossScale, overflows: str) -> list[float]:
    """Values after each step; `x` is one that overflowed."""
    values = []
    for step in overflows:
        subject.after_step(overflow=step == "x")
        values.append(subject.value)
    return values


def test_it_doubles_after_a_window_of_finite_steps() -> None:
    assert run(scale(), "......") == [16, 16, 16, 32, 32, 32]


def test_it_halves_at_an_overflow_and_the_window_starts_again() -> None:
    assert run(scale(), ".x....x") == [16, 8, 8, 8, 8, 16, 8]


def test_hysteresis_forgives_until_the_scale_rises() -> None:
    assert run(scale(hysteresis=3), "xx.x") == [16, 16, 16, 8]
    assert run(scale(hysteresis=2), "x....x.x") == [16, 16, 16, 16, 32, 32, 32, 16]


def test_consecutive_hysteresis_forgives_anew_after_a_finite_step() -> None:
    assert run(scale(hysteresis=2, loss_scale_window=9), "x.x") == [16, 16, 8]
    subject = scale(hysteresis=2, loss_scale_window=9, consecutive_hysteresis=True)
    assert run(subject, "x.xx") == [16, 16, 16, 8]


def test_it_falls_no_lower_than_its_minimum_and_then_gives_up() -> None:
    subject = scale(initial_scale_power=2, min_loss_scale=2.0)
    assert run(subject, "x") == [2]
    with pytest.raises(NonFiniteError, match="at its minimum of 2"):
        subject.after_step(overflow=True)


def test_a_static_scale_stays() -> None:
    assert run(scale(loss_scale=128.0), "x...x.") == [128] * 6


def test_it_goes_on_from_its_state() -> None:
    first, second = scale(hysteresis=2), scale(hysteresis=2)
    run(first, "x..")
    second.load_state_dict(first.state_dict())
    assert run(second, ".x..x") == run(first, ".x..x")


def test_without_fp16_it_is_one_for_ever() -> None:
    assert run(LossScale.of(None), "..x..") == [1] * 5


def test_the_scale_tells_where_it_is_under_deepspeeds_names() -> None:
    scale = LossScale.of(Fp16Config(0.0, 8, 2, 3, 1.0, False))
    assert (scale.cur_scale, scale.scale_window, scale.min_scale, scale.cur_iter) == (256.0, 2, 1.0, 0)
    for overflow in (True, False, False, False):
        scale.after_step(overflow=overflow)
    assert (scale.loss_scale, scale.cur_iter, scale.last_overflow_iter) == (512.0, 4, 0)
    assert (scale.delayed_shift, scale.cur_hysteresis) == (3, 3)  # forgiveness is renewed as it rises
    scale.after_step(overflow=True)
    assert (scale.cur_scale, scale.cur_hysteresis) == (512.0, 2)
    assert not LossScale.of(None).needed
