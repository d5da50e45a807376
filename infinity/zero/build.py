"""From a model and a configuration to the running rooms: sizes first, then memory, then disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from infinity.config import Config, format_size
from infinity.errors import CapacityError, ConfigError
from infinity.io import IoOptions, open_engine
from infinity.io.gds import DeviceReads
from infinity.memory import Arena, Budget, available_memory_bytes
from infinity.optim.formats import StateLayout
from infinity.optim.pipeline import UpdatePipeline
from infinity.schedule import MemoryNeeds, MemorySplit, alone, split_memory
from infinity.telemetry import Counters, Timeline
from infinity.tiers import (
    ActivationFiles,
    ActivationStore,
    DiscreteParams,
    GradStore,
    Link,
    ParamStore,
    SameMemory,
    SpillingGradStore,
    StateStore,
    SwapPath,
    SwapSpace,
    UnifiedParams,
    open_swap,
)
from infinity.zero.executor import Executor
from infinity.zero.gradients import Gradients
from infinity.zero.model_parts import UNDIVIDED, ModelParts
from infinity.zero.partition import Partition
from infinity.zero.ranks import ALONE, Ranks, ranks_on_this_machine
from infinity.zero.reduction import ReducedGradients
from infinity.zero.sizing import Sizing, communication_dtype, host_needs, sharding_of, size_up
from infinity.zero.updates import UpdateSchedule

_log = logging.getLogger(__name__)
_AUTO_SHARE = 0.8  # of the memory that is available when a budget is "auto"


@dataclass(frozen=True)
class Runtime:
    """Everything that one engine owns."""

    sizing: Sizing
    ranks: Ranks
    executor: Executor
    params: ParamStore
    grads: GradStore
    pipeline: UpdatePipeline
    arena: Arena
    param_budget: Budget
    swap: SwapSpace | None
    counters: Counters
    link: Link | None
    parts: ModelParts
    owner_pid: int = field(default_factory=os.getpid)

    @property
    def partition(self) -> Partition:
        return self.sizing.partition

    @property
    def layout(self) -> StateLayout:
        return self.sizing.layout

    @property
    def schedule(self) -> UpdateSchedule:
        return self.sizing.schedule

    @property
    def torn(self) -> bool:
        """An interrupt has left something in nobody's books."""
        return self.executor.torn or self.arena.torn

    def peak_bytes(self) -> dict[str, int]:
        """High-water mark of each tier since the start."""
        params = self.sizing.staying_bytes + self.param_budget.peak_bytes
        nvme = self.swap.size_bytes if self.swap is not None else 0
        if self.sizing.discrete:
            return {"device": params, "host": self.arena.peak_bytes, "nvme": nvme}
        return {"device": 0, "host": params + self.arena.peak_bytes, "nvme": nvme}

    def close(self) -> None:
        """Stop the worker, give memory back, remove the swap files: those of this process, not of its parent."""
        if os.getpid() != self.owner_pid:
            return
        self.executor.detach()
        self.pipeline.close()
        if self.swap is not None:
            self.swap.close()
        self.params.close()
        self.arena.close()
        if self.counters.timeline is not None:
            self.counters.timeline.close()


