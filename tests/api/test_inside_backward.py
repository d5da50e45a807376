"""What a function with a backward of its own may do while the engine's backward pass runs, and what is refused there.

Before the last micro-batch of a step nothing may be lost: what earlier ones have left is part of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.integrations.deepspeed.engine import initialize
from infinity.integrations.deepspeed.parameters import GatheredParameters
from infinity.integrations.deepspeed.values import safe_get_full_fp32_param, safe_get_full_grad
from tests.api.small_models import CONFIG

WIDTH = 64
pytestmark = pytest.mark.usefixtures("ends_process_group")


class Projection(torch.autograd.Function):
    """A product with a weight that no module is called for, as fused losses have it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, inside: Callable[[torch.Tensor], Any]) -> Any:
        ctx.save_for_backward(hidden, weight)
        ctx.inside = inside
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        with ctx.inside(weight):
            return grad @ weight, grad.t() @ hidden, None


class Nothing:
    def __init__(self, weight: torch.Tensor) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.inside: Callable[[torch.Tensor], Any] = Nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return Projection.apply(x, self.head.weight, self.inside).square().mean()


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def engine_of(model: nn.Module, tmp_path: Any, home: str) -> Any:
    place = {"device": home, **({"nvme_path": str(tmp_path)} if home == "nvme" else {})}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": place, "offload_optimizer": place}
    config = CONFIG | {"zero_optimization": zero, "gradient_accumulation_steps": 3}
    if home == "nvme":
        config["tiering"] = {"host_memory": "256KiB", "tile_size": "16KiB"}
    return initialize(model=model, config=config)[0]


@pytest.mark.parametrize("home", ["none", "nvme"])
def test_parameters_are_gathered_in_a_backward_of_ones_own(home, tmp_path) -> None:
    plain, model = Fused(), Fused()
    model.inside = lambda weight: GatheredParameters([weight])
    for step in range(3):
        (plain(inputs(step)) / 3).backward()
    with engine_of(model, tmp_path, home) as engine:
        for step in range(3):
            engine.backward(engine(inputs(step)))
            if step < 2:
                engine.step()
        for name, param in model.named_parameters():
            torch.testing.assert_close(safe_get_full_grad(param), plain.get_parameter(name).grad, msg=name)
        engine.step()


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "gathering": lambda engine, weight: infinity.zero.GatheredParameters([weight]).__enter__(),
    "changing": lambda engine, weight: GatheredParameters([weight], modifier_rank=0).__enter__(),
    "looking": lambda engine, weight: safe_get_full_fp32_param(weight),
    "gradient": lambda engine, weight: safe_get_full_grad(weight),
    "saving": lambda engine, weight: engine.save_checkpoint("nowhere"),
    "dropping": lambda engine, weight: engine.zero_grad(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_would_end_the_pass_is_refused_in_it(call, tmp_path) -> None:
    model = Fused()
    with engine_of(model, tmp_path, "none") as engine:
        engine.backward(engine(inputs(0)))
        engine.step()

        def inside(weight: torch.Tensor) -> Nothing:
            call(engine, weight)
            return Nothing(weight)

        model.inside = inside
        loss = engine(inputs(1))
        with pytest.raises(infinity.InfinityError, match="the engine is in the middle of a backward pass"):
            engine.backward(loss)
        model.inside = Nothing
        for step in range(3):  # the step begins anew
            engine.backward(engine(inputs(step)))
            engine.step()
        assert engine.global_steps == 1
