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

from infinity.config import NvmeConfig
from infinity.errors import StorageError
from infinity.io import IoFuture, IoOptions, Priority, Span
from infinity.kernels import Hyper
from infinity.memory import Arena
from infinity.optim.formats import SHARD_ALIGN, state_layout
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.ticket import Segment, UpdateTicket, WriteParams
from infinity.schedule.needs import Shards
from infinity.schedule.placement import resident_tiles
from infinity.telemetry import Counters, StallCause, Times
from infinity.tiers import Memory, Move, StateStore, SwapSpace, open_swap
from infinity.tiers.slots import Extent

UNITS = 5
NUMEL = 2 * SHARD_ALIGN  # two tiles a unit
UNIT_BYTES = 2 * state_layout("fp32").tile_bytes(SHARD_ALIGN)
EVERYTHING = 1 << 30

pytestmark = pytest.mark.timeout(60)


class Stage(NamedTuple):
    """A pipeline, its states, and the units of the tiles that it has updated, in order."""

    pipeline: UpdatePipeline
    states: StateStore
    swap: SwapSpace
    updated: list[int]

    def submit(self, unit: int, next_use: int, *ready: Move, write: WriteParams | None = None) -> UpdateTicket:
        segments = (Segment(0, NUMEL, Hyper(0.1, 0.9, 0.999, 1e-8, 0.0, 1, decoupled=True)),)
        ticket = UpdateTicket(
            unit, torch.ones(NUMEL), torch.ones(NUMEL), segments, ready, write or self._note(unit), next_use=next_use
        )
        self.pipeline.submit(ticket)
        return ticket

    def _note(self, unit: int) -> WriteParams:
        return lambda start, numel: self.updated.append(unit)


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


@contextmanager
def stage(path: Path, *, resident_bytes: int, slots: int = 3) -> Iterator[Stage]:
    """A pipeline over `UNITS` units whose states are zero."""
    layout = state_layout("fp32")
    arena = Arena(1 << 20)
    swap = open_swap([NvmeConfig(path)], IoOptions())
    shards = Shards([NUMEL] * UNITS, SHARD_ALIGN, layout.tile_bytes, torch.float32, ())
    stay = resident_tiles(shards, resident_bytes)
    states = StateStore(
        [NUMEL] * UNITS,
        SHARD_ALIGN,
        layout.tile_bytes,
        [Memory.HOST if stays else Memory.NVME for stays in stay],
        arena=arena,
        swap=swap,
        counters=Counters(),
    )
    swap.create()
    ring = [arena.lease(layout.tile_bytes(SHARD_ALIGN)) for _ in range(slots)]
    pipeline = UpdatePipeline(layout, states, ring, Counters())
    for unit in range(UNITS):
        for _, fields in pipeline.tiles(unit, writable=True, fresh=True):
            for values in fields.values():
                values.zero_()
    try:
        yield Stage(pipeline, states, swap, [])
    finally:
        pipeline.close()
        swap.close()
        arena.close()


# With one slot a tile cannot overtake another that is still being read.
@pytest.mark.parametrize(("resident_bytes", "slots"), [(0, 1), (EVERYTHING, 0)])
def test_what_is_needed_first_is_updated_first(tmp_path: Path, resident_bytes: int, slots: int) -> None:
    with stage(tmp_path, resident_bytes=resident_bytes, slots=slots) as on:
        gate = _Gate()
        tickets = [on.submit(0, 9, Move(gate, StallCause.DISK_READ))]
        gate.reached.wait()
        next_uses = {1: 3, 2: 1, 3: 2, 4: 1}
        tickets += [on.submit(unit, when) for unit, when in next_uses.items()]
        gate.open()
        tickets[0].computed.result()
        for ticket in tickets:
            ticket.result()
    assert on.updated == [0, 0, 2, 2, 4, 4, 3, 3, 1, 1]  # of equals, the one that came first


@pytest.mark.parametrize(
    ("resident_bytes", "begun_first", "awaited", "order"),
    [
        (EVERYTHING, True, False, [1, 1, 0, 0]),
        (EVERYTHING, False, False, [1, 0, 0, 1]),
        (EVERYTHING, True, True, [1, 0, 0, 1]),
        (UNIT_BYTES, True, True, [1, 0, 0, 1]),
    ],
)
def test_what_is_begun_is_finished_unless_all_gradients_are_there_or_somebody_waits_for_another(
    tmp_path: Path, resident_bytes: int, begun_first: bool, awaited: bool, order: list[int]
) -> None:
    with stage(tmp_path, resident_bytes=resident_bytes) as on:
        begun, go_on = threading.Event(), threading.Event()

        def written(start: int, numel: int) -> None:
            on.updated.append(1)
            begun.set()
            go_on.wait()

        first = on.submit(1, 1, write=written)
        begun.wait()
        second = on.submit(0, 0)
        on.pipeline.prefer(begun=begun_first)
        waiter = threading.Thread(target=on.pipeline.wait_computed, args=[second])
        if awaited:
            waiter.start()
            while not second.awaited:
                time.sleep(0.001)
        go_on.set()
        first.result()
        second.result()
        if awaited:
            waiter.join()
    assert on.updated == order


@pytest.mark.parametrize("at_once", [True, False])
def test_a_tile_that_cannot_be_read_fails_its_unit_alone_and_gives_its_slot_back(
    tmp_path: Path, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stage(tmp_path, resident_bytes=0, slots=1) as on:
        read = on.swap.read

        def failing(extent: Extent, span: Span, *, priority: Priority) -> IoFuture:
            if extent is not on.states.units[1].tiles[1].extent:
                return read(extent, span, priority=priority)
            if at_once:
                raise StorageError(errno.EIO, "the drive is gone", "swap", 0)
            return _Failed()

        monkeypatch.setattr(on.swap, "read", failing)
        on.pipeline.expect(range(UNITS))  # what is read ahead has nobody yet to tell about an error
        tickets = [on.submit(unit, unit) for unit in range(UNITS)]
        for unit, ticket in enumerate(tickets):
            if unit == 1:
                with pytest.raises(StorageError, match="the drive is gone"):
                    ticket.result()
            else:
                ticket.result()
        monkeypatch.undo()
        assert sorted(on.updated) == [0, 0, 1, 2, 2, 3, 3, 4, 4]
        for unit in range(UNITS):
            steps = [bool(fields["exp_avg"].any()) for _, fields in on.pipeline.tiles(unit, writable=False)]
            assert steps == [True, unit != 1]


def test_states_can_be_visited_as_soon_as_their_update_is_waited_for(tmp_path: Path) -> None:
    """A worker that is held up between an update's end and the next thing that it does."""
    ended = threading.Event()

    def hold_up(_: object) -> None:
        ended.set()
        time.sleep(0.2)

    with stage(tmp_path, resident_bytes=EVERYTHING, slots=0) as on:
        gate = _Gate()
        ticket = on.submit(0, 0, Move(gate, StallCause.DISK_READ))
        ticket.computed.add_done_callback(hold_up)
        gate.open()
        ended.wait()
        ticket.result()
        assert len(list(on.pipeline.tiles(0, writable=False))) == len(on.states.units[0].tiles)


def test_an_update_that_a_traceback_shows_does_not_look_into_its_memory(tmp_path: Path) -> None:
    """Which an engine that is closed has given back: looking there ends the process."""
    with stage(tmp_path, resident_bytes=EVERYTHING, slots=0) as on:
        ticket = on.submit(0, 0)
        assert "tensor(" not in repr(ticket)
        assert "unit=0" in repr(ticket)
