"""Check attributes of DeepSpeed's engine and optimizers that a script sets, and that nothing here reads.

Without the check, such an attribute would be set and silently do nothing. If it would change the training in DeepSpeed,
it is refused. If it only selects how the work is done, a warning says that it has no effect. A script may set any other
attribute for its own use.
"""

from __future__ import annotations

import logging

from infinity.errors import ConfigError

_log = logging.getLogger("deepspeed")

_CONFIGURED = "set it in the configuration"
_BY_PARAMETER = "use deepspeed.utils.safe_set_local_grad and its like"
_OTHERWISE = {
    "_global_grad_norm": "it is the last step's, see engine.get_global_grad_norm()",
    "communication_data_type": _CONFIGURED,
    "custom_loss_scaler": "multiply the loss, or set fp16.loss_scale",
    "dtype": _CONFIGURED,
    "dynamic_loss_scale": "set fp16.loss_scale to 0 in the configuration",
    "external_loss_scale": "multiply the loss, or set fp16.loss_scale",
    "fp32_groups": _BY_PARAMETER,
    "fp32_groups_flat": _BY_PARAMETER,
    "fp32_groups_flat_partition": _BY_PARAMETER,
    "fp32_partitioned_groups_flat": _BY_PARAMETER,
    "gradient_accumulation_dtype": "set data_types.grad_accum_dtype in the configuration",
    "gradient_accumulation_steps": _CONFIGURED,
    "gradient_average": "gradients are averaged; multiply the loss by the number of ranks for their sum",
    "gradient_predivide_factor": _CONFIGURED,
    "grads_in_partition": _BY_PARAMETER,
    "loss_scale": "set fp16.loss_scale in the configuration",
    "micro_step_id": "call engine.set_gradient_accumulation_boundary",
    "mpu": "give initialize a process_group, or a model that torch.distributed.tensor.parallel has divided",
    "postscale_gradients": "set prescale_gradients in the configuration",
    "random_ltd_scheduler": "drop tokens in the model",
    "scale_wrt_gas": "give it to engine.backward or engine.scale",
    "sequence_parallel_size": "divide sequences in the model",
    "single_partition_of_fp32_groups": _BY_PARAMETER,
    "torch_autocast_z0_gradscaler": "set torch_autocast.dtype to float16 in the configuration",
    "update_interval": "zenflow is not supported",
}
_WITHOUT_EFFECT = frozenset(
    (
        "all_reduce_print",
        "allgather_bucket_size",
        "check_grad_overflow",
        "contiguous_gradients",
        "cpu_offload_pin_memory",
        "debug_fp16_grads",
        "elastic_checkpoint",
        "enable_backward_allreduce",
        "enable_sanity_checks",
        "fused_adam_legacy",
        "fused_lamb_legacy",
        "ignore_unused_parameters",
        "max_params_in_cpu",
        "overlap_comm",
        "partial_offload",
        "prefetch_elements",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "sub_group_size",
        "use_multi_rank_bucket_allreduce",
        "verbose",
        "warn_unscaled_loss",
    )
)
_warned: set[str] = set()


def check_setting(owner: type, called: str, name: str) -> None:
    """Check an attribute of an engine or optimizer before it is set.

    Args:
        called: `engine` or `optimizer`, for messages.

    Raises:
        ConfigError: the attribute would change the training in DeepSpeed, but not here.
    """
    if name not in _OTHERWISE and name not in _WITHOUT_EFFECT:
        return
    own = getattr(owner, name, None)
    if isinstance(own, property) and own.fset is not None:
        return
    if name in _OTHERWISE:
        raise ConfigError(f"{called}.{name} cannot be set, because nothing would read it: {_OTHERWISE[name]}")
    if name not in _warned:
        _warned.add(name)
        _log.warning("%s.%s is set, which has no effect here: see docs/migration-from-deepspeed.md", called, name)
