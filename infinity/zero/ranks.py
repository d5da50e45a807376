"""What the ranks of one run say to each other: the only file that calls collectives.

Everything here is called by all ranks in the same order. With one rank nothing is sent.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from infinity.errors import CheckpointError, RankError
from infinity.tiers import Piece
from infinity.zero.launch import launch_of, local_size
from infinity.zero.meeting import Meeting, meeting_of

Result = TypeVar("Result")

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
        neighbours: how many of them are on this machine.
        timeout_s: how long one waits for the others to come to what all do together.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    host_group: Any = None
    neighbours: int = 1
    timeout_s: float = 300.0
    meeting: Meeting | None = None

    @staticmethod
    def of_group(group: Any = None, timeout_s: float = 300.0) -> Ranks:
        """The ranks of a process group, which all call this; of the default group if it is None and there is one."""
        if not dist.is_available() or not dist.is_initialized():
            return ALONE
        size = dist.get_world_size(group)
        if size == 1:
            return ALONE
        host = group
        if "gloo" not in str(dist.get_backend_config(group)):
            # Others may be making groups of their own.
            members = dist.get_process_group_ranks(group or dist.group.WORLD)
            host = dist.new_group(members, timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True)
        ranks = Ranks(dist.get_rank(group), size, group, host, timeout_s=timeout_s, meeting=meeting_of(group))
        ranks.together("infinity.initialize()")
        machines = ranks.of_all(_machine())
        return replace(ranks, neighbours=machines.count(machines[ranks.rank]))

    def together(self, what: str) -> None:
        """Wait until all ranks have come to the same call, before anything is exchanged; one rank need not wait.

        Args:
            what: the call as a user writes it, such as `engine.save_checkpoint()`.

        Raises:
            RankError: not all ranks have called it within the time, or one has called something else.
        """
        if self.meeting is not None:
            with self.talking(what):
                self.meeting.together(what, self.timeout_s)

    def all_gather(self, flat: torch.Tensor, pieces: Sequence[Piece], unit: str) -> list[Pending]:
        """Start to fill a unit's flat tensor, of which `pieces` are this rank's, with all ranks' pieces."""
        what = f"the all-gather of unit `{unit}`"
        started = []
        start = 0
        for piece in pieces:
            stop = start + piece.numel * self.size
            own = flat[piece.whole : piece.whole + piece.numel]
            with self.talking(what):
                work = _all_gather(flat[start:stop], own, group=self.group, async_op=True)
                started.append(Pending(self, what, work))
            start = stop
        return started

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

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        if self.size == 1:
            return value
        least = torch.tensor([value], dtype=torch.int64)
        with self.talking("an agreement"):
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self.host_group)
        return int(least.item())

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Take over the values of one rank, in place; the tensor is in host memory."""
        if self.size > 1:
            with self.talking("a broadcast"):
                dist.broadcast(tensor, group=self.host_group, group_src=source)

    def on_rank_0(self, action: Callable[[], Result]) -> Result:
        """Run `action` on rank 0; every rank gets its result, which is plain and small, or its error.

        Raises:
            InfinityError: what the action raised; on the other ranks with the same message.
        """
        if self.size == 1:
            return action()
        held: list[Any] = [None, None]
        failure: Exception | None = None
        if self.rank == 0:
            try:
                held[0] = action()
            except Exception as error:  # the other ranks wait for word of it, too
                failure = error
                held[1] = (isinstance(error, CheckpointError), str(error))
        with self.talking("a broadcast"):
            dist.broadcast_object_list(held, group=self.host_group, group_src=0)
        if failure is not None:
            raise failure
        if held[1] is not None:
            is_checkpoint, message = held[1]
            raise (CheckpointError if is_checkpoint else RankError)(f"rank 0: {message}")
        return held[0]  # type: ignore[no-any-return]

    def of_all(self, value: Any) -> list[Any]:
        """Every rank's value, plain and small, by rank."""
        if self.size == 1:
            return [value]
        held: list[Any] = [None] * self.size
        with self.talking("an exchange of states"):
            dist.all_gather_object(held, value, group=self.host_group)
        return held

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor in host memory to rank 0."""
        with self.talking("a transfer to rank 0"):
            dist.send(tensor, group=self.host_group, group_dst=0)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill a tensor in host memory with what `rank` sends."""
        with self.talking(f"a transfer from rank {rank}"):
            dist.recv(tensor, group=self.host_group, group_src=rank)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.any(False)

    @contextmanager
    def talking(self, what: str) -> Iterator[None]:
        """Say which exchange failed."""
        try:
            yield
        except RuntimeError as error:
            lonely = None if self.meeting is None else self.meeting.lonely()
            cause = lonely or "its own message is the one to look at"
            raise RankError(
                f"rank {self.rank} of {self.size}: {what} failed, because another rank has died or does not answer; "
                f"{cause}. ({str(error).splitlines()[0]})"
            ) from error


ALONE = Ranks()


def world_size(group: Any = None) -> int:
    """How many ranks `join_ranks` will find.

    Raises:
        ConfigError: several processes were started that cannot meet.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group)
    launch = launch_of(os.environ)
    return 1 if launch is None else launch.size


def join_ranks(group: Any = None, timeout_s: float = 300.0) -> Ranks:
    """The ranks to train with; under a launcher, `torch.distributed` is initialised if it was not before.

    Args:
        timeout_s: how long a rank waits for the others.

    Raises:
        ConfigError: several processes were started that cannot meet.
        RankError: not all of them came.
    """
    if dist.is_available() and not dist.is_initialized():
        launch = launch_of(os.environ)
        if launch is not None:
            backend = "gloo"
            if torch.cuda.is_available():
                torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
                backend = "cpu:gloo,cuda:nccl"
            with Ranks(launch.rank, launch.size).talking("the first meeting"):
                dist.init_process_group(
                    backend,
                    init_method=launch.address,
                    rank=launch.rank,
                    world_size=launch.size,
                    timeout=timedelta(seconds=timeout_s),
                )
            atexit.register(_leave_ranks, os.getpid())
    return Ranks.of_group(group, timeout_s)


def ranks_on_this_machine(ranks: Ranks = ALONE) -> int:
    """How many processes share this machine's memory: those of `ranks`, or as many as the launcher says."""
    return max(ranks.neighbours, local_size(os.environ))


def _machine() -> str:
    """What is the same for the processes that share a machine's memory, containers included."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _leave_ranks(owner_pid: int) -> None:
    if os.getpid() == owner_pid and dist.is_initialized():  # a forked child shares the connections, and no thread
        dist.destroy_process_group()
