"""Rates of collectives: all-gather and reduce-scatter of a shard."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from infinity.profiling.processor import synchronize, timed
from infinity.tiers import Piece
from infinity.zero.ranks import Ranks

_SHARD_BYTES = 8 << 20
_ROUNDS = 5


def collective_rates(ranks: Ranks, device: torch.device) -> dict[str, Any] | None:
    """Return the profile's `ranks`; None for one rank. All ranks must call it."""
    if ranks.size == 1:
        return None
    numel = _SHARD_BYTES // 4
    flat = torch.ones(numel * ranks.size, device=device)
    shard = torch.zeros(numel, device=device)
    piece = Piece(shard=0, whole=numel * ranks.rank, numel=numel)

    def gather() -> None:
        for pending in ranks.all_gather(flat, [piece], "profile"):
            pending.wait()
        synchronize(device)

    def reduce() -> None:
        ranks.reduce_scatter(shard, flat, "profile").wait()
        synchronize(device)

    moved = _SHARD_BYTES * (ranks.size - 1)
    return {
        "count": ranks.size,
        "on_this_machine": ranks.neighbours,
        "backend": str(dist.get_backend_config(ranks.group)),
        "shard_bytes": _SHARD_BYTES,
        "all_gather_bytes_per_s": moved / _median_s(ranks, gather),
        "reduce_scatter_bytes_per_s": moved / _median_s(ranks, reduce),
    }


def _median_s(ranks: Ranks, exchange: Callable[[], None]) -> float:
    seconds = []
    for _ in range(_ROUNDS + 1):
        ranks.barrier()
        seconds.append(timed(exchange))
    return statistics.median(seconds[1:])
