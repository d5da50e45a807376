"""A step as the engine would do it, unit by unit and tile by tile, on a machine that is only thought of.

[Note: what is rehearsed]
The compute thread performs the actions of the engine's own scheduler in virtual time. What it does beside, and the
optimizer's worker (rehearsed_updates.py), follow their counterparts in the engine, in the same order and with the same
memory. Reads, writes, copies, exchanges, updates and computing take their turns in lanes. So what a budget costs (a
unit that cannot be updated ahead of the one in use, a drive that idles while all tiles in flight are with the
optimizer) comes of itself. Left out is what takes little time beside these: Python, launches, latencies.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from infinity.memory import Budget
from infinity.planner.lanes import Machine, Process, Speeds, Task, Until
from infinity.planner.rehearsed_grads import Grads
from infinity.planner.rehearsed_updates import OPTIMIZER, READ, WRITE, Ticket, Worker
from infinity.planner.step_work import StepWork, TileWork, UnitWork
from infinity.schedule import Cycle
from infinity.schedule.actions import (
    AwaitAnyUpdate,
    AwaitFetch,
    AwaitNewest,
    AwaitSpill,
    AwaitUpdate,
    Event,
    Evict,
    Fetch,
    GradientsNeedRoom,
    GradientsRest,
    MemoryFreed,
    ParametersMade,
    ParametersNeeded,
    PassBegins,
    PassEnds,
    Spill,
    Submit,
    UpdateDue,
    UseBegins,
)
from infinity.schedule.scheduler import Scheduler
from infinity.schedule.unit_state import UnitState
from infinity.tiers import Residency
from infinity.tiers.copies import State

COMPUTE, UP, DOWN, EXCHANGE = "compute", "up", "down", "collectives"
PARTS = {
    COMPUTE: "compute",
    OPTIMIZER: "optimizer",
    READ: "disk",
    WRITE: "disk",
    UP: "link",
    DOWN: "link",
    EXCHANGE: "collectives",
}
_WARM_UP, _MEASURED = 2, 2  # steps
_FIRST_GRAD = 0.15  # of a block's backward, until gradients of one of its parameters have come
_ARRIVALS = 6  # of gradients, in the rest of it
_Tiles = deque[tuple[int, TileWork]]


@dataclass(frozen=True)
class Rehearsal:
    """What a step took, once the first ones were over.

    Attributes:
        phases_s: forward, backward, and what follows where a step waits for its updates.
        waits_s: of the compute thread, by the part of the machine that it waited for.
        busy_s: for which each part had something to do.
        leased_bytes: most that gradients had beside memory of units' own, and slots.
    """

    seconds: float
    phases_s: dict[str, float]
    waits_s: dict[str, float]
    busy_s: dict[str, float]
    leased_bytes: int


def rehearse(work: StepWork, speeds: Speeds) -> Rehearsal:
    """Go through a few steps."""
    stage = _Stage(work, Machine(PARTS, speeds))
    stage.machine.run(stage.compute_thread(), stage.worker.run())
    return stage.measured()


class _Unit(UnitState):
    """A row, read from a stage."""

    is_reconstructable = False  # whether an update is written is known before
    is_updated_on_device = False  # it takes no time beside what the device computes

    def __init__(self, stage: _Stage, index: int, work: UnitWork) -> None:
        super().__init__(index, str(index), work.nbytes, moves=work.nbytes > 0, spills=work.spill_s > 0)
        self._stage = stage

    @property
    def residency(self) -> Residency:
        if self.index in self._stage.fetching:
            return Residency.FETCHING
        return Residency.RESIDENT if self._stage.has(self.index) else Residency.STORED

    @property
    def is_pinned(self) -> bool:
        return self._stage.is_pinned(self.index)

    @property
    def gradients(self) -> State:
        return self._stage.grads.state(self.index)

    @property
    def gradients_are_used(self) -> bool:
        return self.index in self._stage.handed

    @property
    def gradients_have_room(self) -> bool:
        return self._stage.grads.has_room(self.index)

    @property
    def update_is_due(self) -> bool:
        return self.index in self._stage.pending

    @property
    def update_has_begun(self) -> bool:
        return self.index in self._stage.begun

    @property
    def update_is_submitted(self) -> bool:
        return self.index in self._stage.handed


class _Stage:
    """The compute thread, and what it knows.

    Attributes:
        fetching: units that are fetched ahead, and that nobody has waited for or updated.
        grads: their memory.
        pending: updates that wait for their units, or for room.
        begun: those of them of which a part has run ahead.
        handed: those that the worker has.
    """

    def __init__(self, work: StepWork, machine: Machine) -> None:
        self.machine = machine
        self.worker = Worker(work.units, machine, work.slots)
        self._work = work
        self._units = work.units
        self.grads = Grads(work, machine)
        self._forward_uses = [use.unit for use in work.uses]
        # Units
        self._resident = set(work.plan.resident)
        self._budget = Budget("memory for parameters", work.params_bytes)
        self._budget.used_bytes = sum(self._units[unit].nbytes for unit in self._resident)
        self.fetching: set[int] = set()
        self._reading: dict[int, Task] = {}
        self._unsent: dict[int, float] = {}  # seconds of what is to go up
        self._sending: dict[int, list[Task]] = {}  # on its way up, or to all ranks
        self._gathered: dict[int, Task] = {}
        self._in_use: list[int] = []
        # Updates
        self.pending: dict[int, _Tiles] = {}
        self.begun: set[int] = set()
        self.handed: dict[int, Ticket] = {}
        self._ahead: set[int] = set()
        self._finals: list[int] = []
        self._scheduler = self._scheduled()
        # What is measured
        self._phases_s: defaultdict[str, float] = defaultdict(float)
        self._begun_s = 0.0
        self._before: tuple[Mapping[str, float], Mapping[str, float]] = {}, {}

    def _scheduled(self) -> Scheduler:
        moving = [one.nbytes > 0 for one in self._units]
        cycle = Cycle([one.nbytes for one in self._units], moving, self._work.params_bytes)
        cycle.expect([*self._forward_uses, *self._forward_uses[::-1]], self._work.plan)
        rows = [_Unit(self, unit, one) for unit, one in enumerate(self._units)]
        scheduler = Scheduler(
            rows, cycle, self._budget, "the memory for parameters", self._work.spill_slots, self.grads.in_slots
        )
        for unit in self._work.plan.resident:
            list(scheduler.on(ParametersMade(unit)))  # which asks for nothing
        return scheduler

    def has(self, unit: int) -> bool:
        """The unit's parameters are in memory, or on their way there."""
        return unit in self._resident or not self._units[unit].nbytes

    def is_pinned(self, unit: int) -> bool:
        """Somebody, an update perhaps, keeps the unit in memory."""
        return unit in self._in_use or unit in self.handed or unit in self._gathered

    def _do(self, event: Event) -> Generator[Until, None, bool]:
        """Perform what the scheduler asks for because of an event; False if that is nothing."""
        action = None
        for action in self._scheduler.on(event):
            match action:
                case Fetch(unit, urgent):
                    self._fetch(unit, urgent=urgent)
                case Evict(unit):
                    yield from self._evict(unit)
                case Submit(unit, _, needed):
                    self.grads.take_room(unit)
                    self.begun.discard(unit)
                    self._hand_over(unit, self.pending.pop(unit), needed)
                case Spill(unit):
                    self.grads.spill(unit)
                case AwaitSpill(unit):
                    yield from self._wait([self.grads.leaving[unit]], WRITE)
                    self.grads.leave(unit)
                case AwaitUpdate(unit):
                    yield from self._await_update(unit)
                case AwaitFetch(unit):
                    yield from self._await_read(unit)
                case AwaitNewest(unit):
                    yield from self._await_newest(unit)
                case AwaitAnyUpdate():
                    yield from self._finish_one()
        return action is not None

    def measured(self) -> Rehearsal:
        """Of one of the steps that were measured."""

        def mean(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
            return {name: (value - before.get(name, 0.0)) / _MEASURED for name, value in now.items()}

        machine, waits_s = self.machine, defaultdict[str, float](float)
        for lane, seconds in mean(self.machine.waited_s, self._before[0]).items():
            waits_s[PARTS[lane]] += seconds
        waits_s.pop(PARTS[COMPUTE], None)  # that is computing
        return Rehearsal(
            (machine.now_s - self._begun_s) / _MEASURED,
            {name: seconds / _MEASURED for name, seconds in self._phases_s.items()},
            dict(waits_s),
            mean(machine.busy_s, self._before[1]),
            self.grads.most_leased_bytes,
        )

    def compute_thread(self) -> Process:
        """Steps, as the training loop asks for them."""
        for step in range(_WARM_UP + _MEASURED):
            if step == _WARM_UP:
                self._begun_s = self.machine.now_s
                self._before = dict(self.machine.waited_s), dict(self.machine.busy_s)
                self._phases_s.clear()
            for index in range(self._work.passes):
                yield from self._phase("forward", self._forward())
                yield from self._phase("backward", self._backward(last=index == self._work.passes - 1))
            yield from self._phase("update", self._finish_step())

    def _phase(self, name: str, process: Process) -> Process:
        begun_s = self.machine.now_s
        yield from process
        self._phases_s[name] += self.machine.now_s - begun_s

    # Passes #

    def _forward(self) -> Process:
        yield from self._do(PassBegins())
        yield from self._settle()
        for use in self._work.uses:
            yield from self._enter(use.unit)
            yield from self._wait([self.machine.put(COMPUTE, use.forward_s)], COMPUTE)
            self.machine.put(DOWN, use.down_s)
            self.machine.put(WRITE, use.write_s)
            yield from self._leave(use.unit)

    def _backward(self, *, last: bool) -> Process:
        self.worker.prefer(begun=True)
        if last and (self._work.runs_in_backward or any(unit.ahead for unit in self._units)):
            self.worker.expect(list(dict.fromkeys(self._finals)))
            self._finals = []
        left = Counter(self._forward_uses)
        saved: dict[int, list[Task]] = {}  # by position: what autograd saved, on its way back
        uses = self._work.uses[::-1]
        for position, use in enumerate(uses):
            yield from self._enter(use.unit)
            for index in range(position, min(position + 2, len(uses))):
                if index not in saved:
                    seconds = ((READ, uses[index].read_s), (UP, uses[index].up_s))
                    saved[index] = [self.machine.put(lane, lane_s) for lane, lane_s in seconds]
            yield from self._wait(saved.pop(position), READ)
            left[use.unit] -= 1
            backward_s = use.backward_s + (0.0 if left[use.unit] else self._units[use.unit].take_s)
            yield from self._wait([self.machine.put(COMPUTE, _FIRST_GRAD * backward_s)], COMPUTE)
            if not left[use.unit]:  # those of all its uses come together
                yield from self._have_room_for_grads(use.unit)
            for _ in range(_ARRIVALS):
                yield from self._wait([self.machine.put(COMPUTE, (1 - _FIRST_GRAD) / _ARRIVALS * backward_s)], COMPUTE)
                yield from self._catch_up()
            if not left[use.unit] and use.unit not in self._work.standing:
                yield from self._have_grads(use.unit, last=last)
            yield from self._leave(use.unit)
        for unit in self._work.standing:
            yield from self._have_grads(unit, last=last)
        yield from self._do(PassEnds(learn=True))

    @staticmethod
    def _wait(tasks: Sequence[Task], cause: str) -> Process:
        yield Until(lambda: all(task.done for task in tasks), cause)

    # Units #

    def _enter(self, unit: int) -> Process:
        self._in_use.append(unit)
        yield from self._settle()
        yield from self._do(UseBegins(unit))
        if self._units[unit].gather_s:
            yield from self._gather(unit)

    def _leave(self, unit: int) -> Process:
        self._in_use.remove(unit)
        yield from self._settle()

    # Actions #

    def _fetch(self, unit: int, *, urgent: bool) -> None:
        work = self._units[unit]
        self._budget.take(work.nbytes, f"unit {unit}")
        self._resident.add(unit)
        self.fetching.add(unit)
        self._unsent[unit] = work.up_s
        self._reading[unit] = self.machine.put(READ, work.read_s, lambda: self._send(unit), urgent=urgent)

    def _await_read(self, unit: int) -> Process:
        if unit in self._reading:
            self.machine.hurry(READ, self._reading[unit])
            yield from self._wait([self._reading[unit]], READ)
            del self._reading[unit]
        self.fetching.discard(unit)

    def _await_newest(self, unit: int) -> Process:
        ticket = self.handed.get(unit)
        if ticket is not None and not ticket.computed:
            self.worker.hurry(ticket)
            yield Until(lambda: ticket.computed, OPTIMIZER)
        yield from self._await_read(unit)
        self._send(unit)
        yield from self._wait(self._sending.pop(unit, []), UP)

    def _evict(self, unit: int) -> Process:
        yield from self._wait(self._sending.pop(unit, []), UP)
        self._resident.remove(unit)
        self._unsent.pop(unit, None)
        self._reading.pop(unit, None)
        self._budget.give(self._units[unit].nbytes)

    def _send(self, unit: int) -> None:
        """What has been read, and is not to be updated first, goes up."""
        at_rest = unit not in self.pending and (unit not in self.handed or self.handed[unit].computed)
        if at_rest and unit in self._unsent and (unit not in self._reading or self._reading[unit].done):
            work = self._units[unit]
            sent = [self.machine.put(UP, self._unsent.pop(unit))]
            if not work.nbytes:
                sent.append(self.machine.put(EXCHANGE, work.regather_s))
            self._sending[unit] = sent

    def _gather(self, unit: int) -> Process:
        """Have the unit whole, and the next one on its way."""
        gathered = self._gathered.pop(unit, None) or self.machine.put(EXCHANGE, self._units[unit].gather_s)
        yield from self._wait([gathered], EXCHANGE)
        for following in self._scheduler.cycle.upcoming:
            if following != unit and following not in self._gathered and self._units[following].gather_s:
                yield from self._do(ParametersNeeded(following))
                self._gathered[following] = self.machine.put(EXCHANGE, self._units[following].gather_s)

    def _settle(self) -> Process:
        for unit in [unit for unit, ticket in self.handed.items() if ticket.done]:
            self._note(unit)
        yield from self._do(MemoryFreed())

    def _catch_up(self) -> Process:
        if self._scheduler.waits_for_memory and any(ticket.done for ticket in self.handed.values()):
            yield from self._settle()

    # Gradients #

    def _have_room_for_grads(self, unit: int) -> Process:
        while unit in self.handed or not self.grads.take_room(unit):  # the last step's may be used still
            if not (yield from self._do(GradientsNeedRoom(unit))):
                self.grads.overflow(unit)

    def _have_grads(self, unit: int, *, last: bool) -> Process:
        """All gradients of the unit have come in this pass."""
        tiles = self._units[unit].tiles
        if not tiles:
            return
        self.grads.come(unit)
        if last and self._work.runs_in_backward:
            self._finals.append(unit)
            yield from self._update(unit, deque(enumerate(tiles)))
        elif last and self._units[unit].ahead and unit not in self.handed and unit not in self.pending:
            self._finals.append(unit)
            self._ahead.add(unit)
            needed = self._scheduler.urgency(self._scheduler.rows[unit])[1]
            self._hand_over(unit, deque(list(enumerate(tiles))[: self._units[unit].ahead]), needed)
        else:
            self.grads.rest(unit)
            if self._units[unit].spill_s:
                yield from self._do(GradientsRest())

    # Updates #

    def _update(self, unit: int, tiles: _Tiles) -> Process:
        self.pending[unit] = tiles
        if self.has(unit):
            yield from self._do(UpdateDue(unit))

    def _hand_over(self, unit: int, tiles: _Tiles, needed: int) -> None:
        ready = self.grads.hand_over(unit)
        if unit in self._reading:
            ready = [*ready, self._reading[unit]]
        self.fetching.discard(unit)
        self.handed[unit] = Ticket(unit, tiles, ready, needed)
        self.worker.submit(self.handed[unit])

    def _note(self, unit: int) -> None:
        """An update is over: what it held is free."""
        del self.handed[unit]
        if unit in self._ahead:
            if self._units[unit].recovers:
                self.grads.used(unit)
            return  # others' gradients stay until the norm is known
        self.grads.used(unit)
        work = self._units[unit]
        if work.publish_s or work.regather_s:
            self._unsent[unit] = work.publish_s
        self._send(unit)

    def _await_update(self, unit: int) -> Process:
        ticket = self.handed[unit]
        yield Until(lambda: ticket.done, OPTIMIZER)
        self._note(unit)

    def _finish_one(self) -> Process:
        """Wait for one update, whichever is the first."""
        yield Until(lambda: any(ticket.done for ticket in self.handed.values()), OPTIMIZER)
        for unit in [unit for unit, ticket in self.handed.items() if ticket.done]:
            self._note(unit)

    def _finish_step(self) -> Process:
        self.worker.prefer(begun=False)
        if not self._work.runs_in_backward:
            yield from self._wait(self.grads.coming(), DOWN)
            yield from self._update_all()
        if self._work.settles:
            for unit in list(self.pending):
                self._in_use.append(unit)
                yield from self._do(ParametersNeeded(unit))
                self._in_use.remove(unit)
            while self.handed:
                yield from self._finish_one()
            yield from self._wait([task for tasks in self._sending.values() for task in tasks], UP)
            yield from self._settle()

    def _update_all(self) -> Process:
        """The norm is known: what ran ahead stands, and the rest is updated."""
        ahead, self._ahead = self._ahead, set()
        self.worker.expect([unit for unit in range(len(self._units)) if unit not in ahead])
        for unit, work in enumerate(self._units):
            rest = deque(list(enumerate(work.tiles))[work.ahead if unit in ahead else 0 :])
            if rest or unit not in ahead:
                if unit in ahead:
                    self.begun.add(unit)
                yield from self._update(unit, rest)
            elif unit not in self.handed:
                self.grads.used(unit)
