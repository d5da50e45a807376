"""Planted faults: each breaks a promise, and the simulation has to find it.

A mutant takes `patch(owner, name, value)`, which sets an attribute or an entry until the context of `planted` ends. It
changes one decision of the scheduler, one of the queue, or what a performer does with an action.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from infinity.errors import CapacityError
from infinity.memory import Budget
from infinity.schedule import scheduler as scheduler_module
from infinity.schedule.actions import (
    AwaitAnyUpdate,
    AwaitFetch,
    AwaitNewest,
    AwaitSpill,
    AwaitUpdate,
    Evict,
    Fetch,
    Spill,
    Submit,
    UseBegins,
)
from infinity.schedule.cycle import Cycle
from infinity.schedule.scheduler import Scheduler
from infinity.schedule.update_queue import UpdateQueue
from infinity.simulation import performer as performer_module
from infinity.simulation import rank as rank_module
from infinity.simulation.clock import Tempo
from infinity.simulation.gradients import GradMemory
from infinity.simulation.model import Config, Fault, Look, Pass, RankSpec, Scenario, Step, UnitSpec
from infinity.simulation.performer import Performer
from infinity.simulation.rank import Rank
from infinity.simulation.rows import Due, Row
from infinity.simulation.run import simulate
from infinity.simulation.worker import Worker
from infinity.tiers import Residency
from infinity.tiers.copies import State
from infinity.zero.gathering import Gathering
from tests.simulation.drawn import draw

Patch = Callable[[Any, Any, Any], None]
Plant = Callable[[Patch], None]
_STORED, _RESIDENT = Residency.STORED, Residency.RESIDENT
_HANDLERS, _PERFORMERS = scheduler_module._HANDLERS, performer_module._PERFORMERS


@dataclass(frozen=True)
class Mutant:
    """A planted fault.

    Attributes:
        why: what it does wrong, in a line.
    """

    plant: Plant
    why: str


@dataclass(frozen=True)
class Found:
    """How a mutant was found: by which promise, with which seed."""

    promise: str
    seed: int
    seconds: float


MUTANTS: dict[str, Mutant] = {}
# Seeds of mutants that those from 0 on take longer to find; `python -m tests.simulation --mutants` shows them.
SEEDS = {
    "blocked_while_stored": 29,
    "clipped_stands": 36,
    "error_swallowed": 48,
    "fetch_forgotten": 39,
    "made_forgotten": 33,
    "pins_stay": 18,
    "plan_evicts_arriving": 35,
    "prefetch_past_budget": 20,
    "streams_into_used": 35,
    "undone_keeps_gradients": 48,
    "upcoming_by_memory": 19,
    "withdrawn_while_run": 321,
    "zero_grad_leaves_ahead": 13,
}

_BLOCK, _STAYS = UnitSpec(1), UnitSpec(1, moves=False, old_params="images")
_KEPT, _THREE = UnitSpec(1, tiles=3, has_slots=True), Pass(((0,), (1,), (2,)))
_LATE = RankSpec(0, Tempo(0.3, 20))
# Scenarios for those that seeds seldom find: shrunk from violations.
SCENARIOS = {
    "ahead_keeps_room": Scenario(
        Config((_BLOCK, _BLOCK, UnitSpec(5), _BLOCK), (RankSpec(7), RankSpec(7)), ahead_bytes=7),
        (Pass(((0,), (1,), (2, 3))), Pass(((0,), (1,))), Pass(((0,), (1,), (2, 3)))),
    ),
    "failed_counts_as_computed": Scenario(
        Config((_KEPT,) * 3, (RankSpec(3, Tempo(0.3, 20)),), keeps=True),
        (_THREE, Step(), Look((0,)), Look((1,)), Look((0,)), Fault(0, "update"), _THREE),
        seed=1,
    ),
    "gathered_where_ahead": Scenario(
        Config((replace(_STAYS, tiles=2, ahead=2), _STAYS), (_LATE, _LATE), "speculative", images=2),
        (Pass(((0,),)), Step(), Pass(((1, 0),)), Step("overflow"), Pass(((1, 0),))),
    ),
    "prefetches_keep_staging": Scenario(
        Config((_BLOCK,) * 8, (RankSpec(4, Tempo(0.0, 20)),), "backward", staging_bytes=3),
        (Pass(tuple((unit,) for unit in range(8))), Step()) * 6,
    ),
}


def _mutant(why: str) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        MUTANTS[plant.__name__.strip("_")] = Mutant(plant, why)
        return plant

    return add


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The fault is there as long as the context lasts."""
    undo: list[Callable[[], None]] = []

    def patch(owner: Any, what: Any, value: Any) -> None:
        if isinstance(owner, dict):
            before = owner[what]
            owner[what] = value
            undo.append(lambda: owner.__setitem__(what, before))
        else:
            before = vars(owner)[what]
            setattr(owner, what, value)
            undo.append(lambda: setattr(owner, what, before))

    MUTANTS[name].plant(patch)
    try:
        yield
    finally:
        for each in reversed(undo):
            each()


