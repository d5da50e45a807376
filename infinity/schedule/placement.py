"""Decide once, at `initialize`, the home of every field of every unit. The result is plain data.

[Note: placement]
Three facts of a run decide the placement: its stage, its offload sections, and its compute device.

- If the compute device is the CPU, device and host are one memory, and `none` and `cpu` mean the same.
- A shard is *apart* from the unsharded tensor that the model computes on if the device has memory of its own, or if
  several ranks share the tensor. The optimizer then updates the shard, in host memory. Otherwise it updates the tensor
  itself.
- If states are on the device, the device also updates the parameters. At stages 0 to 2, and on one rank, it updates the
  shard's place in the tensor, which stays on the device. At stage 3 on several ranks, unsharded tensors are freed, so
  the device has a SHARD copy in addition, and updates it.
- Fields that are divided among ranks (at every stage but 0) have their home in shards. At stages 1 and 2, unsharded
  parameters stay; at stage 3 they are gathered from shards. With `communication.shard_size`, the ranks form groups:
  the ranks of a group divide the states, and every group has all states.

`Rules` contains these facts for all units. `place` then moves fields that exceed the divided budget to NVMe, tile by
tile and unit by unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch

from infinity.config import Config, NvmeConfig
from infinity.errors import ConfigError
from infinity.kernels import scratch_bytes
from infinity.schedule.budget import MemoryNeeds, MemorySplit, gather_more, raise_memory
from infinity.schedule.on_device import as_far_as_fits, first_to_stay, may_fill, promotion_order, share_on_device
from infinity.tiers import ARRIVING_UNITS, FlatSpec, GradHomes, Memory, Sharding

_SPILL_SLOTS = 3  # one filled, one written, one read
_RECOVERED_SLOTS = 16  # more than _SPILL_SLOTS, because units hold their slots until their updates run
_LARGE_UNITS = 2  # an embedding and a head
_GRADS_IN_FLIGHT = 3  # units that may hold gradients at once if updates run in backward
# At most 1/4 of all gradients may wait for an update after backward. Without them, the drive would idle under the next
# forward pass, and the device would idle in backward while the optimizer updates a large unit.
_GRADS_LEFT_SHARE = 4
_DEVICE_TILE_BYTES = 64 << 20
_AHEAD_NUMEL = 50_000_000  # gathered early, beyond the next unit: the default of stage3_prefetch_bucket_size
_DRIVE_COPIES = 3  # two slots, and a checkpoint
_STAGING_UNITS = 3  # shards in staging memory at once: one uploaded, one read, one updated


@dataclass(frozen=True)
class ParamRules:
    """Rules for parameters.

    Attributes:
        home: home of the parameters that can be evicted; DEVICE if none can.
        home_on_device: home of the parameters whose states are on the device.
        gathers: whether units are gathered from the shards of several ranks.
        ahead_numel: elements of units that are gathered early, beyond the next one.
        pass_host: whether to read parameters from the drives directly into device memory, if possible.
    """

    home: Memory
    home_on_device: Memory
    gathers: bool
    ahead_numel: int
    pass_host: bool


@dataclass(frozen=True)
class GradRules:
    """Rules for gradients.

    Attributes:
        reduces: whether gradients are summed over several ranks.
        reduces_every_pass: whether this happens in every backward pass, and not only in the last one of a step.
        collects_all: whether every rank holds the full gradients of all units at once before the reduction.
        holds_all: whether this rank holds the gradients of all units at once, in memory or on NVMe.
        spills: whether gradients that exceed host memory go to NVMe.
        recovers: whether gradients of units whose states are all double-buffered on NVMe need no memory after
            speculative updates, because they can be reconstructed.
        stream: whether a unit's gradients leave the device during the computation, unless they are added to other
            gradients on the host.
        sums_on_device: whether gradients of several micro-batches are summed on the device, as far as it has memory,
            and downloaded once.
        sums_once: whether each rank keeps the sum of its group's gradients over a step, as far as there is memory, so
            that replicas exchange it once a step.
    """

    reduces: bool
    reduces_every_pass: bool
    collects_all: bool
    holds_all: bool
    spills: bool
    recovers: bool
    stream: bool
    sums_on_device: bool
    sums_once: bool

    def parts(self, params: int) -> int:
        """Return the number of parts in which the gradients of a unit with this many parameters arrive.

        Each parameter is a part; if ranks reduce the gradients, the unit is one part.
        """
        return 1 if self.reduces else params


@dataclass(frozen=True)
class StateRules:
    """Rules for optimizer states.

    Attributes:
        home: DEVICE if states and gradients never leave the device.
        share_on_device: share of the states that is on the device, in whole units. The other states are in `home`.
        fills: whether spare device memory is filled with states of further units after the first step.
        keeps_steps: whether each finished step stays on NVMe. Fields in host memory then also have a place on NVMe.
        least_tile_bytes: minimum size of a tile, because smaller ones are not worth a kernel launch on a device.
    """

    home: Memory
    share_on_device: float
    fills: bool
    keeps_steps: bool
    least_tile_bytes: int


@dataclass(frozen=True)
class Rules:
    """Rules for all units alike, see [Note: placement].

    Attributes:
        sharding: this rank's slice of a unit's states, gradients, and shards of parameters.
        replicas: number of ranks with the same slice.
        site: the memory in which the optimizer updates parameters: HOST for a shard that is apart, DEVICE for the
            tensor that the model computes on.
        one_memory: whether device and host are one memory, for which the host's budget pays.
        stage: ZeRO stage; 0 with one rank.
        waits_for_updates: whether `step()` returns only when all parameters are updated and shown. If False, updates
            continue under the next forward.
        drives: the drives in use.
        activations_bytes: host memory for activations; 0 if they stay on the device.
    """

    params: ParamRules
    grads: GradRules
    states: StateRules
    sharding: Sharding
    replicas: int
    site: Memory
    one_memory: bool
    stage: int
    waits_for_updates: bool
    drives: tuple[NvmeConfig, ...]
    activations_bytes: int

    @property
    def stay_by_units(self) -> bool:
        """Whether states stay in memory by whole units, see `place_units`."""
        return self.grads.recovers and not self.states.keeps_steps

    def with_grads_recovered(self, *, params: bool) -> Rules:
        """Return these rules for speculative updates after which gradients of units on NVMe can be reconstructed.

        Args:
            params: whether parameters can be reconstructed, too, so that they need no slots of their own.
        """
        on_drives = self.states.home is Memory.NVME and (params or self.params.home is Memory.NVME)
        return replace(self, grads=replace(self.grads, recovers=self.grads.spills and on_drives))

    def param_home(self, *, stays: bool, updated_on_device: bool) -> Memory:
        """Return the home of a unit's parameters. If it is NVMe, the budget may still move the parameters to the host.

        Args:
            stays: whether the parameters never leave the device.
            updated_on_device: whether the unit's states are on the device.
        """
        return Memory.DEVICE if stays else self.params.home_on_device if updated_on_device else self.params.home

    def stored_param_bytes(self, specs: Sequence[FlatSpec]) -> int:
        """Return the most bytes that this rank's parameters take on NVMe, without parameters in the user's files."""
        on_drives = self.params.home is Memory.NVME
        return sum(spec.shard_nbytes for spec in specs if on_drives and spec.offloaded and not spec.runs)

    def first_to_stay(
        self, first: Sequence[int], numels: Sequence[int], bytes_per_param: int, free_bytes: int
    ) -> frozenset[int]:
        """Return units whose parameters stay on the device so that their states can move to it; see `first_to_stay`."""
        return first_to_stay(first, numels, bytes_per_param, free_bytes) if self.states.fills else frozenset()

    def measured_on_device(self, parts: int) -> int:
        """Return for how many of `parts` parts of units the device measures the gradient norm: all or none."""
        return parts if self.grads.stream or self.states.share_on_device else 0

    def in_place_problem(self) -> str:
        """Return why frozen weights cannot be used in the user's files; empty if they can."""
        if self.params.home is Memory.NVME:
            return ""
        return (
            "weights cannot be read in place, because this configuration keeps parameters in memory: set "
            'zero_optimization.stage to 3 and zero_optimization.offload_param.device to "nvme", or pass in_place=False'
        )

    def no_sync_problem(self) -> str:
        """Return why a rank cannot hold the gradients of several passes before they are reduced; empty if it can."""
        if self.stage >= 2:
            return (
                f"no_sync keeps whole gradients on every rank, which stage {self.stage} avoids: leave it out, or use "
                "stage 0 or 1, which reduce gradients in the last micro-batch of a step anyway"
            )
        if not self.grads.reduces and not self.grads.holds_all:
            return (
                "no_sync keeps the gradients of all units, but the update schedule `backward` has memory for a few "
                "units only: set tiering.update_schedule to deferred, or gradient_accumulation_steps"
            )
        return ""


