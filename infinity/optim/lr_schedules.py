"""The curves of learning-rate schedules, as torch schedulers; schedule_classes.py has their names.

Each is a pure function from the index of the last finished step to a factor; -1 stands for no step. The first step
therefore runs with the value at -1 and step `k` with the value at `k - 1`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import SchedulerConfig
from infinity.config.values import number, switch, whole
from infinity.errors import ConfigError


@dataclass(frozen=True)
class Warmup:
    """Rise from 0 to 1 over `steps`, linearly or logarithmically."""

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
    """Warm-up, then linear decay to 0 at `total_steps`."""

    warmup: Warmup
    total_steps: int

    def __call__(self, step: int) -> float:
        if step < self.warmup.steps:
            return self.warmup(step)
        return max(0.0, (self.total_steps - step) / max(1.0, self.total_steps - self.warmup.steps))


@dataclass(frozen=True)
class WarmupCosine:
    """Warm-up from `warmup_min`, then a half cosine down to `cosine_min` at `total_steps`."""

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
    """Grow without limit, by `rate` every `interval` steps; in stairs or continuously."""

    interval: int
    rate: float
    staircase: bool

    def __call__(self, step: int) -> float:
        if step < 0:
            return 1.0
        intervals = (step + 1) / self.interval
        return 1.0 + self.rate * (math.floor(intervals) if self.staircase else intervals)


@dataclass(frozen=True)
class Cycle:
    """Rise over `first` steps and fall over `second`, in stairs if a count is given.

    L. Smith, arXiv 1803.09820.
    """

    first: int
    second: int
    first_stairs: int
    second_stairs: int

    @property
    def length(self) -> int:
        return self.first + self.second

    def height(self, position: int) -> float:
        """Return the height at a position: 0 at both ends, 1 at the top."""
        position %= self.length
        if position <= self.first:
            return _stairs(position / self.first, self.first_stairs)
        return _stairs((self.length - position) / self.second, self.second_stairs)


def _stairs(height: float, count: int) -> float:
    return math.floor(height * count + 1e-9) / count if count else height


class OneCycleLR(LRScheduler):
    """One cycle of the learning rate and the inverse cycle of the momentum (`betas[0]`); then both decay.

    `betas[1]` is not changed.

    Args:
        low, high: bounds of each group's learning rate.
        momentum: bounds of each group's momentum, or None to leave it unchanged.
        decay_steps: length of an interval of the decay; 0 for no decay.
        lr_decay, momentum_decay: after k intervals the rate is divided, the momentum multiplied by 1 + decay * k.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle: Cycle,
        low: list[float],
        high: list[float],
        momentum: list[tuple[float, float]] | None,
        decay_steps: int,
        lr_decay: float,
        momentum_decay: float,
    ) -> None:
        self._cycle = cycle
        self._bounds = list(zip(low, high, strict=True))
        self._momentum = momentum
        self._decay_steps = decay_steps
        self._lr_decay = lr_decay
        self._momentum_decay = momentum_decay
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        decay = 1.0 + self._lr_decay * self._intervals()
        height = self._height()
        return [(low + (high - low) * height) / decay for low, high in self._bounds]

    def momenta(self) -> list[float] | None:
        """Return each group's momentum now; None if the schedule does not change it."""
        if self._momentum is None:
            return None
        decay, height = 1.0 + self._momentum_decay * self._intervals(), self._height()
        return [(high - (high - low) * height) * decay for low, high in self._momentum]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        momenta = self.momenta()
        if momenta is None or self._momentum is None:
            return
        if self.last_epoch == 0:
            momenta = [low for low, _ in self._momentum]  # rate and momentum begin at their low bounds
        for group, beta1 in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (beta1, group["betas"][1])

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the schedule; its curve comes from the configuration."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count, "_last_lr": self._last_lr}

    def _height(self) -> float:
        return self._cycle.height(self.last_epoch) if self.last_epoch <= self._cycle.length else 0.0

    def _intervals(self) -> float:
        """Return the number of decay intervals so far, with fractions."""
        beyond = self.last_epoch - self._cycle.length
        return beyond / self._decay_steps if beyond > 0 and self._decay_steps else 0.0


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
        """Return the position of the schedule; its curve comes from the configuration."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count, "_last_lr": self._last_lr}


class Params:
    """A scheduler section's parameters, checked when they are read."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._type = config.type
        self._values: dict[str, Any] = dict(config.params)

    def get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)  # null means the default
        return default if value is None else value

    def need(self, name: str) -> Any:
        if name not in self._values:
            raise ConfigError(f"scheduler.params.{name} is missing; {self._type} needs it")
        return self._values[name]

    def number(self, name: str, default: float) -> float:
        return number(f"scheduler.params.{name}", self.get(name, default))

    def whole(self, name: str, default: int, *, least: int = 0) -> int:
        return whole(f"scheduler.params.{name}", self.get(name, default), least=least)

    def switch(self, name: str, default: bool) -> bool:
        return switch(f"scheduler.params.{name}", self.get(name, default))

    def rates(self, name: str, value: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        """Return one learning rate for each parameter group."""
        path, groups = f"scheduler.params.{name}", len(optimizer.param_groups)
        values = list(value) if isinstance(value, (list, tuple)) else [value] * groups
        if len(values) != groups:
            raise ConfigError(f"{path} has {len(values)} learning rates but the optimizer {groups} groups")
        return [number(path, rate, least=0) for rate in values]

    def total(self) -> int:
        return whole("scheduler.params.total_num_steps", self.need("total_num_steps"), least=1)

    def warmup(self) -> Warmup:
        steps = self.whole("warmup_num_steps", 1000)
        kind = self.get("warmup_type", "log")
        if kind not in ("log", "linear"):
            raise ConfigError(f"scheduler.params.warmup_type is {kind!r}; choose log or linear")
        return Warmup(max(2, steps), kind)

    def decay(self) -> WarmupDecay:
        total = self.total()
        return WarmupDecay(self.warmup(), total)

    def cosine(self) -> WarmupCosine:
        total = self.total()
        warmup_min, cosine_min = self.number("warmup_min_ratio", 0.0), self.number("cos_min_ratio", 1e-4)
        return WarmupCosine(self.warmup(), total, warmup_min, cosine_min)

    def range_test(self) -> RangeTest:
        return RangeTest(
            self.whole("lr_range_test_step_size", 2000, least=1),
            self.number("lr_range_test_step_rate", 1.0),
            self.switch("lr_range_test_staircase", False),
        )

    def cycle(self) -> Cycle:
        first = self.whole("cycle_first_step_size", 2000, least=1)
        stairs = self.whole("cycle_first_stair_count", 0)
        second = self.whole("cycle_second_step_size", first)
        return Cycle(first, second, stairs, self.whole("cycle_second_stair_count", stairs))
