"""Optimizers under DeepSpeed's names: plain objects with parameter groups, which `initialize` takes over.

Adam and Adagrad are torch's, and work as these do without an engine. Lion, which torch has not, does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from infinity.errors import ConfigError, InfinityError

_Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class DeepSpeedCPUAdam(torch.optim.AdamW):
    """AdamW, or Adam if `adamw_mode` is false.

    Raises:
        ConfigError: bias correction is switched off.
    """

    def __init__(
        self,
        model_params: _Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not bias_correction:
            raise ConfigError(f"{type(self).__name__}: bias_correction=False is not supported; leave it out")
        super().__init__(model_params, lr, tuple(betas), eps, weight_decay, amsgrad)  # type: ignore[arg-type]
        self.decoupled = adamw_mode
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adamw_mode


class FusedAdam(DeepSpeedCPUAdam):
    """The same, with DeepSpeed's arguments for Adam on a GPU."""

    def __init__(
        self,
        params: _Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad."""

    def __init__(
        self,
        model_params: _Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)


class Lion(torch.optim.Optimizer):
    """Lion, for an engine."""

    def __init__(
        self,
        params: _Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refused.

        Raises:
            InfinityError: always; the engine's optimizer steps.
        """
        raise InfinityError(f"{type(self).__name__} steps in an engine only: give it to initialize(optimizer=...)")


class DeepSpeedCPULion(Lion):
    """The same."""


class FusedLion(Lion):
    """The same."""
