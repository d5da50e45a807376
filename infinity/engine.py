"""The face of a training loop: the `Engine` that `initialize` returns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint import (
    Parts,
    apply_extra,
    check_extra,
    collect_extra,
    export_16bit,
    load_tensors,
    open_checkpoint,
    save_checkpoint,
)
from infinity.config import Config
from infinity.errors import InfinityError, NonFiniteError, StorageError
from infinity.optim.loss_scale import LossScale
from infinity.optim.optimizer import TieredOptimizer
from infinity.telemetry import StallCause, StepStats, now
from infinity.zero.build import Runtime, make_gradients, open_activations
from infinity.zero.compute_lane import ComputeLane
from infinity.zero.gathered import claim, disclaim, newest_values
from infinity.zero.guards import Guards
from infinity.zero.hooks import Hooks
from infinity.zero.layer_major import LayerMajor
from infinity.zero.micro_batches import LossFn, call, loss_of
from infinity.zero.updates import StepOutcome, Updates, UpdateSchedule

_log = logging.getLogger(__name__)


class Engine:
    """Trains one model whose states live in the tiers. Built by `initialize`.

    A context manager: leaving it closes the engine.

    Attributes:
        module: the model; its parameters have values only while their unit is in use (NaN otherwise).
        optimizer: holds `param_groups`.
        lr_scheduler: stepped by `step()` after every update, if there is one.
        global_steps: updates so far, skipped ones included.
        micro_steps: backward passes so far.
        skipped_steps: updates that were left out because gradients were not finite.
        device: where the model computes.
        loss_scale: of fp16 training; its `value` is 1 otherwise.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        runtime: Runtime,
        optimizer: TieredOptimizer,
        lr_scheduler: Any | None,
        device: torch.device,
    ) -> None:
        self.module = model
        self.config = config
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.device = device
        self.global_steps = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.loss_scale = LossScale.of(config.fp16)
        self._runtime = runtime
        self._counters = runtime.counters
        self._executor = runtime.executor
        self._ranks = runtime.ranks
        self._gradients = make_gradients(runtime, config, device)
        self._updates = Updates(
            runtime.partition,
            runtime.executor,
            self._gradients,
            optimizer.rule,
            runtime.schedule,
            config.gradient_clipping,
            self.loss_scale,
        )
        optimizer.run_step = self._updates.finish_step
        self._activations = open_activations(config, runtime, model)
        self._compute_lane: ComputeLane | None = None
        if runtime.counters.timeline is not None:
            moment = now if runtime.link is None else runtime.link.mark
            self._compute_lane = ComputeLane(self, runtime.counters.timeline, moment)
        self._hooks = Hooks(model, runtime.partition, self._compute_lane or self, alone=self._ranks.size == 1)
        self._layer_major: LayerMajor | None = None
        if runtime.sizing.layer_major:
            self._layer_major = LayerMajor(model, runtime.partition, device)
        claim(self, model, runtime.partition.units)
        self._guards = Guards(model, runtime, self)
        self._in_cycle = False  # a forward pass has run whose backward has not
        self._stats = StepStats()
        self._outcome: StepOutcome | None = None
        self._closed = False
        self._failure: BaseException | None = None  # after which the states are not those of one step
        self._syncs = True

    # Training loop #

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, with each unit in memory while it is needed."""
        self._check_open()
        training = torch.is_grad_enabled()
        if training:
            self._guards.check()
        with self._running("forward" if training else "evaluation"):
            if not self._in_cycle:
                self._executor.begin_cycle()
            with self._hooks.forward(training=training), self._saving():
                outputs = self.module(*args, **kwargs)
            if training:
                self._in_cycle = True
            elif not self._in_cycle:
                self._executor.end_cycle(learn=False)
        return outputs

    def _saving(self) -> AbstractContextManager[None]:
        """What autograd saves meanwhile goes to its tier."""
        return nullcontext() if self._activations is None else self._activations.saving()

    @contextmanager
    def _running(self, name: str) -> Iterator[None]:
        """A pass over the model; an evaluation is no phase of a training step."""
        with ExitStack() as around:
            around.enter_context(self._stopped_by_failures())
            if name != "evaluation":
                around.enter_context(self._counters.phase(name))
            if self._compute_lane is not None:
                around.enter_context(self._compute_lane.running(name))
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward on `loss` divided by the gradient accumulation steps.

        Raises:
            NonFiniteError: the loss (or, under the `backward` schedule, a gradient) is NaN or infinite and the
                schedule has no way to leave the step out. Nothing has been changed by this loss.
        """
        self._check_open()
        if self._layer_major is not None:
            self._end_cycle(learn=False)
            raise InfinityError(
                'tiering.accumulation is "layer": the micro-batches of a step go through the model together, by '
                'engine.train_batch(micro_batches); or set it to "micro_batch"'
            )
        last = self.is_gradient_accumulation_boundary()
        with self._running("backward"):
            try:
                self._check_finite(loss)
            except NonFiniteError:
                self._end_cycle(learn=False)
                raise
            alone = self.config.gradient_accumulation_steps == 1
            self._updates.begin_backward(last=last, in_parts=self._hooks.in_parts(), early=alone)
            self._gradients.begin_backward(last=last)
            try:
                self.scaled(loss).backward()
            except BaseException:
                self._abort_step()
                raise
            self._end_backward()

    def train_batch(self, micro_batches: Iterable[Any], loss_fn: LossFn | None = None) -> torch.Tensor:
        """Forward, backward and `step` of one whole training step.

        Under `tiering.accumulation: "layer"` all micro-batches go through a block before the next block is fetched, see
        docs/tiers.md; the gradients are the same.

        Args:
            micro_batches: `gradient_accumulation_steps` of them are taken. A mapping is the model's keyword arguments,
                a tuple or list its positional ones, anything else its one argument.
            loss_fn: called with the model's output and the micro-batch, returns the loss; by default the output is the
                loss, or has it as `loss`.

        Returns:
            The mean of the micro-batches' losses in float32, detached, on their device.

        Raises:
            InfinityError: there are too few micro-batches, a step has begun with `backward`, or the model cannot be
                trained layer-major.
            NonFiniteError: as `backward`; no micro-batch of this step counts.
        """
        self._check_at_step_boundary("train_batch")
        count = self.config.gradient_accumulation_steps
        batches = list(islice(micro_batches, count))
        if len(batches) < count:
            raise InfinityError(
                f"train_batch was given {len(batches)} micro-batches but gradient_accumulation_steps is {count}"
            )
        if self._layer_major is not None:
            losses = self._train_layer_major(batches, loss_fn)
        else:
            losses = []
            for batch in batches:
                loss = loss_of(call(self, batch), batch, loss_fn)
                self.backward(loss)
                self.step()
                losses.append(loss.detach())
        return torch.stack(losses).float().mean()

    @contextmanager
    def driven_step(self) -> Iterator[None]:
        """Train one step whose passes something else runs inside, such as a schedule of `torch.distributed.pipelining`.

        Each of the `gradient_accumulation_steps` micro-batches has its forward through `module`; its backward begins
        with `scaled(loss)`. The update follows at the end of the context.

        Raises:
            InfinityError: a step has begun with `backward`, or micro-batches are layer-major.
        """
        self._check_at_step_boundary("driven_step")
        self._check_open()
        if self._layer_major is not None:
            raise InfinityError(
                'driven_step runs no layer-major micro-batches: set tiering.accumulation to "micro_batch"'
            )
        self._guards.check()
        self._executor.begin_cycle()
        self._in_cycle = True
        self.micro_steps += self.config.gradient_accumulation_steps - 1
        self._updates.begin_backward(
            last=True, in_parts=frozenset(range(len(self._runtime.partition.units))), early=False
        )
        self._gradients.begin_backward(last=True)
        with self._stopped_by_failures():
            try:
                yield
            except BaseException:
                self._abort_step()
                raise
            self._end_backward()
        self.step()

    def _train_layer_major(self, batches: Sequence[Any], loss_fn: LossFn | None) -> list[torch.Tensor]:
        assert self._layer_major is not None
        self._check_open()
        self._guards.check()

        def forward(batch: Any) -> torch.Tensor:
            try:
                with self._saving():
                    return loss_of(call(self.module, batch), batch, loss_fn)
            except BaseException:
                self._hooks.abandon()
                raise

        self._executor.begin_cycle()
        self._in_cycle = True
        self.micro_steps += len(batches) - 1  # this is the last backward pass of the step
        with self._stopped_by_failures():
            try:
                losses = self._layer_major.run([partial(forward, batch) for batch in batches], _LayerMajorStep(self))
            except BaseException:
                self._abort_step()
                raise
        with self._running("backward"):
            self._end_backward()
        self.step()
        return losses

    def _check_finite(self, loss: torch.Tensor) -> None:
        """Under the `backward` schedule, which updates before all gradients are known, the loss must be finite."""
        if self._runtime.schedule is not UpdateSchedule.BACKWARD:
            return
        if not self._is_finite_everywhere(loss):
            raise NonFiniteError(
                f"the loss of step {self.global_steps} is {loss.item()}; no parameter was changed by it. Leave "
                "this batch out, or set tiering.update_schedule to deferred to have such steps skipped"
            )

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What the backward of a micro-batch's loss begins with: its share of the step's, times the loss scale."""
        share = loss / (self.config.gradient_accumulation_steps * self._ranks.size)
        return share if self.config.fp16 is None else share.float() * self.loss_scale.value

    def _abort_step(self) -> None:
        """Backward has failed. What has arrived cannot be told from earlier micro-batches: the step starts again."""
        self._gradients.abort_backward()
        self._end_cycle(learn=False)
        self._gradients.drop_all()
        self.micro_steps -= self.micro_steps % self.config.gradient_accumulation_steps

    def _end_backward(self) -> None:
        self._end_cycle(learn=True)
        self._gradients.end_backward()
        self._updates.end_backward()

    def _is_finite_everywhere(self, loss: torch.Tensor) -> bool:
        """The loss of every rank is a number."""
        finite = bool(torch.isfinite(loss).all())
        if self._ranks.size == 1:
            return finite
        with self._counters.stalled(StallCause.COLLECTIVE):
            return not self._ranks.any(not finite)

    def _end_cycle(self, *, learn: bool) -> None:
        self._hooks.abandon()
        self._hooks.end_backward()
        self._executor.end_cycle(learn=learn)
        self._in_cycle = False

    def step(self) -> None:
        """Count a micro-batch; at the last of a step, update the parameters and the learning rate.

        Raises:
            InfinityError: inside `no_sync`.
        """
        self._check_open()
        if not self._syncs:
            raise InfinityError("step() inside no_sync: leave the context before the last backward of the step")
        self._check_not_gathered("step()")
        last = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not last:
            return
        with self._stopped_by_failures(), self._counters.phase("update"):
            self.optimizer.step()
            outcome = self._outcome = self._updates.outcome
            if outcome.skipped:
                self.skipped_steps += 1
                scale = f"; the loss scale is {self.loss_scale.value:g} now" if self.loss_scale.dynamic else ""
                _log.warning("step %d is skipped: its gradients are not finite%s", self.global_steps, scale)
            elif self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.global_steps += 1
        peak_bytes = self._runtime.peak_bytes()
        if self._activations is not None:
            peak_bytes["host"] += self._activations.peak_bytes
        self._stats = self._counters.end_step(peak_bytes, grad_norm=outcome.grad_norm, skipped=outcome.skipped)

    def synchronize(self) -> None:
        """Carry out every pending update and wait for it and its writes.

        Raises:
            StorageError: a read or write of the NVMe tier failed.
        """
        self._check_open()
        with self._stopped_by_failures():
            self._executor.drain()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside this context, `backward` adds to this rank's gradients, and nothing is reduced over the ranks.

        The next `backward` outside of it reduces the sum; `step()` belongs after that one. Each loss counts
        `1 / gradient_accumulation_steps`, as everywhere.

        Raises:
            InfinityError: at stages 2 and 3 on several ranks, where a rank has no room for gradients that are not its
                own; or within another `no_sync`.
        """
        if self._ranks.size > 1 and self.config.zero.stage >= 2:
            raise InfinityError(
                f"no_sync keeps whole gradients on every rank, which stage {self.config.zero.stage} is there to avoid: "
                "leave it out, or use stage 0 or 1, which reduce gradients in the last micro-batch of a step anyway"
            )
        if self._ranks.size == 1 and not self._runtime.sizing.holds_all_gradients:
            raise InfinityError(
                "no_sync keeps the gradients of all units, but under the update schedule `backward` there is room for "
                "those on their way only: set tiering.update_schedule to deferred, or gradient_accumulation_steps"
            )
        if not self._syncs:
            raise InfinityError("no_sync is inside another no_sync already")
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def is_gradient_accumulation_boundary(self) -> bool:
        """The next `step()` updates the parameters."""
        if not self._syncs:
            return False
        steps = self.config.gradient_accumulation_steps
        return self.micro_steps % steps == steps - 1

    def begin_gathering(self) -> Runtime:
        """Carry out pending updates for `infinity.zero.GatheredParameters`; what the engine owns."""
        if self._in_cycle:
            raise InfinityError("parameters cannot be gathered between a forward pass and its backward")
        self.synchronize()
        return self._runtime

    # What the hooks tell #

    def enter(self, units: tuple[int, ...]) -> None:
        if self._layer_major is not None:
            self._layer_major.entered(units)
        self._executor.enter(units)

    def leave(self, units: tuple[int, ...]) -> None:
        self._executor.leave(units)

    def backward_left(self, units: tuple[int, ...]) -> None:
        if self._layer_major is not None:
            return  # other micro-batches have not been through these units yet
        for unit in units:
            self._complete(self._gradients.leave(unit))

    def gradient_ready(self, unit: int, slot: int, param: nn.Parameter) -> None:
        if self._gradients.take(unit, slot, param):
            self._complete((unit,))

    def _complete(self, units: Sequence[int]) -> None:
        """All gradients that these units have in this backward pass are there."""
        if self._layer_major is not None:
            return  # other micro-batches have not been through these units yet
        for unit in units:
            if self.is_gradient_accumulation_boundary():
                self._updates.final(unit)
            self._gradients.rest(unit)

    # What users ask for #

    def stats(self) -> StepStats:
        """What the last step cost."""
        return self._stats

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradients before clipping."""
        return None if self._outcome is None else self._outcome.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of every parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of the newest values in compute dtype in host memory, one unit at a time, on all ranks together."""
        return newest_values(self._runtime, self.synchronize)

    def parameters(self) -> Iterator[torch.Tensor]:
        """The same without their names."""
        return (values for _, values in self.named_parameters())

    # Checkpoints #

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> Path:
        """Save everything that training needs to go on, in memory bounded by one unit; all ranks call this together.

        The directory is one that rank 0 can write and, for loading, all ranks can read. A checkpoint can be loaded by
        any number of ranks.

        Args:
            tag: name of the checkpoint; `global_step<N>` by default.
            client_state: tensors and plain values, given back by `load_checkpoint`.
            save_latest: make it the one that `load_checkpoint` takes by default.

        Returns:
            The checkpoint's directory.

        Raises:
            StorageError: writing failed; nothing half-written is visible.
            CheckpointError: `client_state` has something that could not be loaded safely.
        """
        self._check_at_step_boundary("save_checkpoint")
        self.synchronize()
        extra = collect_extra(self.module, self.optimizer, self.lr_scheduler, self.loss_scale, client_state or {})
        extra["rng_of_ranks"] = self._ranks.of_all(extra["rng"])
        with self._counters.aside("save_checkpoint"):
            return save_checkpoint(
                self._directory(save_dir),
                tag or f"global_step{self.global_steps}",
                self._runtime,
                steps=self._updates.steps,
                counters={
                    "global_steps": self.global_steps,
                    "micro_steps": self.micro_steps,
                    "skipped_steps": self.skipped_steps,
                },
                extra=extra,
                mark_latest=save_latest,
            )

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        *,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[Path | None, dict[str, Any] | None]:
        """Go on from a checkpoint: parameters, optimizer and schedule states, counters and random states.

        Args:
            tag: the checkpoint that was saved last by default.
            load_optimizer_states: False to start with fresh moments and this run's hyper-parameters.
            load_lr_scheduler_states: False to start the LR schedule afresh.
            load_module_only: take parameters and buffers alone. Other parameters may be frozen than when it was saved.

        Returns:
            (its directory, the client's state), or (None, None) if there is no checkpoint and `tag` is None.

        Raises:
            CheckpointError: it is damaged or of another model. The engine is unchanged.
        """
        self._check_at_step_boundary("load_checkpoint")
        self.synchronize()
        whole = not load_module_only
        parts = Parts(load_optimizer_states and whole, load_lr_scheduler_states and whole, whole)
        opened = open_checkpoint(self._directory(load_dir), tag, self._runtime, moments=parts.optimizer)
        if opened is None:
            return None, None
        check_extra(opened.path, opened.extra, self.module, self.optimizer, self.lr_scheduler, parts)
        with self._counters.aside("load_checkpoint"):
            load_tensors(opened, self._runtime, moments=parts.optimizer)  # from here on the engine changes
        self._updates.steps = dict(opened.manifest.steps) if parts.optimizer else {}
        if parts.progress:
            counters = opened.manifest.counters
            self.global_steps = counters["global_steps"]
            accumulation = self.config.gradient_accumulation_steps  # may differ from the saving run's
            self.micro_steps = -(-counters["micro_steps"] // accumulation) * accumulation
            self.skipped_steps = counters["skipped_steps"]
        apply_extra(
            self._ranks.rank, opened.extra, self.module, self.optimizer, self.lr_scheduler, self.loss_scale, parts
        )
        return opened.path, opened.extra["client_state"]

    def save_16bit_model(self, save_dir: str | Path, *, max_shard_size: int | str = "5GB") -> Path:
        """Write the weights for inference, in memory bounded by one unit.

        The directory is what `transformers.AutoModel.from_pretrained` reads, if the model is one of transformers':
        safetensors in the 16-bit dtype of the training (bfloat16 for fp32), and the configuration.

        Args:
            max_shard_size: size at which a new file begins.

        Returns:
            The directory.

        Raises:
            StorageError: writing failed; an earlier export is still there.
            ConfigError: `max_shard_size` is no size.
            InfinityError: the model is divided by tensor parallelism.
        """
        export_16bit(Path(save_dir), self.module, self._runtime, self.named_parameters(), max_shard_size)
        return Path(save_dir)

    def _directory(self, path: str | Path) -> Path:
        """Where the checkpoints of this process's part of the model are."""
        parts = self._runtime.parts.ranks
        return Path(path) if parts.size == 1 else Path(path) / f"part-{parts.rank}-of-{parts.size}"

    def _check_not_gathered(self, what: str) -> None:
        if self._executor.lends:
            raise InfinityError(
                f"{what} inside GatheredParameters, which stores its changes at the end: leave it first"
            )

    def _check_at_step_boundary(self, what: str) -> None:
        self._check_not_gathered(what)
        if self.micro_steps % self.config.gradient_accumulation_steps or self._in_cycle:
            raise InfinityError(f"{what} in the middle of a step: call it after the step() that updates the parameters")

    # End #

    def close(self) -> None:
        """Finish what is in flight, remove the hooks and the swap files. The model is left without values."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as rest:  # in reverse, and all of it, whatever fails
            rest.callback(self._runtime.close)
            if self._activations is not None:
                rest.callback(self._activations.close)
            rest.callback(self._hooks.remove)
            rest.callback(disclaim, self.module)
            rest.callback(self._guards.remove)
            self._compute_lane = None  # it and the optimizer lead back to this object
            self.optimizer.run_step = None
            if self._layer_major is not None:
                rest.callback(self._layer_major.remove)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _stopped_by_failures(self) -> Iterator[None]:
        """Nothing may go on from a tier that failed, nor from a step of which only some units are updated."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, StorageError) or self._updates.under_way:
                self._failure = self._failure or error
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise InfinityError("the engine is closed")
        if self._failure is not None:
            raise InfinityError(
                f"the engine has stopped after an error ({type(self._failure).__name__}: {self._failure}): close it, "
                "and resume from the last checkpoint"
            ) from self._failure


class _LayerMajorStep:
    """What an engine does as layer-major micro-batches go through its model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun = False

    def forward(self, round_index: int, micro_batch: int) -> AbstractContextManager[None]:
        if self._engine._activations is not None:
            self._engine._activations.take_turn(round_index, micro_batch)
        return self._engine._running("forward")

    def start(self, micro_batch: int, loss: torch.Tensor) -> None:
        engine = self._engine
        with engine._running("backward"):
            engine._check_finite(loss)
            if not self._begun:
                engine._updates.begin_backward(last=True, early=False)
                engine._gradients.begin_backward(last=True)
                self._begun = True
            self._piece([engine.scaled(loss)], None)

    def go_on(self, micro_batch: int, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        with self._engine._running("backward"):
            self._piece(tensors, grads)

    def _piece(self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None) -> None:
        torch.autograd.backward(tensors, grads)
        self._engine._hooks.end_backward()

    def complete(self, units: Sequence[int]) -> None:
        engine = self._engine
        with engine._running("backward"):
            for unit in engine._gradients.complete(sorted(units, reverse=True)):
                engine._updates.final(unit)
                engine._gradients.rest(unit)
