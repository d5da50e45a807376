"""The interface of every backend: request in, future out."""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from infinity.config.resolved import AioConfig
from infinity.config.schema import BLOCK_ALIGN_BYTES, MOST_IN_FLIGHT, MOST_THREADS
from infinity.errors import ConfigError, StorageError
from infinity.io.directory import create_private, reopened, reserve
from infinity.io.latency import NO_LATENCIES, Latencies
from infinity.telemetry import Times


class Priority(IntEnum):
    """Order of service; the lowest is served first."""

    DEMAND = 0
    PREFETCH = 1
    WRITE_BACK = 2


@dataclass(frozen=True)
class Span:
    """A range of memory.

    Attributes:
        address, nbytes: the range.
        owner: keeps the memory alive; a request holds it until its last byte has moved.
    """

    address: int
    nbytes: int
    owner: object


@dataclass(frozen=True)
class IoOptions:
    """How requests are cut and queued.

    Attributes:
        block_size_bytes: requests are cut into blocks of this size.
        queue_depth: the most blocks in flight.
        threads: number of threads of the backends `threads` and `aiofiles`.
        sqpoll, iopoll: io_uring's polling modes.
        direct: bypass the page cache, if the filesystem supports it.
    """

    block_size_bytes: int = 1 << 20
    queue_depth: int = 32
    threads: int = 8
    sqpoll: bool = False
    iopoll: bool = False
    direct: bool = True

    @classmethod
    def of(cls, aio: AioConfig) -> IoOptions:
        """Return the options of a configuration's section `aio`."""
        return cls(aio.block_size_bytes, aio.queue_depth, aio.threads, aio.sqpoll, aio.iopoll)

    def __post_init__(self) -> None:
        """Refuse values that the kernel would refuse later, or that no memory can hold."""
        if self.block_size_bytes < 1 or self.block_size_bytes % BLOCK_ALIGN_BYTES:
            raise ConfigError(
                f"the block size is {self.block_size_bytes} bytes; it must be a multiple of {BLOCK_ALIGN_BYTES}, which "
                "direct I/O needs, such as 1MiB"
            )
        if not 1 <= self.queue_depth <= MOST_IN_FLIGHT:
            raise ConfigError(f"the queue depth is {self.queue_depth}; it must be between 1 and {MOST_IN_FLIGHT}")
        if not 1 <= self.threads <= MOST_THREADS:
            raise ConfigError(f"the number of threads is {self.threads}; it must be between 1 and {MOST_THREADS}")


@dataclass(frozen=True)
class IoStats:
    """Totals since the engine was opened.

    Attributes:
        registered_blocks: blocks that used a buffer registered with the kernel.
        reads_asked_bytes, writes_asked_bytes: bytes of all requests, including requests in flight.
    """

    bytes_read: int
    bytes_written: int
    blocks: int
    registered_blocks: int
    reads_asked_bytes: int = 0
    writes_asked_bytes: int = 0


