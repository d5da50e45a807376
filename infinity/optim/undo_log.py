"""The undo log of speculative updates, in host memory.

A tile on NVMe keeps its old version in the other slot (tiers/slots.py). A tile in memory gets a second place: the
update reads the fields from one place and writes them to the other, which is as fast as an update in place. Then the
two places change roles. The parameters are changed in place, because other code uses their addresses. Their old values
are copied to the undo log.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from infinity.memory import ALIGN_BYTES, Arena, Lease, aligned
from infinity.tiers.state_layout import StateLayout


def image_bytes(layout: StateLayout, numel: int) -> int:
    """Return the bytes of the undo log for a tile of `numel` elements: its fields, and its parameters."""
    return layout.tile_bytes(numel) + aligned(numel * layout.param_dtype.itemsize)


@dataclass(eq=False)
class Image:
    """A tile's old values, or memory for them: promised first, taken when the update reaches the tile.

    Attributes:
        fields_bytes, param_bytes: size of each part; 0 for a part that the undo log does not keep.
        fields: of the two places of the tile's fields, the one that is not in use; None before `UndoLog.take`.
        param: the place of its old parameters; None before `UndoLog.take`.
    """

    fields_bytes: int
    param_bytes: int
    fields: Lease | None = None
    param: Lease | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(nbytes for nbytes in (self.fields_bytes, self.param_bytes) if nbytes)

    def old_param(self, dtype: torch.dtype, numel: int) -> torch.Tensor | None:
        """Return the tile's old parameters, 1-D; None if they are not kept."""
        return None if self.param is None else self.param.tensor(dtype, numel)


class Room:
    """The free memory of the undo log. Every successful `draw` reduces it."""

    def __init__(self, free_bytes: int, spare: Counter[int]) -> None:
        self._free_bytes = free_bytes
        self._spare = spare

    def draw(self, sizes: Iterable[int]) -> bool:
        """Draw places of these sizes. Return False, and draw nothing, if they do not fit."""
        drawn = Counter(sizes)
        fresh = sum(nbytes * count for nbytes, count in (drawn - self._spare).items())
        if fresh > self._free_bytes:
            return False
        self._free_bytes -= fresh
        self._spare -= drawn
        return True


class UndoLog:
    """Memory of the undo log: places by size, reused for images of the same size. Not thread-safe.

    `take` uses the place that was used last, whose pages already exist. So new pages are only touched for the tiles
    that are updated before the norm is known. The undo log and the tiles exchange memory, but the size of each stays.

    Args:
        capacity_bytes: size, rounded down to whole pages. The memory is not pinned, because no device copies from or to
            it in a step.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.arena = Arena(capacity_bytes // ALIGN_BYTES * ALIGN_BYTES)
        self._spare: defaultdict[int, deque[Lease]] = defaultdict(deque)  # the place that was used last is the last
        self._promised: Counter[int] = Counter()  # number of promised places, by size

    def room(self, given_back: Iterable[Image] = ()) -> Room:
        """Return the free memory for further promises, if these promised images are given back first."""
        free_bytes = self.arena.capacity_bytes - self.arena.used_bytes
        spare = Counter({nbytes: len(places) - self._promised[nbytes] for nbytes, places in self._spare.items()})
        for image in given_back:
            spare.update(image.sizes)
        return Room(free_bytes, spare)

    def promise(self, image: Image) -> None:
        """Reserve places for an image that fits into `room`; pairs with `give_back`."""
        for nbytes in image.sizes:
            spare = self._spare[nbytes]
            if len(spare) == self._promised[nbytes]:
                spare.appendleft(self.arena.lease(nbytes))
            self._promised[nbytes] += 1

    def take(self, image: Image) -> None:
        """Give the image its promised places."""
        if image.fields_bytes:
            image.fields = self._taken(image.fields_bytes)
        if image.param_bytes:
            image.param = self._taken(image.param_bytes)

    def _taken(self, nbytes: int) -> Lease:
        self._promised[nbytes] -= 1
        return self._spare[nbytes].pop()

    def give_back(self, image: Image) -> None:
        """Free the places, or the promises, of an image."""
        taken = [place for place in (image.fields, image.param) if place is not None]
        for place in taken:
            self._spare[place.nbytes].append(place)
        if not taken:
            self._promised.subtract(image.sizes)

    def close(self) -> None:
        self._spare.clear()
        self.arena.close()


class Remainder:
    """The few gradients and parameters of one update that cannot be reconstructed from the states.

    A rollback reconstructs all others from both slots of the states, see [Note: lost gradients] in
    csrc/adam/reconstruction.h. Each entry contains 1-D tensors: positions in the shard, and the values of these
    elements.
    """

    def __init__(self) -> None:
        self._grads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._params: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep_grads(self, positions: Sequence[int], start: int, grad: torch.Tensor) -> None:
        """Keep these elements of the shard's gradients `grad`; positions count from the element `start`."""
        if positions:
            places = _places(positions, start)
            self._grads.append((places, grad[places]))

    def keep_params(self, positions: Sequence[int], start: int, bits: Sequence[int], dtype: torch.dtype) -> None:
        """Keep parameters with these old 16-bit patterns; positions count from the element `start`."""
        if positions:
            values = torch.tensor(bits, dtype=torch.uint16, device="cpu").view(dtype)
            self._params.append((_places(positions, start), values))

    def put(self, grad: torch.Tensor | None, param: torch.Tensor | None) -> None:
        """Restore the kept elements in tensors of the whole shard."""
        for target, kept in ((grad, self._grads), (param, self._params)):
            if target is not None:
                for places, values in kept:
                    target[places] = values

    def forget_grads(self) -> None:
        """Drop the kept gradients, because the whole gradients are kept in another place."""
        self._grads.clear()

    def forget_params(self) -> int:
        """Drop the parameters and return their number."""
        count = sum(values.numel() for _, values in self._params)
        self._params.clear()
        return count


def _places(positions: Sequence[int], start: int) -> torch.Tensor:
    return torch.tensor(positions, dtype=torch.int64, device="cpu") + start
