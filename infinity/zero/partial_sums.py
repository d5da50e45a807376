"""What a group of ranks has summed over several micro-batches, before its replicas add theirs.

[Note: replicas add up once a step]
Ranks that share states in groups reduce gradients in two sums: within the group, in every micro-batch from stage 2 on,
and over the replicas of a shard, on links that are slower. The second sum may wait for the last micro-batch if the
shard's sum so far stays where it is computed. Which units have room for that is agreed on at `initialize`, the same on
all ranks; the replicas of the others add up in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class PartialSum:
    """This rank's shard of a unit's gradients, summed over its group alone.

    Attributes:
        values: without a meaning while there are none.
        slots: parameters of which this rank has a gradient in it.
    """

    values: torch.Tensor
    slots: set[int] = field(default_factory=set)
    begun: bool = False

    def add(self, shard: torch.Tensor) -> None:
        """Add the shard of one more micro-batch."""
        if self.begun:
            self.values.add_(shard)
        else:
            self.values.copy_(shard)
        self.begun = True

    def add_to(self, shard: torch.Tensor) -> None:
        """Make of the last micro-batch's shard, in place, the sum of all."""
        shard.copy_(self.values.add_(shard))


class PartialSums:
    """The sums of a step so far.

    Args:
        units: those that have one.
        numels: elements of each unit's shard.
        dtype: in which they are summed.
    """

    def __init__(self, units: Collection[int], numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._units = frozenset(units)
        self._numels = numels
        self._dtype = dtype
        self._device = device
        self._memory: dict[int, torch.Tensor] = {}  # used again in every step
        self.held: dict[int, PartialSum] = {}

    def may_hold(self, unit: int) -> bool:
        """The unit's replicas add up once a step."""
        return unit in self._units

    def of(self, unit: int, slots: set[int]) -> PartialSum | None:
        """The unit's sum, to which a micro-batch is to be added that has gradients of these slots."""
        found = self.held.get(unit)
        if found is None:
            if unit not in self._memory:
                self._memory[unit] = torch.empty(self._numels[unit], dtype=self._dtype, device=self._device)
            found = self.held[unit] = PartialSum(self._memory[unit])
        found.slots.update(slots)
        return found

    def take(self, unit: int) -> PartialSum | None:
        """The unit's sum, which is completed now; None if it has none."""
        return self.held.pop(unit, None)

    def clear(self) -> None:
        """What is summed so far is of no use."""
        self.held.clear()


NO_SUMS = PartialSums((), (), torch.float32, torch.device("cpu"))
