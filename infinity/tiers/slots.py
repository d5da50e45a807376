"""Extents with two slots: the next version of what a step has finished is written beside it, never over it.

[Note: slots]
A slotted extent is cut into *ranges*, each of which is always written whole: a tile of optimizer states is one, and so
is the part of a unit's parameters that a tile's update changes. Of each range one slot holds the newest version. What
lies between two commits is an *epoch*: the first write of a range in an epoch goes to the other slot, later ones to the
same again. So the bits that say which slot is the newest, as they are when an epoch is closed, describe states that
stay on the drive until that epoch is committed and the next one is closed.

Until then only one slot of a range may be written, so a write in a new epoch waits for the commit of the one before
(the *gate*). It waits here, where nobody can forget it. Slots are below the coherence protocol: to that, both are one
NVME copy, which nobody reads while it is written.

What was written in this epoch can also be undone: the other slot is the newest again. So updates may run ahead of what
decides on them, whether or not anything is committed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field

from infinity.errors import InfinityError
from infinity.io import IoFuture, Span
from infinity.tiers.striping import Piece

_MOST_OPEN = 64  # writes that are remembered before those that are over are looked for


@dataclass(frozen=True)
class Extent:
    """Space for `nbytes` that lies in one piece on each of some drives.

    Attributes:
        pieces: in the order of the content.
        nbytes: length, aligned.
    """

    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass(frozen=True)
class Part:
    """What of an extent holds a range of memory.

    Attributes:
        offset: where it begins within the extent.
    """

    extent: Extent
    span: Span
    offset: int


@dataclass(eq=False)
class SlotExtent:
    """Space for two versions of the same content, see [Note: slots].

    Attributes:
        slots: the space of each.
        bounds: first byte of each range, then the end of the last.
        newest: which slot has the newest version, by range.
        epochs: in which that was written, by range.
    """

    slots: tuple[Extent, Extent]
    bounds: tuple[int, ...]
    newest: bytearray = field(init=False)
    epochs: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.newest = bytearray(len(self.bounds) - 1)
        self.epochs = [0] * (len(self.bounds) - 1)

    @property
    def nbytes(self) -> int:
        return self.slots[0].nbytes

    def ranges(self, offset: int, nbytes: int) -> range:
        """Indices of the ranges that [offset, offset + nbytes) touches."""
        stop = offset + nbytes
        pairs = itertools.pairwise(self.bounds)
        touched = [i for i, (begin, end) in enumerate(pairs) if begin < stop and offset < end]
        return range(touched[0], touched[-1] + 1) if touched else range(0)

    def parts(self, which: Sequence[int], span: Span, offset: int) -> list[Part]:
        """Where `span` is, from `offset` within the content, if `which` slot counts for each range."""
        found = []
        for slot, group in itertools.groupby(self.ranges(offset, span.nbytes), key=which.__getitem__):
            indices = list(group)
            begin = max(offset, self.bounds[indices[0]])
            end = min(offset + span.nbytes, self.bounds[indices[-1] + 1])
            part = Span(span.address + begin - offset, end - begin, span.owner)
            found.append(Part(self.slots[slot], part, begin))
        return found


class Slots:
    """All slotted extents of one rank: which slots are the newest, and what may be written.

    The compute thread closes epochs; it and the optimizer's worker write.
    """

    def __init__(self) -> None:
        self._extents: list[SlotExtent] = []
        self._epoch = 1
        self._gate: Future[None] | None = None  # of the epoch that was closed last
        self._open: deque[IoFuture] = deque()  # writes of this epoch
        self._failed: Exception | None = None  # of one that is over
        self._found: bytes | None = None

    def add(self, extent: SlotExtent) -> None:
        """Keep track of one more extent; always in the same order."""
        self._extents.append(extent)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return 2 * sum(extent.nbytes for extent in self._extents)

    def layout(self) -> str:
        """Digest of what lies where."""
        places = [
            [extent.bounds, [[astuple(piece) for piece in slot.pieces] for slot in extent.slots]]
            for extent in self._extents
        ]
        return hashlib.sha256(json.dumps(places).encode()).hexdigest()

    # Writes #

    def to_write(self, extent: SlotExtent, span: Span, offset: int) -> list[Part]:
        """Where whole ranges are to be written now; from now on that is their newest version.

        Raises:
            InfinityError: the epoch before could not be committed; nothing may be written any more.
            RuntimeError: a range would be written in part.
        """
        ranges = extent.ranges(offset, span.nbytes)
        if extent.bounds[ranges.start] != offset or extent.bounds[ranges.stop] != offset + span.nbytes:
            raise RuntimeError(f"{span.nbytes} bytes at {offset} are no whole ranges of {extent.bounds}")
        self.wait_committed()
        for index in ranges:
            if extent.epochs[index] != self._epoch:
                extent.epochs[index] = self._epoch
                extent.newest[index] ^= 1
        return extent.parts(extent.newest, span, offset)

    def keeps(self, extent: SlotExtent) -> bool:
        """What is written now leaves what is there in the other slot."""
        return self._epoch not in extent.epochs

    def undo(self, extent: SlotExtent) -> bool:
        """What was there before this epoch is the newest again; False if nothing was written in it."""
        written = [index for index, epoch in enumerate(extent.epochs) if epoch == self._epoch]
        for index in written:
            extent.epochs[index] = 0
            extent.newest[index] ^= 1
        return bool(written)

    def before(self, extent: SlotExtent, span: Span) -> list[Part]:
        """Where that is which what was written in this epoch has replaced, for all of an extent."""
        pairs = zip(extent.newest, extent.epochs, strict=True)
        return extent.parts([slot ^ (epoch == self._epoch) for slot, epoch in pairs], span, 0)

    def next_epoch(self) -> None:
        """What is written from now on leaves what is there in the other slot, where nothing is committed."""
        self._epoch += 1

    def wait_committed(self) -> None:
        """Wait until the epoch that was closed last is committed, on all ranks."""
        if self._gate is not None:
            self._gate.result()

    def opened(self, write: IoFuture) -> None:
        """A write of this epoch is under way."""
        if len(self._open) >= _MOST_OPEN:
            while self._open and self._open[0].done():
                try:
                    self._open.popleft().result()
                except OSError as error:
                    self._failed = self._failed or error
        self._open.append(write)

    def give_up(self, error: Exception) -> None:
        """Nothing is committed any more: whoever waits for it gets the error."""
        if self._gate is not None and not self._gate.done():
            self._gate.set_exception(error)

    # Epochs #

    def close_epoch(self, gate: Future[None]) -> tuple[bytes, list[IoFuture]]:
        """What is written from now on belongs to the next epoch, and waits for the gate of this one.

        Returns:
            What `adopt` takes to go on from this one, and its writes that may still be under way.

        Raises:
            Exception: a write of this epoch has failed.
        """
        if self._failed is not None:
            raise self._failed
        writes, self._open = list(self._open), deque()
        self._gate = gate
        self._epoch += 1
        self._found = None
        return b"".join(bytes(extent.newest) for extent in self._extents), writes

    # What an earlier process has left #

    def adopt(self, newest: bytes) -> None:
        """The slots hold what another process has committed, and are not written before the next commit.

        Raises:
            InfinityError: it is not of as many ranges.
        """
        count = sum(len(extent.newest) for extent in self._extents)
        if len(newest) != count or not set(newest) <= {0, 1}:
            raise InfinityError(f"it has {len(newest)} ranges, and this run has {count}")
        self._found = newest
        for extent, bits in self._each(newest):
            extent.newest[:] = bits
            extent.epochs = [0] * len(extent.epochs)

    @property
    def has_found(self) -> bool:
        """What was adopted is still there."""
        return self._found is not None

    def forget_found(self) -> None:
        """What was adopted has been taken over."""
        self._found = None

    def found(self) -> Iterator[tuple[SlotExtent, bytes]]:
        """Every extent, and which of its slots have what was adopted."""
        if self._found is None:
            raise RuntimeError("nothing was adopted, or it is no more")
        return self._each(self._found)

    def _each(self, newest: bytes) -> Iterator[tuple[SlotExtent, bytes]]:
        start = 0
        for extent in self._extents:
            stop = start + len(extent.newest)
            yield extent, newest[start:stop]
            start = stop

    def give_back(self, extent: SlotExtent, bits: bytes) -> None:
        """What was adopted is the extent's newest version again."""
        extent.newest[:] = bits
        extent.epochs = [0] * len(extent.epochs)
