"""Rates of the matrix products that training consists of: those of linear layers by how their operands lie, attention.

On processors without 16-bit arithmetic of their own these differ by a factor of twenty, and all of them from a square
product: a library has a fast kernel for some and a plain loop for the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from infinity.profiling.processor import timed

_LAYOUTS = ("nn", "nt", "tn")
_ROWS = (32, 128, 512, 2048)
_WIDTH, _DEVICE_WIDTH = 1024, 4096
_HEADS, _TOKENS, _HEAD_WIDTH = 16, 512, 64
_ATTENTION_FLOPS = (2 + 5) * 2 * _HEADS * _TOKENS**2 * _HEAD_WIDTH  # two products forward, five backward
_ROUNDS = 3
_LEAST_S = 0.02  # of all rounds: on a busy machine a few short ones say nothing
_LONG_S = 0.05  # larger products than one that takes so long are not tried: they have its rate
Rates = dict[str, Any]


def product_rates(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> list[Rates]:
    """The profile's `products` of one device."""
    rates = []
    for dtype in dtypes:
        for layout in _LAYOUTS:
            rates += _layer_rates(device, dtype, layout)
        rates.append(_attention_rate(device, dtype))
    return rates


def _layer_rates(device: torch.device, dtype: torch.dtype, layout: str) -> list[Rates]:
    width = _WIDTH if device.type == "cpu" else _DEVICE_WIDTH
    rates = []
    for rows in _ROWS:
        # The gradient of weights, "tn", sums over the rows; the others have them in their result.
        height, inner = (width, rows) if layout == "tn" else (rows, width)
        first = _matrix(height, inner, device, dtype, transposed=layout[0] == "t")
        second = _matrix(inner, width, device, dtype, transposed=layout[1] == "t")
        seconds = _median_s(device, lambda first=first, second=second: torch.mm(first, second))  # type: ignore[misc]
        rates.append(_entry(device, dtype, layout, rows, 2 * rows * width**2 / seconds))
        if seconds > _LONG_S:
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
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    first = timed(finished)
    rounds = 2 if first > _LONG_S else _ROUNDS
    seconds: list[float] = []
    while len(seconds) < rounds or sum(seconds) < _LEAST_S:
        seconds.append(timed(finished))
    return statistics.median(seconds)
