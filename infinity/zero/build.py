"""From a model and a configuration to the running rooms: sizes first, then memory, then disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.io import IoOptions, open_engine
from infinity.io.gds import DeviceReads
from infinity.kernels import cpus_near, share_threads
from infinity.memory import Arena, Budget, Ledger, Level
from infinity.optim.before_images import BeforeImages
from infinity.optim.formats import StateLayout
from infinity.optim.pipeline import UpdatePipeline
from infinity.schedule import Cycle, MemorySplit, split_memory
from infinity.schedule.placement import Placement, Rules, place, summed_once
from infinity.telemetry import Counters, Monitor, Timeline
from infinity.tiers import (
    ActivationFiles,
    ActivationStore,
    Device,
    DeviceGrads,
    DeviceStates,
    DeviceSums,
    GradStore,
    GradStores,
    Link,
    Memory,
    Norms,
    Params,
    StateStore,
    StoredTensor,
    SwapPath,
    SwapSpace,
    WeightFiles,
    open_swap,
)
from infinity.tiers.run_files import RunFiles
from infinity.zero.adoption import RunFacts, open_run
from infinity.zero.agreement import configuration_facts
from infinity.zero.budgets import agreed, device_budgets, fits, host_capacity
from infinity.zero.drives import free_for_swap
from infinity.zero.executor import Executor
from infinity.zero.fitting import cut_to_fit
from infinity.zero.gradients import Gradients
from infinity.zero.groups import Groups
from infinity.zero.in_flight import InFlight
from infinity.zero.landing import Places, landing_of
from infinity.zero.model_parts import UNDIVIDED, ModelParts
from infinity.zero.on_device import OnDevice
from infinity.zero.partial_sums import PartialSums
from infinity.zero.partition import Partition
from infinity.zero.ranks import ALONE, Ranks, is_first_process, ranks_on_this_machine
from infinity.zero.reduction import Direct, Journey, Reduction
from infinity.zero.sizing import Sizing, size_up
from infinity.zero.unit import Unit
from infinity.zero.updates import UpdateSchedule
from infinity.zero.views import ParameterViews

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runtime:
    """Everything that one engine owns.

    Attributes:
        groups: who shares the states, and who has the same of them.
        host, device: what the two memories are used for; with a CPU as the compute device, the host's pays for all.
        loss_norm: of the loss, where the device measures it.
        summed_once: units whose replicas add their gradients up once a step.
        in_files: where values are that stay in files, by name of the parameter.
    """

    sizing: Sizing
    groups: Groups
    executor: Executor
    params: Params
    grads: GradStores
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
    owner_pid: int = field(default_factory=os.getpid)

    @property
    def ranks(self) -> Ranks:
        """Who trains this model together."""
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

    @property
    def torn(self) -> bool:
        """An interrupt has left something in nobody's books."""
        return self.arena.handing_over.torn

    def peak_bytes(self) -> dict[str, int]:
        """High-water mark of each tier since the start."""
        return {"device": self.device.peak_bytes, "host": self.host.peak_bytes, "nvme": self.swap.size_bytes}

    def tiers(self) -> dict[str, Level]:
        """How full each tier is that has a budget; any thread may ask."""
        nvme_bytes = self.swap.size_bytes
        tiers = {
            "device": self.device.level(),
            "host": self.host.level(),
            "nvme": Level(nvme_bytes, nvme_bytes, self.swap.capacity_bytes),
        }
        return {name: level for name, level in tiers.items() if level.capacity_bytes}

    def together(self, what: str) -> None:
        """Where parameters are in the shards of several ranks, all must come to the same call `what`."""
        if self.sizing.rules.gathers:
            self.ranks.together(what)

    def settle(self) -> None:
        """Where users read parameters between steps: carry out every update, and have the parameters show it."""
        if self.sizing.rules.settles:
            self.executor.show_newest()

    def close(self) -> None:
        """Stop the worker, give memory back, remove the swap files: those of this process, not of its parent."""
        if os.getpid() != self.owner_pid:
            return
        self.executor.views.detach()
        self.pipeline.close()
        self.swap.close()
        self.files.close()
        self.params.close()
        self.grads.close()
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
    ranks: Ranks = ALONE,
    parts: ModelParts = UNDIVIDED,
    made: Collection[str] = (),
    in_files: Mapping[str, StoredTensor] | None = None,
    facts: RunFacts | None = None,
) -> Runtime:
    """Lay out the model's states and acquire what they need.

    Args:
        groups: parameter group of every parameter that is trained, by name.
        optimizer: name of its state layout.
        link: to the compute device.
        ranks: who trains this model together.
        parts: who holds the other parts of the model, if it is divided.
        made: parameters whose values do not come with the model.
        in_files: frozen ones that are to stay where they are stored.
        facts: what another process must have alike to go on from this one's states.

    Raises:
        CheckpointError: an earlier process has left states that this one cannot go on from.
        CapacityError: a memory budget is too small; the message has the number that is needed.
        StorageError: an nvme path cannot be used or does not have the space.
        RankError: one of these on another rank.
    """
    free_bytes = link.free_bytes()

    def layout(config: Config) -> Sizing:
        return size_up(
            model,
            groups,
            config,
            optimizer,
            discrete=link.discrete,
            ranks=ranks,
            made=made,
            in_files=in_files,
            device_bytes=free_bytes,
            # The model's other parts would have to choose alike, and may share the drives.
            drive_bytes=lambda: 0 if parts.are_several else free_for_swap(config),
        )

    def is_enough(sizing: Sizing) -> bool:
        host_bytes = host_capacity(config, sizing.host_needs(), ranks)
        return fits(sizing, config, host_bytes, free_bytes, ranks, parts.ranks)  # all compute together

    config, sizing, cut_bytes = cut_to_fit(config, layout, is_enough)
    facts = {**(facts or {}), "configuration": configuration_facts(config)}  # as it is cut
    share_threads(ranks_on_this_machine(ranks), launches=link.discrete, near=cpus_near(link.device))
    groups_of_ranks = Groups.of(ranks, sizing.rules.sharding)
    needs = sizing.host_needs()
    host = Ledger("host memory", host_capacity(config, needs, ranks))
    with _as_one(ranks, parts):
        split = split_memory(needs, host.capacity_bytes, "tiering.host_memory", cut_bytes)
    split = agreed(split, ranks, parts.ranks)
    placement = place(sizing.rules, sizing.specs, sizing.shards, split)
    with ExitStack() as undo:  # what was acquired goes again if a later step fails
        # All of host memory but what is computed on, which has memory of its own.
        arena_bytes = split.ring_bytes + split.grads_bytes + split.states_bytes + split.homes_bytes
        run = _open_run(sizing.rules, config, ranks, facts)
        with _as_one(ranks, parts):
            counters = Counters(_open_timeline(sizing, config, ranks, link, undo))
            arena = Arena(arena_bytes, pin=link.pinned_for)
            undo.callback(arena.close)
            swap = _open_disk(sizing.rules, config, ranks, undo, run)
            slots = [arena.lease(sizing.tile_bytes) for _ in range(split.ring_bytes // sizing.tile_bytes)]
            there = device_budgets(sizing, config, split, host, link.free_bytes())  # before anything is taken
        for others in (ranks, parts.ranks):  # full on one is full on all, see `agreed`
            there.grads.capacity_bytes = others.least(there.grads.capacity_bytes)
        once = summed_once(sizing.rules, sizing.shards, ranks.least(there.sums.capacity_bytes))
        there.sums.take(sum(once.values()), "sums of gradients over a group of ranks")
        with _as_one(ranks, parts):
            states = StateStore(
                sizing.shards.numels,
                sizing.tile_numel,
                sizing.layout.tile_bytes,
                [home.memory for home in placement.tiles],
                arena=arena,
                swap=swap,
                counters=counters,
                device=DeviceStates(link, sizing.layout) if sizing.there or sizing.may_come else None,
                written_through=config.tiering.crash_consistent,
                slotted=sizing.has_slots,
            )
            undo.callback(states.close)
            sums = DeviceSums(sizing.shards.numels, sizing.grad_dtype, there.sums, link.device, states.is_there)
            host.count("gradients, states and what is on its way", arena)
            host.fix("values on their way at initialize", needs.initial_extra_bytes(split))
            apart = _apart(sizing, config, arena, link)
            homes = [home.memory for home in placement.params]
            files = _open_weights(sizing, config, undo)
            params = Params(
                sizing.specs,
                homes,
                there.params,
                counters,
                arena=arena,
                swap=swap,
                files=files,
                device=apart,
                written_through=config.tiering.crash_consistent,
                slotted=sizing.tile_numel if sizing.has_slots else 0,
            )
            undo.callback(params.close)
            images = _room_for_images(sizing, split, host, undo)
            # Behind what a later process goes on from: how many gradients are there depends on the memory of the day.
            grads = _hold_gradients(sizing, placement, split, there.grads, arena, swap, counters, link, states)
            undo.callback(grads.close)
            if run is None:
                swap.create()
        if run is not None:
            ranks.each(lambda: _take_over(swap), "infinity.initialize(): the files")
        _tell_of_waiting(config, sizing, params, images)
        for slot in slots:
            swap.register(slot.span())
        pipeline = UpdatePipeline(sizing.layout, states, slots, counters, images)
        undo.pop_all()
    capacity_bytes = ranks.least(there.params.capacity_bytes)
    moving = [spec.offloaded for spec in sizing.specs]
    cycle = Cycle([spec.nbytes for spec in sizing.specs], moving, capacity_bytes, sizing.ahead_bytes)
    views = ParameterViews(model, sizing.partition, params, writable=config.zero.stage < 3)
    on_device = None if grads.device is None else OnDevice(params, grads.device, states, sizing.layout)
    units = [Unit(each) for each in params.units]
    in_flight = InFlight(units, params, grads.host, pipeline, counters, on_device)
    return Runtime(
        sizing=sizing,
        groups=groups_of_ranks,
        executor=Executor(units, views, params, in_flight, pipeline, cycle, counters, groups_of_ranks.sharing),
        params=params,
        grads=grads,
        pipeline=pipeline,
        states=states,
        sums=sums,
        arena=arena,
        host=host,
        device=there.ledger,
        swap=swap,
        files=files,
        counters=counters,
        link=link,
        loss_norm=Norms(sizing.rules.measured_there(1), link),
        parts=parts,
        monitor=Monitor(config.monitors, writes=is_first_process()),
        summed_once=frozenset(once),
        in_files=in_files or {},
    )


@contextmanager
def _as_one(ranks: Ranks, parts: ModelParts) -> Iterator[None]:
    """What fails on one rank meanwhile is refused by all of them, with its name and words."""
    what = "infinity.initialize(): memory and drives"
    with parts.ranks.as_one(what), ranks.as_one(what):
        yield


def make_gradients(runtime: Runtime) -> Gradients:
    """Where the gradients of a training step are collected."""
    partition, rules = runtime.partition, runtime.sizing.rules
    source: Direct | Reduction = Direct(partition.units, runtime.parts)
    if rules.reduces:
        sizing = runtime.sizing
        journey = Journey(
            rules.sharding,
            rules.reduces_every_pass,
            sizing.collect_dtype,
            sizing.communication_dtype,
            tells_early=sizing.schedule in (UpdateSchedule.BACKWARD, UpdateSchedule.SPECULATIVE),
            streams=rules.grads_stream,
        )
        source = Reduction(
            partition.units,
            runtime.groups,
            journey,
            partition.shared,
            runtime.link.device,
            runtime.counters,
            runtime.parts,
            PartialSums(runtime.summed_once, sizing.shards.numels, sizing.grad_dtype, runtime.link.device),
        )
    streams = rules.grads_stream and not runtime.parts.shares
    places = Places(partition.units, whole=rules.reduces)
    landing = landing_of(
        runtime.grads, source, places, runtime.counters, streams=streams, note=runtime.params.note_final
    )
    return Gradients(partition.units, runtime.grads, source, landing, runtime.sums, runtime.counters, runtime.parts)


def _hold_gradients(
    sizing: Sizing,
    placement: Placement,
    split: MemorySplit,
    there: Budget,
    arena: Arena,
    swap: SwapSpace,
    counters: Counters,
    link: Link,
    states: StateStore,
) -> GradStores:
    """Where gradients are until they are used."""
    shards, dtype = sizing.shards, sizing.grad_dtype
    norms = Norms(sizing.rules.measured_there(Places(sizing.partition.units, whole=sizing.rules.reduces).count), link)
    homes = placement.grad_homes
    host = GradStore(shards.below, dtype, arena, split.grads_bytes, homes, counters, swap, link, norms)
    some_may_be_there = sizing.there or sizing.may_come
    device = DeviceGrads(shards.numels, dtype, there, link.device, norms) if some_may_be_there else None
    return GradStores(host, device, states.is_there)


def _tell_of_waiting(config: Config, sizing: Sizing, params: Params, images: BeforeImages | None) -> None:
    """Say where no update can run ahead although the configuration has them do so."""
    if (
        config.tiering.update_schedule == "speculative"
        and not any(unit.has_slots for unit in params.units)
        and images is None
        and not sizing.rules.recovers_grads
    ):
        _log.warning(
            'tiering.update_schedule is "speculative", but no parameters live on a drive, where updates that run '
            "ahead leave what was before, and no host memory is left for it: all updates wait for the norm. Raise "
            "tiering.host_memory, or set zero_optimization.offload_param.device to nvme"
        )


def _room_for_images(sizing: Sizing, split: MemorySplit, host: Ledger, undo: ExitStack) -> BeforeImages | None:
    """Room for before-images, if there is any."""
    if not split.images_bytes:
        return None
    images = BeforeImages(split.images_bytes)
    undo.callback(images.close)
    host.count("what updates ahead replace", images.arena)
    return images


def _apart(sizing: Sizing, config: Config, arena: Arena, link: Link) -> Device | None:
    """What lies between parameters' homes and what is computed on, where these are apart."""
    if sizing.rules.site is Memory.DEVICE:
        return None
    direct = _open_direct(config, link) if sizing.rules.params_pass_host else None
    return Device(link, arena.part(sizing.params.staging), direct)


def _open_direct(config: Config, link: Link) -> DeviceReads | None:
    """The way from the drive to the device past host memory, if there is one."""
    if config.tiering.checksum:
        raise ConfigError("aio.use_gds reads past the host, where tiering.checksum would look: switch one of them off")
    reader = link.device_reader()
    if isinstance(reader, str):
        _log.warning("aio.use_gds: parameters go through host memory: %s", reader)
        return None
    return DeviceReads(reader)


# Timeline #


def _open_timeline(sizing: Sizing, config: Config, ranks: Ranks, link: Link, undo: ExitStack) -> Timeline | None:
    """Where what runs is recorded, if it is asked for: a file for each rank."""
    path = config.tiering.timeline
    if path is None:
        return None
    if ranks.size > 1:
        path = path.with_suffix(f".rank{ranks.rank}{path.suffix}")
    names = [unit.name for unit in sizing.partition.units]
    timeline = Timeline(path, names, steps=config.tiering.timeline_steps, rank=ranks.rank)
    undo.callback(timeline.close)
    link.keep_times()
    return timeline


# Activations #


def open_activations(config: Config, runtime: Runtime, model: nn.Module) -> ActivationStore | None:
    """The lower tier of what autograd saves, if there is one."""
    tiering = config.tiering
    if not runtime.sizing.rules.activations_bytes:
        if tiering.activations == "cpu":
            _log.info("tiering.activations is cpu: they are there already, since the model computes on the CPU")
        return None
    kept = [runtime.params.tensor(unit.index) for unit in runtime.partition.units]
    kept += [buffer for buffer in model.buffers() if buffer.layout is torch.strided]
    storages = {tensor.untyped_storage()._cdata for tensor in kept}
    files = None
    if tiering.activations == "nvme":
        files = ActivationFiles(
            open_engine(_io_options(config), tiering.io_backend),
            [nvme.path for nvme in tiering.nvme],
            runtime.ranks.rank,
            checksum=tiering.checksum,
        )
    store = ActivationStore(runtime.link, runtime.sizing.rules.activations_bytes, files, storages, runtime.counters)
    runtime.host.count("activations", store)
    return store


# Disk #


def _io_options(config: Config) -> IoOptions:
    aio = config.aio
    return IoOptions(aio.block_size_bytes, aio.queue_depth, aio.threads, aio.sqpoll, aio.iopoll)


def _open_run(rules: Rules, config: Config, ranks: Ranks, facts: RunFacts) -> RunFiles | None:
    """What a later process can go on from, if it is to be able to; all ranks call this."""
    if not config.tiering.crash_consistent:
        return None
    problem = rules.commit_problem()
    if problem:
        raise ConfigError(problem)
    return open_run([nvme.path for nvme in rules.drives], facts, ranks)


def _open_disk(rules: Rules, config: Config, ranks: Ranks, undo: ExitStack, run: RunFiles | None) -> SwapSpace:
    paths = [SwapPath(nvme.path, nvme.capacity_bytes, nvme.bytes_per_s) for nvme in rules.drives]
    swap = open_swap(
        paths,
        _io_options(config),
        config.tiering.io_backend,
        checksum=config.tiering.checksum,
        rank=ranks.rank,
        run=run,
    )
    undo.callback(swap.close)
    return swap


def _take_over(swap: SwapSpace) -> None:
    """Make the files, or take over those of an earlier process, of which one finished step counts from now on."""
    swap.create()
    swap.adopt()


def _open_weights(sizing: Sizing, config: Config, undo: ExitStack) -> WeightFiles:
    """Where units are read that stay in the files of somebody else."""
    if not any(spec.runs for spec in sizing.specs):
        return WeightFiles()
    files = WeightFiles(open_engine(_io_options(config), config.tiering.io_backend))
    undo.callback(files.close)
    return files
