"""Shows a run as one page of HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

from infinity.cli.pages.charts import Axis, Series, axis, chart, thinned
from infinity.cli.pages.document import document, figure, table
from infinity.cli.reporting.lanes import lanes
from infinity.cli.reporting.read import Row, RunLines
from infinity.cli.reporting.summary import Summary, phases_s, stalls
from infinity.telemetry.timeline_summary import Ran

# Colour-blind safe (Okabe and Ito), and visible on white and on black.
_BLUE, _SKY, _GREEN, _ORANGE, _RED, _PINK, _GREY = (
    *("#3d8fd1", "#56b4e9", "#009e73", "#e69f00", "#d55e00"),
    *("#cc79a7", "#888888"),
)
_DIM = "#9aa7b3"
_CAUSES = {
    "disk_read": _BLUE,
    "disk_write": _SKY,
    "host_link": _ORANGE,
    "optimizer": _PINK,
    "collective": _RED,
    "allocator": "#b8a000",
}
_SMOOTH = 50  # points of the curve of the mean loss
_FEW = 60  # a run of up to so many steps shows each step as a dot with a tooltip


def page(title: str, run: RunLines, summary: Summary, timeline: Sequence[Ran]) -> str:
    """Return the whole page."""
    rows = [f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in summary.rows()]
    parts = [table((), rows), "<h2>Learning</h2>", _losses(run), _over_steps(run, "lr", "learning rate")]
    if any(row.get("grad_norm") is not None for row in run.steps):
        parts.append(_over_steps(run, "grad_norm", "gradient norm, before clipping"))
    parts += ["<h2>Steps</h2>", _split(run), _speed(run)]
    occupancy = _occupancy(run)
    if occupancy:
        parts += ["<h2>Tiers</h2>", *occupancy]
    parts.append(_moved(run))
    if timeline:
        parts += ["<h2>Timeline</h2>", lanes(timeline)]
    if run.about:
        parts += ["<h2>The run</h2>", f"<pre>{escape(json.dumps(run.about, indent=2))}</pre>"]
    return document(title, parts)


def _steps_axis(rows: Sequence[Row]) -> Axis:
    return Axis("step", rows[0]["step"] - 0.5, rows[-1]["step"] + 0.5)


def _curve(
    rows: Sequence[Row], value: Callable[[Row], float], name: str, color: str, unit: str = "", *, dots: bool = True
) -> Series:
    """Return a line through all steps, with a dot for each if there are few."""
    steps, values = [float(row["step"]) for row in rows], [value(row) for row in rows]
    if len(rows) <= _FEW:
        labels = [f"step {step:.0f}: {one:.5g}{unit}" for step, one in zip(steps, values, strict=True)]
        return Series(name, list(zip(steps, values, strict=True)), labels, color, line=True, dots=dots)
    points = list(zip(thinned(steps), thinned(values), strict=True))
    return Series(name, points, color=color, line=True, dots=False)


def _values(series: Sequence[Series]) -> list[float]:
    return [value for one in series for _, value in one.points]


def _losses(run: RunLines) -> str:
    rows = [row for row in run.steps if row.get("loss") is not None]
    if not rows:
        return "<p>No loss of this run was finite.</p>"
    many = len(rows) > _FEW
    series = [_curve(rows, lambda row: row["loss"], "loss of a step", _DIM if many else _BLUE, dots=not many)]
    if many:
        steps, losses = [float(row["step"]) for row in rows], [row["loss"] for row in rows]
        mean = list(zip(thinned(steps, _SMOOTH), thinned(losses, _SMOOTH), strict=True))
        series.append(Series("mean of neighbours", mean, color=_BLUE, line=True, dots=False))
    evaluated = [row for row in run.evaluations if row["eval_loss"] is not None]
    if evaluated:
        points = [(float(row["step"]), row["eval_loss"]) for row in evaluated]
        labels = [f"evaluation after step {step:.0f}: {loss:.4f}" for step, loss in points]
        series.append(Series("evaluation", points, labels, _RED, line=True, dots=len(points) <= _FEW))
    drawn = chart(_steps_axis(run.steps), axis("loss", _values(series)), series)
    caption = "Mean over all ranks and micro-batches."
    if run.resumed:
        caption += f" The run was resumed before step {', '.join(map(str, run.resumed))}."
    return figure(drawn, caption)


def _over_steps(run: RunLines, key: str, title: str) -> str:
    rows = [row for row in run.steps if row.get(key) is not None]
    if not rows:
        return ""
    series = [_curve(rows, lambda row: row[key], "", _GREEN, dots=False)]
    return figure(chart(_steps_axis(run.steps), axis(title, _values(series), zero=True), series), "")


def _split(run: RunLines) -> str:
    """Draw the parts of a step's time as stacked areas."""
    rows = run.steps
    causes = list(stalls(rows))
    parts: list[tuple[str, str, list[float]]] = [
        ("compute", _GREEN, [max(0.0, phases_s(row) - sum(row.get("stall_s", {}).values())) for row in rows])
    ]
    parts += [
        (
            f"waits for {cause.replace('_', ' ')}",
            _CAUSES.get(cause, _GREY),
            [row.get("stall_s", {}).get(cause, 0.0) for row in rows],
        )
        for cause in causes
    ]
    parts.append(("outside of its phases", _GREY, [max(0.0, row["step_s"] - phases_s(row)) for row in rows]))
    total_s = sum(row["step_s"] for row in rows)
    shown = [part for part in parts if sum(part[2]) >= 0.002 * total_s]
    steps = _edges(thinned([float(row["step"]) for row in rows]))
    base = [0.0] * len(steps)
    series = []
    for name, color, seconds in shown:
        edges = [value for value in thinned(seconds) for _ in range(2)]
        top = [below + more for below, more in zip(base, edges, strict=True)]
        share = sum(seconds) / total_s
        points = list(zip(steps, top, strict=True))
        series.append(Series(f"{name} {share:.0%}", points, color=color, dots=False, base=base))
        base = top
    drawn = chart(_steps_axis(rows), axis("seconds of a step", base, zero=True), series)
    return figure(
        drawn, "Time of the compute thread. Work of the optimizer's thread and the drives that overlaps is not counted."
    )


