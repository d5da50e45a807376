"""A directory of checkpoints, to which each checkpoint is added atomically."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from infinity.checkpoint.files import discard, is_file_name, read_plain, write_file
from infinity.checkpoint.format import MANIFEST
from infinity.errors import CheckpointError, ConfigError, StorageError
from infinity.io.directory import NO_ROOM, how_to_grow, make_lasting, sync_directory
from infinity.zero.ranks import Ranks
from infinity.zero.shared_directory import MARK

_LATEST = "latest"
_NEW = ".tmp-new-"  # + tag: a checkpoint that is being written
_OLD = ".tmp-old-"  # + tag: a checkpoint that is being replaced, see [Note: what is replaced]
_MARK = ".tmp-latest"
_MAX_TAG_BYTES = 4096
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOLCK)  # of a filesystem without locks


def latest_tag(directory: Path) -> str | None:
    """Return the tag of the checkpoint that was saved last; None if there is none.

    Raises:
        CheckpointError: the file `latest` is damaged.
    """
    path = directory / _LATEST
    try:
        path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        tag = read_plain(path, _MAX_TAG_BYTES).decode("utf-8").strip()
        check_tag(tag)
    except ValueError as error:  # no UTF-8, or no tag
        known = ", ".join(tags(directory))
        raise CheckpointError(
            f"{path} is damaged: {error}; write the name of a checkpoint into it ({known}), or give one as the tag"
        ) from error
    return tag


def tags(directory: Path) -> list[str]:
    """Return the names of all directories that may be checkpoints."""
    if not directory.is_dir():
        return []
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith(".") and path.is_dir())


def remove(directory: Path, tag: str) -> None:
    """Remove a checkpoint atomically. After a crash it is whole, or the next save removes the rest of it."""
    gone = directory / f"{_NEW}{tag}"
    (directory / tag).rename(gone)
    sync_directory(directory)  # otherwise a crash may leave its old name with only some of its files
    shutil.rmtree(gone, ignore_errors=True)


def check_tag(tag: str) -> None:
    """Raise ConfigError for a tag that is no plain file name: empty, hidden, or outside of the directory."""
    if not is_file_name(tag) or tag.startswith(".") or tag == _LATEST:
        raise ConfigError(f"checkpoint tag {tag!r} must be a plain directory name")


class Replacement:
    """A temporary directory for a new checkpoint, which then replaces `directory/tag`.

    `publish` does the replacement; until then an older checkpoint is unchanged. After a crash at any moment, either the
    old or the new checkpoint is whole. `begin` removes the leftovers of an interrupted save.

    Args:
        mark_latest: let the file `latest` name the new checkpoint, so that it is loaded by default.
    """

    def __init__(self, directory: Path, tag: str, *, mark_latest: bool = True) -> None:
        check_tag(tag)
        self.path = directory / f"{_NEW}{tag}"
        self._directory = directory
        self._tag = tag
        self._mark_latest = mark_latest
        self._held = ExitStack()
        self._begun = False

    def begin(self) -> None:
        """Make the temporary directory, and lock the directory of checkpoints.

        Raises:
            StorageError: the directory cannot be made.
            CheckpointError: another process is saving here, or `directory` or `latest` is not of the expected kind.
        """
        directory = self._directory
        try:
            self._held.enter_context(exclusive(directory))
            if self._mark_latest and (directory / _LATEST).is_dir():
                raise CheckpointError(f"{directory / _LATEST} is a directory, where the last tag is noted: remove it")
            _restore(directory)
            _remove_leftovers(directory)
            self.path.mkdir()
            self._begun = True
        except OSError as error:
            raise _storage_error(error, Path(error.filename or directory)) from error

    def publish(self) -> None:
        """Replace the old checkpoint by the new one. The files of the new one must be on the drive.

        Raises:
            OSError: a directory cannot be renamed.
        """
        sync_directory(self.path)
        _swap(self._directory, self.path, self._tag, self._mark_latest)
        self._begun = False

    def remove_replaced(self) -> None:
        """Remove the replaced checkpoint. The new one must be published in the directories of all ranks."""
        shutil.rmtree(self._directory / f"{_OLD}{self._tag}", ignore_errors=True)

    def close(self) -> None:
        """Remove an unpublished checkpoint, and release the lock."""
        # Suppressed, so that the caller sees the error of the write. The next save or load restores the directory.
        with self._held, suppress(OSError):
            if self._begun:
                self._begun = False
                shutil.rmtree(self.path, ignore_errors=True)
                _restore(self._directory)


@contextmanager
def replacing(directory: Path, tag: str, *, mark_latest: bool = True) -> Iterator[Path]:
    """Yield the directory of a `Replacement`, which is published if the block raises nothing.

    Raises:
        StorageError: writing failed, for example because the disk is full.
        CheckpointError: as `Replacement.begin`.
    """
    new = Replacement(directory, tag, mark_latest=mark_latest)
    with closing(new), writing(directory / tag):
        new.begin()
        yield new.path
        new.publish()
        new.remove_replaced()


@contextmanager
def writing(path: Path, what: str = "the checkpoint") -> Iterator[None]:
    """Convert an OSError of the block into a StorageError: "`what` cannot be written", with `path` as its file."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise _storage_error(error, path, what) from error


