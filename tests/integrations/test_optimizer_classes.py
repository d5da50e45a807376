"""The optimizer of an engine under DeepSpeed's names: of the class that scripts ask for, with what they read of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infinity
from infinity.integrations.deepspeed import deepspeeds_settings
from infinity.integrations.deepspeed.engine import initialize
from infinity.integrations.deepspeed.named_optimizers import DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam
from infinity.integrations.deepspeed.optimizers import (
    BF16_Optimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
    ZeROOptimizer,
)
from infinity.optim.optimizer import TieredOptimizer
from tests.api.small_models import CONFIG, WIDTH, Heads

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


@pytest.mark.parametrize(
    ("stage", "section", "more", "cls"),
    [
        (0, "bf16", {}, FP16_Optimizer),
        (0, "fp16", {}, FP16_Optimizer),
        (0, "fp16", {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, FP16_UnfusedOptimizer),
        (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}, BF16_Optimizer),
        (1, "bf16", {}, DeepSpeedZeroOptimizer),
        (2, "fp16", {}, DeepSpeedZeroOptimizer),
    ],
)
def test_its_class_is_that_of_its_precision(stage, section, more, cls) -> None:
    with engine_at(stage, **{section: {"enabled": True}}, **more) as engine:
        assert type(engine.optimizer) is cls


@pytest.mark.parametrize(
    ("section", "device", "cls"),
    [
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, "none", FusedAdam),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "cpu", DeepSpeedCPUAdam),
        ({"type": "Adam", "params": {"torch_adam": True}}, "cpu", torch.optim.AdamW),
        ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}, "none", torch.optim.Adam),
        ({"type": "Lion", "params": {}}, "cpu", DeepSpeedCPULion),
        ({"type": "Adagrad", "params": {}}, "none", torch.optim.Adagrad),
        ({"type": "SGD", "params": {"lr": 0.5}}, "none", torch.optim.SGD),
    ],
)
def test_the_one_beneath_is_what_deepspeed_would_make(section, device, cls) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": device}}
    with engine_at(2, optimizer=section, zero_optimization=zero) as engine:
        base = engine.optimizer.optimizer
        assert isinstance(base, cls)
        assert base is engine.optimizer.optimizer is engine.basic_optimizer
        assert base.param_groups is engine.optimizer.param_groups
        assert not base.state
        if isinstance(base, DeepSpeedCPUAdam):
            assert base.adam_w_mode == (section["type"] == "AdamW")


def test_the_one_beneath_is_what_was_given() -> None:
    model = Heads()
    given = torch.optim.Adam(model.parameters(), lr=0.5)
    with initialize(model=model, optimizer=given, config=CONFIG | {"optimizer": None})[0] as engine:
        assert engine.optimizer.optimizer is given
        engine.optimizer.optimizer.param_groups[0]["lr"] = 0.25
        assert engine.get_lr() == [0.25]


def test_the_loss_scale_has_its_names_in_deepspeed() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 7, "min_loss_scale": 2}
    with engine_at(0, fp16=fp16) as engine:
        optimizer = engine.optimizer
        for names in (optimizer, optimizer.loss_scale_config, optimizer.loss_scaler):
            found = names.cur_scale, names.dynamic_loss_scale, names.cur_iter, names.scale_window, names.min_loss_scale
            assert found == (16, True, 0, 7, 2)
        assert engine.loss_scale() == 0
        backward(engine)
        engine.step()
        assert optimizer.cur_iter == 1


def test_a_setting_of_deepspeeds_is_refused_or_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with engine_at(2) as engine:
        for owner in (engine, engine.optimizer):
            with pytest.raises(infinity.ConfigError, match=r"gradient_predivide_factor cannot be set.*configuration"):
                owner.gradient_predivide_factor = 2.0
            owner.of_my_own = 3
            assert owner.of_my_own == 3
        deepspeeds_settings._warned.clear()
        with caplog.at_level("WARNING", logger="deepspeed"):
            for _ in range(2):
                engine.optimizer.overlap_comm = False
        assert caplog.text.count("optimizer.overlap_comm is set, which has no effect") == 1
        with pytest.raises(AttributeError):
            engine.optimizer.cur_scale = 3.0


def test_another_schedule_may_take_its_place() -> None:
    with engine_at(2) as engine:
        engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.5**step)
        before = engine.get_lr()[0]
        backward(engine)
        engine.step()
        assert engine.get_lr() == [before / 2]
        assert engine.lr_scheduler.last_epoch == 1


class ScheduleOfTransformers(torch.optim.lr_scheduler.LambdaLR):
    """As GreedyLR and AdafactorSchedule, which are no functions that make a schedule."""

    __module__ = "transformers.optimization"


def test_a_schedule_of_a_class_of_transformers_is_taken_over() -> None:
    model = Heads()
    given = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = ScheduleOfTransformers(given, lambda step: 0.5**step)
    engine, optimizer, _, returned = initialize(model=model, optimizer=given, lr_scheduler=schedule, config=CONFIG)
    with engine:
        assert returned is schedule
        backward(engine)
        engine.step()
        assert optimizer is not None
        assert optimizer.param_groups[0]["lr"] == 0.5
