"""Optimizer states of every unit, as tiles that live in host memory or in the NVMe tier.

A training step touches every tile once, so the share that fits in host memory simply stays there: for a cyclic
scan no replacement policy hits more. Those of the first unit stay before others: its gradients come last in a
backward pass and the next forward begins with it, so nothing would hide its traffic. Otherwise the resident tiles are
spread evenly among the stored ones, which keeps the disk's load even over the step.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from infinity.io import IoFuture, Priority
from infinity.memory import Arena, Lease
from infinity.telemetry import Counters
from infinity.tiers.swap import Extent, SwapSpace


@dataclass(frozen=True)
class Tile:
    """A slice of a unit's trainable shard.

    Attributes:
        unit: index of the unit.
        index: position of the tile within the unit.
        start, numel: range of elements within the shard.
        nbytes: bytes of the optimizer's fields for that range.
        home: a lease (host memory) or an extent (NVMe).
    """

    unit: int
    index: int
    start: int
    numel: int
    nbytes: int
    home: Lease | Extent


def cut_into_tiles(shard_numels: Sequence[int], tile_numel: int) -> Iterator[int]:
    """Elements of every tile of every shard."""
    for shard_numel in shard_numels:
        for start in range(0, shard_numel, tile_numel):
            yield min(tile_numel, shard_numel - start)


def stay_in_memory(tile_sizes: Sequence[int], resident_bytes: int) -> list[bool]:
    """Which tiles stay in so much host memory: spread evenly among the others."""
    share = min(1.0, resident_bytes / max(1, sum(tile_sizes)))
    seen_bytes = held_bytes = 0
    stay = []
    for nbytes in tile_sizes:
        seen_bytes += nbytes
        stay.append(held_bytes + nbytes <= min(share * seen_bytes, resident_bytes))
        held_bytes += nbytes if stay[-1] else 0
    return stay


def resident_tiles(
    shard_numels: Sequence[int], tile_numel: int, tile_bytes: Callable[[int], int], resident_bytes: int
) -> list[bool]:
    """Which tiles of these shards, in the order in which a model uses them, stay in so much host memory."""
    sizes = [tile_bytes(numel) for numel in cut_into_tiles(shard_numels, tile_numel)]
    first = -(-next((numel for numel in shard_numels if numel), 0) // tile_numel)
    within = sum(total <= resident_bytes for total in itertools.accumulate(sizes[:first]))
    left_bytes = resident_bytes - sum(sizes[:within])
    return [True] * within + stay_in_memory(sizes[within:], left_bytes)


class StateStore:
    """The tiles of every unit and their homes.

    Args:
        shard_numels: trainable elements of each unit, padded.
        tile_numel: elements of a full tile.
        tile_bytes: bytes of a tile of so many elements.
        resident_bytes: host memory for tiles that stay; with no swap space all of them do.
    """

    def __init__(
        self,
        shard_numels: Sequence[int],
        tile_numel: int,
        tile_bytes: Callable[[int], int],
        *,
        arena: Arena,
        resident_bytes: int,
        swap: SwapSpace | None,
        counters: Counters,
    ) -> None:
        self._swap = swap
        self._counters = counters
        stay = iter(resident_tiles(shard_numels, tile_numel, tile_bytes, resident_bytes))
        self._tiles: list[list[Tile]] = []
        for unit, shard_numel in enumerate(shard_numels):
            tiles = []
            for index, start in enumerate(range(0, shard_numel, tile_numel)):
                numel = min(tile_numel, shard_numel - start)
                nbytes = tile_bytes(numel)
                home = arena.lease(nbytes) if swap is None or next(stay) else swap.reserve(nbytes)
                tiles.append(Tile(unit, index, start, numel, nbytes, home))
            self._tiles.append(tiles)
        self._stored_tiles = [[tile for tile in tiles if isinstance(tile.home, Extent)] for tiles in self._tiles]

    def tiles(self, unit: int) -> Sequence[Tile]:
        return self._tiles[unit]

    def stored(self, unit: int, first: int = 0) -> Iterator[Tile]:
        """The unit's tiles on NVMe, from the tile `first` on."""
        tiles = self._stored_tiles[unit]
        return itertools.islice(tiles, bisect_left(tiles, first, key=attrgetter("index")), None)

    def read(self, tile: Tile, slot: Lease, priority: Priority = Priority.PREFETCH) -> IoFuture:
        """Start reading a stored tile into `slot`."""
        swap, extent = self._place_of(tile)
        read = swap.read(extent, slot.span(0, tile.nbytes), priority=priority)
        self._counters.moved("nvme_read", tile.nbytes, read, tile.unit, "states")
        return read

    def write(self, tile: Tile, slot: Lease) -> IoFuture:
        """Start writing a stored tile from `slot`."""
        swap, extent = self._place_of(tile)
        write = swap.write(extent, slot.span(0, tile.nbytes))
        self._counters.moved("nvme_write", tile.nbytes, write, tile.unit, "states")
        return write

    def _place_of(self, tile: Tile) -> tuple[SwapSpace, Extent]:
        if self._swap is None or not isinstance(tile.home, Extent):
            raise RuntimeError(f"tile {tile.index} of unit {tile.unit} lives in host memory")
        return self._swap, tile.home


def tile_buffer(lease: Lease, tile: Tile) -> torch.Tensor:
    """The bytes of a tile within a lease that holds it."""
    return lease.tensor(torch.uint8, tile.nbytes)
