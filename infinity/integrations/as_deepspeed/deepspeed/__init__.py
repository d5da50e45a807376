"""infinity under DeepSpeed's name: `deepspeed.__infinity__` is its version. What is not here is not supported."""

from __future__ import annotations

from typing import Any

from infinity import __version__ as __infinity__
from infinity.errors import ConfigError as DeepSpeedConfigError
from infinity.front import add_config_arguments
from infinity.integrations.deepspeed.accelerator import get_accelerator
from infinity.integrations.deepspeed.comm import init_distributed
from infinity.integrations.deepspeed.config import DeepSpeedConfig
from infinity.integrations.deepspeed.engine import DeepSpeedEngine, initialize
from infinity.integrations.deepspeed.logs import log_dist, logger
from infinity.integrations.deepspeed.refused import REFUSED, refused
from infinity.optim.optimizer import TieredOptimizer as DeepSpeedOptimizer

from . import checkpointing, comm, monitor, ops, runtime, utils, zero
from .git_version_info import git_branch as __git_branch__
from .git_version_info import git_hash as __git_hash__

__version__ = "0.19.8+infinity"

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "__git_branch__",
    "__git_hash__",
    "__infinity__",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "monitor",
    "ops",
    "runtime",
    "utils",
    "zero",
]

__version_major__, __version_minor__, __version_patch__ = 0, 19, 8


def __getattr__(name: str) -> Any:
    if name in REFUSED:
        return refused(name)
    raise AttributeError(f"module 'deepspeed', which is infinity's here, has no attribute {name!r}")
