from infinity.integrations.dialect.comm import get_rank as _get_data_parallel_rank
from infinity.integrations.dialect.comm import get_rank as get_data_parallel_rank
from infinity.integrations.dialect.comm import get_world_size as _get_data_parallel_world_size
from infinity.integrations.dialect.comm import get_world_size as get_data_parallel_world_size

__all__ = [
    "_get_data_parallel_rank",
    "_get_data_parallel_world_size",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
]
