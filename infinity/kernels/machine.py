"""Which instruction set and how many threads the kernels use; results do not depend on either."""

from __future__ import annotations

from infinity.kernels._native import _adam


def set_threads(count: int) -> None:
    """Use `count` threads from now on."""
    if count < 1:
        raise ValueError(f"thread count is {count}; it must be at least 1")
    _adam.set_thread_count(count)


def thread_count() -> int:
    """Threads that the kernels use; at first, the CPUs that this process may run on."""
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
