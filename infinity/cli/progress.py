"""A progress bar on standard error, if that is a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from infinity.cli.terminal import Drawing, is_terminal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from typing_extensions import Self

_WIDTH = 24
_EVERY_S = 0.5
_SOON_S = 1.0  # the remaining time is not estimated earlier


class Progress:
    """One line with a bar, redrawn in place; nothing if standard error is no terminal. A context manager.

    Attributes:
        cpu_s: processor seconds that the drawing thread has taken so far, which measurements subtract.
    """

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._drawn = is_terminal()
        self._drawing: Drawing | None = None
        self._began_s = time.monotonic()
        self._text = ""
        self._share: Callable[[], float | None] = lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.clear()

    def show(self, text: str, share: float | None = None) -> None:
        """Draw `text`, with a bar if the share of the work that is done, 0 to 1, is known."""
        self._text, self._share = text, lambda: share
        if not self._drawn:
            return
        if self._drawing is None:
            self._drawing = Drawing(self._line)
        else:
            self._drawing.draw()

    def clear(self) -> None:
        """Remove the line, and restart the clock for the remaining time."""
        if self._drawing is not None:
            self._drawing.end()
            self._drawing = None
        self._began_s = time.monotonic()

    @contextmanager
    def following(self, text: str, share: Callable[[], float]) -> Iterator[None]:
        """Redraw `text` and the present `share` from a thread while the body of the context runs."""
        self.clear()
        self._text, self._share = text, share
        if not self._drawn:
            yield
            return
        drawing = self._drawing = Drawing(self._line)
        over = threading.Event()
        thread = threading.Thread(target=self._follow, args=(drawing, over), name="infinity-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.clear()

    def say(self, text: str) -> None:
        """Change the text beside the bar of `following`."""
        self._text = text

    def _follow(self, drawing: Drawing, over: threading.Event) -> None:
        before_s = self.cpu_s
        while not over.wait(_EVERY_S):
            drawing.draw()
            self.cpu_s = before_s + time.thread_time()

    def _line(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        text = Text(self._text, no_wrap=True, overflow="ellipsis")
        share = self._share()
        if share is None:
            return text
        share = min(1.0, max(0.0, share))
        line = Table.grid(padding=(0, 1), expand=True)
        for _ in range(2):
            line.add_column(no_wrap=True)
        line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        line.add_row(ProgressBar(1.0, share, width=_WIDTH), f"{share:4.0%}{self._left(share)}", text)
        return line

    def _left(self, share: float) -> str:
        passed_s = time.monotonic() - self._began_s
        if passed_s < _SOON_S or not share:
            return ""
        return f" {clock(passed_s * (1 - share) / share)} left"


def clock(seconds: float) -> str:
    """Return a duration as `3:07`, or as `1:03:07` from one hour on."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
