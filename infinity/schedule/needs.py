"""How many bytes the values of a model need in each memory: the minimum, and the most that is useful."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch

from infinity.kernels import scratch_bytes
from infinity.schedule.budget import MemoryNeeds, raise_memory
from infinity.schedule.on_device import as_far_as_fits, promotion_order
from infinity.schedule.rules import Rules
from infinity.tiers import ARRIVING_UNITS, FlatSpec, Memory

_GRADS_IN_FLIGHT = 3  # units that may hold gradients at once if updates run in backward
# At most 1/4 of all gradients may wait for an update after backward. If none could wait, the drive would idle under the
# next forward pass, and the device in backward while a large unit is updated. A larger share would leave less memory
# for optimizer states, which get theirs after gradients (`split_memory`).
_WAITING_GRADS_SHARE = 4
STAGING_UNITS = 3  # shards in staging memory at once: one uploaded, one read, one updated


def cut_into_tiles(shard_numels: Sequence[int], tile_numel: int) -> Iterator[int]:
    """Yield the elements of every tile of every shard."""
    for shard_numel in shard_numels:
        whole, rest = divmod(shard_numel, tile_numel)
        yield from itertools.repeat(tile_numel, whole)
        if rest:
            yield rest


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

    def states_bytes(self, units: Collection[int]) -> int:
        return sum(self._tile_sizes([self.numels[unit] for unit in units]))

    def _tile_sizes(self, numels: Sequence[int]) -> list[int]:
        # A large model has a million tiles, but few different ones.
        return [*map(cache(self.tile_bytes), cut_into_tiles(numels, self.tile_numel))]


def may_come(rules: Rules, specs: Sequence[FlatSpec], shards: Shards, first: Collection[int]) -> list[int]:
    """Return units whose states may move to the device later, in order; `first` come first.

    The parameters of these units stay on the device.
    """
    if not rules.states.fills:
        return []
    staying = [0 if spec.offloaded else numel for spec, numel in zip(specs, shards.off_device, strict=True)]
    return promotion_order(staying, first)


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
        homes: shards in host memory, separate from these tensors: in transit, which takes at least `staging`, and
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
    if rules.update_memory is Memory.DEVICE:
        return ParamBytes(computed, Share(), 0)
    # Units that are updated on the device pass through host memory when they are created or read.
    units = 1 if rules.states.home is Memory.DEVICE else STAGING_UNITS
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
    if rules.params.gathers and moving_bytes >= params.computed.most:  # memory does not limit them
        numel = rules.params.ahead_numel + -(-more_bytes // itemsize)
        return f"raise zero_optimization.stage3_prefetch_bucket_size to {numel} elements"
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
        collect, travel, hold: dtypes in which gradients are collected, reduced, and stored until they are used.
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
        overlap: the amount with which backward continues while a unit is updated.
        most: the useful maximum.
    """

    least: int = 0
    overlap: int = 0
    most: int = 0


def by_block(sizes: Sequence[int], blocks: Sequence[str]) -> list[int]:
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
    largest_first = sorted(by_block(sizes, shards.blocks), reverse=True)
    open_bytes = sum(sizes[unit] for unit in shards.standing)

    def in_flight_bytes(units: int) -> int:
        return min(total, sum(largest_first[:units]) + open_bytes)

    if rules.grads.holds_all and (on_device or not rules.grads.reconstructs):
        least = in_flight_bytes(1) if rules.grads.spills and not on_device else total
        return GradShare(least, least, total)
    left = 0
    if not on_device and rules.states.home is Memory.NVME:
        left = total // _WAITING_GRADS_SHARE
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
    return DeviceShare(shards.states_bytes(shards.on_device), grads.overlap, grads.most, sum(_sum_sizes(rules, shards)))


def _sum_sizes(rules: Rules, shards: Shards) -> Sequence[int]:
    """Return the bytes of each unit's sum over a step's micro-batches."""
    if rules.grads.sums_once:
        return [numel * shards.grad_dtype.itemsize for numel in shards.numels]
    return shards.grad_sizes if rules.grads.sums_on_device else ()


def units_that_fit(rules: Rules, shards: Shards, order: Sequence[int], spare_bytes: int) -> list[int]:
    """Return the units whose states fit into `spare_bytes` of device memory, taken in this order.

    The memory must also hold the gradients of these units that exist at once, and the scratch of an update.
    """
    grad_bytes = shards.grad_dtype.itemsize if rules.grads.holds_all else 0
    sizes = [shards.states_bytes([unit]) + grad_bytes * numel for unit, numel in enumerate(shards.numels)]
    passing = scratch_bytes(max((shards.numels[unit] for unit in order), default=0))
    if not rules.grads.holds_all:
        passing += device_grads(rules, shards, order).overlap
    return as_far_as_fits(order, sizes, spare_bytes - passing)


def summed_once(rules: Rules, shards: Shards, capacity_bytes: int) -> dict[int, int]:
    """Return units whose sums the replicas exchange once a step, as far as there is memory, with the bytes of each."""
    sizes = _sum_sizes(rules, shards) if rules.grads.sums_once else ()
    trained = [unit for unit, nbytes in enumerate(sizes) if nbytes]
    return {unit: sizes[unit] for unit in as_far_as_fits(trained, sizes, capacity_bytes)}


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
        grads_overlap_bytes=grads.overlap,
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
        sums_bytes=sum(_sum_sizes(rules, shards)) if rules.one_memory else 0,
    )
