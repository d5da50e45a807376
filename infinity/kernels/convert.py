"""Conversion of gradients and masters; 1-D contiguous CPU tensors of one length."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from infinity.kernels._native import DTYPES, _adam, check

_CHUNK = 32768  # the kernel sums squares in chunks of this size, so such pieces give the same bits as the whole


@dataclass(frozen=True)
class GradStats:
    """Statistics of the values that `grad_store` stored.

    Attributes:
        sum_sq: sum of their squares, summed in double.
        finite: whether no value is NaN or infinite.
    """

    sum_sq: float
    finite: bool


def grad_store(dst: torch.Tensor, src: torch.Tensor, *, accumulate: bool, scale: float = 1.0) -> GradStats:
    """Compute `dst = src * scale`, or `dst += src * scale`, with conversion between dtypes, in one pass.

    Args:
        dst, src: float32, bfloat16 or float16.

    Raises:
        ValueError: a tensor has the wrong dtype, length, layout or device; the message names it.
    """
    numel = dst.numel()
    check(numel, {"dst": dst, "src": src}, *DTYPES)
    sum_sq, finite = _adam.grad_store(
        numel, dst.data_ptr(), DTYPES[dst.dtype], src.data_ptr(), DTYPES[src.dtype], accumulate, scale
    )
    return GradStats(sum_sq, finite)


def grad_stats(values: torch.Tensor) -> GradStats:
    """Return the statistics of stored gradients, without changing them.

    The kernel also writes the values that it measures: here into a buffer of constant size.
    """
    piece, total = torch.empty(_CHUNK, dtype=values.dtype, device="cpu"), 0.0
    for part in values.split(_CHUNK):
        total += grad_store(piece[: part.numel()], part, accumulate=False).sum_sq
    return GradStats(total, math.isfinite(total))


def split_master(master: torch.Tensor, param: torch.Tensor, low_bits: torch.Tensor) -> None:
    """Split float32 `master` into its nearest bfloat16 `param` and the int16 `low_bits` that complete it."""
    numel = master.numel()
    check(numel, {"master": master}, torch.float32)
    check(numel, {"param": param}, torch.bfloat16)
    check(numel, {"low_bits": low_bits}, torch.int16)
    _adam.split_master(numel, master.data_ptr(), param.data_ptr(), low_bits.data_ptr())


def join_master(param: torch.Tensor, low_bits: torch.Tensor, master: torch.Tensor) -> None:
    """Invert `split_master`, exactly."""
    numel = master.numel()
    check(numel, {"param": param}, torch.bfloat16)
    check(numel, {"low_bits": low_bits}, torch.int16)
    check(numel, {"master": master}, torch.float32)
    _adam.join_master(numel, param.data_ptr(), low_bits.data_ptr(), master.data_ptr())
