"""Lion as a plain optimizer, with parameter groups that `initialize` takes over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from infinity.kernels import LionHyper, Rule
from infinity.optim.plain import Group, PlainOptimizer


def lion_rule(group: Group, step: int, grad_scale: float) -> Rule:
    """Lion's numbers of an update."""
    beta1, beta2 = group["betas"]
    return LionHyper(float(group["lr"]), float(beta1), float(beta2), float(group["weight_decay"]), step, grad_scale)


class Lion(PlainOptimizer):
    """Lion.

    Args:
        fp32_optimizer_states: the moment of 16-bit parameters is float32; else it has the parameters' dtype.
    """

    _rule = staticmethod(lion_rule)

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})
        self.defaults["fp32_optimizer_states"] = fp32_optimizer_states
