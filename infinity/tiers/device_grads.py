"""Gradients of units that are updated where they are computed: they never leave the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.memory import Budget
from infinity.memory.hand_over import HandingOver
from infinity.tiers.copies import Move, Transfer
from infinity.tiers.norms import Norms


@dataclass(slots=True)
class _UnitGrads:
    """One unit's gradients, and the last of their norms on its way."""

    buffer: torch.Tensor
    measured: Transfer | None = None


class DeviceGrads:
    """Flat gradient buffers on the device, one a unit, from the first gradient until the update has used them.

    The verbs are those of `GradStore`. All that touches a buffer runs in the order of the compute stream, so that none
    of them waits, and memory that is given back may be used again at once.

    Args:
        numels: trainable elements of each unit, padded.
        dtype: dtype in which gradients are held.
        budget: device memory for them.
        device: where they are computed.
        norms: of parameters' gradients, measured there; closed by whoever has made it.
        handing_over: see [Note: hand-overs] in hand_over.py.

    Attributes:
        budget: what gradients may take of the device's memory.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        budget: Budget,
        device: torch.device,
        norms: Norms,
        handing_over: HandingOver,
    ) -> None:
        self.norms = norms
        self._numels = numels
        self._dtype = dtype
        self.budget = budget
        self._device = device
        self._handing_over = handing_over
        self._units: dict[int, _UnitGrads] = {}  # those that have gradients

    # Adding #

    def open(self, unit: int) -> torch.Tensor | None:
        """The unit's gradients, to be added to; without a meaning if it has none yet. None while there is no room."""
        each = self._units.get(unit)
        if each is None:
            if self.lacks_capacity(unit):
                return None
            with self._handing_over:
                self.budget.take(self._nbytes(unit), f"gradients of unit {unit}")
                each = _UnitGrads(torch.empty(self._numels[unit], dtype=self._dtype, device=self._device))
                self._units[unit] = each
        return each.buffer

    def measure(self, unit: int, index: int, values: torch.Tensor) -> Transfer:
        """Have the norm of these gradients of the unit made, and come to `index` of `norms`."""
        copy = self._units[unit].measured = self.norms.bring(index, values)
        return copy

    def tensor(self, unit: int) -> torch.Tensor:
        return self._units[unit].buffer

    def has_come(self, unit: int) -> bool:
        """What was measured of the unit's gradients is in host memory."""
        each = self._units.get(unit)
        return each is None or each.measured is None or each.measured.done()  # the last one is behind all others

    def rest(self, unit: int) -> None:
        """They stay where they are."""

    def holds(self, unit: int) -> bool:
        """The unit has gradients that no update has."""
        return unit in self._units

    def drop(self, unit: int) -> None:
        """The unit's gradients are nothing any more."""
        with self._handing_over:
            del self._units[unit]
            self.budget.give(self._nbytes(unit))

    # Room #

    def lacks_capacity(self, unit: int) -> bool:
        """What is open takes the memory that the unit's gradients would need."""
        return not self.budget.fits(self._nbytes(unit))

    def _nbytes(self, unit: int) -> int:
        return self._numels[unit] * self._dtype.itemsize

    # Updates #

    def can_hand_over(self, unit: int) -> bool:
        return True

    def hand_over(self, unit: int) -> tuple[torch.Tensor, tuple[Move, ...]]:
        """The gradients are the unit's update's, at once; pairs with `used`."""
        return self._units[unit].buffer, ()

    def used(self, unit: int) -> None:
        """The update has used the gradients."""
        self.drop(unit)

    def close(self) -> None:
        """The device's memory goes."""
        self._units.clear()