def rules_of(
    config: Config, rank: int, ranks: int, *, discrete: bool, exact: bool = True, updates_in_backward: bool
) -> Rules:
    """Resolve a configuration.

    Args:
        rank: number of this process among the `ranks` processes that train the model together.
        discrete: whether the compute device has memory of its own.
        exact: whether the state format has exact moments, which a device can update, too.
        updates_in_backward: whether a unit is updated as soon as its gradients are final.

    Raises:
        ConfigError: the ranks cannot be divided into groups of the configured size, or two keys contradict each other.
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
    home_on_device = Memory.SHARD if stage == 3 and sharding.count > 1 else Memory.DEVICE
    may_be_on_device = states == "none" and discrete and exact
    if params == "nvme":
        home = Memory.NVME
    elif apart and (params == "cpu" or (home_on_device is Memory.SHARD and not may_be_on_device)):
        home = Memory.HOST
    else:
        home = home_on_device
    states_home = {"nvme": Memory.NVME, "cpu": Memory.HOST, "none": Memory.HOST}[states]
    share = share_on_device(config, discrete=discrete, exact=exact)
    if may_be_on_device and home is home_on_device:
        states_home, share = Memory.DEVICE, 1.0
    fills = states_home is not Memory.DEVICE and may_fill(config, ranks, discrete=discrete, exact=exact)
    asked_on_device = share > 0 or (fills and config.tiering.fill_device is True)
    streams = discrete and states_home is not Memory.DEVICE
    pass_host = config.aio.use_gds and discrete and home is Memory.NVME
    if config.tiering.crash_consistent and (share > 0 or fills):
        raise ConfigError(
            "tiering.crash_consistent needs updates in host memory, whose results it writes to the drives, but with "
            "offload_optimizer.device none, ratio below 1 or tiering.fill_device, states are updated on the device: "
            "set device to cpu or nvme, and leave the other two out"
        )
    if pass_host and config.tiering.checksum:
        raise ConfigError(
            "aio.use_gds reads past the host, but tiering.checksum needs the bytes in host memory: switch one of them "
            "off"
        )
    return Rules(
        params=ParamRules(
            home=home,
            home_on_device=home_on_device,
            gathers=sharding.count > 1,
            ahead_numel=_ahead_numel(config, discrete=discrete) if sharding.count > 1 else 0,
            pass_host=pass_host,
        ),
        grads=GradRules(
            reduces=ranks > 1,
            reduces_every_pass=every_pass,
            collects_all=ranks > 1 and summed and not every_pass,
            holds_all=summed or not updates_in_backward,
            spills=on_drives and (summed or not updates_in_backward),
            recovers=False,
            stream=streams,
            sums_on_device=streams and summed and (ranks == 1 or every_pass),
            sums_once=every_pass and summed and 1 < sharing < ranks,
        ),
        states=StateRules(
            home=states_home,
            share_on_device=share,
            fills=fills,
            keeps_steps=config.tiering.crash_consistent,
            # tiles on NVMe keep the size that is best for a drive
            least_tile_bytes=_DEVICE_TILE_BYTES if asked_on_device and states_home is not Memory.NVME else 0,
        ),
        sharding=sharding,
        replicas=ranks // sharing,
        site=Memory.HOST if apart else Memory.DEVICE,
        one_memory=not discrete,
        stage=stage if ranks > 1 else 0,
        # At these stages, training loops read and write parameters between steps, as in torch.
        waits_for_updates=stage < 3 and config.tiering.update_schedule == "auto",
        drives=config.tiering.nvme if on_drives else (),
        activations_bytes=config.tiering.activation_memory_bytes if activations_move else 0,
    )


def _ahead_numel(config: Config, *, discrete: bool) -> int:
    """Return the configured number of elements. The default is 0 if the device has no memory of its own."""
    asked = config.zero.prefetch_numel
    return asked if asked is not None else _AHEAD_NUMEL if discrete else 0


def may_run_ahead(config: Config, ranks: int, *, discrete: bool) -> bool:
    """Whether speculative updates cost nothing.

    There are two cases. Either all fields that they change are double-buffered on NVMe anyway, and users do not read
    the fields between steps. Or everything is in memory, and the host's cores are idle while a device computes.
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
    """Whether "auto" makes updates of units on NVMe speculative.

    True if their gradients need not be kept, and NVMe has room for a second slot and a checkpoint.

    Args:
        rules: the rules with speculative updates.
        slot_bytes: bytes of one slot of all fields that may be on NVMe.
        drive_bytes: returns the free space on the drives; None if it is unknown, and assumed to be enough.
    """
    chosen_here = config.tiering.update_schedule == "auto" and config.waits and config.managed_accumulation
    if not chosen_here or not rules.stay_by_units or not _alone_with_device(ranks, discrete=not rules.one_memory):
        return False
    free_bytes = drive_bytes()
    return free_bytes is None or _DRIVE_COPIES * slot_bytes <= free_bytes


