"""Methods of an engine that return values of its configuration's sections, under DeepSpeed's names.

They return the configured value, or DeepSpeed's default. docs/configuration.md describes the effect of each key here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.comm import get_rank
from infinity.integrations.deepspeed.config import KEYS, OFF, DeepSpeedConfig
from infinity.integrations.deepspeed.precision_config import get_float16_config
from infinity.integrations.deepspeed.zero_config import DeepSpeedZeroConfig, known_zero_config

# Methods that return a field of the section zero_optimization.
_ZERO_FIELDS = {
    "zero_reduce_scatter": "reduce_scatter",
    "zero_overlap_comm": "overlap_comm",
    "zero_sub_group_size": "sub_group_size",
    "zero_reduce_bucket_size": "reduce_bucket_size",
    "zero_multi_rank_bucket_allreduce": "use_multi_rank_bucket_allreduce",
    "zero_allgather_bucket_size": "allgather_bucket_size",
    "zero_allgather_partitions": "allgather_partitions",
    "zero_allgather_sequential": "allgather_sequential",
    "zero_compute_grad_norm": "compute_grad_norm",
    "zero_contiguous_gradients": "contiguous_gradients",
    "zero_load_from_fp32_weights": "load_from_fp32_weights",
    "zero_elastic_checkpoint": "elastic_checkpoint",
    "zero_max_live_parameters": "max_live_parameters",
    "zero_max_reuse_distance": "max_reuse_distance",
    "zero_prefetch_bucket_size": "prefetch_bucket_size",
    "zero_module_granularity_threshold": "module_granularity_threshold",
    "zero_param_persistence_threshold": "param_persistence_threshold",
    "zero_model_persistence_threshold": "model_persistence_threshold",
    "zero_legacy_stage1": "legacy_stage1",
    "zero_ignore_unused_parameters": "ignore_unused_parameters",
    "zero_round_robin_gradients": "round_robin_gradients",
    "zero_parameter_alignment": "parameter_alignment",
    "zero_hpz_partition_size": "zero_hpz_partition_size",
    "zero_quantized_weights": "zero_quantized_weights",
    "zero_quantized_nontrainable_weights": "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients": "zero_quantized_gradients",
    "zero_log_trace_cache_warnings": "log_trace_cache_warnings",
    "is_sanity_checks_enabled": "enable_sanity_checks",
}
# Methods that return a key of the configuration.
_KEYS = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dump_state", "gradient_predivide_factor")
# Methods that always return False, because a configuration with their features is refused; besides `config.OFF`.
_OFF = (
    "autotuning_enabled",
    "bf16_master_weights_and_gradients",
    "bf16_optimizer_states",
    "curriculum_learning_enabled",
    "data_sampling_enabled",
    "flops_profiler_enabled",
    "fp16_master_weights_and_gradients",
    "optimizer_legacy_fusion",
    "random_ltd_enabled",
    "super_offload",
)


class SectionFacts:
    """A mixin of the engine, which sets these fields."""

    config: Config

    @cached_property
    def _config(self) -> DeepSpeedConfig:
        return DeepSpeedConfig(self.config)

    @cached_property
    def _zero_section(self) -> DeepSpeedZeroConfig:
        return known_zero_config(self.config.get("zero_optimization") or {})

    def managed_gradient_accumulation(self) -> bool:
        """Whether a step ends after the configured number of micro-batches."""
        return self.config.managed_accumulation

    def fp16_auto_cast(self) -> bool:
        """Whether inputs are cast to fp16."""
        return self.config.casts_inputs

    def dataloader_drop_last(self) -> bool:
        """Whether data loaders drop a last micro-batch that is not full."""
        return self.config.drops_last

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Return True: different tags on the ranks are always refused, whatever `checkpoint.tag_validation` is."""
        return True

    checkpoint_tag_validation_fail = checkpoint_tag_validation_enabled

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether the home of optimizer states is NVMe."""
        return self.config.zero.offload_optimizer.device == "nvme"

    def postscale_gradients(self) -> bool:
        """Return the configured value. Losses are always divided before backward."""
        return not self.config.get("prescale_gradients", False)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the settings of a dynamic loss scale, by DeepSpeed's names."""
        known = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis")
        section = self.config.get("fp16") or {}
        values = {key: section[key] for key in (*known, "min_loss_scale") if key in section}
        return get_float16_config({"fp16": values}).dynamic_loss_scale_args()

    def get_data_parallel_rank(self) -> int:
        """Return the rank of this process among those that share the batch."""
        return get_rank()

    def get_tensor_parallel_rank(self) -> int:
        """Return 0: the engine divides no layer among ranks."""
        return 0

    get_model_parallel_rank = get_tensor_parallel_rank

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Raise ConfigError unless this is the configured value."""
        self._keep("train_micro_batch_size_per_gpu", self.config.micro_batch_size, micro_batch_size)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raise ConfigError unless this is the configured value."""
        self._keep("train_batch_size", self.config.train_batch_size, train_batch_size)

    def _keep(self, key: str, has: int, wanted: int) -> None:
        if wanted != has:
            raise ConfigError(
                f"{key} is {has} and cannot become {wanted} while an engine trains, because its memory is laid out for "
                "this value: save a checkpoint, and continue from it with a new engine"
            )

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return a loader of this rank's share of a dataset. `route` and `pin_memory` have no effect."""
        if data_sampler is None and not isinstance(dataset, torch.utils.data.IterableDataset):
            data_sampler = torch.utils.data.DistributedSampler(dataset)
        return torch.utils.data.DataLoader(
            dataset,
            batch_size or self.config.micro_batch_size,
            sampler=data_sampler,
            num_workers=num_local_io_workers or 0,
            collate_fn=collate_fn,
            drop_last=self.config.drops_last,
        )


def _of_section(field: str) -> Callable[[Any], Any]:
    return lambda self: getattr(self._zero_section, field)


def _of_key(key: str) -> Callable[[Any], Any]:
    return lambda self: self.config.get(key, KEYS[key])


def _add(name: str, answer: Callable[[Any], Any], what: str) -> None:
    answer.__name__ = name
    answer.__doc__ = what
    setattr(SectionFacts, name, answer)


for _name, _field in _ZERO_FIELDS.items():
    _add(_name, _of_section(_field), f"`zero_optimization.{_field}`.")
for _name in _KEYS:
    _add(_name, _of_key(_name), f"`{_name}`.")
for _name in (*OFF, *_OFF):
    _add(_name, lambda self: False, "Return False: a configuration with this feature is refused.")
