"""The optimizer of an engine under DeepSpeed's names: of the class that scripts ask for, with what they read of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infinity
from infinity.integrations.dialect.engine import initialize
from infinity.integrations.dialect.optimizers import (
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    ZeROOptimizer,
)
from infinity.optim.optimizer import TieredOptimizer
from tests.doors.small_models import CONFIG, WIDTH, Heads

pytestmark = pytest.mark.usefixtures("ends_process_group")


def engine_at(stage: int, **more: Any) -> Any:
    torch.manual_seed(0)
    return initialize(model=Heads(), config=CONFIG | {"zero_optimization": {"stage": stage}} | more)[0]


def backward(engine: Any) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().square().mean())


@pytest.mark.parametrize("stage", range(4))
def test_its_class_is_that_of_its_stage(stage) -> None:
    with engine_at(stage) as engine:
        assert isinstance(engine.optimizer, TieredOptimizer)
        assert isinstance(engine.optimizer, ZeROOptimizer) == (stage > 0)
        assert isinstance(engine.optimizer, DeepSpeedZeroOptimizer) == (stage in {1, 2})
        assert isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3) == (stage == 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", [{}, {"fp16": {"enabled": True, "initial_scale_power": 3}}])
def test_averaged_gradients_are_those_of_the_step(precision, stage) -> None:
    with engine_at(stage, **precision) as engine:
        optimizer = engine.optimizer
        assert optimizer.averaged_gradients == {}
        backward(engine)
        found = optimizer.averaged_gradients
        grads = [infinity.utils.safe_get_full_grad(param).flatten() for param in engine.module.parameters()]
        assert list(found) == [0]
        scale = 8.0 if precision else 1.0
        for here, there in zip(found[0], grads, strict=True):
            assert torch.equal(here, there * scale)
        with pytest.raises(RuntimeError, match="inference tensor"):
            found[0][0].mul_(2)
        engine.step()
        assert optimizer.averaged_gradients == {}
        assert optimizer._global_grad_norm == engine.get_global_grad_norm()


def test_averaged_gradients_can_be_dropped_and_not_be_exchanged() -> None:
    with engine_at(2) as engine:
        before = dict(infinity.Engine.named_parameters(engine))
        backward(engine)
        with pytest.raises(infinity.ConfigError, match="averaged_gradients cannot be set to other gradients"):
            engine.optimizer.averaged_gradients = {0: []}
        engine.optimizer.averaged_gradients = {}
        engine.step()
        assert all(torch.equal(value, before[name]) for name, value in infinity.Engine.named_parameters(engine))


def test_clipping_is_the_configurations() -> None:
    with engine_at(2) as engine:
        assert engine.optimizer.clip_grad == CONFIG["gradient_clipping"]
        engine.optimizer.clip_grad = CONFIG["gradient_clipping"]
        with pytest.raises(infinity.ConfigError, match=r"clip_grad is 0\.5 and cannot become 0\.1"):
            engine.optimizer.clip_grad = 0.1
