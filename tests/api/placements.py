"""Engines in the placements whose API calls differ: parameters stay in memory, or are fetched at use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import infinity
from tests.behaviour.reference import Placement, Recipe, tiny_llama

TIGHT = {"fp32": "640KB", "bf16": "480KB", "fp16": "560KB"}  # two blocks and a few tiles of the test models fit
PLACEMENTS = ["stays", "moves"]


def config_of(placement: str, path: Path, recipe: Recipe | None = None, **more: Any) -> dict[str, Any]:
    """A configuration in which everything is in memory, or hardly anything is."""
    recipe = recipe or Recipe("bf16", clipping=1.0)
    if placement == "stays":
        return recipe.config(Placement()) | more
    return recipe.config(Placement("nvme", "nvme", path, "16KiB", TIGHT[recipe.precision])) | more


def engine_in(
    placement: str, path: Path, model: Any = None, recipe: Recipe | None = None, **kwargs: Any
) -> infinity.Engine:
    """An engine of a small model."""
    return infinity.initialize(model=model or tiny_llama(), config=config_of(placement, path, recipe), **kwargs)[0]
