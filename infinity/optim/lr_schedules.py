"""The schedules of the configuration section `scheduler`: torch schedulers with the parameters of that section.

A curve is a function from the index of the last finished step to a factor; -1 means that no step is finished. The first
step therefore runs with the value at -1, and step `k` with the value at `k - 1`. `step(k)` sets a schedule to its
position after batch `k`, counted from 0; `step()` advances it by one batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import Config, SchedulerConfig
from infinity.config.values import number, switch, whole
from infinity.errors import ConfigError
from infinity.optim.kinds import OptimizerKind, named_optimizer
from infinity.optim.optimizer import TieredOptimizer

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

_Rates = float | list[float]


def make_scheduler(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Create the schedule of a configuration; null means a parameter's default.

    Raises:
        ConfigError: an unknown schedule or parameter, or a missing parameter.
    """
    if config.type not in VALID_LR_SCHEDULES:
        raise ConfigError(f"scheduler.type is {config.type!r}; choose one of {', '.join(VALID_LR_SCHEDULES)}")
    kind = globals()[config.type]
    taken = inspect.signature(kind).parameters
    given = {name: value for name, value in config.params.items() if value is not None}
    for name in given:
        if name not in taken or name in ("optimizer", "last_batch_iteration"):
            raise ConfigError(f"scheduler.params.{name} is unknown to {config.type}")
    for name, parameter in taken.items():
        if parameter.default is parameter.empty and name != "optimizer" and name not in given:
            raise ConfigError(f"scheduler.params.{name} is missing; {config.type} needs it")
    made: LRScheduler = kind(optimizer, **given)
    return made


def try_schedule(config: Config, kind: OptimizerKind, groups: Sequence[Mapping[str, Any]]) -> None:
    """Create the schedule of a configuration, if it has one, for groups with these hyper-parameters, as a check.

    Raises like `make_scheduler`.
    """
    if config.scheduler is not None:
        stand_ins = [{**group, "params": [nn.Parameter(torch.zeros(()))]} for group in groups]
        make_scheduler(config.scheduler, TieredOptimizer(stand_ins, {}, kind))


def checked_kind(config: Config) -> OptimizerKind:
    """Return the optimizer that the configuration names.

    Raises:
        ConfigError: `infinity.initialize` would refuse the optimizer or the schedule.
    """
    kind, defaults = named_optimizer(config)
    params = {} if config.scheduler is None else config.scheduler.params
    groups = max((len(value) for value in params.values() if isinstance(value, (list, tuple))), default=1)
    try_schedule(config, kind, [defaults] * groups)  # as many groups as the schedule has rates
    return kind


# Parameters #


def _whole(name: str, value: Any, *, least: int = 0) -> int:
    return whole(f"scheduler.params.{name}", value, least=least)


def _number(name: str, value: Any) -> float:
    return number(f"scheduler.params.{name}", value)


def _switch(name: str, value: Any) -> bool:
    return switch(f"scheduler.params.{name}", value)


