"""The checked doors to the native optimizer kernels."""

from infinity.kernels.adam import (
    GradStats,
    Hyper,
    active_instruction_set,
    adam_fp32,
    adam_split,
    bare_loop,
    grad_store,
    instruction_sets,
    join_master,
    set_threads,
    split_master,
    thread_count,
    use_instruction_set,
)

__all__ = [
    "GradStats",
    "Hyper",
    "active_instruction_set",
    "adam_fp32",
    "adam_split",
    "bare_loop",
    "grad_store",
    "instruction_sets",
    "join_master",
    "set_threads",
    "split_master",
    "thread_count",
    "use_instruction_set",
]
