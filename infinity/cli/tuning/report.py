"""The result of a search as JSON values, as text, and as the tuned configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from infinity.config import edited, format_size
from infinity.planner import Point
from infinity.tuning import KNOBS, Choices, Outcome, Outlook, Reason, Record, Setting, keys_of, reasons


@dataclass(frozen=True)
class Row:
    """One setting that was measured.

    Attributes:
        what: how it differs from the given one.
        step_s: median over its runs; None if it did not run.
        note: why it did not run or was stopped early; else empty.
    """

    what: str
    predicted_s: float | None
    step_s: float | None
    runs: int
    note: str
    best: bool


@dataclass(frozen=True)
class Report:
    """The result of a search.

    Attributes:
        given_s, best_s: median steps of the given and the best setting over all runs; None without runs.
        curve: predicted steps of the best setting over `tiering.host_memory`.
        history: for each run: the search's time when it ended, its median step, and its setting as text.
    """

    model: str
    seq_len: int
    outcome: Outcome
    given_s: float | None
    best_s: float | None
    reasons: list[Reason]
    rows: list[Row]
    curve: list[Point]
    history: list[tuple[float, float, str]]
    spent_s: float
    written_bytes: int
    values: dict[str, Any]

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        if self.given_s is None and self.best_s is None:
            return "nothing could be measured: the configuration is unchanged"
        if self.given_s is None:
            return f"the given configuration does not run; this one does, {_seconds(self.best_s)} a step"
        if self.outcome.best == self.outcome.given:
            return f"no setting is faster than the given configuration ({_seconds(self.given_s)} a step)"
        return (
            f"{1 / self.outcome.ratio:.2f} times as fast as the given configuration, in consecutive runs: a step takes "
            f"{_seconds(self.best_s)}"
        )

    def facts(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        outcome = self.outcome
        return {
            "model": self.model,
            "seq_len": self.seq_len,
            "headline": self.headline,
            "ending": outcome.ending,
            "given_step_s": self.given_s,
            "tuned_step_s": self.best_s,
            "ratio": outcome.ratio,
            "changed": outcome.best != outcome.given,
            "given": outcome.given.facts(),
            "tuned": outcome.best.facts(),
            "choices": [asdict(reason) for reason in self.reasons],
            "measured": [asdict(row) for row in self.rows],
            "spent_s": self.spent_s,
            "written_bytes": self.written_bytes,
            "config": self.values,
        }

    def lines(self) -> list[str]:
        """Return the report as text."""
        lines = [self.headline, ""]
        for reason in self.reasons:
            change = reason.chosen if reason.chosen == reason.given else f"{reason.given} -> {reason.chosen}"
            lines += [f"{reason.title:<14}{change}", f"{'':<14}  {reason.why}"]
        lines += ["", f"{'measured':>9} {'predicted':>10}"]
        for row in self.rows:
            cells = f"{_seconds(row.step_s):>9} {_seconds(row.predicted_s):>10}"
            lines.append(f"{cells}  {'* ' if row.best else ''}{row.what}{f' ({row.note})' if row.note else ''}")
        written = format_size(self.written_bytes)
        lines += ["", f"{self.outcome.ending}; {self.spent_s:.0f} s, {written} written to the drives"]
        return lines


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


def report_of(model: str, seq_len: int, outcome: Outcome, outlook: Outlook, choices: Choices, record: Record) -> Report:
    """Return the report of a search."""
    why = reasons(outcome.best, outlook, choices, record)
    given_s, best_s = (_finite(record.median_s(setting)) for setting in (outcome.given, outcome.best))
    return Report(
        model=model,
        seq_len=seq_len,
        outcome=outcome,
        given_s=given_s,
        best_s=best_s,
        reasons=why,
        rows=_rows(outcome, outlook, record),
        curve=outlook.over_budgets(outcome.best),
        history=[
            (run.at_s, run.median_s, _what(run.setting, outcome.given))
            for run in record.runs
            if run.step_s and not run.error
        ],
        spent_s=record.spent_s,
        written_bytes=sum(run.written_bytes for run in record.runs),
        values=tuned_values(outlook, outcome, why, given_s, best_s),
    )


def tuned_values(
    outlook: Outlook, outcome: Outcome, why: list[Reason], given_s: float | None, best_s: float | None
) -> dict[str, Any]:
    """Return the file with the best setting and a section `tuned` that gives the reasons. Other keys are unchanged."""
    values = edited(outlook.values, keys_of(outlook.config, outcome.best, KNOBS))  # at least limits instead of "auto"
    notes: Mapping[str, Any] = {
        "by": "infinity tune",
        "step_s": {"given": given_s, "tuned": best_s},
        "why": {reason.knob: f"{reason.chosen}: {reason.why}" for reason in why},
    }
    return {**values, "tuned": notes}


def _rows(outcome: Outcome, outlook: Outlook, record: Record) -> list[Row]:
    rows = []
    for setting in dict.fromkeys(run.setting for run in record.runs):
        runs = [run for run in record.runs if run.setting == setting]
        prediction = outlook.of(setting)
        error = next((run.error for run in runs if run.error), "")
        early = "stopped early" if all(run.stopped for run in runs) else ""
        rows.append(
            Row(
                what=_what(setting, outcome.given),
                predicted_s=_finite(prediction.step_s),
                step_s=_finite(record.median_s(setting)),
                runs=len(runs),
                note=error or early,
                best=setting == outcome.best,
            )
        )
    return sorted(rows, key=lambda row: row.step_s or float("inf"))


def _what(setting: Setting, given: Setting) -> str:
    return "as given" if setting == given else setting.words(given)


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
