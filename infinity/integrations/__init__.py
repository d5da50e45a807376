"""Support for models and calls of other libraries."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.integrations.adapters import load_adapters, save_adapters
    from infinity.integrations.deepspeed.values import full_fp32_values
    from infinity.integrations.exports import save_pretrained
    from infinity.integrations.pretrained import from_pretrained, pretrained_model
    from infinity.integrations.reporting import report_tiers

_HOMES = {
    "from_pretrained": "pretrained",
    "full_fp32_values": "deepspeed.values",
    "load_adapters": "adapters",
    "pretrained_model": "pretrained",
    "report_tiers": "reporting",
    "save_adapters": "adapters",
    "save_pretrained": "exports",
}

__all__ = [
    "from_pretrained",
    "full_fp32_values",
    "load_adapters",
    "pretrained_model",
    "report_tiers",
    "save_adapters",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: some of these modules import transformers, which may be importing this package.
    if name not in _HOMES:
        raise AttributeError(f"module 'infinity.integrations' has no attribute {name!r}")
    return getattr(import_module(f"infinity.integrations.{_HOMES[name]}"), name)
