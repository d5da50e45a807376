"""The optimizer and the learning-rate schedule that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.optim.kinds import ADAM, OptimizerKind, kind_from_config
from infinity.optim.lr_schedules import make_scheduler
from infinity.optim.optimizer import TieredOptimizer


def named_optimizer(config: Config) -> tuple[OptimizerKind, dict[str, Any]]:
    """Return the optimizer, AdamW if none is named, and the hyper-parameters that are given.

    Raises:
        ConfigError: an unknown optimizer or parameter, or an unsupported option.
    """
    if config.optimizer is None:
        return ADAM, {}
    return kind_from_config(config.optimizer.type, config.optimizer.params)


def checked_kind(config: Config) -> OptimizerKind:
    """Return the optimizer of a training by the configuration alone.

    Raises:
        ConfigError: `infinity.initialize` would refuse the optimizer or the schedule.
    """
    kind, defaults = named_optimizer(config)
    params = {} if config.scheduler is None else config.scheduler.params
    groups = max((len(value) for value in params.values() if isinstance(value, (list, tuple))), default=1)
    try_schedule(config, kind, [defaults] * groups)  # as many groups as rates are given
    return kind


def try_schedule(config: Config, kind: OptimizerKind, groups: Sequence[Mapping[str, Any]]) -> None:
    """Make the schedule of a configuration, if there is one, for groups with these hyper-parameters.

    Raises:
        ConfigError: an unknown schedule or parameter, or a missing parameter.
    """
    if config.scheduler is not None:
        stand_ins = [{**group, "params": [nn.Parameter(torch.zeros(()))]} for group in groups]
        make_scheduler(config.scheduler, TieredOptimizer(stand_ins, {}, kind))
