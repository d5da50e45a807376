"""What losses do between a forward pass and its backward, and in the middle of either, beside plain torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity import InfinityError
from infinity.zero import GatheredParameters
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import named_budget

WIDTH, STEPS, LR = 16, 3, 1e-2
EPS = 1e-3  # so that rounding of the smallest gradients does not show


class Chunked(torch.autograd.Function):
    """The mean square of a linear layer's output, with gradients made in the forward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = hidden @ weight.T
        ctx.save_for_backward(2 * out @ weight / out.numel(), 2 * out.T @ hidden / out.numel())
        return out.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_hidden, of_weight = ctx.saved_tensors
        return grad * of_hidden, grad * of_weight


class Late(torch.autograd.Function):
    """The same, of the weight as it is in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return (hidden @ weight.T).square().mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        out = hidden @ weight.T
        return grad * 2 * out @ weight / out.numel(), grad * 2 * out.T @ hidden / out.numel()


class Net(nn.Module):
    """Blocks and a head that the loss reads: `within` says what of it happens in the forward."""

    def __init__(self, within: Callable[[Net, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.within = within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x if self.within is None else self.within(self, x)


Called = Callable[[torch.Tensor], torch.Tensor]
Loss = Callable[[Called, Net, torch.Tensor, Any], torch.Tensor]  # of (model, module, batch, GatheredParameters)


def fused(model: Called, net: Net, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    hidden = model(x)
    with gathered([net.head.weight]):
        return Chunked.apply(hidden, net.head.weight)  # type: ignore[no-any-return, no-untyped-call]


def late(model: Called, net: Net, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    hidden = model(x)
    with gathered(net.head):
        return Late.apply(hidden, net.head.weight)  # type: ignore[no-any-return, no-untyped-call]


def called_inside(model: Called, net: Net, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    hidden = model(x)
    with gathered(net.head):
        return net.head(hidden).square().mean()  # type: ignore[no-any-return]


def penalty(model: Called, net: Net, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    loss = model(x).square().mean()
    with gathered(net):
        return loss + 1e-2 * sum(param.square().sum() for param in net.parameters())


def nested(model: Called, net: Net, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    loss = model(x).square().mean()
    with gathered(net.blocks), gathered(net.blocks[0]):
        return loss + net.blocks[0].weight.square().sum()


OUTSIDE: list[Loss] = [fused, late, called_inside, penalty, nested]


def _fused_within(net: Net, x: torch.Tensor) -> torch.Tensor:
    with GatheredParameters(net.head.weight):
        return Chunked.apply(x, net.head.weight)  # type: ignore[no-any-return, no-untyped-call]


def _penalty_within(net: Net, x: torch.Tensor) -> torch.Tensor:
    with GatheredParameters(net):
        extra = 1e-2 * sum(param.square().sum() for param in net.parameters())
    return x.square().mean() + extra


def engine_of(net: nn.Module, stage: int, tier: str, path: Path, **settings: Any) -> infinity.Engine:
    offload = {"device": tier, "nvme_path": str(path)}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": offload, "stage3_param_persistence_threshold": 0}
    if stage == 3:
        zero["offload_param"] = offload
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS}},
        "zero_optimization": zero,
        "tiering": {"tile_size": "4KiB", "status": False},
    }
    return infinity.initialize(model=net, config=config | settings, device="cpu")[0]


def differences(loss: Loss, within: Any, stage: int, tier: str, clipping: float, path: Path) -> list[str]:
    """The parameters that an engine trains otherwise than plain torch."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plain, net = Net(within), Net(within)
    data = torch.randn(STEPS, ranks, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    with engine_of(net, stage, tier, path, gradient_clipping=clipping) as engine:
        for step in data:
            for x in step:
                (loss(plain, plain, x, lambda _: nullcontext()) / ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(loss(engine, net, step[rank], GatheredParameters))
            engine.step()
        ours = dict(engine.named_parameters())
    return [
        name
        for name, values in plain.named_parameters()
        if not torch.allclose(ours[name], values, rtol=1e-4, atol=LR / 100)
    ]


PLACES = [(2, "cpu"), (3, "cpu"), (3, "nvme")]


@pytest.mark.parametrize("loss", OUTSIDE)
@pytest.mark.parametrize(("stage", "tier"), PLACES)
@pytest.mark.parametrize("clipping", [0.0, 1e9])
def test_a_loss_may_gather_what_it_reads_after_the_forward(loss, stage, tier, clipping, tmp_path) -> None:
    assert not differences(loss, None, stage, tier, clipping, tmp_path)


def whole(model: Called, net: Net, x: torch.Tensor, gathered: Any) -> torch.Tensor:
    return model(x)


@pytest.mark.parametrize("within", [_fused_within, _penalty_within])
@pytest.mark.parametrize(("stage", "tier"), PLACES)
def test_a_loss_may_gather_what_it_reads_in_the_forward(within, stage, tier, tmp_path) -> None:
    assert not differences(whole, within, stage, tier, 0.0, tmp_path)


def on_a_rank(path: Path) -> list[list[str]]:
    found = [differences(loss, None, stage, "cpu", 1e9, path) for loss in OUTSIDE for stage in (2, 3)]
    within = (_fused_within, _penalty_within)
    return found + [differences(whole, each, stage, "cpu", 0.0, path) for each in within for stage in (2, 3)]


def test_losses_gather_on_several_ranks(tmp_path) -> None:
    for found in run_ranks(2, on_a_rank, tmp_path, path=tmp_path):
        assert found == [[]] * len(found)


def test_what_is_gathered_between_passes_must_not_change(tmp_path) -> None:
    net = Net()
    with engine_of(net, 3, "cpu", tmp_path) as engine:
        loss = engine(torch.ones(2, WIDTH)).square().mean()
        with pytest.raises(InfinityError, match="with a modifier_rank between a forward pass and its backward"):
            GatheredParameters(net, modifier_rank=0).__enter__()
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("read", [fused, penalty])
def test_a_parameter_that_a_loss_reads_where_it_is_not_is_named(read, tmp_path) -> None:
    tiering = {"tile_size": "4KiB", "status": False, "host_memory": 1}
    with pytest.raises(infinity.CapacityError) as least:
        engine_of(Net(), 3, "nvme", tmp_path, tiering=tiering)
    tiering["host_memory"] = named_budget(least.value)
    net = Net()
    with engine_of(net, 3, "nvme", tmp_path, tiering=tiering) as engine:
        loss = read(engine, net, torch.ones(2, WIDTH), lambda _: nullcontext())
        assert loss.isnan()
        with pytest.raises(InfinityError, match=r"was computed from `(head|blocks\.\d)\.\w+` outside of the model's"):
            engine.backward(loss)
        loss = engine(torch.ones(2, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()


def cached(model: Called, chunks: torch.Tensor, backward: Callable[[torch.Tensor], object]) -> None:
    """A contrastive loss of all chunks whose representations are computed again in the backward, one at a time."""
    with torch.no_grad():
        known = [model(chunk) for chunk in chunks]
    together = torch.cat(known).requires_grad_()

    def again(grad: torch.Tensor) -> None:
        for chunk, of_chunk in zip(chunks, grad.chunk(len(chunks)), strict=True):
            with torch.enable_grad():
                (model(chunk) * of_chunk).sum().backward()

    loss = (together @ together.T).logsumexp(0).mean()
    handle = together.register_hook(again)
    backward(loss)
    handle.remove()


@pytest.mark.parametrize(("stage", "tier"), PLACES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_engine_is_called_inside_a_hook_of_the_backward(stage, tier, accumulation, tmp_path) -> None:
    """As cached contrastive losses do."""
    plain, net = Net(), Net()
    data = torch.randn(STEPS * accumulation, 3, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    settings = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 1e9}
    with engine_of(net, stage, tier, tmp_path, **settings) as engine:
        for number, chunks in enumerate(data, 1):
            cached(plain, chunks, lambda loss: (loss / accumulation).backward())
            cached(engine, chunks, engine.backward)
            engine.step()
            if number % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
        ours = dict(engine.named_parameters())
    for name, values in plain.named_parameters():
        if values.grad is not None or not name.startswith("head"):
            torch.testing.assert_close(ours[name], values, rtol=1e-4, atol=LR / 100)


def test_an_engine_without_an_optimizer_takes_the_weights_of_a_training(tmp_path) -> None:
    with engine_of(Net(), 3, "cpu", tmp_path) as engine:
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()
        engine.save_checkpoint(tmp_path / "saved", client_state={"epoch": 3})
        trained = dict(engine.named_parameters())
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    with infinity.initialize(model=Net(), config=config, device="cpu", trains=False)[0] as engine:
        assert engine.load_checkpoint(tmp_path / "saved")[1] == {"epoch": 3}
        assert engine.global_steps == 1
        for name, values in engine.named_parameters():
            assert torch.equal(values, trained[name])
