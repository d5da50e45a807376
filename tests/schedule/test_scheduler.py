"""The scheduler in a world of numbers: whatever is used, it is in memory then, and the ledger holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import CapacityError
from infinity.memory import Budget
from infinity.schedule import Cycle
from infinity.schedule.actions import (
    AwaitAnyUpdate,
    AwaitFetch,
    AwaitNewest,
    Event,
    Evict,
    Fetch,
    MemoryFreed,
    OldParametersNeeded,
    ParametersNeeded,
    ParametersStale,
    PassBegins,
    PassEnds,
    RoomNeeded,
    Submit,
    UpdateDue,
    UseBegins,
)
from infinity.schedule.scheduler import Scheduler
from infinity.schedule.unit_state import UnitState
from infinity.tiers import Residency


class Unit(UnitState):
    """A row of its own."""

    residency = Residency.STORED
    update_is_due = False
    update_is_submitted = False
    is_reconstructable = False

    def __init__(self, index: int, nbytes: int) -> None:
        super().__init__(index, f"u{index}", nbytes, moves=True)
        self.pins = 0

    @property
    def is_pinned(self) -> bool:
        return self.pins > 0


@dataclass
class World:
    """Performs actions on numbers; a fetch ends when somebody waits for it, and so does an update."""

    sizes: list[int]
    capacity: int
    actions: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.units = [Unit(index, size) for index, size in enumerate(self.sizes)]
        self.budget = Budget("memory", self.capacity)
        cycle = Cycle(self.sizes, [True] * len(self.sizes), self.capacity)
        self.scheduler = Scheduler(self.units, cycle, self.budget, "tiering.host_memory")

    def on(self, event: Event) -> None:
        for action in self.scheduler.on(event):
            self.actions[type(action).__name__] += 1
            self.perform(action)

    def perform(self, action: object) -> None:
        match action:
            case Fetch(index, _):
                assert self.units[index].residency is Residency.STORED
                self.budget.take(self.sizes[index], f"u{index}")
                self.units[index].residency = Residency.FETCHING
            case AwaitFetch(index):
                self.units[index].residency = Residency.RESIDENT
            case Evict(index):
                unit = self.units[index]
                assert unit.residency is Residency.RESIDENT
                assert not unit.pins
                unit.residency = Residency.STORED
                self.budget.give(self.sizes[index])
            case Submit(index, _, _, waits):
                unit = self.units[index]
                assert unit.update_is_due
                assert unit.residency is not Residency.STORED
                if unit.update_is_submitted and not waits:
                    return
                self.finish(index)
                unit.update_is_due, unit.update_is_submitted = False, True
                unit.residency = Residency.RESIDENT
                unit.pins += 1
            case AwaitNewest(index):
                self.finish(index)
                self.units[index].residency = Residency.RESIDENT
            case AwaitAnyUpdate():
                self.finish(next(index for index, unit in enumerate(self.units) if unit.update_is_submitted))
            case _:
                raise AssertionError(action)

    def finish(self, index: int) -> None:
        unit = self.units[index]
        if unit.update_is_submitted:
            unit.update_is_submitted = False
            unit.pins -= 1

    def use(self, index: int, *, update: bool = False) -> None:
        unit = self.units[index]
        unit.pins += 1
        self.on(UseBegins(index))
        assert unit.residency is Residency.RESIDENT
        assert not unit.update_is_due
        if update:
            unit.update_is_due = True
            self.on(UpdateDue(index))
        unit.pins -= 1
        self.on(MemoryFreed())


def step(world: World, uses: list[int], *, learn: bool = True, updates: bool = True) -> None:
    world.on(PassBegins())
    for unit in uses:
        world.use(unit)
    for unit in reversed(uses):
        world.use(unit, update=updates and not world.units[unit].update_is_due)
    world.on(PassEnds(learn))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_used_is_in_memory_and_the_ledger_holds(data) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    world = World(sizes, max(sizes) + data.draw(st.integers(0, sum(sizes))))
    for _ in range(data.draw(st.integers(1, 4))):
        uses = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=12))
        for _ in range(data.draw(st.integers(1, 3))):
            step(world, uses, learn=data.draw(st.booleans()))
            looked = data.draw(st.integers(0, len(sizes) - 1))
            world.units[looked].pins += 1
            world.on(data.draw(st.sampled_from([ParametersNeeded(looked), OldParametersNeeded(looked)])))
            assert world.units[looked].residency is Residency.RESIDENT
            world.units[looked].pins -= 1
    held = sum(size for size, unit in zip(sizes, world.units, strict=True) if unit.residency is not Residency.STORED)
    assert held == world.budget.used_bytes <= world.capacity


def test_the_same_events_give_the_same_actions() -> None:
    counts = []
    for _ in range(2):
        world = World([3, 2, 4, 2], 8)
        for _ in range(4):
            step(world, [0, 1, 2, 3])
        counts.append(world.actions)
    assert counts[0] == counts[1]


def test_a_step_like_the_last_one_waits_for_no_fetch_that_could_come_ahead() -> None:
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
    world.on(PassBegins())
    world.units[0].pins += 1
    world.on(UseBegins(0))
    with pytest.raises(CapacityError, match=r"unit `u1` needs 4 bytes but u0 .* raise tiering.host_memory by 8 bytes"):
        world.on(UseBegins(1))


def test_nobody_waits_for_what_was_fetched_for_an_update_and_has_left() -> None:
    """An update waits for the values by itself, and the plan may have the unit leave before anybody uses it."""
    world = World([4, 4], 5)
    for action in world.scheduler._fetch(world.units[0], urgent=False):
        world.perform(action)
    world.units[0].residency = Residency.RESIDENT  # as an update has it
    world.on(ParametersStale(0))
    assert world.units[0].residency is Residency.STORED
    with pytest.raises(CapacityError):  # nothing can make room, as everything is away
        world.on(RoomNeeded(1))
