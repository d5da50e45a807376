"""Bring gradients to the memory that holds them, and measure them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import torch

from infinity.kernels import GradStats, grad_stats, grad_store
from infinity.telemetry import Counters
from infinity.tiers import DeviceGrads, GradStore, to_host
from infinity.zero.partition import UnitLayout
from infinity.zero.reduction import Addend, Direct, Reduction
from infinity.zero.unit import Coming, Measures, Unit

_LAG = 2  # one unit's gradients are copied while the next is computed


def parts_before(units: Sequence[UnitLayout], *, whole: bool) -> list[int]:
    """Return for each unit the number of parts of the units before it, and behind them the number of all parts.

    Args:
        whole: a unit is one part, because ranks reduce it as one; if False, each parameter is a part.
    """
    return list(accumulate((1 if whole else len(unit.params) for unit in units), initial=0))


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
    def add(self, row: Unit, addend: Addend, measures: Measures, *, last_pass: bool) -> bool:
        """Add to the gradients of a unit. Return False, and add nothing, while there is no room.

        Args:
            measures: of the unit's parts so far. A part without an entry has no gradients yet.
            last_pass: the result is final, unless more comes for the same part.
        """

    @abstractmethod
    def measure(self, row: Unit, part: int) -> GradStats | Coming:
        """Measure the present gradients of a part."""

    def counted(self, row: Unit, part: int, stats: GradStats) -> GradStats:
        """Return the share of a measurement that counts for the model's norm."""
        if not self._source.shares:
            return stats
        return self._source.measured(row.layout, part, stats, self._values(row, part))

    def _values(self, row: Unit, part: int) -> torch.Tensor:
        return row.total.part_of(self.store.tensor(row.grads), part)


class ToHost(Landing):
    """Gradients go to host memory. The first of a step are copied while the device computes, if it measures them."""

    def __init__(self, store: GradStore, source: Direct | Reduction, counters: Counters, *, streams: bool) -> None:
        super().__init__(store, source)
        self._store = store
        self._counters = counters
        self._streams = streams
        self.lag = _LAG if streams else 0

    def add(self, row: Unit, addend: Addend, measures: Measures, *, last_pass: bool) -> bool:
        _, part, start, stop, grad, *_ = addend
        if self._streams and part not in measures and self._store.can_receive(row.grads):
            index = row.total.number(part)
            copy = self._store.receive(row.grads, start, grad.view(-1), index)
            if copy is not None:
                measures[part] = Coming(self._store.norms.values[index], copy)
                row.params.final = copy
            return copy is not None
        buffer = self._store.open(row.grads)
        if buffer is None:
            return False
        values = buffer[start:stop]
        here = grad if grad.is_cpu else to_host(grad, self._counters)
        stored = grad_store(values, here, accumulate=part in measures)
        measures[part] = self._source.measured(row.layout, part, stored, values) if self._source.shares else stored
        return True

    def measure(self, row: Unit, part: int) -> GradStats:
        return self.counted(row, part, grad_stats(self._values(row, part)))


class Stays(Landing):
    """Gradients stay on the device and are used for updates there. Their norms go to the host."""

    lag = _LAG

    def __init__(self, store: DeviceGrads, source: Direct | Reduction) -> None:
        super().__init__(store, source)
        self._store = store

    def add(self, row: Unit, addend: Addend, measures: Measures, *, last_pass: bool) -> bool:
        _, part, start, stop, grad, *_ = addend
        buffer = self._store.open(row.grads)
        if buffer is None:
            return False
        values = buffer[start:stop]
        (values.add_ if part in measures else values.copy_)(grad.view(-1))
        measures[part] = self.measure(row, part) if last_pass else None
        return True

    def measure(self, row: Unit, part: int) -> Coming:
        index = row.total.number(part)
        return Coming(self._store.norms.values[index], self._store.measure(row.grads, index, self._values(row, part)))
