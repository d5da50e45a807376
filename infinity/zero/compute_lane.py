"""The compute lane of the timeline: the passes of the model, cut at each wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch import nn

from infinity.telemetry import Lane, Timed, Timeline, Times
from infinity.zero.hooks import Listener
from infinity.zero.unit import Unit


@dataclass(frozen=True)
class _Between:
    """The span between two moments of the compute device."""

    start: Timed
    stop: Timed

    def times(self) -> Times | None:
        start, stop = self.start.times(), self.stop.times()
        if start is None or stop is None:
            return None
        return Times(start.finished_s, start.finished_s, stop.finished_s)


class ComputeLane(Listener):
    """Forward every event of the hooks, and record the computation between events.

    Uses may be nested; a span belongs to the innermost use.

    Args:
        moment: returns a marker that completes when the compute device has done its work so far.
    """

    def __init__(self, listener: Listener, timeline: Timeline, moment: Callable[[], Timed]) -> None:
        self._listener = listener
        self._timeline = timeline
        self._moment = moment
        self._pass = ""
        self._uses: list[Unit] = []  # innermost first
        self._since: Timed | None = None  # the start of the running span; None outside of a pass

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Record a pass over the model, for example `forward`."""
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
        """Exclude other work of the compute thread."""
        self._cut()
        try:
            yield
        finally:
            if self._since is not None:
                self._since = self._moment()

    def _cut(self) -> None:
        """Record the span since the last cut for the innermost use, or for no unit."""
        if self._since is not None:
            unit = self._uses[0].index if self._uses else None
            self._timeline.record(Lane.COMPUTE, self._pass, _Between(self._since, self._moment()), unit)

    # Listener #

    def enter(self, units: tuple[Unit, ...]) -> None:
        with self._paused():
            self._listener.enter(units)
        self._uses[:0] = units

    def backward_enter(self, units: tuple[Unit, ...]) -> None:
        with self._paused():
            self._listener.backward_enter(units)
        self._uses[:0] = units

    def leave(self, units: tuple[Unit, ...], *, ends_forward: bool = False) -> None:
        with self._paused():
            self._listener.leave(units, ends_forward=ends_forward)
        for unit in units:
            with suppress(ValueError):  # an exception may have ended its `enter`
                self._uses.remove(unit)

    def backward_left(self, units: tuple[Unit, ...]) -> None:
        with self._paused():
            self._listener.backward_left(units)

    def in_parts(self, unit: Unit, index: int, *, again: bool) -> None:
        self._listener.in_parts(unit, index, again=again)

    def gradient_ready(self, unit: Unit, index: int, param: nn.Parameter) -> None:
        with self._paused():
            self._listener.gradient_ready(unit, index, param)
