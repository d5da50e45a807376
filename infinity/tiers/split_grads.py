"""Gradients of units of which some are updated on the device and others on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.tiers.copies import Move
from infinity.tiers.device_grads import DeviceGrads
from infinity.tiers.grads import GradStore


class SplitGrads:
    """Both stores as one; the verbs are those of `GradStore`.

    Args:
        is_there: whether a unit is updated on the device, which may change while it has no gradients.

    Attributes:
        host, device: where a unit's gradients are, one or the other.
    """

    def __init__(self, host: GradStore, device: DeviceGrads, is_there: Callable[[int], bool]) -> None:
        self.host = host
        self.device = device
        self.is_there = is_there

    def _of(self, unit: int) -> GradStore | DeviceGrads:
        return self.device if self.is_there(unit) else self.host

    # Adding #

    def open(self, unit: int) -> torch.Tensor | None:
        """The unit's gradients, to be added to; None while there is no room."""
        return self._of(unit).open(unit)

    def tensor(self, unit: int) -> torch.Tensor:
        """What the unit's gradients lie in."""
        return self._of(unit).tensor(unit)

    def has_come(self, unit: int) -> bool:
        """What is known of the unit's gradients is known without waiting."""
        return self._of(unit).has_come(unit)

    def rest(self, unit: int) -> None:
        """Nothing is added to the unit's gradients for a while."""
        self._of(unit).rest(unit)

    def holds(self, unit: int) -> bool:
        """The unit has gradients that no update has."""
        return self._of(unit).holds(unit)

    def drop(self, unit: int) -> None:
        """The unit's gradients are nothing any more."""
        self._of(unit).drop(unit)

    # Room #

    def lacks_capacity(self, unit: int) -> bool:
        """What is open takes the memory that the unit's gradients would need."""
        return self._of(unit).lacks_capacity(unit)

    def make_room(self, unit: int) -> bool:
        """Free room in which the unit's gradients could be; False if that is not the way."""
        return self._of(unit).make_room(unit)

    # Updates #

    def can_hand_over(self, unit: int) -> bool:
        """There is room for the unit's gradients, if they are elsewhere."""
        return self._of(unit).can_hand_over(unit)

    def hand_over(self, unit: int) -> tuple[torch.Tensor, tuple[Move, ...]]:
        """The gradients are the unit's update's, once these moves are over; pairs with `used`."""
        return self._of(unit).hand_over(unit)

    def used(self, unit: int) -> None:
        """The update has used the gradients."""
        self._of(unit).used(unit)

    def close(self) -> None:
        """Nothing may come any more from the device: its memory and the host's go."""
        self.host.close()
        self.device.close()
