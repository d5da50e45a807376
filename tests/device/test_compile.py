"""Blocks that were compiled before `initialize` train on a device as without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

import infinity
from infinity import ConfigError
from tests.behaviour.reference import Placement, Recipe, batches
from tests.device import target
from tests.device.training import STEPS, engine_on, tiny, train_over

# What torch says while it compiles a part of a model, also without an engine.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
    ),  # inductor's import
]
RECIPE = Recipe("bf16", 1, 0.5, STEPS)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with target.configured(launch_us=100):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_compiled_blocks_have_the_same_losses(tier) -> None:
    placement, data = Placement(tier, tier), batches(STEPS)
    with engine_on(target.DEVICE, tiny("llama"), RECIPE, placement) as engine:
        losses = train_over(engine, data)
    model = tiny("llama")
    for block in model.model.layers:
        block.compile(backend="eager")
    with engine_on(target.DEVICE, model, RECIPE, placement) as engine:
        assert train_over(engine, data) == losses
    assert counters["stats"]["calls_captured"] > 50
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune"},
        {"options": {"triton.cudagraphs": True}},
        {"backend": "cudagraphs"},
    ],
    ids=str,
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_cuda_graphs_are_refused_where_parameters_come_and_go(how, wrapped) -> None:
    model = tiny("llama")
    if wrapped:
        model.model.layers[1] = torch.compile(model.model.layers[1], **how)
    else:
        model.model.layers[1].compile(**how)
    with pytest.raises(ConfigError, match=r"`model\.layers\.1` was compiled with CUDA graphs"):
        engine_on(target.DEVICE, model, RECIPE, Placement("none", "cpu"))


def test_engine_compile_refuses_cuda_graphs_and_leaves_blocks_as_they_were() -> None:
    with engine_on(target.DEVICE, tiny("llama"), RECIPE, Placement("cpu", "cpu")) as engine:
        with pytest.raises(ConfigError, match="CUDA graphs"):
            engine.compile(compile_kwargs={"mode": "reduce-overhead"})
        assert not engine.is_compiled
        train_over(engine, batches(1))


def test_cuda_graphs_are_of_no_matter_where_all_stays_or_none_can_be_recorded() -> None:
    config = RECIPE.config(Placement("none", "none"))
    config["zero_optimization"]["stage"] = 2
    for device, settings in ((target.DEVICE, config), ("cpu", RECIPE.config(Placement("none", "cpu")))):
        model = tiny("llama")
        model.model.layers[1].compile(mode="reduce-overhead")
        infinity.initialize(model=model, config=settings, device=device)[0].close()
    model = tiny("llama")
    model.model.layers[1].compile(mode="max-autotune-no-cudagraphs")
    engine_on(target.DEVICE, model, RECIPE, Placement("none", "cpu")).close()
