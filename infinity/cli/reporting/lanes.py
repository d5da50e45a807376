"""Draws a timeline as SVG, with one row for each lane."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from infinity.cli.pages.document import figure
from infinity.telemetry import Lane
from infinity.telemetry.timeline_summary import Ran, step_windows, sum_up

# Colour-blind safe (Okabe and Ito).
COLOURS = {
    Lane.PHASE: "#999999",
    Lane.COMPUTE: "#009e73",
    Lane.WAIT: "#d55e00",
    Lane.UPDATE: "#cc79a7",
    Lane.UPDATE_WAIT: "#e0bfd2",
    Lane.PREFETCH: "#0072b2",
    Lane.WRITE_BACK: "#56b4e9",
    Lane.UPLOAD: "#e69f00",
    Lane.DOWNLOAD: "#f0e442",
}
_WIDTH, _LEFT, _RIGHT = 1140, 150, 10
_ROW, _BAR, _TOP, _BOTTOM = 26, 18, 8, 34
_STEPS = 3  # the last steps are drawn; more would be too narrow to see
_LEAST_WIDTH = 1.0  # narrower spans are merged with their neighbours
_LETTER = 7  # approximate width of a letter


def lanes(spans: Sequence[Ran]) -> str:
    """Return a drawing of the last complete steps of a timeline, or a sentence if it has none."""
    windows = step_windows(spans)
    if not windows:
        return "<p>The timeline has no whole step.</p>"
    chosen = sorted(windows)[-_STEPS:]
    total = sum_up(spans, chosen)
    begin_s, end_s = windows[chosen[0]][0], windows[chosen[-1]][1]
    across = (_WIDTH - _LEFT - _RIGHT) / (end_s - begin_s)
    height = _TOP + _ROW * len(total.lanes) + _BOTTOM
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" aria-label="timeline">'
    ]
    for row, (lane, part) in enumerate(total.lanes.items()):
        down = _TOP + _ROW * row
        text = f"{lane.value} {part.busy_s / total.wall_s:.0%}"
        parts.append(f'<text x="{_LEFT - 8}" y="{down + 14}" text-anchor="end">{escape(text)}</text>')
        parts += _bars([span for span in spans if span.lane is lane], lane, down, begin_s, end_s, across)
    bottom = _TOP + _ROW * len(total.lanes)
    for step in chosen:
        at = _LEFT + (windows[step][0] - begin_s) * across
        parts.append(f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}" class="mark"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 14}">{escape(f"step {step}")}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{bottom + 14}" text-anchor="end">{end_s - begin_s:.3g} s</text>')
    named = f"Step {chosen[0]}" if len(chosen) == 1 else f"Steps {chosen[0]} to {chosen[-1]}"
    return figure("\n".join([*parts, "</svg>"]), f"{named}; the share of each lane is of their time.", wide=True)


def _bars(spans: Sequence[Ran], lane: Lane, down: float, begin_s: float, end_s: float, across: float) -> list[str]:
    """Return the bars of a lane. Spans too narrow to distinguish are merged."""
    parts: list[str] = []
    drawn = sorted((span for span in spans if span.start_s < end_s and span.end_s > begin_s), key=lambda s: s.start_s)
    index = 0
    while index < len(drawn):
        first = drawn[index]
        start_s, stop_s, count = max(first.start_s, begin_s), min(first.end_s, end_s), 1
        if lane is not Lane.PHASE:
            while (
                index + count < len(drawn)
                and (stop_s - start_s) * across < _LEAST_WIDTH
                and (drawn[index + count].start_s - stop_s) * across < _LEAST_WIDTH
            ):
                stop_s = max(stop_s, min(drawn[index + count].end_s, end_s))
                count += 1
        left, width = _LEFT + (start_s - begin_s) * across, max(_LEAST_WIDTH, (stop_s - start_s) * across)
        what = first.name if count == 1 else f"{count} spans, from {first.name}"
        parts.append(
            f'<rect x="{left:.1f}" y="{down}" width="{width:.1f}" height="{_BAR}" fill="{COLOURS[lane]}">'
            f"<title>{escape(what)}: {(stop_s - start_s) * 1e3:.1f} ms</title></rect>"
        )
        if lane is Lane.PHASE and width > _LETTER * len(first.name):
            parts.append(f'<text x="{left + 4:.1f}" y="{down + 13}" style="fill:#111">{escape(first.name)}</text>')
        index += count
    return parts
