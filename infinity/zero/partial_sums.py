"""The sum of gradients in a group of ranks over several micro-batches, before it is added to the replicas' sums.

[Note: replicas add up once a step]
Ranks that share states in groups reduce gradients in two sums: within the group, in every micro-batch from stage 2 on,
and over the replicas of a shard, on slower links. The second sum can wait for the last micro-batch if the shard's sum
so far stays on the compute device. `initialize` decides which units have room for that, the same on all ranks. The
replicas of the other units add up in every micro-batch.
"""

from __future__ import annotations

import torch


class PartialSum:
    """This rank's shard of a unit's gradients, summed over its group only, in the micro-batches of a step so far.

    Args:
        numel: elements of the shard.
        dtype: dtype of the sum.

    Attributes:
        held: a sum exists or is arriving, and is not added over the replicas yet.
        slots: parameters with a gradient of this rank in it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel = numel
        self._dtype = dtype
        self._device = device
        self._values: torch.Tensor | None = None  # allocated at first use, then reused in every step
        self.held = False
        self.slots: set[int] = set()
        self._begun = False

    @property
    def values(self) -> torch.Tensor:
        """The sum; undefined if there is none."""
        if self._values is None:
            self._values = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        return self._values

    def hold(self, slots: set[int]) -> None:
        """Announce a micro-batch's shard with gradients of these slots; `add` follows."""
        if not self.held:
            self.held, self._begun = True, False
            self.slots = set()
        self.slots.update(slots)

    def add(self, shard: torch.Tensor) -> None:
        if self._begun:
            self.values.add_(shard)
        else:
            self.values.copy_(shard)
        self._begun = True

    def add_to(self, shard: torch.Tensor) -> None:
        """Replace the last micro-batch's shard, in place, by the sum of all."""
        shard.copy_(self.values.add_(shard))
