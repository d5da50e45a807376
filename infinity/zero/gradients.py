"""Gradients on their way from autograd to the optimizer: flat, accumulated, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.kernels import GradStats
from infinity.telemetry import Counters
from infinity.tiers import DeviceSums, GradStores
from infinity.zero.landing import Coming, Landing, Measures, Parted
from infinity.zero.model_parts import UNDIVIDED, ModelParts, local_gradient
from infinity.zero.partition import Unit
from infinity.zero.ranks import Vote
from infinity.zero.reduction import WHOLE, Addend, Direct, Reduction


@dataclass(slots=True)
class _StepTotal:
    """A unit's gradients of this step so far: parameters that have one, and the measurements."""

    present: set[int] = field(default_factory=set)
    stats: Measures = field(default_factory=dict)


@dataclass(slots=True)
class _UnitTotal:
    """The gradients of a unit so far.

    Attributes:
        trained: the number of its trained parameters.
        of_pass: parameters whose gradient has come in the running pass.
        step: None before the step's first gradient, and after the hand-over to an update.
    """

    unit: Unit
    trained: int
    of_pass: set[int] = field(default_factory=set)
    step: _StepTotal | None = None

    def begun(self) -> _StepTotal:
        if self.step is None:
            self.step = _StepTotal()
        return self.step


