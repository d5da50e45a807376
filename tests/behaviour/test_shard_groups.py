"""Ranks that share states in groups train what all of them would together, and send what theory says."""

from __future__ import annotations

import copy
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import infinity
from infinity.checkpoint.format import read_manifest
from infinity.config import load_config
from infinity.errors import CheckpointError, ConfigError, RankError
from infinity.zero.partition import UnitLayout
from infinity.zero.ranks import Ranks
from tests.behaviour import test_layer_major_ranks
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import (
    ARCHITECTURES,
    Placement,
    Recipe,
    Result,
    assert_same_weights,
    batches,
    loss_of,
    tiny_gpt2,
    train_on,
)
from tests.behaviour.test_fake_ranks import CountedRanks, gathers_of
from tests.behaviour.test_ranks import Case, assert_follows, train_all

RANKS, STEPS = 4, 3


def grouped(size: int | None, precision: str = "fp32", **recipe: Any) -> Recipe:
    """A recipe for ranks of which so many share states."""
    recipe.setdefault("steps", STEPS)
    extra = recipe.pop("extra", {})
    if size is not None:
        extra = extra | {"communication": {"shard_size": size}}
    return Recipe(precision, extra=extra, **recipe)


# Training #


def cases_on(path: Path) -> list[Case]:
    deferred = Placement("nvme", "nvme", path, "64KiB", "1600KB", "deferred")
    backward = Placement("none", "nvme", path, "64KiB", schedule="backward")
    return [
        *(Case(3, recipe=grouped(size, accumulation=2, clipping=0.5)) for size in (None, 4, 2, 1)),
        Case(1, recipe=grouped(2, accumulation=2, clipping=0.5)),
        Case(2, recipe=grouped(2, "bf16", clipping=0.5)),
        Case(3, deferred, grouped(2, "fp32", accumulation=2, clipping=0.5), "llama"),
        Case(3, backward, grouped(2, "bf16"), "llama"),
    ]


def train_each(cases: list[Case]) -> list[Result]:
    """And the case of two groups with its micro-batches layer by layer, last."""
    dist.new_group([0])  # torch then counts another number of groups on rank 0
    return [*train_all(cases), test_layer_major_ranks.train_here(cases[2])]


def test_groups_follow_the_plain_loop_and_replicas_have_the_same_bits(tmp_path) -> None:
    """1 x 4, 2 x 2 and 4 x 1, at every stage, placement and schedule that treats gradients in another way."""
    (tmp_path / "swap").mkdir()
    cases = cases_on(tmp_path / "swap")
    *found, layers = zip(*run_ranks(RANKS, train_each, cases, path=tmp_path), strict=True)
    for case, results in zip(cases, found, strict=True):
        assert_follows(case, results, RANKS)
        for result in results[1:]:
            for name, weight in result.weights.items():
                assert torch.equal(weight, results[0].weights[name]), (case, name)
    whole, named, halves, replicas = found[:4]
    for results in (named, halves, replicas, layers):
        for ours, theirs in zip(results, whole, strict=True):
            if results is not layers:
                torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-5, atol=1e-5)
            for name, weight in ours.weights.items():
                torch.testing.assert_close(weight, theirs.weights[name], rtol=1e-5, atol=2e-6, msg=name)
    assert named[0].losses == whole[0].losses, "a group of all is no group"
    assert not list((tmp_path / "swap").iterdir())


class Experts(nn.Module):
    """A block of two parts, of which a rank may use one, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = x + self.first(x).relu()
        return x + self.second(x).relu() if both else x


class Bystander(nn.Module):
    """A block that backward goes through, and of which no rank has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return x + self.linear(x).detach()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Experts(), Experts(), Bystander(), Experts()])

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, both)
        return x


def experts_config(**more: Any) -> dict[str, Any]:
    config = grouped(2).config(Placement())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return config | more


EXPERTS_OF_A_STEP: list[tuple[int, ...]] = [(3,), (), (0, 3)]  # ranks that use both parts


def experts_data() -> torch.Tensor:
    return torch.randn(len(EXPERTS_OF_A_STEP), RANKS, 4, 16, generator=torch.Generator().manual_seed(2))


