"""State formats: the fields that the optimizer keeps for each parameter, and their places in a tile.

A tile of `n` elements holds its fields back to back, in the order of `StateLayout.fields`, and is padded to whole
pages, so that direct I/O transfers it by one request. `n` is a multiple of `SHARD_ALIGN`. With two moments (Adam):

    format  parameter  fields of a tile                                        bytes per parameter, with the parameter
    fp32    float32    exp_avg, exp_avg_sq (float32)                           12
    split   bfloat16   low_bits (int16), exp_avg, exp_avg_sq (float32)         12
    master  float16    master, exp_avg, exp_avg_sq (float32)                   14
    bf16    bfloat16   low_bits (int16), exp_avg, exp_avg_sq (bfloat16)         8
    int8    bfloat16   low_bits (int16), exp_avg, exp_avg_sq (uint8, scales)    6.03

The master is exact in every format. The moments are exact in the first three formats; docs/state-formats.md gives the
errors of the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity.errors import ConfigError
from infinity.kernels import (
    SCALE_BLOCK,
    Aside,
    Dither,
    Lost,
    Rule,
    join_master,
    load_moment,
    reconstruct_grad,
    reconstruct_params,
    split_master,
    store_moment,
)
from infinity.kernels import can_reconstruct as can_reconstruct_flat
from infinity.kernels import update as update_flat
from infinity.memory import Lease
from infinity.tiers.state_layout import SCALES, StateField, StateLayout
from infinity.tiers.states import Tile

SHARD_ALIGN = 2048  # elements: 4096 bytes of 16-bit values

# format: dtype of the parameter, field that completes it to the float32 master, dtype of the moments
_FORMATS: dict[str, tuple[torch.dtype, StateField | None, torch.dtype]] = {
    "fp32": (torch.float32, None, torch.float32),
    "split": (torch.bfloat16, StateField("low_bits", torch.int16), torch.float32),
    "master": (torch.float16, StateField("master", torch.float32), torch.float32),
    "bf16": (torch.bfloat16, StateField("low_bits", torch.int16), torch.bfloat16),
    "int8": (torch.bfloat16, StateField("low_bits", torch.int16), torch.uint8),
}
# optimizer: its signed moment, its moment that is never negative
MOMENTS: dict[str, tuple[str | None, str | None]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adagrad": (None, "sum"),
    "lion": ("exp_avg", None),
    "sgd": ("momentum_buffer", None),
}
FORMATS = tuple(_FORMATS)


def formats_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the formats for parameters of this dtype. The first one is exact; the others round moments."""
    return tuple(name for name, (param_dtype, *_) in _FORMATS.items() if param_dtype is dtype)


def state_layout(name: str, optimizer: str = "adamw") -> StateLayout:
    """Return the layout of a format for an optimizer. Raises ConfigError if the format or the optimizer is unknown."""
    if optimizer not in MOMENTS:
        raise ConfigError(f"optimizer {optimizer!r} does not exist; choose {', '.join(MOMENTS)}")
    return layout_with_moments(name, *MOMENTS[optimizer])


def layout_with_moments(name: str, first: str | None, second: str | None) -> StateLayout:
    """Return the layout of a format for an optimizer with a signed moment and one that is never negative, `second`.

    Raises:
        ConfigError: the format is unknown, or no optimizer has these moments.
    """
    if name not in _FORMATS:
        raise ConfigError(f"state format {name!r} does not exist; choose {', '.join(_FORMATS)}")
    if (first, second) not in MOMENTS.values():
        raise ConfigError(f"no optimizer has the moments {first!r} and {second!r}")
    param_dtype, master, moment_dtype = _FORMATS[name]
    moments = [moment for moment in (first, second) if moment is not None]
    fields = [master] if master is not None else []
    fields += [StateField(moment, moment_dtype) for moment in moments]
    if moment_dtype == torch.uint8:
        fields += [StateField(moment + SCALES, torch.float32, SCALE_BLOCK) for moment in moments]
    return StateLayout(name, param_dtype, tuple(fields), master.name if master else None, first, second)


class TileFields:
    """Views of tiles, created once for each place of a tile."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        self._views: dict[tuple[Lease, int], dict[str, torch.Tensor]] = {}  # by lease and number of elements

    def of(self, tile: Tile) -> dict[str, torch.Tensor]:
        """Return the fields of a held tile; 1-D, by name."""
        assert tile.lease is not None
        return self.at(tile.lease, tile)

    def at(self, place: Lease, tile: Tile) -> dict[str, torch.Tensor]:
        """Return the fields of a tile in the memory of `place`."""
        key = (place, tile.numel)
        if key not in self._views:
            buffer = place.tensor(torch.uint8, tile.nbytes)
            self._views[key] = self._layout.views(buffer, tile.numel)
        return self._views[key]

    def part(self, fields: dict[str, torch.Tensor], tile: Tile, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the fields of elements [start, stop) of the shard, which are in the tile."""
        if stop - start == tile.numel:
            return fields
        return self._layout.narrow(fields, start - tile.start, stop - tile.start)

    def clear(self) -> None:
        self._views.clear()


