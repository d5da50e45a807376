"""Optimizer states and their formats, the tile pipeline, and learning-rate schedules.

`infinity.optim.AdamW` and `Adam` are plain torch optimizers for loops that do not use the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.optim.adamw import Adam, AdamW

__all__ = ["Adam", "AdamW"]


def __getattr__(name: str) -> Any:
    # Imported late: modules that adamw.py imports use the formats and schedules of this package.
    if name not in __all__:
        raise AttributeError(f"module 'infinity.optim' has no attribute {name!r}")
    from infinity.optim import adamw  # noqa: PLC0415

    return getattr(adamw, name)
