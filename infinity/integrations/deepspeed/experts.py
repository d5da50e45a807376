"""DeepSpeed's questions about its mixture-of-experts layers, of which there are none here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from infinity.errors import ConfigError


def is_moe_param(param: nn.Parameter) -> bool:
    """The parameter belongs to an expert of DeepSpeed's layer, whose mark this is."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(group: Mapping[str, Any]) -> bool:
    """The group is of such parameters."""
    return bool(group.get("moe", False))


def has_moe_layers(model: nn.Module) -> tuple[bool, int]:
    """Whether the model has such layers, and of how many experts: it has none."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups as they are, in which no parameter may be an expert's: there are none to part from the others."""
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
