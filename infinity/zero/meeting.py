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
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._arrive(str(door), what)
        absent = self._wait(door, others, timeout_s)
        if absent:
            self._leave(str(door))
            self._arrive("gave up", what)
            self._gave_up = True
            ranks = ", ".join(map(str, absent))
            raise RankError(
                f"rank {self._rank} called {what} but rank(s) {ranks} did not within {timeout_s:g} s: call it on all "
                "ranks together (or raise communication.timeout, if they come later)"
            )
        self._passed += 1
        calls = {rank: self._call(str(door), rank) for rank in others}
        if door:  # all ranks are here, so all have read what was left at the door before
            self._leave(str(door - 1))
        if self._gave_up:
            self._leave("gave up")
            self._gave_up = False
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
                for place in (str(self._passed), "gave up"):
                    if rank != self._rank and self._is_at(place, rank):
                        return f"rank {rank} called {self._call(place, rank)}, which all ranks must call together"
        return None

    def _wait(self, door: int, ranks: list[int], timeout_s: float) -> list[int]:
        """Those of the ranks that have not come to the door in time."""
        deadline_s = time.monotonic() + timeout_s
        pause_s, longest_s = _POLL_S
        while True:
            ranks = [rank for rank in ranks if not self._is_at(str(door), rank)]
            left_s = deadline_s - time.monotonic()
            if not ranks or left_s <= 0:
                return ranks
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, longest_s)

    def _arrive(self, place: str, what: str) -> None:
        self._store.set(f"{place}/{self._rank}/call", what)
        self._store.add(f"{place}/{self._rank}", 1)

    def _leave(self, place: str) -> None:
        self._store.delete_key(f"{place}/{self._rank}")
        self._store.delete_key(f"{place}/{self._rank}/call")

    def _is_at(self, place: str, rank: int) -> bool:
        return int(self._store.add(f"{place}/{rank}", 0)) > 0  # the one look that never waits

    def _call(self, place: str, rank: int) -> str:
        return str(self._store.get(f"{place}/{rank}/call").decode())


# One for all engines of a group, which count the same doors.
_meetings: weakref.WeakKeyDictionary[Any, Meeting] = weakref.WeakKeyDictionary()


def meeting_of(group: Any = None) -> Meeting:
    """The doors of a process group; of the default group if it is None."""
    group = dist.group.WORLD if group is None else group
    if group not in _meetings:
        _meetings[group] = Meeting(group)
    return _meetings[group]
