"""A directory of checkpoints: each appears whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity.checkpoint.format import write_file
from infinity.errors import CheckpointError, ConfigError, StorageError

_LATEST = "latest"
_TEMPORARY = ".tmp-"


def latest_tag(directory: Path) -> str | None:
    """Tag of the checkpoint that was saved last; None if there is none.

    Raises:
        CheckpointError: the file that says so is damaged.
    """
    try:
        tag = (directory / _LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory / _LATEST} cannot be read: {error}") from error
    check_tag(tag)
    return tag


def check_tag(tag: str) -> None:
    """Refuse a tag that is no plain file name.

    Raises:
        ConfigError: it is empty, hidden, or leads elsewhere.
    """
    if not tag or tag.startswith(".") or Path(tag).name != tag or tag == _LATEST:
        raise ConfigError(f"checkpoint tag {tag!r} must be a plain directory name")


@contextmanager
def replacing(directory: Path, tag: str) -> Iterator[Path]:
    """A directory to fill, which takes the place of `directory/tag` if the block ends well.

    Nothing that was there before is touched until then; after a crash at any moment, either the old or the new
    checkpoint is whole. What an interrupted save left behind goes here.

    Raises:
        StorageError: writing failed, for example because the disk is full.
    """
    check_tag(tag)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for stale in directory.glob(f"{_TEMPORARY}*"):
            _restore_or_remove(directory, stale)
        temporary = directory / f"{_TEMPORARY}{tag}"
        temporary.mkdir()
    except OSError as error:
        raise _storage_error(error, directory) from error
    try:
        yield temporary
        _sync_directory(temporary)
        _swap(directory, temporary, tag)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise _storage_error(error, directory / tag) from error
        raise


def _swap(directory: Path, temporary: Path, tag: str) -> None:
    final = directory / tag
    replaced = directory / f"{_TEMPORARY}old-{tag}"
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    _sync_directory(directory)
    mark = directory / f"{_TEMPORARY}latest"
    write_file(mark, tag.encode())
    mark.rename(directory / _LATEST)
    _sync_directory(directory)
    shutil.rmtree(replaced, ignore_errors=True)


def _restore_or_remove(directory: Path, stale: Path) -> None:
    """Clean up after an interrupted save; if it died between its two renames, the old checkpoint comes back."""
    tag = stale.name.removeprefix(f"{_TEMPORARY}old-")
    if tag != stale.name and not (directory / tag).exists():
        stale.rename(directory / tag)
    elif stale.is_dir():
        shutil.rmtree(stale)
    else:
        stale.unlink()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(error: OSError, path: Path) -> StorageError:
    code = error.errno or errno.EIO
    hint = "; free some space or save elsewhere" if code in (errno.ENOSPC, errno.EDQUOT) else ""
    return StorageError(code, f"the checkpoint cannot be written: {os.strerror(code)}{hint}", str(path), 0)
