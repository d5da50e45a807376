"""Optimizer states of every unit, as tiles whose home is host memory, NVMe, or the compute device."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch

from infinity.errors import InfinityError
from infinity.io import Priority
from infinity.memory import Arena, Lease
from infinity.telemetry import Counters, StallCause
from infinity.tiers.copies import Copy, Field, Memory, Move, State, Transfer
from infinity.tiers.slots import Extent, SlotExtent
from infinity.tiers.state_layout import DeviceStates, Fields
from infinity.tiers.swap import SwapSpace


class Tile(Field):
    """A slice of a unit's trainable shard.

    Attributes:
        unit: index of the unit.
        index: position of the tile within the unit.
        start, numel: range of elements within the shard.
        nbytes: bytes of the optimizer's fields for that range.
        home: the memory in which it is while it is not updated; home_copy: its copy in that memory.
        extent: its place on NVMe, as home or for write-through; None if it has none.
        lease: the memory of its host copy: its home, or a slot of the ring; None while it has none.
        own: while its home is the device, the host memory to which it returns; None otherwise.
    """

    __slots__ = ("extent", "home", "home_copy", "index", "lease", "nbytes", "numel", "own", "start", "unit")

    def __init__(
        self,
        unit: int,
        index: int,
        start: int,
        numel: int,
        nbytes: int,
        home: Memory,
        lease: Lease | None,
        extent: Extent | SlotExtent | None,
    ) -> None:
        self.lease = lease
        self.own: Lease | None = None
        self.extent = extent
        memories = {home, Memory.HOST} | ({Memory.NVME} if extent is not None else set())
        super().__init__(f"tile {index} of the optimizer states of unit {unit}", memories)
        self.set_home(home)
        self.unit = unit
        self.index = index
        self.start = start
        self.numel = numel
        self.nbytes = nbytes

    def set_home(self, home: Memory) -> None:
        """Change the home to a memory that has a copy of the tile, or will have one."""
        self.home = home
        self.home_copy = self.copies.setdefault(home, Copy(home))

    @property
    def is_written_through(self) -> bool:
        """Whether its home is host memory and changes are also written to NVMe."""
        return self.extent is not None and self.home is Memory.HOST

    @property
    def is_in_memory_alone(self) -> bool:
        """Whether its home is host memory and it has no place on NVMe. It may then move within host memory."""
        return self.extent is None and self.home is Memory.HOST


class UnitStates:
    """One unit's optimizer states.

    Attributes:
        tiles: in order; `indices`: the index of each.
        nbytes: bytes of all tiles.
        stored: the tiles whose home is NVMe.
        are_on_device: whether all tiles are on the device, which then updates the unit.
        fields: memory on the device for the whole shard; None if there is none.
    """

    __slots__ = ("are_on_device", "fields", "indices", "nbytes", "stored", "tiles")

    def __init__(self, tiles: Sequence[Tile]) -> None:
        self.tiles = tiles
        self.indices = frozenset(range(len(tiles)))
        self.nbytes = sum(tile.nbytes for tile in tiles)
        self.fields: Fields | None = None
        self.note_homes()

    def note_homes(self) -> None:
        """Update the attributes after the homes of tiles have changed. Free the device memory if it is unused."""
        self.stored = [tile for tile in self.tiles if tile.home is Memory.NVME]
        self.are_on_device = any(tile.home is Memory.DEVICE for tile in self.tiles[:1])
        if not self.are_on_device:
            self.fields = None

    def stored_from(self, first: int) -> Iterator[Tile]:
        """Return the tiles whose home is NVMe, from the tile `first` on."""
        return itertools.islice(self.stored, bisect_left(self.stored, first, key=attrgetter("index")), None)

    @contextmanager
    def changing_on_device(self) -> Iterator[Fields]:
        """Change the unit's fields on the device inside of this context, in compute-stream order."""
        assert self.fields is not None
        for tile in self.tiles:
            tile.begin_write(Memory.DEVICE)
        yield self.fields
        for tile in self.tiles:
            tile.end_write(Memory.DEVICE, in_order=True)


