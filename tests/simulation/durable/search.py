"""Every order of a few durable operations, a crash at every point of each, and what the engine makes of what is left."""

from __future__ import annotations

import itertools
import logging
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from infinity.errors import InfinityError, StorageError
from infinity.tiers.records import parse_record
from tests.simulation.durable.drive import (
    BLOCK,
    ROOT,
    Cached,
    Disk,
    Event,
    Flush,
    Hear,
    Image,
    Names,
    Recorder,
    Size,
    Tell,
    Write,
    losses,
)
from tests.simulation.durable.turns import Numbers, in_turns
from tests.simulation.durable.world import BEFORE, CHECKPOINTS, Trainer, World, blocks_of

MEMORY = Path("/dev/shm")
_LATER = 1 << 20  # names that no earlier process has had
OPERATIONS: dict[str, Callable[[Trainer, int], object]] = {
    "step": lambda trainer, label: trainer.step(label),
    "part": lambda trainer, label: trainer.step(label, range(1, 2)),
    "undo": lambda trainer, label: trainer.step(label, range(1, 2), undone=range(1)),
    "commit": lambda trainer, label: trainer.session.wait(),
    "save": lambda trainer, label: trainer.save("tag"),
    "keep": lambda trainer, label: trainer.save(None, keep_last=1),
    "begin": lambda trainer, label: trainer.save("tag", blocking=False),
    "restart": lambda trainer, label: trainer.resume(),
}
STEPS = ("step", "part", "undo")
BASES: dict[str, tuple[str, ...]] = {"new": (), "trained": ("step", "step", "save")}


class Violation(AssertionError):
    """A promise is broken; the message has the operations and what was lost."""


@dataclass(frozen=True)
class Found:
    """What the engine makes of a directory.

    Attributes:
        label: of the step, on all ranks; None of nothing.
        digests: of the values of each rank.
        refusal: the error's name and words, without what differs from run to run.
        wrong: it is neither a step nor a refusal.
    """

    label: int | None = None
    digests: tuple[str, ...] = ()
    refusal: str | None = None
    wrong: str | None = None


@dataclass
class Counts:
    """Of a search."""

    sequences: int = 0
    crash_points: int = 0
    states: int = 0
    examined: int = 0
    adopted: int = 0
    nothing: int = 0
    loaded: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@contextmanager
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="durable-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# What is left of a run #


def _outcome(outcomes: Sequence[int | None | Exception], digests: Sequence[str]) -> Found:
    errors = [each for each in outcomes if isinstance(each, Exception)]
    for error in errors:
        if not isinstance(error, InfinityError):
            return Found(wrong=f"{type(error).__name__}: {error}")
    if errors:
        words = re.sub(r"rank \d: |/\S*/|[0-9a-f]{8,}", "", str(errors[0]))
        return Found(refusal=f"{type(errors[0]).__name__}: {words[:72]}")
    labels = set(outcomes)
    if len(labels) > 1:
        return Found(wrong=f"the ranks have steps {outcomes}")
    label = labels.pop()
    assert not isinstance(label, Exception)
    return Found() if label is None else Found(label, tuple(digests))


@contextmanager
def _built(disk: Disk, size: int, names: Sequence[str], *, keeps: bool) -> Iterator[World]:
    """Ranks that begin on parts of a disk."""
    with directory() as root, in_turns(Numbers(_LATER)):
        disk.build(root, names)
        with World(root, size, keeps=keeps).dropped() as world:
            yield world


def _opened(world: World, action: Callable[[Trainer], int | None]) -> Found:
    outcomes: Sequence[int | None | Exception] = world.open()
    if not any(isinstance(each, Exception) for each in outcomes):
        outcomes = world.each(action)
    return _outcome(outcomes, [trainer.digest for _, trainer in sorted(world.trainers.items())])


def resumed(disk: Disk, size: int) -> Found:
    """The step that new processes go on from."""
    with _built(disk, size, [f"drive-{rank}" for rank in range(size)], keeps=True) as world:
        return _opened(world, Trainer.resume)


def loaded(disk: Disk, size: int) -> dict[str | None, Found]:
    """What new processes load: the last checkpoint, and each by its tag."""
    with _built(disk, size, [CHECKPOINTS], keeps=False) as world:
        found: dict[str | None, Found] = {None: _opened(world, lambda trainer: trainer.load(None))}
        path = world.trainers[0].checkpoints
        tags = sorted(each.name for each in path.iterdir() if each.name[0] != "." and each.is_dir()) if path.is_dir() else []
        for tag in tags:
            found[tag] = _opened(world, lambda trainer: trainer.load(tag))  # noqa: B023 (called now)
        return found


# A run #


