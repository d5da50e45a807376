"""Random moves, changes, ends and failures of one field, against what the memories really hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import permutations
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import StorageError
from infinity.telemetry import StallCause, Times
from infinity.tiers.copies import Copy, Field, Memory, Move, State

LAYOUTS = [
    (Memory.HOST, Memory.DEVICE),
    (Memory.NVME, Memory.HOST),
    (Memory.NVME, Memory.HOST, Memory.DEVICE),
    (Memory.FILE, Memory.HOST, Memory.DEVICE),
    (Memory.DEVICE,),
    tuple(Memory),
]
UPLOAD = (Memory.HOST, Memory.DEVICE)
LINK = (UPLOAD, UPLOAD[::-1])  # which does not fail


T = TypeVar("T")


class Bytes:
    """What a memory holds; equal to nothing but itself."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return self.what


class Writer:
    """Who changes a copy in place."""

    def __init__(self, memory: Memory, value: Bytes, waits: Sequence[Move]) -> None:
        self.memory, self.value, self.waits = memory, value, waits
        self.has_changed = False


class FakeTransfer:
    """Moves the bytes when it is told to, or waited for; the source must be then what it was when it began.

    Args:
        value: what it reads.
        source: None for what comes from elsewhere.
        writer: who is changing the source to `value`, and says when pieces of it can be moved.
    """

    def __init__(
        self,
        held: dict[Memory, Bytes],
        value: Bytes,
        source: Memory | None,
        target: Memory,
        fails: bool,
        writer: Writer | None = None,
    ) -> None:
        self.held, self.value, self.source, self.target, self.fails = held, value, source, target, fails
        self.writer = writer
        self.has_begun = False
        self.is_over = False
        self.is_behind = False  # who reads the target in the order of the stream has the bytes already

    def begin(self) -> None:
        self.has_begun = True
        self.torn = self.held[self.target] = Bytes("torn")

    @property
    def can_end(self) -> bool:
        return self.has_begun or self.fails

    @property
    def is_upload(self) -> bool:
        """It has an end in the order of the stream before it has one for the host."""
        return (self.source, self.target) == UPLOAD and self.has_begun and not self.is_behind

    def arrive_for_the_stream(self) -> None:
        self.arrive()
        self.is_behind = True

    def arrive(self) -> None:
        assert self.held[self.target] is self.torn, "somebody else has written where a move was arriving"
        self.check_source()
        self.held[self.target] = self.value

    def check_source(self) -> None:
        assert self.source is None or self.held[self.source] is self.value, "the source has changed under a move"

    def done(self) -> bool:
        return self.is_over

    def result(self) -> object:
        assert self.can_end
        if not self.is_over and not self.fails:
            self.check_source() if self.is_behind else self.arrive()
        self.is_over = True
        if self.fails:
            raise StorageError(5, "on purpose", "a drive", 0)
        return None

    def complete(self) -> None:
        with suppress(StorageError):
            self.result()

    def times(self) -> Times | None:
        return None


