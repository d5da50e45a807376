"""Where every field of every unit lives, and what follows from it: decided once, and data for all others.

[Note: placement]
Three facts of a run (its stage, its offload sections, what computes it) and nothing else decide who has what:

- `none` and `cpu` are one place where the compute device is the CPU: device and host are one memory.
- A shard lies *apart* from the tensor that is computed on where the device has memory of its own, or where several
  ranks share the tensor. The optimizer then updates the shard, in host memory; else the tensor itself.
- Where states are on a device, it updates what lies there: the shard's place in a tensor that stays, or, at stage 3,
  where whole tensors come and go, a SHARD of its own beside them.
- What the ranks share (all but at stage 0) has its home in shards. Whole tensors of parameters stay at stages 1 and 2
  and are gathered from shards at stage 3. Ranks share in groups, each of which has all, if `communication.shard_size`
  says so.

`Rules` hold this for all units alike. What a budget is too small for goes to the drive, tile by tile and unit by unit:
that is `place`, once the budget is divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from infinity.config import Config, NvmeConfig
from infinity.kernels import scratch_bytes
from infinity.schedule.budget import MemoryNeeds, MemorySplit
from infinity.schedule.on_device import as_far_as_fits, first_to_stay, may_fill, promotion_order, share_there
from infinity.tiers import ARRIVING_UNITS, WHOLE, FlatSpec, GradHomes, Memory, Sharding

_SPILL_SLOTS = 3  # one filled, one written, one read
_RECOVERED_SLOTS = 16  # of units that wait for their updates, too
_LARGE_UNITS = 2  # an embedding and a head
_GRADS_IN_FLIGHT = 3  # units whose gradients may be held at once where they are updated in backward
# Of all gradients: those whose updates may be left for later. The drive would idle under the next forward pass, and the
# device in backward, while the optimizer is busy with a large unit.
_GRADS_LEFT_SHARE = 4
_DEVICE_TILE_BYTES = 64 << 20
_AHEAD_NUMEL = 50_000_000  # gathered ahead, beyond the next unit: what stage3_prefetch_bucket_size is by default
_DRIVE_COPIES = 3  # two slots, and a checkpoint
_STAGING_UNITS = 3  # of those that lie apart: one uploaded, one read, one updated


@dataclass(frozen=True)
class Home:
    """Where one field of a unit is while nobody uses it.

    Attributes:
        sharding: which slice of it is there.
        dtype: None for tiles of optimizer states, whose fields have several.
        moves: it is used elsewhere, and comes and goes for that.
    """

    memory: Memory
    sharding: Sharding
    dtype: torch.dtype | None
    moves: bool


@dataclass(frozen=True)
class ParamRules:
    """What follows for parameters.

    Attributes:
        home: of those that may leave what is computed on; DEVICE if none may.
        home_there: of those whose states are on the device.
        gathers: units are made whole from the shards of several ranks.
        ahead_numel: elements of units that are, ahead of their use, beyond the next one.
        pass_host: they are to be read from the drives straight into the device, if there is a way.
    """

    home: Memory
    home_there: Memory
    gathers: bool
    ahead_numel: int
    pass_host: bool


@dataclass(frozen=True)
class GradRules:
    """What follows for gradients.

    Attributes:
        reduces: they are sums over several ranks.
        reduces_every_pass: in every backward pass, else in the last one of a step.
        collects_all: every rank has whole gradients of all units at once before they are reduced.
        holds_all: there is room for the gradients of all units at once, as far as they are this rank's.
        spills: those that are to be held but do not fit go to the drive.
        recovers: those of units all of whose states have two slots on the drives need no memory once their updates
            have run ahead of the norm.
        stream: a unit's gradients leave the device while it computes on, where nothing is added to them below.
        sums_there: those of several micro-batches are added up on the device, as far as it has room, and leave once.
        sums_once: those of a group of ranks are added up where they are computed, as far as that has room, and over the
            replicas once a step.
    """

    reduces: bool
    reduces_every_pass: bool
    collects_all: bool
    holds_all: bool
    spills: bool
    recovers: bool
    stream: bool
    sums_there: bool
    sums_once: bool


@dataclass(frozen=True)
class StateRules:
    """What follows for optimizer states.

    Attributes:
        home: DEVICE if they, and gradients, never leave it.
        share_there: so many of them are on the device, unit by unit, whatever the home of the others is.
        fills: what the device's memory has left after the first step is filled with states of further units.
        keeps_steps: what a step has finished stays on the drives, where what lives in host memory has its place, too.
        least_tile_bytes: of a tile: kernels of a device are not worth a launch for less.
    """

    home: Memory
    share_there: float
    fills: bool
    keeps_steps: bool
    least_tile_bytes: int


@dataclass(frozen=True)
class Rules:
    """What follows for all units alike, see [Note: placement].

    Attributes:
        sharding: which slice of a unit's states, of its gradients, and of what lies apart, is this rank's.
        replicas: ranks that have the same slice.
        site: where the optimizer updates: HOST on a shard that lies apart, DEVICE on what is computed on.
        one_memory: device and host are one: the host's budget pays for both.
        stage: of ZeRO, where there are several ranks; else 0.
        settles: a step is over when all parameters are updated and show it; else updates go on under the next forward.
        drives: those that are used.
        activations_bytes: host memory for what autograd saves; 0 where it stays on the device.
    """

    params: ParamRules
    grads: GradRules
    states: StateRules
    sharding: Sharding
    replicas: int
    site: Memory
    one_memory: bool
    stage: int
    settles: bool
    drives: tuple[NvmeConfig, ...]
    activations_bytes: int

    @property
    def stay_by_units(self) -> bool:
        """States stay in memory by whole units, see `place_units`."""
        return self.grads.recovers and not self.states.keeps_steps

    def with_grads_recovered(self, *, params: bool) -> Rules:
        """As these, where updates run ahead of the norm and tell the gradients of states that live on the drives.

        Args:
            params: they tell parameters, too, which else have to have slots themselves.
        """
        on_drives = self.states.home is Memory.NVME and (params or self.params.home is Memory.NVME)
        return replace(self, grads=replace(self.grads, recovers=self.grads.spills and on_drives))

    def param_home(self, *, stays: bool, updated_there: bool) -> Memory:
        """Of a unit's parameters, which may `stay` by themselves, or because they are updated on the device or will be,
        before a budget moves it up from the drive."""
        return Memory.DEVICE if stays else self.params.home_there if updated_there else self.params.home

    def stored_param_bytes(self, specs: Sequence[FlatSpec]) -> int:
        """The most that this rank's parameters take of the drives, those in the files of others aside."""
        on_drives = self.params.home is Memory.NVME
        return sum(spec.shard_nbytes for spec in specs if on_drives and spec.offloaded and not spec.runs)

    def first_to_stay(
        self, first: Sequence[int], numels: Sequence[int], bytes_per_param: int, free_bytes: int
    ) -> frozenset[int]:
        """Units whose parameters stay on the device for their states, which may come later; see the function."""
        return first_to_stay(first, numels, bytes_per_param, free_bytes) if self.states.fills else frozenset()

    def measured_there(self, parts: int) -> int:
        """Of so many parts of units, each measured by itself, those whose gradients' norms are made on the device."""
        return parts if self.grads.stream or self.states.share_there else 0

    def in_place_problem(self) -> str:
        """Why frozen weights cannot be used where they lie in somebody's files; or nothing."""
        if self.params.home is Memory.NVME:
            return ""
        return (
            "the weights are to be used where they lie, but parameters stay in memory: set stage to 3 and "
            "zero_optimization.offload_param.device to nvme, or read them with in_place=False"
        )

    def commit_problem(self) -> str:
        """Why not every step can be kept on the drives; or nothing."""
        if not (self.states.share_there or self.states.fills):
            return ""
        return (
            "tiering.crash_consistent writes through what an update changes in host memory, but with "
            "offload_optimizer.device none, ratio below 1 or tiering.fill_device, states are updated on the device: "
            "set device to cpu or nvme, and leave the other two out"
        )

    def no_sync_problem(self) -> str:
        """Why a rank cannot keep the gradients of several passes to itself, before they are reduced; or nothing."""
        if self.stage >= 2:
            return (
                f"no_sync keeps whole gradients on every rank, which stage {self.stage} is there to avoid: leave it "
                "out, or use stage 0 or 1, which reduce gradients in the last micro-batch of a step anyway"
            )
        if not self.grads.reduces and not self.grads.holds_all:
            return (
                "no_sync keeps the gradients of all units, but under the update schedule `backward` there is room for "
                "those on their way only: set tiering.update_schedule to deferred, or gradient_accumulation_steps"
            )
        return ""


