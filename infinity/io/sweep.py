"""Finds the block size and queue depth that a drive likes best."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infinity.config import format_size
from infinity.config.read import read_text
from infinity.config.typed import Count, Positive, Rate, parsed
from infinity.errors import ConfigError
from infinity.io.bench import BenchSession, ring_bytes
from infinity.io.interface import IoOptions, Span
from infinity.io.patterns import written_share

BLOCK_SIZES_BYTES = tuple(1 << shift for shift in range(17, 24))  # 128 KiB to 8 MiB
QUEUE_DEPTHS = (1, 4, 8, 16, 32, 64)
_GOOD_ENOUGH = 0.97  # of the best rate; among these the shallowest queue of the smallest blocks wins
_LEAST_BLOCKS = 8  # that one measurement moves; fewer than are in flight say little of a depth
_VERSION = 1


@dataclass(frozen=True)
class SweepPoint:
    """One setting and its passes so far, in bytes/s."""

    options: IoOptions
    rates: tuple[float, ...]

    @property
    def bytes_per_s(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep will do.

    Attributes:
        pass_bytes: what one measurement moves, from the beginning of the file.
    """

    operation: str
    settings: tuple[IoOptions, ...]
    passes: int
    pass_bytes: int

    @property
    def measurements(self) -> int:
        return self.passes * len(self.settings)

    @property
    def moved_bytes(self) -> int:
        return self.measurements * self.pass_bytes

    @property
    def written_bytes(self) -> int:
        return int(self.moved_bytes * written_share(self.operation))


@dataclass(frozen=True)
class SweepProgress:
    """`done` of `total` measurements are over."""

    done: int
    total: int
    points: tuple[SweepPoint, ...]


def plan_sweep(
    operation: str,
    size_bytes: int,
    base: IoOptions,
    *,
    passes: int,
    memory_bytes: int,
    most_written_bytes: int,
) -> SweepPlan:
    """Every setting that fits the file and the memory; of the file only as much as may be written so often. Pure.

    Raises:
        ConfigError: nothing fits; the message says what would.
    """
    settings = tuple(
        option
        for block in BLOCK_SIZES_BYTES
        for depth in QUEUE_DEPTHS
        if _LEAST_BLOCKS * block <= size_bytes
        and ring_bytes(option := replace(base, block_size_bytes=block, queue_depth=depth)) <= memory_bytes
    )
    if not settings:
        raise ConfigError(
            f"nothing to sweep: --size is {size_bytes} (the least is 1MiB), and {format_size(memory_bytes)} of memory "
            "may be taken (the least is 8MiB)"
        )
    least_bytes = _LEAST_BLOCKS * settings[-1].block_size_bytes
    times = passes * len(settings) * written_share(operation)
    pass_bytes = size_bytes if not times else min(size_bytes, int(most_written_bytes / times))
    pass_bytes -= pass_bytes % settings[-1].block_size_bytes
    if pass_bytes < least_bytes:
        raise ConfigError(
            f"--max-write leaves {format_size(max(0, most_written_bytes))} for this sweep of {operation}, which "
            f"writes at least {format_size(least_bytes * times)} ({passes} runs of {len(settings)} settings): raise "
            "--max-write, lower --runs, or sweep read"
        )
    return SweepPlan(operation, settings, passes, pass_bytes)


