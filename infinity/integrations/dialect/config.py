"""`DeepSpeedConfig`: the resolved configuration under the names of DeepSpeed's attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.config import Config, load_config
from infinity.errors import ConfigError
from infinity.zero.ranks import world_size


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """The norm that gradients are clipped to; 0 for none.

    Raises:
        ConfigError: it is no such number.
    """
    return load_config({key: param_dict[key] for key in ("gradient_clipping",) if key in param_dict}).gradient_clipping


class DeepSpeedConfig:
    """A configuration that is checked as `initialize` checks it.

    Raises:
        ConfigError: it cannot work, by name.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise ConfigError("DeepSpeedConfig: `mpu` and `mesh_device` are not supported; leave them out")
        resolved = config if isinstance(config, Config) else load_config(config, world_size=world_size())
        self._param_dict = dict(resolved.source)
        self.resolved = resolved
        self.train_batch_size = resolved.train_batch_size
        self.train_micro_batch_size_per_gpu = resolved.micro_batch_size
        self.gradient_accumulation_steps = resolved.gradient_accumulation_steps
        self.monitor_config = resolved.monitors
        self.gradient_clipping = resolved.gradient_clipping
        self.fp16_enabled = resolved.precision == "fp16"
        self.bfloat16_enabled = resolved.precision == "bf16"
        self.zero_enabled = resolved.zero.stage > 0
        self.zero_optimization_stage = resolved.zero.stage
        self.optimizer_name = None if resolved.optimizer is None else resolved.optimizer.type.lower()
        self.optimizer_params = None if resolved.optimizer is None else resolved.optimizer.params
        self.scheduler_name = None if resolved.scheduler is None else resolved.scheduler.type
        self.scheduler_params = None if resolved.scheduler is None else resolved.scheduler.params
