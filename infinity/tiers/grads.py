"""Gradients of a unit in host memory, from the first one that backward produces until the update has used them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.memory import Arena, Lease


class GradStore:
    """Flat gradient buffers, one a unit, leased from the arena while they are needed.

    Args:
        numels: trainable elements of each unit, padded.
        dtype: dtype in which gradients are held (float32 where they are accumulated over micro-batches).
        capacity_bytes: most that may be leased at once.
    """

    def __init__(self, numels: Sequence[int], dtype: torch.dtype, arena: Arena, capacity_bytes: int) -> None:
        self._numels = tuple(numels)
        self._dtype = dtype
        self._arena = arena
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._open: dict[int, GradLease] = {}

    def get(self, unit: int) -> torch.Tensor | None:
        """The unit's gradient buffer, if it is open."""
        lease = self._open.get(unit)
        return None if lease is None else lease.tensor

    def try_open(self, unit: int) -> torch.Tensor | None:
        """Lease a buffer with undefined content; None while there is no room."""
        nbytes = self._numels[unit] * self._dtype.itemsize
        if self._used_bytes + nbytes > self._capacity_bytes:
            return None
        lease = self._arena.try_lease(nbytes)
        if lease is None:
            return None
        self._used_bytes += nbytes
        self._open[unit] = GradLease(self, lease, lease.tensor(self._dtype, self._numels[unit]))
        return self._open[unit].tensor

    def hand_over(self, unit: int) -> GradLease:
        """Pass the buffer to the unit's update, which releases it; the unit's next gradients get another."""
        return self._open.pop(unit)

    def drop(self, unit: int) -> None:
        """Give the unit's buffer back unused."""
        self.hand_over(unit).release()

    def _give_back(self, lease: Lease) -> None:
        self._used_bytes -= lease.nbytes
        lease.release()


@dataclass(frozen=True)
class GradLease:
    """One unit's gradients of one step."""

    store: GradStore
    lease: Lease
    tensor: torch.Tensor

    def release(self) -> None:
        self.store._give_back(self.lease)
