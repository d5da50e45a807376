"""The schedules that the section `scheduler` names: classes over an optimizer, whose arguments are its parameters.

`step(k)` sets the schedule to its position after batch `k`, counted from 0; `step()` advances it by one batch.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import SchedulerConfig
from infinity.errors import ConfigError
from infinity.optim.lr_schedules import FactorLR, OneCycleLR, Params

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

_Rates = float | list[float]


def make_scheduler(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Make the schedule of a configuration; null means a parameter's default.

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


def _params(type_name: str, last_batch_iteration: int, **values: Any) -> Params:
    if last_batch_iteration != -1:
        raise ConfigError(
            f"{type_name}: last_batch_iteration is {last_batch_iteration}; leave it out, and go on with "
            "load_state_dict() or engine.load_checkpoint()"
        )
    return Params(SchedulerConfig(type_name, values))


def _warmup_steps(type_name: str, value: Any) -> Any:
    if value is None:
        raise ConfigError(f"{type_name}: warmup_num_steps is None; give a whole number, or leave it out for 1000")
    return value


def _group_lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class _Steps(LRScheduler):
    """A schedule that counts finished batches; torch's count is higher by one."""

    @property
    def last_batch_iteration(self) -> int:
        """Index of the last finished batch; -1 before the first."""
        return self.last_epoch - 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one batch, or to the position after the batch of this index."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()


class WarmupLR(_Steps, FactorLR):
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
        steps = _warmup_steps("WarmupLR", warmup_num_steps)
        params = _params("WarmupLR", last_batch_iteration, warmup_num_steps=steps, warmup_type=warmup_type)
        warmup = params.warmup()
        self.warmup_num_steps, self.warmup_type = warmup.steps, warmup.kind
        self.min_lrs = params.rates("warmup_min_lr", warmup_min_lr, optimizer)
        high = _group_lrs(optimizer) if warmup_max_lr is None else warmup_max_lr
        self.max_lrs = params.rates("warmup_max_lr", high, optimizer)
        super().__init__(optimizer, warmup, self.min_lrs, self.max_lrs)


class WarmupDecayLR(_Steps, FactorLR):
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
        params = _params(
            "WarmupDecayLR",
            last_batch_iteration,
            total_num_steps=total_num_steps,
            warmup_num_steps=_warmup_steps("WarmupDecayLR", warmup_num_steps),
            warmup_type=warmup_type,
        )
        factor = params.decay()
        self.total_num_steps = factor.total_steps
        self.warmup_num_steps, self.warmup_type = factor.warmup.steps, factor.warmup.kind
        self.min_lrs = params.rates("warmup_min_lr", warmup_min_lr, optimizer)
        self.max_lrs = params.rates("warmup_max_lr", warmup_max_lr, optimizer)
        super().__init__(optimizer, factor, self.min_lrs, self.max_lrs)


class WarmupCosineLR(_Steps, FactorLR):
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
        params = _params(
            "WarmupCosineLR",
            last_batch_iteration,
            total_num_steps=total_num_steps,
            warmup_num_steps=_warmup_steps("WarmupCosineLR", warmup_num_steps),
            warmup_type=warmup_type,
            warmup_min_ratio=warmup_min_ratio,
            cos_min_ratio=cos_min_ratio,
        )
        self._ratio = params.cosine()
        self.total_num_steps = self._ratio.total_steps
        self.warmup_num_steps, self.warmup_type = self._ratio.warmup.steps, self._ratio.warmup.kind
        self.warmup_min_ratio, self.cos_min_ratio = self._ratio.warmup_min, self._ratio.cosine_min
        rates = _group_lrs(optimizer)
        super().__init__(optimizer, self._ratio, [0.0] * len(rates), rates)

    def get_lr_ratio(self) -> float:
        """Return the present fraction of each group's rate."""
        return self._ratio(self.last_batch_iteration)


class LRRangeTest(_Steps, FactorLR):
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
        params = _params(
            "LRRangeTest",
            last_batch_iteration,
            lr_range_test_step_size=lr_range_test_step_size,
            lr_range_test_step_rate=lr_range_test_step_rate,
            lr_range_test_staircase=lr_range_test_staircase,
        )
        factor = params.range_test()
        self.min_lr = params.rates("lr_range_test_min_lr", lr_range_test_min_lr, optimizer)
        self.step_size, self.step_rate, self.staircase = factor.interval, factor.rate, factor.staircase
        super().__init__(optimizer, factor, [0.0] * len(self.min_lr), self.min_lr)


class OneCycle(_Steps, OneCycleLR):
    """One cycle of the learning rate and the inverse cycle of the momentum; then both decay."""

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
        params = _params(
            "OneCycle",
            last_batch_iteration,
            cycle_first_step_size=cycle_first_step_size,
            cycle_second_step_size=cycle_second_step_size,
            cycle_first_stair_count=cycle_first_stair_count,
            cycle_second_stair_count=cycle_second_stair_count,
            decay_step_size=decay_step_size,
            decay_lr_rate=decay_lr_rate,
            decay_mom_rate=decay_mom_rate,
            cycle_momentum=cycle_momentum,
        )
        cycle = params.cycle()
        self.first_step_size, self.second_step_size = cycle.first, cycle.second
        self.first_stair_count, self.second_stair_count = cycle.first_stairs, cycle.second_stairs
        self.total_size, self.step_ratio = cycle.length, cycle.first / cycle.length
        self.min_lrs = params.rates("cycle_min_lr", cycle_min_lr, optimizer)
        self.max_lrs = params.rates("cycle_max_lr", cycle_max_lr, optimizer)
        low = params.rates("cycle_min_mom", cycle_min_mom, optimizer)
        high = params.rates("cycle_max_mom", cycle_max_mom, optimizer)
        self.cycle_momentum = params.switch("cycle_momentum", True) and "betas" in optimizer.defaults
        super().__init__(
            optimizer,
            cycle,
            self.min_lrs,
            self.max_lrs,
            list(zip(low, high, strict=True)) if self.cycle_momentum else None,
            params.whole("decay_step_size", 0),
            params.number("decay_lr_rate", 0.0),
            params.number("decay_mom_rate", 0.0),
        )

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the present `betas` of each group; None if the schedule does not change them."""
        momenta = self.momenta()
        if momenta is None:
            return None
        groups = self.optimizer.param_groups
        return [(beta1, group["betas"][1]) for beta1, group in zip(momenta, groups, strict=True)]
