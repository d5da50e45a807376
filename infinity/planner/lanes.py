"""Virtual time on a simulated machine: lanes that run one task after the other and slow each other down.

Between two events, every busy lane works at a speed that depends on which other lanes are busy. So an event costs a few
operations, however many bytes are moved in between. The compute thread calls and waits; the optimizer's worker takes a
turn whenever the compute thread waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from random import Random
from typing import NamedTuple

from infinity.simulation.clock import Clock, Operation, Tempo

Speeds = Callable[[frozenset[str]], Mapping[str, float]]  # busy lanes -> speed of each, as a share of its speed alone
_OF_WORKER = ("pick", "update")  # operations whose end is a turn of the worker


class Cost(NamedTuple):
    """The work of an operation: seconds of a lane if no other lane is busy."""

    lane: str
    seconds: float
    urgent: bool = False


class Task(Operation):
    """Work of the lane that is its kind.

    Attributes:
        left_s: its remaining time if no other lane were busy.
    """

    __slots__ = ("left_s", "urgent")

    def __init__(self, lane: str, seconds: float, end: Callable[[Operation], None] | None, *, urgent: bool) -> None:
        super().__init__(lane, -1, end)
        self.left_s = seconds
        self.urgent = urgent


class Lanes(Clock):
    """The lanes of a machine, and a clock.

    Attributes:
        now_s: time since the start.
        waited_s: waits of the compute thread, by cause.
        busy_s: time in which each part was busy.
        cost: of an operation, see `Clock.start`.

    Args:
        parts: the part of the machine for each lane.
    """

    cost: Callable[[str, int, Sequence[int]], Cost]

    def __init__(self, parts: Mapping[str, str], speeds: Speeds) -> None:
        super().__init__(Random(0), Tempo())
        self.now_s = 0.0
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self.busy_s = dict.fromkeys(parts.values(), 0.0)
        self._parts = dict(parts)
        self._lanes: dict[str, list[Task]] = {name: [] for name in parts}  # the first task runs now
        self._speeds = cache(speeds)
        self._turns: deque[Callable[[], object]] = deque()  # pending turns of the worker
        self._cause = ""

    def put(
        self, lane: str, seconds: float, end: Callable[[Operation], None] | None = None, *, urgent: bool = False
    ) -> Task:
        """Queue a task behind the others of its lane. An `urgent` task goes before all others that are not."""
        task = Task(lane, seconds, end, urgent=urgent)
        if seconds <= 0.0:
            self._end(task)
        else:
            self._queue(task)
        return task

    def _queue(self, task: Task) -> None:
        queued = self._lanes[task.kind]
        before = sum(each.urgent for each in queued) if task.urgent else len(queued)
        queued.insert(before, task)

    def hurry(self, task: Operation) -> None:
        """Make the task urgent."""
        if isinstance(task, Task) and not task.urgent and not task.done:
            self._lanes[task.kind].remove(task)
            task.urgent = True
            self._queue(task)

    # The compute thread #

    def start(
        self, kind: str, unit: int, end: Callable[[Operation], None] | None = None, tiles: Sequence[int] = ()
    ) -> Operation:
        if kind in _OF_WORKER and end is not None:
            end = partial(self._defer, end)
        lane, seconds, urgent = self.cost(kind, unit, tiles)
        return self.put(lane, seconds, end, urgent=urgent)

    def _defer(self, end: Callable[[Operation], None], task: Operation) -> None:
        self._turns.append(partial(end, task))

    def tick(self) -> None:
        """Do nothing: an operation ends when its time has passed."""

    def wait(self, operation: Operation) -> None:
        if not operation.done:
            self.wait_until(lambda: operation.done, operation.kind)

    def wait_until(self, holds: Callable[[], bool], cause: str) -> None:
        """Wait until a condition holds, and count the wait under the name of its cause.

        Raises:
            RuntimeError: a deadlock: no lane is busy, and the condition does not hold.
        """
        outer, self._cause = self._cause, self._cause or cause
        if self._turns:
            self.wait_for_next()
        while not holds():
            self.wait_for_next()
        self._cause = outer

    def wait_for_next(self) -> None:
        if self._turns:
            self._turns.popleft()()
        else:
            self._advance()

    def _advance(self) -> None:
        """Advance to the end of the next task."""
        busy = [name for name, lane in self._lanes.items() if lane]
        if not busy:
            raise RuntimeError("deadlock: the compute thread waits, but no lane is busy")
        speeds = self._speeds(frozenset(busy))
        passed_s = min(self._lanes[name][0].left_s / speeds[name] for name in busy)
        self.now_s += passed_s
        self.waited_s[self._cause] += passed_s
        for part in {self._parts[name] for name in busy}:
            self.busy_s[part] += passed_s
        running = [self._lanes[name][0] for name in busy]
        for task in running:
            task.left_s -= passed_s * speeds[task.kind]
        for task in running:
            if task.left_s <= 1e-12:
                self._lanes[task.kind].remove(task)
                self._end(task)

    def _end(self, operation: Operation) -> None:
        operation.done = True
        if operation.end is not None:
            operation.end(operation)
        if operation.then is not None:
            self._turns.append(operation.then)
