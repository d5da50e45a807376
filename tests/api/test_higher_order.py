"""Derivatives of derivatives, and functorch's transforms: torch's numbers where parameters stay, else a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import infinity
from infinity.errors import InfinityError
from infinity.tiers import SameMemory
from tests.behaviour.reference import LR, WEIGHT_DECAY, Placement, Recipe

STEPS = 3
LEAST = "120KiB"  # two blocks of parameters
REFUSED = r"backward with create_graph=True .* goes through units that leave memory"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Critic(nn.Module):
    """What a gradient penalty is for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def inputs() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(3))


def critic_in(placement: str, path: Path, link: Any = None) -> infinity.Engine:
    device = "nvme" if placement == "moves" else "none"
    config = Recipe("fp32", clipping=1.0).config(Placement(device, device, path, "4KiB"))
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 8
    return infinity.initialize(model=Critic(), config=config, link=link)[0]


def with_penalty(net: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = inputs().requires_grad_()
    scores = net(x)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return scores.mean() + (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("link", [None, SameMemory], ids=["unified", "discrete"])
def test_a_gradient_penalty_trains_as_in_torch_where_parameters_stay(link, tmp_path) -> None:
    plain = Critic()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    with critic_in("stays", tmp_path, None if link is None else link()) as engine:
        for _ in range(STEPS):
            expected, loss = with_penalty(plain), with_penalty(engine)
            assert torch.allclose(loss, expected, atol=1e-6)
            expected.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(loss)
            engine.step()
        for name, value in engine.named_parameters():
            assert torch.allclose(value, plain.get_parameter(name), atol=1e-6), name


def test_where_they_move_it_is_refused_and_training_goes_on(tmp_path) -> None:
    def train(engine: infinity.Engine) -> list[float]:
        losses = []
        for _ in range(STEPS):
            loss = engine(inputs()).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    with critic_in("moves", tmp_path) as engine:
        undisturbed = train(engine)
    with critic_in("moves", tmp_path) as engine:
        with pytest.raises(InfinityError, match=REFUSED):
            with_penalty(engine)
        assert train(engine) == undisturbed


@pytest.mark.parametrize("placement", ["stays", "moves"])
def test_the_first_derivative_by_inputs_is_torchs(placement, tmp_path) -> None:
    x = inputs().requires_grad_()
    (expected,) = torch.autograd.grad(Critic()(x).sum(), x)
    with critic_in(placement, tmp_path) as engine:
        (slope,) = torch.autograd.grad(engine(x).sum(), x)
        assert torch.allclose(slope, expected, atol=1e-6)


FORWARD: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "functional_call": lambda net: functional_call(net, doubled(), (inputs(),)),
    "vmap": lambda net: vmap(net)(inputs()),
    "jvp": lambda net: jvp(net, (inputs(),), (inputs(),))[1],
}
BACKWARD: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "grad": lambda net: grad(lambda x: net(x).sum())(inputs()),
    "grad of functional_call": lambda net: grad(lambda values: functional_call(net, values, (inputs(),)).sum())(
        doubled()
    )["head.weight"],
    "vmap of grad": lambda net: vmap(grad(lambda x: net(x).sum()))(inputs()),
    "jacrev": lambda net: jacrev(net)(inputs()[0]),
}


def doubled() -> dict[str, torch.Tensor]:
    return {name: 2 * param.detach() for name, param in Critic().named_parameters()}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, when jvp is first used
@pytest.mark.parametrize("transform", FORWARD)
@pytest.mark.parametrize("placement", ["stays", "moves"])
def test_transforms_of_the_forward_pass_give_torchs_numbers(placement, transform, tmp_path) -> None:
    with critic_in(placement, tmp_path) as engine, torch.no_grad():
        assert torch.allclose(FORWARD[transform](engine.module), FORWARD[transform](Critic()), atol=1e-6)


@pytest.mark.parametrize("transform", BACKWARD)
def test_transforms_of_the_backward_pass_give_them_where_parameters_stay(transform, tmp_path) -> None:
    with critic_in("stays", tmp_path) as engine:
        assert torch.allclose(BACKWARD[transform](engine.module), BACKWARD[transform](Critic()), atol=1e-6)


@pytest.mark.parametrize("transform", BACKWARD)
def test_and_are_refused_where_they_move(transform, tmp_path) -> None:
    with critic_in("moves", tmp_path) as engine, pytest.raises(InfinityError, match=REFUSED):
        BACKWARD[transform](engine.module)


class Operations(TorchDispatchMode):
    """Records what it sees, as selective activation checkpointing does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("link", [None, SameMemory], ids=["unified", "discrete"])
@pytest.mark.parametrize("placement", ["stays", "moves"])
def test_a_dispatch_mode_sees_the_operations_of_the_model_alone(placement, link, tmp_path) -> None:
    plain = Critic()
    with critic_in(placement, tmp_path, None if link is None else link()) as engine:
        for _ in range(STEPS):
            with Operations() as expected:
                plain(inputs()).square().mean().backward()
            with Operations() as of_engine:
                engine(inputs()).square().mean().backward()
            engine.step()
            assert of_engine.seen == expected.seen
            plain.zero_grad()


class PerSample(Critic):
    """Its blocks are called within a transform."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = vmap(block)(x)
        return self.head(x)


@pytest.mark.parametrize("wrap", [PerSample, Critic])
@pytest.mark.parametrize("placement", ["stays", "moves"])
def test_modules_within_vmap_train_as_in_torch(placement, wrap, tmp_path) -> None:
    """Frozen in part, so that a block's backward goes on when its own gradients are there."""

    def frozen(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            block.up.requires_grad_(False)
        return model

    plain = frozen(wrap())
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=LR, weight_decay=WEIGHT_DECAY)
    moves = Placement("nvme", "nvme", tmp_path, "4KiB", LEAST, "deferred")
    config = Recipe("fp32").config(moves if placement == "moves" else Placement(schedule="deferred"))
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 8
    with infinity.initialize(model=frozen(wrap()), config=config)[0] as engine:
        called = engine.module if wrap is PerSample else vmap(engine.module)
        for _ in range(STEPS):
            (plain if wrap is PerSample else vmap(plain))(inputs()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(called(inputs()).square().mean())
            engine.step()
        for name, value in engine.named_parameters():
            assert torch.allclose(value, plain.get_parameter(name), atol=1e-6), name


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_parameters_that_leave_memory_within_a_transform_are_ordinary_afterwards(tmp_path) -> None:
    config = Recipe("fp32").config(Placement("nvme", "nvme", tmp_path, "4KiB", LEAST))
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 8
    with infinity.initialize(model=Critic(), config=config)[0] as engine, torch.no_grad():
        slope = FORWARD["jvp"](engine.module)
        assert torch.allclose(engine(inputs()), Critic()(inputs()), atol=1e-6)
        assert torch.allclose(slope, FORWARD["jvp"](Critic()), atol=1e-6)
