"""Rates of the matrix products that training consists of: those of linear layers by how their operands lie, attention.

On processors without 16-bit arithmetic of their own these differ by a factor of twenty, and all of them from a square
product: a library has a fast kernel for some and a plain loop for the others. Weights are others every time, as those
of a model are, since with few rows a product takes as long as it takes to read them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.profiling.processor import synchronize, timed

_LAYOUTS = ("nn", "nt", "tn")
_ROWS = (4, 16, 64, 256, 1024)
_WIDTH, _DEVICE_WIDTH = 1024, 4096
_WEIGHTS_BYTES = 64 << 20  # that no cache holds
_HEADS, _TOKENS, _HEAD_WIDTH = 16, 512, 64
_ATTENTION_FLOPS = (2 + 5) * 2 * _HEADS * _TOKENS**2 * _HEAD_WIDTH  # two products forward, five backward
_ROUNDS = 3
_LEAST_S = 0.02  # of all rounds: on a busy machine a few short ones say nothing
_LONG_S = 0.05  # larger products than one that takes so long are not tried: they have its rate
_SMALL = 16  # elements of a row, of operations that take no time but their own
_SMALL_BLOCKS = 8
Rates = dict[str, Any]


def product_rates(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> list[Rates]:
    """The profile's `products` of one device."""
    rates = []
    for dtype in dtypes:
        for layout in _LAYOUTS:
            rates += _layer_rates(device, dtype, layout)
        rates.append(_attention_rate(device, dtype))
    return rates


def operation_cost(device: torch.device) -> Rates:
    """The profile's entry of `operations` of one device: what one costs beside what it computes, in Python, in autograd
    and in torch; on average over the forward and the backward pass of modules."""
    model = nn.Sequential(*(_small_block() for _ in range(_SMALL_BLOCKS))).to(device)
    rows = torch.ones(1, _SMALL, device=device)

    def step() -> None:
        model(rows).sum().backward()
        model.zero_grad()

    with _Count() as counted:
        step()
    return {"device": device.type, "operation_s": _median_s(device, step) / counted.operations}


def _small_block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(_SMALL), nn.Linear(_SMALL, _SMALL), nn.GELU(), nn.Linear(_SMALL, _SMALL))


class _Count(TorchDispatchMode):
    """Counts operations that compute something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not func.is_view
        return func(*args, **(kwargs or {}))


def _layer_rates(device: torch.device, dtype: torch.dtype, layout: str) -> list[Rates]:
    width = _WIDTH if device.type == "cpu" else _DEVICE_WIDTH
    rates = []
    for rows in _ROWS:
        # The gradient of weights, "tn", sums over the rows; the others have them in their result.
        height, inner = (width, rows) if layout == "tn" else (rows, width)
        first = _matrix(height, inner, device, dtype, transposed=layout[0] == "t")
        count = 1 if layout == "tn" else -(-_WEIGHTS_BYTES // (width**2 * dtype.itemsize))
        seconds = cycle([_matrix(inner, width, device, dtype, transposed=layout[1] == "t") for _ in range(count)])
        product_s = _median_s(device, lambda first=first, seconds=seconds: torch.mm(first, next(seconds)))  # type: ignore[misc]
        rates.append(_entry(device, dtype, layout, rows, 2 * rows * width**2 / product_s))
        if product_s > _LONG_S:
            break
    return rates


def _matrix(rows: int, columns: int, device: torch.device, dtype: torch.dtype, *, transposed: bool) -> torch.Tensor:
    shape = (columns, rows) if transposed else (rows, columns)
    made = torch.ones(shape, dtype=dtype, device=device)
    return made.t() if transposed else made


def _attention_rate(device: torch.device, dtype: torch.dtype) -> Rates:
    query, key, value = (
        torch.ones(1, _HEADS, _TOKENS, _HEAD_WIDTH, dtype=dtype, device=device, requires_grad=True) for _ in range(3)
    )

    def attend() -> None:
        F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    return _entry(device, dtype, "attention", 0, _ATTENTION_FLOPS / _median_s(device, attend))


def _entry(device: torch.device, dtype: torch.dtype, layout: str, rows: int, rate: float) -> Rates:
    name = str(dtype).removeprefix("torch.")
    return {"device": device.type, "dtype": name, "layout": layout, "rows": rows, "flop_per_s": rate}


def _median_s(device: torch.device, body: Callable[[], object]) -> float:
    """Fewer rounds of what takes long."""

    def finished() -> None:
        body()
        synchronize(device)

    first = timed(finished)
    rounds = 2 if first > _LONG_S else _ROUNDS
    seconds: list[float] = []
    while len(seconds) < rounds or sum(seconds) < _LEAST_S:
        seconds.append(timed(finished))
    return statistics.median(seconds)
