"""Optimizers with DeepSpeed's names: plain objects with parameter groups, which `initialize` takes over.

Without an engine they update their parameters in memory, by the same rules; see plain.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch

from infinity.errors import ConfigError
from infinity.kernels import AdagradHyper, Hyper, LionHyper, Rule
from infinity.optim.plain import Group, load_plainly, step_plainly

_Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


# Keys in the groups of torch's other optimizers that Adam's groups do not have.
_OF_OTHERS = ("alpha", "clip_threshold", "dampening", "etas", "lambd", "lr_decay", "momentum_decay", "rho")


def _adam_rule(group: Group, step: int, grad_scale: float) -> Rule:
    beta1, beta2 = group["betas"]
    numbers = (float(group["lr"]), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]))
    return Hyper(*numbers, step, decoupled=bool(group["decoupled_weight_decay"]), grad_scale=grad_scale)


def adagrad_rule(group: Group, step: int, grad_scale: float) -> Rule:
    """Return the rule of an Adagrad update."""
    numbers = {name: float(group[name]) for name in ("lr", "lr_decay", "eps", "weight_decay")}
    return AdagradHyper(**numbers, step=step, grad_scale=grad_scale)


def lion_rule(group: Group, step: int, grad_scale: float) -> Rule:
    """Return the rule of a Lion update."""
    beta1, beta2 = group["betas"]
    return LionHyper(float(group["lr"]), float(beta1), float(beta2), float(group["weight_decay"]), step, grad_scale)


class _Plain(torch.optim.Optimizer):
    """Updates without an engine; precedes torch's class in the bases, if there is one.

    Attributes:
        _rule: makes the rule of an update.
    """

    _rule: ClassVar[staticmethod[[Group, int, float], Rule]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; only without an engine."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            step_plainly(self, self._rule)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict` of this class, of DeepSpeed's or of torch's."""
        super().load_state_dict(dict(state_dict))
        load_plainly(self, state_dict)


class DeepSpeedCPUAdam(_Plain, torch.optim.AdamW):
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
        self._decay_as_asked()

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is AdamW's."""
        return bool(self.defaults["decoupled_weight_decay"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._decay_as_asked()  # torch's AdamW has just set AdamW for all groups

    def _decay_as_asked(self) -> None:
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


class DeepSpeedCPUAdagrad(_Plain, torch.optim.Adagrad):
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


class Lion(_Plain):
    """Lion.

    Args:
        fp32_optimizer_states: the moment of 16-bit parameters is float32; if False it has the parameters' dtype.
    """

    _rule = staticmethod(lion_rule)

    def __init__(
        self,
        params: _Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})
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
