"""Planted faults: each breaks a promise, and the simulation has to find it.

A mutant changes one decision of the scheduler, one of the queue, or what a performer does with an action: something
else takes the place of an attribute, or of an entry, until the context of `planted` ends.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from infinity.errors import CapacityError
from infinity.memory import Budget
from infinity.optim.reading import Reading
from infinity.schedule import actions
from infinity.schedule import scheduler as scheduler_module
from infinity.schedule.cycle import Cycle
from infinity.schedule.scheduler import Scheduler
from infinity.schedule.unit_state import Residency
from infinity.schedule.update_queue import UpdateQueue
from infinity.simulation import performer as performer_module
from infinity.simulation import rank as rank_module
from infinity.simulation.clock import Tempo
from infinity.simulation.layer_major import LayerMajorPass
from infinity.simulation.model import (
    Config,
    Drain,
    Fault,
    Interrupt,
    Look,
    Pass,
    RankSpec,
    Scenario,
    Step,
    UnitSpec,
    ZeroGrad,
)
from infinity.simulation.performer import Performer
from infinity.simulation.rank import Rank
from infinity.simulation.rows import Due, Row
from infinity.simulation.run import simulate
from infinity.simulation.worker import Worker
from infinity.tiers import activations as activations_module
from infinity.tiers.activations import ActivationStore, _Entry
from infinity.tiers.copies import Memory, State
from infinity.tiers.grads import GradStore, UnitGrads
from infinity.tiers.ring import Ring
from infinity.tiers.slots import Slots
from infinity.tiers.states import StateStore
from infinity.zero.filling import Filling
from infinity.zero.gathering import Gathering
from infinity.zero.reduction_order import ReductionOrder
from infinity.zero.rounds import Rounds
from tests.simulation.drawn import draw

Change = tuple[Any, Any, Any]  # an owner, one of its attributes or entries, and what takes its place
_STORED, _RESIDENT = Residency.STORED, Residency.RESIDENT
_HANDLERS, _PERFORMERS = scheduler_module._HANDLERS, performer_module._PERFORMERS


@dataclass(frozen=True)
class Mutant:
    """A planted fault.

    Attributes:
        why: what it does wrong, in a line.
    """

    why: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Found:
    """How a mutant was found: by which promise, with which seed."""

    promise: str
    seed: int
    seconds: float


MUTANTS: dict[str, Mutant] = {}
# Seeds of mutants that those from 0 on take longer to find; `python -m tests.simulation --mutants` shows them.
SEEDS = {
    "again_lets_go": 28,
    "blocked_while_stored": 79,
    "clipped_stands": 48,
    "complete_after_last_use": 26,
    "complete_after_one": 12,
    "error_swallowed": 18,
    "fetch_forgotten": 84,
    "first_needed_leaves": 365,
    "gathered_where_ahead": 393,
    "made_forgotten": 33,
    "old_unit_not_awaited": 124,
    "pins_stay": 18,
    "plan_evicts_arriving": 84,
    "prefetch_past_budget": 20,
    "read_past_write": 174,
    "undone_keeps_gradients": 48,
    "upcoming_by_memory": 20,
    "uploads_unbounded": 19,
    "withdrawn_while_run": 321,
}

_BLOCK = UnitSpec(1)
_KEPT, _THREE = UnitSpec(1, tiles=3, is_double_buffered=True), Pass(((0,), (1,), (2,)))
_FOUR = Pass(((0,), (1,), (2,), (3,)))
_LONG = replace(_FOUR, elements=12)
# States come to the device, have an update there, and go back when a longer batch finds no memory.
_FILLED = Scenario(
    Config((UnitSpec(1, tiles=3, offloaded=False, comes=True),) * 4, (RankSpec(0),), device_bytes=420, ring=4),
    (_FOUR, Step(), _FOUR, Step(), _FOUR, _LONG, Step(), _LONG, Step()),
)
# Scenarios for those that seeds seldom find: shrunk from violations.
SCENARIOS = {
    "ahead_keeps_room": Scenario(
        Config((_BLOCK, _BLOCK, UnitSpec(5), _BLOCK), (RankSpec(7), RankSpec(7)), ahead_bytes=7),
        (Pass(((0,), (1,), (2, 3))), Pass(((0,), (1,))), Pass(((0,), (1,), (2, 3)))),
    ),
    "failed_counts_as_computed": Scenario(
        Config((_KEPT,) * 3, (RankSpec(3, Tempo(0.3, 20)),), keeps=True),
        (_THREE, Step(), Look((0,)), Look((1,)), Look((0,)), Fault(0, "update"), _THREE),
        seed=2,
    ),
    "none_goes_back": _FILLED,
    "pinned_by_drain": Scenario(
        Config((_BLOCK,) * 6, (RankSpec(3, Tempo(0.0, 20)),), ring=4),
        (*(Pass(tuple((unit,) for unit in range(6))), Step()) * 2, Interrupt(0, 1), Drain()),
    ),
    "prefetches_keep_staging": Scenario(
        Config((_BLOCK,) * 8, (RankSpec(4, Tempo(0.0, 20)),), "backward", staging_bytes=3),
        (Pass(tuple((unit,) for unit in range(8))), Step()) * 6,
    ),
    "updates_stay_there": _FILLED,
    "zero_grad_in_part": Scenario(
        Config((UnitSpec(1, streams=True),) * 2, (RankSpec(9, Tempo(0.3, 20)),), ring=6),
        (Pass(((0,), (1,))), Interrupt(0, 12), ZeroGrad(), Step()),
        seed=1291,
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The fault is there as long as the context lasts."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for owner, what, value in MUTANTS[name].changes:
            (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, what, value)
        yield


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


def _add(name: str, why: str, *changes: Change) -> None:
    handlers = [
        (_HANDLERS, event, value)
        for owner, what, value in changes
        for event, handler in _HANDLERS.items()
        if owner is Scheduler and handler is getattr(Scheduler, what)
    ]
    MUTANTS[name] = Mutant(why, (*changes, *handlers))


def _mutant(why: str, owner: Any, what: str) -> Callable[[Any], Any]:
    """A function takes the place of the owner's. One that has `original` as its first argument is given that."""

    def add(function: Any) -> Any:
        name, original = function.__name__.strip("_"), getattr(owner, what)

        def around(*args: Any, **options: Any) -> Any:
            return function(original, *args, **options)

        asks = next(iter(inspect.signature(function).parameters)) == "original"
        _add(name, why, (owner, what, around if asks else function))
        return function

    return add


