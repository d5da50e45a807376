"""Detection of ownership transfers that an interrupt cut short.

[Note: critical sections]
An exception can come between any two lines (KeyboardInterrupt). While memory, a transfer or an update passes from one
owner to the next (a *hand-over*), neither owner has recorded it. Such code runs inside of `with critical:`. A hand-over
that an exception cuts short stays open; later or enclosing hand-overs do not close it. Memory or an update may then be
lost, or it may be unknown that a copy is newer than the home's. So the engine must not continue.
"""

from __future__ import annotations


class CriticalSection:
    """The context of every hand-over of one engine, see [Note: critical sections]. One thread at a time is in it."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open = 0

    @property
    def interrupted(self) -> bool:
        """Whether a hand-over was cut short; only valid between hand-overs."""
        return self._open > 0

    def mark_interrupted(self) -> None:
        """Record that an operation other than a hand-over was cut short."""
        self._open += 1

    def note_rollback(self) -> None:
        """Record that the running hand-over was rolled back, so that its exception leaves a consistent state."""
        self._open -= 1

    def __enter__(self) -> None:
        self._open += 1

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self._open -= 1
