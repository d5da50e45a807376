"""Buffers for benchmarks, with content that no drive can compress, in huge or small pages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from infinity.io import Span
from infinity.memory.arena import Arena
from infinity.memory.mapping import tensor_at


@contextmanager
def random_memory(nbytes: int, *, huge_pages: bool = True) -> Iterator[Span]:
    """Yield `nbytes` of random content, page-aligned; freed at the end of the context.

    Args:
        huge_pages: use huge pages if the kernel has any, like training; else pages of 4 KiB, like plain programs.
    """
    if not huge_pages:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        span = Span(ctypes.addressof(ctypes.c_char.from_buffer(memory)), nbytes, memory)
        tensor_at(span.address, nbytes, memory).random_()
        yield span
        return
    with closing(Arena(nbytes)) as arena, arena.lease(nbytes) as lease:
        lease.tensor(torch.uint8).random_()
        yield lease.span()
