"""Virtual time, in which operations end late, together, at once, in any order, or with an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from infinity.errors import StorageError
from infinity.simulation.invariants import violate


class Crash(BaseException):
    """The process has died."""


class Interrupted(BaseException):
    """The user has interrupted the compute thread."""


@dataclass(frozen=True)
class Tempo:
    """How long operations take.

    Attributes:
        at_once: share of the operations that have ended at the next poll.
        longest: ticks of the longest operation; a tick is one action of the compute thread.
        together: operations end at multiples of this number of ticks.
    """

    at_once: float = 0.0
    longest: int = 0
    together: int = 1

    @classmethod
    def drawn(cls, random: Random) -> Tempo:
        """Draw a tempo: operations end at once, late or never, one by one or together."""
        longest = random.choice((0, 3, 20, 200, 10**6))
        return cls(random.choice((0.0, 0.3, 0.9)), longest, random.choice((1, 1, 16)))


class Operation:
    """A transfer in flight, or an update of a tile."""

    __slots__ = ("done", "end", "failed", "kind", "then", "unit")

    def __init__(self, kind: str, unit: int, end: Callable[[Operation], None] | None) -> None:
        self.kind = kind
        self.unit = unit
        self.end = end
        self.then: Callable[[], None] | None = None
        self.done = False
        self.failed = False

    @property
    def error(self) -> StorageError:
        """The error that it raises if it fails."""
        return StorageError(5, f"the {self.kind} of unit {self.unit} fails", "drive", 0)

    def check(self) -> None:
        """Raise its error if it has failed."""
        if self.failed:
            raise self.error


class Clock:
    """The operations in flight on one rank.

    Attributes:
        trace: called with a line of text for each operation that ends; or None.
        faults: kinds of operations of which the next one fails.
        crash_at: tick at which the process dies.
        interrupt_at: tick at which the user interrupts the compute thread; None for no interrupt.
    """

    def __init__(self, random: Random, tempo: Tempo, trace: Callable[[str], None] | None = None) -> None:
        self.now = 0
        self.trace = trace
        self.faults: list[str] = []
        self.crash_at = -1
        self.interrupt_at: int | None = None
        self._ending = 0  # above 0 while an operation ends: this code, such as the worker's, cannot be interrupted
        self.ended = 0
        self._tempo = tempo
        self._random = random.random
        self._started = 0
        self._under_way: list[tuple[int, int, Operation]] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def start(
        self, kind: str, unit: int, end: Callable[[Operation], None] | None = None, tiles: Sequence[int] = ()
    ) -> Operation:
        """Start an operation. At its end, `end` is called with it, even if it has failed.

        Args:
            unit: number of the unit, or of the extent if the operation moves an extent; -1 for neither.
            tiles: the tiles of the unit that it changes or moves.
        """
        operation, tempo = Operation(kind, unit, end), self._tempo
        if self.faults and kind in self.faults:
            self.faults.remove(kind)
            operation.failed = True
        due = self.now
        if self._random() >= tempo.at_once:
            due += int(tempo.longest * self._random() ** 3)
            due += -due % tempo.together
        self._started += 1
        heappush(self._under_way, (due, self._started, operation))
        return operation

    def tick(self) -> None:
        """Advance by one action of the compute thread, and end the operations that are due."""
        self.now += 1
        if self.now == self.crash_at:
            raise Crash
        self._may_interrupt(self.now)
        while self._under_way and self._under_way[0][0] < self.now:
            self._end_next()

    def _may_interrupt(self, until: int) -> None:
        if self.interrupt_at is not None and self.interrupt_at <= until and not self._ending:
            self.interrupt_at = None
            raise Interrupted

    def wait(self, operation: Operation) -> None:
        """Wait until an operation has ended or failed."""
        while not operation.done:
            self.wait_for_next()

    def wait_until(self, holds: Callable[[], bool], _cause: str) -> None:
        """Wait until a condition holds."""
        while not holds():
            self.wait_for_next()

    def wait_for_next(self) -> None:
        """Advance to the end of the next operation, because a thread waits."""
        if not self._under_way:
            violate("progress", "a thread waits, but no operation is in flight")
        if self.now < self.crash_at <= self._under_way[0][0]:
            raise Crash
        self._may_interrupt(self._under_way[0][0])
        self.now = max(self.now, self._under_way[0][0])
        self._end_next()

    def _end_next(self) -> None:
        self._end(heappop(self._under_way)[2])

    def _end(self, operation: Operation) -> None:
        operation.done = True
        self.ended += 1
        self._ending += 1
        if self.trace is not None:
            self.trace(f"    {operation.kind} of u{operation.unit} {'fails' if operation.failed else 'ends'}")
        if operation.end is not None:
            operation.end(operation)
        if operation.then is not None:
            operation.then()
        self._ending -= 1


class Transfer:
    """An operation as the engine sees it."""

    def __init__(self, clock: Clock, operation: Operation) -> None:
        self._clock = clock
        self.operation = operation

    def done(self) -> bool:
        return self.operation.done

    def result(self) -> None:
        self._clock.wait(self.operation)
        self.operation.check()

    def times(self) -> None:
        return None
