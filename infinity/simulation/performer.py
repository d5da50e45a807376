"""Performs the scheduler's actions on versions and operations, as executor.py and in_flight.py do on tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

from infinity.errors import CapacityError
from infinity.memory import Budget
from infinity.memory.critical_section import CriticalSection
from infinity.optim.pipeline import UpdatePipeline
from infinity.schedule import Cycle, actions, raise_memory
from infinity.schedule.scheduler import Scheduler
from infinity.schedule.unit_state import Residency
from infinity.simulation.activations import Activations
from infinity.simulation.clock import Clock
from infinity.simulation.filling import DeviceMemory
from infinity.simulation.gradients import GradMemory
from infinity.simulation.invariants import check_polled, check_world, most_actions, ready_updates, violate
from infinity.simulation.model import Config, RankSpec
from infinity.simulation.rows import NOTHING, Due, Row, SpeculativeUpdate
from infinity.simulation.staging import Staging
from infinity.simulation.states import States
from infinity.simulation.worker import Ticket, Worker
from infinity.zero.executor import Executor

_STORED, _FETCHING, _RESIDENT = Residency.STORED, Residency.FETCHING, Residency.RESIDENT
Trace = Callable[[str], None]


class _Ledger(Budget):
    """A budget that limits how often an event may check whether there is room, to find endless loops."""

    def __init__(self, capacity_bytes: int, most: int) -> None:
        super().__init__("memory for parameters", capacity_bytes)
        self.questions = 0
        self._most = most

    def fits(self, nbytes: int) -> bool:
        self.questions += 1
        if self.questions > self._most:
            violate("bounded", f"one event has checked {self.questions} times whether there is room")
        return super().fits(nbytes)


class Performer:
    """The memory, drives and optimizer of one rank.

    Attributes:
        events: number of events that were passed to the scheduler.
        committed: the step that survives a crash; None before the first commit.
        changed_memory: whether memory has changed since all rows were last checked together.
        expected: the update that may be speculative, while the scheduler decides about it.
        undecided: units with speculative updates.
        critical: the engine's critical section, which must not be cut short by an interrupt.
        checks: whether to check the promises about all rows at each event.
        gradients_may_spill: whether a speculative update has released gradients, which may now spill.
    """

    checks = True

    def __init__(self, config: Config, spec: RankSpec, seed: int, versions: list[int], trace: Trace | None) -> None:
        self.config = config
        self.trace = trace
        self.events = 0
        self.committed: int | None = None
        self.gradients_may_spill = False
        self.changed_memory = True
        self.expected: Due | None = None
        self.undecided: dict[Row, None] = {}
        self.critical = CriticalSection()
        self.clock = self._make_clock(seed, spec, trace)
        speculative = config.schedule == "speculative"
        self.device = DeviceMemory(self.clock, config)
        self.states = States(
            self.clock,
            config.units,
            config.ring,
            self.device,
            double_buffered=speculative or config.keeps,
            written_through=config.keeps,
        )
        self.worker = self._make_worker()
        self.grads = GradMemory(self.clock, config.units, config.slots, config.shared_bytes, self.critical)
        self.rows = [Row(index, each, self.grads, versions[index]) for index, each in enumerate(config.units)]
        self.images = config.images
        self.staging = Staging(self.clock, config.staging_bytes)
        self.activations = Activations(self.clock, config.saved, on_drive=config.saved_on_drive)
        self._most_actions = most_actions(len(self.rows))
        self.budget = _Ledger(spec.capacity, 2 * self._most_actions)
        capacity = min(rank.capacity for rank in config.ranks)
        self.cycle = Cycle([row.nbytes for row in self.rows], capacity, config.ahead_bytes)
        self.scheduler = Scheduler(
            self.rows,
            self.cycle,
            self.budget,
            partial(raise_memory, "tiering.host_memory"),
            config.slots,
            self.grads.store.leased,
            writes_all=config.keeps or config.writes_all,
            writes_unreconstructable=config.keeps or speculative,
        )

    def _make_clock(self, seed: int, spec: RankSpec, trace: Trace | None) -> Clock:
        return Clock(Random(seed), spec.tempo, trace)

    def _make_worker(self) -> Worker:
        return Worker(self.clock, self.states)

    def do(self, event: actions.Event) -> bool:
        """Perform the scheduler's actions for an event. Return whether there were any."""
        self.events += 1
        if self.trace is not None:
            self.trace(f"  {event}")
        self.clock.tick()
        self.budget.questions = self.grads.questions = 0
        count = 0
        for action in self.scheduler.on(event):
            count += 1
            if count > self._most_actions:
                violate("bounded", f"{event} has caused {count} actions")
            if self.trace is not None:
                self.trace(f"   -> {action}")
            self.perform(action)
        if self.changed_memory and self.checks:
            self.changed_memory = False
            check_world(self)
        return count > 0

    def perform(self, action: actions.Action) -> None:
        if not isinstance(action, actions.AwaitAnyUpdate):
            _PERFORMERS[type(action)](self, action.unit, action)
        elif not self.finish_one():
            violate("legal", "there is no update to wait for")

    # Parameters #

    def _fetch(self, row: Row, _: actions.Fetch) -> None:
        if row.residency is not _STORED:
            violate("legal", f"{row.name} is fetched, and is {row.residency.name}")
        if not self.budget.fits(row.nbytes):
            violate("ledger", f"{row.name} is fetched, and memory is full")
        if not self.staging.open(row):
            return  # the staging memory is full
        self.changed_memory = True
        self.budget.take(row.nbytes, row.name)
        row.residency = _FETCHING
        row.fetch = row.read_home(self.clock)

    def await_fetch(self, row: Row) -> None:
        if row.residency is _STORED:
            violate("legal", f"the fetch of {row.name} is awaited, but was not started")
        if row.residency is _FETCHING:
            assert row.fetch is not None
            self.clock.wait(row.fetch)
            if row.fetch.failed:
                self.changed_memory = True
                row.residency = _STORED
                self.budget.give(row.nbytes)
            else:
                row.residency = _RESIDENT
                self.upload(row)
            self.staging.close(row)
            row.fetch.check()

    def _evict(self, row: Row) -> None:
        if row.residency is not _RESIDENT or not row.offloaded:
            violate("legal", f"{row.name} is evicted, and is {row.residency.name}")
        if row.pins:
            violate("pinned", f"{row.name} is evicted while it is in use")
        if row.is_dirty:
            self.write_home(row)
        if row.readers or row.updating_tile is not None or (row.fetch is not None and not row.fetch.done):
            violate("race", f"{row.name} is evicted while an operation uses it")
        if row.home != row.mem and not row.stale:
            violate("lost", f"{row.name} is evicted at {row.mem}, and the drive has {row.home}")
        self.changed_memory = True
        row.residency, row.fetch, row.stale = _STORED, None, False
        row.mem = [NOTHING] * row.spec.tiles
        self.budget.give(row.nbytes)

    def write_home(self, row: Row) -> None:
        """Write the changed tiles home, and wait."""
        self._open_host(row)
        try:
            self._await_write(row)
            if row.fetch is not None:
                self.clock.wait(row.fetch)
                row.fetch.check()
            if row.home_writers:
                violate("race", f"the home of {row.name} is written twice at once")
            changed = {tile: version for tile, version in enumerate(row.mem) if row.home[tile] != version}
            row.writing = row.write_home(self.clock, changed)
            self._await_write(row)
        finally:
            self.staging.close(row)

    def _await_write(self, row: Row) -> None:
        """Wait for the last `write_home`, whose own wait an interrupt may have ended."""
        if row.writing is not None:
            self.clock.wait(row.writing)
            write, row.writing = row.writing, None
            write.check()

    def _open_host(self, row: Row) -> None:
        """Lease staging memory for the unit. If there is none, wait for updates and fetches that hold it."""
        while not self.staging.open(row):
            if self.finish_one():
                continue
            fetched = next((each for each in self.rows if each.residency is _FETCHING and each is not row), None)
            if fetched is None:
                violate("refusal", f"no staging memory is left for {row.name}")
            self.await_fetch(fetched)

    def upload(self, row: Row) -> None:
        """Start to upload the unit's values to the device."""
        self.staging.upload(row)

    def _await_newest(self, row: Row) -> None:
        if row.ticket is not None:
            self.wait_computed(row.ticket)
        self.await_fetch(row)

    # Updates #

    def _submit(self, row: Row, action: actions.Submit) -> None:
        due, begun = row.due, row.begun
        if due is None or row.ticket is not None or row.residency is _STORED:
            violate("legal", f"an update of {row.name} is submitted that is not due, or cannot be")
        tiles = [tile for tile in range(row.spec.tiles) if begun is None or tile not in begun]
        # The home of a dirty unit is stale, and this update may overwrite only a part of it.
        write = action.write and (row.residency is _FETCHING or row.home == row.mem)
        with self.critical:
            row.due = row.begun = None
            self.worker.submit(self._submit_tiles(row, due, tiles, action.next_use, write=write))

    def _submit_tiles(self, row: Row, due: Due, tiles: list[int], next_use: int, *, write: bool) -> Ticket:
        self.changed_memory = True
        self._open_host(row)
        ready = self.grads.take_for_update(row)
        if row.residency is _FETCHING:
            assert row.fetch is not None
            ready.append(row.fetch)
        row.pins += 1
        if not self.staging.is_needed(row):  # else the fetch ends with an upload of the updated values
            row.residency = _RESIDENT
        row.is_reconstructable = row.spec.old_params == "states"
        states = self.states.store.units[row.index].tiles
        ticket = Ticket(row, due, deque(states[tile] for tile in tiles), ready, next_use, write and row.is_written_home)
        row.ticket = ticket
        return ticket

    def _update_on_device(self, row: Row) -> None:
        due = row.due
        if due is None or (row.residency is _STORED and not row.spec.has_device_shard):
            violate("legal", f"{row.name} is updated on the device, but is not in its memory")
        if row.residency is not _STORED:
            self.await_fetch(row)  # on a real device, its queue waits
        if row.spec.has_device_shard:
            row.mem = list(row.home)
        if row.mem != [due.target - 1] * row.spec.tiles or self.grads.value(row) != due.grad:
            violate("once", f"{row.name} is at {row.mem} with gradients {self.grads.value(row)}, and {due} is due")
        row.mem = [due.target] * row.spec.tiles
        row.home = list(row.mem) if row.spec.has_device_shard else row.home
        self.states.update_on_device(row.index, due.states)
        row.due = None
        self.grads.drop(row)

    def move_states(self, unit: int, *, to_device: bool) -> None:
        """Move the states of a unit with the engine's own code."""
        parts: Any = SimpleNamespace(_park=self.worker.park, _states=self.states.store, _ring=self.states.ring)
        pipeline = SimpleNamespace(move_states=partial(UpdatePipeline.move_states, parts))
        executor: Any = SimpleNamespace(_params=SimpleNamespace(critical=self.critical), _pipeline=pipeline)
        Executor.move_states(executor, unit, to_device=to_device)
        self.rows[unit].on_device = self.states.store.units[unit].are_on_device

    def wait_computed(self, ticket: Ticket) -> None:
        """Give an update the highest priority, and wait until it is computed."""
        if not ticket.computed:
            self.worker.queue.hurry(ticket)
        self.clock.wait_until(lambda: ticket.computed, "optimizer")
        if ticket.error is not None:
            raise ticket.error
        if ticket.row.residency is _RESIDENT:
            self.upload(ticket.row)

    def _await_update(self, row: Row) -> None:
        ticket = row.ticket or violate("legal", f"an update of {row.name} is awaited, but none was submitted")
        self.finish(ticket)

    def finish(self, ticket: Ticket) -> None:
        """Wait until an update has ended: it is computed and written."""
        self.wait_computed(ticket)
        self.clock.wait_until(lambda: ticket.done, "optimizer")
        self._note(ticket)

    def finish_one(self) -> bool:
        """Wait for the update that is computed first. Return False if there is none."""
        if not any(row.ticket is not None for row in self.rows):
            return False
        self.clock.wait_until(lambda: bool(self.worker.ended), "optimizer")
        self.finish(self.worker.ended[0])
        return True

    def poll(self) -> None:
        """Finish updates that have ended, and let the scheduler use the memory that they released."""
        self.clock.tick()
        if self.worker.ended:
            for ticket in [each for each in self.worker.ended if each.done]:
                self._note(ticket)
        self.spill_early()
        ready = ready_updates(self) if self.checks else []
        if self.scheduler.waits_for_memory:
            self.do(actions.MemoryFreed())
        if ready:
            check_polled(ready)

    def _note(self, ticket: Ticket) -> None:
        with self.critical:
            self._take_note(ticket)

    def _take_note(self, ticket: Ticket) -> None:
        row = ticket.row
        assert row.ticket is ticket
        self.changed_memory = True
        row.ticket = None
        self.worker.ended.remove(ticket)
        for each in ticket.ready:
            self.clock.wait(each)
        if not ticket.keeps:
            self.grads.store.drop_after_update(self.grads.of(row))
        elif ticket.drops_grads:
            self.grads.store.drop_reconstructable(self.grads.of(row))
        else:
            self.grads.store.keep_after_update(self.grads.of(row))
            self.gradients_may_spill = True
        row.pins -= 1
        if row.residency is _RESIDENT and ticket.error is None:
            self.upload(row)
        self.staging.close(row)
        if ticket.error is not None:
            raise ticket.error
        for write in ticket.writes:
            write.check()

    # Speculative updates #

    def _submit_speculative(self, row: Row, action: actions.SubmitSpeculative) -> None:
        expected = self.expected
        if row.is_updating or row.residency is not _RESIDENT or expected is None:
            violate("legal", f"a speculative update of {row.name} is submitted, but the unit is not idle")
        kind = self._old_params(row, write=action.write)
        if not kind or (kind == "images" and not self._has_images(row, action.next_use)):
            return
        tiles = [tile for tile in range(row.spec.reversible) if self.states.can_roll_back(row.index, tile)]
        if not tiles:
            return
        with self.critical:
            self._submit_reversible(row, expected, tiles, kind, action.next_use)

    def _submit_reversible(self, row: Row, expected: Due, tiles: list[int], kind: str, next_use: int) -> None:
        whole = len(tiles) == row.spec.tiles and self.states.keeps_all(row.index)
        ticket = self._submit_tiles(row, expected, tiles, next_use, write=kind == "slots")
        ticket.keeps = ticket.logs = True
        ticket.drops_grads = kind != "images" and row.spec.reconstructs and row.spills and whole
        ticket.images = self._images(row, tiles) if kind == "images" else 0
        self.images -= ticket.images
        row.speculative = SpeculativeUpdate(expected, frozenset(tiles), ticket, kind)
        self.undecided[row] = None
        self.worker.submit(ticket)

    def _images(self, row: Row, tiles: Sequence[int]) -> int:
        """Return the part of the undo log that a speculative update takes."""
        return len(tiles)

    def _old_params(self, row: Row, *, write: bool) -> str:
        """Return where a speculative update keeps the old parameters. If it is written anyway, slots are preferred."""
        kind = row.spec.old_params
        if kind == "states" and not self.states.keeps_all(row.index):
            return ""
        if kind == "slots" or (kind == "states" and write and row.spec.is_double_buffered):
            has_both = row.home == row.mem == row.protected
            return "slots" if has_both else kind.replace("slots", "")
        return kind

    def _has_images(self, row: Row, next_use: int) -> bool:
        """Whether the undo log has room. Withdraws speculative updates of units that are needed later, if necessary."""
        undecided = [each.speculative for each in self.undecided if each.speculative is not None]
        later = [each.ticket for each in undecided if each.ticket.images and each.ticket.next_use > next_use]
        later = [each for each in later if each.row.ticket is each and not each.chosen]
        if row.spec.reversible > self.images + sum(each.images for each in later):
            return False
        later.sort(key=lambda each: each.next_use)
        while row.spec.reversible > self.images and later:
            ticket = later.pop()
            if self.worker.withdraw(ticket):  # fails if the worker has chosen it since `later` was computed
                self._decide(ticket.row)
                self._note(ticket)
        return row.spec.reversible <= self.images

    def _decide(self, row: Row) -> SpeculativeUpdate:
        update = row.speculative
        assert update is not None
        row.speculative = None
        del self.undecided[row]
        self.images += update.ticket.images
        update.ticket.logs = False
        self.states.forget(row.index)
        return update

    def speculate(self, row: Row, due: Due) -> bool:
        """Submit a speculative update of the tiles that can be rolled back. Return False if there are none."""
        self.expected = due
        self.do(actions.UpdateExpected(row))
        self.expected = None
        return row.speculative is not None

    def commit_speculative(self, row: Row, due: Due) -> None:
        """Commit the speculative update of the unit. The update of its other tiles is due now."""
        update = self._decide(row)
        if update.due != due:
            violate("once", f"{row.name} had a speculative update {update.due}, and {due} is due")
        if len(update.tiles) < row.spec.tiles:
            row.begun = update.tiles
            row.due = update.due
        elif row.ticket is not None:
            row.ticket.keeps = False
        else:
            self.grads.drop(row)

    def roll_back(self, *rows: Row, grads: bool = True) -> None:
        """Roll back the speculative updates of these units."""
        undecided = [row for row in rows if row.speculative is not None]
        if not undecided:
            return
        for row in undecided:
            if row.residency is _FETCHING:
                self.do(actions.OldParametersNeeded(row))
        away = [row for row in undecided if row.residency is _STORED and self._needs_memory(row)]
        with self.critical:
            self._undo([row for row in undecided if row not in away], grads=grads)
            self.spill_early()
            for row in away:  # one by one: there may not be room for all of them
                self.do(actions.OldParametersNeeded(row))
                self._undo([row], grads=grads)
            self.spill_early()
            for row in undecided:
                self.changed(row)
                if row.stale:
                    self.do(actions.ParametersStale(row))
                row.stale = False

    def changed(self, row: Row) -> None:
        """Called when the unit's values have changed or will change."""

    @staticmethod
    def _needs_memory(row: Row) -> bool:
        return row.speculative is not None and row.speculative.old_params == "states" and not row.spec.host

    def _undo(self, rows: list[Row], *, grads: bool) -> None:
        tickets = [row.ticket for row in rows if row.ticket is not None]
        for ticket in tickets:
            ticket.drops_grads = False
        self.worker.stop(tickets)
        for ticket in tickets:
            self.finish(ticket)
        for row in rows:
            update = row.speculative
            assert update is not None
            done = [tile for tile in sorted(update.tiles) if tile not in {each.index for each in update.ticket.tiles}]
            if update.old_params == "states" or (self.grads.of(row).needs_reconstruction and grads):
                self.worker.between_tiles(partial(self.states.reconstruct, row.index, done, update.due.states))
            self._reconstruct_grads(row, grads=grads)
            self.worker.between_tiles(partial(self.states.roll_back, row.index, sorted(update.tiles)))
            self._decide(row)
            before = [row.wanted] * row.spec.tiles
            if update.old_params != "slots":
                if row.residency is not _RESIDENT and not row.spec.host:
                    violate("lost", f"{row.name} is rolled back in memory, but is {row.residency.name}")
                row.put(before)
            else:
                for tile, version in enumerate(row.home):
                    if version != row.wanted:
                        row.home[tile], row.kept[tile] = row.kept[tile], version
                if row.home != before:
                    violate("lost", f"{row.name} is rolled back to {row.wanted}, and the drive has {row.home}")
                row.stale = True

    def _reconstruct_grads(self, row: Row, *, grads: bool) -> None:
        if not self.grads.of(row).needs_reconstruction:
            return
        if not grads:
            self.grads.drop(row)
            return
        assert row.speculative is not None
        while not self.grads.restore(row, row.speculative.due.grad):
            if not self.free_gradients(row):
                raise CapacityError(f"no memory is left for the gradients of {row.name}, whose update is rolled back")
        self.gradients_may_spill = True

    # Gradients #

    def free_gradients(self, row: Row) -> bool:
        """Free memory for the unit's gradients. Return False if none can be freed."""
        return self.do(actions.GradientsNeedRoom(row))

    def spill_early(self) -> None:
        """Let gradients spill that speculative updates have released."""
        if self.gradients_may_spill:
            self.gradients_may_spill = False
            self.do(actions.GradientsPause())


_PERFORMERS: dict[type[actions.Action], Callable[[Performer, Any, Any], object]] = {
    actions.Fetch: lambda self, row, action: self._fetch(row, action),
    actions.AwaitFetch: lambda self, row, _: self.await_fetch(row),
    actions.Evict: lambda self, row, _: self._evict(row),
    actions.Submit: Performer._submit,
    actions.SubmitSpeculative: lambda self, row, action: self._submit_speculative(row, action),
    actions.UpdateOnDevice: lambda self, row, _: self._update_on_device(row),
    actions.AwaitUpdate: lambda self, row, _: self._await_update(row),
    actions.AwaitNewest: lambda self, row, _: self._await_newest(row),
    actions.AwaitGradients: lambda self, row, _: self.grads.store.finish_moves(self.grads.of(row)),
    actions.Spill: lambda self, row, _: self.grads.spill(row),
    actions.AwaitSpill: lambda self, row, _: self.grads.await_spill(row),
}