def rules_of(
    config: Config, rank: int, ranks: int, *, discrete: bool, exact: bool = True, updates_in_backward: bool
) -> Rules:
    """Resolve a configuration.

    Args:
        rank: this one of `ranks` processes that train the model together.
        discrete: the compute device has memory of its own.
        exact: the state format rounds nothing, so that a device can update it too.
        updates_in_backward: a unit is updated as soon as its gradients are final.

    Raises:
        ConfigError: so many ranks cannot be divided into groups that share states.
    """
    stage, params, states = config.zero.stage, config.zero.offload_param.device, config.zero.offload_optimizer.device
    sharing = config.zero.sharing(ranks)
    sharding = Sharding(rank % sharing, sharing)
    apart = discrete or sharding.count > 1
    layer_major = config.gradient_accumulation_steps > 1 and config.tiering.accumulation == "layer"
    summed = config.accumulates and not layer_major
    every_pass = stage >= 2 and not layer_major
    on_drives = "nvme" in (params, states)
    activations_move = config.tiering.activations == "nvme" or (config.tiering.activations == "cpu" and discrete)
    there = Memory.SHARD if stage == 3 and sharding.count > 1 else Memory.DEVICE
    may_be_there = states == "none" and discrete and exact
    if params == "nvme":
        home = Memory.NVME
    elif apart and (params == "cpu" or (there is Memory.SHARD and not may_be_there)):
        home = Memory.HOST
    else:
        home = there
    states_home = {"nvme": Memory.NVME, "cpu": Memory.HOST, "none": Memory.HOST}[states]
    share = share_there(config, discrete=discrete, exact=exact)
    if may_be_there and home is there:
        states_home, share = Memory.DEVICE, 1.0
    fills = states_home is not Memory.DEVICE and may_fill(config, ranks, discrete=discrete, exact=exact)
    asked_there = share > 0 or (fills and config.tiering.fill_device is True)
    streams = discrete and states_home is not Memory.DEVICE
    return Rules(
        params=ParamRules(
            home=home,
            home_there=there,
            gathers=sharding.count > 1,
            ahead_numel=_ahead_numel(config, discrete=discrete) if sharding.count > 1 else 0,
            pass_host=config.aio.use_gds and discrete and home is Memory.NVME,
        ),
        grads=GradRules(
            reduces=ranks > 1,
            reduces_every_pass=every_pass,
            collects_all=ranks > 1 and summed and not every_pass,
            holds_all=summed or not updates_in_backward,
            spills=on_drives and (summed or not updates_in_backward),
            recovers=False,
            stream=streams,
            sums_there=streams and summed and (ranks == 1 or every_pass),
            sums_once=every_pass and summed and 1 < sharing < ranks,
        ),
        states=StateRules(
            home=states_home,
            share_there=share,
            fills=fills,
            keeps_steps=config.tiering.crash_consistent,
            least_tile_bytes=_least_tile_bytes(states_home, there=asked_there),
        ),
        sharding=sharding,
        replicas=ranks // sharing,
        site=Memory.HOST if apart else Memory.DEVICE,
        one_memory=not discrete,
        stage=stage if ranks > 1 else 0,
        # Users read and write parameters between steps at these stages, as in torch.
        settles=stage < 3 and config.tiering.update_schedule == "auto",
        drives=config.tiering.nvme if on_drives else (),
        activations_bytes=config.tiering.activation_memory_bytes if activations_move else 0,
    )