def _without(method: str, *kinds: type[object]) -> Change:
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

    return Scheduler, method, changed


def _nothing(*_: object, **__: object) -> Iterator[Any]:
    yield from ()


def _none(*_: object, **__: object) -> None:
    pass


# Parameters #

_add("unit_not_awaited", "a unit is used without waiting for it", _without("_bring", actions.AwaitNewest))
_add("old_unit_not_awaited", "old parameters are not waited for", _without("_bring_old", actions.AwaitFetch))
_add("fetch_left_out", "a unit that is needed now is not fetched", _without("_fetch_now", actions.Fetch))
_add("stale_unit_stays", "what a rolled-back update has left in memory is kept", _without("_drop_stale", actions.Evict))
_add("room_without_waiting", "room is refused while updates hold some", _without("_make_room", actions.AwaitAnyUpdate))
_add("update_left_out", "a unit is used before the update that is due", (Scheduler, "_update_now", _nothing))
_add("arrival_forgotten", "a unit that was fetched never makes room", (Scheduler, "_arrived", _none))
_add("made_forgotten", "a unit whose first values are made is not known to be there", (Scheduler, "_made", _nothing))


@_mutant("the plan evicts a unit that is in use", Scheduler, "_follow_plan")
def _plan_evicts_pinned(self: Scheduler) -> Any:
    while self.planned:
        action, unit = self.planned.popleft()
        row = self.rows[unit]
        if action == "evict" and row.residency is _RESIDENT:
            yield from self._evict(row)
        elif action == "prefetch" and row.residency is _STORED:
            yield from self._fetch(row, urgent=False)
            yield from self._try_update(row)


