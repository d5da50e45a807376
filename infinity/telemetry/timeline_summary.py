"""Reads a timeline file, and sums up how busy each lane was."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.config.read import read_text
from infinity.errors import ConfigError
from infinity.telemetry.timeline import Lane

Interval = tuple[float, float]
_PHASES = ("forward", "backward", "update")  # of a training step; other spans of the phase lane are between steps


@dataclass(frozen=True)
class Ran:
    """A span of the file, with times in seconds."""

    lane: Lane
    name: str
    start_s: float
    end_s: float
    nbytes: int
    step: int


@dataclass(frozen=True)
class LaneSum:
    """The work of a lane within some steps.

    Attributes:
        busy_s: seconds in which at least one span ran.
        nbytes: bytes that were moved or worked on; spans that reach beyond the steps count in part.
    """

    busy_s: float
    nbytes: int


@dataclass(frozen=True)
class TimelineSum:
    """The work of some steps.

    Attributes:
        steps: their numbers.
        wall_s: the sum of their durations, each from the start of its forward pass to the end of its `step()`.
        lanes: the work of each lane that has any.
        waits_s: waits of the compute thread, by cause.
    """

    steps: tuple[int, ...]
    wall_s: float
    lanes: dict[Lane, LaneSum]
    waits_s: dict[str, float]


def read_timeline(path: Path) -> list[Ran]:
    """Return all spans of a file that `tiering.timeline` wrote, even if its process was killed.

    Raises:
        ConfigError: the file cannot be read, or is no timeline.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        events = _events(text)
        if not isinstance(events, list):
            raise TypeError
        return [_ran(event) for event in events if event["ph"] == "X"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is no timeline: give a file that tiering.timeline wrote") from error


def _events(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # its process was killed: the last line may be incomplete, and the end is missing
        whole = text.rpartition(",\n")[0]
        return json.loads(f"{whole}\n]")


def _ran(event: dict[str, Any]) -> Ran:
    arguments = event["args"]
    name, step, nbytes = event["name"], arguments["step"], arguments.get("bytes", 0)
    start_s, ran_s = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
    if not (isinstance(name, str) and isinstance(step, int) and isinstance(nbytes, int) and nbytes >= 0):
        raise TypeError("a name that is no text, or a step or bytes that are no whole numbers")
    if not (math.isfinite(start_s) and math.isfinite(ran_s) and ran_s >= 0):
        raise ValueError("a time that is not finite, or a span that ends before it begins")
    return Ran(Lane(event["cat"]), name, start_s, start_s + ran_s, nbytes, step)


def step_windows(spans: Iterable[Ran]) -> dict[int, Interval]:
    """Return start and end of each training step of which the timeline has all phases from forward to update."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in spans:
        if span.lane is Lane.PHASE and span.name in _PHASES:
            starts[span.step] = min(span.start_s, starts.get(span.step, span.start_s))
            if span.name == "update":
                ends[span.step] = span.end_s
    return {step: (starts[step], end_s) for step, end_s in sorted(ends.items()) if end_s > starts[step]}


def sum_up(spans: Sequence[Ran], steps: Collection[int] | None = None) -> TimelineSum:
    """Sum up training steps.

    Args:
        steps: their numbers; by default all complete steps of the timeline.

    Raises:
        ConfigError: the timeline lacks one of the steps, or has no complete step.
    """
    windows = step_windows(spans)
    chosen = sorted(windows if steps is None else steps)
    if not chosen or not windows.keys() >= set(chosen):
        there = f"steps {min(windows)} to {max(windows)}" if windows else "no whole step"
        raise ConfigError(f"the timeline has {there}, not {_listed(chosen)}" if chosen else f"the timeline has {there}")
    within: dict[Lane, list[Interval]] = defaultdict(list)
    moved: dict[Lane, float] = defaultdict(float)
    waits_s: dict[str, float] = defaultdict(float)
    for span in spans:
        for step in chosen:
            start_s, end_s = max(span.start_s, windows[step][0]), min(span.end_s, windows[step][1])
            if start_s >= end_s:
                continue
            within[span.lane].append((start_s, end_s))
            moved[span.lane] += span.nbytes * (end_s - start_s) / (span.end_s - span.start_s)
            if span.lane is Lane.WAIT:
                waits_s[span.name] += end_s - start_s
    lanes = {lane: LaneSum(_covered(within[lane]), round(moved[lane])) for lane in Lane if lane in within}
    wall_s = sum(windows[step][1] - windows[step][0] for step in chosen)
    return TimelineSum(tuple(chosen), wall_s, lanes, dict(waits_s))


def _listed(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _covered(intervals: list[Interval]) -> float:
    """Return the length of the union of the intervals."""
    covered_s, reached_s = 0.0, float("-inf")
    for start_s, end_s in sorted(intervals):
        covered_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return covered_s
