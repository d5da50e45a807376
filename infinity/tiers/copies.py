"""Which copy of a value is the newest, and who still touches it: the one coherence protocol of all tiers.

[Note: copies]
A *field* is one state of one unit, or of one tile of it. Every change raises its *version* by one. It has at most one
*copy* in each memory, and what carries bytes from one copy to another is a *move*. The rules, which every layout
(parameters, gradients, optimizer states, activations) follows because it can do nothing else:

- A copy is read only while it is VALID, and is the newest only if its version is the field's.
- A move carries the version that its source had when it *started*. Until it is over its target is ARRIVING, which
  nobody may read; if it fails, the target is ABSENT and the source is what it was.
- Who changes a copy in place holds it as WRITING: nobody reads it meanwhile, no move begins from it, and the moves that
  touch it are over before the first byte changes. When the change is done all other copies are old.
- A copy is dropped only if it is old, or if the same version is VALID in another memory or on its way there from it.
  Its memory may be used again once no move touches it; until then it is LEAVING, and may be kept after all.
- What has nothing below it (gradients that were used, activations whose graph is gone) ends by `consume`.
- Where the drive has two slots (slots.py), they are one NVME copy here: the newest. What the other one has comes back
  by `take_back`.

The transitions of one field are driven by one thread at a time; threads that carry bytes only report, through
`Transfer.done`. So there is no lock, and a transition costs a dictionary look-up and a comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum, auto
from typing import Protocol

from infinity.telemetry import Counters, StallCause, Times


class Memory(IntEnum):
    """Where a copy is; higher is nearer to the computation."""

    FILE = 0  # a range of somebody's file, which is never written
    NVME = 1
    HOST = 2
    SHARD = 3  # on the device, beside what is computed on
    DEVICE = 4


class State(Enum):
    """Of a copy, see [Note: copies]."""

    ABSENT = auto()
    ARRIVING = auto()
    VALID = auto()
    WRITING = auto()
    LEAVING = auto()


# A look-up in an Enum takes 0.2 us, and a tile takes sixty.
_ABSENT, _ARRIVING, _VALID, _WRITING, _LEAVING = State


class Transfer(Protocol):
    """Bytes on their way: a read, a write, a copy over the link, a collective. Thread-safe."""

    def done(self) -> bool:
        """It is over, well or not."""

    def result(self) -> object:
        """Wait until it is over.

        Raises:
            StorageError: it failed.
        """

    def times(self) -> Times | None:
        """When it ran; None while that is not known."""


class Move:
    """One transfer and what it means for the copies of a field.

    Attributes:
        cause: what waiting for it is waiting for.
        version: what the target will have.
        source, target: None outside of the field, such as a tensor that a user has.
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

    def done(self) -> bool:
        return self.transfer.done()

    def wait(self, counters: Counters) -> None:
        """Block the compute thread until it is over.

        Raises:
            StorageError: it failed.
        """
        with counters.stalled(self.cause):
            self.transfer.result()


class Copy:
    """What one memory has of a field.

    Attributes:
        version: of its bytes; meaningless while it is ABSENT.
        pins: users that keep it from being dropped.
        moves: those that may still read or write its bytes.
    """

    __slots__ = ("memory", "moves", "pins", "state", "version")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.state = _ABSENT
        self.version = -1
        self.pins = 0
        self.moves: list[Move] = []

    def is_still(self) -> bool:
        """No move touches its bytes any more; one that fills it does until it is known how it ended."""
        if self.moves:
            fills = self.state is _ARRIVING
            self.moves = [move for move in self.moves if not move.done() or (fills and move.target is self)]
        return not self.moves