def find(name: str, most_s: float) -> Found | None:
    """Look for a planted fault, first with its seed; None if so many seconds do not find it."""
    begun_s = time.process_time()
    scenario, following = SCENARIOS.get(name, draw(SEEDS.get(name, 0))), 0
    with planted(name):
        while True:
            violation = simulate(scenario).violation
            seconds = time.process_time() - begun_s
            if violation is not None:
                return Found(violation.promise, scenario.seed, seconds)
            if seconds > most_s:
                return None
            scenario, following = draw(following), following + 1


def _without(method: str, *kinds: type[object]) -> Plant:
    """A generator of the scheduler's that leaves out actions of these kinds."""
    original = getattr(Scheduler, method)

    def changed(self: Scheduler, *args: Any, **options: Any) -> Any:
        steps = original(self, *args, **options)
        while True:
            try:
                action = next(steps)
            except StopIteration as end:
                return end.value
            if not isinstance(action, kinds):
                yield action

    def plant(patch: Patch) -> None:
        patch(Scheduler, method, changed)
        for event, handler in list(_HANDLERS.items()):
            if handler is original:
                patch(_HANDLERS, event, changed)

    return plant


def _nothing(*_: object, **__: object) -> Iterator[Any]:
    yield from ()


# Parameters #


def _add(name: str, why: str, plant: Plant) -> None:
    MUTANTS[name] = Mutant(plant, why)


_add("unit_not_awaited", "a unit is used without waiting for it", _without("_bring", AwaitNewest))
_add("old_unit_not_awaited", "old parameters are taken before they are read", _without("_bring_old", AwaitFetch))
_add("fetch_left_out", "a unit that is needed now is not fetched", _without("_fetch_now", Fetch))
_add("stale_unit_stays", "what an undone update has left in memory is kept", _without("_drop_stale", Evict))
_add("room_without_waiting", "room is refused while updates hold some", _without("_make_room", AwaitAnyUpdate))


@_mutant("a unit is used before the update that is due")
def _update_left_out(patch: Patch) -> None:
    patch(Scheduler, "_update_now", _nothing)


@_mutant("the plan evicts a unit that is in use")
def _plan_evicts_pinned(patch: Patch) -> None:
    def follow(self: Scheduler) -> Any:
        while self.planned:
            action, unit = self.planned.popleft()
            row = self.rows[unit]
            if action == "evict" and row.residency is _RESIDENT:
                yield from self._evict(row)
            elif action == "prefetch" and row.residency is _STORED:
                yield from self._fetch(row, urgent=False)
                yield from self._try_update(row)

    patch(Scheduler, "_follow_plan", follow)


@_mutant("the plan evicts a unit that is on its way")
def _plan_evicts_arriving(patch: Patch) -> None:
    original = Scheduler._follow_plan

    def follow(self: Scheduler) -> Any:
        if self.planned and self.planned[0][0] == "evict":
            row = self.rows[self.planned[0][1]]
            if row.residency is Residency.FETCHING:
                yield from self._evict(row)
        yield from original(self)

    patch(Scheduler, "_follow_plan", follow)


@_mutant("the least recently used unit makes room, in use or not")
def _room_by_pinned(patch: Patch) -> None:
    original = Scheduler._make_room

    def make_room(self: Scheduler, row: Any) -> Any:
        for other in self.in_memory:
            if other.residency is _RESIDENT and other is not row:
                yield from self._evict(other)
                return
        yield from original(self, row)

    patch(Scheduler, "_make_room", make_room)


