"""Optimizers under DeepSpeed's names in plain loops, without an engine: torch's numbers, moments in float32."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.integrations.deepspeed.named_optimizers import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLion,
)
from infinity.optim.plain import Lion

Make = Callable[[Any], torch.optim.Optimizer]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(40, 70), (7,), (), (0, 3), (2, 3, 4, 5)]


class LionInTorch(torch.optim.Optimizer):
    """The rule of arXiv 2302.06675, as its authors write it."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    m = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.sub_(group["lr"] * torch.sign(0.9 * m + 0.1 * param.grad))
                    m.mul_(0.99).add_(param.grad, alpha=0.01)


PAIRS: dict[str, tuple[Make, Make]] = {
    "DeepSpeedCPUAdam": (
        partial(DeepSpeedCPUAdam, lr=1e-2, weight_decay=0.1),
        partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    ),
    "coupled": (
        partial(DeepSpeedCPUAdam, lr=1e-2, weight_decay=0.1, adamw_mode=False),
        partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    ),
    "FusedAdam": (partial(FusedAdam, lr=1e-2), partial(torch.optim.Adam, lr=1e-2)),
    "DeepSpeedCPUAdagrad": (
        partial(DeepSpeedCPUAdagrad, lr=1e-1, weight_decay=0.1),
        partial(torch.optim.Adagrad, lr=1e-1, weight_decay=0.1),
    ),
    "DeepSpeedCPULion": (partial(DeepSpeedCPULion, weight_decay=0.1), partial(LionInTorch, weight_decay=0.1)),
    "FusedLion": (partial(FusedLion, lr=1e-2, set_grad_none=True), partial(LionInTorch, lr=1e-2)),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    transposed = torch.randn(11, 13, generator=generator).to(dtype).t()
    last = torch.randn(2, 3, 4, 4, generator=generator).to(dtype).contiguous(memory_format=torch.channels_last)
    return [*made, nn.Parameter(transposed), nn.Parameter(last)]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(param.shape, generator=generator) for param in parameters()]


def advance(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Parameters by turns have gradients, or none at all."""
    for step in steps:
        for index, (param, grad) in enumerate(zip(params, gradients(step), strict=True)):
            param.grad = None if (step + index) % 5 == 4 else grad.to(param.dtype)
        optimizer.step()


def advance_rounded(params: list[nn.Parameter], make: Make, dtype: torch.dtype, steps: int) -> None:
    """What `make`'s optimizer does in float32, on parameters that are rounded to `dtype` after every step."""
    optimizer = make(params)
    for step in range(steps):
        for index, (param, grad) in enumerate(zip(params, gradients(step), strict=True)):
            param.grad = None if (step + index) % 5 == 4 else grad.to(dtype).float()
        optimizer.step()
        with torch.no_grad():
            for param in params:
                param.copy_(param.to(dtype))


def assert_near(ours: list[nn.Parameter], theirs: list[nn.Parameter], dtype: torch.dtype) -> None:
    last_bit = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach().float(), other.detach(), rtol=last_bit, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_without_an_engine_they_are_torchs_in_float32(name, dtype) -> None:
    make, like = PAIRS[name]
    ours, theirs = parameters(dtype), [nn.Parameter(param.detach().float()) for param in parameters(dtype)]
    optimizer = make(ours)
    advance(ours, optimizer, range(12))
    advance_rounded(theirs, like, dtype, 12)
    if name in ("DeepSpeedCPULion", "FusedLion"):  # a sign may differ where a sum is zero but for its rounding
        pairs = zip(ours, theirs, strict=True)
        differing = sum(int((one.float() != other).sum()) for one, other in pairs) if dtype != torch.float32 else 0
        assert differing <= 3
    else:
        assert_near(ours, theirs, dtype)
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert {moment.dtype for moment in moments} == {torch.float32}


def test_a_second_moment_beside_bfloat16_forgets() -> None:
    """0.999 times a number of 8 bits is that number."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = DeepSpeedCPUAdam([param])
    for step in range(50):
        param.grad = torch.full_like(param, 1.0 if step == 0 else 0.0)
        optimizer.step()
    assert optimizer.state[param]["exp_avg_sq"][0].item() == pytest.approx(1e-3 * 0.999**49, rel=1e-4)


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, Lion])
def test_moments_of_16_bits_where_they_are_asked_for(kind) -> None:
    params = parameters(torch.bfloat16)
    optimizer = kind(params, fp32_optimizer_states=False)
    advance(params, optimizer, range(2))
    again = kind(params, fp32_optimizer_states=False)
    again.load_state_dict(optimizer.state_dict())
    for one in (optimizer, again):
        moments = [value for state in one.state.values() for key, value in state.items() if key != "step"]
        assert {moment.dtype for moment in moments} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_a_state_dict_goes_on_with_the_same_bits(name, dtype) -> None:
    make, _ = PAIRS[name]
    params = parameters(dtype)
    optimizer = make(params)
    advance(params, optimizer, range(3))
    others = [nn.Parameter(param.detach().clone()) for param in params]
    again = make(others)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    again.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    advance(params, optimizer, range(3, 6))
    advance(others, again, range(3, 6))
    assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))
    copied = copy.deepcopy(again)
    assert copied.defaults == again.defaults


@pytest.mark.parametrize("name", ["DeepSpeedCPUAdam", "coupled", "DeepSpeedCPUAdagrad"])
def test_a_state_dict_goes_to_torch_and_back(name) -> None:
    make, like = PAIRS[name]
    ours, theirs = parameters(), parameters()
    optimizer, peer = make(ours), like(theirs)
    advance(ours, optimizer, range(3))
    advance(theirs, peer, range(3))
    missing = make(ours)
    missing.load_state_dict(peer.state_dict())
    peer.load_state_dict({**peer.state_dict(), "state": optimizer.state_dict()["state"]})
    advance(ours, missing, range(3, 6))
    advance(theirs, peer, range(3, 6))
    assert_near(ours, theirs, torch.float32)


def test_states_of_deepspeeds_own_are_taken() -> None:
    """It counts steps in plain numbers, and its groups lack what torch's have."""
    params = parameters(torch.bfloat16)
    optimizer = DeepSpeedCPUAdam(params, adamw_mode=False)
    advance(params, optimizer, range(5))
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    keys = ("lr", "betas", "eps", "weight_decay", "amsgrad", "params")
    saved["param_groups"] = [
        {key: group[key] for key in keys} | {"bias_correction": True} for group in saved["param_groups"]
    ]
    others = [nn.Parameter(param.detach().clone()) for param in params]
    again = DeepSpeedCPUAdam(others, adamw_mode=False)
    again.load_state_dict(saved)
    advance(params, optimizer, range(5, 8))
    advance(others, again, range(5, 8))
    assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))


