"""Read and write small files of a checkpoint. Content and names are not trusted, and no read blocks on a pipe."""

from __future__ import annotations

import json
import os
import reprlib
import shutil
import stat
from pathlib import Path
from typing import Any, BinaryIO

from infinity.config.paths import is_path
from infinity.errors import CheckpointError

MAX_BYTES = 1 << 30  # the largest file that is read as a whole


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading.

    Raises:
        CheckpointError: the file cannot be opened, or is a directory, pipe, socket or device, which could block.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a name that no file can have
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    if not plain:
        os.close(descriptor)
        raise CheckpointError(f"{path} cannot be read: it is no plain file")
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, limit_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a plain file.

    Raises:
        CheckpointError: the file cannot be read, or is larger than `limit_bytes`.
    """
    with open_plain(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            content = file.read() if size <= limit_bytes else b""
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if size > limit_bytes:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, more than {limit_bytes}")
    return content


def parse_json(content: bytes) -> Any:
    """Parse UTF-8 JSON. Refuse objects with a double key.

    Raises:
        ValueError: the content is no such JSON, is nested too deeply, or has a number that is too long.
    """
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def brief(value: Any) -> str:
    """Return a short text of a value that was read from a file, for messages."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"<{type(value).__name__}>"


def is_file_name(name: str) -> bool:
    """Whether a name is that of a file within a directory, without a path."""
    return is_path(name) and Path(name).name == name and name not in (".", "..")


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the drive. Raise OSError if the path exists, also as a symbolic link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def discard(path: Path) -> None:
    """Remove the file, directory or symbolic link at a path, if there is one. Links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