class SweepLog:
    """What sweeps have measured so far, kept in a file so that they can go on after an interruption: JSON lines.

    Args:
        path: made if it is missing; None keeps nothing.
        facts: what must be the same for figures to belong together.

    Raises:
        ConfigError: the file is of other measurements, or cannot be read or written.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._rates: dict[tuple[object, ...], list[float]] = {}
        self.written_bytes = 0
        header = {"infinity_sweep": _VERSION, **facts}
        if path is None:
            return
        try:
            if path.exists() and path.stat().st_size:
                self._read(path, header)
            else:
                self._append(header)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"--resume {path}: {error}") from error

    def _read(self, path: Path, header: Mapping[str, Any]) -> None:
        text = read_text(path)
        found = json.loads(next(iter(text.splitlines()), ""))
        if not isinstance(found, dict) or "infinity_sweep" not in found:
            raise ValueError("it is there already and holds no sweep: use another file")
        for name, value in header.items():
            if found.get(name) != value:
                raise ValueError(f"it was begun with {name} {found.get(name)}, and this is {value}: use another file")
        whole = text[: text.rfind("\n") + 1]  # the last line may have been cut off
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        for number, line in enumerate(whole.splitlines()[1:], 2):
            try:
                self._take(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error

    def _take(self, line: str) -> None:
        self.written_bytes += parsed(_Written, line).written_bytes
        if "bytes_per_s" in parsed(dict[str, Any], line):
            found = parsed(_Measured, line)
            self._rates.setdefault(found.key, []).append(found.bytes_per_s)

    def rates(self, place: str, operation: str, pass_bytes: int, options: IoOptions) -> tuple[float, ...]:
        """Of the passes that were measured before."""
        return tuple(self._rates.get((place, operation, pass_bytes, *_shape(options)), ()))

    def pass_bytes(self, place: str, operation: str) -> int | None:
        """What one measurement moved when this sweep was begun; None if it was not."""
        return next((int(str(key[2])) for key in self._rates if key[:2] == (place, operation)), None)

    def add(self, place: str, plan: SweepPlan, options: IoOptions, rate: float, written_bytes: int) -> None:
        """One more pass was measured."""
        block, depth = _shape(options)
        self._append(
            {
                "path": place,
                "op": plan.operation,
                "pass_bytes": plan.pass_bytes,
                "block_size_bytes": block,
                "queue_depth": depth,
                "bytes_per_s": rate,
                "written_bytes": written_bytes,
            }
        )

    def filled(self, nbytes: int) -> None:
        """A file was written, to be measured."""
        self._append({"written_bytes": nbytes})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _shape(options: IoOptions) -> tuple[int, int]:
    return options.block_size_bytes, options.queue_depth


@dataclass(frozen=True)
class _Written:
    """What a line of the log may hold, see [Note: typed records]; older ones do not say what was written."""

    written_bytes: Count = 0


@dataclass(frozen=True)
class _Measured:
    path: str
    op: str
    pass_bytes: Positive
    block_size_bytes: Positive
    queue_depth: Positive
    bytes_per_s: Rate

    @property
    def key(self) -> tuple[object, ...]:
        return self.path, self.op, self.pass_bytes, self.block_size_bytes, self.queue_depth


def sweep(path: Path, plan: SweepPlan, backend: str, buffers: Span, log: SweepLog) -> Iterator[SweepProgress]:
    """Measure every setting of a plan; yields what is known, first of all from before, and then after each pass.

    All settings are measured once before any is measured again, so that a drive that slows down or speeds up
    meanwhile is not taken for a setting that is worse or better.
    """
    place = str(path.parent)
    rates = [log.rates(place, plan.operation, plan.pass_bytes, option)[: plan.passes] for option in plan.settings]
    yield _progress(plan, rates)
    for number in range(plan.measurements):
        index = number % len(plan.settings)
        options = plan.settings[index]
        if len(rates[index]) > number // len(plan.settings):
            continue
        with BenchSession(path, plan.pass_bytes, backend, options, buffers) as session:
            rate = session.run(plan.operation).bytes_per_s
            written_bytes = session.engine.stats().bytes_written
        rates[index] += (rate,)
        log.add(place, plan, options, rate, written_bytes)
        yield _progress(plan, rates)


def _progress(plan: SweepPlan, rates: Sequence[tuple[float, ...]]) -> SweepProgress:
    points = (SweepPoint(options, seen) for options, seen in zip(plan.settings, rates, strict=True) if seen)
    return SweepProgress(sum(map(len, rates)), plan.measurements, tuple(points))


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


def best_for_all(sweeps: Sequence[Sequence[SweepPoint]]) -> SweepPoint:
    """The cheapest setting that is practically the best compromise of several sweeps.

    Each counts by what share of its own fastest rate a setting reaches; those that some sweep has not are left out.

    Raises:
        ConfigError: the sweeps have no setting in common.
    """
    shares: dict[IoOptions, list[float]] = {}
    for points in sweeps:
        fastest = max(point.bytes_per_s for point in points)
        for point in points:
            shares.setdefault(point.options, []).append(point.bytes_per_s / fastest)
    common = [
        SweepPoint(options, (statistics.geometric_mean(seen),))
        for options, seen in shares.items()
        if len(seen) == len(sweeps)
    ]
    if not common:
        raise ConfigError("the sweeps have no setting in common; sweep one path at a time")
    return best_point(common)
