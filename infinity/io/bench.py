"""Measures what a drive gives through an engine: the numbers of `infinity bench-io`."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import ConfigError, StorageError
from infinity.io.interface import IoEngine, IoFile, IoFuture, IoOptions, Priority, Span
from infinity.io.probe import open_engine

OPERATIONS = ("read", "write", "mixed", "randread")
_REQUEST_BLOCKS = 16  # blocks in one request, so that the engine and not Python cuts them
_LATENCY_SAMPLES = 200
_SPARE_SHARE = 0.05  # of a drive that is left free


@dataclass(frozen=True)
class BenchJob:
    """What to measure.

    Attributes:
        size_bytes: length of the file; every run moves this much.
        operation: one of `OPERATIONS`; `mixed` reads one half while it writes the other.
    """

    path: Path
    size_bytes: int
    operation: str
    backend: str
    options: IoOptions


@dataclass(frozen=True)
class BenchRun:
    """One measured run.

    Attributes:
        cpu_s: processor seconds of the whole process.
    """

    seconds: float
    nbytes: int
    cpu_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds


@dataclass(frozen=True)
class BenchResult:
    """All runs of one job on one path.

    Attributes:
        backend: the one that was used.
        direct: the page cache was bypassed.
        latency_s: of single blocks one at a time, sorted.
    """

    job: BenchJob
    backend: str
    direct: bool
    runs: tuple[BenchRun, ...]
    latency_s: tuple[float, ...]

    def percentile(self, share: float) -> float:
        """Latency in seconds that `share` of the blocks stayed below."""
        return self.latency_s[min(len(self.latency_s) - 1, int(share * len(self.latency_s)))]


def run_bench(job: BenchJob, runs: int, buffers: Span) -> Iterator[BenchRun | BenchResult]:
    """Measure; yields each run as it ends, then the result.

    Args:
        buffers: memory to read into and write from; its content is what is written.

    Raises:
        ConfigError: the operation does not exist, or the sizes do not fit together.
        StorageError: the drive has not the room, or a request failed. The file is removed in any case.
    """
    if job.operation not in OPERATIONS:
        raise ConfigError(f"operation {job.operation!r} does not exist; choose one of {', '.join(OPERATIONS)}")
    request_bytes = min(job.options.block_size_bytes * _REQUEST_BLOCKS, job.size_bytes // 2)
    if request_bytes < job.options.block_size_bytes or buffers.nbytes < 2 * request_bytes:
        raise ConfigError(
            f"--size {job.size_bytes} is too small for blocks of {job.options.block_size_bytes} bytes; use 64 of them"
        )
    with _engine(job) as engine, _file(job, engine) as file:
        engine.register(buffers)
        plan = _Plan(job, request_bytes, buffers)
        _move(engine, file, plan.all_of("write"))  # blocks that were never written would read as zeros, for free
        finished = []
        for _ in range(runs):
            finished.append(_timed(engine, file, plan))
            yield finished[-1]
        latency = _latency(engine, file, plan)
        yield BenchResult(job, engine.backend, file.direct, tuple(finished), latency)


@contextmanager
def _engine(job: BenchJob) -> Iterator[IoEngine]:
    engine = open_engine(job.options, job.backend)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def _file(job: BenchJob, engine: IoEngine) -> Iterator[IoFile]:
    try:
        space = os.statvfs(job.path)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, "cannot use this path", str(job.path), 0) from error
    free = space.f_bavail * space.f_frsize
    if job.size_bytes > free - _SPARE_SHARE * space.f_blocks * space.f_frsize:
        raise StorageError(
            errno.ENOSPC,
            f"a file of {job.size_bytes} bytes would fill the drive ({free} are free); use a smaller --size",
            str(job.path),
            0,
        )
    path = job.path / f"infinity-bench-{secrets.token_hex(4)}.tmp"
    try:
        file = engine.open(path, create=True, size_bytes=job.size_bytes)
        yield file
        file.close()
    finally:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Request:
    operation: str
    offset: int
    span: Span


class _Plan:
    """The requests of one run."""

    def __init__(self, job: BenchJob, request_bytes: int, buffers: Span) -> None:
        self._job = job
        self.request_bytes = request_bytes
        self.slots = buffers.nbytes // request_bytes
        self._buffers = buffers

    def span(self, slot: int, nbytes: int) -> Span:
        return Span(self._buffers.address + slot * self.request_bytes, nbytes, self._buffers.owner)

    def all_of(self, operation: str, begin: int = 0, end: int | None = None) -> list[_Request]:
        stop = self._job.size_bytes if end is None else end
        starts = range(begin, stop - self.request_bytes + 1, self.request_bytes)
        return [_Request(operation, at, self.span(i % self.slots, self.request_bytes)) for i, at in enumerate(starts)]

    def run(self) -> list[_Request]:
        operation = self._job.operation
        if operation == "randread":
            block = self._job.options.block_size_bytes
            offsets = list(range(0, self._job.size_bytes - block + 1, block))
            secrets.SystemRandom().shuffle(offsets)
            slots = self._buffers.nbytes // block
            spans = [Span(self._buffers.address + i * block, block, self._buffers.owner) for i in range(slots)]
            return [_Request("read", at, spans[i % slots]) for i, at in enumerate(offsets)]
        if operation != "mixed":
            return self.all_of(operation)
        middle = self._job.size_bytes // 2 // self.request_bytes * self.request_bytes
        pairs = zip(self.all_of("read", 0, middle), self.all_of("write", middle), strict=False)
        return [request for pair in pairs for request in pair]


def _move(engine: IoEngine, file: IoFile, requests: list[_Request]) -> None:
    """Run the requests with a few in flight, so that the engine's queue never runs dry."""
    in_flight: deque[IoFuture] = deque()
    block = max(1, requests[0].span.nbytes) if requests else 1
    most = max(4, (256 << 20) // block)
    for request in requests:
        while len(in_flight) >= most:
            in_flight.popleft().result()
        start = engine.read if request.operation == "read" else engine.write
        in_flight.append(start(file, request.offset, request.span, Priority.PREFETCH))
    for future in in_flight:
        future.result()


def _timed(engine: IoEngine, file: IoFile, plan: _Plan) -> BenchRun:
    requests = plan.run()
    cpu_s = time.process_time()
    start_s = time.perf_counter()
    _move(engine, file, requests)
    seconds = time.perf_counter() - start_s
    return BenchRun(seconds, sum(request.span.nbytes for request in requests), time.process_time() - cpu_s)


def _latency(engine: IoEngine, file: IoFile, plan: _Plan) -> tuple[float, ...]:
    """Seconds of single blocks, one at a time, spread over the file."""
    block = plan._job.options.block_size_bytes
    blocks = plan._job.size_bytes // block
    step = max(1, blocks // _LATENCY_SAMPLES)
    write = plan._job.operation == "write"
    seconds = []
    for index in range(0, blocks, step):
        start_s = time.perf_counter()
        start = engine.write if write else engine.read
        start(file, index * block, plan.span(0, block), Priority.DEMAND).result()
        seconds.append(time.perf_counter() - start_s)
    return tuple(sorted(seconds))
