"""Refuse a forward pass while another thread runs a forward pass of the same model.

Units are fetched, evicted and recorded in the order of one thread's calls. Two threads at once would wait for memory
that the other one holds, or end the use of a unit that the other one computes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from infinity.errors import InfinityError
from infinity.zero.coroutines import this_thread


class OneThread:
    """The holder: the thread that runs the model's forward pass, if one does.

    Coroutines need no claim, because one of them runs at a time. Autograd's threads need none, because the holder waits
    for them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def claim(self) -> bool:
        """Make this thread the holder. Return False if it already is the holder, or needs no claim.

        After True, the thread must call `release`.

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
    def claimed(self) -> Iterator[None]:
        """Make this thread the holder in this context; see `claim`."""
        is_new = self.claim()
        try:
            yield
        finally:
            if is_new:
                self.release()
