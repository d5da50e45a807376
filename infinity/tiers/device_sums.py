"""Sums of gradients over a step's micro-batches, made on the device and sent down once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from infinity.memory import Budget
from infinity.memory.hand_over import HandingOver


@dataclass(slots=True)
class _UnitSums:
    """One unit's buffer, and the sums that there are in it, by part."""

    buffer: torch.Tensor
    parts: dict[int, torch.Tensor] = field(default_factory=dict)


class DeviceSums:
    """Flat buffers on the device, one a unit as far as there is room, each used again in every step.

    All that touches them runs in the order of the compute stream. What has left for the host must be there before the
    next step's first gradient is added, as it is where a step knows the norm of its gradients before it ends.

    Args:
        numels: trainable elements of each unit, padded.
        dtype: dtype in which gradients are summed.
        budget: device memory for them.
        device: where they are computed.
        stays: whether a unit's gradients never leave the device, so that they need no sum beside them.
        handing_over: see [Note: hand-overs] in hand_over.py.

    Attributes:
        units: those that have a buffer.
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
        """There is a buffer for the unit's gradients."""
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
        """Add the gradients of a part of the unit, 1-D, which lie at `start` in its buffer; there is room."""
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
        """Unit and part of every sum that there is."""
        return [(unit, part) for unit, sums in self.units.items() for part in sums.parts]

    def of(self, unit: int, part: int) -> torch.Tensor:
        """The sum, in the buffer's memory."""
        return self.units[unit].parts[part]

    def drop(self, unit: int, part: int) -> None:
        """Forget a sum, if there is one: what comes next begins a new one."""
        sums = self.units.get(unit)
        if sums is not None:
            sums.parts.pop(part, None)

    def give_up(self, unit: int) -> None:
        """The unit's gradients stay on the device from now on; it has no sum. Gives its buffer back."""
        with self._handing_over:
            sums = self.units.pop(unit, None)
            if sums is not None:
                self._budget.give(sums.buffer.nbytes)

    def clear(self) -> None:
        """Forget all of them."""
        for sums in self.units.values():
            sums.parts.clear()

    def close(self) -> None:
        """Give the device's memory back."""
        self.units.clear()
