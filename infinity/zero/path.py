"""The path of a rank through the model, and whether all ranks take the same path.

[Note: one way for all ranks]
A collective has no name. If ranks start collectives for different units, they mix the values of these units, hang, or
abort because the sizes differ. So each exchange of a unit (a gather or a reduction) is checked before it begins:

- Ranks that repeat their last pass send no message: all of them expect the same exchange, and start it.
- A rank whose next exchange is not the expected one does not start it. It announces the exchange in the store of
  `torch.distributed` (the meeting point) and waits for the other ranks.
- Ranks that leave the path at the same exchange announce it, too. If all announce the same exchange, they start it, and
  then compare each further exchange of this pass.
- A rank that has started the expected exchange waits for the missing rank. While it waits, it sees the announcement and
  answers with its own exchange. The two differ, so all ranks raise DivergedError.

In the first pass of a kind, the ranks compare every exchange.

Calls of the model without the engine, as in `generate`, are no passes: they may run any part of it, any number of
times. In them, ranks expect after each exchange the one that followed it the last time.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Protocol

import torch

from infinity.errors import DivergedError
from infinity.zero.meeting import OtherCallError

_FREE = "calls without the engine"  # the kind of exchanges outside of passes
_RECENT = 4096  # at most this many exchanges can one rank be ahead of another


class Peers(Protocol):
    """The ranks that must take the same path."""

    def together(self, what: str) -> None:
        """Block until all ranks call this with the same `what`."""

    def same(self, number: int) -> bool:
        """Whether all ranks call this with the same number."""

    def waiting(self) -> list[str]:
        """Return the calls of `together` in which other ranks wait."""


class Path:
    """The exchanges of this rank so far, in order, and their checksum."""

    def __init__(self) -> None:
        self._number = 0
        self._peers: Peers | None = None
        self._known: dict[str, list[str]] = {}  # exchanges of the last pass of each kind
        self._kind: str | None = None  # of the running pass
        self._expected: list[str] | None = None  # exchanges of this pass; None if ranks compare each exchange
        self._passed: list[str] = []  # exchanges of this pass so far
        self._last_free = ""  # last exchange outside of passes
        self._follows: dict[str, str] = {}  # outside of passes: what followed each exchange the last time
        self._count = 0  # exchanges of all passes
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._diverged = ""

    def check(self, peers: Peers) -> None:
        """Check from now on that all ranks take the same path, see [Note: one way for all ranks]."""
        self._peers = peers

    def begin(self, kind: str) -> None:
        """Begin a pass over the model. Passes of the same kind are expected to have the same exchanges."""
        self._kind, self._expected, self._passed = kind, self._known.get(kind), []

    def begin_without_engine(self) -> None:
        """Begin a call of the model without the engine. Within a pass, it is a part of the pass."""
        if self._kind is None:
            self.begin(_FREE)

    def end_without_engine(self) -> None:
        """End a call that `begin_without_engine` has begun."""
        if self._kind == _FREE:
            self._kind = None

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
            DivergedError: another rank is about to begin a different exchange.
        """
        self.mark(what)
        self._number = zlib.crc32(what.encode(), self._number)

    def mark(self, what: str) -> None:
        """Check as `add` does, but leave the exchange out of the checksum."""
        if self._peers is None or self._kind is None:
            return
        expected = self._predicted()
        if expected is None:
            if not self._peers.same(zlib.crc32(what.encode())):
                self._meet(self._count, what)
        elif expected != what:
            self._meet(self._count, what)
            self._expected = None
        if self._kind == _FREE:
            self._follows[self._last_free] = what
            self._last_free = what
        self._passed.append(what)
        self._recent.append(what)
        self._count += 1

    def _predicted(self) -> str | None:
        """Return the exchange that all ranks expect next; "" for none, None if the ranks compare it."""
        if self._kind == _FREE:
            return self._follows.get(self._last_free)
        if self._expected is None:
            return None
        position = len(self._passed)
        return self._expected[position] if position < len(self._expected) else ""

    def look(self) -> None:
        """Check, while this rank waits for an exchange, that no other rank announces a different one.

        Raises:
            DivergedError: a rank does.
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
        """Return the checksum, to compare all ranks' paths."""
        return checksum_flags(self._number)


def checksum_flags(number: int) -> torch.Tensor:
    """Return a number of 32 bits and its complement, to compare it over the ranks by `Ranks.any_of`.

    If the numbers of all ranks are equal, the bytes equal their maximum over the ranks. Otherwise they differ from it
    on every rank.
    """
    found = number.to_bytes(4, "big")
    return torch.tensor([*found, *(255 - byte for byte in found)], dtype=torch.uint8, device="cpu")


_HERE = "th exchange of units: "
