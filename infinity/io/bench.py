"""Measures what a drive gives through an engine: the numbers of `infinity bench-io`."""

from __future__ import annotations

import errno
import os
import random
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType

from infinity.errors import ConfigError, StorageError
from infinity.io.directory import open_directory
from infinity.io.interface import IoFuture, IoOptions, Priority, Span, create_file
from infinity.io.probe import open_engine

OPERATIONS = ("read", "write", "mixed", "randread")
_REQUEST_BYTES = 2 << 20  # of sequential requests at least, so that the engine and not Python cuts them
_LATENCY_SAMPLES = 200
_SPARE_SHARE = 0.05  # of a drive that is left free


@dataclass(frozen=True)
class BenchRun:
    """One measured run.

    Attributes:
        cpu_s: processor seconds, user and system, of the whole process.
    """

    seconds: float
    nbytes: int
    cpu_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.nbytes / 1e9)


@dataclass(frozen=True)
class _Request:
    operation: str
    offset: int
    span: Span


def check_operation(operation: str) -> None:
    """Raises ConfigError for one that does not exist."""
    if operation not in OPERATIONS:
        raise ConfigError(f"operation {operation!r} does not exist; choose one of {', '.join(OPERATIONS)}")


@contextmanager
def bench_file(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A file of reserved space that is removed in any case.

    Raises:
        StorageError: the directory cannot be used, or the file would fill the drive.
    """
    descriptor = open_directory(directory)
    try:
        space = os.fstatvfs(descriptor)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, "cannot use this path", str(directory), 0) from error
    finally:
        os.close(descriptor)
    free = space.f_bavail * space.f_frsize
    if size_bytes > free - _SPARE_SHARE * space.f_blocks * space.f_frsize:
        raise StorageError(
            errno.ENOSPC,
            f"a file of {size_bytes} bytes would fill the drive ({free} are free); use a smaller --size",
            str(directory),
            0,
        )
    path = directory / f"infinity-bench-{secrets.token_hex(4)}.tmp"
    try:
        os.close(create_file(path, size_bytes))
        yield path
    finally:
        path.unlink(missing_ok=True)


class BenchSession:
    """An engine and a file to measure; a context manager.

    Args:
        buffers: memory to read into and write from; its content is what is written.

    Raises:
        ConfigError: the sizes do not fit together, or the backend does not work here.
    """

    def __init__(self, path: Path, size_bytes: int, backend: str, options: IoOptions, buffers: Span) -> None:
        self._block_bytes = options.block_size_bytes
        if size_bytes < 2 * self._block_bytes or buffers.nbytes < 2 * self._block_bytes:
            raise ConfigError(
                f"--size {size_bytes} is too small for blocks of {self._block_bytes} bytes; use 64 of them"
            )
        self._size_bytes = size_bytes
        in_flight = options.queue_depth * self._block_bytes
        blocks = max(1, min(max(_REQUEST_BYTES, in_flight // 2), size_bytes // 4) // self._block_bytes)
        self._request_bytes = blocks * self._block_bytes
        # Little more memory than is in flight, as fio has it: a host copies what is in its caches up to a fifth faster.
        ring = max(4 * self._request_bytes, 2 * in_flight)
        self._buffers = Span(buffers.address, min(ring, buffers.nbytes), buffers.owner)
        self._engine = open_engine(options, backend)
        try:
            self._file = self._engine.open(path)
            self._engine.register(buffers)
        except BaseException:
            self._engine.close()
            raise
        self.backend = self._engine.backend
        self.direct = self._file.direct

    def __enter__(self) -> BenchSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._engine.close()

    def fill(self) -> None:
        """Write every block once: those that never were would read as zeros, for free."""
        self._move(self._sequential("write", 0, self._size_bytes))

    def run(self, operation: str, runtime_s: float = 0.0) -> BenchRun:
        """One pass over the file, or as many whole ones as `runtime_s` takes."""
        check_operation(operation)
        nbytes = 0
        cpu_s = time.process_time()
        start_s = time.perf_counter()
        while nbytes == 0 or time.perf_counter() - start_s < runtime_s:
            nbytes += self._move(self._requests(operation))
        seconds = time.perf_counter() - start_s
        return BenchRun(seconds, nbytes, time.process_time() - cpu_s)

    def latency_s(self, operation: str) -> tuple[float, ...]:
        """Seconds of single blocks, one at a time, spread over the file; sorted."""
        start = self._engine.write if operation == "write" else self._engine.read
        blocks = self._size_bytes // self._block_bytes
        span = Span(self._buffers.address, self._block_bytes, self._buffers.owner)
        seconds = []
        for index in range(0, blocks, max(1, blocks // _LATENCY_SAMPLES)):
            start_s = time.perf_counter()
            start(self._file, index * self._block_bytes, span, Priority.DEMAND).result()
            seconds.append(time.perf_counter() - start_s)
        return tuple(sorted(seconds))

    def _requests(self, operation: str) -> Sequence[_Request]:
        if operation == "randread":
            requests = self._sequential("read", 0, self._size_bytes, self._block_bytes)
            random.shuffle(requests)
            return requests
        if operation == "mixed":
            middle = self._size_bytes // 2 // self._request_bytes * self._request_bytes
            pairs = zip(
                self._sequential("read", 0, middle), self._sequential("write", middle, self._size_bytes), strict=False
            )
            return list(chain.from_iterable(pairs))
        return self._sequential(operation, 0, self._size_bytes)

    def _sequential(self, operation: str, begin: int, end: int, nbytes: int = 0) -> list[_Request]:
        nbytes = nbytes or self._request_bytes
        slots = self._buffers.nbytes // nbytes
        return [
            _Request(operation, at, Span(self._buffers.address + i % slots * nbytes, nbytes, self._buffers.owner))
            for i, at in enumerate(range(begin, end - nbytes + 1, nbytes))
        ]

    def _move(self, requests: Sequence[_Request]) -> int:
        """Run the requests with a few in flight, so that the engine's queue never runs dry; returns the bytes.

        They are of the class that may use the whole queue depth.
        """
        in_flight: deque[IoFuture] = deque()
        most = max(4, self._buffers.nbytes // requests[0].span.nbytes)
        for request in requests:
            while len(in_flight) >= most:
                in_flight.popleft().result()
            start = self._engine.read if request.operation == "read" else self._engine.write
            in_flight.append(start(self._file, request.offset, request.span, Priority.DEMAND))
        for future in in_flight:
            future.result()
        return sum(request.span.nbytes for request in requests)