class Gradients:
    """The parameters' gradients of the current step.

    Args:
        source: takes them from autograd.
        landing: brings them into `stores`, which hold them.
        sums: sums over micro-batches on the device, as far as there is room.
        parts: the other parts of a divided model.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        stores: GradStores,
        source: Direct | Reduction,
        landing: Landing | Parted,
        sums: DeviceSums,
        counters: Counters,
        parts: ModelParts = UNDIVIDED,
    ) -> None:
        self._store = stores.of
        self._source = source
        self._landing = landing
        self._sums = sums
        self._counters = counters
        self._parts = parts
        self._last_pass = False
        self._rows = [_UnitTotal(unit, sum(slot.trainable for slot in unit.slots)) for unit in units]

    # Arriving #

    def take(self, unit: int, slot: int, param: nn.Parameter) -> Addend | None:
        """Take `param.grad` away. Return the gradients that are to be added now."""
        grad = local_gradient(param)
        if grad is None:
            raise RuntimeError(f"gradient of {self._rows[unit].unit.slots[slot].name} is missing when its hook runs")
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        addend = self._source.take(unit, slot, grad)
        param.grad = None
        return addend

    def sum_there(self, addend: Addend) -> Addend | None:
        """Add to the device's sum of a part's gradients in this step, if it has one or has room for one.

        Returns:
            The gradients for `try_add`; None if nothing leaves the device yet.
        """
        if self._last_pass and not self._sums.units:
            return addend
        unit, part, start, _, grad, *_ = addend
        row = self._rows[unit]
        begins_here = (
            not self._last_pass and (row.step is None or part not in row.step.stats) and self._sums.make_room(unit)
        )
        if not begins_here and not self._sums.holds(unit, part):
            return addend
        self._sums.add(unit, part, start, grad.view(-1))
        if self._last_pass:
            summed = addend._replace(values=self._sums.of(unit, part))
            self._sums.drop(unit, part)
            return summed
        self._note_come(row, addend)
        return None

    def finish(self) -> Iterator[Addend]:
        """Yield the step's remaining gradients, if the user says only now that its last pass is over."""
        if not self._last_pass:
            self._source.begin_pass(last=True)
            yield from self._source.end_pass()
            self._note_told()
        yield from self.sums_left()

    def sums_left(self) -> Iterator[Addend]:
        """Yield the sums on the device to which the last micro-batch has added nothing."""
        for unit, part in self._sums.held():
            addend = self._sum_of(unit, part)
            self._sums.drop(unit, part)
            yield addend

    def _sum_of(self, unit: int, part: int) -> Addend:
        """Return the device's sum of a part, to be added on the host."""
        values, start = self._sums.of(unit, part), 0 if part == WHOLE else self._rows[unit].unit.slots[part].offset
        return Addend(unit, part, start, start + values.numel(), values, (), ())  # the slots are recorded already

    def all_come(self, unit: int) -> bool:
        """Whether all gradients of the unit have come in this backward pass, or need not be waited for."""
        row = self._rows[unit]
        return self._source.tells_late or len(row.of_pass) == row.trained

    @staticmethod
    def _note_come(row: _UnitTotal, addend: Addend) -> None:
        row.begun().present.update(addend.present)
        row.of_pass.update(addend.of_pass)

    def try_add(self, addend: Addend) -> bool | None:
        """Add to the host's gradients of a unit.

        Returns:
            Whether all gradients of the unit have come in this backward pass; None if nothing was added for lack of
                room.
        """
        row = self._rows[addend.unit]
        step = row.step or row.begun()  # first, so that a buffer opened below can be dropped
        is_first = not step.stats
        if not self._landing.add(addend, step.stats, last_pass=self._last_pass):
            return None
        if is_first:
            for low, high in self._source.gaps[row.unit.index]:
                self._store(row.unit.index).tensor(row.unit.index)[low:high] = 0  # kernels process the padding, too
        step.present.update(addend.present)
        row.of_pass.update(addend.of_pass)
        return self._source.tells_late or len(row.of_pass) == row.trained

    def begin_backward(self, *, last: bool, uses: Sequence[int] | None) -> None:
        """Begin a backward pass; `last` is whether it is the last one of a step.

        Args:
            uses: see `Reduction.begin_pass`.
        """
        self._last_pass = last
        self._source.begin_pass(last=last, uses=uses)

    def leave(self, unit: int) -> Iterator[Addend]:
        """Yield gradients to add after backward has left a module of the unit."""
        return self._source.leave(unit)

    def complete(self, unit: int) -> Iterator[Addend]:
        """Yield gradients to add after a step's backward has left the unit for the last time."""
        return self._source.complete(unit)

    def forward_order(self) -> Sequence[int]:
        """Return units in the expected order of the next forward, the same on all ranks; some may be missing."""
        return self._source.forward_order()

    def left_over(self) -> Iterator[Addend]:
        """Yield gradients of units that other ranks have reduced during backward and this one has not."""
        return self._source.rest()

    def end_backward(self) -> Iterator[Addend]:
        """End the pass after yielding its last gradients."""
        yield from self._source.end_pass()
        self._note_told()
        if self._last_pass:
            yield from self.sums_left()
        self._forget_pass()

    def _note_told(self) -> None:
        """Note which parameters have a gradient, now that it is known. Drop units in which none has one on any rank."""
        if not self._source.tells_late:
            return
        for unit, slots in self._source.told():
            self._rows[unit].begun().present.update(slots)
        for row in self._rows:
            if row.step is not None and not row.step.present:
                self._sums.drop(row.unit.index, WHOLE)
                self._drop(row)

    def abort_backward(self) -> None:
        """Forget the pass, which has failed."""
        self._source.clear()
        self._forget_pass()

    def _forget_pass(self) -> None:
        for row in self._rows:
            row.of_pass.clear()

    # Sums #

    def begun(self, unit: int) -> bool:
        """Whether the unit has a gradient in this step."""
        return self._rows[unit].step is not None

    def units_with_gradients(self) -> list[int]:
        return [row.unit.index for row in self._rows if row.step is not None and row.step.present]

    def slots_with_gradients(self, unit: int) -> frozenset[int]:
        step = self._rows[unit].step
        return frozenset() if step is None else frozenset(step.present)

    def have_come(self, unit: int) -> bool:
        """Whether the measurements of the unit can be read without waiting."""
        return self._store(unit).has_come(unit)

    @property
    def lag(self) -> int:
        """Number of units whose gradients may still be on their way from the device while the next unit is computed."""
        return self._landing.lag

    @property
    def alone(self) -> bool:
        """Whether gradients can be checked at any time, because no other rank takes part in it."""
        return self._source.groups.all.size * self._parts.ranks.size == 1

    def ask_others(self, unit: int) -> Vote:
        """Start a vote on whether a gradient of the unit is not finite, on any rank or in any part of the model."""
        spoilt, sharing = not self._is_finite_here(unit), self._source.groups.sharing
        if self._parts.ranks.size == 1:
            return sharing.ask(spoilt)
        with self._source.agreeing():
            spoilt = sharing.any(spoilt)
        return self._parts.ranks.ask(spoilt)

    def is_finite(self, vote: Vote) -> bool:
        """Wait for the vote of `ask_others`."""
        with self._source.agreeing():
            return not vote.result()

    def _is_finite_here(self, unit: int) -> bool:
        return all(stats.finite for stats in self._stats(unit))

    def _stats(self, unit: int) -> list[GradStats]:
        """Return the measurements of the unit's gradients. Blocks until they have come."""
        stats = self._measures(unit)
        for part in [part for part, measured in stats.items() if measured is None]:
            stats[part] = self._landing.measure(unit, part)
        for part, measured in reversed(tuple(stats.items())):  # after the last one all are there, so there is one wait
            if isinstance(measured, Coming):
                stats[part] = self._landing.settled(unit, part, measured.stats(self._counters))
        return [measured for measured in stats.values() if isinstance(measured, GradStats)]

    def _measures(self, unit: int) -> Measures:
        step = self._rows[unit].step
        return {} if step is None else step.stats

    def are_measured(self, unit: int) -> bool:
        """Whether the norm is known without reading the unit's gradients again."""
        stats = self._measures(unit).values()
        return all(isinstance(each, GradStats) or (each is not None and not self._parts.shares) for each in stats)

    def sums_sq(self, unit: int) -> list[float]:
        """Return the squared norm of each of the unit's gradients, or of this rank's shard of them."""
        return [stats.sum_sq for stats in self._stats(unit)]

    def norm(self) -> float:
        """Return the Euclidean norm over all gradients of the step; NaN if one of them is not finite."""
        units = self.units_with_gradients()
        finite = all(self._is_finite_here(unit) for unit in units)
        return self.norm_of([each for unit in units for each in self.sums_sq(unit)] if finite else [math.nan])

    def norm_of(self, sums_sq: Iterable[float]) -> float:
        """Return the norm over all ranks' shards and the model's parts, from this rank's.

        A rank's sum is rounded once, so the order of units does not change it. On a rank that is alone, cutting blocks
        does not change it either.
        """
        with self._source.agreeing():
            return math.sqrt(self._parts.ranks.sum(self._source.groups.sharing.sum(math.fsum(sums_sq))))

    # Reads from outside #

    def held_values(self, unit: int, free: Callable[[int], bool]) -> torch.Tensor:
        """Return the unit's gradients, to read or to change (`remeasure` follows).

        Args:
            free: frees memory for a unit's gradients; False if there is none to free.

        Raises:
            InfinityError: an update has them, or they are not reduced over the ranks yet.
        """
        self.check_reduced()
        for other, part in self._sums.held():
            if other == unit:
                while self.try_add(self._sum_of(unit, part)) is None:  # in case of an error it stays on the device
                    self._have_freed(unit, free)
                self._sums.drop(unit, part)
        while (buffer := self._store(unit).open(unit)) is None:
            self._have_freed(unit, free)
        return buffer

    def collected_anywhere(self) -> bool:
        """Whether some rank has gradients that are not reduced over the ranks yet. All ranks call this together."""
        return self._source.groups.all.any(self._source.waits)

    def collected_values(self, unit: int, slot: int, *, of_all: bool) -> torch.Tensor | None:
        """Return a copy of a gradient that is not reduced yet: see `Reduction.look`.

        Raises:
            InfinityError: another part of it is reduced already.
        """
        if slot in self.slots_with_gradients(unit):
            self.check_reduced()
        return self._source.look(unit, slot, of_all=of_all)

    @staticmethod
    def _have_freed(unit: int, free: Callable[[int], bool]) -> None:
        if not free(unit):
            raise InfinityError("there is no room to look at gradients: raise tiering.host_memory (or device_memory)")

    def check_reduced(self) -> None:
        """Check that all gradients can be read.

        Raises:
            InfinityError: some are not reduced over the ranks yet.
        """
        if self._source.waits:
            raise InfinityError(
                "gradients are not reduced over the ranks before the last micro-batch's backward, at stages 0 and 1 "
                "and with communication.shard_size: look at them after that, before step()"
            )

    def remeasure(self, unit: int) -> None:
        """Measure the unit's gradients, which are in memory, again after a change from outside."""
        stats = self._measures(unit)
        for part in stats:
            stats[part] = self._landing.measure(unit, part)

    # Room #

    def rest(self, unit: int) -> None:
        """Note that the unit's gradients do not change for a while."""
        self._store(unit).rest(unit)

    def all_lack_room(self, unit: int) -> bool:
        """Whether all ranks that share the unit's gradients have no capacity left for them."""
        return self.alone or self._store(unit).lacks_capacity(unit)

    # Ends #

    def forget(self, unit: int) -> None:
        """Start a new sum at the unit's next gradient: the present ones belong to an update."""
        self._rows[unit].step = None

    def held(self) -> bool:
        """Whether there are gradients without an update."""
        return self._source.waits or bool(self.units_with_gradients())

    def drop_slots(self, slots: Mapping[int, Collection[int]]) -> None:
        """Drop the gradients of these parameters, given as slots by unit.

        Raises:
            InfinityError: others would stay, but the reduced gradients of a unit are one sum.
        """
        if self._source.groups.all.size > 1:
            here = {row.unit.index: set(row.step.present) for row in self._rows if row.step is not None}
            for unit, waiting in self._source.slots_that_wait():
                here.setdefault(unit, set()).update(waiting)
            if any(some - set(slots.get(unit, ())) for unit, some in here.items()):
                raise InfinityError(
                    "the gradients of some parameters were dropped (param.grad = None) and those of others were not, "
                    "which several ranks cannot do: drop all of them with engine.zero_grad()"
                )
            self.drop_all()
            return
        for unit in slots:
            row = self._rows[unit]
            if row.step is None:
                continue
            for slot in slots[unit]:
                row.step.present.discard(slot)
                row.step.stats.pop(slot, None)
                self._sums.drop(unit, slot)
            if not row.step.present:
                self._drop(row)

    def drop_all(self) -> None:
        self._source.clear()
        self._sums.clear()
        for row in self._rows:
            if row.step is not None:
                self._drop(row)

    def _drop(self, row: _UnitTotal) -> None:
        store = self._store(row.unit.index)
        if store.holds(row.unit.index):
            store.drop(row.unit.index)
        row.step = None