def build_runtime(
    model: nn.Module,
    groups: Mapping[str, int],
    config: Config,
    optimizer: str,
    link: Link | None,
    ranks: Ranks = ALONE,
    parts: ModelParts = UNDIVIDED,
) -> Runtime:
    """Lay out the model's states and acquire what they need.

    Args:
        groups: parameter group of every parameter that is trained, by name.
        optimizer: name of its state layout.
        link: to a compute device with memory of its own; None if the compute device is the CPU.
        ranks: who trains this model together.
        parts: who holds the other parts of the model, if it is divided.

    Raises:
        CapacityError: a memory budget is too small; the message has the number that is needed.
        StorageError: an nvme path cannot be used or does not have the space.
    """
    if link is None and sharding_of(config, ranks).count > 1:
        link = SameMemory()  # whole units are gathered beside this rank's shards
    sizing = size_up(model, groups, config, optimizer, discrete=link is not None, ranks=ranks)
    needs = host_needs(sizing)
    split = split_memory(needs, host_capacity(config, needs, ranks), "tiering.host_memory")
    split = agreed(split, ranks, parts.ranks)
    with ExitStack() as undo:  # what was acquired goes again if a later step fails
        timeline = _open_timeline(sizing, config, ranks, link, undo)
        counters = Counters(timeline)
        arena = Arena(_arena_bytes(sizing, needs, split), pin=link is not None and link.device.type == "cuda")
        undo.callback(arena.close)
        swap = _open_disk(sizing, config, ranks, undo)
        slots = [arena.lease(sizing.tile_bytes) for _ in range(split.ring_bytes // sizing.tile_bytes)]
        states = StateStore(
            sizing.shard_numels,
            sizing.tile_numel,
            sizing.layout.tile_bytes,
            arena=arena,
            resident_bytes=split.states_bytes,
            swap=swap if sizing.states_on_nvme else None,
            counters=counters,
        )
        grads = _make_grads(sizing, split, arena, swap, counters)
        params, budget = _make_params(sizing, config, split, arena, swap, counters, link)
        if swap is not None:
            swap.create()
            for slot in slots:
                swap.register(slot.span())
        pipeline = UpdatePipeline(sizing.layout, states, slots, params.write_tile, counters)
        undo.pop_all()
    capacity_bytes = ranks.least(budget.capacity_bytes)
    executor = Executor(model, sizing.partition, params, grads, pipeline, capacity_bytes, counters, ranks)
    return Runtime(sizing, ranks, executor, params, grads, pipeline, arena, budget, swap, counters, link, parts)


def make_gradients(runtime: Runtime, config: Config, device: torch.device) -> Gradients:
    """Where the gradients of a training step are collected.

    Args:
        device: where the model computes.
    """
    units, store, make_room = runtime.partition.units, runtime.grads, runtime.executor.finish_an_update
    if runtime.ranks.size == 1:
        return Gradients(units, store, make_room, runtime.counters, runtime.parts)
    every_pass = config.zero.stage >= 2 and not runtime.sizing.layer_major
    return ReducedGradients(
        units,
        store,
        make_room,
        runtime.counters,
        ranks=runtime.ranks,
        sharding=runtime.partition.sharding,
        every_pass=every_pass,
        shared=runtime.partition.shared,
        dtype=communication_dtype(config),
        collect_dtype=runtime.layout.param_dtype if every_pass else runtime.sizing.grad_dtype,
        device=device,
        parts=runtime.parts,
    )


def _make_grads(
    sizing: Sizing, split: MemorySplit, arena: Arena, swap: SwapSpace | None, counters: Counters
) -> GradStore:
    """The store of the gradients; those that are to be held but do not fit have a place on the drive."""
    numels, dtype, capacity, standing = sizing.shard_numels, sizing.grad_dtype, split.grads_bytes, sizing.standing
    if swap is None or not sizing.spilled_units(capacity):
        return GradStore(numels, dtype, arena, capacity, standing)
    return SpillingGradStore(numels, dtype, arena, capacity, standing, swap, counters)


def _make_params(
    sizing: Sizing,
    config: Config,
    split: MemorySplit,
    arena: Arena,
    swap: SwapSpace | None,
    counters: Counters,
    link: Link | None,
) -> tuple[ParamStore, Budget]:
    """The store of the parameters, and the budget of those that come and go."""
    swap = swap if sizing.params_on_nvme else None
    if link is None:
        budget = Budget("host memory for parameters", split.params_bytes)
        return UnifiedParams(sizing.specs, swap, budget, counters), budget
    budget = Budget("device memory for parameters", _device_capacity(sizing, config, link.device))
    home_bytes = split.params_bytes - sizing.staging_bytes
    direct = _open_direct(config, link) if swap is not None else None
    return DiscreteParams(sizing.specs, link, arena, home_bytes, swap, budget, counters, direct), budget


def _open_direct(config: Config, link: Link) -> DeviceReads | None:
    """The way from the drive to the device past host memory, if it is asked for and there is one."""
    if not config.aio.use_gds:
        return None
    if config.tiering.checksum:
        raise ConfigError("aio.use_gds reads past the host, where tiering.checksum would look: switch one of them off")
    reader = link.device_reader()
    if isinstance(reader, str):
        _log.warning("aio.use_gds: parameters go through host memory: %s", reader)
        return None
    return DeviceReads(reader)


# Memory #


def _arena_bytes(sizing: Sizing, needs: MemoryNeeds, split: MemorySplit) -> int:
    """Everything in host memory but the parameters of a CPU, which have memory of their own."""
    states = split.states_bytes if sizing.states_on_nvme else needs.always_bytes
    return split.ring_bytes + split.grads_bytes + states + (split.params_bytes if sizing.discrete else 0)


def host_capacity(config: Config, needs: MemoryNeeds, ranks: Ranks = ALONE) -> int:
    """The host budget: as given, or what is useful of this process's part of the memory that is free."""
    if config.tiering.host_memory_bytes is not None:
        return config.tiering.host_memory_bytes
    share = _AUTO_SHARE / ranks_on_this_machine(ranks)
    return min(needs.most_bytes, int(share * available_memory_bytes()))


def agreed(split: MemorySplit, *ranks: Ranks) -> MemorySplit:
    """This rank's split with the gradients' part that every one of these ranks has.

    When it is full, a unit is updated before all its gradients are there, in which all ranks take part: so it must be
    full on all of them at once, whatever their budgets.
    """
    grads_bytes = split.grads_bytes
    for others in ranks:
        grads_bytes = others.least(grads_bytes)
    return replace(split, grads_bytes=grads_bytes)


def _device_capacity(sizing: Sizing, config: Config, device: torch.device) -> int:
    """Device memory for the parameters that come and go."""
    total = config.tiering.device_memory_bytes
    if total is None:
        if device.type != "cuda":
            return sizing.gathered_bytes if sizing.ranks > 1 else sum(sizing.moving_bytes)
        total = int(_AUTO_SHARE * torch.cuda.mem_get_info(device)[0])
    least = sizing.staying_bytes + sizing.working_set_bytes
    if total < least:
        raise CapacityError(
            f"tiering.device_memory is {format_size(total)} but the parameters need at least {format_size(least)} "
            f"on the device at once: raise it to {least} bytes or more, or offload parameters that stay there"
            + alone(sizing.largest.name, sizing.largest.nbytes, total, sizing.largest.name in sizing.embeddings)
        )
    return min(total - sizing.staying_bytes, sum(sizing.moving_bytes))


# Timeline #


def _open_timeline(sizing: Sizing, config: Config, ranks: Ranks, link: Link | None, undo: ExitStack) -> Timeline | None:
    """Where what runs is recorded, if it is asked for: a file for each rank."""
    path = config.tiering.timeline
    if path is None:
        return None
    if ranks.size > 1:
        path = path.with_suffix(f".rank{ranks.rank}{path.suffix}")
    names = [unit.name for unit in sizing.partition.units]
    timeline = Timeline(path, names, steps=config.tiering.timeline_steps, rank=ranks.rank)
    undo.callback(timeline.close)
    if link is not None:
        link.keep_times()
    return timeline


# Activations #


def open_activations(config: Config, runtime: Runtime, model: nn.Module) -> ActivationStore | None:
    """The lower tier of what autograd saves, if there is one."""
    tiering = config.tiering
    if tiering.activations == "none":
        return None
    if tiering.activations == "cpu" and runtime.link is None:
        _log.info("tiering.activations is cpu: they are there already, since the model computes on the CPU")
        return None
    kept = [runtime.params.tensor(unit.index) for unit in runtime.partition.units]
    kept += [buffer for buffer in model.buffers() if buffer.layout is torch.strided]
    storages = {tensor.untyped_storage()._cdata for tensor in kept}
    link = runtime.link if runtime.link is not None else SameMemory()
    files = None
    if tiering.activations == "nvme":
        files = ActivationFiles(
            open_engine(_io_options(config), tiering.io_backend),
            [nvme.path for nvme in tiering.nvme],
            runtime.ranks.rank,
            checksum=tiering.checksum,
        )
    return ActivationStore(link, tiering.activation_memory_bytes, files, storages, runtime.counters)


# Disk #


def _io_options(config: Config) -> IoOptions:
    aio = config.aio
    return IoOptions(aio.block_size_bytes, aio.queue_depth, aio.threads, aio.sqpoll, aio.iopoll)


def _open_disk(sizing: Sizing, config: Config, ranks: Ranks, undo: ExitStack) -> SwapSpace | None:
    if not sizing.params_on_nvme and not sizing.states_on_nvme:
        return None
    paths = [SwapPath(nvme.path, nvme.capacity_bytes, nvme.bytes_per_s) for nvme in config.tiering.nvme]
    if not paths:
        raise ConfigError("an offload section says nvme but no path is given: set tiering.nvme or nvme_path")
    swap = open_swap(
        paths, _io_options(config), config.tiering.io_backend, checksum=config.tiering.checksum, rank=ranks.rank
    )
    undo.callback(swap.close)
    return swap
