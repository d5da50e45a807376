"""Every key that DeepSpeed 0.19 reads is honoured, accepted without effect, or refused by name."""

from __future__ import annotations

import logging

import pytest

from infinity.config import load_config
from infinity.config.keys import DEPRECATED, NO_EFFECT, REFUSED
from infinity.config.load import known_keys
from infinity.errors import ConfigError

# Collected from runtime/{config,constants,precision_config}.py, runtime/zero/{config,offload_config}.py,
# monitor/config.py, {profiling,comm,compile,datastates,utils}/config.py and the checkpoint and aio constants.
TOP_LEVEL = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    gradient_clipping optimizer scheduler fp16 bf16 bfloat16 zero_optimization aio data_types checkpoint
    steps_per_print wall_clock_breakdown memory_breakdown dump_state disable_python_gc log_level timers
    communication_data_type seq_parallel_communication_data_type sequence_parallel_size
    prescale_gradients gradient_predivide_factor gradient_allreduce_op disable_allgather sparse_gradients
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer dataloader_drop_last vocabulary_size
    use_data_before_expert_parallelism expert_parallel tensor_parallel pipeline compile hybrid_engine
    weight_quantization datastates_ckpt activation_checkpointing torch_autocast data_efficiency
    tensorboard wandb csv_monitor comet trackio flops_profiler comms_logger autotuning
    nebula compression_training amp quantize_training eigenvalue sparse_attention elasticity graph_harvesting
    curriculum_learning progressive_layer_drop
