"""Sums up a run in numbers."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.cli.progress import clock
from infinity.cli.reporting.read import Row, RunLines
from infinity.config import format_size

ROUTES = ("nvme_read", "nvme_write", "host_to_device", "device_to_host")
_PHASES = ("forward_s", "backward_s", "update_s")


@dataclass(frozen=True)
class Summary:
    """The result of a run. Means are over its steps.

    Attributes:
        first_loss, last_loss, least_loss: training losses; None if no loss was finite.
        eval_loss: loss of the last evaluation; `least_eval_loss` is the best, at `least_eval_step`.
        step_s: the median step. `tokens_per_s` is the mean over the whole time.
        stall_share: share of the time that steps waited, by cause.
        bytes_a_step: bytes moved, by route.
        peak_bytes, capacity_bytes: by tier.
    """

    first_step: int
    last_step: int
    skipped: int
    train_s: float
    first_loss: float | None
    last_loss: float | None
    least_loss: float | None
    eval_loss: float | None
    least_eval_loss: float | None
    least_eval_step: int | None
    step_s: float
    slowest_step_s: float
    tokens_per_s: float
    stall_share: dict[str, float]
    bytes_a_step: dict[str, float]
    peak_bytes: dict[str, int]
    capacity_bytes: dict[str, int]
    resumed: list[int]

    def rows(self) -> list[tuple[str, str]]:
        """Return the summary as pairs of a name and a text."""
        rows = [
            ("steps", f"{self.first_step} to {self.last_step}, {clock(self.train_s)} in them" + self._interruptions()),
            ("loss", f"{_loss(self.first_loss)} -> {_loss(self.last_loss)}, least {_loss(self.least_loss)}"),
        ]
        if self.eval_loss is not None:
            rows.append(
                (
                    "evaluation loss",
                    f"{_loss(self.eval_loss)}, least {_loss(self.least_eval_loss)} at step {self.least_eval_step}",
                )
            )
        rows += [
            ("a step", f"{self.step_s:.3g} s (median), the slowest {self.slowest_step_s:.3g} s"),
            ("tokens/s", f"{self.tokens_per_s:.4g}"),
            ("waits", self._waits()),
        ]
        rows += [
            (route.replace("_", " "), f"{format_size(nbytes)} a step")
            for route, nbytes in self.bytes_a_step.items()
            if nbytes
        ]
        for tier, nbytes in self.peak_bytes.items():
            if nbytes:
                most = f" of {format_size(self.capacity_bytes[tier])}" if tier in self.capacity_bytes else ""
                rows.append((f"peak {tier}", f"{format_size(nbytes)}{most}"))
        return rows

    def _interruptions(self) -> str:
        resumed = f"; resumed before step {', '.join(map(str, self.resumed))}" if self.resumed else ""
        return (f"; {self.skipped} skipped" if self.skipped else "") + resumed

    def _waits(self) -> str:
        causes = sorted(self.stall_share.items(), key=lambda item: -item[1])
        told = ", ".join(f"{cause.replace('_', ' ')} {share:.1%}" for cause, share in causes if share >= 0.001)
        return f"{sum(self.stall_share.values()):.1%} of the time" + (f": {told}" if told else "")


def summarize(run: RunLines) -> Summary:
    """Sum up all steps of a run."""
    steps = run.steps
    losses = [row["loss"] for row in steps if row.get("loss") is not None]
    evaluated = [(row["eval_loss"], row["step"]) for row in run.evaluations if row["eval_loss"] is not None]
    train_s = sum(row["step_s"] for row in steps)
    tokens = sum(row["tokens_per_s"] * row["step_s"] for row in steps)
    least = min(evaluated, default=(None, None))
    tiers = steps[-1].get("tiers", {})
    return Summary(
        first_step=steps[0]["step"],
        last_step=steps[-1]["step"],
        skipped=sum(bool(row.get("skipped")) for row in steps),
        train_s=train_s,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        least_loss=min(losses, default=None),
        eval_loss=evaluated[-1][0] if evaluated else None,
        least_eval_loss=least[0],
        least_eval_step=least[1],
        step_s=statistics.median(row["step_s"] for row in steps),
        slowest_step_s=max(row["step_s"] for row in steps),
        tokens_per_s=tokens / train_s if train_s else 0.0,
        stall_share={cause: seconds / train_s for cause, seconds in stalls(steps).items()} if train_s else {},
        bytes_a_step={route: sum(row.get(f"{route}_bytes", 0) for row in steps) / len(steps) for route in ROUTES},
        peak_bytes={tier: max(row.get(f"peak_{tier}_bytes", 0) for row in steps) for tier in ("host", "device")}
        | ({"nvme": tiers["nvme"]["used_bytes"]} if "nvme" in tiers else {}),
        capacity_bytes={tier: level["capacity_bytes"] for tier, level in tiers.items()},
        resumed=run.resumed,
    )


def stalls(steps: Sequence[Row]) -> dict[str, float]:
    """Return the seconds that steps waited, by cause, the longest first."""
    total_s: defaultdict[str, float] = defaultdict(float)
    for row in steps:
        for cause, seconds in row.get("stall_s", {}).items():
            total_s[cause] += seconds
    return dict(sorted(total_s.items(), key=lambda item: -item[1]))


def phases_s(row: Row) -> float:
    """Return the seconds of a step in its forward and backward passes and its update."""
    return sum(float(row.get(phase, 0.0)) for phase in _PHASES)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
