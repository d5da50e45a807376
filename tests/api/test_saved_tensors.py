"""What autograd has saved through a tier is what backward gets, or backward refuses as torch does."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import infinity
from infinity.tiers import SameMemory
from tests.behaviour.reference import Placement, Recipe

LARGE, SMALL = 128, 8  # rows of 128 floats: enough to be taken, and too little


class Spoils(nn.Module):
    """Changes what its own backward needs, after it was saved."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x[: self.rows]).exp()  # saves its result
        hidden.add_(1)
        return hidden.sum()


class Changes(Spoils):
    """Changes only what nothing has saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x[: self.rows])
        hidden.add_(1).mul_(2)
        return hidden.square().sum()


def gradients(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(model(x), model.linear.weight)[0]


def offloaded(model: nn.Module, path, activations: str) -> infinity.Engine:
    config = Recipe().config(Placement())
    config["tiering"] |= {"activations": activations, "nvme": [{"path": str(path)}]}
    return infinity.initialize(model=model, config=config, link=SameMemory())[0]


@pytest.mark.parametrize("activations", ["cpu", "nvme"])
@pytest.mark.parametrize("rows", [LARGE, SMALL])
def test_a_change_in_place_is_refused_as_torch_refuses_it(rows, activations, tmp_path) -> None:
    model, x = Spoils(rows), torch.randn(LARGE, 128)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as refused:
        gradients(model, x)
    told = re.match(
        r".*: \[torch\.FloatTensor \[\d+, \d+\]\].* is at version 1; expected version 0 instead", str(refused.value)
    )
    assert told is not None, refused.value
    with offloaded(model, tmp_path, activations) as engine:
        loss = engine(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as refused:
            engine.backward(loss)
        assert f"[torch.FloatTensor [{rows}, 128]] is at version 1; expected version 0 instead." in str(refused.value)


@pytest.mark.parametrize("activations", ["cpu", "nvme"])
@pytest.mark.parametrize("rows", [LARGE, SMALL])
def test_a_change_that_spoils_nothing_is_none(rows, activations, tmp_path) -> None:
    """Nor is an update, after which the weights are another version of their tensor."""
    torch.manual_seed(0)
    x = torch.randn(LARGE, 128)
    weights = []
    for where in ("none", activations):
        torch.manual_seed(1)
        with offloaded(Changes(rows), tmp_path, where) as engine:
            for _ in range(3):
                engine.backward(engine(x))
                engine.step()
            weights.append(dict(engine.named_parameters()))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_what_was_taken_keeps_no_memory_of_the_device(tmp_path) -> None:
    """The version is watched without the values."""
    with offloaded(Changes(LARGE), tmp_path, "cpu") as engine:
        store = engine._step.activations
        x = torch.randn(LARGE, 128, requires_grad=True)
        storages = []
        with store.saving():
            hidden = x * 2
            storages.append(torch.multiprocessing.reductions.StorageWeakRef(hidden.untyped_storage()))
            squared = hidden.square()
            del hidden
        assert all(reference.expired() for reference in storages)
        squared.sum().backward()
        torch.testing.assert_close(x.grad, 8 * x.detach())


def test_backward_after_the_end_is_refused(tmp_path) -> None:
    x = torch.randn(LARGE, 128, requires_grad=True)
    with offloaded(Changes(LARGE), tmp_path, "nvme") as engine, engine._step.activations.saving():
        squared = (x * 2).square().sum()
    with pytest.raises(infinity.InfinityError, match="the engine is closed: the tensors that autograd had saved"):
        squared.backward()
