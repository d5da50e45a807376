"""The store of `torch.distributed` without endless waits."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from infinity.io.threads import start_thread
from infinity.zero.ending import abandon


class TimedStore:
    """A store whose calls fail if there is no answer in time.

    torch's client waits for an answer without a limit. The process that has the store may be stopped, or its machine
    gone without a word: neither closes the connection.

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
        """Call in a thread of its own, which is left behind if there is no answer.

        Raises:
            RuntimeError: there is none, now or at an earlier call; or it is the store's own error.
        """
        answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put((call(), None))
            except Exception as error:  # raised where the answer is waited for
                answers.put((None, error))

        if not self._silent:
            start_thread(ask, "infinity-store")
            try:
                answer, error = answers.get(timeout=self.timeout_s)
            except Empty:
                self._silent = True
                abandon()  # the thread may come back while the interpreter ends
            else:
                if error is not None:
                    raise error
                return answer
        raise RuntimeError(
            f"the store where ranks meet has not answered for {self.timeout_s:g} s: its process (rank 0's, or its "
            "launcher's) is stopped, or the link to its machine is down"
        )
