"""Functions that run a stretch at a time: a thread of its own for each, of which one runs while the others wait."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from infinity.io.threads import start_thread

Result = TypeVar("Result")


class Coroutine(Generic[Result]):
    """A function that can be left waiting in the middle.

    `resume` starts the function or lets it go on, and returns when it calls `pause` or ends; meanwhile the caller
    waits, so that what both touch needs no lock.

    Attributes:
        at: what the function paused with; None before its start and after its end.
        ended: the function has returned, or raised.
    """

    def __init__(self, function: Callable[[], Result]) -> None:
        self.at: int | None = None
        self.ended = False
        self._function = function
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._abandoned = False
        self._running = False
        context = contextvars.copy_context()
        self._thread = start_thread(lambda: context.run(self._run), "infinity-coroutine")

    def resume(self) -> None:
        """Run up to the next pause or the end.

        Raises:
            BaseException: what the function raised.
        """
        self.at = None
        self._running = True
        self._go.release()
        self._stopped.acquire()
        self._running = False
        if self._error is not None:
            error, self._error = self._error, None  # it holds the function's frames, and they this coroutine
            raise error

    def take_result(self) -> Result:
        """What the function returned; it has ended. Nothing is kept of it here."""
        result, self._result = self._result, None
        return result  # type: ignore[return-value]

    def pause(self, at: int) -> None:
        """Wait to be resumed; called by the function."""
        self.at = at
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise Abandoned

    def _run(self) -> None:
        this_thread.coroutine = self
        self._go.acquire()
        try:
            if not self._abandoned:
                self._result = self._function()
        except Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.ended = True
            self.at = None
            self._stopped.release()

    def _abandon(self) -> None:
        """End the function where it waits, or where it next would if its caller was interrupted; wait for that."""
        self._abandoned = True
        self._go.release()
        self._thread.join()


class Abandoned(BaseException):
    """Raised where a function is paused that will not be resumed."""


class _ThisThread(threading.local):
    coroutine: Coroutine[Any] | None = None  # that the calling code runs in


this_thread = _ThisThread()


def abandon(coroutines: Sequence[Coroutine[Result]]) -> None:
    """End the functions one after the other: what is still running first, so that never two run at once."""
    for coroutine in sorted(coroutines, key=lambda each: not each._running):
        coroutine._abandon()
