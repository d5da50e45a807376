"""The checked API of the native optimizer kernels."""

from infinity.kernels.convert import GradStats, grad_stats, grad_store, join_master, split_master
from infinity.kernels.machine import (
    active_instruction_set,
    bind_this_thread,
    instruction_sets,
    set_threads,
    share_threads,
    thread_count,
    torch_threads,
    use_instruction_set,
)
from infinity.kernels.nodes import cpus_near
from infinity.kernels.on_device import norm_on_device, update_on_device
from infinity.kernels.rules import AdagradHyper, Hyper, LionHyper, Rule, SgdHyper
from infinity.kernels.torch_ops import scratch_bytes, update_in_torch
from infinity.kernels.update import (
    SCALE_BLOCK,
    Aside,
    Dither,
    Lost,
    Moment,
    bare_loop,
    can_reconstruct,
    load_moment,
    reconstruct_grad,
    reconstruct_params,
    store_moment,
    update,
)

__all__ = [
    "SCALE_BLOCK",
    "AdagradHyper",
    "Aside",
    "Dither",
    "GradStats",
    "Hyper",
    "LionHyper",
    "Lost",
    "Moment",
    "Rule",
    "SgdHyper",
    "active_instruction_set",
    "bare_loop",
    "bind_this_thread",
    "can_reconstruct",
    "cpus_near",
    "grad_stats",
    "grad_store",
    "instruction_sets",
    "join_master",
    "load_moment",
    "norm_on_device",
    "reconstruct_grad",
    "reconstruct_params",
    "scratch_bytes",
    "set_threads",
    "share_threads",
    "split_master",
    "store_moment",
    "thread_count",
    "torch_threads",
    "update",
    "update_in_torch",
    "update_on_device",
    "use_instruction_set",
]
