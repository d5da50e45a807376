"""The operations of a training step, which change its phase.

All kinds of steps use the same operations (`begin`, `forward`, `backward`, `finish`, `abort`): ordinary micro-batches,
layer-major micro-batches, a pipeline's schedule, and a plain `loss.backward()`.

[Note: interrupts]
Ctrl-C can come between any two lines, also within `except` and `finally`, so no state may depend on reaching a line.
The running pass is stored in `_pass`. If the next operation finds a pass there, that pass was interrupted, and is then
aborted. Only speculative updates can be rolled back. So if the next operation finds phase UPDATE, or finds that only
some units of a step are updated, the engine is poisoned (FAILED): it refuses to train. All counts of a step change in
one assignment, so that an interrupt leaves either the old ones or the new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from infinity.config import Config
from infinity.errors import ConfigError, DivergedError, InfinityError, NonFiniteError, StorageError
from infinity.kernels import Rule
from infinity.optim.optimizer import TieredOptimizer
from infinity.optim.torch_schedules import advances_by_itself
from infinity.zero.build import Runtime, make_gradients, open_activations
from infinity.zero.compiled import refuse_cuda_graphs
from infinity.zero.compute_lane import ComputeLane
from infinity.zero.dispatch_modes import outside_modes
from infinity.zero.filling import filling_of
from infinity.zero.grad_placeholders import GradPlaceholders
from infinity.zero.hooks import Hooks, Listener
from infinity.zero.last_step import LastStep
from infinity.zero.layer_major import LayerMajor
from infinity.zero.losses import Losses, running_pass
from infinity.zero.outside_reads import GraphPosition
from infinity.zero.phases import FOLLOWS, Phase
from infinity.zero.reduction import Addend
from infinity.zero.step_counter import StepCounter
from infinity.zero.unit import Unit
from infinity.zero.updates import StepOutcome, Updates, UpdateSchedule

_log = logging.getLogger(__name__)


class StepKeeper(Protocol):
    """Commits every finished step on NVMe, for `tiering.crash_consistent`."""

    def before_updates(self) -> None:
        """Called before updates begin. Blocks until the last step is committed, whose values they overwrite."""

    def step_over(self) -> None:
        """Called when a step is over; its updates may still be running."""

    def commit_if_computed(self) -> None:
        """Commit the last step, if all of its updates are computed. Cheap to call often."""


@dataclass(frozen=True)
class _Pass:
    """A running pass over the model.

    Attributes:
        before: the phase before it.
        last: whether it is the last backward pass of a step.
        scope: the open contexts of a *direct* backward pass, which autograd runs without the engine's `backward`.
        number: autograd's number of a backward pass.
    """

    phase: Phase
    before: Phase
    last: bool = False
    scope: ExitStack | None = None
    number: int = -1


class Step(Listener):
    """The training step of one engine; receives the events of the hooks.

    Attributes:
        phase: the phase of the step, see [Note: phases] in phases.py.
        counter: finished steps and micro-batches, and which micro-batch ends the step.
        losses: starts backward passes with scaled losses.
        last: results and costs of the last step.
        lr_scheduler: stepped after every update that was not skipped, if there is one.
        layer_major: runs micro-batches through the blocks together, if configured.
        keeper: commits every step on NVMe, if configured.
        at_end: called at the end of each step, if set.
        all_units: all units, as one set.
        forward_end: the position in autograd's graph at which the last forward pass ended.
    """

    def __init__(self, model: nn.Module, config: Config, runtime: Runtime, optimizer: TieredOptimizer) -> None:
        self.counter = StepCounter(config.gradient_accumulation_steps, counts_boundaries=config.managed_accumulation)
        self.losses = Losses(
            config,
            runtime.ranks,
            runtime.counters,
            runtime.loss_norm,
            early=runtime.schedule is UpdateSchedule.BACKWARD,
            keeps=runtime.monitor.writes,
            keeps_cheap=config.tiering.status,
        )
        self.last = LastStep(config, runtime.counters, runtime.monitor, optimizer, self.losses)
        self.lr_scheduler: Any | None = None
        self.phase = Phase.IDLE
        self._failure = ""
        self._pass: _Pass | None = None
        self._pass_failed = False  # the last backward pass failed, and `drop` was not called since
        self._optimizer = optimizer
        self._update_rules: list[Rule] = []  # rules of each group when the step's updates began
        self.forward_end = GraphPosition.now()
        self._runtime = runtime
        self._executor, self._ranks = runtime.executor, runtime.ranks
        if config.zero.stage == 3 and self._ranks.size > 1:
            self._ranks.path.check(self._ranks)
        self.gradients = make_gradients(runtime, optimizer.rules)
        self.updates = Updates(
            runtime.partition.sharding,
            runtime.executor,
            runtime.pipeline,
            self.gradients,
            optimizer.rule,
            runtime.schedule,
            config.gradient_clipping,
            self.losses,
        )
        self._filling = filling_of(runtime, config)
        self.activations = open_activations(config, runtime, model)
        self._grad_placeholders = GradPlaceholders(model, self._executor.units)
        self._compute_lane: ComputeLane | None = None
        if runtime.counters.timeline is not None:
            self._compute_lane = ComputeLane(self, runtime.counters.timeline, runtime.link.mark)
        self.hooks = self._watch(model)
        self.layer_major: LayerMajor | None = None
        if runtime.sizing.layer_major:
            self.layer_major = LayerMajor(model, runtime.partition, runtime.link.device)
        self.keeper: StepKeeper | None = None
        self.at_end: Callable[[], None] | None = None
        self._only_evaluates = not any(unit.trainable_numel for unit in runtime.partition.units)  # all are frozen
        self.all_units = frozenset(self._executor.units)

    def _watch(self, model: nn.Module) -> Hooks:
        runtime = self._runtime
        lent, alone = runtime.executor.views.lent_params, runtime.ranks.size == 1
        listener = self._compute_lane or self
        return Hooks(model, runtime.partition, self._executor.units, listener, lent, alone=alone)

    def compile_blocks(self, model: nn.Module, **how: Any) -> None:
        """Compile the model's blocks in place, or the whole model if it has none. Raises as `compiling`."""
        blocks = [model.get_submodule(name) for name in self._runtime.partition.blocks or ("",)]
        with self.compiling(model, *blocks):
            for block in blocks:
                type(block).compile(block, **how)  # past the engine's guard of `block.compile`, which comes here

    @contextmanager
    def compiling(self, model: nn.Module, *modules: nn.Module) -> Iterator[None]:
        """Compile these modules of the model in this context, at whose end the hooks are registered again.

        Raises:
            InfinityError: a step has begun, or micro-batches are layer-major.
            ConfigError: CUDA graphs were requested, but their kernels cannot follow parameters that are evicted.
        """
        self.check_boundary("engine.compile()")
        if self.layer_major is not None:
            raise InfinityError(
                'engine.compile() is not possible with tiering.accumulation "layer": compile the blocks before '
                "initialize"
            )
        yield
        try:
            refuse_cuda_graphs(model, fixed=self._runtime.addresses_stay)
        except ConfigError:
            for module in modules:
                module._compiled_call_impl = None
            raise
        if not self.hooks.left_out_of_compile:
            try:
                self.hooks.remove()
                self.hooks = self._watch(model)
            except BaseException as error:  # an interrupt: the model has lost hooks
                self.fail(error)
                raise

    def continue_from(self, before: Step) -> None:
        """Continue with the counts and states of the closed `Step` of the same model."""
        self.counter = before.counter  # its counts include micro-batches whose gradients were dropped
        self.last.continue_from(before.last)
        self.lr_scheduler, self.at_end = before.lr_scheduler, before.at_end

    # Phases #

    def _go(self, phase: Phase) -> None:
        """Change the phase. Raise RuntimeError if `FOLLOWS` does not allow it."""
        if phase not in FOLLOWS[self.phase]:
            raise RuntimeError(f"a step that is {self.phase.value} cannot become {phase.value}")
        self.phase = phase

    def check(self) -> None:
        """Check that training can continue. Abort a pass that an interrupt has left open.

        Raises:
            InfinityError: the engine is closed, poisoned, or in the middle of a backward pass.
        """
        self._check_open()
        if self.in_backward_now:
            raise InfinityError(
                "the engine is in the middle of a backward pass: make this call before or after it. Inside the pass, "
                "read the parameters of the running module directly; they need no gathering"
            )
        if self._pass is not None:
            self.abort()
        if self.phase is Phase.UPDATE or self._runtime.poisoned:
            self.fail(InfinityError("an update was interrupted"))
        if self.phase is Phase.FAILED:
            raise InfinityError(
                f"the engine has stopped after an error ({self._failure}): close it, and resume from the last "
                "checkpoint"
            )

    def _check_open(self) -> None:
        if self.phase is Phase.CLOSED:
            raise InfinityError(
                "the engine is closed: make another one with infinity.initialize. A Trainer that has trained or "
                "evaluated has closed its engine: make a new Trainer"
            )

    @property
    def in_backward_now(self) -> bool:
        """Whether this thread is in a backward pass of the engine, for example in a custom autograd function."""
        return self._in_backward and torch._C._current_graph_task_id() != -1

    @property
    def awaits_step(self) -> bool:
        """Whether a backward pass is over, without a following micro-batch or `step()`."""
        return self.phase is Phase.BACKWARD and self._pass is None

    def fail(self, error: BaseException) -> None:
        """Poison the engine: from now on `check` raises. For errors after which states may mix two steps."""
        if self.phase not in (Phase.FAILED, Phase.CLOSED):
            self._pass = None
            # As text: the error would keep its frames, so the loss, its graph and the engine, alive.
            self._failure = f"{type(error).__name__}: {error}"
            self._go(Phase.FAILED)

    @property
    def at_rest(self) -> bool:
        """Whether all states are of one step, or will be when its submitted updates are done."""
        whole = self.phase not in (Phase.FAILED, Phase.CLOSED, Phase.UPDATE)
        return whole and not self.updates.under_way and not self._runtime.poisoned

    def check_boundary(self, what: str) -> None:
        """Check that no step has begun. A forward pass without its backward pass is dropped.

        Raises:
            InfinityError: gradients wait for their update.
        """
        self.check()
        self._check_not_gathered(what)
        if self.gradients.any_pending() or self.updates.under_way:
            raise InfinityError(
                f"{what} in the middle of a step: call it after the step() that updates the parameters, or drop the "
                "gradients first (engine.zero_grad())"
            )
        if self.phase is not Phase.IDLE:
            self._end_cycle(learn=False)
            self._go(Phase.IDLE)

    def check_values(self, what: str) -> None:
        """Check that parameters have the values of the last step.

        Raises:
            InfinityError: some of them already have the values of the next step.
        """
        self.check()
        if self.updates.under_way:
            raise InfinityError(
                f'{what} between the last backward pass of a step and step(): under tiering.update_schedule "backward" '
                "parameters are updated by then, or about to be. Call step() first"
            )

    def _check_not_gathered(self, what: str) -> None:
        if self._executor.views.lent_params:
            raise InfinityError(
                f"{what} inside GatheredParameters, which stores its changes at the end: leave it first"
            )

    @contextmanager
    def stopped_by_failures(self) -> Iterator[None]:
        """Poison the engine on storage errors, on diverged ranks, and on any error while some units of a step are
        updated."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, (StorageError, DivergedError)) or self.updates.under_way or self._runtime.poisoned:
                self.fail(error)
            raise

    def drain(self) -> None:
        """Run every pending update, and wait for it and its writes."""
        self.check()
        with self.stopped_by_failures():
            self._executor.drain()
            if self.keeper is not None:
                self.keeper.commit_if_computed()

    # Forward #

    def make_room(self, *inputs: Any) -> None:
        """Move states off the device if a training forward of these inputs would need their memory."""
        if self._filling is None:
            return
        elements = sum(leaf.numel() for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        at_rest = self.phase is Phase.IDLE and self._is_alone_without_gradients
        with self.stopped_by_failures():
            self._filling.before_forward(elements, at_rest=at_rest)

    @property
    def _is_alone_without_gradients(self) -> bool:
        """Whether there are no other ranks and no gradients of the step, so that states may move."""
        return self.gradients.alone and not self.gradients.any_pending()

    def begin(self) -> None:
        self.check()
        if self.phase is not Phase.FORWARD:
            self._begin_cycle("the last training pass" if self.counter.ends_step else "a training pass")
        self._go(Phase.FORWARD)

    @outside_modes
    def _begin_cycle(self, kind: str) -> None:
        self._executor.begin_cycle()
        self._ranks.path.begin(kind)

    @contextmanager
    def forward(self, *, training: bool) -> Iterator[None]:
        """Run the model's forward in this context, for training or evaluation."""
        self.check_values("a forward pass")
        before = self.phase
        phase = Phase.FORWARD if training else Phase.EVALUATION
        self._pass = _Pass(phase, before)
        with self.stopped_by_failures(), self.running(phase):
            try:
                if before is not Phase.FORWARD:
                    self._begin_cycle(f"a pass of {phase.value}")
                self._go(phase)
                with self.hooks.forward(training=training), self.saving():
                    yield
                self._check_open()
            except BaseException as error:
                self.abort(error)
                raise
            if not training:
                self._gather_remaining("the end of the evaluation")
                if before is not Phase.FORWARD:
                    self._ranks.path.end()
                self._back_to(before, learn=self._only_evaluates)
        self._pass = None

    def _gather_remaining(self, why: str) -> None:
        """Gather the updated units that this rank has not used, before the next collective of all ranks: `why`."""
        with self.stopped_by_failures():
            self._executor.gather_preceding()
            self._ranks.path.mark(why)

    @outside_modes
    def _back_to(self, before: Phase, *, learn: bool = False) -> None:
        if before is not Phase.FORWARD:
            self._executor.end_cycle(learn=learn)
        self._go(before)

    def saving(self) -> AbstractContextManager[None]:
        """Offload the activations that autograd saves in this context."""
        return nullcontext() if self.activations is None else self.activations.saving()

    @contextmanager
    def running(self, phase: Phase) -> Iterator[None]:
        """Record a pass over the model in the telemetry. An evaluation is not counted among the phases of a step."""
        with ExitStack() as around:
            if phase is not Phase.EVALUATION:
                around.enter_context(self._runtime.counters.phase(phase.value))
            if self._compute_lane is not None:
                around.enter_context(self._compute_lane.running(phase.value))
            yield

    # Backward #

    @contextmanager
    def backward(self, in_parts: frozenset[Unit] | None = None) -> Iterator[None]:
        """Run autograd's backward in this context.

        Args:
            in_parts: units whose gradients come in several parts. By default, the forward pass determines them.
        """
        self.check()
        with self.stopped_by_failures(), self.running(Phase.BACKWARD):
            try:
                self.open_backward(in_parts)
                yield
                self.close_backward()
            except BaseException as error:
                self.abort(error)
                raise

    def check_finite(self, loss: torch.Tensor) -> None:
        """Check that the loss is finite under the `backward` schedule, which updates before all gradients are known."""
        self._gather_remaining("the loss")
        try:
            self.losses.check(loss, self.counter.counts.global_steps, late=self.counter.single_pass)
        except NonFiniteError:
            self._pass_failed = True
            if self._pass is None and self.phase is Phase.FORWARD:
                self._end_cycle(learn=False)
                self._go(Phase.IDLE)
            raise

    @outside_modes
    def open_backward(self, in_parts: frozenset[Unit] | None = None, scope: ExitStack | None = None) -> None:
        if self.updates.under_way:
            raise InfinityError(
                'a second backward pass before step(): under tiering.update_schedule "backward" the first has updated '
                "parameters already. Call step() after each, set gradient_accumulation_steps, or set the schedule to "
                '"deferred", which adds their gradients up'
            )
        self._gather_remaining("the backward pass")
        self._optimizer.check_groups()
        self._optimizer.check_frozen()
        if self._pass_failed:
            self.gradients.drop_all()  # an interrupted `drop` may have left gradients
        self._pass_failed = False
        self.counter.backward_begins()
        if scope is None:
            self._drop_removed_gradients()
        self.updates.roll_back()
        last = self.counter.ends_step
        if self.keeper is not None and last:
            self.keeper.before_updates()
        before, self._pass = self.phase, _Pass(Phase.BACKWARD, self.phase, last, scope, running_pass())
        self._grad_placeholders.remove()
        self._go(Phase.BACKWARD)
        if in_parts is None:
            # after a forward pass without the engine, gradients of any unit may come in parts
            in_parts = self.hooks.in_parts() if before is Phase.FORWARD else self.all_units
        self._update_rules = self._optimizer.rules()
        self.updates.begin_backward(last=last, in_parts=in_parts, single_pass=self.counter.single_pass)
        # Uses are unknown if forward passes may run within backward.
        uses = None if in_parts == self.all_units else self._executor.cycle.recorded
        self.gradients.begin_backward(last=last, uses=uses)

    @outside_modes
    def close_backward(self) -> None:
        self._check_open()
        self._end_cycle(learn=True)
        self._add(self.gradients.source.rest())
        for addend in self.gradients.end_backward():
            self.updates.add(addend)
        self.updates.end_backward()
        self._runtime.params.end_pass()
        self._ranks.path.end()
        self._executor.gathering.set_order(self.gradients.source.forward_order())
        self._grad_placeholders.place()
        self.losses.scaled = False
        self._pass = None

    def _open_direct(self, arriving: nn.Parameter | None = None) -> None:
        """Open a backward pass that the user has started with `loss.backward()` or another use of the graph.

        Autograd calls `_close_direct` at the end of the pass, but not if the pass fails. The next operation then finds
        the pass in `_pass` and aborts it.

        Args:
            arriving: the parameter whose gradient is the first event of the pass.
        """
        self.check()
        self._drop_removed_gradients(arriving)
        torch.autograd.Variable._execution_engine.queue_callback(self._close_direct)
        scope = ExitStack()
        scope.enter_context(self.running(Phase.BACKWARD))
        try:
            self.open_backward(scope=scope)
        except BaseException:
            scope.close()
            raise

    def _close_direct(self) -> None:
        if self._pass is not None and self._pass.scope is not None:
            with self.stopped_by_failures(), self._pass.scope:
                self.close_backward()

    # Update #

    def finish(self) -> None:
        """Count a micro-batch. After the last one of a step, update the parameters and the learning rate."""
        self.check()  # aborts a pass that was left open
        if self._pass_failed:
            raise InfinityError(
                "step() after a backward pass that failed: the gradients of the step were dropped. Run its "
                "micro-batches again, or leave it out with engine.zero_grad()"
            )
        if not self.counter.synchronises:
            raise InfinityError("step() inside no_sync: leave the context before the last backward of the step")
        self._check_not_gathered("step()")
        self._optimizer.check_groups()
        self._drop_removed_gradients()
        if self.updates.under_way and self._update_rules != self._optimizer.rules():
            raise InfinityError(
                "the optimizer's hyper-parameters (param_groups) were changed between backward and step(), but under "
                'tiering.update_schedule "backward" the updates have used the earlier values: change them after '
                'step(), or set the schedule to "deferred"'
            )
        counted = self.counter.after_micro_batch()
        if not self.counter.ends_step:
            self.counter.counts = counted
            return
        with self._runtime.counters.phase("update"):
            if self.phase is Phase.FORWARD:  # no backward followed
                self._end_cycle(learn=False)
            if self.keeper is not None:
                with self.stopped_by_failures():
                    self.keeper.before_updates()
            self._go(Phase.UPDATE)
            self.counter.runs_in_one_call = False
            self.last.outcome = outcome = self._update()
            self._grad_placeholders.clear()
            self.counter.counts = replace(
                counted,
                global_steps=counted.global_steps + 1,
                skipped_steps=counted.skipped_steps + int(outcome.skipped),
            )
            self._go(Phase.IDLE)
        if self.keeper is not None:
            with self.stopped_by_failures():
                self.keeper.step_over()
        self.last.end_step(self.counter.counts, self._runtime.peak_bytes())
        if self.at_end is not None:
            self.at_end()

    def _update(self) -> StepOutcome:
        try:
            outcome = self.updates.finish_step()
            self._runtime.show_newest()
            if self._filling is not None:
                self._filling.after_step()
            scheduler = self.lr_scheduler
            if scheduler is not None and advances_by_itself(scheduler) and not outcome.skipped:
                scheduler.step()
        except BaseException as error:
            if isinstance(error, NonFiniteError) and not self.updates.under_way:  # no unit was updated
                self._grad_placeholders.clear()
                self._go(Phase.IDLE)
            else:
                self.fail(error)
            raise
        return outcome

    def abort(self, error: BaseException | None = None) -> None:
        """Abort the running pass.

        After a forward pass, the phase is the one before it. After a backward pass, the gradients of the step are
        dropped, and the step starts again, because the gradients of the failed pass cannot be separated from the
        gradients of earlier micro-batches.

        Raises:
            InfinityError: the pass itself has closed the engine, for example in a hook or a signal handler.
        """
        self._check_open()
        if self._pass is not None and self._pass.scope is not None:
            self._pass.scope.close()
        self._ranks.path.give_up()
        if isinstance(error, DivergedError):  # a gather may have mixed the values of several units, or never end
            self.hooks.abandon()
            self.gradients.source.clear()
            self.fail(error)
            return
        if self._pass is None or self._pass.phase is Phase.BACKWARD:  # None: `open_backward` failed
            self._pass_failed = True
            self.gradients.source.clear()
            self._runtime.params.end_pass()
            self._end_cycle(learn=False)
            if self.updates.under_way:
                self.fail(error or InfinityError("a backward pass stopped after it had updated some units"))
                return
            self.updates.roll_back(grads=False)
            self.gradients.drop_all()
            self._grad_placeholders.clear_gradients()
            self.losses.forget_sum()
            if earlier := self.counter.begin_step_again():
                _log.warning(
                    "a backward pass failed, and the gradients of the step's earlier micro-batches (%d) are dropped "
                    "with its own: the step begins again, so run all of them again",
                    earlier,
                )
            self._go(Phase.IDLE)
        else:
            self.hooks.abandon()
            self._back_to(self._pass.before)
        self.losses.forget()
        self._pass = None
        if self._filling is not None and isinstance(error, torch.OutOfMemoryError):
            self._filling.out_of_memory(at_rest=self._is_alone_without_gradients)

    def drop(self) -> None:
        """Drop the gradients of the step, as `zero_grad` does. Its micro-batches stay counted.

        Raises:
            InfinityError: the gradients have already updated parameters.
        """
        self.check()
        if self.updates.under_way:
            raise InfinityError(
                "zero_grad() between the last backward pass of a step and step(): under tiering.update_schedule "
                '"backward" its gradients have updated parameters already; set the schedule to "deferred"'
            )
        self._pass_failed = True  # until all gradients are dropped: an interrupt may leave some
        self.updates.roll_back(grads=False)
        self.gradients.drop_all()
        self._pass_failed = False
        self._grad_placeholders.clear()
        self.losses.forget_sum()
        self.counter.leave_out()
        if self.phase is Phase.BACKWARD:  # a forward pass keeps its graph: its backward may follow
            self._go(Phase.IDLE)

    def drop_failed(self) -> None:
        """Drop the gradients of a failed backward pass, because the model's `zero_grad` was called.

        In other cases the next operation notices that the placeholders are gone. A failed pass has left none.
        """
        if self._pass_failed:
            self.drop()

    def _drop_removed_gradients(self, arriving: nn.Parameter | None = None) -> None:
        """Drop gradients after `param.grad = None` or `model.zero_grad()`, see grad_placeholders.py."""
        self._grad_placeholders.check(arriving)
        gone = self._grad_placeholders.dropped()
        if not gone:
            return
        if self.updates.under_way:
            error = InfinityError(
                'gradients were zeroed before step(), but under tiering.update_schedule "backward" they have updated '
                'parameters already; set the schedule to "deferred"'
            )
            self.fail(error)
            raise error
        self.updates.roll_back()
        self.gradients.drop_params(gone)
        self._grad_placeholders.forget(gone)

    def _end_cycle(self, *, learn: bool) -> None:
        if not learn:
            self._ranks.path.give_up()
        self.hooks.abandon()
        self.hooks.end_backward()
        self._executor.end_cycle(learn=learn)

    # Events of the hooks #

    @outside_modes
    def enter(self, units: tuple[Unit, ...]) -> None:
        if self.layer_major is not None:
            self.layer_major.entered(units)
        if self._pass is None:
            self._enter_without_engine(units)
        else:
            self._executor.enter(units)
        if self.keeper is not None:
            self.keeper.commit_if_computed()

    def _enter_without_engine(self, units: tuple[Unit, ...]) -> None:
        self.check_values("a forward pass")
        if not self.hooks.in_forward:
            self._ranks.path.begin_without_engine()
            if self._only_evaluates:  # as in `generate`: each token is a cycle
                self._executor.end_cycle(learn=True)
                self._executor.begin_cycle()
        with self.stopped_by_failures():
            self._executor.enter(units)

    @outside_modes
    def backward_enter(self, units: tuple[Unit, ...]) -> None:
        if not self._in_backward and not self.hooks.in_forward:  # the model may call autograd.grad in its forward
            self._open_direct()
        self._executor.enter(units)

    @property
    def _in_backward(self) -> bool:
        return self._pass is not None and self._pass.phase is Phase.BACKWARD

    @outside_modes
    def leave(self, units: tuple[Unit, ...], *, ends_forward: bool = False) -> None:
        self._executor.leave(units)
        if ends_forward:
            self.forward_end = GraphPosition.now()
            if self._pass is None:  # the model was called without the engine
                self._ranks.path.end_without_engine()
                if not self._only_evaluates:
                    self._executor.hide_evictable()

    @outside_modes
    def backward_left(self, units: tuple[Unit, ...]) -> None:
        if self.layer_major is not None:
            return  # other micro-batches have not left these units yet
        for unit in units:
            self._add(self.gradients.source.leave(unit))

    def _add(self, addends: Iterator[Addend]) -> None:
        """Add gradients in the order of their arrival.

        With several ranks, each comes from a collective, and updates begin between the same two collectives on all.
        """
        for addend in addends:
            self.updates.add(addend)
            if self.gradients.are_complete(addend.unit):
                self._complete(addend.unit)

    def in_parts(self, unit: Unit, index: int, *, again: bool) -> None:
        self.updates.in_parts(unit, index, again=again)

    @outside_modes
    def gradient_ready(self, unit: Unit, index: int, param: nn.Parameter) -> None:
        running = self._pass
        if running is None or running.phase is not Phase.BACKWARD:
            if self.hooks.in_forward:
                raise InfinityError("backward() inside the model's forward: call it on the result of the forward")
            self._open_direct(param)
            running = self._pass
        if running is not None and running.scope is not None:
            if self.layer_major is not None:
                raise InfinityError(USE_TRAIN_BATCH)
            self.losses.scale_gradient(param.grad, running.number)
        addend = self.gradients.take(unit, index, param)
        if addend is not None:
            self.updates.add(addend)
            if self.gradients.are_complete(unit):
                self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        """Called when all gradients of the unit in this backward pass have arrived."""
        if self.layer_major is not None:
            return  # other micro-batches have not left the unit yet
        if self._pass is not None and self._pass.last:
            self.updates.gradients_final(unit)
        self.updates.pause(unit)

    # Contexts and end #

    def remove_hooks(self) -> None:
        """Remove all hooks from the model, before any training."""
        self.hooks.remove()
        if self.activations is not None:
            self.activations.close()

    def close(self) -> None:
        """Remove the hooks and free all memory."""
        if self.phase is Phase.CLOSED:
            return
        self._pass = None
        self._go(Phase.CLOSED)
        with ExitStack() as rest:  # in reverse order, each even if others fail
            rest.callback(self._runtime.close)
            if self.activations is not None:
                rest.callback(self.activations.close)
            rest.callback(self.hooks.remove)
            rest.callback(self._grad_placeholders.clear)
            if self.layer_major is not None:
                rest.callback(self.layer_major.remove)
            self._compute_lane = None  # it refers to this object


USE_TRAIN_BATCH = (
    'tiering.accumulation is "layer": the micro-batches of a step go through the model together, by '
    'engine.train_batch(micro_batches); or set it to "micro_batch"'
)
