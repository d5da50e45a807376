"""Swap files: allocated at the start, and removed at the end, except files that a later process continues from.

[Note: who owns a swap file]
A swap file belongs to one process, which holds an exclusive `flock` on it while it lives. However the process ends, the
kernel releases the lock. So a file whose lock can be taken belongs to a dead run, and the next start removes it. A new
file is locked under a temporary name before it is renamed to a swap file, so that another starting run never sees it
without its lock. No process waits for a lock, because any other process may hold a lock on these files. A process id in
the name would not be enough: ids are reused, and differ between containers that share a drive.
A file that is kept (see run_files.py) gets a name that `remove_stale` ignores.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import logging
import os
import secrets
import signal
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import disk_usage
from types import FrameType

from infinity.errors import StorageError
from infinity.io.directory import allocate, check_private, create_private, how_to_grow, open_directory

_log = logging.getLogger(__name__)
_PREFIX, _SUFFIX, _NEW = "infinity-", ".swap", ".new"
_NEW_FOR_S = 60.0  # far longer than a file has its temporary name


def open_swap_directory(directory: Path, *, lasting: bool = False) -> int:
    """Open a directory for swap files, created if it is missing. Return a descriptor; raises like `open_directory`."""
    return open_directory(directory, "nvme path", make=True, lasting=lasting)


def remove_stale(directory: Path) -> list[Path]:
    """Remove the swap files of dead runs in `directory` and return them. Create the directory if it is missing."""
    with swap_directory(directory, "old swap files") as (descriptor, names):
        return [directory / name for name in names if _removed(descriptor, name)]


@contextmanager
def swap_directory(directory: Path, wanted: str, *, lasting: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Open a directory for swap files, and create it if it is missing. Yield a descriptor and the names in it.

    Args:
        wanted: the kind of files that the caller looks for, for the error.
        lasting: see `open_directory`.

    Raises:
        StorageError: it cannot be created or used.
    """
    descriptor = open_swap_directory(directory, lasting=lasting)
    try:
        with os.scandir(descriptor) as entries:
            names = sorted(entry.name for entry in entries)
        yield descriptor, names
    except OSError as error:
        raise StorageError.of(error, f"cannot look for {wanted}", directory, None) from error
    finally:
        os.close(descriptor)


def _removed(directory: int, name: str) -> bool:
    """Remove a regular swap file of this user if its owner is dead. Return whether it was removed."""
    if not name.startswith(_PREFIX) or not name.endswith((_SUFFIX, _SUFFIX + _NEW)):
        return False
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or (name.endswith(_NEW) and time.time() - found.st_mtime < _NEW_FOR_S):
            return False
        file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return False  # another user's, or just removed
    try:
        if os.fstat(file).st_uid != os.geteuid():
            return False  # root could remove it, but another user may need it
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=directory)
    except OSError:
        return False  # its owner is alive, or the filesystem has no locks
    finally:
        os.close(file)
    return True


@dataclass(eq=False)
class _Place:
    """A name in an open directory, and the process that may remove it; its forked children may not.

    Attributes:
        kept: the file stays when its owner exits.
    """

    path: Path
    directory: int
    pid: int
    kept: bool = False

    def unlink(self) -> None:
        """Remove the file under both of its names, if it exists; raises OSError."""
        for name in (self.path.name + _NEW, self.path.name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.directory)


class OwnedFile:
    """A locked swap file. It is removed when its owner closes it, is collected, or exits, unless it is kept.

    Attributes:
        descriptor: the open file; all later opens go through it (see infinity.io.directory).
        remove: closes the file, and removes it if it is not kept.
    """

    def __init__(self, place: _Place, descriptor: int) -> None:
        self._place = place
        self.descriptor = descriptor
        self.remove = weakref.finalize(self, _remove_own, place, descriptor)

    @property
    def path(self) -> Path:
        """Its name, for messages."""
        return self._place.path

    def keep(self, name: str) -> None:
        """Make the file outlive this process, under another name; it must be flushed already. Raises StorageError."""
        place = self._place
        try:
            os.rename(place.path.name, name, src_dir_fd=place.directory, dst_dir_fd=place.directory)
            os.fsync(place.directory)
        except OSError as error:
            raise StorageError.of(error, f"cannot become {name}", place.path) from error
        place.path = place.path.with_name(name)
        place.kept = True
        _live.discard(place)

    def lose(self) -> None:
        """Undo `keep`: the file is removed when it is closed."""
        self._place.kept = False


