"""A bar on standard error while something takes long, if somebody is there to see it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WIDTH = 24
_EVERY_S = 0.25
_SOON_S = 1.0  # nothing is said of the end before so much is known


class Progress:
    """One line that is drawn over and over; nothing where standard error is no terminal."""

    def __init__(self) -> None:
        self._drawn = sys.stderr.isatty()
        self._began_s = time.monotonic()

    def show(self, text: str, share: float) -> None:
        """Draw `text` with how much is done, 0 to 1."""
        if not self._drawn:
            return
        share = min(1.0, max(0.0, share))
        filled = round(_WIDTH * share)
        left = self._left(share)
        print(
            f"\r\x1b[K[{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%}{left}  {text}",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def clear(self) -> None:
        """Leave the line empty for others, and count the time anew."""
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self._began_s = time.monotonic()

    @contextmanager
    def following(self, text: str, share: Callable[[], float]) -> Iterator[None]:
        """Draw again and again what `share` says, from a thread, while the body works."""
        if not self._drawn:
            yield
            return
        over = threading.Event()

        def draw() -> None:
            while not over.wait(_EVERY_S):
                self.show(text, share())

        self._began_s = time.monotonic()
        thread = threading.Thread(target=draw, name="infinity-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.clear()

    def _left(self, share: float) -> str:
        passed_s = time.monotonic() - self._began_s
        if passed_s < _SOON_S or not share:
            return ""
        left_s = round(passed_s * (1 - share) / share)
        return f" {left_s // 60}:{left_s % 60:02d} left"
