"""The sizes of a model's states, before anything is allocated: units, dtypes, tiles, bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from infinity.config import Config, Precision
from infinity.errors import ConfigError
from infinity.kernels import Hyper
from infinity.optim.formats import SHARD_ALIGN, can_reconstruct, can_reconstruct_param, formats_of, state_layout
from infinity.optim.pipeline import LEAST_SLOTS, MOST_SLOTS
from infinity.optim.undo_log import image_bytes
from infinity.schedule import MemoryNeeds
from infinity.schedule.needs import (
    DeviceShare,
    ParamBytes,
    Shards,
    collecting_bytes,
    cut_into_tiles,
    device_share,
    host_needs,
    may_come,
    param_bytes,
)
from infinity.schedule.on_device import as_far_as_fits, promotion_order
from infinity.schedule.rules import Rules, may_speculate, may_speculate_on_drives, rules_of
from infinity.tiers import FlatSpec, Memory, StoredTensor
from infinity.tiers.state_layout import StateLayout
from infinity.zero.leaf_modules import called_leaves
from infinity.zero.partition import IN_FILES, PERSISTENT, Alignment, Partition, UnitLayout, make_partition
from infinity.zero.ranks import ALONE, Ranks
from infinity.zero.updates import UpdateSchedule

DTYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sizing:
    """Facts that follow from a model and a configuration.

    Attributes:
        rules: the placement of fields.
        on_device: units whose states and gradients are on the device.
        specs: flat parameter tensor of each unit.
        grad_dtype: dtype in which gradients wait for their update.
        communication_dtype: dtype in which they are exchanged between ranks.
        tile_numel: elements of a full tile of optimizer states.
        layer_major: all micro-batches of a step go through a block together.
        initial_numel: elements of the largest unit whose values are made or exchanged at `initialize`.
        embeddings: names of units that are one table.
    """

    partition: Partition
    layout: StateLayout
    schedule: UpdateSchedule
    rules: Rules
    on_device: frozenset[int]
    specs: tuple[FlatSpec, ...]
    grad_dtype: torch.dtype
    communication_dtype: torch.dtype
    tile_numel: int
    layer_major: bool
    initial_numel: int
    embeddings: frozenset[str]

    @cached_property
    def shards(self) -> Shards:
        count = self.rules.sharding.count
        return Shards(
            numels=[unit.trainable_numel // count for unit in self.partition.units],
            tile_numel=self.tile_numel,
            tile_bytes=self.layout.tile_bytes,
            grad_dtype=self.grad_dtype,
            standing=self._standing(),
            on_device=self.on_device,
            blocks=[_block_of(spec, self.partition.blocks) for spec in self.specs],
        )

    def _standing(self) -> list[int]:
        """Return units whose gradients arrive over the whole backward pass, or together with other units' gradients."""
        if not self.layer_major:
            return [unit.index for unit in self.partition.units if unit.name == PERSISTENT]
        in_blocks = {unit for point in self.partition.hook_points if point.in_block for unit in point.units}
        alone = in_blocks - self.partition.shared
        return [unit.index for unit in self.partition.units if unit.index not in alone]

    @cached_property
    def may_come(self) -> list[int]:
        """Units whose states and gradients may move to the device later, in order."""
        return may_come(self.rules, self.specs, self.shards, first_to_go(self.partition))

    @cached_property
    def params(self) -> ParamBytes:
        """Bytes of parameters in each memory."""
        return param_bytes(self.rules, self.specs)

    @property
    def largest(self) -> FlatSpec:
        return max(self.specs, key=lambda spec: spec.nbytes)

    @cached_property
    def device(self) -> DeviceShare:
        """Bytes on the device beside parameters."""
        return device_share(self.rules, self.shards)

    @property
    def ahead_bytes(self) -> int:
        """Memory for units that are gathered early, beyond the next one."""
        return self.rules.params.ahead_numel * self.largest.dtype.itemsize

    @property
    def collect_dtype(self) -> torch.dtype:
        """Dtype of a unit's full gradients, before they are reduced."""
        return self.layout.param_dtype if self.rules.grads.reduces_every_pass else self.grad_dtype

    @property
    def collecting_bytes(self) -> int:
        """Buffers for full gradients on their way to the ranks' shards."""
        numels = [unit.trainable_numel for unit in self.partition.units]
        dtypes = self.collect_dtype, self.communication_dtype, self.grad_dtype
        return collecting_bytes(self.rules, numels, self.partition.shared, *dtypes)

    @property
    def tile_bytes(self) -> int:
        return self.layout.tile_bytes(self.tile_numel)

    @property
    def keeps_steps(self) -> bool:
        return self.rules.states.keeps_steps

    @property
    def is_double_buffered(self) -> bool:
        """Whether fields on the drives are double-buffered."""
        return self.keeps_steps or self.schedule is UpdateSchedule.SPECULATIVE

    @property
    def writes_updates(self) -> bool:
        """Whether updates of units on the drives are always written: for crash consistency, or because a rollback needs
        the old parameters in the other slot."""
        reconstructs = _can_reconstruct_grads(self.layout, self.grad_dtype) and can_reconstruct_param(self.layout)
        return self.keeps_steps or (self.is_double_buffered and not reconstructs)

    @property
    def images_bytes(self) -> int:
        """Size of an undo log for all tiles; 0 if updates are not speculative, or all fields are double-buffered."""
        if self.schedule is not UpdateSchedule.SPECULATIVE or self.keeps_steps:
            return 0
        return sum(image_bytes(self.layout, numel) for numel in cut_into_tiles(self.shards.off_device, self.tile_numel))

    def host_needs(self) -> MemoryNeeds:
        """Return the minimum and maximum use of host memory."""
        return host_needs(
            self.rules,
            self.specs,
            self.shards,
            slots=(LEAST_SLOTS, MOST_SLOTS),
            collecting_bytes=self.collecting_bytes,
            # in float32: a unit that is made or exchanged, and a tile
            initial_bytes=(self.initial_numel + self.tile_numel) * torch.float32.itemsize,
            images_bytes=self.images_bytes,
            embeddings=self.embeddings,
        )


