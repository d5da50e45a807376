"""Small things that scripts import: most of `deepspeed.runtime.utils`, beside norms."""

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
    """torch has it."""
    return True


def noop_decorator(func: Decorated) -> Decorated:
    """The function itself."""
    return func


def ensure_directory_exists(filename: str) -> None:
    """Make the directory that the file is to be in."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Of Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """The tensors in lists, tuples and mappings, moved; those alone for which `criterion_func` holds, if given."""
    return _mapped(item, criterion_func, lambda tensor: tensor.to(device))


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """The same as copies, whose gradients do not reach the originals."""
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
    """A call as it is written."""
    parts = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{base}({', '.join(parts)})"


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """What all of them are; refused if they are not the same."""
    found = set(items)
    if len(found) != 1:
        raise ConfigError(f"get_only_unique_item: there are {len(found)} different ones in {items}")
    return found.pop()


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Where parts that are as long as one another begin, and the last one ends; the first take what is left over."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    length, more = divmod(num_items, num_parts)
    return [part * length + min(part, more) for part in range(num_parts + 1)]


def get_tensor_bytes(item: Any) -> int:
    """Bytes of the tensors in lists, tuples and mappings."""
    if isinstance(item, torch.Tensor):
        return item.nbytes
    if isinstance(item, Mapping):
        item = list(item.values())
    return sum(map(get_tensor_bytes, item)) if isinstance(item, (list, tuple)) else 0


def count_used_parameters_in_backward(parameters: Iterable[nn.Parameter]) -> int:
    """Of these, how many the running backward pass will reach; refused outside of one."""
    if torch._C._current_graph_task_id() == -1:
        raise InfinityError("count_used_parameters_in_backward: call it in a hook, while a backward pass is running")
    with torch.enable_grad():
        trained = [param for param in parameters if isinstance(param, torch.Tensor) and param.requires_grad]
        accumulators = {torch.autograd.graph._get_grad_fn_or_grad_acc(param) for param in trained}
    return sum(map(torch._C._will_engine_execute_node, accumulators))


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log what the process, and torch on its device, hold now; on all ranks by default."""
    log_dist(f"{msg}: {memory_line()}", [print_rank])


def empty_cache() -> None:
    """Of torch's allocator on the device."""
    get_accelerator().empty_cache()


# Around data and checkpoints #


class RepeatingLoader:
    """Goes through a data loader again and again."""

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
    """The same with every tensor copied, in mappings, lists and tuples, so that none brings more than itself."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, Mapping):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):  # a named tuple becomes a plain one, as in DeepSpeed
        return (list if isinstance(item, list) else tuple)(clone_tensors_for_torch_save(each, device) for each in item)
    return item


def split_half_float_double(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The dense tensors of each floating-point dtype, which one collective can take; no list for a dtype of none."""
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    dtypes = (torch.half, torch.float, torch.double, torch.bfloat16)
    buckets = [[tensor for tensor in dense if tensor.dtype is dtype] for dtype in dtypes]
    return [bucket for bucket in buckets if bucket]
