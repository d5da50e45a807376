"""Bytes that move between the tiers in one step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from infinity.schedule import Plan
from infinity.schedule.needs import summed_once
from infinity.schedule.placement import Placement
from infinity.schedule.scheduler import free_slots_wanted
from infinity.tiers import Memory
from infinity.zero.sizing import Sizing


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank in one step.

    Attributes:
        disk, link: parameters fetched from the drives, and to the device.
        unsharded: parameters received from other ranks for uses of units, wherever this rank's shards are.
        states: optimizer states on the drives; updates read and write so many bytes each.
        params_written: updated parameters written back to the drives.
        spilled, unspilled: gradients written to the drives for lack of memory, and read again.
        link_down: gradients that leave the device; sums over micro-batches on it leave once.
        link_up: updated parameters that stay on the device, of units whose states do not.
        reduced: gradients sent to the ranks that share the states.
        averaged: gradients of this rank's shard exchanged with the replicas.
        regathered: updated parameters that every rank keeps unsharded, received from the ranks that have updated them.
    """

    disk: int
    link: int
    unsharded: int
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
        return self.unsharded + self.regathered

    @property
    def read_bytes(self) -> int:
        return self.disk + self.states + self.unspilled

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
    coming = fetched(steps)
    over_link = [] if rules.one_memory else [unit for unit in coming if not specs[unit].has_device_shard]
    whole_bytes = passes * sum(specs[unit].nbytes for unit in _unsharded(steps))
    spills = placement.grad_homes
    # Gradients of speculative updates do not spill.
    spilling = [] if rules.grads.reconstructs else [sizing.shards.grad_sizes[unit] for unit in spills.spilled]
    trained = sum(unit.trainable_numel for unit in sizing.partition.units)
    reduces = micro_batches if rules.grads.reduces_every_pass else 1
    travel = sizing.communication_dtype.itemsize
    at_once = summed_once(rules, sizing.shards, sums_bytes)
    numels = [unit.trainable_numel * (1 if unit.index in at_once else reduces) for unit in sizing.partition.units]
    leaving = 0 if rules.one_memory else sum(sizing.shards.grad_sizes)
    once = min(leaving, sums_bytes)
    moving = sizing.on_device.union(coming)
    staying = sum(spec.shard_nbytes for unit, spec in enumerate(specs) if unit not in moving)
    kept_whole = sum(spec.nbytes for spec in specs if not spec.offloaded)
    return Traffic(
        disk=passes * sum(specs[unit].shard_nbytes for unit in coming if stored[unit]),
        link=passes * sum(specs[unit].shard_nbytes for unit in over_link),
        unsharded=_sent(whole_bytes, rules.sharding.count),
        states=placement.stored_states_bytes,
        params_written=sum(specs[unit].shard_nbytes for unit in written(sizing, steps) if stored[unit]),
        # The first units' gradients, the last of backward, stay in the slots, except slots that were written early. The
        # updates begin with these units and find them in memory.
        spilled=sum(spilling) * passes - sum(spilling[: spills.slots - free_slots_wanted(spills.slots)]),
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


def fetched(steps: Plan) -> list[int]:
    """Return the units fetched in a cycle, one entry for each fetch."""
    on_the_spot = [step.unit for step in steps.steps if step.before is not None]
    return on_the_spot + [unit for step in steps.steps for action, unit in step.actions if action == "prefetch"]


def _unsharded(steps: Plan) -> list[int]:
    """Return the units gathered for the uses of a cycle. A unit stays unsharded if its next use follows at once."""
    uses = [step.unit for step in steps.steps]
    return [unit for index, unit in enumerate(uses) if uses[index - 1 : index] != [unit]]


def _sent(nbytes: int, ranks: int) -> int:
    """Return the bytes that a rank receives or sends if a whole is divided among the ranks."""
    return nbytes * (ranks - 1) // ranks