def _least_tile_bytes(states: Memory, *, there: bool) -> int:
    """Of a tile, some of which are asked to be on the device; tiles of a drive keep the size that is best for it."""
    return _DEVICE_TILE_BYTES if there and states is not Memory.NVME else 0


def _ahead_numel(config: Config, *, discrete: bool) -> int:
    """As it is asked for; else some where the device has memory of its own, and none beside the host's shards."""
    asked = config.zero.prefetch_numel
    return asked if asked is not None else _AHEAD_NUMEL if discrete else 0


def may_run_ahead(config: Config, ranks: int, *, discrete: bool) -> bool:
    """Updates can run ahead of the norm at no price: all that they change has two slots on the drives anyway, and users
    look at none of it between the steps; or all is in memory, and the host's cores idle while a device computes.

    Args:
        ranks: how many train the model together.
        discrete: the compute device has memory of its own.
    """
    if not config.managed_accumulation:
        return False
    if config.tiering.crash_consistent:
        return config.zero.stage == 3
    in_memory = config.zero.offload_optimizer.device == "cpu" and config.zero.offload_param.device != "nvme"
    return _alone_with_device(ranks, discrete=discrete) and in_memory


def may_run_ahead_on_drives(
    config: Config, rules: Rules, ranks: int, *, slot_bytes: int, drive_bytes: Callable[[], int | None]
) -> bool:
    """Whether "auto" has updates of what lives on the drives run ahead of the norm.

    Their gradients need not be kept, and the drives have room for a second slot, and for a checkpoint beside both.

    Args:
        rules: of updates that run ahead.
        ranks: how many train the model together.
        slot_bytes: of one slot of all that may live on the drives.
        drive_bytes: returns what the drives have free; None where that is not known, and taken to be enough.
    """
    chosen_here = config.tiering.update_schedule == "auto" and config.waits and config.managed_accumulation
    if not chosen_here or not rules.stay_by_units or not _alone_with_device(ranks, discrete=not rules.one_memory):
        return False
    free_bytes = drive_bytes()
    return free_bytes is None or _DRIVE_COPIES * slot_bytes <= free_bytes


