"""Matrix products of bf16 tensors in fp32, for processors that have no bf16 instructions.

Torch multiplies bf16 there forty times as slowly as fp32, and a step would be nothing but that: no difference between
two engines would show. The operands are widened, multiplied and rounded once, so the results are at least as exact.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")  # torch takes the kernels back when it is collected


def multiply_in_fp32() -> None:
    """Replace the products that transformers use, on the CPU, in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        _library.impl("mm", _mm, "CPU")
        _library.impl("addmm", _addmm, "CPU")
        _library.impl("bmm", _bmm, "CPU")


def _mm(a: Tensor, b: Tensor) -> Tensor:
    wide = torch.mm(a.float(), b.float(), out=torch.empty(a.shape[0], b.shape[1]))  # `out=` is another kernel
    return wide.to(a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out = torch.empty(a.shape[0], b.shape[1])
    return torch.addmm(bias.float(), a.float(), b.float(), beta=beta, alpha=alpha, out=out).to(a.dtype)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    wide = torch.bmm(a.float(), b.float(), out=torch.empty(a.shape[0], a.shape[1], b.shape[2]))
    return wide.to(a.dtype)
