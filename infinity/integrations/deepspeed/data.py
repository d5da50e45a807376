"""Small helpers around data and tensors that scripts import from DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


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
