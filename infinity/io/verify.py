"""Writes distinguishable data, reads it back, and compares."""

from __future__ import annotations

import ctypes
import errno
import secrets
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from infinity.errors import StorageError
from infinity.io.bench import BenchSession
from infinity.io.interface import IoFuture, Priority, Span
from infinity.io.patterns import Move

_PAGE_BYTES = 4096
_WORDS = _PAGE_BYTES // 8

_Pages = npt.NDArray[np.uint64]


def verify(session: BenchSession, operation: str) -> int:
    """Do the writes of one pass, and read them back. Return the number of compared bytes.

    Every page has a stamp: its offset, and a number that no earlier pass wrote. So a page that was lost, torn, or
    written to another place is found. Blocks smaller than a page share one stamp.

    Raises:
        StorageError: EBADMSG, with the offset of the first byte that differs.
    """
    writes = [move for move in session.moves(operation) if move.operation == "write"]
    slots = _Slots(session.buffers, writes[0].nbytes)
    stamp = secrets.randbits(63)
    under_way: deque[IoFuture] = deque()
    for number, move in enumerate(writes):
        if len(under_way) == slots.count:
            under_way.popleft().result()
        slots.stamp(number, move, stamp)
        span = slots.source(number, move.nbytes)
        under_way.append(session.engine.write(session.file, move.offset, span, Priority.DEMAND))
    for future in under_way:
        future.result()
    for number, move, future in _read_back(session, writes, slots):
        future.result()
        slots.stamp(number, move, stamp)
        _compare(session, slots, number, move)
    return sum(move.nbytes for move in writes)


class _Slots:
    """Two halves of the buffers: one to write from, one to read back into."""

    def __init__(self, buffers: Span, slot_bytes: int) -> None:
        self._buffers = buffers
        self._slot_bytes = slot_bytes
        self.count = max(1, buffers.nbytes // (2 * slot_bytes))

    def source(self, number: int, nbytes: int) -> Span:
        return Span(self._buffers.address + number % self.count * self._slot_bytes, nbytes, self._buffers.owner)

    def target(self, number: int, nbytes: int) -> Span:
        half = self.count * self._slot_bytes
        return Span(self.source(number, nbytes).address + half, nbytes, self._buffers.owner)

    def stamp(self, number: int, move: Move, stamp: int) -> None:
        pages = _pages(self.source(number, move.nbytes))
        pages[:, 0] = np.arange(move.offset, move.offset + move.nbytes, _PAGE_BYTES, dtype=np.uint64)
        pages[:, 1] = stamp


def _pages(span: Span) -> _Pages:
    memory = memoryview((ctypes.c_char * span.nbytes).from_address(span.address)).cast("B")
    return np.frombuffer(memory, dtype=np.uint64).reshape(-1, _WORDS)


def _read_back(session: BenchSession, writes: Sequence[Move], slots: _Slots) -> Iterator[tuple[int, Move, IoFuture]]:
    """Yield every write with a read of the same range, a few of which are in flight."""
    under_way: deque[tuple[int, Move, IoFuture]] = deque()
    for number, move in enumerate(writes):
        if len(under_way) == slots.count:
            yield under_way.popleft()
        span = slots.target(number, move.nbytes)
        read = session.engine.read(session.file, move.offset, span, Priority.DEMAND)
        under_way.append((number, move, read))
    yield from under_way


def _compare(session: BenchSession, slots: _Slots, number: int, move: Move) -> None:
    wrong = np.flatnonzero(
        _pages(slots.source(number, move.nbytes)).ravel() != _pages(slots.target(number, move.nbytes)).ravel()
    )
    if wrong.size:
        raise StorageError(
            errno.EBADMSG,
            f"what was read back is not what was written ({wrong.size * 8} of {move.nbytes} bytes from offset "
            f"{move.offset} on); do not trust this drive, its driver or its filesystem",
            str(session.file.path),
            move.offset + int(wrong[0]) * 8,
        )
