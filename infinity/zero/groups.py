"""Which ranks share the states, and which have the same part of them.

[Note: groups of ranks]
Neighbouring ranks, `communication.shard_size` of them, share what a stage divides: together they have all of it, and
gather and scatter among themselves, over the fast links within a machine if that is how they are cut. The ranks at the
same place of every such group are replicas: they have the same shard, add their gradients of it up over the slow
links, and then compute the same update of it. By default all ranks share; at stage 0 all are replicas.

    ranks 0 to 7 in groups of 4:   sharing [0 1 2 3] [4 5 6 7]   replicas [0 4] [1 5] [2 6] [3 7]
"""

from __future__ import annotations

from dataclasses import dataclass

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