def _alone_with_device(ranks: int, *, discrete: bool) -> bool:
    """The host's cores and drives idle while the device computes; several ranks would tell one another about each unit,
    where they now do so once a step."""
    return discrete and ranks == 1


@dataclass(frozen=True)
class Shards:
    """What is placed, beside the parameters.

    Attributes:
        numels: elements of each unit that this rank's optimizer has.
        tile_numel, tile_bytes: elements of a full tile of optimizer states, bytes of a tile of so many.
        standing: units whose gradients stay open while those of others come and go.
        there: units whose states, and gradients, are on the device; those of the others are `below`.
        blocks: name of the block that each unit is, or is a part of; by default each is one.
    """

    numels: Sequence[int]
    tile_numel: int
    tile_bytes: Callable[[int], int]
    grad_dtype: torch.dtype
    standing: Collection[int]
    there: frozenset[int] = frozenset()
    blocks: Sequence[str] = ()

    def by_block(self, sizes: Sequence[int]) -> list[int]:
        """Bytes of whole blocks, from those of their units."""
        return _by_block(sizes, self.blocks)

    @cached_property
    def below(self) -> list[int]:
        """As `numels`, of units whose states are not on the device; 0 of the others."""
        return [0 if unit in self.there else numel for unit, numel in enumerate(self.numels)]

    @cached_property
    def tile_sizes(self) -> list[int]:
        """Bytes of every tile below."""
        return self._tile_sizes(self.below)

    def tile_sizes_of(self, unit: int) -> list[int]:
        """Bytes of the unit's tiles below."""
        return self._tile_sizes([self.below[unit]])

    @cached_property
    def grad_sizes(self) -> list[int]:
        """Bytes of each unit's gradients below."""
        return [numel * self.grad_dtype.itemsize for numel in self.below]

    @cached_property
    def states_there_bytes(self) -> int:
        """Optimizer states on the device."""
        return self.states_bytes(self.there)

    def states_bytes(self, units: Collection[int]) -> int:
        """Optimizer states of these units."""
        return sum(self._tile_sizes([self.numels[unit] for unit in units]))

    @cached_property
    def grad_sizes_there(self) -> list[int]:
        """Bytes of each unit's gradients on the device."""
        return [(all_ - below) * self.grad_dtype.itemsize for all_, below in zip(self.numels, self.below, strict=True)]

    def _tile_sizes(self, numels: Sequence[int]) -> list[int]:
        return [self.tile_bytes(numel) for numel in cut_into_tiles(numels, self.tile_numel)]


def may_come(rules: Rules, specs: Sequence[FlatSpec], shards: Shards, first: Collection[int]) -> list[int]:
    """Units below whose states may come to the device later, in order: those whose parameters stay there.

    Args:
        first: units that come before the others.
    """
    if not rules.states.fills:
        return []
    staying = [0 if spec.offloaded else numel for spec, numel in zip(specs, shards.below, strict=True)]
    return promotion_order(staying, first)


# Shares of memory #


class Share(NamedTuple):
    """Bytes that are always there, and those of what comes and goes: the least, and the most that is of use."""

    always: int = 0
    least: int = 0
    most: int = 0


@dataclass(frozen=True)
class ParamBytes:
    """What parameters take of the memories.

    Attributes:
        computed: what is computed on, and shards beside it; of the device's, or of the host's where they are one.
        homes: shards that lie apart, in host memory: images on their way, which take `staging`, and homes.
    """

    computed: Share
    homes: Share
    staging: int


def param_bytes(rules: Rules, specs: Sequence[FlatSpec]) -> ParamBytes:
    """What these units take under the rules."""
    moving = sorted((spec for spec in specs if spec.offloaded), key=_nbytes, reverse=True)
    staying = sum(spec.nbytes for spec in specs if not spec.offloaded)
    beside = sum(spec.shard_nbytes for spec in specs if spec.beside)
    # Gathered beside their shards, more than one to go would be there twice.
    twice = [spec.nbytes for spec in moving if spec.beside or (rules.one_memory and rules.params.gathers)]
    most = sum(map(_nbytes, moving)) - sum(twice[3:])
    most += min(sum(twice[3:]), rules.params.ahead_numel * specs[0].dtype.itemsize)
    together = _together_bytes(moving)
    computed = Share(staying + beside, together, max(together, most))
    if rules.site is Memory.DEVICE:
        return ParamBytes(computed, Share(), 0)
    # What is updated on the device passes through when it is made or looked at.
    units = 1 if rules.states.home is Memory.DEVICE else _STAGING_UNITS
    staging = units * max(spec.shard_nbytes for spec in specs)
    homes = sum(spec.shard_nbytes for spec in moving if not spec.beside)
    return ParamBytes(
        computed, Share(0, staging + (0 if rules.params.home is Memory.NVME else homes), staging + homes), staging
    )


