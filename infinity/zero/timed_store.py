"""The store of `torch.distributed` without endless waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from infinity.io.threads import start_thread
from infinity.zero.ending import abandon

Result = TypeVar("Result")


def call_within(timeout_s: float, call: Callable[[], Result]) -> Result:
    """Run `call` in a thread of its own. Return its result, or raise its error.

    Raises:
        concurrent.futures.TimeoutError: it has not ended in time. The thread continues to run.
    """
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:  # raised in the thread that waits for the result
            result.set_exception(error)

    start_thread(run, "infinity-store")
    return result.result(timeout_s)


class TimedStore:
    """A store whose calls fail if there is no answer in time.

    torch's client waits for an answer without a limit. If the process of the store is stopped, or its machine fails,
    the connection stays open.

    Attributes:
        timeout_s: maximum wait for an answer.
    """

    def __init__(self, store: Any) -> None:
        self.timeout_s = 300.0
        self._store = store
        self._silent = False

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda: self._store.add(key, amount)))

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return bytes(self._ask(lambda: self._store.get(key)))

    def delete_key(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Return the store's answer.

        Raises:
            RuntimeError: there is no answer, now or at an earlier call; or the store's own error.
        """
        if not self._silent:
            try:
                return call_within(self.timeout_s, call)
            except FutureTimeoutError:  # before Python 3.11 it is no `TimeoutError`
                self._silent = True
                abandon()  # the thread may return while the interpreter ends
        raise RuntimeError(
            f"the store where ranks meet has not answered for {self.timeout_s:g} s: its process (rank 0's, or its "
            "launcher's) is stopped, or the link to its machine is down"
        )
