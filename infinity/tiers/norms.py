"""Norms of gradients, measured on the device, and on their way to the host without keeping it waiting."""

from __future__ import annotations

import torch

from infinity.kernels import norm_on_device
from infinity.memory import Arena
from infinity.tiers.copies import Transfer
from infinity.tiers.link import Link


class Norms:
    """Euclidean norms in float64, one a parameter; NaN or infinite if one of the parameter's gradients is.

    Args:
        count: how many there are; 0 where the host measures.

    Attributes:
        values: in host memory, each valid once the transfer that `bring` gave is over.
    """

    def __init__(self, count: int, link: Link) -> None:
        self._link = link
        self._arena = Arena(count * torch.float64.itemsize, pin=link.pinned_for)
        self.values = torch.empty(0, dtype=torch.float64)
        if count:
            self.values = self._arena.lease(self._arena.capacity_bytes).tensor(torch.float64)
        self._sources = [torch.empty(0)] * count  # the device's memory of each, which the last copy may still read
        self._last: Transfer | None = None  # one comes after the other

    def __bool__(self) -> bool:
        return bool(self._sources)

    def bring(self, index: int, gradients: torch.Tensor, into: torch.Tensor | None = None) -> Transfer:
        """Measure these gradients, and start the copy of their norm to `index` of `values`; and before it that of the
        gradients to `into`, if that is given."""
        norm = norm_on_device(gradients)
        pairs = [(self.values[index], norm)] if into is None else [(into, gradients), (self.values[index], norm)]
        copy = self._link.download_all(pairs)
        self._sources[index] = norm  # the last one's copy comes before this one's
        self._last = copy
        return copy

    def close(self) -> None:
        """Give the memory back, once nothing is on its way to it that nobody waited for."""
        if self._last is not None:
            self._last.result()
        self._sources.clear()
        self._arena.close()
