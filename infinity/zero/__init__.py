"""ZeRO as placements: units and their lifecycle, and the hooks that drive it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.integrations.deepspeed.estimates import (
        estimate_zero2_model_states_mem_needs,
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from infinity.zero.construction import Init
    from infinity.zero.param_access import GatheredParameters
    from infinity.zero.tiling import TiledLinear

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]

_HOMES = dict.fromkeys(__all__, "infinity.integrations.deepspeed.estimates") | {
    "GatheredParameters": "infinity.zero.param_access",
    "Init": "infinity.zero.construction",
    "TiledLinear": "infinity.zero.tiling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'infinity.zero' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
