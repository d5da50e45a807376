"""`DeepSpeedConfig`: the resolved configuration under the names of DeepSpeed's attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from infinity.config import Config, load_config
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.misuse import AssertedConfigError
from infinity.integrations.deepspeed.precision_config import (
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    get_bfloat16_config,
    get_float16_config,
)
from infinity.integrations.deepspeed.zero_config import known_zero_config
from infinity.zero.ranks import world_size


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """Return the norm that gradients are clipped to; 0 for no clipping."""
    return load_config({key: param_dict[key] for key in ("gradient_clipping",) if key in param_dict}).gradient_clipping


# Attributes that are keys of the configuration, and their defaults.
KEYS: dict[str, Any] = {
    "dump_state": False,
    "gradient_predivide_factor": 1.0,
    "memory_breakdown": False,
    "prescale_gradients": False,
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
}
# Attributes that are always False, because a configuration with their features is refused.
OFF = (
    "curriculum_enabled_legacy",
    "data_efficiency_enabled",
    "eigenvalue_enabled",
    "eigenvalue_verbose",
    "elasticity_enabled",
    "load_universal_checkpoint",
    "pld_enabled",
    "sparse_gradients_enabled",
)


class DeepSpeedConfig:
    """A configuration with the checks of `initialize`."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise ConfigError("DeepSpeedConfig: `mpu` and `mesh_device` are not supported; leave them out")
        resolved = config if isinstance(config, Config) else load_config(config, world_size=world_size())
        self._param_dict = dict(resolved.source)
        self.resolved = resolved
        self.world_size = world_size()
        self.train_batch_size: int | None = resolved.train_batch_size
        self.train_micro_batch_size_per_gpu: int | None = resolved.micro_batch_size
        self.gradient_accumulation_steps: int | None = resolved.gradient_accumulation_steps
        self.managed_gradient_accumulation = resolved.managed_accumulation
        self.monitor_config = resolved.monitors
        self.gradient_allreduce_op = "sum" if resolved.sums_ranks else "mean"
        self.gradient_clipping = resolved.gradient_clipping
        self.dataloader_drop_last = resolved.drops_last
        self.torch_autocast_enabled = resolved.autocast is not None
        self._describe_precision(self._param_dict)
        self._describe_zero(self._param_dict.get("zero_optimization") or {})
        self._describe_optimizer()
        for name, default in KEYS.items():
            setattr(self, name, self._param_dict.get(name, default))
        for name in OFF:
            setattr(self, name, False)
        self.checkpoint_tag_validation_enabled = self.checkpoint_tag_validation_fail = True

    def _describe_precision(self, source: Mapping[str, Any]) -> None:
        self.fp16_enabled = self.resolved.precision == "fp16"
        self.bfloat16_enabled = self.resolved.precision == "bf16"
        self.float16_config = get_float16_config({"fp16": _given(source, "fp16", DeepSpeedFP16Config)})
        self.bfloat16_config = get_bfloat16_config({"bf16": _given(source, "bf16", DeepSpeedBF16Config)})
        data_types = source.get("data_types") or {}
        self.grad_accum_dtype = data_types.get("grad_accum_dtype")
        self.param_dtype, self.buffer_dtype = data_types.get("param_dtype"), data_types.get("buffer_dtype")

    def _describe_zero(self, section: Mapping[str, Any]) -> None:
        self.zero_enabled = self.resolved.zero.stage > 0
        self.zero_optimization_stage = self.resolved.zero.stage
        self.zero_config = known_zero_config(section)

    def _describe_optimizer(self) -> None:
        optimizer, scheduler = self.resolved.optimizer, self.resolved.scheduler
        self.optimizer_name = None if optimizer is None else optimizer.type.lower()
        self.optimizer_params = None if optimizer is None else optimizer.params
        self.scheduler_name = None if scheduler is None else scheduler.type
        self.scheduler_params = None if scheduler is None else scheduler.params

    def _configure_train_batch_size(self) -> None:
        """Compute the batch sizes that are None from the others. Raise AssertedConfigError if they contradict."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if not given.keys() & set(names[:2]):
            raise AssertedConfigError("give train_batch_size or train_micro_batch_size_per_gpu")
        try:
            found = load_config(given, world_size=self.world_size)
        except ConfigError as error:
            raise AssertedConfigError(str(error)) from error
        self.train_batch_size, self.train_micro_batch_size_per_gpu = found.train_batch_size, found.micro_batch_size
        self.gradient_accumulation_steps = found.gradient_accumulation_steps


def _given(source: Mapping[str, Any], section: str, cls: type[BaseModel]) -> dict[str, Any]:
    """Return the values of a section that DeepSpeed's class has as fields."""
    values = source.get(section) or {}
    return {key: value for key, value in values.items() if key in cls.model_fields and value is not None}
