"""DeepSpeed's logger, for scripts that log through it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from infinity.integrations.dialect.comm import get_rank

logger = logging.getLogger("deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; on all of them if -1 is one, on rank 0 by default."""
    wanted = [0] if ranks is None else ranks
    if -1 in wanted or get_rank() in wanted:
        logger.log(level, "[Rank %d] %s", get_rank(), message)