def train_experts(schedule: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = experts_config()
    config["tiering"]["update_schedule"] = schedule
    with infinity.initialize(model=Mixture(), config=config)[0] as engine:
        for x, using in zip(experts_data(), EXPERTS_OF_A_STEP, strict=True):
            rank = dist.get_rank()
            engine.backward(engine(x[rank], both=rank in using).square().mean())
            engine.step()
        return dict(engine.named_parameters())


def overflow_on(culprit: int) -> list[tuple[bool, float]]:
    """Of a step in which one rank's gradients overflow, and of the next: was it applied, and the scale after it."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    found = []
    with infinity.initialize(model=Mixture(), config=experts_config(fp16=fp16))[0] as engine:
        for step in range(2):
            loss = engine(torch.ones(4, 16, dtype=torch.float16), both=True).float().square().mean()
            if step == 0 and dist.get_rank() == culprit:
                loss = loss * 1e30
            engine.backward(loss)
            engine.step()
            found.append((engine.was_step_applied(), engine.loss_scale.value))
    return found


def accessed() -> dict[str, Any]:
    """Return what the API calls give in a run of two groups of two."""
    rank = dist.get_rank()
    config = grouped(2, clipping=0.5).config(Placement())
    with infinity.initialize(model=tiny_gpt2(seed=rank), config=config)[0] as engine:
        model: Any = engine.module
        weight = model.transformer.h[1].mlp.c_fc.weight
        train_on(engine, batches(RANKS)[rank::RANKS])
        engine.backward(loss_of(engine, batches(2 * RANKS)[RANKS + rank]))
        found = {"gradient": infinity.utils.safe_get_full_grad(weight)}
        engine.step()
        found["master"] = infinity.utils.safe_get_full_fp32_param(weight)
        found["moment"] = infinity.utils.safe_get_full_optimizer_state(weight, "exp_avg")
        part = infinity.utils.safe_get_local_fp32_param(weight)
        assert part is not None
        infinity.utils.safe_set_local_fp32_param(weight, torch.full_like(part, float(rank)))
        found["set"] = infinity.utils.safe_get_full_fp32_param(weight)
        bias = model.transformer.h[0].mlp.c_fc.bias
        with infinity.zero.GatheredParameters([bias], modifier_rank=3):
            bias.data.fill_(float(10 + rank))
        found["state"] = {name: value.clone() for name, value in engine.module.state_dict().items()}
        found["copy"] = copy.deepcopy(engine.module).state_dict()["transformer.h.0.mlp.c_fc.bias"]
        return found


def looked_at_between() -> dict[str, Any]:
    """The gradient behind each of two equal micro-batches, and what who sets it between them is told."""
    rank = dist.get_rank()
    config = grouped(2, clipping=0.5, accumulation=2).config(Placement())
    found: dict[str, Any] = {}
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        model: Any = engine.module
        weight = model.transformer.h[1].mlp.c_fc.weight
        engine.backward(loss_of(engine, batches(RANKS)[rank]))
        engine.zero_grad()  # no later sum has these
        for name in ("half", "whole"):
            engine.backward(loss_of(engine, batches(RANKS)[rank]))
            found[name] = infinity.utils.safe_get_full_grad(weight)
            if name == "half":
                with pytest.raises(infinity.InfinityError) as refused:
                    infinity.utils.safe_set_full_grad(weight, torch.zeros_like(found[name]))
                found["refused"] = str(refused.value)
            engine.step()
    return found


def refused_here() -> str:
    with pytest.raises(ConfigError) as refused:
        infinity.initialize(model=tiny_gpt2(), config=grouped(3).config(Placement()))
    return str(refused.value)


def until_killed(culprit: int) -> str:
    rank = dist.get_rank()
    with infinity.initialize(model=tiny_gpt2(), config=grouped(2).config(Placement()))[0] as engine:
        train_on(engine, batches(RANKS)[rank::RANKS])
        if rank == culprit:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RankError) as lost:
            train_on(engine, batches(4 * RANKS)[rank::RANKS])
        return str(lost.value)


@dataclass
class Ends:
    """What each of four ranks in two groups has found."""

    experts: list[dict[str, torch.Tensor]]
    overflow: list[tuple[bool, float]]
    accessed: dict[str, Any]
    between: dict[str, Any]
    refused: str
    lost: str


def go_through() -> Ends:
    return Ends(
        [train_experts(each) for each in ("backward", "deferred")],
        overflow_on(3),
        accessed(),
        looked_at_between(),
        refused_here(),
        until_killed(1),
    )


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> list[Ends]:
    """By rank, without the one that was killed."""
    found = run_ranks(RANKS, go_through, path=tmp_path_factory.mktemp("ends"), killed=[1])
    return [each for each in found if each is not None]


def test_what_one_rank_of_one_group_has_a_gradient_of_is_updated_by_all(ends) -> None:
    """And what no rank has one of stays as it is, weight decay included."""
    torch.manual_seed(0)
    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), **experts_config()["optimizer"]["params"])
    for x, using in zip(experts_data(), EXPERTS_OF_A_STEP, strict=True):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (model(x[rank], both=rank in using).square().mean() / RANKS).backward()
        optimizer.step()
    for found in ends:
        early, late = found.experts
        for name, param in model.named_parameters():
            torch.testing.assert_close(early[name], param.data, rtol=1e-4, atol=1e-5, msg=name)
            assert torch.equal(late[name], early[name]), name


def test_an_overflow_on_one_rank_is_one_on_all(ends) -> None:
    assert [applied for applied, _ in ends[0].overflow] == [False, True]
    assert all(found.overflow == ends[0].overflow for found in ends)


def test_looking_and_setting_is_the_same_on_all_ranks(ends) -> None:
    first, *others = (found.accessed for found in ends)
    for other in others:
        for name in ("gradient", "master", "moment", "set", "copy"):
            assert torch.equal(other[name], first[name]), name
        for name, value in first["state"].items():
            assert torch.equal(other["state"][name], value), name
    assert first["gradient"].shape == first["master"].shape
    # A part is set by two ranks, of which the first one's counts.
    assert first["set"].unique().tolist() == [0.0, 1.0]
    assert (first["copy"] == 13.0).all()


def test_gradients_between_micro_batches_are_those_of_all_groups(ends) -> None:
    first = ends[0].between
    assert first["half"].abs().sum() > 0
    torch.testing.assert_close(2 * first["half"], first["whole"])
    for found in ends:
        assert torch.equal(found.between["half"], first["half"])
        assert torch.equal(found.between["whole"], first["whole"])
        assert "communication.shard_size" in found.between["refused"]


def test_ranks_that_cannot_be_divided_are_refused_on_all(ends) -> None:
    for found in ends:
        assert "communication.shard_size" in found.refused
        assert f"choose a divisor of {RANKS}" in found.refused


def test_a_rank_that_dies_is_an_error_on_all_others(ends) -> None:
    """In its group, and in the others, which wait for the replicas of theirs."""
    for rank, found in zip((0, 2, 3), ends, strict=True):
        assert f"rank {rank} of {RANKS}" in found.lost


# Checkpoints and states that are kept #


def shared_by(size: int | None) -> Case:
    return Case(3, recipe=grouped(size, "bf16", clipping=0.5), architecture="llama")


def begin(size: int | None) -> infinity.Engine:
    return infinity.initialize(model=ARCHITECTURES["llama"](seed=dist.get_rank()), config=shared_by(size).config())[0]


def save_in_groups(path: Path) -> tuple[Any, Any]:
    """Weights when two groups have saved, and after as many steps again; others load and save meanwhile."""
    data = batches(2 * STEPS * RANKS)[dist.get_rank() :: RANKS]
    with begin(2) as engine:
        train_on(engine, data[:STEPS])
        engine.save_checkpoint(path / "2x2")
        saved = dict(engine.named_parameters())
        engine.save_checkpoint(path / "meanwhile", blocking=False)
        train_on(engine, data[STEPS:])
        engine.wait_checkpoint()
        after = dict(engine.named_parameters())
    for there, size, here in (("2x2", 4, "1x4"), ("meanwhile", 1, "4x1")):
        with begin(size) as engine:
            assert engine.load_checkpoint(path / there)[0] is not None
            assert_same_weights(dict(engine.named_parameters()), saved)
            engine.save_checkpoint(path / here)
    return saved, after


def go_on_in_groups(path: Path) -> tuple[Any, Any]:
    data = batches(2 * STEPS * RANKS)[dist.get_rank() :: RANKS]
    with begin(2) as engine:
        assert engine.load_checkpoint(path / "alone")[0] is not None
        loaded = dict(engine.named_parameters())
        train_on(engine, data[STEPS:])
        return loaded, dict(engine.named_parameters())


def test_a_checkpoint_of_groups_loads_however_ranks_share(tmp_path) -> None:
    """2 x 2, then 1 x 4, 4 x 1, one rank, and 2 x 2 again: the same values, and after the same groups the same bits."""
    for part in ("a", "b", "kept"):
        (tmp_path / part).mkdir()
    kept = tmp_path / "kept"
    saved = run_ranks(RANKS, save_in_groups, kept, path=tmp_path / "a")
    model = ARCHITECTURES["llama"](seed=6)
    with infinity.initialize(model=model, config=shared_by(None).config())[0] as engine:
        for name in ("1x4", "4x1"):
            assert engine.load_checkpoint(kept / name)[0] is not None
            assert_same_weights(dict(engine.named_parameters()), saved[0][0])
        engine.save_checkpoint(kept / "alone")
    for (loaded, after), (at_save, on) in zip(
        run_ranks(RANKS, go_on_in_groups, kept, path=tmp_path / "b"), saved, strict=True
    ):
        assert_same_weights(loaded, at_save)
        assert_same_weights(after, on)
    files = Counter(file.name for file in (kept / "2x2").rglob("unit-*"))
    assert set(files.values()) == {1}, "one of the replicas writes a shard"
    assert {name[-len("00000.safetensors") :] for name in files} == {"00000.safetensors", "00001.safetensors"}
    (manifest,) = (read_manifest(file.parent) for file in (kept / "2x2").rglob("manifest.json"))
    assert manifest.ranks == RANKS


def keep(path: Path, size: int, steps: int) -> tuple[int, list[float], dict[str, torch.Tensor]]:
    """Train with every step on the drives, from where an earlier engine has ended."""
    config = grouped(size, "bf16", clipping=0.5).config(Placement("nvme", "nvme", path, "64KiB"))
    config["tiering"]["crash_consistent"] = True
    rank = dist.get_rank()
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        engine.resume()
        begun = engine.global_steps
        losses = train_on(engine, batches(2 * STEPS * RANKS)[rank::RANKS][begun:steps])
        return begun, losses, dict(engine.named_parameters())


def keep_and_go_on(whole: Path, kept: Path) -> str:
    """A run that was never stopped, and one that was; and what other groups are told that want to go on."""
    expected = keep(whole, 2, 2 * STEPS)
    before = keep(kept, 2, STEPS)
    with pytest.raises(CheckpointError) as refused:
        keep(kept, RANKS, 2 * STEPS)
    after = keep(kept, 2, 2 * STEPS)
    assert (expected[0], before[0], after[0]) == (0, 0, STEPS)
    assert before[1] + after[1] == expected[1]
    assert_same_weights(after[2], expected[2])
    return str(refused.value)


def test_steps_that_are_kept_go_on_with_the_same_groups(tmp_path) -> None:
    for message in run_ranks(RANKS, keep_and_go_on, tmp_path / "whole", tmp_path / "kept", path=tmp_path):
        assert "shard_size" in message


# What is sent #


@dataclass(frozen=True)
class CountedGroups(CountedRanks):
    """Which notes by whom as well: with how many ranks each kind of collective is."""

    sizes: dict[str, set[int]] = field(default_factory=dict)

    def all_gather(self, flat: torch.Tensor, pieces: Any, unit: str) -> Any:
        self.sizes.setdefault("gather", set()).add(self.size)
        return super().all_gather(flat, pieces, unit)

    def reduce_scatter(self, shard: torch.Tensor, flat: torch.Tensor, unit: str) -> Any:
        self.sizes.setdefault("reduce-scatter", set()).add(self.size)
        return super().reduce_scatter(shard, flat, unit)

    def all_reduce(self, flat: torch.Tensor, unit: str) -> Any:
        self.sizes.setdefault("all-reduce", set()).add(self.size)
        return super().all_reduce(flat, unit)


def sends_of_a_step(ranks: CountedGroups, stage: int, size: int, accumulation: int = 1) -> list[UnitLayout]:
    config = grouped(size, "bf16", clipping=1.0, accumulation=accumulation).config(Placement(), stage)
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        units = list(engine._runtime.partition.units)
        train_on(engine, batches(2 * accumulation))
        ranks.sent.clear()
        train_on(engine, batches(accumulation))
    return units


@pytest.mark.parametrize("world", [16, 512])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_groups_send_shards_alone_to_one_another(stage, world, monkeypatch) -> None:
    """Whole tensors stay among the ranks that share; an eighth of the gradients crosses, and nothing else."""
    size = 8
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        ranks = CountedGroups(0, world, dist.group.WORLD, dist.group.WORLD)
        monkeypatch.setattr("infinity.setup.join_ranks", lambda *_: ranks)
        units = sends_of_a_step(ranks, stage, size)
    finally:
        dist.destroy_process_group()
    expected = {unit.name: gathers_of(unit, stage, "transformer.wte") for unit in units}
    total = sum(unit.numel for unit in units)
    assert ranks.sent.elements == {
        "gather": sum(expected[unit.name] * unit.numel for unit in units),
        "reduce-scatter": total,
        "all-reduce": total // size,
    }
    assert ranks.sent.reduces == dict.fromkeys((unit.name for unit in units), 2)
    assert ranks.sizes == {"gather": {size}, "reduce-scatter": {size}, "all-reduce": {world // size}}
    assert ranks.sent.small <= 3


@pytest.mark.parametrize(("stage", "passes"), [(1, 1), (2, 3), (3, 3)])
def test_replicas_add_up_once_a_step(stage, passes, monkeypatch) -> None:
    """However many micro-batches it has, and those that share in every one from stage 2 on."""
    size, world = 4, 16
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        ranks = CountedGroups(0, world, dist.group.WORLD, dist.group.WORLD)
        monkeypatch.setattr("infinity.setup.join_ranks", lambda *_: ranks)
        units = sends_of_a_step(ranks, stage, size, accumulation=3)
    finally:
        dist.destroy_process_group()
    total = sum(unit.numel for unit in units)
    assert ranks.sent.elements["reduce-scatter"] == passes * total
    assert ranks.sent.elements["all-reduce"] == total // size


# What is refused #


def accept(values: dict[str, Any], world_size: int = 8) -> int:
    return load_config(values, world_size=world_size).zero.sharing(world_size)


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ({"zero_optimization": {"stage": 3}}, 8),
        ({"zero_optimization": {"stage": 0}}, 1),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": -1}}, 8),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, 4),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, 2),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}}, 8),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}, "communication": {"shard_size": 4}}, 4),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 4}}, 8),  # without effect below stage 3 there, too
        ({"zero_optimization": {"stage": 1}, "communication": {"shard_size": 1}}, 1),
    ],
)
def test_how_many_ranks_share(values, size) -> None:
    assert accept(values) == size


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"zero_optimization": {"stage": 3}, "communication": {"shard_size": 3}}, "choose a divisor of 8"),
        ({"zero_optimization": {"stage": 3}, "communication": {"shard_size": 16}}, "is 16, but the number of ranks, 8"),
        ({"zero_optimization": {"stage": 0}, "communication": {"shard_size": 4}}, "stage 0 divides nothing"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 2}}, "keep one"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 0}}, "it must be a number of ranks, or -1"),
    ],
)
def test_groups_that_cannot_be_are_refused(values, words) -> None:
    with pytest.raises(ConfigError, match=words):
        accept(values)


def test_the_difference_to_the_partition_that_deepspeed_calls_hpz_is_told(caplog) -> None:
    accept({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})
    assert "while DeepSpeed divides them among all" in caplog.text


def test_a_part_of_the_ranks_meets_once() -> None:
    """Engines that follow one another use the same process groups, of which torch keeps all."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        ranks = Ranks(0, 8, dist.group.WORLD, dist.group.WORLD)
        first, second = (ranks.part(range(4), "some") for _ in range(2))
        assert first.group is second.group
        assert (first.size, first.rank) == (4, 0)
        assert ranks.part(range(1), "one").size == 1
        assert ranks.part(range(8), "all") is ranks
    finally:
        dist.destroy_process_group()
