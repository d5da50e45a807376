"""The path of a rank through the model, and whether all ranks take the same path.

[Note: one way for all ranks]
Collectives carry no names: ranks that start different ones mix values of different units, hang, or abort if sizes
differ. So each exchange of a unit is checked before it begins. Ranks that repeat their last pass need no message for
this: all of them know the next exchange and start it. A rank that is about to do something else starts nothing: it
waits for the others at the meeting point, in the store of `torch.distributed`. Ranks that leave the path at the same
exchange come to it, too. If they want the same, this is their new path, and they agree on each further exchange. Ranks
that have kept to the path wait in vain for an exchange with this rank, see its call at the meeting point, and answer
with the exchange that they have begun. A pass of a new kind is agreed on exchange by exchange, too.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Protocol

import torch

from infinity.errors import DivergedError
from infinity.zero.meeting import OtherCallError

_RECENT = 4096  # by how many exchanges a rank can be ahead of another


class Peers(Protocol):
    """The ranks that take one path."""

    def together(self, what: str) -> None:
        """Block until all ranks call this with the same `what`."""

    def same(self, number: int) -> bool:
        """Whether all ranks have this number."""

    def waiting(self) -> list[str]:
        """Return the calls of `together` in which other ranks wait."""


class Path:
    """The units that this rank has exchanged so far, in order, as a number."""

    def __init__(self) -> None:
        self._number = 0
        self._peers: Peers | None = None
        self._known: dict[str, list[str]] = {}  # the last pass of each kind
        self._kind: str | None = None  # of the running pass
        self._expected: list[str] | None = None  # None if ranks agree on each exchange
        self._passed: list[str] = []  # in this pass
        self._count = 0  # over all passes
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._diverged = ""

    def check(self, peers: Peers) -> None:
        """Check from now on that all ranks take the same path, see [Note: one way for all ranks]."""
        self._peers = peers

    def begin(self, kind: str) -> None:
        """Begin a pass over the model; passes of a kind are probably alike."""
        self._kind, self._expected, self._passed = kind, self._known.get(kind), []

    def end(self) -> None:
        """End the pass, on all ranks."""
        if self._kind is not None:
            self._known[self._kind], self._kind = self._passed, None

    def give_up(self) -> None:
        """Abandon the pass, which has failed."""
        self._kind = None

    def add(self, what: str) -> None:
        """Check an exchange that is about to begin.

        Raises:
            DivergedError: another rank is about to begin another one.
        """
        self.mark(what)
        self._number = zlib.crc32(what.encode(), self._number)

    def mark(self, what: str) -> None:
        """As `add`, for a point after which the ranks exchange other things."""
        if self._peers is None or self._kind is None:
            return
        position = len(self._passed)
        if self._expected is None:
            if not self._peers.same(zlib.crc32(what.encode())):
                self._meet(self._count, what)
        elif self._expected[position : position + 1] != [what]:
            self._meet(self._count, what)
            self._expected = None
        self._passed.append(what)
        self._recent.append(what)
        self._count += 1

    def look(self) -> None:
        """Check, while this rank waits for an exchange, that the others come to it.

        Raises:
            DivergedError: one does not.
        """
        if self._diverged:
            raise DivergedError(self._diverged)
        if self._peers is None:
            return
        for call in self._peers.waiting():
            place, _, others = call.partition(_HERE)
            behind = self._count - int(place) if others and place.isdigit() else 0
            if 0 < behind <= len(self._recent):
                self._meet(int(place), self._recent[-behind])

    def _meet(self, place: int, what: str) -> None:
        assert self._peers is not None
        try:
            self._peers.together(f"{place}{_HERE}{what}")
        except OtherCallError as error:
            ways = "; ".join(f"rank {rank}: {call.partition(_HERE)[2] or call}" for rank, call in error.calls.items())
            self._diverged = (
                f"the ranks have run different modules in this step ({ways}): at stage 3 have all ranks take one path "
                "through the model, and draw what it depends on (layers that are left out at random) from one seed, or "
                "set zero_optimization.stage to 2, where ranks may use different modules"
            )
            raise DivergedError(self._diverged) from None

    def flags(self) -> torch.Tensor:
        """Return bytes that equal their maximum over the ranks (`Ranks.any_of`) if all paths are equal, and on no rank
        otherwise."""
        number = self._number.to_bytes(4, "big")
        return torch.tensor([*number, *(255 - byte for byte in number)], dtype=torch.uint8, device="cpu")


_HERE = "th exchange of units: "
