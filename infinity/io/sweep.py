"""Finds the block size and queue depth that a drive likes best."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from infinity.io.bench import BenchSession
from infinity.io.interface import IoOptions, Span

BLOCK_SIZES_BYTES = tuple(1 << shift for shift in range(17, 24))  # 128 KiB to 8 MiB
QUEUE_DEPTHS = (1, 4, 8, 16, 32, 64)
_PASSES = 3
_GOOD_ENOUGH = 0.97  # of the best rate; among these the shallowest queue of the smallest blocks wins


@dataclass(frozen=True)
class SweepPoint:
    """One setting and its passes so far, in bytes/s."""

    options: IoOptions
    rates: tuple[float, ...]

    @property
    def bytes_per_s(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True)
class SweepProgress:
    """`done` of `total` measurements are over."""

    done: int
    total: int
    points: tuple[SweepPoint, ...]


def sweep(
    path: Path, size_bytes: int, backend: str, operation: str, base: IoOptions, buffers: Span
) -> Iterator[SweepProgress]:
    """Measure every setting that fits the file; yields after each pass.

    All settings are measured once before any is measured again, so that a drive that slows down or speeds up
    meanwhile is not taken for a setting that is worse or better.
    """
    settings = [
        replace(base, block_size_bytes=block, queue_depth=depth)
        for block in BLOCK_SIZES_BYTES
        for depth in QUEUE_DEPTHS
        if 8 * block <= min(size_bytes, buffers.nbytes)
    ]
    rates: list[tuple[float, ...]] = [() for _ in settings]
    for done in range(_PASSES * len(settings)):
        index = done % len(settings)
        with BenchSession(path, size_bytes, backend, settings[index], buffers) as session:
            rates[index] += (session.run(operation).bytes_per_s,)
        points = (SweepPoint(options, seen) for options, seen in zip(settings, rates, strict=True) if seen)
        yield SweepProgress(done + 1, _PASSES * len(settings), tuple(points))


def best_point(points: Sequence[SweepPoint]) -> SweepPoint:
    """The cheapest setting that is practically as fast as the fastest: fewer bytes in flight, then smaller blocks."""
    fastest = max(point.bytes_per_s for point in points)
    good = [point for point in points if point.bytes_per_s >= _GOOD_ENOUGH * fastest]
    return min(
        good,
        key=lambda point: (
            point.options.block_size_bytes * point.options.queue_depth,
            point.options.block_size_bytes,
        ),
    )
