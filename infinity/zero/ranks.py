"""Communication among the ranks of one run. No other file calls collectives.

All ranks call these functions in the same order. With one rank nothing is sent.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from infinity.errors import CheckpointError, InfinityError, RankError
from infinity.tiers import Piece, accelerator
from infinity.zero.ending import abandon, leave_at_exit
from infinity.zero.launch import launch_of, local_size
from infinity.zero.meeting import Meeting, Process, meeting_of, this_process
from infinity.zero.path import Path
from infinity.zero.timed_store import call_within

Result = TypeVar("Result")

_ANSWER_S = 5.0
_LEAST_S = 0.001
_MANY_GROUPS = 10_000  # more than a process is in
_LOOK_S = 0.5  # of waiting, before checking whether the other ranks come

# renamed in torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective in flight.

    Args:
        timed: raise after the ranks' own timeout; a device's collective has only its backend's.
    """

    def __init__(self, ranks: Ranks, what: str, work: Any, *, timed: bool = True) -> None:
        self._ranks = ranks
        self._what = what
        self._work = work
        self._timed = timed

    def wait(self) -> None:
        """Block until the collective has ended (on CUDA: make later work on the compute stream wait for it).

        Raises:
            RankError: another rank has failed, or did not take part within the time.
        """
        with self._ranks.talking(self._what):
            if not self._timed:
                self._work.wait()
                return
            until_s = time.monotonic() + self._ranks.patience_s
            while True:
                left_s = until_s - time.monotonic()
                try:
                    # torch counts milliseconds, and 0 is no limit
                    self._work.wait(timedelta(seconds=min(max(left_s, _LEAST_S), _LOOK_S)))
                    return
                except RuntimeError:
                    if self._work.is_completed():
                        self._work.wait()  # raises its own error, if it has one: it may have ended just after the look
                        return
                    if left_s <= _LOOK_S:
                        abandon()
                        self._ranks.note_loss()
                        raise
                self._ranks.path.look()


class Vote:
    """A vote in flight on whether a flag is set on some rank."""

    def __init__(self, flags: torch.Tensor, pending: Pending | None) -> None:
        self._flags = flags
        self._pending = pending

    def result(self) -> bool:
        if self._pending is not None:
            self._pending.wait()
        return bool(self._flags.item())


