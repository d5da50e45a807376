"""The way of gradients from autograd to the optimizer: add them up in a flat buffer a unit, and measure their norms."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.kernels import GradStats
from infinity.schedule.unit_state import UnitState
from infinity.telemetry import Counters
from infinity.tiers import DeviceSums
from infinity.tiers.norms import ArrivingStats
from infinity.zero.model_parts import ModelParts, local_gradient
from infinity.zero.ranks import Vote
from infinity.zero.reduction import Addend, Direct, Reduction
from infinity.zero.unit import WHOLE, Unit

_LAG = 2  # units: when the gradients of two more units are computed, those of a unit have probably arrived on the host


class Gradients:
    """The gradients of the current step. They are added and measured by part: a parameter of a unit, or the unit.

    Args:
        units: all units, by index.
        sums: sums over micro-batches on the device, as far as there is room.
        parts: the other parts of a model that tensor parallelism divides.
        streams: whether gradients, or their norms, leave the device while it computes.

    Attributes:
        source: takes gradients from autograd, and reduces them over the ranks.
        sums_over_ranks: whether several ranks add up their gradients.
        alone: whether there are no other ranks, so that this rank may check a unit's gradients at any time.
        sums_on_device: whether the device may sum the gradients of several micro-batches.
        last_pass: whether the running or latest backward pass is the step's last one.
        lag: number of units whose gradients may still be on their way from the device while the next is computed.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        source: Direct | Reduction,
        sums: DeviceSums,
        counters: Counters,
        parts: ModelParts,
        *,
        sums_on_device: bool,
        streams: bool,
    ) -> None:
        self._units = units
        self.source = source
        self._sums = sums
        self._counters = counters
        self._parts = parts
        self.sums_over_ranks = source.groups.all.size > 1
        self.alone = source.groups.all.size * parts.ranks.size == 1
        self.sums_on_device = sums_on_device
        self.lag = _LAG if streams else 0
        self.last_pass = False

    # Arriving #

    def take(self, unit: Unit, index: int, param: nn.Parameter) -> Addend | None:
        """Take the gradient from `param.grad`. Return gradients to add now; None if they are reduced first."""
        unit.running.arrived.add(index)
        grad = local_gradient(param)
        if grad is None:
            raise RuntimeError(f"gradient of {unit.layout.params[index].name} is missing when its hook runs")
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        addend = self.source.take(unit, index, grad)
        param.grad = None
        return addend

    def sum_on_device(self, addend: Addend) -> Addend | None:
        """Add gradients to the device's sum of this part in the step, if there is one or room for one.

        Returns:
            The gradients for `try_add`; None if the sum stays on the device until the step's last pass.
        """
        unit, part, place, grad, *_ = addend
        step, sums = unit.total.step, unit.grads.sums
        begins_sum = (
            not self.last_pass
            and (step is None or part not in step.stats)
            and not unit.is_updated_on_device  # else its gradients never leave the device
            and self._sums.make_room(unit.grads)
        )
        if not begins_sum and part not in sums:
            return addend
        self._sums.add(unit.grads, part, place.start, grad.view(-1))
        if self.last_pass:
            return addend._replace(values=sums.pop(part))
        unit.total.open_step().present.update(addend.present)
        unit.running.added.update(addend.of_pass)
        return None

    def finish(self) -> Iterator[Addend]:
        """Yield the step's remaining gradients, if only now the latest backward pass turns out to be its last one."""
        if not self.last_pass:
            self.source.begin_pass(last=True)
            yield from self.source.end_pass()
            self._note_flags()
        yield from self.remaining_sums()

    def remaining_sums(self) -> Iterator[Addend]:
        """Yield the sums on the device to which the last micro-batch has added nothing."""
        for unit in reversed(self._units):  # as backward reaches them
            for part in list(unit.grads.sums):
                addend = self._sum_of(unit, part)
                del unit.grads.sums[part]
                yield addend

    def _sum_of(self, unit: Unit, part: int) -> Addend:
        """Return the device's sum of a part, to be added on the host."""
        values = unit.grads.sums[part]
        place = slice(0, values.numel()) if part == WHOLE else _place(unit, part)
        return Addend(unit, part, place, values, (), ())  # the parameters are recorded already

    def are_complete(self, unit: Unit) -> bool:
        """Whether all gradients of the unit have come in this backward pass, or only its end shows which ones come."""
        return self.source.flags_at_end or len(unit.running.added) == unit.total.trained

    def try_add(self, addend: Addend) -> bool:
        """Add gradients to those of their unit. Return False, and add nothing, if they have no room."""
        unit, part, place, grad, *_ = addend
        total, store = unit.total, unit.grads_store
        step = total.open_step()  # first, so that a buffer opened below can be dropped
        stats = step.stats
        is_first = not stats
        if not store.add(unit.grads, part, place, grad, stats, last=self.last_pass):
            return False
        measured = stats[part]
        if isinstance(measured, GradStats):
            if self.source.shares:
                stats[part] = self._share_of(unit, part, measured)
        elif measured is not None and not unit.is_updated_on_device:
            unit.params.download_after = measured.copy
        if is_first:
            for low, high in total.gaps:
                store.tensor(unit.grads)[low:high] = 0  # kernels process the padding, too
        step.present.update(addend.present)
        unit.running.added.update(addend.of_pass)
        return True

    def begin_backward(self, *, last: bool, uses: Sequence[UnitState] | None) -> None:
        """Begin a backward pass; `last` is whether it is the last one of a step.

        Args:
            uses: see `Reduction.begin_pass`.
        """
        self.last_pass = last
        self.source.begin_pass(last=last, uses=uses)

    def end_backward(self) -> Iterator[Addend]:
        """End the pass after yielding its last gradients."""
        yield from self.source.end_pass()
        self._note_flags()
        if self.last_pass:
            yield from self.remaining_sums()

    def _note_flags(self) -> None:
        """Note which parameters have a gradient on some rank, if only the end of the pass shows it.

        Drop the gradients of units in which no parameter has one.
        """
        if not self.source.flags_at_end:
            return
        for unit, indices in self.source.flagged():
            unit.total.open_step().present.update(indices)
        for unit in self._units:
            if unit.total.step is not None and not unit.total.step.present:
                unit.grads.sums.pop(WHOLE, None)
                self._drop(unit)

    # Sums #

    def units_with_gradients(self) -> list[Unit]:
        return [unit for unit in self._units if unit.total.present]

    def are_finite(self, unit: Unit) -> bool:
        """Whether the unit's gradients, or this rank's shard of them, are finite. Blocks until they have come."""
        return all(each.finite for each in self.stats(unit))

    def start_vote(self, unit: Unit) -> Vote:
        """Start a vote on whether a gradient of the unit is not finite, on any rank or in any part of the model."""
        not_finite, sharing = not self.are_finite(unit), self.source.groups.sharing
        if self._parts.ranks.size == 1:
            return sharing.ask(not_finite)
        with self.source.waiting_for_ranks():
            not_finite = sharing.any(not_finite)
        return self._parts.ranks.ask(not_finite)

    def is_finite(self, vote: Vote) -> bool:
        """Wait for the vote of `start_vote`."""
        with self.source.waiting_for_ranks():
            return not vote.result()

    def stats(self, unit: Unit) -> list[GradStats]:
        """Return the measurements of the unit's gradients, or of this rank's shard. Blocks until they have come."""
        stats = unit.total.stats
        for part in [part for part, measured in stats.items() if measured is None]:
            stats[part] = self._measure(unit, part)
        for part, measured in reversed(tuple(stats.items())):  # when the last has arrived, all have: one wait is enough
            if isinstance(measured, ArrivingStats):
                stats[part] = self._share_of(unit, part, measured.stats(self._counters))
        return [measured for measured in stats.values() if isinstance(measured, GradStats)]

    def _measure(self, unit: Unit, part: int) -> GradStats | ArrivingStats:
        """Measure the gradients of a part as they are now."""
        measured = unit.grads_store.measure(unit.grads, part, self._values(unit, part))
        return self._share_of(unit, part, measured) if isinstance(measured, GradStats) else measured

    def _share_of(self, unit: Unit, part: int, stats: GradStats) -> GradStats:
        """Return the share of a measurement that counts for the model's norm."""
        if not self.source.shares:
            return stats
        return self.source.measured(unit.layout, part, stats, self._values(unit, part))

    @staticmethod
    def _values(unit: Unit, part: int) -> torch.Tensor:
        flat = unit.grads_store.tensor(unit.grads)
        return flat if part == WHOLE else flat[_place(unit, part)]

    def are_measured(self, unit: Unit) -> bool:
        """Whether the norm is known without reading the unit's gradients again."""
        stats = unit.total.stats.values()
        return all(isinstance(each, GradStats) or (each is not None and not self._parts.shares) for each in stats)

    def norm(self) -> float:
        """Return the Euclidean norm over all gradients of the step; NaN if one of them is not finite."""
        stats = [each for unit in self.units_with_gradients() for each in self.stats(unit)]
        return self.norm_of(each.sum_sq if each.finite else math.nan for each in stats)

    def norm_of(self, sums_sq: Iterable[float]) -> float:
        """Return the norm over all ranks' shards and the model's parts, from this rank's.

        A rank's sum is rounded once, so the order of units does not change it. On a rank that is alone, cutting blocks
        does not change it either.
        """
        with self.source.waiting_for_ranks():
            return math.sqrt(self._parts.ranks.sum(self.source.groups.sharing.sum(math.fsum(sums_sq))))

    # Reads from outside #

    def open(self, unit: Unit) -> torch.Tensor | None:
        """Return the unit's gradients, to read or to change (then call `remeasure`); None while they have no room.

        Raises:
            InfinityError: they are not reduced over the ranks yet.
        """
        self.check_reduced()
        for part in list(unit.grads.sums):
            if not self.try_add(self._sum_of(unit, part)):  # the sum stays on the device, also after an error
                return None
            del unit.grads.sums[part]
        return unit.grads_store.open(unit.grads)

    def check_reduced(self) -> None:
        """Check that all gradients can be read.

        Raises:
            InfinityError: some are not reduced over the ranks yet.
        """
        if self.source.has_unreduced:
            raise InfinityError(
                "gradients are not reduced over the ranks before the last micro-batch's backward, at stages 0 and 1 "
                "and with communication.shard_size: read them after it, before step()"
            )

    def remeasure(self, unit: Unit) -> None:
        """Measure the unit's gradients again, which a user has changed in memory."""
        stats = unit.total.stats
        for part in stats:
            stats[part] = self._measure(unit, part)

    # Ends #

    def any_pending(self) -> bool:
        """Whether there are gradients without an update."""
        return self.source.has_unreduced or bool(self.units_with_gradients())

    def drop_params(self, indices: Mapping[Unit, Collection[int]]) -> None:
        """Drop the gradients of these parameters, given as indices by unit.

        Raises:
            InfinityError: with several ranks, gradients of other parameters would stay, but ranks drop all or none.
        """
        if self.source.groups.all.size > 1:
            here = {unit: set(unit.total.step.present) for unit in self._units if unit.total.step is not None}
            for unit, unreduced in self.source.unreduced():
                here.setdefault(unit, set()).update(unreduced)
            if any(some - set(indices.get(unit, ())) for unit, some in here.items()):
                raise InfinityError(
                    "the gradients of some parameters were dropped (param.grad = None) and those of others were not, "
                    "which several ranks cannot do: drop all of them with engine.zero_grad()"
                )
            self.drop_all()
            return
        for unit in indices:
            step = unit.total.step
            if step is None:
                continue
            for index in indices[unit]:
                step.present.discard(index)
                step.stats.pop(index, None)
                unit.grads.sums.pop(index, None)
            if not step.present:
                self._drop(unit)

    def drop_all(self) -> None:
        self.source.clear()
        for unit in self._units:
            unit.grads.sums.clear()
            if unit.total.step is not None:
                self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        store = unit.grads_store
        if store.holds(unit.grads):
            store.drop(unit.grads)
        unit.total.step = None


def _place(unit: Unit, index: int) -> slice:
    """Return the elements of a parameter in its unit's buffer."""
    info = unit.layout.params[index]
    return slice(info.offset, info.offset + info.numel)