@dataclass(frozen=True)
class Last:
    """The operation that was performed last.

    Attributes:
        before: the drives when it began, and what had been told by then.
        events: what it did.
        errors: by rank.
    """

    before: Cached
    told: frozenset[tuple[Any, ...]]
    events: list[Event]
    errors: list[Exception]


class History:
    """A run, from empty drives on.

    Attributes:
        shadow: digests of every step, by rank, by label.
        dead: labels that nobody may go on from once a later process has resumed an older step.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.shadow = {0: (BEFORE,) * size}
        self.dead: dict[int, set[int]] = {}
        self.labels: dict[tuple[Any, ...], int] = {}
        self._numbers = Numbers()
        self._cached = Cached(Disk(directories={ROOT: {}}), [])
        self._told: frozenset[tuple[Any, ...]] = frozenset()
        self._held = ExitStack()
        self._label = 0

    def perform(self, operation: str, *, fails: int | None = None, until: int | None = None) -> Last:
        """One operation of all ranks.

        Args:
            fails: number of its flush that fails.
            until: the processes die after so many of its events.
        """
        with in_turns(self._numbers):
            if operation in ("open", "restart"):
                self._begin()
            recorder, world = self._recorder, self._world
            start = len(recorder.events)
            recorder.failing = None if fails is None else recorder.flushes + fails
            before, told = self._cached.copy(), self._told
            with recorder.attached():
                outcomes: list[Any] = world.open() if operation in ("open", "restart") else []
                if operation != "open" and not any(isinstance(each, Exception) for each in outcomes):
                    self._label += operation in STEPS
                    action, label = OPERATIONS[operation], self._label
                    outcomes = world.each(lambda trainer: action(trainer, label))
                    if operation in STEPS:
                        self.shadow[label] = tuple(trainer.digest for _, trainer in sorted(world.trainers.items()))
                world.note_saved()
            self.labels |= world.turns.labels
            if operation == "restart" and isinstance(outcomes[0], int | None):
                adopted = outcomes[0] or 0
                self.dead[adopted] = self.dead.get(adopted, set()) | {each for each in self.shadow if each > adopted}
        events = recorder.events[start:][:until]
        for _, event in events:
            if isinstance(event, Tell):
                self._told |= {event.key}
            elif not isinstance(event, Hear):
                self._cached.take(event)
        return Last(before, told, events, [each for each in outcomes if isinstance(each, Exception)])

    @property
    def survived(self) -> Disk:
        return self._cached.survived()

    def spoil(self) -> None:
        """Change each block of the newest step, and read: the checksums have to say so."""
        for trainer in self._world.trainers.values():
            for path, offset in trainer.places():
                outcomes = []
                for _ in ("changed", "changed back"):
                    content = bytearray(path.read_bytes())
                    content[offset] ^= 1
                    path.write_bytes(content)
                    outcomes += self._world.each(Trainer.read)
                if not isinstance(outcomes[0], StorageError) or outcomes[1] is not None:
                    raise Violation(f"byte {offset} of {path.name} was changed, and changed back: {outcomes}")

    def _begin(self) -> None:
        """New processes on what the old ones have left."""
        self._held.close()
        root, disk = self._held.enter_context(directory()), self._cached.survived()
        disk.build(root)
        self._recorder = Recorder(root, disk)
        self._held.callback(self._recorder.close)
        self._world = self._held.enter_context(World(root, self.size, self._recorder).dropped())

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exc: object) -> None:
        with in_turns(Numbers()):
            self._held.close()


# Crashes #


def cuts(last: Last) -> Iterator[tuple[Cached, frozenset[tuple[Any, ...]]]]:
    """The drives and what has been told, at every point that threads and ranks can be at together."""
    lanes: dict[str, list[int]] = {}
    for index, (lane, _) in enumerate(last.events):
        lanes.setdefault(lane, []).append(index)
    names, seen = list(lanes), set()
    stack: list[tuple[tuple[int, ...], frozenset[tuple[Any, ...]]]] = [((0,) * len(names), last.told)]
    while stack:
        at, told = _silently(last, [lanes[name] for name in names], *stack.pop())
        if at in seen:
            continue
        seen.add(at)
        cached = last.before.copy()
        for index in sorted(i for name, stop in zip(names, at, strict=True) for i in lanes[name][:stop]):
            event = last.events[index][1]
            if not isinstance(event, Tell | Hear):
                cached.take(event)
        yield cached, told
        for lane, name in enumerate(names):
            if at[lane] < len(lanes[name]) and not isinstance(last.events[lanes[name][at[lane]]][1], Tell | Hear):
                stack.append((tuple(stop + (i == lane) for i, stop in enumerate(at)), told))


def _silently(
    last: Last, lanes: Sequence[Sequence[int]], at: tuple[int, ...], told: frozenset[tuple[Any, ...]]
) -> tuple[tuple[int, ...], frozenset[tuple[Any, ...]]]:
    """Go on as far as nothing happens on the drives."""
    stops, moved = list(at), True
    while moved:
        moved = False
        for i, lane in enumerate(lanes):
            while stops[i] < len(lane):
                event = last.events[lane[stops[i]]][1]
                if isinstance(event, Tell):
                    told |= {event.key}
                elif not isinstance(event, Hear) or not event.keys <= told:
                    break
                stops[i], moved = stops[i] + 1, True
    return tuple(stops), told


def _told(change: Write | Size | Names) -> str:
    if isinstance(change, Names):
        return ", ".join(f"{name} of {directory} is {target}" for directory, name, target in change.changes)
    return f"{change.block} of {change.file}" if isinstance(change, Write) else f"{change.nbytes} of {change.file}"


def _used(name: str) -> Callable[[int], bool]:
    """What is unfinished by its name is removed by it, and never read."""
    unread = name.startswith(".tmp-new-") or name.endswith((".new", ".swap"))
    return lambda block: not unread


@lru_cache(1 << 12)
def _blocks(record: bytes) -> Callable[[int], bool]:
    """Those that a record leads to; all if it is damaged."""
    try:
        generations = parse_record(Path("record"), record).generations
    except InfinityError:
        return lambda block: True
    return set().union(*(blocks_of(each.slots) for each in generations)).__contains__


class Search:
    """Examines what crashes leave.

    Args:
        most: waiting mutations of which all subsets are tried.
    """

    def __init__(self, size: int, most: int = 6) -> None:
        self.counts = Counts()
        self._size = size
        self._most = most
        self._resumed: dict[tuple[Image, ...], Found] = {}
        self._loaded: dict[Image, dict[str | None, Found]] = {}

    def run(self, operations: Sequence[str], first: int, **how: int) -> Last:
        """Perform operations on a new machine, with all crashes from one of them on, which is returned.

        Args:
            first: index of it.
            how: see `History.perform`, for that one.
        """
        self.counts.sequences += 1
        with History(self._size) as history:
            for index, operation in enumerate(operations):
                last = history.perform(operation, **(how if index == first else {}))
                if index < first:
                    continue
                told = f"in {operation}, after {operations[:index]} {how or ''}"
                if index == first:
                    seen = last
                    if "until" in how:
                        continue
                self._raised(last, told, may_fail="fails" in how)
                self.crash(history, last, told)
                if last.errors and operation in ("open", "restart") and operations[index + 1 : index + 2] != ("restart",):
                    break  # a process that could not begin
        return seen

    def _raised(self, last: Last, told: str, *, may_fail: bool) -> None:
        for error in last.errors:
            if not isinstance(error, InfinityError) or not may_fail:
                raise Violation(f"{type(error).__name__} {error}: {told}") from error

    def crash(self, history: History, last: Last, told: str) -> None:
        """All crashes in an operation."""
        for cached, keys in cuts(last):
            self.counts.crash_points += 1
            for kept in losses(len(cached.waiting), self._most):
                self.counts.states += 1
                self._check(history, cached.after(kept), keys, lambda: f"{told}, {self._lost(cached, kept)}")  # noqa: B023

    def _lost(self, cached: Cached, kept: Sequence[bool]) -> str:
        said = [f"{type(change).__name__} {_told(change)}" for (change, _), there in zip(cached.waiting, kept, strict=True) if not there]
        return f"crash with {len(kept)} mutations that wait, of which these are lost: {said}"

    def _check(self, history: History, disk: Disk, told: frozenset[tuple[Any, ...]], where: Callable[[], str]) -> None:
        drives = tuple(self._drive(disk, disk.at(f"drive-{rank}")) for rank in range(self._size))
        if drives not in self._resumed:
            self._resumed[drives] = resumed(disk, self._size)
            self.counts.examined += 1
        image = disk.image(disk.at(CHECKPOINTS), _used)
        if image not in self._loaded:
            self._loaded[image] = loaded(disk, self._size)
            self.counts.examined += 1
        step, checkpoints = self._resumed[drives], self._loaded[image]
        back = {key[1] for key in told if key[0] == "resumed"}
        floor = max(back | {history.labels.get(key, 0) for key in told if key[0] == "gate"}, default=0)
        dead = set().union(*(history.dead.get(label, set()) for label in back))
        self._judge("resume", step, history, floor, dead, where)
        saved = max((key[1] for key in told if key[0] == "saved"), default=0)
        for tag, found in checkpoints.items():
            self._judge(f"load {tag}", found, history, saved if tag is None else -1, set(), where)
        newest = checkpoints[None].label
        if newest is not None and (step.label or 0) < newest:
            raise Violation(f"the checkpoint is of step {newest} and resume finds {step}: {where()}")
        self.counts.loaded += newest is not None

    def _drive(self, disk: Disk, directory: int | None) -> Image:
        """What of a drive the outcome depends on; of several ranks, only blocks that a record leads to.

        That nothing else is read is what the search of one rank shows, which leaves nothing out.
        """
        names = {} if directory is None else disk.directories.get(directory, {})
        records = [disk.content(file) for name, file in names.items() if name.endswith(".record")]
        if self._size == 1 or not records:
            return disk.image(directory, _used)
        return disk.image(directory, lambda name: _blocks(records[0]) if name.endswith(".slots") else _used(name))

    def _judge(
        self, what: str, found: Found, history: History, floor: int, dead: set[int], where: Callable[[], str]
    ) -> None:
        """A step that is not older than what was told of, or nothing where nothing was."""
        if found.wrong is not None:
            raise Violation(f"{what}: {found.wrong}: {where()}")
        if (found.label or 0) < floor or (floor < 0 and found.label is None):
            raise Violation(f"{what} has {found}, where step {floor} was told of: {where()}")
        if found.label is not None and (found.label in dead or history.shadow[found.label] != found.digests):
            raise Violation(f"{what} has step {found.label}, which is dead or has other values: {where()}")
        if found.refusal is not None:
            self.counts.refused[found.refusal] += 1
        elif what == "resume":
            self.counts.adopted += found.label is not None
            self.counts.nothing += found.label is None

    # What is searched #

    def sequences(self, length: int, operations: Sequence[str] = tuple(OPERATIONS)) -> None:
        """All of up to so many operations, with a crash in the last of each."""
        for sequence in _sequences(length, operations):
            self.run(sequence, len(sequence) - 1)

    def failing(self, length: int, operations: Sequence[str] = tuple(OPERATIONS)) -> None:
        """The same; one flush fails, then training goes on, or begins again on the machine that went on."""
        for sequence in _sequences(length, operations):
            for after in (("step", "save", "commit"), ("restart", "step", "save")):
                with History(self._size) as history:
                    last = [history.perform(operation) for operation in sequence][-1]
                for number in range(1, 1 + sum(isinstance(event, Flush) for _, event in last.events)):
                    self.run((*sequence, *after), len(sequence) - 1, fails=number)

    def killed(self, length: int, operations: Sequence[str] = tuple(OPERATIONS)) -> None:
        """The same; the processes die at any point of it and begin again on the machine that went on."""
        for sequence in _sequences(length, operations):
            with History(self._size) as history:
                last = [history.perform(operation) for operation in sequence][-1]
            for number, (_, event) in enumerate(last.events):
                if not isinstance(event, Tell | Hear):
                    for after in (("restart", "step", "commit"), ("restart", "save", "keep")):
                        self.run((*sequence, *after), len(sequence) - 1, until=number)

    def damaged(self) -> None:
        """A drive that has lost or changed one block or one name of what it was told to flush."""
        sequence = ("open", *BASES["trained"], "step", "keep")
        with History(self._size) as history:
            for operation in sequence:
                history.perform(operation)
            history.spoil()
            disk = history.survived
            for directory, names in disk.directories.items():
                for name, file in names.items():
                    for other in _spoilt(disk, directory, name, file):
                        if not name.endswith(".slots"):  # whose content nothing checks in another process
                            self.counts.crash_points += 1
                            self._found(history, other, f"{name} is spoilt")

    def _found(self, history: History, disk: Disk, where: str) -> None:
        """Nothing but a step that there was, or a refusal."""
        founds = resumed(disk, self._size), *loaded(disk, self._size).values()
        self.counts.examined += 2
        for found in founds:
            self._judge("after damage", found, history, 0, set(), lambda: where)


def _spoilt(disk: Disk, directory: int, name: str, file: int) -> Iterator[Disk]:
    lost = disk.copy()
    lost.apply(Names(((directory, name, None),)))
    yield lost
    size, blocks = disk.files.get(file, (0, {}))
    for block, data in blocks.items():
        for other in (bytes(len(data)), data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]):
            changed = disk.copy()
            changed.apply(Write(file, block, other))
            yield changed
        changed = disk.copy()
        changed.apply(Size(file, block * BLOCK))
        yield changed


def _sequences(length: int, operations: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Each base with up to so many operations more."""
    for base in BASES.values():
        for count in range(length + 1):
            for more in itertools.product(operations, repeat=count):
                yield ("open", *base, *more)


logging.getLogger("infinity").setLevel(logging.CRITICAL)
