"""The profile as a file: one JSON object whose names carry their units.

    {"format": "infinity-profile", "version": 4, "taken_at_unix_s": ..., "took_s": ..., "infinity": "0.1.0",
     "drives": [{"path", "filesystem", "device", "backend", "direct", "cautions": [],
                 "read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s"}],
     "drives_together": {"read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s"}; null for one drive,
     "contention": [{"part", "beside": [], "rows", "share"}],
     "optimizer": [{"format", "threads", "params_per_s", "bytes_per_s"}],
     "memory": [{"threads", "triad_bytes_per_s", "in_place_bytes_per_s", "fresh_bytes_per_s"}],
     "matmul": [{"device", "dtype", "rows", "flop_per_s"}],
     "products": [{"device", "dtype", "layout", "rows", "flop_per_s"}],
     "operations": [{"device", "operation_s"}],
     "link": {"device", "to_device_bytes_per_s", "to_host_bytes_per_s",
              "both_to_device_bytes_per_s", "both_to_host_bytes_per_s"}; null without a device,
     "ranks": {"count", "on_this_machine", "backend", "shard_bytes",
               "all_gather_bytes_per_s", "reduce_scatter_bytes_per_s"}; null for one process}

What was not measured is null. A rate is that of a median or of one long run. In `mixed`, drives read and write at once,
and the rate is the sum of both. `contention` gives the share of its rate that a part keeps while the parts in `beside`
run: "compute", which is products of `rows` rows on the CPU; "optimizer"; and "disk" in `mixed`. The rate of a
collective counts the bytes that a rank receives (all-gather) or sends (reduce-scatter): (count - 1) shards. `products`
are those of a linear layer with `rows` rows, by the layout of the operands: "nn", "nt" (the second is transposed), "tn"
(the first is); and "attention", forward and backward. `fresh` is the rate at which the system provides new memory.
`operation_s` is the overhead of an operation in the forward or backward pass of a model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from infinity.config.read import read_text
from infinity.config.typed import Amount, Count, Positive, Rate, parsed
from infinity.errors import ConfigError

PROFILE_VERSION = 4
_FORMAT = "infinity-profile"
_PARTS = (
    "drives",
    "drives_together",
    "contention",
    "optimizer",
    "memory",
    "matmul",
    "products",
    "operations",
    "link",
    "ranks",
)


def new_record(infinity_version: str, taken_at_s: float, took_s: float, parts: dict[str, Any]) -> dict[str, Any]:
    """Return a profile of these parts. Missing parts are null."""
    head = {
        "format": _FORMAT,
        "version": PROFILE_VERSION,
        "taken_at_unix_s": taken_at_s,
        "took_s": took_s,
        "infinity": infinity_version,
    }
    return head | {name: parts.get(name) for name in _PARTS}


def read_profile(path: Path) -> dict[str, Any]:
    """Read a profile that `infinity profile --output` wrote.

    Raises:
        ConfigError: the file is no profile, or has a version that this infinity does not know.
    """
    try:
        text = read_text(path)
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"profile {path}: {error}") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ConfigError(f"{path} is no profile: write one with `infinity profile --output {path}`")
    version = found.get("version")
    if version != PROFILE_VERSION:
        raise ConfigError(
            f"profile {path} has version {version}, and this infinity reads {PROFILE_VERSION}: measure it again"
        )
    missing = [name for name in _PARTS if name not in found]
    if missing:
        raise ConfigError(f"profile {path} lacks {', '.join(missing)}: measure it again")
    try:
        parsed(_Profile, text)
    except ValueError as error:
        raise ConfigError(f"profile {path} is damaged: {error}: measure it again") from error
    return found


# Schema of a profile, see [Note: typed records] #


@dataclass(frozen=True)
class _Drives:
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate
    mixed_bytes_per_s: Rate


@dataclass(frozen=True)
class _Contention:
    part: str
    beside: list[str]
    rows: Positive | None
    share: Amount


@dataclass(frozen=True)
class _Optimizer:
    format: str
    threads: Positive
    params_per_s: Rate


@dataclass(frozen=True)
class _Memory:
    threads: Positive
    triad_bytes_per_s: Rate
    fresh_bytes_per_s: Rate


@dataclass(frozen=True)
class _Product:
    device: str
    dtype: str
    layout: str
    rows: Count  # 0 for attention
    flop_per_s: Rate


@dataclass(frozen=True)
class _Operation:
    device: str
    operation_s: Amount


@dataclass(frozen=True)
class _Link:
    device: str
    to_device_bytes_per_s: Rate
    to_host_bytes_per_s: Rate
    both_to_device_bytes_per_s: Rate
    both_to_host_bytes_per_s: Rate


@dataclass(frozen=True)
class _Ranks:
    all_gather_bytes_per_s: Rate
    reduce_scatter_bytes_per_s: Rate


@dataclass(frozen=True)
class _Profile:
    """The parts that the planner reads."""

    drives: list[_Drives] | None
    drives_together: _Drives | None
    contention: list[_Contention] | None
    optimizer: list[_Optimizer]
    memory: Annotated[list[_Memory], Field(min_length=1)]
    products: list[_Product] | None
    operations: list[_Operation] | None
    link: _Link | None
    ranks: _Ranks | None
