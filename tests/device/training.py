"""Training on the device, and what it is held against: the CPU, with everything in memory (see target.py)."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.zero.foresight import Foresight
from infinity.zero.speculation import Speculation
from infinity.zero.unit import Unit
from tests.behaviour.reference import (
    ARCHITECTURES,
    Placement,
    Recipe,
    Result,
    batches,
    train_on,
)
from tests.device import target

STEPS = 3

# Some missing waits show only when kernels lag behind the host, others only when copies do.
SPEEDS: dict[str, dict[str, float]] = {"slow_kernels": {"launch_us": 300}, "slow_link": {"h2d": 1.5e7, "d2h": 1.5e7}}
# Uploads that are still running when the next ones are due, and kernels that lag on a busy machine, too.
CRAWL: dict[str, dict[str, float]] = {"crawl": {"h2d": 1e6, "d2h": 15e6}, "crawling_kernels": {"launch_us": 1500}}
if not target.EMULATED:  # a real device has one speed, whichever a test names
    SPEEDS = defaultdict(dict, own_speed={})


def tiny(architecture: str = "gpt2", seed: int = 0) -> nn.Module:
    """A test model whose attention is made of operators that every device has."""
    model = ARCHITECTURES[architecture](seed)
    model.config._attn_implementation = "eager"
    return model


def engine_on(
    device: str, model: nn.Module, recipe: Recipe, placement: Placement, **tiering: object
) -> infinity.Engine:
    """States stay where `placement` has them, unless `fill_device` is given."""
    config = recipe.config(placement)
    config["tiering"] |= {"fill_device": False} | tiering
    return infinity.initialize(model=model, config=config, device=device)[0]


def train_over(engine: infinity.Engine, data: list[torch.Tensor]) -> list[float]:
    """As `train_on`, of batches that lie in host memory."""
    return train_on(engine, [ids.to(engine.device) for ids in data])


def train_here(engine: infinity.Engine, recipe: Recipe) -> Result:
    """Train on the batches of this recipe; the end's weights are on the host."""
    data = batches(recipe.steps * recipe.accumulation)
    losses = train_over(engine, data)
    return Result(losses, {name: param.detach().cpu() for name, param in engine.named_parameters()})


def train_on_device(recipe: Recipe, placement: Placement, model: nn.Module | None = None, **tiering: object) -> Result:
    with engine_on(target.DEVICE, model or tiny(), recipe, placement, **tiering) as engine:
        return train_here(engine, recipe)


@cache
def on_cpu(architecture: str, precision: str, accumulation: int, clipping: float, steps: int = STEPS) -> Result:
    """The same training on the CPU, with everything in memory; for a real device, on itself without overlap."""
    recipe = Recipe(precision, accumulation, clipping, steps)
    with engine_on(target.REFERENCE, tiny(architecture), recipe, target.PLAIN) as engine:
        return train_here(engine, recipe)


def on_cpu_like(recipe: Recipe, architecture: str = "gpt2") -> Result:
    return on_cpu(architecture, recipe.precision, recipe.accumulation, recipe.clipping, recipe.steps)


def speculates_always(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have updates be speculative in every step; returns a list that grows by the unit of each."""
    ahead: list[int] = []
    speculate = Speculation.speculate

    def counted(self: Speculation, row: Unit, *rest: Any) -> None:
        ahead.append(row.index)
        speculate(self, row, *rest)

    monkeypatch.setattr(Foresight, "speculates", True)
    monkeypatch.setattr(Speculation, "speculate", counted)
    return ahead
