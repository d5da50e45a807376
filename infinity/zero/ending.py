"""How a process that has exchanged something with other ranks ends.

torch's threads take part in a collective, and outlive it. What one of them still has to do once the interpreter ends
is waited for for half an hour, or ends the process with SIGABRT after all its work was done.
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

# Processes that have given up a collective whose group waits for longer, which keeps them from ending until it is over.
_abandoned: list[int] = []


def abandon() -> None:
    """A collective was given up: nothing waits for it when this process ends."""
    _abandoned.append(os.getpid())


def is_abandoned() -> bool:
    """Whether a collective was given up, so that this process ends without waiting for its threads."""
    return os.getpid() in _abandoned


def leave_at_exit() -> None:
    """Destroy the process groups when this process ends."""
    atexit.register(_leave, os.getpid())


def _leave(owner_pid: int) -> None:
    if os.getpid() == owner_pid and dist.is_initialized():  # a forked child shares the connections, and no thread
        dist.destroy_process_group()


def _end() -> None:
    """The last of what is done at exit."""
    if is_abandoned():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    _let_threads_finish()


atexit.register(_end)  # what is registered later runs before it


def _let_threads_finish() -> None:
    """Wait for threads that have not let go of their last collective.

    They wake whoever waits for it first, and then need the interpreter to free its tensors: a thread that does not get
    it since the interpreter has ended by then aborts the process. Destroying a group waits for them only if nobody
    else holds it, and the default arguments of `torch.distributed.nn.functional` do if that was imported later.
    """
    until_s = time.monotonic() + _PATIENCE_S
    while any(state != "S" for state in _states_of_threads()) and time.monotonic() < until_s:
        time.sleep(_POLL_S)  # without the interpreter, which is theirs for that long


def _states_of_threads() -> Iterator[str]:
    """Of gloo's threads; S for one that waits for something to do. None where there is no /proc."""
    for directory in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            task = read_task(directory)
            if task.name == _GLOO:
                yield task.state
