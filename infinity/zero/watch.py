"""The watchdog of one process group: if a rank waits for long, it names the missing rank.

A thread reports to the other ranks, in the store of `torch.distributed`, what this rank waits for or has returned from.
While this rank waits for long, the thread reads the reports of the others. It logs a warning once, and keeps the words
for the error in which the wait may end. Code that raises this error asks the thread for the words, and never the store,
because the store may be unreachable.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infinity.zero.ending import is_abandoned

_PERIOD_S = 5.0  # between two reports
_SILENT = 3  # periods without a report
_WARN_S = 60.0  # of waiting, and at most a quarter of the timeout

_log = logging.getLogger(__name__)


class Watch:
    """The reports of this rank and of the others.

    Args:
        store: the store that the ranks share, with a prefix for these reports.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.timeout_s = 4 * _WARN_S
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._waits: dict[int, tuple[str, float]] = {}  # by thread: what it waits for, and since when
        self._last = ("nothing yet", time.monotonic())  # the last wait that has ended
        self._heard: dict[int, tuple[int, float]] = {}  # number of another rank's last report, and when it was new
        self._looked_s = time.monotonic()
        self._words: str | None = None
        self._warned: float | None = None  # start of the wait for which a warning was logged
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._owner = 0

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Report that this thread waits for `what`, in which other ranks take part, until the end of the context."""
        if self._owner != os.getpid():
            self._start()
        me = threading.get_ident()
        self._waits[me] = what, time.monotonic()
        try:
            yield
        finally:
            self._waits.pop(me, None)
            self._last = what, time.monotonic()

    def missing(self) -> str | None:
        """Return which ranks are missing, in words; None if it is not known (yet)."""
        unheard_s = time.monotonic() - self._looked_s
        if unheard_s > _SILENT * _PERIOD_S:
            return (
                f"the store where ranks meet has not answered for {unheard_s:.0f} s: its process (rank 0's, "
                "or its launcher's) has ended, or the link to its machine is down"
            )
        return self._words

    def close(self) -> None:
        """End the thread, unless it waits for a store that does not answer."""
        self._over.set()
        if self._thread is not None and self._owner == os.getpid():
            self._thread.join(0 if is_abandoned() else 2 * _PERIOD_S)

    def _start(self) -> None:
        """A forked child has no thread, and gets its own when it waits for ranks itself."""
        self._owner = os.getpid()
        self._over = threading.Event()
        self._looked_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="infinity-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that comes back from native code later ends the process with SIGABRT

    def _run(self) -> None:
        number = 0
        while not self._over.wait(_PERIOD_S):
            number += 1
            try:
                self._tell(number)
                self._look()
            except RuntimeError:  # the store has gone with its rank; `missing` says so by the time that passes
                return
            self._looked_s = time.monotonic()

    def _tell(self, number: int) -> None:
        longest = self._longest()
        what, since_s = longest or self._last
        word = {"number": number, "what": what, "waits": longest is not None, "for_s": time.monotonic() - since_s}
        self._store.set(f"{self._rank}", json.dumps(word))
        if number == 1:
            self._store.add(f"{self._rank}/there", 1)

    def _look(self) -> None:
        """Put into words what the others do, while this rank waits for long."""
        longest = self._longest()
        if longest is None or time.monotonic() - longest[1] < _PERIOD_S:
            self._words = None
            self._heard.clear()
            return
        what, since_s = longest
        said = [self._of(rank, what) for rank in self._others]
        self._words = "; ".join(words for words in said if words is not None) or None
        waited_s = time.monotonic() - since_s
        if self._words and since_s != self._warned and waited_s > min(_WARN_S, self.timeout_s / 4):
            self._warned = since_s
            _log.warning("rank %d has waited %.0f s for %s: %s", self._rank, waited_s, what, self._words)

    def _of(self, rank: int, what: str) -> str | None:
        """Return what another rank does; None if it is in the same wait."""
        if int(self._store.add(f"{rank}/there", 0)) == 0:  # the only query that never waits
            return f"rank {rank} has waited for no other rank yet"
        word = json.loads(self._store.get(f"{rank}"))
        now_s = time.monotonic()
        if rank not in self._heard or self._heard[rank][0] != word["number"]:
            self._heard[rank] = word["number"], now_s
        silent_s = now_s - self._heard[rank][1]
        if silent_s > _SILENT * _PERIOD_S:
            return f"rank {rank} has not been heard of for {silent_s:.0f} s, its last word was about {word['what']}"
        if not word["waits"]:
            return f"rank {rank} has not come, it came back from {word['what']} {word['for_s']:.0f} s ago"
        return None if word["what"] == what else f"rank {rank} waits for {word['what']}"

    def _longest(self) -> tuple[str, float] | None:
        waits = list(self._waits.values())
        return min(waits, key=lambda wait: wait[1]) if waits else None
