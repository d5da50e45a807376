"""Optimizer states on the device: each field of a unit in one piece.

On the host the fields of a tile are adjacent, so that one request of a drive reads them. The device does not use tiles,
so the update of a run of parameters needs few kernel launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from infinity.tiers.copies import Transfer
from infinity.tiers.link import Link

Fields = Mapping[str, torch.Tensor]  # 1-D, by name


class StateField(Protocol):
    """One state of every parameter, or of every block of parameters."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def length(self, numel: int) -> int:
        """Return the number of values for `numel` parameters."""


class Layout(Protocol):
    """The fields, and their places in a tile."""

    @property
    def fields(self) -> Iterable[StateField]: ...

    def views(self, buffer: torch.Tensor, numel: int) -> Fields:
        """Return the fields of a tile of `numel` elements as views of its bytes."""

    def narrow(self, states: Fields, start: int, stop: int) -> Fields:
        """Return the fields of elements [start, stop)."""


class DeviceStates:
    """The device memory of units' states.

    Args:
        link: to the device.
    """

    def __init__(self, link: Link, layout: Layout) -> None:
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
