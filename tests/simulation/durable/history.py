"""A run of a few durable operations, from empty drives on, and the points at which it can crash."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.errors import StorageError
from tests.simulation.durable.drive import ROOT, Cached, Disk, Event, Hear, Recorder, Tell
from tests.simulation.durable.turns import Numbers, in_turns
from tests.simulation.durable.world import BEFORE, Layout, Trainer, World

MEMORY = Path("/dev/shm")
OPERATIONS: dict[str, Callable[[Trainer, int], object]] = {
    "step": lambda trainer, label: trainer.step(label),
    "part": lambda trainer, label: trainer.step(label, range(1, 2)),
    "undo": lambda trainer, label: trainer.step(label, range(1, 2), undone=range(1)),
    "commit": lambda trainer, label: trainer.session.wait(),
    "save": lambda trainer, label: trainer.save("tag"),
    "keep": lambda trainer, label: trainer.save(None, keep_last=1),
    "begin": lambda trainer, label: trainer.save("tag", blocking=False),
    "restart": lambda trainer, label: trainer.resume(),
}
STEPS = ("step", "part", "undo")


class Violation(AssertionError):  # noqa: N818  (as in invariants.py)
    """A promise is broken; the message has the operations and what was lost."""


@contextmanager
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="durable-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Last:
    """The operation that was performed last.

    Attributes:
        before: the drives when it began, and what had been told by then.
        events: what it did.
        errors: by rank.
    """

    before: Cached
    told: frozenset[tuple[Any, ...]]
    events: list[Event]
    errors: list[Exception]


class History:
    """A run, from empty drives on.

    Attributes:
        shadow: digests of every step, by rank, by label.
        dead: labels that nobody may go on from once a later process has resumed an older step.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.shadow = {0: (BEFORE,) * layout.ranks}
        self.dead: dict[int, set[int]] = {}
        self.labels: dict[tuple[Any, ...], int] = {}
        self._numbers = Numbers()
        self._cached = Cached(Disk(directories={ROOT: {}}), [])
        self._told: frozenset[tuple[Any, ...]] = frozenset()
        self._held = ExitStack()
        self._label = 0

    def perform(self, operation: str, *, fails: int | None = None, until: int | None = None) -> Last:
        """One operation of all ranks.

        Args:
            fails: number of its flush that fails.
            until: the processes die after so many of its events.
        """
        with in_turns(self._numbers):
            if operation in ("open", "restart"):
                self._begin()
            recorder, world = self._recorder, self._world
            start = len(recorder.events)
            recorder.failing = None if fails is None else recorder.flushes + fails
            before, told = self._cached.copy(), self._told
            with recorder.attached():
                outcomes: list[Any] = world.open() if operation in ("open", "restart") else []
                if operation != "open" and not any(isinstance(each, Exception) for each in outcomes):
                    self._label += operation in STEPS
                    action, label = OPERATIONS[operation], self._label
                    outcomes = world.each(lambda trainer: action(trainer, label))
                    if operation in STEPS:
                        self.shadow[label] = tuple(trainer.digest for _, trainer in sorted(world.trainers.items()))
                world.note_saved()
            self.labels |= world.turns.labels
            if operation == "restart" and isinstance(outcomes[0], int | None):
                adopted = outcomes[0] or 0
                self.dead[adopted] = self.dead.get(adopted, set()) | {each for each in self.shadow if each > adopted}
        events = recorder.events[start:][:until]
        for _, event in events:
            if isinstance(event, Tell):
                self._told |= {event.key}
            elif not isinstance(event, Hear):
                self._cached.take(event)
        return Last(before, told, events, [each for each in outcomes if isinstance(each, Exception)])

    @property
    def survived(self) -> Disk:
        return self._cached.survived()

    def spoil(self) -> None:
        """Change each block of the newest step, and read: the checksums have to say so."""
        for trainer in self._world.trainers.values():
            for path, offset in trainer.places():
                outcomes = []
                for _ in ("changed", "changed back"):
                    content = bytearray(path.read_bytes())
                    content[offset] ^= 1
                    path.write_bytes(content)
                    outcomes += self._world.each(Trainer.read)
                if not isinstance(outcomes[0], StorageError) or outcomes[1] is not None:
                    raise Violation(f"byte {offset} of {path.name} was changed, and changed back: {outcomes}")

    def _begin(self) -> None:
        """New processes on what the old ones have left."""
        self._held.close()
        root, disk = self._held.enter_context(directory()), self._cached.survived()
        disk.build(root)
        self._recorder = Recorder(root, disk)
        self._held.callback(self._recorder.close)
        self._world = self._held.enter_context(World(root, self.layout, self._recorder).dropped())

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exc: object) -> None:
        with in_turns(Numbers()):
            self._held.close()


def cuts(last: Last) -> Iterator[tuple[Cached, frozenset[tuple[Any, ...]]]]:
    """The drives and what has been told, at every point that threads and ranks can be at together."""
    lanes: dict[str, list[int]] = {}
    for index, (lane, _) in enumerate(last.events):
        lanes.setdefault(lane, []).append(index)
    names, seen = list(lanes), set()
    stack: list[tuple[tuple[int, ...], frozenset[tuple[Any, ...]]]] = [((0,) * len(names), last.told)]
    while stack:
        at, told = _silently(last, [lanes[name] for name in names], *stack.pop())
        if at in seen:
            continue
        seen.add(at)
        cached = last.before.copy()
        for index in sorted(i for name, stop in zip(names, at, strict=True) for i in lanes[name][:stop]):
            event = last.events[index][1]
            if not isinstance(event, Tell | Hear):
                cached.take(event)
        yield cached, told
        for i, (name, stop) in enumerate(zip(names, at, strict=True)):
            if stop < len(lanes[name]) and not isinstance(last.events[lanes[name][stop]][1], Tell | Hear):
                stack.append(((*at[:i], stop + 1, *at[i + 1 :]), told))


def _silently(
    last: Last, lanes: Sequence[Sequence[int]], at: tuple[int, ...], told: frozenset[tuple[Any, ...]]
) -> tuple[tuple[int, ...], frozenset[tuple[Any, ...]]]:
    """Go on as far as nothing happens on the drives."""
    stops, moved = list(at), True
    while moved:
        moved = False
        for i, lane in enumerate(lanes):
            while stops[i] < len(lane):
                event = last.events[lane[stops[i]]][1]
                if isinstance(event, Tell):
                    told |= {event.key}
                elif not isinstance(event, Hear) or not event.keys <= told:
                    break
                stops[i], moved = stops[i] + 1, True
    return tuple(stops), told