def _remove_own(place: _Place, descriptor: int) -> None:
    if os.getpid() != place.pid:
        return  # a forked child must not remove its parent's file
    _live.discard(place)
    # Every action runs even if one fails, and no error is raised: reads and writes report a drive that has died.
    if not place.kept:
        _attempt(place.unlink, place.path)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for descriptors that children have inherited
    _attempt(lambda: os.close(descriptor), place.path)
    _attempt(lambda: os.close(place.directory), place.path)


def _attempt(action: Callable[[], None], path: Path) -> None:
    try:
        action()
    except OSError as error:
        _log.warning("%s could not be removed (%s): remove it by hand", path, error.strerror)


def create_owned(directory: Path, rank: int, nbytes: int, name: str | None = None) -> OwnedFile:
    """Create a locked swap file with reserved space.

    Args:
        name: of the file; unique by default.

    Raises:
        StorageError: the directory cannot be used or has too little space; no file is left behind.
    """
    remove_stale(directory)
    name = name or f"{_PREFIX}r{rank}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
    place = _Place(directory / name, open_swap_directory(directory), os.getpid())
    try:
        _remove_at_the_end(place)
        owned = OwnedFile(place, _create_locked(place))
    except BaseException as error:  # KeyboardInterrupt may come right after a system call
        _live.discard(place)
        _attempt(place.unlink, place.path)
        os.close(place.directory)
        if not isinstance(error, OSError):
            raise
        raise StorageError.of(error, "cannot create a swap file here", directory, None) from error
    _reserve(owned, directory, nbytes)
    return owned


def adopt_owned(directory: Path, name: str, nbytes: int, kept_bytes: int) -> OwnedFile:
    """Open and lock a file that another process has kept, and extend it to `nbytes` if it is shorter; it stays kept.

    Args:
        kept_bytes: its size when it was kept.

    Raises:
        StorageError: it is missing, a living process has it, or there is too little space.
    """
    place = _Place(directory / name, open_swap_directory(directory), os.getpid(), kept=True)
    descriptor = -1
    try:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=place.directory)
        check_private(descriptor)
        if (size := os.fstat(descriptor).st_size) < kept_bytes:
            raise OSError(errno.ENODATA, f"it has {size} bytes where {kept_bytes} were kept")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        if descriptor >= 0:
            os.close(descriptor)
        os.close(place.directory)
        if not isinstance(error, OSError):
            raise
        why = f"cannot take over the states of an earlier process ({error.strerror})"
        if isinstance(error, BlockingIOError):
            why = "a living process has these states: end it first, or give each run a directory of its own"
        raise StorageError.of(error, why, place.path) from error
    owned = OwnedFile(place, descriptor)
    _reserve(owned, directory, max(nbytes, size))
    return owned


def _reserve(owned: OwnedFile, directory: Path, nbytes: int) -> None:
    """Reserve a file's space. If there is too little, close the file."""
    try:
        allocate(owned.descriptor, nbytes)
    except OSError as error:
        owned.remove()
        raise StorageError.of(
            error,
            f"cannot reserve {nbytes} bytes for the model's states "
            f"({error.strerror}; {_free(directory)} bytes are free): {how_to_grow(error)}, or choose another nvme path",
            directory,
        ) from error


def _create_locked(place: _Place) -> int:
    """Create and lock the file; return its descriptor. Raises OSError."""
    name, new = place.path.name, place.path.name + _NEW
    descriptor = create_private(new, place.directory)
    try:
        _lock(descriptor, place.path)
        os.rename(new, name, src_dir_fd=place.directory, dst_dir_fd=place.directory)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, path: Path) -> None:
    """Lock a new file. If the filesystem has no locks, log the consequence, once per directory."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if path.parent not in _without_locks:
            _without_locks.add(path.parent)
            _log.warning(
                "%s: files cannot be locked here (%s), so swap files of dead runs are not recognised: remove "
                "infinity-*.swap by hand after a crash",
                path.parent,
                error.strerror,
            )


_without_locks: set[Path] = set()


def _free(directory: Path) -> int | str:
    try:
        return disk_usage(directory).free
    except OSError:
        return "an unknown number of"


# SIGTERM and SIGHUP end a Python process without its exit handlers, so the swap files would stay. If the application
# has not set a handler, ours removes the files and ends the process by the same signal.
_live: set[_Place] = set()


def _remove_at_the_end(place: _Place) -> None:
    _remove_at_exit()
    _live.add(place)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _die)


@cache
def _remove_at_exit() -> None:
    """Register the removal with `atexit`: the handler of `weakref` may be older than the import of infinity.

    It then runs after handlers that end the process at once, as on a rank that gave up a collective.
    """
    atexit.register(_remove_live)


def _remove_live() -> None:
    for place in list(_live):
        if place.pid == os.getpid():
            _attempt(place.unlink, place.path)


def _die(signum: int, frame: FrameType | None) -> None:
    _remove_live()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
