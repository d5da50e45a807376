"""Shows the progress of `infinity train`: a display or a line for each step, and a summary at the end."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from infinity.cli.reporting.summary import ROUTES
from infinity.cli.terminal import drop_unread_streams, is_terminal, plain
from infinity.cli.training.display import Display
from infinity.cli.training.log import RunLog
from infinity.config import format_size
from infinity.memory import Level
from infinity.telemetry import StepStats


@dataclass(frozen=True)
class StepReport:
    """One step, as it is shown and logged."""

    step: int
    loss: float
    step_s: float
    tokens: int
    lr: float
    stats: StepStats
    tiers: Mapping[str, Level] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    def facts(self) -> dict[str, Any]:
        """Return the step as JSON values. NaN, which JSON does not have, becomes None."""
        stats = self.stats
        norm = stats.grad_norm
        return {
            "step": self.step,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "lr": self.lr,
            "grad_norm": norm if norm is not None and math.isfinite(norm) else None,
            "skipped": stats.skipped,
            **{f"{name}_s": seconds for name, seconds in stats.phase_s.items()},
            "optimizer_s": stats.optimizer_s,
            "stall_s": stats.stall_s,
            **{f"{route}_bytes": stats.tier_bytes.get(route, 0) for route in ROUTES},
            **{f"peak_{tier}_bytes": stats.peak_bytes.get(tier, 0) for tier in ("host", "device")},
        }

    def line(self, steps: int) -> str:
        moved = "  ".join(f"{route.replace('_', ' ')} {format_size(n)}" for route, n in self.stats.tier_bytes.items())
        stalls = " ".join(f"{cause} {s:.2f}s" for cause, s in self.stats.stall_s.items() if s >= 0.005)
        parts = [
            f"step {self.step}/{steps}",
            f"loss {self.loss:.4f}" + (" (skipped)" if self.stats.skipped else ""),
            f"{self.step_s:.2f} s",
            f"{self.tokens_per_s:.0f} tokens/s",
            moved,
            f"stalls: {stalls}" if stalls else "",
        ]
        return "  ".join(part for part in parts if part)


@dataclass(frozen=True)
class Evaluation:
    """The model's loss on samples that it is not trained on.

    Attributes:
        tokens: number of tokens that the loss is the mean of.
    """

    step: int
    loss: float
    tokens: int
    seconds: float

    def facts(self) -> dict[str, Any]:
        """Return the evaluation as JSON values. NaN, which JSON does not have, becomes None."""
        return {
            "step": self.step,
            "eval_loss": self.loss if math.isfinite(self.loss) else None,
            "eval_tokens": self.tokens,
            "eval_s": self.seconds,
        }

    def line(self) -> str:
        return f"step {self.step}: evaluation loss {self.loss:.4f} ({self.tokens} tokens, {self.seconds:.1f} s)"


class Progress:
    """Shows steps as they finish and sums them up. A context manager: leaving it restores the terminal.

    Args:
        json_lines: print JSON on standard output instead of text on standard error.
        silent: show nothing, because another rank does.
        log: a log that also receives every step.

    Attributes:
        stopping: whether a signal ends the run. The signal may also have ended the reader of the output, such as `tee`
            in a pipe. The model must be saved nevertheless.
    """

    def __init__(self, steps: int, *, json_lines: bool, silent: bool = False, log: RunLog | None = None) -> None:
        self.stopping = False
        self._steps = steps
        self._silent = silent
        self._json = json_lines
        self._log = log
        self._display = Display(steps) if is_terminal() and not json_lines and not silent else None
        self._first: StepReport | None = None
        self._last: StepReport | None = None
        self._moved: Counter[str] = Counter()
        self._stalled: defaultdict[str, float] = defaultdict(float)
        self._seconds = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal and close the log. A second call does nothing."""
        if self._display is not None:
            with self._writing():
                self._display.end()
        if self._log is not None:
            self._log.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Continue if output cannot be written (full drive, closed terminal): ending the run would lose the training.

        Raises:
            BrokenPipeError: the reader of the output is gone, and no signal has ended the run.
        """
        try:
            yield
        except OSError as error:
            if isinstance(error, BrokenPipeError) and not self.stopping:
                raise
            drop_unread_streams()

    def show(self, report: StepReport) -> None:
        """Show and log a finished step."""
        if self._silent:
            return
        self._first = self._first or report
        self._last = report
        self._moved.update(report.stats.tier_bytes)
        for cause, seconds in report.stats.stall_s.items():
            self._stalled[cause] += seconds
        self._seconds += report.step_s
        if self._log is not None:
            self._log.step(report)
        with self._writing():
            if self._json:
                print(json.dumps(report.facts()), flush=True)
            elif self._display is not None:
                self._display.show(report)
            else:
                print(report.line(self._steps), file=sys.stderr, flush=True)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Show and log an evaluation."""
        if self._silent:
            return
        if self._log is not None:
            self._log.evaluation(evaluation)
        if self._json:
            with self._writing():
                print(json.dumps(evaluation.facts()), flush=True)
        else:
            self.note(evaluation.line())

    def note(self, text: str) -> None:
        """Show a line of text between two steps."""
        if self._silent:
            return
        text = plain(text)
        with self._writing():
            if self._display is not None:
                self._display.note(text)
            else:
                print(text, file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Show a summary of all steps."""
        if self._display is not None:
            with self._writing():
                self._display.end()
        if self._json or self._first is None or self._last is None:
            return
        steps = self._last.step - self._first.step + 1
        peaks = self._last.stats.peak_bytes
        rows = [
            ("steps", f"{steps} in {self._seconds:.1f} s, {self._seconds / steps:.2f} s each"),
            ("loss", f"{self._first.loss:.4f} -> {self._last.loss:.4f}"),
            *(
                (route.replace("_", " "), f"{format_size(n)}, {format_size(n / steps)} a step")
                for route, n in self._moved.items()
            ),
            *((f"peak {tier}", format_size(n)) for tier, n in peaks.items() if n),
            *((f"stall {cause}", f"{s:.1f} s") for cause, s in self._stalled.items() if s >= 0.05),
        ]
        width = max(len(name) for name, _ in rows)
        with self._writing():
            print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows), file=sys.stderr, flush=True)
