"""Norms of gradients, measured on the device and copied to the host asynchronously."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

from infinity.kernels import GradStats, norm_on_device
from infinity.memory import Arena
from infinity.telemetry import Counters, StallCause
from infinity.tiers.copies import Transfer
from infinity.tiers.link import Link


@dataclass(frozen=True, slots=True)
class ArrivingStats:
    """A measurement that is being copied from the device.

    Attributes:
        norm: Euclidean norm, float64, in host memory; NaN or infinite if one of the values is.
    """

    norm: torch.Tensor
    copy: Transfer

    def stats(self, counters: Counters) -> GradStats:
        with counters.stalled(StallCause.HOST_LINK):
            self.copy.result()
        norm = self.norm.item()
        return GradStats(norm * norm, math.isfinite(norm))


Measures: TypeAlias = dict[int, GradStats | ArrivingStats | None]  # by part of a unit; None if not measured yet


class Norms:
    """Euclidean norms in float64, one for each parameter; NaN or infinite if one of its gradients is.

    Args:
        count: number of norms; 0 if the host measures.
    """

    def __init__(self, count: int, link: Link) -> None:
        self._link = link
        self._arena = Arena(count * torch.float64.itemsize, pin=link.pinned_for)
        self._values = torch.empty(0, dtype=torch.float64)  # in host memory
        if count:
            self._values = self._arena.lease(self._arena.capacity_bytes).tensor(torch.float64)
        self._sources = [torch.empty(0)] * count  # device memory of each norm, which its copy may still read
        self._last: Transfer | None = None  # all copies are on one stream

    def __bool__(self) -> bool:
        return bool(self._sources)

    def bring(self, index: int, gradients: torch.Tensor, into: torch.Tensor | None = None) -> ArrivingStats:
        """Measure these gradients, and start copying the norm with this index, after the gradients themselves to
        `into`, if that is given.
        """
        norm, there = norm_on_device(gradients), self._values[index]
        copy = self._link.download_all([(there, norm)] if into is None else [(into, gradients), (there, norm)])
        self._sources[index] = norm  # the copy of the old norm runs before this one
        self._last = copy
        return ArrivingStats(there, copy)

    def close(self) -> None:
        """Free the memory, once the last copy has ended."""
        if self._last is not None:
            self._last.result()
        self._sources.clear()
        self._arena.close()
