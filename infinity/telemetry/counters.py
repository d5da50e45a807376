"""Counters that every room adds to and `engine.stats()` reads.

Counters only ever grow while a step runs; `Counters.end_step` turns the growth since the last step into
one frozen `StepStats`. Adding is thread-safe: the optimizer's worker counts beside the compute thread.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum


class StallCause(str, Enum):
    """Why the compute thread waited."""

    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    HOST_LINK = "host_link"
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"


@dataclass(frozen=True)
class StepStats:
    """What the last step cost.

    Attributes:
        phase_s: wall seconds of the compute thread by phase (`forward`, `backward`, `update`).
        tier_bytes: bytes moved, by route: `nvme_read`, `nvme_write`, `host_to_device`, `device_to_host`.
        stall_s: seconds that the compute thread waited, by `StallCause` value.
        peak_bytes: high-water mark since the start, by tier (`host`, `device`).
        optimizer_s: seconds that the optimizer's own thread spent computing (it overlaps with the phases).
        grad_norm: global gradient norm before clipping, or None where the schedule does not need it.
        skipped: the optimizer did not run because the gradients were not finite.
    """

    phase_s: dict[str, float] = field(default_factory=dict)
    tier_bytes: dict[str, int] = field(default_factory=dict)
    stall_s: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    optimizer_s: float = 0.0
    grad_norm: float | None = None
    skipped: bool = False


class Counters:
    """Running totals of one engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase_s: defaultdict[str, float] = defaultdict(float)
        self._tier_bytes: defaultdict[str, int] = defaultdict(int)
        self._stall_s: defaultdict[str, float] = defaultdict(float)
        self._optimizer_s = 0.0

    def moved(self, route: str, nbytes: int) -> None:
        """Count `nbytes` over `route`, for example `nvme_read`."""
        with self._lock:
            self._tier_bytes[route] += nbytes

    def optimizer_ran(self, seconds: float) -> None:
        """Count seconds of the optimizer's own thread."""
        with self._lock:
            self._optimizer_s += seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the compute thread."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._phase_s[name] += time.perf_counter() - start

    @contextmanager
    def stalled(self, cause: StallCause) -> Iterator[None]:
        """Time a wait of the compute thread."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._stall_s[cause.value] += time.perf_counter() - start

    def end_step(self, peak_bytes: dict[str, int], grad_norm: float | None = None, skipped: bool = False) -> StepStats:
        """Return what was counted since the last call, and start from zero."""
        with self._lock:
            stats = StepStats(
                phase_s=dict(self._phase_s),
                tier_bytes=dict(self._tier_bytes),
                stall_s=dict(self._stall_s),
                peak_bytes=peak_bytes,
                optimizer_s=self._optimizer_s,
                grad_norm=grad_norm,
                skipped=skipped,
            )
            self._phase_s.clear()
            self._tier_bytes.clear()
            self._stall_s.clear()
            self._optimizer_s = 0.0
        return stats
