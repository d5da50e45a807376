"""Gradients of several ranks: collected for a unit, reduced over the ranks, kept as this rank's shard.

[Note: when gradients are reduced]
A unit's gradients of one backward pass are collected in a flat tensor on the compute device. When backward leaves the
unit's module, they are reduced under the backward of the next one; what belongs to no such module, or to several (the
small parameters that stay, tied ones), follows at the end of the pass, once. Leaving happens on all ranks alike, while
which parameters have a gradient may differ (experts that got no token), so the flags that say which ones do are
exchanged beside the gradients. At stages 0 and 1 gradients are summed over the micro-batches first and reduced in the
last one's backward; at stages 2 and 3 in every one's. Those of layer-major micro-batches are summed first at every
stage, and reduced when all of them have left the module.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.kernels import GradStats, grad_store
from infinity.telemetry import Counters, StallCause
from infinity.tiers import GradStore, Sharding, overlap, to_host
from infinity.zero.gradients import Gradients, MakeRoom, gaps
from infinity.zero.model_parts import UNDIVIDED, ModelParts, local_gradient
from infinity.zero.partition import Unit
from infinity.zero.ranks import Pending, Ranks


@dataclass
class _Collected:
    """This rank's gradients of a unit: flat, which slots have one, and which have one of the pass that is running."""

    flat: torch.Tensor
    slots: set[int] = field(default_factory=set)
    of_pass: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Reduction:
    """A reduction under way; `shard` will be this rank's slice of the sum.

    Attributes:
        present: by slot, bytes: it has a gradient on some rank, and it has one of this pass.
    """

    unit: int
    flat: torch.Tensor
    shard: torch.Tensor
    present: torch.Tensor
    pending: tuple[Pending, Pending]


