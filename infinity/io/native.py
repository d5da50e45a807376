"""The native backends, io_uring and threads: thin wrappers around infinity._aio."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from infinity import _aio
from infinity.errors import InfinityError, StorageError
from infinity.io.interface import (
    IoEngine,
    IoFile,
    IoFuture,
    IoOptions,
    IoStats,
    Priority,
    Span,
    check_blocks,
    failure,
)
from infinity.io.latency import Histogram, Latencies
from infinity.io.threads import MORE_THREADS
from infinity.telemetry import Times

_log = logging.getLogger(__name__)
_WITHOUT_TIMEOUT = -1.0


class _NativeFile(IoFile):
    def __init__(self, source: Path, read_only: bool, name: Path, engine: _aio.Engine, direct: bool) -> None:
        self._native: _aio.File | None = _aio.File(os.fsencode(source), read_only, direct)
        self._engine = engine
        self.path = name
        self.direct = self._native.direct
        self.alignment = self._native.alignment

    def opened(self) -> _aio.File:
        if self._native is None:
            raise StorageError(errno.EBADF, "the file is closed", str(self.path), 0)
        return self._native

    def close(self) -> None:
        self._native = None  # requests in flight hold the descriptor; the last one closes it
        self._engine.release_files()


class _NativeFuture(IoFuture):
    def __init__(self, engine: _aio.Engine, request: _aio.Request, operation: str, path: Path) -> None:
        self._engine = engine
        self._request = request
        self._operation = operation
        self._path = path

    def done(self) -> bool:
        return self._request.done()

    def result(self, timeout: float | None = None) -> int:
        if not self._request.done():
            self._engine.promote(self._request)  # a thread waits: a prefetch becomes a demand read
        try:
            over = self._request.wait(_WITHOUT_TIMEOUT if timeout is None else timeout)
        except RuntimeError as forked:
            raise InfinityError(str(forked)) from forked
        if not over:
            raise TimeoutError(f"{self._operation} of {self._path} has not ended after {timeout} s")
        nbytes, error, offset = self._request.outcome()
        if error == errno.EOPNOTSUPP:
            hint = "operation not supported; if aio.iopoll is on, switch it off: the drive has no polling queues"
            raise StorageError(error, hint, str(self._path), offset)
        if error:
            raise failure(error, self._operation, self._path, offset)
        return nbytes

    def times(self) -> Times | None:
        return Times(*self._request.times()) if self._request.done() else None


class NativeEngine(IoEngine):
    """An engine of infinity._aio.

    Args:
        faults: faults to inject in tests, see csrc/aio/faults.h.
    """

    def __init__(self, backend: str, options: IoOptions, faults: Mapping[str, int] | None = None) -> None:
        self.backend = backend
        self._direct = options.direct
        self._engine = _aio.Engine(
            backend=backend,
            block_nbytes=options.block_size_bytes,
            depth=options.queue_depth,
            threads=options.threads,
            sqpoll=options.sqpoll,
            iopoll=options.iopoll,
            faults=dict(faults or {}),
        )
        # By (thread, write): no lock is needed, which a forked child might inherit locked.
        self._asked_bytes: dict[tuple[int, bool], int] = {}
        self._registered: list[Span] = []  # the kernel uses their pages until the engine is closed

    def _open(self, source: Path, read_only: bool, name: Path) -> IoFile:
        file = _NativeFile(source, read_only, name, self._engine, self._direct)
        if self._direct and not file.direct:
            _log.warning("%s: no direct I/O on this filesystem; reads and writes go through the page cache", name)
        return file

    def _submit(self, write: bool, file: IoFile, offset: int, span: Span, priority: Priority, nbytes: int) -> IoFuture:
        where = span.address, nbytes, span.nbytes, int(priority), span.owner
        return self._start(write, file, nbytes, lambda opened: self._engine.submit(write, opened, offset, *where))

    def move_blocks(
        self,
        write: bool,
        file: IoFile,
        offsets: npt.NDArray[np.uint64],
        block_bytes: int,
        span: Span,
        priority: Priority = Priority.DEMAND,
    ) -> IoFuture:
        check_blocks(file, offsets, block_bytes, span)
        where = offsets, block_bytes, span.address, span.nbytes, int(priority), span.owner
        nbytes = len(offsets) * block_bytes
        return self._start(write, file, nbytes, lambda opened: self._engine.submit_blocks(write, opened, *where))

    def _start(self, write: bool, file: IoFile, nbytes: int, submit: Callable[[_aio.File], _aio.Request]) -> IoFuture:
        if not isinstance(file, _NativeFile):
            raise TypeError(f"{file.path} was opened by another engine")
        asker = threading.get_ident(), write
        self._asked_bytes[asker] = self._asked_bytes.get(asker, 0) + nbytes
        try:
            request = submit(file.opened())
        except RuntimeError as error:  # closed, or forked
            raise InfinityError(str(error)) from error
        return _NativeFuture(self._engine, request, "write" if write else "read", file.path)

    def register(self, span: Span) -> bool:
        try:
            refusal = self._engine.register_buffer(span.address, span.nbytes)
        except RuntimeError as forked:
            raise InfinityError(str(forked)) from forked
        if refusal:
            _log.info("buffers are used unregistered: %s", os.strerror(refusal))
        self._registered.append(span)
        return refusal == 0

    def stats(self) -> IoStats:
        moved = self._engine.stats()
        asked = {False: 0, True: 0}
        for (_, write), nbytes in list(self._asked_bytes.items()):
            asked[write] += nbytes
        return IoStats(*moved, asked[False], asked[True])

    def latencies(self) -> Latencies:
        reads, writes = self._engine.latencies()
        return Latencies(Histogram(tuple(reads)), Histogram(tuple(writes)))

    def close(self) -> None:
        self._engine.close()
        self._registered.clear()


def uring_problem() -> str:
    """Return why io_uring does not work on this machine; empty if it does."""
    if not _aio.has_uring():
        return "the extension was built without liburing (install liburing-dev and build again)"
    try:
        NativeEngine("io_uring", IoOptions(queue_depth=2)).close()
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return f"it cannot start a thread: {MORE_THREADS}"
        return f"the kernel refuses it ({os.strerror(error.errno or 0)}){_refusal_hint()}"
    return ""


def _refusal_hint() -> str:
    switch = Path("/proc/sys/kernel/io_uring_disabled")
    try:
        value = switch.read_text().strip()
    except OSError:
        return ""
    if value == "2" or (value == "1" and os.geteuid() != 0):
        return f": kernel.io_uring_disabled is {value}"
    return ": probably a container's seccomp profile; allow io_uring_setup, io_uring_enter and io_uring_register"
