"""Bring gradients to the memory that holds them, and measure them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from infinity.kernels import GradStats, grad_stats, grad_store
from infinity.telemetry import Counters, StallCause
from infinity.tiers import DeviceGrads, GradStore, GradStores, Transfer, to_host
from infinity.zero.partition import ParamSlot, Unit
from infinity.zero.reduction import WHOLE, Addend, Direct, Reduction

_LAG = 2  # one unit's gradients are copied while the next is computed


@dataclass(frozen=True, slots=True)
class Coming:
    """A measurement on its way from the device.

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


Measures: TypeAlias = dict[int, GradStats | Coming | None]  # by part of a unit; None if not measured yet


class _UnitParts(NamedTuple):
    """A unit's parts: the number of its first part among those of all units, and its parameters."""

    first: int
    slots: Sequence[ParamSlot]


class Places:
    """The positions of the parts of units, which are added to and measured separately.

    Args:
        whole: a unit is one part, because ranks reduce it as one; if False, each parameter is a part.

    Attributes:
        count: number of parts of all units.
    """

    def __init__(self, units: Sequence[Unit], *, whole: bool) -> None:
        self.count = 0
        self._units: list[_UnitParts] = []
        for unit in units:
            self._units.append(_UnitParts(self.count, unit.slots))
            self.count += 1 if whole else len(unit.slots)

    def index(self, unit: int, part: int) -> int:
        """Return the number of a part among all units' parts."""
        return self._units[unit].first + (0 if part == WHOLE else part)

    def of(self, flat: torch.Tensor, unit: int, part: int) -> torch.Tensor:
        """Return a part's values in the unit's buffer."""
        if part == WHOLE:
            return flat
        slot = self._units[unit].slots[part]
        return flat[slot.offset : slot.offset + slot.numel]


class Landing(ABC):
    """The destination of gradients.

    Args:
        source: their origin; it knows how much of a part's norm counts for the model.

    Attributes:
        lag: for how many units they may still be on their way while the next unit is computed.
    """

    lag = 0

    def __init__(self, store: GradStore | DeviceGrads, source: Direct | Reduction, places: Places) -> None:
        self._held = store
        self._source = source
        self._places = places

    @abstractmethod
    def add(self, addend: Addend, measures: Measures, *, last_pass: bool) -> bool:
        """Add to the gradients of a unit. Return False, and add nothing, while there is no room.

        Args:
            measures: of the unit's parts so far. A part without an entry has no gradients yet.
            last_pass: the result is final, unless more comes for the same part.
        """

    @abstractmethod
    def measure(self, unit: int, part: int) -> GradStats | Coming:
        """Measure the present gradients of a part."""

    def settled(self, unit: int, part: int, stats: GradStats) -> GradStats:
        """Return the share of a measurement that counts for the model's norm."""
        if not self._source.shares:
            return stats
        return self._source.measured(unit, part, stats, self._values(unit, part))

    def _values(self, unit: int, part: int) -> torch.Tensor:
        return self._places.of(self._held.tensor(unit), unit, part)


class ToHost(Landing):
    """Gradients go to host memory. The first of a step are copied while the device computes, if it measures them.

    Args:
        note: called for each copy of a unit's gradients that begins.
    """

    def __init__(
        self,
        store: GradStore,
        source: Direct | Reduction,
        places: Places,
        counters: Counters,
        *,
        streams: bool,
        note: Callable[[int, Transfer], None],
    ) -> None:
        super().__init__(store, source, places)
        self._store = store
        self._counters = counters
        self._streams = streams
        self._note = note
        self.lag = _LAG if streams else 0

    def add(self, addend: Addend, measures: Measures, *, last_pass: bool) -> bool:
        unit, part, start, stop, grad, *_ = addend
        if self._streams and part not in measures and self._store.can_receive(unit):
            index = self._places.index(unit, part)
            copy = self._store.receive(unit, start, grad.view(-1), index)
            if copy is not None:
                measures[part] = Coming(self._store.norms.values[index], copy)
                self._note(unit, copy)
            return copy is not None
        buffer = self._store.open(unit)
        if buffer is None:
            return False
        values = buffer[start:stop]
        here = grad if grad.is_cpu else to_host(grad, self._counters)
        stored = grad_store(values, here, accumulate=part in measures)
        measures[part] = self._source.measured(unit, part, stored, values) if self._source.shares else stored
        return True

    def measure(self, unit: int, part: int) -> GradStats:
        values = self._values(unit, part)
        return self.settled(unit, part, grad_stats(values))


class Stays(Landing):
    """Gradients stay on the device and are used for updates there. Their norms go to the host."""

    lag = _LAG

    def __init__(self, store: DeviceGrads, source: Direct | Reduction, places: Places) -> None:
        super().__init__(store, source, places)
        self._store = store

    def add(self, addend: Addend, measures: Measures, *, last_pass: bool) -> bool:
        unit, part, start, stop, grad, *_ = addend
        buffer = self._store.open(unit)
        if buffer is None:
            return False
        values = buffer[start:stop]
        (values.add_ if part in measures else values.copy_)(grad.view(-1))
        measures[part] = self.measure(unit, part) if last_pass else None
        return True

    def measure(self, unit: int, part: int) -> Coming:
        index = self._places.index(unit, part)
        return Coming(self._store.norms.values[index], self._store.measure(unit, index, self._values(unit, part)))


class Parted:
    """Some units' gradients stay on the device, and others go to host memory. The methods are those of `Landing`."""

    def __init__(self, is_there: Callable[[int], bool], stays: Landing, to_host: Landing) -> None:
        self._is_there = is_there
        self._stays = stays
        self._to_host = to_host
        self.lag = max(stays.lag, to_host.lag)

    def _of(self, unit: int) -> Landing:
        return self._stays if self._is_there(unit) else self._to_host

    def add(self, addend: Addend, measures: Measures, *, last_pass: bool) -> bool:
        return self._of(addend.unit).add(addend, measures, last_pass=last_pass)

    def measure(self, unit: int, part: int) -> GradStats | Coming:
        return self._of(unit).measure(unit, part)

    def settled(self, unit: int, part: int, stats: GradStats) -> GradStats:
        return self._of(unit).settled(unit, part, stats)


def landing_of(
    stores: GradStores,
    source: Direct | Reduction,
    places: Places,
    counters: Counters,
    *,
    streams: bool,
    note: Callable[[int, Transfer], None],
) -> Landing | Parted:
    """Return the landing for these stores."""
    to_host = ToHost(stores.host, source, places, counters, streams=streams, note=note)
    if stores.device is None:
        return to_host
    return Parted(stores.is_there, Stays(stores.device, source, places), to_host)
