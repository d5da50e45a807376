"""A training run: its name, its model, and its locks on the directories that it saves in.

[Note: who owns a save directory]
A run holds an exclusive `flock` on a file in each directory that it saves in, from its first save there until its
engine is closed. The file names the process. The kernel releases the lock when the process ends, unless a forked child
is still alive. In this case the file names a dead process, and the next run replaces the file. The check and the
replacement are done under the lock on the directory itself.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import uuid
import weakref
from pathlib import Path
from typing import Any

from torch import nn

from infinity.checkpoint.directory import NO_LOCKS, exclusive, writing
from infinity.checkpoint.files import brief, parse_json
from infinity.checkpoint.identity import model_identity
from infinity.errors import CheckpointError

LOCK = ".run-lock"
_MAX_HOLDER_BYTES = 4096
_log = logging.getLogger(__name__)


class Run:
    """One training run: of one engine, or of several that continued from one another's checkpoints.

    Attributes:
        id: a random name. A run that loads a checkpoint takes the checkpoint's.
        model: the identity of the model, see `identity.py`, without values that training has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.id = uuid.uuid4().hex
        self.model = model_identity(model)
        self._locks: dict[Path, int | None] = {}  # descriptors; None where there are no locks
        self._owner = os.getpid()
        weakref.finalize(self, _release, self._locks, self._owner)

    def claim(self, directory: Path) -> None:
        """Lock a directory against saves of other runs. Make the directory if it does not exist.

        Raises:
            CheckpointError: another run saves in it.
            StorageError: the directory cannot be made or written.
        """
        path = directory.absolute()
        if path in self._locks:
            return
        with writing(path), exclusive(path):
            self._locks[path] = _lock(path / LOCK, self.id)

    def unclaim(self) -> None:
        """Release all directories, so that other runs may save there."""
        _release(self._locks, self._owner)


def _lock(path: Path, run: str) -> int | None:
    """Lock the file and return its descriptor; None on a filesystem without locks. The caller holds the directory."""
    descriptor = _open(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            replaced = not _is_at(path, descriptor)  # its owner removed the file after it was opened here
        except BlockingIOError:
            holder = _holder(descriptor)
            if not _is_dead(holder):
                raise CheckpointError(
                    f"{path.parent}: another run saves its checkpoints here: process {brief(holder.get('pid'))} on "
                    f"{brief(holder.get('host'))}, run {brief(holder.get('run'))}. Give each run a directory of its "
                    "own, or end that one (engine.close())"
                ) from None
            path.unlink()
            replaced = True
        if replaced:
            stale, descriptor = descriptor, _open(path)
            os.close(stale)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        try:
            os.pwrite(descriptor, json.dumps(_this_process() | {"run": run}).encode(), 0)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # an empty file is locked as well
                raise
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and error.errno in NO_LOCKS:
            _log.warning("%s: the filesystem has no locks, so other runs are not kept from saving here", path.parent)
            return None
        raise
    return descriptor


def _open(path: Path) -> int:
    """Open the lock file, and make it if needed. Raise CheckpointError if the path is not a plain file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise CheckpointError(f"{path} is no plain file: remove it") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # a second hard link may be a file that is needed
        os.close(descriptor)
        raise CheckpointError(f"{path} is no plain file: remove it")
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file still has this path."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _this_process() -> dict[str, Any]:
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115  (its target is no path)
    except OSError:
        namespace = ""
    return {"pid": os.getpid(), "host": socket.gethostname(), "namespace": namespace}


def _holder(descriptor: int) -> dict[str, Any]:
    try:
        content = parse_json(os.pread(descriptor, _MAX_HOLDER_BYTES, 0))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the process is known to have ended: it was on this machine, in the same namespace of process ids."""
    here = _this_process()
    pid = holder.get("pid")
    if type(pid) is not int or pid <= 0 or any(holder.get(key) != here[key] for key in ("host", "namespace")):
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def _release(locks: dict[Path, int | None], owner: int) -> None:
    """Unlock and remove the lock files. In a forked child of the owner, only close the descriptors."""
    for path, descriptor in locks.items():
        if descriptor is None:
            continue
        try:
            if os.getpid() == owner:
                if _is_at(path / LOCK, descriptor):
                    (path / LOCK).unlink()
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for descriptors that children have inherited
        except OSError as error:
            _log.warning("%s cannot be unlocked: %s", path, error)
        finally:
            os.close(descriptor)
    locks.clear()
