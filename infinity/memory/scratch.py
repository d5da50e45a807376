"""Flat tensors that are needed for a while, many of them one after the other."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from infinity.memory.stable import StableMemory, stable_memory


class Loan(NamedTuple):
    """A 1-D tensor of undefined values, and the memory that it lies in if somebody keeps that for the next one."""

    tensor: torch.Tensor
    memory: StableMemory | None = None


class Scratch(Protocol):
    """Lends tensors."""

    def take(self, numel: int, dtype: torch.dtype) -> Loan:
        """Lend a tensor."""

    def give(self, *loans: Loan) -> None:
        """Nothing uses these any more; one that is never given back goes with its tensor."""


def scratch_on(device: torch.device, *, read_late: bool = False) -> Scratch:
    """Lends tensors on this device.

    Args:
        read_late: copies that hold a tensor may still read it when it has been given back.
    """
    return HostScratch() if device.type == "cpu" and not read_late else DeviceScratch(device)


class HostScratch:
    """Keeps what was given back. What is spare and does not fit goes first, so that nothing is taken beside it."""

    def __init__(self) -> None:
        self._spare: list[StableMemory] = []

    def take(self, numel: int, dtype: torch.dtype) -> Loan:
        nbytes = numel * dtype.itemsize
        memory = next((memory for memory in self._spare if memory.nbytes == nbytes), None)
        if memory is not None:
            self._spare.remove(memory)
        else:
            while self._spare:
                self._spare.pop().free()
            memory = stable_memory(nbytes, torch.device("cpu"))
            memory.allocate()
        return Loan(memory.tensor(dtype, numel), memory)

    def give(self, *loans: Loan) -> None:
        self._spare += [loan.memory for loan in loans if loan.memory is not None]


class DeviceScratch:
    """Leaves it to the device's allocator, which keeps what is free, and does not lend what a copy still reads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, numel: int, dtype: torch.dtype) -> Loan:
        return Loan(torch.empty(numel, dtype=dtype, device=self._device))

    def give(self, *loans: Loan) -> None:
        """It is free when its tensor is gone."""
