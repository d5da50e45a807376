"""Ranks whose batches use different modules train the mean over ranks where parameters stay, and are told where not."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from tests.behaviour.ranks import run_ranks

ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
WIDTH = 16

Path_ = Sequence[str]  # parts of the model, in the order in which a batch goes through them


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Parts(nn.Module):
    """Goes through the parts that it is told, of several sizes; some in blocks, others outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text = nn.Linear(WIDTH, WIDTH)
        self.image = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.unused = nn.Linear(WIDTH, 5)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, path: Path_) -> torch.Tensor:
        for name in path:
            x = x + self.get_submodule(name)(x)
        return x.square().mean()


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
TEXT, IMAGE = ("text", *BLOCKS, "head"), ("image", *BLOCKS, "head")
PATHS: dict[str, list[tuple[Path_, Path_]]] = {  # of rank 0 and rank 1, by micro-batch, again and again
    "image beside text": [(IMAGE, TEXT)],
    "from the second step on": [(TEXT, TEXT), (IMAGE, TEXT), (TEXT, IMAGE)],
    "one with both": [(("image", *TEXT), TEXT)],
    "without the last": [(TEXT, TEXT[:-1]), (TEXT, TEXT)],
    "without the first": [(TEXT, TEXT[1:]), (TEXT[1:], TEXT)],
    "another order": [(TEXT, ("text", *BLOCKS[::-1], "head"))],
    "blocks left out": [(TEXT, ("text", "blocks.2", "head")), (("blocks.1", "head"), TEXT)],
    "nothing alike": [(("text",), ("image", "head")), (BLOCKS, ("text", "image"))],
}


@dataclass(frozen=True)
class Case:
    stage: int
    paths: str
    offload: str = "none"
    accumulation: int = 1
    clipping: float = 0.0
    schedule: str = "auto"
    evaluates: bool = False  # without the engine, as `generate` does
    tiering: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)

    def config(self, path: Path) -> dict[str, Any]:
        where = {"device": self.offload, "nvme_path": str(path)}
        zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0}
        if self.stage:
            zero["offload_optimizer"] = where
        if self.stage == 3:
            zero["offload_param"] = where
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": zero | self.zero,
            "tiering": {"update_schedule": self.schedule, "tile_size": "4KiB"} | self.tiering,
        }


STEPS = 4  # one more than the longest of the paths: ranks return to the first way after steps on others


def data_of(case: Case) -> list[tuple[torch.Tensor, tuple[Path_, Path_]]]:
    generator = torch.Generator().manual_seed(1)
    count, paths = STEPS * case.accumulation, PATHS[case.paths]
    return [(torch.randn(2, 2, WIDTH, generator=generator), paths[index % len(paths)]) for index in range(count)]


def train_here(cases: list[Case], path: Path) -> list[dict[str, torch.Tensor]]:
    rank, found = dist.get_rank(), []
    for case in cases:
        with infinity.initialize(model=Parts(), config=case.config(path))[0] as engine:
            for x, paths in data_of(case):
                engine.backward(engine(x[rank], paths[rank]))
                engine.step()
                with torch.no_grad():
                    engine(x[rank], paths[1 - rank])
            found.append({name: values.clone() for name, values in engine.named_parameters()})
    return found


def train_plainly(case: Case) -> dict[str, torch.Tensor]:
    model = Parts()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for index, (x, paths) in enumerate(data_of(case)):
        loss = sum(model(x[rank], paths[rank]) for rank in range(2)) / (2 * case.accumulation)
        loss.backward()
        if (index + 1) % case.accumulation == 0:
            if case.clipping:
                nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def assert_trained(cases: list[Case], path: Path) -> None:
    plain = [train_plainly(case) for case in cases]
    for ours in run_ranks(2, train_here, cases, path, path=path):
        for case, values, expected in zip(cases, ours, plain, strict=True):
            for name, value in expected.items():
                torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5, msg=f"{case} {name}")


@pytest.mark.parametrize(("stage", "offload", "first"), [(0, "none", 0), (1, "cpu", 1), (2, "none", 1), (2, "nvme", 0)])
def test_below_stage_3_ranks_train_their_mean(stage, offload, first, tmp_path) -> None:
    cases = [
        Case(stage, paths, offload, clipping=(0.0, 0.05)[(first + index) % 2]) for index, paths in enumerate(PATHS)
    ]
    assert_trained(cases, tmp_path)


