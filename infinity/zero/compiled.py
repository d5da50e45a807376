"""Models with modules that `torch.compile` has compiled.

[Note: compiled modules]
torch compiles a module together with its hooks. The engine's hooks do no arithmetic; traced, they would be compiled
again for every state that they read. So they are excluded from compilation: the hooks of a compiled module run as
ordinary Python, and the forward between them is the compiled one. A wrapper that `torch.compile(module)` returned is
replaced by the module, compiled in place as by `module.compile()`, so that parameters keep their names in the model.
If a module is compiled while the model has an engine, the hooks are registered again (guards.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from infinity.errors import ConfigError

Hook = TypeVar("Hook", bound=Callable[..., Any])


def unwrapped(model: nn.Module) -> nn.Module:
    """Replace the wrappers of `torch.compile` in a model by their modules, which stay compiled. Return the model."""
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
    """Whether a module of the model is compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def refuse_cuda_graphs(model: nn.Module, *, fixed: bool) -> None:
    """Refuse modules whose kernels replay at the addresses of their first run, if parameters change their addresses.

    Args:
        fixed: whether parameters keep their addresses.

    Raises:
        ConfigError: a module was compiled with CUDA graphs, and its states do not stay on the device.
    """
    if fixed:
        return
    for name, module in model.named_modules():
        if _has_cuda_graphs(module._compiled_call_impl):
            raise ConfigError(
                f"`{name or type(module).__name__}` was compiled with CUDA graphs, which replay kernels at the "
                "addresses of their first run, but tiering gives parameters new addresses: compile it without them "
                '(mode="default" or "max-autotune-no-cudagraphs"), or use stage 0 to 2 without offloading'
            )


def _has_cuda_graphs(compiled: Any) -> bool:
    """Whether a result of `torch.compile` records CUDA graphs, by its mode, options or backend."""
    of_backend = getattr(compiled, "get_compiler_config", None)
    if of_backend is None:
        return False
    if (of_backend() or {}).get("triton.cudagraphs", False):
        return True
    contents = (cell.cell_contents for cell in compiled.__closure__)  # torch has no name for the context that it made
    backend = next((each.callback for each in contents if hasattr(each, "callback")), None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return getattr(backend, "compiler_name", "") == "cudagraphs"


def left_out(hook: Hook) -> Hook:
    """Return the hook, excluded from compilation; see [Note: compiled modules]."""
    return torch.compiler.disable(hook)  # type: ignore[no-any-return]
