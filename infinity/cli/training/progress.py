"""What `infinity train` shows: a line a step, and at the end what moved where."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass

from infinity.config import format_size
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

    def json_line(self) -> str:
        stats = self.stats
        norm = stats.grad_norm
        return json.dumps(
            {
                "step": self.step,
                "loss": self.loss if math.isfinite(self.loss) else None,
                "step_s": self.step_s,
                "tokens_per_s": self.tokens / self.step_s,
                "lr": self.lr,
                "grad_norm": norm if norm is not None and math.isfinite(norm) else None,
                "skipped": stats.skipped,
                **{f"{name}_s": seconds for name, seconds in stats.phase_s.items()},
                "optimizer_s": stats.optimizer_s,
                "stall_s": stats.stall_s,
                "nvme_read_bytes": stats.tier_bytes.get("nvme_read", 0),
                "nvme_write_bytes": stats.tier_bytes.get("nvme_write", 0),
                "host_to_device_bytes": stats.tier_bytes.get("host_to_device", 0),
                "device_to_host_bytes": stats.tier_bytes.get("device_to_host", 0),
                "peak_host_bytes": stats.peak_bytes.get("host", 0),
                "peak_device_bytes": stats.peak_bytes.get("device", 0),
            }
        )

    def line(self, steps: int) -> str:
        moved = "  ".join(f"{route.replace('_', ' ')} {format_size(n)}" for route, n in self.stats.tier_bytes.items())
        stalls = " ".join(f"{cause} {s:.2f}s" for cause, s in self.stats.stall_s.items() if s >= 0.005)
        parts = [
            f"step {self.step}/{steps}",
            f"loss {self.loss:.4f}" + (" (skipped)" if self.stats.skipped else ""),
            f"{self.step_s:.2f} s",
            f"{self.tokens / self.step_s:.0f} tokens/s",
            moved,
            f"stalls: {stalls}" if stalls else "",
        ]
        return "  ".join(part for part in parts if part)


class Progress:
    """Shows steps as they finish and sums them up.

    Args:
        json_lines: print JSON on standard output instead of lines for people on standard error.
        silent: show nothing; another rank does.
    """

    def __init__(self, steps: int, *, json_lines: bool, silent: bool = False) -> None:
        self._steps = steps
        self._silent = silent
        self._json = json_lines
        self._live = sys.stderr.isatty() and not json_lines
        self._first: StepReport | None = None
        self._last: StepReport | None = None
        self._moved: Counter[str] = Counter()
        self._stalled: defaultdict[str, float] = defaultdict(float)
        self._seconds = 0.0

    def show(self, report: StepReport) -> None:
        """A step has finished."""
        if self._silent:
            return
        self._first = self._first or report
        self._last = report
        self._moved.update(report.stats.tier_bytes)
        for cause, seconds in report.stats.stall_s.items():
            self._stalled[cause] += seconds
        self._seconds += report.step_s
        if self._json:
            print(report.json_line(), flush=True)
        elif self._live:
            print(f"\r\x1b[K{report.line(self._steps)}", end="", file=sys.stderr, flush=True)
        else:
            print(report.line(self._steps), file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Say something between two steps."""
        if self._silent:
            return
        print(f"\n{text}" if self._live else text, file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Show what moved where."""
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
        self.note("\n".join(f"  {name:<{width}}  {value}" for name, value in rows))
