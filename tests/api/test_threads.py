"""Threads that share a model: one at a time has plain torch's numbers, and a second one is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import infinity
from tests.api.placements import PLACEMENTS, engine_in
from tests.behaviour.reference import batches, loss_of, tiny_llama, train_on


def _nothing() -> None:
    pass


class Waiting(nn.Module):
    """A Llama that calls a function between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = tiny_llama()
        self.between: Callable[[], None] = _nothing
        self.llama.model.layers[1].register_forward_pre_hook(lambda *_: self.between())

    def forward(self, **inputs: torch.Tensor) -> object:
        return self.llama(**inputs)


@pytest.mark.parametrize("past_engine", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_second_thread_is_refused_and_the_first_goes_on(placement, past_engine, tmp_path) -> None:
    ids = batches(1)[0]
    with engine_in(placement, tmp_path / "alone", Waiting()) as alone:
        losses = train_on(alone, [ids, ids])
    model = Waiting()
    entered, refused = threading.Event(), threading.Event()
    with engine_in(placement, tmp_path / "shared", model) as engine, ThreadPoolExecutor(1) as pool:

        def second() -> None:
            entered.wait()
            with torch.no_grad():
                loss_of(model if past_engine else engine, ids)

        def let_second_in() -> None:
            entered.set()
            assert refused.wait(30)

        future = pool.submit(second)
        future.add_done_callback(lambda _: refused.set())
        model.between = let_second_in
        first = train_on(engine, [ids])
        with pytest.raises(infinity.InfinityError, match=r"two threads call the model at once: .* a lock around"):
            future.result()
        model.between = _nothing
        assert first + train_on(engine, [ids]) == losses


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_modules_in_threads_of_the_forward_are_refused(placement, tmp_path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.threads = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.threads:
                return sum(branch(x) for branch in self.branches).square().mean()
            with ThreadPoolExecutor(2) as pool:
                return sum(pool.map(lambda branch: branch(x), self.branches)).square().mean()

    model = Branches()
    with engine_in(placement, tmp_path, model) as engine:
        x = torch.randn(2, 64, dtype=torch.bfloat16)
        with pytest.raises(infinity.InfinityError, match="two threads call the model at once"):
            engine(x)
        model.threads = False
        engine.backward(engine(x))
        engine.step()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_thread_may_have_the_model_while_others_wait(placement, tmp_path) -> None:
    """As a web server or `transformers.TextIteratorStreamer` does."""
    ids = batches(1)[0]
    with engine_in(placement, tmp_path) as engine, ThreadPoolExecutor(3) as pool, torch.no_grad():
        here = engine(input_ids=ids).logits
        lock = threading.Lock()

        def there() -> torch.Tensor:
            with lock, torch.no_grad():
                return engine(input_ids=ids).logits

        for future in [pool.submit(there) for _ in range(6)]:
            assert torch.equal(future.result(), here)
