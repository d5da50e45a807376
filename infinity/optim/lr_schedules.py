"""DeepSpeed's learning-rate schedules by name, as torch schedulers.

Each is a pure function from the index of the last finished step to a factor; -1 stands for "none yet". As in DeepSpeed,
the first step therefore runs with the value at -1 and step `k` with the value at `k - 1`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import SchedulerConfig
from infinity.errors import ConfigError


@dataclass(frozen=True)
class Warmup:
    """Rise from 0 to 1 over `steps`, linearly or with the logarithm."""

    steps: int
    kind: str

    def __call__(self, step: int) -> float:
        if step < 0:
            return 0.0
        if step >= self.steps:
            return 1.0
        return step / self.steps if self.kind == "linear" else math.log(step + 1) / math.log(self.steps)


@dataclass(frozen=True)
class WarmupDecay:
    """Warm-up, then a straight line down to 0 at `total_steps`."""

    warmup: Warmup
    total_steps: int

    def __call__(self, step: int) -> float:
        if step < self.warmup.steps:
            return self.warmup(step)
        return max(0.0, (self.total_steps - step) / max(1.0, self.total_steps - self.warmup.steps))


@dataclass(frozen=True)
class WarmupCosine:
    """Warm-up from `warmup_min`, then half a cosine down to `cosine_min` at `total_steps`."""

    warmup: Warmup
    total_steps: int
    warmup_min: float
    cosine_min: float

    def __call__(self, step: int) -> float:
        if step < 0:
            return 0.0
        if step < self.warmup.steps:
            return self.warmup_min + (1.0 - self.warmup_min) * self.warmup(step)
        progress = min(1.0, (step - self.warmup.steps + 1) / max(1, self.total_steps - self.warmup.steps))
        return max(0.0, self.cosine_min + (1.0 - self.cosine_min) * (1.0 + math.cos(math.pi * progress)) / 2)


@dataclass(frozen=True)
class RangeTest:
    """Grow without end, by `rate` every `interval` steps; in stairs or continuously."""

    interval: int
    rate: float
    staircase: bool

    def __call__(self, step: int) -> float:
        if step < 0:
            return 1.0
        intervals = (step + 1) / self.interval
        return 1.0 + self.rate * (math.floor(intervals) if self.staircase else intervals)


class FactorLR(LRScheduler):
    """`low + (high - low) * factor(step)` for every parameter group.

    Args:
        low, high: bounds of each group's learning rate.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],
        low: list[float],
        high: list[float],
    ) -> None:
        self._factor = factor
        self._bounds = list(zip(low, high, strict=True))
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        factor = self._factor(self.last_epoch - 1)
        return [low + (high - low) * factor for low, high in self._bounds]

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is; its shape comes from the configuration."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count, "_last_lr": self._last_lr}


def make_scheduler(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule that a configuration names.

    Raises:
        ConfigError: an unknown schedule or parameter, or one that is missing.
    """
    makers = {
        "WarmupLR": _warmup,
        "WarmupDecayLR": _warmup_decay,
        "WarmupCosineLR": _warmup_cosine,
        "LRRangeTest": _range_test,
    }
    if config.type not in makers:
        raise ConfigError(f"scheduler.type is {config.type!r}; choose one of {', '.join(makers)}")
    params = _Params(config)
    schedule = makers[config.type](params, optimizer)
    params.check_all_read()
    return schedule


class _Params:
    """A scheduler section's parameters, with a record of which were read."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._type = config.type
        self._unread: dict[str, Any] = dict(config.params)

    def get(self, name: str, default: Any) -> Any:
        return self._unread.pop(name, default)

    def need(self, name: str) -> Any:
        if name not in self._unread:
            raise ConfigError(f"scheduler.params.{name} is missing; {self._type} needs it")
        return self._unread.pop(name)

    def warmup(self) -> Warmup:
        steps = self.get("warmup_num_steps", 1000)
        if not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"scheduler.params.warmup_num_steps is {steps!r}; it must be a positive whole number")
        kind = self.get("warmup_type", "log")
        if kind not in ("log", "linear"):
            raise ConfigError(f"scheduler.params.warmup_type is {kind!r}; choose log or linear")
        return Warmup(max(2, steps), kind)

    def check_all_read(self) -> None:
        if self._unread:
            raise ConfigError(f"scheduler.params.{next(iter(self._unread))} is unknown to {self._type}")


def _group_lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _per_group(value: float | list[float], optimizer: torch.optim.Optimizer) -> list[float]:
    values = value if isinstance(value, list) else [value] * len(optimizer.param_groups)
    if len(values) != len(optimizer.param_groups):
        raise ConfigError(
            f"the scheduler has {len(values)} learning rates but the optimizer {len(optimizer.param_groups)} groups"
        )
    return [float(v) for v in values]


def _warmup(params: _Params, optimizer: torch.optim.Optimizer) -> LRScheduler:
    low = _per_group(params.get("warmup_min_lr", 0.0), optimizer)
    high = params.get("warmup_max_lr", None)
    bounds = _group_lrs(optimizer) if high is None else _per_group(high, optimizer)
    return FactorLR(optimizer, params.warmup(), low, bounds)


def _warmup_decay(params: _Params, optimizer: torch.optim.Optimizer) -> LRScheduler:
    total = int(params.need("total_num_steps"))
    low = _per_group(params.get("warmup_min_lr", 0.0), optimizer)
    high = _per_group(params.get("warmup_max_lr", 1e-3), optimizer)
    return FactorLR(optimizer, WarmupDecay(params.warmup(), total), low, high)


def _warmup_cosine(params: _Params, optimizer: torch.optim.Optimizer) -> LRScheduler:
    total = int(params.need("total_num_steps"))
    warmup_min = float(params.get("warmup_min_ratio", 0.0))
    cosine_min = float(params.get("cos_min_ratio", 1e-4))
    factor = WarmupCosine(params.warmup(), total, warmup_min, cosine_min)
    return FactorLR(optimizer, factor, [0.0] * len(optimizer.param_groups), _group_lrs(optimizer))


def _range_test(params: _Params, optimizer: torch.optim.Optimizer) -> LRScheduler:
    low = _per_group(params.get("lr_range_test_min_lr", 1e-3), optimizer)
    factor = RangeTest(
        int(params.get("lr_range_test_step_size", 2000)),
        float(params.get("lr_range_test_step_rate", 1.0)),
        bool(params.get("lr_range_test_staircase", False)),
    )
    return FactorLR(optimizer, factor, [0.0] * len(low), low)
