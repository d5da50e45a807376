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

What was not measured is null. A rate is that of a median or of one long run. Drives read and write at once in
`mixed`, whose rate is the sum of both. Contention is the share of its own speed that a part has left beside one or more
others: "compute" where that is the CPU's, with products of so many `rows`, "optimizer", and "disk" in `mixed`. A
collective's rate is that of the bytes that a rank receives (all-gather) or sends (reduce-scatter): (count - 1) shards.
Products are those of a linear layer of so many rows, by how their operands lie: "nn", "nt" (the second is transposed),
"tn" (the first is); and "attention", forward and backward. Fresh memory is what the system has yet to make ready. An
operation of a model's forward or backward pass costs `operation_s` beside what it computes.
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
    """A profile of these parts; the missing ones are null."""
    head = {
        "format": _FORMAT,
        "version": PROFILE_VERSION,
        "taken_at_unix_s": taken_at_s,
        "took_s": took_s,
        "infinity": infinity_version,
    }
    return head | {name: parts.get(name) for name in _PARTS}


def read_profile(path: Path) -> dict[str, Any]:
    """A profile that `infinity profile --output` wrote.

    Raises:
        ConfigError: it is none, or of a version that this infinity does not know.
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
            f"profile {path} has version {version}, and this infinity reads {PROFILE_VERSION}: take it anew"
        )
    missing = [name for name in _PARTS if name not in found]
    if missing:
        raise ConfigError(f"profile {path} lacks {', '.join(missing)}: take it anew")
    try:
        parsed(_Profile, text)
    except ValueError as error:
        raise ConfigError(f"profile {path} is damaged: {error}: take it anew") from error
    return found


# What it may hold, see [Note: typed records] #


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
    rows: Count  # none of attention
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
    """What of a profile is planned with."""

    drives: list[_Drives] | None
    drives_together: _Drives | None
    contention: list[_Contention] | None
    optimizer: list[_Optimizer]
    memory: Annotated[list[_Memory], Field(min_length=1)]
    products: list[_Product] | None
    operations: list[_Operation] | None
    link: _Link | None
    ranks: _Ranks | None
