"""Parameters that the model's own forward pass changes: as in torch where they stay, refused where they come and go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import InfinityError
from tests.behaviour.reference import LR, WEIGHT_DECAY, Placement, Recipe

WIDTH, STEPS = 16, 3
Change = Callable[[nn.Parameter], object]


def by_index(weight: nn.Parameter) -> None:
    weight[0] *= 0.5


def by_renorm(weight: nn.Parameter) -> None:
    nn.functional.embedding(torch.arange(WIDTH), weight, max_norm=0.5)


CHANGES: dict[str, Change] = {
    "in place": lambda weight: weight.mul_(0.5),
    "by a function": lambda weight: torch.clamp_(weight, -0.1, 0.1),
    "by a view": lambda weight: weight.view(-1).mul_(0.5),
    "by index": by_index,
    "by data": lambda weight: weight.data.mul_(0.5),
    "by a view of data": lambda weight: weight.data[0].mul_(0.5),
    "by what is detached": lambda weight: weight.detach().mul_(0.5),
    "as out": lambda weight: torch.mul(weight, 0.5, out=weight),
    "in a list": lambda weight: torch._foreach_mul_([weight], 0.5),
    "by an initialisation": lambda weight: nn.init.constant_(weight, 0.25),
    "by a norm of embeddings": by_renorm,
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.change: Change | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.change is not None:
            with torch.no_grad():
                self.change(self.weight)
        return x + (x @ self.weight).tanh()


def model_with(change: Change | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    model[1].change = change  # type: ignore[assignment]
    return model


def inputs() -> list[torch.Tensor]:
    return list(torch.randn(STEPS, 4, WIDTH, generator=torch.Generator().manual_seed(1)))


def engine_of(change: Change | None, placement: Placement) -> infinity.Engine:
    config = Recipe().config(placement)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 8
    return infinity.initialize(model=model_with(change), config=config)[0]


def train(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    for x in inputs():
        engine.backward(engine(x).square().mean())
        engine.step()
    return dict(engine.named_parameters())


@pytest.mark.parametrize("change", CHANGES)
def test_where_parameters_stay_a_change_counts(change) -> None:
    with engine_of(CHANGES[change], Placement()) as engine:
        here = train(engine)
    plain = model_with(CHANGES[change])
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    for x in inputs():
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(here[name], param.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", CHANGES)
def test_where_they_come_and_go_it_is_refused_and_nothing_is_changed(change, tmp_path) -> None:
    placement = Placement("nvme", "nvme", tmp_path, "4KiB")
    with engine_of(None, placement) as engine:
        undisturbed = train(engine)
    with engine_of(CHANGES[change], placement) as engine:
        for grad in (torch.enable_grad, torch.no_grad):
            with grad(), pytest.raises(InfinityError, match=r"forward pass changes `1\.weight` in place"):
                engine(inputs()[0])
        engine.module[1].change = None
        here = train(engine)
    assert all(torch.equal(values, here[name]) for name, values in undisturbed.items())


@pytest.mark.parametrize("look", ["detach", "data", "requires_grad_"])
def test_what_changes_no_value_is_no_change(look, tmp_path) -> None:
    def harmless(weight: nn.Parameter) -> None:
        shown = {"detach": weight.detach, "data": lambda: weight.data, "requires_grad_": weight.requires_grad_}[look]()
        (shown * 2).mul_(0.5)

    placement = Placement("nvme", "nvme", tmp_path, "4KiB")
    with engine_of(None, placement) as plain, engine_of(harmless, placement) as engine:
        expected, here = train(plain), train(engine)
    assert all(torch.equal(values, here[name]) for name, values in expected.items())
