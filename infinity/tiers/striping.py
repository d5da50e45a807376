"""Distributes extents over several drives, so that all of them are busy for the same time."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.config import format_size
from infinity.errors import StorageError

_GRAIN_BYTES = 1 << 20  # smaller pieces cost a drive more for requests than they add in bandwidth


@dataclass(frozen=True)
class Stripe:
    """A directory's share of the work.

    Attributes:
        path: the directory.
        weight: its bandwidth, in the same unit for all stripes.
        capacity_bytes: the most that may be reserved in it.
    """

    path: Path
    weight: float
    capacity_bytes: int


@dataclass(frozen=True)
class Piece:
    """A range of one swap file.

    Attributes:
        file: index of the directory that holds it.
        offset, nbytes: range within its swap file.
    """

    file: int
    offset: int
    nbytes: int


class Striping:
    """Reserves space on several directories in proportion to their weights, within their capacities.

    Every extent is split in that proportion, so that one large read uses all drives. An extent smaller than a grain
    goes to the least filled directory.
    """

    def __init__(self, stripes: Sequence[Stripe]) -> None:
        self._stripes = tuple(stripes)
        self.sizes = [0] * len(self._stripes)

    def reserve(self, nbytes: int) -> tuple[Piece, ...]:
        """Reserve `nbytes`, with at most one piece in each directory.

        Raises:
            StorageError: ENOSPC, with the used and the total space of every directory; nothing is reserved.
        """
        old, sizes = self.sizes, self.sizes.copy()
        for begin in range(0, nbytes, _GRAIN_BYTES):
            grain = min(_GRAIN_BYTES, nbytes - begin)
            fits = [file for file, stripe in enumerate(self._stripes) if sizes[file] + grain <= stripe.capacity_bytes]
            if not fits:
                raise self._full(nbytes)
            behind = min(fits, key=lambda file: sizes[file] / self._stripes[file].weight)
            sizes[behind] += grain
        self.sizes = sizes
        return tuple(Piece(file, old[file], size - old[file]) for file, size in enumerate(sizes) if size > old[file])

    def _full(self, nbytes: int) -> StorageError:
        in_use = ", ".join(
            f"{stripe.path} ({format_size(size)} of {format_size(stripe.capacity_bytes)} taken)"
            for stripe, size in zip(self._stripes, self.sizes, strict=True)
        )
        return StorageError(
            errno.ENOSPC,
            f"no room for {format_size(nbytes)} more of the model's states: {in_use}; free space on one of them, raise "
            "tiering.nvme[].capacity, or add a path",
            str(self._stripes[0].path),
            self.sizes[0],
        )