def _alone_with_device(ranks: int, *, discrete: bool) -> bool:
    """Whether one rank computes on a device. The host's cores and drives are then idle while the device computes.

    Several ranks would have to exchange messages for each unit instead of once a step.
    """
    return discrete and ranks == 1


@dataclass(frozen=True)
class Shards:
    """The sizes of this rank's optimizer states and gradients.

    Attributes:
        numels: elements of each unit in this rank's optimizer.
        tile_numel, tile_bytes: elements of a full tile of optimizer states; function from elements to a tile's bytes.
        standing: units whose gradients stay incomplete while gradients of other units are completed and used.
        on_device: units whose states and gradients are on the device. The others are *off* it.
        blocks: the block that contains each unit; by default, each unit is a block.
    """

    numels: Sequence[int]
    tile_numel: int
    tile_bytes: Callable[[int], int]
    grad_dtype: torch.dtype
    standing: Collection[int]
    on_device: frozenset[int] = frozenset()
    blocks: Sequence[str] = ()

    @cached_property
    def off_device(self) -> list[int]:
        """Like `numels`, but 0 for units whose states are on the device."""
        return [0 if unit in self.on_device else numel for unit, numel in enumerate(self.numels)]

    @cached_property
    def tile_sizes(self) -> list[int]:
        """Bytes of every tile that is off the device."""
        return self._tile_sizes(self.off_device)

    def tile_sizes_of(self, unit: int) -> list[int]:
        """Return the bytes of the unit's tiles that are off the device."""
        return self._tile_sizes([self.off_device[unit]])

    @cached_property
    def grad_sizes(self) -> list[int]:
        """Bytes of each unit's gradients that are off the device."""
        return [numel * self.grad_dtype.itemsize for numel in self.off_device]

    @cached_property
    def device_states_bytes(self) -> int:
        return self.states_bytes(self.on_device)

    def states_bytes(self, units: Collection[int]) -> int:
        return sum(self._tile_sizes([self.numels[unit] for unit in units]))

    def _tile_sizes(self, numels: Sequence[int]) -> list[int]:
        return _sizes_of_tiles(numels, self.tile_numel, self.tile_bytes)


