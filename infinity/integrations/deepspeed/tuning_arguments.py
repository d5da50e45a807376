"""Options of a script's parser for a learning-rate schedule, and the scheduler section that they make."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from infinity.optim.lr_schedules import VALID_LR_SCHEDULES

_RANGE_TEST: dict[str, Any] = {
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False,
}
# None stands for the schedule's default: the second half of a cycle is like the first, without stairs.
_ONE_CYCLE: dict[str, Any] = {
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": None,
    "cycle_second_step_size": None,
    "cycle_second_stair_count": None,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_momentum": False,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
}
_WARMUP: dict[str, Any] = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log"}
_COSINE: dict[str, Any] = {"warmup_min_ratio": 0.01, "cos_min_ratio": 0.01}
_NAMES: dict[str, tuple[str, ...]] = {
    "LRRangeTest": tuple(_RANGE_TEST),
    "OneCycle": tuple(_ONE_CYCLE),
    "WarmupLR": tuple(_WARMUP),
    "WarmupDecayLR": tuple(_WARMUP),
    "WarmupCosineLR": ("warmup_num_steps", "warmup_type", *_COSINE),
}
_HIGHEST = {
    "LRRangeTest": "lr_range_test_min_lr",
    "OneCycle": "cycle_max_lr",
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and an option for each parameter of the schedules."""
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedules")
    group.add_argument("--lr_schedule", metavar="NAME", help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    for name, default in (_RANGE_TEST | _ONE_CYCLE | _WARMUP | _COSINE).items():
        if default is False:
            group.add_argument(f"--{name}", action="store_true")
        else:
            kind = int if name.endswith(("_size", "_count", "_steps")) else str if name == "warmup_type" else float
            group.add_argument(f"--{name}", type=kind, default=default)
    return parser


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Copy the parsed options of the schedule LRRangeTest into a section's parameters."""
    params.update(_given(args, _RANGE_TEST))


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Copy the parsed options of the schedule OneCycle into a section's parameters."""
    params.update(_given(args, _ONE_CYCLE))


def override_warmup_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Copy the parsed options of the schedules with a warm-up into a section's parameters."""
    params.update(_given(args, _WARMUP))


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Copy the parsed options of all schedules into a section's parameters."""
    params.update(_given(args, _RANGE_TEST | _ONE_CYCLE | _WARMUP | _COSINE))


def _given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return (the scheduler section, None), or (None, why there is none)."""
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule; choose one of {', '.join(VALID_LR_SCHEDULES)}"
    return {"type": name, "params": _given(args, _NAMES[name])}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[Any, str]:
    """Return (the main learning rate of a section, ""), or (None, why there is none)."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name = config["type"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid LR schedule; choose one of {', '.join(VALID_LR_SCHEDULES)}"
    if name not in _HIGHEST:
        return None, f"{name} takes a share of the optimizer's learning rate, and has none in its params"
    return config["params"][_HIGHEST[name]], ""