def _edges(steps: Sequence[float]) -> list[float]:
    """Return where each step's part of the picture begins and ends: in the middle between it and its neighbours."""
    if len(steps) == 1:
        return [steps[0] - 0.5, steps[0] + 0.5]
    middles = [(a + b) / 2 for a, b in pairwise(steps)]
    bounds = [steps[0] - 0.5, *middles, steps[-1] + 0.5]
    return [edge for a, b in pairwise(bounds) for edge in (a, b)]


def _speed(run: RunLines) -> str:
    series = [_curve(run.steps, lambda row: row["tokens_per_s"], "", _BLUE, " tokens/s")]
    drawn = chart(_steps_axis(run.steps), axis("tokens/s", _values(series), zero=True), series)
    return figure(drawn, "Over all ranks.")


def _occupancy(run: RunLines) -> list[str]:
    """Draw host and device memory over the steps. Files on the drives have a constant size, and are left out."""
    figures = []
    for tier, name in (("host", "host memory"), ("device", "device memory")):
        rows = [row for row in run.steps if tier in row.get("tiers", {})]
        if not rows:
            continue
        capacity = rows[-1]["tiers"][tier]["capacity_bytes"] / (1 << 30)
        series = [
            _curve(rows, lambda row, t=tier: row["tiers"][t]["peak_bytes"] / (1 << 30), "peak", _ORANGE, dots=False),  # type: ignore[misc]
            _curve(rows, lambda row, t=tier: row["tiers"][t]["used_bytes"] / (1 << 30), "used", _BLUE, dots=False),  # type: ignore[misc]
            Series(
                "budget",
                [(rows[0]["step"], capacity), (rows[-1]["step"], capacity)],
                color=_GREY,
                line=True,
                dots=False,
            ),
        ]
        drawn = chart(_steps_axis(run.steps), axis(f"{name}, GiB", _values(series), zero=True), series)
        figures.append(figure(drawn, f"Rank 0's {name} at the end of each step."))
    return figures


def _moved(run: RunLines) -> str:
    """Draw the rates of the routes that were used."""
    routes = (
        ("nvme_read", "read from the drives", _BLUE),
        ("nvme_write", "written to the drives", _RED),
        ("host_to_device", "host to device", _ORANGE),
        ("device_to_host", "device to host", _PINK),
    )
    series = [
        _curve(run.steps, lambda row, k=f"{key}_bytes": row.get(k, 0) / row["step_s"] / 1e9, name, color, dots=False)  # type: ignore[misc]
        for key, name, color in routes
        if any(row.get(f"{key}_bytes") for row in run.steps)
    ]
    if not series:
        return ""
    drawn = chart(_steps_axis(run.steps), axis("GB/s", _values(series), zero=True), series)
    return figure(drawn, "Bytes of a step divided by its time, for rank 0. A drive that is not always busy is faster.")
