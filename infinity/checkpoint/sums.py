"""CRC-32 of every block of a range of bytes, so that a part of the range can be verified alone."""

from __future__ import annotations

import base64
import sys
from array import array

try:
    from zlib_ng.zlib_ng import crc32  # the same checksums as zlib's, six times as fast
except ImportError:
    from zlib import crc32

__all__ = ["BLOCK_BYTES", "BlockSums", "crc32", "decode", "encode"]

BLOCK_BYTES = 512 << 10


class BlockSums:
    """Computes the checksum of every block of a stream of bytes; the last block may be incomplete."""

    def __init__(self) -> None:
        self.sums = array("I")
        self._left_bytes = 0  # missing bytes of the last block

    def add(self, data: memoryview) -> None:
        """Append bytes."""
        done = 0
        while done < len(data):
            if not self._left_bytes:
                self.sums.append(0)
                self._left_bytes = BLOCK_BYTES
            taken = min(self._left_bytes, len(data) - done)
            self.sums[-1] = crc32(data[done : done + taken], self.sums[-1])
            self._left_bytes -= taken
            done += taken


def encode(sums: array[int]) -> str:
    """Return the checksums as text: base64 of little-endian 32-bit numbers."""
    return base64.b64encode(_little_endian(sums).tobytes()).decode()


def decode(text: str) -> array[int]:
    """Return the checksums from the text of `encode`. Raise ValueError for any other text."""
    sums = array("I")
    sums.frombytes(base64.b64decode(text, validate=True))
    return _little_endian(sums)


def _little_endian(sums: array[int]) -> array[int]:
    if sys.byteorder == "big":
        sums = array("I", sums)
        sums.byteswap()
    return sums
