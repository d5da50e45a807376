"""What the drive moves when reads and writes come at the same time: the floor of a step whose states are on it."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from infinity.io import IoOptions
from infinity.io.bench import BenchSession, bench_file
from infinity.memory import Arena


def disk_bytes_per_s(path: Path, size_bytes: int = 4 << 30) -> float:
    """Reads and writes together, as `infinity bench-io --op mixed` measures them; median of three passes."""
    arena = Arena(256 << 20)
    options = IoOptions()
    with arena.lease(arena.capacity_bytes) as lease, bench_file(path, size_bytes) as file:
        lease.tensor(torch.uint8).random_()
        with BenchSession(file, size_bytes, "auto", options, lease.span()) as session:
            session.fill()
            rate = statistics.median(session.run("mixed").bytes_per_s for _ in range(3))
    arena.close()
    return rate
