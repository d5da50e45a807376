"""Flat tensors that are used for a short time and then returned."""

from __future__ import annotations

from typing import NamedTuple

import torch

from infinity.memory.stable import StableMemory, stable_memory


class Loan(NamedTuple):
    """A 1-D tensor of undefined values, and its memory if that is kept for the next loan."""

    tensor: torch.Tensor
    memory: StableMemory | None = None


class Scratch:
    """Lends tensors of the device's allocator. It caches free memory, and reuses it only after copies have read it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, numel: int, dtype: torch.dtype) -> Loan:
        """Lend a tensor."""
        return Loan(torch.empty(numel, dtype=dtype, device=self._device))

    def give(self, *loans: Loan) -> None:
        """Take back loans that are no longer in use. A loan that is not given back is freed with its tensor."""


class HostScratch(Scratch):
    """Keeps memory that was given back. If no spare memory has the right size, it first frees all spare memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._spare: list[StableMemory] = []

    def take(self, numel: int, dtype: torch.dtype) -> Loan:
        nbytes = numel * dtype.itemsize
        memory = next((memory for memory in self._spare if memory.nbytes == nbytes), None)
        if memory is not None:
            self._spare.remove(memory)
        else:
            while self._spare:
                self._spare.pop().free()
            memory = stable_memory(nbytes, self._device)
            memory.allocate()
        return Loan(memory.tensor(dtype, numel), memory)

    def give(self, *loans: Loan) -> None:
        self._spare += [loan.memory for loan in loans if loan.memory is not None]


def scratch_on(device: torch.device, *, read_late: bool) -> Scratch:
    """Return a lender of tensors on this device.

    Args:
        read_late: copies that hold a tensor may still read it after it was given back.
    """
    return HostScratch(device) if device.type == "cpu" and not read_late else Scratch(device)