def _together_bytes(moving: Sequence[FlatSpec]) -> int:
    """The most that a use needs at once: units of a module and of those around it, and another to come, or updated.

    Args:
        moving: units that come and go, the largest first.
    """
    nbytes: dict[str, int] = {}
    for spec in moving:
        nbytes[spec.modules[-1]] = nbytes.get(spec.modules[-1], 0) + spec.nbytes
    most = 0
    for around in {spec.modules for spec in moving}:
        other = next((spec.nbytes for spec in moving if spec.modules[-1] not in around), 0)
        most = max(most, sum(nbytes.get(module, 0) for module in dict.fromkeys(around)) + other)
    return most


def _nbytes(spec: FlatSpec) -> int:
    return spec.nbytes


def collecting_bytes(
    rules: Rules,
    numels: Sequence[int],
    shared: Container[int],
    collect: torch.dtype,
    travel: torch.dtype,
    hold: torch.dtype,
) -> int:
    """The most memory in which whole gradients are collected and reduced, and leave a device where they do; torch's
    backends have copies of their own.

    A model whose modules are left in no order may take more: what is collected has to be somewhere.

    Args:
        numels: trainable elements of each unit.
        shared: units that several modules use, which are collected until the pass ends.
        collect, travel, hold: dtypes in which gradients are collected, reduced, and held until they are used.
    """
    if not rules.grads.reduces:
        return 0
    kept = [rules.grads.collects_all or unit in shared for unit in range(len(numels))]
    moving = sorted((numel for numel, stays in zip(numels, kept, strict=True) if not stays), reverse=True)
    converts = collect is not travel  # else a unit is sent from where it was collected, beside the next
    collected = sum(numels) - sum(moving) + sum(moving[: 1 if converts else 2])
    shard = max(numels) // rules.sharding.count if rules.sharding.count > 1 else 0
    shard *= 2 if rules.replicas > 1 else 1  # one is summed over its replicas beside the next, which is scattered
    leaving = ARRIVING_UNITS * max(numels) // rules.sharding.count if rules.grads.stream else 0
    moving_bytes = ((max(numels) if converts else 0) + shard) * travel.itemsize + leaving * hold.itemsize
    return collected * collect.itemsize + moving_bytes


class GradShare(NamedTuple):
    """Bytes of gradients: the least that must be held, what lets computing go on while a unit is updated, and the most
    that is of use."""

    least: int = 0
    flowing: int = 0
    most: int = 0


def _by_block(sizes: Sequence[int], blocks: Sequence[str]) -> list[int]:
    """Bytes of whole blocks; without their names, each unit is one."""
    if not blocks:
        return list(sizes)
    found: dict[str, int] = {}
    for block, size in zip(blocks, sizes, strict=True):
        found[block] = found.get(block, 0) + size
    return list(found.values())


def grad_share(rules: Rules, shards: Shards, sizes: Sequence[int], *, there: bool = False) -> GradShare:
    """What gradients of units take of the memory that holds them.

    Parts of a block count as one: backward may leave any of them open until it leaves the block.

    Args:
        sizes: bytes of each unit's.
        there: that memory is the device's, from which none spill, and where no update waits for the drive.
    """
    total = sum(sizes)
    largest_first = sorted(shards.by_block(sizes), reverse=True)
    open_bytes = sum(sizes[unit] for unit in shards.standing)

    def flying(units: int) -> int:
        return min(total, sum(largest_first[:units]) + open_bytes)

    if rules.grads.holds_all and (there or not rules.grads.recovers):
        least = flying(1) if rules.grads.spills and not there else total
        return GradShare(least, least, total)
    lags = not there and (rules.states.home is Memory.NVME or rules.grads.stream)
    left = total // _GRADS_LEFT_SHARE if lags else 0
    return GradShare(flying(1), flying(2), min(total, flying(_GRADS_IN_FLIGHT) + left))


class DeviceShare(NamedTuple):
    """Bytes on the device beside parameters: states that stay there, the fewest and most gradients that do, and sums of
    those that leave, or are sent to the replicas."""

    states: int = 0
    grads_least: int = 0
    grads_most: int = 0
    sums: int = 0


def device_share(rules: Rules, shards: Shards) -> DeviceShare:
    """What lies on the device beside parameters."""
    grads = grad_share(rules, shards, shards.grad_sizes_there, there=True)
    return DeviceShare(shards.states_there_bytes, grads.flowing, grads.most, sum(_sum_sizes(rules, shards)))


def _sum_sizes(rules: Rules, shards: Shards) -> Sequence[int]:
    """Bytes of each unit's sum over a step's micro-batches."""
    if rules.grads.sums_once:
        return [numel * shards.grad_dtype.itemsize for numel in shards.numels]
    return shards.grad_sizes if rules.grads.sums_there else ()


