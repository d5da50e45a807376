"""Gradients whose sum of squares exceeds the range of fp32 are clipped by their norm, which is finite in float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.zero.foresight import Foresight
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import (
    LR,
    WEIGHT_DECAY,
    Placement,
    Recipe,
    batches,
    least_memory,
    loss_of,
    tiny_gpt2,
)

FACTORS = (1.0, 1e30, 1.0, 1e30)  # on the loss of each step
CLIPPING = 3.0  # which only the large gradients exceed
SCHEDULES = ("deferred", "speculative", "barrier")
FAR_ABOVE = 1e25  # the square root of the largest number in fp32 is 1.8e19


@dataclass
class Clipped:
    """The end of a training, and the norm of each step's gradients."""

    weights: dict[str, torch.Tensor]
    norms: list[float]


def recipe_of(precision: str) -> Recipe:
    return Recipe(precision, clipping=CLIPPING)


def train_scaled(engine: infinity.Engine, data: list[torch.Tensor]) -> Clipped:
    norms = []
    for factor, ids in zip(FACTORS, data, strict=True):
        engine.backward(loss_of(engine, ids.to(engine.device)) * factor)
        engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        norms.append(norm)
    return Clipped({name: param.detach().cpu() for name, param in engine.named_parameters()}, norms)


def train(config: dict[str, Any]) -> Clipped:
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        return train_scaled(engine, batches(len(FACTORS)))


@cache
def in_memory(precision: str) -> Clipped:
    return train(recipe_of(precision).config(Placement(schedule="barrier")))


def train_plainly(data: list[torch.Tensor], *, ranks: int = 1) -> Clipped:
    """Plain steps in fp32, on the mean gradient of the ranks, which are clipped by their norm in float64."""
    model, norms = tiny_gpt2(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    for step, factor in enumerate(FACTORS):
        for ids in data[step * ranks :][:ranks]:
            (loss_of(model, ids) * factor / ranks).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
        norms.append(norm)
        assert torch.nn.utils.clip_grad_norm_(copies_of(grads), CLIPPING).isinf() == (factor > 1)
        for grad in grads:
            grad *= min(1.0, CLIPPING / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
    return Clipped({name: param.detach() for name, param in model.named_parameters()}, norms)


def copies_of(grads: list[torch.Tensor]) -> list[nn.Parameter]:
    copies = []
    for grad in grads:
        copies.append(nn.Parameter(torch.zeros_like(grad)))
        copies[-1].grad = grad.clone()
    return copies


def assert_follows(found: Clipped, expected: Clipped) -> None:
    assert found.norms == pytest.approx(expected.norms, rel=1e-3)
    assert min(found.norms[1::2]) > FAR_ABOVE > CLIPPING > max(found.norms[::2])
    for name, weight in found.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=1e-4, atol=1e-5, msg=name)


def assert_same(found: Clipped, expected: Clipped) -> None:
    assert found.norms == pytest.approx(expected.norms, rel=1e-12)  # a device sums in another order
    for name, weight in found.weights.items():
        assert torch.equal(weight, expected.weights[name]), name


def test_training_follows_a_plain_loop_that_clips_by_the_norm_in_float64() -> None:
    assert_follows(in_memory("fp32"), train_plainly(batches(len(FACTORS))))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_every_placement_and_schedule_gives_the_same_bits(device, schedule, precision, tmp_path, monkeypatch) -> None:
    """Also if updates have run with the large gradients, and are rolled back."""
    monkeypatch.setattr(Foresight, "speculates", True)
    config = recipe_of(precision).config(Placement(device, device, tmp_path, "64KiB", schedule=schedule))
    if device == "nvme":
        config["tiering"]["host_memory"] = least_memory(tiny_gpt2(), config) * 5 // 4
    assert_same(train(config), in_memory(precision))


def train_on_rank(configs: list[dict[str, Any]]) -> list[Clipped]:
    Foresight.speculates = True  # type: ignore[method-assign,assignment]
    data = batches(2 * len(FACTORS))[dist.get_rank() :: 2]
    found = []
    for config in configs:
        with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
            found.append(train_scaled(engine, data))
    return found


def test_several_ranks_agree(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    configs = []
    for stage, schedule in itertools.product((0, 2, 3), ("deferred", "speculative")):
        device = "nvme" if stage == 3 else "none"
        config = recipe_of("fp32").config(Placement(device, device, swap, "64KiB", schedule=schedule), stage)
        configs.append(config)
    expected = train_plainly(batches(2 * len(FACTORS)), ranks=2)
    for of_rank in run_ranks(2, train_on_rank, configs, path=tmp_path):
        for found in of_rank:
            assert_follows(found, expected)
        for deferred, speculative in zip(of_rank[::2], of_rank[1::2], strict=True):
            assert_same(speculative, deferred)
