"""Updates of units whose optimizer states lie where the model computes."""

from __future__ import annotations

import torch

from infinity.kernels import update_on_device
from infinity.optim.formats import StateLayout
from infinity.optim.pipeline import Segment
from infinity.tiers import DeviceGrads, Memory, Params, StateStore


class OnDevice:
    """Puts updates into the compute stream, before all that is computed later: for whoever asks they are over."""

    def __init__(self, params: Params, grads: DeviceGrads, states: StateStore, layout: StateLayout) -> None:
        self._params = params
        self._grads = grads
        self._states = states
        self._layout = layout

    def has(self, unit: int) -> bool:
        """The unit is updated here, which may change while no update of it is pending."""
        return self._states.is_there(unit)

    def update(self, unit: int, segments: tuple[Segment, ...]) -> None:
        """Update a unit that is on the device with the gradients that are held there."""
        param, (grad, _) = self._params.begin_device_change(unit), self._grads.hand_over(unit)
        for segment in segments:
            self._update(unit, param, grad, segment)
        self._params.end_device_change(unit)
        self._grads.used(unit)

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
