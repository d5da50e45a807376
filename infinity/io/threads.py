"""Starts threads, and reports a limit on threads as an error with a remedy."""

from __future__ import annotations

import threading
from collections.abc import Callable

from infinity.errors import InfinityError

MORE_THREADS = "raise the limit on processes and threads: ulimit -u, or pids.max of the container"


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread that runs `target`.

    Raises:
        InfinityError: the system gives no more threads.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise InfinityError(f"the thread {name} cannot be started ({error}): {MORE_THREADS}") from error
    return thread
