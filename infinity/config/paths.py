"""Expand and check paths from files and commands."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from infinity.config.values import shown
from infinity.errors import ConfigError

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


def expanded_path(text: str) -> str:
    """Return the path with `~`, `~user`, `$NAME` and `${NAME}` replaced, as in a shell.

    Raises:
        ValueError: no file can have this name; or it is a URL or a path of Windows, or names a user or a variable that
            does not exist. Without the check, a directory of that name would be made.
    """
    if not is_path(text):
        raise ValueError(f"{shown(text)} must be a path: not empty, without null characters, encodable")
    if _URL.match(text):
        raise ValueError(f"{text} is a URL; it must be the path of a mounted filesystem, such as /local_nvme")
    if _DRIVE.match(text):
        raise ValueError(f"{text} is a path of Windows; under WSL its drive is mounted at /mnt/{text[0].lower()}")
    expanded = os.path.expandvars(text)
    missing = _VARIABLE.search(expanded)
    if missing is not None:
        raise ValueError(f"{text} names {missing[0]}, which is not set in the environment")
    expanded = os.path.expanduser(expanded)  # noqa: PTH111  (a Path would raise, and drop what a URL repeats)
    if expanded.startswith("~"):
        raise ValueError(f"{text} names a user's home that does not exist; write ./{text} for a directory of that name")
    return expanded


def check_apart(what: str, paths: Iterable[Path]) -> None:
    """Check that each of these directories is given once.

    Args:
        what: the key or option, for the message.

    Raises:
        ConfigError: two paths are the same directory.
    """
    found: dict[str, Path] = {}
    for path in paths:
        place = os.path.realpath(path)
        if place in found:
            both = f"{path} twice" if path == found[place] else f"{found[place]} and {path}, which are one directory"
            raise ConfigError(f"{what} has {both}: give each directory once")
        found[place] = path


def is_path(text: str) -> bool:
    """Whether the system accepts this as the path of a file."""
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except (UnicodeEncodeError, TypeError):  # a caller's value, of any type
        return False
