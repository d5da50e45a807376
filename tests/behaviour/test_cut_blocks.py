"""Blocks that are cut into units of their parts give the bits of whole ones, in less memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.zero.partition import Alignment, Partition, make_partition
from infinity.zero.tiling import Tile, TiledLinear
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import (
    ARCHITECTURES,
    BATCH,
    Placement,
    Recipe,
    Result,
    assert_same_bits,
    batches,
    least_memory,
    loss_of,
    tiny_gpt2,
    train_on,
    trained_on,
)
from tests.behaviour.test_layer_major import inputs

LIMIT = "12KiB"  # a block of the test models has four times as much and more
STEPS = 4

# Where blocks are cut #


def partition_of(model: nn.Module, limit_numel: int | None) -> Partition:
    groups = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    align = Alignment(8, param=1)
    return make_partition(model, groups, align=align, persistence_threshold=0, offloaded=True, limit_numel=limit_numel)


def parameters_of(partition: Partition) -> dict[str, list[str]]:
    return {unit.name: [info.name for info in unit.params] for unit in partition.units}


class Gpt(nn.Module):
    """One block of a GPT: 4 h^2 in attention, 8 h^2 behind it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)})
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.ones(width))


def in_a_list(*blocks: nn.Module) -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList(blocks)
    return model


def test_the_largest_modules_of_a_block_become_units() -> None:
    model, square = in_a_list(Gpt()), 64 * 64
    assert list(parameters_of(partition_of(model, 13 * square))) == ["blocks.0"]
    halves = parameters_of(partition_of(model, 9 * square))
    assert list(halves) == ["blocks.0", "blocks.0.attention.qkv", "blocks.0.mlp"]
    assert "blocks.0.attention.out.weight" in halves["blocks.0"], "an eighth of the limit stays with the block"
    parts = parameters_of(partition_of(model, 5 * square))
    ends = ["attention.qkv", "attention.out", "mlp.0", "mlp.2"]
    assert list(parts) == ["blocks.0", *(f"blocks.0.{end}" for end in ends)]
    assert parts["blocks.0"] == ["blocks.0.scale", "blocks.0.norm.weight", "blocks.0.norm.bias"]


def test_a_cut_block_is_one_block() -> None:
    """To layer-major micro-batches and to activation checkpoints."""
    model = in_a_list(Gpt(), Gpt())
    assert partition_of(model, 64 * 64).blocks == partition_of(model, None).blocks == ("blocks.0", "blocks.1")


@settings(max_examples=50)
@given(widths=st.lists(st.integers(1, 20), min_size=1, max_size=8), limit=st.integers(1, 2000), data=st.data())
def test_every_parameter_is_in_one_unit_and_what_can_be_cut_is(widths, limit, data) -> None:
    def grown(depth: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(width, width) for width in widths]
        if depth:
            layers.insert(data.draw(st.integers(0, len(layers))), grown(depth - 1))
        return nn.Sequential(*layers) if data.draw(st.booleans()) else nn.ModuleList(layers)

    block = Gpt(4)
    block.more = grown(2)
    block.tiled = TiledLinear(8, 8, out_splits=2)
    model = in_a_list(block, nn.Linear(3, 3))
    partition = partition_of(model, limit)
    names = [info.name for unit in partition.units for info in unit.params]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    by_name = {unit.name: unit for unit in partition.units}
    for unit in partition.units:
        module = model.get_submodule(unit.name)
        assert all(info.name.startswith(f"{unit.name}.") for info in unit.params)
        numel = sum(info.numel for info in unit.params)
        own = sum(param.numel() for param in module.parameters(recurse=False))
        assert numel <= max(limit, own), unit.name
        assert not any(isinstance(part, Tile) and part is not module for part in owners(model, unit.params))
    assert all(point.module_name in by_name or not point.units for point in partition.hook_points)


def owners(model: nn.Module, infos: Iterable[Any]) -> list[nn.Module]:
    return [model.get_submodule(info.name.rpartition(".")[0]) for info in infos]