class Field:
    """All copies of one value.

    Args:
        name: for messages.
        memories: where it may have copies.

    Attributes:
        version: of the newest value; 0 before there is one.
    """

    __slots__ = ("copies", "name", "version")

    def __init__(self, name: str, memories: Iterable[Memory]) -> None:
        self.name = name
        self.version = 0
        self.copies = {memory: Copy(memory) for memory in memories}

    # Questions #

    def state(self, memory: Memory) -> State:
        return self.copies[memory].state

    def is_newest(self, memory: Memory) -> bool:
        """This memory has the newest value, for whoever wants to read it."""
        copy = self.copies.get(memory)
        return copy is not None and copy.state is _VALID and copy.version == self.version

    def newest(self) -> Copy | None:
        """The copy nearest to the computation that has the newest value; None while it is changed or on its way."""
        return max((c for m, c in self.copies.items() if self.is_newest(m)), key=_nearness, default=None)

    def can_drop(self, memory: Memory) -> bool:
        """Nobody uses this copy, and the value would not be lost with it."""
        copy = self.copies[memory]
        return copy.state is _VALID and not copy.pins and (copy.version < self.version or self._is_safe_without(copy))

    def _is_safe_without(self, copy: Copy) -> bool:
        """The same version is in another memory, or on its way there from this one."""
        for other in self.copies.values():
            if other is copy or other.version != copy.version:
                continue
            if other.state is _VALID or any(move.source is copy for move in other.moves):
                return True
        return False

    def moves(self) -> tuple[Move, ...]:
        """Those that may still touch any of the copies."""
        return tuple(dict.fromkeys(move for copy in self.copies.values() if not copy.is_still() for move in copy.moves))

    # Moves #

    def expect(self, memory: Memory) -> None:
        """Memory has been taken for a copy whose move begins later; pairs with `begin_move` or `give_up`."""
        self._check_not_file(memory)
        self._go(self.copies[memory], _ABSENT, _ARRIVING)
        self.copies[memory].version = -1  # what it had is no more

    def give_up(self, memory: Memory) -> None:
        """A copy that was expected does not come."""
        if self.arriving(memory) is not None:
            raise RuntimeError(f"{self.name} is on its way to {memory.name} and cannot be given up")
        self._go(self.copies[memory], _ARRIVING, _ABSENT)

    def begin_move(
        self, source: Memory | None, target: Memory, transfer: Transfer, cause: StallCause, *, at: int | None = None
    ) -> Move:
        """The bytes of `source` are on their way to `target`, whose bytes are void from now on.

        Args:
            source: None for what comes from outside of the field, such as other ranks' shards; then `at` is given.
            at: the version of what comes, where it is not the source's: its writer writes it through piece by piece.
        """
        origin, copy = None if source is None else self.copies[source], self.copies[target]
        version = at if at is not None else -1 if origin is None else origin.version
        if origin is not None:
            self._check_readable(origin, _VALID if at is None else _WRITING)
        if not copy.is_still() and (at is None or any(move.target is not origin for move in copy.moves)):
            # What fills the source may still read the target: who changes the source waits for it first.
            raise RuntimeError(f"{self.name} cannot come to {target.name} yet: {_told(copy)}")
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
        """The bytes of a copy are on their way out of the field, to a tensor that a user has."""
        origin = self.copies[source]
        self._check_readable(origin, _VALID)
        move = Move(transfer, cause, origin.version, origin)
        origin.moves.append(move)
        return move

    def finish_move(self, move: Move) -> None:
        """Wait until a move is over: its target is VALID then, though perhaps not the newest any more.

        Raises:
            StorageError: it failed; the target is ABSENT.
        """
        try:
            move.transfer.result()
        except Exception:  # not an interrupt: the move goes on then, and is waited for again
            self._over(move, _ABSENT)
            raise
        self._over(move, _VALID)

    def _over(self, move: Move, outcome: State) -> None:
        target = move.target
        if target is not None and self.arriving(target.memory) is move:  # not an older one, which was waited for
            self._go(target, _ARRIVING, outcome)
        for copy in (move.source, target):
            if copy is not None and move in copy.moves:
                copy.moves.remove(move)

    def arriving(self, memory: Memory) -> Move | None:
        """The move that fills this memory's copy now."""
        copy = self.copies[memory]
        if copy.state is not _ARRIVING:
            return None
        return next((move for move in copy.moves if move.target is copy), None)

    def order_behind(self, move: Move) -> None:
        """What reads the target from now on runs behind the move, in the order of a stream, which may still be on."""
        target = move.target
        assert target is not None
        self._go(target, _ARRIVING, _VALID)
        target.moves.remove(move)

    # Changes in place #

    def begin_write(self, memory: Memory) -> tuple[Move, ...]:
        """This copy, the newest or the one on its way, is the caller's to change; returns the moves to wait for first.

        A field without a value may begin with any copy.
        """
        copy = self.copies[memory]
        for other in self.copies.values():  # for every gradient: no generator
            if other.state is _WRITING:
                raise RuntimeError(f"{self.name} is being changed already")
        if self.version:
            if memory < Memory.HOST:
                raise RuntimeError(f"{self.name} cannot be changed in place in {memory.name}")
            if copy.version != self.version or copy.state not in (_VALID, _ARRIVING):
                raise RuntimeError(
                    f"{self.name}: version {self.version} cannot be changed in {memory.name}, {_told(copy)}"
                )
        elif copy.state is _VALID or copy.state is _WRITING:
            raise RuntimeError(f"{self.name}: there is no value, but {memory.name} is {_told(copy)}")
        waits = () if copy.is_still() else tuple(copy.moves)  # one that has failed among them
        copy.state = _WRITING
        return waits

    def end_write(self, memory: Memory, *, in_order: bool = False) -> None:
        """The change is done: this copy is the newest, and the others are old.

        Args:
            in_order: it is done behind what fills the copy, in the order of a stream; else its writer has waited.

        Raises:
            RuntimeError: the copy is still being filled.
            StorageError: what was to fill it has failed.
        """
        copy = self.copies[memory]
        fills = [move for move in copy.moves if move.target is copy]
        for move in () if in_order else fills:
            if not move.done():
                raise RuntimeError(f"{self.name} was changed in {memory.name} while it was still on its way there")
            move.transfer.result()
        for move in fills:
            self._over(move, _VALID)
        # In one line, and before the state: an interrupt leaves a change that is ended once more, and not one that no
        # copy has.
        self.version = copy.version = self.version + 1
        self._go(copy, _WRITING, _VALID)

    def outdate(self) -> None:
        """The value has changed where this field has no copy: all of them are old."""
        self.version += 1

    def take_back(self, memory: Memory) -> None:
        """The last change is undone: this memory has what was before it, in its other slot, and all copies are old."""
        if not self.version:
            raise RuntimeError(f"{self.name} has no value to be taken back")
        for copy in self.copies.values():
            if copy.state is _WRITING or copy.state is _ARRIVING or not copy.is_still():
                raise RuntimeError(f"{self.name} cannot be taken back: in {copy.memory.name} it is {_told(copy)}")
        copy = self.copies[memory]
        copy.state = _VALID  # or what was written of the change has failed
        self.version = copy.version = self.version + 1

    def fail_write(self, memory: Memory) -> None:
        """The change was left half way: this copy is nothing any more."""
        copy = self.copies[memory]
        self._go(copy, _WRITING, _LEAVING)
        copy.version = -1
        self.gone(memory)
        if any(other.version > self.version for other in self.copies.values()):
            self.version += 2  # what was written through of the change is nobody's value

    # Ends #

    def pin(self, memory: Memory) -> None:
        """Keep a copy from being dropped; pairs with `unpin`."""
        self.copies[memory].pins += 1

    def unpin(self, memory: Memory) -> None:
        copy = self.copies[memory]
        if not copy.pins:
            raise RuntimeError(f"{self.name} is not pinned in {memory.name}")
        copy.pins -= 1

    def drop(self, memory: Memory) -> bool:
        """End a copy; returns whether its memory is free now. If not it is LEAVING, and `gone` tells when it is."""
        copy = self.copies[memory]
        if not self.can_drop(memory):
            raise RuntimeError(f"{self.name} is in use, or nowhere else, and cannot leave {memory.name}: {_told(copy)}")
        copy.state = _LEAVING
        return self.gone(memory)

    def gone(self, memory: Memory) -> bool:
        """A copy that was LEAVING has left: its memory is free."""
        copy = self.copies[memory]
        if copy.state is not _LEAVING or not copy.is_still():
            return False
        if copy.version == self.version and self.newest() is None:
            return False  # nobody knows yet whether what is on its way from here has arrived
        self._go(copy, _LEAVING, _ABSENT)
        return True

    def keep(self, memory: Memory) -> None:
        """A copy that was about to leave stays: its bytes are still there."""
        if self.copies[memory].version < 0:
            raise RuntimeError(f"{self.name}: what leaves {memory.name} is nothing any more")
        self._go(self.copies[memory], _LEAVING, _VALID)

    def consume(self) -> None:
        """The value was used for the last time: every copy goes, and the next change begins a new one."""
        for copy in self.copies.values():
            if copy.pins or copy.state is _WRITING:
                raise RuntimeError(f"{self.name} is still in use in {copy.memory.name}")
        for copy in self.copies.values():
            copy.version = -1
            copy.state = _ABSENT if copy.is_still() else _LEAVING
        self.version = 0

    def _check_readable(self, copy: Copy, state: State) -> None:
        if copy.state is not state:
            raise RuntimeError(f"{self.name}: what is in {copy.memory.name} is {copy.state.name} and cannot be read")

    def _check_not_file(self, memory: Memory) -> None:
        if memory is Memory.FILE:
            raise RuntimeError(f"{self.name} lies in a file of somebody else, which is never written")

    def _go(self, copy: Copy, source: State, target: State) -> None:
        """The one transition: it checks where it comes from."""
        if copy.state is not source:
            raise RuntimeError(
                f"{self.name} cannot become {target.name} in {copy.memory.name}: it is {_told(copy)}, not {source.name}"
            )
        copy.state = target


def _nearness(copy: Copy) -> Memory:
    return copy.memory


def _told(copy: Copy) -> str:
    return f"{copy.state.name} at version {copy.version} with {copy.pins} pins and {len(copy.moves)} moves"
