"""Charts as SVG, so that a page needs no other file and no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

_WIDTH, _HEIGHT = 560, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 14, 44
_TICKS = 5
_LETTER, _LINE, _MARK = 7.0, 18, 34  # legend: approximate width of a letter, height of a line, width of a mark
_MOST_POINTS = 400  # points of a line; more cannot be distinguished


@dataclass(frozen=True)
class Series:
    """Points (x, y), drawn as a line, dots or an area.

    Attributes:
        labels: text of each point's tooltip.
        color: a CSS color.
        steps: draw the line as steps: level until the next point.
        base: lower edge of a filled area, for each point.
    """

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    color: str = "#1f77b4"
    line: bool = False
    dots: bool = True
    steps: bool = False
    base: Sequence[float] = ()


@dataclass(frozen=True)
class Axis:
    """The x or y axis, from `low` to `high`."""

    title: str
    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value on the axis, 0 to 1."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return the values to label."""
        if self.log:
            return [self.low * (self.high / self.low) ** (index / (_TICKS - 1)) for index in range(_TICKS)]
        step = _round_step((self.high - self.low) / _TICKS)
        first = math.ceil(self.low / step)
        return [step * index for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def axis(title: str, values: Sequence[float], *, log: bool = False, zero: bool = False) -> Axis:
    """Return an axis that covers these values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if log:
        return Axis(title, low / 1.15, high * 1.15, log=True)
    low = 0.0 if zero else low
    return Axis(title, low, high + 0.08 * ((high - low) or abs(high) or 1.0))


def thinned(values: Sequence[float], most: int = _MOST_POINTS) -> list[float]:
    """Return at most `most` values, each the mean of neighbouring values."""
    count = min(most, len(values))
    bounds = [index * len(values) // count for index in range(count + 1)] if count else [0]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]


def chart(x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Return a chart as an SVG element."""
    legend = _legend([one for one in series if one.name])
    frame = _Frame(_TOP + _LINE * len(legend))
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {frame.height}" width="{_WIDTH}" height="{frame.height}" role="img" '
        f'aria-label="{escape(y.title)} over {escape(x.title)}">'
    ]
    areas = [one for one in series if one.base]
    parts += [_area(frame, x, y, one) for one in areas if one.points]
    parts += _drawn_frame(frame, x, y)
    for one in series:
        places = [(_across(x, px), frame.down(y, py)) for px, py in one.points]
        if one.line and places:
            parts.append(
                f'<path d="{_path(places, steps=one.steps)}" fill="none" stroke="{one.color}" stroke-width="2"/>'
            )
        if one.dots:
            labels = [*one.labels, *[""] * (len(places) - len(one.labels))]
            parts += [_dot(place, label, one.color) for place, label in zip(places, labels, strict=True)]
    parts += [text for row, line in enumerate(legend) for text in _legend_line(row, line)]
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Frame:
    """The position of the plot in the drawing. The legend is above it."""

    top: int

    @property
    def bottom(self) -> int:
        return self.top + _HEIGHT - _TOP - _BOTTOM

    @property
    def height(self) -> int:
        return self.bottom + _BOTTOM

    def down(self, y: Axis, value: float) -> float:
        return self.bottom - y.share(value) * (self.bottom - self.top)


def _drawn_frame(frame: _Frame, x: Axis, y: Axis) -> list[str]:
    right, top, bottom = _WIDTH - _RIGHT, frame.top, frame.bottom
    parts = [f'<rect x="{_LEFT}" y="{top}" width="{right - _LEFT}" height="{bottom - top}" class="frame"/>']
    for value in x.ticks():
        at = _across(x, value)
        parts.append(f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{bottom}" class="grid"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{_tick(value)}</text>')
    for value in y.ticks():
        at = frame.down(y, value)
        parts.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
    middle = (top + bottom) / 2
    parts.append(
        f'<text x="{(_LEFT + right) / 2}" y="{frame.height - 8}" text-anchor="middle">{escape(x.title)}</text>'
    )
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y.title)}</text>'
    )
    return parts


def _tick(value: float) -> str:
    """Return a label. Large values are shown in full, because step numbers may have six digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _area(frame: _Frame, x: Axis, y: Axis, one: Series) -> str:
    over = [(_across(x, px), frame.down(y, py)) for px, py in one.points]
    under = [(across, frame.down(y, base)) for (across, _), base in zip(over, one.base, strict=True)]
    points = " ".join(f"{across:.1f},{down:.1f}" for across, down in [*over, *reversed(under)])
    return f'<polygon points="{points}" fill="{one.color}" fill-opacity="0.85"/>'


def _legend(named: Sequence[Series]) -> list[list[Series]]:
    """Return the series of each line of the legend; no line is wider than the drawing."""
    lines: list[list[Series]] = []
    left = 0.0
    for one in named:
        width = _MARK + _LETTER * len(one.name)
        if not lines or width > left:
            lines.append([])
            left = float(_WIDTH - _LEFT - _RIGHT)
        lines[-1].append(one)
        left -= width
    return lines


def _legend_line(row: int, line: Sequence[Series]) -> list[str]:
    parts, at, down = [], float(_LEFT), _TOP + _LINE * row
    for one in line:
        parts.append(f'<circle cx="{at + 5:.1f}" cy="{down - 4}" r="4" fill="{one.color}"/>')
        parts.append(f'<text x="{at + 13:.1f}" y="{down}">{escape(one.name)}</text>')
        at += _MARK + _LETTER * len(one.name)
    return parts


def _dot(place: tuple[float, float], label: str, color: str) -> str:
    title = f"<title>{escape(label)}</title>" if label else ""
    return (
        f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="4.5" fill="{color}" fill-opacity="0.75">{title}</circle>'
    )


def _path(places: Sequence[tuple[float, float]], *, steps: bool) -> str:
    parts = [f"M{places[0][0]:.1f} {places[0][1]:.1f}"]
    for across, down in places[1:]:
        parts.append(f"H{across:.1f}V{down:.1f}" if steps else f"L{across:.1f} {down:.1f}")
    return "".join(parts)


def _across(x: Axis, value: float) -> float:
    return _LEFT + x.share(value) * (_WIDTH - _RIGHT - _LEFT)


def _round_step(step: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step)
