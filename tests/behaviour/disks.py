"""Drives that are slow or fail, put in through the seam of the I/O interface, and small ones."""

from __future__ import annotations

import ctypes
import errno
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinity.io import IoEngine, IoFile, IoFuture, IoStats, Priority, Span, open_engine
from infinity.io.interface import failure
from infinity.telemetry import Times


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A filesystem of its own in memory, there, with these options of mount; skips the test where root is needed."""
    path.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("mounting a filesystem needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def swap_on(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[IoEngine], IoEngine]) -> None:
    """From now on engines of swap space are wrapped."""
    monkeypatch.setattr("infinity.tiers.swap.open_engine", lambda *args: wrap(open_engine(*args)))


class Disk(IoEngine):
    """An engine around another."""

    def __init__(self, engine: IoEngine) -> None:
        self.backend = engine.backend
        self._engine = engine

    def _open(self, source: Path, read_only: bool, name: Path) -> IoFile:
        return self._engine._open(source, read_only, name)

    def _submit(self, write: bool, file: IoFile, offset: int, span: Span, priority: Priority, nbytes: int) -> IoFuture:
        begin = self._engine.write if write else self._engine.read
        return begin(file, offset, span, priority, nbytes=nbytes)

    def stats(self) -> IoStats:
        return self._engine.stats()

    def close(self) -> None:
        self._engine.close()


class SlowDisk(Disk):
    """Its reads or writes take longer."""

    def __init__(self, engine: IoEngine, read_s: float, write_s: float) -> None:
        super().__init__(engine)
        self._read_s, self._write_s = read_s, write_s

    def read(self, file: IoFile, offset: int, span: Span, priority: Priority = Priority.PREFETCH) -> IoFuture:
        return LateFuture(super().read(file, offset, span, priority), self._read_s)

    def write(self, file: IoFile, offset: int, span: Span, priority: Priority = Priority.WRITE_BACK) -> IoFuture:
        return LateFuture(super().write(file, offset, span, priority), self._write_s)


class FailingDisk(Disk):
    """Answers EIO instead of moving anything, where `fails(operation, offset)` says so."""

    def __init__(self, engine: IoEngine, fails: Callable[[str, int], bool]) -> None:
        super().__init__(engine)
        self._fails = fails

    def read(self, file: IoFile, offset: int, span: Span, priority: Priority = Priority.PREFETCH) -> IoFuture:
        if self._fails("read", offset):
            return FailedFuture("read", file.path, offset)
        return super().read(file, offset, span, priority)

    def write(self, file: IoFile, offset: int, span: Span, priority: Priority = Priority.WRITE_BACK) -> IoFuture:
        if self._fails("write", offset):
            return FailedFuture("write", file.path, offset)
        return super().write(file, offset, span, priority)


class LateFuture(IoFuture):
    """Over some time after its submission, at the earliest."""

    def __init__(self, future: IoFuture, delay_s: float) -> None:
        self._future = future
        self._due_s = time.perf_counter() + delay_s

    def done(self) -> bool:
        return time.perf_counter() >= self._due_s and self._future.done()

    def result(self, timeout: float | None = None) -> int:
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
        return self._future.result(timeout)

    def times(self) -> Times | None:
        times = self._future.times() if self.done() else None
        return None if times is None else times._replace(finished_s=max(times.finished_s, self._due_s))


class FailedFuture(IoFuture):
    """Over at once, with EIO."""

    def __init__(self, operation: str, path: Path, offset: int) -> None:
        self._error = failure(errno.EIO, operation, path, offset)
        self._at_s = time.perf_counter()

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> int:
        raise self._error

    def times(self) -> Times | None:
        return Times(self._at_s, self._at_s, self._at_s)


class LyingDisk(Disk):
    """Acknowledges what it does not do, for the requests of one number, counted from the time that `number` is set.

    Args:
        lie: "lost": the write never comes; "torn": only its first page does; "stale": the read returns what lay there
            before the last write.
    """

    def __init__(self, engine: IoEngine, lie: str) -> None:
        super().__init__(engine)
        self.lie = lie
        self.number: int | None = None
        self.lied = False
        self._count = 0
        self._written: dict[tuple[Path, int], tuple[bytes, bytes]] = {}  # by place: the last write, the one before

    def read(self, file: IoFile, offset: int, span: Span, priority: Priority = Priority.PREFETCH) -> IoFuture:
        read = super().read(file, offset, span, priority)
        if self.lie != "stale" or not self._is_next():
            return read
        read.result()
        for (path, start), (last, before) in self._written.items():
            if path == file.path and offset <= start and start + len(last) <= offset + span.nbytes:
                self.lied |= before != last
                ctypes.memmove(span.address + start - offset, before, len(before))
        return read

    def write(self, file: IoFile, offset: int, span: Span, priority: Priority = Priority.WRITE_BACK) -> IoFuture:
        now = ctypes.string_at(span.address, span.nbytes)
        before, _ = self._written.get((file.path, offset), (bytes(span.nbytes), b""))
        if len(before) == len(now):
            self._written[file.path, offset] = now, before
        if self.lie == "stale" or not self._is_next():
            return super().write(file, offset, span, priority)
        self.lied = before != now
        if self.lie == "torn" and span.nbytes > file.alignment:
            super().write(file, offset, Span(span.address, file.alignment, span.owner), priority).result()
        return _Acknowledged(span.nbytes)

    def _is_next(self) -> bool:
        self._count += self.number is not None
        return self._count - 1 == self.number


class _Acknowledged(IoFuture):
    """Over at once, and well."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._at_s = time.perf_counter()

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> int:
        return self._nbytes

    def times(self) -> Times | None:
        return Times(self._at_s, self._at_s, self._at_s)
