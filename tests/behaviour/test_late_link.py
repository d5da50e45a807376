"""Everything that a device with memory of its own does, on a machine that tells on who does not wait for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.tiers import Link, SameMemory
from infinity.zero import GatheredParameters
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import (
    ARCHITECTURES,
    LR,
    WEIGHT_DECAY,
    Placement,
    Recipe,
    Result,
    assert_same_bits,
    assert_same_weights,
    batches,
    least_memory,
    loss_of,
    tiny_gpt2,
    tiny_llama,
    train,
    train_on,
)
from tests.behaviour.test_activations import Many, placed
from tests.behaviour.test_activations import train as train_many
from tests.behaviour.test_discrete_device import least_device_memory
from tests.tiers.late_link import LateLink, LateRequest, LateToken, late

STEPS = 3
WIDTH, DEPTH = 32, 6


@pytest.fixture
def make_link(monkeypatch):
    """Makes late links; what they found is an error, also if nobody else passed it on."""
    links: list[LateLink] = []

    def make(seed: int, patience: int | None = 12) -> LateLink:
        assert not links, "the drives know one link"
        links.append(late(monkeypatch, seed, patience))
        return links[0]

    yield make
    for link in links:
        assert link.watch.faults == []
        assert link.copies, "nothing went over the link"


def recipe_of(precision: str, accumulation: int, clipping: float, **extra: Any) -> Recipe:
    return Recipe(precision, accumulation, clipping, STEPS, extra)


@cache
def in_memory(architecture: str, precision: str, accumulation: int, clipping: float) -> Result:
    return train(ARCHITECTURES[architecture](), recipe_of(precision, accumulation, clipping), Placement())


# The same bits #

RECIPES = [("bf16", 1, 0.0), ("bf16", 1, 0.5), ("fp32", 4, 0.5), ("bf16", 4, 0.0)]


@pytest.mark.parametrize(
    ("architecture", "device", "seed", "recipe"),
    [  # all pairs
        (list(ARCHITECTURES)[(d + seed) % 2], device, seed, recipe)
        for d, device in enumerate(["none", "cpu", "nvme"])
        for seed, recipe in enumerate(RECIPES)
    ],
)
def test_training(architecture, device, seed, recipe, tmp_path, make_link) -> None:
    link = make_link(seed, patience=None if seed == 1 else 4 << seed)
    ours = train(ARCHITECTURES[architecture](), recipe_of(*recipe), Placement(device, device, tmp_path, "64KiB"), link)
    assert_same_bits(ours, in_memory(architecture, *recipe))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("host_memory", ["900KB", "1GiB"])
def test_tight_device_memory(seed, host_memory, tmp_path, make_link) -> None:
    clipping = 0.5 * (seed % 2)
    placement = Placement("nvme", "nvme", tmp_path, "64KiB", host_memory)
    room = least_device_memory(placement, recipe_of("bf16", 1, clipping))
    ours = train(tiny_llama(), recipe_of("bf16", 1, clipping), placement, make_link(seed), device_memory=room)
    assert_same_bits(ours, in_memory("llama", "bf16", 1, clipping))


@pytest.mark.parametrize("schedule", ["backward", "deferred", "barrier"])
@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_schedules(schedule, home, tmp_path, make_link) -> None:
    placement = Placement(home, "nvme", tmp_path, "64KiB", schedule=schedule)
    ours = train(tiny_gpt2(), recipe_of("bf16", 1, 0.0), placement, make_link(7))
    assert_same_bits(ours, in_memory("gpt2", "bf16", 1, 0.0))


def test_reading_past_the_host(tmp_path, make_link) -> None:
    placement = Placement("nvme", "nvme", tmp_path, "64KiB", "640KB")
    recipe = recipe_of("bf16", 1, 0.5)
    room = least_device_memory(placement, recipe)
    recipe.extra["aio"] = {"use_gds": True}
    ours = train(tiny_llama(), recipe, placement, make_link(3), device_memory=room)
    assert_same_bits(ours, in_memory("llama", "bf16", 1, 0.5))


def test_a_timeline(tmp_path, make_link) -> None:
    placement = Placement("nvme", "nvme", tmp_path, "64KiB")
    ours = train(
        tiny_llama(), recipe_of("bf16", 1, 0.5), placement, make_link(4), timeline=str(tmp_path / "trace.json")
    )
    assert_same_bits(ours, in_memory("llama", "bf16", 1, 0.5))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("memory", ["300KiB", "16MiB"])
@pytest.mark.parametrize("seed", range(2))
def test_activations(tier, memory, seed, tmp_path, make_link) -> None:
    losses, weights, _ = train_many(Many, placed(tmp_path, "none"))
    ours, our_weights, _ = train_many(Many, placed(tmp_path, tier, memory), link=make_link(seed))
    assert_same_bits(Result(ours, our_weights), Result(losses, weights))


# Stochastic depth #


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


class StochasticDepth(nn.Module):
    """A micro-batch goes through some of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor, skipped: set[int]) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                x = block(x)
        return x.square().mean()


