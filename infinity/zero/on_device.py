"""Updates of units whose optimizer states are on the compute device."""

from __future__ import annotations

from infinity.kernels import update_on_device
from infinity.optim.formats import StateLayout
from infinity.optim.jobs import Segment
from infinity.tiers import DeviceGrads, Params, StateStore, UnitGrads
from infinity.tiers.unit_params import UnitParams


class OnDevice:
    """Queue updates on the compute stream, before all later computation, so that callers need not wait for them."""

    def __init__(self, params: Params, grads: DeviceGrads, states: StateStore, layout: StateLayout) -> None:
        self._params = params
        self._grads = grads
        self._states = states
        self._layout = layout

    def update(self, params: UnitParams, grads: UnitGrads, segments: tuple[Segment, ...]) -> None:
        layout = self._layout
        param, (grad, _) = self._params.begin_device_change(params), self._grads.hand_over(grads)
        with self._states.changing_there(params.index) as fields:
            for segment in segments:
                here, part = slice(segment.start, segment.stop), layout.narrow(fields, segment.start, segment.stop)
                update_on_device(
                    segment.rule,
                    param[here],
                    grad[here],
                    master=None if layout.master is None else part[layout.master],
                    first=None if layout.first is None else part[layout.first],
                    second=None if layout.second is None else part[layout.second],
                )
        self._params.end_device_change(params)
        self._grads.used(grads)