@_mutant("the plan evicts a unit that is on its way", Scheduler, "_follow_plan")
def _plan_evicts_arriving(original: Any, self: Scheduler) -> Any:
    if self.planned and self.planned[0][0] == "evict":
        row = self.rows[self.planned[0][1]]
        if row.residency is Residency.FETCHING:
            yield from self._evict(row)
    yield from original(self)


@_mutant("the least recently used unit makes room, in use or not", Scheduler, "_make_room")
def _room_by_pinned(original: Any, self: Scheduler, row: Any) -> Any:
    for other in self.in_memory:
        if other.residency is _RESIDENT and other is not row:
            yield from self._evict(other)
            return
    yield from original(self, row)


@_mutant("a prefetch takes memory that is not free", Scheduler, "_fetch")
def _prefetch_past_budget(original: Any, self: Scheduler, row: Any, *, urgent: bool) -> Any:
    if urgent:
        return (yield from original(self, row, urgent=urgent))
    yield actions.Fetch(row, urgent)
    self._fetching[row] = None
    return True


@_mutant("a stale plan is believed: what it has in memory is not fetched", Scheduler, "_fetch_now")
def _stale_plan(original: Any, self: Scheduler, row: Any) -> Any:
    if self.cycle.plan is None or row.index not in self.cycle.plan.resident:
        yield from original(self, row)


@_mutant("a fetch that is under way is forgotten, and its memory is never given back", Scheduler, "_fetch")
def _fetch_forgotten(original: Any, self: Scheduler, row: Any, *, urgent: bool) -> Any:
    done = yield from original(self, row, urgent=urgent)
    self._fetching.pop(row, None)
    return done


# Updates #

_add("no_room_awaited", "an update that has no room is not helped", _without("_free_gradients", actions.AwaitAnyUpdate))
_add("blocked_never_retried", "blocked updates are never tried again", (Scheduler, "_retry_updates", _nothing))
_add(
    "kept_steps_not_written",
    "steps that are to stay are not written",
    (Scheduler, "writes_updates", lambda self, row: False),
    (Cycle, "may_be_evicted", lambda self, unit: False),
)
_add(
    "update_tried_once",
    "somebody who needs an update tries once, and does not wait for room",
    (Scheduler, "_update_now", lambda self, row: self._try_update(row)),
)


@_mutant("an update is submitted twice", Scheduler, "_try_update")
def _submitted_twice(original: Any, self: Scheduler, row: Any) -> Any:
    for action in original(self, row):
        yield action
        if isinstance(action, actions.Submit):
            yield action


@_mutant("a blocked update is forgotten", Scheduler, "_try_update")
def _blocked_forgotten(original: Any, self: Scheduler, row: Any) -> Any:
    yield from original(self, row)
    self.blocked.clear()


@_mutant("a blocked update is submitted although its unit has left memory", Scheduler, "_retry_updates")
def _blocked_while_stored(self: Scheduler) -> Any:
    for row in list(self.blocked):
        if row.due is not None and row.gradients_have_room and row.ticket is None:
            del self.blocked[row]
            yield actions.Submit(row, True, 0)


@_mutant("an update is submitted although its gradients have no room", Scheduler, "_try_update")
def _submitted_without_room(self: Scheduler, row: Any) -> Any:
    if row.due is not None and not row.is_updated_on_device:
        if row.ticket is not None:
            yield actions.AwaitUpdate(row)
        yield actions.Submit(row, *self._write_and_next_use(row))


@_mutant("the rest of an update is submitted beside the part that runs", Scheduler, "_try_update")
def _parts_together(self: Scheduler, row: Any) -> Any:
    if row.due is not None and row.gradients_have_room and not row.is_updated_on_device:
        yield actions.Submit(row, *self._write_and_next_use(row))


# Gradients #

_add("spill_not_awaited", "a slot is taken before it is written", _without("_free_gradients", actions.AwaitSpill))
_add("spill_left_out", "a slot is given back unwritten", _without("_free_gradients", actions.Spill))


@_mutant("gradients spill that an update uses", Scheduler, "_first_in_slot")
def _used_gradients_spill(self: Scheduler, state: State) -> Any:
    return next((self.rows[unit] for unit in self._in_slots if self.rows[unit].gradients is state), None)


