"""Parameters that `torch.distributed.tensor.parallel` has distributed: this process trains their local parts.

[Note: tensor parallelism]
Such a parameter is a DTensor on a mesh of processes that compute one model together. The engine uses only its local
part, which is in a unit, is sharded over the ranks of the other mesh dimension, updated and saved. Its gradient is a
DTensor, too, and is converted to the parameter's placement. For values of the whole model, such as the norm of the
gradients and whether they are finite, the processes of all parts exchange their values. A parameter that several
processes hold in full counts once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.errors import ConfigError
from infinity.zero.ranks import ALONE, Ranks


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether it holds floating-point numbers to compute with, of 16 bits or more.

    Shorter ones are codes, like integers: only their module knows their meaning, and another precision would change it.
    """
    return not is_code(tensor.dtype)


def is_code(dtype: torch.dtype) -> bool:
    """Whether the dtype is not for numbers to compute with, see `has_numbers`."""
    return not dtype.is_floating_point or dtype.itemsize == 1


@dataclass(frozen=True)
class ModelParts:
    """The processes that hold the parts of one model, including this one.

    Attributes:
        ranks: these processes.
        shares: for parameters that several of them hold in full, by name: each one's share of the squared gradient
            norm; 1 for all others.
    """

    ranks: Ranks
    shares: Mapping[str, float]

    @property
    def are_several(self) -> bool:
        return self.ranks.size > 1

    def share(self, name: str) -> float:
        return self.shares.get(name, 1.0)


UNDIVIDED = ModelParts(ALONE, {})


def model_parts(model: nn.Module, ranks: Ranks) -> ModelParts:
    """Return how a model is divided.

    Args:
        ranks: the ranks that share its states.

    Raises:
        ConfigError: its parameters are distributed over more than one mesh dimension, over several meshes, or over the
            ranks that also share its states; or they have no values yet.
    """
    parameters: Iterable[tuple[str, Any]] = model.named_parameters()
    meshes = {name: param.device_mesh for name, param in parameters if is_distributed(param)}
    if not meshes:
        return UNDIVIDED
    first, mesh = next(iter(meshes.items()))
    for name, other in meshes.items():
        if other.ndim != 1 or other != mesh:
            raise ConfigError(
                f"parameter `{name}` is distributed over {other} and `{first}` over {mesh}: the model must be "
                'parallelised over one mesh dimension, as in parallelize_module(model, mesh["tp"], plan)'
            )
        if model.get_parameter(name).is_meta:
            raise ConfigError(f"parameter `{name}` is a DTensor on the meta device: give the model values first")
    group = mesh.get_group()
    sharing = dist.get_process_group_ranks(ranks.group or dist.group.WORLD) if ranks.size > 1 else [dist.get_rank()]
    together = set(dist.get_process_group_ranks(group)) & set(sharing)
    if len(together) > 1:
        raise ConfigError(
            f"parameter `{first}` is distributed over ranks {sorted(together)}, which would also share its states: "
            'give initialize the ranks of the other mesh dimension, process_group=mesh["dp"].get_group()'
        )
    size = dist.get_world_size(group)
    shares = {name: 1 / size for name, param in model.named_parameters() if _is_replicated(param)}
    return ModelParts(Ranks.of_group(group, ranks.timeout_s), shares)


def _is_replicated(param: Any) -> bool:
    return not is_distributed(param) or all(placement.is_replicate() for placement in param.placements)


def is_distributed(param: torch.Tensor) -> bool:
    """Whether the parameter is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # else no DTensors exist, and its import takes a second
    return module is not None and isinstance(param, module.DTensor)


def local_part(param: Any) -> torch.Tensor:
    """Return this process's part of a parameter: the parameter itself, if it is not distributed."""
    return param._local_tensor if is_distributed(param) else param  # type: ignore[no-any-return]


def set_local_part(param: Any, values: torch.Tensor) -> None:
    """Point the parameter at the memory of `values`, with their dtype."""
    if not is_distributed(param):
        param.data = values
        return
    if param.dtype is not values.dtype:  # a DTensor has a dtype of its own
        torch.utils.swap_tensors(param, nn.Parameter(_from_local(param, values), requires_grad=param.requires_grad))
    param._local_tensor.data = values


def _from_local(param: Any, values: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (imported by whoever made `param`)

    return DTensor.from_local(
        values, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def local_gradient(param: Any) -> torch.Tensor | None:
    """Return this process's part of `param.grad`. The processes of the model call this together."""
    grad = param.grad
    if grad is None or not is_distributed(grad):
        return grad  # type: ignore[no-any-return]
    return grad.redistribute(placements=param.placements).to_local()  # type: ignore[no-any-return]
