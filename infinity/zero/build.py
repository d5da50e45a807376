"""Build an engine's runtime from a model and a configuration: first sizes, then memory, then disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, chain

import torch
from torch import nn

from infinity.config import Config
from infinity.io import IoOptions, open_engine
from infinity.io.gds import DeviceReads
from infinity.kernels import Rule, cpus_near, share_threads
from infinity.memory import Arena, Lease, Ledger, Level
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.undo_log import UndoLog
from infinity.schedule import Cycle, MemorySplit, split_memory
from infinity.schedule.needs import summed_once
from infinity.schedule.on_device import addresses_stay
from infinity.schedule.placement import Placement, place
from infinity.telemetry import Counters, Monitor, Timeline
from infinity.tiers import (
    ActivationFiles,
    ActivationStore,
    Device,
    DeviceGrads,
    DeviceStates,
    DeviceSums,
    GradStore,
    Link,
    Memory,
    Norms,
    Params,
    StateStore,
    StoredTensor,
    SwapSpace,
    WeightFiles,
    open_swap,
)
from infinity.tiers.run_files import RunFiles
from infinity.tiers.state_layout import StateLayout
from infinity.zero.adoption import RunFacts, open_run
from infinity.zero.agreement import configuration_facts
from infinity.zero.budgets import DeviceBudgets, cut_to_fit, device_budgets, fits, free_for_swap, host_capacity
from infinity.zero.executor import Executor
from infinity.zero.gradients import Gradients
from infinity.zero.groups import Groups, PartialSum
from infinity.zero.in_flight import InFlight
from infinity.zero.model_parts import ModelParts
from infinity.zero.partition import ParamInfo, ParamPart, Partition, UnitLayout
from infinity.zero.ranks import Ranks, is_first_process, least_of, ranks_on_this_machine
from infinity.zero.reduction import Direct, Reduction, ReductionRules
from infinity.zero.sizing import Sizing, size_up
from infinity.zero.unit import Unit
from infinity.zero.updates import UpdateSchedule
from infinity.zero.views import ModelViews, UnitViews

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runtime:
    """Everything that one engine owns.

    Attributes:
        host, device: the ledgers of the two memories; if the compute device is the CPU, the host's counts everything.
        device_grads: gradients of units that are updated on the device; None if no unit can be.
        loss_norm: of the loss, if the device measures it.
        summed_once: units whose replicas add their gradients up once a step.
        addresses_stay: tensors used by kernels keep their addresses for the whole run.
    """

    sizing: Sizing
    groups: Groups
    executor: Executor
    params: Params
    grads: GradStore
    device_grads: DeviceGrads | None
    pipeline: UpdatePipeline
    states: StateStore
    sums: DeviceSums
    arena: Arena
    host: Ledger
    device: Ledger
    swap: SwapSpace
    files: WeightFiles
    counters: Counters
    link: Link
    loss_norm: Norms
    parts: ModelParts
    monitor: Monitor
    summed_once: frozenset[int]
    in_files: Mapping[str, StoredTensor]
    addresses_stay: bool
    owner_pid: int = field(default_factory=os.getpid)

    @property
    def ranks(self) -> Ranks:
        """The ranks that train this model together."""
        return self.groups.all

    @property
    def partition(self) -> Partition:
        return self.sizing.partition

    @property
    def layout(self) -> StateLayout:
        return self.sizing.layout

    @property
    def schedule(self) -> UpdateSchedule:
        return self.sizing.schedule

    def row(self, unit: UnitLayout) -> Unit:
        """Return the unit with this layout, with its parameters, gradients, states and views."""
        return self.executor.units[unit.index]

    def trained_parts(
        self, unit: UnitLayout, *, writable: bool, of: ParamInfo | None = None
    ) -> Iterator[tuple[ParamPart, dict[str, torch.Tensor]]]:
        """Yield this rank's parts of trained parameters in each tile, with their optimizer states.

        Args:
            writable: see `UpdatePipeline.tiles`.
            of: only this parameter.
        """
        for tile, fields in self.pipeline.tiles(unit.index, writable=writable):
            for part in self.partition.parts(unit, tile.start, tile.start + tile.numel, of=of):
                yield part, self.layout.narrow(fields, part.start - tile.start, part.stop - tile.start)

    @property
    def poisoned(self) -> bool:
        """Whether an interrupt has cut an ownership transfer short."""
        return self.arena.critical.interrupted

    def peak_bytes(self) -> dict[str, int]:
        """Return the peak use of each tier since the start."""
        return {"device": self.device.peak_bytes, "host": self.host.peak_bytes, "nvme": self.swap.size_bytes}

    def tiers(self) -> dict[str, Level]:
        """Return the fill level of each tier with a budget; from any thread."""
        nvme_bytes = self.swap.size_bytes
        tiers = {
            "device": self.device.level(),
            "host": self.host.level(),
            "nvme": Level(nvme_bytes, nvme_bytes, self.swap.capacity_bytes),
        }
        return {name: level for name, level in tiers.items() if level.capacity_bytes}

    def together(self, what: str) -> None:
        """Meet all ranks at the call `what` if parameters are sharded over them."""
        if self.sizing.rules.params.gathers:
            self.ranks.together(what)

    def show_newest(self) -> None:
        """Finish every update and show the new values, if users may read parameters between steps."""
        if self.sizing.rules.waits_for_updates:
            self.executor.show_newest()

    def close(self) -> None:
        """Stop the worker, free the memory, and remove the swap files; does nothing in a forked child."""
        if os.getpid() != self.owner_pid:
            return
        self.executor.detach_views()
        self.pipeline.close()
        self.swap.close()
        self.files.close()
        self.params.close()
        self.grads.close()
        if self.device_grads is not None:
            self.device_grads.close()
        self.states.close()
        self.sums.close()
        self.loss_norm.close()
        self.arena.close()
        if self.counters.timeline is not None:
            self.counters.timeline.close()
        self.monitor.close()


def build_runtime(
    model: nn.Module,
    groups: Mapping[str, int],
    config: Config,
    optimizer: str,
    link: Link,
    ranks: Ranks,
    parts: ModelParts,
    made: Collection[str],
    in_files: Mapping[str, StoredTensor],
    facts: RunFacts | None = None,
) -> Runtime:
    """Lay out the model's states, and acquire memory and files.

    Args:
        model, groups, config, optimizer, ranks, made, in_files: see `size_up`.
        link: to the compute device.
        parts: the other parts of a divided model.
        facts: values that a later process must share to continue from this one's states.

    Raises:
        CheckpointError: an earlier process has left states that this one cannot continue from.
        CapacityError: a memory budget is too small; the message has the required number.
        StorageError: an nvme path cannot be used or does not have the space.
        RankError: one of these on another rank.
    """
    size = partial(
        size_up, model, groups, optimizer=optimizer, discrete=link.discrete, ranks=ranks, made=made, in_files=in_files
    )
    plan = _lay_out(size, config, link, ranks, parts)
    facts = {**(facts or {}), "configuration": configuration_facts(plan.config)}
    share_threads(ranks_on_this_machine(ranks), launches=link.discrete, near=cpus_near(link.device))
    with ExitStack() as undo:  # if a later step fails, free everything acquired so far
        run = None
        if plan.config.tiering.crash_consistent:
            run = open_run([nvme.path for nvme in plan.sizing.rules.drives], facts, ranks)
        memory = _open_memory(plan, undo, run)
        once = _share_sums(plan, memory)
        with _as_one(ranks, parts):
            states = undo.enter_context(closing(_hold_states(plan, memory)))
            stores = _make_stores(plan, memory, states, undo)
            if run is None:
                memory.swap.create()
        if run is not None:
            ranks.each(lambda: _take_over(memory.swap), "infinity.initialize(): the files")
        _tell_of_waiting(plan, stores)
        for slot in memory.slots:
            memory.swap.register(slot.span())
        pipeline = undo.enter_context(
            closing(UpdatePipeline(plan.sizing.layout, states, memory.slots, memory.counters, stores.images))
        )
        runtime = Runtime(
            sizing=plan.sizing,
            groups=plan.groups,
            executor=_make_executor(plan, model, memory, states, stores, pipeline),
            params=stores.params,
            grads=stores.grads,
            device_grads=stores.device_grads,
            pipeline=pipeline,
            states=states,
            sums=stores.sums,
            arena=memory.arena,
            host=plan.host,
            device=memory.device.ledger,
            swap=memory.swap,
            files=stores.files,
            counters=memory.counters,
            link=link,
            loss_norm=Norms(plan.sizing.rules.measured_on_device(1), link),
            parts=parts,
            monitor=Monitor(config.monitors, writes=is_first_process()),
            summed_once=once,
            in_files=in_files,
            addresses_stay=addresses_stay(config, discrete=link.discrete),
        )
        undo.pop_all()
    return runtime


# Decisions, before anything is acquired #


@dataclass(frozen=True)
class _Plan:
    """The layout, and the configuration with the size to which blocks were cut."""

    config: Config
    sizing: Sizing
    split: MemorySplit
    placement: Placement
    groups: Groups
    host: Ledger
    link: Link
    parts: ModelParts

    @property
    def ranks(self) -> Ranks:
        return self.groups.all


def _lay_out(size: Callable[..., Sizing], config: Config, link: Link, ranks: Ranks, parts: ModelParts) -> _Plan:
    """Decide the units, the division of host memory, and the placement.

    Args:
        size: `size_up` of the model.
    """
    free_bytes = link.free_bytes()

    @cache
    def drive_bytes() -> int:
        # The other parts of a divided model would have to choose alike, and may share the drives.
        return 0 if parts.are_several else free_for_swap(config)

    def is_enough(sizing: Sizing) -> bool:
        host_bytes = host_capacity(config, sizing.host_needs(), ranks)
        return fits(sizing, config, host_bytes, free_bytes, ranks, parts.ranks)  # all parts compute together

    layout = partial(size, device_bytes=free_bytes, drive_bytes=drive_bytes)
    config, sizing, cut_bytes = cut_to_fit(config, layout, is_enough)
    needs = sizing.host_needs()
    host = Ledger("host memory", host_capacity(config, needs, ranks))
    with _as_one(ranks, parts):
        split = split_memory(needs, host.capacity_bytes, cut_bytes)
    # When the memory for gradients is full, a unit is updated before all its gradients have arrived, and all ranks take
    # part in that. So it must be full on all ranks at the same time, whatever their budgets are.
    split = replace(split, grads_bytes=least_of(split.grads_bytes, ranks, parts.ranks))
    placement = place(sizing.rules, sizing.specs, sizing.shards, split)
    groups = Groups.of(ranks, sizing.rules.sharding)
    return _Plan(config, sizing, split, placement, groups, host, link, parts)


# Acquisition #


@dataclass(frozen=True)
class _Memory:
    """The empty tiers. `slots` are the slots of the ring of tiles; `device` has the budgets of the compute device."""

    counters: Counters
    arena: Arena
    swap: SwapSpace
    slots: Sequence[Lease]
    device: DeviceBudgets


@dataclass(frozen=True)
class _Stores:
    params: Params
    grads: GradStore
    device_grads: DeviceGrads | None
    sums: DeviceSums
    files: WeightFiles
    images: UndoLog | None


def _open_memory(plan: _Plan, undo: ExitStack, run: RunFiles | None) -> _Memory:
    """Open the drives, and allocate host memory, except the memory that the model computes in."""
    sizing, split, config = plan.sizing, plan.split, plan.config
    arena_bytes = split.ring_bytes + split.grads_bytes + split.states_bytes + split.homes_bytes
    with _as_one(plan.ranks, plan.parts):
        counters = Counters(_open_timeline(plan, undo))
        arena = undo.enter_context(closing(Arena(arena_bytes, pin=plan.link.pinned_for)))
        swap = open_swap(
            sizing.rules.drives,
            IoOptions.of(config.aio),
            config.tiering.io_backend,
            checksum=config.tiering.checksum,
            rank=plan.ranks.rank,
            run=run,
        )
        undo.callback(swap.close)
        slots = [arena.lease(sizing.tile_bytes) for _ in range(split.ring_bytes // sizing.tile_bytes)]
        device = device_budgets(sizing, config, split, plan.host, plan.link.free_bytes())  # before any allocation
    # the same on all ranks, as `grads_bytes` of the split
    device.grads.capacity_bytes = least_of(device.grads.capacity_bytes, plan.ranks, plan.parts.ranks)
    return _Memory(counters, arena, swap, slots, device)


def _share_sums(plan: _Plan, memory: _Memory) -> frozenset[int]:
    """Return the units whose replicas sum their gradients once a step, and take the memory for that."""
    sums = memory.device.sums
    once = summed_once(plan.sizing.rules, plan.sizing.shards, plan.ranks.least(sums.capacity_bytes))
    sums.take(sum(once.values()), "sums of gradients over a group of ranks")
    return frozenset(once)


def _hold_states(plan: _Plan, memory: _Memory) -> StateStore:
    sizing = plan.sizing
    return StateStore(
        sizing.shards.numels,
        sizing.tile_numel,
        sizing.layout.tile_bytes,
        chain.from_iterable(plan.placement.tiles),
        arena=memory.arena,
        swap=memory.swap,
        counters=memory.counters,
        device=DeviceStates(plan.link, sizing.layout) if sizing.on_device or sizing.may_come else None,
        written_through=plan.config.tiering.crash_consistent,
        double_buffered=sizing.is_double_buffered,
    )


def _make_stores(plan: _Plan, memory: _Memory, states: StateStore, undo: ExitStack) -> _Stores:
    sizing, split, host, device = plan.sizing, plan.split, plan.host, plan.link.device
    host.count("gradients, states and what is on its way", memory.arena)
    host.fix("values on their way at initialize", sizing.host_needs().initial_extra_bytes(split))
    apart = _apart(plan, memory.arena)
    files = _open_weights(plan, undo)
    params = Params(
        sizing.specs,
        plan.placement.params,
        memory.device.params,
        memory.counters,
        arena=memory.arena,
        swap=memory.swap,
        files=files,
        device=apart,
        writes_every_update=plan.config.tiering.crash_consistent,
        double_buffered_numel=sizing.tile_numel if sizing.is_double_buffered else 0,
    )
    undo.callback(params.close)
    images = _room_for_images(plan, undo)
    # Last, so that a later process finds all other extents in the same place: the gradients' space varies with free
    # memory.
    grads = undo.enter_context(closing(_hold_gradients(plan, memory)))
    budgets, critical = memory.device, memory.arena.critical
    on_device = None
    if sizing.on_device or sizing.may_come:
        on_device = DeviceGrads(grads.units, grads.dtype, budgets.grads, device, critical, grads.norms)
    sums = DeviceSums(grads.units, grads.dtype, budgets.sums, device, critical)
    return _Stores(params, grads, on_device, sums, files, images)


def _make_executor(
    plan: _Plan, model: nn.Module, memory: _Memory, states: StateStore, stores: _Stores, pipeline: UpdatePipeline
) -> Executor:
    """Create the executor, with the units, their views, and the cycle of uses."""
    sizing, params, grads = plan.sizing, stores.params, stores.grads
    capacity_bytes = plan.ranks.least(memory.device.params.capacity_bytes)
    cycle = Cycle([spec.nbytes for spec in sizing.specs], capacity_bytes, sizing.ahead_bytes)
    views = ModelViews(writable=plan.config.zero.stage < 3)
    layouts = sizing.partition.units
    units = [
        Unit(layout, each, UnitViews(layout, model, each, views), of_grads, grads, stores.device_grads, of_states)
        for layout, each, of_grads, of_states in zip(layouts, params.units, grads.units, states.units, strict=True)
    ]
    in_flight = InFlight(params, grads, pipeline, memory.counters)
    sharing = plan.groups.sharing
    advice = memory.device.advice
    return Executor(units, views, params, grads, in_flight, pipeline, cycle, memory.counters, advice, sharing)


@contextmanager
def _as_one(ranks: Ranks, parts: ModelParts) -> Iterator[None]:
    """If one rank fails in this context, raise an error on all ranks, with its number and message."""
    what = "infinity.initialize(): memory and drives"
    with parts.ranks.as_one(what), ranks.as_one(what):
        yield


def make_gradients(runtime: Runtime, update_rules: Callable[[], Sequence[Rule]]) -> Gradients:
    """Create the collector of a training step's gradients.

    Args:
        update_rules: returns the present rules of the parameter groups.
    """
    partition, rules = runtime.partition, runtime.sizing.rules
    units = runtime.executor.units
    source: Direct | Reduction
    if rules.grads.reduces:  # only one of them is created, because each writes into the units
        sizing = runtime.sizing
        reduction_rules = ReductionRules(
            rules.sharding,
            rules.grads.reduces_every_pass,
            sizing.collect_dtype,
            sizing.communication_dtype,
            flags_early=sizing.schedule in (UpdateSchedule.BACKWARD, UpdateSchedule.SPECULATIVE),
            streams=rules.grads.stream,
        )
        numels, device = sizing.shards.numels, runtime.link.device
        for unit in runtime.summed_once:
            units[unit].total.partial = PartialSum(numels[unit], sizing.grad_dtype, device)
        source = Reduction(
            units,
            runtime.groups,
            reduction_rules,
            partition.shared,
            device,
            runtime.counters,
            runtime.parts,
            update_rules,
        )
    else:
        source = Direct(units, runtime.parts)
    streams = runtime.grads.streams or runtime.device_grads is not None
    return Gradients(
        units,
        source,
        runtime.sums,
        runtime.counters,
        runtime.parts,
        sums_on_device=rules.grads.sums_on_device,
        streams=streams,
    )


def _hold_gradients(plan: _Plan, memory: _Memory) -> GradStore:
    sizing = plan.sizing
    counts = [sizing.rules.grads.parts(len(unit.params)) for unit in sizing.partition.units]
    store = GradStore(
        sizing.shards.numels,
        sizing.shards.off_device,
        sizing.grad_dtype,
        memory.arena,
        plan.split.grads_bytes,
        plan.placement.grad_homes,
        memory.counters,
        memory.swap,
        Norms(sizing.rules.measured_on_device(sum(counts)), plan.link),
        streams=sizing.rules.grads.stream and not plan.parts.shares,
    )
    for each, first in zip(store.units, accumulate(counts, initial=0), strict=False):
        each.first = first
    return store


def _tell_of_waiting(plan: _Plan, stores: _Stores) -> None:
    """Warn if no update can be speculative although the configuration requests it."""
    if (
        plan.config.tiering.update_schedule == "speculative"
        and not any(unit.is_double_buffered for unit in stores.params.units)
        and stores.images is None
        and not plan.sizing.rules.grads.reconstructs
    ):
        _log.warning(
            'tiering.update_schedule is "speculative", but no parameters live on a drive, which would keep '
            "the old values, and no host memory is left for the undo log: all updates wait for the norm. Raise "
            "tiering.host_memory, or set zero_optimization.offload_param.device to nvme"
        )


def _room_for_images(plan: _Plan, undo: ExitStack) -> UndoLog | None:
    """Allocate the undo log, if it has any room."""
    if not plan.split.images_bytes:
        return None
    images = undo.enter_context(closing(UndoLog(plan.split.images_bytes)))
    plan.host.count("undo log", images.arena)
    return images


def _apart(plan: _Plan, arena: Arena) -> Device | None:
    """Return the path between parameters' homes and the compute device; None if both are one memory."""
    if plan.sizing.rules.update_memory is Memory.DEVICE:
        return None
    direct = _open_direct(plan.link) if plan.sizing.rules.params.pass_host else None
    staging_bytes = plan.split.homes_bytes - plan.placement.host_homes_bytes(plan.sizing.specs)
    return Device(plan.link, arena.part(staging_bytes), direct)


