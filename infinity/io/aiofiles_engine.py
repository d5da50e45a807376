"""The backend of last resort: plain Python, if the native extension is not built."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Literal

import aiofiles

from infinity.errors import InfinityError, StorageError
from infinity.io.directory import reopened
from infinity.io.interface import IoEngine, IoFile, IoFuture, IoOptions, IoStats, Priority, Span, failure
from infinity.io.latency import Histogram, Latencies
from infinity.io.threads import MORE_THREADS, start_thread
from infinity.telemetry import Times


class _Descriptor:
    """An open file that every request opens again, for its own file position; closed by the last user."""

    def __init__(self, source: Path, read_only: bool) -> None:
        number = os.open(source, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
        self.path = reopened(number)
        self.mode: Literal["rb", "r+b"] = "rb" if read_only else "r+b"
        self._close = weakref.finalize(self, os.close, number)
        self._lock = threading.Lock()
        self._users = 1

    def hold(self) -> bool:
        """Add a user; False if the last one has closed the file."""
        with self._lock:
            self._users += self._users > 0
            return self._users > 0

    def drop(self) -> None:
        """Remove a user; the last one closes the file."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._close()


class _PlainFile(IoFile):
    """A file that is read and written through the page cache, so no alignment is needed."""

    def __init__(self, source: Path, read_only: bool, name: Path) -> None:
        self.opened: _Descriptor | None = _Descriptor(source, read_only)
        self.path = name
        self.direct = False
        self.alignment = 1

    def close(self) -> None:
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.drop()  # requests in flight hold it


class _Stamps:
    """Times at which a request was submitted, started and finished."""

    def __init__(self) -> None:
        self.submitted_s = self.started_s = self.finished_s = time.perf_counter()


class _PlainFuture(IoFuture):
    def __init__(self, future: Future[int], stamps: _Stamps) -> None:
        self._future = future
        self._stamps = stamps
        self._process = os.getpid()

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> int:
        if not self._future.done() and os.getpid() != self._process:
            raise InfinityError("this request belongs to the parent process; the child cannot wait for it")
        try:
            return self._future.result(timeout)
        except FutureTimeoutError as error:
            raise TimeoutError(f"the request has not ended after {timeout} s") from error

    def times(self) -> Times | None:
        stamps = self._stamps
        return Times(stamps.submitted_s, stamps.started_s, stamps.finished_s) if self._future.done() else None


class AiofilesEngine(IoEngine):
    """Runs requests on its own event loop, `threads` of them at a time."""

    backend = "aiofiles"

    def __init__(self, options: IoOptions) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._moved = {"read": 0, "write": 0}
        self._asked = {"read": 0, "write": 0}
        self._taken_s: dict[str, Counter[float]] = {"read": Counter(), "write": Counter()}
        self._requests = 0
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(options.threads)
        try:
            self._thread = start_thread(self._loop.run_forever, "infinity-aiofiles")
        except BaseException:
            self._loop.close()
            raise

    def _open(self, source: Path, read_only: bool, name: Path) -> IoFile:
        return _PlainFile(source, read_only, name)

    def _submit(self, write: bool, file: IoFile, offset: int, span: Span, priority: Priority, nbytes: int) -> IoFuture:
        if not isinstance(file, _PlainFile):
            raise TypeError(f"{file.path} was opened by another engine")
        if os.getpid() != self._owner:
            raise InfinityError("this I/O engine belongs to the parent process; open one in the child")
        opened = file.opened
        if opened is None or not opened.hold():
            raise StorageError(errno.EBADF, "the file is closed", str(file.path), offset)
        operation = "write" if write else "read"
        stamps = _Stamps()
        with self._lock:  # `close` finishes the requests that were submitted before it set `_closed`
            if not self._closed:
                self._asked[operation] += nbytes
                moving = self._timed_move(operation, file.path, opened, offset, span, nbytes, stamps)
                return _PlainFuture(asyncio.run_coroutine_threadsafe(moving, self._loop), stamps)
        opened.drop()
        raise InfinityError("the I/O engine is closed")

    async def _timed_move(
        self, operation: str, name: Path, file: _Descriptor, offset: int, span: Span, nbytes: int, stamps: _Stamps
    ) -> int:
        async with self._slots:
            stamps.started_s = time.perf_counter()
            try:
                moved = await self._move(operation, name, file, offset, span, nbytes)
                with self._lock:
                    self._taken_s[operation][_rounded(time.perf_counter() - stamps.started_s)] += 1
                return moved
            finally:
                file.drop()
                stamps.finished_s = time.perf_counter()

    async def _move(self, operation: str, name: Path, file: _Descriptor, offset: int, span: Span, nbytes: int) -> int:
        view = memoryview((ctypes.c_char * span.nbytes).from_address(span.address)).cast("B")
        moved = 0
        try:
            async with aiofiles.open(file.path, file.mode, buffering=0) as stream:
                await stream.seek(offset)
                while moved < nbytes:
                    part = view[moved % span.nbytes :][: nbytes - moved]
                    count = await (stream.readinto(part) if operation == "read" else stream.write(part))
                    if not count:
                        raise OSError(errno.ENODATA, "end of file")
                    moved += count
        except OSError as error:
            raise failure(error.errno or errno.EIO, operation, name, offset + moved) from error
        except RuntimeError as error:  # the executor has no thread, and cannot start one
            message = f"{operation} failed: {error} ({MORE_THREADS})"
            raise StorageError(errno.EAGAIN, message, str(name), offset + moved) from error
        with self._lock:
            self._moved[operation] += moved
            self._requests += 1
        return moved

    def stats(self) -> IoStats:
        with self._lock:
            asked = self._asked
            return IoStats(self._moved["read"], self._moved["write"], self._requests, 0, asked["read"], asked["write"])

    def latencies(self) -> Latencies:
        with self._lock:
            read, write = (Histogram(tuple(self._taken_s[name].items())) for name in ("read", "write"))
        return Latencies(read, write)

    def close(self) -> None:
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    async def _finish() -> None:
        """Wait for every request in flight."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)


def _rounded(seconds: float) -> float:
    """Round to three digits, so that a histogram stays small."""
    return float(f"{seconds:.3g}")
