"""What the drives of a configuration have free on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from infinity.config import Config
from infinity.tiers.swap_file import remove_stale


@dataclass(frozen=True)
class Drive:
    """A drive of the machine, with what is free on it."""

    path: str
    free_bytes: int


def drives_here(config: Config) -> list[Drive]:
    """The drives of a configuration on this machine, each once, with what the configuration may take of it.

    A directory that does not exist yet is looked for upwards, since `initialize` makes it.
    """
    found: dict[int, Drive] = {}
    for nvme in config.tiering.nvme:
        path = nvme.path.absolute()
        while not path.exists():
            path = path.parent
        free = shutil.disk_usage(path).free
        free = free if nvme.capacity_bytes is None else min(free, nvme.capacity_bytes)
        found.setdefault(os.stat(path).st_dev, Drive(str(nvme.path), free))  # noqa: PTH116 (`path` may be a mount)
    return list(found.values())


def free_on(drives: Iterable[Drive]) -> int:
    """Bytes that all of them have free together."""
    return sum(drive.free_bytes for drive in drives)


def free_for_swap(config: Config) -> int:
    """What a run that begins may take of the drives, once what dead runs have left there is removed.

    Raises:
        StorageError: a directory cannot be used.
    """
    for nvme in config.tiering.nvme:
        remove_stale(nvme.path)
    return free_on(drives_here(config))
