"""Values of `optimizer.params` and `scheduler.params`, whose keys depend on the type, checked under their names."""

from __future__ import annotations

import math
from typing import Any

from infinity.errors import ConfigError

_SHOWN_CHARS = 100


def shown(value: Any) -> str:
    """A value in a message, as much as a reader would look at."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def boolean(value: Any) -> Any:
    """Common files write "true" for true."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def switch(path: str, value: Any) -> bool:
    """True or false, as JSON's or as a string; a ConfigError that names `path` for anything else."""
    value = boolean(value)
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{path} is {shown(value)}; it must be true or false")


def number(path: str, value: Any, *, least: float = -math.inf, below: float = math.inf) -> float:
    """A finite number, at least `least` and less than `below`; common files write some as strings.

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
    """A whole number of at least `least`; JSON reads 5e8 as a float.

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
