"""`zero_grad()` in the middle of a step drops gradients, and leaves the step's end where it was, as in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import infinity
from tests.api.sequences import EPS, Blocks
from tests.api.test_interrupts import Case, data

STEPS, ACCUMULATION = 2, 4
OPTIMIZER = {"lr": 1e-2, "weight_decay": 1e-2, "eps": EPS}
ZERO_GRADS: dict[str, Callable[[infinity.Engine], None]] = {
    "engine": lambda engine: engine.zero_grad(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
    "model": lambda engine: engine.module.zero_grad(),
}


def plain(dropped: int) -> dict[str, torch.Tensor]:
    """Weights of a plain loop that drops what there is after a micro-batch of the first step."""
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    for step in range(STEPS):
        for micro_batch in range(ACCUMULATION):
            (model(data(step, micro_batch)) / ACCUMULATION).backward()
            if (step, micro_batch) == (0, dropped):
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def accumulating(schedule: str, tmp_path) -> infinity.Engine:
    config = Case(schedule, "nvme", accumulation=ACCUMULATION, clipping=0.0).config(tmp_path)
    del config["scheduler"]
    config["optimizer"]["params"] = dict(OPTIMIZER)
    return infinity.initialize(model=Blocks(), config=config)[0]


@pytest.mark.parametrize("before_step", [False, True])
@pytest.mark.parametrize("zero_grad", ZERO_GRADS)
@pytest.mark.parametrize("schedule", ["deferred", "barrier", "backward", "speculative"])
def test_the_step_ends_where_it_would(schedule, zero_grad, before_step, tmp_path) -> None:
    dropped = 1
    with accumulating(schedule, tmp_path) as engine:
        for step in range(STEPS):
            for micro_batch in range(ACCUMULATION):
                assert engine.is_gradient_accumulation_boundary() == (micro_batch == ACCUMULATION - 1)
                engine.backward(engine(data(step, micro_batch)))
                if before_step and (step, micro_batch) == (0, dropped):
                    ZERO_GRADS[zero_grad](engine)
                engine.step()
                if not before_step and (step, micro_batch) == (0, dropped):
                    ZERO_GRADS[zero_grad](engine)
            assert (engine.global_steps, engine.micro_steps) == (step + 1, ACCUMULATION * (step + 1))
        found = dict(engine.named_parameters())
    for name, value in plain(dropped).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero_grad", ZERO_GRADS)
def test_a_step_left_out_after_a_failed_backward_ends_where_it_would(zero_grad, tmp_path) -> None:
    with accumulating("deferred", tmp_path) as engine:
        for step in range(STEPS):
            for micro_batch in range(ACCUMULATION):
                loss = engine(data(step, micro_batch))
                if (step, micro_batch) == (0, 1):
                    engine.module.fails = ("backward", ValueError)
                    with pytest.raises(ValueError, match="on purpose"):
                        engine.backward(engine(data(step, micro_batch)))
                    engine.module.fails = None
                    ZERO_GRADS[zero_grad](engine)
                else:
                    engine.backward(loss)
                engine.step()
            assert (engine.global_steps, engine.micro_steps) == (step + 1, ACCUMULATION * (step + 1))
        found = dict(engine.named_parameters())
    for name, value in plain(dropped=1).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_no_micro_batch_of_a_failed_train_batch_counts(where, tmp_path) -> None:
    with accumulating("deferred", tmp_path) as engine:
        batches = [data(0, micro_batch) for micro_batch in range(ACCUMULATION)]
        handle = engine.module.register_forward_pre_hook(
            lambda module, args: setattr(module, "fails", (where, ValueError) if args[0] is batches[2] else None)
        )
        with pytest.raises(ValueError, match="on purpose"):
            engine.train_batch(batches)
        handle.remove()
        engine.module.fails = None
        engine.zero_grad()
        engine.train_batch(batches)
        assert (engine.global_steps, engine.micro_steps) == (1, ACCUMULATION)
