"""Names of DeepSpeed that infinity does not have, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from infinity.errors import ConfigError

_PIPELINE = "use torch.distributed.pipelining, see engine.driven_step()"
_EXPERTS = "a mixture-of-experts block of the model itself is one unit"
_LAYERS = "the model's own layers compute"
_SCALE = "the loss scale is the engine's, see engine.optimizer.loss_scaler, and the section fp16 of the configuration"
_FILES = "checkpoints are stored by parameter name in safetensors, see docs/checkpoints.md"

REFUSED = {
    "init_inference": "use the model under torch.no_grad(), or engine(...) of an engine without an optimizer",
    "InferenceEngine": "use the model under torch.no_grad(), or engine(...) of an engine without an optimizer",
    "tp_model_init": "divide the model with torch.distributed.tensor.parallel",
    "set_autotp_mode": "divide the model with torch.distributed.tensor.parallel",
    "PipelineModule": _PIPELINE,
    "PipelineEngine": _PIPELINE,
    "LayerSpec": _PIPELINE,
    "TiedLayerSpec": _PIPELINE,
    "MoE": _EXPERTS,
    "OnDevice": "build the model under torch.device('meta') or zero.Init",
    "DeepSpeedHybridEngine": "generate with the model itself",
    "DeepSpeedTransformerLayer": "use the model's own layers",
    "replace_transformer_layer": "use the model's own layers",
    "_get_sequence_parallel_group": "every rank has whole sequences",
    "get_model_ckpt_name_for_rank": _FILES,
    "get_model_state_file": _FILES,
    "get_optim_files": _FILES,
    "AllGatherCoalescedHandle": "GatheredParameters waits for what it gathers",
    "AsyncIOBuilder": "see infinity.io for reading and writing drives",
    "CPUAdagradBuilder": "use deepspeed.ops.adagrad.DeepSpeedCPUAdagrad",
    "CPUAdamBuilder": "use deepspeed.ops.adam.DeepSpeedCPUAdam",
    "CPULionBuilder": "use deepspeed.ops.lion.DeepSpeedCPULion",
    "CreateLossScaler": _SCALE,
    "DeepSpeedCheckpoint": _FILES,
    "DeepSpeedDataLoader": "give initialize training_data, or use engine.deepspeed_io",
    "DeepSpeedZeRoOffload": "the engine brings and takes back parameters by itself, see docs/inside.md",
    "DynamicLossScaler": _SCALE,
    "FusedAdamBuilder": "use deepspeed.ops.adam.FusedAdam",
    "FusedLambBuilder": "choose Adam, AdamW, Adagrad, Lion or SGD",
    "FusedLionBuilder": "use deepspeed.ops.lion.FusedLion",
    "InferenceBuilder": _LAYERS,
    "InsertPostInitMethodToModuleSubClasses": "use zero.Init",
    "LinearFunctionForZeroStage3": _LAYERS,
    "LinearModuleForZeroStage3": _LAYERS,
    "LossScaleConfig": _SCALE,
    "LossScaleProfile": _SCALE,
    "LossScaler": _SCALE,
    "MiCS_Optimizer": "zero_optimization.mics_shard_size says how many ranks divide the states",
    "QuantizerBuilder": "communication is not quantized",
    "SuperOffloadOptimizer_Stage3": "zero_optimization.offload_optimizer says where states are; updates overlap anyway",
    "TiledLinearReturnBias": "use TiledLinear, whose bias is added",
    "TransformerBuilder": _LAYERS,
    "UtilsBuilder": "use torch._utils._flatten_dense_tensors",
    "zero3_linear_wrap": _LAYERS,
    "MultipleAllGatherHandles": "GatheredParameters waits for what it gathers",
    "MiCS_Init": "use zero.Init; zero_optimization.mics_shard_size says how many ranks divide the parameters",
}


def refused(name: str) -> Callable[..., NoReturn]:
    """Return a function in place of an unsupported one. It raises ConfigError when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise _error(name)

    refuse.__name__ = name
    return refuse


def refused_class(name: str, **attributes: Any) -> type:
    """Return a class in place of an unsupported one. Its constructor raises ConfigError.

    So a script can use it in `isinstance`, or as a base class that it never instantiates.
    """

    def refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise _error(name)

    return type(name, (), {"__init__": refuse, "__doc__": f"Not supported: {REFUSED[name]}.", **attributes})


def refused_or_unknown(name: str) -> Callable[..., NoReturn]:
    """Return the refusal of a name of the package `deepspeed` itself that is not supported.

    Raises:
        AttributeError: DeepSpeed has no such name, either.
    """
    if name in REFUSED:
        return refused(name)
    raise AttributeError(f"module 'deepspeed', which is infinity's here, has no attribute {name!r}")


def _error(name: str) -> ConfigError:
    return ConfigError(f"deepspeed.{name} is not supported by infinity: {REFUSED[name]}")