def _open_direct(link: Link) -> DeviceReads | None:
    """Return the reader from the drive directly to the device, if there is one."""
    reader = link.device_reader()
    if isinstance(reader, str):
        _log.warning("aio.use_gds: parameters go through host memory: %s", reader)
        return None
    return DeviceReads(reader)


# Timeline #


def _open_timeline(plan: _Plan, undo: ExitStack) -> Timeline | None:
    """Open the timeline, if configured: one file for each rank."""
    tiering, ranks = plan.config.tiering, plan.ranks
    path = tiering.timeline
    if path is None:
        return None
    if ranks.size > 1:
        path = path.with_suffix(f".rank{ranks.rank}{path.suffix}")
    names = [unit.name for unit in plan.sizing.partition.units]
    timeline = undo.enter_context(closing(Timeline(path, names, steps=tiering.timeline_steps, rank=ranks.rank)))
    plan.link.keep_times()
    return timeline


# Activations #


def open_activations(config: Config, runtime: Runtime, model: nn.Module) -> ActivationStore | None:
    """Create the store of offloaded activations, if configured."""
    tiering = config.tiering
    if not runtime.sizing.rules.activations_bytes:
        if tiering.activations == "cpu":
            _log.info("tiering.activations is cpu: without effect, because the model computes on the CPU")
        return None
    kept = [each.tensor for each in runtime.params.units]
    kept += [buffer for buffer in model.buffers() if buffer.layout is torch.strided]
    storages = {tensor.untyped_storage()._cdata for tensor in kept}
    files = None
    if tiering.activations == "nvme":
        files = ActivationFiles(
            open_engine(IoOptions.of(config.aio), tiering.io_backend),
            [nvme.path for nvme in tiering.nvme],
            runtime.ranks.rank,
            checksum=tiering.checksum,
        )
    store = ActivationStore(runtime.link, runtime.sizing.rules.activations_bytes, files, storages, runtime.counters)
    runtime.host.count("activations", store.arena)
    return store


# Disk #


def _take_over(swap: SwapSpace) -> None:
    """Create the files, or adopt the files of an earlier process and continue from one of its finished steps."""
    swap.create()
    swap.adopt()


def _open_weights(plan: _Plan, undo: ExitStack) -> WeightFiles:
    """Open the user's files in which units stay."""
    if not any(spec.runs for spec in plan.sizing.specs):
        return WeightFiles()
    engine = open_engine(IoOptions.of(plan.config.aio), plan.config.tiering.io_backend)
    return undo.enter_context(closing(WeightFiles(engine)))
