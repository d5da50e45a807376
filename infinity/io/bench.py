"""Measures the performance of a drive through an engine, for `infinity bench-io`."""

from __future__ import annotations

import errno
import math
import os
import resource
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import TracebackType

from infinity.config.schema import BLOCK_ALIGN_BYTES
from infinity.errors import ConfigError, StorageError
from infinity.io.directory import open_directory
from infinity.io.interface import IoEngine, IoFuture, IoOptions, Priority, Span, create_file
from infinity.io.latency import NO_LATENCIES, Latencies
from infinity.io.patterns import Move, Scatter, check_operation, is_random, moves, pass_bytes, scatters
from infinity.io.probe import open_engine

_REQUEST_BYTES = 2 << 20  # least size of a request, so that the engine and not Python cuts it into blocks
_SCATTERED_BLOCKS = 256  # most blocks of a random request, so that a slow drive soon reacts to KeyboardInterrupt
_AHEAD_S = 0.25  # seconds of work queued behind the requests in flight, so that Python seldom wakes
_SPARE_SHARE = 0.05  # of a drive's space that stays free
_ENDLESS = 1 << 62  # passes: only the clock ends the run


@dataclass(frozen=True)
class BenchRun:
    """One measured run.

    Attributes:
        cpu_s: processor seconds, user and system, of the whole process.
        passes: number of passes over the file; the last one may be incomplete.
        blocks: number of blocks, or of requests if the engine does not cut them.
        user_s, system_s: parts of `cpu_s`.
        caller_s: part of `cpu_s` of the thread that cuts, submits and waits; the engine's threads use the remainder.
            None if unknown.
        latencies: latencies of the blocks.
    """

    seconds: float
    nbytes: int
    cpu_s: float
    passes: int = 1
    blocks: int = 0
    user_s: float = 0.0
    system_s: float = 0.0
    caller_s: float | None = None
    latencies: Latencies = NO_LATENCIES

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds

    @property
    def blocks_per_s(self) -> float:
        return self.blocks / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.nbytes / 1e9)


