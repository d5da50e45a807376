"""The way of a rank through the model, and whether all ranks go the same way.

[Note: one way for all ranks]
Collectives do not say whose they are: ranks that come to different ones mix values of different units, hang, or end in
an abort where sizes differ. So each exchange of a unit is checked before it begins. Ranks that do what they did in the
pass before need no word about it: all of them know what comes, and each begins it. A rank that is about to do something
else begins nothing: it waits for the others where ranks meet, in the store of `torch.distributed`. Others that leave
the way in the same place come there, too, and if they want the same, it is their new way, which they agree upon
exchange by exchange. Others that have kept to the way wait in vain for an exchange with this rank, see it where ranks
meet, and say what they have begun instead. A pass of a kind that was never seen is agreed upon as well.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Protocol

import torch

from infinity.errors import DivergedError
from infinity.zero.meeting import OtherCallError

_RECENT = 4096  # exchanges that a rank can be ahead of another


class Peers(Protocol):
    """The ranks that go one way."""

    def together(self, what: str) -> None:
        """Wait until all ranks call this with the same `what`."""

    def same(self, number: int) -> bool:
        """All ranks have this number."""

    def waiting(self) -> list[str]:
        """What other ranks have called `together` with, and wait."""


class Path:
    """Which units this rank has exchanged so far, in their order, as a number."""

    def __init__(self) -> None:
        self._number = 0
        self._peers: Peers | None = None
        self._known: dict[str, list[str]] = {}  # by kind of pass, what the last one was
        self._kind: str | None = None  # of the pass that is running
        self._expected: list[str] | None = None  # None where ranks agree upon each exchange
        self._passed: list[str] = []  # in this pass
        self._count = 0  # over all passes
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._diverged = ""

    def check(self, peers: Peers) -> None:
        """From now on, see that all ranks go the same way, see [Note: one way for all ranks]."""
        self._peers = peers

    def begin(self, kind: str) -> None:
        """A pass over the model begins; passes of a kind are probably alike."""
        self._kind, self._expected, self._passed = kind, self._known.get(kind), []

    def end(self) -> None:
        """It is over, on all ranks."""
        if self._kind is not None:
            self._known[self._kind], self._kind = self._passed, None

    def give_up(self) -> None:
        """It has failed."""
        self._kind = None

    def add(self, what: str) -> None:
        """An exchange is about to begin.

        Raises:
            DivergedError: another rank is about to begin another one.
        """
        self.mark(what)
        self._number = zlib.crc32(what.encode(), self._number)

    def mark(self, what: str) -> None:
        """As `add`, of a point behind which the ranks exchange other things."""
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
        """While this rank waits for an exchange: see that the others come to it.

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
        """Bytes whose greatest over the ranks (`Ranks.any_of`) are these again if all have come the same way, and on no
        rank else."""
        number = self._number.to_bytes(4, "big")
        return torch.tensor([*number, *(255 - byte for byte in number)], dtype=torch.uint8, device="cpu")


_HERE = "th exchange of units: "
