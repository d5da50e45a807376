"""Control groups of the kernel, which bound the memory of the processes in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def control_group(nbytes: int) -> Iterator[Path]:
    """A control group with so much memory, of either version of them, below that of this process.

    Raises:
        OSError: none can be made here, or no limit be set.
    """
    names = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    old = next((path for kinds, path in names.items() if "memory" in kinds.split(",")), None)
    if old is not None:
        group, limit = Path(f"/sys/fs/cgroup/memory{old}"), "memory.limit_in_bytes"
    else:
        group, limit = Path(f"/sys/fs/cgroup{names.get('', '/')}"), "memory.max"
    group = group / f"infinity-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(nbytes))
        yield group
    finally:
        group.rmdir()