def that_fit(rules: Rules, shards: Shards, order: Sequence[int], spare_bytes: int) -> list[int]:
    """Of units that may come to the device, in this order, those for which so much of its memory is room.

    Beside their states there is room for their gradients, as far as these are there at once, and for an update.
    """
    states = [shards.states_bytes([unit]) for unit in range(len(shards.numels))]
    scratch = scratch_bytes(max((shards.numels[unit] for unit in order), default=0))
    if rules.grads.holds_all:
        grads = [numel * shards.grad_dtype.itemsize for numel in shards.numels]
        sizes, passing = [sum(pair) for pair in zip(states, grads, strict=True)], scratch
    else:
        sizes, passing = states, scratch + grads_there_bytes(rules, shards, order)
    taken = as_far_as_fits(order, sizes, spare_bytes - passing)
    return [unit for unit in order if unit in taken]


def summed_once(rules: Rules, shards: Shards, capacity_bytes: int) -> dict[int, int]:
    """Units whose replicas add up once a step, as far as their sums have room, and the bytes of each sum."""
    taken: dict[int, int] = {}
    for unit, nbytes in enumerate(_sum_sizes(rules, shards) if rules.grads.sums_once else ()):
        if 0 < nbytes <= capacity_bytes:
            taken[unit] = nbytes
            capacity_bytes -= nbytes
    return taken


def grads_there_bytes(rules: Rules, shards: Shards, came: Collection[int]) -> int:
    """What gradients need on the device once these units have come to it."""
    there = shards.there.union(came)
    sizes = [numel * shards.grad_dtype.itemsize if unit in there else 0 for unit, numel in enumerate(shards.numels)]
    return grad_share(rules, shards, sizes, there=True).flowing


def host_needs(
    rules: Rules,
    specs: Sequence[FlatSpec],
    shards: Shards,
    *,
    slots: tuple[int, int],
    collecting_bytes: int,
    initial_bytes: int,
    images_bytes: int,
    embeddings: Collection[str],
) -> MemoryNeeds:
    """What host memory must and may hold.

    Args:
        slots: tiles in flight, the fewest and the most that are of use.
        collecting_bytes: for whole gradients on their way between ranks.
        initial_bytes: values on their way to the tiers at `initialize`.
        images_bytes: of the before-images of all tiles; 0 where updates leave none.
        embeddings: names of modules that are one table.
    """
    params = param_bytes(rules, specs)
    computed = params.computed if rules.one_memory else Share()
    stored = shards.tile_sizes if rules.states.home is Memory.NVME else []
    grads = grad_share(rules, shards, shards.grad_sizes)
    states_bytes = sum(shards.tile_sizes)
    beside = sum(shards.grad_sizes) if rules.stay_by_units else 0
    # What lies on the device passes through one slot when it is looked at.
    passing = int(rules.states.fills or bool(shards.there))
    slots = (max(passing, min(slots[0], len(stored))), max(passing, min(slots[1], len(stored))))
    largest = max(specs, key=lambda spec: spec.nbytes)
    tile_bytes = shards.tile_bytes(shards.tile_numel)
    return MemoryNeeds(
        tile_bytes=tile_bytes,
        ring_min_bytes=slots[0] * tile_bytes,
        ring_bytes=slots[1] * tile_bytes,
        params_min_bytes=computed.least,
        params_bytes=computed.most,
        grads_min_bytes=grads.least,
        grads_flowing_bytes=grads.flowing,
        grads_bytes=grads.most,
        states_min_bytes=states_bytes - sum(stored),
        states_bytes=states_bytes + beside,
        always_bytes=computed.always,
        largest_unit=largest.name,
        largest_unit_bytes=largest.nbytes,
        largest_is_embedding=largest.name in embeddings,
        homes_min_bytes=params.homes.least,
        homes_bytes=params.homes.most,
        collecting_bytes=collecting_bytes if rules.one_memory else 0,
        activations_bytes=rules.activations_bytes,
        initial_bytes=initial_bytes,
        images_bytes=images_bytes,
        sums_bytes=device_share(rules, shards).sums if rules.one_memory else 0,
    )


# What a divided budget makes of it #


@dataclass(frozen=True)
class Placement:
    """The table: the home of every field of every unit.

    Attributes:
        params, grads: by unit.
        tiles: of optimizer states, in the order of `cut_into_tiles`.
        grad_homes: which units have memory of their own for their gradients, and which share it.
        stored_bytes: optimizer states and gradients on the drives, which go there and come back in every step.
    """

    params: tuple[Home, ...]
    grads: tuple[Home, ...]
    tiles: tuple[Home, ...]
    grad_homes: GradHomes
    stored_bytes: int


