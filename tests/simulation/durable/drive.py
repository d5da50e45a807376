"""Drives that keep what was flushed, and of everything else whatever a crash leaves.

[Note: the drive]
The engine works on files of a directory in memory, by its own system calls. `Recorder` stands where `os` is and looks
at the directory before and after each call. What has changed is a mutation: of one block of one file, or of the names
that one call changes. A mutation lasts when its file (of names: one of their directories) is flushed after it. At a
crash any others may be there and any may be missing: that covers writes that are torn between blocks, and reordered.
A flush that fails leaves its file's writes in doubt for ever, as a kernel does that drops what it could not write:
later flushes say nothing of them. So a crash is a list of mutations that are there, and a new process finds the
directory that they make. A process that dies without the machine finds all of them.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import local
from typing import Any

BLOCK = 4096
ROOT = -1  # directories have negative numbers, files positive ones
_CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir", "open")
_FLUSHES = ("fsync", "fdatasync")
_open = os.open  # past a recorder
_unused = itertools.count(2)  # numbers
Image = tuple[Any, ...]  # all that a directory holds, to compare
Used = Callable[[str], Collection[int] | None]  # blocks by name; None for all


@dataclass(frozen=True)
class Write:
    """A block of a file has another content."""

    file: int
    block: int
    data: bytes


@dataclass(frozen=True)
class Size:
    """A file has another length, by zeros or by less."""

    file: int
    nbytes: int


@dataclass(frozen=True)
class Names:
    """What one call has changed: directory, name, and what has that name now."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True)
class Flush:
    """All mutations of a file or directory so far last; if it has failed, those of a file are in doubt."""

    target: int
    failed: bool = False


@dataclass(frozen=True)
class Tell:
    """Something has happened that others wait for."""

    key: tuple[Any, ...]


@dataclass(frozen=True)
class Hear:
    """Somebody goes on that has waited for these."""

    keys: frozenset[tuple[Any, ...]]


Mutation = Write | Size | Names
Event = tuple[str, Mutation | Flush | Tell | Hear]  # of a lane: what one thread does, in order


