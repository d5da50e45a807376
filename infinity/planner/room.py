"""Reduce "auto" budgets so that they leave room for the other memory of a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from infinity.config import Config
from infinity.errors import CapacityError
from infinity.planner.filled import computing_bytes
from infinity.planner.training_plan import Machine, TrainingPlan, plan_training
from infinity.planner.work import Work

# Stacks, the allocator's fragments and libraries that load late: at least so much, or a twentieth of the memory.
_SLACK_BYTES = 128 << 20
_SLACK_SHARE = 20


def plan_with_room(
    model: nn.Module,
    config: Config,
    machine: Machine,
    count: Callable[[TrainingPlan], Work],
    host_bytes: int,
) -> tuple[Config, TrainingPlan, Work]:
    """Return a configuration whose budgets leave room for activations and gradients, its plan, and a micro-batch's
    work.

    Budgets set by the user stay. If a reduced budget would be too small for the model, the original stays, and
    `infinity.planner.problems` reports the shortage.

    Args:
        count: counts the work of a micro-batch.
        host_bytes: memory of one machine for its processes, without libraries.

    Raises:
        CapacityError: a budget is too small for the model.
    """
    plan = plan_training(model, config, machine)
    work = count(plan)
    roomy = _with_room(config, plan, computing_bytes(plan, work), host_bytes // machine.neighbours)
    if roomy is config:
        return config, plan, work
    try:
        return roomy, plan_training(model, roomy, machine), work
    except CapacityError:
        return config, plan, work


def _with_room(config: Config, plan: TrainingPlan, beside_bytes: int, host_bytes: int) -> Config:
    """Return the configuration with smaller budgets; itself if they leave enough room."""
    tiering, machine = config.tiering, plan.machine
    slack = min(max(_SLACK_BYTES, host_bytes // _SLACK_SHARE), host_bytes // 8)
    host_limit = host_bytes - slack - (0 if machine.discrete else beside_bytes)
    if tiering.host_memory_bytes is None and plan.host_bytes > host_limit > 0:
        tiering = replace(tiering, host_memory_bytes=host_limit)
    if machine.device_bytes is not None and tiering.device_memory_bytes is None:
        device_limit = int(machine.device_bytes * (1 - tiering.device_headroom)) - beside_bytes
        if plan.device_used_bytes > device_limit > 0:
            tiering = replace(tiering, device_memory_bytes=device_limit)
    return config if tiering is config.tiering else replace(config, tiering=tiering)
