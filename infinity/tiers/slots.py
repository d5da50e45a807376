"""Double-buffered extents: a step writes its next version into the other slot, never over the last finished step.

[Note: slots]
A double-buffered extent is cut into *ranges*, each of which is always written whole: a tile of optimizer states, or the
part of a unit's parameters that a tile's update changes. One slot of each range holds the newest version. The time
between two commits is an *epoch*. The first write of a range in an epoch goes to the other slot; later writes in the
epoch go to that same slot. When an epoch is closed, one bit for each range names its newest slot. The states in these
slots stay on the drive until that epoch is committed and the next one is closed.

Until an epoch is committed, the slots of the commit before it must stay intact. So a write in a new epoch waits for the
commit of the previous epoch (the *gate*). `to_write` waits, so that no caller can forget it. The coherence protocol
does not know slots: it sees both as one NVME copy, which is not read while it is written.

Writes of the current epoch can be rolled back: the other slot becomes the newest again. So updates may be speculative,
with or without commits.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field

from infinity.errors import InfinityError
from infinity.io import IoFuture, Span
from infinity.tiers.striping import Piece

_MOST_OPEN = 64  # open writes before completed ones are removed from the list


@dataclass(frozen=True)
class Extent:
    """Space for `nbytes`, with at most one piece on each drive.

    Attributes:
        pieces: in the order of the content.
        nbytes: length, aligned.
    """

    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass(frozen=True)
class Part:
    """The part of an extent that holds a range of memory.

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
        newest: the slot with the newest version, by range.
        epochs: the epoch in which that slot was written, by range.
        found: the slot that an earlier process has committed, by range; empty if there is none, see `Slots.adopt`.
    """

    slots: tuple[Extent, Extent]
    bounds: tuple[int, ...]
    newest: bytearray = field(init=False)
    epochs: list[int] = field(init=False)
    found: bytes = field(init=False, default=b"")

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

    def take_found(self) -> None:
        """Make the version that an earlier process has committed the newest."""
        self.newest[:] = self.found
        self.epochs = [0] * len(self.epochs)

    def parts(self, which: Sequence[int], span: Span, offset: int) -> list[Part]:
        """Return the places of `span`, from `offset` within the content, with `which` slot to use for each range."""
        found = []
        for slot, group in itertools.groupby(self.ranges(offset, span.nbytes), key=which.__getitem__):
            indices = list(group)
            begin = max(offset, self.bounds[indices[0]])
            end = min(offset + span.nbytes, self.bounds[indices[-1] + 1])
            part = Span(span.address + begin - offset, end - begin, span.owner)
            found.append(Part(self.slots[slot], part, begin))
        return found


class Slots:
    """All double-buffered extents of one rank: their newest slots, and the slots that may be written.

    The compute thread closes epochs; the compute thread and the optimizer's worker write.

    Attributes:
        extents: every process must append them in the same order.
        has_found: whether `found` of the extents is still valid; the reader resets it.
    """

    def __init__(self) -> None:
        self.extents: list[SlotExtent] = []
        self._epoch = 1
        self._gate: Future[None] | None = None  # of the epoch that was closed last
        self._open: deque[IoFuture] = deque()  # writes of this epoch
        self._failed: Exception | None = None  # error of a write of this epoch that has ended
        self.has_found = False

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return 2 * sum(extent.nbytes for extent in self.extents)

    def layout(self) -> str:
        """Return a digest of the places of all extents."""
        places = [
            [extent.bounds, [[astuple(piece) for piece in slot.pieces] for slot in extent.slots]]
            for extent in self.extents
        ]
        return hashlib.sha256(json.dumps(places).encode()).hexdigest()

    # Writes #

    def to_write(self, extent: SlotExtent, span: Span, offset: int) -> list[Part]:
        """Return the places to write whole ranges to now, and make these the newest version. Blocks for the gate.

        Raises:
            InfinityError: the previous epoch could not be committed; nothing can be written any more.
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
        """Whether a write would leave the current content in the other slot: this epoch has not written the extent."""
        return self._epoch not in extent.epochs

    def roll_back(self, extent: SlotExtent) -> bool:
        """Roll back the writes of this epoch. Return False if there are none."""
        written = [index for index, epoch in enumerate(extent.epochs) if epoch == self._epoch]
        for index in written:
            extent.epochs[index] = 0
            extent.newest[index] ^= 1
        return bool(written)

    def before(self, extent: SlotExtent, span: Span) -> list[Part]:
        """Return the places of the content before this epoch, for a whole extent."""
        pairs = zip(extent.newest, extent.epochs, strict=True)
        return extent.parts([slot ^ (epoch == self._epoch) for slot, epoch in pairs], span, 0)

    def next_epoch(self) -> None:
        """Begin an epoch without a commit: later writes leave the current content in the other slot."""
        self._epoch += 1

    def wait_committed(self) -> None:
        """Block until the epoch that was closed last is committed on all ranks."""
        if self._gate is not None:
            self._gate.result()

    def opened(self, write: IoFuture) -> None:
        """Record a write of this epoch that was started."""
        if len(self._open) >= _MOST_OPEN:
            while self._open and self._open[0].done():
                try:
                    self._open.popleft().result()
                except OSError as error:
                    self._failed = self._failed or error
        self._open.append(write)

    def give_up(self, error: Exception) -> None:
        """Fail the gate with this error, because no epoch will be committed any more."""
        if self._gate is not None and not self._gate.done():
            self._gate.set_exception(error)

    # Epochs #

    def close_epoch(self, gate: Future[None]) -> tuple[bytes, list[IoFuture]]:
        """Begin the next epoch, whose writes wait for `gate`.

        Returns:
            The bits that `adopt` takes to continue from the closed epoch, and its writes that may still be in flight.

        Raises:
            Exception: a write of the closed epoch has failed.
        """
        if self._failed is not None:
            raise self._failed
        writes, self._open = list(self._open), deque()
        self._gate = gate
        self._epoch += 1
        self.has_found = False
        return b"".join(bytes(extent.newest) for extent in self.extents), writes

    # The state that an earlier process left #

    def adopt(self, newest: bytes) -> None:
        """Take over the slots that an earlier process committed. They are not overwritten before the next commit.

        Raises InfinityError if the number of ranges differs.
        """
        count = sum(len(extent.newest) for extent in self.extents)
        if len(newest) != count or not set(newest) <= {0, 1}:
            raise InfinityError(f"it has {len(newest)} ranges, and this run has {count}")
        start = 0
        for extent in self.extents:
            stop = start + len(extent.newest)
            extent.found = newest[start:stop]
            extent.take_found()
            start = stop
        self.has_found = True