# The queue #


@_mutant("an update that somebody waits for is lost", UpdateQueue, "hurry")
def _hurried_is_lost(self: Any, update: Any) -> None:
    if update in self.updates and not update.chosen and len(self.updates) > 1:
        self.updates.remove(update)


@_mutant("of two updates in the queue the second is lost", UpdateQueue, "submit")
def _queue_drops(original: Any, self: Any, update: Any) -> None:
    if len(self.updates) != 1:
        original(self, update)


@_mutant("another update than the finished one leaves the queue", UpdateQueue, "remove")
def _wrong_one_leaves(self: Any, update: Any) -> None:
    if len(self.updates) > 1 and self.updates[0] is update:
        self.updates.pop()
    else:
        self.updates.remove(update)


@_mutant("the worker waits for the first update, and never looks again", UpdateQueue, "next")
def _first_must_be_ready(self: Any, distance: Callable[[Any], int]) -> Any:
    return self.updates[0] if self.updates and distance(self.updates[0]) == 0 else None


@_mutant("an update that has begun is in the queue twice", UpdateQueue, "begin")
def _begun_stays(self: Any, update: Any) -> None:
    update.begun = True
    self.updates.insert(0, update)


# Optimizer states #

_add("read_past_write", "states are read while their last update is written", (Ring, "_wait_written", _none))
_add("epoch_goes_on", "states of the committed step are written over", (Slots, "next_epoch", _none))
_add("states_not_undone", "a rolled-back update leaves its states", (StateStore, "roll_back", _none))


@_mutant("a slot of the ring is free before its write has ended", Ring, "release")
def _ring_slot_freed_early(original: Any, self: Any, tile: Any) -> Any:
    slot, write = tile.lease, original(self, tile)
    if write is not None:
        self._free.append(slot)
    return write


@_mutant("a tile that was read ahead keeps its slot when its update is stopped", Ring, "give_up")
def _read_ahead_stays(self: Any, tile: Any) -> None:
    if tile in self._arriving:
        self._finish_read(tile)


@_mutant("more tiles are read ahead than the ring has slots", Reading, "read_ahead")
def _read_past_ring(original: Any, self: Any) -> None:
    self._ring._free.extend(() if self._ring._free else [SimpleNamespace(version=0)])
    original(self)


# Layer-major micro-batches #


@_mutant("a unit that is used twice is complete once micro-batches have left its last use", Rounds, "uses")
def _complete_after_last_use(self: Any, units: Any) -> None:
    self._first_use |= dict.fromkeys(units, self.running)


@_mutant("a unit is complete once the first micro-batch has left it", LayerMajorPass, "_backward")
def _complete_after_one(original: Any, self: Any, micro_batch: Any, round_index: int | None) -> None:
    original(self, micro_batch, round_index)
    if round_index is not None and any(at < round_index for at in micro_batch.entered):
        self._complete([unit for unit in self._call.uses[micro_batch.entered[round_index]] if unit in self._first_use])
        for unit in self._call.uses[micro_batch.entered[round_index]]:
            self._first_use.pop(unit, None)


# Interrupts #

_add("written_twice", "a write whose wait was interrupted is begun again", (Performer, "_await_write", _none))


@_mutant("a unit stays in use whose update was waited for when an interrupt came", Rank, "_submit_due")
def _pinned_by_drain(self: Rank) -> None:
    for row in [row for row in self._asked if row.due is not None]:
        self._pin(row)
        self.do(actions.ParametersNeeded(row))
        self._unpin(row)


@_mutant("what an interrupted zero_grad has left is taken for a step's gradients", Rank, "_zero_grad")
def _zero_grad_in_part(self: Rank) -> None:
    if not self._under_way:
        self._drop()
        self._pass_failed = False


@_mutant("an exception within a module leaves its step's gradients", Rank, "_abort")
def _abort_keeps_gradients(original: Any, self: Rank, *, backward: bool) -> None:
    inside = any(row.computing for row in self.rows)
    original(self, backward=backward and not inside)


# Saved activations #