@_mutant("a prefetch takes memory that is not free")
def _prefetch_past_budget(patch: Patch) -> None:
    original = Scheduler._fetch

    def fetch(self: Scheduler, row: Any, *, urgent: bool) -> Any:
        if urgent:
            return (yield from original(self, row, urgent=urgent))
        yield Fetch(row.index, urgent)
        self._fetching[row] = None
        return True

    patch(Scheduler, "_fetch", fetch)


@_mutant("a stale plan is believed: what it has in memory is not fetched")
def _stale_plan(patch: Patch) -> None:
    original = Scheduler._fetch_now

    def fetch_now(self: Scheduler, row: Any) -> Any:
        if self.cycle.plan is None or row.index not in self.cycle.plan.resident:
            yield from original(self, row)

    patch(Scheduler, "_fetch_now", fetch_now)


@_mutant("a unit that was fetched is not known to be in memory, and never makes room")
def _arrival_forgotten(patch: Patch) -> None:
    patch(Scheduler, "_arrived", lambda self, row: None)


@_mutant("a fetch that is under way is forgotten, and its memory is never given back")
def _fetch_forgotten(patch: Patch) -> None:
    original = Scheduler._fetch

    def fetch(self: Scheduler, row: Any, *, urgent: bool) -> Any:
        done = yield from original(self, row, urgent=urgent)
        self._fetching.pop(row, None)
        return done

    patch(Scheduler, "_fetch", fetch)


@_mutant("a unit whose first values are made is not known to be in memory")
def _made_forgotten(patch: Patch) -> None:
    patch(Scheduler, "_made", _nothing)


# Updates #

_add("no_room_awaited", "an update that has no room is not helped", _without("_free_gradients", AwaitAnyUpdate))


@_mutant("an update is submitted twice")
def _submitted_twice(patch: Patch) -> None:
    original = Scheduler._try_update

    def try_update(self: Scheduler, row: Any) -> Any:
        for action in original(self, row):
            yield action
            if isinstance(action, Submit):
                yield action

    patch(Scheduler, "_try_update", try_update)


@_mutant("blocked updates are never tried again")
def _blocked_never_retried(patch: Patch) -> None:
    patch(Scheduler, "_retry_updates", _nothing)


@_mutant("a blocked update is forgotten")
def _blocked_forgotten(patch: Patch) -> None:
    original = Scheduler._try_update

    def try_update(self: Scheduler, row: Any) -> Any:
        yield from original(self, row)
        self.blocked.clear()

    patch(Scheduler, "_try_update", try_update)


@_mutant("a blocked update is submitted although its unit has left memory")
def _blocked_while_stored(patch: Patch) -> None:
    def retry(self: Scheduler) -> Any:
        for row in list(self.blocked):
            if row.update_is_due and row.gradients_have_room and not row.update_is_submitted:
                del self.blocked[row]
                yield Submit(row.index, True, 0)

    patch(Scheduler, "_retry_updates", retry)


@_mutant("an update is submitted although its gradients have no room")
def _submitted_without_room(patch: Patch) -> None:
    def try_update(self: Scheduler, row: Any) -> Any:
        if row.update_is_due and not row.is_updated_on_device:
            if row.update_is_submitted:
                yield AwaitUpdate(row.index)
            yield Submit(row.index, *self._urgency(row))

    patch(Scheduler, "_try_update", try_update)


@_mutant("somebody who needs an update tries once, and does not wait for room")
def _update_tried_once(patch: Patch) -> None:
    patch(Scheduler, "_update_now", lambda self, row: self._try_update(row))


@_mutant("the rest of an update is submitted beside the part that runs")
def _parts_together(patch: Patch) -> None:
    def try_update(self: Scheduler, row: Any) -> Any:
        if row.update_is_due and row.gradients_have_room and not row.is_updated_on_device:
            yield Submit(row.index, *self._urgency(row))

    patch(Scheduler, "_try_update", try_update)


@_mutant("steps that are to stay are not written")
def _kept_steps_not_written(patch: Patch) -> None:
    patch(Scheduler, "is_written", lambda self, row: False)
    patch(Cycle, "leaves_memory", lambda self, unit: False)


# Gradients #

_add("spill_not_awaited", "a slot is taken before its gradients are written", _without("_free_gradients", AwaitSpill))
_add("spill_left_out", "a slot is given back, and its gradients were not written", _without("_free_gradients", Spill))


@_mutant("gradients spill that an update uses")
def _used_gradients_spill(patch: Patch) -> None:
    def first(self: Scheduler, state: State) -> Any:
        return next((self.rows[unit] for unit in self._in_slots if self.rows[unit].gradients is state), None)

    patch(Scheduler, "_first_in_slot", first)


