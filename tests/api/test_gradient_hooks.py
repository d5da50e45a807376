"""Hooks that a script registers for gradients see them, and what they change counts, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.api.small_models import WIDTH, Heads, engine_of

Registers = Callable[[nn.Module], None]


def _hook(model: nn.Module) -> None:
    for param in model.parameters():
        param.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


def _accumulated_hook(model: nn.Module) -> None:
    def clamp(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(-1e-3, 1e-3)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(clamp)


def _module_hook(model: Any) -> None:
    model.out.register_full_backward_hook(lambda module, of_inputs, of_outputs: (of_inputs[0] * 0.5,))


def _dropping_hook(model: Any) -> None:
    def drop(param: torch.Tensor) -> None:
        param.grad = None

    model.mix.bias.register_post_accumulate_grad_hook(drop)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("register", [_hook, _accumulated_hook, _module_hook, _dropping_hook])
def test_what_hooks_make_of_gradients_is_trained_with(register: Registers, before: bool, stage: int) -> None:
    torch.manual_seed(0)
    model = Heads()
    torch.manual_seed(0)
    plain = Heads()
    register(plain)
    if before:
        register(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    config = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 1e-2}}
    more = {"gradient_clipping": 0.0, "optimizer": config, "zero_optimization": {"stage": stage}}
    with engine_of(model, **more) as engine:
        if not before:
            register(model)
        for seed in range(3):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
            engine.backward(engine(x).square().mean())
            engine.step()
            plain(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in engine.named_parameters():
            torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)
