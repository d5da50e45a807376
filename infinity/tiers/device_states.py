"""Optimizer states that live where the model computes: every field of a unit in one piece.

On the host a tile has its fields back to back, so that it is one request of a drive. Here nothing comes in tiles: an
update of a run of parameters is as few launches as if there were none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from infinity.tiers.copies import Transfer
from infinity.tiers.link import Link

Fields = Mapping[str, torch.Tensor]  # 1-D, by name


class StateField(Protocol):
    """One state of every parameter, or of every so many."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def length(self, numel: int) -> int:
        """Values for `numel` parameters."""


class Layout(Protocol):
    """Which fields there are, and how a tile holds them."""

    @property
    def fields(self) -> Iterable[StateField]: ...

    def views(self, buffer: torch.Tensor, numel: int) -> Fields:
        """The fields of a tile of `numel` elements over its bytes."""

    def narrow(self, states: Fields, start: int, stop: int) -> Fields:
        """The fields of elements [start, stop)."""


class DeviceStates:
    """The device's memory of the units whose states are there.

    Args:
        link: to the device.
    """

    def __init__(self, link: Link, layout: Layout) -> None:
        self._link = link
        self._layout = layout
        self._units: dict[int, Fields] = {}

    def make_room(self, unit: int, numel: int) -> None:
        """Memory for a unit of so many elements, if it has none.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        if unit not in self._units:
            self._units[unit] = {
                field.name: torch.empty(field.length(numel), dtype=field.dtype, device=self._link.device)
                for field in self._layout.fields
            }

    def give_back(self, unit: int) -> None:
        """The unit's memory, if it has any."""
        self._units.pop(unit, None)

    def close(self) -> None:
        """Give all of it back."""
        self._units.clear()

    def fields(self, unit: int) -> Fields:
        """Of the unit's whole shard."""
        return self._units[unit]

    def download(self, unit: int, start: int, numel: int, target: torch.Tensor) -> Transfer:
        """Start copying what a tile has to these bytes of it in host memory."""
        there, here = self._both(unit, start, numel, target)
        return [self._link.download(here[name], values) for name, values in there.items()][-1]

    def upload(self, unit: int, start: int, numel: int, source: torch.Tensor) -> Transfer:
        """The other way; what the device is given from now on runs behind it."""
        there, here = self._both(unit, start, numel, source)
        copy = [self._link.upload(values, here[name]) for name, values in there.items()][-1]
        self._link.compute_waits(copy)
        return copy

    def _both(self, unit: int, start: int, numel: int, tile: torch.Tensor) -> tuple[Fields, Fields]:
        """The same elements' fields there and here; copies of them are on one stream, so the last is done last."""
        there = self._layout.narrow(self._units[unit], start, start + numel)
        return there, self._layout.views(tile, numel)
