"""Gradients of units that are updated on the device: they never leave it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infinity.memory import Budget
from infinity.memory.hand_over import HandingOver
from infinity.tiers.copies import Move, Transfer
from infinity.tiers.grads import GradStore
from infinity.tiers.norms import Norms


@dataclass(slots=True)
class _UnitGrads:
    """One unit's gradients, and the copy of their last norm."""

    buffer: torch.Tensor
    measured: Transfer | None = None


class DeviceGrads:
    """Flat gradient buffers on the device, one for each unit, from the first gradient to the end of the update.

    The methods are the ones of `GradStore`. All work on a buffer runs in the order of the compute stream, so no method
    waits, and freed memory may be reused at once.

    Args:
        numels: trainable elements of each unit, padded.
        dtype: dtype in which gradients are held.
        budget: device memory for them.
        device: the device that computes them.
        norms: of parameters' gradients, measured on the device; closed by its creator.
        handing_over: see [Note: hand-overs] in hand_over.py.

    Attributes:
        budget: the argument `budget`.
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
        self._units: dict[int, _UnitGrads] = {}  # units that have gradients

    # Adding #

    def open(self, unit: int) -> torch.Tensor | None:
        """Return the unit's gradients for accumulation, undefined if it has none yet; None while there is no room."""
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
        """Measure these gradients of the unit, and start copying the norm to `index` of `norms`."""
        copy = self._units[unit].measured = self.norms.bring(index, values)
        return copy

    def tensor(self, unit: int) -> torch.Tensor:
        return self._units[unit].buffer

    def has_come(self, unit: int) -> bool:
        """Whether the norms of the unit's gradients are in host memory."""
        each = self._units.get(unit)
        return each is None or each.measured is None or each.measured.done()  # the last copy runs behind all others

    def rest(self, unit: int) -> None:
        """Do nothing: the gradients stay on the device."""

    def holds(self, unit: int) -> bool:
        """Whether the unit has gradients that no update uses; an update on the device drops them before it returns."""
        return unit in self._units

    def drop(self, unit: int) -> None:
        with self._handing_over:
            del self._units[unit]
            self.budget.give(self._nbytes(unit))

    # Room #

    def lacks_capacity(self, unit: int) -> bool:
        """Whether the budget has too little room for the unit's gradients."""
        return not self.budget.fits(self._nbytes(unit))

    def _nbytes(self, unit: int) -> int:
        return self._numels[unit] * self._dtype.itemsize

    # Updates #

    def can_hand_over(self, unit: int) -> bool:
        return True

    def hand_over(self, unit: int) -> tuple[torch.Tensor, tuple[Move, ...]]:
        """Give the gradients to the unit's update, which need not wait; pairs with `used`."""
        return self._units[unit].buffer, ()

    def used(self, unit: int) -> None:
        """Drop the gradients after the update has used them."""
        self.drop(unit)

    def close(self) -> None:
        self._units.clear()


@dataclass(frozen=True)
class GradStores:
    """The stores that hold units' gradients until an update has used them.

    Attributes:
        host: for units that are updated on the host.
        device: for the others; None if no unit can be updated on the device.
        is_there: whether a unit is updated on the device; may change while the unit has no gradients.
    """

    host: GradStore
    device: DeviceGrads | None
    is_there: Callable[[int], bool]

    def of(self, unit: int) -> GradStore | DeviceGrads:
        return self.host if self.device is None or not self.is_there(unit) else self.device

    def close(self) -> None:
        """Wait for gradients on their way from the device, and free all memory."""
        self.host.close()
        if self.device is not None:
            self.device.close()
