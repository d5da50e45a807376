"""DeepSpeed's functions about its mixture-of-experts layers, which infinity does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from infinity.errors import ConfigError


def is_moe_param(param: nn.Parameter) -> bool:
    """Whether the parameter is marked as one of an expert in DeepSpeed's layer."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(group: Mapping[str, Any]) -> bool:
    """Whether the group is marked as one of experts' parameters."""
    return bool(group.get("moe", False))


def has_moe_layers(model: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): the model has no such layers, and no experts in them."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return the groups unchanged. Raise ConfigError if a parameter is marked as one of an expert."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    taken = []
    for group in groups:
        members = list(group["params"])
        if any(is_moe_param(param) for param in members):
            raise ConfigError(
                "split_params_into_different_moe_groups_for_optimizer: a parameter is marked as an expert's "
                "(allreduce is False). Experts are not divided among ranks here: leave the mark out"
            )
        taken.append({**group, "params": members})
    return taken