"""
SECTIONS = {
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "fp16": """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads""",
    "bf16": """enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
        bf16_optimizer_states""",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "checkpoint": """tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization
        writer""",
    "zero_optimization": """
        stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
        elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param
        cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size stage3_prefetch_bucket_size
        param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold
        stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters max_reuse_distance
        stage3_max_reuse_distance gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save
        module_granularity_threshold stage3_module_granularity_threshold use_all_reduce_for_fetch_params
        stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential
        stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
        parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
        zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
        mics_shard_size mics_hierarchical_params_gather zeropp_loco_param""",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": """device nvme_path buffer_count pin_memory pipeline_read pipeline_write
        fast_init ratio super_offload cpuadam_cores_perc""",
}
DEEPSPEED_KEYS = TOP_LEVEL.split() + [f"{name}.{key}" for name, keys in SECTIONS.items() for key in keys.split()]

# Keys of refused features at the values that DeepSpeed takes as "not wanted".
SWITCHED_OFF = {
    "comet": {},
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
    "comms_logger": {"verbose": True, "prof_all": True},  # nothing switches it on
    "amp": {"enabled": False, "opt_level": "O1"},
    "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
    "weight_quantization": {"enabled": False},
    "compile": {"deepcompile": False, "offload_activation": False},
    "tensor_parallel": {"autotp_size": 0},
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": "false",
        "number_checkpoints": None,
    },
    "pipeline": None,
    "checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False},
    "datastates_ckpt": False,
    "sequence_parallel_size": 1,
    "data_types": {"grad_accum_dtype": None, "param_dtype": None, "keep_in_fp32_modules": []},
    "fp16": {"fp16_master_weights_and_grads": "false"},
    "bf16": {"check_grad_overflow": True, "bf16_optimizer_states": False},
    "zero_optimization": {"zero_hpz_partition_size": 1, "zero_quantized_weights": False, "cpu_offload": "auto"},
    "zero_optimization.offload_optimizer": {"super_offload": False},
}


@pytest.mark.parametrize("key", DEEPSPEED_KEYS)
def test_every_key_of_deepspeed_is_classified_once(key) -> None:
    known = dict(known_keys())
    homes = [key in NO_EFFECT, key in REFUSED, key in DEPRECATED, key in known]
    is_section_of_listed_keys = any(path.startswith(key + ".") for path in (*NO_EFFECT, *REFUSED))
    assert sum(homes) == 1 or (not any(homes) and is_section_of_listed_keys)


@pytest.mark.parametrize("key", sorted(SWITCHED_OFF))
def test_what_is_switched_off_is_accepted(key, caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert load_config({key: SWITCHED_OFF[key]}) == load_config({})
    assert f"configuration key {key}" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("comet", {"enabled": True}),
        ("trackio", {"enabled": True}),
        ("weight_quantization", {"post_init_quant": {"fc": {}}}),
        ("bf16.check_grad_overflow", False),
        ("zero_optimization.zero_quantized_gradients", True),
        ("tensor_parallel", {"autotp_size": 2}),
        ("compile", {"deepcompile": True}),
    ],
)
def test_what_is_switched_on_and_not_supported_is_refused(key, value) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({key: value})
    assert str(refused.value) == f"{key} is {value!r}: {REFUSED[key]}; remove the key"


@pytest.mark.parametrize("value", ["Ignore", "WARN", "fail", None])
def test_ways_to_validate_tags_are_accepted(value) -> None:
    assert load_config({"checkpoint": {"tag_validation": value}}) == load_config({})


@pytest.mark.parametrize("value", ["foo", True, 3])
def test_no_way_to_validate_tags_is_refused(value) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.tag_validation is .*; choose one of Ignore, Warn, Fail"):
        load_config({"checkpoint": {"tag_validation": value}})


def test_the_spellings_without_stage3_mean_the_same(caplog) -> None:
    config = load_config({"zero_optimization": {"param_persistence_threshold": 5, "max_live_parameters": 1e9}})
    assert config.zero.param_persistence_threshold == 5
    assert config.zero.prefetch_numel is None
    for key, value in (("prefetch_bucket_size", 5e7), ("stage3_prefetch_bucket_size", 0.9 * 64 * 64)):
        assert load_config({f"zero_optimization.{key}": value}).zero.prefetch_numel == int(value)
    with caplog.at_level(logging.INFO):
        load_config({"zero_optimization.max_reuse_distance": "auto"})
    assert "zero_optimization.max_reuse_distance has no effect" in caplog.text


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, "bf16 and bfloat16"),
        (
            {"zero_optimization": {"param_persistence_threshold": 5, "stage3_param_persistence_threshold": 6}},
            "zero_optimization.param_persistence_threshold and zero_optimization.stage3_param_persistence_threshold",
        ),
    ],
)
def test_a_key_given_under_two_names_is_refused(values, names) -> None:
    with pytest.raises(ConfigError, match=f"{names} are two names of one key"):
        load_config(values)


@pytest.mark.parametrize(("old", "new"), [("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")])
def test_old_switches_are_the_sections_that_replaced_them(old, new, caplog) -> None:
    zero = {"stage": 3}
    for on in (True, "true"):
        with caplog.at_level(logging.INFO):
            config = load_config({"zero_optimization": zero | {old: on, "cpu_offload_use_pin_memory": True}})
        assert config == load_config({"zero_optimization": zero | {new: {"device": "cpu"}}})
        lines = [record.getMessage() for record in caplog.records if f".{old} " in record.getMessage()]
        assert lines == [
            f"configuration key zero_optimization.{old} is deprecated: zero_optimization.{new}.device is cpu"
        ]
        caplog.clear()
    for off in (False, None, "auto", "false"):
        assert load_config({"zero_optimization": zero | {old: off}}) == load_config({"zero_optimization": zero})


def test_old_switches_are_refused_where_they_contradict_the_rest() -> None:
    both = {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "none"}}
    for given in (both, dict(reversed(both.items()))):
        with pytest.raises(ConfigError, match=r"offload_optimizer is given as well; remove .*cpu_offload"):
            load_config({"zero_optimization": given})
    with pytest.raises(ConfigError, match=r"cpu_offload is 1; it must be true or false"):
        load_config({"zero_optimization": {"stage": 2, "cpu_offload": 1}})
    below = load_config({"zero_optimization": {"stage": 2, "cpu_offload_param": True}})
    assert below.zero.offload_param.device == "none"
    with pytest.raises(ConfigError, match=r"did you mean `zero_optimization.cpu_offload_param`"):
        load_config({"zero_optimization": {"stage": 3, "cpu_offload_params": True}})


def test_aio_may_be_where_guides_have_it() -> None:
    aio = {"block_size": 262144, "queue_depth": 16, "single_submit": False}
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    within = load_config({"zero_optimization": zero | {"aio": aio}})
    assert within == load_config({"zero_optimization": zero, "aio": aio})
    assert within.get("aio") == aio
    with pytest.raises(ConfigError, match=r"zero_optimization.aio and aio are both given"):
        load_config({"zero_optimization": zero | {"aio": aio}, "aio": aio})