class IoFuture(ABC):
    """A submitted request. Thread-safe; `result` may be called any number of times."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the request has ended, with or without an error."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> int:
        """Block until the request ends, and return the bytes moved.

        Raises:
            StorageError: the request failed.
            InfinityError: a forked child waits for a request of its parent.
            TimeoutError: it has not ended after `timeout` seconds; it continues.
        """

    @abstractmethod
    def times(self) -> Times | None:
        """Return the times at which the request was submitted, started and finished; None while it is in flight."""


def together(requests: Sequence[IoFuture]) -> IoFuture:
    """Return these requests as one request."""
    return requests[0] if len(requests) == 1 else _Together(requests)


class _Together(IoFuture):
    def __init__(self, requests: Sequence[IoFuture]) -> None:
        self._requests = tuple(requests)

    def done(self) -> bool:
        return all(request.done() for request in self._requests)

    def result(self, timeout: float | None = None) -> int:
        """Wait for all of them, also if one fails: until then the memory is in use."""
        until_s = None if timeout is None else time.monotonic() + timeout
        nbytes, failed = 0, None
        for request in self._requests:
            try:
                nbytes += request.result(None if until_s is None else max(0.0, until_s - time.monotonic()))
            except TimeoutError:
                raise
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return nbytes

    def times(self) -> Times | None:
        seen = [times for request in self._requests if (times := request.times()) is not None]
        if len(seen) < len(self._requests) or not seen:
            return None
        return Times(
            min(times.submitted_s for times in seen),
            min(times.started_s for times in seen),
            max(times.finished_s for times in seen),
        )


class IoFile(ABC):
    """An open file.

    Attributes:
        path: the name of the file, for messages.
        direct: whether requests bypass the page cache.
        alignment: offsets, sizes and addresses must be multiples of this.
    """

    path: Path
    direct: bool
    alignment: int

    @abstractmethod
    def close(self) -> None:
        """Refuse further requests; requests in flight are finished."""


class IoEngine(ABC):
    """Moves bytes between files and memory. Thread-safe."""

    backend: str

    def open(
        self,
        path: str | Path,
        *,
        create: bool = False,
        read_only: bool = False,
        size_bytes: int = 0,
        descriptor: int | None = None,
    ) -> IoFile:
        """Open a file, with O_DIRECT if the filesystem supports it.

        Args:
            create: create the file, with mode 0600; it must not exist.
            size_bytes: reserve this much space in a created file.
            descriptor: the file, if it is already open; `path` is then only its name in messages.

        Raises:
            StorageError: the file cannot be opened, created or reserved. A created file is removed.
        """
        path = Path(path)
        if create:
            created = create_file(path, size_bytes)
            try:
                return self.open(path, read_only=read_only, descriptor=created)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(created)
        try:
            return self._open(path if descriptor is None else reopened(descriptor), read_only, path)
        except OSError as error:
            raise StorageError.of(error, "cannot open", path) from error

    @abstractmethod
    def _open(self, source: Path, read_only: bool, name: Path) -> IoFile:
        """Open an existing file, called `name` in messages; raises OSError."""

    def read(
        self,
        file: IoFile,
        offset: int,
        span: Span,
        priority: Priority = Priority.PREFETCH,
        *,
        nbytes: int | None = None,
    ) -> IoFuture:
        """Start filling `span` from `offset`.

        Args:
            nbytes: may be more than the span has. The request then reuses the span repeatedly, and its final content is
                undefined. For measurements of a drive, not of memory bandwidth.

        Raises:
            StorageError: the request is not aligned to the file's `alignment`.
            InfinityError: the engine is closed, or belongs to the parent process.
        """
        nbytes = span.nbytes if nbytes is None else nbytes
        check_aligned(file, offset, span, nbytes)
        return self._submit(False, file, offset, span, priority, nbytes)

    def write(
        self,
        file: IoFile,
        offset: int,
        span: Span,
        priority: Priority = Priority.WRITE_BACK,
        *,
        nbytes: int | None = None,
    ) -> IoFuture:
        """Start writing `span` at `offset`, repeatedly if `nbytes` is more; raises like `read`."""
        nbytes = span.nbytes if nbytes is None else nbytes
        check_aligned(file, offset, span, nbytes)
        return self._submit(True, file, offset, span, priority, nbytes)

    def move_blocks(
        self,
        write: bool,
        file: IoFile,
        offsets: npt.NDArray[np.uint64],
        block_bytes: int,
        span: Span,
        priority: Priority = Priority.DEMAND,
    ) -> IoFuture:
        """Start reading or writing a block at each of these offsets, in order.

        For measurements: the blocks reuse `span`, which has whole blocks, so its final content is undefined. Native
        engines take all blocks as one request, without a cost in Python for each of them.

        Raises:
            StorageError: a block is not aligned to the file's `alignment`.
            InfinityError: the engine is closed, or belongs to the parent process.
        """
        check_blocks(file, offsets, block_bytes, span)
        begin = self.write if write else self.read
        places = range(0, span.nbytes, block_bytes)
        return together(
            [
                begin(file, offset, Span(span.address + places[i % len(places)], block_bytes, span.owner), priority)
                for i, offset in enumerate(offsets.tolist())
            ]
        )

    def _submit(self, write: bool, file: IoFile, offset: int, span: Span, priority: Priority, nbytes: int) -> IoFuture:
        """Submit an aligned read or write; engines that override `read` and `write` need not implement it."""
        raise NotImplementedError

    def register(self, span: Span) -> bool:
        """Register `span` so that the kernel keeps it pinned, which saves work per request. Return False if it refuses.

        The engine holds `span.owner` until it is closed.
        """
        return False

    @abstractmethod
    def stats(self) -> IoStats:
        """Return the totals since the engine was opened."""

    def latencies(self) -> Latencies:
        """Return latencies of blocks since the engine was opened, from submission to completion; empty if unknown."""
        return NO_LATENCIES

    @abstractmethod
    def close(self) -> None:
        """Finish all submitted requests, then stop."""


def check_aligned(file: IoFile, offset: int, span: Span, nbytes: int) -> None:
    """Refuse a request that direct I/O would refuse.

    Raises:
        StorageError: EINVAL; the message names the offset, size or address that is not aligned.
    """
    places = ("offset", offset), ("size", nbytes), ("buffer address", span.address), ("buffer size", span.nbytes)
    for name, value in places:
        if value % file.alignment:
            raise StorageError(
                errno.EINVAL,
                f"{name} {value} is not a multiple of {file.alignment}, which direct I/O on this file needs",
                str(file.path),
                offset,
            )


def check_blocks(file: IoFile, offsets: npt.NDArray[np.uint64], block_bytes: int, span: Span) -> None:
    """Refuse blocks that do not fit their memory, or that direct I/O would refuse.

    Raises:
        StorageError: EINVAL; the message names the problem.
    """
    misplaced = np.flatnonzero(offsets % np.uint64(file.alignment))
    first = int(offsets[misplaced[0] if misplaced.size else 0]) if len(offsets) else 0
    check_aligned(file, first, span, block_bytes)
    if block_bytes < 1 or span.nbytes < block_bytes or span.nbytes % block_bytes:
        raise StorageError(
            errno.EINVAL,
            f"buffer size {span.nbytes} is not a multiple of the block size {block_bytes}",
            str(file.path),
            first,
        )


def create_file(path: Path, size_bytes: int) -> int:
    """Create a file with reserved space that only its owner can read. Return a descriptor.

    Raises:
        StorageError: it cannot be created or reserved; no file is left behind.
    """
    try:
        descriptor = create_private(path)
    except OSError as error:
        raise StorageError.of(error, "cannot create", path) from error
    try:
        reserve(descriptor, size_bytes, path)
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return descriptor


def failure(error: int, operation: str, path: Path, offset: int) -> StorageError:
    """Return the error of a failed request."""
    if error == errno.ENODATA:
        return StorageError(error, f"{operation} reached the end of the file", str(path), offset)
    return StorageError(error, f"{operation} failed: {os.strerror(error)}", str(path), offset)
