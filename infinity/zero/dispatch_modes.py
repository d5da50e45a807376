"""Run the engine's operations outside of the user's dispatch modes.

[Note: dispatch modes]
A `TorchDispatchMode` sees all operations of its thread, and may replace their results. Selective activation
checkpointing is one: when backward repeats a forward pass, it returns the results that it has kept of the first pass.
The engine's operations differ between the two passes. A mode that replaced their results would put old values into the
model, or stop an update half way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
R = TypeVar("R")


def outside_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, which runs without the dispatch modes of its caller; see [Note: dispatch modes]."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call
