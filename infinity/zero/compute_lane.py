"""What the compute device computes, for the timeline: the passes of the model, cut where they wait for something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from infinity.telemetry import Lane, Timed, Timeline, Times
from infinity.zero.hooks import Listener


@dataclass(frozen=True)
class _Between:
    """From one moment of the compute device to another."""

    start: Timed
    stop: Timed

    def times(self) -> Times | None:
        start, stop = self.start.times(), self.stop.times()
        if start is None or stop is None:
            return None
        return Times(start.finished_s, start.finished_s, stop.finished_s)


class ComputeLane:
    """A listener of the hooks that passes everything on, and records what is computed in between.

    Uses may be nested; what is computed belongs to the innermost.

    Args:
        moment: of the compute device, when it has done what it was given so far.
    """

    def __init__(self, listener: Listener, timeline: Timeline, moment: Callable[[], Timed]) -> None:
        self._listener = listener
        self._timeline = timeline
        self._moment = moment
        self._pass = ""
        self._uses: list[int] = []  # units, innermost last
        self._since: Timed | None = None  # the beginning of the span that is running; None outside of a pass

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """A pass over the model, for example `forward`."""
        self._pass = name
        self._since = self._moment()
        try:
            yield
        finally:
            self._cut()
            self._since = None
            self._uses.clear()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """The compute thread does something else meanwhile."""
        self._cut()
        try:
            yield
        finally:
            if self._since is not None:
                self._since = self._moment()

    def _cut(self) -> None:
        """What was computed up to here belongs to the innermost use, or to no unit."""
        if self._since is not None:
            unit = self._uses[-1] if self._uses else None
            self._timeline.record(Lane.COMPUTE, self._pass, _Between(self._since, self._moment()), unit)

    # Listener #

    def enter(self, units: tuple[int, ...]) -> None:
        with self._paused():
            self._listener.enter(units)
        self._uses.extend(reversed(units))

    def backward_enter(self, units: tuple[int, ...]) -> None:
        with self._paused():
            self._listener.backward_enter(units)
        self._uses.extend(reversed(units))

    def leave(self, units: tuple[int, ...]) -> None:
        with self._paused():
            self._listener.leave(units)
        for unit in units:
            index = next((i for i in reversed(range(len(self._uses))) if self._uses[i] == unit), None)
            if index is not None:  # an exception may have come before its `enter` was over
                del self._uses[index]

    def backward_left(self, units: tuple[int, ...]) -> None:
        with self._paused():
            self._listener.backward_left(units)

    def gradient_ready(self, unit: int, slot: int, param: nn.Parameter) -> None:
        with self._paused():
            self._listener.gradient_ready(unit, slot, param)