def place(rules: Rules, specs: Sequence[FlatSpec], shards: Shards, split: MemorySplit) -> Placement:
    """Fill the table for host memory that is divided so."""
    if rules.stay_by_units:
        grads, stay = place_units(shards, split)
    else:
        if rules.grads.recovers:
            grads = _with_most_slots(shards.grad_sizes, shards.standing, split.grads_bytes)
        else:
            grads = place_gradients(
                shards.grad_sizes, shards.standing, split.grads_bytes, spills=rules.grads.spills, blocks=shards.blocks
            )
        # Of states at home in host memory, the share is all.
        stay = resident_tiles(shards.below, shards.tile_numel, shards.tile_bytes, split.states_bytes)
    homes_bytes = split.homes_bytes - param_bytes(rules, specs).staging

    def home(dtype: torch.dtype | None, stays: bool, *, there: bool = False) -> Home:
        if there:
            return Home(Memory.DEVICE, rules.sharding, dtype, moves=False)
        return Home(Memory.HOST if stays else Memory.NVME, rules.sharding, dtype, moves=not stays)

    return Placement(
        params=tuple(_param_homes(rules, specs, homes_bytes)),
        grads=tuple(
            home(shards.grad_dtype, unit not in grads.spilled, there=unit in shards.there) for unit in range(len(specs))
        ),
        tiles=tuple(_tile_homes(shards, home(None, True, there=True), [home(None, stays) for stays in stay])),
        grad_homes=grads,
        stored_bytes=sum(shards.grad_sizes[unit] for unit in grads.spilled)
        + sum(size for size, stays in zip(shards.tile_sizes, stay, strict=True) if not stays),
    )


def _tile_homes(shards: Shards, there: Home, below: Sequence[Home]) -> Iterator[Home]:
    """Of every tile of every unit, given those of the tiles below."""
    rest = iter(below)
    for unit, numel in enumerate(shards.numels):
        for _ in cut_into_tiles([numel], shards.tile_numel):
            yield there if unit in shards.there else next(rest)


def _param_homes(rules: Rules, specs: Sequence[FlatSpec], homes_bytes: int) -> Iterator[Home]:
    """Units that come and go live in host memory as far as it reaches, in the order of the model."""
    for spec in specs:
        if not spec.offloaded:
            yield Home(Memory.DEVICE, WHOLE, spec.dtype, moves=False)
            continue
        if spec.beside:
            yield Home(Memory.SHARD, rules.sharding, spec.dtype, moves=True)
            continue
        fits = spec.shard_nbytes <= homes_bytes
        homes_bytes -= spec.shard_nbytes if fits else 0
        drive = Memory.FILE if spec.runs else rules.params.home
        yield Home(Memory.HOST if fits else drive, rules.sharding, spec.dtype, moves=True)


def cut_into_tiles(shard_numels: Sequence[int], tile_numel: int) -> Iterator[int]:
    """Elements of every tile of every shard."""
    for shard_numel in shard_numels:
        for start in range(0, shard_numel, tile_numel):
            yield min(tile_numel, shard_numel - start)


def stay_in_memory(sizes: Sequence[int], resident_bytes: int) -> list[bool]:
    """Which of these stay in so much memory: spread evenly among the others, which evens the drive's load out."""
    share = min(1.0, resident_bytes / max(1, sum(sizes)))
    seen_bytes = held_bytes = 0
    stay = []
    for nbytes in sizes:
        seen_bytes += nbytes
        stay.append(held_bytes + nbytes <= min(share * seen_bytes, resident_bytes))
        held_bytes += nbytes if stay[-1] else 0
    return stay


