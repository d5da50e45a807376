"""fp16: steps that overflow are skipped, the scale survives a checkpoint, and stages place as they say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError, NonFiniteError
from tests.behaviour.reference import (
    LR,
    WEIGHT_DECAY,
    Placement,
    Recipe,
    batches,
    loss_of,
    tiny_gpt2,
    train,
    train_on,
)

WARMUP = 5


def config(placement: Placement, **fp16: Any) -> dict[str, Any]:
    values = Recipe("fp16", clipping=1.0).config(placement)
    values["fp16"] |= fp16
    return values


@pytest.mark.parametrize("device", ["none", "nvme"])
@pytest.mark.parametrize("schedule", ["deferred", "barrier"])
def test_steps_that_overflow_change_nothing_and_halve_the_scale(device, schedule, tmp_path) -> None:
    values = config(Placement(device, device, tmp_path, schedule=schedule), initial_scale_power=24, hysteresis=1)
    with infinity.initialize(model=tiny_gpt2(), config=values)[0] as engine:
        before = dict(engine.named_parameters())
        scales, losses = [], []
        for ids in batches(24):
            skipped = engine.skipped_steps
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            scales.append(engine.loss_scale.value)
            if engine.skipped_steps > skipped:
                assert engine.stats().skipped
                assert all(torch.equal(value, before[name]) for name, value in engine.named_parameters())
            else:
                before = dict(engine.named_parameters())
        assert 1 <= engine.skipped_steps < 24
        assert engine.global_steps == 24
        assert scales[-1] == 2.0 ** (24 - engine.skipped_steps)
        assert losses[-1] < losses[0]


@dataclass
class Course:
    """What a run with a dynamic scale did, step by step."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def plain_course(model: nn.Module, power: int, window: int, recipe: Recipe) -> Course:
    """torch's AdamW and GradScaler on fp32 masters; the scale rises where [Note: dynamic scale] says."""
    params = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().clone().requires_grad_() for p in params]
    model.half()
    optimizer = torch.optim.AdamW(masters, lr=0.0, weight_decay=WEIGHT_DECAY)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power, growth_interval=10**6)
    course = Course()
    taken = finite_in_a_row = 0
    data = batches(recipe.steps * recipe.accumulation)
    for start in range(0, len(data), recipe.accumulation):
        for ids in data[start : start + recipe.accumulation]:
            loss = loss_of(model, ids)
            course.losses.append(loss.item())
            scaler.scale(loss.float() / recipe.accumulation).backward()
            for master, param in zip(masters, params, strict=True):
                assert param.grad is not None
                master.grad = param.grad.float() + (0 if master.grad is None else master.grad)
                param.grad = None
        rate = LR * min(1.0, max(0, taken - 1) / WARMUP)
        optimizer.param_groups[0]["lr"] = rate
        scale = scaler.get_scale()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters, recipe.clipping)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped = scaler.get_scale() < scale
        finite_in_a_row = 0 if skipped else finite_in_a_row + 1
        taken += not skipped
        if finite_in_a_row > 1 and (finite_in_a_row - 1) % window == 0:
            scaler.update(2 * scale)
        course.scales.append(scaler.get_scale())
        course.skipped.append(skipped)
        course.rates.append(rate)
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                param.copy_(master)
    return course


def engine_course(power: int, window: int, recipe: Recipe, placement: Placement) -> Course:
    values = recipe.config(placement)
    values["fp16"] |= {"initial_scale_power": power, "loss_scale_window": window, "hysteresis": 1}
    values["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": WARMUP, "warmup_type": "linear"}}
    course = Course()
    with infinity.initialize(model=tiny_gpt2(), config=values)[0] as engine:
        for ids in batches(recipe.steps * recipe.accumulation):
            last = engine.is_gradient_accumulation_boundary()
            rate, skipped = engine.get_lr()[0], engine.skipped_steps
            course.losses += train_on(engine, [ids])
            if last:
                course.rates.append(rate)
                course.scales.append(engine.loss_scale.value)
                course.skipped.append(engine.skipped_steps > skipped)
    return course


@pytest.mark.parametrize(("accumulation", "device"), [(1, "none"), (3, "nvme")])
@pytest.mark.parametrize(("power", "window"), [(24, 1000), (20, 3)], ids=["falls", "falls-and-rises"])
def test_runs_that_skip_steps_follow_torchs_grad_scaler(power, window, accumulation, device, tmp_path) -> None:
    recipe = Recipe("fp16", accumulation, clipping=1.0, steps=30)
    plain = plain_course(tiny_gpt2(), power, window, recipe)
    ours = engine_course(power, window, recipe, Placement(device, device, tmp_path))
    assert 3 <= sum(plain.skipped) < 15
    assert ours.skipped == plain.skipped
    assert ours.scales == plain.scales
    assert ours.rates == pytest.approx(plain.rates)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-3)
    assert sum(ours.losses[-5:]) < 0.95 * sum(ours.losses[:5])


