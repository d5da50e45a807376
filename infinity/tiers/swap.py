"""Swap files: the NVMe tier's space, reserved up front and never left behind.

[Note: who owns a swap file]
A swap file belongs to one process, which holds an exclusive `flock` on it for as long as it lives. The kernel
drops the lock when the process dies, however it dies, so a file whose lock can be taken is a dead run's and is
removed at the next start. Looking and creating happen under a lock on the directory itself, so that two
starting runs do not take each other's new files for dead ones. Process ids would not do: they are reused, and
mean nothing across containers that share a drive.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import signal
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from infinity.errors import StorageError
from infinity.io import IoEngine, IoFile, IoFuture, Priority, Span

ALIGN_BYTES = 4096
_PREFIX, _SUFFIX = "infinity-", ".swap"


@dataclass(frozen=True)
class SwapPath:
    """A directory on a drive, and how much of it may be used (None: what is free)."""

    path: Path
    capacity_bytes: int | None = None


@dataclass(frozen=True)
class Extent:
    """A range of one swap file.

    Attributes:
        file: index of the swap path that holds it.
        offset: bytes from the start of the file, aligned.
        nbytes: length, aligned.
        slot: copy number; a second copy of the same content is a layout choice.
    """

    file: int
    offset: int
    nbytes: int
    slot: int = 0


def remove_stale(directory: Path) -> list[Path]:
    """Remove the swap files of dead runs in `directory`; returns what was removed."""
    removed = []
    for path in sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(fd)
    return removed


class SwapSpace:
    """Extents over one swap file per path.

    Reserve every extent, then `create`: the files are allocated whole, so that a full disk is an error at
    the start and not in the middle of a run.
    """

    def __init__(self, engine: IoEngine, paths: Sequence[SwapPath], rank: int = 0) -> None:
        self._engine = engine
        self._paths = tuple(paths)
        self._rank = rank
        self._sizes = [0] * len(self._paths)
        self._files: list[IoFile] = []
        self._locks: list[_OwnedFile] = []

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes)

    def reserve(self, nbytes: int) -> Extent:
        """Reserve an aligned extent on the path that holds the least so far.

        Raises:
            StorageError: no path has room for it within its capacity.
        """
        nbytes = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        order = sorted(range(len(self._paths)), key=lambda i: self._sizes[i])
        for index in order:
            capacity = self._paths[index].capacity_bytes
            if capacity is None or self._sizes[index] + nbytes <= capacity:
                extent = Extent(index, self._sizes[index], nbytes)
                self._sizes[index] += nbytes
                return extent
        names = ", ".join(f"{p.path} ({p.capacity_bytes} bytes)" for p in self._paths) or "no path is given"
        raise StorageError(
            errno.ENOSPC,
            f"the model's states do not fit the NVMe capacities: {names}; raise tiering.nvme[].capacity or add a path",
            str(self._paths[0].path) if self._paths else "tiering.nvme",
            sum(self._sizes),
        )

    def create(self) -> None:
        """Create the files at full size.

        Raises:
            StorageError: a path is missing, read-only or too full; nothing is left behind.
        """
        try:
            for index, swap_path in enumerate(self._paths):
                self._locks.append(_create_owned(swap_path.path, self._rank, self._sizes[index]))
            for owned in self._locks:
                self._files.append(self._engine.open(owned.path))
        except BaseException:
            self.close()
            raise
        _remove_on_sigterm(self)

    def read(self, extent: Extent, span: Span, offset: int = 0, *, priority: Priority) -> IoFuture:
        """Start reading `span.nbytes` from `offset` within the extent."""
        return self._engine.read(self._files[extent.file], extent.offset + offset, span, priority)

    def write(self, extent: Extent, span: Span, offset: int = 0) -> IoFuture:
        """Start writing `span` at `offset` within the extent."""
        return self._engine.write(self._files[extent.file], extent.offset + offset, span)

    def files(self) -> tuple[Path, ...]:
        return tuple(owned.path for owned in self._locks)

    def close(self) -> None:
        """Close and remove the files. No request may be in flight."""
        _live_spaces.discard(self)
        for file in self._files:
            file.close()
        self._files.clear()
        for owned in self._locks:
            owned.remove()
        self._locks.clear()


class _OwnedFile:
    """A locked swap file that goes when its owner closes it, is collected, or exits."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.remove = weakref.finalize(self, _unlink_own, path, fd, os.getpid())


def _unlink_own(path: Path, fd: int, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child must not remove its parent's file
    path.unlink(missing_ok=True)
    os.close(fd)


def _create_owned(directory: Path, rank: int, nbytes: int) -> _OwnedFile:
    name = f"{_PREFIX}r{rank}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
    path = directory / name
    try:
        directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StorageError(
            error.errno or errno.EIO,
            "cannot use this nvme path (create the directory, or correct nvme_path)",
            str(directory),
            0,
        ) from error
    try:
        fcntl.flock(directory_fd, fcntl.LOCK_EX)  # see [Note: who owns a swap file]
        remove_stale(directory)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        owned = _OwnedFile(path, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, "cannot create a swap file here", str(directory), 0) from error
    finally:
        os.close(directory_fd)
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        owned.remove()
        free = os.statvfs(directory)
        raise StorageError(
            error.errno or errno.EIO,
            f"cannot reserve {nbytes} bytes for the optimizer and parameter states "
            f"({free.f_bavail * free.f_frsize} bytes are free): free some, or choose another nvme path",
            str(directory),
            0,
        ) from error
    return owned


# SIGTERM ends a Python process without running its exit handlers, which would leave the swap files. Where the
# application has not chosen a handler of its own, ours removes them and dies of the same signal.
_live_spaces: weakref.WeakSet[SwapSpace] = weakref.WeakSet()


def _remove_on_sigterm(space: SwapSpace) -> None:
    _live_spaces.add(space)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _die_of_sigterm)


def _die_of_sigterm(signum: int, frame: FrameType | None) -> None:
    for space in list(_live_spaces):
        for path in space.files():
            path.unlink(missing_ok=True)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
