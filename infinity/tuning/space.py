"""The knobs of the search, their values, and the keys of the configuration file that they set.

[Note: what is left alone]
The search does not change the global batch, the optimizer and its rates, clipping, precision, the ZeRO stage, and
everything else without a knob here. Most knobs do not change the bits of the result. Two change how the same sums are
rounded: the division of a rank's batch into micro-batches, and their order (`layer`, if blocks share weights or
inputs). Formats with rounded moments are tried only if `lossy` allows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from infinity.config import Config, default_tile_bytes, format_size
from infinity.config.typed import Count, Positive
from infinity.errors import ConfigError
from infinity.optim.formats import formats_of
from infinity.zero.sizing import choose_schedule, compute_dtype

Placement = tuple[str, str]
Aio = tuple[Positive, Positive, str]
Batch = tuple[Positive, Positive, str]
Memory = tuple[Count | None, Count | None]
Choices = Mapping[str, tuple[Any, ...]]

_TILES = (1 << 20, 4 << 20, 16 << 20)
_MOST_CUTS = 8  # ways to cut a batch


@dataclass(frozen=True)
class Setting:
    """One value for each knob; the fields are the knobs.

    Attributes:
        placement: devices of `offload_param` and `offload_optimizer`.
        schedule: a name; or "auto" below stage 3, where parameters are the newest when `step()` returns.
        tile: bytes; None for auto.
        aio: block size in bytes, queue depth, backend.
        batch: samples of a micro-batch, micro-batches a step, their order.
        memory: bytes of `host_memory` and `device_memory`; None for auto.
    """

    placement: Placement
    state_format: str
    schedule: str
    tile: Positive | None
    aio: Aio
    batch: Batch
    memory: Memory

    def facts(self) -> dict[str, Any]:
        """Return the setting as JSON values."""
        return {knob: list(value) if isinstance(value := getattr(self, knob), tuple) else value for knob in KNOBS}

    def words(self, other: Setting) -> str:
        """Describe the knobs that differ from `other`."""
        differing = [knob for knob in KNOBS if getattr(self, knob) != getattr(other, knob)]
        return "; ".join(f"{TITLES[knob]} {shown(knob, getattr(self, knob))}" for knob in differing)


KNOBS = tuple(field.name for field in fields(Setting))
TITLES = {
    "placement": "placement",
    "state_format": "state format",
    "schedule": "updates",
    "tile": "tiles",
    "aio": "aio",
    "batch": "batch",
    "memory": "memory",
}


def shown(knob: str, value: Any) -> str:
    """Return a knob's value as text."""
    if knob == "placement":
        return f"parameters {value[0]}, states {value[1]}"
    if knob == "tile":
        return _size(value)
    if knob == "aio":
        return f"{format_size(value[0])} x {value[1]} ({value[2]})"
    if knob == "batch":
        order = " layer by layer" if value[2] == "layer" else ""
        return f"{value[1]} x {value[0]}{order}"
    if knob == "memory":
        return f"host {_size(value[0])}, device {_size(value[1])}"
    return str(value)


def _size(nbytes: int | None) -> str:
    return "auto" if nbytes is None else format_size(nbytes)


@dataclass(frozen=True)
class Limits:
    """Limits that no setting may exceed; None for those of the configuration.

    Attributes:
        disk_bytes: bytes of swap files on all drives together; None for the free space.
    """

    host_bytes: int | None = None
    device_bytes: int | None = None
    disk_bytes: int | None = None


def setting_of(config: Config, limits: Limits = Limits()) -> Setting:
    """Return the setting of a configuration. An "auto" budget becomes the limit, if there is one.

    Raises:
        ConfigError: a budget exceeds its limit.
    """
    tiering, aio, zero = config.tiering, config.aio, config.zero
    names = zero.stage == 3 and not config.waits
    exact = formats_of(compute_dtype(config))[0]
    return Setting(
        placement=(zero.offload_param.device, zero.offload_optimizer.device),
        state_format=exact if tiering.state_format == "auto" else tiering.state_format,
        schedule=choose_schedule(config).value if names else tiering.update_schedule,
        tile=None if _tiering(config).get("tile_size") in (None, "auto") else tiering.tile_size_bytes,
        aio=(aio.block_size_bytes, aio.queue_depth, tiering.io_backend),
        batch=(config.micro_batch_size, config.gradient_accumulation_steps, tiering.accumulation),
        memory=(
            _within("host_memory", tiering.host_memory_bytes, limits.host_bytes),
            _within("device_memory", tiering.device_memory_bytes, limits.device_bytes),
        ),
    )


def _tiering(config: Config) -> Mapping[str, Any]:
    return config.get("tiering") or {}


def _within(name: str, stated: int | None, limit: int | None) -> int | None:
    if stated is None or limit is None:
        return limit if stated is None else stated
    if stated > limit:
        raise ConfigError(
            f"tiering.{name} is {format_size(stated)}, above --{name.replace('_', '-')} {format_size(limit)}: lower it "
            "in the configuration, or raise the limit"
        )
    return stated


