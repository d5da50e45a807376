"""Budgets that are "auto", made small enough for what a training takes beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from infinity.config import Config
from infinity.errors import CapacityError
from infinity.planner.filled import computing_bytes
from infinity.planner.training_plan import Machine, TrainingPlan, plan_training
from infinity.planner.work import Work

# Stacks, the allocator's remainders and libraries that load late: at least so much, or a twentieth of what there is.
_SLACK_BYTES = 128 << 20
_SLACK_SHARE = 20


def plan_with_room(
    model: nn.Module,
    config: Config,
    machine: Machine,
    count: Callable[[TrainingPlan], Work],
    host_bytes: int,
) -> tuple[Config, TrainingPlan, Work]:
    """The configuration with budgets that leave room for activations and gradients, its plan, and a micro-batch's work.

    A budget that is given stays as it is. One that would be too small for the model stays as it was chosen:
    `infinity.planner.problems` says what is missing then.

    Args:
        count: counts the work of a micro-batch.
        host_bytes: memory of one machine that its processes may take, libraries excluded.

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
    """The configuration with smaller budgets; itself where what is chosen leaves room enough."""
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
