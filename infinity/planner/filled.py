"""Predict device memory during a step, and the optimizer states that fill the spare part.

The engine measures the first step and then fills device memory (infinity/zero/filling.py); here both are computed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from infinity.config import Config
from infinity.planner.traffic import traffic_of
from infinity.planner.training_plan import TrainingPlan
from infinity.planner.work import Work
from infinity.schedule.needs import units_that_fit
from infinity.schedule.on_device import why_not_filled
from infinity.tiers import Memory
from infinity.zero.partition import PERSISTENT
from infinity.zero.sizing import is_exact


def activation_bytes(plan: TrainingPlan, work: Work | None) -> int:
    """Return the peak of activations where the model computes. Offloaded ones count for the host's budget instead.

    Args:
        work: of a micro-batch; None leaves activations out.
    """
    if work is None:
        return 0
    moves = plan.sizing.rules.activations_bytes > 0
    return int(work.activation_bytes - (work.saved_bytes if moves else 0))


def gradient_bytes(plan: TrainingPlan) -> tuple[int, int]:
    """Return the peak of gradients that backward has made and the engine has not taken: during backward, and at its
    end.

    torch keeps the gradient of a parameter that several modules use (a tied head) from the first to the last of them,
    and adds another one in new memory.
    """
    partition = plan.sizing.partition
    shared = partition.shared
    most, kept, added_up = 0, 0, 0
    for unit, spec in zip(partition.units, plan.sizing.specs, strict=True):
        nbytes = unit.trainable_numel * spec.dtype.itemsize
        if unit.index in shared and unit.name != PERSISTENT:
            kept += nbytes
            added_up = max(added_up, nbytes)
        else:
            most = max(most, nbytes)
    return most + kept, kept + 2 * added_up


def computing_bytes(plan: TrainingPlan, work: Work | None) -> int:
    """Return the peak of activations and gradients where the model computes."""
    grads, added_up = gradient_bytes(plan)
    return max(activation_bytes(plan, work) + grads, added_up)


def filled_later(plan: TrainingPlan, config: Config, work: Work | None) -> list[int]:
    """Return the units whose optimizer states move to the device after the first step, in order."""
    tiering = config.tiering
    free_share = 1 - tiering.device_headroom
    used_bytes = plan.device_used_bytes
    spare_bytes = int((plan.machine.device_bytes or 0) * free_share) - used_bytes - computing_bytes(plan, work)
    if tiering.device_memory_bytes is not None:
        spare_bytes = min(spare_bytes, tiering.device_memory_bytes - used_bytes)
    return units_that_fit(plan.sizing.rules, plan.sizing.shards, plan.sizing.may_come, spare_bytes)


def once_filled(plan: TrainingPlan, config: Config, later: Collection[int]) -> TrainingPlan:
    """Return the plan after these units' states have moved to the device. The division of host memory stays."""
    if not later:
        return plan
    sizing = replace(plan.sizing, on_device=plan.sizing.on_device.union(later))
    tiles = tuple(
        (Memory.DEVICE,) * len(homes) if unit in later else homes for unit, homes in enumerate(plan.placement.tiles)
    )
    off_device = [home for homes in tiles for home in homes if home is not Memory.DEVICE]
    sizes = zip(sizing.shards.tile_sizes, off_device, strict=True)
    stored_bytes = sum(nbytes for nbytes, home in sizes if home is Memory.NVME)
    placement = replace(plan.placement, tiles=tiles, stored_states_bytes=stored_bytes)
    micro = config.gradient_accumulation_steps
    traffic = traffic_of(sizing, placement, plan.steps, micro, plan.sums_bytes)
    return replace(plan, sizing=sizing, placement=placement, traffic=traffic)


def states_on_device(plan: TrainingPlan, config: Config, work: Work | None) -> str:
    """Describe how much of the optimizer states stays on the device, and why; empty without a device."""
    sizing, machine = plan.sizing, plan.machine
    if not machine.discrete:
        return ""
    later = filled_later(plan, config, work)
    share = _share(plan, sizing.on_device.union(later))
    if later:
        first = f" ({_share(plan, sizing.on_device):.0%} from the start)" if sizing.on_device else ""
        return f"{share:.0%} stay on the device{first}: beside measured activations, after the first step"
    if sizing.on_device:
        return f"{share:.0%} stay on the device: {_asked(config)}"
    return f"none stay on the device: {_why_not(plan, config)}"


def _share(plan: TrainingPlan, units: Collection[int]) -> float:
    """Return the units' share of all optimizer states, in elements."""
    numels = plan.sizing.shards.numels
    return sum(numels[unit] for unit in units) / max(1, sum(numels))


def _asked(config: Config) -> str:
    """Name the key that puts states on the device from the start."""
    offload = config.zero.offload_optimizer
    if offload.device == "none":
        return "zero_optimization.offload_optimizer.device is none"
    return f"zero_optimization.offload_optimizer.ratio is {offload.ratio:g}"


def _why_not(plan: TrainingPlan, config: Config) -> str:
    if not config.tiering.fill_device:
        return "tiering.fill_device is false"
    if config.tiering.fill_device == "auto":
        exact = is_exact(plan.sizing.layout)
        reason = why_not_filled(config, plan.machine.ranks, discrete=plan.machine.discrete, exact=exact)
        if reason:
            return reason
    if not plan.sizing.may_come:
        return "parameters are evicted (zero_optimization.offload_param.device), so their states cannot stay"
    return "beside activations and tiering.device_headroom there is no room for those of a unit"