@dataclass(frozen=True)
class Ranks:
    """The processes that train one model together.

    Attributes:
        rank: of this process.
        size: number of ranks.
        group: for tensors on the compute device.
        host_group: for tensors in host memory.
        neighbours: number of ranks on this machine.
        timeout_s: maximum wait for the other ranks at a common call.
        path: of this process, shared with ranks of a part of the meeting.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    host_group: Any = None
    neighbours: int = 1
    timeout_s: float = 300.0
    meeting: Meeting | None = None
    called: str = ""  # this rank in messages, if these ranks are a part of the meeting
    path: Path = field(default_factory=Path, compare=False)

    @property
    def on_one_machine(self) -> bool:
        return self.neighbours == self.size

    @property
    def patience_s(self) -> float:
        """How long to wait for the other ranks now. Short if a wait for another rank has already timed out.

        A pass that fails because of a missing rank still waits for the collectives that it has started. Otherwise each
        of these waits would take a whole timeout.
        """
        is_lost = self.meeting is not None and self.meeting.is_lost
        return min(_LOOK_S, self.timeout_s) if is_lost else self.timeout_s

    def note_loss(self) -> None:
        """Record that a wait for another rank has timed out. Its collective keeps the group busy for good."""
        if self.meeting is not None:
            self.meeting.is_lost = True

    @staticmethod
    def of_group(group: Any = None, timeout_s: float = 300.0) -> Ranks:
        """Return the ranks of a process group; by default of the default group. All ranks call this together."""
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        if size == 1:
            return ALONE
        meeting = meeting_of(group)
        meeting.set_timeout(timeout_s)
        meeting.is_lost = False
        ranks = Ranks(dist.get_rank(group), size, group, group, timeout_s=timeout_s, meeting=meeting)
        ranks.together("infinity.initialize()")
        if "gloo" not in str(dist.get_backend_config(group)):
            with ranks.talking("the first meeting"):
                host = _group_of(dist.get_process_group_ranks(group or dist.group.WORLD), "gloo", timeout_s)
            ranks = replace(ranks, host_group=host)
        meeting.processes = ranks.of_all(this_process())
        machines = [process.machine for process in meeting.processes]
        return replace(ranks, neighbours=machines.count(machines[ranks.rank]))

    def part(self, members: Sequence[int], what: str) -> Ranks:
        """Return the part of these ranks that contains this rank, with process groups of its own.

        All ranks call this together, each with its own part, so that every rank is in a part.

        Args:
            members: the ranks of the part, in ascending order.
            what: the name of the part, for messages.

        Raises:
            RankError: another rank did not call this in time.
        """
        if len(members) == 1:
            return ALONE
        if len(members) == self.size:
            return self
        parent = self.group or dist.group.WORLD
        everyone = dist.get_process_group_ranks(parent)
        chosen = [everyone[rank] for rank in members]
        made = _made.setdefault(parent, {})
        if tuple(chosen) not in made:
            with self.talking(f"the first meeting of {what}"):
                group = _group_of(chosen, str(dist.get_backend_config(parent)), self.timeout_s)
                host = group if self.host_group is self.group else _group_of(chosen, "gloo", self.timeout_s)
            made[tuple(chosen)] = group, host
        group, host = made[tuple(chosen)]
        if dist.get_process_group_ranks(group) != chosen:  # torch sorts them
            raise RankError(
                f"communication.shard_size forms {what} from neighbouring ranks, but the process group has its ranks "
                f"in the order {everyone}: give initialize a group whose ranks ascend, or leave shard_size out"
            )
        called = f"{self.rank} of {self.size}, among {what}"
        return replace(
            self, rank=members.index(self.rank), size=len(members), group=group, host_group=host, called=called
        )

    def together(self, what: str) -> None:
        """Block until all ranks have made the same call, before anything is exchanged. Does nothing with one rank.

        Args:
            what: the call as a user writes it, such as `engine.save_checkpoint()`.

        Raises:
            RankError: not all ranks have called it within the time, or one has called something else.
        """
        if self.meeting is not None:
            with self.talking(what):
                self.meeting.together(what, self.patience_s)

    def all_gather(self, flat: torch.Tensor, pieces: Sequence[Piece], unit: str) -> list[Pending]:
        """Start to fill a unit's flat tensor with all ranks' pieces; `pieces` are this rank's."""
        what = f"the all-gather of unit `{unit}`"
        self.path.add(what)
        started = []
        start = 0
        for piece in pieces:
            stop = start + piece.numel * self.size
            own = flat[piece.whole : piece.whole + piece.numel]
            started.append(self._start(what, self.group, _all_gather, flat[start:stop], own))
            start = stop
        return started

    def reduce_scatter(self, shard: torch.Tensor, flat: torch.Tensor, unit: str) -> Pending:
        """Start to sum all ranks' `flat`; `shard` becomes this rank's slice of the sum."""
        what = f"the reduce-scatter of the gradients of unit `{unit}`"
        self.path.add(what)
        return self._start(what, self.group, _reduce_scatter, shard, flat)

    def all_reduce(self, flat: torch.Tensor, unit: str) -> Pending:
        """Start to sum all ranks' `flat` in place."""
        what = f"the all-reduce of the gradients of unit `{unit}`"
        self.path.add(what)
        return self._start(what, self.group, dist.all_reduce, flat)

    def _start(self, what: str, group: Any, collective: Callable[..., Any], *args: Any, **options: Any) -> Pending:
        """Start a collective, whose first argument is a tensor."""
        with self.talking(what):
            work = collective(*args, group=group, async_op=True, **options)
        return Pending(self, what, work, timed=args[0].device.type == "cpu")

    def any_of(self, flags: torch.Tensor) -> Pending:
        """Start to replace each byte, in host memory and in place, by its maximum over the ranks."""
        return self._combine(flags, dist.ReduceOp.MAX, "an agreement")

    def any(self, flag: bool) -> bool:
        return self.ask(flag).result()

    def ask(self, flag: bool) -> Vote:
        """Start to find out whether the flag is set on some rank."""
        flags = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        return Vote(flags, self.any_of(flags) if self.size > 1 else None)

    def sum(self, value: float) -> float:
        """Return the sum over the ranks in float64; the same bits on all of them."""
        total = torch.tensor(value, dtype=torch.float64, device="cpu")
        return float(self._combined(total, dist.ReduceOp.SUM, "the sum of the squared gradients"))

    def same(self, number: int) -> bool:
        """Whether all ranks call this with the same number."""
        ends = self._combined(torch.tensor([number, -number], dtype=torch.int64, device="cpu"), dist.ReduceOp.MAX)
        return int(ends[0]) == -int(ends[1])

    def waiting(self) -> list[str]:
        """Return the calls of `together` in which other ranks wait for this one."""
        return [] if self.meeting is None else self.meeting.waiting()

    def least(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        return int(self._combined(torch.tensor(value, dtype=torch.int64, device="cpu"), dist.ReduceOp.MIN))

    def _combined(self, values: torch.Tensor, operation: Any, what: str = "an agreement") -> torch.Tensor:
        """Combine the values of all ranks, in place."""
        if self.size > 1:
            self._combine(values, operation, what).wait()
        return values

    def _combine(self, values: torch.Tensor, operation: Any, what: str) -> Pending:
        return self._start(what, self.host_group, dist.all_reduce, values, operation)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Copy the values of one rank to all, in place; the tensor is in host memory."""
        if self.size > 1:
            self._start("a broadcast", self.host_group, dist.broadcast, tensor, group_src=source).wait()

    def on_rank_0(self, action: Callable[[], Result]) -> Result:
        """Run `action` on rank 0. Every rank gets its result, which is plain and small, or its error.

        Raises:
            InfinityError: the error of the action; on the other ranks with the same message.
        """
        if self.size == 1:
            return action()
        result, failure = _attempt(action) if self.rank == 0 else (None, None)
        answer: list[Any] = [result, None if failure is None else (isinstance(failure, CheckpointError), str(failure))]
        with self.talking("a broadcast"):
            dist.broadcast_object_list(answer, group=self.host_group, group_src=0)
        if failure is not None:
            raise failure
        if answer[1] is not None:
            is_checkpoint, message = answer[1]
            raise (CheckpointError if is_checkpoint else RankError)(f"rank 0: {message}")
        return answer[0]  # type: ignore[no-any-return]

    def of_all(self, value: Any) -> list[Any]:
        """Return every rank's value, plain and small, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.talking("an exchange of states"):
            dist.all_gather_object(values, value, group=self.host_group)
        return values

    def others_have(self, value: Callable[[], Any | None]) -> bool:
        """Whether there are other ranks, and all ranks have the same value, which is not None."""
        if self.size == 1:
            return False
        found = self.of_all(value())
        return found[0] is not None and all(each == found[0] for each in found)

    def each(
        self, action: Callable[[], Result], what: str, refusal: type[InfinityError] = CheckpointError
    ) -> list[Result]:
        """Run `action` on every rank. Every rank gets all results, which are plain, by rank.

        The ranks wait for a slow rank as long as it calls `progress` now and then.

        Args:
            what: the action, for messages.
            refusal: error of the other ranks if one fails.

        Raises:
            InfinityError: it failed on a rank. That rank raises its own error; the others raise a `refusal` with its
                number and message.
        """
        if self.size == 1:
            return [action()]
        return self._all_or_none(*_attempt(action), what, refusal)

    @contextmanager
    def as_one(self, what: str) -> Iterator[None]:
        """Run the code inside this context like `each`, with RankError. The code must not wait for another rank."""
        if self.size == 1:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self._all_or_none(None, failure, what, RankError)

    def _all_or_none(
        self, result: Result | None, failure: Exception | None, what: str, refusal: type[InfinityError]
    ) -> list[Result]:
        """Return all ranks' results, or raise if one has failed."""
        self.together(what)
        outcomes = self.of_all((result, None if failure is None else str(failure)))
        if failure is not None and not isinstance(failure, refusal):
            raise failure
        for rank, (_, message) in enumerate(outcomes):
            if message is not None:
                raise refusal(f"rank {rank}: {message}") from failure
        return [result for result, _ in outcomes]

    @property
    def processes(self) -> list[Process]:
        return [] if self.meeting is None else self.meeting.processes

    def progress(self) -> None:
        """Tell the ranks that wait in `each` that this one makes progress. Cheap to call often, from any thread."""
        if self.meeting is not None:
            self.meeting.progress()

    def tell(self, what: str) -> None:
        """Count an action of this rank; from any thread, with no collective."""
        if self.meeting is not None:
            self.meeting.tell(what)

    def untold(self, what: str, count: int) -> list[int]:
        """Return the ranks that have counted fewer than `count` of these actions; from any thread, with no collective.

        Raises:
            RankError: one of them has ended.
        """
        return [] if self.meeting is None else self.meeting.untold(what, count)

    def barrier(self) -> None:
        """Block until all ranks call this."""
        self.any(False)

    @contextmanager
    def talking(self, what: str) -> Iterator[None]:
        """Name the failed exchange, and the missing rank, in errors."""
        meeting = self.meeting
        # The wait ends only after the cause is found, because the watch then forgets which rank is missing.
        with nullcontext() if meeting is None else meeting.watch.waiting(what):
            try:
                yield
            except RuntimeError as error:
                here = self.called or f"{self.rank} of {self.size}"
                cause = None if meeting is None else _soon(meeting.lonely) or meeting.watch.missing()
                raise RankError(
                    f"rank {here}: {what} failed, because another rank has died or does not answer; "
                    f"{cause or 'the cause is in the log of that rank'}. ({str(error).splitlines()[0]})"
                ) from error


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Return the action's result, or its error: the other ranks wait for the outcome."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def _group_of(members: list[int], backend: str, timeout_s: float) -> Any:
    """Return a process group of these ranks; other ranks may make groups of their own.

    torch names such a group by its members and by the number of groups that this process is in. Ranks that differ in
    this number, as with a group of rank 0 alone, would not find each other. So torch is shown the same number on all.
    """
    c10d: Any = dist.distributed_c10d
    groups: dict[Any, str] = c10d._world.pg_names
    named = _named.setdefault(dist.group.WORLD, Counter())
    fill = [object() for _ in range(_MANY_GROUPS + named[tuple(members)] - len(groups))]
    groups.update(dict.fromkeys(fill, ""))
    try:
        group = dist.new_group(members, timedelta(seconds=timeout_s), backend=backend, use_local_synchronization=True)
    finally:
        for each in fill:
            del groups[each]
    named[tuple(members)] += 1
    return group


def _soon(ask: Callable[[], str | None]) -> str | None:
    """Return the answer, or None if it takes long: it comes from a store that may be unreachable."""
    with suppress(Exception):  # the caller has an error of its own to raise
        return call_within(_ANSWER_S, ask)
    return None


ALONE = Ranks()

# Parts of each process group, by their ranks: torch keeps a group's connections as long as the process lives.
_made: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], tuple[Any, Any]]] = weakref.WeakKeyDictionary()

