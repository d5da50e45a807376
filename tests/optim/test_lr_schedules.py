"""Learning rates (and momenta) are DeepSpeed's: the values below are what DeepSpeed 0.19.8 gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import SchedulerConfig
from infinity.errors import ConfigError
from infinity.optim.lr_schedules import make_scheduler

STEPS = [0, 1, 2, 5, 8, 9, 15, 20, 21, 25, 29]  # before the optimizer step of this index
REFERENCE: list[tuple[str, dict[str, Any], list[float], list[float] | None]] = [
    (
        "WarmupLR",
        {"warmup_max_lr": 0.001, "warmup_num_steps": 8},
        [0.0, 0.0, 0.000333333333, 0.000773976032, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001],
        None,
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": 0.0001, "warmup_max_lr": 0.001, "warmup_num_steps": 8, "warmup_type": "linear"},
        [0.0001, 0.0001, 0.0002125, 0.00055, 0.0008875, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001],
        None,
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 24, "warmup_max_lr": 0.001, "warmup_num_steps": 8},
        [0.0, 0.0, 0.000333333333, 0.000773976032, 0.001, 0.001, 0.000625, 0.0003125, 0.00025, 0.0, 0.0],
        None,
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 24, "warmup_num_steps": 8, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01},
        [
            0.0,
            0.0001,
            0.0004,
            0.000796578428,
            0.001,
            0.000990488714,
            0.000601569709,
            0.000154982143,
            9.34225419e-05,
            1e-05,
            1e-05,
        ],
        None,
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.0001, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 2.0},
        [0.0001, 0.00014, 0.00018, 0.0003, 0.00042, 0.00046, 0.0007, 0.0009, 0.00094, 0.0011, 0.00126],
        None,
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.0001, "lr_range_test_step_size": 5, "lr_range_test_staircase": True},
        [0.0001, 0.0001, 0.0001, 0.0002, 0.0002, 0.0002, 0.0004, 0.0005, 0.0005, 0.0006, 0.0006],
        None,
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.001, "cycle_first_step_size": 8},
        [0.0001, 0.0002125, 0.000325, 0.0006625, 0.001, 0.0008875, 0.0002125, 0.0001, 0.0001, 0.0001, 0.0001],
        [0.8, 0.8875, 0.875, 0.8375, 0.8, 0.8125, 0.8875, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.0001,
            "cycle_max_lr": 0.001,
            "cycle_first_step_size": 8,
            "cycle_second_step_size": 12,
            "decay_step_size": 3,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.01,
        },
        [
            0.0001,
            0.0002125,
            0.000325,
            0.0006625,
            0.001,
            0.000925,
            0.000475,
            0.0001,
            8.57142857e-05,
            5.45454545e-05,
            4e-05,
        ],
        [0.8, 0.8875, 0.875, 0.8375, 0.8, 0.808333333, 0.858333333, 0.9, 0.903, 0.915, 0.927],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.0001,
            "cycle_max_lr": 0.001,
            "cycle_first_step_size": 7,
            "cycle_second_step_size": 13,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 4,
            "cycle_momentum": False,
        },
        [0.0001, 0.0001, 0.0001, 0.0007, 0.000775, 0.000775, 0.000325, 0.0001, 0.0001, 0.0001, 0.0001],
        None,
    ),
]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3)


def course(name: str, params: dict[str, Any], *, resume_at: int | None = None) -> list[tuple[float, float]]:
    """(learning rate, momentum) before each step."""
    subject = optimizer()
    schedule = make_scheduler(SchedulerConfig(name, params), subject)
    seen = []
    for step in range(STEPS[-1] + 1):
        if step == resume_at:
            state, groups = schedule.state_dict(), subject.state_dict()
            subject = optimizer()
            schedule = make_scheduler(SchedulerConfig(name, params), subject)
            schedule.load_state_dict(state)
            subject.load_state_dict(groups)
        group = subject.param_groups[0]
        seen.append((group["lr"], group["betas"][0]))
        subject.step()
        schedule.step()
    return seen


@pytest.mark.parametrize(("name", "params", "rates", "momenta"), REFERENCE)
def test_values_are_deepspeeds(name, params, rates, momenta) -> None:
    seen = course(name, params)
    assert [seen[step][0] for step in STEPS] == pytest.approx(rates, rel=1e-7, abs=1e-12)
    assert [seen[step][1] for step in STEPS] == pytest.approx(momenta or [0.9] * len(STEPS), rel=1e-7)


@pytest.mark.parametrize(("name", "params", "rates", "momenta"), REFERENCE)
def test_a_resumed_schedule_goes_on(name, params, rates, momenta) -> None:
    assert course(name, params, resume_at=12) == course(name, params)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("OneCycle", {"cycle_max_lr": 1e-3}, "cycle_min_lr is missing"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "is 0; .* at least 1"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": "big"}, r"params.cycle_max_lr is 'big'; it must be a finite"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, r"params.warmup_num_steps is 2.5; it must be a whole number"),
        ("WarmupLR", {"warmup_num_steps": True}, r"params.warmup_num_steps is True; it must be a whole number"),
        ("WarmupLR", {"warmup_max_lr": -1}, r"params.warmup_max_lr is -1; it must be a finite number of at least 0"),
        ("WarmupLR", {"warmup_max_lr": [1e-3, 1e-3]}, "has 2 learning rates but the optimizer 1 groups"),
        (
            "WarmupDecayLR",
            {"total_num_steps": "auto?"},
            r"params.total_num_steps is 'auto\?'; it must be a whole number",
        ),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": float("nan")}, r"params.cos_min_ratio is nan"),
        ("LRRangeTest", {"lr_range_test_staircase": 3}, r"params.lr_range_test_staircase is 3; .* true or false"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_mom": 0}, "cycle_mom is unknown to OneCycle"),
        ("WarmupDecayLR", {}, "total_num_steps is missing"),
        ("WarmupLR", {"warmup_type": "cubic"}, "choose log or linear"),
        ("Cosine", {}, "choose one of"),
    ],
)
def test_what_cannot_work_is_refused_by_name(name, params, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scheduler(SchedulerConfig(name, params), optimizer())


def test_numbers_as_people_write_them() -> None:
    """1e3 is a float to JSON, null stands for the default, and a warm-up of 0 steps takes 2 as in DeepSpeed."""
    written = {"warmup_num_steps": 1e1, "warmup_min_lr": "1e-5", "warmup_max_lr": None}
    assert course("WarmupLR", written) == course("WarmupLR", {"warmup_num_steps": 10, "warmup_min_lr": 1e-5})
    assert course("WarmupLR", {"warmup_num_steps": 0}) == course("WarmupLR", {"warmup_num_steps": 2})
