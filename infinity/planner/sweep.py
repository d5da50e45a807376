"""Predict the same training over a range of tokens, host budgets or drives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from infinity.config import Config, format_size
from infinity.planner.rates import Rates, with_numbers
from infinity.planner.step_time import StepTime, predict_step
from infinity.planner.training_plan import Machine, plan_training
from infinity.planner.work import count_work

_DOUBLINGS = 8
_BUDGETS = 8
_DRIVES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Point:
    """A step at one value of the swept quantity."""

    value: float
    label: str
    step_s: float
    tokens_per_s: float
    bottleneck: str


@dataclass(frozen=True)
class Sweep:
    """The fixed part of a sweep."""

    model: nn.Module
    config: Config
    machine: Machine
    rates: Rates
    seq_len: int
    checkpointing: bool

    def over(self, what: str) -> list[Point]:
        """Return points over "tokens" (of a micro-batch), "host-memory" or "drives" (as a factor on their number)."""
        points = {"tokens": self._tokens, "host-memory": self._budgets, "drives": self._drives}[what]
        return list(points())

    def _predict(self, config: Config, rates: Rates) -> StepTime:
        plan = plan_training(self.model, config, self.machine)
        work = count_work(self.model, plan, config.micro_batch_size, self.seq_len, checkpointing=self.checkpointing)
        return predict_step(plan, config, work, rates)

    def _tokens(self) -> Iterator[Point]:
        for doubling in range(_DOUBLINGS):
            config = replace(self.config, micro_batch_size=1 << doubling)
            tokens = config.micro_batch_size * self.seq_len
            yield _point(tokens, f"{tokens:,}", self._predict(config, self.rates))

    def _budgets(self) -> Iterator[Point]:
        needs = plan_training(self.model, self.config, self.machine).needs
        ratio = (needs.most_bytes / needs.least_bytes) ** (1 / (_BUDGETS - 1))
        for index in range(_BUDGETS):
            budget = needs.most_bytes if index == _BUDGETS - 1 else int(needs.least_bytes * ratio**index)
            tiering = replace(self.config.tiering, host_memory_bytes=budget)
            step = self._predict(replace(self.config, tiering=tiering), self.rates)
            yield _point(budget, format_size(budget), step)

    def _drives(self) -> Iterator[Point]:
        for count in _DRIVES:
            yield _point(count, str(count), self._predict(self.config, with_numbers(self.rates, drives=count)))


def _point(value: float, label: str, step: StepTime) -> Point:
    return Point(value, label, step.seconds, step.tokens_per_s if step.seconds else 0.0, step.bottleneck)
