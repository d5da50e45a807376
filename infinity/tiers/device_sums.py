"""Sums of gradients over a step's micro-batches, computed on the device and downloaded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infinity.memory import Budget
from infinity.memory.hand_over import HandingOver


class DeviceSums:
    """Flat buffers on the device, one for each unit while there is room, reused in every step.

    All work on them runs in the order of the compute stream. Downloads must end before the next step adds its first
    gradient. This holds if a step knows the norm of its gradients before it ends.

    Args:
        numels: trainable elements of each unit, padded.
        dtype: dtype in which gradients are summed.
        budget: device memory for them.
        device: the device that computes them.
        stays: whether a unit's gradients never leave the device, so that they need no separate sum.
        handing_over: see [Note: hand-overs] in hand_over.py.

    Attributes:
        units: the buffer of each unit that has one.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        budget: Budget,
        device: torch.device,
        stays: Callable[[int], bool],
        handing_over: HandingOver,
    ) -> None:
        self._numels = numels
        self._dtype = dtype
        self._budget = budget
        self._device = device
        self._stays = stays
        self._handing_over = handing_over
        self.units: dict[int, torch.Tensor] = {}
        self._sums: dict[tuple[int, int], torch.Tensor] = {}  # views of the buffers, by unit and part

    def make_room(self, unit: int) -> bool:
        """Allocate a buffer for the unit's gradients if it has none. Return False if it needs none, or without room."""
        if self._stays(unit):
            return False
        if unit not in self.units:
            nbytes = self._numels[unit] * self._dtype.itemsize
            if not self._budget.fits(nbytes):
                return False
            with self._handing_over:
                self._budget.take(nbytes, f"sums of gradients of unit {unit}")
                self.units[unit] = torch.empty(self._numels[unit], dtype=self._dtype, device=self._device)
        return True

    def add(self, unit: int, part: int, start: int, grad: torch.Tensor) -> None:
        """Add the 1-D gradients of a part of the unit, at `start` of its buffer; `make_room` was True."""
        if (unit, part) in self._sums:
            self._sums[unit, part].add_(grad)
        else:
            self._sums[unit, part] = self.units[unit][start : start + grad.numel()]
            self._sums[unit, part].copy_(grad)

    def holds(self, unit: int, part: int) -> bool:
        return (unit, part) in self._sums

    def held(self) -> list[tuple[int, int]]:
        """Return unit and part of every sum."""
        return list(self._sums)

    def of(self, unit: int, part: int) -> torch.Tensor:
        """Return the sum, a view of the buffer."""
        return self._sums[unit, part]

    def drop(self, unit: int, part: int) -> None:
        """Drop a sum, if it exists: the next gradient begins a new one."""
        self._sums.pop((unit, part), None)

    def give_up(self, unit: int) -> None:
        """Free the unit's buffer, because its gradients stay on the device from now on."""
        with self._handing_over:
            buffer = self.units.pop(unit, None)
            if buffer is not None:
                self._budget.give(buffer.nbytes)
        self._sums = {key: sum_ for key, sum_ in self._sums.items() if key[0] != unit}

    def clear(self) -> None:
        self._sums.clear()

    def close(self) -> None:
        self.units.clear()
        self._sums.clear()
