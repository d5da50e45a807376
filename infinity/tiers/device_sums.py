"""Sums of gradients over a step's micro-batches, computed on the device and downloaded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from infinity.memory import Budget
from infinity.memory.hand_over import HandingOver


@dataclass(slots=True)
class _UnitSums:
    """One unit's buffer, and the sums in it, by part."""

    buffer: torch.Tensor
    parts: dict[int, torch.Tensor] = field(default_factory=dict)


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
        units: units that have a buffer.
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
        self.units: dict[int, _UnitSums] = {}

    def has_room(self, unit: int) -> bool:
        """Whether there is a buffer for the unit's gradients; allocate one if the budget has room."""
        if self._stays(unit):
            return False
        if unit not in self.units:
            nbytes = self._numels[unit] * self._dtype.itemsize
            if not self._budget.fits(nbytes):
                return False
            with self._handing_over:
                self._budget.take(nbytes, f"sums of gradients of unit {unit}")
                self.units[unit] = _UnitSums(torch.empty(self._numels[unit], dtype=self._dtype, device=self._device))
        return True

    def add(self, unit: int, part: int, start: int, grad: torch.Tensor) -> None:
        """Add the 1-D gradients of a part of the unit, at `start` of its buffer; `has_room` was True."""
        sums = self.units[unit]
        if part in sums.parts:
            sums.parts[part].add_(grad)
        else:
            sums.parts[part] = sums.buffer[start : start + grad.numel()]
            sums.parts[part].copy_(grad)

    def holds(self, unit: int, part: int) -> bool:
        sums = self.units.get(unit)
        return sums is not None and part in sums.parts

    def held(self) -> list[tuple[int, int]]:
        """Return unit and part of every sum."""
        return [(unit, part) for unit, sums in self.units.items() for part in sums.parts]

    def of(self, unit: int, part: int) -> torch.Tensor:
        """Return the sum, a view of the buffer."""
        return self.units[unit].parts[part]

    def drop(self, unit: int, part: int) -> None:
        """Drop a sum, if it exists: the next gradient begins a new one."""
        sums = self.units.get(unit)
        if sums is not None:
            sums.parts.pop(part, None)

    def give_up(self, unit: int) -> None:
        """Free the unit's buffer, because its gradients stay on the device from now on."""
        with self._handing_over:
            sums = self.units.pop(unit, None)
            if sums is not None:
                self._budget.give(sums.buffer.nbytes)

    def clear(self) -> None:
        """Drop all sums."""
        for sums in self.units.values():
            sums.parts.clear()

    def close(self) -> None:
        """Free the device's memory."""
        self.units.clear()
