"""Decide once, at `initialize`, the home of every field of every unit, for a division of host memory."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from infinity.schedule.budget import MemorySplit
from infinity.schedule.needs import Shards, by_block, cut_into_tiles, param_bytes
from infinity.schedule.rules import Rules
from infinity.tiers import FlatSpec, GradHomes, Memory

_SPILL_SLOTS = 3  # one filled, one written, one read
_RECONSTRUCTED_SLOTS = 16  # more than _SPILL_SLOTS, because units hold their slots until their updates run
_LARGE_UNITS = 2  # an embedding and a head


@dataclass(frozen=True)
class Placement:
    """The home of every field of every unit: the memory in which it is while it is not used.

    Attributes:
        params: homes of parameters, by unit.
        tiles: homes of tiles of optimizer states, by unit and tile.
        grad_homes: which units have memory of their own for their gradients, and which share memory.
        stored_states_bytes: optimizer states on NVMe, which each step reads and writes.
    """

    params: tuple[Memory, ...]
    tiles: tuple[tuple[Memory, ...], ...]
    grad_homes: GradHomes
    stored_states_bytes: int

    def host_homes_bytes(self, specs: Sequence[FlatSpec]) -> int:
        return sum(spec.shard_nbytes for spec, home in zip(specs, self.params, strict=True) if home is Memory.HOST)


def place(rules: Rules, specs: Sequence[FlatSpec], shards: Shards, split: MemorySplit) -> Placement:
    """Return the placement for this division of host memory."""
    if rules.stay_by_units:
        grads, stay = place_units(shards, split)
    else:
        if rules.grads.reconstructs:
            grads = _with_most_slots(shards.grad_sizes, shards.standing, split.grads_bytes)
        else:
            grads = place_gradients(
                shards.grad_sizes, shards.standing, split.grads_bytes, spills=rules.grads.spills, blocks=shards.blocks
            )
        # states whose home is host memory are granted in full
        stay = resident_tiles(shards, split.states_bytes)
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
        stored_states_bytes=sum(size for size, stays in zip(shards.tile_sizes, stay, strict=True) if not stays),
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


def stay_in_memory(sizes: Sequence[int], resident_bytes: int) -> list[bool]:
    """Return which items stay in `resident_bytes` of memory, spread evenly so that the drive's load is even."""
    share = min(1.0, resident_bytes / max(1, sum(sizes)))
    seen_bytes = stay_bytes = 0
    stay = []
    for nbytes in sizes:
        seen_bytes += nbytes
        stay.append(stay_bytes + nbytes <= min(share * seen_bytes, resident_bytes))
        stay_bytes += nbytes if stay[-1] else 0
    return stay


def resident_tiles(shards: Shards, resident_bytes: int) -> list[bool]:
    """Return which tiles of optimizer states, of those off the device, stay in `resident_bytes` of host memory.

    Every step uses each tile once. For such a cyclic scan, no replacement policy has more hits than a fixed choice.
    Tiles of the first unit come first: its gradients are the last of a backward pass, and the next forward begins with
    it, so that its traffic would not overlap with computation.
    """
    sizes = shards.tile_sizes
    first = -(-next((numel for numel in shards.off_device if numel), 0) // shards.tile_numel)
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

    first, *others = [unit for unit, sizes in enumerate(tiles) if sizes]
    keep(first)  # see `resident_tiles`
    costs = [sum(tiles[unit]) + (0 if unit in own else grads[unit]) for unit in others]
    whole = dict(zip(others, stay_in_memory(costs, free_bytes), strict=True))
    for unit in sorted(others, key=lambda unit: not whole[unit]):  # units that stay as a whole come first
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
        return min(_RECONSTRUCTED_SLOTS, spare // sizes[by_size[alone]])

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
        spills: whether all gradients are kept until the end of backward, on NVMe if they do not fit.
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
        fits = fits and sizes[by_size[0]] + max(by_block(rest, blocks)) <= spare
        return GradHomes((*standing, *by_size[: int(fits)]))
    largest = max(sizes[unit] for unit in others)
    slots = max(1, min(_SPILL_SLOTS, spare // largest))
    stay = stay_in_memory([sizes[unit] for unit in others], max(0, spare - slots * largest))
    own = {*standing, *(unit for unit, stays in zip(others, stay, strict=True) if stays)}
    return GradHomes(tuple(sorted(own)), tuple(unit for unit in others if unit not in own), slots)
