"""Types and checks of arguments that several commands take."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from infinity.config import Config, check_apart, expanded_path, parse_size
from infinity.config.paths import is_path
from infinity.errors import ConfigError


def size_argument(text: str) -> int:
    """Argparse type: parse a size such as `16MiB` to bytes."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def path_argument(text: str) -> Path:
    """Argparse type: a path with `~` expanded, which shells do not do in `--path=~/swap`.

    Callers must make it absolute before they pass it to another process or write it to a file.
    """
    if not text:  # for example from an unset variable; Path would take it as the working directory
        raise argparse.ArgumentTypeError('the path is empty; give ".", if the working directory is meant')
    try:
        return Path(expanded_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def name_argument(text: str) -> str:
    """Argparse type: a name, or a path as in `path_argument`."""
    return str(path_argument(text)) if text.startswith("~") or not is_path(text) else text


def check_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Raise ConfigError if one of these options is given and smaller than `least`."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")


def check_directory(option: str, path: Path) -> None:
    """Check, before long work, that its results can be written into a directory, which need not exist.

    Raises:
        ConfigError: the directory, or the nearest directory above it, is a file or cannot be written.
    """
    place = path.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise ConfigError(f"{option} {path}: {place} is no directory: give another path")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: {place} cannot be written: give another path, or change its permissions")


def check_file(option: str, path: Path) -> None:
    """Check, before long work, that its results can be written into a file.

    Raises:
        ConfigError: the file is a directory or cannot be written, or its directory does not exist.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory: give a file")
    if path.exists() and not path.is_file():
        return  # a device such as /dev/stdout: its directory need not be writable
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no such directory")
    check_directory(option, path.absolute().parent)


def drive_paths(given: Sequence[Path] | None, config: Config) -> tuple[Path, ...]:
    """Return the directories of --path, or else of the configuration's drives, or else the working directory.

    Raises:
        ConfigError: two of them are the same directory.
    """
    paths = tuple(path.absolute() for path in given or [nvme.path for nvme in config.tiering.nvme] or [Path()])
    check_apart("--path", paths)
    return paths


def program_argument(text: str) -> Path:
    """Argparse type: the absolute path of a program. A name without a slash is looked up in PATH, as in a shell."""
    if os.sep in text:
        return path_argument(text).absolute()
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no program in PATH; give its path")
    return Path(found).absolute()


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def duration_argument(text: str) -> float:
    """Argparse type: parse `90`, `90s`, `5m` or `1.5h` to seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90s, 5m or 1.5h")
    return float(match[1]) * _SECONDS[match[2]]