def may_come(rules: Rules, specs: Sequence[FlatSpec], shards: Shards, first: Collection[int]) -> list[int]:
    """Return units whose states may move to the device later, in order; `first` come first.

    The parameters of these units stay on the device.
    """
    if not rules.states.fills:
        return []
    staying = [0 if spec.offloaded else numel for spec, numel in zip(specs, shards.off_device, strict=True)]
    return promotion_order(staying, first)


# Shares of memory #


class Share(NamedTuple):
    """Bytes that are always in use, and the minimum and useful maximum for units that are fetched and evicted."""

    always: int = 0
    least: int = 0
    most: int = 0


@dataclass(frozen=True)
class ParamBytes:
    """The bytes of parameters in each memory.

    Attributes:
        computed: tensors that the model computes on, and SHARD copies; in device memory, or in host memory if the two
            are one memory.
        homes: shards in host memory that are apart from these tensors: in transit, which takes at least `staging`, and
            at home.
    """

    computed: Share
    homes: Share
    staging: int


def param_bytes(rules: Rules, specs: Sequence[FlatSpec]) -> ParamBytes:
    moving = sorted((spec for spec in specs if spec.offloaded), key=lambda spec: spec.nbytes, reverse=True)
    staying = sum(spec.nbytes for spec in specs if not spec.offloaded)
    shards = sum(spec.shard_nbytes for spec in specs if spec.has_device_shard)
    # These units are in memory twice, as a shard and unsharded. After the three largest, count only early gathers.
    twice = [spec.nbytes for spec in moving if spec.has_device_shard or (rules.one_memory and rules.params.gathers)]
    most = sum(spec.nbytes for spec in moving) - sum(twice[3:])
    most += min(sum(twice[3:]), rules.params.ahead_numel * specs[0].dtype.itemsize)
    together = _together_bytes(moving)
    computed = Share(staying + shards, together, max(together, most))
    if rules.site is Memory.DEVICE:
        return ParamBytes(computed, Share(), 0)
    # Units that are updated on the device pass through host memory when they are created or read.
    units = 1 if rules.states.home is Memory.DEVICE else _STAGING_UNITS
    staging = units * max(spec.shard_nbytes for spec in specs)
    homes = sum(spec.shard_nbytes for spec in moving if not spec.has_device_shard)
    # If parameters stay on a device, each update needs a copy of its unit in host memory. With memory for all copies,
    # no update waits for the upload of another one.
    need_images = units > 1 and not (moving or rules.one_memory)
    images = sum(spec.shard_nbytes for spec in specs) if need_images else 0
    least = staging + (0 if rules.params.home is Memory.NVME else homes)
    return ParamBytes(computed, Share(0, least, max(staging, images) + homes), staging)


