"""Gradients of units of which some may be updated on the device and the others on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infinity.tiers.device_grads import DeviceGrads
from infinity.tiers.grads import GradStore


@dataclass(frozen=True)
class GradStores:
    """Where units' gradients are held until an update has used them.

    Attributes:
        host: of units that are updated there.
        device: of the others; None where there can be none.
        is_there: whether a unit is one of the others, which may change while it has no gradients.
    """

    host: GradStore
    device: DeviceGrads | None
    is_there: Callable[[int], bool]

    def of(self, unit: int) -> GradStore | DeviceGrads:
        return self.host if self.device is None or not self.is_there(unit) else self.device

    def close(self) -> None:
        """Nothing may come any more from the device: its memory and the host's go."""
        self.host.close()
        if self.device is not None:
            self.device.close()
