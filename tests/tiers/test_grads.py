"""Gradients that come, rest, spill and are used, on a drive that moves a byte only when somebody makes it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import StorageError
from infinity.io import IoFuture, Span
from infinity.memory import Arena, Budget
from infinity.schedule import Cycle
from infinity.schedule.actions import (
    AwaitGradients,
    AwaitSpill,
    Event,
    GradientsNeedRoom,
    GradientsPause,
    Spill,
)
from infinity.schedule.scheduler import Scheduler
from infinity.schedule.unit_state import Residency, UnitState
from infinity.telemetry import Counters, Times
from infinity.tiers import (
    GradHomes,
    GradStore,
    HostMemory,
    Move,
    Norms,
    SameMemory,
    SwapSpace,
)
from infinity.tiers.copies import State
from infinity.tiers.slots import Extent
from infinity.tiers.striping import Piece

UNIT = 1024  # elements; a page of float32
UNITS = 5


class LateFuture(IoFuture):
    """The bytes move, or the request fails, when it is finished: by who waits for it, or by the test."""

    def __init__(self, act: Callable[[], None], fails: bool) -> None:
        self._act: Callable[[], None] | None = act
        self._fails = fails

    def finish(self) -> None:
        act, self._act = self._act, None
        if act is not None and not self._fails:
            act()

    def done(self) -> bool:
        return self._act is None

    def result(self, timeout: float | None = None) -> int:
        self.finish()
        if self._fails:
            raise StorageError(5, "the drive fails", "a file", 0)
        return 0

    def times(self) -> Times | None:
        return None


class LateSwap:
    def __init__(self) -> None:
        self.content: dict[Extent, bytes] = {}
        self.moving: list[LateFuture] = []
        self.reserved = 0
        self.fails = False

    def reserve(self, nbytes: int) -> Extent:
        self.reserved += 1
        return Extent((Piece(self.reserved, 0, nbytes),), nbytes)

    def write(self, extent: Extent, span: Span) -> LateFuture:
        def act() -> None:
            self.content[extent] = ctypes.string_at(span.address, span.nbytes)

        return self._start(act)

    def read(self, extent: Extent, span: Span, *, priority: object) -> LateFuture:
        def act() -> None:
            ctypes.memmove(span.address, self.content[extent], span.nbytes)

        return self._start(act)

    def _start(self, act: Callable[[], None]) -> LateFuture:
        self.moving.append(LateFuture(act, self.fails))
        return self.moving[-1]


class Row(UnitState):
    """Of a unit whose parameters stay, and that is not updated."""

    residency = Residency.RESIDENT
    is_pinned = is_updated_on_device = False

    def __init__(self, store: GradStore, index: int) -> None:
        self._grads = store.units[index]
        super().__init__(index, f"u{index}", 0, offloaded=False, spills=self._grads.spills)
        self._store = store

    @property
    def gradients(self) -> State:
        return self._grads.host.state

    @property
    def gradients_are_used(self) -> bool:
        return self._grads.host.pins > 0

    @property
    def gradients_have_room(self) -> bool:
        return self._store.can_submit(self._grads)


def decide(store: GradStore, event: Event) -> bool:
    """Perform what the scheduler asks for; False if that is nothing."""
    rows = [Row(store, unit) for unit in range(UNITS)]
    cycle = Cycle([0] * UNITS, 0)
    scheduler = Scheduler(rows, cycle, Budget("memory", 0), str, len(store.slots), store.leased)
    action = None
    for action in scheduler.on(event):
        match action:
            case AwaitGradients(unit):
                store.finish_moves(store.units[unit.index])
            case Spill(unit):
                store.spill(store.units[unit.index])
            case AwaitSpill(unit):
                store.await_spill(store.units[unit.index])
            case _:
                raise AssertionError(action)
    return action is not None


def rest(store: GradStore, unit: int) -> None:
    store.pause(store.units[unit])
    decide(store, GradientsPause())


def spilling(swap: LateSwap, slots: int) -> GradStore:
    """Units of 1 to 5 pages; the first of them stays."""
    numels = [UNIT * (1 + unit) for unit in range(UNITS)]
    capacity = 4 * (numels[0] + slots * numels[-1])
    homes = GradHomes((0,), tuple(range(1, UNITS)), slots)
    return GradStore(
        numels,
        numels,
        torch.float32,
        Arena(capacity),
        capacity,
        homes,
        Counters(),
        cast(Any, swap),
        Norms(0, HostMemory()),
    )


def add(store: GradStore, unit: int, value: float) -> None:
    fresh = not store.holds(store.units[unit])
    while (buffer := store.open(store.units[unit])) is None:
        assert decide(store, GradientsNeedRoom(Row(store, unit)))
    if fresh:
        buffer.zero_()
    buffer += value


@given(data=st.data(), slots=st.integers(1, 3))
def test_any_order_of_adding_resting_spilling_and_using_keeps_every_sum(data: st.DataObject, slots: int) -> None:
    swap = LateSwap()
    store = spilling(swap, slots)
    sums: dict[int, float] = {}
    lent: dict[int, tuple[tuple[torch.Tensor, tuple[Move, ...]], float]] = {}
    for step in range(data.draw(st.integers(1, 40))):
        unit = data.draw(st.integers(0, UNITS - 1))
        action = data.draw(st.sampled_from(["add", "rest", "hand over", "use", "drop", "finish", "room"]))
        if action == "add" and unit not in lent and len(lent) < slots:  # else an update is waited for first
            add(store, unit, step + 1)
            sums[unit] = sums.get(unit, 0) + step + 1
        elif action == "rest" and unit in sums:
            rest(store, unit)
        elif action == "room":
            decide(store, GradientsNeedRoom(Row(store, unit)))
        elif action == "hand over" and unit in sums and store.can_submit(store.units[unit]):
            lent[unit] = store.take_for_update(store.units[unit]), sums.pop(unit)
            assert store.open(store.units[unit]) is None
        elif action == "use" and unit in lent:
            (tensor, moves), value = lent.pop(unit)
            for move in moves:
                move.transfer.result()
            assert torch.all(tensor == value)
            store.drop_after_update(store.units[unit])
        elif action == "drop" and unit in sums:
            store.drop(store.units[unit])
            del sums[unit]
        elif action == "finish" and swap.moving:
            swap.moving.pop(data.draw(st.integers(0, len(swap.moving) - 1))).finish()
        assert {unit for unit in range(UNITS) if store.holds(store.units[unit])} == set(sums)
    for unit in lent:
        store.drop_after_update(store.units[unit])
    for unit, value in sums.items():
        add(store, unit, 1)
        tensor = store.open(store.units[unit])
        assert tensor is not None
        assert torch.all(tensor == value + 1)


def test_a_write_that_fails_is_told_and_what_is_dropped_does_not_care() -> None:
    swap = LateSwap()
    store = spilling(swap, 1)
    add(store, 1, 1.0)
    swap.fails = True
    rest(store, 1)  # the only slot is needed for others
    with pytest.raises(StorageError):
        add(store, 2, 1.0)
    store.drop(store.units[1])
    assert not store.holds(store.units[1])
    swap.fails = False
    add(store, 1, 2.0)
    tensor = store.open(store.units[1])
    assert tensor is not None
    assert torch.all(tensor == 2)


def test_a_read_that_fails_leaves_the_gradients_on_the_drive() -> None:
    swap = LateSwap()
    store = spilling(swap, 1)
    add(store, 1, 1.0)
    rest(store, 1)
    add(store, 2, 2.0)
    assert decide(store, GradientsNeedRoom(Row(store, 1)))
    swap.fails = True
    with pytest.raises(StorageError):
        store.open(store.units[1])
    swap.fails = False
    add(store, 1, 1.0)
    tensor = store.open(store.units[1])
    assert tensor is not None
    assert torch.all(tensor == 2)


def test_an_interrupt_where_a_transfer_begins_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes may come after the memory is somebody else's."""
    swap = LateSwap()
    store = spilling(swap, 1)
    add(store, 1, 1.0)

    def interrupted(*_: object) -> LateFuture:
        raise KeyboardInterrupt

    monkeypatch.setattr(swap, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rest(store, 1)
    assert store._critical.interrupted


def test_gradients_that_stream_wait_for_the_update_of_the_last_ones() -> None:
    """The last step's have come the same way, and nobody has taken note that their update is over."""
    link = SameMemory()
    homes = GradHomes((0,))
    store = GradStore(
        [UNIT],
        [UNIT],
        torch.float32,
        Arena(4 * UNIT),
        4 * UNIT,
        homes,
        Counters(),
        SwapSpace((), ()),
        Norms(1, link),
    )
    assert store.receive(store.units[0], 0, torch.ones(UNIT), 0) is not None
    store.pause(store.units[0])
    store.take_for_update(store.units[0])
    assert store.can_receive(store.units[0])
    assert store.receive(store.units[0], 0, torch.full((UNIT,), 2.0), 0) is None
    store.drop_after_update(store.units[0])
    assert store.receive(store.units[0], 0, torch.full((UNIT,), 2.0), 0) is not None
    store.pause(store.units[0])
    tensor, moves = store.take_for_update(store.units[0])
    for move in moves:
        move.transfer.result()
    assert torch.all(tensor == 2)
    store.drop_after_update(store.units[0])
    store.close()
