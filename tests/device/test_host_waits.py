"""From the end of a forward pass to that of `step()` the host waits for no stream of the device."""

from __future__ import annotations

import pytest
import torch

import infinity
from infinity.tiers import Params
from infinity.tiers.unit_params import UnitParams
from tests.behaviour.reference import Placement, Recipe, assert_same_bits, batches, loss_of, tiny_gpt2
from tests.device import target
from tests.device.training import engine_on, on_cpu_like, tiny, train_here


@pytest.mark.parametrize(("params", "optimizer"), [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")])
@pytest.mark.parametrize(("accumulation", "clipping"), [(1, 0.0), (1, 0.5), (3, 0.5)])
def test_a_step_waits_for_no_stream(clipping, accumulation, params, optimizer, tmp_path) -> None:
    """Single events may be waited for: a norm, or memory that the host is too far ahead of."""
    recipe = Recipe("bf16", accumulation, clipping, 4)
    with engine_on(target.DEVICE, tiny(), recipe, Placement(params, optimizer, tmp_path, "64KiB")) as engine:
        data = [ids.to(engine.device) for ids in batches(4 * accumulation)]
        waits = []
        for ids in data:
            loss = loss_of(engine, ids)
            before = target.counts()["host_waits"]
            engine.backward(loss)
            engine.step()
            waits.append(target.counts()["host_waits"] - before)
    assert waits[2 * accumulation :] == [0] * 2 * accumulation


def test_no_update_waits_for_anothers_upload_where_there_is_room(monkeypatch, tmp_path) -> None:
    """Where parameters stay on the device, every update needs an image of its unit in host memory, until that is
    uploaded. On an H100 a step of 8B parameters took 2.8 s in place of 2.0 s with room for three of them only."""
    staged: list[UnitParams] = []
    waits: list[str] = []
    stage, finish_leaving = Params._stage, Params._finish_leaving

    def noted(self: Params, each: UnitParams) -> bool:
        staged.append(each)
        return stage(self, each)

    def waited(self: Params, each: UnitParams) -> None:
        if each is not staged[-1]:
            waits.append(each.spec.name)
        finish_leaving(self, each)

    monkeypatch.setattr(Params, "_stage", noted)
    monkeypatch.setattr(Params, "_finish_leaving", waited)
    model = tiny_gpt2(blocks=8)
    model.config._attn_implementation = "eager"
    placement = Placement("none", "cpu", tmp_path, "16MiB", schedule="backward")
    with target.configured(h2d=2e6), engine_on(target.DEVICE, model, Recipe("bf16", 1, 0.0, 3), placement) as engine:
        train_here(engine, Recipe("bf16", 1, 0.0, 3))
    assert staged
    assert not waits


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
