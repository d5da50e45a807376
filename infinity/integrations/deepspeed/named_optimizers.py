"""Optimizers with DeepSpeed's names, whose parameter groups `initialize` uses.

Without an engine they update their parameters in memory, by the same rules, see optim/plain.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.kernels import Rule
from infinity.optim.kinds import ADAM, adagrad_rule
from infinity.optim.plain import Group, Lion, PlainOptimizer

_Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


# Keys in the groups of torch's other optimizers that Adam's groups do not have.
_OF_OTHERS = ("alpha", "clip_threshold", "dampening", "etas", "lambd", "lr_decay", "momentum_decay", "rho")


def _adam_rule(group: Group, step: int, grad_scale: float) -> Rule:
    return ADAM.rule({**group, "decoupled": group["decoupled_weight_decay"]}, step, grad_scale)


class DeepSpeedCPUAdam(PlainOptimizer, torch.optim.AdamW):
    """AdamW, or Adam if `adamw_mode` is false.

    Args:
        fp32_optimizer_states: moments of 16-bit parameters are float32; if False they have the parameters' dtype.

    Raises:
        ConfigError: bias correction is off, AMSGrad is on, or the groups belong to another optimizer.
    """

    _rule = staticmethod(_adam_rule)

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
        given: list[Any] = list(model_params)
        _check_arguments(type(self).__name__, given, bias_correction=bias_correction, amsgrad=amsgrad)
        super().__init__(given, lr, tuple(betas), eps, weight_decay)  # type: ignore[arg-type]
        self.defaults |= {"decoupled_weight_decay": adamw_mode, "fp32_optimizer_states": fp32_optimizer_states}
        self._set_decay()

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is AdamW's."""
        return bool(self.defaults["decoupled_weight_decay"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._set_decay()  # torch's AdamW has just set AdamW's decay for all groups

    def _set_decay(self) -> None:
        for group in self.param_groups:
            group["decoupled_weight_decay"] = self.adam_w_mode


class FusedAdam(DeepSpeedCPUAdam):
    """AdamW with DeepSpeed's arguments for Adam on a GPU."""

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


class DeepSpeedCPUAdagrad(PlainOptimizer, torch.optim.Adagrad):
    """Adagrad. `adamw_mode`, which accelerate passes to every optimizer, has no effect.

    Args:
        fp32_optimizer_states: the sums of 16-bit parameters are float32; if False they have the parameters' dtype.
    """

    _rule = staticmethod(adagrad_rule)

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
        self.state.clear()  # torch creates states at once; this class with the first step, or never in an engine
        self.defaults["fp32_optimizer_states"] = fp32_optimizer_states


class DeepSpeedCPULion(Lion):
    """Lion under another name."""


class FusedLion(Lion):
    """Lion with DeepSpeed's arguments for Lion on a GPU."""

    def __init__(
        self,
        params: _Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


def _check_arguments(name: str, groups: Iterable[Any], *, bias_correction: bool, amsgrad: bool) -> None:
    """Refuse unsupported arguments, and groups of other optimizers, which accelerate replaces by Adam with offload."""
    of_groups = [group for group in groups if isinstance(group, dict)]
    if not bias_correction or not all(group.get("bias_correction", True) for group in of_groups):
        raise ConfigError(f"{name}: bias_correction=False is not supported; leave it out")
    if amsgrad or any(group.get("amsgrad", False) for group in of_groups):
        raise ConfigError(f"{name}: amsgrad=True is not supported; leave it out")
    foreign = next((key for group in of_groups for key in _OF_OTHERS if key in group), None)
    if foreign is not None:
        raise ConfigError(
            f"{name} was given parameter groups of another optimizer (they have `{foreign}`): where "
            "states are offloaded accelerate takes it for every optimizer of a script. Set "
            '"zero_force_ds_cpu_optimizer": false in the configuration to train with the script\'s own'
        )


class MultiTensorApply:
    """Calls an operation on lists of tensors with `chunk_size` as its first argument."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: Sequence[Any], *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