# The queue #


@_mutant("an update that somebody waits for is lost")
def _hurried_is_lost(patch: Patch) -> None:
    def hurry(self: Any, update: Any) -> None:
        if update in self.updates and not update.chosen and len(self.updates) > 1:
            self.updates.remove(update)

    patch(UpdateQueue, "hurry", hurry)


@_mutant("of two updates in the queue the second is lost")
def _queue_drops(patch: Patch) -> None:
    original = UpdateQueue.submit

    def submit(self: Any, update: Any) -> None:
        if len(self.updates) != 1:
            original(self, update)

    patch(UpdateQueue, "submit", submit)


@_mutant("another update than the finished one leaves the queue")
def _wrong_one_leaves(patch: Patch) -> None:
    def remove(self: Any, update: Any) -> None:
        if len(self.updates) > 1 and self.updates[0] is update:
            self.updates.pop()
        else:
            self.updates.remove(update)

    patch(UpdateQueue, "remove", remove)


@_mutant("the worker waits for the first update, and never looks again")
def _first_must_be_ready(patch: Patch) -> None:
    def following(self: Any, distance: Callable[[Any], int]) -> Any:
        return self.updates[0] if self.updates and distance(self.updates[0]) == 0 else None

    patch(UpdateQueue, "next", following)


@_mutant("an update that has begun is in the queue twice")
def _begun_stays(patch: Patch) -> None:
    def begin(self: Any, update: Any) -> None:
        update.begun = True
        self.updates.insert(0, update)

    patch(UpdateQueue, "begin", begin)


# Ranks #


@_mutant("a rank gathers ahead only what its memory has")
def _gathers_by_memory(patch: Patch) -> None:
    def look_ahead(self: Rank) -> None:
        while (unit := self._gathering.due(self.cycle.upcoming)) is not None:
            if self.rows[unit].residency is _STORED:
                return
            self._pin(unit)
            self._gathering.look_ahead(unit)

    patch(Rank, "_look_ahead", look_ahead)


@_mutant("what comes next is judged by what this rank's memory holds")
def _upcoming_by_memory(patch: Patch) -> None:
    original = Scheduler._use

    def use(self: Scheduler, event: Any) -> Any:
        yield from original(self, event)
        if self.planned:
            self.cycle._last.end()

    patch(Scheduler, "_use", use)
    patch(_HANDLERS, UseBegins, use)


@_mutant("units that were gathered ahead keep their room from those that are used")
def _ahead_keeps_room(patch: Patch) -> None:
    patch(Rank, "_make_way", lambda self, unit: None)


@_mutant("a unit is gathered anew only on ranks where its update has run ahead")
def _gathered_where_ahead(patch: Patch) -> None:
    original = Rank.run_ahead

    def run_ahead(self: Rank, unit: int, due: Due) -> bool:
        runs = original(self, unit, due)
        if runs:
            self._gathering.changed(unit)
        return runs

    patch(Rank, "_foresee", lambda self, row: None)
    patch(Performer, "run_ahead", run_ahead)


@_mutant("a unit that was updated is not gathered again")
def _gathered_once(patch: Patch) -> None:
    patch(Gathering, "changed", lambda self, unit: None)


# Performers #


@_mutant("the ledger forgets every ninth unit that leaves")
def _ledger_forgets(patch: Patch) -> None:
    counted = SimpleNamespace(times=0)
    original = Budget.give

    def give(self: Budget, nbytes: int) -> None:
        counted.times += 1
        if counted.times % 9:
            original(self, nbytes)

    patch(Budget, "give", give)


@_mutant("what is nowhere else is evicted without being written")
def _evicted_unwritten(patch: Patch) -> None:
    patch(Performer, "write_home", lambda self, row: None)


@_mutant("a fetch counts as over when it is asked for")
def _fetch_is_over(patch: Patch) -> None:
    def wait(self: Performer, action: Any) -> None:
        self.rows[action.unit].residency = _RESIDENT

    patch(_PERFORMERS, AwaitFetch, wait)
    patch(Performer, "await_fetch", wait)


@_mutant("an update is over before it is written")
def _writes_not_awaited(patch: Patch) -> None:
    def finish(self: Performer, ticket: Any) -> None:
        self.wait_computed(ticket)
        self._note(ticket)

    patch(Performer, "finish", finish)


