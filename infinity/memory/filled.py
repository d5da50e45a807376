"""Memory that benchmarks read into and write from: of content that no drive can compress, in huge pages or in small."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from infinity.io import Span
from infinity.memory.arena import Arena
from infinity.memory.mapping import tensor_at


@contextmanager
def random_memory(nbytes: int, *, huge_pages: bool = True) -> Iterator[Span]:
    """`nbytes` of random content, page-aligned; given back at the end.

    Args:
        huge_pages: as training's buffers lie, where the kernel has them; or in pages of 4 KiB, as plain programs' do.
    """
    if not huge_pages:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        span = Span(ctypes.addressof(ctypes.c_char.from_buffer(memory)), nbytes, memory)
        tensor_at(span.address, nbytes, memory).random_()
        yield span
        return
    arena = Arena(nbytes)
    with arena.lease(nbytes) as lease:
        lease.tensor(torch.uint8).random_()
        yield lease.span()
    arena.close()
