"""The fields of a tile of optimizer states as tensors, in any of the tile's places."""

from __future__ import annotations

import torch

from infinity.memory import Lease
from infinity.optim.formats import StateLayout
from infinity.tiers.states import Tile


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
