"""Small functions that scripts import: most of `deepspeed.runtime.utils`, without norms."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from infinity.errors import ConfigError, InfinityError
from infinity.integrations.deepspeed.accelerator import get_accelerator
from infinity.integrations.deepspeed.logs import log_dist, memory_line

Decorated = TypeVar("Decorated")

noop_context = nullcontext


def is_compile_supported() -> bool:
    """Return True: torch has it."""
    return True


def noop_decorator(func: Decorated) -> Decorated:
    """Return the function itself."""
    return func


def ensure_directory_exists(filename: str) -> None:
    """Make the directory of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Set the seed of Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Move tensors in lists, tuples and mappings to a device; if given, only those that `criterion_func` accepts."""
    return _mapped(item, criterion_func, lambda tensor: tensor.to(device))


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """As `move_to_device`, but with detached copies."""
    return _mapped(item, criterion_func, lambda tensor: tensor.detach().clone().to(device))


def _mapped(item: Any, criterion: Callable[[Any], bool] | None, move: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(item, torch.Tensor) and (criterion is None or criterion(item)):
        return move(item)
    if isinstance(item, (list, tuple)):  # a named tuple becomes a plain one, as in DeepSpeed
        return (list if isinstance(item, list) else tuple)(_mapped(value, criterion, move) for value in item)
    if isinstance(item, Mapping):
        return {key: _mapped(value, criterion, move) for key, value in item.items()}
    return item


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return the text of a call."""
    parts = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{base}({', '.join(parts)})"


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the single value of all items. Raise ConfigError if they differ."""
    found = set(items)
    if len(found) != 1:
        raise ConfigError(f"get_only_unique_item: there are {len(found)} different ones in {items}")
    return found.pop()


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the first items of parts of equal size, and the end of the last. The first parts take the remainder."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    length, more = divmod(num_items, num_parts)
    return [part * length + min(part, more) for part in range(num_parts + 1)]


def get_tensor_bytes(item: Any) -> int:
    """Return the bytes of the tensors in lists, tuples and mappings."""
    if isinstance(item, torch.Tensor):
        return item.nbytes
    if isinstance(item, Mapping):
        item = list(item.values())
    return sum(map(get_tensor_bytes, item)) if isinstance(item, (list, tuple)) else 0


def count_used_parameters_in_backward(parameters: Iterable[nn.Parameter]) -> int:
    """Return how many of the parameters the running backward pass will reach. Raise InfinityError outside of one."""
    if torch._C._current_graph_task_id() == -1:
        raise InfinityError("count_used_parameters_in_backward: call it in a hook, while a backward pass is running")
    with torch.enable_grad():
        trained = [param for param in parameters if isinstance(param, torch.Tensor) and param.requires_grad]
        accumulators = {torch.autograd.graph._get_grad_fn_or_grad_acc(param) for param in trained}
    return sum(map(torch._C._will_engine_execute_node, accumulators))


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log the memory of the process, and of torch on its device; on all ranks by default."""
    log_dist(f"{msg}: {memory_line()}", [print_rank])


def empty_cache() -> None:
    """Empty the cache of torch's allocator on the device."""
    get_accelerator().empty_cache()


# Data and checkpoints #


class RepeatingLoader:
    """Iterates over a data loader repeatedly, without an end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy every tensor in mappings, lists and tuples, because `torch.save` would save the whole storage of a view."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, Mapping):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):  # a named tuple becomes a plain one, as in DeepSpeed
        return (list if isinstance(item, list) else tuple)(clone_tensors_for_torch_save(each, device) for each in item)
    return item


def split_half_float_double(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group the dense tensors by floating-point dtype, for one collective each. There are no empty groups."""
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    dtypes = (torch.half, torch.float, torch.double, torch.bfloat16)
    buckets = [[tensor for tensor in dense if tensor.dtype is dtype] for dtype in dtypes]
    return [bucket for bucket in buckets if bucket]