def resident_tiles(
    shard_numels: Sequence[int], tile_numel: int, tile_bytes: Callable[[int], int], resident_bytes: int
) -> list[bool]:
    """Which tiles of optimizer states stay in so much host memory.

    Every step touches each once, and for a cyclic scan no replacement hits more than a fixed choice. Those of the first
    unit come first: its gradients are the last of a backward pass and the next forward begins with it, so that nothing
    would hide its traffic.
    """
    sizes = [tile_bytes(numel) for numel in cut_into_tiles(shard_numels, tile_numel)]
    first = -(-next((numel for numel in shard_numels if numel), 0) // tile_numel)
    within = sum(total <= resident_bytes for total in itertools.accumulate(sizes[:first]))
    return [True] * within + stay_in_memory(sizes[within:], resident_bytes - sum(sizes[:within]))


def place_units(shards: Shards, split: MemorySplit) -> tuple[GradHomes, list[bool]]:
    """Choose units whose states stay in memory, beside their gradients: what updates of those replace has no other
    place, so that they wait for the norm. The gradients of others pass through slots.

    Returns:
        The homes of gradients, and of every tile below whether it stays.
    """
    grads, tiles = shards.grad_sizes, [shards.tile_sizes_of(unit) for unit in range(len(shards.numels))]
    capacity_bytes = split.grads_bytes + split.states_bytes
    if sum(grads) + sum(map(sum, tiles)) <= capacity_bytes:
        return GradHomes(tuple(range(len(grads)))), [True] * sum(map(len, tiles))
    homes = _with_most_slots(grads, shards.standing, split.grads_bytes)
    own = set(homes.own)
    slot_bytes = max((grads[unit] for unit in homes.spilled), default=0)
    free_bytes = capacity_bytes - sum(grads[unit] for unit in own) - homes.slots * slot_bytes
    kept = [0] * len(tiles)  # tiles that stay, by unit

    def keep(unit: int) -> None:
        """Have as many of its tiles stay as there is room for."""
        nonlocal free_bytes
        beside = 0 if unit in own else grads[unit]
        fitting = sum(total <= free_bytes - beside for total in itertools.accumulate(tiles[unit]))
        if fitting:
            own.add(unit)
            kept[unit] = fitting
            free_bytes -= beside + sum(tiles[unit][:fitting])

    first = next((unit for unit, sizes in enumerate(tiles) if sizes), None)
    if first is not None:
        keep(first)  # see `resident_tiles`
    others = [unit for unit, sizes in enumerate(tiles) if sizes and unit != first]
    costs = [sum(tiles[unit]) + (0 if unit in own else grads[unit]) for unit in others]
    whole = stay_in_memory(costs, free_bytes)
    for unit in itertools.compress(others, whole):
        keep(unit)
    for unit in (unit for unit, stays in zip(others, whole, strict=True) if not stays):
        keep(unit)
    stay = [index < count for count, sizes in zip(kept, tiles, strict=True) for index in range(len(sizes))]
    spilled = tuple(unit for unit in homes.spilled if unit not in own)
    return GradHomes(tuple(sorted(own)), spilled, homes.slots if spilled else 0), stay


def _with_most_slots(sizes: Sequence[int], standing: Collection[int], capacity_bytes: int) -> GradHomes:
    """Homes of gradients that leave with their updates.

    Slots are as large as the largest unit that shares them, so that a few that are larger than most have memory of
    their own where that makes more slots.
    """
    if sum(sizes) <= capacity_bytes:
        return GradHomes(tuple(range(len(sizes))))
    others = [unit for unit in range(len(sizes)) if unit not in standing and sizes[unit]]
    by_size = sorted(others, key=sizes.__getitem__, reverse=True)

    def slots_beside(alone: int) -> int:
        """How many there are if so many of the largest have memory of their own."""
        spare = capacity_bytes - sum(sizes[unit] for unit in (*standing, *by_size[:alone]))
        return min(_RECOVERED_SLOTS, spare // sizes[by_size[alone]])

    alone = max(range(min(_LARGE_UNITS + 1, len(by_size))), key=slots_beside)
    own = {*standing, *by_size[:alone]}
    return GradHomes(tuple(sorted(own)), tuple(unit for unit in others if unit not in own), max(1, slots_beside(alone)))


def place_gradients(
    sizes: Sequence[int],
    standing: Collection[int],
    capacity_bytes: int,
    *,
    spills: bool,
    blocks: Sequence[str] = (),
) -> GradHomes:
    """Divide units with gradients of these sizes among the homes.

    Args:
        standing: units whose gradients stay open while those of others come and go.
        spills: all gradients are to be held, those that do not fit on the drive.
        blocks: name of the block that each unit is a part of: all of its units may be open at once.
    """
    if sum(sizes) <= capacity_bytes:
        return GradHomes(tuple(range(len(sizes))))
    others = [unit for unit in range(len(sizes)) if unit not in standing and sizes[unit]]
    spare = capacity_bytes - sum(sizes[unit] for unit in standing)
    if not spills:  # the largest other unit would seldom find so much in one piece, if two more have room beside it
        by_size = sorted(others, key=sizes.__getitem__, reverse=True)
        rest = [0 if unit in (*standing, *by_size[:1]) else size for unit, size in enumerate(sizes)]
        fits = sum(sizes[unit] for unit in by_size[:3]) <= spare
        fits = fits and sizes[by_size[0]] + max(_by_block(rest, blocks)) <= spare
        return GradHomes((*standing, *by_size[: int(fits)]))
    largest = max(sizes[unit] for unit in others)
    slots = max(1, min(_SPILL_SLOTS, spare // largest))
    stay = stay_in_memory([sizes[unit] for unit in others], max(0, spare - slots * largest))
    own = {*standing, *(unit for unit, stays in zip(others, stay, strict=True) if stays)}
    return GradHomes(tuple(sorted(own)), tuple(unit for unit in others if unit not in own), slots)
