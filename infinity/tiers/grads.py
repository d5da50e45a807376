"""Gradients of a unit in host memory, from the first one that backward produces until the update has used them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from infinity.memory import Arena, Lease
from infinity.tiers.params import Arrival


class GradStore:
    """Flat gradient buffers, one a unit.

    A unit has a buffer of its own where the capacity holds all of them, or where it is in `standing`. The others
    lease one while they need it; they come and go together, so that the room for them never stays fragmented.

    Args:
        numels: trainable elements of each unit, padded.
        dtype: dtype in which gradients are held (float32 where they are accumulated over micro-batches).
        capacity_bytes: most that may be leased at once.
        standing: units whose gradients stay open while those of others come and go.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        arena: Arena,
        capacity_bytes: int,
        standing: Collection[int],
    ) -> None:
        self._sizes = [numel * dtype.itemsize for numel in numels]
        self._dtype = dtype
        self._arena = arena
        self._left_bytes = capacity_bytes
        own = range(len(numels)) if sum(self._sizes) <= capacity_bytes else self._with_largest(standing, capacity_bytes)
        self._own = {unit: arena.lease(self._sizes[unit]) for unit in own if self._sizes[unit]}
        self._left_bytes -= sum(self._sizes[unit] for unit in own)
        self._open: dict[int, GradLease] = {}
        self._lent: set[int] = set()

    def _with_largest(self, standing: Collection[int], capacity_bytes: int) -> Collection[int]:
        """These units, and the largest other one, which would seldom find so much in one piece.

        Only if there is room for two more beside it: one is computed while another is updated.
        """
        by_size = sorted(set(range(len(self._sizes))) - set(standing), key=self._sizes.__getitem__, reverse=True)
        spare = capacity_bytes - sum(self._sizes[unit] for unit in (*standing, *by_size[:3]))
        return [*standing, by_size[0]] if spare >= 0 else standing

    def get(self, unit: int) -> torch.Tensor | None:
        """The unit's gradient buffer, if it is open."""
        lease = self._open.get(unit)
        return None if lease is None else lease.tensor

    def try_open(self, unit: int) -> torch.Tensor | None:
        """A buffer with undefined content; None while there is no room, or an update still has the unit's last."""
        if unit in self._lent:
            return None
        memory = self._own.get(unit)
        if memory is None:
            if self._sizes[unit] > self._left_bytes:
                return None
            memory = self._arena.try_lease(self._sizes[unit])
            if memory is None:
                return None
        # In this order, and what is open can be dropped, whatever line an interrupt leaves.
        self._open[unit] = GradLease(self, unit, memory, memory.tensor(self._dtype))
        self._lent.add(unit)
        if unit not in self._own:
            self._left_bytes -= self._sizes[unit]
        return self._open[unit].tensor

    def lacks_capacity(self, unit: int) -> bool:
        """What is open takes the memory that the unit's gradients would need."""
        return unit not in self._own and self._sizes[unit] > self._left_bytes

    def holds(self, unit: int) -> bool:
        """The unit has gradients, in its buffer or elsewhere: `try_open` gives them back."""
        return unit in self._open

    def rest(self, unit: int) -> None:
        """Nothing is added to the unit's gradients for a while."""

    def make_room(self, unit: int) -> bool:
        """Free room in which the unit's gradients could be; False if that is not the way."""
        return False

    def can_hand_over(self, unit: int) -> bool:
        """There is room for the unit's gradients, if they are elsewhere."""
        return True

    def hand_over(self, unit: int) -> GradLease:
        """Pass the buffer to the unit's update, which releases it."""
        return self._open.pop(unit)

    def drop(self, unit: int) -> None:
        """Give the unit's buffer back unused."""
        self.hand_over(unit).release()

    def _give_back(self, unit: int, memory: Lease) -> None:
        self._lent.discard(unit)
        if unit not in self._own:
            self._left_bytes += self._sizes[unit]
            memory.release()


@dataclass(frozen=True)
class GradLease:
    """One unit's gradients of one step.

    Attributes:
        arrival: what `tensor` still waits for.
    """

    store: GradStore
    unit: int
    memory: Lease
    tensor: torch.Tensor
    arrival: Arrival | None = None

    def release(self) -> None:
        """The gradients were used; the buffer may hold others."""
        self.store._give_back(self.unit, self.memory)
