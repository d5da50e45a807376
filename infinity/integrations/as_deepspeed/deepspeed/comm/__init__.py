from typing import Any

from infinity.integrations.deepspeed import comm as _comm
from infinity.integrations.deepspeed.comm import (
    get_global_rank,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
)

__all__ = ["get_global_rank", "get_local_rank", "get_rank", "get_world_size", "init_distributed"]


def __getattr__(name: str) -> Any:
    return getattr(_comm, name)
