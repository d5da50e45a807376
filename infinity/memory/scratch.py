"""Flat tensors for short use, many of them one after the other."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from infinity.memory.stable import StableMemory, stable_memory


class Loan(NamedTuple):
    """A 1-D tensor of undefined values, and its memory if that is kept for the next loan."""

    tensor: torch.Tensor
    memory: StableMemory | None = None


class Scratch(Protocol):
    """Lends tensors."""

    def take(self, numel: int, dtype: torch.dtype) -> Loan:
        """Lend a tensor."""

    def give(self, *loans: Loan) -> None:
        """Take back loans that are no longer in use. A loan that is not given back is freed with its tensor."""


def scratch_on(device: torch.device, *, read_late: bool = False) -> Scratch:
    """Return a lender of tensors on this device.

    Args:
        read_late: copies that hold a tensor may still read it after it was given back.
    """
    return HostScratch() if device.type == "cpu" and not read_late else DeviceScratch(device)


class HostScratch:
    """Keeps memory that was given back. If no spare memory has the size, it frees all of it before it allocates."""

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
    """Uses the device's allocator, which caches free memory, and does not reuse memory that a copy still reads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, numel: int, dtype: torch.dtype) -> Loan:
        return Loan(torch.empty(numel, dtype=dtype, device=self._device))

    def give(self, *loans: Loan) -> None:
        """Do nothing: the memory is free when its tensor is collected."""
