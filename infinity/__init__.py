"""Train models that do not fit the GPUs at hand: parameters, gradients and optimizer states in three tiers.

Names are imported when they are first used, so that `infinity --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity import checkpoint, config, integrations, optim, zero
    from infinity.config import load_config
    from infinity.engine import Engine
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
    from infinity.setup import initialize

__version__ = "0.1.0"

_HOMES = {
    "Engine": "infinity.engine",
    "initialize": "infinity.setup",
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
    "checkpoint",
    "config",
    "from_pretrained",
    "initialize",
    "integrations",
    "load_config",
    "optim",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"infinity.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
