"""Updates where some units are updated on the device and others on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection

from infinity.optim.pipeline import Segment
from infinity.zero.in_flight import InFlight
from infinity.zero.on_device import OnDevice


class OnBothSides:
    """Each unit's update goes to where its states are; what takes time is the host's. The verbs are `InFlight`'s.

    Args:
        is_there: whether a unit is updated on the device, which may change while no update of it is pending.

    Attributes:
        host: carries out the updates of the other units, and knows of all that are pending or finished.
        pending, finished: of both, see `InFlight`.
    """

    def __init__(self, host: InFlight, device: OnDevice, is_there: Callable[[int], bool]) -> None:
        self.host = host
        self.pending = device.pending = host.pending
        self.finished = device.finished = host.finished
        self._device = device
        self._is_there = is_there

    @property
    def torn(self) -> bool:
        """An interrupt has left an update half way."""
        return self.host.torn or self._device.torn

    @torn.setter
    def torn(self, torn: bool) -> None:
        self.host.torn = torn

    def __contains__(self, unit: int) -> bool:
        return unit in self.host

    def __bool__(self) -> bool:
        return bool(self.host)

    @property
    def units(self) -> frozenset[int]:
        """Units whose updates are in the pipeline."""
        return self.host.units

    @property
    def ahead(self) -> Collection[int]:
        """Units whose updates run ahead, or have done so."""
        return self.host.ahead

    @property
    def all_computed(self) -> bool:
        """No update is still to be computed."""
        return self.host.all_computed

    def _of(self, unit: int) -> InFlight | OnDevice:
        return self._device if self._is_there(unit) else self.host

    # Into the pipeline, or into the device's queue #

    def try_start(self, unit: int, write: bool, needed: int) -> None:
        """Start the pending update of a unit in memory, if its gradients have room."""
        self._of(unit).try_start(unit, write, needed)

    def start(self, unit: int, write: bool, needed: int) -> None:
        """As `try_start`, waiting for room."""
        self._of(unit).start(unit, write, needed)

    def ran_ahead(self, unit: int) -> tuple[Segment, ...] | None:
        """What an update of the unit has done ahead; None if there was none."""
        return self._of(unit).ran_ahead(unit)

    def can_run_ahead(self, unit: int, needed: int) -> bool:
        """Something of the unit can be updated and be undone."""
        return self._of(unit).can_run_ahead(unit, needed)

    def free_gradients(self, unit: int) -> bool:
        """Free memory that the unit's gradients may take; False if there is none."""
        return self._of(unit).free_gradients(unit)

    def open_host(self, unit: int) -> None:
        """Have the unit's values on their way to where they are looked at, waiting for memory that updates hold."""
        self.host.open_host(unit)

    # Out of it #

    def wait_computed(self, unit: int) -> None:
        """Wait until the unit's new values are in memory."""
        self.host.wait_computed(unit)

    def finish_one(self) -> bool:
        """Wait for one update, whichever is the first to be done; False if there is none."""
        return self.host.finish_one()

    def settle(self) -> None:
        """Take note of updates that are over, and start what they have made room for."""
        self.host.settle()
