"""When a unit is updated, and with which numbers.

[Note: update schedules]
`backward`: a unit is updated as soon as its gradients are final, during the rest of the backward pass. If updates
cannot keep up, those of the units that the next forward pass uses last run during that pass.
`deferred`: once the global norm is known, unit by unit under the next forward pass, which fetches the units.
`speculative`: as `deferred`, but while recent steps neither clipped nor skipped, updates run speculatively during
backward, see [Note: speculative updates] in speculation.py.
`barrier`: all updates run inside `step()`.

All schedules give the same weights. `backward` cannot wait for the global norm, so it cannot clip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from infinity.errors import CapacityError, InfinityError, NonFiniteError
from infinity.kernels import Rule
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.ticket import Segment
from infinity.tiers import Sharding, overlap
from infinity.zero.executor import Executor
from infinity.zero.foresight import Foresight
from infinity.zero.gradients import Gradients
from infinity.zero.losses import Losses
from infinity.zero.ranks import Vote
from infinity.zero.reduction import Addend, second_gradient
from infinity.zero.unit import Unit, UnitPass

_OPEN_VOTES = 1  # units on which the ranks vote (are their gradients finite?) while they compute on

RuleOf = Callable[[int, int, float], Rule]  # (parameter group, step, gradient scale)


class UpdateSchedule(str, Enum):
    """See [Note: update schedules]."""

    BACKWARD = "backward"
    DEFERRED = "deferred"
    SPECULATIVE = "speculative"
    BARRIER = "barrier"


@dataclass(frozen=True)
class StepOutcome:
    """The result of `finish_step`.

    Attributes:
        grad_norm: global norm of the gradients before clipping.
        skipped: the gradients were not finite, so nothing was updated.
    """

    grad_norm: float
    skipped: bool


class Updates:
    """Turn final gradients into updates of the units.

    Args:
        rule_of: the present update rule of a parameter group.
        max_norm: clip the global norm to this; 0 for no clipping.
        losses: has the loss scale, a factor on all gradients.
    """

    def __init__(
        self,
        sharding: Sharding,
        executor: Executor,
        pipeline: UpdatePipeline,
        gradients: Gradients,
        rule_of: RuleOf,
        schedule: UpdateSchedule,
        max_norm: float,
        losses: Losses,
    ) -> None:
        self._sharding = sharding
        self._executor = executor
        self._pipeline = pipeline
        self._gradients = gradients
        self._rule_of = rule_of
        self._pass_rules: dict[tuple[int, int, float], Rule] = {}  # of `rule_of`, for all units of a pass
        self._schedule = schedule
        self._max_norm = max_norm
        self._losses = losses
        self._sums_sq: list[float] = []  # for the norm: of the units updated so far in this step, under `backward`
        # Units with final gradients, perhaps still on their way to the host, and the ranks' vote on each, once begun.
        self._final: dict[Unit, Vote | None] = {}
        self._update_order: list[int] = []  # units in the order of their updates, probably that of the next step, too
        self._single_pass = True
        self._foresight = Foresight()
        self.under_way = False  # the step's updates have begun and have not ended
        self.steps: dict[str, int] = {}  # number of updates of each parameter, by name

    def begin_backward(self, *, last: bool, in_parts: frozenset[Unit] = frozenset(), single_pass: bool = True) -> None:
        """Begin a backward pass.

        Args:
            last: the gradients of the step are final after it.
            in_parts: units whose gradients are complete only at its end.
            single_pass: the step has one pass, so each gradient is final on arrival.
        """
        self._single_pass = single_pass
        self._pass_rules.clear()
        for unit in self._executor.units:
            unit.running = UnitPass(unit in in_parts, waits=not self._gradients.sums_over_ranks and unit in in_parts)
        self._final.clear()
        self._pipeline.prefer(begun=True)
        speculates = last and self._schedule is UpdateSchedule.SPECULATIVE and self._foresight.speculates
        if speculates:
            self._executor.begin_speculation()
        if speculates or (last and self._schedule is UpdateSchedule.BACKWARD):
            self._pipeline.expect(list(dict.fromkeys(self._update_order)))
            self._update_order = []

    def end_backward(self) -> None:
        """End the backward pass. This completes units in parts, and units with parameters that it has not reached."""
        is_last = self._gradients.last_pass and self._schedule is UpdateSchedule.BACKWARD
        if is_last:
            self._losses.check_late()
            self._update_voted()  # now, while it is known which votes were about a part of the gradients
        for unit in self._executor.units:
            unit.running.in_parts = unit.running.waits = False
            unit.running.late.clear()
        # A pass without gradients (`torch.autograd.grad` with respect to inputs) is not the step's last one.
        if is_last and (not self._gradients.alone or any(unit.running.arrived for unit in self._executor.units)):
            self._all_final()

    def in_parts(self, unit: Unit, index: int, *, again: bool) -> None:
        """Note that the unit's gradients are complete only at the end of the running backward pass.

        Several ranks must decide alike, see [Note: gradients that come again] in reduction.py.

        Args:
            index: the parameter whose gradient has come.
            again: whether this parameter has already had a gradient in this pass.

        Raises:
            InfinityError: the first gradient has updated the parameter, and is not summed over ranks.
        """
        unit.running.in_parts = True
        if self._gradients.sums_over_ranks:
            return
        if again and unit.running.updated:
            raise second_gradient(f"parameter `{unit.layout.params[index].name}`")
        unit.running.waits = True
        self._final.pop(unit, None)

    def gradients_final(self, unit: Unit) -> None:
        """Note that the unit's gradients of this step are complete. Do nothing if they come in parts.

        Under the `backward` schedule the unit is updated now, or at one of the next calls if the gradients are still on
        their way from the device.

        Raises:
            NonFiniteError: under the `backward` schedule, a gradient is not finite.
        """
        if unit.running.waits:
            return
        if self._schedule is UpdateSchedule.BACKWARD:
            self._final[unit] = None
            if self._gradients.alone:
                self._update_due()
            else:
                self._update_due(len(self._unvoted) - self._gradients.lag, open_votes=_OPEN_VOTES)
        elif self._schedule is UpdateSchedule.SPECULATIVE:
            # On all ranks, although each decides by its own memory and drives whether its update is speculative.
            self._executor.gathering.changed(unit)
            if self._foresight.speculates:
                self._speculate(unit)

    def _speculate(self, unit: Unit) -> None:
        """Submit the unit's update speculatively, as if the global norm were known and small."""
        segments = self._segments(unit, 1.0 / self._losses.loss_scale.value)
        if self._executor.speculate(unit, segments, may_drop_grads=self._gradients.are_measured(unit)):
            self._update_order.append(unit.index)
            unit.running.updated = True
            self._foresight.speculated()

    def roll_back(self, *, grads: bool = True) -> None:
        """Roll back this step's speculative updates, because a caller reads the old values. The updates run later.

        Args:
            grads: restore the gradients; False if the step's gradients are about to be dropped.
        """
        if self._executor.roll_back_all(grads=grads):
            self._foresight.rolled_back()

    def _all_final(self) -> None:
        """Update all units that have gradients and are not updated yet."""
        self._update_voted()
        self._final |= dict.fromkeys(self._gradients.units_with_gradients())
        self._update_due(len(self._final))

    @property
    def _unvoted(self) -> list[Unit]:
        """Units with final gradients on which the ranks do not vote yet."""
        return [unit for unit, vote in self._final.items() if vote is None]

    def _update_due(self, await_units: int = 0, open_votes: int = 0) -> bool:
        """Update units with final gradients that have arrived. Return whether any was updated.

        Several ranks vote on whether the gradients of a unit are finite. They must start each vote at the same point,
        so they start it a fixed number of units later, when the gradients have probably arrived. They compute on during
        a vote, and update the unit when they start the next one. A single rank needs no vote: it updates a unit as soon
        as its gradients have arrived.

        Args:
            await_units: block for the gradients of this many units, the oldest first.
            open_votes: how many votes may still be open at the end.
        """
        updated = False
        for done, unit in enumerate(self._unvoted):
            if done >= await_units and not (self._gradients.alone and unit.grads_store.has_come(unit.grads)):
                break
            self._losses.check_late()
            if self._gradients.alone:
                del self._final[unit]
                self._update_final(unit, finite=self._gradients.are_finite(unit))
                updated = True
            else:
                self._final[unit] = self._gradients.start_vote(unit)
                updated |= self._update_voted(_OPEN_VOTES)
            self._executor.poll()  # upload updates that ended while this thread waited
        return self._update_voted(open_votes) or updated

    def _update_voted(self, open_votes: int = 0) -> bool:
        """Update the units that the ranks have voted on, except the last `open_votes`. Return whether any vote ended.

        A unit waits for the end of the pass if another of its gradients has come during the vote.
        """
        voted = [(unit, vote) for unit, vote in self._final.items() if vote is not None]
        for unit, vote in voted[: len(voted) - open_votes]:
            del self._final[unit]
            finite = self._gradients.is_finite(vote)
            if unit.running.lacks_part and not unit.running.waits:
                unit.running.waits = True
                self.under_way |= finite  # a rank that lacks no part updates the unit now
            if not (finite and unit.running.waits):
                self._update_final(unit, finite=finite)
        return len(voted) > open_votes

    def _update_final(self, unit: Unit, *, finite: bool) -> None:
        if not finite:
            changed = "parameters of later units are already updated" if self.under_way else "nothing was changed by it"
            raise NonFiniteError(
                f"a gradient of unit `{unit.name}` is not finite; {changed}. "
                "Resume from the last checkpoint with a lower learning rate, or set tiering.update_schedule to "
                "deferred, which skips such a step"
            )
        self._update_order.append(unit.index)
        unit.running.updated = True
        self._sums_sq += [each.sum_sq for each in self._gradients.stats(unit)]
        self._update(unit, self._segments(unit, 1.0))

    def add(self, addend: Addend) -> None:
        """Add these gradients to those of their unit. Block until they have room.

        Raises:
            CapacityError: the budget cannot give the room.
        """
        self._executor.prepare_for_gradients(addend.unit)
        for_host = self._gradients.sum_on_device(addend) if self._gradients.sums_on_device else addend
        if for_host is not None and not self._gradients.try_add(for_host):
            self._add_with_room(for_host)

    def _add_with_room(self, addend: Addend) -> None:
        """Add gradients that the device does not sum. Make room for them if there is none."""
        while not self._gradients.try_add(addend):
            if not self._make_room(addend.unit):
                raise CapacityError(
                    f"no host memory is left for the gradients of unit `{addend.unit.name}`, because those of other "
                    "units wait for the end of backward: they come in parts (from reentrant checkpoints), or backward "
                    "may read these parameters again. Set tiering.update_schedule to deferred, which has room for all "
                    "gradients, or checkpoint with use_reentrant=False"
                )

    def _make_room(self, unit: Unit) -> bool:
        """Free memory for the unit's gradients. Return False if there is none to free.

        First try what this rank can do alone: a spill, or a wait. All ranks must vote and update together. So do that
        only if the gradients of other units use up the capacity, because this happens on all ranks alike.
        """
        if self._gradients.alone and self._update_due(await_units=1):
            return True
        if self._executor.free_gradients(unit):
            return True
        if not self._gradients.alone and not unit.grads_store.lacks_capacity(unit.grads):
            return False
        if self._executor.in_flight.is_busy:
            self._executor.drain()
            return True
        return self._update_voted() or self._update_due(await_units=1) or self._update_early()

    def _update_early(self) -> bool:
        """Update those parameters of a unit whose gradients have come, although other gradients of it have not.

        The others may never come (experts without a token), or are applied by a second update. Each parameter's
        gradient comes once in a pass, so no parameter is updated twice.

        Returns:
            False if no gradient is final yet.
        """
        waiting = [unit for unit in self._gradients.units_with_gradients() if not unit.running.waits]
        final = self._schedule is UpdateSchedule.BACKWARD and self._gradients.last_pass and self._single_pass
        if not final or not waiting:
            return False
        self.gradients_final(waiting[-1])  # backward probably reached it first
        self._update_due(len(self._final))
        self._executor.drain()
        return True

    def pause(self, unit: Unit) -> None:
        """Note that the unit's gradients do not change for a while."""
        unit.grads_store.pause(unit.grads)
        if unit.spills:
            self._executor.gradients_pause()

    def local_gradients(self, unit: Unit) -> torch.Tensor:
        """Return this rank's gradients of the unit, to read or to change (`remeasure` follows).

        Raises:
            InfinityError: they are not reduced over the ranks yet, or have no room.
        """
        while (values := self._gradients.open(unit)) is None:
            if not self._executor.free_gradients(unit):
                raise InfinityError(
                    "there is no memory to read gradients into: raise tiering.host_memory (or device_memory)"
                )
        return values

    def remeasure(self, unit: Unit) -> None:
        """Measure gradients again that were changed from outside."""
        self.local_gradients(unit)
        self._gradients.remeasure(unit)
        self.pause(unit)

    def finish_step(self) -> StepOutcome:
        """Update all remaining units, now or later, once all gradients of the step have come."""
        outcome = self._finish_step()
        self.under_way = False
        self._executor.end_step()
        return outcome

    def _finish_step(self) -> StepOutcome:
        self._pipeline.prefer(begun=False)
        self._pass_rules.clear()  # the user may have changed hyper-parameters since the backward pass
        for addend in self._gradients.finish():
            self._add_with_room(addend)
        if self._schedule is UpdateSchedule.BACKWARD:
            self._all_final()
            norm, self._sums_sq = self._gradients.norm_of(self._sums_sq), []
            return StepOutcome(norm, skipped=False)
        loss_scale = self._losses.loss_scale.value
        self._await_gradients()
        norm = self._gradients.norm() / loss_scale
        overflow = norm != norm
        if overflow:
            self._executor.roll_back_all(grads=False)
            self._gradients.drop_all()
        self._losses.loss_scale.after_step(overflow=overflow)
        if overflow:
            self._foresight.after_step(quiet=False)
            return StepOutcome(norm, skipped=True)
        scale = 1.0 / loss_scale
        if self._max_norm > 0:  # as torch.nn.utils.clip_grad_norm_ does
            scale *= min(1.0, self._max_norm / (norm + 1e-6))
        self._foresight.after_step(quiet=scale == 1.0 / loss_scale)
        self._update_all(scale)
        if self._schedule is UpdateSchedule.BARRIER:
            self._executor.drain()
        return StepOutcome(norm, skipped=False)

    def _await_gradients(self) -> None:
        """Block until all gradients have arrived. Meanwhile, upload the results of speculative updates that end."""
        if self._executor.in_flight.is_busy:
            for unit in reversed(self._gradients.units_with_gradients()):
                self._gradients.stats(unit)
                self._executor.poll()

    def _update_all(self, scale: float) -> None:
        """Update all units that have gradients. Commit speculative updates that used the same rules, and roll back the
        others."""
        units = self._gradients.units_with_gradients()
        units.sort(key=self._executor.cycle.first_use)
        segments = {unit: self._segments(unit, scale) for unit in units}
        others = [unit for unit in units if unit.speculated != segments[unit]]
        self._executor.roll_back(*others)
        if self._schedule is not UpdateSchedule.BARRIER:
            self._pipeline.expect([unit.index for unit in others])
        for unit in units:
            self._update(unit, segments[unit])

    def _update(self, unit: Unit, segments: tuple[Segment, ...]) -> None:
        self.under_way = True
        self._executor.step_is_over = False
        indices = unit.total.present
        for index in indices:
            name = unit.layout.params[index].name
            self.steps[name] = self.steps.get(name, 0) + 1
        unit.total.step = None  # the update has the gradients now
        if unit.speculated == segments:
            self._executor.commit(unit, indices)
        else:
            self._executor.update(unit, segments, indices)

    def _segments(self, unit: Unit, scale: float) -> tuple[Segment, ...]:
        """Return the unit's update: runs of neighbouring parameters that have a gradient, the same group and the same
        step count, cut to this rank's shard.

        As in torch, a parameter without a gradient in this step gets no update: no weight decay, no step count.
        """
        layout, present = unit.layout, unit.total.present
        runs: list[tuple[int, int, int, int]] = []  # start, stop, group, step
        joinable = False
        for index, info in enumerate(layout.params):
            if index not in present:
                joinable = False
                continue
            step = self.steps.get(info.name, 0) + 1
            stop = info.offset + info.numel
            if joinable and runs[-1][2:] == (info.group, step):
                runs[-1] = (runs[-1][0], stop, info.group, step)
            else:
                runs.append((info.offset, stop, info.group, step))
            joinable = True
        segments = []
        for own in self._sharding.pieces(layout.trainable_numel, layout.trainable_numel):
            for start, stop, group, step in runs:
                piece = overlap(own, start, stop)
                if piece is not None:
                    segments.append(Segment(piece.shard, piece.shard + piece.numel, self._rule(group, step, scale)))
        return tuple(segments)

    def _rule(self, group: int, step: int, scale: float) -> Rule:
        key = group, step, scale
        if key not in self._pass_rules:
            self._pass_rules[key] = self._rule_of(*key)
        return self._pass_rules[key]