def compute_dtype(config: Config) -> torch.dtype:
    return DTYPES[config.precision]


def is_exact(layout: StateLayout) -> bool:
    """Whether the state format does not round. A device updates no format that rounds: only the native kernels can."""
    return layout.format == formats_of(layout.param_dtype)[0]


def choose_schedule(config: Config, ranks: int = 1, *, discrete: bool = False) -> UpdateSchedule:
    """Resolve `tiering.update_schedule`.

    Args:
        ranks: number of ranks that train the model together.
        discrete: the compute device has memory of its own.

    Raises:
        ConfigError: `backward` was asked for together with clipping or fp16.
    """
    asked = config.tiering.update_schedule
    if asked == "auto":
        if not config.waits:
            return UpdateSchedule.BACKWARD
        speculates = may_speculate(config, ranks, discrete=discrete)
        return UpdateSchedule.SPECULATIVE if speculates else UpdateSchedule.DEFERRED
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
    drive_bytes: Callable[[], int | None] = lambda: None,
) -> Sizing:
    """Lay out a model's states.

    Args:
        groups: parameter group of every trained parameter, by name.
        optimizer: name of its state layout.
        discrete: the compute device has memory of its own.
        ranks: the ranks that train this model together.
        made: parameters whose values do not come with the model.
        in_files: frozen parameters that stay in their files.
        device_bytes: free device memory; 0 if unknown.
        drive_bytes: free space on the drives; None if unknown, and taken to be enough.

    Raises:
        ConfigError: the model has no parameters, the state format does not fit the precision, parameters cannot stay in
            their files, two keys contradict each other, or the model has no blocks for layer-major micro-batches.
    """
    dtype = compute_dtype(config)
    layout = state_layout(state_format(config), optimizer)
    schedule = choose_schedule(config, ranks.size, discrete=discrete)
    rules = rules_of(
        config,
        ranks.rank,
        ranks.size,
        discrete=discrete,
        exact=is_exact(layout),
        updates_in_backward=schedule is UpdateSchedule.BACKWARD,
    )
    problem = rules.in_place_problem()
    if in_files and problem:
        raise ConfigError(problem)
    limit_bytes = config.tiering.max_unit_size_bytes
    partition = make_partition(
        model,
        groups,
        align=Alignment.of(layout),
        persistence_threshold=config.zero.param_persistence_threshold,
        offloaded=rules.params.home is not Memory.DEVICE,
        sharding=rules.sharding,
        watched=rules.grads.reduces,
        in_files=in_files,
        dtype=dtype,
        limit_numel=None if limit_bytes is None else limit_bytes // dtype.itemsize,
        leaves=called_leaves(model, config.zero.leaf_modules),
    )
    accumulates = config.accumulates
    layer_major = accumulates and config.tiering.accumulation == "layer"
    if layer_major and not partition.blocks:
        raise ConfigError(
            f'tiering.accumulation is "layer" but the model ({type(model).__name__}) is no sequence of blocks (in an '
            'nn.ModuleList or nn.Sequential, or named by _no_split_modules): set tiering.accumulation to "micro_batch"'
        )
    numels = [unit.trainable_numel for unit in partition.units]
    first = first_to_go(partition)
    # at most this share of all states, as close to it as whole units allow
    on_device_numel = int(rules.states.share_on_device * sum(numels))
    on_device = frozenset(as_far_as_fits(promotion_order(numels, first), numels, on_device_numel))
    grad_dtype = DTYPES[config.grad_accum_dtype] if accumulates else _pass_dtype(config, rules)
    budget_bytes = min(device_bytes, config.tiering.device_memory_bytes or device_bytes)
    free_bytes = budget_bytes - dtype.itemsize * sum(unit.numel for unit in partition.units)
    bytes_per_param = layout.bytes_per_param + grad_dtype.itemsize  # of states and gradients
    stay = on_device | rules.first_to_stay(first, numels, bytes_per_param, free_bytes)
    specs = tuple(_flat_spec(unit, dtype, rules, on_device=unit.index in stay) for unit in partition.units)
    if not accumulates and _can_reconstruct_grads(layout, grad_dtype):
        assumed = rules.with_reconstruction(params=can_reconstruct_param(layout))
        off_device = sum(numel for unit, numel in enumerate(numels) if unit not in on_device)
        slot_bytes = layout.bytes_per_param * off_device // rules.sharding.count + rules.stored_param_bytes(specs)
        chosen = may_speculate_on_drives(config, assumed, ranks.size, slot_bytes=slot_bytes, drive_bytes=drive_bytes)
        schedule = UpdateSchedule.SPECULATIVE if chosen else schedule
        rules = assumed if schedule is UpdateSchedule.SPECULATIVE else rules
    return Sizing(
        partition=partition,
        layout=layout,
        schedule=schedule,
        rules=rules,
        on_device=on_device,
        specs=specs,
        grad_dtype=grad_dtype,
        communication_dtype=DTYPES[config.communication_data_type],
        tile_numel=_tile_numel(partition, layout, max(config.tiering.tile_size_bytes, rules.states.least_tile_bytes)),
        layer_major=layer_major,
        initial_numel=max(_initial_numel(unit, made, rules) for unit in partition.units),
        embeddings=_embeddings(model),
    )


