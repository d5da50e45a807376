"""Room in host memory for what updates that run ahead replace, until it is known whether they stay.

A tile on the drives has its old version in another slot (tiers/slots.py). One that lives in memory gets a second place:
the update reads its fields in one and writes them in the other, as fast as in place, and the places change roles. Its
parameters are changed in place, where others expect them; what they were is left here.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
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
    """What a tile was before its update, or room for that: promised first, taken when the update comes to the tile.

    Attributes:
        fields_bytes, param_bytes: of what is kept here; 0 for what is kept elsewhere.
        fields: the place that the tile's fields do not have now; None while none is taken.
        param: of its parameters, likewise.
    """

    fields_bytes: int
    param_bytes: int
    fields: Lease | None = None
    param: Lease | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of its places."""
        return tuple(nbytes for nbytes in (self.fields_bytes, self.param_bytes) if nbytes)

    def old_param(self, dtype: torch.dtype, numel: int) -> torch.Tensor | None:
        """The tile's parameters, 1-D."""
        return None if self.param is None else self.param.tensor(dtype, numel)


class Room:
    """How much more fits, as one asks for one thing after the other."""

    def __init__(self, free_bytes: int, spare: Counter[int]) -> None:
        self._free_bytes = free_bytes
        self._spare = spare

    def draw(self, sizes: Iterable[int]) -> bool:
        """Whether places of these bytes could be promised, too."""
        drawn = Counter(sizes)
        fresh = sum(nbytes * count for nbytes, count in (drawn - self._spare).items())
        if fresh > self._free_bytes:
            return False
        self._free_bytes -= fresh
        self._spare -= drawn
        return True


class BeforeImages:
    """Places by their size: each that was ever there is used for others of its size from then on.

    Which place it will be is left open until it is taken, and is then the one that was used last: its memory is there
    already, and more of that is never touched than updates get to before the norm is known. As places change roles,
    memory of the tiles comes to lie here and the other way round, at no change of the sums. Not for several threads at
    once.

    Args:
        capacity_bytes: of memory of their own, which is not pinned: no device copies from or to it in a step. Whole
            pages of it are used.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.arena = Arena(capacity_bytes // LEASE_ALIGN_BYTES * LEASE_ALIGN_BYTES)
        self._spare: defaultdict[int, deque[Lease]] = defaultdict(deque)  # the one that was used last is the last
        self._promised: Counter[int] = Counter()  # of these, by size

    def room(self, given_back: Iterable[Image] = ()) -> Room:
        """What could be promised now, or once these, which are promised, are given back."""
        free_bytes = self.arena.capacity_bytes - self.arena.used_bytes
        spare = Counter({nbytes: len(places) - self._promised[nbytes] for nbytes, places in self._spare.items()})
        for image in given_back:
            spare.update(image.sizes)
        return Room(free_bytes, spare)

    def promise(self, image: Image) -> None:
        """There will be places for it, for which there is `room`; pairs with `give_back`."""
        for nbytes in image.sizes:
            spare = self._spare[nbytes]
            if len(spare) == self._promised[nbytes]:
                spare.appendleft(self.arena.lease(nbytes))
            self._promised[nbytes] += 1

    def take(self, image: Image) -> None:
        """Give it the places that it was promised."""
        if image.fields_bytes:
            image.fields = self._taken(image.fields_bytes)
        if image.param_bytes:
            image.param = self._taken(image.param_bytes)

    def _taken(self, nbytes: int) -> Lease:
        self._promised[nbytes] -= 1
        return self._spare[nbytes].pop()

    def give_back(self, image: Image) -> None:
        """What it holds, or was promised, is not needed any more."""
        taken = [place for place in (image.fields, image.param) if place is not None]
        for place in taken:
            self._spare[place.nbytes].append(place)
        if not taken:
            self._promised.subtract(image.sizes)

    def close(self) -> None:
        """Let go of the memory."""
        self._spare.clear()
        self.arena.close()
