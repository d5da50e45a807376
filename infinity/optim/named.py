"""Optimizers under DeepSpeed's names: plain objects with parameter groups, which `initialize` takes over.

Adam and Adagrad are torch's, and work as these do without an engine. Lion, which torch has not, does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from infinity.errors import ConfigError, InfinityError

_Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


# What groups of torch's other optimizers have, and Adam's never.
_OF_OTHERS = ("alpha", "clip_threshold", "dampening", "etas", "lambd", "lr_decay", "momentum_decay", "rho")


class DeepSpeedCPUAdam(torch.optim.AdamW):
    """AdamW, or Adam if `adamw_mode` is false.

    Raises:
        ConfigError: bias correction is switched off, or the groups are another optimizer's.
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
        given: list[Any] = list(model_params)
        self._check_groups(given)
        super().__init__(given, lr, tuple(betas), eps, weight_decay, amsgrad)  # type: ignore[arg-type]
        self.decoupled = adamw_mode
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adamw_mode

    def _check_groups(self, groups: Iterable[Any]) -> None:
        """accelerate makes this of every optimizer that is given to it, where states are offloaded."""
        foreign = next((key for group in groups if isinstance(group, dict) for key in _OF_OTHERS if key in group), None)
        if foreign is not None:
            raise ConfigError(
                f"{type(self).__name__} was given parameter groups of another optimizer (they have `{foreign}`): where "
                "states are offloaded accelerate takes it for every optimizer of a script. Set "
                '"zero_force_ds_cpu_optimizer": false in the configuration to train with the script\'s own'
            )


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
    """Adagrad. `adamw_mode`, which accelerate gives to all of these, is Adam's and changes nothing."""

    def __init__(
        self,
        model_params: _Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        adamw_mode: bool = False,
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
