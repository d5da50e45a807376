"""AdamW and Adam on flat host tensors, and the gradient bookkeeping around them.

Every function takes 1-D contiguous CPU tensors of one length and works in place. Results are the same bits
for every instruction set, number of threads, and way of cutting a tensor into pieces.

The update, in this order, with all arithmetic in fp32 (Kingma and Ba, arXiv 1412.6980, algorithm 1; decoupled decay:
Loshchilov and Hutter, arXiv 1711.05101, algorithm 2)::

    g = grad * grad_scale  (+ weight_decay * p, if coupled)
    p = p * (1 - lr * weight_decay)                    (if decoupled)
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    p = p - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.errors import InfinityError

try:
    from infinity import _adam
except ImportError as error:
    raise InfinityError(
        f"the native optimizer kernels are missing ({error}); install infinity with a C++ compiler at hand: "
        "python -m pip install ."
    ) from error

_DTYPES = {
    torch.float32: _adam.Dtype.f32,
    torch.bfloat16: _adam.Dtype.bf16,
    torch.float16: _adam.Dtype.f16,
}


@dataclass(frozen=True)
class Hyper:
    """The numbers of one update.

    Attributes:
        step: which update of these elements this is, from 1.
        decoupled: AdamW's weight decay; else Adam's, which adds it to the gradient.
        grad_scale: factor on the gradient: 1 / loss scale x clip coefficient.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool
    grad_scale: float = 1.0


@dataclass(frozen=True)
class GradStats:
    """What `grad_store` measured on the values that it stored.

    Attributes:
        sum_sq: sum of their squares, summed in double.
        finite: none of them is NaN or infinite.
    """

    sum_sq: float
    finite: bool


def adam_fp32(
    param: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor, hyper: Hyper
) -> None:
    """One update of fp32 parameters.

    Args:
        param, exp_avg, exp_avg_sq: float32; updated in place.
        grad: float32, bfloat16 or float16.

    Raises:
        ValueError: a tensor has the wrong dtype, length, layout or device; the message names it.
    """
    numel = param.numel()
    for name, tensor in (("param", param), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        _check(name, tensor, numel, torch.float32)
    _check("grad", grad, numel, *_DTYPES)
    _adam.adam_fp32(
        numel,
        param.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        grad.data_ptr(),
        _DTYPES[grad.dtype],
        _scalars(hyper),
    )


def adam_split(
    param: torch.Tensor,
    low_bits: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    hyper: Hyper,
) -> None:
    """One update of fp32 masters that are kept as a bfloat16 parameter and the 16 bits that complete it.

    The result equals `adam_fp32` on the joined master bit for bit, and `param` is that master rounded to nearest
    (ties away from zero: 16 bits cannot say which of two equally near neighbours is meant).

    Args:
        param: bfloat16; low_bits: int16; exp_avg, exp_avg_sq: float32; all updated in place.
        grad: float32, bfloat16 or float16.

    Raises:
        ValueError: a tensor has the wrong dtype, length, layout or device; the message names it.
    """
    numel = param.numel()
    _check("param", param, numel, torch.bfloat16)
    _check("low_bits", low_bits, numel, torch.int16)
    for name, tensor in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        _check(name, tensor, numel, torch.float32)
    _check("grad", grad, numel, *_DTYPES)
    _adam.adam_split(
        numel,
        param.data_ptr(),
        low_bits.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        grad.data_ptr(),
        _DTYPES[grad.dtype],
        _scalars(hyper),
    )


def grad_store(dst: torch.Tensor, src: torch.Tensor, *, accumulate: bool, scale: float = 1.0) -> GradStats:
    """`dst = src * scale`, or `dst += src * scale`, with conversion between dtypes, in one pass.

    Args:
        dst, src: float32, bfloat16 or float16.

    Raises:
        ValueError: a tensor has the wrong dtype, length, layout or device; the message names it.
    """
    numel = dst.numel()
    _check("dst", dst, numel, *_DTYPES)
    _check("src", src, numel, *_DTYPES)
    sum_sq, finite = _adam.grad_store(
        numel, dst.data_ptr(), _DTYPES[dst.dtype], src.data_ptr(), _DTYPES[src.dtype], accumulate, scale
    )
    return GradStats(sum_sq, finite)


def split_master(master: torch.Tensor, param: torch.Tensor, low_bits: torch.Tensor) -> None:
    """Split float32 `master` into its nearest bfloat16 `param` and the int16 `low_bits` that complete it."""
    numel = master.numel()
    _check("master", master, numel, torch.float32)
    _check("param", param, numel, torch.bfloat16)
    _check("low_bits", low_bits, numel, torch.int16)
    _adam.split_master(numel, master.data_ptr(), param.data_ptr(), low_bits.data_ptr())


def join_master(param: torch.Tensor, low_bits: torch.Tensor, master: torch.Tensor) -> None:
    """The inverse of `split_master`, exact."""
    numel = master.numel()
    _check("param", param, numel, torch.bfloat16)
    _check("low_bits", low_bits, numel, torch.int16)
    _check("master", master, numel, torch.float32)
    _adam.join_master(numel, param.data_ptr(), low_bits.data_ptr(), master.data_ptr())


def bare_loop(param: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor) -> None:
    """Read and write what `adam_fp32` does with next to no arithmetic, its roofline; finite values stay. All float32."""
    numel = param.numel()
    for name, tensor in (("param", param), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq), ("grad", grad)):
        _check(name, tensor, numel, torch.float32)
    _adam.bare_loop(numel, param.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr())


# The machine #


def set_threads(count: int) -> None:
    """Use `count` threads from now on."""
    if count < 1:
        raise ValueError(f"thread count is {count}; it must be at least 1")
    _adam.set_thread_count(count)


def thread_count() -> int:
    """Threads that the kernels use."""
    return _adam.thread_count()


def instruction_sets() -> list[str]:
    """Instruction sets that were compiled and run on this processor, best last."""
    return list(_adam.instruction_sets())


def active_instruction_set() -> str:
    """The one in use."""
    return _adam.active_instruction_set()


def use_instruction_set(name: str) -> None:
    """Use another of `instruction_sets()`; results do not depend on it."""
    if name not in instruction_sets():
        raise ValueError(f"instruction set {name!r} does not run here; choose one of {', '.join(instruction_sets())}")
    _adam.use_instruction_set(name)


def _scalars(hyper: Hyper) -> _adam.AdamScalars:
    return _adam.AdamScalars(
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        step=hyper.step,
        decoupled=hyper.decoupled,
        grad_scale=hyper.grad_scale,
    )


def _check(name: str, tensor: torch.Tensor, numel: int, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}; it must be {wanted}")
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements where {numel} are expected")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; the kernels work in host memory")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
