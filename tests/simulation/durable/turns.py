"""Ranks and their committing threads, which take turns: one runs until it waits for another."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Semaphore, Thread
from typing import Any, TypeVar

from infinity.checkpoint import commits, snapshot
from infinity.errors import RankError
from infinity.zero.ranks import Ranks
from tests.simulation.durable.drive import Hear, Recorder, Tell, here

Result = TypeVar("Result")
_runs = itertools.count(1)


class Turns:
    """Runs one action on every rank."""

    def __init__(self, size: int, recorder: Recorder | None) -> None:
        self.size = size
        self.recorder = recorder
        self.commit: Callable[[int], None] = lambda rank: None  # has a rank's committing thread run until it waits
        self.told: dict[str, dict[int, int]] = {}
        self.closed: dict[int, list[tuple[Any, ...]]] = {}  # epochs, by rank
        self.labels: dict[tuple[Any, ...], int] = {}  # of the steps that gates open for
        self._run = 0
        self._alive: list[int] = []
        self._seats = [Semaphore(0) for _ in range(size)]
        self._box: dict[int, Any] = {}
        self._met: list[list[Any]] = []

    def tell(self, *key: Any) -> None:
        if self.recorder is not None:
            self.recorder.look()
            self.recorder.add(Tell(key))

    def hear(self, *keys: tuple[Any, ...]) -> None:
        if self.recorder is not None:
            self.recorder.add(Hear(frozenset(keys)))

    def run(self, action: Callable[[int], Result]) -> list[Result | Exception]:
        """What each rank has returned, or raised."""
        outcomes: list[Any] = [None] * self.size
        self._run = next(_runs)
        self._alive, self._box, self._met = list(range(self.size)), {}, []

        def act(rank: int) -> None:
            here.lane, here.turns, here.rank, here.met = f"rank {rank}", self, rank, 0
            try:
                outcomes[rank] = action(rank)
            except Exception as error:
                outcomes[rank] = error
            if self.recorder is not None:
                self.recorder.look()

        def seat(rank: int) -> None:
            self._seats[rank].acquire()
            act(rank)
            self._pass(rank, leaves=True)

        if self.size == 1:
            act(0)
            return outcomes
        threads = [Thread(target=seat, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._seats[0].release()
        for thread in threads:
            thread.join()
        return outcomes

    def _pass(self, rank: int, *, leaves: bool = False) -> None:
        """Let the next rank run; returns when it is this one's turn again."""
        following = [other for other in (*range(rank + 1, self.size), *range(rank)) if other in self._alive]
        if leaves:
            self._alive.remove(rank)
        if following:
            self._seats[following[0]].release()
        if following and not leaves:
            self._seats[rank].acquire()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """All ranks' values, when all have called this."""
        mine, here.met = here.met, here.met + 1
        self.tell("met", self._run, mine, rank)
        self._box[rank] = value
        if len(self._box) == self.size:
            self._met.append([self._box[each] for each in range(self.size)])
            self._box = {}
        while len(self._met) <= mine:
            if len(self._alive) < self.size:
                raise RankError(f"rank {rank}: another rank has ended")
            self._pass(rank)
        self.hear(*(("met", self._run, mine, other) for other in range(self.size)))
        return self._met[mine]


@dataclass(frozen=True)
class TurnRanks(Ranks):
    """The engine's ranks, whose exchanges are turns."""

    turns: Turns = field(default_factory=lambda: Turns(1, None), compare=False)

    def of_all(self, value: Any) -> list[Any]:
        return self.turns.exchange(self.rank, value) if self.size > 1 else [value]

    def any(self, flag: bool) -> bool:
        return any(self.of_all(flag))

    def on_rank_0(self, action: Callable[[], Result]) -> Result:
        return self.each(lambda: action() if self.rank == 0 else None, "")[0]  # type: ignore[return-value]

    def tell(self, what: str) -> None:
        told = self.turns.told.setdefault(what, {})
        told[self.rank] = told.get(self.rank, 0) + 1
        self.turns.tell(what, told[self.rank], self.rank)

    def untold(self, what: str, count: int) -> list[int]:
        """Waits, so that it is none."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            if self.turns.told[what].get(rank, 0) < count:
                self.turns.commit(rank)
            if self.turns.told[what].get(rank, 0) < count:
                raise RankError(f"rank {self.rank}: rank {rank} has not committed its step")
        self.turns.hear(*((what, count, rank) for rank in others))
        return []


class Gate(Future[None]):
    """Opened by the committing thread, which runs when somebody waits here."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Gate.made += 1
        self.key = "gate", Gate.made
        self.turns, self.rank = here.turns, here.rank
        self.turns.closed.setdefault(self.rank, []).append(("closed", *self.key))
        self.turns.tell("closed", *self.key)

    def set_result(self, result: None) -> None:
        super().set_result(result)
        self.turns.tell(*self.key)

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            self.turns.commit(self.rank)
        if self.exception(0) is None:
            self.turns.hear(self.key)
        return super().result(0)


class Worker:
    """In the place of a thread: works when it is joined."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work

    def join(self, timeout: float | None = None) -> None:
        self._work()


class AtOnce:
    """In the place of a pool of threads."""

    def __init__(self, *args: Any) -> None:
        pass

    def submit(self, action: Callable[[], Result]) -> Future[Result]:
        done: Future[Result] = Future()
        try:
            done.set_result(action())
        except BaseException as error:  # whoever asks for it gets it
            done.set_exception(error)
        return done

    def shutdown(self) -> None:
        pass


class Numbers:
    """In the place of random names and of the clock: the same in every run."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def token(self, nbytes: int) -> str:
        self._next += 1
        return f"{self._next:0{2 * nbytes}x}"

    @property
    def hex(self) -> str:
        return self.token(16)

    def time(self) -> float:
        self._next += 1
        return float(self._next)


@contextmanager
def in_turns(numbers: Numbers) -> Iterator[None]:
    """Threads, clocks and random names of the engine are the search's; none of its decisions is."""
    places: Sequence[tuple[Any, str, Any]] = (
        (commits, "start_thread", Worker),
        (commits, "Future", Gate),
        (snapshot, "ThreadPoolExecutor", AtOnce),
        (secrets, "token_hex", numbers.token),
        (uuid, "uuid4", lambda: numbers),
        (time, "time", numbers.time),
    )
    real = [getattr(owner, name) for owner, name, _ in places]
    log = logging.getLogger("infinity")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)  # of errors that are looked for
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        log.setLevel(level)
        for (owner, name, _), value in zip(places, real, strict=True):
            setattr(owner, name, value)
