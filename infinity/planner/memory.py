"""Bytes of every tier and of the process beside them, and the budgets and the largest model that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from infinity.config import Config, format_size
from infinity.errors import CapacityError
from infinity.planner.decoder import Shape, decoder_of, usual_shape
from infinity.planner.filled import activation_bytes, computing_bytes, gradient_bytes
from infinity.planner.step_time import StepTime
from infinity.planner.training_plan import Machine, TrainingPlan, plan_training
from infinity.planner.work import Work
from infinity.zero.budgets import Drive, device_least_bytes, free_on

Count = Callable[[nn.Module, TrainingPlan], Work]

# Stacks, the allocator's fragments and libraries that load late: at least so much, or a twentieth of the memory.
_SLACK_BYTES = 128 << 20
_SLACK_SHARE = 20
_MOST_PARAMS = 1e15
_SURE = 0.98  # usable share of the free memory: libraries take a little more or less in another process
_NEAR = 1.05
_LEAST_BYTES = 6  # least bytes of a parameter and its states, in any format


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank, and of its machine's drives.

    Attributes:
        device_bytes: on a device with memory of its own: states, `activation_bytes`, and the gradients of one unit.
        budget_bytes: of `tiering.host_memory`, as far as it is used; at most `granted_bytes`.
        libraries_bytes: Python, torch and other loaded libraries.
        activation_bytes: peak of activations where the model computes.
        unit_grad_bytes: gradients that the engine has not taken yet: of the unit in backward, and of one that several
            modules use.
        process_bytes: peak of the process in host memory: budget, libraries, and, if the model computes on the CPU,
            activations and gradients.
        nvme_bytes: of one rank; `machine_nvme_bytes` of all ranks on one machine.
    """

    device_bytes: int
    budget_bytes: int
    granted_bytes: int
    libraries_bytes: int
    activation_bytes: int
    unit_grad_bytes: int
    process_bytes: int
    nvme_bytes: int
    machine_nvme_bytes: int


def estimate(plan: TrainingPlan, work: Work | None, libraries_bytes: int, step: StepTime | None = None) -> Estimate:
    """Add up the bytes of a plan in each memory.

    Args:
        work: of a micro-batch; None leaves activations out.
        libraries_bytes: of a process before it trains.
        step: the predicted step, which shows how long gradients wait for their updates. Without it, or if some of its
            rates are unknown, gradients count with all that they are granted.
    """
    grads, added_up = gradient_bytes(plan)
    computing = computing_bytes(plan, work)
    discrete = plan.machine.discrete
    budget_bytes = plan.host_used_bytes - _never_taken_bytes(plan, step)
    return Estimate(
        device_bytes=plan.device_used_bytes + computing if discrete else 0,
        budget_bytes=budget_bytes,
        granted_bytes=plan.host_used_bytes,
        libraries_bytes=libraries_bytes,
        activation_bytes=activation_bytes(plan, work),
        unit_grad_bytes=max(grads, added_up),
        process_bytes=budget_bytes + libraries_bytes + (0 if discrete else computing),
        nvme_bytes=plan.nvme_bytes,
        machine_nvme_bytes=plan.nvme_bytes * plan.machine.neighbours,
    )


def _never_taken_bytes(plan: TrainingPlan, step: StepTime | None) -> int:
    """Return the bytes that the budget grants to parameters, waiting gradients and states but that they never use.

    Units that are gathered from several ranks' shards come earlier than the plan says, and use all of it.
    """
    gathered = any(spec.sharding.count > 1 for spec in plan.sizing.specs)
    params = 0 if plan.machine.discrete or gathered else max(0, plan.params_bytes - plan.steps.most_bytes)
    homes, shards = plan.placement.grad_homes, plan.sizing.shards
    own_bytes = sum(shards.grad_sizes[unit] for unit in homes.own)
    if homes.spilled:
        slot_bytes = max(shards.grad_sizes[unit] for unit in homes.spilled)
        states_bytes = sum(shards.tile_sizes) - plan.placement.stored_states_bytes
        # Added up: gradients of units whose states stay in memory may count among the states.
        granted_bytes = plan.split.grads_bytes + plan.split.states_bytes
        return params + granted_bytes - own_bytes - homes.slots * slot_bytes - states_bytes
    if step is None or step.unknown:
        return params
    return params + max(0, plan.split.grads_bytes - own_bytes - step.leased_grads_bytes)


def problems(plan: TrainingPlan, needs: Estimate, drives: list[Drive], host_bytes: int) -> Iterator[str]:
    """Yield the reasons why this cannot train on these machines.

    Args:
        drives: of one machine.
        host_bytes: free or total memory of one machine.
    """
    free = free_on(drives)
    if needs.machine_nvme_bytes > free:
        listed = ", ".join(f"{drive.path} has {format_size(drive.free_bytes)}" for drive in drives) or "there is none"
        yield (
            f"the drives are too small: {format_size(needs.machine_nvme_bytes)} are needed on a machine, {listed} "
            f"free. Free {format_size(needs.machine_nvme_bytes - free)}, add a path to tiering.nvme, raise "
            "tiering.host_memory so that less is stored, or take a smaller state_format"
        )
    too_little = host_problem(plan, needs, host_bytes)
    if too_little:
        yield too_little
    if plan.machine.device_bytes is not None and needs.device_bytes > plan.machine.device_bytes:
        yield (
            f"device memory is too small: {format_size(needs.device_bytes)} are needed, of which "
            f"{format_size(needs.activation_bytes)} are activations, and there are "
            f"{format_size(plan.machine.device_bytes)}. "
            + _lower("device_memory" if plan.device_used_bytes > device_least_bytes(plan.sizing) else "")
        )