def _rates(name: str, value: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return one learning rate for each parameter group."""
    path, groups = f"scheduler.params.{name}", len(optimizer.param_groups)
    values = list(value) if isinstance(value, (list, tuple)) else [value] * groups
    if len(values) != groups:
        raise ConfigError(f"{path} has {len(values)} learning rates but the optimizer {groups} groups")
    return [number(path, rate, least=0) for rate in values]


def _group_lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _warmup(steps: Any, kind: Any) -> tuple[int, str]:
    if kind not in ("log", "linear"):
        raise ConfigError(f"scheduler.params.warmup_type is {kind!r}; choose log or linear")
    return max(2, _whole("warmup_num_steps", steps)), kind


# Curves #


def _rise(steps: int, kind: str, step: int) -> float:
    """Rise from 0 to 1 over `steps`, linearly or logarithmically."""
    if step < 0:
        return 0.0
    if step >= steps:
        return 1.0
    return step / steps if kind == "linear" else math.log(step + 1) / math.log(steps)


def _rise_and_decay(warmup: int, kind: str, total: int, step: int) -> float:
    """Rise, then fall linearly to 0 at `total`."""
    if step < warmup:
        return _rise(warmup, kind, step)
    return max(0.0, (total - step) / max(1.0, total - warmup))


def _rise_and_cosine(warmup: int, kind: str, total: int, low: float, last: float, step: int) -> float:
    """Rise from `low`, then fall by a half cosine to `last` at `total`."""
    if step < 0:
        return 0.0
    if step < warmup:
        return low + (1.0 - low) * _rise(warmup, kind, step)
    progress = min(1.0, (step - warmup + 1) / max(1, total - warmup))
    return max(0.0, last + (1.0 - last) * (1.0 + math.cos(math.pi * progress)) / 2)


def _grow(interval: int, rate: float, staircase: bool, step: int) -> float:
    """Grow without limit, by `rate` every `interval` steps; in stairs or continuously."""
    if step < 0:
        return 1.0
    intervals = (step + 1) / interval
    return 1.0 + rate * (math.floor(intervals) if staircase else intervals)


def _stairs(height: float, count: int) -> float:
    return math.floor(height * count + 1e-9) / count if count else height


# Schedules #


class _Schedule(LRScheduler):
    """A schedule that counts finished batches; torch's count is higher by one."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        if last_batch_iteration != -1:
            raise ConfigError(
                f"{type(self).__name__}: last_batch_iteration is {last_batch_iteration}; leave it out, and continue by "
                "load_state_dict() or engine.load_checkpoint()"
            )
        super().__init__(optimizer)

    @property
    def last_batch_iteration(self) -> int:
        """Index of the last finished batch; -1 before the first."""
        return self.last_epoch - 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one batch, or to the position after the batch of this index."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the schedule; its curve comes from the configuration."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count, "_last_lr": self._last_lr}


class FactorLR(_Schedule):
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
        last_batch_iteration: int = -1,
    ) -> None:
        self._factor = factor
        self._bounds = list(zip(low, high, strict=True))
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        factor = self._factor(self.last_batch_iteration)
        return [low + (high - low) * factor for low, high in self._bounds]


class WarmupLR(FactorLR):
    """Rise from `warmup_min_lr` to `warmup_max_lr`, which is each group's rate by default, and stay."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: _Rates = 0.0,
        warmup_max_lr: _Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.warmup_num_steps, self.warmup_type = warmup = _warmup(warmup_num_steps, warmup_type)
        high = _group_lrs(optimizer) if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = _rates("warmup_min_lr", warmup_min_lr, optimizer)
        self.max_lrs = _rates("warmup_max_lr", high, optimizer)
        super().__init__(optimizer, partial(_rise, *warmup), self.min_lrs, self.max_lrs, last_batch_iteration)


class WarmupDecayLR(FactorLR):
    """Rise to `warmup_max_lr`, then decay linearly to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: _Rates = 0.0,
        warmup_max_lr: _Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _whole("total_num_steps", total_num_steps, least=1)
        self.warmup_num_steps, self.warmup_type = warmup = _warmup(warmup_num_steps, warmup_type)
        self.min_lrs = _rates("warmup_min_lr", warmup_min_lr, optimizer)
        self.max_lrs = _rates("warmup_max_lr", warmup_max_lr, optimizer)
        factor = partial(_rise_and_decay, *warmup, self.total_num_steps)
        super().__init__(optimizer, factor, self.min_lrs, self.max_lrs, last_batch_iteration)


class WarmupCosineLR(FactorLR):
    """Rise from a fraction of each group's rate to the full rate, then fall by a half cosine to another fraction."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _whole("total_num_steps", total_num_steps, least=1)
        self.warmup_min_ratio = _number("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio)
        self.warmup_num_steps, self.warmup_type = warmup = _warmup(warmup_num_steps, warmup_type)
        factor = partial(_rise_and_cosine, *warmup, self.total_num_steps, self.warmup_min_ratio, self.cos_min_ratio)
        rates = _group_lrs(optimizer)
        super().__init__(optimizer, factor, [0.0] * len(rates), rates, last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """Return the present fraction of each group's rate."""
        return self._factor(self.last_batch_iteration)


