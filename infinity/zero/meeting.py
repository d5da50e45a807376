"""Where the ranks meet before something that they must do together, so that one who came alone does not hang.

They meet in the store of `torch.distributed`: a collective that one rank has started alone can neither be called back,
nor tell who did not come, and would be taken for the training's by a rank that is there.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any

import torch.distributed as dist

from infinity.errors import RankError

_POLL_S = (0.0002, 0.05)  # between looks: at first, and at most


class Meeting:
    """The doors of one process group.

    Args:
        group: None for the default group.
    """

    def __init__(self, group: Any = None) -> None:
        group = dist.group.WORLD if group is None else group
        name = f"infinity/{group.group_name}"
        c10d: Any = dist.distributed_c10d
        self._store = c10d.PrefixStore(name, c10d._get_default_store())
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._passed = 0  # doors that all ranks went through
        self._gave_up = False

    def together(self, what: str, timeout_s: float) -> None:
        """Wait until all ranks call this with the same `what`.

        Raises:
            RankError: some rank did not come within the time, or came to something else.
        """
        door = self._passed
        own = self._key(door, self._rank)
        self._store.set(own, what)
        others = [rank for rank in range(self._size) if rank != self._rank]
        absent = self._wait(door, others, timeout_s)
        if absent:
            self._store.set(f"gave-up/{self._rank}", what)
            self._gave_up = True
            self._store.delete_key(own)
            ranks = ", ".join(map(str, absent))
            raise RankError(
                f"rank {self._rank} called {what} but rank(s) {ranks} did not within {timeout_s:g} s: call it on all "
                "ranks together"
            )
        self._passed += 1
        if self._gave_up:
            self._store.delete_key(f"gave-up/{self._rank}")
            self._gave_up = False
        calls = {rank: self._call(self._key(door, rank)) for rank in others}
        if door:  # all ranks are here, so all have read what was left at the door before
            self._store.delete_key(self._key(door - 1, self._rank))
        for rank, call in calls.items():
            if call != what:
                raise RankError(
                    f"rank {self._rank} called {what} while rank {rank} called {call}: all ranks must call the same "
                    "together"
                )

    def lonely(self) -> str | None:
        """A rank that waits for this one at a door, or has given up there."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            for rank in range(self._size):
                for key in (self._key(self._passed, rank), f"gave-up/{rank}"):
                    if rank != self._rank and self._store.check([key]):
                        return f"rank {rank} called {self._call(key)}, which all ranks must call together"
        return None

    def _wait(self, door: int, ranks: list[int], timeout_s: float) -> list[int]:
        """Those of the ranks that have not come to the door in time."""
        deadline_s = time.monotonic() + timeout_s
        pause_s, longest_s = _POLL_S
        while True:
            ranks = [rank for rank in ranks if not self._store.check([self._key(door, rank)])]
            left_s = deadline_s - time.monotonic()
            if not ranks or left_s <= 0:
                return ranks
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, longest_s)

    def _call(self, key: str) -> str:
        return str(self._store.get(key).decode())

    def _key(self, door: int, rank: int) -> str:
        return f"{door}/{rank}"


# One for all engines of a group, which count the same doors.
_meetings: weakref.WeakKeyDictionary[Any, Meeting] = weakref.WeakKeyDictionary()


def meeting_of(group: Any = None) -> Meeting:
    """The doors of a process group; of the default group if it is None."""
    group = dist.group.WORLD if group is None else group
    if group not in _meetings:
        _meetings[group] = Meeting(group)
    return _meetings[group]
