"""Optimizer states of every unit, as tiles that live in host memory, in the NVMe tier, or where the model computes."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import torch

from infinity.errors import InfinityError
from infinity.io import Priority
from infinity.memory import Arena, Lease
from infinity.telemetry import Counters, StallCause
from infinity.tiers.copies import Field, Memory, State, Transfer
from infinity.tiers.link import Link
from infinity.tiers.swap import Extent, SwapSpace


class Tile(Field):
    """A slice of a unit's trainable shard.

    Attributes:
        unit: index of the unit.
        index: position of the tile within the unit.
        start, numel: range of elements within the shard.
        nbytes: bytes of the optimizer's fields for that range.
        home: the memory in which it lives; home_copy: its copy there.
        extent: where it lives on NVMe; None for others.
        there: its bytes where it lives on the device, uint8; None for others.
        lease: the memory of its host copy: its home, or a slot of the ring; None while it has none.
    """

    __slots__ = ("extent", "home", "home_copy", "index", "lease", "nbytes", "numel", "start", "there", "unit")

    def __init__(
        self, unit: int, index: int, start: int, numel: int, nbytes: int, place: Lease | Extent | torch.Tensor
    ) -> None:
        self.lease: Lease | None = place if isinstance(place, Lease) else None
        self.extent: Extent | None = place if isinstance(place, Extent) else None
        self.there: torch.Tensor | None = place if isinstance(place, torch.Tensor) else None
        self.home = Memory.HOST
        if self.lease is None:
            self.home = Memory.NVME if self.there is None else Memory.DEVICE
        super().__init__(f"tile {index} of the optimizer states of unit {unit}", {self.home, Memory.HOST})
        self.home_copy = self.copies[self.home]
        self.unit = unit
        self.index = index
        self.start = start
        self.numel = numel
        self.nbytes = nbytes


class StateStore:
    """The tiles of every unit and their homes.

    Args:
        shard_numels: trainable elements of each unit, padded.
        tile_numel: elements of a full tile.
        tile_bytes: bytes of a tile of so many elements.
        homes: where each tile lives, in the order of the units.
        link: to the device, where some live there.
    """

    def __init__(
        self,
        shard_numels: Sequence[int],
        tile_numel: int,
        tile_bytes: Callable[[int], int],
        homes: Iterable[Memory],
        *,
        arena: Arena,
        swap: SwapSpace,
        counters: Counters,
        link: Link | None = None,
    ) -> None:
        self._arena = arena
        self._swap = swap
        self._counters = counters
        self._link = link
        places = iter(homes)
        self._tiles: list[list[Tile]] = []
        for unit, shard_numel in enumerate(shard_numels):
            tiles = []
            for index, start in enumerate(range(0, shard_numel, tile_numel)):
                numel = min(tile_numel, shard_numel - start)
                nbytes = tile_bytes(numel)
                tiles.append(Tile(unit, index, start, numel, nbytes, self._place(next(places), nbytes)))
            self._tiles.append(tiles)
        self._stored_tiles = [[tile for tile in tiles if tile.extent is not None] for tiles in self._tiles]

    def _place(self, home: Memory, nbytes: int) -> Lease | Extent | torch.Tensor:
        if home is Memory.HOST:
            return self._arena.lease(nbytes)
        if home is Memory.NVME:
            return self._swap.reserve(nbytes)
        assert self._link is not None
        return torch.empty(nbytes, dtype=torch.uint8, device=self._link.device)

    def tiles(self, unit: int) -> Sequence[Tile]:
        return self._tiles[unit]

    def stored(self, unit: int, first: int = 0) -> Iterator[Tile]:
        """The unit's tiles on NVMe, from the tile `first` on."""
        tiles = self._stored_tiles[unit]
        return itertools.islice(tiles, bisect_left(tiles, first, key=attrgetter("index")), None)

    def read(self, tile: Tile, slot: Lease, priority: Priority) -> None:
        """Start reading a tile whose home is not host memory into `slot`.

        Raises:
            InfinityError: its values are lost.
        """
        if tile.state(tile.home) is not State.VALID:  # or being written: the ring waits for that
            raise InfinityError(f"{tile.name} is lost: an update or a write of it has failed")
        if tile.extent is None:
            self._download(tile, slot)
            return
        read = self._swap.read(tile.extent, slot.span(0, tile.nbytes), priority=priority)
        tile.lease = slot
        tile.begin_move(Memory.NVME, Memory.HOST, read, StallCause.DISK_READ)
        self._counters.moved("nvme_read", tile.nbytes, read, tile.unit, "states")

    def write(self, tile: Tile) -> Transfer:
        """Start writing such a tile from the slot where it is."""
        assert tile.lease is not None
        if tile.extent is None:
            return self._upload(tile, tile.lease)
        write = self._swap.write(tile.extent, tile.lease.span(0, tile.nbytes))
        tile.begin_move(Memory.HOST, Memory.NVME, write, StallCause.DISK_WRITE)
        self._counters.moved("nvme_write", tile.nbytes, write, tile.unit, "states")
        return write

    # The device #

    def _download(self, tile: Tile, slot: Lease) -> None:
        assert tile.there is not None
        assert self._link is not None
        copy = self._link.download(slot.tensor(torch.uint8, tile.nbytes), tile.there)
        tile.lease = slot
        tile.begin_move(Memory.DEVICE, Memory.HOST, copy, StallCause.HOST_LINK)
        self._counters.moved("device_to_host", tile.nbytes, copy, tile.unit, "states")

    def _upload(self, tile: Tile, slot: Lease) -> Transfer:
        assert tile.there is not None
        assert self._link is not None
        copy = self._link.upload(tile.there, slot.tensor(torch.uint8, tile.nbytes))
        self._link.compute_waits(copy)
        tile.begin_move(Memory.HOST, Memory.DEVICE, copy, StallCause.HOST_LINK)
        self._counters.moved("host_to_device", tile.nbytes, copy, tile.unit, "states")
        return copy

    def close(self) -> None:
        """Give the device's memory back; nothing may be on its way."""
        for tiles in self._tiles:
            for tile in tiles:
                tile.there = None
