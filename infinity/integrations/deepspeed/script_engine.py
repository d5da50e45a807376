"""`infinity.Engine`: the engine, and what scripts ask it under DeepSpeed's names, mostly about the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from infinity import engine
from infinity.accessors import DTYPES
from infinity.errors import ConfigError, InfinityError
from infinity.zero.compiled import is_compiled


class Engine(engine.Engine):
    """Trains one model whose states live in the tiers: what `infinity.initialize` makes.

    It is `infinity.engine.Engine`, which has the attributes and the calls of a training loop.
    """

    # Ranks #

    @property
    def dp_world_size(self) -> int:
        """As `world_size`: the batch is divided among all of them."""
        return self._runtime.ranks.size

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
        """Samples so far, those of skipped updates included: of every backward pass, if every `step()` ends a step."""
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
        """False: apex is not supported."""
        return False

    def torch_autocast_enabled(self) -> bool:
        """The model's forward runs under `torch.autocast`."""
        return self.config.autocast is not None

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """In which the model computes, and in which the gradients of micro-batches are summed."""
        return DTYPES[self.config.precision], DTYPES[self.config.grad_accum_dtype]

    @property
    def communication_data_type(self) -> torch.dtype:
        """In which gradients travel between ranks."""
        return DTYPES[self.config.communication_data_type]

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

    def get_mom(self) -> list[Any]:
        """Momentum of every parameter group: `betas`, or SGD's `momentum`; 0 where there is none."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]

    def was_step_applied(self) -> bool:
        """The last `step()` updated the parameters."""
        outcome = self._step.last.outcome
        return outcome is not None and not self._step.counter.position and not outcome.skipped

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
            backend: as in `torch.compile`; `compile_kwargs` has its other arguments.

        Raises:
            InfinityError: a step has begun.
            ConfigError: `schedule` or `compiled_autograd_enabled` is given, which are for DeepSpeed's own compiler.
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
