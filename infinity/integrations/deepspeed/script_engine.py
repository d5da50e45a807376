"""`infinity.Engine`: the engine with DeepSpeed's names of further methods, most of them about the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from infinity import engine
from infinity.errors import ConfigError, InfinityError
from infinity.zero.compiled import is_compiled
from infinity.zero.sizing import DTYPES


class Engine(engine.Engine):
    """Train one model whose states are in the tiers. Created by `infinity.initialize`.

    The attributes and methods of a training loop are those of `infinity.engine.Engine`.
    """

    # Ranks #

    @property
    def dp_world_size(self) -> int:
        """As `world_size`: the batch is divided among all ranks."""
        return self._runtime.ranks.size

    # Batches #

    def train_batch_size(self) -> int:
        """Return the samples per update over all ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per forward on one rank."""
        return self.config.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches per update."""
        return self.config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (samples per update, samples per forward on one rank, micro-batches per update)."""
        config = self.config
        return config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps

    @property
    def global_samples(self) -> int:
        """The number of samples so far, including skipped steps; of backward passes, without managed accumulation."""
        counts, config = self._step.counter.counts, self.config
        if config.managed_accumulation:
            return counts.global_steps * config.train_batch_size
        return counts.micro_steps * (config.train_batch_size // config.gradient_accumulation_steps)

    # Precision #

    def fp16_enabled(self) -> bool:
        return self.config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.config.precision == "bf16"

    def amp_enabled(self) -> bool:
        """Return False: apex is not supported."""
        return False

    def torch_autocast_enabled(self) -> bool:
        """Whether the model's forward runs under `torch.autocast`."""
        return self.config.autocast is not None

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the compute dtype, and the dtype in which the gradients of micro-batches are summed."""
        return DTYPES[self.config.precision], DTYPES[self.config.grad_accum_dtype]

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which ranks exchange gradients."""
        return DTYPES[self.config.communication_data_type]

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self._step.losses.loss_scale.dynamic

    def initial_dynamic_scale(self) -> float:
        """Return the initial loss scale; 1 without fp16."""
        fp16 = self.config.fp16
        if fp16 is None:
            return 1.0
        return fp16.loss_scale or 2.0**fp16.initial_scale_power

    # ZeRO #

    def zero_optimization(self) -> bool:
        """Whether any states are divided among the ranks."""
        return self.config.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.config.zero.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self.config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.config.zero.stage >= 3

    def zero_offload_optimizer(self) -> str:
        """Return the home of optimizer states: none, cpu or nvme."""
        return self.config.zero.offload_optimizer.device

    def zero_offload_param(self) -> str:
        """Return the home of parameters: none, cpu or nvme."""
        return self.config.zero.offload_param.device

    def zero_cpu_offload(self) -> bool:
        """Whether the home of optimizer states is host memory."""
        return self.config.zero.offload_optimizer.device == "cpu"

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether a save of the model gathers its weights: True unless the configuration says false."""
        section = self.config.get("zero_optimization", {})
        names = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
        return not any(section.get(name) is False for name in names)

    # Optimizer #

    def gradient_clipping(self) -> float:
        """Return the global norm that gradients are clipped to; 0 for no clipping."""
        return self.config.gradient_clipping

    def optimizer_name(self) -> str | None:
        """Return the type of the configured optimizer, or None."""
        return None if self.config.optimizer is None else self.config.optimizer.type.lower()

    def optimizer_params(self) -> Mapping[str, Any] | None:
        """Return the hyper-parameters of the configured optimizer, or None."""
        return None if self.config.optimizer is None else self.config.optimizer.params

    def scheduler_name(self) -> str | None:
        """Return the type of the configured learning-rate schedule, or None."""
        return None if self.config.scheduler is None else self.config.scheduler.type

    def scheduler_params(self) -> Mapping[str, Any] | None:
        """Return the parameters of the configured learning-rate schedule, or None."""
        return None if self.config.scheduler is None else self.config.scheduler.params

    def get_mom(self) -> list[Any]:
        """Return the momentum of every parameter group: `betas`, or SGD's `momentum`; 0 for none."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the parameters."""
        outcome = self._step.last.outcome
        return outcome is not None and not self._step.counter.position and not outcome.skipped

    # Telemetry #

    def steps_per_print(self) -> Any:
        """Return the configured value. Nothing is printed, see `stats()`."""
        return self.config.get("steps_per_print", 10)

    def wall_clock_breakdown(self) -> bool:
        """Whether monitors get the seconds of each phase. `stats()` always has them."""
        return self.config.monitors.phases

    def memory_breakdown(self) -> bool:
        """Return the configured value. `stats()` always has the peak bytes of each tier."""
        return bool(self.config.get("memory_breakdown", False))

    # States #

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Do nothing if the model computes on the CPU: no states are on a device.

        Raises:
            InfinityError: the model computes on a device, whose memory may hold states.
        """
        if self.device.type == "cpu":
            return
        raise InfinityError(
            "offload_states: parameters that stay on the device cannot leave it for a while. Set "
            "zero_optimization.offload_param.device to cpu or nvme, and tiering.device_memory to what may stay there"
        )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Do nothing, as `offload_states`."""

    def empty_partition_cache(self) -> None:
        """Do nothing: the budget bounds the memory of parameters that are gathered early."""

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model's blocks with `torch.compile`; the whole model if it has no blocks.

        Args:
            backend: as in `torch.compile`; `compile_kwargs` has its other arguments.

        Raises:
            InfinityError: a step has begun.
            ConfigError: `schedule` or `compiled_autograd_enabled`, options of DeepSpeed's own compiler, is given.
        """
        if schedule is not None or compiled_autograd_enabled:
            given = "schedule" if schedule is not None else "compiled_autograd_enabled"
            raise ConfigError(f"engine.compile({given}=...) is not supported: leave it out")
        if not self.is_compiled:
            self._step.compile_blocks(self.module, backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """Whether a part of the model is compiled."""
        return is_compiled(self.module)
