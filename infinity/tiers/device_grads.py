"""Gradients on the device: of units that are updated there, and sums over a step's micro-batches of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.memory import Budget
from infinity.memory.critical_section import CriticalSection
from infinity.tiers.grads import UnitGrads
from infinity.tiers.norms import ArrivingStats, Measures, Norms


@dataclass(eq=False)
class _DeviceBuffers:
    """Flat buffers on the device, one for each unit while there is room.

    Args:
        units: the gradients of all units.
        dtype: dtype of the buffers.
        budget: device memory for them.
        device: the device that computes the gradients.
        critical: see [Note: critical sections] in critical_section.py.
    """

    units: Sequence[UnitGrads]
    dtype: torch.dtype
    budget: Budget
    device: torch.device
    critical: CriticalSection

    def lacks_capacity(self, each: UnitGrads) -> bool:
        """Whether the budget has too little room for the unit's gradients."""
        return not self.budget.fits(self._nbytes(each))

    def _nbytes(self, each: UnitGrads) -> int:
        return each.numel * self.dtype.itemsize

    def _allocated(self, each: UnitGrads, what: str) -> torch.Tensor:
        """Return a new buffer for the unit, which has room; call this in the hand-over that keeps it."""
        self.budget.take(self._nbytes(each), f"{what} of unit {each.unit}")
        return torch.empty(each.numel, dtype=self.dtype, device=self.device)


@dataclass(eq=False)
class DeviceGrads(_DeviceBuffers):
    """Flat gradient buffers of units that are updated on the device, from the first gradient to the end of the update.

    The methods are those of `GradStore`, without a hand-over: an update on the device reads the buffer and drops it.
    Gradients are measured in the last pass of a step. All work on a buffer runs in the order of the compute stream, so
    no method waits, and freed memory may be reused at once.

    Args:
        norms: of parameters' gradients, measured on the device; closed by its creator.
    """

    norms: Norms

    # Adding #

    def add(self, each: UnitGrads, part: int, place: slice, grad: torch.Tensor, stats: Measures, *, last: bool) -> bool:
        buffer = self.open(each)
        if buffer is None:
            return False
        values = buffer[place]
        (values.add_ if part in stats else values.copy_)(grad.view(-1))
        stats[part] = self.measure(each, part, values) if last else None
        return True

    def open(self, each: UnitGrads) -> torch.Tensor | None:
        """Return the unit's gradients for accumulation, undefined if it has none yet; None while there is no room."""
        if each.device_tensor is None:
            if self.lacks_capacity(each):
                return None
            with self.critical:
                each.device_tensor = self._allocated(each, "gradients")
        return each.device_tensor

    def measure(self, each: UnitGrads, part: int, values: torch.Tensor) -> ArrivingStats:
        """Measure these gradients of a part of the unit, and start copying the norm."""
        coming = self.norms.bring(each.number(part), values)
        each.measured = coming.copy
        return coming

    def tensor(self, each: UnitGrads) -> torch.Tensor:
        assert each.device_tensor is not None
        return each.device_tensor

    def has_come(self, each: UnitGrads) -> bool:
        """Whether the norms of the unit's gradients are in host memory."""
        return each.measured is None or each.measured.done()  # the last copy runs behind all others

    def pause(self, each: UnitGrads) -> None:
        """Do nothing: the gradients stay on the device."""

    def holds(self, each: UnitGrads) -> bool:
        """Whether the unit has gradients that no update uses; an update on the device drops them before it returns."""
        return each.device_tensor is not None

    def drop(self, each: UnitGrads) -> None:
        with self.critical:
            each.device_tensor = each.measured = None
            self.budget.give(self._nbytes(each))

    def close(self) -> None:
        for each in self.units:
            each.device_tensor = each.measured = None


@dataclass(eq=False)
class DeviceSums(_DeviceBuffers):
    """Sums of gradients over a step's micro-batches, which leave the device once.

    The buffers are reused in every step. All work on them runs in the order of the compute stream. Downloads must end
    before the next step adds its first gradient. This holds if a step knows the norm of its gradients before it ends.
    """

    def make_room(self, each: UnitGrads) -> bool:
        """Allocate a buffer for the unit's gradients if it has none. Return False without room."""
        if each.sum is None:
            if self.lacks_capacity(each):
                return False
            with self.critical:
                each.sum = self._allocated(each, "sums of gradients")
        return True

    def add(self, each: UnitGrads, part: int, start: int, grad: torch.Tensor) -> None:
        """Add the 1-D gradients of a part of the unit, at `start` of its buffer; `make_room` was True."""
        if part in each.sums:
            each.sums[part].add_(grad)
        else:
            assert each.sum is not None
            each.sums[part] = each.sum[start : start + grad.numel()]
            each.sums[part].copy_(grad)

    def give_up(self, each: UnitGrads) -> None:
        """Free the unit's buffer, because its gradients stay on the device from now on."""
        with self.critical:
            buffer, each.sum = each.sum, None
            if buffer is not None:
                self.budget.give(buffer.nbytes)
        each.sums.clear()

    def close(self) -> None:
        for each in self.units:
            each.sum = None
            each.sums.clear()
