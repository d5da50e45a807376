"""Collectives of tensors on the emulated device: through host memory and gloo, with the order that NCCL keeps.

A collective begins after what the compute stream was given before it, and only who waits for its work sees the result.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from infinity.tiers.link import on_stream


class _Work:
    """A collective on the host, and what goes up again after it."""

    def __init__(self, work: Any, stream: torch.Stream, target: torch.Tensor, result: torch.Tensor) -> None:
        self._work = work
        self._stream = stream
        self._target = target
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        with on_stream(self._stream):
            self._target.copy_(self._result, non_blocking=True)
        torch.accelerator.current_stream().wait_stream(self._stream)
        return True


class StagedGroup(dist.ProcessGroup):
    """The collectives that the engine uses."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream = torch.Stream("simdev")

    def getBackendName(self) -> str:  # noqa: N802
        return "staged"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]  # torch keeps it for groups with backends alone

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> _Work:
        (tensor,) = tensors
        host = self._down(tensor)
        return _Work(self._gloo.allreduce([host], options), self._stream, tensor, host)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, options: Any = None) -> _Work:
        whole = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        return _Work(self._gloo._allgather_base(whole, self._down(own), options), self._stream, output, whole)

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, options: Any = None) -> _Work:
        own = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        return _Work(self._gloo._reduce_scatter_base(own, self._down(whole), options), self._stream, output, own)

    def _down(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that the compute stream will have put there."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.accelerator.current_stream())
        with on_stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return host


def staged_group() -> dist.ProcessGroup:
    """All ranks of the default group, for tensors on the emulated device. All ranks call this together."""
    dist.Backend.register_backend("staged", StagedGroup, devices=["simdev"])
    return dist.new_group(backend="staged")