_add("turns_not_taken", "the store is not told whose turn it is", (ActivationStore, "take_turn", _none))
_add("saved_freed_early", "a saved tensor is freed while it is copied", (_Entry, "has_left", lambda self: True))
_add("uploads_unbounded", "any number of tensors is uploaded ahead", (activations_module, "_AHEAD", 99))


@_mutant("the tensor that is needed first leaves memory", ActivationStore, "_free_one")
def _first_needed_leaves(original: Any, self: ActivationStore) -> bool:
    for entry in reversed(self._here):
        if entry.is_newest(Memory.HOST) and entry.is_newest(Memory.NVME) and not entry.moves():
            entry.drop(Memory.HOST)
            self._leave_arena(entry)
            return True
    return bool(original(self))


@_mutant("backward computes on a tensor before its upload is over", ActivationStore, "_take_ahead")
def _upload_not_awaited(self: ActivationStore, entry: Any) -> Any:
    if entry.ahead is None:
        return None
    (target, _), entry.ahead = entry.ahead, None
    self._ahead_bytes -= entry.nbytes
    return target


# States that come to the device #

_add("filled_uncounted", "states that come to the device are not counted", (Filling, "_count", _none))
_add("none_goes_back", "a device that was out of memory keeps its states", (Filling, "_give_half", _none))


@_mutant("states move to the device while updates of them are in the queue", Filling, "_fill")
def _filled_undrained(original: Any, self: Any, spare_bytes: int) -> None:
    self._runtime.executor.drain = _none
    original(self, spare_bytes)


@_mutant("states leave the device without the updates that they have had there", Ring, "move_back")
def _updates_stay_there(original: Any, self: Any, tile: Any) -> Any:
    if tile.own is None:
        return original(self, tile)
    tile.lease = tile.own
    tile.set_home(Memory.HOST)
    tile.roll_back(Memory.HOST)
    tile.own = None
    return None


# Ranks #

_add("absent_not_reduced", "what other ranks alone have used is not reduced", (ReductionOrder, "rest", _nothing))


@_mutant("each rank reduces gradients in the order in which its own backward leaves units", ReductionOrder, "leave")
def _reduced_as_left(self: ReductionOrder[int], unit: int) -> Any:
    self.left.append(unit)
    if unit in self.order:
        self.over.add(unit)
        yield unit


@_mutant("a forward that runs again within backward lets go of its unit at its end", Gathering, "leave")
def _again_lets_go(original: Any, self: Gathering, row: Any, expected: int | None) -> None:
    if row.shared is not None and row.shared.uses > 1:
        row.shared.uses = 0
        self.reshard(row)
        row.shared.uses = 1
    else:
        original(self, row, expected)


_add("ahead_keeps_room", "units that were gathered ahead keep their room", (Gathering, "drop_unexpected", _none))
_add("gathered_once", "a unit that was updated is not gathered again", (Gathering, "changed", _none))


@_mutant("a rank gathers ahead only what its memory has", Rank, "_gather_upcoming")
def _gathers_by_memory(self: Rank) -> None:
    while (row := self._gathering.next_to_gather([self.rows[unit] for unit in self.cycle.upcoming])) is not None:
        if row.residency is _STORED:
            return
        self._pin(row)
        self._gathering.gather_early(row)


@_mutant("what comes next is judged by what this rank's memory holds", Scheduler, "_use")
def _upcoming_by_memory(original: Any, self: Scheduler, event: Any) -> Any:
    yield from original(self, event)
    if self.planned:
        self.cycle._last.end()


def _gathers_if_ahead(self: Rank, row: Row, due: Due, original: Any = Rank.speculate) -> bool:
    runs = original(self, row, due)
    if runs:
        self._gathering.changed(row)
    return bool(runs)


_add(
    "gathered_where_ahead",
    "a unit is gathered anew only on ranks where its update is speculative",
    (Rank, "_foresee", _none),
    (Performer, "speculate", _gathers_if_ahead),
)


# Performers #

