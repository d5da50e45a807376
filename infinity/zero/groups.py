"""Groups of ranks: the ranks that share the states, the replicas that have the same shard, and sums over the replicas.

[Note: groups of ranks]
`communication.shard_size` neighbouring ranks form a group and divide the fields that the stage divides. They gather and
scatter among themselves: over the fast links within a machine, if each group is within one machine. The ranks at the
same position of all groups are replicas: they have the same shard, sum their gradients of it over the slower links, and
then compute the same update. By default, all ranks are one group; at stage 0, all are replicas.

    ranks 0 to 7 in groups of 4:   sharing [0 1 2 3] [4 5 6 7]   replicas [0 4] [1 5] [2 6] [3 7]

[Note: replicas add up once a step]
With groups, gradients are reduced in two sums: over the ranks of a group, in every micro-batch from stage 2 on, and
over the replicas of a shard, on slower links. The second sum can wait for the last micro-batch if the compute device
keeps the shard's sum of the earlier micro-batches. `initialize` decides for which units there is memory for that, the
same units on all ranks. For the other units, the replicas add up in every micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.tiers import Sharding
from infinity.zero.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Groups:
    """The ranks of one run, see [Note: groups of ranks].

    Attributes:
        all: all ranks.
        sharing: the ranks of this rank's group, whose shards together are the whole, in order.
        replicas: the ranks that have the same shard as this one.
    """

    all: Ranks = ALONE
    sharing: Ranks = ALONE
    replicas: Ranks = ALONE

    @staticmethod
    def of(ranks: Ranks, sharding: Sharding) -> Groups:
        """Return the groups for this sharding. All ranks call this together.

        Raises:
            RankError: another rank did not call this in time.
        """
        first = ranks.rank // sharding.count * sharding.count
        # In this order on all ranks. Otherwise two of them would wait for each other.
        sharing = ranks.part(range(first, first + sharding.count), "the ranks that share the states")
        with_this_shard = range(ranks.rank % sharding.count, ranks.size, sharding.count)
        replicas = ranks.part(with_this_shard, "the ranks that have the same shard")
        return Groups(ranks, sharing, replicas)


class PartialSum:
    """This rank's shard of a unit's gradients, summed over its group and over the micro-batches of the step so far.

    Args:
        numel: elements of the shard.
        dtype: dtype of the sum.

    Attributes:
        is_pending: whether a sum exists or is arriving that is not yet added over the replicas.
        present: indices of the parameters for which the sum contains a gradient of this rank.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel = numel
        self._dtype = dtype
        self._device = device
        self._values: torch.Tensor | None = None  # allocated at first use, then reused in every step
        self.is_pending = False
        self.present: set[int] = set()
        self._begun = False

    @property
    def values(self) -> torch.Tensor:
        """The sum; undefined if there is none."""
        if self._values is None:
            self._values = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        return self._values

    def announce(self, indices: set[int]) -> None:
        """Announce a micro-batch's shard with gradients of these parameters; `add` follows."""
        if not self.is_pending:
            self.is_pending, self._begun = True, False
            self.present = set()
        self.present.update(indices)

    def add(self, shard: torch.Tensor) -> None:
        if self._begun:
            self.values.add_(shard)
        else:
            self.values.copy_(shard)
        self._begun = True

    def add_to(self, shard: torch.Tensor) -> None:
        """Replace the shard of the last micro-batch, in place, by the sum over all micro-batches."""
        shard.copy_(self.values.add_(shard))
