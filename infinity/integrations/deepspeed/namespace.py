"""The table of DeepSpeed's modules: the names that each offers here, and the files that implement them.

Names of modules are without `deepspeed.`. A home that begins with a dot is a file of this package; one that begins with
a slash is another module of the table. To support another name, implement it in one of these files and add it to the
table. To support another module, add a row. `finder.py` makes the modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

VERSION = "0.19.8"  # the version of DeepSpeed whose names these are; also in sys_path, for importlib.metadata
_MAJOR, _MINOR, _PATCH = map(int, VERSION.split("."))


class Home(NamedTuple):
    """The module and attribute that implement a name."""

    module: str
    attribute: str


class Refused(NamedTuple):
    """A name that can be imported. A call raises an error that says what to use instead, see refused.py."""

    name: str
    is_class: bool


class Module(NamedTuple):
    """One module.

    Attributes:
        names: the offered objects by name: a `Home`, a `Refused`, or the value itself.
        is_package: whether it may have submodules.
        submodules: the submodules that are imported with it.
        fallback: a function that returns, or refuses, any other name.
        source: a file of this package whose code runs as this module, for functions that use its globals.
        instead: what to use instead, for the error of an import; empty for a supported module.
    """

    names: Mapping[str, Any] = {}
    is_package: bool = False
    submodules: tuple[str, ...] = ()
    fallback: Home | None = None
    source: str = ""
    instead: str = ""


# Rows #


def _module(*names: Mapping[str, Any], fallback: Home | None = None, source: str = "") -> Module:
    return Module(_joined(names), fallback=fallback, source=source)


def _package(*names: Mapping[str, Any], submodules: str = "", fallback: Home | None = None) -> Module:
    return Module(_joined(names), True, tuple(submodules.split()), fallback)


def _unsupported(instead: str) -> Module:
    return Module(is_package=True, instead=instead)


def _joined(names: tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
    return {name: offered for each in names for name, offered in each.items()}


def _of(home: str, same: str = "", /, **renamed: str) -> dict[str, Home]:
    """Return the homes of names that `home` implements under the same name, or under another one."""
    attributes = {name: name for name in same.split()} | renamed
    return {name: Home(home, attribute) for name, attribute in attributes.items()}


def _values(**values: Any) -> dict[str, Any]:
    return values


def _lower_case(names: str) -> dict[str, str]:
    """Return constants whose values are their names in lower case."""
    return {name: name.lower() for name in names.split()}


def _refused_classes(names: str) -> dict[str, Refused]:
    return {name: Refused(name, is_class=True) for name in names.split()}


def _refused_functions(names: str) -> dict[str, Refused]:
    return {name: Refused(name, is_class=False) for name in names.split()}


# Names that several modules offer #

_ACCELERATOR = _of(".accelerator", "get_accelerator is_current_accelerator_supported")
_CHECKPOINTING = _of(".activation_checkpointing", "checkpoint configure is_configured non_reentrant_checkpoint reset")
_CHECKPOINT = _refused_classes("DeepSpeedCheckpoint")
_COMM = _module(
    _of(
        ".comm",
        """
        allgather_fn get_all_ranks_from_group get_global_rank get_local_rank get_rank get_world_group get_world_size
        has_all_gather_into_tensor has_reduce_scatter_tensor inference_all_reduce init_distributed
        reduce_scatter_coalesced reduce_scatter_fn
        """,
    ),
    fallback=Home(".comm", "__getattr__"),  # torch's
)
_CONFIG_ERROR = _of("infinity.errors", DeepSpeedConfigError="ConfigError")
_OPTIMIZER = _of("infinity.optim.optimizer", DeepSpeedOptimizer="TieredOptimizer")
_LOGS = _of(".logs", "log_dist logger")
_FULL_VALUES = _of(
    ".values",
    """
    safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
    safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state
    safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
    safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
    safe_update_full_grad_vectorized
    """,
)
_LEAF_MODULES = _of(
    "infinity.zero.leaf_modules",
    """
    get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name
    set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module
    """,
)
_PARAMETERS = _of(
    ".parameters",
    """
    GatheredParameters Init ZeroParamStatus ZeroParamType register_external_parameter unregister_external_parameter
    """,
)
_ZERO = _package(
    _PARAMETERS,
    _of(".parameters", "unwrap_model_for_generation"),
    _of("infinity.zero.tiling", "TiledLinear"),
    _refused_classes("MiCS_Init"),
)
_OFFLOAD = _of(".zero_config", "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum")
_IS_ZERO_PARAM = _of(".parameters", "is_zero_param")

# The table #

MODULES: Mapping[str, Module] = {
    "": _package(
        _of("infinity", __infinity__="__version__"),
        _of(".versions", __git_branch__="git_branch", __git_hash__="git_hash"),
        _values(
            __version__=f"{VERSION}+infinity",
            __version_major__=_MAJOR,
            __version_minor__=_MINOR,
            __version_patch__=_PATCH,
        ),
        _CONFIG_ERROR,
        _OPTIMIZER,
        _LOGS,
        _of(".front", "add_config_arguments"),
        _of(".accelerator", "get_accelerator"),
        _of(".comm", "init_distributed"),
        _of(".config", "DeepSpeedConfig"),
        _of(".engine", "DeepSpeedEngine initialize"),
        submodules="checkpointing comm git_version_info monitor ops runtime utils zero",
        fallback=Home(".refused", "refused_or_unknown"),
    ),
    "accelerator": _package(_ACCELERATOR, _of(".accelerator", DeepSpeedAccelerator="Accelerator")),
    "accelerator.real_accelerator": _module(_ACCELERATOR),
    "autotuning": _unsupported("use `infinity tune`"),
    "checkpoint": _package(_CHECKPOINT),
    # Keys of DeepSpeed's checkpoint files, for scripts that use them. The files of infinity do not have these keys.
    "checkpoint.constants": _module(
        _values(
            BASE_OPTIMIZER_STATE="base_optimizer_state",
            FP32_FLAT_GROUPS="fp32_flat_groups",
            OPTIMIZER_STATE_DICT="optimizer_state_dict",
        )
    ),
    "checkpoint.deepspeed_checkpoint": _module(_CHECKPOINT),
    "checkpoint.utils": _module(
        _of(".helpers", "clone_tensors_for_torch_save"), _refused_functions("get_model_ckpt_name_for_rank")
    ),
    "checkpointing": _module(_CHECKPOINTING),
    "comm": _COMM._replace(is_package=True),
    "comm.comm": _COMM,
    "comm.torch": _module(fallback=Home(".comm", "of_torch")),
    "compile": _unsupported("call torch.compile on the model or its blocks before initialize"),
    "compression": _unsupported("quantise the model with torchao"),
    "elasticity": _unsupported("resume a checkpoint on any number of ranks"),
    "git_version_info": _module(
        _of("infinity", __infinity__="__version__"),
        _of(".versions", "git_branch git_hash torch_info"),
        _values(version=VERSION),
    ),
    "inference": _unsupported("use the model under torch.no_grad()"),
    "launcher": _package(),
    "launcher.runner": _module(_values(DEEPSPEED_ENVIRONMENT_NAME=".deepspeed_env")),
    "linear": _unsupported("use PEFT for adapters"),
    "module_inject": _unsupported("divide the model with torch.distributed.tensor.parallel"),
    "moe": _package(),
    "moe.layer": _module(_refused_classes("MoE")),
    "moe.utils": _module(
        _of(
            ".experts",
            """
            has_moe_layers is_moe_param is_moe_param_group split_params_into_different_moe_groups_for_optimizer
            """,
        )
    ),
    "monitor": _package(submodules="config monitor"),
    "monitor.config": _module(
        _of("infinity.config", DeepSpeedMonitorConfig="MonitorConfig"), _of(".monitor", "get_monitor_config")
    ),
    "monitor.monitor": _module(_of(".monitor", "MonitorMaster")),
    "ops": _package(_of(".builders", "__compatible_ops__"), submodules="adagrad adam aio lion op_builder"),
    "ops.adagrad": _package(_of(".named_optimizers", "DeepSpeedCPUAdagrad")),
    "ops.adam": _package(_of(".named_optimizers", "DeepSpeedCPUAdam FusedAdam")),
    "ops.adam.cpu_adam": _module(_of(".named_optimizers", "DeepSpeedCPUAdam")),
    "ops.adam.fused_adam": _module(_of(".named_optimizers", "FusedAdam MultiTensorApply multi_tensor_applier")),
    "ops.adam.multi_tensor_apply": _module(_of(".named_optimizers", "MultiTensorApply")),
    "ops.aio": _package(_of(".builders", "AsyncIOBuilder")),
    "ops.lamb": _unsupported("choose Adam, AdamW, Adagrad, Lion or SGD"),
    "ops.lion": _package(_of(".named_optimizers", "DeepSpeedCPULion FusedLion")),
    "ops.op_builder": _package(
        _of(
            ".builders",
            """
            AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder FusedAdamBuilder FusedLambBuilder
            FusedLionBuilder InferenceBuilder QuantizerBuilder TransformerBuilder UtilsBuilder
            """,
        )
    ),
    "ops.sparse_attention": _unsupported("use the model's attention implementation"),
    "ops.transformer": _unsupported("use the model's own layers"),
    "pipe": _package(_refused_classes("LayerSpec PipelineModule TiedLayerSpec")),
    "profiling": _unsupported("use torch.profiler, or tiering.timeline"),
    "runtime": _package(submodules="lr_schedules zero"),
    "runtime.activation_checkpointing": _package(),
    "runtime.activation_checkpointing.checkpointing": _module(_CHECKPOINTING),
    "runtime.base_optimizer": _module(_OPTIMIZER, _of(".optimizers", "ZeROOptimizer")),
    "runtime.bf16_optimizer": _module(_of(".optimizers", "BF16_Optimizer")),
    "runtime.comm": _package(),
    "runtime.comm.coalesced_collectives": _module(_of(".comm", "reduce_scatter_coalesced")),
    "runtime.compiler": _module(_of("torch.compiler", "is_compiling"), _of(".helpers", "is_compile_supported")),
    "runtime.config": _module(
        _CONFIG_ERROR,
        _of(".config", "DeepSpeedConfig get_gradient_clipping"),
        _values(
            ADAGRAD_OPTIMIZER="adagrad",
            ADAM_OPTIMIZER="adam",
            ADAMW_OPTIMIZER="adamw",
            LION_OPTIMIZER="lion",
            SGD_OPTIMIZER="sgd",
            LAMB_OPTIMIZER="lamb",  # refused in a configuration, as the next one
            ONEBIT_ADAM_OPTIMIZER="onebitadam",
        ),
    ),
    "runtime.config_utils": _module(_of(".config_model", "DeepSpeedConfigModel")),
    "runtime.constants": _module(
        _values(
            GRADIENT_CLIPPING="gradient_clipping",
            GRADIENT_CLIPPING_DEFAULT=1.0,
            PIPE_REPLICATED="ds_pipe_replicated",
            TORCH_DISTRIBUTED_DEFAULT_PORT=29500,
        )
    ),
    "runtime.data_pipeline": _unsupported("give training_data an order of its own"),
    "runtime.dataloader": _module(_of(".helpers", "RepeatingLoader"), _refused_classes("DeepSpeedDataLoader")),
    "runtime.engine": _module(
        _of(".engine", "DeepSpeedEngine"),
        _of(".optimizers", "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable"),
    ),
    "runtime.fp16": _package(),
    "runtime.fp16.fused_optimizer": _module(_of(".optimizers", "FP16_Optimizer")),
    "runtime.fp16.loss_scaler": _module(
        _refused_classes("DynamicLossScaler LossScaleConfig LossScaleProfile LossScaler"),
        _refused_functions("CreateLossScaler"),
    ),
    "runtime.fp16.unfused_optimizer": _module(_of(".optimizers", "FP16_UnfusedOptimizer")),
    "runtime.lr_schedules": _module(
        _of(
            "infinity.optim.lr_schedules",
            "VALID_LR_SCHEDULES LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
        ),
        _of(
            ".tuning_arguments",
            """
            add_tuning_arguments get_config_from_args get_lr_from_config override_1cycle_params
            override_lr_range_test_params override_params
            """,
            override_warmupLR_params="override_warmup_params",
        ),
        _values(
            LR_RANGE_TEST="LRRangeTest",
            ONE_CYCLE="OneCycle",
            WARMUP_LR="WarmupLR",
            WARMUP_DECAY_LR="WarmupDecayLR",
            WARMUP_COSINE_LR="WarmupCosineLR",
            WARMUP_LOG_RATE="log",
            WARMUP_LINEAR_RATE="linear",
        ),
        _lower_case(
            """
            LR_SCHEDULE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE
            CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT
            DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE
            CYCLE_MOMENTUM WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO
            TOTAL_NUM_STEPS
            """
        ),
    ),
    "runtime.pipe": _unsupported("use torch.distributed.pipelining, see engine.driven_step()"),
    "runtime.precision_config": _module(
        _of(
            ".precision_config",
            "DeepSpeedBF16Config DeepSpeedFP16Config get_bfloat16_config get_float16_config",
        )
    ),
    "runtime.sequence_parallel": _unsupported("there is no sequence parallelism"),
    "runtime.superoffload": _package(),
    "runtime.superoffload.superoffload_stage3": _module(_refused_classes("SuperOffloadOptimizer_Stage3")),
    # DeepSpeed keeps smaller tensors in memory. Here, tensors of any size are moved.
    "runtime.swap_tensor": _package(_values(MIN_SWAPPABLE_BYTES=1 << 20)),
    "runtime.torch_autocast": _module(
        _of(".precision_config", "PARAM_COMM_DTYPE_ATTR_NAME get_comm_dtype has_comm_dtype")
    ),
    "runtime.utils": _module(
        _of(
            ".helpers",
            """
            call_to_str copy_to_device count_used_parameters_in_backward empty_cache ensure_directory_exists
            get_only_unique_item get_tensor_bytes memory_status move_to_device noop_context noop_decorator
            partition_uniform set_random_seed
            """,
        ),
        _of(".logs", "required_torch_version see_memory_usage"),
        _of(
            ".norms",
            """
            CheckOverflow clip_grad_norm_ clip_tensors_by_global_norm combine_grad_norm_groups get_global_norm
            get_global_norm_of_tensors get_weight_norm has_inf_or_nan is_invalid_grad_norm
            mask_nan_or_inf_with_val_inplace
            """,
        ),
    ),
    "runtime.zero": _ZERO,
    "runtime.zero.config": _module(_OFFLOAD, _of(".zero_config", "DeepSpeedZeroConfig ZeroStageEnum get_zero_config")),
    "runtime.zero.leaf_module_config": _module(
        _of(
            ".zero_config",
            """
            DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES
            DeepSpeedZeroLeafModuleConfig
            """,
        )
    ),
    "runtime.zero.linear": _module(
        _refused_classes("LinearFunctionForZeroStage3 LinearModuleForZeroStage3"),
        _refused_functions("zero3_linear_wrap"),
    ),
    "runtime.zero.mics": _module(_refused_classes("MiCS_Init MiCS_Optimizer")),
    "runtime.zero.offload_config": _module(_OFFLOAD, _of(".zero_config", "OffloadStateTypeEnum")),
    "runtime.zero.offload_states": _module(_of(".engine", "get_state_devices")),
    "runtime.zero.parameter_offload": _module(_refused_classes("DeepSpeedZeRoOffload")),
    "runtime.zero.partition_parameters": _module(
        _PARAMETERS,
        _IS_ZERO_PARAM,
        _of(".parameters", "partitioned_param_data_shape zero_wrapper_for_fp_tensor_constructor"),
        _of(".accelerator", "get_accelerator"),
        _of("torch", _orig_torch_arange="arange"),
        _refused_classes("AllGatherCoalescedHandle InsertPostInitMethodToModuleSubClasses MultipleAllGatherHandles"),
    ),
    "runtime.zero.stage3": _module(
        _of(".optimizers", "DeepSpeedZeroOptimizer_Stage3"),
        _of(
            ".estimates",
            """
            estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold
            estimate_zero3_model_states_mem_needs_all_live
            """,
        ),
    ),
    "runtime.zero.stage_1_and_2": _module(
        _of(".optimizers", "DeepSpeedZeroOptimizer"),
        _of(".helpers", "split_half_float_double"),
        _of(
            ".estimates",
            """
            estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold
            estimate_zero2_model_states_mem_needs_all_live
            """,
        ),
    ),
    "runtime.zero.tensor_fragment": _module(_FULL_VALUES),
    "runtime.zero.tiling": _module(
        _of("infinity.zero.tiling", "TiledLinear"), _refused_classes("TiledLinearReturnBias")
    ),
    "runtime.zero.utils": _module(_of("infinity.errors", ZeRORuntimeException="ConfigError"), _IS_ZERO_PARAM),
    "sequence": _unsupported("there is no sequence parallelism"),
    "utils": _package(
        _LOGS,
        _of(".logs", "set_log_level_from_string"),
        _of(".helpers", "RepeatingLoader"),
        _of("/utils.nvtx", "instrument_w_nvtx"),
        _of(".timers", "SynchronizedWallClockTimer"),
        _FULL_VALUES,
        _LEAF_MODULES,
        _refused_classes("OnDevice"),
        submodules="groups nvtx timer",
    ),
    "utils.groups": _module(
        _of(
            ".comm",
            "_get_sequence_parallel_rank _get_sequence_parallel_world_size",
            _get_data_parallel_group="get_world_group",
            _get_data_parallel_rank="get_rank",
            _get_data_parallel_world_size="get_world_size",
            get_data_parallel_group="get_world_group",
            get_data_parallel_rank="get_rank",
            get_data_parallel_world_size="get_world_size",
        ),
        _refused_functions("_get_sequence_parallel_group"),
    ),
    "utils.logging": _module(_LOGS, _of(".logs", "print_dist set_log_level_from_string warning_once")),
    "utils.nvtx": _module(source="nvtx"),
    "utils.tensor_fragment": _module(_FULL_VALUES),
    "utils.timer": _module(_of(".timers", "NoopTimer SynchronizedWallClockTimer ThroughputTimer trim_mean")),
    "utils.torch": _module(_of(".logs", "required_torch_version")),
    "utils.z3_leaf_module": _module(_LEAF_MODULES),
    "utils.zero_to_fp32": _module(
        _of(
            ".zero_to_fp32",
            """
            convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint
            load_state_dict_from_zero_checkpoint main
            """,
        ),
        _refused_functions("get_model_state_file get_optim_files"),
    ),
    "zero": _ZERO,
}
