"""The order in which the pipeline updates what is queued."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from infinity.io import IoFuture, IoOptions
from infinity.kernels import Hyper
from infinity.memory import Arena
from infinity.optim.formats import SHARD_ALIGN, state_layout
from infinity.optim.pipeline import Segment, UpdateJob, UpdatePipeline
from infinity.telemetry import Counters, StallCause, Times
from infinity.tiers import Arrival, StateStore, SwapPath, open_swap

UNITS = 5
NUMEL = 2 * SHARD_ALIGN  # two tiles a unit


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


def job(unit: int, needed: int, *ready: Arrival) -> UpdateJob:
    segments = (Segment(0, NUMEL, Hyper(0.1, 0.9, 0.999, 1e-8, 0.0, 1, decoupled=True)),)
    return UpdateJob(unit, torch.ones(NUMEL), torch.ones(NUMEL), segments, ready, write_back=True, needed=needed)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("resident_bytes", [0, 1 << 30])
def test_what_is_needed_first_is_updated_first(tmp_path: Path, resident_bytes: int) -> None:
    layout = state_layout("fp32")
    arena = Arena(1 << 20)
    slots = [arena.lease(layout.tile_bytes(SHARD_ALIGN)) for _ in range(3)]
    swap = open_swap([SwapPath(tmp_path)], IoOptions())
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
    finished: list[int] = []
    pipeline = UpdatePipeline(layout, states, slots, lambda unit, *_: finished.append(unit), Counters())
    for unit in range(UNITS):
        for _, fields in pipeline.tiles(unit, writable=True, fresh=True):
            for values in fields.values():
                values.zero_()

    gate = _Gate()
    tickets = [pipeline.submit(job(0, 9, Arrival(gate, StallCause.DISK_READ)))]
    gate.reached.wait()
    needed = {1: 3, 2: 1, 3: 2, 4: 1}
    tickets += [pipeline.submit(job(unit, when)) for unit, when in needed.items()]
    gate.open()
    assert pipeline.first_computed(tickets[:1]) is tickets[0]
    for ticket in tickets:
        ticket.wait()
    pipeline.close()
    swap.close()
    assert list(dict.fromkeys(finished)) == [0, 2, 4, 3, 1]  # of equals, the one that came first
