"""Reduces memory budgets that are "auto", so that they leave room for activations and gradients."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import nn

from infinity.config import load_config, with_values
from infinity.errors import CapacityError, ConfigError
from infinity.memory import available_memory_bytes, free_bytes
from infinity.planner import (
    Machine,
    TrainingPlan,
    Work,
    count_work,
    drives_here,
    estimate,
    free_on,
    host_problem,
    plan_with_room,
)
from infinity.zero.ranks import Ranks

_log = logging.getLogger(__name__)


def with_room(
    values: Mapping[str, Any],
    model: nn.Module,
    device: torch.device,
    ranks: Ranks,
    seq_len: int,
    *,
    checkpointing: bool,
) -> dict[str, Any]:
    """Return the configuration with "auto" budgets reduced to leave room for activations and gradients.

    All ranks must call this together. If the work of the model cannot be counted, `initialize` chooses the budgets.

    Raises:
        CapacityError: host memory is too small for the processes of a machine; raised on all ranks.
    """
    config = load_config(values, world_size=ranks.size)
    machine = Machine(
        ranks.size,
        ranks.neighbours,
        free_bytes(device) if device.type != "cpu" else None,
        drive_bytes=free_on(drives_here(config)),
    )

    def count(plan: TrainingPlan) -> Work:
        return count_work(model, plan, config.micro_batch_size, seq_len, checkpointing=checkpointing)

    available, problem = available_memory_bytes(), ""
    try:
        roomy, plan, work = plan_with_room(model, config, machine, count, available)
        libraries = psutil.Process().memory_info().rss
        needs = estimate(plan, work, libraries)
        problem = host_problem(plan, needs, available + libraries * machine.neighbours)
        found = roomy.tiering
    except (CapacityError, ConfigError) as error:
        _log.info("budgets are chosen without counting activations: %s", error)
        found = config.tiering
    if not ranks.least(int(not problem)):
        raise CapacityError(problem or "host memory is too small on another rank; its message has the numbers")
    budgets = {"host_memory": found.host_memory_bytes, "device_memory": found.device_memory_bytes}
    agreed = {key: ranks.least(sys.maxsize if nbytes is None else nbytes) for key, nbytes in budgets.items()}
    return with_values(values, {f"tiering.{key}": nbytes for key, nbytes in agreed.items() if nbytes < sys.maxsize})
