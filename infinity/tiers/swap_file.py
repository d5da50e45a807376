"""Swap files: reserved up front, and never left behind.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from infinity.errors import StorageError

_PREFIX, _SUFFIX = "infinity-", ".swap"


def remove_stale(directory: Path) -> list[Path]:
    """Remove the swap files of dead runs in `directory`; returns what was removed.

    Raises:
        StorageError: the directory cannot be used.
    """
    with _locked(directory):
        return _remove_stale(directory)


def _remove_stale(directory: Path) -> list[Path]:
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


class OwnedFile:
    """A locked swap file that goes when its owner closes it, is collected, or exits."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.remove = weakref.finalize(self, _unlink_own, path, fd, os.getpid())


def _unlink_own(path: Path, fd: int, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child must not remove its parent's file
    path.unlink(missing_ok=True)
    _live.pop(path, None)
    os.close(fd)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; see [Note: who owns a swap file]."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StorageError(
            error.errno or errno.EIO,
            "cannot use this nvme path (create the directory, or correct nvme_path)",
            str(directory),
            0,
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def create_owned(directory: Path, rank: int, nbytes: int) -> OwnedFile:
    """A new, locked swap file of reserved space.

    Raises:
        StorageError: the directory cannot be used or has too little space; nothing is left behind.
    """
    path = directory / f"{_PREFIX}r{rank}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
    with _locked(directory):
        try:
            _remove_stale(directory)
            _remove_on_sigterm(path)
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            owned = OwnedFile(path, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, "cannot create a swap file here", str(directory), 0) from error
    try:
        if nbytes:
            os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        owned.remove()
        free = os.statvfs(directory)
        raise StorageError(
            error.errno or errno.EIO,
            f"cannot reserve {nbytes} bytes for the model's states "
            f"({free.f_bavail * free.f_frsize} bytes are free): free some, or choose another nvme path",
            str(directory),
            0,
        ) from error
    return owned


# SIGTERM ends a Python process without running its exit handlers, which would leave the swap files. Where the
# application has not chosen a handler of its own, ours removes them and dies of the same signal.
_live: dict[Path, int] = {}  # the process that made each; a forked child must not remove its parent's


def _remove_on_sigterm(path: Path) -> None:
    _live[path] = os.getpid()
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _die_of_sigterm)


def _die_of_sigterm(signum: int, frame: FrameType | None) -> None:
    for path, owner_pid in list(_live.items()):
        if owner_pid == os.getpid():
            path.unlink(missing_ok=True)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
