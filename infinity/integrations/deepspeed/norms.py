"""Norms and clipping of a script's own tensors, under the names of `deepspeed.runtime.utils`.

The engine itself clips the gradients of its parameters (`gradient_clipping`); their norm is
`engine.get_global_grad_norm()`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from infinity.errors import ConfigError
from infinity.integrations.deepspeed.comm import get_world_size

_INVALID = -1.0  # stands for a norm that is not finite


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    """Return whether an element is not finite, as a scalar on the tensor's device."""
    values = x._values() if x.is_sparse else x
    return torch.isfinite(values).all().logical_not()


def is_invalid_grad_norm(norm: torch.Tensor | float) -> bool:
    """Whether a norm is not finite, or negative, which stands for not finite."""
    numbers = norm.flatten().tolist() if isinstance(norm, torch.Tensor) else [float(norm)]
    return any(not math.isfinite(number) or number < 0 for number in numbers)


def get_global_norm(norm_list: Iterable[torch.Tensor | float]) -> float:
    """Return the norm of the union of tensors from the norms of each; infinite if one is invalid."""
    norms = list(norm_list)
    return math.inf if any(map(is_invalid_grad_norm, norms)) else math.hypot(*map(float, norms))


def combine_grad_norm_groups(norm_groups: Iterable[torch.Tensor | float], norm_type: float = 2) -> torch.Tensor:
    """As `get_global_norm`, for any p-norm, and return a tensor."""
    norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norm_groups])
    invalid = (~torch.isfinite(norms) | (norms < 0)).any()
    combined = torch.linalg.vector_norm(norms, ord=norm_type)
    return torch.where(invalid, torch.full_like(combined, math.inf), combined)


def mask_nan_or_inf_with_val_inplace(input: torch.Tensor, device: Any = None, val: float = _INVALID) -> None:  # noqa: A002
    """Replace elements that are not finite by `val`, in place."""
    input.masked_fill_(~torch.isfinite(input), val)


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> torch.Tensor:
    """Return the p-norm of all elements as a float32 scalar; -1 if it is not finite.

    Raises:
        ConfigError: tensors are divided among ranks.
    """
    _refuse("get_global_norm_of_tensors", mpu=mpu, moe_ep_group=moe_ep_group)
    norm = _norm(input_tensors, norm_type)
    mask_nan_or_inf_with_val_inplace(norm)
    return norm


def get_weight_norm(parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Return the p-norm of the parameters' values as a number; -1 if it is not finite."""
    _refuse("get_weight_norm", mpu=mpu)
    return float(get_global_norm_of_tensors([value.detach() for value in _listed(parameters)], norm_type))


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: torch.Tensor | float | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> torch.Tensor | float:
    """Scale the tensors in place, if their norm is larger than `max_norm`. Return their norm before."""
    if global_norm is None:
        global_norm = get_global_norm_of_tensors(input_tensors, mpu=mpu)
    factor = max_norm / (float(global_norm) + eps)
    if factor < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(factor)
    return global_norm


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Clip gradients of parameters without an engine by their norm, averaged over the ranks. All ranks call this.

    Raises:
        ConfigError: parameters are divided among ranks.
        InfinityError: the parameters belong to an engine.
    """
    _refuse("clip_grad_norm_", mpu=mpu)
    grads = [param.grad for param in _listed(parameters) if param.grad is not None]
    norm = _norm(grads, norm_type)
    if dist.is_initialized():
        norm = norm / get_world_size()
        dist.all_reduce(norm)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.detach().mul_(factor)
    return norm


class CheckOverflow:
    """Checks on this rank whether gradients of parameters without an engine are finite."""

    def __init__(
        self,
        param_groups: Iterable[Iterable[torch.Tensor]] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        _refuse("CheckOverflow", mpu=mpu)
        self.params = [param for group in param_groups or () for param in group]

    def check_using_norm(self, norm_group: Iterable[torch.Tensor | float], reduce_overflow: bool = True) -> bool:
        """Whether a norm is invalid; with `reduce_overflow`, on any rank, and all ranks call this together."""
        overflow = any(map(is_invalid_grad_norm, norm_group))
        if not reduce_overflow or not dist.is_initialized():
            return overflow
        flag = torch.tensor([int(overflow)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def check(self, param_groups: Iterable[Iterable[torch.Tensor]] | None = None) -> bool:
        """Whether a gradient in the groups is not finite."""
        groups = [self.params] if param_groups is None else param_groups
        return self.has_overflow([param for group in groups for param in group])

    def has_overflow(self, params: Iterable[torch.Tensor], has_moe_params: bool | None = None) -> bool:
        """Whether a gradient of these parameters is not finite."""
        return any(bool(has_inf_or_nan(param.grad)) for param in params if param.grad is not None)


def _norm(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(tensor.detach(), norm_type, dtype=torch.float32) for tensor in tensors]
    together = torch.stack([norm.to(norms[0].device) for norm in norms] or [torch.zeros(())])
    combined: torch.Tensor = torch.linalg.vector_norm(together, norm_type)
    return combined


def _listed(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _refuse(what: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{what}({name}=...) is not supported: reduce the norm over its group yourself")
