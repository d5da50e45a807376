"""The timeline of operations, written as a Chrome trace (JSON) that Perfetto opens.

[Note: one clock]
All times are seconds of `time.perf_counter()`, which is CLOCK_MONOTONIC on Linux. The I/O engines use this clock for
the times of their requests, and all processes of a machine share it, so that the files of its ranks can be compared. In
the file times are microseconds, as the format requires.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from infinity.errors import ConfigError

_log = logging.getLogger(__name__)
_FLUSH_AT = 4096  # held spans that are written before the step ends


class Lane(str, Enum):
    """Rows of the timeline, in their order from the top."""

    PHASE = "phase"
    COMPUTE = "compute"
    WAIT = "wait"
    UPDATE = "update"
    UPDATE_WAIT = "update-wait"
    PREFETCH = "prefetch"
    WRITE_BACK = "write-back"
    UPLOAD = "host-to-device"
    DOWNLOAD = "device-to-host"


_FIRST_THREAD = {lane: 1000 * (index + 1) for index, lane in enumerate(Lane)}  # rows are threads in the format
_encode = json.JSONEncoder(check_circular=False).encode


class Times(NamedTuple):
    """When an operation was submitted, started and finished; see [Note: one clock]."""

    submitted_s: float
    started_s: float
    finished_s: float

    def times(self) -> Times:
        """Return itself, so that `Times` is a `Timed` that has ended."""
        return self


def now() -> Times:
    """Return the times of an operation that takes no time, now."""
    moment_s = time.perf_counter()
    return Times(moment_s, moment_s, moment_s)


class Timed(Protocol):
    """An operation that was started."""

    def times(self) -> Times | None:
        """Return when it ran; None while it is under way."""


@dataclass(frozen=True)
class Span:
    """One operation.

    Attributes:
        unit: index of the unit that it worked on, or None.
        nbytes: bytes that it moved or worked on; 0 if that has no meaning.
        step: the training step that it belongs to, from 1.
    """

    lane: Lane
    name: str
    ran: Timed
    unit: int | None = None
    nbytes: int = 0
    step: int = 1


@dataclass
class _Rows:
    """The rows of a lane, which needs several if spans overlap; `ends_s` has the end of the last span in each."""

    ends_s: list[float] = field(default_factory=list)

    def place(self, times: Times) -> int:
        for row, end_s in enumerate(self.ends_s):
            if end_s <= times.started_s:
                self.ends_s[row] = times.finished_s
                return row
        self.ends_s.append(times.finished_s)
        return len(self.ends_s) - 1


class Timeline:
    """Writes spans to a file, at the end of each step. Thread-safe.

    The file is a JSON array. If the process is killed, the closing bracket is missing; Perfetto and `infinity timeline`
    read such a file, too.

    Args:
        path: the file; it is replaced if it exists.
        unit_names: names of the units, by index.
        steps: the number of steps after which recording ends.
        rank: the rank of this process.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, unit_names: Sequence[str], *, steps: int, rank: int = 0) -> None:
        self.path = path
        self._unit_names = tuple(unit_names)
        self._steps = steps
        self._process = rank + 1  # viewers take 0 for the idle process
        self._step = 1
        self._lock = threading.Lock()
        self._paused = False
        self._spans: list[Span] = []
        self._rows: defaultdict[Lane, _Rows] = defaultdict(_Rows)
        try:
            self._file = path.open("w")
        except OSError as error:
            raise ConfigError(f"tiering.timeline: {path} cannot be written ({error.strerror})") from error
        self._separator = "[\n"
        self._write([self._about("process_name", {"name": f"rank {rank}"})])

    def record(self, lane: Lane, name: str, ran: Timed, unit: int | None = None, nbytes: int = 0) -> None:
        """Record an operation that has run or is under way."""
        with self._lock:
            if self._file.closed or self._paused:
                return
            self._spans.append(Span(lane, name, ran, unit, nbytes, self._step))
            if len(self._spans) >= _FLUSH_AT:
                self._flush()

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Show all that runs in this context as one span, which is no phase of a step."""
        start_s = time.perf_counter()
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self.record(Lane.PHASE, name, Times(start_s, start_s, time.perf_counter()))

    def end_step(self) -> None:
        """Write the spans of the training step that has ended; close the file after the last step to record."""
        with self._lock:
            if self._file.closed:
                return
            self._flush()
            self._step += 1
            if self._step > self._steps and not self._file.closed:
                self._close()
                _log.info("the timeline of %d steps is in %s", self._steps, self.path)

    def close(self) -> None:
        """Write the held spans and close the file. Operations that are still under way are left out."""
        with self._lock:
            if not self._file.closed:
                self._close()

    def _close(self) -> None:
        self._flush()
        self._spans.clear()
        if not self._file.closed:
            with suppress(OSError), self._file:  # readers do not need the end
                self._file.write("\n]\n")

    def _flush(self) -> None:
        """Write the spans that have ended, in the order of their start, and keep the others.

        If the file cannot be written, recording ends and training continues.
        """
        over: list[tuple[Times, Span]] = []
        under_way: list[Span] = []
        for span in self._spans:
            times = span.ran.times()
            if times is None:
                under_way.append(span)
            else:
                over.append((times, span))
        self._spans = under_way
        over.sort(key=lambda pair: pair[0].started_s)
        try:
            self._write(event for times, span in over for event in self._events(times, span))
            self._file.flush()
        except OSError as error:
            _log.warning("the timeline %s ends here: it cannot be written (%s)", self.path, error.strerror)
            with suppress(OSError):  # `close` writes the file's buffer, which fails again
                self._file.close()

    def _events(self, times: Times, span: Span) -> Iterator[dict[str, Any]]:
        """Yield the span as an event, after events that name its row if the row is new."""
        rows = self._rows[span.lane]
        rows_before = len(rows.ends_s)
        row = rows.place(times)
        thread = _FIRST_THREAD[span.lane] + row
        if row == rows_before:
            title = span.lane.value if row == 0 else f"{span.lane.value} ({row + 1})"
            yield self._about("thread_name", {"name": title}, thread)
            yield self._about("thread_sort_index", {"sort_index": thread}, thread)
        arguments: dict[str, Any] = {"step": span.step}
        if span.nbytes:
            arguments["bytes"] = span.nbytes
        if times.submitted_s < times.started_s:
            arguments["queued_us"] = _microseconds(times.started_s - times.submitted_s)
        yield {
            "ph": "X",
            "pid": self._process,
            "tid": thread,
            "cat": span.lane.value,
            "name": span.name if span.unit is None else f"{self._unit_names[span.unit]} {span.name}",
            "ts": _microseconds(times.started_s),
            "dur": _microseconds(times.finished_s - times.started_s),
            "args": arguments,
        }

    def _about(self, what: str, arguments: dict[str, Any], thread: int = 0) -> dict[str, Any]:
        return {"ph": "M", "pid": self._process, "tid": thread, "name": what, "args": arguments}

    def _write(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self._file.write(self._separator)
            self._file.write(_encode(event))
            self._separator = ",\n"


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
