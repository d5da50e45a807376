"""`deepspeed.utils.nvtx`: this file runs as that module, whose names its functions use and scripts may exchange."""

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
    """The function, whose calls are named ranges in a profile of the device; while torch compiles they are not."""

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
