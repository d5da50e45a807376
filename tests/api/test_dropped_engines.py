"""An unreferenced engine frees everything, as `close()` does."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

import infinity
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2, train_on


def held(path: Path) -> tuple[int, int, int]:
    """Descriptors, threads and swap files of this process."""
    descriptors = list(Path("/proc/self/fd").iterdir())
    return len(descriptors), threading.active_count(), sum(f.is_file() for f in path.rglob("*"))


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_engines_that_are_dropped_leave_nothing(clipping, tmp_path) -> None:
    config = Recipe("bf16", clipping=clipping).config(Placement("nvme", "nvme", tmp_path))

    def use() -> None:
        engine = infinity.initialize(model=tiny_gpt2(), config=config)[0]
        train_on(engine, batches(2))

    use()
    gc.collect()
    before = held(tmp_path)
    for _ in range(5):
        use()
        gc.collect()
    # What the tests before have left may go meanwhile.
    assert all(now <= then for now, then in zip(held(tmp_path), before, strict=True))


def test_the_model_outlives_its_engine_and_says_so(tmp_path) -> None:
    model = tiny_gpt2()
    engine = infinity.initialize(model=model, config=Recipe("bf16").config(Placement("nvme", "nvme", tmp_path)))[0]
    train_on(engine, batches(1))
    del engine
    gc.collect()
    assert all(param.isnan().all() for param in model.parameters())
    assert not any(file.is_file() for file in tmp_path.rglob("*"))


def test_an_engine_in_the_middle_of_a_step_can_be_dropped(tmp_path) -> None:
    config = Recipe("bf16", clipping=1.0).config(Placement("nvme", "nvme", tmp_path))
    before = threading.active_count()
    engine = infinity.initialize(model=tiny_gpt2(), config=config)[0]
    loss = loss_of(engine, batches(1)[0])
    engine.backward(loss)
    del engine, loss
    gc.collect()
    assert threading.active_count() <= before  # those of the tests before may end meanwhile


def test_an_engine_is_gone_without_the_garbage_collector(tmp_path) -> None:
    """Its memory is too much to wait for that."""
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path))
    before = threading.active_count()
    gc.disable()
    try:
        engine = infinity.initialize(model=tiny_gpt2(), config=config)[0]
        train_on(engine, batches(1))
        del engine
        assert threading.active_count() <= before  # those of the tests before may end meanwhile
    finally:
        gc.enable()


def test_close_after_close_and_use_after_close_are_told() -> None:
    engine = infinity.initialize(model=tiny_gpt2(), config=Recipe("bf16").config(Placement()))[0]
    engine.close()
    engine.close()
    with pytest.raises(infinity.InfinityError, match="the engine is closed"):
        engine(torch.zeros(1, 4, dtype=torch.long))


def test_an_engine_that_failed_in_backward_is_gone_with_its_graph(tmp_path) -> None:
    """The graph leads to the engine, past the garbage collector; the engine must not lead to the graph."""
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path))

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    def use() -> None:
        with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
            engine.module.transformer.h[1].register_full_backward_hook(fail)
            loss = loss_of(engine, batches(1)[0])
            with pytest.raises(ValueError, match="on purpose"):
                engine.backward(loss)

    use()
    gc.collect()
    before = held(tmp_path)
    for _ in range(3):
        use()
    gc.collect()
    assert held(tmp_path) == before
