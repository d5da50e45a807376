"""Gradients are summed over micro-batches and over ranks in the dtypes that the configuration names."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.config import load_config
from infinity.planner import plan_training
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import DTYPES, Placement, Recipe

PASSES, NUMEL = 3, 777
RECIPE = Recipe("bf16", accumulation=PASSES, clipping=1e6)  # clipping has the norm known at every schedule

Gradients = dict[str, torch.Tensor]


class Product(nn.Module):
    """Its gradients are products of numbers: the same bits wherever the weight lies, as no library's gemm promises."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NUMEL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).float().sum()


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.products = nn.ModuleList([Product(), Product()])

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        return torch.stack([product(x) for product, x in zip(self.products, xs, strict=True)]).sum()


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, NUMEL, generator=generator).bfloat16() for _ in range(count)]


@dataclass(frozen=True)
class Sums:
    """Where and in which dtypes gradients are summed."""

    stage: int
    travel: str = "bf16"
    accumulate: str = "fp32"

    def config(self) -> dict[str, Any]:
        values = RECIPE.config(Placement())
        values["zero_optimization"] = {"stage": self.stage}
        values["communication_data_type"] = self.travel
        values["data_types"] = {"grad_accum_dtype": self.accumulate}
        return values


def norm_here(sums: Sums) -> float:
    """The gradient norm of the first step, on this rank."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with infinity.initialize(model=Products(), config=sums.config())[0] as engine:
        for xs in batches(PASSES * size)[rank::size]:
            engine.backward(engine(xs))
            engine.step()
        norm = engine.get_global_grad_norm()
    assert norm is not None
    return norm


def norms_here(cases: list[Sums]) -> list[float]:
    return [norm_here(case) for case in cases]


def plain_gradients(size: int) -> list[list[Gradients]]:
    """torch's gradients by rank and micro-batch, of a loss divided by their number; all of one set of bf16 weights."""
    model = Products().bfloat16()
    gradients: list[list[Gradients]] = [[] for _ in range(size)]
    for index, xs in enumerate(batches(PASSES * size)):
        model.zero_grad()
        (model(xs) / (PASSES * size)).backward()
        gradients[index % size].append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return gradients


def total(parts: list[Gradients], dtype: torch.dtype) -> Gradients:
    """The sum, rounded to `dtype` after every addition."""
    sums = rounded(parts[0], dtype)
    for part in parts[1:]:
        sums = {name: (sums[name].float() + grad.float()).to(dtype) for name, grad in part.items()}
    return sums


def rounded(gradients: Gradients, dtype: torch.dtype) -> Gradients:
    return {name: grad.to(dtype) for name, grad in gradients.items()}


def plain_norm(sums: Sums, gradients: list[list[Gradients]]) -> float:
    travel, accumulate = DTYPES[sums.travel], DTYPES[sums.accumulate]
    if len(gradients) == 1:
        final = total(gradients[0], accumulate)
    elif sums.stage >= 2:  # over the ranks in every pass, then over the passes
        final = total([total(list(of_pass), travel) for of_pass in zip(*gradients, strict=True)], accumulate)
    else:
        sent = [rounded(total(of_rank, accumulate), travel) for of_rank in gradients]
        final = rounded(total(sent, travel), accumulate)
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in final.values()))


def assert_norms(norms: list[float], cases: list[Sums], gradients: list[list[Gradients]]) -> None:
    expected = [plain_norm(case, gradients) for case in cases]
    assert norms == pytest.approx(expected, rel=1e-9)
    for one, other in itertools.pairwise(expected):
        assert one != pytest.approx(other, rel=1e-7), "the cases cannot be told apart"


@pytest.mark.parametrize("stage", [0, 3])
def test_micro_batches_are_summed_in_the_accumulation_dtype(stage) -> None:
    cases = [Sums(stage, accumulate=dtype) for dtype in ("fp32", "bf16")]
    assert_norms(norms_here(cases), cases, plain_gradients(1))


def test_ranks_sum_in_the_communication_dtype(tmp_path: Path) -> None:
    cases = [Sums(*case) for case in itertools.product((1, 3), ("bf16", "fp32"), ("fp32", "bf16"))]
    gradients = plain_gradients(2)
    for norms in run_ranks(2, norms_here, cases, path=tmp_path):
        for stage in (1, 3):
            chosen = [index for index, case in enumerate(cases) if case.stage == stage]
            assert_norms([norms[i] for i in chosen], [cases[i] for i in chosen], gradients)


def test_sums_in_bf16_take_half_the_memory() -> None:
    wide, narrow = (
        plan_training(Products(), load_config(Sums(3, accumulate=dtype).config())).needs for dtype in ("fp32", "bf16")
    )
    assert narrow.grads_bytes * 2 == wide.grads_bytes
    rest = {"grads_bytes": 0, "grads_min_bytes": 0, "grads_overlap_bytes": 0}
    assert dataclasses.replace(narrow, **rest) == dataclasses.replace(wide, **rest)


def norm_of_one(stage: int, travel: str) -> float:
    """The gradient norm of a step of one micro-batch."""
    config = Recipe("bf16", clipping=1e6).config(Placement())
    config |= {"zero_optimization": {"stage": stage}, "communication_data_type": travel}
    with infinity.initialize(model=Products(), config=config)[0] as engine:
        engine.backward(engine(batches(dist.get_world_size())[dist.get_rank()]))
        engine.step()
        norm = engine.get_global_grad_norm()
    assert norm is not None
    return norm


def norms_of_one(cases: list[tuple[int, str]]) -> list[float]:
    return [norm_of_one(*case) for case in cases]


def test_what_the_ranks_have_summed_is_held_as_it_is(tmp_path: Path) -> None:
    """Also where there is one micro-batch, and so no dtype of accumulation: a sum in fp32 is not rounded to bf16."""
    cases = [(stage, travel) for travel in ("fp32", "bf16") for stage in (0, 1, 3)]
    model = Products().bfloat16()
    parts: list[Gradients] = []
    for xs in batches(2):
        model.zero_grad()
        (model(xs) / 2).backward()
        parts.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    expected = [
        math.sqrt(sum(float(grad.double().square().sum()) for grad in total(parts, DTYPES[travel]).values()))
        for _, travel in cases
    ]
    assert expected[0] != pytest.approx(expected[-1], rel=1e-7), "the cases cannot be told apart"
    for norms in run_ranks(2, norms_of_one, cases, path=tmp_path):
        assert norms == pytest.approx(expected, rel=1e-9)
