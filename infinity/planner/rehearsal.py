"""A step as the engine would do it, unit by unit and tile by tile, on a machine that is only thought of.

[Note: what is rehearsed]
The compute thread (zero/executor.py, which follows the plan) and the optimizer's worker (rehearsed_updates.py) do what
their counterparts in the engine do, in the same order and with the same memory. Reads, writes, copies, exchanges,
updates and computing take their turns in lanes. So what a budget costs (a unit that cannot be updated ahead of the one
in use, a drive that idles while all tiles in flight are with the optimizer) comes of itself. Left out is what takes
little time beside these: Python, launches, latencies.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.planner.lanes import Machine, Process, Speeds, Task, Until
from infinity.planner.rehearsed_grads import Grads
from infinity.planner.rehearsed_updates import OPTIMIZER, READ, WRITE, Ticket, Worker
from infinity.planner.step_work import StepWork, TileWork

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
_NOW = -1  # when an update is needed that keeps its unit from leaving memory
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


class _Stage:
    """The compute thread, and what it knows."""

    def __init__(self, work: StepWork, machine: Machine) -> None:
        self.machine = machine
        self.worker = Worker(work.units, machine, work.slots)
        self._work = work
        self._units = work.units
        self._grads = Grads(work, machine)
        self._forward_uses = [use.unit for use in work.uses]
        # Units
        self._resident = set(work.plan.resident)
        self._free_bytes = work.params_bytes - sum(self._units[unit].nbytes for unit in self._resident)
        self._reading: dict[int, Task] = {}
        self._unsent: dict[int, float] = {}  # seconds of what is to go up
        self._sending: dict[int, list[Task]] = {}  # on its way up, or to all ranks
        self._gathered: dict[int, Task] = {}
        self._in_use: list[int] = []
        self._recency: dict[int, None] = dict.fromkeys(work.plan.resident)
        self._todo: deque[tuple[str, int]] = deque()
        self._position = 0  # in the plan
        # Updates
        self._pending: dict[int, _Tiles] = {}  # they wait for their units
        self._turn = 0
        self._asked: dict[int, int] = {}  # whose turn it is among these
        self._staying = {unit for unit, one in enumerate(work.units) if not one.nbytes}
        self._handed: dict[int, Ticket] = {}
        self._ahead: set[int] = set()
        self._finals: list[int] = []
        # What is measured
        self._phases_s: defaultdict[str, float] = defaultdict(float)
        self._begun_s = 0.0
        self._before: tuple[Mapping[str, float], Mapping[str, float]] = {}, {}

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
            self._grads.most_leased_bytes,
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
        self._position = 0
        self._todo.extend(("evict", unit) for unit in self._recency if unit not in self._work.plan.resident)
        for use in self._work.uses:
            yield from self._enter(use.unit)
            yield from self._wait([self.machine.put(COMPUTE, use.forward_s)], COMPUTE)
            self.machine.put(DOWN, use.down_s)
            self.machine.put(WRITE, use.write_s)
            self._leave(use.unit)

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
                self._catch_up()
            if not left[use.unit] and use.unit not in self._work.standing:
                self._have_grads(use.unit, last=last)
            self._leave(use.unit)
        for unit in self._work.standing:
            self._have_grads(unit, last=last)

    @staticmethod
    def _wait(tasks: Sequence[Task], cause: str) -> Process:
        yield Until(lambda: all(task.done for task in tasks), cause)

    # Units #

    def _enter(self, unit: int) -> Process:
        self._settle()
        self._in_use.append(unit)
        step = None
        if self._units[unit].nbytes:
            step = self._work.plan.steps[self._position]
            self._position += 1
            if step.before is not None:
                self._todo.extend(("evict", victim) for victim in step.before)
                self._work_off()
        yield from self._bring(unit)
        if step is not None:
            self._todo.extend(step.actions)
            self._work_off()
        if self._units[unit].gather_s:
            yield from self._gather(unit)

    def _leave(self, unit: int) -> None:
        self._in_use.remove(unit)
        self._settle()

    def _bring(self, unit: int) -> Process:
        """Have the unit here, with its newest values."""
        while self._units[unit].nbytes and unit not in self._resident and not self._fetch(unit, urgent=True):
            yield from self._make_room(unit)
        while not self._try_update(unit):
            yield from self._free_for_update(unit)
        ticket = self._handed.get(unit)
        if ticket is not None and not ticket.computed:
            self.worker.hurry(ticket)
            yield Until(lambda: ticket.computed, OPTIMIZER)
        if unit in self._reading:
            self.machine.hurry(READ, self._reading[unit])
            yield from self._wait([self._reading[unit]], READ)
            del self._reading[unit]
        self._send(unit)
        yield from self._wait(self._sending.pop(unit, []), UP)
        if self._units[unit].nbytes:
            self._recency.pop(unit, None)
            self._recency[unit] = None

    def _fetch(self, unit: int, *, urgent: bool) -> bool:
        work = self._units[unit]
        if work.nbytes > self._free_bytes:
            return False
        self._free_bytes -= work.nbytes
        self._resident.add(unit)
        self._unsent[unit] = work.up_s
        self._reading[unit] = self.machine.put(READ, work.read_s, lambda: self._send(unit), urgent=urgent)
        return True

    def _send(self, unit: int) -> None:
        """What has been read, and is not to be updated first, goes up."""
        at_rest = unit not in self._pending and (unit not in self._handed or self._handed[unit].computed)
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
        steps = self._work.plan.steps
        following = steps[self._position].unit if self._position < len(steps) else unit
        if following != unit and following not in self._gathered:
            yield from self._bring(following)
            self._gathered[following] = self.machine.put(EXCHANGE, self._units[following].gather_s)

    def _make_room(self, unit: int) -> Process:
        for other in (*self._recency, *self._reading):
            if other in self._resident and self._try_evict(other):
                return
        if self._handed:
            yield from self._finish_one()
            return
        for other in [other for other in self._reading if other not in self._in_use]:
            yield from self._wait([self._reading.pop(other)], READ)
            self._recency[other] = None
            return
        raise RuntimeError(f"there is no room for unit {unit}")

    def _try_evict(self, unit: int) -> bool:
        """Have the unit away; False if it is still needed."""
        if unit not in self._resident:
            return True
        moving = [self._reading[unit]] if unit in self._reading else []
        if not all(task.done for task in (*moving, *self._sending.get(unit, ()))):
            return False
        if unit in self._in_use or unit in self._handed or unit in self._gathered or unit in self._ahead:
            return False
        self._resident.remove(unit)
        for known in (self._recency, self._unsent, self._reading, self._sending):
            known.pop(unit, None)
        self._free_bytes += self._units[unit].nbytes
        return True

    def _work_off(self) -> None:
        while self._todo:
            action, unit = self._todo[0]
            if action == "evict" and not self._try_evict(unit):
                return
            if action == "prefetch" and unit not in self._resident:
                if not self._fetch(unit, urgent=False):
                    return
                self._try_update(unit)
            self._todo.popleft()

    def _settle(self) -> None:
        for unit in [unit for unit, ticket in self._handed.items() if ticket.done]:
            self._note(unit)
        here = self._pending.keys() & self._resident | self._pending.keys() & self._staying
        for unit in sorted(here, key=self._asked.__getitem__):
            if not self._try_update(unit):
                break
        self._work_off()

    def _catch_up(self) -> None:
        if self._todo and any(ticket.done for ticket in self._handed.values()):
            self._settle()

    # Gradients #

    def _have_room_for_grads(self, unit: int) -> Process:
        while unit in self._handed:  # the last step's are still used
            yield from self._finish_one()
        while not self._grads.take_room(unit):
            leaving = self._grads.oldest_leaving()
            if leaving is not None and self._units[unit].spill_s:
                yield from self._wait([leaving], WRITE)
            elif self._handed:
                yield from self._finish_one()
            else:
                self._grads.overflow(unit)

    def _have_grads(self, unit: int, *, last: bool) -> None:
        """All gradients of the unit have come in this pass."""
        tiles = self._units[unit].tiles
        if not tiles:
            return
        self._grads.come(unit)
        if last and self._work.runs_in_backward:
            self._finals.append(unit)
            self._update(unit, deque(enumerate(tiles)))
        elif last and self._units[unit].ahead and unit not in self._handed and unit not in self._pending:
            self._finals.append(unit)
            self._ahead.add(unit)
            self._hand_over(unit, deque(list(enumerate(tiles))[: self._units[unit].ahead]))
        else:
            self._grads.rest(unit)

    # Updates #

    def _update(self, unit: int, tiles: _Tiles) -> None:
        self._pending[unit] = tiles
        self._asked[unit] = self._turn = self._turn + 1
        if unit in self._resident or not self._units[unit].nbytes:
            self._try_update(unit)

    def _try_update(self, unit: int) -> bool:
        """Hand the unit's update over, if there is one; False if that has to wait."""
        if unit not in self._pending:
            return True
        if unit in self._handed:
            if not self._handed[unit].done:
                return False
            self._note(unit)
        if not self._grads.take_room(unit):
            return False
        self._hand_over(unit, self._pending.pop(unit))
        return True

    def _free_for_update(self, unit: int) -> Process:
        leaving = self._grads.oldest_leaving()
        if self._handed:
            yield from self._finish_one()
        elif leaving is not None:
            yield from self._wait([leaving], WRITE)
        else:
            self._grads.overflow(unit)

    def _hand_over(self, unit: int, tiles: _Tiles) -> None:
        ready = self._grads.hand_over(unit)
        if unit in self._reading:
            ready = [*ready, self._reading[unit]]
        self._handed[unit] = Ticket(unit, tiles, ready, _NOW if unit in self._work.plan.evicted else unit)
        self.worker.submit(self._handed[unit])

    def _note(self, unit: int) -> None:
        """An update is over: what it held is free."""
        del self._handed[unit]
        if unit in self._ahead:
            if self._units[unit].recovers:
                self._grads.used(unit)
            return  # others' gradients stay until the norm is known
        self._grads.used(unit)
        work = self._units[unit]
        if work.publish_s or work.regather_s:
            self._unsent[unit] = work.publish_s
        self._send(unit)

    def _finish_one(self) -> Process:
        """Wait for one update, whichever is the first."""
        yield Until(lambda: any(ticket.done for ticket in self._handed.values()), OPTIMIZER)
        for unit in [unit for unit, ticket in self._handed.items() if ticket.done]:
            self._note(unit)

    def _finish_step(self) -> Process:
        self.worker.prefer(begun=False)
        if not self._work.runs_in_backward:
            yield from self._wait(self._grads.coming(), DOWN)
            self._update_all()
        if self._work.settles:
            for unit in list(self._pending):
                self._in_use.append(unit)
                yield from self._bring(unit)
                self._in_use.remove(unit)
            while self._handed:
                yield from self._finish_one()
            yield from self._wait([task for tasks in self._sending.values() for task in tasks], UP)
            self._settle()

    def _update_all(self) -> None:
        """The norm is known: what ran ahead stands, and the rest is updated."""
        ahead, self._ahead = self._ahead, set()
        self.worker.expect([unit for unit in range(len(self._units)) if unit not in ahead])
        for unit, work in enumerate(self._units):
            rest = deque(list(enumerate(work.tiles))[work.ahead if unit in ahead else 0 :])
            if rest or unit not in ahead:
                self._update(unit, rest)
            elif unit not in self._handed:
                self._grads.used(unit)