# How many groups `_group_of` has made among the ranks of a default group, by members.
_named: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def world_size(group: Any = None) -> int:
    """Return the number of ranks that `join_ranks` will find.

    Raises:
        ConfigError: several processes were started that cannot meet.
    """
    if dist.is_initialized():
        return dist.get_world_size(group)
    launch = launch_of(os.environ)
    return 1 if launch is None else launch.size


def join_ranks(group: Any = None, timeout_s: float = 300.0) -> Ranks:
    """Return the ranks to train with. Under a launcher, initialise `torch.distributed` if necessary.

    Args:
        timeout_s: how long a rank waits for the others.

    Raises:
        ConfigError: several processes were started that cannot meet.
        RankError: not all of them joined in time.
    """
    launch = None if dist.is_initialized() else launch_of(os.environ)
    if launch is not None:
        backend = "gloo"
        device = accelerator()
        if device is not None:
            torch.accelerator.set_device_index(launch.local_rank % torch.accelerator.device_count())
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        with Ranks(launch.rank, launch.size).talking("the first meeting"):
            dist.init_process_group(
                backend,
                init_method=launch.address,
                rank=launch.rank,
                world_size=launch.size,
                timeout=timedelta(seconds=timeout_s),
            )
        leave_at_exit()
    return Ranks.of_group(group, timeout_s)


def least_of(value: int, *ranks: Ranks) -> int:
    """Return the smallest value of all of these ranks."""
    for others in ranks:
        value = others.least(value)
    return value


def is_first_process() -> bool:
    """Whether this process is the first one of all groups."""
    return not dist.is_initialized() or dist.get_rank() == 0


def ranks_on_this_machine(ranks: Ranks) -> int:
    """Return how many processes share this machine's memory: the number in `ranks`, or the launcher's if larger."""
    return max(ranks.neighbours, local_size(os.environ))
