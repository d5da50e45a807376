"""Several ranks train what one process would on the same global batch."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import (
    ARCHITECTURES,
    LR,
    WEIGHT_DECAY,
    Placement,
    Recipe,
    Result,
    batches,
    loss_of,
    train_plainly,
    trained_on,
)

STEPS = 3


@dataclass(frozen=True)
class Case:
    """One training run on several ranks."""

    stage: int = 3
    placement: Placement = field(default_factory=Placement)
    recipe: Recipe = field(default_factory=lambda: Recipe(steps=STEPS))
    architecture: str = "gpt2"

    def config(self) -> dict[str, Any]:
        return self.recipe.config(self.placement, self.stage)


def train_here(case: Case) -> Result:
    """This rank's part: every rank takes each `size`-th micro-batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = ARCHITECTURES[case.architecture](seed=rank)  # rank 0's values count
    data = batches(case.recipe.steps * case.recipe.accumulation * size)
    with infinity.initialize(model=model, config=case.config())[0] as engine:
        return trained_on(engine, data[rank::size])


def train_all(cases: list[Case]) -> list[Result]:
    return [train_here(case) for case in cases]


def run_cases(size: int, cases: list[Case], path: Path) -> list[list[Result]]:
    """Results by case, then by rank."""
    return list(zip(*run_ranks(size, train_all, cases, path=path), strict=True))


def plainly(case: Case, size: int) -> Result:
    """The plain loop with the ranks' micro-batches one after the other."""
    recipe = case.recipe
    return _trained_plainly(
        case.architecture, recipe.precision, recipe.accumulation * size, recipe.clipping, recipe.steps
    )


@cache
def _trained_plainly(architecture: str, *recipe: Any) -> Result:
    """Stages and placements share it; what else a recipe has is no matter of the plain loop."""
    return train_plainly(ARCHITECTURES[architecture](seed=0), Recipe(*recipe))


def assert_follows(case: Case, results: list[Result], size: int) -> None:
    expected = plainly(case, size)
    losses = [loss for step in zip(*(result.losses for result in results), strict=True) for loss in step]
    tolerance = 1e-4 if case.recipe.precision == "fp32" else 3e-2
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), rtol=tolerance, atol=tolerance)
    for result in results:
        for name, weight in result.weights.items():
            torch.testing.assert_close(
                weight.float(), expected.weights[name].float(), rtol=tolerance, atol=tolerance, msg=name
            )


@pytest.mark.parametrize("size", [2, 3])
def test_every_stage_follows_the_plain_loop(size, tmp_path) -> None:
    recipes = [
        Recipe(steps=STEPS),
        Recipe(accumulation=2, clipping=0.5, steps=STEPS),
        Recipe("bf16", clipping=0.5, steps=STEPS),
    ]
    # All pairs of a stage, a recipe and a number of ranks.
    cases = [
        Case(stage, recipe=recipe)
        for stage in range(4)
        for index, recipe in enumerate(recipes)
        if size == 2 or index == stage % len(recipes)
    ]
    for case, results in zip(cases, run_cases(size, cases, tmp_path), strict=True):
        assert_follows(case, results, size)


@pytest.mark.parametrize(("precision", "clipping"), [("fp32", 0.5), ("bf16", 0.0), ("fp16", 0.0)])
def test_placements_give_the_same_bits(precision, clipping, tmp_path) -> None:
    """On two ranks, wherever the shards live and whenever they are updated."""
    recipe = Recipe(precision, accumulation=2, clipping=clipping, steps=STEPS)
    (tmp_path / "swap").mkdir()
    schedule = "deferred" if clipping or precision == "fp16" else "backward"
    tight = "1600KB" if precision == "fp32" else "1MB"
    placements = [
        Placement(),
        Placement("cpu", "cpu", schedule="barrier"),
        Placement("none", "nvme", tmp_path / "swap", "64KiB"),
        Placement("nvme", "nvme", tmp_path / "swap", "64KiB", tight, schedule),
    ]
    cases = [Case(3, placement, recipe, "llama") for placement in placements]
    cases += [Case(stage, recipe=recipe, architecture="llama") for stage in (1, 2)]
    reference, *others = run_cases(2, cases, tmp_path)
    for case, results in zip(cases[1:], others, strict=True):
        for expected, result in zip(reference, results, strict=True):
            if case.stage == 3:
                assert result.losses == expected.losses, case.placement
            for name, weight in result.weights.items():
                # stages 1 and 2 sum micro-batches and ranks in another order
                tolerance = 0 if case.stage == 3 else {"fp32": 1e-4}.get(precision, 3e-2)
                torch.testing.assert_close(weight, expected.weights[name], rtol=tolerance, atol=tolerance)
    assert not list((tmp_path / "swap").iterdir())


