"""Models that `torch.compile` has been at.

[Note: compiled modules]
torch compiles a module together with its hooks, and ours are no arithmetic: traced, they would be compiled anew for
every state that they look at. They are left out of what is compiled, so that a compiled module's hooks run as they do
without it, and between them its forward is what torch compiled. A wrapper that `torch.compile(module)` returned is
replaced by the module, compiled in place as `module.compile()` does: names of parameters are those of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Hook = TypeVar("Hook", bound=Callable[..., Any])


def unwrapped(model: nn.Module) -> nn.Module:
    """The model with wrappers of `torch.compile` replaced by their modules, which stay compiled."""
    dynamo = sys.modules.get("torch._dynamo")  # else nothing is compiled, and importing it takes a second
    if dynamo is None:
        return model

    def inner(module: Any) -> Any:
        while isinstance(module, dynamo.OptimizedModule):
            wrapped: Any = module._orig_mod
            wrapped._compiled_call_impl = module.dynamo_ctx(wrapped._call_impl)
            module = wrapped
        return module

    model = inner(model)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, dynamo.OptimizedModule):
                setattr(parent, name, inner(child))
    return model


def is_compiled(model: nn.Module) -> bool:
    """Some module in it is compiled, or in a module that is."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def left_out(hook: Hook) -> Hook:
    """The hook, as something that is never compiled; see [Note: compiled modules]."""
    return torch.compiler.disable(hook)  # type: ignore[no-any-return]
