"""Let the ranks meet before a common operation, so that a rank that calls it alone does not hang.

They meet in the store of `torch.distributed`, and not in a collective. A collective that one rank has started alone
cannot be cancelled, does not name the missing rank, and could be matched with a collective of the training.

A rank that works alone for long, because it reads or writes files, reports progress. The others wait as long as it
does: the timeout is for silent ranks, not for slow drives.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from infinity.errors import RankError
from infinity.telemetry.tasks import read_task
from infinity.zero.timed_store import TimedStore
from infinity.zero.watch import Watch

_POLL_S = (0.0002, 0.05)  # between polls: at first, and at most
_PROGRESS_S = 1.0  # minimum time between two progress reports


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        machine: identifies the machine, also from within containers.
        namespace: namespace of the process id.
        started: start time in the kernel's clock, because process ids are reused.
    """

    machine: str
    namespace: str
    pid: int
    started: str

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended. False for a process that this one cannot see."""
        here = this_process()
        if not here.started or (self.machine, self.namespace) != (here.machine, here.namespace):
            return False  # without /proc, no process is seen
        try:
            task = read_task(Path(f"/proc/{self.pid}"))
        except FileNotFoundError:
            return True
        except (OSError, ValueError, IndexError):
            return False
        return task.state in "ZX" or str(task.started) != self.started


def this_process() -> Process:
    machine, namespace, started = socket.gethostname(), "", ""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError, ValueError, IndexError):
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115  (its target is no path)
        started = str(read_task(Path("/proc/self")).started)
    return Process(machine, namespace, os.getpid(), started)


class OtherCallError(RankError):
    """Ranks have made different calls.

    Attributes:
        calls: the call of each rank.
    """

    def __init__(self, words: str, calls: dict[int, str]) -> None:
        super().__init__(words)
        self.calls = calls


class Meeting:
    """The meetings of one process group, numbered in their order.

    Attributes:
        watch: names the missing rank when a wait is long.
        processes: the process of each rank; empty until they are known.
        is_lost: whether a wait for another rank in a collective has timed out.
    """

    def __init__(self, group: Any) -> None:
        name = f"infinity/{group.group_name}"
        c10d: Any = dist.distributed_c10d
        store = c10d.PrefixStore(name, c10d._get_default_store())
        self._store = TimedStore(store)
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self.watch = Watch(c10d.PrefixStore("watch", store), self._rank, self._size)
        self._passed = 0  # meetings that all ranks have passed
        self._gave_up = False
        self._told_s = -_PROGRESS_S
        self.processes: list[Process] = []
        self.is_lost = False

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long the store may take for an answer, and when the watch begins to warn."""
        self._store.timeout_s = self.watch.timeout_s = timeout_s

    def together(self, what: str, timeout_s: float) -> None:
        """Block until all ranks call this with the same `what`.

        Raises:
            RankError: a rank did not call this within the time and reported no progress, or has ended, or made another
                call.
        """
        meeting = self._passed
        self._arrive(str(meeting), what)
        absent = self._wait(str(meeting), timeout_s)
        if absent:
            self._arrive("gave up", what)  # before the key is deleted, so that other ranks find one of the two
            self._store.delete_key(f"{meeting}/{self._rank}")  # its call stays: another rank may be about to read it
            self._gave_up = True
            ranks = ", ".join(map(str, absent))
            raise RankError(
                f"rank {self._rank} called {what} but rank(s) {ranks} did not within {timeout_s:g} s: call it on all "
                "ranks together (or raise communication.timeout, if they come later)"
            )
        self._passed += 1
        calls = {rank: self._call(str(meeting), rank) for rank in self._others}
        if meeting:  # all ranks are here, so all have read the entries of the meeting before
            self._leave(str(meeting - 1))
        if self._gave_up:
            self._leave("gave up")
            self._gave_up = False
        for rank, call in calls.items():
            if call != what:
                raise OtherCallError(
                    f"rank {self._rank} called {what} while rank {rank} called {call}: all ranks must call the same "
                    "together",
                    dict(sorted({self._rank: what, **calls}.items())),
                )

    def progress(self) -> None:
        """Report that this rank makes progress in its work alone. Cheap to call often, from any thread."""
        now_s = time.monotonic()
        if now_s - self._told_s >= _PROGRESS_S:
            self._told_s = now_s
            self._store.add(f"progress/{self._rank}", 1)

    def tell(self, what: str) -> None:
        """Count an action of this rank; from any thread."""
        self._store.add(f"told/{what}/{self._rank}", 1)

    def untold(self, what: str, count: int) -> list[int]:
        """Return the ranks that have counted fewer than `count` of these actions; from any thread.

        Raises:
            RankError: one of them has ended.
        """
        ranks = [r for r in range(self._size) if self._store.add(f"told/{what}/{r}", 0) < count]
        self._check_alive(rank for rank in ranks if rank != self._rank)
        return ranks

    def waiting(self) -> list[str]:
        """Return the calls of other ranks that wait for this one at a meeting."""
        meeting = str(self._passed)
        return [self._call(meeting, rank) for rank in self._others if self._is_at(meeting, rank)]

    def lonely(self) -> str | None:
        """Name a rank that waits for this one at a meeting, or has given up; None if there is none."""
        with suppress(RuntimeError):  # the store may be gone with its rank
            for rank in self._others:
                for place in (str(self._passed), "gave up"):
                    if self._is_at(place, rank):
                        return f"rank {rank} called {self._call(place, rank)}, which all ranks must call together"
        return None

    def _wait(self, meeting: str, timeout_s: float) -> list[int]:
        """Wait until the other ranks are at the meeting. Return the ranks that did not come in time."""
        now_s = time.monotonic()
        ranks = self._others
        heard = {rank: (self._progress(rank), now_s) for rank in ranks}  # latest report, and when it was seen
        looked_s = now_s
        pause_s, longest_s = _POLL_S
        while True:
            ranks = [rank for rank in ranks if not self._is_at(meeting, rank)]
            now_s = time.monotonic()
            if now_s - looked_s >= min(_PROGRESS_S, timeout_s / 2):
                looked_s = now_s
                self._check_alive(ranks, but_at=meeting)
                for rank in ranks:
                    if (said := self._progress(rank)) != heard[rank][0]:
                        heard[rank] = said, now_s
            left_s = [heard[rank][1] + timeout_s - now_s for rank in ranks]
            if not ranks or min(left_s) <= 0:
                return ranks
            time.sleep(min(pause_s, *left_s))
            pause_s = min(2 * pause_s, longest_s)

    def _check_alive(self, ranks: Iterable[int], but_at: str | None = None) -> None:
        """Check that the ranks are alive, as far as this machine shows it.

        Args:
            but_at: ranks that have been at this meeting may have ended.

        Raises:
            RankError: one of them has ended.
        """
        for rank in ranks if self.processes else ():
            if self.processes[rank].has_ended and (but_at is None or not self._is_at(but_at, rank)):
                raise RankError(
                    f"rank {self._rank} of {self._size}: rank {rank} (process {self.processes[rank].pid}) has ended; "
                    "the cause is in the last message of its log"
                )

    def _progress(self, rank: int) -> int:
        return self._store.add(f"progress/{rank}", 0)

    def _arrive(self, place: str, what: str) -> None:
        self._store.set(f"{place}/{self._rank}/call", what)
        self._store.add(f"{place}/{self._rank}", 1)

    def _leave(self, place: str) -> None:
        self._store.delete_key(f"{place}/{self._rank}")
        self._store.delete_key(f"{place}/{self._rank}/call")

    def _is_at(self, place: str, rank: int) -> bool:
        return self._store.add(f"{place}/{rank}", 0) > 0  # the only query of the store that never waits

    def _call(self, place: str, rank: int) -> str:
        return self._store.get(f"{place}/{rank}/call").decode()


# One for all engines of a group, so that they count the same meetings.
_meetings: weakref.WeakKeyDictionary[Any, Meeting] = weakref.WeakKeyDictionary()


def meeting_of(group: Any) -> Meeting:
    """Return the meeting points of a process group; None for the default group."""
    group = dist.group.WORLD if group is None else group
    if group not in _meetings:
        _meetings[group] = Meeting(group)
    return _meetings[group]
