"""`deepspeed.checkpointing`: torch's activation checkpointing. Saved tensors are offloaded as configured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from infinity.errors import ConfigError


def checkpoint(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Run `function` without saving its intermediate results; the backward pass runs it again."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **more)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Do nothing: `activation_checkpointing` and `tiering.activations` of the configuration decide about activations.

    Raises:
        ConfigError: an option is not supported, or only the configuration can set it.
    """
    if mpu_ is not None or partition_activations:
        raise ConfigError("checkpointing.configure: activations are not divided among ranks; leave the option out")
    if checkpoint_in_cpu:
        raise ConfigError(
            "checkpointing.configure(checkpoint_in_cpu=True): set activation_checkpointing.cpu_checkpointing in the "
            "configuration"
        )


def is_configured() -> bool:
    """Return True: there is nothing to configure."""
    return True


def reset() -> None:
    """Do nothing: torch frees the saved tensors."""