def room_advice(rules: Rules, params: ParamBytes, itemsize: int, moving_bytes: int, more_bytes: int) -> str:
    """Return advice on how to give more memory to units that are fetched and evicted.

    Args:
        itemsize: bytes of one element.
        moving_bytes: the memory that these units have.
        more_bytes: the bytes that are missing.
    """
    if rules.params.gathers and moving_bytes >= params.computed.most:
        return gather_more(rules.params.ahead_numel, itemsize, more_bytes)
    return raise_memory("tiering.host_memory" if rules.one_memory else "tiering.device_memory", more_bytes)


def _together_bytes(moving: Sequence[FlatSpec]) -> int:
    """Return the most bytes that a use needs at once.

    These are the units of a module and of the modules that contain it, and one more unit that is fetched or updated.

    Args:
        moving: units that are fetched and evicted, the largest first.
    """
    nbytes: dict[str, int] = {}
    for spec in moving:
        nbytes[spec.modules[-1]] = nbytes.get(spec.modules[-1], 0) + spec.nbytes
    most = 0
    for around in {spec.modules for spec in moving}:
        other = next((spec.nbytes for spec in moving if spec.modules[-1] not in around), 0)
        most = max(most, sum(nbytes.get(module, 0) for module in dict.fromkeys(around)) + other)
    return most


def collecting_bytes(
    rules: Rules,
    numels: Sequence[int],
    shared: Container[int],
    collect: torch.dtype,
    travel: torch.dtype,
    hold: torch.dtype,
) -> int:
    """Return the most bytes in which full gradients are collected and reduced, and in which they leave a device.

    Torch's own copies are not included. A model whose backward pass leaves modules in no fixed order may take more.

    Args:
        numels: trainable elements of each unit.
        shared: units that several modules use; their gradients are collected until the pass ends.
        collect, travel, hold: dtypes in which gradients are collected, reduced, and held until they are used.
    """
    if not rules.grads.reduces:
        return 0
    kept = [rules.grads.collects_all or unit in shared for unit in range(len(numels))]
    moving = sorted((numel for numel, stays in zip(numels, kept, strict=True) if not stays), reverse=True)
    converts = collect is not travel  # otherwise a unit is sent from its own memory, while the next one is collected
    collected = sum(numels) - sum(moving) + sum(moving[: 1 if converts else 2])
    shard = max(numels) // rules.sharding.count if rules.sharding.count > 1 else 0
    shard *= 2 if rules.replicas > 1 else 1  # one is summed over its replicas while the next is scattered
    leaving = ARRIVING_UNITS * max(numels) // rules.sharding.count if rules.grads.stream else 0
    moving_bytes = ((max(numels) if converts else 0) + shard) * travel.itemsize + leaving * hold.itemsize
    return collected * collect.itemsize + moving_bytes


