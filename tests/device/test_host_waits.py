"""From the end of a forward pass to that of `step()` the host waits for no stream of the device."""

from __future__ import annotations

import pytest
import torch

import infinity
from tests.behaviour.reference import Placement, Recipe, batches, loss_of
from tests.behaviour.test_parity import assert_same_bits
from tests.device import target
from tests.device.training import engine_on, on_cpu_like, tiny, train_here


@pytest.mark.parametrize(("params", "optimizer"), [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")])
@pytest.mark.parametrize(("accumulation", "clipping"), [(1, 0.0), (1, 0.5), (4, 0.5)])
def test_a_step_waits_for_no_stream(clipping, accumulation, params, optimizer, tmp_path) -> None:
    """Single events may be waited for: a norm, or memory that the host is too far ahead of."""
    recipe = Recipe("bf16", accumulation, clipping, 6)
    with engine_on(target.DEVICE, tiny(), recipe, Placement(params, optimizer, tmp_path, "64KiB")) as engine:
        data = [ids.to(engine.device) for ids in batches(6 * accumulation)]
        waits = []
        for ids in data:
            loss = loss_of(engine, ids)
            before = target.counts()["host_waits"]
            engine.backward(loss)
            engine.step()
            waits.append(target.counts()["host_waits"] - before)
    assert waits[2 * accumulation :] == [0] * 4 * accumulation


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_refused_before_anything_changes(value, tmp_path) -> None:
    """Also where the device says so when backward runs already; the batch can be left out."""
    recipe = Recipe("bf16", 1, 0.0, 3)
    with engine_on(target.DEVICE, tiny(), recipe, Placement("cpu", "cpu", tmp_path, "64KiB")) as engine:
        ids = batches(1)[0].to(engine.device)
        for _ in range(2):
            before = {name: param.detach().cpu() for name, param in engine.named_parameters()}
            loss = loss_of(engine, ids)
            with pytest.raises(infinity.NonFiniteError, match="the loss of step 0 is not finite; no parameter"):
                engine.backward(loss + torch.tensor(value, device=engine.device))
            assert all(torch.equal(param.detach().cpu(), before[name]) for name, param in engine.named_parameters())
        assert_same_bits(train_here(engine, recipe), on_cpu_like(recipe))
