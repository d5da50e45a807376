"""Every optimizer through the engine: torch's numbers in memory, and the same bits wherever the states live."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import ConfigError
from tests.behaviour.reference import Placement, Recipe, Result, batches, loss_of, tiny_gpt2, train_on

SECTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-3, "betas": [0.8, 0.99], "weight_decay": 0.1, "adam_w_mode": False},
    "AdamW": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1, "torch_adam": True},
    "Adagrad": {"lr": 2e-3, "weight_decay": 0.01, "lr_decay": 0.1},
    "Lion": {"lr": 1e-4, "betas": [0.9, 0.98], "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
}
RECIPE = Recipe("fp32", clipping=1.0, steps=6)


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv 2302.06675, algorithm 2, line by line."""

    def __init__(self, params: Any, lr: float, betas: list[float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                beta1, beta2 = group["betas"]
                update = (beta1 * average + (1 - beta1) * param.grad).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                average.mul_(beta2).add_(param.grad, alpha=1 - beta2)


PLAIN = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "Lion": Lion,
    "SGD": torch.optim.SGD,
}


def config(name: str, placement: Placement, recipe: Recipe = RECIPE) -> dict[str, Any]:
    return recipe.config(placement) | {"optimizer": {"type": name, "params": SECTIONS[name]}}


def train(values: dict[str, Any], **given: Any) -> Result:
    model = tiny_gpt2()
    if "optimizer" in given:
        given["optimizer"] = given["optimizer"](model.parameters())
    with infinity.initialize(model=model, config=values, **given)[0] as engine:
        losses = train_on(engine, batches(RECIPE.steps))
        return Result(losses, dict(engine.named_parameters()))


@cache
def in_memory(name: str) -> Result:
    return train(config(name, Placement()))


@pytest.mark.parametrize("name", SECTIONS)
def test_losses_are_torchs(name) -> None:
    model = tiny_gpt2()
    params = {key: value for key, value in SECTIONS[name].items() if key not in ("adam_w_mode", "torch_adam")}
    optimizer = PLAIN[name](model.parameters(), **params)
    losses = []
    for ids in batches(RECIPE.steps):
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert in_memory(name).losses == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_placements_give_the_same_bits(name, device, tmp_path) -> None:
    placed = train(config(name, Placement(device, device, tmp_path)))
    assert placed.losses == in_memory(name).losses
    assert all(torch.equal(value, placed.weights[key]) for key, value in in_memory(name).weights.items())


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize(("precision", "format_name"), [("bf16", "split"), ("bf16", "int8"), ("fp16", "master")])
def test_a_checkpoint_goes_on_with_the_same_bits(name, precision, format_name, tmp_path: Path) -> None:
    values = config(name, Placement(), Recipe(precision, clipping=1.0))
    values["tiering"]["state_format"] = format_name
    data = batches(6)

    with infinity.initialize(model=tiny_gpt2(), config=values)[0] as engine:
        train_on(engine, data[:3])
        engine.save_checkpoint(tmp_path)
        rest = train_on(engine, data[3:])
    with infinity.initialize(model=tiny_gpt2(1), config=values)[0] as engine:
        engine.load_checkpoint(tmp_path)
        assert train_on(engine, data[3:]) == rest


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Adagrad", lambda params: torch.optim.Adagrad(params, **SECTIONS["Adagrad"])),
        ("SGD", lambda params: torch.optim.SGD(params, **SECTIONS["SGD"])),
    ],
)
def test_a_torch_optimizer_is_taken_over(name, make) -> None:
    assert train(RECIPE.config(Placement()) | {"optimizer": None}, optimizer=make).losses == in_memory(name).losses


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "Lamb"}, "choose Adam, AdamW, Adagrad, Lion or SGD"),
        ({"type": "AdamW", "params": {"lr": -1}}, r"params\.lr is -1; it must be a finite number of at least 0"),
        ({"type": "AdamW", "params": {"lr": "abc"}}, r"params\.lr is 'abc'; it must be a finite number"),
        ({"type": "AdamW", "params": {"lr": float("inf")}}, r"params\.lr is inf; it must be a finite number"),
        ({"type": "AdamW", "params": {"lr": True}}, r"params\.lr is True; it must be a finite number"),
        ({"type": "AdamW", "params": {"betas": [0.9]}}, r"params\.betas is \[0\.9\]; it must be two numbers"),
        ({"type": "Adam", "params": {"betas": [0.9, 1.0]}}, r"params\.betas\[1\] is 1\.0; .* less than 1"),
        ({"type": "AdamW", "params": {"betas": 0.9}}, r"params\.betas is 0\.9; it must be two numbers"),
        ({"type": "AdamW", "params": {"max_grad_norm": 1.0}}, "gradients are clipped by gradient_clipping; move it"),
        ({"type": "SGD", "params": {"nesterov": "maybe"}}, r"params\.nesterov is 'maybe'; .* true or false"),
        ({"type": "Lion", "params": {"eps": 1e-8}}, r"params\.eps is unknown to Lion; it has lr, betas, weight_decay"),
        ({"type": "AdamW", "params": {"amsgrad": True}}, r"params\.amsgrad is True, which is not supported"),
        ({"type": "Adam", "params": {"bias_correction": False}}, r"params\.bias_correction is False"),
        ({"type": "SGD", "params": {"dampening": 0.5}}, r"params\.dampening is 0\.5"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(section, message) -> None:
    with pytest.raises(ConfigError, match=message):
        infinity.initialize(model=tiny_gpt2(), config=RECIPE.config(Placement()) | {"optimizer": section})


def test_strings_for_booleans_are_understood() -> None:
    values = config("Adam", Placement())
    values["optimizer"] = {"type": "Adam", "params": SECTIONS["Adam"] | {"adam_w_mode": "false"}}
    assert train(values).losses == in_memory("Adam").losses


class WithItsOwnStep(torch.optim.AdamW):
    """As scripts write them: the base class's groups, and another update."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.sub_(param.grad.mean())
        return super().step(closure)


class OfOurs(infinity.optim.AdamW):
    """A subclass of infinity's optimizer is no other case."""


@pytest.mark.parametrize("cls", [WithItsOwnStep, OfOurs])
def test_a_subclass_is_refused_by_name(cls) -> None:
    model = tiny_gpt2()
    with pytest.raises(ConfigError, match=f"optimizer {cls.__name__} is a subclass of AdamW"):
        infinity.initialize(
            model=model, optimizer=cls(model.parameters()), config={"train_batch_size": 2}, device="cpu"
        )


def test_a_step_that_the_engine_would_not_call_is_refused() -> None:
    model = tiny_gpt2()
    settings: Any = {"model": model, "config": {"train_batch_size": 2}, "device": "cpu"}
    replaced = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced.step = lambda closure=None: None  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="`step` of this SGD was replaced"):
        infinity.initialize(optimizer=replaced, **settings)
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        hooked = torch.optim.SGD(model.parameters(), lr=0.1)
        getattr(hooked, register)(lambda *_: None)
        with pytest.raises(ConfigError, match="this SGD has step hooks"):
            infinity.initialize(optimizer=hooked, **settings)


def test_step_hooks_of_the_engine_s_optimizer_are_called_and_schedulers_may_watch_step() -> None:
    model, called = tiny_gpt2(), []
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(given)  # torch counts calls of `step` for it
    engine, optimizer, _, _ = infinity.initialize(
        model=model, optimizer=given, config={"train_batch_size": 2}, device="cpu"
    )
    with engine:
        assert optimizer is not None
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        engine.backward(loss_of(engine, batches(1)[0]))
        optimizer.step()
    assert called == ["before", "after"]