class GradShare(NamedTuple):
    """Bytes of gradients.

    Attributes:
        least: the minimum.
        flowing: the amount with which the computation continues during an update.
        most: the useful maximum.
    """

    least: int = 0
    flowing: int = 0
    most: int = 0


def _by_block(sizes: Sequence[int], blocks: Sequence[str]) -> list[int]:
    """Return the bytes of whole blocks; without block names, each unit is a block."""
    if not blocks:
        return list(sizes)
    found: dict[str, int] = {}
    for block, size in zip(blocks, sizes, strict=True):
        found[block] = found.get(block, 0) + size
    return list(found.values())


def grad_share(rules: Rules, shards: Shards, sizes: Sequence[int], *, on_device: bool = False) -> GradShare:
    """Return the bytes of gradients in the memory that holds them.

    The units of a block count as one: the gradients of any of them may be incomplete until backward leaves the block.

    Args:
        sizes: bytes of each unit's gradients.
        on_device: whether the memory is the device's. Its gradients do not spill, and no update waits for the drive.
    """
    total = sum(sizes)
    largest_first = sorted(_by_block(sizes, shards.blocks), reverse=True)
    open_bytes = sum(sizes[unit] for unit in shards.standing)

    def in_flight_bytes(units: int) -> int:
        return min(total, sum(largest_first[:units]) + open_bytes)

    if rules.grads.holds_all and (on_device or not rules.grads.recovers):
        least = in_flight_bytes(1) if rules.grads.spills and not on_device else total
        return GradShare(least, least, total)
    left = 0
    if not on_device and rules.states.home is Memory.NVME:
        left = total // _GRADS_LEFT_SHARE
    elif not on_device and rules.grads.stream:  # a device computes faster than host memory serves the optimizer
        left = total
    return GradShare(in_flight_bytes(1), in_flight_bytes(2), min(total, in_flight_bytes(_GRADS_IN_FLIGHT) + left))


class DeviceShare(NamedTuple):
    """Bytes on the device in addition to parameters.

    Attributes:
        states: optimizer states on the device.
        grads_least, grads_most: gradients that stay on the device for these states, the minimum and maximum.
        sums: sums of gradients that are later downloaded or sent to the replicas.
    """

    states: int = 0
    grads_least: int = 0
    grads_most: int = 0
    sums: int = 0


def device_share(rules: Rules, shards: Shards) -> DeviceShare:
    grads = device_grads(rules, shards)
    return DeviceShare(shards.device_states_bytes, grads.flowing, grads.most, sum(_sum_sizes(rules, shards)))


def _sum_sizes(rules: Rules, shards: Shards) -> Sequence[int]:
    """Return the bytes of each unit's sum over a step's micro-batches."""
    if rules.grads.sums_once:
        return [numel * shards.grad_dtype.itemsize for numel in shards.numels]
    return shards.grad_sizes if rules.grads.sums_on_device else ()


def units_that_fit(rules: Rules, shards: Shards, order: Sequence[int], spare_bytes: int) -> list[int]:
    """Return the units whose states fit into `spare_bytes` of device memory, taken in this order.

    The memory must also hold the gradients of these units that exist at once, and the scratch of an update.
    """
    states = [shards.states_bytes([unit]) for unit in range(len(shards.numels))]
    scratch = scratch_bytes(max((shards.numels[unit] for unit in order), default=0))
    if rules.grads.holds_all:
        grads = [numel * shards.grad_dtype.itemsize for numel in shards.numels]
        sizes, passing = [sum(pair) for pair in zip(states, grads, strict=True)], scratch
    else:
        sizes, passing = states, scratch + device_grads(rules, shards, order).flowing
    taken = as_far_as_fits(order, sizes, spare_bytes - passing)
    return [unit for unit in order if unit in taken]


