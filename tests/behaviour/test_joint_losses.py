"""One loss of two engines: each trains as in plain torch, whichever of them scales the loss."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity import InfinityError
from infinity.errors import UnscaledLossError
from tests.behaviour.ranks import run_ranks

WIDTH = 8
WAYS = ("loss", "first.backward", "second.backward", "first.scale", "second.scale", "sum")


def engine_of(model: nn.Module, accumulation: int, stage: int = 3, **settings: Any) -> infinity.Engine:
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero |= {"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1e9,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": zero,
    }
    return infinity.initialize(model=model, config=config | settings, device="cpu")[0]


def models() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def updates(way: str, accumulations: tuple[int, int], stage: int = 3, **settings: Any) -> list[float]:
    """By how much of what it should be the weights of each engine's model change in one step of it."""
    plain = models()
    x = torch.ones(2, WIDTH)
    plain[1](plain[0](x)).mean().backward()
    first, second = (
        engine_of(copy.deepcopy(model), count, stage, **settings)
        for model, count in zip(plain, accumulations, strict=True)
    )
    with first, second:
        for _ in range(max(accumulations)):
            loss = second(first(x.half() if "fp16" in settings else x)).float().mean()
            if way == "sum":
                (first.scale(loss / 2) + second.scale(loss / 2)).backward()
            elif way == "loss":
                loss.backward()
            else:
                name, _, verb = way.partition(".")
                scaled = getattr(first if name == "first" else second, verb)(loss)
                if verb == "scale":
                    scaled.backward()
            for engine, count in zip((first, second), accumulations, strict=True):
                if engine.micro_steps < count:
                    engine.step()
        after = [dict(engine.named_parameters())["weight"].float() for engine in (first, second)]
    return [
        ((model.weight.detach() - weight) / model.weight.grad).mean().item()
        for model, weight in zip(plain, after, strict=True)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_each_engine_trains_as_if_it_had_scaled_the_loss(way, accumulation, stage) -> None:
    assert updates(way, (accumulation, accumulation), stage) == pytest.approx([1.0, 1.0], rel=1e-5)


@pytest.mark.parametrize("way", ["loss", "first.backward", "second.backward", "second.scale"])
def test_engines_that_accumulate_differently_have_shares_of_their_own(way) -> None:
    """The first updates after one micro-batch, and the second after four."""
    assert updates(way, (1, 4))[0] == pytest.approx(1.0, rel=1e-5)


def test_losses_of_different_scales_are_refused() -> None:
    third = nn.Linear(WIDTH, WIDTH)
    with engine_of(models()[0], 1) as one, engine_of(models()[1], 4) as two, engine_of(third, 1) as three:
        shared = three(torch.ones(2, WIDTH))
        total = one.scale(one(shared).mean()) + two.scale(two(shared).mean())
        with pytest.raises(InfinityError, match=r"scaled by different numbers \(0.25, 1\)"):
            total.backward()


@pytest.mark.parametrize("way", ["first.backward", "second.scale"])
def test_a_loss_scale_counts_for_every_engine(way) -> None:
    found = updates(way, (2, 2), fp16={"enabled": True, "initial_scale_power": 8})
    assert found == pytest.approx([1.0, 1.0], rel=2e-2)


def test_an_engine_in_fp16_refuses_what_one_of_other_precision_has_scaled() -> None:
    with engine_of(models()[0], 1, fp16={"enabled": True}) as half, engine_of(models()[1], 1) as full:
        loss = full(half(torch.ones(2, WIDTH).half()).float()).mean()
        with pytest.raises(UnscaledLossError):
            full.backward(loss)


def on_a_rank(path: Path) -> list[list[float]]:
    assert dist.get_world_size() == 2
    return [updates(way, (2, 2), stage) for way in WAYS for stage in (2, 3)]


def test_the_number_of_ranks_is_counted_once(tmp_path) -> None:
    for found in run_ranks(2, on_a_rank, tmp_path, path=tmp_path):
        assert found == [pytest.approx([1.0, 1.0], rel=1e-5)] * len(found)
