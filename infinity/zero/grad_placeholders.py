"""Placeholders in `param.grad` while the engine has the gradient.

[Note: gradient placeholders]
The engine takes the gradients of backward. Code that reads `param.grad`, such as `clip_grad_norm_(model.parameters())`,
would find None, which means "no gradient" for torch, and do nothing without an error. So until the end of the step, the
`grad` of a parameter with a gradient is a tensor of the same shape and dtype that takes no memory and raises an error
on every use. If `model.zero_grad()` or `param.grad = None` has removed it, the user has dropped the gradient. If
another tensor is in its place, the user has set it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.zero.model_parts import is_distributed
from infinity.zero.unit import Unit


class GradPlaceholder(torch.Tensor):
    """A tensor with the form of a gradient and no values, see [Note: gradient placeholders]."""

    @staticmethod
    def __new__(cls, param: torch.Tensor) -> GradPlaceholder:
        made: GradPlaceholder = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device
        )
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise InfinityError(
            f"{func.__name__} of `param.grad`: gradients are with the engine, sharded and in their tier, and cannot be "
            "read or changed here. Clipping is configured (gradient_clipping), engine.get_global_grad_norm() has the "
            "norm, and optimizer.zero_grad() drops them"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradPlaceholder(shape={tuple(self.shape)}, dtype={self.dtype})"


@dataclass(slots=True)
class _Trained:
    """A trained parameter.

    Attributes:
        placeholder: kept, because creating one is slow.
        has_gradient: whether the engine has its gradient.
    """

    unit: Unit
    index: int
    name: str
    param: nn.Parameter
    placeholder: GradPlaceholder | None = None
    has_gradient: bool = False


class GradPlaceholders:
    """The placeholders of a model's trained parameters.

    Args:
        model: its parameters that tensor parallelism has divided get no placeholder.
    """

    def __init__(self, model: nn.Module, units: Iterable[Unit]) -> None:
        self._params: list[_Trained] = []
        for unit in units:
            for index, info in enumerate(unit.layout.params):
                param = model.get_parameter(info.name)
                if info.trainable and not is_distributed(param):
                    self._params.append(_Trained(unit, index, info.name, param))
        self._placed = False

    @torch.inference_mode(False)
    def place(self) -> None:
        """Place a placeholder for every gradient of this step, at the end of a backward pass."""
        for each in self._params:
            each.has_gradient |= each.index in each.unit.running.arrived
            if each.has_gradient:
                if each.placeholder is None:
                    each.placeholder = GradPlaceholder(each.param)
                each.param.grad = each.placeholder
        self._placed = True

    def remove(self) -> None:
        """Remove the placeholders before a backward pass writes to `param.grad`; `place` follows."""
        for each in self._params:
            if each.has_gradient and isinstance(each.param.grad, GradPlaceholder):
                each.param.grad = None
        self._placed = False

    def clear(self) -> None:
        """Remove all placeholders, and forget the gradients."""
        self.remove()
        for each in self._params:
            each.has_gradient = False

    def clear_gradients(self) -> None:
        """Do `clear`, and also remove gradients that a failed backward pass has left."""
        self.clear()
        for each in self._params:
            each.param.grad = None

    def check(self, arriving: nn.Parameter | None = None) -> None:
        """Check that every `param.grad`, except the arriving one, is None or a placeholder.

        Raises:
            InfinityError: the user has set one.
        """
        for each in self._params:
            grad = each.param.grad
            if grad is not None and not isinstance(grad, GradPlaceholder) and each.param is not arriving:
                raise InfinityError(
                    f"the gradient of `{each.name}` was set by hand, which the engine does not see: leave param.grad "
                    "alone, and change the loss instead"
                )

    def dropped(self) -> dict[Unit, set[int]]:
        """Return the indices of parameters, by unit, whose placeholder was removed by the user."""
        gone: dict[Unit, set[int]] = {}
        if self._placed:
            for each in self._params:
                if each.has_gradient and each.param.grad is None:
                    gone.setdefault(each.unit, set()).add(each.index)
        return gone

    def forget(self, indices: Mapping[Unit, Collection[int]]) -> None:
        """Forget the gradients of these parameters."""
        for each in self._params:
            if each.index in indices.get(each.unit, ()):
                each.has_gradient = False
