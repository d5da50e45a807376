"""Room in host memory for what updates that run ahead replace, until it is known whether they stay.

A tile on the drives has its old version in another slot (tiers/slots.py). One that lives in memory gets a second place:
the update reads its fields in one and writes them in the other, as fast as in place, and the places change roles. Its
parameters are changed in place, where others expect them; what they were is left here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from infinity.memory import LEASE_ALIGN_BYTES, Arena, Lease
from infinity.optim.formats import StateLayout


def image_bytes(layout: StateLayout, numel: int) -> int:
    """Bytes for what an update replaces of a tile of `numel` elements: its fields, and its parameters."""
    param_bytes = -(-numel * layout.param_dtype.itemsize // LEASE_ALIGN_BYTES) * LEASE_ALIGN_BYTES
    return layout.tile_bytes(numel) + param_bytes


@dataclass(eq=False)
class Image:
    """What a tile was before its update, or room for that; None of what is kept elsewhere.

    Attributes:
        fields: the place that the tile's fields do not have now.
        param: of its parameters.
    """

    fields: Lease | None
    param: Lease | None

    def old_param(self, dtype: torch.dtype, numel: int) -> torch.Tensor | None:
        """The tile's parameters, 1-D."""
        return None if self.param is None else self.param.tensor(dtype, numel)


class Room:
    """How much more fits, as one asks for one thing after the other."""

    def __init__(self, free_bytes: int, spare: Counter[int]) -> None:
        self._free_bytes = free_bytes
        self._spare = spare

    def draw(self, sizes: Iterable[int]) -> bool:
        """Whether places of these bytes could be taken, too."""
        drawn = Counter(sizes)
        fresh = sum(nbytes * count for nbytes, count in (drawn - self._spare).items())
        if fresh > self._free_bytes:
            return False
        self._free_bytes -= fresh
        self._spare -= drawn
        return True


class BeforeImages:
    """Places by their size: each that was ever taken is used for others of its size from then on.

    As places change roles, memory of the tiles comes to lie here and the other way round, at no change of the sums.

    Args:
        capacity_bytes: of memory of their own, which no device copies from or to; whole pages of it are used.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.arena = Arena(capacity_bytes // LEASE_ALIGN_BYTES * LEASE_ALIGN_BYTES)
        self._spare: defaultdict[int, list[Lease]] = defaultdict(list)

    def room(self) -> Room:
        """What could be taken now."""
        free_bytes = self.arena.capacity_bytes - self.arena.used_bytes
        return Room(free_bytes, Counter({nbytes: len(places) for nbytes, places in self._spare.items()}))

    def take(self, nbytes: int) -> Lease:
        """A place of so many bytes, in whole pages, for which there is `room`."""
        spare = self._spare[nbytes]
        return spare.pop() if spare else self.arena.lease(nbytes)

    def give_back(self, image: Image) -> None:
        """What it holds is not needed any more."""
        for place in (image.fields, image.param):
            if place is not None:
                self._spare[place.nbytes].append(place)

    def close(self) -> None:
        """Let go of the memory."""
        self._spare.clear()
        self.arena.close()
