"""The order in which the pipeline updates what is queued, and what is left when that fails."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from infinity.errors import StorageError
from infinity.io import IoFuture, IoOptions, Priority
from infinity.kernels import Hyper
from infinity.memory import Arena, Lease
from infinity.optim.formats import SHARD_ALIGN, state_layout
from infinity.optim.pipeline import Segment, UpdateJob, UpdatePipeline
from infinity.telemetry import Counters, StallCause, Times
from infinity.tiers import Arrival, StateStore, SwapPath, open_swap
from infinity.tiers.states import Tile

UNITS = 5
NUMEL = 2 * SHARD_ALIGN  # two tiles a unit
UNIT_BYTES = 2 * state_layout("fp32").tile_bytes(SHARD_ALIGN)
EVERYTHING = 1 << 30

pytestmark = pytest.mark.timeout(60)


class Stage(NamedTuple):
    """A pipeline, its states, and the units of the tiles that it has updated, in order."""

    pipeline: UpdatePipeline
    states: StateStore
    updated: list[int]


class _Gate(IoFuture):
    """Something that an update waits for until it is opened."""

    def __init__(self) -> None:
        self._opened: Future[None] = Future()
        self.reached = threading.Event()  # somebody waits

    def open(self) -> None:
        self._opened.set_result(None)

    def done(self) -> bool:
        return self._opened.done()

    def result(self, timeout: float | None = None) -> int:
        self.reached.set()
        self._opened.result(timeout)
        return 0

    def times(self) -> Times | None:
        return None


class _Failed(IoFuture):
    """A read that the drive has refused."""

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> int:
        raise StorageError(errno.EIO, "the drive is gone", "swap", 0)

    def times(self) -> Times | None:
        return None


def job(unit: int, needed: int, *ready: Arrival) -> UpdateJob:
    segments = (Segment(0, NUMEL, Hyper(0.1, 0.9, 0.999, 1e-8, 0.0, 1, decoupled=True)),)
    return UpdateJob(unit, torch.ones(NUMEL), torch.ones(NUMEL), segments, ready, write_back=True, needed=needed)


@contextmanager
def stage(path: Path, *, resident_bytes: int, slots: int = 3) -> Iterator[Stage]:
    """A pipeline over `UNITS` units whose states are zero."""
    layout = state_layout("fp32")
    arena = Arena(1 << 20)
    swap = open_swap([SwapPath(path)], IoOptions())
    states = StateStore(
        [NUMEL] * UNITS,
        SHARD_ALIGN,
        layout.tile_bytes,
        arena=arena,
        resident_bytes=resident_bytes,
        swap=swap,
        counters=Counters(),
    )
    swap.create()
    updated: list[int] = []
    ring = [arena.lease(layout.tile_bytes(SHARD_ALIGN)) for _ in range(slots)]
    pipeline = UpdatePipeline(layout, states, ring, lambda unit, *_: updated.append(unit), Counters())
    for unit in range(UNITS):
        for _, fields in pipeline.tiles(unit, writable=True, fresh=True):
            for values in fields.values():
                values.zero_()
    try:
        yield Stage(pipeline, states, updated)
    finally:
        pipeline.close()
        swap.close()
        arena.close()


# With one slot a tile cannot overtake another that is still being read.
@pytest.mark.parametrize(("resident_bytes", "slots"), [(0, 1), (EVERYTHING, 0)])
def test_what_is_needed_first_is_updated_first(tmp_path: Path, resident_bytes: int, slots: int) -> None:
    with stage(tmp_path, resident_bytes=resident_bytes, slots=slots) as (pipeline, _, updated):
        gate = _Gate()
        tickets = [pipeline.submit(job(0, 9, Arrival(gate, StallCause.DISK_READ)))]
        gate.reached.wait()
        needed = {1: 3, 2: 1, 3: 2, 4: 1}
        tickets += [pipeline.submit(job(unit, when)) for unit, when in needed.items()]
        gate.open()
        assert pipeline.first_computed(tickets[:1]) is tickets[0]
        for ticket in tickets:
            ticket.wait()
    assert updated == [0, 0, 2, 2, 4, 4, 3, 3, 1, 1]  # of equals, the one that came first


@pytest.mark.parametrize(
    ("resident_bytes", "awaited", "order"),
    [(EVERYTHING, False, [1, 1, 0, 0]), (EVERYTHING, True, [1, 0, 0, 1]), (UNIT_BYTES, True, [1, 0, 0, 1])],
)
def test_what_is_begun_is_finished_unless_somebody_waits_for_another(
    tmp_path: Path, resident_bytes: int, awaited: bool, order: list[int]
) -> None:
    with stage(tmp_path, resident_bytes=resident_bytes) as (pipeline, _, updated):
        begun, go_on = threading.Event(), threading.Event()

        def written(unit: int, *_: int) -> None:
            updated.append(unit)
            begun.set()
            go_on.wait()

        pipeline._write_params = written
        first = pipeline.submit(job(1, 1))
        begun.wait()
        second = pipeline.submit(job(0, 0))
        waiter = threading.Thread(target=pipeline.wait_computed, args=[second])
        if awaited:
            waiter.start()
            while not second.awaited:
                time.sleep(0.001)
        go_on.set()
        first.wait()
        second.wait()
        if awaited:
            waiter.join()
    assert updated == order


@pytest.mark.parametrize("at_once", [True, False])
def test_a_tile_that_cannot_be_read_fails_its_unit_alone_and_gives_its_slot_back(
    tmp_path: Path, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stage(tmp_path, resident_bytes=0, slots=1) as (pipeline, states, updated):
        read = states.read

        def failing(tile: Tile, slot: Lease, priority: Priority = Priority.PREFETCH) -> IoFuture:
            if (tile.unit, tile.index) != (1, 1):
                return read(tile, slot, priority)
            if at_once:
                raise StorageError(errno.EIO, "the drive is gone", "swap", 0)
            return _Failed()

        monkeypatch.setattr(states, "read", failing)
        pipeline.expect(range(UNITS))  # what is read ahead has nobody yet to tell about an error
        tickets = [pipeline.submit(job(unit, unit)) for unit in range(UNITS)]
        for unit, ticket in enumerate(tickets):
            if unit == 1:
                with pytest.raises(StorageError, match="the drive is gone"):
                    ticket.wait()
            else:
                ticket.wait()
        monkeypatch.undo()
        assert sorted(updated) == [0, 0, 1, 2, 2, 3, 3, 4, 4]
        for unit in range(UNITS):
            steps = [bool(fields["exp_avg"].any()) for _, fields in pipeline.tiles(unit, writable=False)]
            assert steps == [True, unit != 1]