def request_bytes(options: IoOptions, most_bytes: int) -> int:
    """Return the size of a request: whole blocks, half of the bytes in flight, so that two requests fill the queue."""
    in_flight = options.queue_depth * options.block_size_bytes
    wanted = min(max(_REQUEST_BYTES, in_flight // 2), most_bytes)
    return max(1, wanted // options.block_size_bytes) * options.block_size_bytes


def ring_bytes(options: IoOptions) -> int:
    """Return the size of a session's memory: the bytes in flight, and a few requests that are verified."""
    in_flight = options.queue_depth * options.block_size_bytes
    request = request_bytes(options, max(_REQUEST_BYTES, in_flight))
    return max(3 * request, in_flight + request)


def shares(buffers: Span, count: int) -> list[Span]:
    """Divide memory into `count` parts of equal size, aligned for direct I/O."""
    nbytes = buffers.nbytes // count // BLOCK_ALIGN_BYTES * BLOCK_ALIGN_BYTES
    return [Span(buffers.address + index * nbytes, nbytes, buffers.owner) for index in range(count)]


def check_space(directory: Path, size_bytes: int) -> None:
    """Check that a directory has space for a file of this size.

    Raises:
        StorageError: the directory cannot be used, or the file would fill the drive.
    """
    descriptor = open_directory(directory)
    try:
        space = os.fstatvfs(descriptor)
    except OSError as error:
        raise StorageError.of(error, "cannot use this path", directory, None) from error
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


@contextmanager
def bench_file(directory: Path, size_bytes: int) -> Iterator[Path]:
    """Yield a file of reserved space, which is removed in any case; raises as `check_space`."""
    check_space(directory, size_bytes)
    path = directory / f"infinity-bench-{secrets.token_hex(4)}.tmp"
    try:
        os.close(create_file(path, size_bytes))
        yield path
    finally:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Clocks:
    """Readings of the clocks."""

    seconds: float
    cpu_s: float
    caller_s: float
    user_s: float
    system_s: float


def _clocks() -> _Clocks:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return _Clocks(time.perf_counter(), time.process_time(), time.thread_time(), usage.ru_utime, usage.ru_stime)


class _Watch:
    """Measures a run from its construction on. Its own calls to the engine are outside of the measured times.

    Args:
        others_cpu_s: processor seconds so far of threads outside of the run, such as a progress display.
    """

    def __init__(self, engine: IoEngine, others_cpu_s: Callable[[], float]) -> None:
        self._engine = engine
        self._others_cpu_s = others_cpu_s
        self._others_s = others_cpu_s()
        self._stats, self._latencies = engine.stats(), engine.latencies()
        self._start = _clocks()

    @property
    def begin_s(self) -> float:
        return self._start.seconds

    def run(self, passes: int) -> BenchRun:
        """Return the measurements until now."""
        start, end = self._start, _clocks()
        others_s = self._others_cpu_s() - self._others_s  # almost all of it in user mode
        before, after = self._stats, self._engine.stats()
        return BenchRun(
            end.seconds - start.seconds,
            after.bytes_read - before.bytes_read + after.bytes_written - before.bytes_written,
            max(0.0, end.cpu_s - start.cpu_s - others_s),
            passes,
            after.blocks - before.blocks,
            max(0.0, end.user_s - start.user_s - others_s),
            end.system_s - start.system_s,
            end.caller_s - start.caller_s,
            self._engine.latencies().since(self._latencies),
        )


class BenchSession:
    """An engine and a file to measure; a context manager.

    Args:
        buffers: memory to read into and write from; the writes store its content.
        as_in_training: use the priorities of prefetches and write-backs, which leave a part of the depth to urgent
            requests; if False, requests may use the full depth.
        others_cpu_s: processor seconds so far of threads that do not count.

    Attributes:
        registered: the kernel keeps the buffers pinned, which saves work for every block.
        unfinished: measurements of a run that an exception ended, such as KeyboardInterrupt.

    Raises:
        ConfigError: the sizes do not fit together, or the backend does not work on this machine.
    """

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        backend: str,
        options: IoOptions,
        buffers: Span,
        *,
        as_in_training: bool = False,
        others_cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._others_cpu_s = others_cpu_s
        self._block_bytes = options.block_size_bytes
        self._in_flight_bytes = options.queue_depth * options.block_size_bytes
        self._read_class = Priority.PREFETCH if as_in_training else Priority.DEMAND
        self._write_class = Priority.WRITE_BACK if as_in_training else Priority.DEMAND
        if size_bytes < 2 * self._block_bytes or buffers.nbytes < 2 * self._block_bytes:
            raise ConfigError(
                f"--size {size_bytes} is too small for blocks of {self._block_bytes} bytes; use 64 of them"
            )
        self._size_bytes = size_bytes
        self._request_bytes = request_bytes(options, min(size_bytes // 4, buffers.nbytes // 3))
        self.buffers = Span(buffers.address, min(ring_bytes(options), buffers.nbytes), buffers.owner)
        self.engine = open_engine(options, backend)
        try:
            self.file = self.engine.open(path)
            self.registered = self.engine.register(buffers)
        except BaseException:
            self.engine.close()
            raise
        self.backend = self.engine.backend
        self.direct = self.file.direct
        self.unfinished: BenchRun | None = None

    def __enter__(self) -> BenchSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        self.engine.close()

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written since the session began."""
        stats = self.engine.stats()
        return stats.bytes_read + stats.bytes_written

    @property
    def window_bytes(self) -> int:
        """Bytes of the buffers that measured blocks cycle through; whole blocks."""
        return min(self._in_flight_bytes, self.buffers.nbytes // self._block_bytes * self._block_bytes)

    def moves(self, operation: str) -> Sequence[Move]:
        """Return the requests of one pass, in order."""
        return moves(operation, self._size_bytes, self._block_bytes, self._request_bytes)

    def pass_bytes(self, operation: str) -> int:
        """Return the bytes that one pass moves."""
        return pass_bytes(operation, self._size_bytes, self._block_bytes)

    def _requests(self, operation: str) -> Sequence[Move | Scatter]:
        """Return a pass as requests of many blocks each, so that Python does not limit small blocks."""
        if is_random(operation):
            request_bytes = min(self._request_bytes, _SCATTERED_BLOCKS * self._block_bytes)
            return scatters(operation, self._size_bytes, self._block_bytes, request_bytes)
        return self.moves(operation)

    def fill(self) -> None:
        """Write every block once: blocks without data would read as zeros, without drive traffic."""
        self._perform(self.moves("write"), math.inf)

    def run(
        self,
        operation: str,
        runtime_s: float = 0.0,
        *,
        passes: int = 1,
        most_passes: int | None = None,
        until_s: float = math.inf,
    ) -> BenchRun:
        """Run whole passes over the file for `runtime_s`, but at least `passes`.

        Args:
            most_passes: upper limit of the passes, whatever the time.
            until_s: a time of `time.perf_counter` at which to stop, also within a pass.
        """
        check_operation(operation)
        requests = self._requests(operation)
        self.unfinished = None
        done = 0
        watch = _Watch(self.engine, self._others_cpu_s)
        try:
            while done < passes or time.perf_counter() - watch.begin_s < runtime_s:
                self._perform(requests, until_s)
                done += 1
                if done == most_passes or time.perf_counter() >= until_s:
                    break
        except BaseException:
            self.unfinished = watch.run(done + 1)
            raise
        return watch.run(done)

    def _perform(self, requests: Sequence[Move | Scatter], until_s: float) -> None:
        """Run the requests with some queued ahead, so that the engine's queue is never empty."""
        under_way: deque[IoFuture] = deque()
        request_bytes = requests[0].nbytes  # the first is the longest
        least = 2 * math.ceil(self._in_flight_bytes / request_bytes)
        most, moved_bytes, begin_s = least, 0, time.perf_counter()
        for request, span in zip(requests, cycle(self._spans(request_bytes))):
            if len(under_way) >= most:
                moved_bytes += _finish(under_way, len(under_way) // 2)
                bytes_per_s = moved_bytes / (time.perf_counter() - begin_s)
                ahead_s = min(_AHEAD_S, until_s - time.perf_counter())  # queued requests must be waited for, too
                most = max(least, int(ahead_s * bytes_per_s / request_bytes))
            if under_way and time.perf_counter() >= until_s:  # at least one request, so that there is a rate
                break
            under_way.append(self._begin(request, span))
        _finish(under_way, len(under_way))

    def _begin(self, request: Move | Scatter, span: Span) -> IoFuture:
        write = request.operation == "write"
        turn = self._write_class if write else self._read_class
        if isinstance(request, Scatter):
            return self.engine.move_blocks(write, self.file, request.offsets, request.block_bytes, span, turn)
        begin = self.engine.write if write else self.engine.read
        part = Span(span.address, min(span.nbytes, request.nbytes), span.owner)
        return begin(self.file, request.offset, part, turn, nbytes=request.nbytes)

    def _spans(self, request_bytes: int) -> Sequence[Span]:
        """Return memory for successive requests: as much as is in flight, as in fio, or less if there is less.

        A host copies cached data up to a fifth faster. A block that all others overtake shares its memory with a later
        one for a while; the content is not used.
        """
        memory = self.buffers
        if request_bytes >= self.window_bytes:
            return [Span(memory.address, self.window_bytes, memory.owner)]
        count = min(math.ceil(self._in_flight_bytes / request_bytes), memory.nbytes // request_bytes)
        return [Span(memory.address + i * request_bytes, request_bytes, memory.owner) for i in range(count)]


def _finish(under_way: deque[IoFuture], count: int) -> int:
    """Wait for the oldest `count` requests, first for the last of them: one sleep. Return the bytes that they moved."""
    if count:
        under_way[count - 1].result()
    return sum(under_way.popleft().result() for _ in range(count))


def run_together(
    sessions: Sequence[BenchSession], operation: str, runtime_s: float, most_passes: int | None = None
) -> list[BenchRun]:
    """Run the same operation on all sessions at once, to measure each while the others are busy.

    This call raises KeyboardInterrupt; the sessions then run until they are closed.

    Args:
        most_passes: upper limit of each session's passes, whatever the time.
    """
    if len(sessions) == 1:
        until = time.perf_counter() + runtime_s
        return [sessions[0].run(operation, until_s=until, passes=_ENDLESS, most_passes=most_passes)]
    runs: list[BenchRun | None] = [None] * len(sessions)
    errors: list[Exception] = []
    gate = threading.Barrier(len(sessions) + 1)
    until_s = [math.inf]

    def measure(index: int) -> None:
        gate.wait()
        try:
            runs[index] = sessions[index].run(operation, passes=_ENDLESS, most_passes=most_passes, until_s=until_s[0])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=measure, args=(index,), daemon=True) for index in range(len(sessions))]
    for thread in threads:
        thread.start()
    until_s[0] = time.perf_counter() + runtime_s
    gate.wait()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [run for run in runs if run is not None]