@dataclass(frozen=True)
class File:
    """Length and blocks; those of zeros are left out."""

    nbytes: int = 0
    blocks: Mapping[int, bytes] = field(default_factory=dict)

    @cached_property
    def image(self) -> Image:
        return self.nbytes, *sorted(self.blocks.items())

    @cached_property
    def content(self) -> bytes:
        blocks = (self.blocks.get(i, b"") for i in range(-(-self.nbytes // BLOCK)))
        return b"".join(block.ljust(BLOCK, b"\0") for block in blocks)[: self.nbytes]


_EMPTY = File()


@dataclass
class Disk:
    """Files, and directories as names."""

    files: dict[int, File] = field(default_factory=dict)
    directories: dict[int, dict[str, int]] = field(default_factory=dict)

    def copy(self) -> Disk:
        return Disk(dict(self.files), dict(self.directories))

    def apply(self, change: Mutation) -> None:
        if isinstance(change, Names):
            for directory, name, target in change.changes:
                names = self.directories[directory] = dict(self.directories.get(directory, {}))
                names.pop(name, None)
                if target is not None:
                    names[name] = target
            return
        file = self.files.get(change.file, _EMPTY)
        if isinstance(change, Size):
            last = -(-change.nbytes // BLOCK)
            self.files[change.file] = File(change.nbytes, {i: data for i, data in file.blocks.items() if i < last})
        else:
            blocks = {i: data for i, data in file.blocks.items() if i != change.block}
            if any(change.data):
                blocks[change.block] = change.data
            self.files[change.file] = File(max(file.nbytes, change.block * BLOCK + len(change.data)), blocks)

    def content(self, file: int) -> bytes:
        return self.files.get(file, _EMPTY).content

    def at(self, name: str) -> int | None:
        """What has a name at the top."""
        return self.directories.get(ROOT, {}).get(name)

    def image(self, target: int | None, used: Used = lambda name: None) -> Image:
        """All that a file or directory holds.

        Args:
            used: which blocks somebody reads who finds a file under this name; for a directory, all or none.
        """
        if target is None or target > 0:
            return () if target is None else self.files.get(target, _EMPTY).image
        names: list[tuple[str, Image]] = []
        for name, inner in sorted(self.directories.get(target, {}).items()):
            reads = used(name)
            image = self.image(inner, used) if reads is None or (reads and inner > 0) else ()
            if reads is not None:
                image = tuple(each for each in image[1:] if each[0] in reads)
            names.append((name, image))
        return tuple(names)

    def build(self, path: Path, only: Sequence[str] | None = None, target: int = ROOT) -> None:
        """Make the directory, or those of these names in it."""
        path.mkdir(0o700, exist_ok=True)
        for name, inner in self.directories.get(target, {}).items():
            if only is not None and name not in only:
                continue
            if inner < 0:
                self.build(path / name, None, inner)
            else:
                descriptor = os.open(path / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                os.write(descriptor, self.content(inner))
                os.close(descriptor)


@dataclass
class Cached:
    """What lasts, and the mutations that do not; `doubtful` ones never will."""

    lasting: Disk
    waiting: list[tuple[Mutation, bool]]

    def copy(self) -> Cached:
        return Cached(self.lasting.copy(), list(self.waiting))

    def take(self, event: Mutation | Flush) -> None:
        """One more event."""
        if not isinstance(event, Flush):
            self.waiting.append((event, False))
            return
        left: list[tuple[Mutation, bool]] = []
        for change, doubtful in self.waiting:
            if not _is_of(change, event.target) or doubtful or (event.failed and event.target < 0):
                left.append((change, doubtful))
            elif event.failed:
                left.append((change, True))
            else:
                left = [each for each in left if not (each[1] and _same_place(each[0], change))]
                self.lasting.apply(change)
        self.waiting = left

    def after(self, kept: Sequence[bool]) -> Disk:
        """What a crash leaves if these of the waiting mutations have come to the drive."""
        disk = self.lasting.copy()
        for (change, _), there in zip(self.waiting, kept, strict=True):
            if there:
                disk.apply(change)
        return disk

    def survived(self) -> Disk:
        """What another process finds on a machine that goes on."""
        return self.after([True] * len(self.waiting))


def _is_of(change: Mutation, target: int) -> bool:
    if isinstance(change, Names):
        return any(directory == target for directory, _, _ in change.changes)
    return change.file == target


def _same_place(one: Mutation, other: Mutation) -> bool:
    return isinstance(one, Write) and isinstance(other, Write) and (one.file, one.block) == (other.file, other.block)


def losses(count: int, most: int) -> Iterator[tuple[bool, ...]]:
    """Which of so many mutations survive: all subsets of up to `most`, else prefixes and single losses."""
    if count <= most:
        for bits in range(1 << count):
            yield tuple(bool(bits >> i & 1) for i in range(count))
        return
    for stop in range(count + 1):
        yield tuple(i < stop for i in range(count))
    for lost in range(count - 1):
        yield tuple(i != lost for i in range(count))


here = local()  # `lane`: of this thread


class Recorder:
    """Writes down what happens in a directory from now on.

    Args:
        before: what is in it.
        failing: number of the flush that fails.
    """

    def __init__(self, root: Path, before: Disk, failing: int | None = None) -> None:
        self.events: list[Event] = []
        self.flushes = 0
        self.failing = failing
        self._root = root
        self._now = before.copy()
        self._numbers: dict[int, int] = {}  # of inodes
        self._held: dict[int, int] = {}  # descriptors, so that no inode is used again
        self._number(root, ROOT, before)

    def _number(self, path: Path, target: int, before: Disk) -> None:
        """What is there already has the numbers that it had."""
        self._hold(path, target)
        for name, inner in before.directories.get(target, {}).items():
            self._number(path / name, inner, before)

    def _hold(self, path: Path, target: int) -> None:
        descriptor = _open(path, os.O_RDONLY)
        self._held[target] = descriptor
        self._numbers[os.fstat(descriptor).st_ino] = target

    def add(self, event: Mutation | Flush | Tell | Hear) -> None:
        self.events.append((getattr(here, "lane", "alone"), event))
        if isinstance(event, Write | Size | Names):
            self._now.apply(event)

    def look(self) -> None:
        """Write down what has changed since the last look."""
        names: dict[int, dict[str, int]] = {}
        self._walk(self._root, ROOT, names)
        changes: list[tuple[int, str, int | None]] = []
        for directory, entries in names.items():
            known = self._now.directories.get(directory, {})
            changes += [(directory, name, None) for name in known if name not in entries]
            changes += [(directory, name, target) for name, target in entries.items() if known.get(name) != target]
        if changes:
            self.add(Names(tuple(changes)))
        for target in {inner for entries in names.values() for inner in entries.values() if inner > 0}:
            self._compare(target)

    def _walk(self, path: Path, directory: int, names: dict[int, dict[str, int]]) -> None:
        entries = names[directory] = {}
        with os.scandir(path) as found:
            for entry in found:
                if entry.inode() not in self._numbers:
                    sign = -1 if entry.is_dir(follow_symlinks=False) else 1
                    self._hold(Path(entry.path), sign * next(_unused))
                entries[entry.name] = self._numbers[entry.inode()]
                if entries[entry.name] < 0:
                    self._walk(Path(entry.path), entries[entry.name], names)

    def _compare(self, file: int) -> None:
        descriptor = self._held[file]
        size = os.fstat(descriptor).st_size
        data, blocks = os.pread(descriptor, size, 0), self._now.files.get(file, _EMPTY).blocks
        for start in range(0, size, BLOCK):
            block = data[start : start + BLOCK]
            if block.ljust(BLOCK, b"\0") != blocks.get(start // BLOCK, b"").ljust(BLOCK, b"\0"):
                self.add(Write(file, start // BLOCK, block))
        if size != self._now.files.get(file, _EMPTY).nbytes:
            self.add(Size(file, size))

    def flush(self, descriptor: int) -> None:
        self.look()
        self.flushes += 1
        failed = self.flushes == self.failing
        target = self._numbers.get(os.fstat(descriptor).st_ino)
        if target is not None:
            self.add(Flush(target, failed))
        if failed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Stand where the operating system is."""
        real = {name: getattr(os, name) for name in (*_CHANGES, *_FLUSHES)}

        def changing(call: Callable[..., Any]) -> Callable[..., Any]:
            def changed(*args: Any, **named: Any) -> Any:
                if call is real["open"] and not args[1] & os.O_CREAT:
                    return call(*args, **named)
                self.look()
                try:
                    return call(*args, **named)
                finally:
                    self.look()

            return changed

        self._put({name: changing(real[name]) for name in _CHANGES} | dict.fromkeys(_FLUSHES, self.flush))
        try:
            yield
        finally:
            self._put(real)
            self.look()

    def _put(self, calls: dict[str, Callable[..., Any]]) -> None:
        for name, call in calls.items():
            setattr(os, name, call)

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
