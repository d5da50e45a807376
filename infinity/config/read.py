"""Read JSON files, with an error that names the place where a file is not JSON, and write them whole."""

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
_MOST_DIGITS = 400  # more than a float's largest value has


def read_json(path: str | Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        ConfigError: it cannot be read, or holds something else; the message says what and where.
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
    """Write a file whole or not at all; a ConfigError if it cannot be written."""
    text = json.dumps(values, indent=2) + "\n"
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, which a rename would replace
            path.write_text(text, encoding="utf-8")
            return
        target = Path(os.path.realpath(path))  # a link stays one
        partial = target.with_name(target.name + ".part")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{what} cannot be written to {path}: {error.strerror}") from error


def read_regular(path: str | Path, most_bytes: int = _MOST_OF_ANY) -> bytes:
    """The content of a regular file. Nobody is waited for: a named pipe that has no writer would keep us for ever.

    Raises:
        OSError: it cannot be read, is something else than a regular file, or is larger than any of its kind.
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
    """The UTF-8 text of a regular file, see `read_regular`; raises the same."""
    return read_regular(path).decode("utf-8")


def _text(path: str | Path) -> str:
    try:
        content = read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:  # a null character, or what no filename can hold
        raise ConfigError(f"cannot read the configuration {shown(str(path))}: {error}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 (byte 0x{content[error.start]:02x} at offset {error.start}): save it as UTF-8"
        ) from error


def _whole(digits: str) -> int | float:
    """An integer; one that nothing could use is infinite, which is refused under its key as such."""
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python's parser keeps the last of two equal keys, silently."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ConfigError(f"configuration key `{key}` is given twice in one section; remove one")
        values[key] = value
    return values


def check_values(values: Any, path: str = "", level: int = 0) -> None:
    """Refuse by its key what no key can use and what would break whoever shows it: endless nesting, endless numbers."""
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
