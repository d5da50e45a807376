"""Coherence of all tiers: which copy of a value is the newest, and which transfers still use it.

[Note: copies]
A *field* is one state of one unit, or of one tile of it. Every change raises its *version* by one. A field has at most
one *copy* in each memory. A *move* carries bytes from one copy to another. Every layout (parameters, gradients,
optimizer states, activations) is built on this class, which enforces these rules:

- A copy is read only while it is VALID. It is the newest only if its version is the field's version.
- A move carries the version that its source had when the move *started*. Until it ends, its target is ARRIVING and must
  not be read. If it fails, the target is ABSENT and the source is unchanged.
- A writer that changes a copy in place sets it to WRITING: it is not read, and only a write-through starts from it.
  The writer waits for all moves that touch the copy before it changes the first byte. After the change all other copies
  are old, except one that was written through.
- A copy is dropped only if it is old, or if the same version is VALID in another memory or on its way to it. Its memory
  may be reused once no move touches it. Until then the copy is LEAVING, and `keep` can make it VALID again.
- `consume` ends a value after its last use (gradients after the update, activations of a freed graph).
- A double-buffered copy on the drive (slots.py) is one NVME copy in this protocol: the newest version. `roll_back`
  returns to the version in the other slot.

One thread at a time makes the transitions of a field. Other threads carry bytes, and only report through
`Transfer.done`. So no lock is needed, and a transition costs a dictionary look-up and a comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum, auto
from typing import Protocol

from infinity.telemetry import Counters, StallCause, Times


class Memory(IntEnum):
    """The memory that holds a copy; a higher value is nearer to the computation."""

    FILE = 0  # a range of an existing file, read only
    NVME = 1
    HOST = 2
    SHARD = 3  # on the device, beside the unsharded unit
    DEVICE = 4


class State(Enum):
    """State of a copy, see [Note: copies]."""

    ABSENT = auto()
    ARRIVING = auto()
    VALID = auto()
    WRITING = auto()
    LEAVING = auto()


# A look-up in an Enum takes 0.2 us, and a tile needs sixty of them.
_ABSENT, _ARRIVING, _VALID, _WRITING, _LEAVING = State


class Transfer(Protocol):
    """A transfer in flight: a read, a write, a copy over the link, a collective. Thread-safe."""

    def done(self) -> bool:
        """Whether it ended, with or without an error."""

    def result(self) -> object:
        """Block until it ends.

        Raises:
            StorageError: it failed.
        """

    def times(self) -> Times | None:
        """When it ran; None as long as this is unknown."""


class Move:
    """One transfer, with the copies of a field that it reads and fills.

    Attributes:
        cause: the stall cause of waiting for it.
        version: version of the target after the move.
        source, target: None if that end of the transfer is not a copy of the field, but a user's tensor for example.
    """

    __slots__ = ("cause", "source", "target", "transfer", "version")

    def __init__(
        self,
        transfer: Transfer,
        cause: StallCause,
        version: int = 0,
        source: Copy | None = None,
        target: Copy | None = None,
    ) -> None:
        self.transfer = transfer
        self.cause = cause
        self.version = version
        self.source = source
        self.target = target

    def wait(self, counters: Counters) -> None:
        """Block the compute thread until the move ends.

        Raises:
            StorageError: it failed.
        """
        with counters.stalled(self.cause):
            self.transfer.result()


class Copy:
    """The copy of a field in one memory.

    Attributes:
        version: the version of the field that its bytes have; meaningless while the copy is ABSENT.
        pins: number of users that keep it from being dropped.
        moves: moves that may still read or write its bytes.
    """

    __slots__ = ("memory", "moves", "pins", "state", "version")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.state = _ABSENT
        self.version = -1
        self.pins = 0
        self.moves: list[Move] = []

    def is_still(self) -> bool:
        """Whether no move touches its bytes. A move that fills the copy counts until `finish_move`."""
        if self.moves:
            fills = self.state is _ARRIVING
            self.moves = [move for move in self.moves if not move.transfer.done() or (fills and move.target is self)]
        return not self.moves

    def pin(self) -> None:
        """Keep the copy from being dropped; pairs with `unpin`."""
        self.pins += 1

    def unpin(self) -> None:
        if not self.pins:
            raise RuntimeError(f"the copy in {self.memory.name} is not pinned")
        self.pins -= 1


class Field:
    """All copies of one value.

    Args:
        name: for messages.
        memories: the memories that may have a copy.

    Attributes:
        version: of the newest value; 0 before the first value.
    """

    __slots__ = ("copies", "name", "version")

    def __init__(self, name: str, memories: Iterable[Memory]) -> None:
        self.name = name
        self.version = 0
        self.copies = {memory: Copy(memory) for memory in memories}

    # Queries #

    def state(self, memory: Memory) -> State:
        return self.copies[memory].state

    def is_newest(self, memory: Memory) -> bool:
        """Whether this memory has a VALID copy of the newest version."""
        copy = self.copies.get(memory)
        return copy is not None and copy.state is _VALID and copy.version == self.version

    def can_drop(self, memory: Memory) -> bool:
        """Whether the copy is VALID and unpinned, and dropping it does not lose the value."""
        copy = self.copies[memory]
        return copy.state is _VALID and not copy.pins and (copy.version < self.version or self._is_safe_without(copy))

    def _is_safe_without(self, copy: Copy) -> bool:
        """Whether the same version is VALID in another memory, or on its way from this copy to another memory."""
        for other in self.copies.values():
            if other is copy or other.version != copy.version:
                continue
            if other.state is _VALID or any(move.source is copy for move in other.moves):
                return True
        return False

    def moves(self) -> tuple[Move, ...]:
        """Return the moves that may still touch any of the copies."""
        return tuple(dict.fromkeys(move for copy in self.copies.values() if not copy.is_still() for move in copy.moves))

    # Moves #

    def expect(self, memory: Memory) -> None:
        """Mark a copy as ARRIVING before its move begins; pairs with `begin_move` or `give_up`."""
        self._check_not_file(memory)
        self._go(self.copies[memory], _ABSENT, _ARRIVING)
        self.copies[memory].version = -1  # the old bytes are lost

    def give_up(self, memory: Memory) -> None:
        """Make an expected copy ABSENT again; its move was not started."""
        if self.arriving(memory) is not None:
            raise RuntimeError(f"{self.name} is on its way to {memory.name} and cannot be given up")
        self._go(self.copies[memory], _ARRIVING, _ABSENT)

    def begin_move(
        self, source: Memory | None, target: Memory, transfer: Transfer, cause: StallCause, *, at: int | None = None
    ) -> Move:
        """Start a move from `source` to `target`. The old bytes of the target are invalid from now on.

        Args:
            source: None if the bytes come from outside of the field, such as from other ranks' shards; pass `at` then.
            at: version of the target, if it differs from the source's version: for a write-through during a change.
        """
        origin, copy = None if source is None else self.copies[source], self.copies[target]
        version = at if at is not None else -1 if origin is None else origin.version
        if origin is not None:
            self._check_readable(origin, _VALID if at is None else _WRITING)
        if not copy.is_still() and (at is None or any(move.target is not origin for move in copy.moves)):
            # The move that fills the source may still read the target. The writer of the source waits for it first.
            raise RuntimeError(f"{self.name} cannot come to {target.name} yet: {_described(copy)}")
        self._check_not_file(target)
        if copy.state is _VALID and copy.version < version:
            copy.state = _ABSENT
        if copy.state is not _ARRIVING:
            self._go(copy, _ABSENT, _ARRIVING)
        copy.version = version
        move = Move(transfer, cause, version, origin, copy)
        copy.moves.append(move)
        if origin is not None:
            origin.moves.append(move)
        return move

    def lend(self, source: Memory, transfer: Transfer, cause: StallCause) -> Move:
        """Start a move that copies bytes from the field to a user's tensor."""
        origin = self.copies[source]
        self._check_readable(origin, _VALID)
        move = Move(transfer, cause, origin.version, origin)
        origin.moves.append(move)
        return move

    def finish_move(self, move: Move) -> None:
        """Block until a move ends, and make its target VALID. A newer version may exist by then.

        Raises:
            StorageError: the move failed; the target is ABSENT.
        """
        try:
            move.transfer.result()
        except Exception:  # after an interrupt, which is no Exception, the move continues, and a later call waits again
            self._end_move(move, _ABSENT)
            raise
        self._end_move(move, _VALID)

    def _end_move(self, move: Move, outcome: State) -> None:
        target = move.target
        if target is not None and target.state is _ARRIVING and move in target.moves:  # else an earlier call did this
            self._go(target, _ARRIVING, outcome)
        for copy in (move.source, target):
            if copy is not None and move in copy.moves:
                copy.moves.remove(move)

    def arriving(self, memory: Memory) -> Move | None:
        """Return the move that fills this memory's copy now, or None."""
        copy = self.copies[memory]
        if copy.state is not _ARRIVING:
            return None
        return next((move for move in copy.moves if move.target is copy), None)

    def order_behind(self, move: Move) -> None:
        """Make the target VALID before the move ends, because all later readers run behind the move in stream order."""
        target = move.target
        assert target is not None
        self._go(target, _ARRIVING, _VALID)
        target.moves.remove(move)

    # Changes in place #

    def begin_write(self, memory: Memory) -> tuple[Move, ...]:
        """Begin a change of this copy in place. Return the moves to wait for before the first byte is changed.

        The copy must be the newest, or be arriving. If the field has no value, it may be any copy.
        """
        copy = self.copies[memory]
        for other in self.copies.values():  # a loop, not a generator: this runs for every gradient
            if other.state is _WRITING:
                raise RuntimeError(f"{self.name} is being changed already")
        if self.version:
            if memory < Memory.HOST:
                raise RuntimeError(f"{self.name} cannot be changed in place in {memory.name}")
            if copy.version != self.version or copy.state not in (_VALID, _ARRIVING):
                raise RuntimeError(
                    f"{self.name}: version {self.version} cannot be changed in {memory.name}, {_described(copy)}"
                )
        elif copy.state is _VALID or copy.state is _WRITING:
            raise RuntimeError(f"{self.name}: there is no value, but {memory.name} is {_described(copy)}")
        waits = () if copy.is_still() else tuple(copy.moves)  # failed moves are included
        copy.state = _WRITING
        return waits

    def end_write(self, memory: Memory, *, changed: bool = True, in_order: bool = False) -> None:
        """End the change: this copy becomes the newest, and the others become old.

        Args:
            changed: if False, nothing was written, and the version stays.
            in_order: whether the change runs in stream order behind the move that fills the copy. If False, the writer
                has waited for that move.

        Raises:
            RuntimeError: the copy is still being filled.
            StorageError: the move that fills it failed.
        """
        copy = self.copies[memory]
        fills = [move for move in copy.moves if move.target is copy] if copy.moves else []
        for move in () if in_order else fills:
            if not move.transfer.done():
                raise RuntimeError(f"{self.name} was changed in {memory.name} while it was still on its way there")
            move.transfer.result()
        for move in fills:
            self._end_move(move, _VALID)
        # In one statement, and before the state changes: if an interrupt comes in between, `end_write` is repeated, and
        # the field's version always has a copy.
        self.version = copy.version = self.version + int(changed)
        self._go(copy, _WRITING, _VALID)

    def invalidate(self) -> None:
        """Raise the version, because the value changed outside of this field. All copies become old."""
        self.version += 1

    def roll_back(self, memory: Memory) -> None:
        """Roll back the last change: the other slot in this memory becomes the newest, and all other copies old."""
        if not self.version:
            raise RuntimeError(f"{self.name} has no value to roll back")
        for copy in self.copies.values():
            if copy.state is _WRITING or copy.state is _ARRIVING or not copy.is_still():
                raise RuntimeError(f"{self.name} cannot be rolled back: in {copy.memory.name} it is {_described(copy)}")
        copy = self.copies[memory]
        copy.state = _VALID  # it was ABSENT if the write of the change failed
        self.version = copy.version = self.version + 1

    def fail_write(self, memory: Memory) -> None:
        """End a change that failed half way: drop this copy."""
        copy = self.copies[memory]
        self._go(copy, _WRITING, _LEAVING)
        copy.version = -1
        self.gone(memory)
        if any(other.version > self.version for other in self.copies.values()):
            self.version += 2  # above the version of the part that was written through

    # Ends #

    def drop(self, memory: Memory) -> bool:
        """Drop a copy. Return whether its memory is free now; if not, it is LEAVING until `gone` returns True."""
        copy = self.copies[memory]
        if not self.can_drop(memory):
            raise RuntimeError(
                f"{self.name} is in use or has no other copy, and stays in {memory.name}: {_described(copy)}"
            )
        copy.state = _LEAVING
        return self.gone(memory)

    def gone(self, memory: Memory) -> bool:
        """Make a LEAVING copy ABSENT if no move touches it any more. Return whether its memory is free now."""
        copy = self.copies[memory]
        if copy.state is not _LEAVING or not copy.is_still():
            return False
        if copy.version == self.version and not any(map(self.is_newest, self.copies)):
            return False  # the move to the only other copy has ended, but `finish_move` was not called yet
        self._go(copy, _LEAVING, _ABSENT)
        return True

    def keep(self, memory: Memory) -> None:
        """Make a LEAVING copy VALID again: its bytes are still in memory."""
        if self.copies[memory].version < 0:
            raise RuntimeError(f"{self.name}: the copy that leaves {memory.name} has no valid bytes to keep")
        self._go(self.copies[memory], _LEAVING, _VALID)

    def consume(self) -> None:
        """End the value after its last use: drop every copy. The next change begins a new value."""
        for copy in self.copies.values():
            if copy.pins or copy.state is _WRITING:
                raise RuntimeError(f"{self.name} is still in use in {copy.memory.name}")
        for copy in self.copies.values():
            copy.version = -1
            copy.state = _ABSENT if copy.is_still() else _LEAVING
        self.version = 0

    def _check_readable(self, copy: Copy, state: State) -> None:
        if copy.state is not state:
            raise RuntimeError(f"{self.name}: the copy in {copy.memory.name} is {copy.state.name} and cannot be read")

    def _check_not_file(self, memory: Memory) -> None:
        if memory is Memory.FILE:
            raise RuntimeError(f"{self.name} is in an existing weight file, which is never written")

    def _go(self, copy: Copy, source: State, target: State) -> None:
        """Change the state from `source` to `target`. Raise RuntimeError if the state is another one."""
        if copy.state is not source:
            raise RuntimeError(
                f"{self.name} cannot become {target.name} in {copy.memory.name}: it is {_described(copy)}, "
                f"not {source.name}"
            )
        copy.state = target


def _described(copy: Copy) -> str:
    return f"{copy.state.name} at version {copy.version} with {copy.pins} pins and {len(copy.moves)} moves"