_add("evicted_unwritten", "what is nowhere else is evicted without being written", (Performer, "write_home", _none))
_add(
    "slot_given_twice",
    "a slot is given away twice",
    (GradStore, "_free_slot", lambda self: self.slots[0]),
)
_add("undone_keeps_gradients", "a rolled-back update keeps its gradients", (Performer, "_reconstruct_grads", _none))
_add(
    "failed_counts_as_computed",
    "a step is committed although an update of it has failed",
    (rank_module, "_is_computed", lambda row: row.ticket is None or row.ticket.computed),
)


@_mutant("the ledger forgets every ninth unit that leaves", Budget, "give")
def _ledger_forgets(original: Any, self: Any, nbytes: int) -> None:
    self.times = getattr(self, "times", 0) + 1
    if self.times % 9:
        original(self, nbytes)


def _fetch_is_over(_: Performer, row: Row, __: object = None) -> None:
    row.residency = _RESIDENT


_add(
    "fetch_is_over",
    "a fetch counts as over when it is asked for",
    (_PERFORMERS, actions.AwaitFetch, _fetch_is_over),
    (Performer, "await_fetch", _fetch_is_over),
)


@_mutant("an update is over before it is written", Performer, "finish")
def _writes_not_awaited(self: Performer, ticket: Any) -> None:
    self.wait_computed(ticket)
    self._note(ticket)


@_mutant("the error of an update is not looked at", Worker, "_finish")
def _error_swallowed(original: Any, self: Worker, ticket: Any, error: Any = None) -> None:
    original(self, ticket)


@_mutant("prefetched units keep all memory on the way from an update", Performer, "_open_host")
def _prefetches_keep_staging(self: Performer, row: Row) -> None:
    while not self.staging.open(row):
        if not self.finish_one():
            raise CapacityError(row.name)


@_mutant("gradients come from the device to those that an update still has", GradStore, "receive")
def _streams_into_used(original: Any, self: GradStore, each: UnitGrads, *gradients: Any) -> Any:
    pins, each.host.pins = each.host.pins, 0
    try:
        return original(self, each, *gradients)
    finally:
        each.host.pins += pins


@_mutant("gradients stay after their update", GradStore, "drop_after_update")
def _gradients_stay(self: GradStore, each: UnitGrads) -> None:
    each.host.unpin()


def _withdraw(self: Worker, ticket: Any) -> bool:
    ticket.chosen = False
    return Worker.withdraw(self, ticket)


@_mutant("an update that the worker is at is withdrawn", Performer, "_has_images")
def _withdrawn_while_run(self: Performer, row: Row, next_use: int) -> bool:
    for update in [each.speculative for each in self.undecided if each.speculative is not None]:
        if row.spec.reversible > self.images and update.ticket.images and not update.ticket.computed:
            _withdraw(self.worker, update.ticket)
            self._decide(update.ticket.row)
            self._note(update.ticket)
    return row.spec.reversible <= self.images


@_mutant("the rest of a speculative update of some tiles is forgotten", Performer, "commit_speculative")
def _rest_forgotten(original: Any, self: Performer, row: Row, due: Due) -> None:
    original(self, row, due)
    if row.begun is not None:
        row.due = row.begun = None


@_mutant("a speculative update stands although the norm was clipped", Rank, "_update_all")
def _clipped_stands(self: Rank, *, clips: bool) -> None:
    for unit in list(self._added):
        self._update(self.rows[unit], clips=clips)


@_mutant("the drive's protected slot is written over", Row, "begin_write_home")
def _slot_unprotected(original: Any, self: Row, tile: int) -> bool:
    protected, self.protected = self.protected, [-9] * self.spec.tiles
    try:
        return bool(original(self, tile))
    finally:
        self.protected = protected


@_mutant("an exception in a pass leaves its units in use", Rank, "_end_cycle")
def _pins_stay(original: Any, self: Rank, *, learn: bool) -> None:
    pins = [row.pins for row in self.rows]
    original(self, learn=learn)
    if not learn:
        for row, before in zip(self.rows, pins, strict=True):
            row.pins = before


@_mutant("zero_grad leaves speculative updates", Rank, "_drop")
def _zero_grad_leaves_ahead(self: Rank) -> None:
    for unit in self._added:
        self.grads.drop(self.rows[unit])
    self._added = {}
