"""What a thread waits for."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from infinity.telemetry.timeline import Lane, Timeline, Times

_SHOWN_S = 10e-6  # below that there was nothing to wait for


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
