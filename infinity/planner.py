"""What a model and a configuration will do, before anything is allocated: bytes of every tier, a plan of the step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from infinity.config import Config
from infinity.schedule import MemoryNeeds, MemorySplit, Plan, make_plan, split_memory
from infinity.tiers import cut_into_tiles, resident_tiles
from infinity.tiers.swap import ALIGN_BYTES
from infinity.zero.build import host_capacity
from infinity.zero.sizing import Sizing, host_needs, size_up


@dataclass(frozen=True)
class UnitFacts:
    """A unit, in the order of the model: `nbytes` of parameters, which come and go if `offloaded`."""

    name: str
    params: int
    nbytes: int
    offloaded: bool


@dataclass(frozen=True)
class TrainingPlan:
    """One step of training on one process whose compute device is the CPU.

    Attributes:
        units: what is fetched and evicted as a whole.
        state_format, update_schedule: as "auto" was resolved.
        needs: the least and the most that host memory can usefully hold.
        host_bytes: the budget, given or chosen.
        split: what the budget grants.
        nvme_bytes: space that will be reserved on the drives.
        steps: of one cycle in steady state, forward through the units in their order and backward in the reverse.
        read_bytes, write_bytes: disk traffic of one step.
    """

    units: tuple[UnitFacts, ...]
    state_format: str
    update_schedule: str
    needs: MemoryNeeds
    host_bytes: int
    split: MemorySplit
    nvme_bytes: int
    steps: Plan
    read_bytes: int
    write_bytes: int

    @property
    def params(self) -> int:
        return sum(unit.params for unit in self.units)

    def facts(self) -> dict[str, Any]:
        """As plain values, for JSON; the plan's steps by unit name."""
        names = [unit.name for unit in self.units]
        return {
            "params": self.params,
            "state_format": self.state_format,
            "update_schedule": self.update_schedule,
            "host_least_bytes": self.needs.least_bytes,
            "host_most_bytes": self.needs.most_bytes,
            "host_bytes": self.host_bytes,
            "split": asdict(self.split),
            "nvme_bytes": self.nvme_bytes,
            "read_bytes_per_step": self.read_bytes,
            "write_bytes_per_step": self.write_bytes,
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


def plan_training(model: nn.Module, config: Config) -> TrainingPlan:
    """Plan a model's training as `infinity.initialize` would lay it out on the CPU; its parameters may be on meta.

    Raises:
        CapacityError: the host budget is too small; the message has the number that is needed.
        ConfigError: a combination that cannot work.
    """
    groups = {name: 0 for name, param in model.named_parameters() if param.requires_grad and param.is_floating_point()}
    sizing = size_up(model, groups, config, "adamw", discrete=False)
    needs = host_needs(sizing)
    capacity = host_capacity(config, needs)
    split = split_memory(needs, capacity, "tiering.host_memory")
    moving = [unit for unit, spec in enumerate(sizing.specs) if spec.offloaded]
    plan = make_plan([*moving, *reversed(moving)], [spec.nbytes for spec in sizing.specs], split.params_bytes)
    read, written = _traffic(sizing, split, plan)
    return TrainingPlan(
        units=tuple(
            UnitFacts(spec.name, sum(slot.numel for slot in unit.slots), spec.nbytes, spec.offloaded)
            for unit, spec in zip(sizing.partition.units, sizing.specs, strict=True)
        ),
        state_format=sizing.layout.format,
        update_schedule=sizing.schedule.value,
        needs=needs,
        host_bytes=capacity,
        split=split,
        nvme_bytes=_stored_states(sizing, split)
        + (_params_space(sizing) if sizing.params_on_nvme else 0)
        + _spilled_grads(sizing, split),
        steps=plan,
        read_bytes=read,
        write_bytes=written,
    )


def _stored_states(sizing: Sizing, split: MemorySplit) -> int:
    """Bytes of optimizer states that live on the drives."""
    if not sizing.states_on_nvme:
        return 0
    numels, tile_bytes = sizing.shard_numels, sizing.layout.tile_bytes
    sizes = [tile_bytes(numel) for numel in cut_into_tiles(numels, sizing.tile_numel)]
    stay = resident_tiles(numels, sizing.tile_numel, tile_bytes, split.states_bytes)
    return sum(size for size, stays in zip(sizes, stay, strict=True) if not stays)


def _params_space(sizing: Sizing) -> int:
    return sum(-(-spec.nbytes // ALIGN_BYTES) * ALIGN_BYTES for spec in sizing.specs if spec.offloaded)


def _spilled_grads(sizing: Sizing, split: MemorySplit) -> int:
    """Bytes of gradients that go to the drives and come back."""
    return sum(sizing.grad_sizes[unit] for unit in sizing.spilled_units(split.grads_bytes))


def _traffic(sizing: Sizing, split: MemorySplit, plan: Plan) -> tuple[int, int]:
    """(read, written) in a step: states and gradients that do not stay both ways, parameters as the plan says."""
    states = _stored_states(sizing, split) + _spilled_grads(sizing, split)
    if not sizing.params_on_nvme:
        return states, states
    updated = sum(sizing.specs[unit].nbytes for unit in plan.evicted)
    return states + plan.fetched_bytes, states + updated
