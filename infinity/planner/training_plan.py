"""Plan a model's training, before anything is allocated: bytes of every tier, and the actions of a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import nn

from infinity.config import Config
from infinity.memory import Ledger, aligned
from infinity.optim.lr_schedules import checked_kind
from infinity.planner.traffic import Traffic, traffic_of
from infinity.schedule import MemoryNeeds, MemorySplit, Plan, make_plan, split_memory
from infinity.schedule.placement import Placement, place
from infinity.tiers import Memory
from infinity.zero.budgets import auto_bytes, cut_to_fit, device_budgets, fits, host_capacity
from infinity.zero.model_parts import has_numbers
from infinity.zero.ranks import Ranks
from infinity.zero.sizing import Sizing, size_up


@dataclass(frozen=True)
class Machine:
    """The machines for a training.

    Attributes:
        ranks: processes that train together, one a device; `neighbours` of them share a machine.
        device_bytes: memory of each compute device; None if that is the CPU.
        host_bytes: memory of a machine; None for this one's.
        drive_bytes: free space on its drives; None if unknown, and taken to be enough.
    """

    ranks: int = 1
    neighbours: int = 1
    device_bytes: int | None = None
    host_bytes: int | None = None
    drive_bytes: int | None = None

    @property
    def discrete(self) -> bool:
        """Whether the compute device has memory of its own."""
        return self.device_bytes is not None


@dataclass(frozen=True)
class UnitFacts:
    """A unit, in the order of the model: `nbytes` of parameters, which are fetched and evicted if `offloaded`."""

    name: str
    params: int
    nbytes: int
    offloaded: bool


class Use(NamedTuple):
    """A module that uses a unit, in a block or outside of all of them."""

    unit: int
    in_block: bool


@dataclass(frozen=True)
class TrainingPlan:
    """One step of training on one rank, with the rank's budgets and bytes.

    Attributes:
        machine: where it trains.
        sizing: facts that follow from model and configuration.
        units: fetched and evicted as a whole.
        needs: the minimum and the useful maximum of host memory.
        host_bytes: the budget, given or chosen.
        split: the division of the budget.
        host_used_bytes: the part of the budget that may be used.
        device_used_bytes: on a device with memory of its own: parameters that are computed on, and gradients between
            ranks; 0 without one.
        nvme_bytes: space that will be reserved on the drives.
        placement: the home of every field.
        params_bytes: memory for units that are fetched and evicted, where they are computed on.
        sums_bytes: memory for sums of gradients over micro-batches, where they are computed.
        uses: units in the order of a forward pass, one entry for each module that uses one; backward is the reverse.
        steps: one cycle in steady state, over the uses of units that are fetched and evicted.
        traffic: bytes that move in a step.
    """

    machine: Machine
    sizing: Sizing
    units: tuple[UnitFacts, ...]
    needs: MemoryNeeds
    host_bytes: int
    split: MemorySplit
    host_used_bytes: int
    device_used_bytes: int
    nvme_bytes: int
    placement: Placement
    params_bytes: int
    sums_bytes: int
    uses: tuple[Use, ...]
    steps: Plan
    traffic: Traffic

    @property
    def params(self) -> int:
        return sum(unit.params for unit in self.units)

    @property
    def updated_on_device(self) -> list[str]:
        return [unit.name for index, unit in enumerate(self.units) if index in self.sizing.on_device]

    def facts(self) -> dict[str, Any]:
        """Return plain values for JSON; the plan's steps by unit name."""
        names = [unit.name for unit in self.units]
        return {
            "params": self.params,
            "ranks": self.machine.ranks,
            "state_format": self.sizing.layout.format,
            "update_schedule": self.sizing.schedule.value,
            "host_least_bytes": self.needs.least_bytes,
            "host_most_bytes": self.needs.most_bytes,
            "host_bytes": self.host_bytes,
            "host_used_bytes": self.host_used_bytes,
            "device_used_bytes": self.device_used_bytes,
            "states_on_device_bytes": self.sizing.shards.states_bytes(self.sizing.on_device),
            "updated_on_device": self.updated_on_device,
            "split": asdict(self.split),
            "nvme_bytes": self.nvme_bytes,
            "read_bytes_per_step": self.traffic.read_bytes,
            "write_bytes_per_step": self.traffic.write_bytes,
            "gathered_bytes_per_step": self.traffic.gathered,
            "reduced_bytes_per_step": self.traffic.reduced,
            "averaged_bytes_per_step": self.traffic.averaged,
            "units": [asdict(unit) for unit in self.units],
            "steps": [
                {
                    "use": names[step.unit],
                    "fetch_on_the_spot": step.before is not None,
                    "evict_first": [names[unit] for unit in step.before or ()],
                    "then": [[action, names[unit]] for action, unit in step.actions],
                }
                for step in self.steps.steps
            ],
        }


