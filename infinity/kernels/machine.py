"""Which instruction set and how many threads the kernels use; results do not depend on either."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

from infinity.kernels._native import _adam

_MOST_LEFT = 2  # CPUs for the threads that keep a device busy: the script's, and autograd's
_LEFT_SHARE = 4

_chosen = False  # somebody has called `set_threads`


def set_threads(count: int) -> None:
    """Use `count` threads from now on."""
    if count < 1:
        raise ValueError(f"thread count is {count}; it must be at least 1")
    global _chosen
    _chosen = True
    _adam.set_thread_count(count)


def share_threads(processes: int, *, launches: bool, near: Collection[int] = ()) -> None:
    """Use this process's share of the machine's CPUs from now on, unless `set_threads` was called.

    Args:
        processes: how many train on this machine. Those that are bound to CPUs of their own have theirs.
        launches: some CPUs are left for the threads that launch what a device computes.
        near: CPUs that the threads are bound to; none to run on all that the process has.
    """
    _adam.set_cpus(sorted(near))
    if not _chosen:
        allowed = len(os.sched_getaffinity(0))
        count = _share(os.cpu_count() or 1, allowed, processes, launches=launches)
        _adam.set_thread_count(min(count, len(near)) if near else count)


def bind_this_thread() -> None:
    """Have the calling thread run where the kernels' threads do."""
    if cpus := _adam.cpus():
        with suppress(OSError):  # it runs anywhere then, with the same results
            os.sched_setaffinity(0, cpus)


def _share(machine: int, allowed: int, processes: int, *, launches: bool) -> int:
    """Of a machine's CPUs, of which a process is allowed to use so many."""
    is_bound = allowed <= machine // processes
    own = allowed if is_bound else allowed // processes
    left = min(_MOST_LEFT, own // _LEFT_SHARE) if launches else 0
    return max(1, own - left)


def thread_count() -> int:
    """Threads that the kernels use; at first, as many as this process may use CPUs."""
    return _adam.thread_count()


def instruction_sets() -> list[str]:
    """Instruction sets that were compiled and run on this processor, best last."""
    return list(_adam.instruction_sets())


def active_instruction_set() -> str:
    """The one in use: the best, or what the environment variable INFINITY_ISA names."""
    return _adam.active_instruction_set()


def use_instruction_set(name: str) -> None:
    """Use another of `instruction_sets()`."""
    if name not in instruction_sets():
        raise ValueError(f"instruction set {name!r} does not run here; choose one of {', '.join(instruction_sets())}")
    _adam.use_instruction_set(name)
