"""DeepSpeed's estimates of the memory for the model's states in 16-bit training with Adam, under its names.

The figures are those of DeepSpeed's engine, with a GPU for each rank: they show which of its configurations fit. The
figures of this engine come from `infinity plan`, which also knows NVMe, state formats and budgets.

[Note: bytes of a parameter]
Rajbhandari et al., arXiv 1910.02054, section 3.1, as DeepSpeed counts them: 2 for the weight, 2 for the gradient, 4 for
the gradient in fp32, 4 for the master and 8 for both moments. Host bytes are multiplied by `additional_buffer_factor`
for pinned buffers and fragmentation. Without `zero.Init`, each rank builds a copy of the model on the host, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

_WEIGHT = 2
_WEIGHT_FP32 = 4
_OPTIMIZER = 16  # the sum of [Note: bytes of a parameter] without the weight
_ALL = _WEIGHT + _OPTIMIZER


class Estimate(NamedTuple):
    """Bytes of model states under the named options.

    Attributes:
        cpu_bytes: host memory of one node.
        gpu_bytes: memory of one GPU.
    """

    options: str
    cpu_bytes: int
    gpu_bytes: int


# Stages 1 and 2 #


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return (host bytes of one node, bytes of one GPU) under stage 2; `cpu_offload` offloads the optimizer states.

    Source: DeepSpeed, the function of this name in `runtime/zero/stage_1_and_2.py`.
    """
    gpus = num_nodes * num_gpus_per_node
    gpu = _WEIGHT * total_params
    if cpu_offload:
        host = max(_WEIGHT_FP32 * gpus, _OPTIMIZER)
    else:
        host = _WEIGHT_FP32 * num_gpus_per_node
        gpu += int(_ALL * total_params / gpus)
    return int(total_params * host * additional_buffer_factor), gpu


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[Estimate]:
    """Print, and return, the needs of `model` under stage 2 with each choice of offload."""
    return estimate_zero2_model_states_mem_needs_all_cold(
        _total_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[Estimate]:
    """Print, and return, the needs of a model of `total_params` under stage 2 with each choice of offload."""
    rows = []
    for offload in (True, False):
        cpu, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append(Estimate(f"offload_optimizer={_device(offload)}", cpu, gpu))
    _print(rows, f"{_millions(total_params)} parameters", num_gpus_per_node, num_nodes)
    return rows


# Stage 3 #


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return (host bytes of one node, bytes of one GPU, the largest layer's part of these) under stage 3.

    Args:
        cpu_offload: offload optimizer states; `cpu_offload_params` has an effect only with it.
        zero_init: the model is built under `zero.Init`.

    Source: DeepSpeed, the function of this name in `runtime/zero/stage3.py`.
    """
    gpus = num_nodes * num_gpus_per_node
    share = 1 / num_nodes
    copies = _WEIGHT_FP32 * num_gpus_per_node
    layer = (_WEIGHT + _WEIGHT) * largest_layer_params  # its weights and gradients
    if not cpu_offload:
        built = largest_layer_params if zero_init else total_params
        return int(built * copies * additional_buffer_factor), layer + int(_ALL * total_params / gpus), layer
    host, gpu = (_ALL, 0) if cpu_offload_params else (_OPTIMIZER, int(_WEIGHT * total_params / gpus))
    # The order of the factors is DeepSpeed's, for the same rounding.
    cpu = total_params * host * share if zero_init else total_params * max(copies, host * share)
    return int(cpu * additional_buffer_factor), layer + gpu, layer


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[Estimate]:
    """Print, and return, the needs of `model` under stage 3 with each choice of offload and construction."""
    largest = max(sum(param.numel() for param in module.parameters(recurse=False)) for module in model.modules())
    return estimate_zero3_model_states_mem_needs_all_cold(
        _total_params(model), largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[Estimate]:
    """Print, and return, the needs of a model under stage 3 with each choice of offload and construction.

    Args:
        largest_layer_params: number of parameters of the largest module, without its submodules.
    """
    rows = []
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                zero_init,
                additional_buffer_factor,
            )
            options = (
                f"offload_param={_device(params)}, offload_optimizer={_device(optimizer)}, zero_init={zero_init:d}"
            )
            rows.append(Estimate(options, cpu, gpu))
    what = f"{_millions(total_params)} parameters, {_millions(largest_layer_params)} in the largest layer"
    _print(rows, what, num_gpus_per_node, num_nodes)
    return rows


# Output #


def _total_params(model: nn.Module) -> int:
    """Return the number of elements. Tied parameters count once, also if they are two objects on one storage."""
    return sum({param.data_ptr() or id(param): param.numel() for param in model.parameters()}.values())


def _device(offload: bool) -> str:
    return "cpu" if offload else "none"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.0f}M"


def _print(rows: Sequence[Estimate], what: str, gpus_per_node: int, nodes: int) -> None:
    print(f"Model states of {what}, on {nodes} node(s) of {gpus_per_node} GPU(s):")
    print("   per node |    per GPU | options")
    for row in rows:
        print(f"{row.cpu_bytes / 2**30:7.2f} GiB | {row.gpu_bytes / 2**30:6.2f} GiB | {row.options}")