def plan_training(model: nn.Module, config: Config, machine: Machine = Machine()) -> TrainingPlan:
    """Plan a model's training as `infinity.initialize` would lay it out. Its parameters may be on meta.

    Raises:
        CapacityError: a memory budget is too small; the message has the required number.
        ConfigError: a combination that cannot work, as `infinity.initialize` refuses it.
    """

    def is_enough(sizing: Sizing) -> bool:
        host_bytes = _host_capacity(config, sizing.host_needs(), machine)
        return fits(sizing, config, host_bytes, machine.device_bytes or 0)

    config, sizing, cut_bytes = cut_to_fit(config, lambda config: _sizing(model, config, machine), is_enough)
    needs = sizing.host_needs()
    capacity = _host_capacity(config, needs, machine)
    split = split_memory(needs, capacity, cut_bytes)
    placement = place(sizing.rules, sizing.specs, sizing.shards, split)
    there = device_budgets(sizing, config, split, Ledger("host memory", capacity), machine.device_bytes or 0)
    beside = needs.collecting_bytes + needs.activations_bytes + needs.initial_extra_bytes(split)
    uses = tuple(Use(unit, point.in_block) for point in sizing.partition.hook_points for unit in point.units)
    moving = [unit for unit, _ in uses if sizing.specs[unit].offloaded]
    sizes = [spec.nbytes for spec in sizing.specs]
    steps = make_plan([*moving, *reversed(moving)], sizes, there.params.capacity_bytes, sizing.ahead_bytes)
    return TrainingPlan(
        machine=machine,
        sizing=sizing,
        units=tuple(
            UnitFacts(spec.name, sum(info.numel for info in unit.params), spec.nbytes, spec.offloaded)
            for unit, spec in zip(sizing.partition.units, sizing.specs, strict=True)
        ),
        needs=needs,
        host_bytes=capacity,
        split=split,
        host_used_bytes=needs.always_bytes + split.granted_bytes + beside,
        device_used_bytes=there.ledger.shares_bytes,
        nvme_bytes=_nvme_bytes(sizing, placement),
        placement=placement,
        params_bytes=there.params.capacity_bytes,
        sums_bytes=there.sums.capacity_bytes,
        uses=uses,
        steps=steps,
        traffic=traffic_of(sizing, placement, steps, config.gradient_accumulation_steps, there.sums.capacity_bytes),
    )


def _sizing(model: nn.Module, config: Config, machine: Machine) -> Sizing:
    groups = {name: 0 for name, param in model.named_parameters() if param.requires_grad and has_numbers(param)}
    made = {name for name, param in model.named_parameters() if param.is_meta}
    ranks = Ranks(size=machine.ranks, neighbours=machine.neighbours)
    return size_up(
        model,
        groups,
        config,
        checked_kind(config).layout,
        discrete=machine.discrete,
        ranks=ranks,
        made=made,
        device_bytes=machine.device_bytes or 0,
        drive_bytes=lambda: machine.drive_bytes,
    )


def _host_capacity(config: Config, needs: MemoryNeeds, machine: Machine) -> int:
    if machine.host_bytes is None or config.tiering.host_memory_bytes is not None:
        return host_capacity(config, needs, Ranks(neighbours=machine.neighbours))
    return min(needs.most_bytes, auto_bytes(machine.host_bytes, machine.neighbours))


def _nvme_bytes(sizing: Sizing, placement: Placement) -> int:
    """Return the bytes of states, parameters and gradients on the drives. If every step is kept, all states and
    parameters have a place there, wherever their home is."""
    spilled = sum(sizing.shards.grad_sizes[unit] for unit in placement.grad_homes.spilled)
    if sizing.keeps_steps:
        lasting = [*sizing.shards.tile_sizes, *(spec.shard_nbytes for spec in sizing.specs if not spec.runs)]
    else:
        homes = zip(sizing.specs, placement.params, strict=True)
        stored = [spec.shard_nbytes for spec, home in homes if home is Memory.NVME]
        lasting = [placement.stored_states_bytes, *stored]
    return spilled + (2 if sizing.is_double_buffered else 1) * sum(map(aligned, lasting))
