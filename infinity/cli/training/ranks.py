"""Coordination of the ranks of a training: their samples, and when to stop."""

from __future__ import annotations

import torch
import torch.distributed as dist


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process, and the number of ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def first_sample(next_sample: int, micro_batch: int) -> int:
    """Return the first sample of this rank's micro-batch if the run is at sample `next_sample`; ranks take turns."""
    return next_sample + rank_and_size()[0] * micro_batch


def mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a scalar over the ranks."""
    if rank_and_size()[1] > 1:
        value = value.clone()
        dist.all_reduce(value)
        value /= rank_and_size()[1]
    return float(value.item())


def agreed(signum: int, device: torch.device) -> int:
    """Return the signal that any rank received (0: none), so that all ranks stop after the same step."""
    if rank_and_size()[1] == 1:
        return signum
    received = torch.tensor(signum, device=device)
    dist.all_reduce(received, dist.ReduceOp.MAX)
    return int(received.item())
