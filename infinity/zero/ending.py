"""End a process that has used collectives.

torch's threads take part in a collective, and outlive it. If such a thread still has work when the interpreter ends,
the process waits for it for up to half an hour, or ends with SIGABRT although all its own work is done.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from infinity.telemetry.tasks import read_task

_GLOO = "pt_gloo_runloop"  # name of the threads of a group in host memory
_POLL_S = 0.001
_PATIENCE_S = 5.0

# Ids of processes that have given up a collective. Its group still waits, and would keep the process from ending.
_abandoned: list[int] = []


def abandon() -> None:
    """Record that a collective was given up, so that this process ends without waiting for it."""
    _abandoned.append(os.getpid())


def is_abandoned() -> bool:
    """Whether a collective was given up, so that this process ends without waiting for its threads."""
    return os.getpid() in _abandoned


def leave_at_exit() -> None:
    """Destroy the process groups when this process ends."""
    atexit.register(_leave, os.getpid())


def _leave(owner_pid: int) -> None:
    if os.getpid() == owner_pid and dist.is_initialized():  # a forked child has the connections, but not the threads
        dist.destroy_process_group()


def _end() -> None:
    """Run as the last exit handler."""
    if is_abandoned():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    _let_threads_finish()


atexit.register(_end)  # handlers that are registered later run before it


def _let_threads_finish() -> None:
    """Wait for threads that have not finished their last collective.

    Such a thread first wakes the waiters of the collective, and then needs the interpreter to free its tensors. If the
    interpreter has ended by then, the thread aborts the process. Destroying a group waits for its threads only if no
    other object refers to the group. The default arguments of `torch.distributed.nn.functional` refer to it if that
    module was imported later.
    """
    until_s = time.monotonic() + _PATIENCE_S
    while any(state != "S" for state in _states_of_threads()) and time.monotonic() < until_s:
        time.sleep(_POLL_S)  # releases the interpreter for these threads


def _states_of_threads() -> Iterator[str]:
    """Yield the states of gloo's threads; S for a thread that waits for work. Yield none if there is no /proc."""
    for directory in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            task = read_task(directory)
            if task.name == _GLOO:
                yield task.state