def summed_once(rules: Rules, shards: Shards, capacity_bytes: int) -> dict[int, int]:
    """Return units whose sums the replicas exchange once a step, as far as there is memory, with the bytes of each."""
    taken: dict[int, int] = {}
    for unit, nbytes in enumerate(_sum_sizes(rules, shards) if rules.grads.sums_once else ()):
        if 0 < nbytes <= capacity_bytes:
            taken[unit] = nbytes
            capacity_bytes -= nbytes
    return taken


def device_grads(rules: Rules, shards: Shards, came: Collection[int] = ()) -> GradShare:
    """Return the bytes of gradients on the device, if the states of the units in `came` are also on it."""
    on_device = shards.on_device.union(came)
    sizes = [numel * shards.grad_dtype.itemsize if unit in on_device else 0 for unit, numel in enumerate(shards.numels)]
    return grad_share(rules, shards, sizes, on_device=True)


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
    """Return the minimum and the useful maximum of host memory.

    Args:
        slots: tiles in flight, the minimum and the useful maximum.
        collecting_bytes: for full gradients in transit between ranks.
        initial_bytes: values on their way to the tiers at `initialize`.
        images_bytes: of an undo log for all tiles; 0 if updates need none.
        embeddings: names of embeddings, which cannot be cut.
    """
    params = param_bytes(rules, specs)
    computed = params.computed if rules.one_memory else Share()
    stored = shards.tile_sizes if rules.states.home is Memory.NVME else []
    grads = grad_share(rules, shards, shards.grad_sizes)
    states_bytes = sum(shards.tile_sizes)
    beside = sum(shards.grad_sizes) if rules.stay_by_units else 0
    # Reads of states on the device pass through one slot.
    passing = int(rules.states.fills or bool(shards.on_device))
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


# Placement under a divided budget #


@dataclass(frozen=True)
class Placement:
    """The home of every field of every unit: the memory in which it is while it is not used.

    Attributes:
        params: homes of parameters, by unit.
        tiles: homes of tiles of optimizer states, by unit and tile.
        grad_homes: which units have memory of their own for their gradients, and which share memory.
        stored_bytes: optimizer states and gradients on NVMe, which each step reads and writes.
    """

    params: tuple[Memory, ...]
    tiles: tuple[tuple[Memory, ...], ...]
    grad_homes: GradHomes
    stored_bytes: int

    def host_homes_bytes(self, specs: Sequence[FlatSpec]) -> int:
        return sum(spec.shard_nbytes for spec, home in zip(specs, self.params, strict=True) if home is Memory.HOST)


def place(rules: Rules, specs: Sequence[FlatSpec], shards: Shards, split: MemorySplit) -> Placement:
    """Return the placement for this division of host memory."""
    if rules.stay_by_units:
        grads, stay = place_units(shards, split)
    else:
        if rules.grads.recovers:
            grads = _with_most_slots(shards.grad_sizes, shards.standing, split.grads_bytes)
        else:
            grads = place_gradients(
                shards.grad_sizes, shards.standing, split.grads_bytes, spills=rules.grads.spills, blocks=shards.blocks
            )
        # states whose home is host memory are granted in full
        stay = resident_tiles(shards.off_device, shards.tile_numel, shards.tile_bytes, split.states_bytes)
    homes_bytes = split.homes_bytes - param_bytes(rules, specs).staging
    of_tile = iter(stay)
    return Placement(
        params=tuple(_param_homes(rules, specs, homes_bytes)),
        tiles=tuple(
            tuple(
                Memory.DEVICE if unit in shards.on_device else Memory.HOST if next(of_tile) else Memory.NVME
                for _ in cut_into_tiles([numel], shards.tile_numel)
            )
            for unit, numel in enumerate(shards.numels)
        ),
        grad_homes=grads,
        stored_bytes=sum(shards.grad_sizes[unit] for unit in grads.spilled)
        + sum(size for size, stays in zip(shards.tile_sizes, stay, strict=True) if not stays),
    )


def _param_homes(rules: Rules, specs: Sequence[FlatSpec], homes_bytes: int) -> Iterator[Memory]:
    """Yield the home of each unit. Units that can be evicted get host memory until it is full, in the model's order."""
    for spec in specs:
        if not spec.offloaded:
            yield Memory.DEVICE
        elif spec.has_device_shard:
            yield Memory.SHARD
        elif spec.shard_nbytes <= homes_bytes:
            homes_bytes -= spec.shard_nbytes
            yield Memory.HOST
        else:
            yield Memory.FILE if spec.runs else rules.params.home


