"""DeepSpeed's learning-rate schedules as classes over an optimizer, with its arguments and defaults."""

from __future__ import annotations

from typing import Any

import torch

from infinity.config import SchedulerConfig
from infinity.errors import ConfigError
from infinity.optim.lr_schedules import FactorLR, OneCycleLR, Params

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

_Rates = float | list[float]


def _params(type_name: str, last_batch_iteration: int, **values: Any) -> Params:
    if last_batch_iteration != -1:
        raise ConfigError(
            f"{type_name}: last_batch_iteration is {last_batch_iteration}; leave it out, and go on with "
            "load_state_dict() or engine.load_checkpoint()"
        )
    return Params(SchedulerConfig(type_name, values))


class WarmupLR(FactorLR):
    """Rise from `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps`, then stay."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: _Rates = 0.0,
        warmup_max_lr: _Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        params = _params("WarmupLR", last_batch_iteration, warmup_num_steps=warmup_num_steps, warmup_type=warmup_type)
        low = params.rates("warmup_min_lr", warmup_min_lr, optimizer)
        super().__init__(optimizer, params.warmup(), low, params.rates("warmup_max_lr", warmup_max_lr, optimizer))


class WarmupDecayLR(FactorLR):
    """The same, then a straight line down to `warmup_min_lr` at `total_num_steps`."""

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
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
        )
        factor = params.decay()
        low = params.rates("warmup_min_lr", warmup_min_lr, optimizer)
        super().__init__(optimizer, factor, low, params.rates("warmup_max_lr", warmup_max_lr, optimizer))


class WarmupCosineLR(FactorLR):
    """Warm up from a share of each group's rate to the whole of it, then half a cosine down to another share."""

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
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            warmup_min_ratio=warmup_min_ratio,
            cos_min_ratio=cos_min_ratio,
        )
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, params.cosine(), [0.0] * len(rates), rates)


class LRRangeTest(FactorLR):
    """Grow from `lr_range_test_min_lr` without end."""

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
        low = params.rates("lr_range_test_min_lr", lr_range_test_min_lr, optimizer)
        super().__init__(optimizer, factor, [0.0] * len(low), low)


class OneCycle(OneCycleLR):
    """One cycle of the learning rate and, the other way round, of the momentum; then both decay."""

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
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
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
        )
        super().__init__(
            optimizer,
            params.cycle(),
            params.rates("cycle_min_lr", cycle_min_lr, optimizer),
            params.rates("cycle_max_lr", cycle_max_lr, optimizer),
            (cycle_min_mom, cycle_max_mom) if cycle_momentum and "betas" in optimizer.defaults else None,
            params.whole("decay_step_size", 0),
            decay_lr_rate,
            decay_mom_rate,
        )
