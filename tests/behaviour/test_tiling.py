"""A linear layer in tiles is the layer, in memory that the layer would not fit in."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.zero import GatheredParameters, Init, TiledLinear
from tests.behaviour.test_models import ADAM, WIDTH, Chain, batches, config, tightest, train_both

WIDE = 1501  # divides by no number of splits used here


class Wide(Chain):
    """A projection far larger than the blocks, and inside of a block a tiled one."""

    def __init__(self, tiled: bool) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDE)
        self.narrow = nn.Linear(WIDE, WIDTH)
        if tiled:
            self.wide = TiledLinear(WIDTH, WIDE, out_splits=12, init_linear=self.wide)
            self.narrow = TiledLinear(WIDE, WIDTH, in_splits=6, out_splits=2, init_linear=self.narrow)
            for block in self.blocks:
                block.up = TiledLinear(WIDTH, 2 * WIDTH, in_splits=2, out_splits=3, init_linear=block.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.narrow(torch.tanh(self.wide(x))))


def untiled(weights: dict[str, torch.Tensor], layer: str, like: TiledLinear) -> torch.Tensor:
    rows = [
        torch.cat([weights[f"{layer}.linears.{i}.{j}.weight"] for j in range(len(like.in_sizes))], dim=1)
        for i in range(len(like.out_sizes))
    ]
    return torch.cat(rows)


@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (1, 3), (4, 1), (3, 7)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled_linear_is_the_linear_layer(in_splits, out_splits, bias, dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(WIDE, 41, bias, dtype=dtype)
    tiled = TiledLinear(WIDE, 41, bias, in_splits, out_splits, init_linear=linear, dtype=dtype)
    theirs = torch.randn(3, 5, WIDE, dtype=dtype).requires_grad_()
    ours = theirs.detach().clone().requires_grad_()
    expected, found = linear(theirs), tiled(ours)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 5e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **tolerance)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance["rtol"], atol=10 * tolerance["atol"])
    grads = {name: param.grad for name, param in tiled.named_parameters(prefix="x")}
    grads = {name: grad for name, grad in grads.items() if grad is not None}
    scale = float(linear.weight.grad.abs().max())
    torch.testing.assert_close(
        untiled(grads, "x", tiled) / scale, linear.weight.grad / scale, rtol=0, atol=tolerance["atol"]
    )


def test_split_inputs_and_outputs() -> None:
    linear = nn.Linear(10, 7)
    tiled = TiledLinear(
        10, 7, in_splits=3, out_splits=2, input_is_already_split=True, combine_out_splits=False, init_linear=linear
    )
    x = torch.randn(4, 10)
    outputs = tiled(x.split(tiled.in_sizes, dim=-1))
    assert [part.shape[-1] for part in outputs] == [4, 3]
    torch.testing.assert_close(torch.cat(outputs, dim=-1), linear(x))
    with pytest.raises(infinity.ConfigError, match=r"parts of widths \[4, 3, 3\].*tensor of shape \(4, 10\)"):
        tiled(x)
    with pytest.raises(infinity.ConfigError, match=r"parts of widths \[5, 5\]"):
        tiled(x.split(5, dim=-1))


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(infinity.ConfigError, match=r"in_splits is 9.*in_features, 8"):
        TiledLinear(8, 8, in_splits=9)
    with pytest.raises(infinity.ConfigError, match=r"\(8, 8, True\).*\(8, 8, False\)"):
        TiledLinear(8, 8, init_linear=nn.Linear(8, 8, bias=False))
    with pytest.raises(infinity.ConfigError, match="in memory"):
        TiledLinear(8, 8, init_linear=nn.Linear(8, 8, device="meta"))


@pytest.mark.parametrize("clipping", [0.0, 1e9], ids=["backward", "deferred"])
def test_tiles_train_in_memory_that_the_layer_would_not_fit_in(clipping, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Wide(tiled=False)
    torch.manual_seed(0)
    model = Wide(tiled=True)
    settings = tightest(model, tmp_path, gradient_clipping=clipping)
    largest = max(p.numel() for p in plain.parameters()) * 4
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    engine, *_ = infinity.initialize(model=model, config=settings)
    with engine:
        assert engine._runtime.host.parts["parameters"].capacity_bytes < largest
        for batch in batches():
            train_both(plain, optimizer, engine, batch)
        weights = dict(engine.named_parameters())
    for layer in ("wide", "narrow", "blocks.1.up"):
        whole = plain.get_submodule(layer).weight.detach()
        torch.testing.assert_close(untiled(weights, layer, model.get_submodule(layer)), whole, rtol=1e-4, atol=1e-4)


def test_a_unit_that_fits_in_no_way_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(infinity.CapacityError, match=r"`wide` alone is larger .* infinity.zero.TiledLinear"):
        infinity.initialize(model=Wide(tiled=False), config=config(tmp_path, 120_000))
    with pytest.raises(infinity.CapacityError) as refused:
        infinity.initialize(model=Wide(tiled=True), config=config(tmp_path, 120_000))
    assert "TiledLinear" not in str(refused.value)


def test_tiles_are_initialised_as_the_layer_is_and_can_be_filled_later(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with Init(config=config(tmp_path)):
        model = nn.Sequential(TiledLinear(4000, 8, in_splits=10), nn.Linear(8, 8))
    linear = nn.Linear(4000, 8)
    engine, *_ = infinity.initialize(model=model, config=config(tmp_path))
    with engine:
        made = untiled(dict(engine.named_parameters()), "0", model[0])
        assert made.abs().max() == pytest.approx(4000**-0.5, rel=0.01)
        assert made.std() == pytest.approx(float(linear.weight.detach().std()), rel=0.05)
        with pytest.raises(infinity.ConfigError, match="GatheredParameters"):
            _evicted(model[0]).copy_params_from(linear)
        with GatheredParameters(model[0], modifier_rank=0):
            model[0].copy_params_from(linear)
        assert torch.equal(untiled(dict(engine.named_parameters()), "0", model[0]), linear.weight.detach())


def _evicted(layer: TiledLinear) -> TiledLinear:
    """The layer as it is while its tiles are away."""
    away = copy.deepcopy(layer)
    for param in away.parameters():
        param.data = torch.full((), float("nan")).expand(param.shape)
    return away
