"""Write files around the page cache: a copy into it takes several times as long as the write to the drive, and a
checkpoint would fill memory that training needs.

Whole blocks go through the I/O engine by direct I/O, from aligned memory. The edges of a range go through the cache, as
does everything on a filesystem without direct I/O. No page is written both ways.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
import torch

from infinity.errors import InfinityError, StorageError
from infinity.io import IoEngine, IoFile, IoFuture, IoOptions, Priority, open_engine
from infinity.io.directory import allocate
from infinity.memory import ALIGN_BYTES, Arena, Lease

Result = TypeVar("Result")

_BUFFER_BYTES = 4 << 20
_BUFFERS = 4  # one is being filled, the others are being written
_OPTIONS = IoOptions(block_size_bytes=1 << 20, queue_depth=16, threads=4)


def submit(threads: ThreadPoolExecutor, action: Callable[[], Result]) -> Future[Result]:
    """Run the action in a thread, or at once if the interpreter is exiting: executors refuse work then."""
    try:
        return threads.submit(action)
    except RuntimeError:
        done: Future[Result] = Future()
        try:
            done.set_result(action())
        except BaseException as error:  # `result()` raises it
            done.set_exception(error)
        return done


class Staging:
    """Aligned buffers for data that is written to files, and the I/O engine that writes them; a context manager."""

    def __init__(self) -> None:
        self._arena = Arena(_BUFFERS * _BUFFER_BYTES)
        self._buffers: deque[tuple[Lease, _Write | None]] = deque(
            (self._arena.lease(_BUFFER_BYTES), None) for _ in range(_BUFFERS)
        )
        self._engine = _engine()

    def open(self, path: Path) -> IoFile | None:
        """Open a file for direct writes; None if direct I/O is not possible."""
        if self._engine is None or not _takes_direct_io(path):
            return None
        file = self._engine.open(path)
        if file.direct and ALIGN_BYTES % file.alignment == 0:
            return file
        file.close()
        return None

    def write(self, file: OutputFile, target: IoFile, data: memoryview, offset: int) -> _Write:
        """Start to write `data`, at most one buffer long. `data` is copied, and may be reused at once."""
        assert self._engine is not None
        buffer, before = self._buffers.popleft()
        if before is not None:
            before.wait()
        staged = buffer.tensor(torch.uint8, len(data)).numpy()
        staged[:] = np.frombuffer(data, np.uint8)  # numpy releases the GIL for the copy
        future = self._engine.write(target, offset, buffer.span(0, len(data)), Priority.DEMAND)
        write = _Write(file, staged.data, offset, future)
        self._buffers.append((buffer, write))
        return write

    def close(self) -> None:
        """Wait for the writes, and free the buffers."""
        for _, write in self._buffers:
            if write is not None:
                write.wait()
        if self._engine is not None:
            self._engine.close()
            self._engine = None  # drop the last reference, which closes its descriptors
        for buffer, _ in self._buffers:
            buffer.release()
        self._buffers.clear()
        self._arena.close()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _engine() -> IoEngine | None:
    """Open an I/O engine; None if the process cannot have one, and everything goes through the cache."""
    try:
        return open_engine(_OPTIONS)
    except InfinityError:
        return None


class _Write:
    """The write of a range from a buffer, which must not change until the write has ended."""

    def __init__(self, file: OutputFile, data: memoryview, offset: int, future: IoFuture) -> None:
        self._file = file
        self._data = data
        self._offset = offset
        self._future: IoFuture | None = future
        self._lock = Lock()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until the write has ended or failed. A range that direct I/O refuses is written through the cache."""
        with self._lock:
            if self._future is None:
                return
            try:
                self._future.result()
            except StorageError as error:
                self._error = error if error.errno != errno.EINVAL else self._write_cached()
            self._future = None

    def _write_cached(self) -> OSError | None:
        try:
            self._file.write_cached(self._data, self._offset)
        except OSError as error:
            return error
        return None

    def result(self) -> None:
        """Block until the write has ended.

        Raises:
            OSError: writing failed.
        """
        self.wait()
        if self._error is not None:
            raise self._error


class OutputFile:
    """A new file of known size, allocated up front and written in ranges.

    Raises:
        OSError: the file cannot be created, or the disk is full.
    """

    def __init__(self, path: Path, nbytes: int, staging: Staging) -> None:
        self._staging = staging
        self._pending: list[_Write] = []
        self._edges: list[tuple[bytes, int]] = []  # written in `finish`: a cached write waits for all direct writes
        self._cached = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        self._direct: IoFile | None = None
        self._closed = False
        try:
            if nbytes:
                allocate(self._cached, nbytes)
                self._direct = staging.open(path)
        except BaseException:
            path.unlink(missing_ok=True)
            self.close()
            raise

    def write(self, data: memoryview, offset: int) -> None:
        """Write a range; `data` may be reused at once."""
        head = min(-offset % ALIGN_BYTES, len(data))
        tail = head + (len(data) - head) // ALIGN_BYTES * ALIGN_BYTES
        if self._direct is None or head == tail:
            self.write_cached(data, offset)
            return
        for start in range(head, tail, _BUFFER_BYTES):
            part = data[start : min(start + _BUFFER_BYTES, tail)]
            self._pending.append(self._staging.write(self, self._direct, part, offset + start))
        self._edges.append((bytes(data[:head]), offset))
        self._edges.append((bytes(data[tail:]), offset + tail))

    def write_cached(self, data: memoryview, offset: int) -> None:
        """Write a range through the page cache."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._cached, data[done:], offset + done)

    def finish(self) -> None:
        """Wait for the writes, flush the file to the drive, and close it.

        Raises:
            OSError: writing failed.
        """
        try:
            for pending in self._pending:
                pending.result()
            for data, offset in self._edges:
                self.write_cached(memoryview(data), offset)
            os.fsync(self._cached)
            os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)  # keep host memory for training
        finally:
            self.close()

    def close(self) -> None:
        """Close the file without flushing it. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        os.close(self._cached)
        if self._direct is not None:
            self._direct.close()
            self._direct = None


def _takes_direct_io(path: Path) -> bool:
    """Whether a file can be opened for direct I/O. Tested here, because an I/O engine would warn if it cannot."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return False
        raise
    return True
