"""The ready configurations: the files of `configs/`, installed with the package, by name."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

from infinity.cli.arguments import path_argument
from infinity.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_PLACES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # installed; in a checkout, or an editable install


def ready_configurations() -> dict[str, Path]:
    """Return the file of every ready configuration, by its name without `.json`.

    Raises:
        ConfigError: their directory is missing.
    """
    for place in _PLACES:
        found = sorted(place.glob("*.json"))
        if found:
            return {path.stem: path for path in found}
    raise ConfigError(f"there are no ready configurations in {_PLACES[0]}: install infinity again, or give a file")


def config_argument(text: str) -> Path:
    """Argparse type: a configuration file, or the name of a ready configuration; an existing file takes precedence."""
    path = path_argument(text)
    if path.suffix or len(path.parts) != 1 or path.exists():
        return path
    try:
        return ready_configuration(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def ready_configuration(name: str) -> Path:
    """Return the file of a ready configuration.

    Raises:
        ConfigError: the name is unknown; the message lists the names.
    """
    ready = ready_configurations()
    if name in ready:
        return ready[name]
    nearest = difflib.get_close_matches(name, ready, 1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(
        f"{name} is neither a file nor a ready configuration: {hint}`infinity configs` lists them ({', '.join(ready)})"
    )
