from typing import Any

import torch.distributed as _dist


def __getattr__(name: str) -> Any:
    return getattr(_dist, name)
