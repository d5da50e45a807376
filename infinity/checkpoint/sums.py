"""CRC-32 of every block of a range of bytes: whoever reads a part of it can verify that part alone."""

from __future__ import annotations

import base64
import sys
from array import array

try:
    from zlib_ng.zlib_ng import crc32  # the same sums as zlib's, six times as fast
except ImportError:
    from zlib import crc32

__all__ = ["BLOCK_BYTES", "BlockSums", "crc32", "decode", "encode"]

BLOCK_BYTES = 512 << 10


class BlockSums:
    """Takes bytes in their order, and has the sums of the blocks that they make."""

    def __init__(self) -> None:
        self.sums = array("I")
        self._room = 0  # bytes that the last block still takes

    def add(self, data: memoryview) -> None:
        """Append bytes."""
        done = 0
        while done < len(data):
            if not self._room:
                self.sums.append(0)
                self._room = BLOCK_BYTES
            taken = min(self._room, len(data) - done)
            self.sums[-1] = crc32(data[done : done + taken], self.sums[-1])
            self._room -= taken
            done += taken


def encode(sums: array[int]) -> str:
    """The sums as text: base64 of little-endian 32-bit numbers."""
    return base64.b64encode(_little_endian(sums).tobytes()).decode()


def decode(text: str) -> array[int]:
    """The inverse of `encode`; a ValueError for any other text."""
    sums = array("I")
    sums.frombytes(base64.b64decode(text, validate=True))
    return _little_endian(sums)


def _little_endian(sums: array[int]) -> array[int]:
    if sys.byteorder == "big":
        sums = array("I", sums)
        sums.byteswap()
    return sums
