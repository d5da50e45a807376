"""Predicted beside measured steps: what the benchmarks of predictions print and draw alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_COLORS = {"disk": "tab:blue", "compute": "tab:orange"}


def errors_line(rows: Sequence[dict[str, Any]]) -> str:
    """The median and the worst of `error`."""
    errors = sorted(abs(row["error"]) for row in rows)
    middle = statistics.median(errors)
    return f"\nmedian error {middle:.1%}, worst {errors[-1]:.1%}, of {len(rows)} configurations"


def plot_errors(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw `predicted_s` over `measured_s` with the spread of what was measured, by `name` and `bottleneck`."""
    figure = Figure(figsize=(6.5, 6), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        spread = [[row["measured_s"] - row["measured_min_s"]], [row["measured_max_s"] - row["measured_s"]]]
        place = row["measured_s"], row["predicted_s"]
        axes.errorbar(*place, xerr=spread, marker="o", color=_COLORS.get(row["bottleneck"], "tab:gray"))
        axes.annotate(row["name"], place, fontsize=7, xytext=(4, 4), textcoords="offset points")
    ends = [min(row["measured_min_s"] for row in rows), max(row["measured_max_s"] for row in rows)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (1.25, 0.8):
        axes.plot(ends, [factor * end for end in ends], color="gray", linewidth=0.6, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="measured step, s", ylabel="predicted step, s")
    axes.set_title("blue: bound by the drive, orange: by computing; dashed: 25%")
    figure.savefig(path)