SKIPPED = [set(), {2, 3}, set(), {1, 2, 3}, set(), {4, 5}, {3}, set(), set(), {2, 3, 4}, set(), {1, 2, 3, 4, 5}]


def build() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    return StochasticDepth(), list(torch.randn(2 * len(SKIPPED), 4, WIDTH))


def plainly(size: int) -> nn.Module:
    model, data = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    for index, skipped in enumerate(SKIPPED):
        for x in data[index * size : (index + 1) * size]:
            (model(x, skipped) / (2 * size)).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


def train_some_blocks(
    config: dict[str, Any], link: Link | None = None, rank: int = 0, size: int = 1
) -> dict[str, torch.Tensor]:
    model, data = build()
    with infinity.initialize(model=model, config=config, link=link)[0] as engine:
        for x, skipped in zip(data[rank::size], SKIPPED, strict=False):
            engine.backward(engine(x, skipped))
            engine.step()
        return dict(engine.named_parameters())


def assert_trained(weights: dict[str, torch.Tensor], size: int = 1) -> None:
    expected = plainly(size).state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def config_of(path: Path, home: str, schedule: str, device_memory: int | str) -> dict[str, Any]:
    clipping = 0.0 if schedule == "backward" else 1e9
    config = Recipe(accumulation=2, clipping=clipping).config(Placement(home, home, path, "16KiB", schedule=schedule))
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    config["tiering"]["device_memory"] = device_memory
    return config


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("schedule", ["backward", "deferred", "barrier"])
@pytest.mark.parametrize("patience", [None, 12])
def test_blocks_that_are_skipped_after_they_were_fetched(home, schedule, patience, tmp_path, make_link) -> None:
    """Room for three of six."""
    plain = train_some_blocks(config_of(tmp_path, "none", schedule, "auto"))
    assert_trained(plain)
    config = config_of(tmp_path, home, schedule, "auto")
    config["tiering"]["device_memory"] = least_memory(build()[0], config, "device_memory", link=SameMemory()) * 3 // 2
    assert_same_weights(train_some_blocks(config, make_link(1, patience)), plain)


# API calls between two steps #


def evaluate_between(engine: infinity.Engine) -> None:
    with torch.no_grad():
        loss_of(engine, batches(1, seed=9)[0])


def write_parameters(engine: infinity.Engine) -> None:
    with GatheredParameters(engine.module, 0), torch.no_grad():
        for param in engine.module.parameters():
            param.mul_(1.5)


def read_all(engine: infinity.Engine) -> None:
    engine.module.state_dict()
    dict(engine.named_parameters())


CALLS: dict[str, Callable[[infinity.Engine], None]] = {
    "evaluation": evaluate_between,
    "writes": write_parameters,
    "reads": read_all,
}


def train_with_calls(call: str, placement: Placement, recipe: Recipe, link: Link | None, **tiering: Any) -> Result:
    """Train, and make the call after each step."""
    config = recipe.config(placement)
    config["tiering"] |= tiering
    losses = []
    with infinity.initialize(model=tiny_llama(), config=config, link=link)[0] as engine:
        for ids in batches(recipe.steps):
            losses += train_on(engine, [ids])
            CALLS[call](engine)
        return Result(losses, dict(engine.named_parameters()))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("home", "clipping", "seed"), [("cpu", 0.0, 0), ("nvme", 0.0, 1), ("nvme", 0.5, 2)])
def test_api_calls_between_steps(call, home, clipping, seed, tmp_path, make_link) -> None:
    recipe, placement = recipe_of("bf16", 1, clipping), Placement(home, "nvme", tmp_path, "64KiB")
    room = least_device_memory(placement, recipe)
    ours = train_with_calls(call, placement, recipe, make_link(seed), device_memory=room)
    assert_same_bits(ours, train_with_calls(call, Placement(), recipe, None))


