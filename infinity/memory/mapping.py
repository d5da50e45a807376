"""Anonymous address ranges; native if the extension is built."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Protocol

import torch

HUGE_PAGE_BYTES = 2 << 20
FRESH_BYTES = 32 << 20  # an allocator maps each larger block separately: glibc's maximum of M_MMAP_THRESHOLD


class Mapping(Protocol):
    """A range of memory that is unmapped when it is collected."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def open(self) -> None:
        """Make it readable and writable."""

    def shut(self) -> None:
        """Forbid access and free the physical pages; the content is zero after the next `open`."""

    def park(self) -> None:
        """Forbid access like `shut`, but keep the pages, for the next `open` or for another mapping's `open_with`."""

    def open_with(self, parked: Any) -> None:
        """Open with the pages of a parked mapping of the same size. The system need not zero them, unlike new pages."""


class _PlainMapping:
    """Python's mmap with the requested alignment. It cannot forbid access."""

    def __init__(self, nbytes: int, alignment: int) -> None:
        self._map = mmap.mmap(-1, nbytes + alignment)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = -(-base // alignment) * alignment
        self.nbytes = nbytes

    def open(self) -> None:
        return None

    def shut(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def park(self) -> None:
        return None

    def open_with(self, parked: _PlainMapping) -> None:
        parked.shut()


try:
    from infinity import _aio

    def make_mapping(nbytes: int, alignment: int) -> Mapping:
        """Reserve `nbytes` at a multiple of `alignment`; no access until `open`."""
        return _aio.Mapping(nbytes, alignment)

except ImportError:  # the extension is not built

    def make_mapping(nbytes: int, alignment: int) -> Mapping:
        """Reserve `nbytes` at a multiple of `alignment`."""
        return _PlainMapping(nbytes, alignment)


def tensor_at(address: int, nbytes: int, owner: object) -> torch.Tensor:
    """Return a uint8 tensor over memory that `owner` keeps alive; the tensor's storage holds `owner`."""
    buffer = (ctypes.c_char * nbytes).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)
