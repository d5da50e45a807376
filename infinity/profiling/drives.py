"""Rates of the drives: each alone, all at once, and while the optimizer and matrix products run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from infinity.io import IoOptions, Span
from infinity.io.bench import BenchRun, BenchSession, bench_file, ring_bytes, run_together, shares
from infinity.io.drives import cautions, drive_of
from infinity.memory.filled import random_memory
from infinity.profiling.contention import RUNS_OF_DRIVES, contention

OPERATIONS = ("read", "write", "mixed")
MOST_PASSES = 4  # over its file in one measurement, which limits what it writes
_PASSES_BESIDE = 2  # the same for measurements of contention, which are more
_BESIDE_S = 0.5
Rates = dict[str, Any]


def written_bytes(paths: int, size_bytes: int) -> int:
    """Return the most bytes that `drive_rates` writes: to fill the files, and in "write", "mixed" and contention."""
    per_path = size_bytes + MOST_PASSES * (size_bytes + size_bytes // 2)
    together = MOST_PASSES * (size_bytes + size_bytes // 2) if paths > 1 else 0
    beside = RUNS_OF_DRIVES * (_PASSES_BESIDE * size_bytes // 2)
    return paths * (per_path + together + beside)


def drive_rates(
    paths: Sequence[Path],
    size_bytes: int,
    options: IoOptions,
    backend: str,
    seconds: float,
    optimizer_numel: int,
    progress: Callable[[str], None],
    *,
    computes_here: bool = True,
) -> Rates:
    """Return the profile's `drives`, `drives_together` and `contention`.

    Args:
        size_bytes: size of the file on each path.
        seconds: length of one measurement. It ends earlier after `MOST_PASSES` passes over its file.
        optimizer_numel: parameters of the optimizer in the measurements of contention.
        computes_here: whether the compute device is the CPU. If so, contention includes matrix products.

    Raises:
        StorageError: a path cannot be used, or a file would fill its drive.
    """
    with ExitStack() as stack:
        buffers = stack.enter_context(random_memory(ring_bytes(options) * len(paths)))
        files = [stack.enter_context(bench_file(path, size_bytes)) for path in paths]
        sessions = _sessions(files, size_bytes, options, backend, buffers, stack)
        drives = []
        for file, session in zip(files, sessions, strict=True):
            drives.append(_alone(file, session, seconds, progress))
        together = None
        if len(sessions) > 1:
            together = {}
            for operation in OPERATIONS:
                together[f"{operation}_bytes_per_s"] = _together(sessions, operation, size_bytes, drives, seconds)
                progress(f"all drives: {operation}")
        fastest = max(float(drive["mixed_bytes_per_s"]) for drive in drives)
        beside_s = min(_BESIDE_S, seconds, _PASSES_BESIDE * size_bytes / fastest)
        beside = contention(optimizer_numel, partial(_move, sessions), beside_s, computes_here=computes_here)
        progress("drives, optimizer and products beside one another")
    return {"drives": drives, "drives_together": together, "contention": beside}


def _sessions(
    files: Sequence[Path], size_bytes: int, options: IoOptions, backend: str, buffers: Span, stack: ExitStack
) -> list[BenchSession]:
    return [
        stack.enter_context(BenchSession(file, size_bytes, backend, options, span, as_in_training=True))
        for file, span in zip(files, shares(buffers, len(files)), strict=True)
    ]


def _alone(file: Path, session: BenchSession, seconds: float, progress: Callable[[str], None]) -> Rates:
    drive = drive_of(file.parent)
    session.fill()
    progress(f"{file.parent}: filled")
    facts: Rates = {
        "path": str(file.parent),
        "filesystem": drive.filesystem,
        "device": drive.device,
        "backend": session.backend,
        "direct": session.direct,
        "cautions": cautions(drive, direct=session.direct),
    }
    for operation in OPERATIONS:
        run = session.run(operation, seconds, most_passes=MOST_PASSES)
        facts[f"{operation}_bytes_per_s"] = run.bytes_per_s
        progress(f"{file.parent}: {operation}")
    return facts


def _together(
    sessions: Sequence[BenchSession], operation: str, size_bytes: int, drives: Sequence[Rates], seconds: float
) -> float:
    """Return the rate of all drives at once, measured for as long as the fastest may pass over its file."""
    fastest = max(float(drive[f"{operation}_bytes_per_s"]) for drive in drives)
    return _total(run_together(sessions, operation, min(seconds, MOST_PASSES * size_bytes / fastest), MOST_PASSES))


def _move(sessions: Sequence[BenchSession], seconds: float) -> float:
    """Read and write at once on all drives, and return their rate."""
    return _total(run_together(sessions, "mixed", seconds, _PASSES_BESIDE))


def _total(runs: Sequence[BenchRun]) -> float:
    return sum(run.nbytes for run in runs) / max(run.seconds for run in runs)