def init_states(
    layout: StateLayout, master: torch.Tensor, param: torch.Tensor, states: Mapping[str, torch.Tensor]
) -> None:
    """Initialize `param` and `states` from the float32 `master`, for the first update."""
    write_master(layout, master, param, states)
    for field in layout.moment_fields:
        states[field.name].zero_()


def write_master(
    layout: StateLayout, master: torch.Tensor, param: torch.Tensor, states: Mapping[str, torch.Tensor]
) -> None:
    """Store a float32 master; the moments do not change."""
    if layout.master == "low_bits":
        split_master(master, param, states["low_bits"])
        return
    param.copy_(master)
    if layout.master is not None:
        states[layout.master].copy_(master)


def read_master(layout: StateLayout, param: torch.Tensor, states: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the exact float32 master as a new tensor.

    In format `master`, a parameter that was changed outside the optimizer replaces its master, as in an update.
    """
    if layout.master == "low_bits":
        master = torch.empty(param.numel(), dtype=torch.float32, device="cpu")
        join_master(param, states["low_bits"], master)
        return master
    if layout.master is None:
        return param.clone()
    master = states[layout.master]
    unchanged = master.to(param.dtype).view(torch.int16) == param.view(torch.int16)
    return torch.where(unchanged, master, param.float())


def read_moments(layout: StateLayout, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the moments as new float32 tensors, by name."""
    moments = {}
    for name in (layout.first, layout.second):
        moment = layout.moment(states, name)
        if name is not None and moment is not None:
            moments[name] = load_moment(moment, signed=name == layout.first)
    return moments


def write_moments(
    layout: StateLayout,
    moments: Mapping[str, torch.Tensor],
    states: Mapping[str, torch.Tensor],
    dither: Dither | None = None,
) -> None:
    """Store float32 moments, rounded to the format."""
    for name in (layout.first, layout.second):
        moment = layout.moment(states, name)
        if name is not None and moment is not None:
            store_moment(moment, moments[name], signed=name == layout.first, dither=dither)


def update(
    layout: StateLayout,
    param: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    grad: torch.Tensor,
    hyper: Rule,
    dither: Dither | None = None,
    aside: tuple[torch.Tensor | None, Mapping[str, torch.Tensor] | None] | None = None,
    *,
    report_lost: bool = False,
    params: bool = False,
) -> Lost | None:
    """Make one update in place.

    Args:
        param, grad: 1-D and of one length; states: the fields for the same elements.
        dither: random bits for stochastic rounding; not needed by formats with exact moments.
        aside: tensors for the old parameters and for the new fields of the same elements; None to change all in place.
        report_lost: report the elements whose gradients `reconstruct` cannot restore; requires `can_reconstruct`.
        params: also report the elements whose parameters it cannot reconstruct; requires `can_reconstruct_param`.

    Returns:
        The elements that cannot be reconstructed, if requested.
    """
    return update_flat(
        hyper,
        param,
        grad,
        master=states[layout.master] if layout.master is not None else None,
        first=layout.moment(states, layout.first),
        second=layout.moment(states, layout.second),
        dither=dither,
        aside=None if aside is None else _aside(layout, *aside),
        report_lost=report_lost,
        params=params,
    )


def can_reconstruct(layout: StateLayout, rule: Rule, grad_dtype: torch.dtype) -> bool:
    """Whether gradients of this dtype can be reconstructed from the states before and after an update."""
    dtypes = {field.name: field.dtype for field in layout.fields}
    return layout.first is not None and can_reconstruct_flat(rule, dtypes[layout.first], grad_dtype)


def can_reconstruct_param(layout: StateLayout) -> bool:
    """Whether the old parameters can be reconstructed, too, if the gradients can."""
    return layout.master == "low_bits"


def reconstruct(
    layout: StateLayout,
    rule: Rule,
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    *,
    grad: torch.Tensor | None,
    param: torch.Tensor | None,
) -> None:
    """Reconstruct the values before an update by `rule`, except of the elements that `update` has reported.

    Args:
        before, after: the fields of the same elements, before and after the update.
        grad: if given, filled with the gradients.
        param: if given, the parameters after the update, which are replaced by the old ones.
    """
    assert layout.first is not None
    if grad is not None:
        reconstruct_grad(rule, before[layout.first], after[layout.first], grad)
    if param is not None:
        assert layout.master is not None
        assert layout.second is not None
        low_bits = before[layout.master], after[layout.master]
        reconstruct_params(rule, param, low_bits, after[layout.first], after[layout.second])


def _aside(layout: StateLayout, param: torch.Tensor | None, states: Mapping[str, torch.Tensor] | None) -> Aside:
    if states is None:
        return Aside(param)
    master = states[layout.master] if layout.master is not None else None
    return Aside(param, master, layout.moment(states, layout.first), layout.moment(states, layout.second))
