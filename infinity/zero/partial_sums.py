"""What a group of ranks has summed over several micro-batches, before its replicas add theirs.

[Note: replicas add up once a step]
Ranks that share states in groups reduce gradients in two sums: within the group, in every micro-batch from stage 2 on,
and over the replicas of a shard, on links that are slower. The second sum may wait for the last micro-batch if the
shard's sum so far stays where it is computed. Which units have room for that is agreed on at `initialize`, the same on
all ranks; the replicas of the others add up in every micro-batch.
"""

from __future__ import annotations

import torch


class PartialSum:
    """This rank's shard of a unit's gradients, summed over its group alone in the micro-batches of a step so far.

    Args:
        numel: elements of the shard.
        dtype: in which they are summed.

    Attributes:
        held: there is a sum, or a micro-batch on its way to it, which is not completed yet.
        slots: parameters of which this rank has a gradient in it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel = numel
        self._dtype = dtype
        self._device = device
        self._values: torch.Tensor | None = None  # made when it is first needed, and used again in every step
        self.held = False
        self.slots: set[int] = set()
        self._begun = False

    @property
    def values(self) -> torch.Tensor:
        """The sum, without a meaning while there is none."""
        if self._values is None:
            self._values = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        return self._values

    def hold(self, slots: set[int]) -> None:
        """A micro-batch is on its way to the sum that has gradients of these slots; `add` follows."""
        if not self.held:
            self.held, self._begun = True, False
            self.slots = set()
        self.slots.update(slots)

    def add(self, shard: torch.Tensor) -> None:
        """Add the shard of one more micro-batch."""
        if self._begun:
            self.values.add_(shard)
        else:
            self.values.copy_(shard)
        self._begun = True

    def add_to(self, shard: torch.Tensor) -> None:
        """Make of the last micro-batch's shard, in place, the sum of all."""
        shard.copy_(self.values.add_(shard))
