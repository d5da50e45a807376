"""Import the extension of the kernels, and check tensors before their addresses are passed to it."""

from __future__ import annotations

from collections.abc import Mapping

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


def check(numel: int, tensors: Mapping[str, torch.Tensor], *dtypes: torch.dtype) -> None:
    """Refuse tensors that the kernels cannot use.

    Args:
        tensors: the tensors, by their names in messages.
        dtypes: the allowed dtypes of each tensor.

    Raises:
        ValueError: wrong dtype, length, layout or device; the message names it.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name} is {tensor.dtype}; it must be {wanted}")
        if tensor.numel() != numel:
            raise ValueError(f"{name} has {tensor.numel()} elements where {numel} are expected")
        if not tensor.is_cpu:
            raise ValueError(f"{name} is on {tensor.device}; the kernels work in host memory")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
