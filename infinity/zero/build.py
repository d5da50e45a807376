"""From a model and a configuration to the running rooms: sizes first, then memory, then disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.io import IoEngine, IoOptions, open_engine
from infinity.memory import Arena, Budget
from infinity.optim.formats import SHARD_ALIGN, StateLayout, state_layout
from infinity.optim.pipeline import UpdatePipeline
from infinity.schedule import MemoryNeeds, MemorySplit, split_memory
from infinity.telemetry import Counters
from infinity.tiers import FlatSpec, GradStore, ParamStore, StateStore, SwapPath, SwapSpace, UnifiedParams
from infinity.zero.executor import Executor
from infinity.zero.partition import PERSISTENT, Partition, make_partition
from infinity.zero.updates import UpdateSchedule

RING_SLOTS = 4  # one tile read, one updated, one written, and one of slack between the rates
_AUTO_SHARE = 0.8  # of the memory that is available when the budget is "auto"
_GRADS_IN_FLIGHT = 3  # units whose gradients the `backward` schedule may hold at once

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Runtime:
    """Everything that one engine owns."""

    partition: Partition
    layout: StateLayout
    schedule: UpdateSchedule
    executor: Executor
    params: ParamStore
    grads: GradStore
    pipeline: UpdatePipeline
    arena: Arena
    param_budget: Budget
    always_bytes: int
    swap: SwapSpace | None
    io: IoEngine | None
    counters: Counters

    def peak_bytes(self) -> dict[str, int]:
        """High-water mark of each tier since the start."""
        host = self.always_bytes + self.arena.peak_bytes + self.param_budget.peak_bytes
        return {"host": host, "device": 0, "nvme": self.swap.size_bytes if self.swap is not None else 0}

    def close(self) -> None:
        """Stop the worker, give memory back, remove the swap files."""
        self.executor.detach()
        self.pipeline.close()
        if self.io is not None:
            self.io.close()
        if self.swap is not None:
            self.swap.close()
        self.params.close()
        self.arena.close()


def compute_dtype(config: Config) -> torch.dtype:
    """The dtype that the model computes in."""
    return _DTYPES[config.precision]


def choose_schedule(config: Config) -> UpdateSchedule:
    """Resolve `tiering.update_schedule`.

    Raises:
        ConfigError: `backward` was asked for together with clipping.
    """
    asked = config.tiering.update_schedule
    if asked == "auto":
        return UpdateSchedule.DEFERRED if config.gradient_clipping > 0 else UpdateSchedule.BACKWARD
    schedule = UpdateSchedule(asked)
    if schedule is UpdateSchedule.BACKWARD and config.gradient_clipping > 0:
        raise ConfigError(
            "tiering.update_schedule is backward but gradient_clipping is "
            f"{config.gradient_clipping}: the norm is known only after backward. Use deferred (or auto), "
            "or set gradient_clipping to 0"
        )
    return schedule


def build_runtime(model: nn.Module, groups: Mapping[str, int], config: Config) -> Runtime:
    """Lay out the model's states and acquire what they need.

    Args:
        groups: parameter group of every parameter that is trained, by name.

    Raises:
        CapacityError: a memory budget is too small; the message has the number that is needed.
        StorageError: an nvme path cannot be used or does not have the space.
    """
    counters = Counters()
    params_on_nvme = config.zero.offload_param.device == "nvme"
    states_on_nvme = config.zero.offload_optimizer.device == "nvme"
    dtype = compute_dtype(config)
    layout = state_layout(_format(config))
    partition = make_partition(
        model,
        groups,
        shard_align=SHARD_ALIGN,
        persistence_threshold=config.zero.param_persistence_threshold,
        offloaded=params_on_nvme,
    )
    specs = [FlatSpec(unit.name, unit.numel, unit.shard_numel, dtype, not unit.persistent) for unit in partition.units]
    schedule = choose_schedule(config)
    grad_dtype = torch.float32 if config.gradient_accumulation_steps > 1 else dtype
    tile_numel = _tile_numel(partition, layout, config.tiering.tile_size_bytes)
    needs = _needs(partition, specs, layout, schedule, grad_dtype, config, tile_numel)
    split = split_memory(needs, _capacity(config, needs), "tiering.host_memory")

    io: IoEngine | None = None
    swap: SwapSpace | None = None
    arena = Arena(needs.ring_bytes + split.grads_bytes + _states_in_arena(needs, split, states_on_nvme))
    try:
        if params_on_nvme or states_on_nvme:
            io = open_engine(_io_options(config), config.tiering.io_backend)
            swap = SwapSpace(io, _swap_paths(config))
        budget = Budget("parameters", split.params_bytes)
        slots = [arena.lease(tile_numel * layout.bytes_per_param) for _ in range(RING_SLOTS)] if states_on_nvme else []
        shard_numels = [unit.shard_numel for unit in partition.units]
        states = StateStore(
            shard_numels,
            tile_numel,
            layout.bytes_per_param,
            arena=arena,
            resident_bytes=split.states_bytes,
            swap=swap if states_on_nvme else None,
            counters=counters,
        )
        params = UnifiedParams(specs, swap if params_on_nvme else None, budget, counters)
        if swap is not None:
            swap.create()
        standing = [unit.index for unit in partition.units if unit.name == PERSISTENT]
        grads = GradStore(shard_numels, grad_dtype, arena, split.grads_bytes, standing)
        if io is not None and slots:
            for slot in slots:
                io.register(slot.span())
        pipeline = UpdatePipeline(layout, states, slots, params.write_tile, counters)
    except BaseException:
        if swap is not None:
            swap.close()
        if io is not None:
            io.close()
        arena.close()
        raise
    executor = Executor(model, partition, params, grads, pipeline, split.params_bytes, counters)
    always = sum(spec.nbytes for spec in specs if not spec.offloaded)
    return Runtime(
        partition,
        layout,
        schedule,
        executor,
        params,
        grads,
        pipeline,
        arena,
        budget,
        always,
        swap,
        io,
        counters,
    )


# Sizes #


def _format(config: Config) -> str:
    asked = config.tiering.state_format
    fitting = {"fp32": "fp32", "bf16": "split"}[config.precision]
    if asked not in ("auto", fitting):
        raise ConfigError(
            f"tiering.state_format is {asked!r}, which does not serve {config.precision}; use {fitting!r} or 'auto'"
        )
    return fitting


def _tile_numel(partition: Partition, layout: StateLayout, tile_bytes: int) -> int:
    largest = max(unit.shard_numel for unit in partition.units)
    numel = max(SHARD_ALIGN, tile_bytes // layout.bytes_per_param // SHARD_ALIGN * SHARD_ALIGN)
    return min(numel, max(largest, SHARD_ALIGN))


def _needs(
    partition: Partition,
    specs: Sequence[FlatSpec],
    layout: StateLayout,
    schedule: UpdateSchedule,
    grad_dtype: torch.dtype,
    config: Config,
    tile_numel: int,
) -> MemoryNeeds:
    moving = sorted((spec for spec in specs if spec.offloaded), key=lambda spec: spec.nbytes, reverse=True)
    shard_numels = sorted((unit.shard_numel for unit in partition.units), reverse=True)
    grads = [numel * grad_dtype.itemsize for numel in shard_numels]
    standing = sum(unit.shard_numel * grad_dtype.itemsize for unit in partition.units if unit.name == PERSISTENT)
    if schedule is UpdateSchedule.BACKWARD and config.gradient_accumulation_steps == 1:
        grads_min = min(sum(grads), grads[0] + standing)
        grads_most = min(sum(grads), sum(grads[:_GRADS_IN_FLIGHT]) + standing)
    else:
        grads_min = grads_most = sum(grads)
    states = sum(shard_numels) * layout.bytes_per_param
    states_on_nvme = config.zero.offload_optimizer.device == "nvme"
    params = sum(spec.nbytes for spec in specs)
    params_moving = sum(spec.nbytes for spec in moving)
    return MemoryNeeds(
        ring_bytes=RING_SLOTS * tile_numel * layout.bytes_per_param if states_on_nvme else 0,
        params_min_bytes=sum(spec.nbytes for spec in moving[:2]),  # one in use, one on its way
        params_bytes=params_moving,
        grads_min_bytes=grads_min,
        grads_bytes=grads_most,
        states_bytes=states if states_on_nvme else 0,
        always_bytes=params - params_moving + (0 if states_on_nvme else states),
        largest_unit=max(specs, key=lambda spec: spec.nbytes).name,
    )


def _states_in_arena(needs: MemoryNeeds, split: MemorySplit, states_on_nvme: bool) -> int:
    return split.states_bytes if states_on_nvme else needs.always_bytes


def _capacity(config: Config, needs: MemoryNeeds) -> int:
    if config.tiering.host_memory_bytes is not None:
        return config.tiering.host_memory_bytes
    return max(min(needs.most_bytes, int(_AUTO_SHARE * psutil.virtual_memory().available)), 0)


# Disk #


def _io_options(config: Config) -> IoOptions:
    aio = config.aio
    return IoOptions(block_size_bytes=aio.block_size_bytes, queue_depth=aio.queue_depth, threads=aio.threads)


def _swap_paths(config: Config) -> list[SwapPath]:
    paths = [SwapPath(Path(nvme.path), nvme.capacity_bytes) for nvme in config.tiering.nvme]
    if not paths:
        raise ConfigError("an offload section says nvme but no path is given: set tiering.nvme or nvme_path")
    return paths