@pytest.mark.parametrize(("home", "seed"), [("cpu", 0), ("nvme", 1)])
def test_checkpoints(home, seed, tmp_path, make_link) -> None:
    """Saved by one engine; loaded by another that has begun to train, before it goes on."""
    (tmp_path / "swap").mkdir()
    recipe, data = recipe_of("bf16", 1, 0.5), batches(2 * STEPS)
    config = recipe.config(Placement(home, home, tmp_path / "swap", "64KiB"))
    link = make_link(seed)
    with infinity.initialize(model=tiny_llama(), config=config, link=link)[0] as engine:
        train_on(engine, data[:STEPS])
        engine.save_checkpoint(tmp_path / "saved")
        losses = train_on(engine, data[STEPS:])
        weights = dict(engine.named_parameters())
        engine.load_checkpoint(tmp_path / "saved")
        assert_same_bits(
            Result(train_on(engine, data[STEPS:]), dict(engine.named_parameters())), Result(losses, weights)
        )
    plain = dataclasses.replace(recipe, steps=2 * STEPS)
    with infinity.initialize(model=tiny_llama(), config=plain.config(Placement()))[0] as engine:
        assert train_on(engine, data)[STEPS:] == losses
        assert_same_bits(Result([], dict(engine.named_parameters())), Result([], weights))


# Ends #


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("when", ["initialize", "forward", "backward", "step"])
def test_closing_in_the_middle_of_a_step(home, when, tmp_path, make_link) -> None:
    config = recipe_of("bf16", 1, 0.0).config(Placement(home, home, tmp_path, "64KiB", schedule="deferred"))
    config["tiering"] |= {"activations": "cpu"}
    link = make_link(5, patience=None)
    with infinity.initialize(model=tiny_llama(), config=config, link=link)[0] as engine:
        if when != "initialize":
            train_on(engine, batches(2))
            loss = loss_of(engine, batches(3)[2])
        if when in ("backward", "step"):
            engine.backward(loss)
        if when == "step":
            engine.step()


def train_here(configs: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    trained = []
    for seed, config in enumerate(configs):
        link = LateLink(seed, 4 << seed)
        trained.append(train_some_blocks(config, link, rank, size))
        assert link.copies
        assert link.watch.faults == []
    return trained


def test_several_ranks(tmp_path) -> None:
    """Shards come and go beside what is gathered of them."""
    (tmp_path / "swap").mkdir()
    homes = [("none", "backward"), ("cpu", "deferred"), ("nvme", "backward")]
    configs = [config_of(tmp_path / "swap", home, schedule, "auto") for home, schedule in homes]
    for of_rank in run_ranks(2, train_here, configs, path=tmp_path):
        for weights in of_rank:
            assert_trained(weights, 2)


# What it is good for #


def without_waits(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """From now on the link, or the drive, says that something is over that is not."""
    if what == "compute_waits":
        monkeypatch.setattr(LateLink, "compute_waits", lambda self, token: None)
    for name in {"done": ("done", "query"), "result": ("result", "synchronize")}.get(what, ()):
        monkeypatch.setattr(LateToken, name, lambda self, timeout=None: True)
    if what == "reads":
        done, result = LateRequest.done, LateRequest.result
        monkeypatch.setattr(LateRequest, "done", lambda self: self.reads or done(self))
        monkeypatch.setattr(LateRequest, "result", lambda self, timeout=None: self.reads or result(self, timeout))


@pytest.mark.parametrize("what", ["nothing", "compute_waits", "done", "result", "reads"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_a_missing_wait_is_noticed(clipping, what, tmp_path, monkeypatch) -> None:
    """In what the steps themselves do, not only when the engine closes."""
    recipe = recipe_of("bf16", 1, clipping)
    placement = Placement("nvme", "nvme", tmp_path, "64KiB", "900KB")
    config = recipe.config(placement)
    config["tiering"] |= {"device_memory": least_device_memory(placement, recipe)}
    link = late(monkeypatch, patience=None)
    engine, *_ = infinity.initialize(model=tiny_llama(), config=config, link=link)
    losses = []
    with monkeypatch.context() as lies, contextlib.suppress(Exception):
        without_waits(lies, what)
        losses = train_on(engine, batches(STEPS))
    with contextlib.suppress(AssertionError):
        link.finish()  # sources that have changed are found when a copy ends
    noticed = link.watch.faults or losses != in_memory("llama", "bf16", 1, clipping).losses
    with contextlib.suppress(Exception):
        engine.close()
    assert bool(noticed) == (what != "nothing")
