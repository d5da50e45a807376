"""Train models that do not fit the GPUs at hand: parameters, gradients and optimizer states in three tiers.

Names are imported when they are first used, so that `infinity --help` does not wait for torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.distribution import warn_of_namesake
from infinity.extension import installed_package

if TYPE_CHECKING:
    from infinity import checkpoint, config, integrations, optim, zero
    from infinity.config import load_config
    from infinity.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        InfinityError,
        NonFiniteError,
        RankError,
        StorageError,
    )
    from infinity.integrations import from_pretrained
    from infinity.integrations.deepspeed.front import add_config_arguments, init_distributed, initialize
    from infinity.integrations.deepspeed.script_engine import Engine

__version__ = "0.1.0"

_HOMES = {
    "Engine": "infinity.integrations.deepspeed.script_engine",
    "add_config_arguments": "infinity.integrations.deepspeed.front",
    "init_distributed": "infinity.integrations.deepspeed.front",
    "initialize": "infinity.integrations.deepspeed.front",
    "from_pretrained": "infinity.integrations",
    "load_config": "infinity.config",
    "CapacityError": "infinity.errors",
    "CheckpointError": "infinity.errors",
    "ConfigError": "infinity.errors",
    "InfinityError": "infinity.errors",
    "NonFiniteError": "infinity.errors",
    "RankError": "infinity.errors",
    "StorageError": "infinity.errors",
}

_PACKAGES = ("checkpoint", "config", "integrations", "optim", "zero")

# The finder makes modules of DeepSpeed, such as `infinity.ops.adam`, for scripts with `import infinity as deepspeed`.
import_module("infinity.integrations.deepspeed.finder").FINDER.serve(sys.modules[__name__])
_OF_DEEPSPEED = ("accelerator", "checkpointing", "comm", "monitor", "ops", "runtime", "utils")

_installed = installed_package()
if _installed is not None:  # this is a source tree, and the installed package has its extensions
    __path__.append(str(_installed))
warn_of_namesake(Path(__file__).parent.parent)

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "InfinityError",
    "NonFiniteError",
    "RankError",
    "StorageError",
    "__version__",
    "add_config_arguments",
    "checkpoint",
    "config",
    "from_pretrained",
    "init_distributed",
    "initialize",
    "integrations",
    "load_config",
    "optim",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES or name in _OF_DEEPSPEED:
        return import_module(f"infinity.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