class Machine:
    """One field and what its memories hold. A verb is allowed, and then right, or refused, and then nothing changes.

    Args:
        layout: where the field has copies.
        first: where its first value is made, if it is in no file.
    """

    def __init__(self, layout: Sequence[Memory], first: int) -> None:
        self.field = Field("unit", layout)
        self.layout = layout
        self.held = {memory: Bytes("nothing") for memory in layout}
        self.values: dict[int, Bytes] = {}
        self.moves: list[Move] = []
        self.writer: Writer | None = None
        self.needs_reconstruction = False
        self.is_lost = False  # used for the last time, or half written
        place = Memory.FILE if Memory.FILE in layout else pick_from(layout, first)
        self.field.begin_write(place)
        self.held[place] = self.values[1] = Bytes("version 1")
        self.field.end_write(place)
        self.file = self.held.get(Memory.FILE)

    # Verbs #

    def expect(self, pick: int) -> None:
        memory = pick_from(self.layout, pick)
        if self.is_allowed(self.field.expect, memory):
            self.is_free(memory)  # what was somebody else's just now

    def give_up(self, pick: int) -> None:
        memory = pick_from(self.layout, pick)
        if self.is_allowed(self.field.give_up, memory):
            self.is_free(memory)

    def move(self, pick: int) -> None:
        self.start(pick, fails=False)

    def move_and_fail(self, pick: int) -> None:
        self.start(pick, fails=True)

    def start(self, pick: int, *, fails: bool) -> None:
        if len(self.layout) == 1:
            return
        source, target = pick_from(list(permutations(self.layout, 2)), pick)
        writer = self.writer if self.writer is not None and self.writer.memory is source else None
        value, at = self.held[source], None
        if writer is not None:
            value, at = writer.value, self.field.version + 1
        transfer = FakeTransfer(self.held, value, source, target, fails and (source, target) not in LINK, writer)
        self.begin_move(source, target, transfer, at)

    def gather(self, pick: int) -> None:
        """The newest value comes from outside of the field."""
        if self.needs_reconstruction and not self.is_lost:
            target, version = pick_from(self.layout, pick), self.field.version
            transfer = FakeTransfer(self.held, self.values[version], None, target, fails=pick % 3 == 0)
            self.begin_move(None, target, transfer, version)

    def invalidate(self, pick: int) -> None:
        if self.writer is None and not self.is_lost:
            self.field.invalidate()
            self.values[self.field.version] = Bytes(f"version {self.field.version} of elsewhere")
            self.needs_reconstruction = True

    def begin_move(self, source: Memory | None, target: Memory, transfer: FakeTransfer, at: int | None) -> None:
        moves: list[Move] = []
        if self.is_allowed(
            lambda: moves.append(self.field.begin_move(source, target, transfer, StallCause.HOST_LINK, at=at))
        ):
            assert target is not Memory.FILE, "a file of somebody else is written"
            self.moves += moves
            if transfer.writer is None or transfer.writer.has_changed:
                self.begin_transfer(transfer)

    def begin_transfer(self, transfer: FakeTransfer) -> None:
        if transfer.source is Memory.DEVICE:  # behind all that the compute stream is behind
            for earlier in (earlier for earlier in map(transfer_of, self.moves) if earlier.is_behind):
                earlier.complete()
        self.assert_untouched(transfer.target, besides=transfer)
        transfer.begin()

    def complete(self, pick: int) -> None:
        """A transfer is over, and nobody knows yet."""
        moves = [move for move in self.moves if transfer_of(move).can_end and not move.transfer.done()]
        if moves:
            transfer_of(pick_from(moves, pick)).complete()

    def finish(self, pick: int) -> None:
        moves = [move for move in self.moves if transfer_of(move).can_end]
        if not moves:
            return
        move = pick_from(moves, pick)
        source, target = move.source, move.target
        assert target is not None
        before, fills = self.state(), self.field.arriving(target.memory) is move
        self.moves.remove(move)
        try:
            self.field.finish_move(move)
        except StorageError:
            assert not fills or target.state is State.ABSENT
            assert fills or self.state() == before
            if source is not None and source.state is State.LEAVING and source.version >= 0:
                self.field.keep(source.memory)

    def order_behind(self, pick: int) -> None:
        moves = [move for move in self.moves if transfer_of(move).is_upload and not move.transfer.done()]
        if moves:
            move = pick_from(moves, pick)
            if self.is_allowed(self.field.order_behind, move):
                transfer_of(move).arrive_for_the_stream()

    def begin_write(self, pick: int) -> None:
        memory = pick_from(self.layout, pick)
        waits: list[Move] = []
        if memory is Memory.FILE and not self.field.version:
            return  # so it is told that there is a value in the file
        if self.is_allowed(lambda: waits.extend(self.field.begin_write(memory))):
            assert self.writer is None, "two write at once"
            assert memory is not Memory.FILE, "a file of somebody else is written"
            self.writer = Writer(memory, Bytes(f"version {self.field.version + 1}"), waits)

    def change(self, pick: int) -> None:
        writer = self.writer
        if writer is None or writer.has_changed:
            return
        for move in writer.waits:
            transfer_of(move).complete()
        if any(transfer_of(move).fails and transfer_of(move).target is writer.memory for move in writer.waits):
            self.fail_write(pick)
            return
        self.assert_untouched(writer.memory)
        if self.field.version:
            assert self.held[writer.memory] is self.values[self.field.version], "an update of something else"
        self.held[writer.memory] = writer.value
        writer.has_changed = True
        for transfer in map(transfer_of, self.moves):
            if transfer.writer is writer and not transfer.is_over:
                self.begin_transfer(transfer)

    def end_write(self, pick: int) -> None:
        writer = self.writer
        if writer is not None and writer.has_changed:
            self.writer = None
            self.field.end_write(writer.memory)
            self.values[self.field.version] = writer.value
            self.is_lost = self.needs_reconstruction = False

    def leave_alone(self, pick: int) -> None:
        """Who was to change a copy ends without: what fills it must have come by then."""
        writer = self.writer
        if writer is None or writer.has_changed or not self.field.version:
            return
        if any(transfer_of(move).writer is writer for move in self.moves):
            return  # what it was to change is on its way
        fills = [move for move in writer.waits if transfer_of(move).target is writer.memory]
        try:
            allowed = self.is_allowed(self.field.end_write, writer.memory)
        except StorageError:
            assert any(transfer_of(move).fails for move in fills)
            self.fail_write(pick)
            return
        assert allowed == all(move.transfer.done() for move in fills)
        if allowed:
            self.writer = None
            self.values[self.field.version] = self.held[writer.memory]
            self.needs_reconstruction = False

    def fail_write(self, pick: int) -> None:
        writer, self.writer = self.writer, None
        if writer is None:
            return
        self.is_lost = True
        self.values[self.field.version + 1] = writer.value  # as far as it was written through
        for transfer in map(transfer_of, self.moves):
            transfer.fails |= transfer.writer is writer and not transfer.is_over
        self.field.fail_write(writer.memory)
        if self.field.state(writer.memory) is State.ABSENT:
            self.is_free(writer.memory)

    def pin(self, pick: int) -> None:
        self.is_allowed(self.field.copies[pick_from(self.layout, pick)].pin)

    def unpin(self, pick: int) -> None:
        self.is_allowed(self.field.copies[pick_from(self.layout, pick)].unpin)

    def drop(self, pick: int) -> None:
        memory = pick_from(self.layout, pick)
        could, pins = self.field.can_drop(memory), self.field.copies[memory].pins
        is_free: list[bool] = []
        assert self.is_allowed(lambda: is_free.append(self.field.drop(memory))) == could
        if is_free:
            assert not pins
        if any(is_free):
            self.is_free(memory)

    def gone(self, pick: int) -> None:
        memory = pick_from(self.layout, pick)
        if self.field.gone(memory):
            self.is_free(memory)

    def keep(self, pick: int) -> None:
        self.is_allowed(self.field.keep, pick_from(self.layout, pick))

    def consume(self, pick: int) -> None:
        if self.is_allowed(self.field.consume):
            assert self.writer is None, "what somebody changes is taken away"
            self.is_lost = True
            self.values.clear()
            for memory in self.layout:
                if self.field.state(memory) is State.ABSENT:
                    self.is_free(memory)

    def roll_back(self, pick: int) -> None:
        """What was there before the last change is in the drive's other slot."""
        if Memory.NVME not in self.layout or self.is_lost:
            return
        if self.is_allowed(self.field.roll_back, Memory.NVME):
            assert self.writer is None, "what somebody changes is taken back"
            self.assert_untouched(Memory.NVME)
            self.held[Memory.NVME] = self.values[self.field.version] = Bytes(f"version {self.field.version}, as before")
            self.needs_reconstruction = False

    # What is always so #

    def check(self) -> None:
        for memory, copy in self.field.copies.items():
            if copy.state is State.VALID:
                is_ahead = self.writer is not None and copy.version == self.field.version + 1
                value = self.writer.value if is_ahead and self.writer else self.values[copy.version]
                assert self.held[memory] is value, f"{memory.name} has not version {copy.version}"
        newest = self.newest()
        assert newest is None or newest.version == self.field.version
        if not self.is_lost and not self.needs_reconstruction and self.writer is None:
            assert self.values[self.field.version] in self.kept(), "the newest value is lost"
        assert self.held.get(Memory.FILE) is self.file, "a file of somebody else is written"

    def newest(self) -> Copy | None:
        """The newest copy that is nearest to the computation."""
        memory = max((memory for memory in self.field.copies if self.field.is_newest(memory)), default=None)
        return None if memory is None else self.field.copies[memory]

    def end(self) -> None:
        """When all is over, the newest value can be brought to where it is used."""
        self.change(0)
        self.end_write(0)
        while self.moves:
            self.finish(0)
            self.check()
        if self.is_lost or self.needs_reconstruction:
            return
        for memory in self.layout:
            self.field.gone(memory)
            while self.field.copies[memory].pins:
                self.field.copies[memory].unpin()
        newest = self.newest()
        assert newest is not None
        assert self.held[newest.memory] is self.values[self.field.version]

    # How it is done #

    def is_allowed(self, verb: Callable[..., object], *args: object) -> bool:
        before = self.state()
        try:
            verb(*args)
        except RuntimeError:
            assert self.state() == before, "a refusal has changed something"
            return False
        return True

    def kept(self) -> list[Bytes]:
        """Newest values that are somewhere, or arrive for sure."""
        copies = [copy for copy in self.field.copies.values() if copy.version == self.field.version]
        held = [self.held[copy.memory] for copy in copies if copy.state in (State.VALID, State.LEAVING)]
        moves = filter(None, (self.field.arriving(copy.memory) for copy in copies))
        return held + [transfer_of(move).value for move in moves if not transfer_of(move).fails]

    def state(self) -> object:
        copies = [(copy.state, copy.version, copy.pins) for copy in self.field.copies.values()]
        return copies, self.field.version

    def assert_untouched(self, memory: Memory, besides: FakeTransfer | None = None) -> None:
        for transfer in map(transfer_of, self.moves):
            if transfer is not besides and transfer.has_begun and not transfer.is_over:
                assert transfer.source is not memory, f"{memory.name} is still read"
                assert transfer.target is not memory or transfer.is_behind, f"{memory.name} is still filled"

    def is_free(self, memory: Memory) -> None:
        """Somebody else has the memory now, unless it is a place in a file."""
        self.assert_untouched(memory)
        if memory in (Memory.HOST, Memory.DEVICE):
            self.held[memory] = Bytes("memory of somebody else")


def pick_from(options: Sequence[T], pick: int) -> T:
    return options[pick % len(options)]


def transfer_of(move: Move) -> FakeTransfer:
    assert isinstance(move.transfer, FakeTransfer)
    return move.transfer


VERBS = [
    name for name, verb in vars(Machine).items() if list(getattr(verb, "__annotations__", {})) == ["pick", "return"]
]


@settings(max_examples=1000, derandomize=True)
@given(
    st.sampled_from(LAYOUTS),
    st.integers(0, 4),
    st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 19)), max_size=60),
)
def test_every_copy_has_the_bytes_of_its_version(layout, first, steps) -> None:
    machine = Machine(layout, first)
    for verb, pick in steps:
        getattr(machine, verb)(pick)
        machine.check()
    machine.end()
