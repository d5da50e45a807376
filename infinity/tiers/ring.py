"""The slots of host memory that stored tiles of optimizer states pass through, and which copies they hold.

[Note: the ring]
A tile that lives on NVMe, or on the device, has a copy in a slot from the start of its read to the end of its write:
ARRIVING while it is read ahead, VALID while it is held, WRITING while it is updated, LEAVING while it is written. So a
tile's copies say what its slot does; the ring knows beside that which slots are free, and in what order reads and
writes began. The copy at home is ARRIVING until it is written, so that no read overtakes a write.

Tiles and the ring are driven by one thread at a time: the pipeline's worker while updates are queued, and whoever
visits the tiles while the worker is parked.
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
    """A ledger of slots; tiles that live in host memory pass through without one.

    Args:
        slots: each as large as a full tile; empty where no tile is stored.
        waits: what the driving thread waits for is booked there.
    """

    def __init__(self, states: StateStore, slots: Sequence[Lease], waits: Waits) -> None:
        self._states = states
        self._waits = waits
        self._free = deque(slots)
        self._arriving: dict[Tile, None] = {}  # in the order in which their reads began
        self._leaving: deque[Tile] = deque()  # in the order in which their writes began

    @property
    def will_have_room(self) -> bool:
        """A slot is free, or will be once a write is done."""
        return bool(self._free or self._leaving)

    def has(self, tile: Tile) -> bool:
        """The tile is in memory, or on its way there."""
        return tile.copies[_HOST].state not in (_ABSENT, _LEAVING)

    def is_here(self, tile: Tile) -> bool:
        """Whoever holds the tile now does not wait for a read."""
        copy = tile.copies[_HOST]
        return copy.state is _VALID or (copy.state is _ARRIVING and copy.moves[0].done())

    # Slots #

    def reap(self) -> None:
        """Take back the slots of what has been written by now."""
        while self._leaving and self._leaving[0].home_copy.moves[0].done():
            self._finish_write()

    def clear(self) -> None:
        """Wait for all that moves, and give up what was read ahead; then every slot is free."""
        for tile in tuple(self._arriving):
            self.give_up(tile)
        while self._leaving:
            self._finish_write()

    # Tiles #

    def read_ahead(self, tiles: Iterable[Tile], *, wait: bool) -> None:
        """Fill the free slots with those of these tiles that are not here yet, in their order.

        Args:
            wait: there is nothing better to do than to wait for what is being written.

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
                self._settle(tile)
            self._read(tile, Priority.PREFETCH)
            if not self._free:
                return

    def give_up(self, tile: Tile) -> None:
        """A tile may have been read ahead, and is not needed."""
        if tile in self._arriving:
            with suppress(Exception):  # its outcome does not matter any more
                self._finish_read(tile)
                self.let_go(tile)

    def undo(self, tile: Tile) -> None:
        """Undo an update that ran ahead, see `StateStore.undo`."""
        self.give_up(tile)
        self._settle(tile)
        self._settle_through(tile)
        self._states.undo(tile)

    @contextmanager
    def before(self, tile: Tile) -> Iterator[Lease]:
        """What a tile that is held was before an update of this epoch, as long as the context lasts.

        Raises:
            StorageError: it cannot be read.
        """
        self._make_room()
        slot = self._free.popleft()
        try:
            with self._waits.waiting(StallCause.DISK_READ):
                self._states.read_before(tile, slot).result()
            yield slot
        finally:
            self._free.append(slot)

    def hold(self, tile: Tile, *, fresh: bool = False) -> None:
        """Have a tile in memory until `let_go`, reading it now if nothing did so ahead.

        Args:
            fresh: its values end here, unread, as the caller writes new ones.

        Raises:
            StorageError: it cannot be read.
            InfinityError: its values are lost.
        """
        if tile.home is _HOST:
            self._settle_through(tile)
            if fresh:
                tile.consume()
            elif tile.copies[_HOST].state is not _VALID:
                raise InfinityError(f"{tile.name} is lost: an update of it has failed")
            return
        if tile not in self._arriving:
            self._settle(tile)
            self._make_room()
            if fresh:
                tile.consume()
                tile.lease = self._free.popleft()
                return
            self._read(tile, Priority.DEMAND)
        self._finish_read(tile)

    def move_there(self, tile: Tile) -> None:
        """Have a tile live on the device, where its unit has room; it keeps its place below."""
        self.hold(tile)
        self._states.move_there(tile)
        tile.drop(_HOST)
        if tile.own is None:
            self._free_slot(tile)
        tile.lease = None

    def move_back(self, tile: Tile) -> Transfer | None:
        """Have a tile of the device live below again, in its place there.

        Returns:
            The write to that place, if there is one.
        """
        if tile.own is None:
            self.hold(tile)
            self._states.move_back(tile)
            return self.let_go(tile)
        self._states.read(tile, tile.own, Priority.DEMAND)
        move = tile.arriving(_HOST)
        assert move is not None
        self._finish(tile, move)
        self._states.move_back(tile)
        return None

    def let_go(self, tile: Tile) -> Transfer | None:
        """A held tile is not used any more; its slot is free once nothing moves.

        Returns:
            The write of what has changed, if anything was to be written.
        """
        copy = tile.copies[_HOST]
        if copy.state is _WRITING:  # it was left half way
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
            tile.consume()  # what was not written is lost
            raise
        finally:
            if write is None:
                self._free_slot(tile)
            else:
                self._leaving.append(tile)
        return write

    def _make_room(self) -> None:
        """Have a free slot: wait for the oldest write, or give up the farthest read, if there is none."""
        self.reap()
        if not self._free and self._leaving:
            self._finish_write()
        if not self._free:
            self.give_up(next(reversed(self._arriving)))

    def _settle_through(self, tile: Tile) -> None:
        """Wait for the writing of a tile that lives here: only then it may change."""
        write = tile.arriving(Memory.NVME) if tile.is_written_through else None
        if write is not None:
            with suppress(Exception):  # whoever waits for the ticket gets the error
                self._finish(tile, write)

    def _settle(self, tile: Tile) -> None:
        """Wait for the write of a tile, if there is one: only then it may be read."""
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
        with suppress(Exception):  # whoever waits for the ticket gets the error
            self._finish(tile, tile.home_copy.moves[0])
        self._leaving.popleft()
        tile.gone(_HOST)
        self._free_slot(tile)

    def _finish(self, tile: Tile, move: Move) -> None:
        with nullcontext() if move.done() else self._waits.waiting(move.cause):
            tile.finish_move(move)

    def _free_slot(self, tile: Tile) -> None:
        assert tile.lease is not None  # the slot
        self._free.append(tile.lease)
        tile.lease = None
