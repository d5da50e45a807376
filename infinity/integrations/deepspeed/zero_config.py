"""The section `zero_optimization` as DeepSpeed's class, with its fields and defaults, for scripts that use the class.

`initialize` does not use it. docs/configuration.md describes the effect of each key here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from infinity.integrations.deepspeed.config_model import DeepSpeedConfigModel

_Count = Annotated[int, Field(ge=0)]
_Names = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]

# Modules that DeepSpeed gathers as a whole by default: blocks of experts.
DEFAULT_LEAF_MODULE_CLASSES = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class OffloadDeviceEnum(str, Enum):
    """The homes of offloaded states."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The kinds of states that `offload_states` of DeepSpeed can move off the device."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, Enum):
    """The stages, named by the states that they divide."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796  (DeepSpeed has both names)


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """The section `offload_param`."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: _Count = 5
    buffer_size: _Count = 10**8
    max_in_cpu: _Count = 10**9
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """The section `offload_optimizer`."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: _Count = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: Annotated[float, Field(ge=0, le=1)] = 0.8

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap with the update."""
        return self.pipeline_read or self.pipeline_write


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """The section `leaf_module`: full names of classes, names of modules, and suffixes of these; a list or one name."""

    classes: _Names = Field(default_factory=DEFAULT_LEAF_MODULE_CLASSES.copy)
    names: _Names = Field(default_factory=DEFAULT_LEAF_MODULE_NAMES.copy)
    name_suffixes: _Names = Field(default_factory=DEFAULT_LEAF_MODULE_NAME_SUFFIXES.copy)


def _deprecated(new: str, to_new: Any = None) -> Any:
    facts: dict[str, Any] = {"deprecated": True, "new_param": new, "new_param_fn": to_new}
    return Field(None, json_schema_extra=facts)


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """The section `zero_optimization`."""

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: Annotated[int, Field(gt=0)] = 5 * 10**8
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: _Count = 5 * 10**8
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    sub_group_size: _Count = 10**9
    cpu_offload_param: bool | None = _deprecated(
        "offload_param", lambda on: DeepSpeedZeroOffloadParamConfig(device=OffloadDeviceEnum.cpu) if on else None
    )
    cpu_offload_use_pin_memory: bool | None = None
    cpu_offload: bool | None = _deprecated(
        "offload_optimizer",
        lambda on: DeepSpeedZeroOffloadOptimizerConfig(device=OffloadDeviceEnum.cpu) if on else None,
    )
    prefetch_bucket_size: _Count = Field(5 * 10**7, alias="stage3_prefetch_bucket_size")
    adaptive_prefetch_bucket_size: bool = Field(False, alias="stage3_adaptive_prefetch_bucket_size")
    adaptive_prefetch_min_size: _Count = Field(10**7, alias="stage3_adaptive_prefetch_min_size")
    adaptive_prefetch_max_size: _Count = Field(5 * 10**8, alias="stage3_adaptive_prefetch_max_size")
    param_persistence_threshold: _Count = Field(10**5, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: _Count = Field(sys.maxsize, alias="stage3_model_persistence_threshold")
    max_live_parameters: _Count = Field(10**9, alias="stage3_max_live_parameters")
    max_reuse_distance: _Count = Field(10**9, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: int = Field(0, alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = Field(False, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    stage3_gather_fp16_weights_on_model_save: bool | None = _deprecated("gather_16bit_weights_on_model_save")
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: _Count = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    mics_shard_size: int = -1
    mics_hierarchical_params_gather: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)

    @model_validator(mode="before")
    @classmethod
    def _overlaps_by_default_at_stage_3(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("overlap_comm") is None:
            return {**values, "overlap_comm": values.get("stage") == ZeroStageEnum.weights}
        return values

    @model_validator(mode="after")
    def _fits_its_stage(self) -> DeepSpeedZeroConfig:
        if not self.compute_grad_norm and self.stage not in (1, 2):
            raise ValueError(f"compute_grad_norm is false at stage {self.stage:d}; it can be at stages 1 and 2")
        if self.offload_optimizer is not None and self.offload_optimizer.ratio < 1 and self.stage != 3:
            raise ValueError(f"offload_optimizer.ratio is {self.offload_optimizer.ratio}; below 1 it needs stage 3")
        return self


def known_zero_config(section: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Return DeepSpeed's section, without infinity's own keys."""
    fields = DeepSpeedZeroConfig.model_fields
    known = {name for key, field in fields.items() for name in (key, field.alias) if name}
    values = {key: value for key, value in section.items() if key in known and value is not None}
    return get_zero_config({"zero_optimization": values})


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Return the section of a configuration, or its defaults if there is none."""
    section = param_dict.get("zero_optimization", {})
    if isinstance(section, bool):  # its oldest form
        section = {"stage": int(section)}
    return DeepSpeedZeroConfig(**section)
