"""Which collectives run follows from what all ranks do alike, and no unit is reduced more often than it must be."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.errors import RankError
from infinity.schedule.actions import Event, UseBegins
from infinity.telemetry import Counters
from infinity.tiers import FlatSpec, Sharding
from infinity.zero.executor import Executor
from infinity.zero.gathering import Gathering
from infinity.zero.ranks import Pending, Ranks
from infinity.zero.unit import Shared
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import LR, WEIGHT_DECAY, Placement, Recipe, least_memory

WIDTH, STEPS = 32, 3


class Expert(nn.Module):
    """A block of which one part has no gradient, so that its unit waits for one until the pass is over."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.used(x).relu()


def experts() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Expert() for _ in range(6)))


def data() -> torch.Tensor:
    return torch.randn(STEPS, 2, 4, WIDTH, generator=torch.Generator().manual_seed(1))


def settings(path: Path, host_memory: int | str, stage: int) -> dict[str, Any]:
    return Recipe().config(Placement("nvme", "nvme", path, "16KiB", host_memory), stage)


@contextmanager
def no_collective_in_actions(executor: Executor) -> Iterator[None]:
    """Refuse collectives while the actions of an event are performed."""
    perform, talking = executor._report, Ranks.talking
    events: list[Event] = []

    def do(event: Event) -> bool:
        events.append(event)
        try:
            return perform(event)
        finally:
            events.pop()

    def talk(self: Ranks, what: str) -> AbstractContextManager[None]:
        assert not events, f"{what} is an action for {events[-1]}"
        return talking(self, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_report", do)
        patch.setattr(Ranks, "talking", talk)
        yield


def train_in(path: Path, budgets: list[str], stage: int) -> dict[str, torch.Tensor]:
    """Train in this rank's budget, where "least" is what the refusal names."""
    rank = dist.get_rank()
    budget: int | str = budgets[rank]
    if "least" in budgets:
        least = least_memory(experts(), settings(path, 1, stage))
        budget = least if budget == "least" else budget
    with (
        infinity.initialize(model=experts(), config=settings(path, budget, stage))[0] as engine,
        no_collective_in_actions(engine._runtime.executor),
    ):
        for x in data()[:, rank]:
            engine.backward(engine(x).square().mean())
            engine.step()
        return dict(engine.named_parameters())


def train_each(path: Path, cases: list[tuple[list[str], int]]) -> list[dict[str, torch.Tensor]]:
    return [train_in(path, budgets, stage) for budgets, stage in cases]


def test_ranks_with_different_budgets_train_alike(tmp_path) -> None:
    """A unit is updated before all its gradients are there when memory is full: on all ranks, or on none."""
    (tmp_path / "swap").mkdir()
    model = experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    for x in data():
        (sum(model(half).square().mean() for half in x) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    cases = [(budgets, stage) for budgets in (["least", "1GiB"], ["1GiB", "least"]) for stage in (1, 2, 3)]
    for of_rank in run_ranks(2, train_each, tmp_path / "swap", cases, path=tmp_path):
        for case, weights in zip(cases, of_rank, strict=True):
            for name, param in model.named_parameters():
                torch.testing.assert_close(weights[name], param.data, rtol=1e-5, atol=1e-6, msg=f"{case} {name}")


class Small(nn.Module):
    """Many modules whose parameters are in the unit that stays, and a weight that two modules use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        for index in range(16):
            self.add_module(f"norm_{index}", nn.LayerNorm(WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in range(16):
            x = self.get_submodule(f"norm_{index}")(x)
        return self.last(x)


@dataclass(frozen=True)
class Passes:
    """A step at a stage, and how many of its backward passes reduce."""

    stage: int
    accumulation: int
    reduce: int


STEPS_TO_COUNT = [Passes(0, 2, 1), Passes(1, 1, 1), Passes(1, 2, 1), Passes(2, 2, 2), Passes(3, 1, 1), Passes(3, 2, 2)]


def count_reductions() -> list[tuple[Counter[str], dict[str, torch.Tensor]]]:
    """How often each unit was reduced, and what became of the model."""
    reduced: Counter[str] = Counter()

    def counted(reduce: Callable[..., Pending]) -> Callable[..., Pending]:
        def run(*args: Any) -> Pending:
            reduced[args[-1]] += 1
            return reduce(*args)

        return run

    Ranks.all_reduce = counted(Ranks.all_reduce)
    Ranks.reduce_scatter = counted(Ranks.reduce_scatter)
    return [(Counter(reduced), weights) for passes in STEPS_TO_COUNT if (weights := train_step(passes, reduced))]


def train_step(passes: Passes, reduced: Counter[str]) -> dict[str, torch.Tensor]:
    reduced.clear()
    torch.manual_seed(0)
    config = Recipe(accumulation=passes.accumulation).config(Placement())
    config["zero_optimization"] = {"stage": passes.stage, "stage3_param_persistence_threshold": 100}
    with infinity.initialize(model=Small(), config=config)[0] as engine:
        for x in data()[: passes.accumulation, dist.get_rank()]:
            engine.backward(engine(x).square().mean())
            engine.step()
        return dict(engine.named_parameters())


def test_a_unit_is_reduced_once_a_pass(tmp_path) -> None:
    """However many modules use it: what is sent is then the size of the model."""
    expected = [plain_step(passes.accumulation) for passes in STEPS_TO_COUNT]
    for of_rank in run_ranks(2, count_reductions, path=tmp_path):
        for passes, model, (reduced, weights) in zip(STEPS_TO_COUNT, expected, of_rank, strict=True):
            assert reduced == {"first": passes.reduce, "persistent": passes.reduce}, passes
            for name, param in model.named_parameters():
                torch.testing.assert_close(weights[name], param.data, rtol=1e-4, atol=1e-5, msg=f"{passes} {name}")


def plain_step(accumulation: int) -> nn.Module:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    for x in data()[:accumulation].flatten(0, 1):
        (model(x).square().mean() / (2 * accumulation)).backward()
    optimizer.step()
    return model


# What fails half-way #


class InMemory:
    """A unit's parameters that are always in memory, as far as gathering looks at them."""

    def __init__(self, index: int) -> None:
        self.spec = FlatSpec(f"unit {index}", 64, 64, torch.float32, True, Sharding(0, 2))
        self.tensor = torch.zeros(64)
        self.compute_copy = SimpleNamespace(pin=lambda: None, unpin=lambda: None)  # nothing is evicted here


class Row:
    """What gathering looks at of a unit."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.params = InMemory(index)
        self.shared = Shared(self.params.spec)


class OtherRank:
    """What this rank asks of the other: gathers are noted, and fail when told to."""

    def __init__(self) -> None:
        self.gathered: list[str] = []
        self.waiting: list[str] = []
        self.has_died = False

    def all_gather(self, flat: torch.Tensor, pieces: Any, unit: str) -> list[Any]:
        self.gathered.append(unit)
        self.waiting.append(unit)
        return [SimpleNamespace(wait=lambda: self.finish(unit))]

    def finish(self, unit: str) -> None:
        self.waiting.remove(unit)
        if self.has_died:
            raise RankError("the other rank has died")


@pytest.fixture
def ranks() -> OtherRank:
    return OtherRank()


@pytest.fixture
def rows() -> list[Any]:
    return [Row(index) for index in range(4)]


@pytest.fixture
def gathering(ranks, rows) -> Gathering:
    return Gathering(rows[:2], ranks, 1 << 20, Counters(None))


def test_leaving_what_was_not_entered_is_no_use(gathering, rows, ranks) -> None:
    """`enter` of a call with several units may fail before it comes to this one, and `leave` follows all the same."""
    gathering.leave(rows[0], None)
    gathering.enter(rows[0])
    gathering.leave(rows[0], None)
    gathering.enter(rows[0])
    assert ranks.gathered == ["unit 0"] * 2


def test_a_gather_that_failed_is_tried_again(gathering, rows, ranks) -> None:
    ranks.has_died = True
    with pytest.raises(RankError, match="died"):
        gathering.enter(rows[0])
    gathering.leave(rows[0], None)
    ranks.has_died = False
    gathering.enter(rows[0])
    assert ranks.gathered == ["unit 0"] * 2


def test_a_unit_is_not_changed_while_it_is_unsharded_early(gathering, rows, ranks) -> None:
    """The gather may write old values until it is over."""
    gathering.enter(rows[0])
    assert gathering.next_to_gather([rows[1]]) is rows[1]
    gathering.gather_early(rows[1])
    assert ranks.waiting == ["unit 1"]
    gathering.changed(rows[1])
    assert ranks.waiting == []
    gathering.enter(rows[1])
    assert ranks.gathered == ["unit 0", "unit 1", "unit 1"]


def test_several_are_unsharded_early_in_their_order_and_dropped_when_skipped(rows, ranks) -> None:
    """256 bytes a unit: one in use, two ahead, and room for one that is fetched."""
    gathering = Gathering(rows, ranks, 4 * 256, Counters(None), ahead_bytes=1 << 20)
    gathering.enter(rows[0])
    for unit in (1, 2):
        assert gathering.next_to_gather([rows[1], rows[2], rows[3]]) is rows[unit]
        gathering.gather_early(rows[unit])
    assert gathering.next_to_gather([rows[1], rows[2], rows[3]]) is None
    assert ranks.waiting == ["unit 1", "unit 2"]
    gathering.leave(rows[0], 1)
    gathering.enter(rows[2])  # the one between is not used
    assert ranks.waiting == []
    assert not gathering.is_whole(rows[1])
    assert gathering.is_whole(rows[2])
    assert gathering.next_to_gather([rows[3]]) is rows[3]
    gathering.gather_early(rows[3])
    gathering.enter(rows[1])  # nothing of what was expected
    assert not gathering.is_whole(rows[3])
    assert ranks.waiting == []
    assert ranks.gathered == ["unit 0", "unit 1", "unit 2", "unit 3", "unit 1"]


def test_what_lies_behind_a_unit_that_is_let_go_first_is_gathered_behind_it(rows, ranks) -> None:
    """So the order of what is ahead is that of the uses."""
    gathering = Gathering(rows, ranks, 16 * 256, Counters(None), ahead_bytes=1 << 20)
    gathering.enter(rows[0])
    assert gathering.next_to_gather([rows[1], rows[0], rows[2]]) is rows[1]
    gathering.gather_early(rows[1])
    assert gathering.next_to_gather([rows[1], rows[0], rows[2]]) is None, "unit 0 is resharded before its next use"
    assert gathering.next_to_gather([rows[1], rows[1], rows[2]]) is rows[2], "unit 1 is kept from one use to the next"
    assert gathering.next_to_gather([rows[1], rows[2], rows[1]]) is rows[2]
    gathering.gather_early(rows[2])
    assert gathering.next_to_gather([rows[1], rows[2], rows[1], rows[3]]) is None
    gathering.leave(rows[0], 1)
    gathering.enter(rows[1])
    assert gathering.next_to_gather([rows[1], rows[2], rows[3]]) is rows[3], "what is used again at once is not let go"


class Block(nn.Module):
    """A unit that comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def fail_in_enter() -> tuple[torch.Tensor, torch.Tensor]:
    """What the model computes after an `enter` that failed, and what it should."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)))
    plain = copy.deepcopy(model)
    x = data()[0, 0]
    with infinity.initialize(model=model, config=Recipe().config(Placement()))[0] as engine:
        executor, failures = engine._runtime.executor, [RuntimeError("out of memory")]
        perform = executor._report

        def failing(event: Event) -> None:
            if event == UseBegins(executor.units[1]) and failures:
                raise failures.pop()
            perform(event)

        executor._report = failing
        with torch.no_grad():
            with pytest.raises(RuntimeError, match="out of memory"):
                engine(x)
            for _ in range(2):
                out = engine(x)
        return out, plain(x)


def test_a_model_is_whole_again_after_a_failure(tmp_path) -> None:
    for out, expected in run_ranks(2, fail_in_enter, path=tmp_path):
        torch.testing.assert_close(out, expected.detach())
