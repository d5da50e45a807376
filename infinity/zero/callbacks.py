"""Callbacks from a part to its owner."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def weakly(method: Callable[..., T]) -> Callable[..., T]:
    """The bound method, without keeping its object alive.

    An owner that gives its parts a method of its own would be in a reference cycle, and its memory would be there until
    the garbage collector runs. A part does not outlive the use of its owner.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> T:
        bound = reference()
        assert bound is not None, "a part is used after its owner is gone"
        return bound(*args)

    return call
