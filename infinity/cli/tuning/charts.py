"""Charts as SVG, drawn here so that a page needs no other file and no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 560, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 44
_TICKS = 5


@dataclass(frozen=True)
class Series:
    """Points (x, y) with what each says under the pointer; joined by a line, or dots.

    Attributes:
        color: a CSS color.
        steps: between points the line stays level until the next.
    """

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    color: str = "#1f77b4"
    line: bool = False
    dots: bool = True
    steps: bool = False


@dataclass(frozen=True)
class Axis:
    """One of the two, from `low` to `high`."""

    title: str
    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value is on it, 0 to 1."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Values that are written beside it."""
        if self.log:
            return [self.low * (self.high / self.low) ** (index / (_TICKS - 1)) for index in range(_TICKS)]
        step = _round_step((self.high - self.low) / _TICKS)
        first = math.ceil(self.low / step)
        return [step * index for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def axis(title: str, values: Sequence[float], *, log: bool = False, zero: bool = False) -> Axis:
    """One that has room for these values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if log:
        return Axis(title, low / 1.15, high * 1.15, log=True)
    low = 0.0 if zero else low
    return Axis(title, low, high + 0.08 * ((high - low) or abs(high) or 1.0))


def chart(x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """An SVG element."""
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(y.title)} over {escape(x.title)}">'
    ]
    parts += _frame(x, y)
    for one in series:
        places = [(_across(x, px), _down(y, py)) for px, py in one.points]
        if one.line and places:
            parts.append(
                f'<path d="{_path(places, steps=one.steps)}" fill="none" stroke="{one.color}" stroke-width="2"/>'
            )
        if one.dots:
            labels = [*one.labels, *[""] * (len(places) - len(one.labels))]
            parts += [_dot(place, label, one.color) for place, label in zip(places, labels, strict=True)]
    parts += _legend(series)
    return "\n".join([*parts, "</svg>"])


def _frame(x: Axis, y: Axis) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}" class="frame"/>']
    for value in x.ticks():
        at = _across(x, value)
        parts.append(f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}" class="grid"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{value:.3g}</text>')
    for value in y.ticks():
        at = _down(y, value)
        parts.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x.title)}</text>')
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(y.title)}</text>'
    )
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    named = [one for one in series if one.name]
    parts = []
    for index, one in enumerate(named):
        at = _TOP + 16 + 16 * index
        parts.append(f'<circle cx="{_WIDTH - _RIGHT - 12}" cy="{at - 4}" r="4" fill="{one.color}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT - 22}" y="{at}" text-anchor="end">{escape(one.name)}</text>')
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


def _down(y: Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - y.share(value) * (_HEIGHT - _BOTTOM - _TOP)


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step)
