"""What the tests of this directory share."""

from __future__ import annotations

from collections.abc import Callable

import torch

import infinity
from tests.behaviour.reference import Placement, Recipe, tiny_gpt2

RECIPE = Recipe("bf16", clipping=0.5)


def make_engine(
    placement: Placement, recipe: Recipe = RECIPE, *, seed: int = 0, build: Callable[..., torch.nn.Module] = tiny_gpt2
) -> infinity.Engine:
    config = recipe.config(placement)
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 8}}
    return infinity.initialize(model=build(seed), config=config)[0]
