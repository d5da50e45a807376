"""Every order of a few durable operations, a crash at every point of each, and what is made of what it leaves."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from infinity.errors import InfinityError
from infinity.tiers.records import parse_record
from tests.simulation.durable.drive import (
    BLOCK,
    Cached,
    Disk,
    Flush,
    Hear,
    Image,
    Names,
    Size,
    Tell,
    Write,
    losses,
)
from tests.simulation.durable.history import OPERATIONS, History, Last, Violation, cuts, directory
from tests.simulation.durable.turns import Numbers, in_turns
from tests.simulation.durable.world import Layout, Trainer, World, blocks_of

_LATER = 1 << 20  # names that no earlier process has had
BASES: dict[str, tuple[str, ...]] = {"new": (), "trained": ("step", "step", "save")}
AFTER_FAILURES = ("step", "save", "commit"), ("restart", "step", "save")
AFTER_DEATHS = ("restart", "step", "commit"), ("restart", "save", "keep")


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


@dataclass(frozen=True)
class Promised:
    """What was told of before a crash.

    Attributes:
        step, checkpoint: labels of the last ones.
        dead: of steps that the run has left behind.
    """

    step: int
    checkpoint: int
    dead: frozenset[int]


@dataclass
class Counts:
    """Of a search."""

    sequences: int = 0
    crash_points: int = 0
    states: int = 0
    examined: int = 0
    damages: int = 0
    adopted: int = 0
    nothing: int = 0
    loaded: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


# What is left of a run #


def _outcome(outcomes: Sequence[int | Exception | None], digests: Sequence[str]) -> Found:
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
def _built(disk: Disk, layout: Layout, *, keeps: bool) -> Iterator[World]:
    """Ranks that begin on parts of a disk."""
    with directory() as root, in_turns(Numbers(_LATER)):
        disk.build(root, layout.slots if keeps else layout.checkpoints)
        with World(root, layout, keeps=keeps).dropped() as world:
            yield world


def _opened(world: World, action: Callable[[Trainer], int | None]) -> Found:
    outcomes: Sequence[int | Exception | None] = world.open()
    if not any(isinstance(each, Exception) for each in outcomes):
        outcomes = world.each(action)
    return _outcome(outcomes, [trainer.digest for _, trainer in sorted(world.trainers.items())])


def resumed(disk: Disk, layout: Layout) -> Found:
    """The step that new processes go on from."""
    with _built(disk, layout, keeps=True) as world:
        return _opened(world, Trainer.resume)


def loaded(disk: Disk, layout: Layout) -> dict[str, Found]:
    """What new processes load: the last checkpoint, and each by its tag where all ranks see the same."""
    with _built(disk, layout, keeps=False) as world:
        found = {"": _opened(world, lambda trainer: trainer.load(None))}
        first = world.trainers[0]
        for tag in () if layout.apart else first.tags():
            if tag != first.loaded:
                found[tag] = _opened(world, lambda trainer: trainer.load(tag))  # noqa: B023 (called now)
        return found


# Crashes #


def _told(change: Write | Size | Names) -> str:
    if isinstance(change, Names):
        return ", ".join(f"{name} of {directory} is {target}" for directory, name, target in change.changes)
    return f"{change.block} of {change.file}" if isinstance(change, Write) else f"{change.nbytes} of {change.file}"


def told_of(cached: Cached, kept: Sequence[bool]) -> str:
    """A crash in words."""
    lost = [
        f"{type(each).__name__} {_told(each)}"
        for (each, _), there in zip(cached.waiting, kept, strict=True)
        if not there
    ]
    return f"crash with {len(kept)} mutations that wait, of which these are lost: {lost}"


def _used(name: str) -> Collection[int] | None:
    """What is unfinished by its name is removed by it, and never read."""
    return () if name.endswith((".new", ".swap")) else None


def _saved(disk: Disk, directory: int | None) -> Image:
    """What loading looks at; the rest is the next save's to remove."""
    names = {} if directory is None else disk.directories.get(directory, {})
    seen = [name for name in names if name[0] != "." or name.startswith(".tmp-old-")]
    return directory is None, *((name, disk.image(names[name])) for name in sorted(seen))


@lru_cache(1 << 12)
def _blocks(record: bytes) -> Collection[int] | None:
    """Those that a record leads to; all if it is damaged."""
    try:
        generations = parse_record(Path("record"), record).generations
    except InfinityError:
        return None
    return set().union(*(blocks_of(each.slots) for each in generations))


