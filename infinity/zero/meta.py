"""Build a model on the meta device, and initialise its modules later, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.errors import ConfigError

InitFunction = Callable[[nn.Module], None]


@contextmanager
def construct_on_meta() -> Iterator[None]:
    """Put every parameter that is created in this context on the meta device; buffers stay real.

    A parameter is registered in its module before its initialisation writes to it, so its memory is reserved but never
    touched. (`torch.device("meta")` would also put the buffers on the meta device, and so lose values such as rotary
    frequencies, which nothing computes again.)
    """

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return None
        return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    with register_module_parameter_registration_hook(to_meta):  # type: ignore[arg-type]
        yield


def own_rule(model: nn.Module) -> InitFunction:
    """Return a function that initialises one module of `model`, whose parameters have memory.

    For a transformers model, it uses the rule of the architecture. For any other module, it calls `reset_parameters`,
    which torch's layers have.
    """
    by_architecture: Any = getattr(model, "_init_weights", None)

    @torch.no_grad()
    def initialise(module: nn.Module) -> None:
        reset: Any = getattr(module, "reset_parameters", None)
        if by_architecture is not None:
            by_architecture(module)
        elif reset is not None:
            reset()
        elif any(True for _ in module.parameters(recurse=False)):
            raise ConfigError(
                f"{type(module).__name__} holds parameters on the meta device and has no reset_parameters(); "
                "give it one, pass init_function to initialize, or build the model in memory"
            )

    return initialise
