"""Rates of the matrix products of a training: attention, and linear layers with each layout of their operands.

On processors without 16-bit arithmetic the rates of the layouts differ by a factor of twenty, and from the rate of a
square product: libraries have a fast kernel for some layouts and a plain loop for others. Each call uses other weights,
as in a model: with few rows, the time of a product is the time to read the weights, which must not be in a cache.
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
_WEIGHTS_BYTES = 64 << 20  # larger than any cache
_HEADS, _TOKENS, _HEAD_WIDTH = 16, 512, 64
_ATTENTION_FLOPS = (2 + 5) * 2 * _HEADS * _TOKENS**2 * _HEAD_WIDTH  # two products forward, five backward
_ROUNDS = 3
_LEAST_S = 0.02  # of all rounds together: on a busy machine, the median of a few short rounds varies too much
_LONG_S = 0.05  # if a product takes longer, larger ones are not measured: they have the same rate
_SMALL = 16  # elements of a row: so few that an operation's overhead is all of its time
_SMALL_BLOCKS = 8
Rates = dict[str, Any]


def product_rates(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> list[Rates]:
    """Return the profile's `products` of one device."""
    rates = []
    for dtype in dtypes:
        for layout in _LAYOUTS:
            rates += _layer_rates(device, dtype, layout)
        rates.append(_attention_rate(device, dtype))
    return rates


def operation_cost(device: torch.device) -> Rates:
    """Return the profile's entry of `operations` of one device: the overhead of an operation in Python, autograd and
    torch, on average over the forward and backward pass of small modules."""
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
    """Counts operations that compute: all except views."""

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
        # "tn", the gradient of the weights, sums over the rows; the other products have as many rows in their result.
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
    """Return the median seconds of `body`, with fewer rounds if it takes long."""

    def finished() -> None:
        body()
        synchronize(device)

    first = timed(finished)
    rounds = 2 if first > _LONG_S else _ROUNDS
    seconds: list[float] = []
    while len(seconds) < rounds or sum(seconds) < _LEAST_S:
        seconds.append(timed(finished))
    return statistics.median(seconds)
