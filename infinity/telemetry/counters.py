"""Counters that every room adds to and `engine.stats()` reads.

Counters only ever grow while a step runs; `Counters.end_step` turns the growth since the last step into
one frozen `StepStats`. Adding is thread-safe: the optimizer's worker counts beside the compute thread.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum

from infinity.telemetry.timeline import Lane, Timed, Timeline, Times

_SHOWN_S = 10e-6  # below that there was nothing to wait for
_LANE = {
    "nvme_read": Lane.PREFETCH,
    "nvme_write": Lane.WRITE_BACK,
    "host_to_device": Lane.UPLOAD,
    "device_to_host": Lane.DOWNLOAD,
}


class StallCause(str, Enum):
    """What a thread waited for.

    `ALLOCATOR` is the time that getting or freeing memory takes. A wait until somebody gives memory up is booked by
    what that somebody is doing.
    """

    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    HOST_LINK = "host_link"
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"
    ALLOCATOR = "allocator"


class Waits:
    """What a worker thread has waited for so far: a thread that waits for the worker reads it before and after.

    The one thread that waits calls `waiting`; any thread may call `totals_s`.

    Args:
        timeline: where the waits are shown, among what the worker does.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline
        self._lock = threading.Lock()
        self._totals_s: defaultdict[StallCause, float] = defaultdict(float)
        self._current: tuple[StallCause, float] | None = None  # and since when

    @contextmanager
    def waiting(self, cause: StallCause) -> Iterator[None]:
        """The worker waits for `cause` while the context lasts; contexts do not nest."""
        start_s = time.perf_counter()
        with self._lock:
            self._current = (cause, start_s)
        try:
            yield
        finally:
            with self._lock:
                self._current = None
                end_s = time.perf_counter()
                self._totals_s[cause] += end_s - start_s
            if self._timeline is not None and end_s - start_s > _SHOWN_S:
                self._timeline.record(Lane.UPDATE_WAIT, cause.value, Times(start_s, start_s, end_s))

    def totals_s(self) -> dict[StallCause, float]:
        """Seconds by cause, with those of the wait that is under way."""
        with self._lock:
            totals_s = dict(self._totals_s)
            if self._current is not None:
                cause, start_s = self._current
                totals_s[cause] = totals_s.get(cause, 0.0) + time.perf_counter() - start_s
        return totals_s


@dataclass(frozen=True)
class StepStats:
    """What the last step cost.

    Attributes:
        phase_s: wall seconds of the compute thread by phase (`forward`, `backward`, `update`).
        tier_bytes: bytes whose move was started since the last step ended (setting up and checkpoints left out), by
            route: `nvme_read`, `nvme_write`, `host_to_device`, `device_to_host`.
        stall_s: seconds of these phases that the compute thread waited, by `StallCause` value.
        outside_stall_s: seconds that it waited outside of these phases since the last step, by cause: in evaluation,
            `synchronize`, reading parameters.
        peak_bytes: high-water mark since the start, by tier (`host`, `device`).
        optimizer_s: seconds that the optimizer's own thread spent computing (it overlaps with the phases).
        grad_norm: global gradient norm before clipping, or None where the schedule does not need it.
        skipped: the optimizer did not run because the gradients were not finite.
    """

    phase_s: dict[str, float] = field(default_factory=dict)
    tier_bytes: dict[str, int] = field(default_factory=dict)
    stall_s: dict[str, float] = field(default_factory=dict)
    outside_stall_s: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    optimizer_s: float = 0.0
    grad_norm: float | None = None
    skipped: bool = False


