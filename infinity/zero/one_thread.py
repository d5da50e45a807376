"""Refuse a second thread in a model whose forward another thread runs.

Units are fetched, evicted and recorded in the order of one thread's calls. Calls of two threads at once would wait for
each other's memory, or end each other's uses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from infinity.errors import InfinityError
from infinity.zero.coroutines import this_thread


class OneThread:
    """The thread that runs a model's forward, if one does.

    Coroutines, of which one runs at a time, and autograd's threads, for which the holder waits, need no claim.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def claim(self) -> bool:
        """Return whether this thread has become the holder, which must `release`; False if it is, or needs no claim.

        Raises:
            InfinityError: another thread is the holder.
        """
        this = threading.get_ident()
        if self._holder == this or this_thread.coroutine is not None or torch._C._current_graph_task_id() >= 0:
            return False
        with self._lock:
            if self._holder is not None:
                raise InfinityError(
                    "two threads call the model at once: run its modules in one thread, and give threads that share an "
                    "engine a lock around each call"
                )
            self._holder = this
        return True

    def release(self) -> None:
        """End the claim."""
        self._holder = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the model inside; see `claim`."""
        claimed = self.claim()
        try:
            yield
        finally:
            if claimed:
                self.release()
