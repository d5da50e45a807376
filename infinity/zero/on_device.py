"""Updates of units whose optimizer states lie where the model computes."""

from __future__ import annotations

import torch

from infinity.errors import CapacityError
from infinity.kernels import update_on_device
from infinity.optim.formats import StateLayout
from infinity.optim.pipeline import Segment
from infinity.tiers import DeviceGrads, Memory, Params, StateStore


class OnDevice:
    """What is started is over for whoever asks: it lies in the compute stream, before all that is computed later.

    The verbs are those of `InFlight`.

    Attributes:
        pending: updates that wait for nothing but to be started.
        finished: units whose updates are over; whoever looks at them takes them out.
        units: none, since no update takes time that anybody sees.
        ahead: none, for the same reason.
        torn: an interrupt has left an update half way.
    """

    units: frozenset[int] = frozenset()
    ahead: frozenset[int] = frozenset()

    def __init__(self, params: Params, grads: DeviceGrads, states: StateStore, layout: StateLayout) -> None:
        self.pending: dict[int, tuple[Segment, ...]] = {}
        self.finished: list[int] = []
        self.torn = False
        self._params = params
        self._grads = grads
        self._states = states
        self._layout = layout

    @property
    def all_computed(self) -> bool:
        """No update is still to be computed."""
        return not self.pending

    def __contains__(self, unit: int) -> bool:
        return False

    def __bool__(self) -> bool:
        return bool(self.pending)

    def try_start(self, unit: int, write: bool, needed: int) -> None:
        """Carry out the pending update of a unit; the arguments are of interest where that takes time."""
        if unit not in self.pending:
            return
        within, self.torn = self.torn, True
        segments = self.pending.pop(unit)
        param, (grad, _) = self._params.begin_device_change(unit), self._grads.hand_over(unit)
        for segment in segments:
            self._update(unit, param, grad, segment)
        self._params.end_device_change(unit)
        self._grads.used(unit)
        self.finished.append(unit)
        self.torn = within

    start = try_start

    def _update(self, unit: int, param: torch.Tensor, grad: torch.Tensor, segment: Segment) -> None:
        """Update what the unit's tiles have of a run of elements."""
        layout = self._layout
        for tile in self._states.tiles(unit):
            low, high = max(segment.start, tile.start), min(segment.stop, tile.start + tile.numel)
            if low >= high:
                continue
            assert tile.there is not None
            fields = layout.narrow(layout.views(tile.there, tile.numel), low - tile.start, high - tile.start)
            tile.begin_write(Memory.DEVICE)
            update_on_device(
                segment.rule,
                param[low:high],
                grad[low:high],
                master=None if layout.master is None else fields[layout.master],
                first=None if layout.first is None else fields[layout.first],
                second=None if layout.second is None else fields[layout.second],
            )
            tile.end_write(Memory.DEVICE)

    def ran_ahead(self, unit: int) -> tuple[Segment, ...] | None:
        """It did not."""
        return None

    def can_run_ahead(self, unit: int, needed: int) -> bool:
        """It need not."""
        return False

    def open_host(self, unit: int) -> None:
        """Have the unit's values on their way to where they are looked at."""
        if not self._params.open_host(unit):
            raise CapacityError(
                f"no host memory is left for the values of unit `{self._params.specs[unit].name}` on their way: "
                "look at fewer units at once, or raise tiering.host_memory"
            )

    def wait_computed(self, unit: int) -> None:
        """It is."""

    def finish_one(self) -> bool:
        """There is none to wait for."""
        return False

    def settle(self) -> None:
        """Nothing is over that was not before."""

    def free_gradients(self, unit: int) -> bool:
        """An update that was started has given its gradients back."""
        return False