class Mixed(nn.Module):
    """Takes numbers in several ways, and says what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor, rest: dict[str, Any], *, scale: float) -> tuple[torch.Tensor, list[Any]]:
        first, index = rest["both"]
        return self.body[0](x + first)[index] * scale, [x.dtype, first.dtype, index.dtype, rest["name"]]


def test_inputs_are_cast_where_that_is_asked_for(tmp_path) -> None:
    x, index = torch.randn(4, 8, requires_grad=True), torch.tensor([1, 2])
    rest = {"both": (torch.randn(4, 8), index), "name": "as it is"}
    values = config(Placement("none", "none", tmp_path), auto_cast=True)
    with infinity.initialize(model=Mixed(), config=values)[0] as engine:
        out, given = engine(x, rest, scale=0.5)
        assert given == [torch.float16, torch.float16, torch.int64, "as it is"]
        engine.backward(out.float().square().mean())
        assert x.grad.dtype is torch.float32
        assert x.grad.any()
        engine.step()
    with (
        infinity.initialize(model=Mixed(), config=config(Placement("none", "none", tmp_path)))[0] as engine,
        pytest.raises(RuntimeError, match="dtype"),
    ):
        engine(x, rest, scale=0.5)


@pytest.mark.parametrize("accumulation", ["micro_batch", "layer"])
def test_inputs_of_train_batch_are_cast_in_every_order(accumulation, tmp_path) -> None:
    values = config(Placement("none", "none", tmp_path), auto_cast=True) | {"gradient_accumulation_steps": 2}
    values["tiering"]["accumulation"] = accumulation
    rest = {"both": (torch.randn(4, 8), torch.tensor([1, 2])), "name": "as it is"}
    batch = {"x": torch.randn(4, 8), "rest": rest, "scale": 0.5}

    def loss(output: tuple[torch.Tensor, list[Any]], given: dict[str, Any]) -> torch.Tensor:
        assert given is batch
        return output[0].float().square().mean()

    with infinity.initialize(model=Mixed(), config=values)[0] as engine:
        engine.train_batch([batch, batch], loss)
        assert engine.global_steps == 1


def test_a_scale_that_can_fall_no_more_is_an_error() -> None:
    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sum() * 1e30  # in fp16: infinite

    values = config(Placement(), initial_scale_power=1, hysteresis=1)
    with infinity.initialize(model=Overflowing(), config=values)[0] as engine:
        engine.backward(engine(torch.ones(2, 8, dtype=torch.float16)))
        engine.step()
        engine.backward(engine(torch.ones(2, 8, dtype=torch.float16)))
        with pytest.raises(NonFiniteError, match="at its minimum of 1"):
            engine.step()


def test_the_scale_and_the_masters_survive_a_checkpoint(tmp_path) -> None:
    values = config(Placement(), loss_scale_window=3, initial_scale_power=8)

    data = batches(12)
    with infinity.initialize(model=tiny_gpt2(), config=values)[0] as engine:
        train_on(engine, data[:5])
        engine.save_checkpoint(tmp_path)
        scale = engine.loss_scale.value
        rest = train_on(engine, data[5:])
        final = engine.loss_scale.value
    with infinity.initialize(model=tiny_gpt2(1), config=values)[0] as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.loss_scale.value == scale
        assert train_on(engine, data[5:]) == rest
        assert engine.loss_scale.value == final > scale


def test_updates_under_backward_are_refused() -> None:
    with pytest.raises(ConfigError, match="backward but the loss is scaled for fp16"):
        infinity.initialize(model=tiny_gpt2(), config=config(Placement(schedule="backward")))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_on_one_process_give_the_same_losses(stage, tmp_path) -> None:
    recipe = Recipe("fp16", clipping=1.0, steps=4)
    values = recipe.config(Placement("none", "cpu" if stage else "none"))
    values["zero_optimization"]["stage"] = stage
    with infinity.initialize(model=tiny_gpt2(), config=values)[0] as engine:
        losses = train_on(engine, batches(4))
    assert losses == train(tiny_gpt2(), recipe, Placement()).losses


@pytest.mark.parametrize(("stage", "named", "states"), [(2, "offload_param", "nvme"), (0, "offload_optimizer", "none")])
def test_what_a_stage_keeps_whole_stays_there_and_that_is_said(stage, named, states, caplog, tmp_path) -> None:
    values = Recipe(steps=4).config(Placement("nvme", "nvme", tmp_path))
    values["zero_optimization"]["stage"] = stage
    with infinity.initialize(model=tiny_gpt2(), config=values)[0] as engine:
        assert f"zero_optimization.{named}.device is nvme, which does nothing at stage {stage}" in caplog.text
        losses = train_on(engine, batches(4))
        zero = engine.config.zero
        assert (zero.offload_param.device, zero.offload_optimizer.device) == ("none", states)
    assert losses == train(tiny_gpt2(), Recipe(steps=4), Placement()).losses
