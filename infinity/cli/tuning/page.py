"""Shows a search as one self-contained page of HTML."""

from __future__ import annotations

import json
from html import escape

from infinity.cli.pages.charts import Series, axis, chart
from infinity.cli.pages.document import document, figure, table
from infinity.cli.tuning.report import Report


def page(report: Report) -> str:
    """Return the whole page."""
    title = f"infinity tune: {report.model}, {report.seq_len} tokens a sample"
    return document(
        title,
        [
            f"<p>{escape(report.headline)}. {escape(report.outcome.ending.capitalize())}, after "
            f"{report.spent_s:.0f} s.</p>",
            "<h2>Every choice, and why</h2>",
            _choices(report),
            "<h2>Measured and predicted</h2>",
            _predicted(report),
            _over_time(report),
            _over_memory(report),
            "<h2>All that was measured</h2>",
            _runs(report),
            "<h2>The configuration</h2>",
            f"<pre>{escape(json.dumps(report.values, indent=2))}</pre>",
        ],
    )


def _choices(report: Report) -> str:
    rows = []
    for reason in report.reasons:
        mark = ' class="changed"' if reason.chosen != reason.given else ""
        cells = f"<td>{escape(reason.title)}</td><td>{escape(reason.given)}</td><td{mark}>{escape(reason.chosen)}</td>"
        rows.append(f"<tr>{cells}<td>{escape(reason.why)}</td></tr>")
    return table(("choice", "given", "now", "why"), rows)


def _runs(report: Report) -> str:
    rows = []
    for row in report.rows:
        cells = "".join(f'<td class="number">{_number(value)}</td>' for value in (row.step_s, row.predicted_s))
        mark = ' class="best"' if row.best else ""
        texts = f"<td>{row.runs}</td><td>{escape(row.what)}</td><td>{escape(row.note)}</td>"
        rows.append(f"<tr{mark}>{cells}{texts}</tr>")
    return table(("step, s", "predicted, s", "runs", "what differs from the given one", ""), rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _predicted(report: Report) -> str:
    known = [(row, row.step_s, row.predicted_s) for row in report.rows if row.step_s and row.predicted_s]
    if not known:
        return ""
    values = [value for _, step_s, predicted_s in known for value in (step_s, predicted_s)]
    ends = min(values), max(values)
    dots = [
        Series(
            name,
            [(step_s, predicted_s) for row, step_s, predicted_s in known if row.best == best],
            [
                f"{row.what}: {step_s:.3g} s, predicted {predicted_s:.3g} s"
                for row, step_s, predicted_s in known
                if row.best == best
            ],
            color,
        )
        for name, best, color in (("measured", False, "#1f77b4"), ("the best", True, "#2ca02c"))
    ]
    same = Series("", [(end, end) for end in ends], color="#999", line=True, dots=False)
    drawn = chart(
        axis("measured step, s", values, log=True), axis("predicted step, s", values, log=True), [same, *dots]
    )
    return figure(drawn, "On the line, the prediction was exact. Points to the right of it took longer than predicted.")


def _over_time(report: Report) -> str:
    if not report.history:
        return ""
    points = [(at_s, step_s) for at_s, step_s, _ in report.history]
    best: list[tuple[float, float]] = []
    for at_s, step_s in points:
        best.append((at_s, min(step_s, best[-1][1] if best else step_s)))
    series = [
        Series("fastest so far", best, color="#2ca02c", line=True, dots=False, steps=True),
        Series("a run's median step", points, [f"{what}: {step_s:.3g} s" for _, step_s, what in report.history]),
    ]
    x = axis("seconds of the search", [at_s for at_s, _ in points], zero=True)
    drawn = chart(x, axis("step, s", [step_s for _, step_s in points], zero=True), series)
    return figure(drawn, "Steps over the time of the search. Repeated runs of a setting show how the machine varies.")


def _over_memory(report: Report) -> str:
    if len(report.curve) < 2:
        return ""
    points = [(point.value / (1 << 30), point.step_s) for point in report.curve]
    labels = [f"{point.label}: {point.step_s:.3g} s, bound by {point.bottleneck}" for point in report.curve]
    x = axis("tiering.host_memory, GiB", [across for across, _ in points], zero=True)
    drawn = chart(
        x, axis("predicted step, s", [up for _, up in points], zero=True), [Series("", points, labels, line=True)]
    )
    return figure(drawn, "The best setting with other budgets, by the plan.")