def first_to_go(partition: Partition) -> list[int]:
    """Return units whose updates nothing hides: the first, and the small parameters outside of blocks."""
    return [unit.index for unit in partition.units if unit.index == 0 or unit.name == PERSISTENT]


def _pass_dtype(config: Config, rules: Rules) -> torch.dtype:
    """Return the dtype of one pass's gradients: the model's, unless the ranks' sum is more precise."""
    made, summed = compute_dtype(config), DTYPES[config.communication_data_type]
    return summed if rules.grads.reduces and summed.itemsize > made.itemsize else made


def _can_reconstruct_grads(layout: StateLayout, grad_dtype: torch.dtype) -> bool:
    """Whether gradients of this dtype can be reconstructed after Adam's updates without coupled weight decay."""
    rule = Hyper(lr=0.0, beta1=0.9, beta2=0.999, eps=0.0, weight_decay=0.0, step=1, decoupled=True)
    return (layout.first, layout.second) == (rule.first, rule.second) and can_reconstruct(layout, rule, grad_dtype)


def _flat_spec(unit: UnitLayout, dtype: torch.dtype, rules: Rules, *, on_device: bool) -> FlatSpec:
    home = rules.param_home(stays=unit.persistent, updated_on_device=on_device)
    moves, beside = home is not Memory.DEVICE, home is Memory.SHARD
    return FlatSpec(unit.name, unit.numel, unit.trainable_numel, dtype, moves, rules.sharding, unit.runs, beside)


def _initial_numel(unit: UnitLayout, made: Collection[str], rules: Rules) -> int:
    """Return the elements of a unit that pass through memory at `initialize`: all of them if ranks exchange them."""
    if unit.runs:
        return 0  # they are read straight to where they are used
    return sum(info.numel for info in unit.params if rules.grads.reduces or info.name in made)


def _block_of(spec: FlatSpec, blocks: Collection[str]) -> str:
    """Return the block that contains the unit, or its own module if none does."""
    return next((module for module in spec.modules if module in blocks), spec.modules[-1])


def _embeddings(model: nn.Module) -> frozenset[str]:
    """Return the names of units of one large table, which cannot be divided."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    tables = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    return frozenset(name + end for name in tables for end in ("", IN_FILES))


def state_format(config: Config) -> str:
    """Return the name of the state format. Raise ConfigError if the configured one does not fit the precision."""
    asked = config.tiering.state_format
    fitting = formats_of(compute_dtype(config))
    if asked == "auto":
        return fitting[0]
    if asked not in fitting:
        choices = ", ".join(fitting)
        raise ConfigError(f"tiering.state_format {asked!r} does not fit {config.precision}; use {choices} or auto")
    return asked


def _tile_numel(partition: Partition, layout: StateLayout, tile_bytes: int) -> int:
    largest = max(unit.trainable_numel for unit in partition.units) // partition.sharding.count
    numel = tile_bytes // layout.bytes_per_param // SHARD_ALIGN * SHARD_ALIGN
    return max(SHARD_ALIGN, min(numel, largest))
