"""How gradients come to host memory: as autograd makes them, or as the sum over several ranks.

[Note: when gradients are reduced]
A unit's gradients of one backward pass are collected in a flat tensor on the compute device. When backward leaves the
unit's module, they are reduced under the backward of the next one, see [Note: one order on all ranks] in
reduction_order.py; what belongs to no such module, or to several (the small parameters that stay, tied ones), follows
at the end of the pass, once. Which parameters have a gradient may differ (experts that got no token, parts of the model
that a rank's batch does not need), so flags that say which ones do are exchanged:
of all units at once at the end of the pass, in one exchange, or, where updates begin within the pass and have to know,
of each unit beside its gradients. At stages 0 and 1 gradients are summed over the micro-batches first and reduced in
the last one's backward; at stages 2 and 3 in every one's. Those of layer-major micro-batches are summed first at every
stage, and reduced when all of them have left the module.

Where ranks share states in groups, a reduction is two: the ranks of a group scatter the unit's sum, and then, under the
scatter of the next unit, each adds up its slice with the replicas that have the same one. See groups.py, and
[Note: replicas add up once a step].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import torch

from infinity.errors import DivergedError, InfinityError
from infinity.kernels import GradStats
from infinity.memory import Loan, scratch_on
from infinity.telemetry import Counters, StallCause
from infinity.tiers import Sharding, overlap
from infinity.zero.groups import Groups
from infinity.zero.model_parts import UNDIVIDED, ModelParts
from infinity.zero.partial_sums import PartialSum
from infinity.zero.partition import Unit
from infinity.zero.ranks import Pending
from infinity.zero.reduction_order import ReductionOrder

WHOLE = -1  # the one part of a unit whose gradients are reduced together


_Told: TypeAlias = tuple[torch.Tensor | None, tuple[Pending, ...]]  # flags by slot, and what they wait for


class Addend(NamedTuple):
    """Gradients that are to be added to those that host memory has of their unit.

    Attributes:
        part: what is measured by itself: a slot, or WHOLE.
        start, stop: where `values`, contiguous, lie in the unit's buffer.
        present: slots that have a gradient in it.
        of_pass: those that have one of the backward pass that is running.
    """

    unit: int
    part: int
    start: int
    stop: int
    values: torch.Tensor
    present: Collection[int]
    of_pass: Collection[int]


@dataclass
class _Collected:
    """This rank's gradients of a unit: flat, which slots have one, and which have one of the pass that is running."""

    loan: Loan
    slots: set[int] = field(default_factory=set)
    of_pass: set[int] = field(default_factory=set)


