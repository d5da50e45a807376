"""Parse and format byte sizes."""

from __future__ import annotations

import re

from infinity.config.values import shown
from infinity.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_TOO_MANY = 2.0**62
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: int | float | str) -> int:
    """Return the bytes of `16MiB`, `2GB`, `5e8` or a plain number.

    Raises:
        ValueError: the value is no size. The message shows valid forms.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size")
    match = _PATTERN.fullmatch(str(value))
    if match is None or match.group(2).lower() not in _UNITS:
        raise ValueError(f"{shown(value)} is not a size; write bytes, or a number with a unit such as 16MiB or 2GB")
    nbytes = float(match.group(1)) * _UNITS[match.group(2).lower()]
    if nbytes >= _TOO_MANY:
        raise ValueError(f"{shown(value)} is more than any machine has")
    return int(nbytes)


def named_size(name: str, value: int | str) -> int:
    """Return `parse_size` of the argument `name`. Raise ConfigError, which names it, if it is no size."""
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def format_size(nbytes: float) -> str:
    """Return `nbytes` in a suitable binary unit: `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def size_to_set(nbytes: int) -> str:
    """Return a value for a key that must be at least `nbytes`: rounded up, as one word, such as `1.51GiB`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            hundredths = -(-nbytes * 100 // size)
            return f"{hundredths // 100}.{hundredths % 100:02d}{unit}"
    return f"{nbytes}B"
