"""Parameters come down for an update when their unit's gradients have, and wait for nothing that is queued behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.memory import Arena
from infinity.tiers import AcceleratorLink
from tests.behaviour.reference import Placement, Recipe, batches
from tests.device import target
from tests.device.training import engine_on, tiny, train_over


@pytest.mark.skipif(not target.EMULATED, reason="kernels of a real device are not slow by request")
def test_a_download_of_what_is_there_overtakes_what_is_computed() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    link, arena = AcceleratorLink(device), Arena(2 << 20, pin=device)
    with arena.lease(1 << 20) as late, arena.lease(1 << 20) as early:
        values = torch.ones(1 << 18, device=device)
        mark = link.mark()
        with target.configured(launch_us=1_000_000):
            more = values + 1  # kept until it has come
            others = link.download(late.tensor(torch.float32), more)
            token = link.download(early.tensor(torch.float32), values, mark)
            token.result()
            assert not others.done()
            others.result()
        assert early.tensor(torch.float32).eq(1).all()
        assert late.tensor(torch.float32).eq(2).all()
    arena.close()


@pytest.mark.parametrize(
    ("clipping", "schedule", "early"),
    [
        (0.0, "backward", True),
        (1e6, "speculative", True),
        (1e6, "deferred", False),  # after backward the user may write to parameters
    ],
)
def test_parameters_come_down_early_within_a_backward_pass(clipping, schedule, early, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("infinity.zero.foresight.Foresight.speculates", True)
    download, told = AcceleratorLink.download, list[bool]()

    def noted(self: AcceleratorLink, there: torch.Tensor, here: torch.Tensor, after: Any = None) -> Any:
        if any(here.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in flat):
            told.append(after is not None)
        return download(self, there, here, after)

    recipe = Recipe("bf16", 1, clipping)
    with engine_on(target.DEVICE, tiny(), recipe, Placement("none", "cpu", tmp_path, schedule=schedule)) as engine:
        params = engine._runtime.params
        flat = [each.tensor for each in params.units]
        monkeypatch.setattr(AcceleratorLink, "download", noted)
        train_over(engine, batches(3))
        engine._runtime.executor.drain()
        assert all(each.download_after is None for each in params.units), "the last pass is over"
    assert len(told) >= 3 * len(flat)
    assert set(told) == {early}
