"""What the drive moves when reads and writes come at the same time: the floor of a step whose states are on it."""

from __future__ import annotations

from pathlib import Path

from infinity.io import IoOptions
from infinity.io.bench import BenchSession, bench_file, ring_bytes
from infinity.memory.filled import random_memory


def disk_bytes_per_s(path: Path, operation: str = "mixed", *, runtime_s: float = 5.0, size: int = 4 << 30) -> float:
    """Reads and writes together, or one of them, as `infinity bench-io --op OPERATION --runtime` measures them.

    Args:
        runtime_s: passes over the file are made for at least so long. A shared drive changes from one second to the
            next; what a step is held against should be as long as the step.
        size: bytes of the file.
    """
    options = IoOptions()
    with (
        random_memory(ring_bytes(options)) as buffers,
        bench_file(path, size) as file,
        BenchSession(file, size, "auto", options, buffers) as session,
    ):
        session.fill()
        return session.run(operation, runtime_s).bytes_per_s
