"""DeepSpeed's keys that are no fields of the schema: without effect here, refused, or deprecated.

The first two tables map a dotted path to the reason, which the log line, the error and the documentation show. A
refused key is accepted if its value switches the feature off: false, null, or DeepSpeed's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.config.values import boolean

_BUCKETS = "collectives work on a unit at a time"
_PRESCALED = "the loss is divided by the number of ranks before backward"
_BUFFERS = "buffer sizes follow from the model and tiering.host_memory"
_PINNED = "host memory is pinned where there is a GPU"
_LIVE = "see tiering.host_memory, tiering.device_memory and tiering.max_unit_size"
_PREFETCH = "prefetch follows from the recorded trace and the memory budget"
_COLLECTIVES = "how a unit is gathered is not configurable"
_GATHERED = "saving always gathers, one unit at a time"
_CHECKPOINTS = "checkpoints are always stored by parameter name, in safetensors"

NO_EFFECT: dict[str, str] = {
    "tuned": "it records the choice of `infinity tune`, and the reasons",
    "steps_per_print": "the training loop prints; see engine.stats()",
    "memory_breakdown": "engine.stats() always has the peak bytes of each tier",
    "dump_state": "the resolved configuration is logged at level DEBUG",
    "zero_allow_untested_optimizer": "unsupported optimizers are refused by name",
    "zero_force_ds_cpu_optimizer": "accelerate reads it: false keeps the optimizer of the script",
    "disable_allgather": _BUCKETS,
    "prescale_gradients": _PRESCALED,
    "gradient_predivide_factor": _PRESCALED,
    "sparse_gradients": "sparse gradients are accepted and made dense",
    "disable_python_gc": "Python's garbage collector is not changed",
    "log_level": "use Python's logging configuration",
    "vocabulary_size": "DeepSpeed only warns about its alignment",
    "use_data_before_expert_parallelism": "there are no expert-parallel groups; see expert_parallel",
    "seq_parallel_communication_data_type": "there is no sequence parallelism; see sequence_parallel_size",
    "timers": "engine.stats() always has the seconds of each phase",
    "optimizer.legacy_fusion": "there is one implementation of each optimizer",
    "optimizer.torch_adam": "there is one implementation of each optimizer",
    "checkpoint.tag_validation": "all ranks write one checkpoint, and tags that differ are refused",
    "checkpoint.use_node_local_storage": "every rank writes its own files, whether directories are shared or not",
    "checkpoint.load_universal": _CHECKPOINTS,
    "checkpoint.parallel_write": _CHECKPOINTS,
    "checkpoint.checkpoint_serialization": _CHECKPOINTS,
    "checkpoint.writer": "writing always streams, one unit at a time",
    "zero_optimization.contiguous_gradients": "gradients are always held flat",
    "zero_optimization.overlap_comm": "communication always overlaps",
    "zero_optimization.reduce_scatter": _BUCKETS,
    "zero_optimization.reduce_bucket_size": _BUCKETS,
    "zero_optimization.allgather_partitions": _BUCKETS,
    "zero_optimization.allgather_bucket_size": _BUCKETS,
    "zero_optimization.use_multi_rank_bucket_allreduce": _BUCKETS,
    "zero_optimization.round_robin_gradients": _BUCKETS,
    "zero_optimization.sub_group_size": "the optimizer works on tiles; see tiering.tile_size",
    "zero_optimization.stage3_max_live_parameters": _LIVE,
    "zero_optimization.max_live_parameters": _LIVE,
    "zero_optimization.stage3_max_reuse_distance": _PREFETCH,
    "zero_optimization.max_reuse_distance": _PREFETCH,
    "zero_optimization.stage3_adaptive_prefetch_bucket_size": _PREFETCH,
    "zero_optimization.adaptive_prefetch_bucket_size": _PREFETCH,
    "zero_optimization.stage3_adaptive_prefetch_min_size": _PREFETCH,
    "zero_optimization.adaptive_prefetch_min_size": _PREFETCH,
    "zero_optimization.stage3_adaptive_prefetch_max_size": _PREFETCH,
    "zero_optimization.adaptive_prefetch_max_size": _PREFETCH,
    "zero_optimization.stage3_model_persistence_threshold": "see tiering.host_memory",
    "zero_optimization.model_persistence_threshold": "see tiering.host_memory",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _GATHERED,
    "zero_optimization.gather_16bit_weights_on_model_save": _GATHERED,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _GATHERED,
    "zero_optimization.stage3_module_granularity_threshold": "a transformer block is a unit",
    "zero_optimization.module_granularity_threshold": "a transformer block is a unit",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _COLLECTIVES,
    "zero_optimization.use_all_reduce_for_fetch_params": _COLLECTIVES,
    "zero_optimization.stage3_allgather_sequential": _COLLECTIVES,
    "zero_optimization.allgather_sequential": _COLLECTIVES,
    "zero_optimization.mics_hierarchical_params_gather": _COLLECTIVES,
    "zero_optimization.compute_grad_norm": "the norm is computed while gradients are copied",
    "zero_optimization.enable_sanity_checks": "checks are always on",
    "zero_optimization.legacy_stage1": "there is one stage 1",
    "zero_optimization.parameter_alignment": "parameters are always aligned in their unit's buffer",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "there is no Muon; see optimizer.type",
    "zero_optimization.ignore_unused_parameters": "parameters without a gradient are always skipped",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold the exact masters",
    "zero_optimization.elastic_checkpoint": "checkpoints are stored by parameter name",
    "zero_optimization.memory_efficient_linear": "torch is not patched",
    "zero_optimization.override_module_apply": "torch is not patched",
    "zero_optimization.log_trace_cache_warnings": "a step that leaves the trace causes no warning",
    "zero_optimization.pipeline_loading_checkpoint": "loading always streams",
    "zero_optimization.cpu_offload_use_pin_memory": _PINNED,
    "zero_optimization.offload_param.pin_memory": _PINNED,
    "zero_optimization.offload_param.buffer_count": _BUFFERS,
    "zero_optimization.offload_param.buffer_size": _BUFFERS,
    "zero_optimization.offload_param.max_in_cpu": _BUFFERS,
    "zero_optimization.offload_optimizer.pin_memory": _PINNED,
    "zero_optimization.offload_optimizer.buffer_count": _BUFFERS,
    "zero_optimization.offload_optimizer.pipeline": "reads and writes are always pipelined",
    "zero_optimization.offload_optimizer.pipeline_read": "reads are always pipelined",
    "zero_optimization.offload_optimizer.pipeline_write": "writes are always pipelined",
    "zero_optimization.offload_optimizer.fast_init": "states are always initialised by streaming",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "the optimizer has its own thread pool",
    "aio.single_submit": "requests are submitted in batches",
    "aio.overlap_events": "submission and completion always overlap",
    "aio.thread_count": "see aio.intra_op_parallelism",
    "activation_checkpointing.partition_activations": "every rank keeps its own activations",
    "activation_checkpointing.contiguous_memory_optimization": "offloaded activations are in one arena",
    "activation_checkpointing.number_checkpoints": "the arena's size is tiering.activation_memory",
    "activation_checkpointing.synchronize_checkpoint_boundary": "no synchronization is needed",
    "activation_checkpointing.profile": "engine.stats() always has the seconds of each phase",
    "torch_autocast.lower_precision_safe_modules": "ranks exchange gradients in communication_data_type",
    "bf16.immediate_grad_update": "gradients leave the parameters as backward produces them",
}

# Allowed values of keys without an effect, in upper or lower case, for which DeepSpeed refuses all others.
CHOICES: dict[str, tuple[str, ...]] = {"checkpoint.tag_validation": ("Ignore", "Warn", "Fail")}

REFUSED: dict[str, str] = {
    "amp": "apex AMP is not supported; use bf16",
    "sparse_attention": "not supported; use the model's attention implementation",
    "comet": "not supported; see tensorboard, wandb and csv_monitor",
    "trackio": "not supported; see tensorboard, wandb and csv_monitor",
    "flops_profiler": "not supported",
    "comms_logger": "not supported",
    "autotuning": "use `infinity tune`",
    "elasticity": "not supported",
    "compression_training": "not supported",
    "data_efficiency": "not supported",
    "curriculum_learning": "not supported",
    "progressive_layer_drop": "not supported",
    "eigenvalue": "not supported",
    "quantize_training": "not supported",
    "hybrid_engine": "not supported",
    "data_types.param_dtype": "parameters have the dtype of fp16 or bf16, whichever is enabled",
    "data_types.buffer_dtype": "buffers that are saved have the parameters' dtype, others keep their own",
    "data_types.keep_in_fp32_modules": "buffers registered with persistent=False keep their own dtype",
    "compile": "call torch.compile on the model or its blocks before initialize, or engine.compile() after it",
    "nebula": "not supported",
    "datastates_ckpt": _CHECKPOINTS,
    "graph_harvesting": "not supported; removed from DeepSpeed",
    "weight_quantization": "quantised weights are for inference only",
    "expert_parallel": "not supported; a mixture-of-experts block is one unit",
    "pipeline": "use torch.distributed.pipelining",
    "tensor_parallel": "use torch.distributed.tensor.parallel",
    "sequence_parallel_size": "not supported",
    "zero_optimization.zenflow": "updates already overlap; see tiering.update_schedule",
    "zero_optimization.zero_quantized_weights": "quantised collectives are not supported",
    "zero_optimization.zero_quantized_nontrainable_weights": "quantised collectives are not supported",
    "zero_optimization.zero_quantized_gradients": "quantised collectives are not supported",
    "zero_optimization.offload_optimizer.super_offload": "updates already overlap; see tiering.update_schedule",
    "zero_optimization.zeropp_loco_param": "quantised collectives are not supported",
    "bf16.check_grad_overflow": "gradients are always checked",
    "fp16.fp16_master_weights_and_grads": "masters are exact; see tiering.state_format",
    "bf16.bf16_master_weights_and_grads": "masters are exact; see tiering.state_format",
    "bf16.bf16_optimizer_states": "see tiering.state_format",
}

# Switches that DeepSpeed has deprecated, and the section whose device is cpu if the switch is on.
DEPRECATED: dict[str, str] = {
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
}

# Values of refused keys that switch the feature off, besides false and null.
_OFF: dict[str, object] = {
    "sequence_parallel_size": 1,
    "data_types.keep_in_fp32_modules": [],
    "bf16.check_grad_overflow": True,
}
# The key that switches a section on; without it the section does nothing in DeepSpeed.
_SWITCHES = dict.fromkeys(
    (
        "amp",
        "autotuning",
        "comet",
        "comms_logger",
        "curriculum_learning",
        "data_efficiency",
        "eigenvalue",
        "elasticity",
        "expert_parallel",
        "flops_profiler",
        "hybrid_engine",
        "nebula",
        "progressive_layer_drop",
        "quantize_training",
        "trackio",
    ),
    "enabled",
) | {"compile": "deepcompile", "tensor_parallel": "autotp_size"}


def is_switched_off(path: str, value: Any) -> bool:
    """Whether a refused key has a value that switches its feature off."""
    if isinstance(value, Mapping):
        switch = value.get(_SWITCHES.get(path, "enabled"), path not in _SWITCHES)
        return _is(switch, False) or all(_is(inner, False) for inner in value.values())
    return _is(value, _OFF.get(path, False))


def _is(value: Any, off: object) -> bool:
    return value is None or boolean(value) in ("auto", off)
