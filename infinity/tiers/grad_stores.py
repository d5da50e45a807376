"""Gradients of units, some of which may be updated on the device and the others on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infinity.tiers.device_grads import DeviceGrads
from infinity.tiers.grads import GradStore


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