class ReducedGradients(Gradients):
    """Gradients that are the sum over all ranks.

    Args:
        every_pass: reduce in every backward pass (stages 2 and 3), not only in the last of a step.
        shared: units that several modules use.
        dtype: dtype in which gradients travel.
        collect_dtype: dtype in which they are collected before that.
        device: where the model computes.
        parts: who holds the other parts of the model, if it is divided.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        store: GradStore,
        make_room: MakeRoom,
        counters: Counters,
        *,
        ranks: Ranks,
        sharding: Sharding,
        every_pass: bool,
        shared: Container[int],
        dtype: torch.dtype,
        collect_dtype: torch.dtype,
        device: torch.device,
        parts: ModelParts = UNDIVIDED,
    ) -> None:
        super().__init__(units, store, make_room, counters, parts)
        self._alone = False
        self._ranks = ranks
        self._sharding = sharding
        self._every_pass = every_pass
        self._shared = shared
        self._dtype = dtype
        self._collect_dtype = collect_dtype
        self._device = device
        self._reduces = False  # in the backward pass that is running
        self._collected: dict[int, _Collected] = {}
        self._under_way: list[_Reduction] = []
        self._present: list[set[int]] = [set() for _ in units]  # slots with a gradient on some rank
        self._of_pass: list[set[int]] = [set() for _ in units]  # those that have come in this backward pass
        self._sums: dict[int, GradStats] = {}  # of this rank's shards
        self._spare: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    # Collecting #

    def take(self, unit_index: int, slot_index: int, param: nn.Parameter) -> bool:
        """Move `param.grad` to the other gradients of its unit; never complete before it is reduced."""
        grad = local_gradient(param)
        slot = self._units[unit_index].slots[slot_index]
        if grad is None:
            raise RuntimeError(f"gradient of {slot.name} is missing when its hook runs")
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        collected = self._collected.get(unit_index)
        if collected is None:
            numel = self._units[unit_index].trainable_numel
            collected = self._collected[unit_index] = _Collected(self._memory(numel, self._collect_dtype))
        target = collected.flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
        if slot_index in collected.slots:
            target.add_(grad)
        else:
            target.copy_(grad)
        collected.slots.add(slot_index)
        collected.of_pass.add(slot_index)
        param.grad = None
        return False

    def begin_backward(self, *, last: bool) -> None:
        self._reduces = last or self._every_pass

    # Reducing #

    def leave(self, unit: int) -> Sequence[int]:
        return () if unit in self._shared else self._left(unit)

    def _left(self, unit: int) -> Sequence[int]:
        return self._reduce(unit) if self._reduces and self._units[unit].trainable_numel else ()

    def complete(self, units: Sequence[int]) -> Iterator[int]:
        """Reduce these units, one after the other: a round later a unit might be away, and its update would wait."""
        for unit in units:
            self._left(unit)
            self._finish_reductions()
            if self._present[unit]:
                yield unit

    def end_backward(self) -> None:
        """Reduce what no module has reduced, so that every rank has its sums; the gradients are complete then."""
        if self._reduces:
            for unit in self._left_over():
                self._reduce(unit)
            self._finish_reductions()
        for collected in self._collected.values():
            collected.of_pass.clear()
        self._of_pass = [set() for _ in self._units]

    def abort_backward(self) -> None:
        self._reduces = False
        self._collected.clear()
        self._under_way.clear()
        self._of_pass = [set() for _ in self._units]

    def _left_over(self) -> list[int]:
        """Units with gradients on some rank that are not reduced yet."""
        flags = torch.zeros(len(self._units), dtype=torch.uint8)
        flags[list(self._collected)] = 1
        with self._counters.stalled(StallCause.COLLECTIVE):
            self._ranks.any_of(flags).wait()
        return [int(unit) for unit in flags.nonzero()]

    def _reduce(self, unit_index: int) -> Sequence[int]:
        """Start to reduce a unit's gradients, and keep the sums of the one before; returns what is complete."""
        complete = self._finish_reductions()
        unit = self._units[unit_index]
        collected = self._collected.pop(unit_index, None) or _Collected(
            self._memory(unit.trainable_numel, self._collect_dtype)
        )
        for start, stop in gaps(unit, collected.slots):
            collected.flat[start:stop] = 0
        flat = collected.flat
        if flat.dtype is not self._dtype:
            flat = self._memory(unit.trainable_numel, self._dtype).copy_(collected.flat)
            self._keep(collected.flat)
        present = torch.zeros(2, len(unit.slots), dtype=torch.uint8)
        present[0, list(collected.slots)] = 1
        present[1, list(collected.of_pass)] = 1
        flags = self._ranks.any_of(present)
        if self._sharding.count == 1:
            shard, sums = flat, self._ranks.all_reduce(flat, unit.name)
        else:
            shard = self._memory(unit.trainable_numel // self._sharding.count, self._dtype)
            sums = self._ranks.reduce_scatter(shard, flat, unit.name)
        self._under_way.append(_Reduction(unit_index, flat, shard, present, (flags, sums)))
        return complete

    def _finish_reductions(self) -> list[int]:
        """Add the sums that were under way to this rank's shards; returns the units that are complete now."""
        complete = []
        for reduction in self._under_way:
            with self._counters.stalled(StallCause.COLLECTIVE):
                for pending in reduction.pending:
                    pending.wait()
            here, of_pass = ({int(slot) for slot in flags.nonzero()} for flags in reduction.present)
            if here:
                self._add(reduction.unit, reduction.shard)
                self._present[reduction.unit] |= here
                self._of_pass[reduction.unit] |= of_pass
                if len(self._of_pass[reduction.unit]) == self._awaited[reduction.unit]:
                    complete.append(reduction.unit)
            self._keep(reduction.flat)
            if reduction.shard is not reduction.flat:
                self._keep(reduction.shard)
        self._under_way.clear()
        return complete

    def _add(self, unit: int, shard: torch.Tensor) -> None:
        buffer = self._store.get(unit)
        fresh = not self._store.holds(unit)
        if buffer is None:
            buffer = self._open(self._units[unit])
        stats = grad_store(buffer, to_host(shard, self._counters), accumulate=not fresh)
        self._sums[unit] = replace(stats, sum_sq=stats.sum_sq - self._counted_elsewhere(unit, buffer))

    def _counted_elsewhere(self, unit_index: int, shard: torch.Tensor) -> float:
        """Squares of what other parts of the model hold alike, as far as they account for it."""
        unit, total = self._units[unit_index], 0.0
        for own in self._sharding.pieces(unit.trainable_numel, unit.trainable_numel):
            for slot in unit.slots:
                share = self._parts.share(slot.name)
                here = overlap(own, slot.offset, slot.offset + slot.numel) if share < 1 and slot.trainable else None
                if here is not None:
                    values = shard[here.shard : here.shard + here.numel].double()
                    total += (1 - share) * float(values.square().sum())
        return total

    # Memory of what is collected #

    def _memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        spare = self._spare.get((numel, dtype))
        return spare.pop() if spare else torch.empty(numel, dtype=dtype, device=self._device)

    def _keep(self, tensor: torch.Tensor) -> None:
        """The memory may be used again: one tensor of each size is kept."""
        spare = self._spare.setdefault((tensor.numel(), tensor.dtype), [])
        if not spare:
            spare.append(tensor)

    # Sums #

    def units_with_gradients(self) -> list[int]:
        return [unit for unit, slots in enumerate(self._present) if slots]

    def slots_with_gradients(self, unit: int) -> frozenset[int]:
        return frozenset(self._present[unit])

    def is_finite(self, unit: int) -> bool:
        with self._counters.stalled(StallCause.COLLECTIVE):
            finite = not self._ranks.any(not self._sums[unit].finite)
            return not self._parts.ranks.any(not finite)

    def sum_sq(self, unit: int) -> float:
        return self._sums[unit].sum_sq

    def norm(self) -> float:
        sums = [self._sums[unit] for unit in self.units_with_gradients()]
        finite = all(stats.finite for stats in sums)
        return self.norm_of(math.fsum(stats.sum_sq for stats in sums) if finite else math.nan)

    def norm_of(self, sum_sq: float) -> float:
        if self._sharding.count == 1:
            return super().norm_of(sum_sq)
        with self._counters.stalled(StallCause.COLLECTIVE):
            total = self._ranks.sum(sum_sq)
        return super().norm_of(total)

    def forget(self, unit: int) -> None:
        self._present[unit] = set()
        self._sums.pop(unit, None)
        self._collecting.discard(unit)

    def held(self) -> bool:
        return bool(self._collected) or any(self._present)

    def drop_slots(self, slots: Mapping[int, Collection[int]]) -> None:
        """All of them: what is reduced of a unit is one sum.

        Raises:
            InfinityError: others would stay.
        """
        here = {unit: set(self._present[unit]) for unit in self.units_with_gradients()}
        for unit, collected in self._collected.items():
            here.setdefault(unit, set()).update(collected.slots)
        if any(some - set(slots.get(unit, ())) for unit, some in here.items()):
            raise InfinityError(
                "the gradients of some parameters were dropped (param.grad = None) and those of others were not, which "
                "several ranks cannot do: drop all of them with engine.zero_grad()"
            )
        self.drop_all()

    def drop_all(self) -> None:
        self._collected.clear()
        super().drop_all()