class StateStore:
    """The tiles of every unit and their homes.

    Args:
        shard_numels: trainable elements of each unit, padded.
        tile_numel: elements of a full tile.
        tile_bytes: bytes of a tile, by its number of elements.
        homes: home of each tile, in the order of the units.
        device: memory of tiles on the device; None if no tile can be on it.
        written_through: whether every tile, also one in memory, is double-buffered on NVMe.
        double_buffered: whether tiles whose home is NVMe are double-buffered.

    Attributes:
        units: all units, by index.
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
        device: DeviceStates | None = None,
        written_through: bool = False,
        double_buffered: bool = False,
    ) -> None:
        self._swap = swap
        self._counters = counters
        self._device = device
        places = iter(homes)
        self.units: list[UnitStates] = []
        for unit, shard_numel in enumerate(shard_numels):
            tiles = []
            for index, start in enumerate(range(0, shard_numel, tile_numel)):
                numel = min(tile_numel, shard_numel - start)
                nbytes = tile_bytes(numel)
                home = next(places)
                lease = arena.lease(nbytes) if home is Memory.HOST else None
                extent: Extent | SlotExtent | None = None
                if written_through or (double_buffered and home is Memory.NVME):
                    extent = swap.reserve_slots(nbytes, (0, nbytes))
                elif home is Memory.NVME:
                    extent = swap.reserve(nbytes)
                tiles.append(Tile(unit, index, start, numel, nbytes, home, lease, extent))
            each = UnitStates(tiles)
            if each.are_on_device:
                self.make_device_room(each)
            self.units.append(each)

    @property
    def some_are_on_device(self) -> bool:
        return any(each.are_on_device for each in self.units)

    def read(self, tile: Tile, slot: Lease, priority: Priority) -> Move:
        """Start reading a tile whose home is not host memory into `slot`; raises InfinityError if it is lost."""
        if tile.state(tile.home) is not State.VALID:  # it is not being written either: the ring has waited for that
            raise InfinityError(f"{tile.name} is lost: an update or a write of it has failed")
        return self._download(tile, slot) if tile.home is Memory.DEVICE else self._read_nvme(tile, slot, priority)

    def _read_nvme(self, tile: Tile, slot: Lease, priority: Priority) -> Move:
        assert tile.extent is not None
        read = self._swap.read(tile.extent, slot.span(0, tile.nbytes), priority=priority)
        tile.lease = slot
        self._counters.moved("nvme_read", tile.nbytes, read, tile.unit, "states")
        return tile.begin_move(Memory.NVME, Memory.HOST, read, StallCause.DISK_READ)

    def write(self, tile: Tile) -> Transfer:
        """Start writing a tile from its host memory, a slot or its home."""
        assert tile.lease is not None
        if tile.home is Memory.DEVICE:
            return self._upload(tile, tile.lease).transfer
        assert tile.extent is not None
        write = self._swap.write(tile.extent, tile.lease.span(0, tile.nbytes))
        tile.begin_move(Memory.HOST, Memory.NVME, write, StallCause.DISK_WRITE)
        self._counters.moved("nvme_write", tile.nbytes, write, tile.unit, "states")
        return write

    def take_over(self) -> None:
        """Replace every tile's value by the one that an earlier process left on NVMe. No transfer may be in flight."""
        for tile in itertools.chain.from_iterable(each.tiles for each in self.units):
            assert isinstance(tile.extent, SlotExtent)
            for move in tile.moves():
                move.transfer.result()
            tile.consume()
            tile.extent.take_found()
            tile.begin_write(Memory.NVME)  # that process was the writer
            tile.end_write(Memory.NVME)
            if tile.home is Memory.HOST:
                self._read_home(tile)

    def can_roll_back(self, tile: Tile) -> bool:
        """Whether an update of the tile would keep its present states in the other slot."""
        return isinstance(tile.extent, SlotExtent) and self._swap.slots.keeps(tile.extent)

    def read_before(self, tile: Tile, slot: Lease) -> Transfer:
        """Start reading the tile's values before its update in this epoch; requires `can_roll_back`."""
        assert isinstance(tile.extent, SlotExtent)
        parts = self._swap.slots.before(tile.extent, slot.span(0, tile.nbytes))
        read = self._swap.read_parts(parts, Priority.DEMAND)
        self._counters.moved("nvme_read", tile.nbytes, read, tile.unit, "states")
        return read

    def roll_back(self, tile: Tile) -> None:
        """Roll back the tile's update of this epoch, if there was one; no transfer of the tile may be in flight.

        Raises:
            StorageError: its home is host memory, and the old values cannot be read.
        """
        assert isinstance(tile.extent, SlotExtent)
        if self._swap.slots.roll_back(tile.extent):
            tile.roll_back(Memory.NVME)
            if tile.home is Memory.HOST:
                self._read_home(tile)

    def _read_home(self, tile: Tile) -> None:
        assert tile.lease is not None
        tile.finish_move(self._read_nvme(tile, tile.lease, Priority.DEMAND))

    # The device #

    def _on_device(self, tile: Tile) -> tuple[DeviceStates, Fields]:
        """Return the device's memory, and the part of the tile's unit."""
        fields = self.units[tile.unit].fields
        assert self._device is not None
        assert fields is not None
        return self._device, fields

    def _download(self, tile: Tile, slot: Lease) -> Move:
        device, fields = self._on_device(tile)
        copy = device.download(fields, tile.start, tile.numel, slot.tensor(torch.uint8, tile.nbytes))
        tile.lease = slot
        move = tile.begin_move(Memory.DEVICE, Memory.HOST, copy, StallCause.HOST_LINK)
        self._counters.moved("device_to_host", tile.nbytes, copy, tile.unit, "states")
        return move

    def _upload(self, tile: Tile, slot: Lease) -> Move:
        device, fields = self._on_device(tile)
        copy = device.upload(fields, tile.start, tile.numel, slot.tensor(torch.uint8, tile.nbytes))
        move = tile.begin_move(Memory.HOST, Memory.DEVICE, copy, StallCause.HOST_LINK)
        self._counters.moved("host_to_device", tile.nbytes, copy, tile.unit, "states")
        return move

    def make_device_room(self, each: UnitStates) -> None:
        """Allocate memory on the device for the unit's tiles, if they have none; raises torch.OutOfMemoryError."""
        assert self._device is not None
        if each.fields is None:
            each.fields = self._device.room(sum(tile.numel for tile in each.tiles))

    def move_to_device(self, tile: Tile) -> None:
        """Make the device the home of a held tile, whose unit has device memory. Blocks for the copy."""
        assert tile.lease is not None
        tile.own = tile.lease if tile.home is Memory.HOST else None
        tile.set_home(Memory.DEVICE)
        tile.finish_move(self._upload(tile, tile.lease))

    def move_back(self, tile: Tile) -> None:
        """Make the host or NVMe the home of a held tile again. That memory may still contain an older value."""
        tile.set_home(Memory.NVME if tile.own is None else Memory.HOST)
        tile.drop(Memory.DEVICE)
        tile.own = None

    def close(self) -> None:
        """Free the device's memory; no transfer may be in flight."""
        for each in self.units:
            each.fields = None
