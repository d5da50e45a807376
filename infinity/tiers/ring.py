"""The ring: slots of host memory into which tiles of optimizer states are read, and from which they are written.

[Note: the ring]
A tile whose home is NVMe or the device has a copy in a slot from the start of its read to the end of its write:
ARRIVING while it is read ahead, VALID while it is held, WRITING while it is updated, LEAVING while it is written. So
the state of a slot follows from the copies of its tile. The ring itself stores only the free slots, and the order in
which reads and writes began. The home copy is ARRIVING until it is written, so that no read overtakes a write.

One thread at a time uses tiles and ring: the pipeline's worker while updates are queued, or a thread that visits the
tiles while the worker is parked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from infinity.errors import InfinityError
from infinity.io import Priority
from infinity.memory import Lease
from infinity.telemetry import StallCause, Waits
from infinity.tiers.copies import Memory, Move, State, Transfer
from infinity.tiers.states import StateStore, Tile

_HOST = Memory.HOST  # a look-up in an Enum takes 0.2 us
_ABSENT, _ARRIVING, _VALID, _WRITING, _LEAVING = State


class Ring:
    """Assigns slots to tiles. Tiles whose home is host memory need no slot.

    Args:
        slots: each as large as a full tile; empty if the home of every tile is host memory.
        waits: counts the waiting times of the thread that uses the ring.
    """

    def __init__(self, states: StateStore, slots: Sequence[Lease], waits: Waits) -> None:
        self._states = states
        self._waits = waits
        self._free = deque(slots)
        self._arriving: dict[Tile, None] = {}  # in the order in which their reads began
        self._leaving: deque[Tile] = deque()  # in the order in which their writes began

    @property
    def will_have_room(self) -> bool:
        """Whether a slot is free, or will be free when a write has ended."""
        return bool(self._free or self._leaving)

    def has(self, tile: Tile) -> bool:
        """Whether the tile is in host memory, or being read."""
        return tile.copies[_HOST].state not in (_ABSENT, _LEAVING)

    def is_here(self, tile: Tile) -> bool:
        """Whether `hold` of the tile would not wait for a read."""
        copy = tile.copies[_HOST]
        return copy.state is _VALID or (copy.state is _ARRIVING and copy.moves[0].transfer.done())

    # Slots #

    def reap(self) -> None:
        """Free the slots of tiles whose writes have ended."""
        while self._leaving and self._leaving[0].home_copy.moves[0].transfer.done():
            self._finish_write()

    def clear(self) -> None:
        """Wait for all transfers, and drop tiles that were read ahead; then every slot is free."""
        for tile in tuple(self._arriving):
            self.give_up(tile)
        while self._leaving:
            self._finish_write()

    # Tiles #

    def read_ahead(self, tiles: Iterable[Tile], *, wait: bool) -> None:
        """Start reading the tiles that are not in memory, in order, as long as slots are free.

        Args:
            wait: block for writes if needed, because the caller has no other work.

        Raises:
            StorageError: the drive takes no request.
            InfinityError: a tile's values are lost.
        """
        if wait and not self._free and self._leaving:
            self._finish_write()
        for tile in tiles if self._free else ():
            if self.has(tile):
                continue
            if tile.home_copy.state is _ARRIVING:
                if not wait:
                    return
                self._wait_written(tile)
            self._read(tile, Priority.PREFETCH)
            if not self._free:
                return

    def give_up(self, tile: Tile) -> None:
        """Drop a tile that is not needed, if it was read ahead."""
        if tile in self._arriving:
            with suppress(Exception):  # the outcome no longer matters
                self._finish_read(tile)
                self.release(tile)

    def roll_back(self, tile: Tile) -> None:
        """Roll back a speculative update of the tile, see `StateStore.roll_back`."""
        self.give_up(tile)
        self._wait_written(tile)
        self._finish_write_through(tile)
        self._states.roll_back(tile)

    @contextmanager
    def before(self, tile: Tile) -> Iterator[Lease]:
        """Yield a slot with the values of a held tile before its update in this epoch; raises StorageError."""
        self._make_room()
        slot = self._free.popleft()
        try:
            with self._waits.waiting(StallCause.DISK_READ):
                self._states.read_before(tile, slot).result()
            yield slot
        finally:
            self._free.append(slot)

    def hold(self, tile: Tile, *, fresh: bool = False) -> None:
        """Keep a tile in memory until `release`. Read it now if it was not read ahead.

        Args:
            fresh: drop the old values unread, because the caller writes new ones.

        Raises:
            StorageError: it cannot be read.
            InfinityError: its values are lost.
        """
        if tile.home is _HOST:
            self._finish_write_through(tile)
            if fresh:
                tile.consume()
            elif tile.copies[_HOST].state is not _VALID:
                raise InfinityError(f"{tile.name} is lost: an update of it has failed")
            return
        if tile not in self._arriving:
            self._wait_written(tile)
            self._make_room()
            if fresh:
                tile.consume()
                tile.lease = self._free.popleft()
                return
            self._read(tile, Priority.DEMAND)
        self._finish_read(tile)

    def move_to_device(self, tile: Tile) -> None:
        """Make the device the tile's home; the unit has memory on it. The tile keeps its place on the host or NVMe."""
        self.hold(tile)
        self._states.move_to_device(tile)
        tile.drop(_HOST)
        if tile.own is None:
            self._free_slot(tile)
        tile.lease = None

    def move_back(self, tile: Tile) -> Transfer | None:
        """Make the place that a tile kept on the host or NVMe its home again. Return the write to it, if any."""
        if tile.own is None:
            self.hold(tile)
            self._states.move_back(tile)
            return self.release(tile)
        self._finish(tile, self._states.read(tile, tile.own, Priority.DEMAND))
        self._states.move_back(tile)
        return None

    def release(self, tile: Tile) -> Transfer | None:
        """End `hold`; the slot is free once no move touches it. Return the write of changed values, if any."""
        copy = tile.copies[_HOST]
        if copy.state is _WRITING:  # the change was interrupted
            tile.fail_write(_HOST)
        if tile.home is _HOST:
            through = tile.is_written_through and copy.state is _VALID and not tile.is_newest(Memory.NVME)
            return self._states.write(tile) if through else None
        write = None
        try:
            if copy.state is _VALID:
                if not tile.is_newest(tile.home):
                    write = self._states.write(tile)
                tile.drop(_HOST)
        except BaseException:
            tile.consume()  # unwritten values are lost
            raise
        finally:
            if write is None:
                self._free_slot(tile)
            else:
                self._leaving.append(tile)
        return write

    def _make_room(self) -> None:
        """Free a slot if none is free: wait for the oldest write, or drop the tile that was read ahead last."""
        self.reap()
        if not self._free and self._leaving:
            self._finish_write()
        if not self._free:
            self.give_up(next(reversed(self._arriving)))

    def _finish_write_through(self, tile: Tile) -> None:
        """Wait for the write-through of a tile whose home is host memory, which must end before a change."""
        write = tile.arriving(Memory.NVME) if tile.is_written_through else None
        if write is not None:
            with suppress(Exception):  # a waiter of the ticket gets the error
                self._finish(tile, write)

    def _wait_written(self, tile: Tile) -> None:
        """Wait for the tile's write, if there is one, which must end before a read."""
        while tile.home_copy.state is _ARRIVING:
            self._finish_write()

    def _read(self, tile: Tile, priority: Priority) -> None:
        slot = self._free.popleft()
        try:
            self._states.read(tile, slot, priority)
        except BaseException:
            self._free.append(slot)
            raise
        self._arriving[tile] = None

    def _finish_read(self, tile: Tile) -> None:
        copy = tile.copies[_HOST]
        try:
            self._finish(tile, copy.moves[0])
        finally:
            if copy.state is not _ARRIVING:
                del self._arriving[tile]
            if copy.state is _ABSENT:
                self._free_slot(tile)

    def _finish_write(self) -> None:
        tile = self._leaving[0]
        with suppress(Exception):  # a waiter of the ticket gets the error
            self._finish(tile, tile.home_copy.moves[0])
        self._leaving.popleft()
        tile.gone(_HOST)
        self._free_slot(tile)

    def _finish(self, tile: Tile, move: Move) -> None:
        with nullcontext() if move.transfer.done() else self._waits.waiting(move.cause):
            tile.finish_move(move)

    def _free_slot(self, tile: Tile) -> None:
        assert tile.lease is not None  # the slot
        self._free.append(tile.lease)
        tile.lease = None
