"""The engine of one rank around the scheduler: passes, steps and user calls, as in step.py and updates.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from infinity.errors import CapacityError, StorageError
from infinity.schedule import actions
from infinity.schedule.unit_state import Residency
from infinity.simulation.clock import Interrupted
from infinity.simulation.filling import check_filled, filling_of
from infinity.simulation.invariants import (
    check_at_rest,
    check_closed,
    check_committed,
    check_newest,
    check_world,
    violate,
)
from infinity.simulation.layer_major import LayerMajorPass
from infinity.simulation.model import Call, Change, Config, Drain, Look, Pass, Step, ZeroGrad
from infinity.simulation.performer import Performer, Trace
from infinity.simulation.rows import NOTHING, Due, Row
from infinity.zero.foresight import Foresight
from infinity.zero.gathering import Gathering
from infinity.zero.reduction_order import ReductionOrder
from infinity.zero.unit import Shared

Agree = Callable[[object], None]


class UserError(Exception):
    """Raised by the user's code in the middle of a pass."""


class Rank(Performer):
    """One process of the training.

    Args:
        agree: called with facts that must be equal on all ranks.

    Attributes:
        step: number of the present step.
        failed: whether the engine is poisoned by an error.
    """

    def __init__(
        self, config: Config, index: int, seed: int, versions: list[int], agree: Agree, trace: Trace | None = None
    ) -> None:
        super().__init__(config, config.ranks[index], seed, versions, trace)
        self.index = index
        self.step = 0
        self.failed = False
        self._agree = agree
        self._schedule = config.schedule
        self._is_shared = len(config.ranks) > 1 and config.gathers
        self._whole: dict[int, int] = {}  # the version of each unit when it was gathered
        self._gathering = self._gathers(len(config.ranks) if config.gathers else 1)
        self._foresight = Foresight()
        self._added: dict[int, int] = {}  # for each unit, the uses that have added to its gradients in this step
        self._update_order: list[int] = []
        self._asked: dict[Row, None] = {}  # units in the order in which their updates were requested
        self._under_way = False  # updates of this step were requested
        self._pass_failed = False
        self._last = self._speculates = False  # whether the running pass is the step's last, and is speculative
        self._open = ""  # "forward" or "backward" while a pass runs
        self._updates = False  # inside `_finish_step`, while it requests updates
        self._somewhere: set[int] = set()  # units that any rank uses in the running pass
        self._complete_units: set[int] = set()  # units whose gradients of the running pass are complete
        # If no parameters are evicted, ranks may use different units: the gradients of all are reduced in one order.
        trained = [row.index for row in reversed(self.rows) if row.spec.grads]
        reduces = self._is_shared and not any(row.offloaded for row in self.rows)
        self.reduction = ReductionOrder(trained) if reduces else None
        self.reduced: set[int] | None = None  # units with gradients on some rank, in the pass that has just ended
        self._filling = filling_of(config, self.device, self.states.store, self._least, self.drain, self.move_states)
        self._uncommitted = False
        self._noted = list(versions)  # versions at the end of the last step
        for row in self.rows:
            if row.spec.made:
                self._make(row)

    def _make(self, row: Row) -> None:
        row.home = [NOTHING] * row.spec.tiles
        while not self.budget.fits(row.nbytes):
            self.do(actions.RoomNeeded(row))
        self.budget.take(row.nbytes, row.name)
        row.residency = Residency.RESIDENT
        self.do(actions.ParametersMade(row))

    def _gathers(self, ranks: int) -> Any:
        """Return the engine's `Gathering` for this rank, whose rows have the attributes of units that it reads."""
        for row in self.rows:
            moving_bytes = row.nbytes if row.offloaded else 0
            spec: Any = SimpleNamespace(name=row.name, nbytes=row.nbytes, moving_bytes=moving_bytes, pieces=())
            copy = SimpleNamespace(pin=partial(self._pin, row), unpin=partial(self._unpin, row))
            row.params = SimpleNamespace(spec=spec, compute_copy=copy, tensor=row)
            row.shared = Shared(spec) if ranks > 1 else None
        others = SimpleNamespace(all_gather=self._all_gather)
        counters = SimpleNamespace(stalled=nullcontext)
        made: Any = Gathering
        return made(self.rows, others, self.cycle.capacity_bytes, counters, self.cycle.ahead_bytes)

    def _all_gather(self, row: Row, _pieces: object, _name: str) -> Sequence[Any]:
        check_newest(row)
        self._agree(("gather", row.index, row.wanted))
        self._whole[row.index] = row.wanted
        return ()

    def _least(self, value: int) -> int:
        self._agree(("least", value))
        return value

    @staticmethod
    def _pin(row: Row) -> None:
        row.pins += 1

    @staticmethod
    def _unpin(row: Row) -> None:
        row.pins -= 1

    def changed(self, row: Row) -> None:
        self._gathering.changed(row)

    # Calls #

    def call(self, call: Call, *, last: bool) -> None:
        """Perform a call of the training loop; `last` if it is the last pass of its step.

        Raises:
            StorageError, CapacityError: the engine has failed.
        """
        try:
            match call:
                case Pass() if self._under_way:
                    pass  # after the last pass of a step, the engine refuses another one
                case Pass(evaluates=True):
                    self._evaluate(call)
                case Pass():
                    self._train(call, last=last)
                case Step(norm, raises):
                    self._finish_step(norm, raises=raises)
                case Look(units, whole):
                    self._look(units, whole=whole)
                case Change(unit):
                    self._change(unit)
                case ZeroGrad():
                    self._zero_grad()
                case Drain():
                    self.drain()
        except UserError:
            self._stopped()
        except torch.OutOfMemoryError:
            self._out_of_memory()
        except Interrupted:
            self.failed = len(self.config.ranks) > 1  # the other ranks would wait for this one
            self._stopped()
        except (StorageError, CapacityError):
            self.failed = True
            raise
        check_world(self)
        check_committed(self)

    def _out_of_memory(self) -> None:
        assert self._filling is not None
        came = len(self._filling.came)
        if not came:
            violate("refusal", "a batch does not fit on the device, although no states have moved to it")
        self.failed = len(self.config.ranks) > 1  # the other ranks would wait for this one
        self._stopped()
        if not self.failed:
            self._filling.out_of_memory(at_rest=not self._added)
            if not self._added and len(self._filling.came) == came:
                violate("progress", "no states leave the device, although it has no memory for a batch")

    def _stopped(self) -> None:
        """Abort the pass after an exception of the user's code. The engine must have failed, or be unchanged."""
        self.failed |= self.critical.interrupted or self._updates
        backward = self._open == "backward"
        while self._open and not self.failed:
            try:
                self._abort(backward=self._open == "backward")
            except Interrupted:  # the next call aborts the pass again
                self.failed |= self.critical.interrupted or len(self.config.ranks) > 1
        left = [row.name for row in self.rows if row.pins != int(row.ticket is not None)]
        if left and not self.failed:
            violate("error", f"{left} are pinned after an exception that the engine survives")
        if backward and self._added and not self.failed:
            violate("error", f"a failed backward pass has left gradients of units {list(self._added)}")

    # Passes #

    def _begin_cycle(self) -> None:
        self.activations.forget()
        self._agree("pass begins")
        self.do(actions.CycleBegins())
        self._gathering.begin_cycle()
        self.poll()

    def _end_cycle(self, *, learn: bool) -> None:
        if self.reduction is None:
            self._agree("pass ends")
        self._gathering.end_cycle()
        for row in self.rows:
            row.pins, row.computing = int(row.ticket is not None), False
        self.do(actions.CycleEnds(learn))

    def _evaluate(self, call: Pass) -> None:
        self._open = "forward"
        self._begin_cycle()
        self._forward(call)
        self._gather_owed(None)
        self._end_cycle(learn=False)
        self._open = ""

    def _forward(self, call: Pass) -> None:
        for position in self._mine(call):
            self.forward_use(call, position)

    def _mine(self, call: Pass) -> list[int]:
        return call.of(-1 if self.reduction is None else self.index)

    def forward_use(self, call: Pass, position: int, micro_batch: int = 0) -> None:
        self._user_code(call, position, backward=False)
        self._compute(call, position, micro_batch, saves=not (call.evaluates or call.segment))

    def _compute(self, call: Pass, position: int, micro_batch: int, *, saves: bool) -> None:
        units = call.uses[position]
        self._enter(units)
        if self._open == "forward":
            self.goes_forward(position)
        if call.inside and self._open == "forward":
            self._may_raise(call, position, backward=False)
        if saves:
            sizes = [size for unit in units for size in self.rows[unit].spec.saves]
            self.activations.save((micro_batch, position), sizes)
        self._leave(units)

    def goes_forward(self, position: int) -> None:
        """Called when a module computes in the forward pass."""

    def goes_backward(self, position: int, *, begun: bool) -> None:
        """Called when a module computes in the backward pass.

        Args:
            begun: False before the first gradients of the module, True for the computation after them.
        """

    def _compute_again(self, call: Pass, position: int, micro_batch: int) -> None:
        """Run forward again for activation checkpoints, before the backward of a module."""
        computing = [row for row in self.rows if row.computing] if call.segment else []
        for again in call.again(position):
            if again in self._mine(call):
                self._compute(call, again, micro_batch, saves=True)
        for row in computing:
            row.computing = True

    def _train(self, call: Pass, *, last: bool) -> None:
        if self._filling is not None:
            at_rest = len(self.config.ranks) == 1 and not self._added
            self._filling.before_forward(call.elements, at_rest=at_rest)
        self._open = "forward"
        self._begin_cycle()
        self._last = last
        self._complete_units.clear()
        if call.micro_batches:
            LayerMajorPass(self, call).run()
        else:
            self._forward(call)
            self.activations.begin_uses()
            self.open_backward()
            if self._filling is not None:
                self.device.compute(call)
            mine = self._mine(call)
            left = Counter(unit for position in mine for unit in call.uses[position])
            if self.reduction is not None:
                self.reduction.begin(set(left))
                self._somewhere = {unit for rank in range(len(self.config.ranks)) for unit in _units(call, rank)}
            for position in reversed(mine):
                self.backward_use(call, position, left)
        self.activations.check_over()
        self._end_cycle(learn=True)
        if self.reduction is not None and not call.micro_batches:
            self._reduce(self.reduction.rest())
            self.reduced = self._somewhere
        if last and self._schedule == "backward":
            self._update_others()
        self._open = ""

    def open_backward(self) -> None:
        self._open = "backward"
        if self._pass_failed:
            self._drop()
        self._pass_failed = False
        self._gather_owed(None)
        self.roll_back_all()
        if self._last:
            self._before_updates()
        self.worker.queue.prefer(begun=True)
        self._speculates = self._last and self._schedule == "speculative" and self._foresight.speculates
        if self._speculates:
            self._begin_speculation()
        if self._speculates or (self._last and self._schedule == "backward"):
            self.worker.expect(list(dict.fromkeys(self._update_order)))
            self._update_order = []

    def backward_use(self, call: Pass, position: int, left: Counter[int] | None = None, micro_batch: int = 0) -> None:
        """Backward of a module.

        Args:
            left: uses of each unit that backward has not left; None if other micro-batches have not left the units.
        """
        units = call.uses[position]
        self._user_code(call, position, backward=True)
        if not call.nested:
            self._compute_again(call, position, micro_batch)
        self._enter(units)
        if call.nested:
            self._compute_again(call, position, micro_batch)
        self.activations.use((micro_batch, position))
        self.goes_backward(position, begun=False)
        if call.inside:
            self._may_raise(call, position, backward=True)
        for unit in units:
            spec = self.rows[unit].spec
            if unit in self._complete_units:
                violate("once", f"backward uses {self.rows[unit].name} after its gradients were complete")
            if left is not None:
                left[unit] -= 1
            if spec.grads and not self._reduces(call) and (spec.parts or (left is not None and not left[unit])):
                self._add(self.rows[unit])
        self.goes_backward(position, begun=True)
        for unit in units:
            if not self._gathering.is_whole(self.rows[unit]):
                violate("pinned", f"{self.rows[unit].name} was resharded while a module computed on it")
            self.rows[unit].computing = False
            if self.rows[unit].spec.grads and left is not None and not left[unit]:
                self._left(call, self.rows[unit])
        self._leave(units)

    def _reduces(self, call: Pass) -> bool:
        return self.reduction is not None and not call.micro_batches

    def _left(self, call: Pass, row: Row) -> None:
        if self.reduction is not None and self._reduces(call):
            self._reduce(self.reduction.leave(row.index))
        else:
            self._complete(row)

    def _reduce(self, units: Iterable[int]) -> None:
        """Reduce the gradients of these units over all ranks, including ranks that have not used them."""
        for unit in units:
            self._agree(("reduce", unit))
            if unit in self._somewhere:
                self._add(self.rows[unit])
                self._complete(self.rows[unit])

    def learn(self, order: Iterable[int] | None) -> None:
        """End a pass after ranks have exchanged its order. If the order did not suit all ranks, follow `order`."""
        if self.reduction is not None and self.reduced is not None:
            if order is not None:
                self.reduction.learn(order)
            self.reduction.note_used(self.reduced)
            self._gathering.set_order(self.reduction.order[::-1])
        self.reduced = None

    def complete(self, units: Sequence[int]) -> None:
        """Complete the gradients of units that all micro-batches have left."""
        for row in [self.rows[unit] for unit in units if self.rows[unit].spec.grads]:
            if not row.spec.parts:
                self._add(row)
            self._complete(row)

    def _update_others(self) -> None:
        """Update the units that the last pass of the step has not used."""
        for unit in sorted(self._added):
            self._update(self.rows[unit])
            self.poll()

    def _user_code(self, call: Pass, position: int, *, backward: bool) -> None:
        """Run the user's code between two modules: it may read a unit, or raise."""
        for at, unit in call.looks:
            if at == position and not backward:
                self._look((unit,), whole=False)
        if not call.inside:
            self._may_raise(call, position, backward=backward)

    @staticmethod
    def _may_raise(call: Pass, position: int, *, backward: bool) -> None:
        if call.stop == (2 * len(call.uses) - 1 - position if backward else position):
            raise UserError

    def _abort(self, *, backward: bool) -> None:
        """Abort a pass. A forward pass leaves no trace, a backward pass drops the step's gradients."""
        before = [row.wanted for row in self.rows]
        self._end_cycle(learn=False)
        if backward:
            self._pass_failed = True
            if self._under_way:
                self.failed = True
                return
            self._drop()
        self._open = ""
        left = [row.name for row in self.rows if backward and row.speculative is not None]
        if left or before != [row.wanted for row in self.rows]:
            violate("error", f"an aborted pass has left speculative updates of {left}, or new versions")

    def _enter(self, units: tuple[int, ...]) -> None:
        """Prepare the units for a module that computes on them next."""
        rows = [self.rows[unit] for unit in units]
        self.roll_back(*rows)
        self._gathering.drop_unexpected(rows)
        for row in rows:
            self._pin(row)
        for row in rows:
            self.poll()
            if self.reduction is None:
                self._agree(row.index)
            self.do(actions.UseBegins(row))
            self._gather_owed(row)
            self._gathering.enter(row)
            self._gather_upcoming()
        for row in rows:
            check_newest(row)
            whole = self._whole.get(row.index)
            if self._is_shared and whole != row.wanted:
                violate("newest", f"{row.name} was gathered at {whole}, and the newest is {row.wanted}")
            row.computing = True
        self._commit_if_computed()

    def _gather_owed(self, row: Row | None) -> None:
        """Gather the units that all ranks gather before this one; with None, before another collective."""
        for other in self._gathering.preceding(row):
            self.do(actions.ParametersNeeded(other))
            self._gathering.gather(other)

    def _gather_upcoming(self) -> None:
        while (row := self._gathering.next_to_gather([self.rows[unit] for unit in self.cycle.upcoming])) is not None:
            self.roll_back(row)
            self._pin(row)
            self.do(actions.ParametersNeeded(row))
            self._gathering.gather_early(row)

    def _leave(self, units: tuple[int, ...]) -> None:
        for row in [self.rows[unit] for unit in units]:
            if row.computing:
                check_newest(row)
                row.computing = False
                if not self._gathering.is_whole(row):
                    violate("pinned", f"{row.name} was resharded while a module computed on it")
            row.pins -= 1
            self._gathering.leave(row, self.cycle.expected)
        self.poll()

    # Gradients #

    def _add(self, row: Row) -> None:
        """Add gradients of the backward pass to the unit's. Waits for room."""
        if self.scheduler.waits_for_memory and self.worker.ended:
            self.poll()
        added = self._added.setdefault(row.index, 0)
        while not self.grads.try_add(row, self.step, added):
            if not self._make_room(row):
                raise CapacityError(f"no memory is left for the gradients of {row.name}")
        self._added[row.index] = added + 1

    def _make_room(self, row: Row) -> bool:
        if self.free_gradients(row):
            return True
        if any(each.due is not None or each.ticket is not None for each in self.rows):
            self.drain()
            return True
        return False

    def _complete(self, row: Row) -> None:
        """Update the unit, if it is time, because its gradients of this pass are complete."""
        self._complete_units.add(row.index)
        if self._last and self._schedule == "backward":
            self._update_order.append(row.index)
            self._update(row)
            self.poll()
        elif self._last and self._schedule == "speculative":
            self._foresee(row)
            if self._speculates and self.speculate(row, self._due(row, clips=False)):
                self._update_order.append(row.index)
                self._foresight.speculated()
        self.grads.pause(row)
        if row.spills:
            self.do(actions.GradientsPause())

    def _foresee(self, row: Row) -> None:
        """Let all ranks gather the unit again, even those on which it has no speculative update."""
        self._gathering.changed(row)

    def _drop(self) -> None:
        """Drop the gradients of the step."""
        if self.roll_back_all(grads=False):
            self._foresight.rolled_back()
        for row in [self.rows[unit] for unit in self._added]:
            # Gradients in use are those of the last step: an interrupt has ended a wait for their update.
            if not row.gradients_are_used:
                self.grads.drop(row)
        self._added = {}

    def _zero_grad(self) -> None:
        if not self._under_way:
            self._pass_failed = True  # an interrupt inside `_drop` may leave a part of the gradients
            self._drop()
            self._pass_failed = False

    # Updates #

    def _due(self, row: Row, *, clips: bool) -> Due:
        return Due(row.wanted + 1, row.updates + 1, (self.step, self._added[row.index]), clips)

    def _update(self, row: Row, *, clips: bool = False) -> None:
        """Request the update of the unit, or commit its speculative update."""
        self._under_way = True
        due = self._due(row, clips=clips)
        if row.speculative is not None:
            self.commit_speculative(row, due)
        else:
            row.due = due
            self._gathering.changed(row)
        row.wanted += 1
        row.updates += 1
        del self._added[row.index]
        self._asked.pop(row, None)
        self._asked[row] = None
        if row.residency is not Residency.STORED or row.spec.has_device_shard:
            self.do(actions.UpdateDue(row))

    def _finish_step(self, norm: str, *, raises: bool) -> None:
        if self._pass_failed:
            self._zero_grad()
            return
        self._before_updates()
        self._updates = True
        self.worker.queue.prefer(begun=False)
        if self._schedule == "backward":
            self._update_others()
        else:
            self.poll()
            norm = norm if self._added else "quiet"  # without gradients the norm is 0
            if norm == "overflow":
                self._foresight.after_step(quiet=False)
                self._drop()
            else:
                self._foresight.after_step(quiet=norm == "quiet")
                self._update_all(clips=norm == "clipped")
        if self._schedule == "barrier":
            self.drain()
        if self._filling is not None:
            self._filling.after_step()
            check_filled(self._filling, self.device)
        if raises:
            raise UserError
        self._under_way = self._updates = False
        self.step += 1
        self._agree([row.wanted for row in self.rows])
        self._uncommitted = self.config.keeps
        self._noted = [row.wanted for row in self.rows]
        self._commit_if_computed()

    def _update_all(self, *, clips: bool) -> None:
        """Commit speculative updates or, if the norm clips, roll them back; then update the other units."""
        rows = sorted([self.rows[unit] for unit in sorted(self._added)], key=self.cycle.first_use)
        others = [row for row in rows if row.speculative is None or clips]
        self.roll_back(*others)
        if self._schedule != "barrier":
            self.worker.expect([row.index for row in others])
        for row in rows:
            self._update(row, clips=clips)

    def roll_back_all(self, *, grads: bool = True) -> bool:
        """Roll back all speculative updates. Return whether there were any."""
        rows = list(self.undecided)
        self.roll_back(*rows, grads=grads)
        return bool(rows)

    def _submit_due(self) -> None:
        for row in [row for row in self._asked if row.due is not None]:
            with self._pinned(row):
                self.do(actions.ParametersNeeded(row))

    def drain(self) -> None:
        """Submit all updates, and wait for them."""
        self.roll_back_all()
        self._submit_due()
        while self.finish_one():
            pass
        self.poll()
        check_at_rest(self)

    # Committed steps #

    def _begin_speculation(self) -> None:
        self._write_changed()
        if not self.config.keeps:
            self._protect()

    def _protect(self) -> None:
        """Require that the present versions on the drives stay there until the next call."""
        for row in self.rows:
            row.protected = list(row.home)
        self.states.protect()

    def _before_updates(self) -> None:
        """Commit the last step before updates begin, because they overwrite its values."""
        if not self.config.keeps:
            return
        if self._uncommitted:
            self._submit_due()
            for row in self.rows:
                if row.ticket is not None:
                    self.wait_computed(row.ticket)
            self._commit()
        self._write_changed()
        if self.committed is None:
            self._commit()

    def _commit_if_computed(self) -> None:
        if self._uncommitted and all(row.due is None and _is_computed(row) for row in self.rows):
            self._commit()

    def _commit(self) -> None:
        """Commit the last step, after waiting for its writes. It stays on the drives until the next commit."""
        for row in self.rows:
            for write in row.ticket.writes if row.ticket is not None else ():
                self.clock.wait(write)
                write.check()
            noted = self._noted[row.index]
            if row.is_written_home and not all(noted <= version <= row.wanted for version in row.home):
                violate("crash", f"{row.name} is committed at {noted}, and the drive has {row.home}")
        self._uncommitted = False
        self.committed = self.step
        self._protect()

    def _write_changed(self) -> None:
        for row in self.rows:
            at_rest = row.ticket is None and row.due is None and row.residency is Residency.RESIDENT
            if row.is_written_home and at_rest and row.is_dirty and self.scheduler.writes_updates(row):
                with self._resident(row):
                    self.write_home(row)

    # Users #

    @contextmanager
    def _pinned(self, row: Row) -> Iterator[None]:
        self._pin(row)
        try:
            yield
        finally:
            self._unpin(row)

    @contextmanager
    def _resident(self, row: Row, *, whole: bool = False) -> Iterator[Row]:
        """Keep the unit's newest parameters in memory in this context; if `whole`, all ranks gather them."""
        self.roll_back(row)
        if whole:
            self._gathering.drop_early()
        with self._pinned(row), ExitStack() as end:
            self.do(actions.ParametersNeeded(row))
            if whole:
                end.callback(self._gathering.reshard, row)
                self._gathering.gather(row)
            check_newest(row)
            yield row

    def _look(self, units: tuple[int, ...], *, whole: bool) -> None:
        """Read the newest parameters of these units at once, as a user does."""
        if self._under_way:
            return
        try:
            with ExitStack() as looks:
                for row in [looks.enter_context(self._resident(self.rows[unit], whole=whole)) for unit in units]:
                    check_newest(row)
        except CapacityError:
            self._check_refusal(units)

    def _check_refusal(self, units: tuple[int, ...]) -> None:
        used = sum(row.nbytes for row in self.rows if row.offloaded and (row.pins or row.index in units))
        if used <= self.budget.capacity_bytes:
            violate("refusal", f"{units} are refused, and {used} of {self.budget.capacity_bytes} bytes are in use")
        check_world(self)

    def _change(self, unit: int) -> None:
        """Write a unit's parameters between two steps, as a user does."""
        if self._under_way or self._added:
            return
        with self._resident(self.rows[unit]) as row:
            if row.ticket is not None:
                self.finish(row.ticket)
            row.wanted += 1
            row.put([row.wanted] * row.spec.tiles)
            self._gathering.changed(row)

    # The end #

    def close(self) -> None:
        """Release everything, even after a failure."""
        if not self.failed:
            self._drop()
            self.drain()
        self.activations.close()
        while self.clock.is_busy:
            self.clock.wait_for_next()
        self.states.close(failed=self.failed)
        self._gathering.end_cycle()
        for row in self.rows:
            if row.ticket is None and not self.failed:
                violate("pinned", f"{row.name} is in use after the end") if row.pins else None
            self._give_up(row)
        if not self.failed:
            check_closed(self)

    def _give_up(self, row: Row) -> None:
        if row.offloaded and row.residency is not Residency.STORED:
            self.budget.give(row.nbytes)
        if row.residency is Residency.FETCHING:
            self.staging.close(row)
        row.residency = Residency.STORED


def _units(call: Pass, rank: int) -> set[int]:
    return {unit for position in call.of(rank) for unit in call.uses[position]}


def _is_computed(row: Row) -> bool:
    return row.ticket is None or (row.ticket.computed and row.ticket.error is None)
