"""What the drive moves when reads and writes come at the same time: the floor of a step whose states are on it."""

from __future__ import annotations

from pathlib import Path

import torch

from infinity.io import IoOptions
from infinity.io.bench import BenchSession, bench_file
from infinity.memory import Arena

_FILE_BYTES = 4 << 30


def disk_bytes_per_s(path: Path, *, runtime_s: float = 5.0) -> float:
    """Reads and writes together, as `infinity bench-io --op mixed --runtime` measures them.

    Args:
        runtime_s: passes over the file are made for at least so long. A shared drive changes from one second to the
            next; what a step is held against should be as long as the step.
    """
    arena = Arena(256 << 20)
    options = IoOptions()
    with arena.lease(arena.capacity_bytes) as lease, bench_file(path, _FILE_BYTES) as file:
        lease.tensor(torch.uint8).random_()
        with BenchSession(file, _FILE_BYTES, "auto", options, lease.span()) as session:
            session.fill()
            rate = session.run("mixed", runtime_s).bytes_per_s
    arena.close()
    return rate
