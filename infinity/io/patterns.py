"""The bytes that a benchmark moves, and their order. Pure.

A request has several blocks if their order allows it, so that the engine and not Python cuts them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
import numpy.typing as npt

from infinity.errors import ConfigError

OPERATIONS = ("read", "write", "mixed", "randread", "randwrite")
_WRITTEN_SHARE = {"read": 0.0, "write": 1.0, "mixed": 0.5, "randread": 0.0, "randwrite": 1.0}


@dataclass(frozen=True)
class Move:
    """One request: `operation` is read or write."""

    operation: str
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Scatter:
    """One request for many blocks at any offsets: `operation` is read or write.

    Attributes:
        offsets: byte offsets of the blocks, in the order in which they start.
        block_bytes: size of each block.
    """

    operation: str
    offsets: npt.NDArray[np.uint64]
    block_bytes: int

    @property
    def nbytes(self) -> int:
        return len(self.offsets) * self.block_bytes


def check_operation(operation: str) -> None:
    """Raise ConfigError for an unknown operation."""
    if operation not in OPERATIONS:
        raise ConfigError(f"operation {operation!r} does not exist; choose one of {', '.join(OPERATIONS)}")


def written_share(operation: str) -> float:
    """Return the fraction of an operation's bytes that it writes: 0 to 1."""
    return _WRITTEN_SHARE[operation]


def moves(operation: str, size_bytes: int, block_bytes: int, request_bytes: int) -> Sequence[Move]:
    """Return one pass over the whole blocks of a file.

    Mixed reads the first half and writes the second, one request of each in turn, as an optimizer streams its tiles.

    Args:
        request_bytes: the most bytes of a sequential request; whole blocks. A random request is one block.
    """
    end = size_bytes // block_bytes * block_bytes
    if operation == "mixed":
        middle = end // 2 // block_bytes * block_bytes
        reads = _sequential("read", 0, middle, request_bytes)
        writes = _sequential("write", middle, 2 * middle, request_bytes)
        return [move for move in chain.from_iterable(zip_longest(reads, writes)) if move is not None]
    if is_random(operation):
        blocks = _sequential(operation.removeprefix("rand"), 0, end, block_bytes)
        random.shuffle(blocks)
        return blocks
    return _sequential(operation, 0, end, request_bytes)


def scatters(operation: str, size_bytes: int, block_bytes: int, request_bytes: int) -> Sequence[Scatter]:
    """Return one pass of a random operation, like `moves`, in requests of as many blocks as fit `request_bytes`."""
    count = size_bytes // block_bytes
    offsets = np.random.default_rng().permutation(count).astype(np.uint64) * np.uint64(block_bytes)
    each = max(1, request_bytes // block_bytes)
    kind = operation.removeprefix("rand")
    return [Scatter(kind, offsets[begin : begin + each], block_bytes) for begin in range(0, count, each)]


def is_random(operation: str) -> bool:
    """Whether the operation moves blocks in random order."""
    return operation in ("randread", "randwrite")


def pass_bytes(operation: str, size_bytes: int, block_bytes: int) -> int:
    """Return the bytes that one pass moves."""
    blocks = size_bytes // block_bytes
    return (blocks // 2 * 2 if operation == "mixed" else blocks) * block_bytes


def _sequential(operation: str, begin: int, end: int, nbytes: int) -> list[Move]:
    return [Move(operation, at, min(nbytes, end - at)) for at in range(begin, end, nbytes)]
