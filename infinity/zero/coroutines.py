"""Functions that pause and are resumed: each has its own thread, of which one runs while the others wait."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from infinity.io.threads import start_thread

Result = TypeVar("Result")


class Coroutine(Generic[Result]):
    """A function that can pause.

    `resume` starts or continues the function, and returns when it calls `pause` or ends. The caller waits until then,
    so data that both use needs no lock.

    Attributes:
        at: the argument of the function's last `pause`; None before its start and after its end.
        ended: whether the function has returned, or raised.
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
            BaseException: raised by the function.
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
        """Return the result of the function, which has ended. This object does not keep the result."""
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
        """End the function at its pause, or at the next one if its caller was interrupted. Block until it has ended."""
        self._abandoned = True
        self._go.release()
        self._thread.join()


class Abandoned(BaseException):
    """Raised in a paused function that will not be resumed."""


class _ThisThread(threading.local):
    coroutine: Coroutine[Any] | None = None  # the coroutine in which the calling code runs


this_thread = _ThisThread()


def abandon(coroutines: Sequence[Coroutine[Result]]) -> None:
    """End the functions one after the other, a running one first, so that two never run at once."""
    for coroutine in sorted(coroutines, key=lambda each: not each._running):
        coroutine._abandon()