class Search:
    """Examines what crashes leave.

    Args:
        most: waiting mutations of which all subsets are tried.
    """

    def __init__(self, layout: Layout, most: int = 6) -> None:
        self.counts = Counts()
        self._layout = layout
        self._most = most
        self._resumed: dict[tuple[Image, ...], Found] = {}
        self._loaded: dict[Image, dict[str, Found]] = {}

    def run(self, operations: Sequence[str], first: int, **how: int) -> Last:
        """Perform operations on a new machine, with all crashes from one of them on, which is returned.

        Args:
            first: index of it.
            how: see `History.perform`, for that one.
        """
        self.counts.sequences += 1
        with History(self._layout) as history:
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
                if (
                    last.errors
                    and operation in ("open", "restart")
                    and operations[index + 1 : index + 2] != ("restart",)
                ):
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
            promised = self._promised(history, keys)
            for kept in losses(len(cached.waiting), self._most):
                self.counts.states += 1
                self._check(history, cached.after(kept), promised, lambda: f"{told}, {told_of(cached, kept)}")  # noqa: B023

    def _promised(self, history: History, told: frozenset[tuple[Any, ...]]) -> Promised:
        back = {key[1] for key in told if key[0] == "resumed"}
        return Promised(
            max(back | {history.labels.get(key, 0) for key in told if key[0] == "gate"}, default=0),
            max((key[1] for key in told if key[0] == "saved"), default=0),
            frozenset().union(*(history.dead.get(label, set()) for label in back)),
        )

    def _check(self, history: History, disk: Disk, promised: Promised, where: Callable[[], str]) -> None:
        drives = tuple(self._drive(disk, disk.at(name)) for name in self._layout.slots)
        if drives not in self._resumed:
            self._resumed[drives] = resumed(disk, self._layout)
            self.counts.examined += 1
        image = tuple(_saved(disk, disk.at(name)) for name in self._layout.checkpoints)
        if image not in self._loaded:
            self._loaded[image] = loaded(disk, self._layout)
            self.counts.examined += 1
        step, checkpoints = self._resumed[drives], self._loaded[image]
        self._judge("resume", step, history, promised.step, promised.dead, where)
        for tag, found in checkpoints.items():
            self._judge(f"load {tag}", found, history, -1 if tag else promised.checkpoint, frozenset(), where)
        newest = checkpoints[""].label
        if newest is not None and (step.label or 0) < newest:
            raise Violation(f"the checkpoint is of step {newest} and resume finds {step}: {where()}")
        self.counts.loaded += newest is not None

    def _drive(self, disk: Disk, directory: int | None) -> Image:
        """What of a drive the outcome depends on; of several ranks, only blocks that a record leads to.

        That nothing else is read is what the search of one rank shows, which leaves nothing out.
        """
        names = {} if directory is None else disk.directories.get(directory, {})
        records = [disk.content(file) for name, file in names.items() if name.endswith(".record")]
        if self._layout.ranks == 1 or not records:
            return disk.image(directory, _used)
        return disk.image(directory, lambda name: _blocks(records[0]) if name.endswith(".slots") else _used(name))

    def _judge(
        self, what: str, found: Found, history: History, floor: int, dead: frozenset[int], where: Callable[[], str]
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

    def crashing(self, sequence: Sequence[str]) -> None:
        """A crash in the last operation."""
        self.run(sequence, len(sequence) - 1)

    def failing(self, sequence: Sequence[str]) -> None:
        """Each flush of the last operation fails; training goes on, or begins again on the machine that went on."""
        flushes = sum(isinstance(event, Flush) for event in self.events_of(sequence))
        for number, after in itertools.product(range(1, 1 + flushes), AFTER_FAILURES):
            self.run((*sequence, *after), len(sequence) - 1, fails=number)

    def killed(self, sequence: Sequence[str], first: int = 0) -> None:
        """The processes die at each point of the last operation, and begin again on the machine that went on."""
        events = self.events_of(sequence)
        for number in range(first, len(events)):
            for after in () if isinstance(events[number], Tell | Hear) else AFTER_DEATHS:
                self.run((*sequence, *after), len(sequence) - 1, until=number)

    def killed_publishing(self, sequence: Sequence[str]) -> None:
        """The same, from where the last operation begins to have a checkpoint be there."""
        named = [
            isinstance(each, Names) and any(name == ".tmp-latest" for _, name, _ in each.changes)
            for each in self.events_of(sequence)
        ]
        self.killed(sequence, named.index(True))

    def events_of(self, sequence: Sequence[str]) -> list[Any]:
        """Of the last operation."""
        with History(self._layout) as history:
            last = [history.perform(operation) for operation in sequence][-1]
        return [event for _, event in last.events]

    def damaged(self, sequence: Sequence[str]) -> None:
        """Afterwards a drive has lost or changed one block or one name of what it was told to flush."""
        with History(self._layout) as history:
            for operation in sequence:
                self._raised(history.perform(operation), f"in {operation} of {sequence}", may_fail=False)
            history.spoil()
            disk = history.survived
            for directory, names in disk.directories.items():
                for name, file in names.items():
                    for other in _spoilt(disk, directory, name, file):
                        self.counts.damages += 1
                        found = [resumed(other, self._layout)]
                        if not name.endswith(".record"):
                            found += loaded(other, self._layout).values()
                        for each in found:
                            self._judge(f"{name} is spoilt", each, history, 0, frozenset(), lambda: "a damage")


def _spoilt(disk: Disk, directory: int, name: str, file: int) -> Iterator[Disk]:
    lost = disk.copy()
    lost.apply(Names(((directory, name, None),)))
    yield lost
    if name.endswith(".slots"):
        return  # nothing checks its content in another process
    for block, data in disk.files[file].blocks.items() if file > 0 else ():
        places = range(0, len(data), 4) if name.endswith(".record") and not block else (len(data) // 2, len(data) - 1)
        for other in (bytes(len(data)), *(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in places)):
            changed = disk.copy()
            changed.apply(Write(file, block, other))
            yield changed
        changed = disk.copy()
        changed.apply(Size(file, block * BLOCK))
        yield changed


def sequences(length: int, operations: Sequence[str] = tuple(OPERATIONS)) -> Iterator[tuple[str, ...]]:
    """Each base with up to so many operations more."""
    for base, count in itertools.product(BASES.values(), range(length + 1)):
        for more in itertools.product(operations, repeat=count):
            yield ("open", *base, *more)
