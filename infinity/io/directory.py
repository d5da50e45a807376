"""Directories for a run's own files, and the files in them, safe against replacement by other users.

[Note: files by descriptor]
Other users may be able to write to a drive's directory (/tmp, a scratch disk). A name in it cannot be trusted: between
two uses another user may put a link to another file in its place, and a run of root would write into that file. So a
file is created under a name that must not exist, and from then on used by its descriptor; for other flags the
descriptor is opened again (`reopened`). A directory that all users may write to without the sticky bit is refused,
since they could also remove and rename a run's files. Files that outlive the process (`lasting`) are safe only if no
user but root, and no group but this user's own, can rename them while no process has them open.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from infinity.errors import StorageError

_BLOCK_BYTES = 512  # of `st_blocks`
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a file that cannot grow


def open_directory(path: Path, kind: str = "path", *, make: bool = False, lasting: bool = False) -> int:
    """Open a directory in which a run's files are safe. Return a descriptor.

    Args:
        kind: name of the directory in errors.
        make: create it, and its parents, if it is missing; for this user alone.
        lasting: its files outlive the process, and a later process trusts them.

    Raises:
        StorageError: it is missing and cannot be created, is not a directory, or others may rename its files.
    """
    try:
        if make and lasting:
            make_lasting(path, 0o700)
        elif make:
            path.mkdir(0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            problem = _renaming(os.fstat(descriptor), lasting=lasting)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError.of(
            error, f"cannot use this {kind}{', nor create it' if make else ''} ({reason})", path, None
        ) from error
    if problem is not None:
        os.close(descriptor)
        raise StorageError(
            errno.EPERM,
            f"cannot use this {kind}: {problem} and has no sticky bit, so that other users could replace the files of "
            "this run; {} or chmod +t it, or give a directory of your own below it".format(
                "chmod o-w" if "everybody" in problem else "chown it, chmod g-w it"
            ),
            str(path),
            None,
        )
    return descriptor


def make_lasting(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its parents, unless they exist. Their names are on the drive when this returns.

    Raises OSError. The name of an existing directory is flushed, too: the process that made it may have died before.
    """
    made = [each for each in path.parents if not each.exists()]
    path.mkdir(mode, parents=True, exist_ok=True)
    for each in (*reversed(made), path):
        if each.stat().st_dev == each.parent.stat().st_dev:  # otherwise it is a mount point, whose name is elsewhere
            with suppress(PermissionError):  # a parent that may not be read cannot be flushed
                sync_directory(each.parent)


def sync_directory(path: Path) -> None:
    """Flush a directory's names to the drive; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _renaming(found: os.stat_result, *, lasting: bool) -> str | None:
    """Describe who else may rename this user's files in a directory; None if no other user may."""
    mode = found.st_mode
    if mode & stat.S_ISVTX:
        return None
    if mode & stat.S_IWOTH:
        return "it is writable for everybody"
    if lasting and found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}, not to user {os.geteuid()} who runs this,"
    if lasting and mode & stat.S_IWGRP and found.st_gid not in (os.getegid(), 0):
        return f"it is writable for group {found.st_gid}, which is not this user's own,"
    return None


def create_private(path: str | Path, directory: int | None = None) -> int:
    """Create a file that only its owner can read. Return a descriptor; raises OSError.

    Args:
        directory: descriptor that a relative path is relative to.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC
    return os.open(path, flags, 0o600, dir_fd=directory)


def check_private(descriptor: int) -> None:
    """Check that only this user could create or write an open file, as with `create_private`.

    In a directory with the sticky bit any user may create a file under an expected name.

    Raises:
        OSError: the file is no plain file, another user's, writable by others, or has a second name.
    """
    problem = foreign(os.fstat(descriptor))
    if problem is not None:
        raise OSError(errno.EPERM, f"{problem}: if its content can be trusted, make it your own (a copy with mode 600)")


def foreign(found: os.stat_result) -> str | None:
    """Describe why another user may have created a file or can write to it; None if it is this user's own."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no plain file"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not to user {os.geteuid()} who runs this"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    if found.st_nlink != 1:
        return f"it has {found.st_nlink} names (hard links)"
    return None


def reopened(descriptor: int) -> Path:
    """Return a path that opens the file of a descriptor, even if its name has changed."""
    return Path(f"/proc/self/fd/{descriptor}")


def allocate(descriptor: int, nbytes: int, start: int = 0) -> None:
    """Allocate a range of a file whose space below `start` is allocated. The file grows to the end of the range.

    The free space is compared first, because a filesystem may use all free space before it refuses. In the meantime,
    other programs could not write to the drive.

    Raises:
        OSError: there is too little space.
    """
    if not nbytes:
        return
    drive = os.fstatvfs(descriptor)
    missing = start + nbytes - _BLOCK_BYTES * os.fstat(descriptor).st_blocks
    if drive.f_blocks and missing > drive.f_bavail * drive.f_frsize:  # some filesystems do not say how large they are
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(descriptor, start, nbytes)


def how_to_grow(error: OSError) -> str:
    """Return what to do about an error of `NO_ROOM`. The caller adds where else the file could be."""
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f)"
    return "free some space"


def reserve(descriptor: int, nbytes: int, path: Path) -> None:
    """Reserve the first `nbytes` of a file.

    Raises:
        StorageError: there is too little space.
    """
    try:
        allocate(descriptor, nbytes)
    except OSError as error:
        raise StorageError.of(error, f"cannot reserve {nbytes} bytes", path) from error
