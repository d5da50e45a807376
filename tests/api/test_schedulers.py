"""Every learning-rate scheduler of torch does to the engine's optimizer what it does to torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

import infinity
from tests.behaviour.reference import Placement, Recipe

# torch 2.6 warns of what its own SequentialLR does
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")

STEPS = 12
LR = 0.1

Make = Callable[[torch.optim.Optimizer], Any]


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    warm = schedules.LinearLR(optimizer, 0.1, total_iters=3)
    return schedules.SequentialLR(
        optimizer, [warm, schedules.StepLR(optimizer, 2), schedules.ExponentialLR(optimizer, 0.5)], milestones=[4, 8]
    )


def _chained(optimizer: torch.optim.Optimizer) -> Any:
    """One that has another with several of its own."""
    return schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.1, total_iters=4), _sequential(optimizer)], optimizer
    )


def _of_the_defaults(optimizer: torch.optim.Optimizer) -> schedules.LambdaLR:
    """As transformers' polynomial decay."""
    return schedules.LambdaLR(optimizer, lambda step: 1 - 0.001 * step / optimizer.defaults["lr"])


class Follower:
    """Follows a metric and is of no class of torch, as transformers' GreedyLR."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.best = 1e9

    def step(self, metrics: float) -> None:
        factor = 1.1 if metrics < self.best else 0.8
        self.best = min(self.best, metrics)
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class Plateau(schedules.ReduceLROnPlateau):
    """As one that can also be called without a metric, which the engine must not do."""

    def step(self, metrics: float | None = None, epoch: int | None = None) -> None:  # type: ignore[override]
        if metrics is None:
            raise TypeError("the engine has called this")
        super().step(metrics, epoch)


FOLLOWERS = (schedules.ReduceLROnPlateau, Follower)

MAKERS: dict[str, Make] = {
    "LambdaLR": partial(schedules.LambdaLR, lr_lambda=[lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "MultiplicativeLR": partial(schedules.MultiplicativeLR, lr_lambda=lambda step: 0.9 if step % 2 else 1.1),
    "StepLR": partial(schedules.StepLR, step_size=3),
    "MultiStepLR": partial(schedules.MultiStepLR, milestones=[2, 5]),
    "ConstantLR": partial(schedules.ConstantLR, factor=0.3, total_iters=4),
    "LinearLR": partial(schedules.LinearLR, start_factor=0.1, total_iters=6),
    "ExponentialLR": partial(schedules.ExponentialLR, gamma=0.8),
    "SequentialLR": _sequential,
    "ChainedScheduler": _chained,
    "PolynomialLR": partial(schedules.PolynomialLR, total_iters=8, power=2.0),
    "CosineAnnealingLR": partial(schedules.CosineAnnealingLR, T_max=5, eta_min=0.01),
    "CosineAnnealingWarmRestarts": partial(schedules.CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "CyclicLR": partial(schedules.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=3),
    "OneCycleLR": partial(schedules.OneCycleLR, max_lr=[0.3, 0.2], total_steps=STEPS + 1),
    "ReduceLROnPlateau": partial(schedules.ReduceLROnPlateau, patience=1, factor=0.5),
    "SWALR": partial(SWALR, swa_lr=0.02, anneal_epochs=4),
    "one that reads the optimizer's defaults": _of_the_defaults,
    "one of a library that follows a metric": Follower,
    "one with a default for its metric": partial(Plateau, patience=1, factor=0.5),
}


def test_every_scheduler_of_torch_is_here() -> None:
    classes = {
        name
        for name, kind in vars(schedules).items()
        if inspect.isclass(kind) and issubclass(kind, schedules.LRScheduler) and not name.startswith("_")
    }
    assert classes - {"LRScheduler"} - MAKERS.keys() == set()


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [model.weight], "lr": 2 * LR}, {"params": [model.bias]}]
    if kind == "SGD":
        return torch.optim.SGD(groups, lr=LR, momentum=0.8)
    return torch.optim.AdamW(groups, lr=LR, betas=(0.8, 0.9))


def _numbers(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    return [tuple(group.get(key) for key in ("lr", "momentum", "betas")) for group in optimizer.param_groups]


def _metric(step: int) -> float:
    return (5.0, 4.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0)[step]


def _plain(kind: str, make: Make) -> tuple[list[list[tuple[Any, ...]]], torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = _optimizer(kind, model)
    scheduler = make(optimizer)
    seen = [_numbers(optimizer)]
    for step in range(STEPS):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(*([_metric(step)] if isinstance(scheduler, FOLLOWERS) else []))
        seen.append(_numbers(optimizer))
    return seen, model.weight.detach()


def _config() -> dict[str, Any]:
    config = Recipe("fp32").config(Placement())
    del config["optimizer"]
    return config


def _train(engine: infinity.Engine, scheduler: Any, steps: range) -> list[list[tuple[Any, ...]]]:
    seen = []
    for step in steps:
        engine.backward(engine(torch.ones(2, 4)).square().sum())
        engine.step()
        if isinstance(scheduler, FOLLOWERS):
            scheduler.step(_metric(step))
        seen.append(_numbers(engine.optimizer))
    return seen


@pytest.mark.parametrize("given", ["instance", "callable"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("name", MAKERS)
def test_it_follows_torch(name, kind, given) -> None:
    make = MAKERS[name]
    expected, weight = _plain(kind, make)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = _optimizer(kind, model)
    scheduler = make(optimizer) if given == "instance" else make
    engine, tiered, _, made = infinity.initialize(model, _config(), optimizer=optimizer, lr_scheduler=scheduler)
    with engine:
        seen = [_numbers(tiered), *_train(engine, made, range(STEPS))]
        trained = dict(engine.named_parameters())["weight"]
    assert seen == expected
    torch.testing.assert_close(trained, weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_it_goes_on_from_a_checkpoint(name, tmp_path) -> None:
    expected, _ = _plain("AdamW", MAKERS[name])
    half = STEPS // 2
    for steps in (range(half), range(half, STEPS)):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = _optimizer("AdamW", model)
        engine, *_, made = infinity.initialize(
            model, _config(), optimizer=optimizer, lr_scheduler=MAKERS[name](optimizer)
        )
        with engine:
            if steps.start:
                engine.load_checkpoint(tmp_path)
            assert _train(engine, made, steps) == expected[steps.start + 1 : steps.stop + 1]
            engine.save_checkpoint(tmp_path)


def test_a_class_is_called_with_the_optimizer() -> None:
    model = nn.Linear(4, 4)
    engine, *_, made = infinity.initialize(
        model, _config(), optimizer=_optimizer("SGD", model), lr_scheduler=schedules.ConstantLR
    )
    with engine:
        assert isinstance(made, schedules.ConstantLR)
        assert engine.get_lr() == pytest.approx([2 * LR / 3, LR / 3])


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model = nn.Linear(4, 4)
    other = schedules.StepLR(_optimizer("SGD", model), 3)
    words = r"lr_scheduler has a StepLR of an optimizer \(SGD\) that was not given to initialize"
    for optimizer in (None, _optimizer("SGD", model)):
        config = _config() | ({"optimizer": {"type": "AdamW"}} if optimizer is None else {})
        with pytest.raises(infinity.ConfigError, match=words):
            infinity.initialize(model, config, optimizer=optimizer, lr_scheduler=other)


def test_a_scheduler_that_holds_no_optimizer_is_stepped() -> None:
    class Counts:
        steps = 0

        def step(self) -> None:
            self.steps += 1

    model = nn.Linear(4, 4)
    engine, _, _, made = infinity.initialize(
        model, _config(), optimizer=_optimizer("SGD", model), lr_scheduler=Counts()
    )
    with engine:
        _train(engine, made, range(3))
    assert made.steps == 3