def train_without_sync(case: Case) -> Result:
    """Three backward passes a step, of which the last reduces."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data = batches(case.recipe.steps * 3 * size)[rank::size]
    losses = []
    with infinity.initialize(model=ARCHITECTURES[case.architecture](), config=case.config())[0] as engine:
        for index, ids in enumerate(data):
            with nullcontext() if index % 3 == 2 else engine.no_sync():
                loss = loss_of(engine, ids)
                engine.backward(loss / 3)
            losses.append(loss.item())
            if index % 3 == 2:
                engine.step()
        return Result(losses, dict(engine.named_parameters()))


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_reduces_in_the_last_pass(stage, tmp_path) -> None:
    case = Case(stage)
    results = run_ranks(2, train_without_sync, case, path=tmp_path)
    assert_follows(dataclasses.replace(case, recipe=Recipe(accumulation=3, steps=STEPS)), results, 2)


def no_sync_message(case: Case) -> str:
    with infinity.initialize(model=ARCHITECTURES[case.architecture](), config=case.config())[0] as engine:
        with pytest.raises(infinity.InfinityError) as refused, engine.no_sync():
            pass
        return str(refused.value)


def test_no_sync_is_refused_where_gradients_are_sharded(tmp_path) -> None:
    for message in run_ranks(2, no_sync_message, Case(2), path=tmp_path):
        assert "no_sync" in message
        assert "stage 2" in message


class Experts(nn.Module):
    """A block whose tokens choose one of two experts; on a rank, one of them may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.never = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x + self.experts[expert](x).relu()


class Mixture(nn.Module):
    _no_split_modules = ("Experts",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, choices: list[int]) -> torch.Tensor:
        for block, choice in zip(self.blocks, choices, strict=True):
            x = block(x, choice)
        return self.head(x).square().mean()


CHOICES = [[0, 1, 1], [0, 0, 1], [1, 1, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]]  # of two ranks in three steps


def mixture() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    return Mixture(), torch.randn(len(CHOICES), 4, 16)


