"""Blocks that were compiled before `initialize` train on a device as without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from tests.behaviour.reference import Placement, Recipe, batches
from tests.device import simdev
from tests.device.training import STEPS, engine_on, tiny, train_over

# What torch says while it compiles a part of a model, also without an engine.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
RECIPE = Recipe("bf16", 1, 0.5, STEPS)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with simdev.configured(launch_us=100):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_compiled_blocks_have_the_same_losses(tier) -> None:
    placement, data = Placement(tier, tier), batches(STEPS)
    with engine_on("simdev", tiny("llama"), RECIPE, placement) as engine:
        losses = train_over(engine, data)
    model = tiny("llama")
    for block in model.model.layers:
        block.compile(backend="eager")
    with engine_on("simdev", model, RECIPE, placement) as engine:
        assert train_over(engine, data) == losses
    assert counters["stats"]["calls_captured"] > 50
    assert not counters["graph_break"]
