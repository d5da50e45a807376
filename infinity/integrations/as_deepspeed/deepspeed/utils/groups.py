from infinity.integrations.deepspeed.comm import get_rank as _get_data_parallel_rank
from infinity.integrations.deepspeed.comm import get_rank as get_data_parallel_rank
from infinity.integrations.deepspeed.comm import get_world_group as _get_data_parallel_group
from infinity.integrations.deepspeed.comm import get_world_group as get_data_parallel_group
from infinity.integrations.deepspeed.comm import get_world_size as _get_data_parallel_world_size
from infinity.integrations.deepspeed.comm import get_world_size as get_data_parallel_world_size
from infinity.integrations.deepspeed.refused import refused

__all__ = [
    "_get_data_parallel_group",
    "_get_data_parallel_rank",
    "_get_data_parallel_world_size",
    "_get_sequence_parallel_group",
    "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
]

_get_sequence_parallel_group = refused("_get_sequence_parallel_group")


def _get_sequence_parallel_rank() -> int:
    """0: every rank has whole sequences."""
    return 0


def _get_sequence_parallel_world_size() -> int:
    """1, likewise."""
    return 1