@_mutant("the error of an update is not looked at")
def _error_swallowed(patch: Patch) -> None:
    original = Worker._finish

    def finish(self: Worker, ticket: Any, error: Any = None) -> None:
        original(self, ticket)

    patch(Worker, "_finish", finish)


@_mutant("prefetched units keep all memory on the way from an update")
def _prefetches_keep_staging(patch: Patch) -> None:
    def open_host(self: Performer, row: Row) -> None:
        while not self.staging.open(row):
            if not self.finish_one():
                raise CapacityError(row.name)

    patch(Performer, "_open_host", open_host)


@_mutant("gradients come from the device to those that an update still has")
def _streams_into_used(patch: Patch) -> None:
    def can_receive(row: Row) -> bool:
        return row.streams_in is not None or (row.gradients is State.ABSENT and row.grad_drive is None)

    patch(GradMemory, "_can_receive", staticmethod(can_receive))


@_mutant("gradients stay after their update")
def _gradients_stay(patch: Patch) -> None:
    def used(self: GradMemory, row: Row) -> None:
        row.grad_pins -= 1

    patch(GradMemory, "used", used)


@_mutant("a slot is given away twice")
def _slot_given_twice(patch: Patch) -> None:
    patch(GradMemory, "_has_free_slot", lambda self: len(self.leased) <= self.slots)


@_mutant("an update that the worker is at is withdrawn")
def _withdrawn_while_run(patch: Patch) -> None:
    original = Worker.withdraw

    def withdraw(self: Worker, ticket: Any) -> bool:
        ticket.chosen = False
        return original(self, ticket)

    def has_images(self: Performer, row: Row, needed: int) -> bool:
        for ahead in [each.ahead for each in self.aheads if each.ahead is not None]:
            if row.spec.ahead > self.images and ahead.ticket.images and not ahead.ticket.computed:
                withdraw(self.worker, ahead.ticket)
                self._decide(ahead.ticket.row)
                self._note(ahead.ticket)
        return row.spec.ahead <= self.images

    patch(Performer, "_has_images", has_images)


@_mutant("an update that is undone does not give its gradients back")
def _undone_keeps_gradients(patch: Patch) -> None:
    patch(Performer, "_recover_grads", lambda self, row, *, grads: None)


@_mutant("the rest of an update that ran ahead in part is forgotten")
def _rest_forgotten(patch: Patch) -> None:
    original = Performer.commit_ahead

    def commit(self: Performer, row: Row, due: Due) -> None:
        original(self, row, due)
        if row.begun is not None:
            row.due = row.begun = None

    patch(Performer, "commit_ahead", commit)


@_mutant("an update that ran ahead stands although the norm was clipped")
def _clipped_stands(patch: Patch) -> None:
    def update_all(self: Rank, *, clips: bool) -> None:
        for unit in list(self._added):
            row = self.rows[unit]
            (self._update if row.ahead is None else self._confirm)(row, clips=clips)

    patch(Rank, "_update_all", update_all)


@_mutant("the drive's protected slot is written over")
def _slot_unprotected(patch: Patch) -> None:
    original = Row.begin_write_home

    def begin(self: Row, tile: int) -> bool:
        protected, self.protected = self.protected, [-9] * self.spec.tiles
        try:
            return original(self, tile)
        finally:
            self.protected = protected

    patch(Row, "begin_write_home", begin)


@_mutant("a step is committed although an update of it has failed")
def _failed_counts_as_computed(patch: Patch) -> None:
    patch(rank_module, "_is_computed", lambda row: row.ticket is None or row.ticket.computed)


@_mutant("an exception in a pass leaves its units in use")
def _pins_stay(patch: Patch) -> None:
    original = Rank._end_cycle

    def end_cycle(self: Rank, *, learn: bool) -> None:
        pins = [row.pins for row in self.rows]
        original(self, learn=learn)
        if not learn:
            for row, before in zip(self.rows, pins, strict=True):
                row.pins = before

    patch(Rank, "_end_cycle", end_cycle)


@_mutant("zero_grad leaves updates that ran ahead")
def _zero_grad_leaves_ahead(patch: Patch) -> None:
    def drop(self: Rank) -> None:
        for unit in self._added:
            self.grads.drop(self.rows[unit])
        self._added = {}

    patch(Rank, "_drop", drop)