def restore_interrupted(directory: Path) -> set[str]:
    """Restore the name of a checkpoint whose replacement was interrupted between its two renames.

    Returns:
        Tags of replaced checkpoints that have not been removed yet.

    Raises:
        CheckpointError: a checkpoint cannot be renamed.
    """
    try:
        if not any(directory.glob(f"{_OLD}*")):
            return set()
        with locked(directory) as alone:
            if alone:  # otherwise a running save holds the lock, and it was not interrupted
                _restore(directory)
        return {path.name.removeprefix(_OLD) for path in directory.glob(f"{_OLD}*")}
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or directory}: a checkpoint that an interrupted save moved cannot be found or renamed "
            f"({error.strerror}): if there is a `{_OLD}<tag>`, rename it to `<tag>`"
        ) from error


def resolve_replaced(ranks: Ranks, directory: Path) -> None:
    """Restore replaced checkpoints after an interrupted save. All ranks call this together.

    [Note: what is replaced]
    A replaced checkpoint stays under another name until the new one is published in the directories of all ranks; rank
    0's directory is the last. After a crash before that, the old checkpoint counts. It gets its name back in every
    directory where the name is free, or where the new one has the name although rank 0's directory has the old one.

    Raises:
        CheckpointError: a checkpoint cannot be renamed.
    """
    left = ranks.each(lambda: restore_interrupted(directory), "what an interrupted save has left")
    replaced, found = left[ranks.rank], sorted(set().union(*left))
    if not found:
        return
    counts = ranks.on_rank_0(lambda: {tag: _content(directory / tag / MANIFEST) for tag in found})

    def resolve() -> None:
        if not directory.is_dir():
            return
        with locked(directory) as alone:
            for tag in sorted(replaced) if alone else ():  # otherwise a rank that shares the directory does it
                new, old = directory / tag, directory / f"{_OLD}{tag}"
                if counts[tag] is not None and _content(old / MANIFEST) == counts[tag] != _content(new / MANIFEST):
                    discard(directory / f"{_NEW}{tag}")
                    new.rename(directory / f"{_NEW}{tag}")
                    old.rename(new)
        sync_directory(directory)  # on all ranks, before the next save removes a replaced checkpoint on any rank

    try:
        ranks.each(resolve, "what an interrupted save has replaced")
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory} cannot be renamed: {error.strerror}") from error


def _content(path: Path) -> bytes | None:
    try:
        return read_plain(path)
    except CheckpointError:
        return None


def _swap(directory: Path, temporary: Path, tag: str, mark_latest: bool) -> None:
    final = directory / tag
    replaced = directory / f"{_OLD}{tag}"
    mark = directory / _MARK
    if mark_latest:
        write_file(mark, tag.encode())  # first, because a full disk could fail this write; the renames need no space
    if final.exists():
        final.rename(replaced)
        sync_directory(directory)  # both renames at once could reach the drive in any order
    temporary.rename(final)
    sync_directory(directory)
    if mark_latest:
        mark.rename(directory / _LATEST)
        sync_directory(directory)


def _restore(directory: Path) -> None:
    for replaced in directory.glob(f"{_OLD}*"):
        final = directory / replaced.name.removeprefix(_OLD)
        ours = (replaced / MANIFEST).is_file() and not replaced.is_symlink() and not final.name.startswith(".")
        if ours and not os.path.lexists(final):
            replaced.rename(final)


def _remove_leftovers(directory: Path) -> None:
    """Remove everything that an interrupted save left, and any other file with such a name."""
    found = [path for prefix in (_NEW, _OLD, MARK) for path in directory.glob(f"{prefix}*")]
    if found:
        # The process that renamed the replacement may have died before the new name was on the drive.
        sync_directory(directory)
    for stale in (*found, directory / _MARK):
        discard(stale)


def make_directory(path: Path) -> None:
    """Make a directory to save in, unless it exists. Its name is on the drive when this returns.

    Raises:
        CheckpointError: the path exists and is no directory.
        OSError: the directory cannot be made.
    """
    try:
        make_lasting(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"{error.filename or path} is no directory: remove it, or save elsewhere") from error


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Make a directory to save in, unless it exists, and hold its lock.

    Raises:
        CheckpointError: another process is saving in it, or the path is no directory.
        OSError: the directory cannot be made.
    """
    make_directory(directory)
    with locked(directory) as alone:
        if not alone:
            raise CheckpointError(f"{directory}: another process is saving a checkpoint here; wait for it to finish")
        yield


@contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Hold the directory's lock. Yield False if another process holds it, True also if the filesystem has no locks."""
    descriptor, owner = os.open(directory, os.O_RDONLY | os.O_DIRECTORY), os.getpid()
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield True
    finally:
        if os.getpid() == owner:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for descriptors that children have inherited
        os.close(descriptor)


def _storage_error(error: OSError, path: Path, what: str = "the checkpoint") -> StorageError:
    """Return the error of a failed write, with advice if the disk is full."""
    code = error.errno or errno.EIO
    hint = f"; {how_to_grow(error)} or save elsewhere" if code in NO_ROOM else ""
    return StorageError(code, f"{what} cannot be written: {os.strerror(code)}{hint}", str(path), 0)
