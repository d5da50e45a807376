"""Memory that is freed and allocated again while its tensors stay: pages of an address range, or a device's storage."""

from __future__ import annotations

from typing import Protocol

import torch

from infinity.io import Span
from infinity.memory.mapping import HUGE_PAGE_BYTES, Mapping, make_mapping, tensor_at

_PAGE_BYTES = 4096


class StableMemory(Protocol):
    """Memory whose tensors stay valid while it is freed and allocated again. It is free at first."""

    nbytes: int

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the first `numel` elements as a 1-D tensor. Call while allocated; valid whenever allocated."""

    def allocate(self) -> None:
        """Make the memory usable; its content is undefined."""

    def free(self) -> None:
        """Free the memory."""


def stable_memory(nbytes: int, device: torch.device, spare: SparePages | None = None) -> StableMemory:
    """Return memory on a device. On the CPU it is mapped: an allocator would keep freed memory, in fragments.

    Args:
        spare: keeps its pages while it is free; if None, they return to the system.
    """
    return StableBuffer(nbytes, spare) if device.type == "cpu" else DeviceBuffer(nbytes, device)


class DeviceBuffer:
    """Memory of torch's allocator for a device, behind one storage."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self._device = device
        self.nbytes = nbytes

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the first `numel` elements as a 1-D tensor. Call while allocated; valid whenever allocated."""
        return torch.empty(0, dtype=dtype, device=self._device).set_(self._storage, 0, (numel,))  # type: ignore[call-overload, no-any-return]

    def allocate(self) -> None:
        """Make the memory usable; its content is undefined."""
        self._storage.resize_(self.nbytes)

    def free(self) -> None:
        """Return the memory to the allocator."""
        self._storage.resize_(0)


class SparePages:
    """Pages of freed buffers, for the next allocations of the same size.

    The system zeroes every new page, which takes a core as long as a drive takes to read the page. So a unit gets the
    pages of an evicted unit of the same size. Spare pages count as free: all of them are freed before pages of another
    size are allocated. So used and spare pages together never exceed the peak of used pages.
    """

    def __init__(self) -> None:
        self._parked: list[Mapping] = []

    def park(self, mapping: Mapping) -> None:
        """Keep the pages; an access faults from now on."""
        mapping.park()
        if mapping not in self._parked:
            self._parked.append(mapping)

    def take(self, mapping: Mapping) -> Mapping | None:
        """Return the mapping whose pages this mapping gets, itself if it is parked; None if it needs new pages."""
        fitting = [each for each in self._parked if each.nbytes == mapping.nbytes]
        if not fitting:
            self.clear()
            return None
        found = mapping if mapping in fitting else fitting[0]
        self._parked.remove(found)
        return found

    def clear(self) -> None:
        """Free all pages."""
        while self._parked:
            self._parked.pop().shut()


class StableBuffer:
    """Memory whose tensors keep their addresses while it is freed and allocated again.

    Tensors that autograd saved stay valid across both. An access while it is free ends the process with a segmentation
    fault, instead of reading zeros.
    """

    def __init__(self, nbytes: int, spare: SparePages | None = None) -> None:
        self._spare = spare
        alignment = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else _PAGE_BYTES
        self._mapping = make_mapping(max(nbytes, 1), alignment)
        self._bytes = tensor_at(self._mapping.address, max(nbytes, 1), self._mapping)
        self.address = self._mapping.address
        self.nbytes = nbytes

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the first `numel` elements as a 1-D tensor; valid to read and write while allocated."""
        return self._bytes[: numel * dtype.itemsize].view(dtype)

    def allocate(self) -> None:
        """Make the memory usable. Its content is undefined; without `spare` it is zero."""
        parked = None if self._spare is None else self._spare.take(self._mapping)
        if parked is None or parked is self._mapping:
            self._mapping.open()
        else:
            self._mapping.open_with(parked)

    def free(self) -> None:
        """Free the physical memory, or park its pages as spare."""
        if self._spare is None:
            self._mapping.shut()
        else:
            self._spare.park(self._mapping)

    def span(self, offset_bytes: int = 0, nbytes: int | None = None) -> Span:
        """Return a range for I/O."""
        length = self.nbytes - offset_bytes if nbytes is None else nbytes
        return Span(self.address + offset_bytes, length, self._mapping)

    def close(self) -> None:
        """Free the physical memory for good; an access through a tensor faults."""
        self._mapping.shut()