class LRRangeTest(FactorLR):
    """Grow from `lr_range_test_min_lr` without limit."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: _Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lr = _rates("lr_range_test_min_lr", lr_range_test_min_lr, optimizer)
        self.step_size = _whole("lr_range_test_step_size", lr_range_test_step_size, least=1)
        self.step_rate = _number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = _switch("lr_range_test_staircase", lr_range_test_staircase)
        factor = partial(_grow, self.step_size, self.step_rate, self.staircase)
        super().__init__(optimizer, factor, [0.0] * len(self.min_lr), self.min_lr, last_batch_iteration)


class OneCycle(_Schedule):
    """One cycle of the learning rate and the inverse cycle of the momentum (`betas[0]`); then both decay.

    The rate rises over the first steps and falls over the second, in stairs if a count is given (L. Smith,
    arXiv 1803.09820). After k intervals of the decay the rate is divided, the momentum multiplied by 1 + decay * k.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: _Rates,
        cycle_max_lr: _Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: _Rates = 0.8,
        cycle_max_mom: _Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        first, second = cycle_first_step_size, cycle_second_step_size
        self.first_step_size = _whole("cycle_first_step_size", first, least=1)
        self.second_step_size = _whole("cycle_second_step_size", self.first_step_size if second is None else second)
        first, second = cycle_first_stair_count, cycle_second_stair_count
        self.first_stair_count = _whole("cycle_first_stair_count", first)
        self.second_stair_count = _whole("cycle_second_stair_count", first if second is None else second)
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.min_lrs = _rates("cycle_min_lr", cycle_min_lr, optimizer)
        self.max_lrs = _rates("cycle_max_lr", cycle_max_lr, optimizer)
        self.cycle_momentum = _switch("cycle_momentum", cycle_momentum) and "betas" in optimizer.defaults
        low = _rates("cycle_min_mom", cycle_min_mom, optimizer)
        high = _rates("cycle_max_mom", cycle_max_mom, optimizer)
        self._momentum_bounds = list(zip(low, high, strict=True))
        self._decay_steps = _whole("decay_step_size", decay_step_size)
        self._lr_decay = _number("decay_lr_rate", decay_lr_rate)
        self._momentum_decay = _number("decay_mom_rate", decay_mom_rate)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        decay, height = 1.0 + self._lr_decay * self._intervals(), self._height()
        bounds = zip(self.min_lrs, self.max_lrs, strict=True)
        return [(low + (high - low) * height) / decay for low, high in bounds]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the present `betas` of each group; None if the schedule does not change them."""
        if not self.cycle_momentum:
            return None
        decay, height = 1.0 + self._momentum_decay * self._intervals(), self._height()
        pairs = zip(self._momentum_bounds, self.optimizer.param_groups, strict=True)
        return [((high - (high - low) * height) * decay, group["betas"][1]) for (low, high), group in pairs]

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        betas = self.get_mom()
        if betas is None:
            return
        if self.last_epoch == 0:  # rate and momentum begin at their low bounds
            betas = [(low, beta2) for (low, _), (_, beta2) in zip(self._momentum_bounds, betas, strict=True)]
        for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = pair

    def _height(self) -> float:
        """Return the height of the cycle now: 0 at both ends, 1 at the top."""
        position = self.last_epoch
        if position >= self.total_size:
            return 0.0
        if position <= self.first_step_size:
            return _stairs(position / self.first_step_size, self.first_stair_count)
        return _stairs((self.total_size - position) / self.second_step_size, self.second_stair_count)

    def _intervals(self) -> float:
        """Return the number of decay intervals so far, with fractions."""
        beyond = self.last_epoch - self.total_size
        return beyond / self._decay_steps if beyond > 0 and self._decay_steps else 0.0
