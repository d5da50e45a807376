"""What is drawn over and over on standard error, where that is a terminal: other output goes above it."""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_CANNOT_DRAW = frozenset(("dumb", "unknown"))


def plain(text: str) -> str:
    """Somebody's text as it can be shown: what would move a cursor, set a title or turn the line round is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def drop_unread_streams() -> None:
    """Redirect standard output and standard error to the null device, if their reader is gone."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)  # a pipe without a reader and a closed terminal are reported without being asked for
    for number, _ in poll.poll(0):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def unwind_on_signals() -> None:
    """Let SIGTERM, and SIGHUP unless it is ignored, end the command by an exception, so that its files are removed."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def is_terminal() -> bool:
    """Somebody looks at standard error, on something that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in _CANNOT_DRAW


def console() -> Console:
    """Standard error; text is shown as it is, brackets and all."""
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False)


class Drawing:
    """A picture of some lines at the bottom of the terminal, and what else is printed above it.

    Args:
        renderable: makes the picture, for the terminal's present width.
        stays: the last picture is left on the terminal at the end.
    """

    def __init__(self, renderable: Callable[[], RenderableType], *, stays: bool = False) -> None:
        from rich.live import Live

        self._live = Live(
            get_renderable=renderable,
            console=console(),
            auto_refresh=False,
            transient=not stays,
            redirect_stdout=sys.stdout.isatty(),  # a file or pipe gets what is its own
        )
        self._handlers: list[logging.StreamHandler[TextIO]] = []
        atexit.register(self.end)  # an error may come past whoever has drawn, and the cursor is hidden
        before = sys.stderr
        self._live.start(refresh=True)
        for handler in logging.getLogger().handlers:  # they hold standard error as it was
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(sys.stderr)
                self._handlers.append(handler)

    def draw(self) -> None:
        """Show what is new."""
        self._live.refresh()

    def note(self, text: str) -> None:
        """Print above the picture."""
        self._live.console.print(text, soft_wrap=True)

    def end(self) -> None:
        """Give the terminal back; a second time does nothing."""
        atexit.unregister(self.end)
        self._live.stop()
        while self._handlers:
            self._handlers.pop().setStream(sys.stderr)