# What is trained #


@dataclass(frozen=True)
class Run:
    architecture: str = "gpt2"
    recipe: Recipe = field(default_factory=lambda: Recipe("bf16", steps=STEPS, clipping=0.5))
    placement: Placement = field(default_factory=Placement)
    accumulation: str = "micro_batch"

    def config(self, *, cut: bool) -> dict[str, Any]:
        config = self.recipe.config(self.placement)
        config["tiering"]["accumulation"] = self.accumulation
        return config | {"tiering": config["tiering"] | ({"max_unit_size": LIMIT} if cut else {})}


def train_run(run: Run, *, cut: bool) -> tuple[Result, int]:
    """And into how many units the model was divided."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    steps = run.recipe.steps * run.recipe.accumulation
    with infinity.initialize(model=ARCHITECTURES[run.architecture](seed=3), config=run.config(cut=cut))[0] as engine:
        if run.accumulation == "layer":
            micro = inputs(steps * size)[rank::size]
            each = run.recipe.accumulation
            losses = [float(engine.train_batch(micro[at : at + each])) for at in range(0, steps, each)]
        else:
            losses = train_on(engine, batches(steps * size)[rank::size])
        return Result(losses, dict(engine.named_parameters())), len(engine._runtime.partition.units)


def both_ways(runs: list[Run]) -> list[tuple[Result, Result]]:
    found = []
    for run in runs:
        whole, few = train_run(run, cut=False)
        cut, many = train_run(run, cut=True)
        assert many >= few + 4
        found.append((whole, cut))
    return found


def runs_on(path: Path) -> list[Run]:
    on_drives = Placement("nvme", "nvme", path, "64KiB", schedule="deferred")
    return [
        Run(placement=on_drives),
        Run("llama", Recipe("fp32", steps=STEPS, accumulation=2), Placement("nvme", "nvme", path, "64KiB")),
        Run(recipe=Recipe("bf16", steps=STEPS, accumulation=2, clipping=0.5), accumulation="layer"),
    ]


def test_a_cut_block_trains_to_the_same_bits(tmp_path) -> None:
    for whole, cut in both_ways(runs_on(tmp_path)):
        assert_same_bits(whole, cut)


def test_so_it_does_on_two_ranks(tmp_path) -> None:
    (tmp_path / "swap").mkdir()
    for results in run_ranks(2, both_ways, runs_on(tmp_path / "swap"), path=tmp_path):
        for whole, cut in results:
            assert_same_bits(whole, cut)


def config_of(run: Run, max_unit_size: str, host_memory: int) -> dict[str, Any]:
    config = run.config(cut=False)
    return config | {"tiering": config["tiering"] | {"max_unit_size": max_unit_size, "host_memory": host_memory}}


def refused_with(run: Run, host_memory: int) -> str:
    with pytest.raises(infinity.CapacityError) as refused:
        infinity.initialize(model=tiny_gpt2(), config=config_of(run, "auto", host_memory))
    return str(refused.value)


def train_cut(config: dict[str, Any], rank: int = 0, ranks: int = 1) -> tuple[Result, int]:
    with infinity.initialize(model=tiny_gpt2(seed=3), config=config)[0] as engine:
        losses = train_on(engine, batches(STEPS * ranks)[rank::ranks])
        return Result(losses, dict(engine.named_parameters())), len(engine._runtime.partition.units)


def test_blocks_are_cut_where_whole_ones_do_not_fit(tmp_path) -> None:
    run = Run(placement=Placement("nvme", "nvme", tmp_path, "16KiB"))
    words = refused_with(run, 1)
    found = re.search(
        r"Raise tiering.host_memory to (\d+) bytes \(\S+\) or more \(from (\d+) on, blocks are cut", words
    )
    assert found is not None, words
    whole, least = int(found[1]), int(found[2])
    assert least < whole
    result, few = train_cut(config_of(run, "auto", whole))
    assert few == train_run(run, cut=False)[1], "whole ones fit"
    for budget in (whole - 1, least):
        cut, many = train_cut(config_of(run, "auto", budget))
        assert many > few
        assert_same_bits(cut, result)
    refused_with(run, least - 1)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("limit", ["2KiB", "5KiB", "12KiB"])
def test_the_least_budget_of_a_cut_model_is_enough(architecture, limit, tmp_path) -> None:
    """With updates under backward, where a unit is updated beside those in use."""
    run = Run(architecture, Recipe("bf16", steps=2), Placement("nvme", "nvme", tmp_path, "16KiB", schedule="backward"))
    config = config_of(run, limit, 1)
    config["tiering"]["host_memory"] = least_memory(ARCHITECTURES[architecture](), config)
    with infinity.initialize(model=ARCHITECTURES[architecture](seed=3), config=config)[0] as engine:
        result = trained_on(engine, batches(2))
    assert_same_bits(result, train_run(run, cut=False)[0])


def cut_alike(run: Run, budgets: tuple[int, int]) -> tuple[Result, int]:
    rank = dist.get_rank()
    return train_cut(config_of(run, "auto", budgets[rank]), rank, 2)


def test_ranks_with_unequal_budgets_cut_alike(tmp_path) -> None:
    for name in ("swap", "equal", "unequal"):
        (tmp_path / name).mkdir()
    run = Run(placement=Placement("nvme", "nvme", tmp_path / "swap", "16KiB"))
    (whole, few), _ = run_ranks(2, cut_alike, run, (64 << 20, 64 << 20), path=tmp_path / "equal")
    results = run_ranks(2, cut_alike, run, (64 << 20, 700_000), path=tmp_path / "unequal")
    assert results[0][1] == results[1][1] > few
    assert_same_bits(results[0][0], whole)


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward, of which one reads a parameter of a part past the part's forward."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + nn.functional.linear(self.up(x).relu(), self.down.weight, self.down.bias)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def train_checkpointed(*, cut: bool) -> Result:
    torch.manual_seed(0)
    losses = []
    with infinity.initialize(model=Checkpointed(), config=Run().config(cut=cut))[0] as engine:
        for x in torch.randn(STEPS, BATCH, 32, generator=torch.Generator().manual_seed(1)):
            loss = engine(x.bfloat16()).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return Result(losses, dict(engine.named_parameters()))


def test_checkpointed_blocks_and_those_that_read_past_a_module_are_cut(tmp_path) -> None:
    assert_same_bits(train_checkpointed(cut=True), train_checkpointed(cut=False))


def save_and_load(path: Path) -> list[Result]:
    """Train on whole; then on, from a checkpoint, cut, and the other way round."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = batches(2 * STEPS * size)[rank::size]
    found = []
    for first, second in ((False, False), (False, True), (True, False)):
        there = path / f"{first}-{second}"
        run = Run()
        with infinity.initialize(model=tiny_gpt2(seed=1), config=run.config(cut=first))[0] as engine:
            losses = train_on(engine, data[:STEPS])
            engine.save_checkpoint(there)
        with infinity.initialize(model=tiny_gpt2(seed=2), config=run.config(cut=second))[0] as engine:
            assert engine.load_checkpoint(there)[0] is not None
            losses += train_on(engine, data[STEPS:])
            found.append(Result(losses, dict(engine.named_parameters())))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_checkpoints_load_however_blocks_are_cut(size, tmp_path) -> None:
    (tmp_path / "kept").mkdir()
    kept = tmp_path / "kept"
    for whole, *others in [save_and_load(kept)] if size == 1 else run_ranks(size, save_and_load, kept, path=tmp_path):
        for other in others:
            assert_same_bits(whole, other)


def test_evaluation_of_a_cut_model() -> None:
    run = Run()
    ids = batches(1)[0]
    found = []
    for cut in (False, True):
        with infinity.initialize(model=tiny_gpt2(seed=3), config=run.config(cut=cut))[0] as engine, torch.no_grad():
            found.append(loss_of(engine, ids).item())
    assert found[0] == found[1]