@pytest.mark.parametrize("schedule", ["backward", "deferred", "barrier", "speculative"])
def test_so_they_do_under_every_schedule(schedule, tmp_path) -> None:
    clipping = 0.0 if schedule == "backward" else 100.0
    half = schedule in ("deferred", "speculative")
    assert_trained(
        [Case(1 + (index + half) % 2, paths, "nvme", 1, clipping, schedule) for index, paths in enumerate(PATHS)],
        tmp_path,
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_so_they_do_with_accumulation(stage, tmp_path) -> None:
    cases = [
        Case(stage, paths, accumulation=2, clipping=(0.0, 0.05)[(stage + index) % 2])
        for index, paths in enumerate(PATHS)
    ]
    assert_trained(cases, tmp_path)


def test_so_they_do_with_cut_blocks(tmp_path) -> None:
    cases = [
        Case(stage, paths, "nvme", clipping=(0.0, 0.05)[(stage + index) % 2], tiering={"max_unit_size": "2KiB"})
        for stage in (1, 2)
        for index, paths in enumerate(PATHS)
    ]
    assert_trained(cases, tmp_path)


# Stage 3 #


def refused_here(cases: list[Case], path: Path) -> list[tuple[str, float]]:
    """What each case is refused with, and after how long."""
    rank, found = dist.get_rank(), []
    for case in cases:
        said = "", 0.0
        with infinity.initialize(model=Parts(), config=case.config(path))[0] as engine:
            for x, paths in data_of(case):
                began_s = time.monotonic()
                try:
                    if case.evaluates:
                        with torch.no_grad():
                            engine.module(x[rank], paths[rank])
                        continue
                    engine.backward(engine(x[rank], paths[rank]))
                    engine.step()
                except infinity.InfinityError as error:
                    said = f"{type(error).__name__}: {error}", time.monotonic() - began_s
                    with pytest.raises(infinity.InfinityError, match="has stopped after an error"):
                        engine(x[rank], paths[rank])
                    break
        found.append(said)
    return found


def assert_refused(cases: list[Case], path: Path) -> None:
    for of_rank in run_ranks(2, refused_here, cases, path, path=path):
        for case, (said, took_s) in zip(cases, of_rank, strict=True):
            words = r"DivergedError: the ranks have run different modules .*rank 0: .*; rank 1: .*stage to 2"
            assert re.search(words, said), f"{case}: {said}"
            assert took_s < 30


LATE = "from the second step on"


@pytest.mark.parametrize(("offload", "clipping"), [("none", 0.0), ("none", 0.05), ("cpu", 0.05), ("nvme", 0.0)])
def test_at_stage_3_ranks_are_told_what_differs(offload, clipping, tmp_path) -> None:
    assert_refused([Case(3, paths, offload, clipping=clipping) for paths in PATHS if paths != LATE], tmp_path)


def test_so_they_are_with_accumulation_and_cut_blocks(tmp_path) -> None:
    cases = [
        Case(3, paths, "nvme", accumulation, tiering=tiering)
        for paths in PATHS
        for accumulation, tiering in ((2, {}), (1, {"max_unit_size": "2KiB"}))
        if paths != LATE
    ]
    assert_refused(cases, tmp_path)


@pytest.mark.parametrize(
    ("offload", "accumulation", "evaluates"), [("none", 1, False), ("nvme", 2, False), ("nvme", 1, True)]
)
def test_a_rank_that_keeps_to_the_way_of_before_is_told_too(offload, accumulation, evaluates, tmp_path) -> None:
    """It has begun to gather what the other rank does not use, so that the group is of no use behind this."""
    cases = [Case(3, LATE, offload, accumulation, evaluates=evaluates)]
    for ((said, took_s),) in run_ranks(2, refused_here, cases, tmp_path, path=tmp_path):
        assert re.search(r"rank 0: .*unit `image.*rank 1: .*unit `text", said), said
        assert took_s < 30


FEWER: list[Path_] = [TEXT, ("text",), ("text",), TEXT, ("image",), TEXT]
ALIKE: list[Path_] = [TEXT, ("text", "blocks.2", "head"), IMAGE, ("text", *BLOCKS[::-1]), TEXT, ("blocks.1",)]


def alike_here(
    ways: list[Path_], tiering: dict[str, Any], evaluates: bool, path: Path
) -> list[dict[str, torch.Tensor]]:
    """All ranks take the same way, another one in each step, maybe with evaluations between."""
    found = []
    for offload in ("none", "nvme"):
        case = Case(3, "", offload, clipping=0.05, tiering=tiering)
        with infinity.initialize(model=Parts(), config=case.config(path))[0] as engine:
            for index, way in enumerate(ways):
                x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index))
                engine.backward(engine(x, way))
                engine.step()
                if evaluates:
                    with torch.no_grad():
                        engine(x, ways[-index])
                        engine.module(x, ways[-index])
            found.append({name: values.clone() for name, values in engine.named_parameters()})
    return found


@pytest.mark.parametrize(
    ("ways", "tiering", "evaluates"), [(ALIKE, {}, True), (FEWER, {"host_memory": "356KiB"}, False)]
)
def test_at_stage_3_a_way_that_all_ranks_take_is_no_error(ways, tiering, evaluates, tmp_path) -> None:
    model = Parts()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for index, way in enumerate(ways):
        model(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index)), way).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    for of_rank in run_ranks(2, alike_here, ways, tiering, evaluates, tmp_path, path=tmp_path):
        for values in of_rank:
            for name, param in model.named_parameters():
                torch.testing.assert_close(values[name], param.detach(), rtol=1e-4, atol=1e-5, msg=name)
