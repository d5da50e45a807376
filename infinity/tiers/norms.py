"""Norms of gradients, measured on the device and copied to the host asynchronously."""

from __future__ import annotations

import torch

from infinity.kernels import norm_on_device
from infinity.memory import Arena
from infinity.tiers.copies import Transfer
from infinity.tiers.link import Link


class Norms:
    """Euclidean norms in float64, one for each parameter; NaN or infinite if one of its gradients is.

    Args:
        count: number of norms; 0 if the host measures.

    Attributes:
        values: in host memory, each valid once the transfer that `bring` returned has ended.
    """

    def __init__(self, count: int, link: Link) -> None:
        self._link = link
        self._arena = Arena(count * torch.float64.itemsize, pin=link.pinned_for)
        self.values = torch.empty(0, dtype=torch.float64)
        if count:
            self.values = self._arena.lease(self._arena.capacity_bytes).tensor(torch.float64)
        self._sources = [torch.empty(0)] * count  # device memory of each norm, which its copy may still read
        self._last: Transfer | None = None  # all copies are on one stream

    def __bool__(self) -> bool:
        return bool(self._sources)

    def bring(self, index: int, gradients: torch.Tensor, into: torch.Tensor | None = None) -> Transfer:
        """Measure these gradients, and start copying their norm to `index` of `values`, after the gradients themselves
        to `into`, if that is given.
        """
        norm = norm_on_device(gradients)
        pairs = [(self.values[index], norm)] if into is None else [(into, gradients), (self.values[index], norm)]
        copy = self._link.download_all(pairs)
        self._sources[index] = norm  # the copy of the old norm runs before this one
        self._last = copy
        return copy

    def close(self) -> None:
        """Free the memory, once the last copy has ended."""
        if self._last is not None:
            self._last.result()
        self._sources.clear()
        self._arena.close()