def train_mixtures(cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    return [train_mixture(case) for case in cases]


def train_mixture(case: Case) -> dict[str, torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, data = mixture()
    with infinity.initialize(model=model, config=case.config())[0] as engine:
        for x, choices in list(zip(data, CHOICES, strict=True))[rank::size]:
            engine.backward(engine(x, choices))
            engine.step()
        return dict(engine.named_parameters())


def test_ranks_may_use_different_experts(tmp_path) -> None:
    """A parameter without a gradient on any rank is left alone; one with a gradient on some rank is updated on all."""
    swap = tmp_path / "swap"
    swap.mkdir()
    model, data = mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    for index, (x, choices) in enumerate(zip(data, CHOICES, strict=True)):
        (model(x, choices) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    cases = [Case(stage, Placement("nvme", "nvme", swap) if stage == 3 else Placement()) for stage in range(4)]
    for of_rank in run_ranks(2, train_mixtures, cases, path=tmp_path):
        for case, weights in zip(cases, of_rank, strict=True):
            for name, param in model.named_parameters():
                torch.testing.assert_close(weights[name], param.data, rtol=1e-5, atol=1e-6, msg=f"{case.stage} {name}")


class Detour(nn.Module):
    """Goes through two of its layers, which are alike, in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = x + self.layers[index](x).tanh()
        return x.square().mean()


def take_paths(cases: list[Case], orders: list[list[int]]) -> list[str]:
    """What each case's third step is refused with; in two, the ranks take the same path."""
    refusals = []
    for case in cases:
        with infinity.initialize(model=Detour(), config=case.config())[0] as engine:
            for order in ([0, 1, 2], [2, 1], orders[dist.get_rank()]):
                try:
                    engine.backward(engine(torch.ones(2, 16), order))
                    engine.step()
                except infinity.InfinityError as error:
                    refusals.append(str(error))
                    with pytest.raises(infinity.InfinityError, match="has stopped after an error"):
                        engine(torch.ones(2, 16), order)
    return refusals


@pytest.mark.parametrize("orders", [[[0, 1], [1, 0]], [[0, 2], [1, 2]]], ids=["another order", "other layers"])
def test_ranks_on_different_paths_are_told_so(orders, tmp_path) -> None:
    """Layers of one size: their parameters would be mixed without a word. Below stage 3 that is no error."""
    swap = tmp_path / "swap"
    swap.mkdir()
    cases = [Case(3, Placement("nvme", "nvme", swap)), Case(3)]
    for refusals in run_ranks(2, take_paths, cases, orders, path=tmp_path):
        assert len(refusals) == len(cases)
        assert all("the ranks have run different modules" in refusal for refusal in refusals)


class Again(nn.Module):
    """Its backward pass comes to the last layer again, when `after` layers have had their gradients.

    Args:
        where: the ranks on which it does so.
        trained: number of layers that are trained, the last ones.
    """

    def __init__(self, after: int = 3, where: tuple[int, ...] = (0, 1), trained: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.after, self.where = after, where
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(7))
        self.layers[: 7 - trained].requires_grad_(False)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == len(self.layers) - self.after and rank in self.where:
                x.register_hook(self._again)
            x = x + layer(x).tanh()
        return x.square().mean()

    @torch.enable_grad()
    def _again(self, grad: torch.Tensor) -> None:
        (self.layers[-1](torch.ones_like(grad)) * grad).sum().backward()


class Constant(nn.Module):
    """On rank 0, backward reads the values of a layer after it has passed the layer's gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x + layer(x).tanh()
            if index == 2 and rank == 0:
                x = x * layer.weight.detach()[0].exp()
        return x.square().mean()


@dataclass
class Trained:
    """What became of a training: its weights, or why it was refused."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    refusal: str = ""


def train_again(models: list[tuple[nn.Module, list[Case]]], data: torch.Tensor) -> list[list[Trained]]:
    rank = dist.get_rank()

    def train(model: nn.Module, case: Case) -> Trained:
        with infinity.initialize(model=copy.deepcopy(model), config=case.config())[0] as engine:
            for x in data[rank::2]:
                try:
                    engine.backward(engine(x, rank))
                    engine.step()
                except infinity.InfinityError as error:
                    with pytest.raises(infinity.InfinityError, match="has stopped after an error"):
                        engine.zero_grad()
                    return Trained(refusal=str(error))
            return Trained(dict(engine.named_parameters()))

    return [[train(model, case) for case in cases] for model, cases in models]


def test_gradients_in_parts_update_a_unit_once_on_all_ranks_or_are_refused_by_all(tmp_path) -> None:
    """A unit's second gradient comes before the ranks vote on the first one, during the vote, or after it.

    If one rank alone gets one, the others learn it before they vote, or at the end of the pass. After a refusal no rank
    goes on.
    """
    data = torch.randn(2 * STEPS, 4, 16)

    def at(*stages: int, schedule: str = "backward") -> list[Case]:
        return [
            Case(stage, Placement(schedule=schedule), Recipe(clipping=0 if schedule == "backward" else 1e9))
            for stage in stages
        ]

    right = [
        (Again(1), at(1, 3)),
        (Again(3), at(0, 1, 2, 3)),
        (Again(1, where=(0,)), at(0, 2)),
        (Constant(), at(0, 1)),
        (Constant(), at(2, schedule="speculative")),
    ]
    refused = [
        (Again(6), at(1, 3)),
        (Again(3, where=(0,)), at(0, 2)),
        (Again(2, where=(0,), trained=3), at(0)),  # rank 0 updates nothing before it learns that rank 1 has
        (Again(6, where=(1,)), at(0)),
    ]
    found = run_ranks(2, train_again, right + refused, data, path=tmp_path)
    for of_rank in found:
        for (model, cases), trained in zip(right, of_rank[: len(right)], strict=True):
            expected = train_plainly_on_two(copy.deepcopy(model), data)
            for case, here in zip(cases, trained, strict=True):
                assert not here.refusal, (model, case)
                for name, weight in here.weights.items():
                    message = f"{type(model).__name__} {case.stage} {case.placement.schedule} {name}"
                    torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=message)
        for (model, cases), trained in zip(refused, of_rank[len(right) :], strict=True):
            for case, here in zip(cases, trained, strict=True):
                assert "has got a second gradient in one backward pass" in here.refusal, (model, case, here)


def train_plainly_on_two(model: nn.Module, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights after steps on the mean gradient of two ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    for pair in data.split(2):
        for rank, x in enumerate(pair):
            (model(x, rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}
