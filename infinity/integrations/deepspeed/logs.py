"""DeepSpeed's logger, for scripts that log through it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from infinity.errors import ConfigError
from infinity.integrations.deepspeed.comm import get_rank

logger = logging.getLogger("deepspeed")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_logged: set[tuple[Any, ...]] = set()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; on all of them if -1 is one, on rank 0 by default."""
    wanted = [0] if ranks is None else ranks
    if -1 in wanted or get_rank() in wanted:
        logger.log(level, "[Rank %d] %s", get_rank(), message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print on these ranks; on all of them if -1 is one, on rank 0 by default."""
    wanted = [0] if ranks is None else ranks
    if -1 in wanted or get_rank() in wanted:
        print(f"[Rank {get_rank()}] {message}")


def warning_once(*args: Any, **kwargs: Any) -> None:
    """`logger.warning`, once for each message."""
    if args not in _logged:
        _logged.add(args)
        logger.warning(*args, **kwargs)


def set_log_level_from_string(name: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level ("debug", ..., "critical") of a logger, by default DeepSpeed's.

    Raises:
        ValueError: there is no such level.
    """
    if name.upper() not in _LEVELS:
        raise ValueError(f"{name!r} is no log level: choose one of {', '.join(_LEVELS).lower()}")
    (custom_logger or logger).setLevel(name.upper())


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] | None = None) -> None:
    """Log the memory of the process, and of torch on its device, if `force` is true."""
    if force:
        log_dist(f"{message}: {memory_line()}", ranks)


def memory_line() -> str:
    """Return the memory of the process, and of torch on its device, in words."""
    held = f"{psutil.Process().memory_info().rss / 2**30:.2f} GiB in host memory"
    if torch.accelerator.is_available():
        held += f", {torch.get_device_module().memory_allocated() / 2**30:.2f} GiB on the device"
    return held


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch's version is within the given bounds. At least one must be given."""
    if min_version is None and max_version is None:
        raise ConfigError("required_torch_version: give min_version, max_version or both")
    own = _version(torch.__version__)
    least = min_version is None or own >= _version(str(min_version))
    return least and (max_version is None or own <= _version(str(max_version)))


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = [*text.split("."), "0"]
    return int(major), int(minor)