@pytest.mark.parametrize("adamw_mode", [True, False])
def test_groups_have_their_own_numbers_also_where_they_come_later(adamw_mode) -> None:
    like = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    ours, theirs = parameters(), parameters()
    optimizers = [
        kind(
            [{"params": params[:2], "lr": 1e-2, "weight_decay": 0.3}, {"params": params[2:4], "betas": (0.5, 0.9)}],
            weight_decay=0.1,
            **options,
        )
        for kind, params, options in ((DeepSpeedCPUAdam, ours, {"adamw_mode": adamw_mode}), (like, theirs, {}))
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    for params, optimizer, schedule in zip((ours, theirs), optimizers, schedules, strict=True):
        advance(params, optimizer, range(2))
        schedule.step()
        optimizer.add_param_group({"params": params[4:], "lr": torch.tensor(0.1), "maximize": True})
        advance(params, optimizer, range(2, 6))
    assert_near(ours, theirs, torch.float32)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_rows_of_an_embedding_with_sparse_gradients() -> None:
    tables = []
    for kind in (DeepSpeedCPUAdagrad, torch.optim.Adagrad):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True)
        optimizer = kind(table.parameters(), lr=0.1)
        for ids in ([1, 1, 3], [3, 9, 0], [1, 2, 3]):
            optimizer.zero_grad()
            table(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
        tables.append(table.weight.detach())
    torch.testing.assert_close(*tables)
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="gradient is sparse"):
        DeepSpeedCPUAdam(table.parameters()).step()


def test_a_closure_is_evaluated_with_gradients() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = Lion([param], lr=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert param.tolist() == [0.5, 0.5, 0.5]


def test_what_has_no_counterpart_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    for options in ({"amsgrad": True}, {"bias_correction": False}):
        for kind in (DeepSpeedCPUAdam, FusedAdam):
            with pytest.raises(ConfigError, match=rf"{kind.__name__}: {next(iter(options))}=\w+ is not supported"):
                kind(params, **options)
            with pytest.raises(ConfigError, match="is not supported"):
                kind([{"params": params, **options}])
    saved = torch.optim.AdamW(params, amsgrad=True).state_dict()
    optimizer = DeepSpeedCPUAdam(params)
    optimizer.load_state_dict(saved)
    params[0].grad = torch.ones(2)
    with pytest.raises(ConfigError, match="DeepSpeedCPUAdam: amsgrad=True is not supported"):
        optimizer.step()
    for wrong, words in (
        (torch.ones(2, dtype=torch.float64), "float64"),
        (torch.ones(2, device="meta"), "meta device"),
    ):
        param = nn.Parameter(wrong)
        param.grad = torch.ones_like(wrong)
        with pytest.raises(ConfigError, match=words):
            Lion([param]).step()
