"""State formats: which fields the optimizer keeps beside a parameter, and how a tile holds them.

A tile of `n` elements holds its fields back to back, each `n` elements long, in the order of `StateLayout.fields`.
`n` is a multiple of `SHARD_ALIGN`, so every field starts on a page and the tile is one request of direct I/O.

    format  parameter  fields of a tile                        bytes per parameter, parameter included
    fp32    float32    exp_avg, exp_avg_sq                     12
    split   bfloat16   low_bits (int16), exp_avg, exp_avg_sq   12
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from infinity.errors import ConfigError
from infinity.kernels import Hyper, adam_fp32, adam_split, join_master, split_master

SHARD_ALIGN = 2048  # elements: 4096 bytes of the narrowest field


@dataclass(frozen=True)
class StateField:
    """One field of the optimizer's state."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class StateLayout:
    """What is stored for each parameter, and in what order.

    Attributes:
        format: name of the format.
        param_dtype: dtype of the parameter itself, which is stored apart.
        fields: in the order in which a tile holds them.
    """

    format: str
    param_dtype: torch.dtype
    fields: tuple[StateField, ...]

    @property
    def bytes_per_param(self) -> int:
        """Bytes of all fields for one element."""
        return sum(field.dtype.itemsize for field in self.fields)

    def tile_bytes(self, numel: int) -> int:
        """Bytes of a tile of `numel` elements."""
        return numel * self.bytes_per_param

    def views(self, buffer: torch.Tensor, numel: int) -> dict[str, torch.Tensor]:
        """The fields of a tile of `numel` elements as 1-D tensors over its bytes.

        Args:
            buffer: 1-D uint8, `numel * bytes_per_param` long.
        """
        views = {}
        start = 0
        for field in self.fields:
            stop = start + numel * field.dtype.itemsize
            views[field.name] = buffer[start:stop].view(field.dtype)
            start = stop
        return views


_MOMENTS = (StateField("exp_avg", torch.float32), StateField("exp_avg_sq", torch.float32))
_LAYOUTS = {
    "fp32": StateLayout("fp32", torch.float32, _MOMENTS),
    "split": StateLayout("split", torch.bfloat16, (StateField("low_bits", torch.int16), *_MOMENTS)),
}


def state_layout(name: str) -> StateLayout:
    """The layout of a format.

    Raises:
        ConfigError: there is no format of this name.
    """
    if name not in _LAYOUTS:
        raise ConfigError(f"state format {name!r} does not exist; choose {' or '.join(_LAYOUTS)}")
    return _LAYOUTS[name]


def init_states(
    layout: StateLayout, master: torch.Tensor, param: torch.Tensor, states: Mapping[str, torch.Tensor]
) -> None:
    """Fill `param` and `states` from the float32 `master`, as before the first update."""
    write_master(layout, master, param, states)
    states["exp_avg"].zero_()
    states["exp_avg_sq"].zero_()


def write_master(
    layout: StateLayout, master: torch.Tensor, param: torch.Tensor, states: Mapping[str, torch.Tensor]
) -> None:
    """Store a float32 master; the moments are left alone."""
    if layout.format == "split":
        split_master(master, param, states["low_bits"])
    else:
        param.copy_(master)


def read_master(layout: StateLayout, param: torch.Tensor, states: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The exact float32 master, as a new tensor."""
    if layout.format == "split":
        master = torch.empty(param.numel(), dtype=torch.float32)
        join_master(param, states["low_bits"], master)
        return master
    return param.clone()


def update(
    layout: StateLayout,
    param: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    grad: torch.Tensor,
    hyper: Hyper,
) -> None:
    """One AdamW or Adam update in place; all tensors 1-D and of one length."""
    if layout.format == "split":
        adam_split(param, states["low_bits"], states["exp_avg"], states["exp_avg_sq"], grad, hyper)
    else:
        adam_fp32(param, states["exp_avg"], states["exp_avg_sq"], grad, hyper)
