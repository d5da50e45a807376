"""The `Engine` that `initialize` returns to a training loop."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from infinity.accessors import Accessors
from infinity.checkpoint import Options, Parts, Session
from infinity.checkpoint.unfreezing import check_possible, kept
from infinity.config import Config
from infinity.errors import ConfigError, InfinityError
from infinity.memory import Level
from infinity.optim.loss_scale import LossScale
from infinity.optim.optimizer import TieredOptimizer
from infinity.telemetry import Monitor, StepStats
from infinity.telemetry.status import Publisher
from infinity.zero.build import Runtime
from infinity.zero.drivers import LossFn, call, driven, loss_of, train_layer_major
from infinity.zero.grad_placeholders import GradPlaceholder
from infinity.zero.guards import Guards
from infinity.zero.materialize import rebuild
from infinity.zero.param_access import Place, check_room, claim, disclaim, is_lent, newest_values, views_of
from infinity.zero.phases import Phase
from infinity.zero.status import Sampler
from infinity.zero.step import USE_TRAIN_BATCH, Step

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)


class Engine(Accessors):
    """Train one model whose states are in the tiers. Created by `initialize`.

    The engine is a context manager: the end of the context closes it. It is also closed when the last reference is
    dropped. Unknown attributes are forwarded to the model.

    Attributes:
        module: the model. At stage 3 its parameters have values only while their unit is in use (NaN otherwise).
        optimizer: the optimizer, with `param_groups`.
        device: the device that the model computes on.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        runtime: Runtime,
        optimizer: TieredOptimizer,
        lr_scheduler: Any | None,
    ) -> None:
        self.module = model
        self.config = config
        self.optimizer = optimizer
        self.device = runtime.link.device
        self._begin(runtime)
        self.lr_scheduler = lr_scheduler

    def _begin(self, runtime: Runtime) -> None:
        """Connect the engine to the tiers of this runtime."""
        model, optimizer, config = self.module, self.optimizer, self.config
        self._runtime = runtime
        self._step = Step(model, config, runtime, optimizer)
        optimizer.keep_groups()
        self._session = Session(model, optimizer, runtime, self._step)
        optimizer.run_step = self._step.finish
        optimizer.drop_gradients = self._step.drop
        optimizer.loss_scaler = self._step.losses.loss_scale
        with ExitStack() as undo:  # after an error, the model has no hooks and guards of the engine
            undo.callback(self._step.remove_hooks)
            undo.callback(self._session.close_commits)
            claim(self, model, runtime.partition.units)
            undo.callback(disclaim, model)
            self._guards = Guards(model, runtime, self, {id(model.get_parameter(name)) for name in optimizer.frozen})
            undo.callback(self._guards.remove)
            runtime.show_newest()
            undo.pop_all()
        publisher = Publisher(Sampler(self._step, runtime, optimizer, config)) if config.tiering.status else None
        # Must hold no reference to self, so that an unreferenced engine is collected.
        self._close = weakref.finalize(
            self, _close, model, optimizer, self._step, self._guards, self._session, publisher
        )
        self._close.atexit = False

    def __getattr__(self, name: str) -> Any:
        """Forward unknown attributes to the model."""
        if name.startswith("_") or name == "module":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(f"neither the engine nor its {type(self.module).__name__} has {name!r}") from None

    @classmethod
    def optimizer_class(cls, config: Config) -> type[TieredOptimizer]:
        """Return the class of the optimizer that `initialize` returns with an engine of this class."""
        return TieredOptimizer

    @property
    def lr_scheduler(self) -> Any | None:
        """The learning rate scheduler, or None. `step()` steps it after every update.

        The training loop must step torch's ReduceLROnPlateau itself, because that needs a metric. The attribute may be
        set to another scheduler of the same optimizer.
        """
        return self._step.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any | None) -> None:
        self._step.lr_scheduler = scheduler

    @property
    def global_steps(self) -> int:
        """The number of steps so far, including skipped ones."""
        return self._step.counter.counts.global_steps

    @property
    def micro_steps(self) -> int:
        """The number of micro-batches so far, which is the number of calls of `step()`.

        If `managed_gradient_accumulation` is false, it is the number of backward passes.
        """
        return self._step.counter.counts.micro_steps

    @property
    def skipped_steps(self) -> int:
        """The number of steps whose update was skipped, because gradients were not finite."""
        return self._step.counter.counts.skipped_steps

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of fp16 training. In other precisions, its `value` is 1."""
        return self._step.losses.loss_scale

    @property
    def monitor(self) -> Monitor:
        """The writer to `tensorboard`, `wandb` and `csv_monitor`: see its `write_events`. Only rank 0 writes."""
        return self._runtime.monitor

    # Training loop #

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass, as `engine(...)` does. Each unit is in memory while it is used.

        Raises:
            InfinityError: another thread runs the model.
        """
        with self._step.hooks.thread.claimed():
            return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        training = torch.is_grad_enabled()
        if self._step.in_backward_now:
            # For example, a hook of a cached contrastive loss calls this. The call is a part of the running pass.
            with self._autocast():
                return self._call_model(*args, **kwargs)
        if training:
            self._check_model()
            self._step.make_room(args, kwargs)
        with self._step.forward(training=training), self._autocast():
            return self._call_model(*args, **kwargs)

    def _call_model(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.casts_inputs:
            args, kwargs = tree_map_only(torch.Tensor, _half, (args, kwargs))
        return self.module(*args, **kwargs)

    def _check_model(self) -> None:
        """Check the model before a training forward, and create states for parameters that were unfrozen."""
        self._guards.check()
        if unfrozen := self.optimizer.unfrozen():
            self._make_states(unfrozen)

    def _make_states(self, names: list[str]) -> None:
        """Create states for parameters that were frozen, see [Note: states that are laid out anew] in unfreezing.py.

        Raises:
            InfinityError: a step has begun, or this engine cannot create them. The engine is unchanged.
        """
        if self.awaits_backward:
            raise InfinityError(
                f"parameter `{names[0]}` requires a gradient since a forward pass whose backward is to come: call "
                "requires_grad_ between two steps. If the pass was an evaluation, run it under torch.no_grad()"
            )
        check_possible(names[0], self.config, self._runtime.ranks)
        self._step.check_boundary(f"creating states for `{names[0]}`, which requires a gradient now,")
        optimizer, before = self.optimizer, self._step
        trained, frozen = optimizer.trained, optimizer.frozen
        _log.info("`%s` and %d others require gradients now: all states are laid out again", names[0], len(names) - 1)
        failure: InfinityError | None = None
        with kept(self._session, self.config, self._runtime.ranks) as restore:
            old = replace(self._runtime, monitor=self._runtime.monitor.follow())
            self._close()
            more = {name: frozen[name] for name in names}
            try:
                self._rebuild(old, {**trained, **more}, {name: frozen[name] for name in frozen.keys() - more.keys()})
            except InfinityError as error:
                failure = error
                self._rebuild(old, trained, frozen)
            restore(self._session)
            self._step.continue_from(before)
        if failure is not None:
            raise failure

    def _rebuild(self, old: Runtime, trained: Mapping[str, int], frozen: Mapping[str, int]) -> None:
        self.optimizer.bind(self.module, trained, frozen)
        runtime = rebuild(old, self.module, trained, self.config, self.optimizer.kind.layout)
        paused = [param for param in map(self.module.get_parameter, trained) if not param.requires_grad]
        try:
            for param in paused:  # so that they get states and hooks, as at `initialize`
                param.requires_grad_(True)
            self._begin(runtime)
        except BaseException:
            runtime.close()
            raise
        finally:
            for param in paused:
                param.requires_grad_(False)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.torch_autocast_dtype()
        if dtype is None:
            return nullcontext()
        # The cache of autocast would keep a copy of every weight until the end of the forward pass.
        return torch.autocast(self.device.type, dtype, cache_enabled=False)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward pass of a micro-batch.

        Args:
            loss: a scalar tensor, computed by the forward pass of the engine. This method divides it by the gradient
                accumulation steps and the ranks, and in fp16 multiplies it by the loss scale. The gradients of tensors
                that are not parameters of the engine, such as inputs or a temperature of the loss, are divided and
                multiplied, too: sum them over all ranks.
            retain_graph: as in `torch.Tensor.backward`.
            scale_wrt_gas: False if the loss is already divided by the gradient accumulation steps.

        Returns:
            `loss` itself, not divided.

        Raises:
            NonFiniteError: under the schedule `backward`: the loss is NaN or infinite, and nothing was changed; or a
                gradient is NaN or infinite, and the engine has stopped if other units are already updated.
            InfinityError: an earlier backward pass of this step has updated the parameters, or `loss` is no tensor.
        """
        self.optimizer.check_trains()
        if not isinstance(loss, torch.Tensor):
            raise InfinityError(
                f"engine.backward takes the loss, a tensor of one number; it got a {type(loss).__name__}"
            )
        if self._step.layer_major is not None:
            self._step.check_boundary("backward")
            raise InfinityError(USE_TRAIN_BATCH)
        self._step.check()
        self._guards.check_loss(loss, self._step.forward_end)
        with self._step.running(Phase.BACKWARD):
            self._step.check_finite(loss)
        scaled = self._step.losses.scale(loss, whole_step=not scale_wrt_gas)
        with self._step.backward():
            scaled.backward(retain_graph=retain_graph)
        return loss

    def scale(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Return the tensor to call `backward()` on in your own loop: `engine.scale(loss).backward()`.

        It is the loss divided by the gradient accumulation steps and the number of ranks, and in fp16 multiplied by the
        loss scale. Without fp16, `loss.backward()` has the same effect.
        """
        return self._step.losses.scale(loss, whole_step=not scale_wrt_gas)

    def step(self) -> None:
        """Count a micro-batch. After the last one of a step, update the parameters and step the LR schedule.

        At stage 3, or if `tiering.update_schedule` is set, updates may still run when this returns.

        Raises:
            InfinityError: inside `no_sync`, or after a backward pass that failed.
        """
        if self._step.counter.ends_step:
            self.optimizer.step()
        else:
            self._step.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the current step. Its micro-batches stay counted.

        Raises:
            InfinityError: under the update schedule `backward`, these gradients have already updated parameters.
        """
        self._step.drop()

    def train_batch(self, micro_batches: Iterable[Any], loss_fn: LossFn | None = None) -> torch.Tensor:
        """Run forward, backward and `step` of all micro-batches of one step.

        With `tiering.accumulation: "layer"`, all micro-batches go through a block before the next block is fetched: see
        docs/how-to/accumulate-gradients.md, also for what that changes in the numbers.

        Args:
            micro_batches: this method takes `gradient_accumulation_steps` of them. A mapping contains the keyword
                arguments of the model, a tuple or list the positional ones. Any other object is the only argument.
            loss_fn: returns the loss for the model's output and the micro-batch. By default, the loss is the output, or
                the attribute `loss` of it.

        Returns:
            The mean of the micro-batches' losses in float32, detached, on their device.

        Raises:
            InfinityError: there are too few micro-batches, `backward` has begun a step, or the model cannot be trained
                layer-major.
            NonFiniteError: as for `backward`. No micro-batch of this step is counted.
        """
        self._check_first_micro_batch("train_batch")
        count = self.config.gradient_accumulation_steps
        batches = list(islice(micro_batches, count))
        if len(batches) < count:
            raise InfinityError(
                f"train_batch was given {len(batches)} micro-batches but gradient_accumulation_steps is {count}"
            )
        self._step.counter.runs_in_one_call = True
        if self._step.layer_major is not None:
            losses = train_layer_major(self._step, self._step.layer_major, self._call_model, batches, loss_fn)
            self.step()
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
        """Train one step in this context, if other code runs its forward and backward passes.

        An example of such code is a schedule of `torch.distributed.pipelining`.

        The code calls `module` for each of the `gradient_accumulation_steps` micro-batches, and begins each backward
        pass with `scale(loss)`. The update follows at the end of the context.

        Raises:
            InfinityError: `backward` has begun a step, or micro-batches are layer-major.
            NonFiniteError: a gradient is NaN or infinite, and the update schedule cannot skip the step.
        """
        self._check_first_micro_batch("driven_step")
        if self._step.layer_major is not None:
            raise InfinityError(
                'driven_step runs no layer-major micro-batches: set tiering.accumulation to "micro_batch"'
            )
        self._step.counter.runs_in_one_call = True
        with driven(self._step):
            yield
        self.step()

    def _check_first_micro_batch(self, what: str) -> None:
        self._step.check_boundary(what)
        if not self.config.managed_accumulation:
            raise InfinityError(
                f"{what} ends a step by itself, and managed_gradient_accumulation is false: call backward() and step()"
            )
        self._step.counter.boundary = None
        self._check_model()
        steps = self.config.gradient_accumulation_steps
        if self.micro_steps % steps:
            raise InfinityError(
                f"{what} in the middle of a step: {self.micro_steps % steps} of its {steps} micro-batches are counted; "
                "call step() for the others first"
            )

    def synchronize(self) -> None:
        """Block until all pending updates are computed and written.

        With `tiering.crash_consistent`, also until the last step is committed.

        Raises:
            StorageError: a read or write of the NVMe tier failed.
        """
        self._step.drain()
        if self._session.commits is not None:
            self._session.commits.wait()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip the reduction of gradients over the ranks in this context.

        In the context, `backward` adds to this rank's gradients. The next `backward` outside of the context reduces the
        sum; call `step()` after it. In the context, too, each loss is divided by `gradient_accumulation_steps`.

        Raises:
            InfinityError: at stages 2 and 3 on several ranks, where a rank has memory only for its shard of the
                gradients; or within another `no_sync`.
        """
        problem = self._runtime.sizing.rules.no_sync_problem()
        if problem:
            raise InfinityError(problem)
        with self._step.counter.unsynchronised():
            yield

    def begin_gathering(self, what: str, *, stores: bool) -> Runtime:
        """Finish pending updates before parameters are read or changed, and return the engine's runtime.

        Args:
            what: name of the caller, for messages.
            stores: whether the caller will change values.
        """
        if stores:
            if self.awaits_backward:
                raise InfinityError(
                    f"{what} with a modifier_rank between a forward pass and its backward, which needs the values of "
                    "the forward pass. If the pass was an evaluation, run it under torch.no_grad()"
                )
            self._runtime.ranks.together(what)
        else:
            self._runtime.together(what)
        if not self._step.hooks.in_forward:  # inside a forward pass, the units in use are already up to date
            self._step.check_values(what)
            if not self.awaits_backward:
                self.synchronize()
        if stores:
            self._session.finish_saving()
        return self._runtime

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward pass is running, or has not had its backward pass yet."""
        return self._step.phase is Phase.FORWARD or self._step.hooks.in_forward

    def lends(self, place: Place) -> bool:
        """Whether the parameter is lent, in `GatheredParameters` for example."""
        return is_lent(self._runtime, place)

    def shows(self, place: Place) -> bool:
        """Whether the parameter is lent, or a running pass of the model uses it."""
        if self.lends(place):
            return True
        in_pass = self._step.hooks.in_forward or self._step.in_backward_now
        return in_pass and views_of(self._runtime, place).shows()

    def model_was_zeroed(self) -> None:
        """Drop the gradients of a failed pass, because the model's own `zero_grad` was called."""
        self._step.drop_failed()

    def compiling(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return the context in which a module of the model is compiled, because its own `compile` was called."""
        return self._step.compiling(self.module, module)

    def finish_updates(self, what: str) -> None:
        """Finish pending updates, because `what` reads the parameters."""
        self._step.check_values(what)
        self.synchronize()

    # Reports and values for users #

    def stats(self) -> StepStats:
        """Return what the last step cost: seconds by phase, bytes moved, waits by cause, peaks of memory."""
        return self._step.last.stats

    def tiers(self) -> dict[str, Level]:
        """Return how full the tiers with a budget are now: `device`, `host`, `nvme`.

        Each has `used_bytes`, `peak_bytes` (the most so far) and `capacity_bytes`.
        """
        return self._runtime.tiers()

    def tell(self, *, steps: int | None = None, tokens: int | None = None, loss: float | None = None) -> None:
        """Report to `infinity top` what the engine does not know.

        Args:
            steps: the number of steps of the whole training.
            tokens: tokens of a step, over all ranks.
            loss: the loss of the last step, if the engine does not know it, or would have to wait for the device.
        """
        said = {"steps": steps, "tokens": tokens}
        last = self._step.last
        last.told = last.told | {name: value for name, value in said.items() if value is not None}
        if loss is not None:
            last.loss = float(loss)

    def get_global_grad_norm(self) -> float | None:
        """Return the global L2 norm of the last step's gradients before clipping; None if it was not computed."""
        outcome = self._step.last.outcome
        return None if outcome is None else outcome.grad_norm

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, value) of every parameter, in the model's order. All ranks call this together.

        A value is a copy in host memory, in the parameter's shape and the compute dtype, after all updates so far.
        Parameters of integers or other codes keep their own dtype. At most one unit is in memory for this. If a
        parameter has a gradient, the `grad` of its copy is a placeholder: every use of it raises an error.

        Raises:
            InfinityError: under the schedule `backward`, between the last backward pass of a step and `step()`.
        """
        for name, values in newest_values(
            self._runtime, self.module, partial(self.finish_updates, "engine.named_parameters()")
        ):
            if isinstance(self.module.get_parameter(name).grad, GradPlaceholder):
                values.grad = GradPlaceholder(values)
            yield name, values

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the values of `named_parameters`, without names."""
        return (values for _, values in self.named_parameters())

    # Checkpoints #

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | float | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep_last: int | None = None,
        blocking: bool = True,
    ) -> Path:
        """Save a checkpoint from which training resumes bit for bit. All ranks call this together.

        Each rank writes its own shards, and holds one tile of them in memory. The ranks may share the directory, or
        each machine may have its own. Any number of ranks can load the checkpoint, if they find all files.

        Args:
            tag: name of the checkpoint, a string or a number; `global_step<N>` by default.
            client_state: tensors and plain values, which `load_checkpoint` returns.
            save_latest: make it the checkpoint that `load_checkpoint` loads by default.
            exclude_frozen_parameters: leave out frozen parameters; loading then needs `load_module_strict=False`.
            keep_last: after this save, remove the run's checkpoints in the directory except the newest `keep_last`.
            blocking: False to return before the current state is written. The updates of the next step write each tile
                before they change it. The checkpoint is usually complete two steps later, at the latest when frozen
                parameters are written. `wait_checkpoint`, the next save or load, `close` and the end of the process
                complete it earlier, and raise errors of the writes. With optimizer states on a device, the call blocks.

        Returns:
            The checkpoint's directory.

        Raises:
            StorageError: writing failed. The earlier checkpoint is intact.
            CheckpointError: `client_state` contains something that could not be loaded safely, or another run saves its
                checkpoints in this directory.
            ConfigError: `save_dir` is empty, `tag` is no plain name or not the same on all ranks, `keep_last` is not at
                least 1, or `client_state` is no mapping.
        """
        if keep_last is not None and keep_last < 1:
            raise ConfigError(f"keep_last is {keep_last}; it must be at least 1, the checkpoint that is saved")
        if not isinstance(client_state, Mapping | None):
            raise ConfigError(f"client_state is a {type(client_state).__name__}; give a dict, or None")
        return self._session.save(
            save_dir,
            None if tag is None else str(tag),
            client_state or {},
            options=Options(save_latest, not exclude_frozen_parameters, keep_last),
            blocking=blocking,
        )

    @property
    def saving(self) -> Path | None:
        """The directory of the checkpoint that is being saved with `blocking=False`; None if there is none."""
        return self._session.saving

    def wait_checkpoint(self) -> None:
        """Block until the checkpoint of a save with `blocking=False` is complete. All ranks call this together.

        Raises:
            StorageError: the checkpoint cannot be written. An earlier checkpoint of this tag is intact.
            CheckpointError: the save failed on another rank or for another reason.
        """
        self._session.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        strict_model: bool = True,
    ) -> tuple[Path | None, dict[str, Any] | None]:
        """Load a checkpoint: parameters, optimizer and schedule states, counters and random states.

        All ranks call this together. An engine without an optimizer loads no optimizer states.

        Args:
            tag: name of the checkpoint. By default, the checkpoint that was saved last or, if it is damaged, the newest
                intact one.
            load_module_strict: False to keep the values of frozen parameters that are not in the checkpoint.
            load_optimizer_states: False to start with fresh moments and this run's hyper-parameters.
            load_lr_scheduler_states: False to start the LR schedule from its beginning.
            load_module_only: load only parameters and buffers. This run may freeze other parameters than the saved one.
            strict_model: False to load values of another model whose parameters have the same names and shapes.

        Returns:
            (directory of the checkpoint, `client_state`), or (None, None) if there is no checkpoint and `tag` is None.

        Raises:
            CheckpointError: the checkpoint is damaged, of another model, or differs between ranks. The engine is
                unchanged, unless the message says that it has stopped.
            ConfigError: `load_dir` is empty.
        """
        whole = not load_module_only
        trains = whole and self.optimizer.trains
        parts = Parts(load_optimizer_states and trains, load_lr_scheduler_states and trains, whole)
        name = None if tag is None else str(tag)
        return self._session.load(load_dir, name, parts, strict_model=strict_model, all_weights=load_module_strict)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
        *,
        max_shard_size: int | str = "5GB",
    ) -> Path:
        """Write the weights for inference. At most one unit is in memory at a time.

        The files are safetensors in the 16-bit dtype of the training (bfloat16 for fp32). For a model of transformers,
        the configuration is written, too: `transformers.AutoModel.from_pretrained` loads the directory.

        Args:
            save_filename: write only a file of this name: safetensors if it ends in `.safetensors`, else a state dict
                as `torch.save` writes it (which takes twice the space while it is written). Only `model.safetensors`
                is written with the configuration.
            exclude_frozen_parameters: leave out frozen parameters.
            max_shard_size: size at which a new file begins.

        Returns:
            The directory.

        Raises:
            StorageError: writing failed. An earlier export is intact.
            ConfigError: `save_dir` is empty, `max_shard_size` is no size, or `save_filename` is no plain name of a file
                with weights.
            CheckpointError: another process is saving to this directory.
            InfinityError: the model is divided by tensor parallelism.
        """
        return self._session.export(
            save_dir,
            self.named_parameters(),
            max_shard_size,
            file_name=save_filename,
            frozen=not exclude_frozen_parameters,
        )

    # Steps that outlive the process (tiering.crash_consistent) #

    def resume(self) -> tuple[Path | None, dict[str, Any] | None]:
        """Resume from the last step that an earlier process of this run committed, without a checkpoint.

        All ranks call this together, before they train. It needs `tiering.crash_consistent`. It restores parameters,
        optimizer and schedule states, counters, random states and loss scale of the end of that step.

        Returns:
            (path of the step's record, the values that `keep_with_steps` kept), or (None, None) if there is no step.

        Raises:
            CheckpointError: the step does not fit this run. The engine is unchanged.
            ConfigError: `tiering.crash_consistent` is not set.
            StorageError: the states cannot be read. The engine has stopped.
        """
        return self._session.resume()

    def check_resumed(self, what: str) -> None:
        """Check that there is no step to resume, which `what` would overwrite.

        Raises:
            CheckpointError: there is one. Call `resume`, or remove it by `infinity states remove`.
        """
        if self._session.commits is not None:
            self._session.commits.check_resumed(what)

    def keep_with_steps(self, client_state: Callable[[], Mapping[str, Any]]) -> None:
        """Keep values of the training loop with every step, such as its position in the data.

        Args:
            client_state: a function that is called at the end of every `step()` that updates. It returns tensors and
                plain values, which `resume` returns later. Values that change after the call are kept with the next
                step, or by `commit`.

        Raises:
            ConfigError: `tiering.crash_consistent` is not set.
        """
        self._session.keep_with_steps(client_state)

    def commit(self) -> None:
        """Commit the current state again, with the changes that the loop made after the last `step()`.

        Every `step()` commits by itself. All ranks call this together.

        Raises:
            ConfigError: `tiering.crash_consistent` is not set.
            StorageError: a drive has failed.
        """
        self._session.commit()

    def end_run(self) -> None:
        """Request that `close` removes the states of this run from the drives. All ranks call this together.

        Raises:
            ConfigError: `tiering.crash_consistent` is not set.
        """
        self._session.end_run()

    # End #

    def close(self) -> None:
        """Finish pending updates and writes, and remove the hooks and the swap files.

        The model has no values afterwards; `destroy` keeps them. With `tiering.crash_consistent`, the last step is
        committed and its files stay, unless `end_run` was called.

        Raises:
            StorageError: a checkpoint that was saved with `blocking=False` cannot be written. The engine is closed.
            CheckpointError: the save failed on another rank or for another reason. The engine is closed.
            Exception: the last step of a crash-consistent run cannot be committed on this rank; raised by the drive or
                the function of `keep_with_steps`. The engine is closed, and `resume` continues from the previous step.
        """
        self._end(failed=False)

    def _end(self, *, failed: bool) -> None:
        try:
            if self._close.alive:
                self._session.end_saving(failed=failed)
                if not failed:
                    self._session.finish_commits()
        finally:
            self._close()

    def destroy(self, *, strict: bool = False) -> None:
        """Close the engine, and give the model its newest values in memory. All ranks call this together.

        Gradients of a step that has begun are dropped. If the values do not fit in memory, the model has no values
        afterwards, and a warning says so.

        Args:
            strict: raise an error in both cases, and leave the engine open.

        Raises:
            InfinityError: with `strict`: the values do not fit in memory, or a step has begun and not ended.
        """
        places, values = self._guards.places(self.module), {}
        try:
            if not strict:
                self._step.drop()  # for example of a step that ran out of memory, before another try
            self._step.check_boundary("engine.destroy()")
            self.begin_gathering("engine.destroy()", stores=False)
            check_room(self._runtime, places, ("engine.destroy()", "save the model first, and call close()"))
            values = dict(newest_values(self._runtime, self.module, self.synchronize))
        except InfinityError as error:  # also raised if the engine has failed or is closed
            if strict:
                raise
            _log.warning("the model is left without values: %s", error)
        self.close()
        for place in places:
            if place.info.name in values:
                place.param.data = values.pop(place.info.name).to(self.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._end(failed=kind is not None)


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def _close(
    model: nn.Module,
    optimizer: TieredOptimizer,
    step: Step,
    guards: Guards,
    session: Session,
    publisher: Publisher | None,
) -> None:
    """Close an engine. The garbage collector calls this, in any thread, for an engine that was not closed."""
    if session.in_worker:  # a worker thread cannot wait for its own end
        threading.Thread(target=_close, args=(model, optimizer, step, guards, session, publisher)).start()
        return
    session.cancel_saving()
    optimizer.run_step = optimizer.drop_gradients = None
    disclaim(model)
    with ExitStack() as rest:
        rest.callback(session.unclaim)
        rest.callback(step.close)
        rest.callback(session.close_commits)
        if publisher is not None:
            rest.callback(publisher.close)  # runs first, because the publisher reads the objects above
        guards.remove()
