"""Which ranks share the states, which have the same part of them, and the sums that wait for the latter.

[Note: groups of ranks]
Neighbouring ranks, `communication.shard_size` of them, share what a stage divides: together they have all of it, and
gather and scatter among themselves, over the fast links within a machine if that is how they are cut. The ranks at the
same place of every such group are replicas: they have the same shard, add their gradients of it up over the slow
links, and then compute the same update of it. By default all ranks share; at stage 0 all are replicas.

    ranks 0 to 7 in groups of 4:   sharing [0 1 2 3] [4 5 6 7]   replicas [0 4] [1 5] [2 6] [3 7]

[Note: replicas add up once a step]
Ranks that share states in groups reduce gradients in two sums: within the group, in every micro-batch from stage 2 on,
and over the replicas of a shard, on slower links. The second sum can wait for the last micro-batch if the shard's sum
so far stays on the compute device. `initialize` decides which units have room for that, the same on all ranks. The
replicas of the other units add up in every micro-batch.
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
        all: of them.
        sharing: those whose shards are the whole together with this rank's, in their order.
        replicas: those that have the same shard.
    """

    all: Ranks = ALONE
    sharing: Ranks = ALONE
    replicas: Ranks = ALONE

    @staticmethod
    def of(ranks: Ranks, sharding: Sharding) -> Groups:
        """The groups of ranks that share like this; all ranks call this together.

        Raises:
            RankError: the others have not come.
        """
        first = ranks.rank // sharding.count * sharding.count
        # On all ranks in this order, or two of them would wait for one another.
        sharing = ranks.part(range(first, first + sharding.count), "the ranks that share the states")
        with_this_shard = range(ranks.rank % sharding.count, ranks.size, sharding.count)
        replicas = ranks.part(with_this_shard, "the ranks that have the same shard")
        return Groups(ranks, sharing, replicas)


class PartialSum:
    """This rank's shard of a unit's gradients, summed over its group only, in the micro-batches of a step so far.

    Args:
        numel: elements of the shard.
        dtype: dtype of the sum.

    Attributes:
        held: a sum exists or is arriving, and is not added over the replicas yet.
        present: indices of parameters with a gradient of this rank in it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel = numel
        self._dtype = dtype
        self._device = device
        self._values: torch.Tensor | None = None  # allocated at first use, then reused in every step
        self.held = False
        self.present: set[int] = set()
        self._begun = False

    @property
    def values(self) -> torch.Tensor:
        """The sum; undefined if there is none."""
        if self._values is None:
            self._values = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        return self._values

    def hold(self, indices: set[int]) -> None:
        """Announce a micro-batch's shard with gradients of these parameters; `add` follows."""
        if not self.held:
            self.held, self._begun = True, False
            self.present = set()
        self.present.update(indices)

    def add(self, shard: torch.Tensor) -> None:
        if self._begun:
            self.values.add_(shard)
        else:
            self.values.copy_(shard)
        self._begun = True

    def add_to(self, shard: torch.Tensor) -> None:
        """Replace the last micro-batch's shard, in place, by the sum of all."""
        shard.copy_(self.values.add_(shard))
