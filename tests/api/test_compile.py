"""Models that were compiled before `initialize` train as without it, under their own names, and are compiled still."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import infinity
from infinity.zero.step import Step
from tests.api.placements import config_of
from tests.behaviour.reference import Placement, Recipe, batches, tiny_llama, train_on

DATA = batches(3)
# What torch says while it compiles a part of a model, also without an engine.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Counting:
    """A backend that runs what it is given, and counts the pieces."""

    def __init__(self) -> None:
        self.graphs = 0
        self.operations = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        self.operations += len([node for node in graph.graph.nodes if node.op.startswith("call_")])
        return graph.forward


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def blocks(model: Any, backend: Any) -> nn.Module:
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(block, backend=backend)
    return model


def blocks_in_place(model: Any, backend: Any) -> nn.Module:
    for block in model.model.layers:
        block.compile(backend=backend)
    return model


def whole(model: Any, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)


def whole_in_place(model: Any, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


needs_newer_torch = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="transformers' own code asks for torch.compiler.is_exporting"
)


# Each placement with blocks and with the whole model, one compiled in place and one as a module around it.
@pytest.mark.parametrize(
    ("placement", "compiled"),
    [
        ("stays", blocks_in_place),
        ("moves", blocks),
        pytest.param("stays", whole, marks=needs_newer_torch),
        pytest.param("moves", whole_in_place, marks=needs_newer_torch),
    ],
)
def test_a_compiled_llama_trains_with_the_same_losses(placement, compiled, tmp_path) -> None:
    config = config_of(placement, tmp_path)
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        losses = train_on(engine, DATA)
        names = [name for name, _ in engine.named_parameters()]
    backend = Counting()
    with infinity.initialize(model=compiled(tiny_llama(), backend), config=config)[0] as engine:
        assert train_on(engine, DATA) == losses
        assert [name for name, _ in engine.named_parameters()] == names
        assert list(engine.module.state_dict()) == list(tiny_llama().state_dict())
    assert 0 < backend.graphs < 20  # and not one for every step or state of the engine
    assert backend.operations > 50


def broken(compiled: Callable[[Any, Any], nn.Module], train: Callable[[nn.Module], None]) -> tuple[list[str], int]:
    """Why graphs of a compiled model broke while it was trained, and how many were compiled."""
    torch._dynamo.reset()
    counters.clear()
    backend = Counting()
    train(compiled(tiny_llama(), backend))
    return list(counters["graph_break"]), backend.graphs


@pytest.mark.parametrize(
    ("compiled", "between_units"), [(blocks, False), pytest.param(whole, True, marks=needs_newer_torch)]
)
def test_graphs_break_at_hooks_between_units_alone(compiled, between_units, tmp_path) -> None:
    """The watch on reads breaks none, and has nothing compiled anew."""

    def plainly(model: nn.Module) -> None:
        for ids in DATA:
            model(input_ids=ids, labels=ids).loss.backward()

    def by_the_engine(model: nn.Module) -> None:
        with infinity.initialize(model=model, config=config_of("moves", tmp_path))[0] as engine:
            train_on(engine, DATA)

    alone, graphs = broken(compiled, plainly)
    watched, graphs_watched = broken(compiled, by_the_engine)
    assert not alone
    assert bool(watched) == between_units
    assert all("<function Hooks._watch_module" in reason for reason in watched)
    assert between_units or graphs_watched == graphs


@pytest.mark.parametrize("recipe", [Recipe("bf16", 2), Recipe("bf16", 2, extra={})], ids=["micro-batch", "layer"])
def test_so_it_does_through_aot_autograd(recipe, tmp_path, request) -> None:
    config = recipe.config(Placement("nvme", "nvme", tmp_path, "64KiB"))
    layer_major = "layer" in request.node.callspec.id
    config["tiering"]["accumulation"] = "layer" if layer_major else "micro_batch"
    micro_batches = [{"input_ids": ids, "labels": ids} for ids in DATA[:2]]
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        expected = [engine.train_batch(micro_batches).item() for _ in range(2)]
    with infinity.initialize(model=blocks(tiny_llama(), "aot_eager"), config=config)[0] as engine:
        losses = [engine.train_batch(micro_batches).item() for _ in range(2)]
    assert losses == pytest.approx(expected, abs=2e-3)


def test_a_toy_exports_its_own_names(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    compiled = torch.compile(model, backend="eager")
    with infinity.initialize(model=compiled, config=Recipe().config(Placement()))[0] as engine:
        assert engine.module is model
        assert [name for name, _ in engine.named_parameters()] == [name for name, _ in model.named_parameters()]
        loss = engine(torch.ones(2, 4)).sum()
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            assert torch.equal(compiled(torch.ones(2, 4)), engine(torch.ones(2, 4)))


@contextmanager
def training_compiled(steps_before: int, path: Path) -> Iterator[tuple[infinity.Engine, Counting]]:
    """An engine that has trained these steps, to compile in the context. Its losses do not depend on that."""
    config = config_of("moves", path)
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        losses = train_on(engine, DATA)
    backend = Counting()
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        begun = train_on(engine, DATA[:steps_before])
        yield engine, backend
        assert begun + train_on(engine, DATA[steps_before:]) == losses
    assert 0 < backend.graphs < 20


@pytest.mark.parametrize("steps_before", [0, 1])
def test_modules_of_an_engine_can_be_compiled_by_themselves(steps_before, tmp_path) -> None:
    """As accelerate compiles regions: each block, and each module beside them."""
    with training_compiled(steps_before, tmp_path) as (engine, backend):
        inner = engine.module.model
        for module in (*inner.layers, inner.embed_tokens, inner.norm, engine.module.lm_head):
            module.compile(backend=backend, dynamic=False)
    assert "compile" not in vars(inner.norm)
    engine.module.lm_head.compile(backend=backend)


def test_an_interrupt_while_hooks_are_registered_again_stops_the_engine(monkeypatch, tmp_path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with infinity.initialize(model=tiny_llama(), config=config_of("moves", tmp_path))[0] as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Step, "_watch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.module.lm_head.compile(backend="eager")
        with pytest.raises(infinity.InfinityError, match="has stopped after an error"):
            train_on(engine, DATA[:1])


class Configured(nn.Linear):
    """Its `compile` is as that of other frameworks' models, and returns the module."""

    def compile(self, *, metrics: tuple[str, ...]) -> Configured:  # type: ignore[override]
        self.metrics = metrics
        return self


def test_a_modules_own_compile_returns_what_it_returns_without_an_engine() -> None:
    model = nn.Sequential(Configured(4, 4))
    with infinity.initialize(model, {"train_batch_size": 1})[0]:
        assert model[0].compile(metrics=("loss",)) is model[0]
        assert model[0].metrics == ("loss",)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_engine_compiles_its_blocks(steps_before, tmp_path) -> None:
    with training_compiled(steps_before, tmp_path) as (engine, backend):
        assert not engine.is_compiled
        engine.compile(backend=backend, compile_kwargs={"dynamic": False})
        assert engine.is_compiled
        engine.compile()  # which it is
    assert backend.operations > 50


def test_it_does_so_between_steps_alone(tmp_path) -> None:
    with infinity.initialize(model=tiny_llama(), config=config_of("moves", tmp_path))[0] as engine:
        with pytest.raises(infinity.ConfigError, match="schedule"):
            engine.compile(schedule=[])
        engine.backward(engine(input_ids=DATA[0], labels=DATA[0]).loss)
        with pytest.raises(infinity.InfinityError, match=r"engine\.compile"):
            engine.compile()
        with pytest.raises(infinity.InfinityError, match=r"engine\.compile"):
            engine.module.lm_head.compile()
