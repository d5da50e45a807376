from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["MultiTensorApply"]


class MultiTensorApply:
    """Calls an operation on lists of tensors, which takes them in pieces of so many elements."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: Sequence[Any], *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
