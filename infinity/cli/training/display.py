"""The display of `infinity train` on a terminal: two lines, and on a wide one also past losses and tiers."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from infinity.cli.progress import clock
from infinity.cli.terminal import Drawing
from infinity.config import format_size

if TYPE_CHECKING:
    from infinity.cli.training.progress import StepReport

_WIDE = 120  # a terminal with so many columns also shows past losses and tiers
_EVERY_S = 0.1  # shortest time between two redraws
_RECENT = 20  # the last steps, from which the remaining time is estimated
_HISTORY = 200
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 32
_BAR_WIDTH = 10


class Display:
    """Draws the last step. The picture stays on the terminal at the end."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._last: StepReport | None = None
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._drawn_s = 0.0
        self._drawing = Drawing(lambda: self, stays=True)

    def show(self, report: StepReport) -> None:
        """Show a finished step."""
        self._last = report
        self._seconds.append(report.step_s)
        if math.isfinite(report.loss):
            self._losses.append(report.loss)
        now_s = time.monotonic()
        if now_s - self._drawn_s >= _EVERY_S:
            self._drawn_s = now_s
            self._drawing.draw()

    def note(self, text: str) -> None:
        """Print above the picture."""
        self._drawing.note(text)

    def end(self) -> None:
        """Draw the last step, and leave it on the terminal."""
        self._drawing.end()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.picture(options.max_width, blocks=not options.ascii_only)

    def picture(self, width: int, *, blocks: bool) -> RenderableType:
        """Return the picture, of two or four lines.

        Args:
            blocks: whether the terminal can show the characters of a curve.
        """
        lines: list[RenderableType] = [self._bar()]
        if self._last is None:
            return Group(*lines, _line(["the first step"]))
        lines.append(_line(_figures(self._last)))
        if width >= _WIDE:
            lines.append(_line(self._history(blocks=blocks)))
            lines.append(_line(_tiers(self._last)))
        return Group(*lines)

    def _bar(self) -> RenderableType:
        done = 0 if self._last is None else self._last.step
        left = f"  {clock(statistics.mean(self._seconds) * (self._steps - done))} left" if self._seconds else ""
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        share = done / self._steps
        line.add_row(Text(f"step {done}/{self._steps}"), ProgressBar(1.0, share), Text(f"{share:4.0%}{left}"))
        return line

    def _history(self, *, blocks: bool) -> list[str]:
        if not self._losses:
            return []
        curve = sparkline(self._losses, _SPARK_WIDTH) if blocks else ""
        recent = list(self._losses)[-_RECENT:]
        return [
            f"last {len(self._losses)} losses {curve}".rstrip(),
            f"least {min(self._losses):.4f}",
            f"mean of {len(recent)} {statistics.mean(recent):.4f}",
        ]


def _line(parts: Sequence[str]) -> Text:
    return Text("  ".join(part for part in parts if part), no_wrap=True, overflow="ellipsis")


def _figures(report: StepReport) -> list[str]:
    norm = report.stats.grad_norm
    return [
        f"loss {report.loss:.4f}" + (" (skipped)" if report.stats.skipped else ""),
        f"{_count(report.tokens_per_s)} tokens/s",
        f"{report.step_s:.2f} s/step",
        f"lr {report.lr:.2e}",
        "" if norm is None else f"norm {norm:.3g}",
    ]


def _tiers(report: StepReport) -> list[str]:
    """Return how full the tiers are, the rates of the drives, and what the step waited for."""
    moved, stalls = report.stats.tier_bytes, report.stats.stall_s
    parts = []
    for name, level in sorted(report.tiers.items()):
        share = level.used_bytes / level.capacity_bytes
        gauge = f"{'#' * round(_BAR_WIDTH * share):.<{_BAR_WIDTH}}"
        parts.append(f"{name} [{gauge}] {format_size(level.used_bytes)} of {format_size(level.capacity_bytes)}")
    for route, text in (("nvme_read", "read"), ("nvme_write", "write")):
        if moved.get(route):
            parts.append(f"{text} {moved[route] / report.step_s / 1e9:.2f} GB/s")
    waited_s = sum(stalls.values())
    if waited_s >= 0.01 * report.step_s:
        cause, most_s = max(stalls.items(), key=lambda item: item[1])
        parts.append(f"waits {waited_s / report.step_s:.0%} ({cause.replace('_', ' ')} {most_s / report.step_s:.0%})")
    return parts


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve in one line of text. Each character shows the mean of its part of the values."""
    values = list(values)
    count = min(width, len(values))
    means = [
        statistics.mean(values[index * len(values) // count : (index + 1) * len(values) // count])
        for index in range(count)
    ]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def _count(number: float) -> str:
    """Return a number with about three digits, and with a k from 10,000 on."""
    return f"{number / 1000:.3g}k" if number >= 10_000 else f"{number:.0f}" if number >= 10 else f"{number:.2g}"
