"""The learning-rate schedules of the command line: warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from infinity.optim.lr_schedules import FactorLR

KINDS = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule over a run. No update has a rate of 0.

    Attributes:
        kind: one of `KINDS`.
        warmup: number of updates over which the rate rises to the optimizer's.
        steps: number of updates of the run; `linear` and `cosine` reach 0 after the last one.
    """

    kind: str
    warmup: int
    steps: int

    def factor(self, update: int) -> float:
        """Return the rate at an update, counted from 0, as a share of the highest rate."""
        if update < self.warmup:
            return (update + 1) / (self.warmup + 1)
        share = min(1.0, (update - self.warmup) / max(1, self.steps - self.warmup))
        if self.kind == "linear":
            return 1.0 - share
        return (1.0 + math.cos(math.pi * share)) / 2 if self.kind == "cosine" else 1.0

    def made(self, optimizer: torch.optim.Optimizer) -> FactorLR:
        """Return a scheduler for the `lr_scheduler` of `initialize`."""
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        return FactorLR(optimizer, lambda finished: self.factor(finished + 1), [0.0] * len(rates), rates)

    def words(self) -> str:
        """Describe the schedule."""
        over = f"warm-up over {self.warmup} step{'' if self.warmup == 1 else 's'}"
        if self.warmup >= self.steps:
            return f"{over}, which does not end in {self.steps}"
        return (f"{over}, then " if self.warmup else "") + (
            "constant" if self.kind == "constant" else f"{self.kind} decay to step {self.steps}"
        )
