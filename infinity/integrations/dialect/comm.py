"""`deepspeed.comm`: torch.distributed, which can be asked before it is initialised."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch.distributed as dist

from infinity import front
from infinity.integrations.dialect.misuse import AssertedConfigError
from infinity.zero.launch import launch_of

__all__ = ["get_global_rank", "get_local_rank", "get_rank", "get_world_size", "init_distributed"]


def init_distributed(*args: Any, **more: Any) -> None:
    """`infinity.init_distributed`.

    Raises:
        AssertedConfigError: it must not, and nobody has.
    """
    given = inspect.signature(front.init_distributed).bind(*args, **more).arguments
    check_initialized(given.get("dist_init_required"))
    front.init_distributed(*args, **more)


def check_initialized(required: bool | None) -> None:
    """Somebody has initialised `torch.distributed`, where this must not.

    Raises:
        AssertedConfigError: nobody has.
    """
    if required is False and not dist.is_initialized():
        raise AssertedConfigError(
            "dist_init_required is False, but torch.distributed is not initialized: do that first, or leave it out"
        )


def get_rank(group: Any = None) -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """How many ranks there are; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """This process among those on this machine."""
    launch = launch_of(os.environ)
    return 0 if launch is None else launch.local_rank


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The rank in the whole of the rank in a group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def inference_all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    """`all_reduce`."""
    return dist.all_reduce(tensor, op, group)


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def __getattr__(name: str) -> Any:
    try:
        return getattr(dist, name)
    except AttributeError:
        raise AttributeError(f"deepspeed.comm has no {name!r} here, and torch.distributed has none") from None
