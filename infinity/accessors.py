"""What scripts ask an engine about itself under DeepSpeed's names: facts of the configuration, the ranks, the step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.config import Config, Precision
from infinity.errors import ConfigError, InfinityError
from infinity.optim.optimizer import TieredOptimizer
from infinity.zero.build import Runtime
from infinity.zero.compiled import is_compiled
from infinity.zero.launch import launch_of
from infinity.zero.step import Step

_DTYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Accessors:
    """A mixin of the engine, which has these fields."""

    config: Config
    device: torch.device
    module: nn.Module
    optimizer: TieredOptimizer
    _runtime: Runtime
    _step: Step

    # Ranks #

    @property
    def global_rank(self) -> int:
        """This process among those that train together."""
        return self._runtime.ranks.rank

    @property
    def local_rank(self) -> int:
        """This process among those on this machine, as the launcher counts them."""
        launch = launch_of(os.environ)
        return 0 if launch is None else launch.local_rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._runtime.ranks.size

    @property
    def dp_world_size(self) -> int:
        """The same: the batch is divided among all of them."""
        return self._runtime.ranks.size

    # The step #

    @property
    def in_forward(self) -> bool:
        """The model's forward is running."""
        return self._step.hooks.in_forward

    @property
    def in_backward(self) -> bool:
        """This thread is in a backward pass of the model."""
        return self._step.in_backward_now

    @property
    def awaits_step(self) -> bool:
        """A backward pass is over, and neither the next micro-batch nor the update has begun."""
        return self._step.awaits_step

    # Batches #

    def train_batch_size(self) -> int:
        """Samples per update over all ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self.config.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self.config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per update, samples per forward on one rank, micro-batches per update."""
        config = self.config
        return config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps

    @property
    def global_samples(self) -> int:
        """Samples so far, those of skipped updates included."""
        return self._step.counter.counts.global_steps * self.config.train_batch_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """The next `step()` updates the parameters."""
        return self._step.counter.ends_step

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the backward pass that comes is the last of its step, in place of counting calls of `step()`.

        Call it before every micro-batch's backward, and `step()` after the last one; it holds until it is called again.

        Raises:
            InfinityError: gradients of several passes have no room under this configuration.
        """
        if not is_boundary and not self._runtime.sizing.rules.grads.holds_all:
            raise InfinityError(
                "set_gradient_accumulation_boundary(False) adds up the gradients of several backward passes, for which "
                "nothing is reserved: set gradient_accumulation_steps to how many they are, or "
                'tiering.update_schedule to "deferred"'
            )
        self._step.counter.boundary = is_boundary

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backward passes inside make one step: their gradients are added up, and `step()` follows behind.

        They are reduced over the ranks as they come, so this saves no communication here.

        Raises:
            InfinityError: gradients of several passes have no room under this configuration; `step()` is called inside.
        """
        if not self._runtime.sizing.rules.grads.holds_all:
            raise InfinityError(
                "coalesce_grad_reduction adds up the gradients of several backward passes, for which nothing is "
                'reserved: set tiering.update_schedule to "deferred"'
            )
        steps = self._step.counter.counts.global_steps
        yield
        if self._step.counter.counts.global_steps != steps:
            raise InfinityError("step() inside coalesce_grad_reduction: call it behind the context")

    # Precision #

    def fp16_enabled(self) -> bool:
        return self.config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.config.precision == "bf16"

    def amp_enabled(self) -> bool:
        """False: apex is not supported."""
        return False

    def torch_autocast_enabled(self) -> bool:
        """The model's forward runs under `torch.autocast`."""
        return self.config.autocast is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """In what it computes then."""
        return None if self.config.autocast is None else _DTYPES[self.config.autocast]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """In which the model computes, and in which the gradients of micro-batches are summed."""
        return _DTYPES[self.config.precision], _DTYPES[self.config.grad_accum_dtype]

    @property
    def communication_data_type(self) -> torch.dtype:
        """In which gradients travel between ranks."""
        return _DTYPES[self.config.communication_data_type]

    def dynamic_loss_scale(self) -> bool:
        """The loss scale follows the gradients."""
        return self._step.losses.loss_scale.dynamic

    def initial_dynamic_scale(self) -> float:
        """The loss scale that training began with; 1 without fp16."""
        fp16 = self.config.fp16
        if fp16 is None:
            return 1.0
        return fp16.loss_scale or 2.0**fp16.initial_scale_power

    # ZeRO #

    def zero_optimization(self) -> bool:
        """Something is divided among the ranks."""
        return self.config.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.config.zero.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self.config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.config.zero.stage >= 3

    def zero_offload_optimizer(self) -> str:
        """The home of optimizer states: none, cpu or nvme."""
        return self.config.zero.offload_optimizer.device

    def zero_offload_param(self) -> str:
        """The home of parameters: none, cpu or nvme."""
        return self.config.zero.offload_param.device

    def zero_cpu_offload(self) -> bool:
        """Optimizer states are in host memory."""
        return self.config.zero.offload_optimizer.device == "cpu"

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """What saves a model's weights gathers them: so it is, unless the configuration says false."""
        section = self.config.get("zero_optimization", {})
        names = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
        return not any(section.get(name) is False for name in names)

    # Optimizer #

    def gradient_clipping(self) -> float:
        """Global norm that gradients are clipped to; 0 for none."""
        return self.config.gradient_clipping

    def optimizer_name(self) -> str | None:
        """Type of the configuration's optimizer."""
        return None if self.config.optimizer is None else self.config.optimizer.type.lower()

    def optimizer_params(self) -> Mapping[str, Any] | None:
        """Hyper-parameters of the configuration's optimizer."""
        return None if self.config.optimizer is None else self.config.optimizer.params

    def scheduler_name(self) -> str | None:
        """Type of the configuration's learning-rate schedule."""
        return None if self.config.scheduler is None else self.config.scheduler.type

    def scheduler_params(self) -> Mapping[str, Any] | None:
        """Parameters of the configuration's learning-rate schedule."""
        return None if self.config.scheduler is None else self.config.scheduler.params

    def get_lr(self) -> list[float]:
        """Learning rate of every parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum of every parameter group: `betas`, or SGD's `momentum`; 0 where there is none."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]

    def was_step_applied(self) -> bool:
        """The last `step()` updated the parameters."""
        outcome = self._step.last.outcome
        at_boundary = self._step.counter.counts.micro_steps % self.config.gradient_accumulation_steps == 0
        return outcome is not None and at_boundary and not outcome.skipped

    # Gradients #

    def gradients_wait(self, what: str) -> bool:
        """Some gradients are not reduced over the ranks, which ask this together, yet.

        Args:
            what: asks, for messages.
        """
        self._step.check()
        self._runtime.together(what)
        return self._step.gradients.collected_anywhere()

    def waiting_gradient(self, unit: int, slot: int) -> torch.Tensor | None:
        """A copy of a gradient that is not reduced yet, flat: the sum of what the ranks have so far, if they do.

        Inside `no_sync` it is what this rank has, as if there were no others.
        """
        step = self._step
        found = step.gradients.collected_values(unit, slot, of_all=step.counter.synchronises)
        return found if found is None or step.counter.synchronises else found * step.losses.ranks_count

    def held_gradients(self, unit: int, slot: int, what: str) -> torch.Tensor | None:
        """This rank's part of a unit's gradients in host memory, if the parameter of this slot has one.

        Args:
            what: asks for it, for messages.
        """
        self._step.check()
        if self._step.updates.under_way:
            raise InfinityError(
                f'{what} after the last backward pass of a step: under tiering.update_schedule "backward" gradients '
                'are used as they come; set the schedule to "deferred"'
            )
        gradients = self._step.gradients
        self._runtime.together(what)
        gradients.check_reduced()  # else a gradient that waits for that would pass for none
        self._step.updates.undo_ahead()
        return self._step.updates.held_values(unit) if slot in gradients.slots_with_gradients(unit) else None

    def gradients_changed(self, unit: int) -> None:
        """What `held_gradients` gave was written to."""
        self._step.updates.remeasure(unit)

    # Telemetry #

    def steps_per_print(self) -> Any:
        """As the configuration has it; nothing is printed, see `stats()`."""
        return self.config.get("steps_per_print", 10)

    def wall_clock_breakdown(self) -> bool:
        """Monitors are told the seconds of each phase; `stats()` has them in any case."""
        return self.config.monitors.phases

    def memory_breakdown(self) -> bool:
        """As the configuration has it; `stats()` has the peak bytes of each tier in any case."""
        return bool(self.config.get("memory_breakdown", False))

    # States #

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Take the states off the device while something else needs it: they are never there where the CPU computes.

        Raises:
            InfinityError: the model computes on a device whose memory holds some of them.
        """
        if self.device.type == "cpu":
            return
        raise InfinityError(
            "offload_states: parameters that stay on the device cannot leave it for a while. Set "
            "zero_optimization.offload_param.device to cpu or nvme, and tiering.device_memory to what may stay there"
        )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo `offload_states`: there is nothing to do."""

    def empty_partition_cache(self) -> None:
        """Free parameters that were gathered ahead: the budget bounds them, so there is nothing to do."""

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Have `torch.compile` compile the model's blocks; the whole model if it has none.

        Args:
            backend: of torch.compile, with what else it takes in `compile_kwargs`.

        Raises:
            InfinityError: a step has begun.
            ConfigError: `schedule` or `compiled_autograd_enabled` is given, which are DeepSpeed's own compiler's.
        """
        if schedule is not None or compiled_autograd_enabled:
            given = "schedule" if schedule is not None else "compiled_autograd_enabled"
            raise ConfigError(f"engine.compile({given}=...) is not supported: leave it out")
        if not self.is_compiled:
            self._step.compile_blocks(self.module, backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """Some part of the model is compiled."""
        return is_compiled(self.module)
