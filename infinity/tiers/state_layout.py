"""The layout of optimizer states: the fields of a tile, and the same fields on the device.

On the host, the fields of a tile are adjacent, so that one request to a drive reads them. The device does not use
tiles: each field of a unit is one tensor, so that the update of a run of parameters needs few kernel launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from infinity.errors import ConfigError
from infinity.kernels import Moment
from infinity.memory import aligned
from infinity.tiers.copies import Transfer
from infinity.tiers.link import Link

Fields = Mapping[str, torch.Tensor]  # 1-D, by name
SCALES = "_scales"  # suffix of a moment's name


@dataclass(frozen=True)
class StateField:
    """One field of the optimizer's state.

    Attributes:
        block: number of parameters that share one value.
    """

    name: str
    dtype: torch.dtype
    block: int = 1

    def length(self, numel: int) -> int:
        """Return the number of values for `numel` parameters."""
        return -(-numel // self.block)


@dataclass(frozen=True)
class StateLayout:
    """The fields of each parameter, and their order.

    Attributes:
        format: name of the format.
        param_dtype: dtype of the parameter itself, which is stored separately.
        fields: in the order in which a tile holds them.
        master: name of the field that completes the parameter to the float32 master; None if the parameter itself is
            the master.
        first: name of the signed moment, or None.
        second: name of the moment that is never negative, or None.
    """

    format: str
    param_dtype: torch.dtype
    fields: tuple[StateField, ...]
    master: str | None
    first: str | None
    second: str | None

    @property
    def bytes_per_param(self) -> int:
        """Bytes of all fields for one element, rounded up; `tile_bytes` is exact."""
        unblocked = sum(field.dtype.itemsize for field in self.fields if field.block == 1)
        return unblocked + any(field.block > 1 for field in self.fields)

    @property
    def moment_fields(self) -> tuple[StateField, ...]:
        """The fields that hold moments, including scales."""
        return tuple(field for field in self.fields if field.name != self.master)

    def tile_bytes(self, numel: int) -> int:
        """Return the bytes of a tile of `numel` elements, with padding."""
        return aligned(sum(field.length(numel) * field.dtype.itemsize for field in self.fields))

    def views(self, buffer: torch.Tensor, numel: int) -> dict[str, torch.Tensor]:
        """Return the fields of a tile of `numel` elements as 1-D views of its bytes.

        Args:
            buffer: 1-D uint8, at least as long as the fields.
        """
        views = {}
        start = 0
        for field in self.fields:
            stop = start + field.length(numel) * field.dtype.itemsize
            views[field.name] = buffer[start:stop].view(field.dtype)
            start = stop
        return views

    def narrow(self, states: Mapping[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the fields of elements [start, stop) of a tile.

        Raises:
            ConfigError: the format scales its moments by blocks, and `start` is inside of a block.
        """
        narrowed = {}
        for field in self.fields:
            if start % field.block:
                raise ConfigError(
                    f"state format {self.format!r} scales moments by blocks of {field.block}, but parameters with "
                    f"settings of their own start at element {start}: choose format 'split' or 'bf16'"
                )
            narrowed[field.name] = states[field.name][start // field.block : field.length(stop)]
        return narrowed

    def moment(self, states: Mapping[str, torch.Tensor], name: str | None) -> Moment | None:
        """Return the moment of that name for the kernels; None for None."""
        return None if name is None else Moment(states[name], states.get(name + SCALES))


class DeviceStates:
    """The device memory of units' states.

    Args:
        link: to the device.
    """

    def __init__(self, link: Link, layout: StateLayout) -> None:
        self._link = link
        self._layout = layout

    def room(self, numel: int) -> Fields:
        """Allocate memory for a unit of `numel` elements; raises torch.OutOfMemoryError."""
        return {
            field.name: torch.empty(field.length(numel), dtype=field.dtype, device=self._link.device)
            for field in self._layout.fields
        }

    def download(self, states: Fields, start: int, numel: int, target: torch.Tensor) -> Transfer:
        """Start copying a tile's values from the device to its bytes in host memory."""
        there, here = self._both(states, start, numel, target)
        return [self._link.download(here[name], values) for name, values in there.items()][-1]

    def upload(self, states: Fields, start: int, numel: int, source: torch.Tensor) -> Transfer:
        """Start copying a tile's values to the device; later work of the compute stream runs behind the copy."""
        there, here = self._both(states, start, numel, source)
        copy = [self._link.upload(values, here[name]) for name, values in there.items()][-1]
        self._link.compute_waits(copy)
        return copy

    def _both(self, states: Fields, start: int, numel: int, tile: torch.Tensor) -> tuple[Fields, Fields]:
        """Return the same elements' fields on the device and on the host. All copies of them are on one stream."""
        there = self._layout.narrow(states, start, start + numel)
        return there, self._layout.views(tile, numel)
