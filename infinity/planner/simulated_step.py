"""Simulate a step unit by unit and tile by tile, as the engine would run it on a given machine.

[Note: what is simulated]
The rank of infinity/simulation trains: it performs the actions of the engine's own scheduler, and its worker takes
updates in the order of the engine's own queue. Its clock consists of lanes, in which reads, writes, copies,
collectives, updates and computation take the time that the machine needs for them. So the cost of a small budget (a
unit whose update must wait for the one in use, a drive that idles while the optimizer has all tiles in flight) results
from the simulation itself. Small costs are left out: Python, launches, latencies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from infinity.io import Priority
from infinity.planner.lanes import Cost, Lanes, Speeds
from infinity.planner.step_work import StepWork, TileWork, UnitWork, aside
from infinity.schedule import actions
from infinity.schedule.unit_state import Residency
from infinity.simulation.clock import Clock, Operation, Transfer
from infinity.simulation.model import Config, Pass, RankSpec, UnitSpec
from infinity.simulation.rank import Rank
from infinity.simulation.rows import Due, Row
from infinity.simulation.worker import Ticket, Worker
from infinity.tiers.copies import Memory, State
from infinity.tiers.states import Tile

COMPUTE, OPTIMIZER, READ, WRITE = "compute", "optimizer", "read", "write"
UP, DOWN, EXCHANGE = "up", "down", "collectives"
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
_FIRST_GRAD = 0.15  # share of a block's backward before the first gradient is ready
_ARRIVALS = 6  # steps in which the gradients arrive during the remaining backward of a block


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
    return TimedRank(work, Lanes(PARTS, speeds)).train()


# What is simulated #


def _spec(work: UnitWork) -> UnitSpec:
    """Return a unit of the simulation. Here `reversible` counts bytes of the undo log, not tiles."""
    return UnitSpec(
        work.nbytes,
        tiles=max(1, len(work.tiles)),
        offloaded=work.nbytes > 0,
        grads="" if not work.tiles else "slot" if work.spill_s else "own" if work.own_grads else "shared",
        grad_bytes=work.grad_bytes,
        is_double_buffered=any(tile.params_s for tile in work.tiles),
        reversible=work.undo_bytes,
        reconstructs=work.reconstructs,
        host=not work.read_s,
        on_drive=frozenset(index for index, tile in enumerate(work.tiles) if tile.is_stored),
    )


def _config(work: StepWork) -> Config:
    own_bytes = sum(unit.grad_bytes for unit in work.units if unit.tiles and unit.own_grads)
    return Config(
        tuple(map(_spec, work.units)),
        (RankSpec(work.params_bytes),),
        "backward" if work.runs_in_backward else "speculative" if work.speculates else "deferred",
        slots=work.spill_slots,
        shared_bytes=max(0, work.grads_bytes - own_bytes),
        writes_all=work.writes_all,
        images=work.undo_bytes,
        ring=work.slots,
    )


class _Worker(Worker):
    """A worker that never blocks the simulation: the compute thread continues while the worker waits for a drive.

    Attributes:
        upload: called with each unit whose update is computed.
    """

    lanes: Lanes
    upload: Callable[[Row], None]

    def _can_read_ahead(self) -> bool:
        ring = self.states.ring
        ring.reap()
        unread = next((tile for tile in self._reading._upcoming() if not ring.has(tile)), None) if ring._free else None
        return unread is not None and unread.home_copy.state is not State.ARRIVING

    def _read_ahead(self) -> None:
        self.states.ring.read_ahead(self._reading._upcoming(), wait=False)

    def _arriving(self, tile: Tile) -> Operation | None:
        """Return the operation that the tile waits for, and start its read as soon as possible."""
        ring, arriving = self.states.ring, self.states.arriving
        if tile.home is Memory.NVME and not ring.has(tile):
            ring.reap()
            if ring._leaving and (not ring._free or tile.home_copy.state is State.ARRIVING):
                return cast(Transfer, ring._leaving[0].home_copy.moves[0].transfer).operation
            if not ring._free and (last := arriving(next(reversed(ring._arriving)))) is not None:
                return last  # when this read has ended, its slot is freed for the tile
            ring._make_room()
            ring._read(tile, Priority.DEMAND)
        read = arriving(tile)
        if read is not None:
            self.lanes.hurry(read)
        return read

    def _updated(self, ticket: Ticket, update: Operation) -> None:
        super()._updated(ticket, update)
        for write in ticket.writes[-2:]:  # the writes of the tile's states and parameters
            if write.then is None:
                write.then = self._wake

    def _end(self, ticket: Ticket) -> None:
        super()._end(ticket)
        self.upload(ticket.row)


class TimedRank(Rank):
    """One process of the training, whose operations take the time of `work`."""

    checks = False

    def __init__(self, work: StepWork, lanes: Lanes) -> None:
        self.lanes = lanes
        self._work = work
        self._stored = [tile for unit in work.units for tile in unit.tiles if tile.is_stored]
        self._first = {use.unit: position for position, use in reversed(list(enumerate(work.uses)))}
        lanes.cost = self._cost
        super().__init__(_config(work), 0, 0, [0] * len(work.units), agree=lambda _: None)
        self._saved: dict[int, list[Operation]] = {}  # transfers of activations back to the device, by position
        self._coming: defaultdict[Row, list[Operation]] = defaultdict(list)  # transfers of gradients to the host
        self._unsent_s: dict[Row, float] = {}  # uploads that start once the parameters are in memory and updated
        self._sending: dict[Row, list[Operation]] = {}  # uploads of parameters in flight
        self._expect()
        # measurements
        self._phase = ""
        self._phases_s: defaultdict[str, float] = defaultdict(float)
        self._phase_begun_s = 0.0
        self._most_leased_bytes = 0

    def _expect(self) -> None:
        """Set up the plan and memory of a training in steady state."""
        uses, plan = [use.unit for use in self._work.uses], self._work.plan
        self.cycle.expect([*uses, *uses[::-1]], plan)
        for row in [row for row in self.rows if row.offloaded and row.index in plan.resident]:
            self.budget.take(row.nbytes, row.name)
            row.residency = Residency.RESIDENT
            self.do(actions.ParametersMade(row))

    def _make_clock(self, *_: object) -> Clock:
        return self.lanes

    def _make_worker(self) -> Worker:
        worker = _Worker(self.lanes, self.states)
        worker.lanes, worker.upload = self.lanes, self.upload
        return worker

    def _cost(self, kind: str, unit: int, tiles: Sequence[int]) -> Cost:
        """Return the work of an operation. Of optimizer states, `unit` is the number of an extent."""
        if kind in ("states read", "states write"):
            tile = self._stored[unit // 2 if self._schedule == "speculative" else unit]
            return Cost(READ, tile.read_s) if kind == "states read" else Cost(WRITE, tile.write_s)
        work = self._work.units[unit]
        match kind:
            case "update":
                return Cost(OPTIMIZER, self._updated_tile(unit, tiles[0]).update_s)
            case "fetch":
                return Cost(READ, work.read_s)
            case "write":
                return Cost(WRITE, sum(work.tiles[tile].params_s for tile in tiles))
            case "spill":
                return Cost(WRITE, work.spill_s)
            case "unspill":
                return Cost(READ, work.spill_s, urgent=True)
        return Cost("", 0.0)

    def _updated_tile(self, unit: int, tile: int) -> TileWork:
        work, ticket = self._work.units[unit].tiles[tile], self.rows[unit].ticket
        return aside(work) if ticket is not None and ticket.logs else work

    # Steps #

    def train(self) -> SimulatedStep:
        """Run steps like a training loop. Return the mean of the measured ones."""
        work, lanes = self._work, self.lanes
        call = Pass(tuple((use.unit,) for use in work.uses))
        for step in range(_WARM_UP + _MEASURED):
            if step == _WARM_UP:
                self._begin_phase("")
                self._phases_s.clear()
                begun_s, waited_s, busy_s = lanes.now_s, dict(lanes.waited_s), dict(lanes.busy_s)
            for index in range(work.passes):
                self._begin_phase("forward")
                self._train(call, last=index == work.passes - 1)
            self._begin_phase("update")
            self._finish_step("quiet", raises=False)
        self._begin_phase("")
        waits_s = defaultdict[str, float](float)
        for lane, seconds in _mean(lanes.waited_s, waited_s).items():
            waits_s[PARTS[lane]] += seconds
        waits_s.pop(PARTS[COMPUTE], None)  # time of computation, not of a wait
        return SimulatedStep(
            (lanes.now_s - begun_s) / _MEASURED,
            _mean(self._phases_s, {}),
            dict(waits_s),
            _mean(lanes.busy_s, busy_s),
            self._most_leased_bytes,
        )

    def _begin_phase(self, name: str) -> None:
        now_s = self.lanes.now_s
        if self._phase:
            self._phases_s[self._phase] += now_s - self._phase_begun_s
        self._phase, self._phase_begun_s = name, now_s

    def open_backward(self) -> None:
        self._begin_phase("backward")
        super().open_backward()

    def _finish_step(self, norm: str, *, raises: bool) -> None:
        self.worker.queue.prefer(begun=False)
        if not self._work.runs_in_backward:  # the norm needs all gradients
            self._wait((task for tasks in self._coming.values() for task in tasks), DOWN)
        super()._finish_step(norm, raises=raises)
        if self._work.waits_for_updates:
            self.drain()

    def drain(self) -> None:
        super().drain()
        self._wait((task for tasks in self._sending.values() for task in tasks), UP)
        self.poll()

    def _wait(self, tasks: Iterable[Operation], cause: str) -> None:
        left = list(tasks)
        self.lanes.wait_until(lambda: all(task.done for task in left), cause)

    # Uses #

    def _compute_for(self, seconds: float) -> None:
        self._wait([self.lanes.put(COMPUTE, seconds)], COMPUTE)

    def goes_forward(self, position: int) -> None:
        use = self._work.uses[position]
        self._compute_for(use.forward_s)
        self.lanes.put(DOWN, use.down_s)
        self.lanes.put(WRITE, use.write_s)

    def goes_backward(self, position: int, *, begun: bool) -> None:
        use = self._work.uses[position]
        takes = position == self._first[use.unit]  # the gradients of all its uses come together
        backward_s = use.backward_s + (self._work.units[use.unit].take_s if takes else 0.0)
        if not begun:
            self._bring_saved(position)
            self._compute_for(_FIRST_GRAD * backward_s)
            return
        for _ in range(_ARRIVALS):
            self._compute_for((1 - _FIRST_GRAD) / _ARRIVALS * backward_s)
            if self.scheduler.waits_for_memory and self.worker.ended:
                self.poll()

    def _bring_saved(self, position: int) -> None:
        """Wait for the activations of a use. Those of the use before it are also on their way."""
        for at in range(position, max(-1, position - 2), -1):
            if at not in self._saved:
                use = self._work.uses[at]
                self._saved[at] = [self.lanes.put(READ, use.read_s), self.lanes.put(UP, use.up_s)]
        self._wait(self._saved.pop(position), READ)

    def _gathers(self, _: int) -> Any:
        return super()._gathers(2 if any(unit.gather_s for unit in self._work.units) else 1)

    def _all_gather(self, row: Row, _pieces: object, _name: str) -> Sequence[Any]:
        task = self.lanes.put(EXCHANGE, self._work.units[row.index].gather_s)
        return [SimpleNamespace(wait=partial(self.lanes.wait, task))]

    # Parameters #

    def _fetch(self, row: Row, action: actions.Fetch) -> None:
        super()._fetch(row, action)
        assert row.fetch is not None
        self._unsent_s[row] = self._work.units[row.index].up_s
        if row.fetch.done:
            self.upload(row)
            return
        row.fetch.then = partial(self.upload, row)
        if action.urgent:
            self.lanes.hurry(row.fetch)

    def await_fetch(self, row: Row) -> None:
        if row.fetch is not None and not row.fetch.done:
            self.lanes.hurry(row.fetch)
        super().await_fetch(row)

    def _await_newest(self, row: Row) -> None:
        super()._await_newest(row)
        self.upload(row)
        self._await_sent(row)

    def _evict(self, row: Row) -> None:
        self._await_sent(row)
        self._unsent_s.pop(row, None)
        super()._evict(row)

    def _await_sent(self, row: Row) -> None:
        self._wait(self._sending.pop(row, []), UP)

    def upload(self, row: Row) -> None:
        """Upload parameters that are read and have no pending update."""
        at_rest = row.due is None and (row.ticket is None or row.ticket.computed)
        if at_rest and row in self._unsent_s and (row.fetch is None or row.fetch.done):
            self._sending[row] = [self.lanes.put(UP, self._unsent_s.pop(row))]
            if not row.nbytes:
                self._sending[row].append(self.lanes.put(EXCHANGE, self._work.units[row.index].regather_s))

    def _publish(self, row: Row) -> None:
        """Prepare the upload of new values of parameters that stay on the device."""
        work = self._work.units[row.index]
        if work.publish_s or work.regather_s:
            self._unsent_s[row] = work.publish_s

    # Gradients and updates #

    def _add(self, row: Row) -> None:
        super()._add(row)
        self._most_leased_bytes = max(self._most_leased_bytes, self.grads.store._leased_bytes)

    def _complete(self, row: Row) -> None:
        work = self._work.units[row.index]
        self._coming[row] += [self.lanes.put(EXCHANGE, work.reduce_s), self.lanes.put(DOWN, work.down_s)]
        super()._complete(row)

    def _submit_tiles(self, row: Row, due: Due, tiles: list[int], next_use: int, *, write: bool) -> Ticket:
        if self.expected is None:
            self._publish(row)
        ticket = super()._submit_tiles(row, due, tiles, next_use, write=row.spec.is_double_buffered)
        ticket.ready += self._coming.pop(row, [])
        return ticket

    def _submit_speculative(self, row: Row, action: actions.SubmitSpeculative) -> None:
        work, expected = self._work.units[row.index], self.expected
        assert expected is not None
        whole = self._has_images(row, action.next_use)
        tiles = list(range(len(work.tiles) if whole else work.unlogged))
        if tiles:
            kind = "images" if whole and work.undo_bytes else "slots"
            self._submit_reversible(row, expected, tiles, kind, action.next_use)

    def _images(self, row: Row, tiles: Sequence[int]) -> int:
        return row.spec.reversible

    def commit_speculative(self, row: Row, due: Due) -> None:
        super().commit_speculative(row, due)
        if row.due is None:
            self._publish(row)
            self.upload(row)


def _mean(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: (value - before.get(name, 0.0)) / _MEASURED for name, value in now.items()}
