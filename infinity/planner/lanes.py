"""Virtual time on a simulated machine: lanes that run one task after the other and slow each other down, and processes
that wait for them.

Between two events, every busy lane works at a speed that depends on which other lanes are busy. So an event costs a few
operations, however many bytes are moved in between.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field


@dataclass(eq=False)
class Task:
    """Work of one lane.

    Attributes:
        left_s: its remaining time if no other lane were busy.
        after: called when it is done.
    """

    left_s: float
    after: Callable[[], None] | None = None
    done: bool = False


@dataclass(frozen=True)
class Until:
    """A process waits until a condition holds.

    Attributes:
        cause: the name under which the wait is counted.
    """

    holds: Callable[[], bool]
    cause: str


Process = Generator[Until, None, None]
Speeds = Callable[[frozenset[str]], Mapping[str, float]]  # of the busy lanes, as shares of each one's speed alone


@dataclass
class _Lane:
    urgent: deque[Task] = field(default_factory=deque)
    others: deque[Task] = field(default_factory=deque)

    @property
    def next(self) -> deque[Task]:
        """The tasks that go first; the head runs now."""
        return self.urgent or self.others

    def __bool__(self) -> bool:
        return bool(self.urgent or self.others)


class Lanes:
    """The lanes of a machine, and a clock.

    Attributes:
        now_s: time since the start.
        waited_s: of the first process, by cause.
        busy_s: time in which each part was busy.

    Args:
        parts: the part of the machine for each lane.
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
        """Queue a task behind the others of its lane. An `urgent` task goes before all others that are not."""
        task = Task(seconds, after)
        if seconds <= 0.0:
            self._end(task)
        else:
            each = self._lanes[lane]
            (each.urgent if urgent else each.others).append(task)
        return task

    def hurry(self, lane: str, task: Task) -> None:
        each = self._lanes[lane]
        if task in each.others:
            each.others.remove(task)
            each.urgent.append(task)

    def run(self, first: Process, *others: Process) -> None:
        """Run until the first process has ended.

        Raises:
            RuntimeError: a deadlock: no lane is busy, and the first process still waits.
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
        """Advance to the end of the next task. Return the seconds until then."""
        busy = frozenset(name for name, lane in self._lanes.items() if lane)
        if not busy:
            raise RuntimeError("everybody waits, and nothing is under way")
        if busy not in self._known:
            self._known[busy] = self._speeds(busy)
        speeds = self._known[busy]
        passed_s = min(self._lanes[name].next[0].left_s / speeds[name] for name in busy)
        self.now_s += passed_s
        for part in {self._parts[name] for name in busy}:
            self.busy_s[part] += passed_s
        ended = []
        for name in busy:
            tasks = self._lanes[name].next
            tasks[0].left_s -= passed_s * speeds[name]
            if tasks[0].left_s <= 1e-12:
                ended.append(tasks.popleft())
        for task in ended:
            self._end(task)
        return passed_s

    @staticmethod
    def _end(task: Task) -> None:
        task.done = True
        if task.after is not None:
            task.after()
