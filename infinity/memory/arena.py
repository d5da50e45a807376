"""One aligned allocation that is leased in parts."""

from __future__ import annotations

import bisect
import copy
import ctypes
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from infinity.config import format_size
from infinity.errors import CapacityError, InfinityError
from infinity.io import Span
from infinity.kernels import bind_this_thread, thread_count
from infinity.memory import pinning
from infinity.memory.critical_section import CriticalSection
from infinity.memory.mapping import HUGE_PAGE_BYTES, make_mapping, tensor_at

ALIGN_BYTES = 4096  # alignment of leases, tiles and files: a multiple of the blocks of direct I/O
_TOUCHED_BYTES = 256 << 20  # bytes that one task of a thread touches


class FreeList:
    """The free ranges of `[0, capacity)`: best fit, neighbours are merged. Pure."""

    def __init__(self, capacity: int) -> None:
        self._holes = [(0, capacity)] if capacity else []  # (start, size), in the order of their starts

    def take(self, size: int, *, at_end: bool = False) -> int | None:
        """Take `size` at the start or end of the smallest hole that fits. Return its offset; None if no hole fits."""
        large = ((hole, index) for index, (_, hole) in enumerate(self._holes) if hole >= size)
        hole, index = min(large, default=(0, None))
        if index is None:
            return None
        start, _ = self._holes.pop(index)
        left = hole - size
        if left:
            self._holes.insert(index, (start if at_end else start + size, left))
        return start + left if at_end else start

    def give(self, start: int, size: int) -> None:
        """Return a range that `take` returned."""
        index = bisect.bisect_left(self._holes, (start, 0))
        if index < len(self._holes) and start + size == self._holes[index][0]:
            size += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == start:
            start, before = self._holes.pop(index - 1)
            index, size = index - 1, size + before
        self._holes.insert(index, (start, size))

    @property
    def largest(self) -> int:
        return max((size for _, size in self._holes), default=0)


class Arena:
    """Memory that is mapped once and leased.

    Args:
        capacity_bytes: rounded up to whole pages. Physical memory is allocated at the first access.
        pin: also register the memory with this device's driver, so that the device copies from and to it directly. All
            physical memory is then allocated at once, by as many threads as the optimizer uses.

    Attributes:
        used_bytes, peak_bytes: bytes leased now, and at most so far.
        critical: guards every hand-over of the memory; shared by all parts of the arena.
    """

    def __init__(self, capacity_bytes: int, *, pin: torch.device | None = None) -> None:
        self._begin(capacity_bytes)
        self.critical = CriticalSection()
        self._mapping = make_mapping(max(self.capacity_bytes, ALIGN_BYTES), HUGE_PAGE_BYTES)
        self._mapping.open()
        self._address = self._mapping.address
        self._pinned_for = pin
        self._pinned: tuple[int, ...] = ()
        if pin is not None:
            _touch(tensor_at(self._address, self._mapping.nbytes, self._mapping))
            self._pinned = pinning.pin(pin, self._mapping.address, self._mapping.nbytes)

    def _begin(self, capacity_bytes: int) -> None:
        self.capacity_bytes = aligned(capacity_bytes)
        self.used_bytes = 0
        self.peak_bytes = 0
        self._free = FreeList(self.capacity_bytes)
        self._within: Arena | None = None  # the arena that counts the leases of this part

    def part(self, nbytes: int, *, counts_leases: bool = False) -> Arena:
        """Return an arena within this one, whose leases neither use nor fragment the memory of others.

        Args:
            counts_leases: count only the leases of the part as used in this arena. If False, count the whole part.

        Raises:
            CapacityError: no hole is large enough.
        """
        part = copy.copy(self)
        part._begin(nbytes)
        if part.capacity_bytes:
            offset = self._free.take(part.capacity_bytes)
            if offset is None:
                raise self._full(nbytes)
            part._address = self._address + offset
        if counts_leases:
            part._within = self
        else:
            self._count(part.capacity_bytes)
        return part

    def lease(self, nbytes: int) -> Lease:
        """Lease `nbytes`, aligned to a page, with undefined content.

        Raises:
            CapacityError: no hole is large enough.
        """
        lease = self.try_lease(nbytes)
        if lease is None:
            raise self._full(nbytes)
        return lease

    def try_lease(self, nbytes: int, *, at_end: bool = False) -> Lease | None:
        """Like `lease`, but return None if no hole is large enough.

        Args:
            at_end: lease the end of a hole. Small and large leases fragment the arena less at different ends.
        """
        size = aligned(nbytes)
        with self.critical:
            offset = self._free.take(size, at_end=at_end)
            if offset is None:
                return None
            self._count(size)
            return Lease(self, self._address + offset, nbytes)

    def close_gaps(self, leases: Sequence[Lease]) -> None:
        """Move `leases`, which must be all leases of this arena, to its start. Addresses change, contents stay.

        During the call, no thread may access them. Tensors that were created from them before are invalid afterwards.
        """
        with self.critical:
            self._free = FreeList(self.capacity_bytes)
            for lease in sorted(leases, key=lambda lease: lease.address):  # so that no lease overwrites a later one
                offset = self._free.take(aligned(lease.nbytes))
                assert offset is not None
                lease._move(self._address + offset)

    def _give_back(self, address: int, nbytes: int) -> None:
        size = aligned(nbytes)
        self._free.give(address - self._address, size)
        self._count(-size)

    def _count(self, nbytes: int) -> None:
        """Add to the used bytes; `nbytes` may be negative."""
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        if self._within is not None:
            self._within._count(nbytes)

    def _full(self, nbytes: int) -> CapacityError:
        return CapacityError(
            f"the arena has no free range of {format_size(nbytes)}: {format_size(self.used_bytes)} of "
            f"{format_size(self.capacity_bytes)} are in use and the largest hole has {format_size(self._free.largest)}"
        )

    def close(self) -> None:
        """Free the physical memory. No lease may be in use."""
        if self._pinned_for is not None:
            pinning.unpin(self._pinned_for, self._pinned)
            self._pinned = ()
        self._mapping.shut()


