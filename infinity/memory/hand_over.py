"""Whether an interrupt has left something in nobody's books.

[Note: hand-overs]
An exception may come between any two lines (Ctrl-C). While memory, a transfer or an update passes from one owner to the
next, it is in neither's books: that happens inside `with handing_over:`. A hand-over that is left half way stays open,
whatever hand-overs it is part of or follow it before anybody looks. Then memory is lost, or an update, or its values
are not known to be newer than the home's, and nothing may go on from there.
"""

from __future__ import annotations


class HandingOver:
    """A context around every hand-over of one engine, see [Note: hand-overs]. One thread at a time is in it."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open = 0

    @property
    def torn(self) -> bool:
        """Asked between hand-overs: one was left half way."""
        return self._open > 0

    def tear(self) -> None:
        """Something was left half way that is no hand-over."""
        self._open += 1

    def __enter__(self) -> None:
        self._open += 1

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self._open -= 1
