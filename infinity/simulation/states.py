"""Optimizer states with versions instead of values: the engine's own tiles, slots and ring on a simulated drive.

The version of a tile's states is the number of its updates. Tiles whose home is the drive pass through the ring. The
engine's coherence protocol raises if an operation would read or write a wrong copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from infinity.simulation.clock import Clock, Operation, Transfer
from infinity.simulation.drive import Drive, Memory
from infinity.simulation.filling import TILE_BYTES, DeviceMemory, DeviceRoom
from infinity.simulation.invariants import violate
from infinity.tiers import copies
from infinity.tiers.ring import Ring
from infinity.tiers.slots import SlotExtent
from infinity.tiers.states import StateStore, Tile

if TYPE_CHECKING:
    from infinity.simulation.model import UnitSpec

_HOST, _NVME, _DEVICE = copies.Memory.HOST, copies.Memory.NVME, copies.Memory.DEVICE


class States:
    """The optimizer states of one rank.

    Args:
        slots: number of slots of the ring.
        device: memory of states on the device.
        double_buffered: whether a tile whose home is the drive has two places on it.
        written_through: whether every tile has places on the drive.

    Attributes:
        store, ring: the engine's store and ring.
        protected: versions of tiles on the drive that must stay there.
    """

    def __init__(
        self,
        clock: Clock,
        units: Sequence[UnitSpec],
        slots: int,
        device: DeviceMemory,
        *,
        double_buffered: bool,
        written_through: bool,
    ) -> None:
        self._drive = Drive(clock, read="states read", write="states write")
        self.store = StateStore(
            [unit.tiles if unit.grads else 0 for unit in units],
            1,
            lambda numel: numel * TILE_BYTES,
            [home for unit in units if unit.grads for home in _homes(unit)],
            arena=cast(Any, SimpleNamespace(lease=lambda _: Memory())),
            swap=cast(Any, self._drive),
            counters=cast(Any, SimpleNamespace(moved=lambda *_, **__: None)),
            device=cast(Any, device),
            written_through=written_through,
            double_buffered=double_buffered,
        )
        self._slots = slots
        waits: Any = SimpleNamespace(waiting=lambda _: nullcontext())
        self.ring = Ring(self.store, cast(Any, [Memory() for _ in range(slots)]), waits)
        self._before: dict[Tile, int] = {}  # the undo log: old versions of tiles that are only in memory
        self.protected: dict[Tile, int] = {}
        self._all = [tile for unit in range(len(units)) for tile in self.store.units[unit].tiles]
        for tile in self._all:
            tile.begin_write(tile.home)
            tile.end_write(tile.home)
            if tile.home is _DEVICE:
                self._device_versions(tile.unit)[tile.start] = 0
        device.is_filling = True

    def keeps_all(self, unit: int) -> bool:
        """Whether an update that is submitted now keeps all old states of the unit on the drive."""
        return all(map(self.store.can_roll_back, self.store.units[unit].tiles))

    def can_roll_back(self, unit: int, tile: int) -> bool:
        """Whether an update of the tile can be rolled back; see `Rollback.reversible_tiles`."""
        each = self.store.units[unit].tiles[tile]
        return self.store.can_roll_back(each) or each.is_in_memory_alone

    def _device_versions(self, unit: int) -> dict[int, int]:
        room: Any = self.store.units[unit].fields
        return cast(DeviceRoom, room).versions

    # Updates #

    def begin(self, tile: Tile) -> None:
        """Bring the tile into memory, and begin to change it."""
        self.ring.hold(tile)
        tile.begin_write(_HOST)

    def end(self, tile: Tile, target: int, *, keeps: bool) -> list[Operation]:
        """Set the tile to version `target`. Return its write, if there is one."""
        memory = self._memory(tile)
        if memory.value != target - 1:
            violate("once", f"{tile.name} are at {memory.value}, and become {target}")
        if keeps and not self.store.can_roll_back(tile):
            self._before[tile] = memory.value
        memory.value = target
        tile.end_write(_HOST)
        return self.release(tile)

    def update_on_device(self, unit: int, target: int) -> None:
        """Update a unit whose states are on the device."""
        with self.store.units[unit].changing_on_device():
            for tile in self.store.units[unit].tiles:
                version = self._device_versions(unit).get(tile.start)
                if version != target - 1:
                    violate("once", f"{tile.name} on the device are at {version}, and become {target}")
                self._device_versions(unit)[tile.start] = target

    def release(self, tile: Tile) -> list[Operation]:
        """Allow the tile to leave memory, and return its write. A change that has not ended is dropped."""
        write = self.ring.release(tile)
        return [] if write is None else [cast(Transfer, write).operation]

    @staticmethod
    def arriving(tile: Tile) -> Operation | None:
        """Return the read of the tile into the ring while it is in flight, else None."""
        move = tile.arriving(_HOST)
        return None if move is None or move.transfer.done() else cast(Transfer, move.transfer).operation

    def forget(self, unit: int) -> None:
        """Drop the undo log of a unit, whose speculative update was committed or rolled back."""
        for tile in self.store.units[unit].tiles:
            self._before.pop(tile, None)

    def roll_back(self, unit: int, tiles: Sequence[int]) -> None:
        """Roll back a speculative update of these tiles."""
        for tile in [self.store.units[unit].tiles[index] for index in tiles]:
            if tile in self._before:
                self._memory(tile).value = self._before.pop(tile)
                tile.roll_back(_HOST)
            elif isinstance(tile.extent, SlotExtent):
                self.ring.roll_back(tile)

    def reconstruct(self, unit: int, tiles: Sequence[int], target: int) -> None:
        """Read the versions before and after `target`, from which gradients and parameters are reconstructed."""
        for tile in [self.store.units[unit].tiles[index] for index in tiles]:
            self.ring.hold(tile)
            with self.ring.before(tile) as place:
                found = cast(Memory, place).value, self._memory(tile).value
                if found != (target - 1, target):
                    violate("lost", f"{tile.name} are at {found}: an update to {target} cannot be reconstructed")
            self.ring.release(tile)

    @staticmethod
    def _memory(tile: Tile) -> Memory:
        assert tile.lease is not None
        return cast(Memory, tile.lease)

    # Promises #

    def protect(self) -> None:
        """Require that the present versions on the drive stay there until the next call."""
        self._drive.slots.next_epoch()
        for tile in self._all:
            if isinstance(tile.extent, SlotExtent):
                newest = tile.extent.slots[tile.extent.newest[0]]
                self.protected[tile] = self._drive.value(newest)

    def check_committed(self) -> None:
        for tile, version in self.protected.items():
            assert isinstance(tile.extent, SlotExtent)
            found = [self._drive.value(slot) for slot in tile.extent.slots]
            if version not in found:
                violate("crash", f"{tile.name} are committed at {version}, and the drive has {found}")

    def check_at(self, unit: int, wanted: int) -> None:
        """Check that all tiles of the unit have had this number of updates."""
        for tile in self.store.units[unit].tiles:
            if tile.home is _HOST:
                version = self._memory(tile).value
            elif tile.home is _DEVICE:
                version = self._device_versions(unit)[tile.start]
            else:
                assert tile.extent is not None
                extent = tile.extent
                newest = extent.slots[extent.newest[0]] if isinstance(extent, SlotExtent) else extent
                version = self._drive.value(newest)
            if version != wanted:
                violate("once", f"{tile.name} have had {version} updates, and {wanted} were requested")

    def close(self, *, failed: bool) -> None:
        """Wait for all transfers. Then every slot must be free, unless the engine has failed."""
        self.ring.clear()
        if len(self.ring._free) != self._slots and not failed:
            violate("closed", f"{self._slots - len(self.ring._free)} slots of the ring are held")


def _homes(unit: UnitSpec) -> list[copies.Memory]:
    if unit.on_device:
        return [_DEVICE] * unit.tiles
    return [_NVME if tile in unit.on_drive else _HOST for tile in range(unit.tiles)]
