"""What an engine held is free as soon as nobody holds the engine, and an unfinished pass does not read it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.overrides import _get_current_function_mode_stack

import infinity
from infinity.tiers import SameMemory
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2, tiny_llama
from tests.behaviour.test_grad_spill import spilling

RECIPES = {
    "backward": Recipe("bf16"),
    "deferred": Recipe("bf16", 2, 0.5),
    "fp16": Recipe("fp16"),
}


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def assert_freed(model: Any, config: dict[str, Any], **kwargs: Any) -> None:
    """Trains `model`, of which the caller keeps nothing."""
    engine, optimizer, *_ = infinity.initialize(model=model, config=config, **kwargs)
    for ids in batches(4):
        if engine.config.tiering.accumulation == "layer":
            engine.train_batch([{"input_ids": ids, "labels": ids}] * engine.config.gradient_accumulation_steps)
            continue
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        del loss
    runtime = engine._runtime
    held = {
        "engine": engine,
        "model": model,
        "arena": runtime.arena,
        "parameters": runtime.params,
        "gradients": runtime.grads,
        "pipeline": runtime.pipeline,
    }
    alive = {name: weakref.ref(part) for name, part in held.items()}
    del model, runtime, held
    engine.close()
    del engine
    assert [name for name, part in alive.items() if part() is not None] == []
    with pytest.raises(infinity.InfinityError, match="belongs to no engine"):
        optimizer.step()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_a_closed_engine_and_its_memory_go_at_once(recipe, device, tmp_path) -> None:
    assert_freed(tiny_llama(), RECIPES[recipe].config(Placement(device, device, tmp_path, "64KiB")))


def test_so_they_do_with_a_device(tmp_path) -> None:
    config = RECIPES["deferred"].config(Placement("nvme", "nvme", tmp_path, "64KiB"))
    assert_freed(tiny_gpt2(), config, link=SameMemory())


def test_so_they_do_where_gradients_spill(tmp_path: Path) -> None:
    assert_freed(tiny_llama(), RECIPES["deferred"].config(spilling(RECIPES["deferred"], tmp_path)))


@pytest.mark.parametrize(
    "tiering",
    [{"accumulation": "layer"}, {"activations": "nvme"}, {"timeline": "trace.json"}],
    ids=["layer-major", "activations", "timeline"],
)
def test_so_they_do_with(tiering, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = RECIPES["deferred"].config(Placement("nvme", "nvme", tmp_path, "64KiB"))
    config["tiering"] |= tiering
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    assert_freed(tiny_llama(), config)


# Passes that see the end of their engine #


@pytest.mark.parametrize("device", ["none", "nvme"])
def test_a_backward_pass_after_the_end_is_an_error(device, tmp_path) -> None:
    """It would read freed memory, in which an access ends the process."""
    config = RECIPES["backward"].config(Placement(device, device, tmp_path, "64KiB"))
    engine = infinity.initialize(model=tiny_llama(), config=config)[0]
    loss = loss_of(engine, batches(1)[0])
    engine.close()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook"])
def test_a_pass_that_closes_its_engine_says_that_it_is_closed(hook, recipe, tmp_path) -> None:
    """As a handler of a signal may do; nothing of the engine stays active in this thread."""
    model = tiny_llama()
    config = RECIPES[recipe].config(Placement("nvme", "nvme", tmp_path, "64KiB"))
    engine = infinity.initialize(model=model, config=config)[0]
    getattr(model.model.layers[1], hook)(lambda *_: engine.close())
    with pytest.raises(infinity.InfinityError, match="the engine is closed"):
        engine.backward(loss_of(engine, batches(1)[0]))
    assert not _get_current_function_mode_stack()
    assert not list(tmp_path.iterdir())
