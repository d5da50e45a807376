"""GPUDirect Storage through kvikio: reads from the drive straight into device memory."""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, Protocol

import torch

from infinity.errors import InfinityError, StorageError
from infinity.io.interface import IoFuture, failure
from infinity.io.threads import MORE_THREADS
from infinity.telemetry import Times


def gds_problem() -> str:
    """Return why GPUDirect Storage does not work on this machine; empty if it does."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        import kvikio.cufile_driver  # noqa: PLC0415  (optional, and it loads CUDA)
        import kvikio.defaults  # noqa: PLC0415
    except ImportError as error:
        return f"kvikio is missing ({error}); pip install kvikio-cu12, or -cu13, after your CUDA version"
    if kvikio.defaults.is_compat_mode_preferred():
        return "cuFile is absent, or /run/udev cannot be read: kvikio would copy through the host as well"
    try:
        if not kvikio.cufile_driver.get("is_gds_available"):
            return "cuFile runs without the nvidia-fs driver: it would copy through the host as well"
    except RuntimeError as error:
        return f"cuFile does not start ({error})"
    return ""


class DeviceReader(Protocol):
    """Fills device memory from a file."""

    def read(self, path: Path, offset: int, target: torch.Tensor) -> int:
        """Read bytes (uint8) at `offset`, and block. Return how many: fewer than the target has, or 0 at the end."""

    def close(self) -> None:
        """Close the files."""


class KvikioReader:
    """DeviceReader by kvikio, which cuts large reads into tasks for its own threads."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def read(self, path: Path, offset: int, target: torch.Tensor) -> int:
        import kvikio  # noqa: PLC0415

        if path not in self._files:
            self._files[path] = kvikio.CuFile(path, "r")
        return int(self._files[path].read(target, target.numel(), offset))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class HostReader:
    """DeviceReader for a device whose memory is the host's."""

    def read(self, path: Path, offset: int, target: torch.Tensor) -> int:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            # not through numpy, after which the storage could never be resized
            buffer = (ctypes.c_char * target.numel()).from_address(target.data_ptr())
            return file.readinto(buffer) or 0

    def close(self) -> None:
        """Do nothing: no file stays open."""


class DeviceReads:
    """Runs reads into device memory one after another, each after a given wait.

    They run on a thread, because kvikio ignores streams: newly allocated memory may still be in use by queued kernels.
    """

    def __init__(self, reader: DeviceReader) -> None:
        self._reader = reader
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="infinity-gds")

    def start(
        self, pieces: Sequence[tuple[Path, int, int]], target: torch.Tensor, wait: Callable[[], object]
    ) -> IoFuture:
        """Start filling `target` (uint8, on the device) from (path, offset, nbytes), after `wait` has returned."""
        try:
            return _DeviceRead(self._worker.submit(self._timed_read, tuple(pieces), target, wait))
        except RuntimeError as error:
            raise InfinityError(f"cannot start a thread for reads to the device ({error}): {MORE_THREADS}") from error

    def _timed_read(
        self, pieces: Sequence[tuple[Path, int, int]], target: torch.Tensor, wait: Callable[[], object]
    ) -> tuple[int, float, float]:
        """Return the bytes, and the times at which the read started and ended."""
        wait()
        started_s = time.perf_counter()
        nbytes = self._read(pieces, target)
        return nbytes, started_s, time.perf_counter()

    def _read(self, pieces: Sequence[tuple[Path, int, int]], target: torch.Tensor) -> int:
        begin = 0
        for path, offset, nbytes in pieces:
            stop = begin + nbytes
            while begin < stop:  # the system reads 2 GiB at most at a time
                try:
                    moved = self._reader.read(path, offset, target[begin:stop])
                except (OSError, RuntimeError) as error:
                    code = getattr(error, "errno", None) or errno.EIO
                    raise StorageError(code, f"read into device memory failed: {error}", str(path), offset) from error
                if not moved:
                    raise failure(errno.ENODATA, "read", path, offset)
                begin, offset = begin + moved, offset + moved
        return begin

    def close(self) -> None:
        """Finish all reads, then close the files."""
        self._worker.shutdown()
        self._reader.close()


class _DeviceRead(IoFuture):
    def __init__(self, future: Future[tuple[int, float, float]]) -> None:
        self._future = future
        self._submitted_s = time.perf_counter()

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> int:
        try:
            return self._future.result(timeout)[0]
        except FutureTimeoutError as error:
            raise TimeoutError(f"the read into device memory has not ended after {timeout} s") from error

    def times(self) -> Times | None:
        if not self._future.done():
            return None
        if self._future.exception() is not None:
            return Times(self._submitted_s, self._submitted_s, self._submitted_s)
        return Times(self._submitted_s, *self._future.result()[1:])
