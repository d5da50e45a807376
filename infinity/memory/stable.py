"""Memory that comes and goes behind tensors that stay: pages of a reserved range on the host, a storage on a device."""

from __future__ import annotations

from typing import Protocol

import torch

from infinity.io import Span
from infinity.memory.mapping import HUGE_PAGE_BYTES, Mapping, make_mapping, tensor_at

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


def stable_memory(nbytes: int, device: torch.device, spare: SparePages | None = None) -> StableMemory:
    """Memory on a device. On the CPU it is mapped: an allocator would keep what is freed, in pieces among the rest.

    Args:
        spare: where its pages wait while it is freed; without, they go back to the system.
    """
    return StableBuffer(nbytes, spare) if device.type == "cpu" else DeviceBuffer(nbytes, device)


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


class SparePages:
    """Pages of freed buffers, for those of their size that are allocated next.

    The system zeroes every page that it gives, which takes a core no less than a read takes a drive: as units of one
    size come and go, their pages go from one to the next. What is spare counts as free, so all of it goes back before
    pages of another size are taken: what is in use and what is spare together never exceed what was in use at once.
    """

    def __init__(self) -> None:
        self._parked: list[Mapping] = []

    def park(self, mapping: Mapping) -> None:
        """Keep the pages; a touch faults from now on."""
        mapping.park()
        if mapping not in self._parked:
            self._parked.append(mapping)

    def take(self, mapping: Mapping) -> Mapping | None:
        """Whose pages this mapping is to have: its own if they are still there; None for new ones."""
        fitting = [each for each in self._parked if each.nbytes == mapping.nbytes]
        if not fitting:
            self.clear()
            return None
        found = mapping if mapping in fitting else fitting[0]
        self._parked.remove(found)
        return found

    def clear(self) -> None:
        """Give all of it back."""
        while self._parked:
            self._parked.pop().shut()


class StableBuffer:
    """Memory whose tensors keep their addresses while it is freed and allocated again.

    Tensors that autograd saved stay valid across both. A touch while the memory is freed ends the process with a
    segmentation fault rather than reading zeros.
    """

    def __init__(self, nbytes: int, spare: SparePages | None = None) -> None:
        self._spare = spare
        alignment = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else _PAGE_BYTES
        self._mapping = make_mapping(max(nbytes, 1), alignment)
        self._bytes = tensor_at(self._mapping.address, max(nbytes, 1), self._mapping)
        self.address = self._mapping.address
        self.nbytes = nbytes

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` elements as a 1-D tensor; valid to read and write while allocated."""
        return self._bytes[: numel * dtype.itemsize].view(dtype)

    def allocate(self) -> None:
        """Make the memory usable; its content is undefined, and zero where there are no spare pages."""
        parked = None if self._spare is None else self._spare.take(self._mapping)
        if parked is None or parked is self._mapping:
            self._mapping.open()
        else:
            self._mapping.open_with(parked)

    def free(self) -> None:
        """Give the physical memory back."""
        if self._spare is None:
            self._mapping.shut()
        else:
            self._spare.park(self._mapping)

    def span(self, offset_bytes: int = 0, nbytes: int | None = None) -> Span:
        """A range for I/O."""
        length = self.nbytes - offset_bytes if nbytes is None else nbytes
        return Span(self.address + offset_bytes, length, self._mapping)

    def close(self) -> None:
        """Free the memory for good; tensors over it are left behind as `free` leaves them."""
        self._mapping.shut()