class Lease:
    """A range of an arena; a context manager that releases it. Its tensors do not keep it alive."""

    def __init__(self, arena: Arena, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._arena: Arena | None = arena
        self._bytes = tensor_at(address, nbytes, arena)

    def __del__(self) -> None:
        """Release a lease that an interrupt made unreachable before its owner stored it."""
        if getattr(self, "_arena", None) is not None:
            self.release()

    def tensor(self, dtype: torch.dtype, numel: int | None = None, offset_bytes: int = 0) -> torch.Tensor:
        """Return a 1-D tensor over the lease, from `offset_bytes` on."""
        stop = None if numel is None else offset_bytes + numel * dtype.itemsize
        return self._bytes[offset_bytes:stop].view(dtype)

    def span(self, offset_bytes: int = 0, nbytes: int | None = None) -> Span:
        """Return a range for I/O."""
        length = self.nbytes - offset_bytes if nbytes is None else nbytes
        return Span(self.address + offset_bytes, length, self)

    def _move(self, address: int) -> None:
        ctypes.memmove(address, self.address, self.nbytes)
        self.address = address
        self._bytes = tensor_at(address, self.nbytes, self._arena)

    def keep(self) -> int:
        """Never release the memory. Return its address."""
        self._arena = None
        return self.address

    def release(self) -> None:
        """Release the memory; only once."""
        if self._arena is None:
            raise InfinityError("this lease was released before")
        arena, self._arena = self._arena, None
        arena._give_back(self.address, self.nbytes)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of `ALIGN_BYTES`."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _touch(memory: torch.Tensor) -> None:
    """Allocate the physical pages of new memory on several threads. A driver that pins them would use one thread."""
    pages = memory[:: mmap.PAGESIZE].split(_TOUCHED_BYTES // mmap.PAGESIZE)
    with ThreadPoolExecutor(min(thread_count(), len(pages)), "infinity-touch") as threads:
        for _ in threads.map(_fill, pages):
            pass


def _fill(pages: torch.Tensor) -> None:
    bind_this_thread()  # near the device: the NUMA node of the thread that touches a page first provides it
    pages.numpy().fill(0)  # numpy releases the GIL