class Counters:
    """Running totals of one engine.

    Args:
        timeline: has everything that is counted recorded as well.

    Attributes:
        waiting: what the compute thread waits for right now, and since when (`time.perf_counter`).
        step_wall_s: from the end of the step before the last to that of the last; None before there are two.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline
        self._lock = threading.Lock()
        self._phase_s: defaultdict[str, float] = defaultdict(float)
        self._tier_bytes: defaultdict[str, int] = defaultdict(int)
        self._stall_s: defaultdict[str, float] = defaultdict(float)
        self._outside_stall_s: defaultdict[str, float] = defaultdict(float)
        self._optimizer_s = 0.0
        self._in_phase = False
        self.waiting: tuple[StallCause, float] | None = None
        self.step_wall_s: float | None = None
        self._step_ended_s: float | None = None
        self._booked_s = 0.0  # of all stalls so far, so that one within another is not counted twice

    def moved(self, route: str, nbytes: int, move: Timed, unit: int | None = None, field: str = "") -> None:
        """Count `nbytes` over `route`, for example `nvme_read`, when the move is started.

        Args:
            move: tells the timeline when it ran.
            unit, field: what is moved.
        """
        with self._lock:
            self._tier_bytes[route] += nbytes
        if self.timeline is not None:
            self.timeline.record(_LANE[route], field, move, unit, nbytes)

    def updated(self, unit: int, nbytes: int, start_s: float) -> None:
        """Count the arithmetic of the optimizer's own thread on `nbytes` of states, from `start_s` until now."""
        end_s = time.perf_counter()
        with self._lock:
            self._optimizer_s += end_s - start_s
        if self.timeline is not None:
            self.timeline.record(Lane.UPDATE, "update", Times(start_s, start_s, end_s), unit, nbytes)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of a training step on the compute thread."""
        start_s = time.perf_counter()
        self._in_phase = True
        try:
            yield
        finally:
            self._in_phase = False
            end_s = time.perf_counter()
            with self._lock:
                self._phase_s[name] += end_s - start_s
            if self.timeline is not None:
                self.timeline.record(Lane.PHASE, name, Times(start_s, start_s, end_s))

    def stalled(self, cause: StallCause, worker: Waits | None = None) -> AbstractContextManager[None]:
        """Time a wait of the compute thread. The context may be used again after its end.

        Args:
            worker: what is waited for is the work of this thread; what that thread itself waits for meanwhile is
                booked by its own cause, and only the rest under `cause`.
        """
        return _Stall(self, cause, worker)

    def _book(self, cause: StallCause, seconds: float, end_s: float) -> None:
        """Without the lock: only the compute thread stalls, and only it ends steps."""
        if seconds <= 0:
            return
        (self._stall_s if self._in_phase else self._outside_stall_s)[cause.value] += seconds
        self._booked_s += seconds
        if self.timeline is not None:
            start_s = end_s - seconds
            self.timeline.record(Lane.WAIT, cause.value, Times(start_s, start_s, end_s))

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Leave out what is counted meanwhile: `name` (a checkpoint, say) is no training. Nothing else may run."""
        with self._lock:
            tier_bytes, optimizer_s = dict(self._tier_bytes), self._optimizer_s
            outside_stall_s = dict(self._outside_stall_s)
        try:
            with self.timeline.aside(name) if self.timeline is not None else nullcontext():
                yield
        finally:
            with self._lock:
                self._tier_bytes = defaultdict(int, tier_bytes)
                self._outside_stall_s = defaultdict(float, outside_stall_s)
                self._optimizer_s = optimizer_s

    def end_step(self, peak_bytes: dict[str, int], grad_norm: float | None = None, skipped: bool = False) -> StepStats:
        """Return what was counted since the last call, and start from zero."""
        with self._lock:
            stats = StepStats(
                phase_s=dict(self._phase_s),
                tier_bytes=dict(self._tier_bytes),
                stall_s=dict(self._stall_s),
                outside_stall_s=dict(self._outside_stall_s),
                peak_bytes=peak_bytes,
                optimizer_s=self._optimizer_s,
                grad_norm=grad_norm,
                skipped=skipped,
            )
            for counted in (self._phase_s, self._tier_bytes, self._stall_s, self._outside_stall_s):
                counted.clear()
            self._optimizer_s = 0.0
        ended_s = time.perf_counter()
        if self._step_ended_s is not None:
            self.step_wall_s = ended_s - self._step_ended_s
        self._step_ended_s = ended_s
        if self.timeline is not None:
            self.timeline.end_step()
        return stats


class _Stall(AbstractContextManager[None]):
    """One wait. A class, since a generator would cost several microseconds, a few times for every unit that moves."""

    __slots__ = ("_around", "_booked_before_s", "_cause", "_counters", "_start_s", "_waits_before_s", "_worker")

    def __init__(self, counters: Counters, cause: StallCause, worker: Waits | None) -> None:
        self._counters = counters
        self._cause = cause
        self._worker = worker

    def __enter__(self) -> None:
        self._waits_before_s = {} if self._worker is None else self._worker.totals_s()
        self._booked_before_s = self._counters._booked_s
        self._start_s = time.perf_counter()
        self._around = self._counters.waiting
        self._counters.waiting = self._cause, self._start_s

    def __exit__(self, *exc: object) -> None:
        end_s = time.perf_counter()
        counters = self._counters
        counters.waiting = self._around
        rest_s = end_s - self._start_s - (counters._booked_s - self._booked_before_s)
        if self._worker is not None:
            for deeper, total_s in self._worker.totals_s().items():
                waited_s = min(rest_s, total_s - self._waits_before_s.get(deeper, 0.0))
                rest_s -= waited_s
                counters._book(deeper, waited_s, end_s - rest_s)
        counters._book(self._cause, rest_s, end_s)
