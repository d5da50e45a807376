"""The scheduler in a world of numbers: whatever is used, it is in memory then, and the ledgers hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import CapacityError
from infinity.memory import Budget
from infinity.schedule import Cycle, raise_memory
from infinity.schedule.actions import (
    AwaitAnyUpdate,
    AwaitFetch,
    AwaitNewest,
    AwaitSpill,
    AwaitUpdate,
    CycleBegins,
    CycleEnds,
    Event,
    Evict,
    Fetch,
    GradientsNeedRoom,
    GradientsPause,
    MemoryFreed,
    OldParametersNeeded,
    ParametersNeeded,
    ParametersStale,
    RoomNeeded,
    Spill,
    Submit,
    UpdateDue,
    UseBegins,
)
from infinity.schedule.scheduler import Scheduler
from infinity.schedule.unit_state import Residency, UnitState
from infinity.tiers.copies import State


class Unit(UnitState):
    """A row of its own."""

    residency = Residency.STORED
    gradients = State.ABSENT
    is_updated_on_device = False

    def __init__(self, world: World, index: int, nbytes: int) -> None:
        super().__init__(index, f"u{index}", nbytes, offloaded=True, spills=world.slots > 0)
        self.pins = 0
        self._world = world

    @property
    def gradients_are_used(self) -> bool:
        return self.ticket is not None

    @property
    def gradients_have_room(self) -> bool:
        return self._world.has_slot(self.index)

    @property
    def is_pinned(self) -> bool:
        return self.pins > 0


@dataclass
class World:
    """Performs actions on numbers; a fetch ends when somebody waits for it, and so do an update and a spill.

    Attributes:
        slots: for units' gradients; 0 where all have memory.
        in_slots: who has one.
    """

    sizes: list[int]
    capacity: int
    slots: int = 0
    in_slots: dict[int, None] = field(default_factory=dict)
    actions: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.units = [Unit(self, index, size) for index, size in enumerate(self.sizes)]
        self.budget = Budget("memory", self.capacity)
        cycle = Cycle(self.sizes, self.capacity)
        advice = partial(raise_memory, "tiering.host_memory")
        self.scheduler = Scheduler(self.units, cycle, self.budget, advice, self.slots, self.in_slots)

    def on(self, event: Event) -> bool:
        action = None
        for action in self.scheduler.on(event):
            self.actions[type(action).__name__] += 1
            self.perform(action)
        return action is not None

    def has_slot(self, index: int) -> bool:
        return not self.slots or index in self.in_slots or len(self.in_slots) < self.slots

    def have_slot(self, index: int) -> None:
        assert self.has_slot(index)
        if self.slots:
            self.in_slots[index] = None
            self.units[index].gradients = State.WRITING

    def free_slot(self, index: int) -> None:
        self.in_slots.pop(index, None)
        self.units[index].gradients = State.ABSENT

    def perform(self, action: Any) -> None:
        match action:
            case Fetch(unit, _):
                assert unit.residency is Residency.STORED
                self.budget.take(unit.nbytes, unit.name)
                unit.residency = Residency.FETCHING
            case AwaitFetch(unit):
                unit.residency = Residency.RESIDENT
            case Evict(unit):
                assert unit.residency is Residency.RESIDENT
                assert not unit.pins
                unit.residency = Residency.STORED
                self.budget.give(unit.nbytes)
            case Submit(unit, _, _):
                assert unit.due
                assert not unit.ticket
                assert unit.residency is not Residency.STORED
                self.have_slot(unit.index)
                unit.due, unit.ticket = None, True
                unit.residency = Residency.RESIDENT
                unit.pins += 1
            case AwaitUpdate(unit):
                assert unit.ticket
                self.finish(unit.index)
            case Spill(unit):
                assert unit.gradients in (State.VALID, State.WRITING)
                unit.gradients = State.LEAVING
            case AwaitSpill(unit):
                assert unit.gradients is State.LEAVING
                self.free_slot(unit.index)
            case AwaitNewest(unit):
                self.finish(unit.index)
                unit.residency = Residency.RESIDENT
            case AwaitAnyUpdate():
                self.finish(next(index for index, unit in enumerate(self.units) if unit.ticket))
            case _:
                raise AssertionError(action)

    def finish(self, index: int) -> None:
        unit = self.units[index]
        if unit.ticket:
            unit.ticket = None
            unit.pins -= 1
            self.free_slot(index)

    def use(self, index: int, *, update: bool = False) -> None:
        unit = self.units[index]
        unit.pins += 1
        self.on(UseBegins(unit))
        assert unit.residency is Residency.RESIDENT
        assert not unit.due
        if update:
            while unit.ticket or not self.has_slot(index):
                assert self.on(GradientsNeedRoom(unit))
            self.have_slot(index)
            if self.slots:
                unit.gradients = State.VALID
                self.on(GradientsPause())
            unit.due = True
            self.on(UpdateDue(unit))
        unit.pins -= 1
        self.on(MemoryFreed())


def step(world: World, uses: list[int], *, learn: bool = True, updates: bool = True) -> None:
    world.on(CycleBegins())
    for unit in uses:
        world.use(unit)
    for unit in reversed(uses):
        world.use(unit, update=updates and not world.units[unit].due)
    world.on(CycleEnds(learn))


@settings(max_examples=150)
@given(st.data())
def test_what_is_used_is_in_memory_and_the_ledger_holds(data) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    world = World(sizes, max(sizes) + data.draw(st.integers(0, sum(sizes))), data.draw(st.integers(0, 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        uses = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=12))
        for _ in range(data.draw(st.integers(1, 3))):
            step(world, uses, learn=data.draw(st.booleans()))
            unit = world.units[data.draw(st.integers(0, len(sizes) - 1))]
            unit.pins += 1
            world.on(data.draw(st.sampled_from([ParametersNeeded(unit), OldParametersNeeded(unit)])))
            assert unit.residency is Residency.RESIDENT
            unit.pins -= 1
    held = sum(size for size, unit in zip(sizes, world.units, strict=True) if unit.residency is not Residency.STORED)
    assert held == world.budget.used_bytes <= world.capacity
    assert len(world.in_slots) <= world.slots


def test_the_same_events_give_the_same_actions() -> None:
    counts = []
    for _ in range(2):
        world = World([3, 2, 4, 2], 8)
        for _ in range(4):
            step(world, [0, 1, 2, 3])
        counts.append(world.actions)
    assert counts[0] == counts[1]


def test_a_step_like_the_last_one_waits_for_no_fetch_that_could_be_prefetched() -> None:
    world = World([1] * 6, 3)
    for _ in range(3):
        step(world, list(range(6)), updates=False)
    urgent = []
    perform = world.perform

    def noted(action: object) -> None:
        if isinstance(action, Fetch) and action.urgent:
            urgent.append(action.unit)
        perform(action)

    world.perform = noted  # type: ignore[method-assign]
    step(world, list(range(6)), updates=False)
    assert not urgent


def test_units_that_do_not_fit_together_are_refused_by_name() -> None:
    world = World([4, 4], 5)
    world.on(CycleBegins())
    world.units[0].pins += 1
    world.on(UseBegins(world.units[0]))
    with pytest.raises(CapacityError, match=r"unit `u1` needs 4 B but u0 .* raise tiering.host_memory by 8 bytes"):
        world.on(UseBegins(world.units[1]))


def test_nobody_waits_for_what_was_fetched_for_an_update_and_has_left() -> None:
    """An update waits for the values by itself, and the plan may have the unit leave before anybody uses it."""
    world = World([4, 4], 5)
    for action in world.scheduler._fetch(world.units[0], urgent=False):
        world.perform(action)
    world.units[0].residency = Residency.RESIDENT  # as an update has it
    world.on(ParametersStale(world.units[0]))
    assert world.units[0].residency is Residency.STORED
    with pytest.raises(CapacityError):  # nothing can make room, as everything is away
        world.on(RoomNeeded(world.units[1]))
