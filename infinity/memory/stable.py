"""Memory that comes and goes behind tensors that stay: pages of a reserved range on the host, a storage on a device."""

from __future__ import annotations

from typing import Protocol

import torch

from infinity.io import Span
from infinity.memory.mapping import HUGE_PAGE_BYTES, make_mapping, tensor_at

_PAGE_BYTES = 4096


class StableMemory(Protocol):
    """Memory whose tensors stay valid while it is freed and allocated again; it begins as freed."""

    nbytes: int

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` elements as a 1-D tensor; made while allocated, valid whenever allocated."""

    def allocate(self) -> None:
        """Make the memory usable; its content is undefined."""

    def free(self) -> None:
        """Give the memory back."""


def stable_memory(nbytes: int, device: torch.device) -> StableMemory:
    """Memory on a device. On the CPU it is mapped: an allocator would keep what is freed, in pieces among the rest."""
    return StableBuffer(nbytes) if device.type == "cpu" else DeviceBuffer(nbytes, device)


class DeviceBuffer:
    """Memory of torch's allocator for a device, behind one storage."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self._device = device
        self.nbytes = nbytes

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` elements as a 1-D tensor; made while allocated, valid whenever allocated."""
        return torch.empty(0, dtype=dtype, device=self._device).set_(self._storage, 0, (numel,))  # type: ignore[call-overload, no-any-return]

    def allocate(self) -> None:
        """Make the memory usable; its content is undefined."""
        self._storage.resize_(self.nbytes)

    def free(self) -> None:
        """Give the memory back to the allocator."""
        self._storage.resize_(0)


class StableBuffer:
    """Memory whose tensors keep their addresses while it is freed and allocated again.

    Tensors that autograd saved stay valid across both. A touch while the memory is freed ends the process with a
    segmentation fault rather than reading zeros.
    """

    def __init__(self, nbytes: int) -> None:
        alignment = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else _PAGE_BYTES
        self._mapping = make_mapping(max(nbytes, 1), alignment)
        self._bytes = tensor_at(self._mapping.address, max(nbytes, 1), self._mapping)
        self.address = self._mapping.address
        self.nbytes = nbytes

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` elements as a 1-D tensor; valid to read and write while allocated."""
        return self._bytes[: numel * dtype.itemsize].view(dtype)

    def allocate(self) -> None:
        """Make the memory usable; its content is zero."""
        self._mapping.open()

    def free(self) -> None:
        """Give the physical memory back."""
        self._mapping.shut()

    def span(self, offset_bytes: int = 0, nbytes: int | None = None) -> Span:
        """A range for I/O."""
        length = self.nbytes - offset_bytes if nbytes is None else nbytes
        return Span(self.address + offset_bytes, length, self._mapping)

    def close(self) -> None:
        """Free the memory for good; tensors over it are left behind as `free` leaves them."""
        self._mapping.shut()
