"""Simulate a step unit by unit and tile by tile, as the engine would run it on a given machine.

[Note: what is simulated]
The compute thread performs the actions of the engine's own scheduler in virtual time. The optimizer's worker
(simulated_worker.py) takes updates in the order of the engine's own queue. Reads, writes, copies, collectives, updates
and computation are queued in lanes. So the cost of a small budget (a unit whose update must wait for the one in use, a
drive that idles while the optimizer has all tiles in flight) results from the simulation itself. Small costs are left
out: Python, launches, latencies.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import cast

from infinity.memory import Budget
from infinity.planner.lanes import Lanes, Process, Speeds, Task, Until
from infinity.planner.simulated_worker import OPTIMIZER, READ, WRITE, Ticket, Worker
from infinity.planner.step_work import StepWork, TileWork, UnitWork, aside
from infinity.schedule import Cycle, actions, raise_memory
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
_FIRST_GRAD = 0.15  # of a block's backward, until one of its parameters has its gradient
_ARRIVALS = 6  # of gradients, in the remaining backward of a block


@dataclass(frozen=True)
class SimulatedStep:
    """The costs of a step in steady state.

    Attributes:
        phases_s: forward, backward, and time spent waiting for updates at the end of the step.
        waits_s: of the compute thread, by the part of the machine that it waited for.
        busy_s: time in which each part was busy.
        leased_bytes: peak of gradients outside of units' own memory and of slots.
    """

    seconds: float
    phases_s: dict[str, float]
    waits_s: dict[str, float]
    busy_s: dict[str, float]
    leased_bytes: int


def simulate_step(work: StepWork, speeds: Speeds) -> SimulatedStep:
    stage = Stage(work, Lanes(PARTS, speeds))
    stage.lanes.run(stage.compute_thread(), stage.worker.run())
    return stage.measured()


class _Gradients:
    """The memory of gradients.

    Attributes:
        in_slots: units whose gradients have a slot, the longest first.
        leased_bytes: outside of units' own memory and of slots.
    """

    def __init__(self, work: StepWork) -> None:
        self.slots = work.spill_slots
        self.in_slots: dict[int, None] = {}
        self.free_bytes = work.grads_bytes
        self.leased_bytes = self.most_leased_bytes = 0

    def lease(self, work: UnitWork) -> None:
        self.free_bytes -= work.grad_bytes
        self.leased_bytes += 0 if work.own_grads else work.grad_bytes
        self.most_leased_bytes = max(self.most_leased_bytes, self.leased_bytes)

    def give_back(self, work: UnitWork) -> None:
        self.free_bytes += work.grad_bytes
        self.leased_bytes -= 0 if work.own_grads else work.grad_bytes


class _Unit(UnitState):
    """A row.

    Attributes:
        uses: number of modules that compute on it.
        reading: the read of the parameters from the drive.
        unsent_s: duration of their upload, which starts once they are in memory and updated.
        sending: their upload, or their gather by all ranks.
        gathered: their early gather for the next use.
        spilling: the write of the gradients to the drive.
        has_spilled: the drive has gradients.
        coming: transfers of the gradients to the memory where they wait.
        due: tiles of the update that is due; None if none is.
        ticket: the update in the worker's queue.
        ahead: number of tiles updated speculatively, until the norm is known; then `begun`, until the others are
            submitted.
        kept_bytes: of the undo log that they take.
    """

    due: deque[tuple[int, TileWork]] | None
    begun: int | None
    ticket: Ticket | None
    ahead: int | None
    is_updated_on_device = False  # its time is part of the device's computation
    residency = Residency.RESIDENT
    gradients = State.ABSENT

    def __init__(self, index: int, work: UnitWork, memory: _Gradients, others: Sequence[_Unit]) -> None:
        super().__init__(index, str(index), work.nbytes, offloaded=work.nbytes > 0, spills=work.spill_s > 0)
        self.work = work
        self.uses = 0
        self.reading: Task | None = None
        self.unsent_s: float | None = None
        self.sending: list[Task] = []
        self.gathered: Task | None = None
        self.spilling: Task | None = None
        self.has_spilled = False
        self.coming: list[Task] = []
        self.kept_bytes = 0
        self._memory = memory
        self._others = others

    @property
    def is_pinned(self) -> bool:
        return self.uses > 0 or self.ticket is not None or self.gathered is not None

    @property
    def gradients_are_used(self) -> bool:
        return self.ticket is not None

    @property
    def gradients_have_room(self) -> bool:
        if self.gradients is not State.ABSENT:
            return True
        if self.spills:
            return len(self._memory.in_slots) < self._memory.slots or self.written() is not None
        return self.work.grad_bytes <= self._memory.free_bytes

    def written(self) -> _Unit | None:
        """Return a unit whose gradients are on the drive and still have a slot."""
        rows = (self._others[unit] for unit in self._memory.in_slots)
        return next((row for row in rows if row.spilling is not None and row.spilling.done), None)


class Stage:
    """The compute thread and its state.

    Attributes:
        scheduler: the engine's.
    """

    def __init__(self, work: StepWork, lanes: Lanes) -> None:
        self.lanes = lanes
        self.worker = Worker(work.units, lanes, work.slots)
        self._work = work
        self._forward_uses = [use.unit for use in work.uses]
        self._gradients = _Gradients(work)
        self._rows: list[_Unit] = []
        self._rows += [_Unit(unit, each, self._gradients, self._rows) for unit, each in enumerate(work.units)]
        self._budget = Budget("memory for parameters", work.params_bytes)
        self._due: dict[_Unit, None] = {}  # in the order in which they became due
        self._submitted: dict[_Unit, None] = {}
        self._update_order: list[int] = []
        self._some_rest = False  # speculative updates have given gradients back
        self._undo_free_bytes = work.undo_bytes
        self.scheduler = self._scheduled()
        # measurements
        self._phases_s: defaultdict[str, float] = defaultdict(float)
        self._begun_s = 0.0
        self._before: tuple[Mapping[str, float], Mapping[str, float]] = {}, {}

    def _scheduled(self) -> Scheduler:
        work, sizes = self._work, [row.nbytes for row in self._rows]
        cycle = Cycle(sizes, [row.offloaded for row in self._rows], work.params_bytes)
        cycle.expect([*self._forward_uses, *self._forward_uses[::-1]], work.plan)
        memory = self._gradients
        scheduler = Scheduler(
            self._rows,
            cycle,
            self._budget,
            partial(raise_memory, "the memory for parameters"),
            memory.slots,
            memory.in_slots,
            writes_all=work.writes_all,
        )
        for row in self._rows:
            if row.offloaded and row.index not in work.plan.resident:
                row.residency = Residency.STORED
            elif row.offloaded:
                self._budget.used_bytes += row.nbytes
                list(scheduler.on(actions.ParametersMade(row)))  # yields no action
        return scheduler

    def measured(self) -> SimulatedStep:
        """Return the mean of the measured steps."""

        def mean(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
            return {name: (value - before.get(name, 0.0)) / _MEASURED for name, value in now.items()}

        lanes, waits_s = self.lanes, defaultdict[str, float](float)
        for lane, seconds in mean(self.lanes.waited_s, self._before[0]).items():
            waits_s[PARTS[lane]] += seconds
        waits_s.pop(PARTS[COMPUTE], None)  # this is computation, no wait
        return SimulatedStep(
            (lanes.now_s - self._begun_s) / _MEASURED,
            {name: seconds / _MEASURED for name, seconds in self._phases_s.items()},
            dict(waits_s),
            mean(lanes.busy_s, self._before[1]),
            self._gradients.most_leased_bytes,
        )

    def compute_thread(self) -> Process:
        """Run steps like a training loop."""
        for step in range(_WARM_UP + _MEASURED):
            if step == _WARM_UP:
                self._begun_s = self.lanes.now_s
                self._before = dict(self.lanes.waited_s), dict(self.lanes.busy_s)
                self._phases_s.clear()
            for index in range(self._work.passes):
                yield from self._phase("forward", self._forward())
                yield from self._phase("backward", self._backward(last=index == self._work.passes - 1))
            yield from self._phase("update", self._finish_step())

    def _phase(self, name: str, process: Process) -> Process:
        begun_s = self.lanes.now_s
        yield from process
        self._phases_s[name] += self.lanes.now_s - begun_s

    # Passes #

    def _forward(self) -> Process:
        yield from self._do(actions.PassBegins())
        yield from self._poll()
        for use in self._work.uses:
            yield from self._enter(use.unit)
            yield from self._wait([self.lanes.put(COMPUTE, use.forward_s)], COMPUTE)
            self.lanes.put(DOWN, use.down_s)
            self.lanes.put(WRITE, use.write_s)
            yield from self._leave(use.unit)

    def _backward(self, *, last: bool) -> Process:
        self.worker.queue.prefer(begun=True)
        if last and (self._work.runs_in_backward or any(map(self._may_run_ahead, self._work.units))):
            self.worker.queue.expect(list(dict.fromkeys(self._update_order)))
            self._update_order = []
        left = Counter(self._forward_uses)
        saved: dict[int, list[Task]] = {}  # by position: activations on their way back
        uses = self._work.uses[::-1]
        for position, use in enumerate(uses):
            row = self._rows[use.unit]
            yield from self._enter(use.unit)
            for index in range(position, min(position + 2, len(uses))):
                if index not in saved:
                    seconds = ((READ, uses[index].read_s), (UP, uses[index].up_s))
                    saved[index] = [self.lanes.put(lane, lane_s) for lane, lane_s in seconds]
            yield from self._wait(saved.pop(position), READ)
            left[use.unit] -= 1
            backward_s = use.backward_s + (0.0 if left[use.unit] else row.work.take_s)
            yield from self._wait([self.lanes.put(COMPUTE, _FIRST_GRAD * backward_s)], COMPUTE)
            if not left[use.unit]:  # the gradients of all its uses come together
                yield from self._have_room_for_grads(row)
            for _ in range(_ARRIVALS):
                yield from self._wait([self.lanes.put(COMPUTE, (1 - _FIRST_GRAD) / _ARRIVALS * backward_s)], COMPUTE)
                if self.scheduler.waits_for_memory and self._some_update_is_done():
                    yield from self._poll()
            if not left[use.unit]:
                yield from self._have_grads(row, last=last)
            yield from self._leave(use.unit)
        yield from self._do(actions.PassEnds(learn=True))

    def _finish_step(self) -> Process:
        self.worker.queue.prefer(begun=False)
        if not self._work.runs_in_backward:
            yield from self._wait([task for row in self._rows for task in row.coming], DOWN)
            yield from self._update_all()
        if self._work.waits_for_updates:
            for row in list(self._due):
                row.uses += 1
                yield from self._do(actions.ParametersNeeded(row))
                row.uses -= 1
            while self._submitted:
                yield from self._finish_one()
            yield from self._wait([task for row in self._rows for task in row.sending], UP)
            yield from self._poll()

    @staticmethod
    def _wait(tasks: Sequence[Task], cause: str) -> Process:
        yield Until(lambda: all(task.done for task in tasks), cause)

    def _enter(self, unit: int) -> Process:
        row = self._rows[unit]
        row.uses += 1
        yield from self._poll()
        yield from self._do(actions.UseBegins(row))
        if row.work.gather_s:
            yield from self._gather(row)

    def _leave(self, unit: int) -> Process:
        self._rows[unit].uses -= 1
        yield from self._poll()

    def _gather(self, row: _Unit) -> Process:
        """Gather the unit, and start to gather the next one."""
        gathered, row.gathered = row.gathered or self.lanes.put(EXCHANGE, row.work.gather_s), None
        yield from self._wait([gathered], EXCHANGE)
        for unit in self.scheduler.cycle.upcoming:
            following = self._rows[unit]
            if following is not row and following.gathered is None and following.work.gather_s:
                yield from self._do(actions.ParametersNeeded(following))
                following.gathered = self.lanes.put(EXCHANGE, following.work.gather_s)

    def _poll(self) -> Process:
        self._note_done()
        if self._some_rest:
            self._some_rest = False
            yield from self._do(actions.GradientsRest())
        if self.scheduler.waits_for_memory:
            yield from self._do(actions.MemoryFreed())

    # Actions #

    def _do(self, event: actions.Event) -> Generator[Until, None, bool]:
        """Perform the scheduler's actions for an event. Return whether there were any."""
        action = None
        for action in self.scheduler.on(event):
            yield from self.perform(action)
        return action is not None

    def perform(self, action: actions.Action) -> Process:
        if isinstance(action, actions.AwaitAnyUpdate):
            yield from self._finish_one()
            return
        row = cast(_Unit, action.unit)
        match action:
            case actions.Fetch(urgent=urgent):
                self._fetch(row, urgent=urgent)
            case actions.AwaitFetch():
                yield from self._await_fetch(row)
            case actions.Evict():
                yield from self._evict(row)
            case actions.AwaitNewest():
                yield from self._await_newest(row)
            case actions.Submit(needed=needed):
                assert row.due is not None
                self._open_grads(row)
                tiles, row.due, row.begun = row.due, None, None
                self._due.pop(row, None)
                self._submit_tiles(row, tiles, needed)
            case actions.SubmitAhead(needed=needed):
                row.ahead = self._keep_old(row, needed) or None
                if row.ahead is not None:
                    self._submit_tiles(row, deque(enumerate(map(aside, row.work.tiles[: row.ahead]))), needed)
            case actions.AwaitUpdate():
                yield from self._await_update(row)
            case actions.Spill():
                row.gradients = State.LEAVING
                row.spilling = self.lanes.put(WRITE, row.work.spill_s)
            case actions.AwaitSpill():
                assert row.spilling is not None
                yield from self._wait([row.spilling], WRITE)
                self._free_slot(row)
            case _:
                raise TypeError(f"nothing simulates {action}")

    # Parameters #

    def _fetch(self, row: _Unit, *, urgent: bool) -> None:
        self._budget.take(row.nbytes, f"unit {row.name}")
        row.residency = Residency.FETCHING
        row.unsent_s = row.work.up_s
        row.reading = self.lanes.put(READ, row.work.read_s, lambda: self._send(row), urgent=urgent)

    def _await_fetch(self, row: _Unit) -> Process:
        reading = row.reading
        if reading is not None:
            self.lanes.hurry(READ, reading)
            yield from self._wait([reading], READ)
            row.reading = None
        row.residency = Residency.RESIDENT

    def _await_newest(self, row: _Unit) -> Process:
        ticket = row.ticket
        if ticket is not None and not ticket.computed:
            self.worker.queue.hurry(ticket)
            yield Until(lambda: ticket.computed, OPTIMIZER)
        yield from self._await_fetch(row)
        self._send(row)
        yield from self._await_sent(row)

    def _evict(self, row: _Unit) -> Process:
        yield from self._await_sent(row)
        row.residency = Residency.STORED
        row.reading = row.unsent_s = None
        self._budget.give(row.nbytes)

    def _await_sent(self, row: _Unit) -> Process:
        sending, row.sending = row.sending, []
        yield from self._wait(sending, UP)

    def _send(self, row: _Unit) -> None:
        """Upload parameters that are read and have no pending update."""
        at_rest = row.due is None and (row.ticket is None or row.ticket.computed)
        if at_rest and row.unsent_s is not None and (row.reading is None or row.reading.done):
            row.sending = [self.lanes.put(UP, row.unsent_s)]
            row.unsent_s = None
            if not row.nbytes:
                row.sending.append(self.lanes.put(EXCHANGE, row.work.regather_s))

    # Gradients #

    def _have_room_for_grads(self, row: _Unit) -> Process:
        while row.ticket is not None or not row.gradients_have_room:  # the last step's update may still use them
            if not (yield from self._do(actions.GradientsNeedRoom(row))):
                break  # the engine finds a way that takes no longer
        self._open_grads(row)

    def _open_grads(self, row: _Unit) -> None:
        """Allocate memory for the unit's gradients."""
        if row.gradients is State.ABSENT:
            if row.spills:
                self._take_slot(row)
            else:
                self._gradients.lease(row.work)
        row.gradients, row.spilling = State.WRITING, None

    def _take_slot(self, row: _Unit) -> None:
        memory = self._gradients
        written = row.written()
        if len(memory.in_slots) >= memory.slots and written is not None:
            self._free_slot(written)
        memory.in_slots[row.index] = None
        if row.has_spilled:
            row.coming = [self.lanes.put(READ, row.work.spill_s, urgent=True)]

    def _free_slot(self, row: _Unit) -> None:
        """Free the slot of a unit whose gradients are written to the drive."""
        del self._gradients.in_slots[row.index]
        row.gradients, row.spilling, row.has_spilled = State.ABSENT, None, True

    def _have_grads(self, row: _Unit, *, last: bool) -> Process:
        """Handle the unit's gradients of this pass once all have come."""
        work = row.work
        if not work.tiles:
            return
        if work.reduce_s:
            row.coming.append(self.lanes.put(EXCHANGE, work.reduce_s))
        if work.down_s:
            row.coming.append(self.lanes.put(DOWN, work.down_s))
        if last and self._work.runs_in_backward:
            self._update_order.append(row.index)
            yield from self._update(row, deque(enumerate(work.tiles)))
        elif last and self._may_run_ahead(work):
            yield from self._do(actions.UpdateForeseen(row))
            if row.ahead is not None:
                self._update_order.append(row.index)
        if row.gradients is State.WRITING:
            row.gradients = State.VALID
        if row.spills:
            yield from self._do(actions.GradientsRest())

    def _grads_used(self, row: _Unit) -> None:
        if row.gradients is not State.ABSENT:
            if row.spills:
                del self._gradients.in_slots[row.index]
            else:
                self._gradients.give_back(row.work)
        row.gradients, row.spilling, row.has_spilled = State.ABSENT, None, False

    # Updates #

    def _update(self, row: _Unit, tiles: deque[tuple[int, TileWork]]) -> Process:
        row.due = tiles
        self._due[row] = None
        if row.residency is not Residency.STORED:
            yield from self._do(actions.UpdateDue(row))

    def _submit_tiles(self, row: _Unit, tiles: deque[tuple[int, TileWork]], needed: int) -> None:
        ready, row.coming = row.coming, []
        if row.reading is not None:
            ready.append(row.reading)
        row.residency = Residency.RESIDENT
        row.gradients = State.VALID
        row.ticket = Ticket(row.index, tiles, ready, needed)
        self._submitted[row] = None
        self.worker.queue.submit(row.ticket)

    def _may_run_ahead(self, work: UnitWork) -> bool:
        """Whether the undo log is large enough for the unit, or not needed for it."""
        return self._work.speculates and (work.unlogged > 0 or work.undo_bytes <= self._work.undo_bytes)

    def _keep_old(self, row: _Unit, needed: int) -> int:
        """Take room in the undo log, as the engine does (`InFlight.can_speculate`). Return how many of the unit's tiles
        can be updated speculatively."""
        nbytes = row.work.undo_bytes
        tickets = {each: each.ticket for each in self._submitted if each.kept_bytes and each.ticket is not None}
        later = [(ticket.needed, each) for each, ticket in tickets.items() if not ticket.chosen]
        later = sorted((pair for pair in later if pair[0] > needed), key=itemgetter(0))
        if nbytes > self._undo_free_bytes + sum(each.kept_bytes for _, each in later):
            return row.work.unlogged
        while nbytes > self._undo_free_bytes:
            self._withdraw(later.pop()[1])
        row.kept_bytes = nbytes
        self._undo_free_bytes -= nbytes
        return len(row.work.tiles)

    def _withdraw(self, row: _Unit) -> None:
        """Cancel a speculative update that the worker has not begun."""
        ticket = row.ticket
        assert ticket is not None
        self.worker.queue.remove(ticket)
        row.coming = ticket.ready
        self._forget_old(row)
        row.ahead = row.ticket = None
        del self._submitted[row]

    def _forget_old(self, row: _Unit) -> None:
        self._undo_free_bytes += row.kept_bytes
        row.kept_bytes = 0

    def _note_done(self) -> None:
        for row in [row for row in self._submitted if row.ticket and row.ticket.done]:
            self._note(row)

    def _note(self, row: _Unit) -> None:
        """Free the resources of a finished update."""
        row.ticket = None
        del self._submitted[row]
        if row.ahead is not None or row.begun is not None:  # the norm is unknown, or the other tiles are due
            if row.work.recovers:
                self._grads_used(row)
            else:
                self._some_rest = True
            return
        self._grads_used(row)
        if row.work.publish_s or row.work.regather_s:
            row.unsent_s = row.work.publish_s
        self._send(row)

    def _await_update(self, row: _Unit) -> Process:
        ticket = row.ticket
        assert ticket is not None
        yield Until(lambda: ticket.done, OPTIMIZER)
        self._note(row)

    def _finish_one(self) -> Process:
        """Wait for one update, the first to end."""
        yield Until(self._some_update_is_done, OPTIMIZER)
        self._note_done()

    def _some_update_is_done(self) -> bool:
        return any(row.ticket and row.ticket.done for row in self._submitted)

    def _update_all(self) -> Process:
        """Commit speculative updates, now that the norm is known, and update all other tiles in the order of the next
        forward pass."""
        rows = sorted(
            (row for row in self._rows if row.work.tiles), key=lambda row: self.scheduler.cycle.first_use(row.index)
        )
        self.worker.queue.expect([row.index for row in rows if row.ahead is None])
        for row in rows:
            done, row.ahead = row.ahead, None
            left = deque(list(enumerate(row.work.tiles))[done:])
            self._forget_old(row)
            if left:
                row.begun = done
                yield from self._update(row, left)
            elif row.ticket is None:
                self._grads_used(row)
            else:  # tiles that it has not reached are updated in place
                row.ticket.tiles = deque((index, row.work.tiles[index]) for index, _ in row.ticket.tiles)
