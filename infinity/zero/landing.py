"""Bring gradients to the memory that holds them, and measure them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import torch

from infinity.kernels import GradStats, grad_stats, grad_store
from infinity.telemetry import Counters, StallCause
from infinity.tiers import DeviceGrads, GradStore, Transfer, to_host
from infinity.zero.partition import UnitLayout
from infinity.zero.reduction import WHOLE, Addend, Direct, Reduction
from infinity.zero.unit import Unit

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


@dataclass(slots=True)
class StepTotal:
    """A unit's gradients of this step so far: parameters that have one, and the measurements."""

    present: set[int] = field(default_factory=set)
    stats: Measures = field(default_factory=dict)


@dataclass(slots=True)
class UnitTotal:
    """The gradients of a unit so far.

    Attributes:
        row: what the engine has of the unit.
        first: number of the unit's first part among the parts of all units.
        trained: the number of its trained parameters.
        of_pass: parameters whose gradient has come in the running pass.
        step: None before the step's first gradient, and after the hand-over to an update.
    """

    unit: UnitLayout
    row: Unit
    first: int
    trained: int
    of_pass: set[int] = field(default_factory=set)
    step: StepTotal | None = None

    def begun(self) -> StepTotal:
        if self.step is None:
            self.step = StepTotal()
        return self.step

    def number(self, part: int) -> int:
        """Return the number of a part among the parts of all units."""
        return self.first + (0 if part == WHOLE else part)

    def part_of(self, flat: torch.Tensor, part: int) -> torch.Tensor:
        """Return a part's values in the unit's buffer."""
        if part == WHOLE:
            return flat
        slot = self.unit.slots[part]
        return flat[slot.offset : slot.offset + slot.numel]


def parts_before(units: Sequence[UnitLayout], *, whole: bool) -> list[int]:
    """Return for each unit the number of parts of the units before it, and behind them the number of all parts.

    Args:
        whole: a unit is one part, because ranks reduce it as one; if False, each parameter is a part.
    """
    return list(accumulate((1 if whole else len(unit.slots) for unit in units), initial=0))


class Landing(ABC):
    """The destination of gradients.

    Args:
        source: their origin; it knows how much of a part's norm counts for the model.

    Attributes:
        store: holds them.
        lag: for how many units they may still be on their way while the next unit is computed.
    """

    lag = 0

    def __init__(self, store: GradStore | DeviceGrads, source: Direct | Reduction) -> None:
        self.store: GradStore | DeviceGrads = store
        self._source = source

    @abstractmethod
    def add(self, total: UnitTotal, addend: Addend, measures: Measures, *, last_pass: bool) -> bool:
        """Add to the gradients of a unit. Return False, and add nothing, while there is no room.

        Args:
            measures: of the unit's parts so far. A part without an entry has no gradients yet.
            last_pass: the result is final, unless more comes for the same part.
        """

    @abstractmethod
    def measure(self, total: UnitTotal, part: int) -> GradStats | Coming:
        """Measure the present gradients of a part."""

    def settled(self, total: UnitTotal, part: int, stats: GradStats) -> GradStats:
        """Return the share of a measurement that counts for the model's norm."""
        if not self._source.shares:
            return stats
        return self._source.measured(total.unit, part, stats, self._values(total, part))

    def _values(self, total: UnitTotal, part: int) -> torch.Tensor:
        return total.part_of(self.store.tensor(total.row.grads), part)


class ToHost(Landing):
    """Gradients go to host memory. The first of a step are copied while the device computes, if it measures them."""

    def __init__(self, store: GradStore, source: Direct | Reduction, counters: Counters, *, streams: bool) -> None:
        super().__init__(store, source)
        self._store = store
        self._counters = counters
        self._streams = streams
        self.lag = _LAG if streams else 0

    def add(self, total: UnitTotal, addend: Addend, measures: Measures, *, last_pass: bool) -> bool:
        _, part, start, stop, grad, *_ = addend
        if self._streams and part not in measures and self._store.can_receive(total.row.grads):
            index = total.number(part)
            copy = self._store.receive(total.row.grads, start, grad.view(-1), index)
            if copy is not None:
                measures[part] = Coming(self._store.norms.values[index], copy)
                total.row.params.final = copy
            return copy is not None
        buffer = self._store.open(total.row.grads)
        if buffer is None:
            return False
        values = buffer[start:stop]
        here = grad if grad.is_cpu else to_host(grad, self._counters)
        stored = grad_store(values, here, accumulate=part in measures)
        measures[part] = self._source.measured(total.unit, part, stored, values) if self._source.shares else stored
        return True

    def measure(self, total: UnitTotal, part: int) -> GradStats:
        return self.settled(total, part, grad_stats(self._values(total, part)))


class Stays(Landing):
    """Gradients stay on the device and are used for updates there. Their norms go to the host."""

    lag = _LAG

    def __init__(self, store: DeviceGrads, source: Direct | Reduction) -> None:
        super().__init__(store, source)
        self._store = store

    def add(self, total: UnitTotal, addend: Addend, measures: Measures, *, last_pass: bool) -> bool:
        _, part, start, stop, grad, *_ = addend
        buffer = self._store.open(total.row.grads)
        if buffer is None:
            return False
        values = buffer[start:stop]
        (values.add_ if part in measures else values.copy_)(grad.view(-1))
        measures[part] = self.measure(total, part) if last_pass else None
        return True

    def measure(self, total: UnitTotal, part: int) -> Coming:
        index = total.number(part)
        return Coming(
            self._store.norms.values[index], self._store.measure(total.row.grads, index, self._values(total, part))
        )
