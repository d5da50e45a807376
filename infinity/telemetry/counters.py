"""Counters of bytes, seconds and stalls, from which `engine.stats()` is made.

All parts of the engine add to the counters of the running step. `Counters.end_step` returns them as a frozen
`StepStats` and resets them. The optimizer's worker thread adds, too, so byte and optimizer counters have a lock.
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

_SHOWN_S = 10e-6  # shorter waits are the cost of the call, and are not shown in the timeline
_LANE = {
    "nvme_read": Lane.PREFETCH,
    "nvme_write": Lane.WRITE_BACK,
    "host_to_device": Lane.UPLOAD,
    "device_to_host": Lane.DOWNLOAD,
}


class StallCause(str, Enum):
    """What a thread waited for.

    `ALLOCATOR` is the time of allocating and freeing memory. If a thread waits until an operation frees memory, the
    wait has the cause of this operation, such as `DISK_WRITE`.
    """

    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    HOST_LINK = "host_link"
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"
    ALLOCATOR = "allocator"


class Waits:
    """Seconds that a worker thread has waited, by cause.

    Only the worker calls `waiting`. A thread that waits for it calls `totals_s` before and after, to learn the cause.

    Args:
        timeline: records the waits in the lane `UPDATE_WAIT`.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline
        self._lock = threading.Lock()
        self._totals_s: defaultdict[StallCause, float] = defaultdict(float)
        self._current: tuple[StallCause, float] | None = None  # the wait under way: its cause and start time

    @contextmanager
    def waiting(self, cause: StallCause) -> Iterator[None]:
        """Count the time of the context as a wait for `cause`. Contexts must not be nested."""
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
        """Return the seconds by cause, including the wait that is under way."""
        with self._lock:
            totals_s = dict(self._totals_s)
            if self._current is not None:
                cause, start_s = self._current
                totals_s[cause] = totals_s.get(cause, 0.0) + time.perf_counter() - start_s
        return totals_s


@dataclass(frozen=True)
class StepStats:
    """Measurements of the last step.

    Attributes:
        phase_s: wall seconds of the compute thread by phase (`forward`, `backward`, `update`).
        tier_bytes: bytes of the transfers started since the previous step ended, without those of `initialize` and
            checkpoints, by route: `nvme_read`, `nvme_write`, `host_to_device`, `device_to_host`.
        stall_s: seconds that the compute thread waited in these phases, by `StallCause` value.
        outside_stall_s: seconds that it waited outside of these phases since the previous step, by cause: in
            evaluation, in `synchronize`, and while parameters are read.
        peak_bytes: high-water mark since the start, by tier (`host`, `device`).
        optimizer_s: seconds that the optimizer's own thread spent computing (it overlaps with the phases).
        grad_norm: global gradient norm before clipping; None if the schedule does not compute it.
        skipped: True if the optimizer did not run because the gradients were not finite.
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
        timeline: also records each transfer, update, phase and wait that is counted.

    Attributes:
        waiting: cause and start time (`time.perf_counter`) of the compute thread's present wait, or None.
        step_wall_s: seconds between the ends of the last two steps; None before the second step has ended.
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
        self._booked_s = 0.0  # the sum of all stalls so far; an outer stall subtracts the stalls nested in it

    def moved(self, route: str, nbytes: int, move: Timed, unit: int | None = None, field: str = "") -> None:
        """Count `nbytes` over `route`, for example `nvme_read`. Called when the transfer starts.

        Args:
            move: the transfer, from which the timeline later takes its times.
            unit, field: what is moved.
        """
        with self._lock:
            self._tier_bytes[route] += nbytes
        if self.timeline is not None:
            self.timeline.record(_LANE[route], field, move, unit, nbytes)

    def updated(self, unit: int, nbytes: int, start_s: float) -> None:
        """Count an update of `nbytes` of states, which the optimizer's thread computed from `start_s` until now."""
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
        """Return a context that times a wait of the compute thread. It may be entered again after its end.

        Args:
            worker: the waits of the worker thread, if the compute thread waits for it. The time that the worker waits
                meanwhile counts under the worker's own causes, and only the rest under `cause`.
        """
        return _Stall(self, cause, worker)

    def _book(self, cause: StallCause, seconds: float, end_s: float) -> None:
        """Add a stall. Needs no lock: only the compute thread stalls and ends steps."""
        if seconds <= 0:
            return
        (self._stall_s if self._in_phase else self._outside_stall_s)[cause.value] += seconds
        self._booked_s += seconds
        if self.timeline is not None:
            start_s = end_s - seconds
            self.timeline.record(Lane.WAIT, cause.value, Times(start_s, start_s, end_s))

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Discard what is counted in this context, since `name` (a checkpoint) is no training. Nothing else may run."""
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
        """Return what was counted since the last call, and reset the counters."""
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
    """Context of one wait. It is a class because a generator costs several microseconds, several times per unit."""

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
