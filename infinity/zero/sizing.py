"""What a model's states need, before anything is allocated: units, dtypes, tiles, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.optim.formats import SHARD_ALIGN, StateLayout, state_layout
from infinity.optim.pipeline import LEAST_SLOTS, MOST_SLOTS
from infinity.schedule import MemoryNeeds
from infinity.tiers import WHOLE, FlatSpec, Sharding, choose_spilled, cut_into_tiles
from infinity.zero.partition import PERSISTENT, Alignment, Partition, make_partition
from infinity.zero.ranks import ALONE, Ranks
from infinity.zero.updates import UpdateSchedule

_GRADS_IN_FLIGHT = 3  # units whose gradients the `backward` schedule may hold at once
# Of all gradients: those whose updates may be left to the next forward pass, under which the drive would idle.
_GRADS_LEFT_SHARE = 4
_STAGING_UNITS = 3  # of a discrete device: one uploaded, one read, one updated

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# the exact one, which is the default, first
_FORMATS = {"fp32": ("fp32",), "bf16": ("split", "bf16", "int8"), "fp16": ("master",)}


@dataclass(frozen=True)
class Sizing:
    """Facts that follow from a model and a configuration.

    Attributes:
        specs: flat parameter tensor of each unit.
        grad_dtype: dtype in which gradients are held.
        tile_numel: elements of a full tile of optimizer states.
        params_on_nvme, states_on_nvme: NVMe is home to parameters, to optimizer states.
        discrete: the compute device has memory of its own.
        accumulates: gradients are summed over several backward passes.
        layer_major: all micro-batches of a step go through a block together.
        settles: a step is over when all parameters are updated, and show it; else updates go on under the next forward.
        ranks: how many processes train the model together.
        embeddings: names of modules that are one table.
    """

    partition: Partition
    layout: StateLayout
    schedule: UpdateSchedule
    specs: tuple[FlatSpec, ...]
    grad_dtype: torch.dtype
    tile_numel: int
    params_on_nvme: bool
    states_on_nvme: bool
    discrete: bool
    accumulates: bool
    layer_major: bool = False
    settles: bool = False
    ranks: int = 1
    embeddings: frozenset[str] = frozenset()

    @property
    def shard_numels(self) -> list[int]:
        """Elements of each unit that this rank's optimizer has."""
        return [unit.trainable_numel // self.partition.sharding.count for unit in self.partition.units]

    @property
    def standing(self) -> list[int]:
        """Units whose gradients arrive over the whole backward pass, or together with those of others."""
        if not self.layer_major:
            return [unit.index for unit in self.partition.units if unit.name == PERSISTENT]
        points = self.partition.hook_points
        users = Counter(unit for point in points for unit in point.units)
        alone = {unit for point in points if point.module_name in self.partition.blocks for unit in point.units}
        return [unit.index for unit in self.partition.units if users[unit.index] > 1 or unit.index not in alone]

    @property
    def holds_all_gradients(self) -> bool:
        """There is room for the gradients of all units at once."""
        summed = self.accumulates and not self.layer_major
        return summed or self.schedule is not UpdateSchedule.BACKWARD

    @property
    def spills_gradients(self) -> bool:
        """Gradients that are to be held but do not fit go to NVMe."""
        return self.holds_all_gradients and (self.params_on_nvme or self.states_on_nvme)

    @property
    def grad_sizes(self) -> list[int]:
        """Bytes of each unit's gradients, of those that this rank's optimizer has."""
        return [numel * self.grad_dtype.itemsize for numel in self.shard_numels]

    def spilled_units(self, grads_bytes: int) -> tuple[int, ...]:
        """Units whose gradients go to NVMe when so much host memory is there for gradients."""
        if not self.spills_gradients or sum(self.grad_sizes) <= grads_bytes:
            return ()
        return choose_spilled(self.grad_sizes, self.standing, grads_bytes).spilled

    @property
    def moving_bytes(self) -> list[int]:
        """Sizes of the units whose parameters come and go, largest first."""
        return sorted((spec.nbytes for spec in self.specs if spec.offloaded), reverse=True)

    @property
    def staying_bytes(self) -> int:
        """Parameters that are always on the compute device."""
        return sum(spec.nbytes for spec in self.specs if not spec.offloaded)

    @property
    def largest(self) -> FlatSpec:
        """The unit with the most bytes."""
        return max(self.specs, key=lambda spec: spec.nbytes)

    @property
    def working_set_bytes(self) -> int:
        """Least room for parameters that come and go: one unit in use, one on its way."""
        return sum(self.moving_bytes[:2])

    @property
    def home_bytes(self) -> int:
        """This rank's shards of the units whose parameters come and go."""
        return sum(spec.shard_nbytes for spec in self.specs if spec.offloaded)

    @property
    def gathered_bytes(self) -> int:
        """Room for whole units where the ranks' shards are apart from them: one in use, one to come, one to go."""
        return sum(self.moving_bytes[:3])

    @property
    def staging_bytes(self) -> int:
        """Host memory for images of units on their way to and from a discrete device."""
        return _STAGING_UNITS * max(spec.shard_nbytes for spec in self.specs) if self.discrete else 0

    @property
    def tile_bytes(self) -> int:
        """A full tile of optimizer states."""
        return self.layout.tile_bytes(self.tile_numel)

    def ring_bytes(self, slots: int) -> int:
        """Room for so many of the optimizer pipeline's tiles in flight, or for as many as there are on NVMe."""
        if not self.states_on_nvme:
            return 0
        tiles = islice(cut_into_tiles(self.shard_numels, self.tile_numel), slots)
        return sum(1 for _ in tiles) * self.tile_bytes

    @property
    def states_bytes(self) -> int:
        """All optimizer states."""
        return sum(self.layout.tile_bytes(numel) for numel in cut_into_tiles(self.shard_numels, self.tile_numel))


def compute_dtype(config: Config) -> torch.dtype:
    """The dtype that the model computes in."""
    return _DTYPES[config.precision]


def communication_dtype(config: Config) -> torch.dtype:
    """The dtype in which gradients travel between ranks."""
    return _DTYPES[config.communication_data_type]


def sharding_of(config: Config, ranks: Ranks) -> Sharding:
    """What each rank has a slice of: nothing at stage 0, else every unit's states."""
    return WHOLE if config.zero.stage == 0 else Sharding(ranks.rank, ranks.size)


def choose_schedule(config: Config) -> UpdateSchedule:
    """Resolve `tiering.update_schedule`.

    Raises:
        ConfigError: `backward` was asked for together with clipping or fp16.
    """
    asked = config.tiering.update_schedule
    if asked == "auto":
        waits = config.gradient_clipping > 0 or config.precision == "fp16"
        return UpdateSchedule.DEFERRED if waits else UpdateSchedule.BACKWARD
    schedule = UpdateSchedule(asked)
    if schedule is UpdateSchedule.BACKWARD and config.precision == "fp16":
        raise ConfigError(
            "tiering.update_schedule is backward but fp16 is enabled: whether a step is skipped is known only after "
            "backward. Use deferred (or auto)"
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
) -> Sizing:
    """Lay out a model's states.

    Args:
        groups: parameter group of every parameter that is trained, by name.
        optimizer: name of its state layout.
        discrete: the compute device has memory of its own, or the ranks' shards are apart from what is gathered.
        ranks: who trains this model together.

    Raises:
        ConfigError: the model has no parameters, or the state format does not serve the precision.
    """
    home = config.zero.offload_param.device
    dtype = compute_dtype(config)
    layout = state_layout(_format(config), optimizer)
    sharding = sharding_of(config, ranks)
    shards_params = config.zero.stage == 3 and sharding.count > 1
    partition = make_partition(
        model,
        groups,
        align=Alignment(SHARD_ALIGN, max(Alignment.slot, *(field.block for field in layout.fields))),
        persistence_threshold=config.zero.param_persistence_threshold,
        offloaded=shards_params or (home != "none" if discrete else home == "nvme"),
        sharding=sharding,
        watched=ranks.size > 1,
    )
    accumulates = config.gradient_accumulation_steps > 1
    return Sizing(
        partition=partition,
        layout=layout,
        schedule=choose_schedule(config),
        specs=tuple(
            FlatSpec(u.name, u.numel, u.trainable_numel, dtype, not u.persistent, sharding) for u in partition.units
        ),
        grad_dtype=_DTYPES[config.grad_accum_dtype] if accumulates else dtype,
        tile_numel=_tile_numel(partition, layout, config.tiering.tile_size_bytes),
        params_on_nvme=home == "nvme",
        states_on_nvme=config.zero.offload_optimizer.device == "nvme",
        discrete=discrete,
        accumulates=accumulates,
        layer_major=accumulates and config.tiering.accumulation == "layer",
        # Users read and write parameters between steps at these stages, as in torch.
        settles=config.zero.stage < 3 and config.tiering.update_schedule == "auto",
        ranks=ranks.size,
        embeddings=_embeddings(model),
    )


def _embeddings(model: nn.Module) -> frozenset[str]:
    """Modules of one large table, which cannot be divided."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return frozenset(name for name, module in model.named_modules() if isinstance(module, kinds))


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


def host_needs(sizing: Sizing) -> MemoryNeeds:
    """What host memory must and may hold."""
    grads = sorted(sizing.grad_sizes, reverse=True)
    grads_min = grads_most = sum(grads)
    standing = sum(sizing.grad_sizes[unit] for unit in sizing.standing)
    if sizing.spills_gradients or not sizing.holds_all_gradients:
        grads_min = min(sum(grads), grads[0] + standing)
    grads_flowing = grads_min
    if not sizing.holds_all_gradients:
        left = sum(grads) // _GRADS_LEFT_SHARE if sizing.states_on_nvme else 0
        grads_flowing = min(sum(grads), sum(grads[:2]) + standing)
        grads_most = min(sum(grads), sum(grads[:_GRADS_IN_FLIGHT]) + standing + left)
    states = sizing.states_bytes
    if sizing.discrete:
        always = 0
        params_min = sizing.staging_bytes + (0 if sizing.params_on_nvme else sizing.home_bytes)
        params_most = sizing.staging_bytes + sizing.home_bytes
    else:
        always = sizing.staying_bytes
        params_min, params_most = sizing.working_set_bytes, sum(sizing.moving_bytes)
    return MemoryNeeds(
        tile_bytes=sizing.tile_bytes,
        ring_min_bytes=sizing.ring_bytes(LEAST_SLOTS),
        ring_bytes=sizing.ring_bytes(MOST_SLOTS),
        params_min_bytes=params_min,
        params_bytes=params_most,
        grads_min_bytes=grads_min,
        grads_flowing_bytes=grads_flowing,
        grads_bytes=grads_most,
        states_bytes=states if sizing.states_on_nvme else 0,
        always_bytes=always + (0 if sizing.states_on_nvme else states),
        largest_unit=sizing.largest.name,
        largest_unit_bytes=sizing.largest.nbytes,
        largest_is_embedding=sizing.largest.name in sizing.embeddings,
    )
