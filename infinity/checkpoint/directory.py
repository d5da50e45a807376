"""A directory of checkpoints: each appears whole or not at all."""

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
_NEW = ".tmp-new-"  # + tag: being filled
_OLD = ".tmp-old-"  # + tag: is being replaced, see [Note: what is replaced]
_MARK = ".tmp-latest"
_MAX_TAG_BYTES = 4096
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOLCK)  # where a filesystem has none


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
    """Names of all directories that may be checkpoints."""
    if not directory.is_dir():
        return []
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith(".") and path.is_dir())


def remove(directory: Path, tag: str) -> None:
    """Remove a checkpoint, so that a crash leaves it whole or leaves what the next save removes."""
    gone = directory / f"{_NEW}{tag}"
    (directory / tag).rename(gone)
    sync_directory(directory)  # else its files may go before its name
    shutil.rmtree(gone, ignore_errors=True)


def check_tag(tag: str) -> None:
    """Refuse a tag that is no plain file name: one that is empty, hidden, or leads elsewhere."""
    if not is_file_name(tag) or tag.startswith(".") or tag == _LATEST:
        raise ConfigError(f"checkpoint tag {tag!r} must be a plain directory name")


class Replacement:
    """A directory to fill, which then takes the place of `directory/tag`.

    Nothing that was there before is touched until `publish`; after a crash at any moment, either the old or the new
    checkpoint is whole. What an interrupted save left behind goes at `begin`.

    Args:
        mark_latest: make it the one that is loaded by default.
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
        """Make the directory.

        Raises:
            StorageError: it cannot be made.
            CheckpointError: another process is saving in this directory, or it has something of another kind at a
                place that is needed.
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
        """Have the new checkpoint be there; what it is made of must be on the drive.

        Raises:
            OSError: it cannot be renamed.
        """
        sync_directory(self.path)
        _swap(self._directory, self.path, self._tag, self._mark_latest)
        self._begun = False

    def remove_replaced(self) -> None:
        """Remove what it has taken the place of, once the new checkpoint is in the directories of all ranks."""
        shutil.rmtree(self._directory / f"{_OLD}{self._tag}", ignore_errors=True)

    def close(self) -> None:
        """Remove what is not published, and let others save here."""
        with self._held, suppress(OSError):  # the next save or load restores it; the error of writing is to be seen
            if self._begun:
                self._begun = False
                shutil.rmtree(self.path, ignore_errors=True)
                _restore(self._directory)


@contextmanager
def replacing(directory: Path, tag: str, *, mark_latest: bool = True) -> Iterator[Path]:
    """A `Replacement` to fill, which is published if the block ends well.

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
    """Turn errors of files into a StorageError that says that `what`, at `path`, cannot be written."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise _storage_error(error, path, what) from error


def restore_interrupted(directory: Path) -> set[str]:
    """If a save died between its two renames, give the checkpoint that it was to replace its name back.

    Returns:
        Tags of checkpoints that are replaced and still there.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    try:
        if not any(directory.glob(f"{_OLD}*")):
            return set()
        with locked(directory) as alone:
            if alone:  # else a save is under way, which has nothing to be restored
                _restore(directory)
        return {path.name.removeprefix(_OLD) for path in directory.glob(f"{_OLD}*")}
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or directory}: what an interrupted save was to replace cannot be looked for or renamed "
            f"({error.strerror}): if there is a `{_OLD}<tag>`, rename it to `<tag>`"
        ) from error


def resolve_replaced(ranks: Ranks, directory: Path) -> None:
    """See [Note: what is replaced]; all ranks call this together.

    [Note: what is replaced]
    A checkpoint that is replaced stays under another name until the new one is in the directories of all ranks, of
    which rank 0's is the last. A crash before that leaves the old one: it gets its name back where nothing has it, and
    where the new one has it although rank 0 has the old one still.

    Raises:
        CheckpointError: it cannot be renamed.
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
            for tag in sorted(replaced) if alone else ():  # else a rank beside this one does
                new, old = directory / tag, directory / f"{_OLD}{tag}"
                if counts[tag] is not None and _content(old / MANIFEST) == counts[tag] != _content(new / MANIFEST):
                    discard(directory / f"{_NEW}{tag}")
                    new.rename(directory / f"{_NEW}{tag}")
                    old.rename(new)
        sync_directory(directory)  # everywhere, before the next save removes what is replaced anywhere

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
        write_file(mark, tag.encode())  # first: from here on nothing needs space
    if final.exists():
        final.rename(replaced)
        sync_directory(directory)  # before the name has two claimants, of which a crash might leave the new one alone
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
    """What an interrupted save left, and whatever else has such a name."""
    found = [path for prefix in (_NEW, _OLD, MARK) for path in directory.glob(f"{prefix}*")]
    if found:
        # What they were replaced by has its name from a process that may have died before that was on the drive.
        sync_directory(directory)
    for stale in (*found, directory / _MARK):
        discard(stale)


def make_directory(path: Path) -> None:
    """Make a directory to save in, unless it is there; a crash leaves its name.

    Raises:
        CheckpointError: there is something else.
        OSError: it cannot be made.
    """
    try:
        make_lasting(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"{error.filename or path} is no directory: remove it, or save elsewhere") from error


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Make a directory to save in, unless it is there, and hold its lock.

    Raises:
        CheckpointError: another process is saving in it, or it is something else.
        OSError: it cannot be made.
    """
    make_directory(directory)
    with locked(directory) as alone:
        if not alone:
            raise CheckpointError(f"{directory}: another process is saving a checkpoint here; wait for it to finish")
        yield


@contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Hold the directory's lock; False if another process has it. Where a filesystem has no locks, all go ahead."""
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
    """An error of writing, with what to do about it."""
    code = error.errno or errno.EIO
    hint = f"; {how_to_grow(error)} or save elsewhere" if code in NO_ROOM else ""
    return StorageError(code, f"{what} cannot be written: {os.strerror(code)}{hint}", str(path), 0)