def host_problem(plan: TrainingPlan, needs: Estimate, host_bytes: int) -> str:
    """Return why the host memory of a machine, free or all of it, is not enough; empty if it is."""
    total = (needs.process_bytes + needs.granted_bytes - needs.budget_bytes) * plan.machine.neighbours
    if total <= host_bytes:
        return ""
    return (
        f"host memory is too small: the processes of a machine take {format_size(total)} with the budget of "
        f"{format_size(plan.host_bytes)} each, and {format_size(host_bytes)} are there. "
        + _lower("host_memory" if plan.host_bytes > plan.needs.least_bytes else "")
    )


def _lower(budget: str) -> str:
    """Return what takes less memory: fewer activations, and a lower budget if one is named."""
    lower = f"tiering.{budget}, " if budget else ""
    return f"Lower {lower}the micro-batch or the sequence length, or checkpoint activations"


def plan_with_room(
    model: nn.Module,
    config: Config,
    machine: Machine,
    count: Callable[[TrainingPlan], Work],
    host_bytes: int,
) -> tuple[Config, TrainingPlan, Work]:
    """Return a configuration whose budgets leave room for activations and gradients, its plan, and a micro-batch's
    work.

    Budgets set by the user stay. Others may be larger than "auto" allows if the model needs them: the share that "auto"
    leaves free is for activations of unknown size. If a reduced budget would be too small for the model, it is the
    least that the model needs, so that `infinity.planner.problems` reports the shortage with what is needed.

    Args:
        count: counts the work of a micro-batch.
        host_bytes: memory of one machine for its processes, without libraries.

    Raises:
        CapacityError: a budget is too small for the model.
    """
    plan = _first_plan(model, config, machine, host_bytes // machine.neighbours)
    work = count(plan)
    room = partial(_with_room, config, plan, computing_bytes(plan, work), host_bytes // machine.neighbours)
    roomy = room()
    if roomy is config:
        return config, plan, work
    try:
        return roomy, plan_training(model, roomy, machine), work
    except CapacityError:  # not even with cut blocks
        for _ in range(2):  # a smaller device budget keeps fewer parameters there, which lowers the minimum again
            roomy = room(host_least=plan.needs.least_bytes, device_least=device_least_bytes(plan.sizing))
            plan = plan_training(model, roomy, machine)
        return roomy, plan, work


def _first_plan(model: nn.Module, config: Config, machine: Machine, host_bytes: int) -> TrainingPlan:
    """Return the plan with the budgets of `infinity.initialize`, or with all host memory if these are too small."""
    try:
        return plan_training(model, config, machine)
    except CapacityError as refusal:
        if config.tiering.host_memory_bytes is not None or host_bytes <= 0:
            raise
        all_of_it = replace(config, tiering=replace(config.tiering, host_memory_bytes=host_bytes))
        try:
            return plan_training(model, all_of_it, machine)
        except CapacityError:
            raise refusal from None


def _with_room(
    config: Config, plan: TrainingPlan, beside_bytes: int, host_bytes: int, host_least: int = 1, device_least: int = 1
) -> Config:
    """Return the configuration with smaller budgets, of at least so many bytes; itself if they leave enough room."""
    tiering, machine = config.tiering, plan.machine
    slack = min(max(_SLACK_BYTES, host_bytes // _SLACK_SHARE), host_bytes // 8)
    host_limit = max(host_least, host_bytes - slack - (0 if machine.discrete else beside_bytes))
    if tiering.host_memory_bytes is None and plan.host_bytes > host_limit:
        tiering = replace(tiering, host_memory_bytes=min(host_limit, plan.needs.most_bytes))
    if machine.device_bytes is not None and tiering.device_memory_bytes is None:
        headroom = int(machine.device_bytes * tiering.device_headroom)
        device_limit = max(device_least, machine.device_bytes - headroom - beside_bytes)
        if plan.device_used_bytes > device_limit:
            tiering = replace(tiering, device_memory_bytes=device_limit)
    return config if tiering is config.tiering else replace(config, tiering=tiering)


def largest_model(
    config: Config,
    machine: Machine,
    drives: list[Drive],
    host_bytes: int,
    count: Count,
    libraries_bytes: int,
    tiles: int = 1,
) -> Shape | None:
    """Return the largest decoder that trains on these machines, according to `problems`; None if none does.

    Args:
        drives, host_bytes: see `problems`.
        count: counts the work of a micro-batch of a model.
        tiles: see `decoder_of`.
    """

    host_bytes = int(_SURE * host_bytes)
    machines = machine.ranks // machine.neighbours
    every_byte = machines * (host_bytes + free_on(drives))
    every_byte += machine.ranks * (machine.device_bytes or 0)
    most_params = min(_MOST_PARAMS, every_byte / _LEAST_BYTES)  # the plan of a model far too large would take minutes

    def fits(step: int) -> bool:
        shape = usual_shape(step)
        if shape.params > most_params:
            return False
        model = decoder_of(shape, tiles)
        free_bytes = host_bytes - libraries_bytes * machine.neighbours
        try:
            _, plan, work = plan_with_room(model, config, machine, lambda plan: count(model, plan), free_bytes)
        except CapacityError:
            return False
        return not any(problems(plan, estimate(plan, work, libraries_bytes), drives, host_bytes))

    if not fits(0):
        return None
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1 and usual_shape(high).params > _NEAR * usual_shape(low).params:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return usual_shape(low)
