"""Check values of `optimizer.params` and `scheduler.params`, which the schema does not know. Errors name the key."""

from __future__ import annotations

import math
from typing import Any

from infinity.errors import ConfigError

_SHOWN_CHARS = 100


def shown(value: Any) -> str:
    """Return the text of a value for a message, cut off after 100 characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def boolean(value: Any) -> Any:
    """Convert the strings "true" and "false", which files often have, to bool. Return any other value unchanged."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def switch(path: str, value: Any) -> bool:
    """Return a bool that is given as such or as a string. Raise ConfigError, which names `path`, for other values."""
    value = boolean(value)
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{path} is {shown(value)}; it must be true or false")


def number(path: str, value: Any, *, least: float = -math.inf, below: float = math.inf) -> float:
    """Return a finite number that is at least `least` and less than `below`. Strings are accepted.

    Raises:
        ConfigError: the value at `path` is no such number.
    """
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if math.isfinite(found) and least <= found < below:
        return found
    demand = "a finite number"
    demand += f" of at least {least:g}" if least > -math.inf else ""
    demand += f", less than {below:g}" if below < math.inf else ""
    raise ConfigError(f"{path} is {shown(value)}; it must be {demand}")


def whole(path: str, value: Any, *, least: int) -> int:
    """Return a whole number of at least `least`. Whole floats are accepted, because JSON reads 5e8 as a float.

    Raises:
        ConfigError: the value at `path` is no such number.
    """
    try:
        found = number(path, value, least=least)
    except ConfigError:
        found = math.nan
    if not found.is_integer():
        raise ConfigError(f"{path} is {shown(value)}; it must be a whole number of at least {least}")
    return int(found)
