"""Read JSON files with errors that name the place, and write them atomically."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.config.values import shown
from infinity.errors import ConfigError

_MOST_BYTES = 16 << 20
_MOST_OF_ANY = 1 << 30
_MOST_LEVELS = 32
_MOST_DIGITS = 400  # more digits than the largest float has


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ConfigError: the file cannot be read, or holds no JSON object. The message says what is wrong and where.
    """
    text = _text(path)
    try:
        values = json.loads(text, object_pairs_hook=_without_duplicates, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply for a configuration; is it the right file?") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def write_json(path: Path, values: Mapping[str, Any], what: str) -> None:
    """Write a file atomically. Raise ConfigError, which names `what`, if it cannot be written."""
    text = json.dumps(values, indent=2) + "\n"
    try:
        if path.exists() and not path.is_file():  # such as /dev/stdout, which a rename would replace
            path.write_text(text, encoding="utf-8")
            return
        target = Path(os.path.realpath(path))  # keeps a symbolic link
        partial = target.with_name(target.name + ".part")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{what} cannot be written to {path}: {error.strerror}") from error


def read_regular(path: str | Path, most_bytes: int = _MOST_OF_ANY) -> bytes:
    """Return the content of a regular file. A named pipe is refused: the read would block until it has a writer.

    Raises:
        OSError: the file cannot be read, is no regular file, or is larger than `most_bytes`.
        ValueError: no file can have this name.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file (a directory, pipe or device)", str(path))
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes; is it the right file?", str(path))
        return file.read()


def read_text(path: str | Path) -> str:
    """Return the UTF-8 text of a regular file. Raises as `read_regular`."""
    return read_regular(path).decode("utf-8")


def _text(path: str | Path) -> str:
    try:
        content = read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:  # a null character, or a character that no file name can have
        raise ConfigError(f"cannot read the configuration {shown(str(path))}: {error}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 (byte 0x{content[error.start]:02x} at offset {error.start}): save it as UTF-8"
        ) from error


def _whole(digits: str) -> int | float:
    """Parse an integer. One that is too long becomes infinite, which is then refused with the name of its key."""
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse double keys: Python's parser would silently keep the last one."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ConfigError(f"configuration key `{key}` is given twice in one section; remove one")
        values[key] = value
    return values


def check_values(values: Any, path: str = "", level: int = 0) -> None:
    """Refuse nesting that is too deep and integers that are too long to be shown, with the name of their key."""
    if level > _MOST_LEVELS:
        raise ConfigError(f"{path[:80]}... is nested more than {_MOST_LEVELS} levels deep; no key is")
    if isinstance(values, Mapping):
        for key, value in values.items():
            check_values(value, f"{path}.{key}" if path else str(key), level + 1)
    elif isinstance(values, (list, tuple)):
        for index, value in enumerate(values):
            check_values(value, f"{path}.{index}", level + 1)
    elif isinstance(values, int) and values.bit_length() > 1024:  # repr and float refuse it
        raise ConfigError(f"{path} is a number of more than 300 digits; write a smaller one")