# Values of the knobs #


def choices_of(
    config: Config,
    limits: Limits,
    *,
    aio: Sequence[Aio] = (),
    discrete: bool = False,
    keep: Collection[str] = (),
    lossy: bool = False,
) -> Choices:
    """Return the values of every knob, within [Note: what is left alone]. The given value comes first.

    Args:
        aio: the aio settings to try.
        discrete: whether the compute device has memory of its own.
        keep: knobs that keep their given value.
        lossy: whether formats with rounded moments are allowed.
    """
    given = setting_of(config, limits)
    others: dict[str, Sequence[Any]] = {
        "placement": _placements(config, discrete=discrete),
        "state_format": formats_of(compute_dtype(config)) if lossy else (),
        "schedule": _schedules(config),
        "tile": _tiles(config),
        "aio": aio,
        "batch": list(_batches(config)),
        "memory": [(limits.host_bytes or given.memory[0], limits.device_bytes or given.memory[1])],
    }
    return {
        knob: tuple(dict.fromkeys((getattr(given, knob), *(() if knob in keep else others[knob])))) for knob in KNOBS
    }


def canonical(setting: Setting, given: Setting) -> Setting:
    """Return the representative of equivalent settings: the order of a single micro-batch has no effect."""
    micro, count, order = setting.batch
    if count == 1 and order != given.batch[2]:
        return replace(setting, batch=(micro, count, given.batch[2]))
    return setting


def _placements(config: Config, *, discrete: bool) -> list[Placement]:
    stage = config.zero.stage
    devices = ["none", *(["cpu"] if discrete else []), *(["nvme"] if config.tiering.nvme else [])]
    params = devices if stage == 3 else ["none"]
    states = devices if stage >= 1 else ["none"]
    return list(product(params, states))


def _schedules(config: Config) -> list[str]:
    """Return the schedules to try. Below stage 3, only `auto` promises the newest parameters when `step()` returns."""
    waiting = "auto" if config.tiering.update_schedule == "auto" else "deferred"
    # If updates wait for the norm, `auto` decides whether speculative updates are better.
    overlapping = [waiting] if config.waits else ["backward", "deferred"]
    if config.zero.stage == 3 or config.tiering.update_schedule in overlapping:
        return overlapping
    return ["auto"]


def _tiles(config: Config) -> list[int | None]:
    on_drives = len(config.tiering.nvme) if config.zero.offload_optimizer.device == "nvme" else 0
    return [None, *(tile for tile in _TILES if tile != default_tile_bytes(on_drives))]


def _batches(config: Config) -> Iterator[Batch]:
    """Yield the ways to divide a rank's part of the global batch, the largest micro-batches first."""
    micro, count = config.micro_batch_size, config.gradient_accumulation_steps
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if not config.managed_accumulation or any(config.get(key) == "auto" for key in keys):
        return  # the training loop decides them
    total = micro * count
    sizes = [size for size in range(total, 0, -1) if total % size == 0]
    for size in sizes[: _MOST_CUTS - 1] + sizes[_MOST_CUTS - 1 :][-1:]:
        for order in ("micro_batch",) if config.autocast or size == total else ("micro_batch", "layer"):
            yield size, total // size, order


# Keys of the file #


def keys_of(config: Config, setting: Setting, knobs: Collection[str] = KNOBS) -> dict[str, Any]:
    """Return the keys, by dotted path, that change `config` to this setting. Unchanged keys are left out."""
    given = setting_of(config)
    keys: dict[str, Any] = {}
    for knob in knobs:
        before, after = getattr(given, knob), getattr(setting, knob)
        pairs = zip(_PATHS[knob], _parts(before), _parts(after), strict=True)
        keys |= {path: _value(path, new) for path, old, new in pairs if old != new}
    paths = [str(nvme.path) for nvme in config.tiering.nvme]
    if any(path in _PATHS["placement"] for path in keys) and paths and not _tiering(config).get("nvme"):
        keys["tiering.nvme"] = [{"path": path} for path in paths]  # the new offload section has no `nvme_path`
    return keys


_PATHS = {
    "placement": ("zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device"),
    "state_format": ("tiering.state_format",),
    "schedule": ("tiering.update_schedule",),
    "tile": ("tiering.tile_size",),
    "aio": ("aio.block_size", "aio.queue_depth", "tiering.io_backend"),
    "batch": ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "tiering.accumulation"),
    "memory": ("tiering.host_memory", "tiering.device_memory"),
}
_SIZES = frozenset(("tiering.tile_size", "aio.block_size", "tiering.host_memory", "tiering.device_memory"))


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _value(path: str, value: Any) -> Any:
    """Return the value as users write it: `4MiB` if that is exact."""
    if path not in _SIZES:
        return value
    if value is None:
        return "auto"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value % unit == 0:
            return f"{value // unit}{name}"
    return value
