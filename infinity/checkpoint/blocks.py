"""Files written around the page cache: copying into it takes several times as long as the drive, and a checkpoint is
more than it should hold.

Whole blocks go by direct I/O, through aligned memory. The edges of a range go through the cache, and so does
everything where a filesystem has no direct I/O. No page is written both ways.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

Result = TypeVar("Result")

ALIGN_BYTES = 4096
_BLOCK_BYTES = 4 << 20
_BUFFERS = 3  # one filled, two written


def submit(threads: ThreadPoolExecutor, action: Callable[[], Result]) -> Future[Result]:
    """Have a thread act, or act now: at the interpreter's end no thread begins anything."""
    try:
        return threads.submit(action)
    except RuntimeError:
        done: Future[Result] = Future()
        try:
            done.set_result(action())
        except BaseException as error:  # whoever looks at the outcome gets it
            done.set_exception(error)
        return done


class Staging:
    """Aligned memory on the way to files, and the threads that write it; a context manager."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_BUFFERS - 1)
        self._buffers: deque[tuple[mmap.mmap, Future[None] | None]] = deque(
            (mmap.mmap(-1, _BLOCK_BYTES), None) for _ in range(_BUFFERS)
        )

    def write(self, file: OutputFile, data: memoryview, offset: int) -> Future[None]:
        """Start writing at most a block; `data` may be reused at once."""
        buffer, busy = self._buffers.popleft()
        if busy is not None:
            wait([busy])  # whose outcome its file looks at
        np.frombuffer(buffer, np.uint8, len(data))[:] = np.frombuffer(data, np.uint8)  # others may run meanwhile
        future = submit(self._threads, partial(file.write_block, buffer, len(data), offset))
        self._buffers.append((buffer, future))
        return future

    def close(self) -> None:
        """Wait for what is being written, and give the memory back."""
        self._threads.shutdown()
        for buffer, _ in self._buffers:
            buffer.close()
        self._buffers.clear()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class OutputFile:
    """A new file of known size, reserved up front, written in ranges.

    Raises:
        OSError: it cannot be created, or the disk has no room for it.
    """

    def __init__(self, path: Path, nbytes: int, staging: Staging) -> None:
        self._staging = staging
        self._pending: list[Future[None]] = []
        self._edges: list[tuple[bytes, int]] = []  # for the end: a write through the cache waits for direct ones
        self._cached = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        self._direct: int | None = None
        self._closed = False
        try:
            if nbytes:
                os.posix_fallocate(self._cached, 0, nbytes)
            self._direct = _open_direct(path)
        except BaseException:
            path.unlink(missing_ok=True)  # a reservation that failed may have taken all the space there was
            self.close()
            raise

    def write(self, data: memoryview, offset: int) -> None:
        """Write a range; `data` may be reused at once."""
        head = min(-offset % ALIGN_BYTES, len(data))
        tail = head + (len(data) - head) // ALIGN_BYTES * ALIGN_BYTES
        if self._direct is None or head == tail:
            _write_all(self._cached, data, offset)
            return
        for start in range(head, tail, _BLOCK_BYTES):
            part = data[start : min(start + _BLOCK_BYTES, tail)]
            self._pending.append(self._staging.write(self, part, offset + start))
        self._edges.append((bytes(data[:head]), offset))
        self._edges.append((bytes(data[tail:]), offset + tail))

    def write_block(self, buffer: mmap.mmap, nbytes: int, offset: int) -> None:
        """Write aligned memory; what direct I/O refuses goes through the cache."""
        with memoryview(buffer) as view, view[:nbytes] as data:
            done = 0
            if self._direct is not None:
                try:
                    done = os.pwrite(self._direct, data, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            _write_all(self._cached, data[done:], offset + done)

    def finish(self) -> None:
        """Wait for the ranges and flush them to the drive; the file is closed.

        Raises:
            OSError: writing failed.
        """
        try:
            for pending in self._pending:
                pending.result()
            for data, offset in self._edges:
                _write_all(self._cached, memoryview(data), offset)
            os.fsync(self._cached)
            os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)  # leave RAM to training
        finally:
            self.close()

    def close(self) -> None:
        """Close without flushing; once is enough."""
        if self._closed:
            return
        self._closed = True
        wait(self._pending)
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)


def _open_direct(path: Path) -> int | None:
    """A descriptor for direct writes; None where the filesystem has none."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return None
        raise


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