def cut_into_tiles(shard_numels: Sequence[int], tile_numel: int) -> Iterator[int]:
    """Yield the elements of every tile of every shard."""
    for shard_numel in shard_numels:
        whole, rest = divmod(shard_numel, tile_numel)
        yield from itertools.repeat(tile_numel, whole)
        if rest:
            yield rest


def _sizes_of_tiles(shard_numels: Sequence[int], tile_numel: int, tile_bytes: Callable[[int], int]) -> list[int]:
    """Return the bytes of every tile of every shard."""
    # A large model has a million tiles, but few different ones.
    return [*map(cache(tile_bytes), cut_into_tiles(shard_numels, tile_numel))]


def stay_in_memory(sizes: Sequence[int], resident_bytes: int) -> list[bool]:
    """Return which items stay in `resident_bytes` of memory, spread evenly so that the drive's load is even."""
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
    """Return which tiles of optimizer states stay in `resident_bytes` of host memory.

    Every step uses each tile once. For such a cyclic scan, no replacement policy has more hits than a fixed choice.
    Tiles of the first unit come first: its gradients are the last of a backward pass, and the next forward begins with
    it, so that its traffic would not overlap with computation.
    """
    sizes = _sizes_of_tiles(shard_numels, tile_numel, tile_bytes)
    first = -(-next((numel for numel in shard_numels if numel), 0) // tile_numel)
    within = sum(total <= resident_bytes for total in itertools.accumulate(sizes[:first]))
    return [True] * within + stay_in_memory(sizes[within:], resident_bytes - sum(sizes[:within]))


def place_units(shards: Shards, split: MemorySplit) -> tuple[GradHomes, list[bool]]:
    """Choose units whose states stay in memory, together with their gradients.

    Their updates wait for the norm, because the old values have no second copy. The gradients of all other units pass
    through slots.

    Returns:
        The homes of gradients, and whether each tile that is off the device stays.
    """
    grads, tiles = shards.grad_sizes, [shards.tile_sizes_of(unit) for unit in range(len(shards.numels))]
    capacity_bytes = split.grads_bytes + split.states_bytes
    if sum(grads) + sum(map(sum, tiles)) <= capacity_bytes:
        return GradHomes(tuple(range(len(grads)))), [True] * sum(map(len, tiles))
    homes = _with_most_slots(grads, shards.standing, split.grads_bytes)
    own = set(homes.own)
    slot_bytes = max((grads[unit] for unit in homes.spilled), default=0)
    free_bytes = capacity_bytes - sum(grads[unit] for unit in own) - homes.slots * slot_bytes
    kept = [0] * len(tiles)  # number of tiles that stay, by unit

    def keep(unit: int) -> None:
        """Keep as many of the unit's tiles as fit."""
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
    """Return the homes of gradients that need no memory after their speculative update.

    A slot is as large as the largest unit that uses it. So the largest units get memory of their own if this leaves
    memory for more slots.
    """
    if sum(sizes) <= capacity_bytes:
        return GradHomes(tuple(range(len(sizes))))
    others = [unit for unit in range(len(sizes)) if unit not in standing and sizes[unit]]
    by_size = sorted(others, key=sizes.__getitem__, reverse=True)

    def slots_beside(alone: int) -> int:
        """Return the number of slots if the `alone` largest units have memory of their own."""
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
    """Choose the homes of gradients with these sizes.

    Args:
        standing: see `Shards`.
        spills: whether all gradients are held until the end of backward, on NVMe if they do not fit.
        blocks: the block that contains each unit. The gradients of all units of a block may be incomplete at once.
    """
    if sum(sizes) <= capacity_bytes:
        return GradHomes(tuple(range(len(sizes))))
    others = [unit for unit in range(len(sizes)) if unit not in standing and sizes[unit]]
    spare = capacity_bytes - sum(sizes[unit] for unit in standing)
    # The largest of the other units would rarely find one free piece of its size. So it gets memory of its own if
    # there is memory for two more units.
    if not spills:
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