class Direct:
    """One rank: every parameter's gradient goes to its unit by itself. The verbs are those of `Reduction`."""

    groups = Groups()
    tells_late = False
    waits = False

    def __init__(self, units: Sequence[Unit], parts: ModelParts = UNDIVIDED) -> None:
        self._slots = [unit.slots for unit in units]
        self._parts = parts
        self.shares = bool(parts.shares)
        self.gaps: Sequence[Sequence[tuple[int, int]]] = [gaps(unit) for unit in units]

    def take(self, unit: int, slot: int, grad: torch.Tensor) -> Addend | None:
        place, here = self._slots[unit][slot], (slot,)
        return Addend(unit, slot, place.offset, place.offset + place.numel, grad.contiguous(), here, here)

    def begin_pass(self, *, last: bool, uses: Sequence[int] | None = None) -> None:
        """All passes are alike."""

    def leave(self, unit: int) -> Iterator[Addend]:
        return iter(())

    complete = leave

    def rest(self) -> Iterator[Addend]:
        return iter(())

    end_pass = rest

    def forward_order(self) -> Sequence[int]:
        """There is nobody to agree with."""
        return ()

    def told(self) -> Iterator[tuple[int, list[int]]]:
        """Every addend has said it all."""
        return iter(())

    def clear(self) -> None:
        """Nothing is collected."""

    def slots_that_wait(self) -> Iterator[tuple[int, set[int]]]:
        """Nothing waits."""
        return iter(())

    def look(self, unit: int, slot: int, *, of_all: bool) -> torch.Tensor | None:
        """Nothing is."""
        return None

    def measured(self, unit: int, part: int, stats: GradStats, values: torch.Tensor) -> GradStats:
        return replace(stats, sum_sq=stats.sum_sq * self._parts.share(self._slots[unit][part].name))

    def agreeing(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class Journey:
    """How gradients come from this rank to all.

    Attributes:
        every_pass: reduce in every backward pass, not only in the last of a step.
        collect_dtype: in which they are collected.
        dtype: in which they travel.
        tells_early: which parameters have one is known with each sum, else only at the end of the pass.
        streams: sums leave the device while it computes on: they may be read when more come.
    """

    sharding: Sharding
    every_pass: bool
    collect_dtype: torch.dtype
    dtype: torch.dtype
    tells_early: bool
    streams: bool = False


class _Reduction(NamedTuple):
    """A reduction under way; `shard` will be this rank's slice of the sum.

    Attributes:
        whole: the unit's gradients of this rank; None where the shard is all of them.
        present: by slot, bytes: it has a gradient on some rank, and it has one of this pass; None where that is known
            at the end of the pass.
        pending: what is waited for: these flags, and the sum.
        partial: the sum of the step's earlier passes, which it is to be added to, if there is one.
        stays: it is added to no more than that in this pass.
    """

    unit: int
    whole: Loan | None
    shard: Loan
    present: torch.Tensor | None
    pending: tuple[Pending, ...]
    partial: PartialSum | None = None
    stays: bool = False


@dataclass(slots=True, eq=False)
class _ReducedUnit:
    """One unit, and what this rank has of its gradients.

    Attributes:
        first: of its slots, among those of all units.
        trainable: how many of its parameters have gradients.
        shared: several modules use it.
        partial: where its replicas add up once a step: what its group has summed so far.
        collected: what is not reduced yet; None while that is nothing.
        uses: calls in the forward of the backward pass that is running, if they are known.
        left: how many of them that pass has left.
    """

    unit: Unit
    first: int
    trainable: int
    shared: bool
    partial: PartialSum | None
    collected: _Collected | None = None
    uses: int = 0
    left: int = 0

    @property
    def held(self) -> PartialSum | None:
        """What is summed in its group, and not over the replicas yet; None if that is nothing."""
        return self.partial if self.partial is not None and self.partial.held else None

    @property
    def slots(self) -> set[int]:
        """Slots of which this rank has a gradient that is not reduced over all ranks yet."""
        here = set() if self.collected is None else self.collected.slots
        return here if self.held is None else here | self.held.slots

    @property
    def has_all(self) -> bool:
        """This rank has all gradients of it once backward has left it: of a call of its module, or of all calls."""
        if self.collected is not None and len(self.collected.of_pass) == self.trainable:
            return True
        return self.left >= self.uses


class Reduction:
    """Several ranks: gradients are collected by unit, reduced, and come to host memory as this rank's shard.

    Who goes through an iterator adds each addend before it asks for the next.

    Args:
        shared: units that several modules use.
        device: where the model computes.
        parts: who holds the other parts of the model, if it is divided.
        partial_sums: of units whose replicas add up once a step.

    Attributes:
        gaps: of each unit's buffer, elements that lie in no addend.
        shares: other parts of the model hold some parameters, too, so that `measured` has something to do.
        groups: who shares the sums, and who has the same of them.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: Groups,
        journey: Journey,
        shared: Container[int],
        device: torch.device,
        counters: Counters,
        parts: ModelParts = UNDIVIDED,
        partial_sums: Mapping[int, PartialSum] | None = None,
    ) -> None:
        self.groups = groups
        self._last = False
        self.gaps: Sequence[Sequence[tuple[int, int]]] = [()] * len(units)
        self._units: list[_ReducedUnit] = []
        self._slots = 0  # of all units
        for index, unit in enumerate(units):
            partial = None if partial_sums is None else partial_sums.get(index)
            trainable = sum(slot.trainable for slot in unit.slots)
            self._units.append(_ReducedUnit(unit, self._slots, trainable, index in shared, partial))
            self._slots += len(unit.slots)
        self._journey = journey
        self._device = device
        self._scratch = scratch_on(device, read_late=journey.streams)
        self._counters = counters
        self._parts = parts
        self.shares = bool(parts.shares)
        self._reduces = False  # in the backward pass that is running
        self._scattering: _Reduction | None = None
        self._averaging: _Reduction | None = None
        self._present = self._no_flags()
        self._used: set[int] = set()  # units of which some rank has a gradient of it
        alone = (index for index, unit in enumerate(units) if unit.trainable_numel and index not in shared)
        self._order = ReductionOrder(reversed(list(alone)))
        self._knows_order = False

    @property
    def tells_late(self) -> bool:
        """Which parameters have a gradient is known at the end of the pass, by `told`; addends do not say it."""
        return not self._journey.tells_early

    @property
    def waits(self) -> bool:
        """There are gradients that are not reduced over all ranks yet."""
        return any(each.collected is not None or each.held is not None for each in self._units)

    def slots_that_wait(self) -> Iterator[tuple[int, set[int]]]:
        """Whose they are: parameters of which this rank has one, by unit."""
        for unit, each in enumerate(self._units):
            if each.slots:
                yield unit, each.slots

    def _no_flags(self) -> torch.Tensor:
        """Of all units' slots, bytes: this rank has reduced a gradient of it in this pass; at the end, some has."""
        return torch.zeros(self._slots, dtype=torch.uint8, device="cpu")

    # Collecting #

    def take(self, unit: int, slot: int, grad: torch.Tensor) -> Addend | None:
        """A parameter's gradient has come; returns what is to be added at once."""
        each = self._units[unit]
        if self._journey.tells_early and unit in self._order.skipped:
            raise InfinityError(
                f"a gradient of `{each.unit.slots[slot].name}` has come, whose module this pass has not run on "
                "this rank, and other ranks' gradients of it may have updated it: read it in the model's forward, or "
                'set tiering.update_schedule to "deferred"'
            )
        if each.collected is None:
            each.collected = self._empty(each.unit)
        collected, place = each.collected, each.unit.slots[slot]
        target = collected.loan.tensor[place.offset : place.offset + place.numel].view(place.shape)
        if slot in collected.slots:
            target.add_(grad)
        else:
            target.copy_(grad)
        collected.slots.add(slot)
        collected.of_pass.add(slot)
        return None

    def _empty(self, unit: Unit) -> _Collected:
        return _Collected(self._scratch.take(unit.trainable_numel, self._journey.collect_dtype))

    def begin_pass(self, *, last: bool, uses: Sequence[int] | None = None) -> None:
        """A backward pass begins, the `last` one of a step or not.

        Args:
            uses: the units that its forward has used on this rank, as often as it has, in their order; None if that is
                not known.
        """
        self._reduces = last or self._journey.every_pass
        self._last = last
        self._present = self._no_flags()
        calls = Counter(uses or ())
        for unit, each in enumerate(self._units):
            each.uses, each.left = calls[unit], 0
        self._used.clear()
        if self._reduces and not self._knows_order:
            self._learn_order(reversed(dict.fromkeys(uses or ())))
            self._knows_order = True
        self._order.begin(None if uses is None else calls.keys())

    def _learn_order(self, order: Iterable[int]) -> None:
        """All ranks take over rank 0's order."""
        told = torch.full((len(self._units),), -1, dtype=torch.int64, device="cpu")
        mine = torch.tensor([unit for unit in order if unit in self._order.order], dtype=torch.int64, device="cpu")
        told[: len(mine)] = mine
        with self.agreeing():
            self.groups.all.broadcast(told)
        self._order.learn(int(unit) for unit in told if unit >= 0)

    def clear(self) -> None:
        """What is collected is of no use, nor is the pass that is running."""
        self._reduces = False
        for each in self._units:
            if each.collected is not None:
                dropped, each.collected = each.collected, None
                self._scratch.give(dropped.loan)
            if each.partial is not None:
                each.partial.held = False
        # Other ranks may never answer, and what still writes there keeps its memory.
        self._scattering = self._averaging = None

    def look(self, unit: int, slot: int, *, of_all: bool) -> torch.Tensor | None:
        """A copy, flat and in float32, of what is collected of a parameter's gradient; None if nothing is.

        Args:
            of_all: its sum over the ranks, which look together; else what this one has.
        """
        each = self._units[unit]
        place, collected, partial = each.unit.slots[slot], each.collected, each.held
        mine = None
        if collected is not None and slot in collected.slots:
            mine = collected.loan.tensor[place.offset : place.offset + place.numel]
        if not of_all:
            return None if mine is None else mine.float().clone()
        here = mine is not None or (partial is not None and slot in partial.slots)
        if not self.groups.all.any(here):
            return None
        total = torch.zeros(place.numel, dtype=self._journey.dtype, device=self._device)
        if mine is not None:
            total.copy_(mine)
        if partial is not None:
            numel = each.unit.trainable_numel
            for own in self._journey.sharding.pieces(numel, numel):
                part = overlap(own, place.offset, place.offset + place.numel)
                if part is not None:
                    start = part.whole - place.offset
                    total[start : start + part.numel] += partial.values[part.shard : part.shard + part.numel]
        self.groups.all.all_reduce(total, each.unit.name).wait()
        return total.float()

    # Reducing #

    def leave(self, unit: int) -> Iterator[Addend]:
        """Backward has left a module of the unit: add what was under way, and reduce the unit under what comes next."""
        each = self._units[unit]
        each.left += 1
        if self._reduces and not each.shared and each.has_all:
            for due in self._order.leave(unit):
                yield from self._reduce(due)

    def complete(self, unit: int) -> Iterator[Addend]:
        """All micro-batches have left the unit, which is reduced at once: a round later it might be away."""
        self._order.complete(unit)
        yield from self._reduce(unit)
        yield from self._finish()

    def forward_order(self) -> Sequence[int]:
        """See `Gradients.forward_order`."""
        return self._order.order[::-1]

    def rest(self) -> Iterator[Addend]:
        """Backward is over: reduce those units that other ranks have reduced within it."""
        if self._reduces:
            for unit in self._order.rest():
                yield from self._reduce(unit)

    def end_pass(self) -> Iterator[Addend]:
        """Reduce what no module has reduced, so that every rank has its sums."""
        yield from self.rest()
        if self._reduces:
            self.groups.all.path.mark("the end of the backward pass")
            left, order_suits = self._left()
            for unit in left:
                yield from self._reduce(unit)
            yield from self._finish()
            if not order_suits:
                self._learn_order(self._order.left)
            if self._last:  # in others, some units say nothing
                self._order.note_used(self._used | {unit for unit, _ in self.told()})
        for each in self._units:
            if each.collected is not None:
                each.collected.of_pass.clear()

    def _left(self) -> tuple[list[int], bool]:
        """Units of which some rank has gradients that no module has reduced; and the order has suited all ranks."""
        count = len(self._units)
        left = torch.zeros(count, dtype=torch.uint8, device="cpu")
        for unit, each in enumerate(self._units):
            if each.collected is not None or (self._last and each.held is not None):
                left[unit] = 1
        told = self._no_flags()[:0]
        if self.tells_late:
            for unit in left.nonzero():
                each = self._units[int(unit)]
                self._note(each, each.slots)
            told = self._present
        path = self.groups.all.path.flags()
        flags = torch.cat([left, told, path, torch.tensor([not self._order.suits], dtype=torch.uint8, device="cpu")])
        with self.agreeing():
            self.groups.all.any_of(flags).wait()
        left, told, path_of_all, unsuited = flags.split([count, len(told), len(path), 1])
        if not torch.equal(path_of_all, path):
            raise DivergedError(
                "the ranks have run different modules in this step, or the same in another order, so that gradients or "
                "parameters of different units were mixed: have all ranks take one path through the model, and draw "
                "what it depends on (layers that are left out at random) from one seed"
            )
        if self.tells_late:
            self._present = told
        return [int(unit) for unit in left.nonzero()], not bool(unsuited)

    def _note(self, each: _ReducedUnit, slots: set[int]) -> None:
        if not self._stays(each):
            self._present[[each.first + slot for slot in slots]] = 1

    def _stays(self, each: _ReducedUnit) -> bool:
        """What this pass has of the unit waits for the last one."""
        return not self._last and each.partial is not None

    def told(self) -> Iterator[tuple[int, list[int]]]:
        """By unit, slots that have a gradient on some rank in the pass that is over, if addends have not said it."""
        if not (self._reduces and self.tells_late):
            return
        for unit, each in enumerate(self._units):
            flags = self._present[each.first : each.first + len(each.unit.slots)]
            slots = [int(slot) for slot in flags.nonzero()]
            if slots:
                yield unit, slots

    def _reduce(self, index: int) -> Iterator[Addend]:
        """Start to reduce a unit, once the one before is added."""
        each, journey = self._units[index], self._journey
        unit = each.unit
        numel = unit.trainable_numel
        if not self._reduces or not numel:
            return
        yield from self._advance()
        slots, stays = each.slots, self._stays(each)
        collected, each.collected = each.collected or self._empty(unit), None
        whole = collected.loan
        for start, stop in gaps(unit, collected.slots):
            whole.tensor[start:stop] = 0
        if whole.tensor.dtype is not journey.dtype:
            whole = self._scratch.take(numel, journey.dtype)
            whole.tensor.copy_(collected.loan.tensor)
            self._scratch.give(collected.loan)
        partial = each.partial if stays else each.held
        if partial is not None and stays:
            partial.hold(slots)
        elif partial is not None:
            partial.held = False  # this reduction completes it
        own = None
        if journey.sharding.count == 1:
            sums = self.groups.replicas.all_reduce(whole.tensor, unit.name)
        else:
            own = self._scratch.take(numel // journey.sharding.count, journey.dtype)
            sums = self.groups.sharing.reduce_scatter(own.tensor, whole.tensor, unit.name)
        # Behind the sums, before which ranks that are not at the same unit find that out.
        present, flags = (None, ()) if stays else self._tell(each, slots, collected.of_pass)
        if own is None:
            self._averaging = _Reduction(index, None, whole, present, (*flags, sums))
        else:
            self._scattering = _Reduction(index, whole, own, present, (*flags, sums), partial, stays)

    def _tell(self, each: _ReducedUnit, slots: set[int], of_pass: set[int]) -> _Told:
        """Which slots of a unit have a gradient: here, and once what is pending is over, on some rank."""
        if self.tells_late:
            self._note(each, slots)
            return None, ()
        present = torch.zeros(2, len(each.unit.slots), dtype=torch.uint8, device="cpu")
        present[0, list(slots)] = 1
        present[1, list(of_pass)] = 1
        return present, (self.groups.all.any_of(present),)

    def _finish(self) -> Iterator[Addend]:
        """Wait for all that is under way, and go through what it brings."""
        yield from self._advance()
        yield from self._advance()

    def _advance(self) -> Iterator[Addend]:
        """Wait for what is under way, if anything is: what was scattered is summed over the replicas next, under what
        comes then, and what is complete is gone through."""
        scattered, self._scattering = self._scattering, None
        complete, self._averaging = self._averaging, None
        if scattered is not None:
            self._wait_for(scattered)
            assert scattered.whole is not None
            self._scratch.give(scattered.whole)
            if self.groups.replicas.size == 1:
                complete = scattered._replace(pending=())  # nothing is averaged
            elif scattered.stays:
                assert scattered.partial is not None
                scattered.partial.add(scattered.shard.tensor)
                self._scratch.give(scattered.shard)
            else:
                if scattered.partial is not None:
                    scattered.partial.add_to(scattered.shard.tensor)
                name = self._units[scattered.unit].unit.name
                sums = self.groups.replicas.all_reduce(scattered.shard.tensor, name)
                self._averaging = scattered._replace(pending=(sums,))
        if complete is not None:
            yield from self._complete(complete)

    def _wait_for(self, reduction: _Reduction) -> None:
        with self.agreeing():
            for pending in reduction.pending:
                pending.wait()

    def _complete(self, reduction: _Reduction) -> Iterator[Addend]:
        """A sum over all ranks."""
        self._wait_for(reduction)
        here: set[int] = set()
        of_pass: set[int] = set()
        if reduction.present is not None:
            here, of_pass = ({int(slot) for slot in flags.nonzero()} for flags in reduction.present)
        if here:
            self._used.add(reduction.unit)
        if here or reduction.present is None:
            shard = reduction.shard.tensor
            yield Addend(reduction.unit, WHOLE, 0, shard.numel(), shard, here, of_pass)
        self._scratch.give(reduction.shard)

    def measured(self, unit: int, part: int, stats: GradStats, values: torch.Tensor) -> GradStats:
        """Less the squares of what other parts of the model hold alike, as far as they account for it."""
        layout = self._units[unit].unit
        elsewhere, numel = 0.0, layout.trainable_numel
        for own in self._journey.sharding.pieces(numel, numel):
            for slot in layout.slots:
                share = self._parts.share(slot.name)
                here = overlap(own, slot.offset, slot.offset + slot.numel) if share < 1 and slot.trainable else None
                if here is not None:
                    shared = values[here.shard : here.shard + here.numel].double()
                    elsewhere += (1 - share) * float(shared.square().sum())
        return replace(stats, sum_sq=stats.sum_sq - elsewhere)

    def agreeing(self) -> AbstractContextManager[None]:
        """Around a wait for the other ranks."""
        return self._counters.stalled(StallCause.COLLECTIVE)


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
