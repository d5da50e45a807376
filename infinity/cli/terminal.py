"""Text that is redrawn in place on a terminal, below all other output; and safe use of the standard streams."""

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
    """Return the text with unprintable characters escaped: a terminal would interpret them as commands."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def drop_unread_streams() -> None:
    """Redirect standard output and standard error to the null device, if their reader is gone."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)  # poll always reports a pipe without a reader, and a closed terminal
    for number, _ in poll.poll(0):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def unwind_on_signals() -> None:
    """Raise SystemExit on SIGTERM and SIGHUP, unless they are ignored, so that the command's files are removed."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def is_terminal() -> bool:
    """Whether standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in _CANNOT_DRAW


def console() -> Console:
    """Return a console on standard error that shows text unchanged, including brackets."""
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False)


class Drawing:
    """A picture of some lines at the bottom of the terminal. Other output is printed above it.

    Args:
        renderable: returns the picture, for the terminal's present width.
        stays: leave the last picture on the terminal at the end.
    """

    def __init__(self, renderable: Callable[[], RenderableType], *, stays: bool = False) -> None:
        from rich.live import Live

        self._live = Live(
            get_renderable=renderable,
            console=console(),
            auto_refresh=False,
            transient=not stays,
            redirect_stdout=sys.stdout.isatty(),  # output to a file or pipe must not go to the terminal
        )
        self._handlers: list[logging.StreamHandler[TextIO]] = []
        atexit.register(self.end)  # shows the cursor again if an error skips the call of `end`
        before = sys.stderr
        self._live.start(refresh=True)
        for handler in logging.getLogger().handlers:  # they still write to the stream from before `start`
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(sys.stderr)
                self._handlers.append(handler)

    def draw(self) -> None:
        """Redraw the picture."""
        self._live.refresh()

    def note(self, text: str) -> None:
        """Print above the picture."""
        self._live.console.print(text, soft_wrap=True)

    def end(self) -> None:
        """Restore the terminal. A second call does nothing."""
        atexit.unregister(self.end)
        self._live.stop()
        while self._handlers:
            self._handlers.pop().setStream(sys.stderr)
