"""Bytes that move between the tiers in one step, by the phase in which they must move."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from infinity.schedule import Plan
from infinity.schedule.placement import Placement, summed_once
from infinity.schedule.scheduler import spilled_ahead
from infinity.tiers import Memory
from infinity.zero.sizing import Sizing


@dataclass(frozen=True)
class Fetches:
    """Bytes of parameters fetched in all forward or all backward passes of a step, by route.

    Attributes:
        gathered: from other ranks, for each use of a unit, wherever this rank's shard is.
    """

    disk: int = 0
    link: int = 0
    gathered: int = 0


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank in one step.

    Attributes:
        forward, backward: parameters fetched in these phases.
        states: optimizer states on the drives; updates read and write so many bytes each.
        params_written: updated parameters written back to the drives.
        spilled, unspilled: gradients written to the drives for lack of memory, and read again.
        link_down: gradients that leave the device; sums over micro-batches on it leave once.
        link_up: updated parameters that stay on the device, of units whose states do not.
        reduced: gradients sent to the ranks that share the states.
        averaged: gradients of this rank's shard exchanged with the replicas.
        regathered: updated parameters that every rank keeps unsharded, received from the ranks that have updated them.
    """

    forward: Fetches
    backward: Fetches
    states: int
    params_written: int
    spilled: int
    unspilled: int
    link_down: int
    link_up: int
    reduced: int
    averaged: int
    regathered: int

    @property
    def gathered(self) -> int:
        """Parameters received from the ranks that share the states."""
        return self.forward.gathered + self.backward.gathered + self.regathered

    @property
    def read_bytes(self) -> int:
        return self.forward.disk + self.backward.disk + self.states + self.unspilled

    @property
    def write_bytes(self) -> int:
        return self.states + self.params_written + self.spilled


def traffic_of(sizing: Sizing, placement: Placement, steps: Plan, micro_batches: int, sums_bytes: int = 0) -> Traffic:
    """Return the traffic of a step of so many micro-batches. Each repeats the plan's cycle unless they are layer-major.

    Args:
        sums_bytes: memory for sums of gradients over micro-batches, where they are computed.
    """
    rules, specs = sizing.rules, sizing.specs
    passes = 1 if sizing.layer_major else micro_batches
    stored = [home is Memory.NVME for home in placement.params]
    half = len(steps.steps) // 2
    phases = zip(_fetched(steps, half), _gathered(steps, half), strict=True)
    forward, backward = (_fetches(sizing, stored, list(units), whole, passes) for units, whole in phases)
    spills = placement.grad_homes
    sizes = [sizing.shards.grad_sizes[unit] for unit in spills.spilled]
    spilling = [] if rules.grads.recovers else sizes  # gradients of speculative updates do not spill
    trained = sum(unit.trainable_numel for unit in sizing.partition.units)
    reduces = micro_batches if rules.grads.reduces_every_pass else 1
    travel = sizing.communication_dtype.itemsize
    at_once = summed_once(rules, sizing.shards, sums_bytes)
    numels = [unit.trainable_numel * (1 if unit.index in at_once else reduces) for unit in sizing.partition.units]
    leaving = 0 if rules.one_memory else sum(sizing.shards.grad_sizes)
    once = min(leaving, sums_bytes)
    coming = {unit for part in _fetched(steps, 0) for unit in part}
    staying = sum(
        spec.shard_nbytes for unit, spec in enumerate(specs) if unit not in coming and unit not in sizing.there
    )
    kept_whole = sum(spec.nbytes for spec in specs if not spec.offloaded)
    return Traffic(
        forward,
        backward,
        states=placement.stored_bytes - sum(sizes),
        params_written=sum(specs[unit].shard_nbytes for unit in written(sizing, steps) if stored[unit]),
        # The first units' gradients, the last of backward, stay in the slots, except slots that were written early. The
        # updates begin with these units and find them in memory.
        spilled=sum(spilling) * passes - sum(spilling[: spills.slots - spilled_ahead(spills.slots)]),
        unspilled=sum(spilling) * passes - sum(spilling[: spills.slots]),
        link_down=once + (leaving - once) * passes,
        link_up=staying if leaving else 0,
        reduced=_sent(trained * travel * reduces, rules.sharding.count),
        # an all-reduce is a reduce-scatter and an all-gather
        averaged=_sent(2 * sum(numels) * travel // rules.sharding.count, rules.replicas),
        regathered=_sent(kept_whole, rules.sharding.count),
    )


def written(sizing: Sizing, steps: Plan) -> Collection[int]:
    """Return units whose updated parameters are written home. If updates change the tensor that is computed on, only
    units that are evicted need it."""
    changed_there = sizing.rules.one_memory and not sizing.rules.params.gathers
    return steps.evicted if changed_there and not sizing.writes_updates else range(len(sizing.specs))


def _fetched(steps: Plan, forward: int) -> Iterator[Iterator[int]]:
    """Yield the units fetched in the forward uses, then those of all other uses."""
    for part in (steps.steps[:forward], steps.steps[forward:]):
        on_the_spot = (step.unit for step in part if step.before is not None)
        ahead = (unit for step in part for action, unit in step.actions if action == "prefetch")
        yield iter([*on_the_spot, *ahead])


def _gathered(steps: Plan, forward: int) -> Iterator[list[int]]:
    """Yield the units gathered for the forward uses, then for all others, wherever their shards are. A unit stays
    unsharded if its next use follows at once."""
    uses = [step.unit for step in steps.steps]
    due = [(index, unit) for index, unit in enumerate(uses) if uses[index - 1 : index] != [unit]]
    yield [unit for index, unit in due if index < forward]
    yield [unit for index, unit in due if index >= forward]


def _fetches(sizing: Sizing, stored: list[bool], units: list[int], whole: list[int], passes: int) -> Fetches:
    specs, rules = sizing.specs, sizing.rules
    whole_bytes = passes * sum(specs[unit].nbytes for unit in whole)
    shards = passes * sum(specs[unit].shard_nbytes for unit in units if not specs[unit].beside)
    return Fetches(
        disk=passes * sum(specs[unit].shard_nbytes for unit in units if stored[unit]),
        link=0 if rules.one_memory else shards,
        gathered=_sent(whole_bytes, rules.sharding.count),
    )


def _sent(nbytes: int, ranks: int) -> int:
    """Return the bytes that a rank receives or sends if a whole is divided among the ranks."""
    return nbytes * (ranks - 1) // ranks
