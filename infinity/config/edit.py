"""Change some keys of a configuration, and leave the rest of the file as it is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from infinity.config.keys import DEPRECATED
from infinity.config.values import shown
from infinity.errors import ConfigError

AN_OBJECT = "it must be an object of keys and values"


def edited(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a file's content with new values at dotted paths.

    Keys keep their order and their spelling (`{"tiering.tile_size": ...}` stays dotted). New keys are last in their
    section. A deprecated switch is removed if the section that has replaced it gets a value.

    Raises:
        ConfigError: the value of a section is no object.
    """
    result = copy.deepcopy(dict(values))
    for path, value in changes.items():
        for old, new in DEPRECATED.items():
            if path.startswith(f"{new}."):
                remove(result, old)
        _set(result, path, value)
    return result


def _set(section: dict[str, Any], path: str, value: Any) -> None:
    key, rest = _split(section, path)
    if not rest:
        section[key] = value
        return
    if section.get(key) is None:
        section[key] = {}
    if not isinstance(section[key], dict):
        raise ConfigError(f"{key} is {shown(section[key])}; {AN_OBJECT}")
    _set(section[key], rest, value)


def _split(section: Mapping[str, Any], path: str) -> tuple[str, str]:
    """Split `path` behind its longest prefix that is a key of the section, or else behind its first part."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        key = ".".join(parts[:count])
        if key in section:
            return key, ".".join(parts[count:])
    return parts[0], ".".join(parts[1:])


def remove(section: dict[str, Any], path: str) -> None:
    """Remove the key at a dotted path, if it exists."""
    key, rest = _split(section, path)
    if not rest:
        section.pop(key, None)
    elif isinstance(section.get(key), dict):
        remove(section[key], rest)
