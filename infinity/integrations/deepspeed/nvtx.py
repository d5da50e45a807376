"""`deepspeed.utils.nvtx`. This file runs as that module, so that its functions use names that scripts may replace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling

from infinity.integrations.deepspeed.accelerator import get_accelerator

__all__ = ["DEEPSPEED_NVTX_DOMAIN", "enable_nvtx", "get_accelerator", "instrument_w_nvtx", "is_compiling"]

DEEPSPEED_NVTX_DOMAIN = "DeepSpeed"
enable_nvtx = True


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its calls are named ranges in a profile of the device, except while torch compiles."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not enable_nvtx or is_compiling():
            return func(*args, **kwargs)
        accelerator: Any = get_accelerator()
        domain = {"domain": DEEPSPEED_NVTX_DOMAIN} if getattr(accelerator, "supports_nvtx_domain", False) else {}
        accelerator.range_push(func.__qualname__, **domain)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop(**domain)

    return call
