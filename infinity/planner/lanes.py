"""Time on a machine that is only thought of: lanes that do one thing after the other and slow one another down, and
processes that wait for them.

Between two events every lane that has work does it at a speed that depends on which others have work, too; so an event
costs a handful of operations, however much was moved in between.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field


@dataclass(eq=False)
class Task:
    """Work of one lane.

    Attributes:
        left_s: what it would take alone.
        after: called when it is done.
    """

    left_s: float
    after: Callable[[], None] | None = None
    done: bool = False


@dataclass(frozen=True)
class Until:
    """A process waits until something is so.

    Attributes:
        cause: what the wait is booked under.
    """

    holds: Callable[[], bool]
    cause: str


Process = Generator[Until, None, None]
Speeds = Callable[
    [frozenset[str]], Mapping[str, float]
]  # of the lanes that have work, as shares of what each has alone


@dataclass
class _Lane:
    """Tasks in the order in which they are done."""

    urgent: deque[Task] = field(default_factory=deque)
    others: deque[Task] = field(default_factory=deque)

    def head(self) -> Task:
        return (self.urgent or self.others)[0]

    def pop(self) -> Task:
        return (self.urgent or self.others).popleft()

    def __bool__(self) -> bool:
        return bool(self.urgent or self.others)


class Machine:
    """Lanes, each of a part of the machine, and a clock.

    Attributes:
        now_s: since the beginning.
        waited_s: of the first process, by cause.
        busy_s: how long each part has had work.

    Args:
        parts: of the machine, by lane.
    """

    def __init__(self, parts: Mapping[str, str], speeds: Speeds) -> None:
        self.now_s = 0.0
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self.busy_s = dict.fromkeys(parts.values(), 0.0)
        self._parts = dict(parts)
        self._lanes = {name: _Lane() for name in parts}
        self._speeds = speeds
        self._known: dict[frozenset[str], Mapping[str, float]] = {}

    def put(self, lane: str, seconds: float, after: Callable[[], None] | None = None, *, urgent: bool = False) -> Task:
        """Have a lane do so much, behind what it has to do already; what is `urgent` goes first."""
        task = Task(seconds, after)
        if seconds <= 0.0:
            self._end(task)
        else:
            each = self._lanes[lane]
            (each.urgent if urgent else each.others).append(task)
        return task

    def hurry(self, lane: str, task: Task) -> None:
        """Somebody waits for the task now."""
        each = self._lanes[lane]
        if task in each.others:
            each.others.remove(task)
            each.urgent.append(task)

    def run(self, first: Process, *others: Process) -> None:
        """Until the first process is over.

        Raises:
            RuntimeError: nobody has anything to do, and the first process still waits.
        """
        waiting = {process: next(process, None) for process in (first, *others)}
        while True:
            moved = True
            while moved:
                moved = False
                for process, until in waiting.items():
                    if until is not None and until.holds():
                        waiting[process] = next(process, None)
                        moved = True
            until = waiting[first]
            if until is None:
                return
            self.waited_s[until.cause] += self._advance()

    def _advance(self) -> float:
        """Go on to the end of the next task; returns the seconds until then."""
        busy = frozenset(name for name, lane in self._lanes.items() if lane)
        if not busy:
            raise RuntimeError("everybody waits, and nothing is under way")
        if busy not in self._known:
            self._known[busy] = self._speeds(busy)
        speeds = self._known[busy]
        passed_s = min(self._lanes[name].head().left_s / speeds[name] for name in busy)
        self.now_s += passed_s
        for part in {self._parts[name] for name in busy}:
            self.busy_s[part] += passed_s
        ended = []
        for name in busy:
            lane = self._lanes[name]
            head = lane.head()
            head.left_s -= passed_s * speeds[name]
            if head.left_s <= 1e-12:
                ended.append(lane.pop())
        for task in ended:
            self._end(task)
        return passed_s

    @staticmethod
    def _end(task: Task) -> None:
        task.done = True
        if task.after is not None:
            task.after()
