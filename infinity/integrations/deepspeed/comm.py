"""`deepspeed.comm`: torch.distributed. Ranks and sizes are also known before it is initialised."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from infinity.errors import ConfigError
from infinity.integrations.deepspeed import front
from infinity.integrations.deepspeed.misuse import AssertedConfigError
from infinity.zero.launch import launch_of
from infinity.zero.ranks import world_size

__all__ = ["get_global_rank", "get_local_rank", "get_rank", "get_world_size", "init_distributed"]


def init_distributed(*args: Any, **more: Any) -> None:
    """Call `infinity.init_distributed`.

    Raises:
        AssertedConfigError: `dist_init_required` is False, and `torch.distributed` is not initialised.
        ConfigError: accelerate counts one process, and several ranks were started.
    """
    check_accelerate()
    given = inspect.signature(front.init_distributed).bind(*args, **more).arguments
    check_initialized(given.get("dist_init_required"))
    front.init_distributed(*args, **more)


def check_initialized(required: bool | None) -> None:
    """Raise AssertedConfigError if `required` is False and `torch.distributed` is not initialised."""
    if required is False and not dist.is_initialized():
        raise AssertedConfigError(
            "dist_init_required is False, but torch.distributed is not initialized: do that first, or leave it out"
        )


def check_accelerate() -> None:
    """Raise ConfigError if accelerate counts one process for several ranks: each would train on all samples."""
    known: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    counts_one = getattr(known, "_shared_state", {}).get("backend", "not counted yet") is None
    size = world_size() if counts_one else 1
    if size > 1:
        raise ConfigError(
            f"{size} ranks were started, but accelerate counts one process, because this machine has no GPU: all ranks "
            "would train on the same samples. Start one rank (--ranks 1), or name the backend in the script. With "
            'TrainingArguments: write os.environ["ACCELERATE_USE_DEEPSPEED"] = "true" and '
            'accelerate.PartialState(backend="gloo") before it, and give it '
            'accelerator_config={"use_configured_state": True}. With Accelerator: give it '
            'kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]'
        )


def get_rank(group: Any = None) -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """Return the rank of this process among those on this machine."""
    launch = launch_of(os.environ)
    return 0 if launch is None else launch.local_rank


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the global rank of rank `group_rank` of a group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


_FOR_ITS_LOG = ("prof", "log_name", "debug")  # further arguments of DeepSpeed's collectives, which are ignored
_OTHER_NAMES = {"output_tensor": ("output",), "tensor": ("input_tensor", "input")}  # torch's names, by DeepSpeed's
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


def _all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """As torch's, but with every backend also for a tensor without dimensions, which torch refuses with gloo."""
    if input_tensor.dim() == 0:
        input_tensor = input_tensor.view(1)
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def _collective(name: str) -> Callable[..., Any]:
    """Return torch's collective of this name, which also accepts DeepSpeed's arguments."""
    torchs = _all_gather_into_tensor if name == "all_gather_into_tensor" else getattr(dist, name)
    own = inspect.signature(torchs).parameters

    @functools.wraps(torchs)
    def call(*args: Any, **more: Any) -> Any:
        named = {key: value for key, value in more.items() if key not in _FOR_ITS_LOG}
        for key in named.keys() - own.keys():
            name = next((other for other in _OTHER_NAMES.get(key, ()) if other in own), key)
            named[name] = named.pop(key)
        return torchs(*args, **named)

    return call


def inference_all_reduce(
    tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, **for_its_log: Any
) -> Any:
    """Call `all_reduce`."""
    return dist.all_reduce(tensor, op, group, async_op)


def allgather_fn(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False, **more: Any) -> Any:
    """Call `all_gather_into_tensor`."""
    return _all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_fn(
    output_tensor: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, **more: Any
) -> Any:
    """Call `reduce_scatter_tensor`."""
    return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def reduce_scatter_coalesced(tensors: Sequence[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """Return this rank's part of each tensor's mean over the ranks, flat. Last parts may be shorter. One collective."""
    count, rank = get_world_size(group), get_rank(group)
    lengths = [-(-tensor.numel() // count) for tensor in tensors]
    padded = [
        torch.nn.functional.pad(tensor.reshape(-1), (0, length * count - tensor.numel())).view(count, length)
        for tensor, length in zip(tensors, lengths, strict=True)
    ]
    together = torch.cat(padded, dim=1) / count
    mine = torch.empty_like(together[0])
    dist.reduce_scatter_tensor(mine, together.view(-1), group=group)
    parts = mine.split(lengths)
    ends = [
        max(0, min(length, tensor.numel() - rank * length)) for tensor, length in zip(tensors, lengths, strict=True)
    ]
    return [part[:end] for part, end in zip(parts, ends, strict=True)]


def has_all_gather_into_tensor() -> bool:
    """Return True: torch has it."""
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the global ranks of the members of a group."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def _get_sequence_parallel_rank() -> int:
    """Return 0: every rank has whole sequences."""
    return 0


def _get_sequence_parallel_world_size() -> int:
    """Return 1: every rank has whole sequences."""
    return 1


def of_torch(name: str) -> Any:
    """Return the attribute of `torch.distributed`: `deepspeed.comm.torch` offers all of them."""
    return getattr(dist, name)


def __getattr__(name: str) -> Any:
    try:
        return _collective(name) if name in _COLLECTIVES else getattr(dist, name)
    except AttributeError:
        raise AttributeError(f"deepspeed.comm has no {name!r} here, and torch.distributed has none") from None
