"""The memory that this process may still use, within the limits of the machine and of its container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil
import torch


class _Kind(NamedTuple):
    """The file names of one version of control groups."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, str]  # in memory.stat: inactive and active pages of files


_V1 = _Kind(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Kind(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that this process could allocate now, on a device or on the host."""
    if device.type == "cpu":
        return available_memory_bytes()
    module = torch.get_device_module(device)
    cached = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0]) + int(cached)


class DeviceLevel(NamedTuple):
    """How full a device's memory is.

    Attributes:
        total_bytes: size of the memory.
        free_bytes: bytes that this process could allocate.
        allocated_bytes, most_bytes: bytes of this process's tensors, now and at most so far.
    """

    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    most_bytes: int


def device_level(device: torch.device) -> DeviceLevel:
    """Return how full the memory of a device is; the device must not be the CPU."""
    module = torch.get_device_module(device)
    return DeviceLevel(
        total_bytes=int(module.mem_get_info(device)[1]),
        free_bytes=free_bytes(device),
        allocated_bytes=int(module.memory_allocated(device)),
        most_bytes=int(module.max_memory_allocated(device)),
    )


def available_memory_bytes(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes that can be allocated without swapping, and without the process being killed for it.

    Args:
        cgroups: mount point of the control groups.
        membership: file with the control groups of this process.
    """
    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *_left_by_cgroups(cgroups, membership)]))


def memory_limit_bytes(
    cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return the lowest limit of a control group; None if it is not below the machine's memory."""
    total = int(psutil.virtual_memory().total)
    limits = (limit for kind, group in _groups(cgroups, membership) for limit in _limits(kind, group))
    least = min(limits, default=total)
    return least if least < total else None


def _left_by_cgroups(cgroups: Path, membership: Path) -> Iterator[int]:
    """Yield the free bytes of each control group of this process, its own and its parents."""
    for kind, group in _groups(cgroups, membership):
        limit, usage = min(_limits(kind, group), default=None), _number(group / kind.usage)
        if limit is not None and usage is not None:
            yield limit - usage + _reclaimable(kind, group)


def _groups(cgroups: Path, membership: Path) -> Iterator[tuple[_Kind, Path]]:
    """Yield the control groups of this process, innermost first.

    In a container the path may be the host's, of which only the last part is mounted, as the root.
    """
    for line in _text(membership).splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if "memory" in controllers.split(","):
            kind, root = _V1, cgroups / "memory"
        elif hierarchy == "0" and not controllers:
            kind, root = _V2, cgroups
        else:
            continue
        parts = [part for part in PurePosixPath(name).parts if part not in ("/", "..")]
        for depth in range(len(parts), -1, -1):
            yield kind, root.joinpath(*parts[:depth])


def _limits(kind: _Kind, group: Path) -> list[int]:
    """Return the limits that are set; `max` means no limit."""
    return [limit for name in kind.limits if (limit := _number(group / name)) is not None]


def _reclaimable(kind: _Kind, group: Path) -> int:
    """Estimate the cached files in the usage, which the kernel can free: the inactive, and half of the active ones."""
    inactive, active = 0, 0
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == kind.cache[0] and value.isdigit():
            inactive = int(value)
        elif name == kind.cache[1] and value.isdigit():
            active = int(value)
    return inactive + active // 2


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
