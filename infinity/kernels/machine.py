"""The instruction set of the kernels, and the number of threads; the kernels' results do not depend on them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import torch

from infinity.kernels._native import _adam

_MOST_LEFT = 2  # CPUs for threads that launch work on a device: the script's and autograd's
_LEFT_SHARE = 4

_chosen = False  # whether `set_threads` was called


def set_threads(count: int) -> None:
    """Use `count` threads from now on."""
    if count < 1:
        raise ValueError(f"thread count is {count}; it must be at least 1")
    global _chosen
    _chosen = True
    _adam.set_thread_count(count)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads in this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share_threads(processes: int, *, launches: bool, near: Collection[int] = ()) -> None:
    """Use this process's share of the machine's CPUs from now on, unless `set_threads` was called.

    Args:
        processes: number of training processes on this machine; a process that is bound to its own CPUs uses these.
        launches: leave some CPUs for the threads that launch work on a device.
        near: CPUs that the threads are bound to; empty to use all CPUs of the process.
    """
    _adam.set_cpus(sorted(near))
    if not _chosen:
        allowed = len(os.sched_getaffinity(0))
        count = _share(os.cpu_count() or 1, allowed, processes, launches=launches)
        _adam.set_thread_count(min(count, len(near)) if near else count)


def bind_this_thread() -> None:
    """Bind the calling thread to the CPUs of the kernels' threads."""
    if cpus := _adam.cpus():
        with suppress(OSError):  # it may run on any CPU then, with the same results
            os.sched_setaffinity(0, cpus)


def _share(machine: int, allowed: int, processes: int, *, launches: bool) -> int:
    """Return the number of threads, of `machine` CPUs of which the process may use `allowed`."""
    is_bound = allowed <= machine // processes
    own = allowed if is_bound else allowed // processes
    left = min(_MOST_LEFT, own // _LEFT_SHARE) if launches else 0
    return max(1, own - left)


def thread_count() -> int:
    """Return the number of threads; initially the number of CPUs that this process may use."""
    return _adam.thread_count()


def instruction_sets() -> list[str]:
    """Return the instruction sets that were compiled and run on this processor, the best last."""
    return list(_adam.instruction_sets())


def active_instruction_set() -> str:
    """Return the instruction set in use: the best one, or the value of the environment variable INFINITY_ISA."""
    return _adam.active_instruction_set()


def use_instruction_set(name: str) -> None:
    """Use another of `instruction_sets()`."""
    if name not in instruction_sets():
        raise ValueError(f"instruction set {name!r} does not run here; choose one of {', '.join(instruction_sets())}")
    _adam.use_instruction_set(name)
