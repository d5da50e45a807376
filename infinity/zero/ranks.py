"""What the ranks of one run say to each other: the only file that calls collectives.

Everything here is called by all ranks in the same order. With one rank nothing is sent.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from infinity.errors import RankError
from infinity.tiers import Piece

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective that was started."""

    def __init__(self, ranks: Ranks, what: str, work: Any) -> None:
        self._ranks = ranks
        self._what = what
        self._work = work

    def wait(self) -> None:
        """Block until the result is there (on CUDA: until what the compute stream is given next sees it).

        Raises:
            RankError: another rank has failed.
        """
        with self._ranks.talking(self._what):
            self._work.wait()


@dataclass(frozen=True)
class Ranks:
    """The processes that train one model together.

    Attributes:
        rank: this one.
        size: how many they are.
        group: for tensors on the compute device.
        host_group: for tensors in host memory.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    host_group: Any = None

    @staticmethod
    def of_group(group: Any = None) -> Ranks:
        """The ranks of a process group; of the default group if it is None and there is one."""
        if not dist.is_available() or not dist.is_initialized():
            return ALONE
        size = dist.get_world_size(group)
        if size == 1:
            return ALONE
        host = group
        if "gloo" not in str(dist.get_backend_config(group)):
            host = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
        return Ranks(dist.get_rank(group), size, group, host)

    def all_gather(self, flat: torch.Tensor, pieces: Sequence[Piece], unit: str) -> None:
        """Fill a unit's flat tensor, of which `pieces` are this rank's, with all ranks' pieces."""
        start = 0
        for piece in pieces:
            stop = start + piece.numel * self.size
            own = flat[piece.whole : piece.whole + piece.numel]
            with self.talking(f"the all-gather of unit `{unit}`"):
                _all_gather(flat[start:stop], own, group=self.group)
            start = stop

    def reduce_scatter(self, shard: torch.Tensor, flat: torch.Tensor, unit: str) -> Pending:
        """Start to sum all ranks' `flat`; `shard` becomes this rank's slice of the sum."""
        what = f"the reduce-scatter of the gradients of unit `{unit}`"
        with self.talking(what):
            return Pending(self, what, _reduce_scatter(shard, flat, group=self.group, async_op=True))

    def all_reduce(self, flat: torch.Tensor, unit: str) -> Pending:
        """Start to sum all ranks' `flat` in place."""
        what = f"the all-reduce of the gradients of unit `{unit}`"
        with self.talking(what):
            return Pending(self, what, dist.all_reduce(flat, group=self.group, async_op=True))

    def any_of(self, flags: torch.Tensor) -> Pending:
        """Start to combine bytes in host memory, in place: what is not 0 on some rank is not 0 on all."""
        with self.talking("an agreement"):
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.host_group, async_op=True)
            return Pending(self, "an agreement", work)

    def any(self, flag: bool) -> bool:
        """It is so on some rank."""
        if self.size == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.uint8)
        self.any_of(flags).wait()
        return bool(flags.item())

    def sum(self, value: float) -> float:
        """Sum over the ranks in float64; the same bits on all of them."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        with self.talking("the sum of the squared gradients"):
            dist.all_reduce(total, group=self.host_group)
        return float(total.item())

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Take over rank 0's values, in place; the tensor is in host memory."""
        if self.size > 1:
            with self.talking("a broadcast"):
                dist.broadcast(tensor, group=self.host_group, group_src=0)

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value: plain and small."""
        if self.size == 1:
            return value
        held = [value]
        with self.talking("a broadcast"):
            dist.broadcast_object_list(held, group=self.host_group, group_src=0)
        return held[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.any(False)

    @contextmanager
    def talking(self, what: str) -> Iterator[None]:
        """Say which exchange failed."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size}: {what} failed, because another rank has died or does not answer; "
                f"its own message is the one to look at. ({str(error).splitlines()[0]})"
            ) from error


ALONE = Ranks()


def join_ranks(group: Any = None) -> Ranks:
    """The ranks to train with; under a launcher, `torch.distributed` is initialised if it was not before."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ
    if group is None and launched and dist.is_available() and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
            dist.init_process_group("cpu:gloo,cuda:nccl")
        else:
            dist.init_process_group("gloo")
        atexit.register(_leave_ranks)
    return Ranks.of_group(group)


def _leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
