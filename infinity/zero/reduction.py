"""Take gradients from autograd: as they are, or as the sum over several ranks.

[Note: when gradients are reduced]
A unit's gradients of one backward pass are collected in a flat tensor on the compute device. When backward leaves the
unit's module, they are reduced during the backward of the next one, see [Note: one order on all ranks] in
reduction_order.py. Units that belong to several modules, or to none (tied parameters, small parameters that stay in
memory), are reduced once, at the end of the pass.

Ranks may differ in which parameters have a gradient (experts without a token, parts of the model that a rank's batch
does not need), so they exchange flags for this. If updates begin within the pass, they need the flags early: each unit
sends them with its gradients. Otherwise there is one exchange for all units at the end of the pass.

At stages 0 and 1, gradients are summed over the micro-batches, and reduced in the backward of the last one. At stages 2
and 3 they are reduced in the backward of every micro-batch. Gradients of layer-major micro-batches are summed first at
every stage, and reduced when all micro-batches have left the module.

If ranks share states in groups, a reduction has two steps. First, the ranks of a group reduce-scatter the unit. Then,
during the reduce-scatter of the next unit, each rank all-reduces its slice with its replicas. See groups.py, and
[Note: replicas add up once a step].

[Note: gradients that come again]
Under reentrant checkpointing, and if a hook runs a backward pass of its own, a unit gets its gradients in parts, see
[Note: gradients in parts] in hooks.py. Such a unit is updated at the end of the pass, on all ranks or on none, but one
rank may have run code that the others have not. What a rank knows when a unit is reduced goes with the unit's flags.
A gradient that comes later is added to the next reduction of its unit, at the end of the pass, and this rank does not
update the unit before. At the end the ranks find out whether another one has updated it, and then all of them refuse
the step. So no decision that starts a collective depends on what only one rank knows.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from infinity.errors import DivergedError, InfinityError
from infinity.kernels import GradStats
from infinity.memory import Loan, scratch_on
from infinity.schedule.unit_state import UnitState
from infinity.telemetry import Counters, StallCause
from infinity.tiers import Sharding
from infinity.zero.agreement import agree, optimizer_facts
from infinity.zero.groups import Groups, PartialSum
from infinity.zero.model_parts import UNDIVIDED, ModelParts
from infinity.zero.partition import UnitLayout
from infinity.zero.path import checksum_flags
from infinity.zero.ranks import Pending
from infinity.zero.reduction_order import ReductionOrder
from infinity.zero.unit import WHOLE, Collected, Unit

_RATE_ADVICE = ". A scheduler that follows the loss (ReduceLROnPlateau) must get the same loss on all ranks: their mean"


class Addend(NamedTuple):
    """Gradients to be added to their unit's.

    Attributes:
        part: the index of a parameter, or WHOLE; parts are measured separately.
        place: elements of the unit's buffer for `values`, which are contiguous.
        present: indices of parameters with a gradient in it.
        of_pass: indices of parameters with a gradient of the running backward pass.
    """

    unit: Unit
    part: int
    place: slice
    values: torch.Tensor
    present: Collection[int]
    of_pass: Collection[int]


class Direct:
    """One rank: each parameter's gradient goes to its unit separately. The methods are those of `Reduction`."""

    groups = Groups()
    flags_at_end = False
    has_unreduced = False

    def __init__(self, units: Sequence[Unit], parts: ModelParts) -> None:
        self._parts = parts
        self.shares = bool(parts.shares)
        for unit in units:
            unit.total.gaps = gaps(unit.layout)

    def take(self, unit: Unit, index: int, grad: torch.Tensor) -> Addend | None:
        info, here = unit.layout.params[index], (index,)
        return Addend(unit, index, slice(info.offset, info.offset + info.numel), grad.contiguous(), here, here)

    def begin_pass(self, *, last: bool, uses: Sequence[UnitState] | None = None) -> None:
        """Do nothing: all passes are alike."""

    def leave(self, *_: Unit) -> Iterator[Any]:
        """Yield nothing: no gradient waits for other ranks, and each addend names its parameters."""
        return iter(())

    complete = rest = end_pass = flagged = unreduced = leave

    def forward_order(self) -> Sequence[int]:
        """Return nothing: no other rank has to agree."""
        return ()

    def clear(self) -> None:
        """Do nothing: no gradients are collected."""

    def collected_gradient(self, unit: Unit, index: int, *, of_all: bool) -> torch.Tensor | None:
        return None

    def measured(self, unit: UnitLayout, part: int, stats: GradStats, values: torch.Tensor) -> GradStats:
        return replace(stats, sum_sq=stats.sum_sq * self._parts.share(unit.params[part].name))

    def waiting_for_ranks(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class ReductionRules:
    """How gradients are summed over the ranks.

    Attributes:
        every_pass: reduce in every backward pass, not only in the last of a step.
        collect_dtype: dtype in which they are collected.
        dtype: dtype in which they are reduced.
        flags_early: the flags of the parameters that have a gradient are exchanged with each sum; if False, at the end
            of the pass.
        streams: sums leave the device while it computes, and may still be read when the next ones arrive.
    """

    sharding: Sharding
    every_pass: bool
    collect_dtype: torch.dtype
    dtype: torch.dtype
    flags_early: bool
    streams: bool = False


class _PendingReduction(NamedTuple):
    """A reduction in flight; `shard` will be this rank's slice of the sum.

    Attributes:
        whole: this rank's gradients of the unit; None if the shard is all of them.
        present: three flags for each parameter: some rank has a gradient, some rank has one of this pass, some rank
            expects more of the unit's. None if flags are exchanged at the end of the pass.
        pending: the exchanges to wait for: these flags, and the sum.
        partial: the sum of the step's earlier passes, if replicas add up once a step.
        stays: the sum is only added to `partial`: the replicas add up in a later pass.
    """

    of: Unit
    whole: Loan | None
    shard: Loan
    present: torch.Tensor | None
    pending: tuple[Pending, ...]
    partial: PartialSum | None = None
    stays: bool = False


class Reduction:
    """Several ranks: collect gradients by unit, reduce them, and yield this rank's shard.

    Callers must add each yielded addend before they take the next one: its memory is reused.

    Args:
        shared: units that several modules use.
        device: where the model computes.
        parts: the other parts of a divided model.
        update_rules: returns the present update rules of the parameter groups.

    Attributes:
        flags_at_end: whether `flagged`, at the end of the pass, names the parameters with a gradient, instead of each
            addend.
        shares: other parts of the model hold some of the parameters, too, so `measured` must correct for them.
        groups: the ranks that share a sum, and the replicas that have the same shard.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: Groups,
        rules: ReductionRules,
        shared: Container[int],
        device: torch.device,
        counters: Counters,
        parts: ModelParts = UNDIVIDED,
        update_rules: Callable[[], Sequence[object]] = list,
    ) -> None:
        self.groups = groups
        self._last = False
        self._units = units
        self._count = 0  # of all parameters
        for unit in units:
            stop = self._count + len(unit.layout.params)
            unit.total.flags, self._count = slice(self._count, stop), stop
            unit.total.early = unit.layout.trainable_numel > 0 and unit.index not in shared
        self._rules = rules
        self.flags_at_end = not rules.flags_early
        self._device = device
        self._scratch = scratch_on(device, read_late=rules.streams)
        self._counters = counters
        self._parts = parts
        self._update_rules = update_rules
        self.shares = bool(parts.shares)
        self._reduces = False  # in the running backward pass
        self._scattering: _PendingReduction | None = None
        self._averaging: _PendingReduction | None = None
        self._present = self._no_flags()
        self._used: set[Unit] = set()  # units with a gradient on some rank
        self._order = ReductionOrder(reversed([unit for unit in units if unit.total.early]))
        self._knows_order = False

    @property
    def has_unreduced(self) -> bool:
        """Whether any gradients are not reduced over all ranks yet."""
        return any(unit.total.collected is not None or unit.total.pending_sum is not None for unit in self._units)

    def unreduced(self) -> Iterator[tuple[Unit, set[int]]]:
        """Yield the parameters with gradients that are not reduced yet, by unit."""
        for unit in self._units:
            if unit.total.unreduced:
                yield unit, unit.total.unreduced

    def _no_flags(self) -> torch.Tensor:
        """Return zeros, one for each parameter, to flag gradients that were reduced in this pass.

        They flag this rank's gradients and, after the exchange, those of all ranks.
        """
        return torch.zeros(self._count, dtype=torch.uint8, device="cpu")

    # Collecting #

    def take(self, unit: Unit, index: int, grad: torch.Tensor) -> Addend | None:
        """Collect a parameter's gradient. Return the gradients that are to be added at once."""
        total, place = unit.total, unit.layout.params[index]
        if not self.flags_at_end and unit in self._order.skipped:
            raise InfinityError(
                f"a gradient of `{place.name}` has come, but this rank has not run its module in "
                "this pass, and other ranks may have updated it already: read it in the model's forward, or "
                'set tiering.update_schedule to "deferred"'
            )
        if total.collected is None:
            total.collected = self._empty(unit.layout)
        collected = total.collected
        if unit in self._order.over:
            unit.running.late.add(index)
        target = collected.loan.tensor[place.offset : place.offset + place.numel].view(place.shape)
        if index in collected.present:
            target.add_(grad)
        else:
            target.copy_(grad)
        collected.present.add(index)
        return None

    def _empty(self, unit: UnitLayout) -> Collected:
        return Collected(self._scratch.take(unit.trainable_numel, self._rules.collect_dtype))

    def begin_pass(self, *, last: bool, uses: Sequence[UnitState] | None = None) -> None:
        """Begin a backward pass; `last` is whether it is the last one of a step.

        Args:
            uses: the unit of each call in its forward on this rank, in order; None if unknown.
        """
        self._reduces = last or self._rules.every_pass
        self._last = last
        self._present = self._no_flags()
        calls = Counter(uses or ())
        for unit in self._units:
            unit.running.uses, unit.running.left = calls[unit], 0
        self._used.clear()
        if self._reduces and not self._knows_order:
            self._learn_order(reversed(list(calls)))
            self._knows_order = True
        self._order.begin(None if uses is None else {unit for unit in self._units if unit.running.uses})

    def _learn_order(self, order: Iterable[UnitState]) -> None:
        """Replace every rank's order by rank 0's."""
        known = torch.full((len(self._units),), -1, dtype=torch.int64, device="cpu")
        early = set(self._order.order)
        mine = torch.tensor([unit.index for unit in order if unit in early], dtype=torch.int64, device="cpu")
        known[: len(mine)] = mine
        with self.waiting_for_ranks():
            self.groups.all.broadcast(known)
        self._order.learn(self._units[int(index)] for index in known if index >= 0)

    def clear(self) -> None:
        """Drop the collected gradients, and the running pass."""
        self._reduces = False
        for total in (unit.total for unit in self._units):
            if total.collected is not None:
                dropped, total.collected = total.collected, None
                self._scratch.give(dropped.loan)
            if total.partial is not None:
                total.partial.is_pending = False
        # Do not wait for these, because other ranks may never answer. A collective that still writes keeps its memory.
        self._scattering = self._averaging = None

    def collected_gradient(self, unit: Unit, index: int, *, of_all: bool) -> torch.Tensor | None:
        """Return a copy, flat and in float32, of a parameter's collected gradient; None if there is none.

        Args:
            of_all: return its sum over the ranks, which all call this; if False, this rank's gradient.
        """
        place, collected, partial = unit.layout.params[index], unit.total.collected, unit.total.pending_sum
        mine = None
        if collected is not None and index in collected.present:
            mine = collected.loan.tensor[place.offset : place.offset + place.numel]
        if not of_all:
            return None if mine is None else mine.float().clone()
        here = mine is not None or (partial is not None and index in partial.present)
        if not self.groups.all.any(here):
            return None
        total = torch.zeros(place.numel, dtype=self._rules.dtype, device=self._device)
        if mine is not None:
            total.copy_(mine)
        if partial is not None:
            for part in unit.layout.parts(self._rules.sharding, of=place):
                total[part.param] += partial.values[part.shard]
        self.groups.all.all_reduce(total, unit.layout.name).wait()
        return total.float()

    # Reducing #

    def leave(self, unit: Unit) -> Iterator[Addend]:
        """Note that backward has left a module of the unit. Yield earlier reductions, and reduce the unit while
        backward goes on."""
        total, running = unit.total, unit.running
        running.left += 1
        has_all = total.collected is not None and len(running.arrived) == total.trained
        if self._reduces and total.early and (has_all or running.left >= running.uses):
            for due in self._order.leave(unit):
                yield from self._reduce(due)

    def complete(self, unit: Unit) -> Iterator[Addend]:
        """Reduce the unit at once, when all micro-batches have left it: in the next round it may be evicted."""
        self._order.over.add(unit)
        yield from self._reduce(unit)
        yield from self._finish()

    def forward_order(self) -> Sequence[int]:
        """Return units in the expected order of the next forward, the same on all ranks; some may be missing."""
        return [unit.index for unit in reversed(self._order.order)]

    def rest(self) -> Iterator[Addend]:
        """Reduce the units that other ranks have reduced in this backward, and this rank has not."""
        if self._reduces:
            for unit in self._order.rest():
                yield from self._reduce(unit)

    def end_pass(self) -> Iterator[Addend]:
        """Reduce the remaining units, so that every rank has its sums."""
        yield from self.rest()
        if self._reduces:
            self.groups.all.path.mark("the end of the backward pass")
            left, order_suits = self._left()
            for unit in left:
                yield from self._reduce(unit)
            yield from self._finish()
            if not order_suits:
                self._learn_order(self._order.left)
            if self._last:  # in earlier passes, units with partial sums send no flags
                self._order.note_used(self._used | {unit for unit, _ in self.flagged()})

    def _left(self) -> tuple[list[Unit], bool]:
        """Return units whose gradients on some rank are not reduced yet, and whether the order has suited all ranks."""
        count = len(self._units)
        left = torch.zeros(count, dtype=torch.uint8, device="cpu")
        for unit in self._units:
            if unit.total.collected is not None or (self._last and unit.total.pending_sum is not None):
                left[unit.index] = 1
        present = self._no_flags()[:0]
        if self.flags_at_end:
            for index in left.nonzero():
                unit = self._units[int(index)]
                self._note(unit, unit.total.unreduced)
            present = self._present
        path = self.groups.all.path.flags()
        update_rules = checksum_flags(zlib.crc32(repr(self._update_rules()).encode()))
        lacking = _flags(unit.running.lacks_part for unit in self._units)
        updated = _flags(unit.running.updated for unit in self._units)
        suits = _flags([not self._order.suits])
        flags = torch.cat([left, present, path, update_rules, lacking, updated, suits])
        with self.waiting_for_ranks():
            self.groups.all.any_of(flags).wait()
        sizes = [count, len(present), len(path), len(update_rules), count, count, 1]
        left, present, path_of_all, rules_of_all, lacking, updated, unsuited = flags.split(sizes)
        if not torch.equal(path_of_all, path):
            raise DivergedError(
                "the ranks have run different modules in this step, or the same in another order, so that gradients or "
                "parameters of different units were mixed: have all ranks take one path through the model, and draw "
                "what it depends on (layers that are left out at random) from one seed"
            )
        if not torch.equal(rules_of_all, update_rules):  # each rank would update its shard by its own rule
            agree(self.groups.all, {"optimizer": optimizer_facts(self._update_rules(), {})}, _RATE_ADVICE)
        for index in lacking.nonzero():
            unit = self._units[int(index)]
            if updated[index]:
                raise second_gradient(f"a parameter of unit `{unit.layout.name}`")
            unit.running.waits = True
        if self.flags_at_end:
            self._present = present
        return [self._units[int(index)] for index in left.nonzero()], not bool(unsuited)

    def _note(self, unit: Unit, indices: set[int]) -> None:
        if not self._stays(unit):
            self._present[unit.total.flags][list(indices)] = 1

    def _stays(self, unit: Unit) -> bool:
        """Whether the unit's gradients of this pass wait for the last one."""
        return not self._last and unit.total.partial is not None

    def flagged(self) -> Iterator[tuple[Unit, list[int]]]:
        """Yield parameters with a gradient on some rank in the finished pass, by unit, unless addends named them."""
        if not (self._reduces and self.flags_at_end):
            return
        for unit in self._units:
            indices = [int(index) for index in self._present[unit.total.flags].nonzero()]
            if indices:
                yield unit, indices

    def _reduce(self, unit: Unit) -> Iterator[Addend]:
        """Start to reduce a unit, after the one before it is added."""
        total, layout = unit.total, unit.layout
        dtype, sharding = self._rules.dtype, self._rules.sharding
        numel = layout.trainable_numel
        if not self._reduces or not numel:
            return
        yield from self._advance()
        indices, stays = total.unreduced, self._stays(unit)
        collected, total.collected = total.collected or self._empty(layout), None
        whole = collected.loan
        for start, stop in gaps(layout, collected.present):
            whole.tensor[start:stop] = 0
        if whole.tensor.dtype is not dtype:
            whole = self._scratch.take(numel, dtype)
            whole.tensor.copy_(collected.loan.tensor)
            self._scratch.give(collected.loan)
        partial = total.partial if stays else total.pending_sum
        if partial is not None and stays:
            partial.announce(indices)
        elif partial is not None:
            partial.is_pending = False  # this reduction completes it
        own = None
        if sharding.count == 1:
            sums = self.groups.replicas.all_reduce(whole.tensor, layout.name)
        else:
            own = self._scratch.take(numel // sharding.count, dtype)
            sums = self.groups.sharing.reduce_scatter(own.tensor, whole.tensor, layout.name)
        # The flags are sent after the sums, because the sums detect a rank that is at another unit.
        present, flags = (None, ()) if stays else self._send_flags(unit, indices)
        if own is None:
            self._averaging = _PendingReduction(unit, None, whole, present, (*flags, sums))
        else:
            self._scattering = _PendingReduction(unit, whole, own, present, (*flags, sums), partial, stays)

    def _send_flags(self, unit: Unit, indices: set[int]) -> tuple[torch.Tensor | None, tuple[Pending, ...]]:
        """Return which parameters have a gradient on this rank and, after the pending exchange, on some rank."""
        if self.flags_at_end:
            self._note(unit, indices)
            return None, ()
        present = torch.zeros(3, len(unit.layout.params), dtype=torch.uint8, device="cpu")
        present[0, list(indices)] = 1
        present[1, list(unit.running.arrived)] = 1
        present[2] = unit.running.in_parts
        return present, (self.groups.all.any_of(present),)

    def _finish(self) -> Iterator[Addend]:
        """Wait for all reductions in flight, and yield their sums."""
        yield from self._advance()
        yield from self._advance()

    def _advance(self) -> Iterator[Addend]:
        """Wait for reductions in flight. Start the sum over the replicas for a scattered one; yield a complete one."""
        scattered, self._scattering = self._scattering, None
        complete, self._averaging = self._averaging, None
        if scattered is not None:
            self._wait_for(scattered)
            assert scattered.whole is not None
            self._scratch.give(scattered.whole)
            if self.groups.replicas.size == 1:
                complete = scattered._replace(pending=())  # no second sum
            elif scattered.stays:
                assert scattered.partial is not None
                scattered.partial.add(scattered.shard.tensor)
                self._scratch.give(scattered.shard)
            else:
                if scattered.partial is not None:
                    scattered.partial.add_to(scattered.shard.tensor)
                name = scattered.of.layout.name
                sums = self.groups.replicas.all_reduce(scattered.shard.tensor, name)
                self._averaging = scattered._replace(pending=(sums,))
        if complete is not None:
            yield from self._complete(complete)

    def _wait_for(self, reduction: _PendingReduction) -> None:
        with self.waiting_for_ranks():
            for pending in reduction.pending:
                pending.wait()

    def _complete(self, reduction: _PendingReduction) -> Iterator[Addend]:
        """Yield a sum over all ranks."""
        self._wait_for(reduction)
        here: set[int] = set()
        of_pass: set[int] = set()
        if reduction.present is not None:
            here, of_pass, in_parts = ({int(index) for index in flags.nonzero()} for flags in reduction.present)
            reduction.of.running.waits |= bool(in_parts)
        if here:
            self._used.add(reduction.of)
        if here or reduction.present is None:
            shard = reduction.shard.tensor
            yield Addend(reduction.of, WHOLE, slice(0, shard.numel()), shard, here, of_pass)
        self._scratch.give(reduction.shard)

    def measured(self, unit: UnitLayout, part: int, stats: GradStats, values: torch.Tensor) -> GradStats:
        """Subtract the squares of parameters that other parts of the model hold, too, according to their share."""
        elsewhere = 0.0
        for here in unit.parts(self._rules.sharding):
            share = self._parts.share(here.info.name)
            if share < 1 and here.info.trainable:
                elsewhere += (1 - share) * float(values[here.shard].double().square().sum())
        return replace(stats, sum_sq=stats.sum_sq - elsewhere)

    def waiting_for_ranks(self) -> AbstractContextManager[None]:
        """Count the time of a wait for the other ranks."""
        return self._counters.stalled(StallCause.COLLECTIVE)


def second_gradient(which: str) -> InfinityError:
    """Return the error for a parameter whose update has used a part of its gradient."""
    return InfinityError(
        f"{which} has got a second gradient in one backward pass, and the first has updated it already: a hook or an "
        "autograd function runs a backward pass of its own within this one, as reentrant checkpoints do "
        "(use_reentrant=True; of a layer that its block calls twice). Set tiering.update_schedule to deferred, which "
        "updates after all of them, or use_reentrant to False, and resume from the last checkpoint"
    )


def _flags(values: Iterable[bool]) -> torch.Tensor:
    return torch.tensor([*values], dtype=torch.uint8, device="cpu")


def gaps(unit: UnitLayout, indices: Container[int] | None = None) -> list[tuple[int, int]]:
    """Return ranges of the unit's trainable part that belong to no parameter, or to none of `indices` if given."""
    ranges = []
    position = 0
    for index, info in enumerate(unit.params):
        if not info.trainable:
            break
        if indices is not None and index not in indices:
            continue
        if info.offset > position:
            ranges.append((position, info.offset))
        position = info.offset + info.numel
    if position < unit.trainable_numel:
        ranges.append((position, unit.trainable_numel))
    return ranges
