"""The extension itself, and the checks before an address is handed to it."""

from __future__ import annotations

import torch

from infinity.errors import InfinityError
from infinity.extension import missing_extension

try:
    from infinity import _adam
except ImportError as error:
    raise InfinityError(f"the native optimizer kernels are missing: {missing_extension('_adam')} ({error})") from error

__all__ = ["DTYPES", "_adam", "check"]

DTYPES = {
    torch.float32: _adam.Dtype.f32,
    torch.bfloat16: _adam.Dtype.bf16,
    torch.float16: _adam.Dtype.f16,
}


def check(name: str, tensor: torch.Tensor, numel: int, *dtypes: torch.dtype) -> None:
    """Refuse a tensor that the kernels could not take as it is.

    Raises:
        ValueError: wrong dtype, length, layout or device; the message names it.
    """
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}; it must be {wanted}")
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements where {numel} are expected")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; the kernels work in host memory")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
