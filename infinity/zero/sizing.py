"""What a model's states need, before anything is allocated: units, dtypes, tiles, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.kernels import Hyper
from infinity.optim.before_images import image_bytes
from infinity.optim.formats import SHARD_ALIGN, StateLayout, can_recover, can_recover_param, state_layout
from infinity.optim.pipeline import LEAST_SLOTS, MOST_SLOTS
from infinity.schedule import MemoryNeeds
from infinity.schedule.on_device import as_far_as_fits, promotion_order
from infinity.schedule.placement import (
    DeviceShare,
    ParamBytes,
    Rules,
    Shards,
    collecting_bytes,
    cut_into_tiles,
    device_share,
    host_needs,
    may_come,
    may_run_ahead,
    may_run_ahead_on_drives,
    param_bytes,
    rules_of,
)
from infinity.tiers import FlatSpec, Memory, StoredTensor
from infinity.zero.leaf_modules import called_leaves
from infinity.zero.partition import IN_FILES, PERSISTENT, Alignment, InFiles, Partition, Unit, make_partition
from infinity.zero.ranks import ALONE, Ranks
from infinity.zero.updates import UpdateSchedule

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# the exact one, which is the default, first
_ROUNDING = ("bf16", "int8")  # stochastically, as only the native kernels do
_FORMATS = {"fp32": ("fp32",), "bf16": ("split", "bf16", "int8"), "fp16": ("master",)}


@dataclass(frozen=True)
class Sizing:
    """Facts that follow from a model and a configuration.

    Attributes:
        rules: where fields live.
        there: units whose states, and gradients, are on the device.
        specs: flat parameter tensor of each unit.
        grad_dtype: dtype in which gradients are held.
        communication_dtype: dtype in which they travel between ranks.
        tile_numel: elements of a full tile of optimizer states.
        layer_major: all micro-batches of a step go through a block together.
        initial_numel: elements of the largest unit whose values are made, or exchanged, at `initialize`.
        embeddings: names of units that are one table.
    """

    partition: Partition
    layout: StateLayout
    schedule: UpdateSchedule
    rules: Rules
    there: frozenset[int]
    specs: tuple[FlatSpec, ...]
    grad_dtype: torch.dtype
    communication_dtype: torch.dtype
    tile_numel: int
    layer_major: bool
    initial_numel: int
    embeddings: frozenset[str]

    @cached_property
    def shards(self) -> Shards:
        """What this rank's optimizer has."""
        count = self.rules.sharding.count
        return Shards(
            numels=[unit.trainable_numel // count for unit in self.partition.units],
            tile_numel=self.tile_numel,
            tile_bytes=self.layout.tile_bytes,
            grad_dtype=self.grad_dtype,
            standing=self._standing(),
            there=self.there,
            blocks=[_block_of(spec, self.partition.blocks) for spec in self.specs],
        )

    def _standing(self) -> list[int]:
        """Units whose gradients arrive over the whole backward pass, or together with those of others."""
        if not self.layer_major:
            return [unit.index for unit in self.partition.units if unit.name == PERSISTENT]
        points = self.partition.hook_points
        users = Counter(unit for point in points for unit in point.units)
        blocks = self.partition.blocks
        inside = tuple(f"{name}." for name in blocks)
        alone = {
            unit
            for point in points
            if point.module_name in blocks or point.module_name.startswith(inside)
            for unit in point.units
        }
        return [unit.index for unit in self.partition.units if users[unit.index] > 1 or unit.index not in alone]

    @cached_property
    def may_come(self) -> list[int]:
        """Units whose states, and gradients, may come to the device later, in order."""
        return may_come(self.rules, self.specs, self.shards, first_to_go(self.partition))

    @cached_property
    def params(self) -> ParamBytes:
        """What parameters take of the memories."""
        return param_bytes(self.rules, self.specs)

    @property
    def largest(self) -> FlatSpec:
        """The unit with the most bytes."""
        return max(self.specs, key=lambda spec: spec.nbytes)

    @cached_property
    def device(self) -> DeviceShare:
        """What lies on the device beside parameters."""
        return device_share(self.rules, self.shards)

    @property
    def ahead_bytes(self) -> int:
        """Of units that are gathered ahead of their use, beyond the next one."""
        return self.rules.params.ahead_numel * self.largest.dtype.itemsize

    @property
    def collect_dtype(self) -> torch.dtype:
        """Of whole gradients of a unit, before they are reduced."""
        return self.layout.param_dtype if self.rules.grads.reduces_every_pass else self.grad_dtype

    @property
    def collecting_bytes(self) -> int:
        """Buffers for whole gradients on their way to the ranks' shards."""
        numels = [unit.trainable_numel for unit in self.partition.units]
        dtypes = self.collect_dtype, self.communication_dtype, self.grad_dtype
        return collecting_bytes(self.rules, numels, self.partition.shared, *dtypes)

    @property
    def tile_bytes(self) -> int:
        """A full tile of optimizer states."""
        return self.layout.tile_bytes(self.tile_numel)

    @property
    def keeps_steps(self) -> bool:
        """What a step has finished stays on the drives."""
        return self.rules.states.keeps_steps

    @property
    def has_slots(self) -> bool:
        """What lives on the drives has two slots."""
        return self.keeps_steps or self.schedule is UpdateSchedule.SPECULATIVE

    @property
    def writes_updates(self) -> bool:
        """What an update changes of units that live on the drives is always written: a step is to stay there, or an
        update ahead of the next one would leave what it replaces nowhere else."""
        told = _recovers(self.layout, self.grad_dtype) and can_recover_param(self.layout)
        return self.keeps_steps or (self.has_slots and not told)

    @property
    def images_bytes(self) -> int:
        """Before-images of all tiles; 0 where updates wait for the norm, or all that they change has two slots."""
        if self.schedule is not UpdateSchedule.SPECULATIVE or self.keeps_steps:
            return 0
        return sum(image_bytes(self.layout, numel) for numel in cut_into_tiles(self.shards.below, self.tile_numel))

    def host_needs(self) -> MemoryNeeds:
        """What host memory must and may hold."""
        return host_needs(
            self.rules,
            self.specs,
            self.shards,
            slots=(LEAST_SLOTS, MOST_SLOTS),
            collecting_bytes=self.collecting_bytes,
            # In float32: a unit that is made or exchanged, and a tile.
            initial_bytes=(self.initial_numel + self.tile_numel) * torch.float32.itemsize,
            images_bytes=self.images_bytes,
            embeddings=self.embeddings,
        )


def compute_dtype(config: Config) -> torch.dtype:
    """The dtype that the model computes in."""
    return _DTYPES[config.precision]


def is_exact(layout: StateLayout) -> bool:
    """The state format rounds nothing, so that a device can update it as the host does."""
    return layout.format not in _ROUNDING


def choose_schedule(config: Config, ranks: int = 1, *, discrete: bool = False) -> UpdateSchedule:
    """Resolve `tiering.update_schedule`.

    Args:
        ranks: how many train the model together.
        discrete: the compute device has memory of its own.

    Raises:
        ConfigError: `backward` was asked for together with clipping or fp16.
    """
    asked = config.tiering.update_schedule
    if asked == "auto":
        if not config.waits:
            return UpdateSchedule.BACKWARD
        ahead = may_run_ahead(config, ranks, discrete=discrete)
        return UpdateSchedule.SPECULATIVE if ahead else UpdateSchedule.DEFERRED
    schedule = UpdateSchedule(asked)
    if schedule is UpdateSchedule.BACKWARD and config.fp16 is not None:
        raise ConfigError(
            "tiering.update_schedule is backward but the loss is scaled for fp16: whether a step is skipped is known "
            "only after backward. Use deferred (or auto)"
        )
    if schedule is UpdateSchedule.BACKWARD and config.gradient_clipping > 0:
        raise ConfigError(
            f"tiering.update_schedule is backward but gradient_clipping is {config.gradient_clipping}: the norm is "
            "known only after backward. Use deferred (or auto), or set gradient_clipping to 0"
        )
    return schedule


def _unknown() -> int | None:
    return None


def size_up(
    model: nn.Module,
    groups: Mapping[str, int],
    config: Config,
    optimizer: str,
    *,
    discrete: bool,
    ranks: Ranks = ALONE,
    made: Collection[str] = (),
    in_files: Mapping[str, StoredTensor] | None = None,
    device_bytes: int = 0,
    drive_bytes: Callable[[], int | None] = _unknown,
) -> Sizing:
    """Lay out a model's states.

    Args:
        groups: parameter group of every parameter that is trained, by name.
        optimizer: name of its state layout.
        discrete: the compute device has memory of its own.
        ranks: who trains this model together.
        made: parameters whose values do not come with the model.
        in_files: frozen ones that are to stay where they are stored.
        device_bytes: what the device has free; 0 where that is not known.
        drive_bytes: what the drives have free; None where that is not known, and taken to be enough.

    Raises:
        ConfigError: the model has no parameters, the state format does not serve the precision, or parameters cannot
            stay in their files.
    """
    dtype = compute_dtype(config)
    layout = state_layout(_format(config), optimizer)
    schedule = choose_schedule(config, ranks.size, discrete=discrete)
    exact = is_exact(layout)
    rules = rules_of(
        config,
        ranks.rank,
        ranks.size,
        discrete=discrete,
        exact=exact,
        updates_in_backward=schedule is UpdateSchedule.BACKWARD,
    )
    problem = rules.in_place_problem()
    if in_files and problem:
        raise ConfigError(problem)
    partition = make_partition(
        model,
        groups,
        align=Alignment.of(layout),
        persistence_threshold=config.zero.param_persistence_threshold,
        offloaded=rules.params.home is not Memory.DEVICE,
        sharding=rules.sharding,
        watched=rules.grads.reduces,
        in_files=InFiles(in_files or {}, dtype),
        limit_numel=_limit_numel(config, dtype),
        leaves=called_leaves(model, config.zero.leaf_modules),
    )
    accumulates = config.accumulates
    there = _there(partition, rules.states.share_there)
    grad_dtype = _DTYPES[config.grad_accum_dtype] if accumulates else _held_dtype(config, rules)
    budget_bytes = min(device_bytes, config.tiering.device_memory_bytes or device_bytes)
    free_bytes = budget_bytes - dtype.itemsize * sum(unit.numel for unit in partition.units)
    numels = [unit.trainable_numel for unit in partition.units]
    bytes_per_param = layout.bytes_per_param + grad_dtype.itemsize  # of states and gradients
    stay = there | rules.first_to_stay(first_to_go(partition), numels, bytes_per_param, free_bytes)
    specs = tuple(_flat_spec(unit, dtype, rules, there=unit.index in stay) for unit in partition.units)
    if not accumulates and _recovers(layout, grad_dtype):
        ahead = rules.with_grads_recovered(params=can_recover_param(layout))
        below = sum(numel for unit, numel in enumerate(numels) if unit not in there)
        slot_bytes = layout.bytes_per_param * below // rules.sharding.count + rules.stored_param_bytes(specs)
        chosen = may_run_ahead_on_drives(config, ahead, ranks.size, slot_bytes=slot_bytes, drive_bytes=drive_bytes)
        schedule = UpdateSchedule.SPECULATIVE if chosen else schedule
        rules = ahead if schedule is UpdateSchedule.SPECULATIVE else rules
    return Sizing(
        partition=partition,
        layout=layout,
        schedule=schedule,
        rules=rules,
        there=there,
        specs=specs,
        grad_dtype=grad_dtype,
        communication_dtype=_DTYPES[config.communication_data_type],
        tile_numel=_tile_numel(partition, layout, max(config.tiering.tile_size_bytes, rules.states.least_tile_bytes)),
        layer_major=accumulates and config.tiering.accumulation == "layer",
        initial_numel=max(_initial_numel(unit, made, rules) for unit in partition.units),
        embeddings=_embeddings(model),
    )


def _limit_numel(config: Config, dtype: torch.dtype) -> int | None:
    """Elements of a unit above which blocks are cut; None for no limit."""
    nbytes = config.tiering.max_unit_size_bytes
    return None if nbytes is None else nbytes // dtype.itemsize


def _there(partition: Partition, share: float) -> frozenset[int]:
    """Units that have this share of all states, as near to it from below as whole units come."""
    numels = [unit.trainable_numel for unit in partition.units]
    order = promotion_order(numels, first_to_go(partition))
    return as_far_as_fits(order, numels, int(share * sum(numels)))


def first_to_go(partition: Partition) -> list[int]:
    """Units whose updates nothing hides: the first, and the small parameters outside of blocks."""
    return [unit.index for unit in partition.units if unit.index == 0 or unit.name == PERSISTENT]


def _held_dtype(config: Config, rules: Rules) -> torch.dtype:
    """Of the gradients of one backward pass: the model's, unless the ranks' sum has more digits."""
    made, summed = compute_dtype(config), _DTYPES[config.communication_data_type]
    return summed if rules.grads.reduces and summed.itemsize > made.itemsize else made


def _recovers(layout: StateLayout, grad_dtype: torch.dtype) -> bool:
    """Adam's updates without coupled decay tell gradients of this dtype."""
    rule = Hyper(lr=0.0, beta1=0.9, beta2=0.999, eps=0.0, weight_decay=0.0, step=1, decoupled=True)
    return (layout.first, layout.second) == (rule.first, rule.second) and can_recover(layout, rule, grad_dtype)


def _flat_spec(unit: Unit, dtype: torch.dtype, rules: Rules, *, there: bool) -> FlatSpec:
    home = rules.param_home(stays=unit.persistent, updated_there=there)
    moves, beside = home is not Memory.DEVICE, home is Memory.SHARD
    return FlatSpec(unit.name, unit.numel, unit.trainable_numel, dtype, moves, rules.sharding, unit.runs, beside)


def _initial_numel(unit: Unit, made: Collection[str], rules: Rules) -> int:
    """Elements of a unit whose values are in memory on their way to the tiers: all are that the ranks exchange."""
    if unit.runs:
        return 0  # they are read straight to where they are used
    return sum(slot.numel for slot in unit.slots if rules.grads.reduces or slot.name in made)


def _block_of(spec: FlatSpec, blocks: Collection[str]) -> str:
    """The block that a unit is part of; its own module if that is in none."""
    return next((module for module in spec.modules if module in blocks), spec.modules[-1])


def _embeddings(model: nn.Module) -> frozenset[str]:
    """Units of one large table, which cannot be divided."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    tables = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    return frozenset(name + end for name in tables for end in ("", IN_FILES))


def _format(config: Config) -> str:
    asked = config.tiering.state_format
    fitting = _FORMATS[config.precision]
    if asked == "auto":
        return fitting[0]
    if asked not in fitting:
        choices = ", ".join(fitting)
        raise ConfigError(f"tiering.state_format {asked!r} does not serve {config.precision}; use {choices} or auto")
    return asked


def _tile_numel(partition: Partition, layout: StateLayout, tile_bytes: int) -> int:
    largest = max(unit.trainable_numel for unit in partition.units) // partition.sharding.count
    numel = tile_bytes // layout.bytes_per_param // SHARD_ALIGN * SHARD_ALIGN
    return max(SHARD_ALIGN, min(numel, largest))
