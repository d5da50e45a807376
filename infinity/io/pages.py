"""Measures a process's memory in huge pages, and starts processes with or without them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity.io.interface import Span

_PR_SET_THP_DISABLE = 41
_PR_GET_THP_DISABLE = 42


def huge_page_bytes(span: Span) -> int | None:
    """Return the bytes of huge pages in the mappings that hold `span`; None if the kernel does not report them."""
    try:
        lines = Path("/proc/self/smaps").read_text(errors="replace").splitlines()  # it has names of mapped files
    except OSError:
        return None
    found, inside = 0, False
    for line in lines:
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            begin, _, end = first.partition("-")
            inside = int(begin, 16) < span.address + span.nbytes and span.address < int(end, 16)
        elif inside and first == "AnonHugePages:":
            found += _kilobytes(line)
    return min(found, span.nbytes)


def child_huge_page_bytes(pid: int) -> int:
    """Return the bytes of huge pages of a process and its children; 0 for a process that has ended."""
    found = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("AnonHugePages:"):
                found += _kilobytes(line)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return found
    return found + sum(child_huge_page_bytes(int(child)) for child in children)


@contextmanager
def huge_pages_for_children(allowed: bool) -> Iterator[dict[str, str]]:
    """Yield the environment for a child that is started inside of this context, with or without huge pages.

    If the kernel gives huge pages only on request (`madvise`), the environment makes glibc request them for malloc.
    """
    environment = dict(os.environ)
    if allowed:
        tunables = [environment["GLIBC_TUNABLES"]] if environment.get("GLIBC_TUNABLES") else []
        environment["GLIBC_TUNABLES"] = ":".join([*tunables, "glibc.malloc.hugetlb=1"])
        yield environment
        return
    libc = ctypes.CDLL(None, use_errno=True)
    before = libc.prctl(_PR_GET_THP_DISABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a child inherits it
    try:
        yield environment
    finally:
        libc.prctl(_PR_SET_THP_DISABLE, max(before, 0), 0, 0, 0)


def _kilobytes(line: str) -> int:
    return int(line.split()[1]) << 10
