"""Gradients on their way from autograd to the optimizer: held flat, accumulated, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence

import torch
from torch import nn

from infinity.errors import CapacityError
from infinity.kernels import GradStats, grad_store
from infinity.telemetry import Counters
from infinity.tiers import GradStore, to_host
from infinity.zero.model_parts import UNDIVIDED, ModelParts, local_gradient
from infinity.zero.partition import Unit

MakeRoom = Callable[[], bool]


class Gradients:
    """What the parameters' gradients of the current step are so far.

    Args:
        make_room: frees a gradient buffer that an update holds; False if no update is in flight.
        parts: who holds the other parts of the model, if it is divided.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        store: GradStore,
        make_room: MakeRoom,
        counters: Counters,
        parts: ModelParts = UNDIVIDED,
    ) -> None:
        self._units = tuple(units)
        self._store = store
        self._make_room = make_room
        self._finish_early: MakeRoom = lambda: False
        self._counters = counters
        self._parts = parts
        self._alone = parts.ranks.size == 1
        self._stats: list[dict[int, GradStats]] = [{} for _ in units]  # by slot; present once it has a gradient
        self._awaited = [sum(slot.trainable for slot in unit.slots) for unit in units]
        self._gaps = [gaps(unit) for unit in units]
        self._collecting: set[int] = set()  # units with a buffer; what is handed over is in the store for a while, too
        self._arrived = [0] * len(units)  # slots that have arrived in the backward pass that is running

    def take(self, unit_index: int, slot_index: int, param: nn.Parameter) -> bool:
        """Move `param.grad` into the unit's buffer and free it.

        Returns:
            Whether every trainable parameter of the unit has now arrived in this backward pass.

        Raises:
            CapacityError: no buffer can be had within the budget.
        """
        unit = self._units[unit_index]
        slot = unit.slots[slot_index]
        buffer = self._store.get(unit_index)
        if buffer is None:
            fresh = not self._store.holds(unit_index)
            buffer = self._open(unit)
            for start, stop in self._gaps[unit_index] if fresh else ():
                buffer[start:stop] = 0  # kernels run over the padding too
        grad = local_gradient(param)
        if grad is None:
            raise RuntimeError(f"gradient of {slot.name} is missing when its hook runs")
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        target = buffer[slot.offset : slot.offset + slot.numel]
        seen = self._stats[unit_index]
        seen[slot_index] = grad_store(target, to_host(grad.reshape(-1), self._counters), accumulate=slot_index in seen)
        param.grad = None
        self._arrived[unit_index] += 1
        return self._arrived[unit_index] == self._awaited[unit_index]

    def begin_backward(self, *, last: bool) -> None:
        """A backward pass begins, the `last` one of a step or not."""

    def when_full(self, finish_early: MakeRoom) -> None:
        """Have this called when there is no room for a unit's gradients, and no update in flight either."""
        self._finish_early = finish_early

    def leave(self, unit: int) -> Sequence[int]:
        """Backward has left a module of the unit; returns units whose gradients are complete because of that."""
        return ()

    def complete(self, units: Sequence[int]) -> Iterator[int]:
        """A step's backward is through these units: go through those whose gradients are all there because of that."""
        yield from (unit for unit in units if self._stats[unit])

    def end_backward(self) -> None:
        """The pass is over: the next arrival belongs to another one."""
        self._arrived = [0] * len(self._units)

    def abort_backward(self) -> None:
        """The pass has failed."""
        self._arrived = [0] * len(self._units)

    def units_with_gradients(self) -> list[int]:
        return [index for index, stats in enumerate(self._stats) if stats]

    def slots_with_gradients(self, unit: int) -> frozenset[int]:
        return frozenset(self._stats[unit])

    def is_finite(self, unit: int) -> bool:
        """So are all of the unit's gradients, on every rank and in every part of the model."""
        return not self._parts.ranks.any(not self._is_finite_here(unit))

    def _is_finite_here(self, unit: int) -> bool:
        return all(stats.finite for stats in self._stats[unit].values())

    def sum_sq(self, unit: int) -> float:
        """What the unit's gradients, or this rank's shard of them, contribute to the square of the norm."""
        slots = self._units[unit].slots
        return math.fsum(s.sum_sq * self._parts.share(slots[slot].name) for slot, s in self._stats[unit].items())

    def norm(self) -> float:
        """Euclidean norm over all gradients of the step; NaN if one of them is not finite."""
        units = self.units_with_gradients()
        finite = all(self._is_finite_here(unit) for unit in units)
        return self.norm_of(math.fsum(self.sum_sq(unit) for unit in units) if finite else math.nan)

    def norm_of(self, sum_sq: float) -> float:
        """The norm over all ranks' shards and the model's parts, of a sum over this rank's."""
        return math.sqrt(self._parts.ranks.sum(sum_sq))

    def rest(self, unit: int) -> None:
        """Nothing more is added to the unit's gradients for a while."""
        self._store.rest(unit)

    def forget(self, unit: int) -> None:
        """The unit's gradients are handed over: what arrives next starts a new sum."""
        self._stats[unit] = {}
        self._collecting.discard(unit)

    def held(self) -> bool:
        """There are gradients that no update has."""
        return any(self._stats)

    def drop_slots(self, slots: Mapping[int, Collection[int]]) -> None:
        """Throw the gradients of these parameters away, given as slots by unit."""
        for unit, some in slots.items():
            for slot in some:
                self._stats[unit].pop(slot, None)
            if not self._stats[unit]:
                self._drop(unit)

    def drop_all(self) -> None:
        """Throw the step's gradients away."""
        for unit in self._collecting | set(self.units_with_gradients()):
            self._drop(unit)

    def _drop(self, unit: int) -> None:
        if self._store.holds(unit):
            self._store.drop(unit)
        self.forget(unit)

    def _open(self, unit: Unit) -> torch.Tensor:
        self._collecting.add(unit.index)
        while True:
            buffer = self._store.try_open(unit.index)
            if buffer is not None:
                return buffer
            if not (self._store.make_room(unit.index) or self._make_room() or self._try_finish_early(unit.index)):
                raise CapacityError(
                    f"no host memory is left for the gradients of unit `{unit.name}`: raise tiering.host_memory, or "
                    "set tiering.update_schedule to deferred, which has room for the gradients of all units"
                )

    def _try_finish_early(self, unit: int) -> bool:
        """Where others take part in an update, only if the capacity is used up, which it is on all of them alike."""
        return (self._alone or self._store.lacks_capacity(unit)) and self._finish_early()


def gaps(unit: Unit, slots: Container[int] | None = None) -> list[tuple[int, int]]:
    """Ranges of the unit's trainable part that belong to no parameter, or to none of `slots` if they are given."""
    ranges = []
    position = 0
    for index, slot in enumerate(unit.slots):
        if not slot.trainable:
            break
        if slots is not None and index not in slots:
            continue
        if slot.offset > position:
            ranges.append((position, slot.offset))
        position = slot.offset + slot.numel
    if position < unit.trainable_numel:
        ranges.append((position, unit.trainable_numel))
    return ranges
