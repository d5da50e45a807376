"""Gradients on their way from autograd to the optimizer: held flat, accumulated, measured."""

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
    """A unit's gradients of this step so far: slots that have one, and what was measured."""

    present: set[int] = field(default_factory=set)
    stats: Measures = field(default_factory=dict)


@dataclass(slots=True)
class _UnitTotal:
    """What has come of a unit's gradients.

    Attributes:
        index: of the unit.
        trained: how many of its parameters are.
        of_pass: slots that have come in the pass that is running.
        step: None before the step's first gradient, and once they are handed over.
    """

    index: int
    unit: Unit
    trained: int
    of_pass: set[int] = field(default_factory=set)
    step: _StepTotal | None = None

    def begun(self) -> _StepTotal:
        if self.step is None:
            self.step = _StepTotal()
        return self.step


class Gradients:
    """What the parameters' gradients of the current step are so far.

    Args:
        source: how they come from autograd.
        landing: how they come into `stores`, where they are held.
        sums: where those of several micro-batches are added up on the device, as far as there is room.
        parts: who holds the other parts of the model, if it is divided.
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
        self._rows = [_UnitTotal(unit.index, unit, sum(slot.trainable for slot in unit.slots)) for unit in units]

    # Arriving #

    def take(self, unit: int, slot: int, param: nn.Parameter) -> Addend | None:
        """Take `param.grad` away; returns what is to be added now."""
        grad = local_gradient(param)
        if grad is None:
            raise RuntimeError(f"gradient of {self._rows[unit].unit.slots[slot].name} is missing when its hook runs")
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        addend = self._source.take(unit, slot, grad)
        param.grad = None
        return addend

    def sum_there(self, addend: Addend) -> Addend | None:
        """Add to what the device has of a part's gradients in this step, if that is where they are added up.

        Returns:
            What `try_add` is to add now; None if nothing leaves the device yet.
        """
        if self._last_pass and not self._sums.units:
            return addend
        unit, part, start, _, grad, *_ = addend
        row = self._rows[unit]
        begins_here = (
            not self._last_pass and (row.step is None or part not in row.step.stats) and self._sums.has_room(unit)
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
        """Go through what the step has not added yet, where only now the user says that its last pass was that."""
        if not self._last_pass:
            self._source.begin_pass(last=True)
            yield from self._source.end_pass()
            self._note_told()
        yield from self.sums_left()

    def sums_left(self) -> Iterator[Addend]:
        """Go through what is still on the device of sums to which the last micro-batch has added nothing."""
        for unit, part in self._sums.held():
            addend = self._sum_of(unit, part)
            self._sums.drop(unit, part)
            yield addend

    def _sum_of(self, unit: int, part: int) -> Addend:
        """What the device has added up, for the host."""
        values, start = self._sums.of(unit, part), 0 if part == WHOLE else self._rows[unit].unit.slots[part].offset
        return Addend(unit, part, start, start + values.numel(), values, (), ())  # whose they are is known

    def all_come(self, unit: int) -> bool:
        """All gradients of the unit have come in this backward pass, as far as it takes to let them rest."""
        row = self._rows[unit]
        return self._source.tells_late or len(row.of_pass) == row.trained

    @staticmethod
    def _note_come(row: _UnitTotal, addend: Addend) -> None:
        row.begun().present.update(addend.present)
        row.of_pass.update(addend.of_pass)

    def try_add(self, addend: Addend) -> bool | None:
        """Add to what host memory has of a unit.

        Returns:
            Whether all gradients of the unit have come in this backward pass; None, and nothing is added, while there
            is no room.
        """
        row = self._rows[addend.unit]
        step = row.step or row.begun()  # first, so that what is opened can be dropped
        is_first = not step.stats
        if not self._landing.add(addend, step.stats, last_pass=self._last_pass):
            return None
        if is_first:
            for low, high in self._source.gaps[row.index]:
                self._store(row.index).tensor(row.index)[low:high] = 0  # kernels run over the padding too
        step.present.update(addend.present)
        row.of_pass.update(addend.of_pass)
        return self._source.tells_late or len(row.of_pass) == row.trained

    def begin_backward(self, *, last: bool, uses: Sequence[int] | None) -> None:
        """A backward pass begins, the `last` one of a step or not.

        Args:
            uses: see `Reduction.begin_pass`.
        """
        self._last_pass = last
        self._source.begin_pass(last=last, uses=uses)

    def leave(self, unit: int) -> Iterator[Addend]:
        """Backward has left a module of the unit; go through what is to be added because of that."""
        return self._source.leave(unit)

    def complete(self, unit: int) -> Iterator[Addend]:
        """A step's backward is through the unit; go through what is to be added because of that."""
        return self._source.complete(unit)

    def forward_order(self) -> Sequence[int]:
        """Units in the order in which the next forward will probably use them, which all ranks know; not all units."""
        return self._source.forward_order()

    def left_over(self) -> Iterator[Addend]:
        """Backward is over; go through what other ranks have added within it, and `leave` has not said here."""
        return self._source.rest()

    def end_backward(self) -> Iterator[Addend]:
        """The pass is over, once what is to be added because of that is gone through."""
        yield from self._source.end_pass()
        self._note_told()
        if self._last_pass:
            yield from self.sums_left()
        self._forget_pass()

    def _note_told(self) -> None:
        """It is known now which parameters have a gradient; units of which none has, on no rank, have nothing."""
        if not self._source.tells_late:
            return
        for unit, slots in self._source.told():
            self._rows[unit].begun().present.update(slots)
        for row in self._rows:
            if row.step is not None and not row.step.present:
                self._sums.drop(row.index, WHOLE)
                self._drop(row)

    def abort_backward(self) -> None:
        """The pass has failed."""
        self._source.clear()
        self._forget_pass()

    def _forget_pass(self) -> None:
        for row in self._rows:
            row.of_pass.clear()

    # Sums #

    def begun(self, unit: int) -> bool:
        """Something has been added to the unit's gradients in this step."""
        return self._rows[unit].step is not None

    def units_with_gradients(self) -> list[int]:
        return [row.index for row in self._rows if row.step is not None and row.step.present]

    def slots_with_gradients(self, unit: int) -> frozenset[int]:
        step = self._rows[unit].step
        return frozenset() if step is None else frozenset(step.present)

    def have_come(self, unit: int) -> bool:
        """What is known of the unit's gradients is known without waiting."""
        return self._store(unit).has_come(unit)

    @property
    def lag(self) -> int:
        """Of how many units gradients may be on their way from the device while those of the next are computed."""
        return self._landing.lag

    @property
    def alone(self) -> bool:
        """No other rank takes part in what is found out about gradients, so that it can be done at any time."""
        return self._source.groups.all.size * self._parts.ranks.size == 1

    def ask_others(self, unit: int) -> Vote:
        """Begin to find out whether a gradient of the unit is not finite, on some rank or in some part of the model."""
        spoilt, sharing = not self._is_finite_here(unit), self._source.groups.sharing
        if self._parts.ranks.size == 1:
            return sharing.ask(spoilt)
        with self._source.agreeing():
            spoilt = sharing.any(spoilt)
        return self._parts.ranks.ask(spoilt)

    def is_finite(self, vote: Vote) -> bool:
        """What came of `ask_others`."""
        with self._source.agreeing():
            return not vote.result()

    def _is_finite_here(self, unit: int) -> bool:
        return all(stats.finite for stats in self._stats(unit))

    def _stats(self, unit: int) -> list[GradStats]:
        """What was measured of the unit's gradients, once it has come."""
        stats = self._measures(unit)
        for part in [part for part, measured in stats.items() if measured is None]:
            stats[part] = self._landing.measure(unit, part)
        for part, measured in reversed(tuple(stats.items())):  # behind the last, all of them are there: one wait
            if isinstance(measured, Coming):
                stats[part] = self._landing.settled(unit, part, measured.stats(self._counters))
        return [measured for measured in stats.values() if isinstance(measured, GradStats)]

    def _measures(self, unit: int) -> Measures:
        step = self._rows[unit].step
        return {} if step is None else step.stats

    def are_measured(self, unit: int) -> bool:
        """Nobody looks at the unit's gradients again to know their norm."""
        stats = self._measures(unit).values()
        return all(isinstance(each, GradStats) or (each is not None and not self._parts.shares) for each in stats)

    def sums_sq(self, unit: int) -> list[float]:
        """What each of the unit's gradients, or this rank's shard of it, contributes to the square of the norm."""
        return [stats.sum_sq for stats in self._stats(unit)]

    def norm(self) -> float:
        """Euclidean norm over all gradients of the step; NaN if one of them is not finite."""
        units = self.units_with_gradients()
        finite = all(self._is_finite_here(unit) for unit in units)
        return self.norm_of([each for unit in units for each in self.sums_sq(unit)] if finite else [math.nan])

    def norm_of(self, sums_sq: Iterable[float]) -> float:
        """The norm over all ranks' shards and the model's parts, of this rank's.

        A rank's sum is rounded once, so that the order of units does not change it; nor does, on a rank that is alone,
        where blocks are cut.
        """
        with self._source.agreeing():
            return math.sqrt(self._parts.ranks.sum(self._source.groups.sharing.sum(math.fsum(sums_sq))))

    # Looks from outside #

    def held_values(self, unit: int, free: Callable[[int], bool]) -> torch.Tensor:
        """What is held of the unit's gradients, to look at or to change (`remeasure` follows).

        Args:
            free: frees memory for a unit's gradients; False if there is none.

        Raises:
            InfinityError: an update has them, or they are not reduced over the ranks yet.
        """
        self.check_reduced()
        for other, part in self._sums.held():
            if other == unit:
                while self.try_add(self._sum_of(unit, part)) is None:  # it stays where it is
                    self._have_freed(unit, free)
                self._sums.drop(unit, part)
        while (buffer := self._store(unit).open(unit)) is None:
            self._have_freed(unit, free)
        return buffer

    def collected_anywhere(self) -> bool:
        """Some rank has gradients that are not reduced over the ranks yet; all of them ask together."""
        return self._source.groups.all.any(self._source.waits)

    def collected_values(self, unit: int, slot: int, *, of_all: bool) -> torch.Tensor | None:
        """A copy of a gradient that is not reduced yet: see `Reduction.look`.

        Raises:
            InfinityError: the step has another part of it, which is reduced.
        """
        if slot in self.slots_with_gradients(unit):
            self.check_reduced()
        return self._source.look(unit, slot, of_all=of_all)

    @staticmethod
    def _have_freed(unit: int, free: Callable[[int], bool]) -> None:
        if not free(unit):
            raise InfinityError("there is no room to look at gradients: raise tiering.host_memory (or device_memory)")

    def check_reduced(self) -> None:
        """All gradients that backward passes have made can be looked at.

        Raises:
            InfinityError: some are not reduced over the ranks yet.
        """
        if self._source.waits:
            raise InfinityError(
                "gradients are not reduced over the ranks before the last micro-batch's backward, at stages 0 and 1 "
                "and with communication.shard_size: look at them after that, before step()"
            )

    def remeasure(self, unit: int) -> None:
        """The unit's gradients, which are in memory, were changed from outside: their norm is another one."""
        stats = self._measures(unit)
        for part in stats:
            stats[part] = self._landing.measure(unit, part)

    # Room #

    def rest(self, unit: int) -> None:
        """Nothing more is added to the unit's gradients for a while."""
        self._store(unit).rest(unit)

    def all_lack_room(self, unit: int) -> bool:
        """Whoever has a part in the unit's gradients has no capacity left for them."""
        return self.alone or self._store(unit).lacks_capacity(unit)

    # Ends #

    def forget(self, unit: int) -> None:
        """The unit's gradients are handed over: what arrives next starts a new sum."""
        self._rows[unit].step = None

    def held(self) -> bool:
        """There are gradients that no update has."""
        return self._source.waits or bool(self.units_with_gradients())

    def drop_slots(self, slots: Mapping[int, Collection[int]]) -> None:
        """Throw the gradients of these parameters away, given as slots by unit.

        Raises:
            InfinityError: others would stay, and what is reduced of a unit is one sum.
        """
        if self._source.groups.all.size > 1:
            here = {row.index: set(row.step.present) for row in self._rows if row.step is not None}
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
        """Throw the step's gradients away."""
        self._source.clear()
        self._sums.clear()
        for row in self._rows:
            if row.step is not None:
                self._drop(row)

    def _drop(self, row: _UnitTotal) -> None:
        store = self._store(row.index)
        if store.holds(row.index):
            store.drop(row.index)
        row.step = None
