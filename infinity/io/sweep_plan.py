"""The plan of a sweep: settings, passes and bytes. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from infinity.config import format_size
from infinity.errors import ConfigError
from infinity.io.bench import ring_bytes
from infinity.io.interface import IoOptions
from infinity.io.patterns import written_share

BLOCK_SIZES_BYTES = tuple(1 << shift for shift in range(17, 24))  # 128 KiB to 8 MiB
QUEUE_DEPTHS = (1, 4, 8, 16, 32, 64)
CHALLENGERS = 3  # settings that are measured again in turn with the default
FINAL_PASSES = 5  # final measurements of each of them, and of the default
_LEAST_BLOCKS = 8  # of one measurement; fewer blocks than are in flight would not show the effect of a depth


@dataclass(frozen=True)
class SweepPoint:
    """One setting and its measurements so far, in bytes/s.

    Attributes:
        final_rates: measurements in turn with the default; empty for a setting without these.
    """

    options: IoOptions
    rates: tuple[float, ...]
    final_rates: tuple[float, ...] = ()

    @property
    def bytes_per_s(self) -> float:
        return statistics.median(self.final_rates or self.rates)

    @property
    def final_spread_bytes_per_s(self) -> float:
        """Range of the final measurements without the fastest and the slowest: one pause of a drive must not decide."""
        inner = sorted(self.final_rates)[1:-1] or self.final_rates
        return max(inner) - min(inner)

    @property
    def in_flight_bytes(self) -> int:
        return self.options.block_size_bytes * self.options.queue_depth


@dataclass(frozen=True)
class SweepPlan:
    """The plan of a sweep.

    Attributes:
        default: the setting that is kept unless another is better; None if it fits neither file nor memory.
        seconds: time of one measurement; less if the limit of written bytes ends it.
        pass_bytes: bytes of the file, from its start, that measurements use; a measurement that writes makes one pass.
    """

    operation: str
    settings: tuple[IoOptions, ...]
    default: IoOptions | None
    passes: int
    seconds: float
    pass_bytes: int

    @property
    def measurements(self) -> int:
        """The most measurements; without the final ones if no setting looks better than the default."""
        return _measurements(self.passes, self.settings, self.default)

    @property
    def written_bytes(self) -> int:
        """The most bytes written."""
        return int(self.measurements * self.pass_bytes * written_share(self.operation))

    @property
    def most_passes(self) -> int | None:
        """The most passes of one measurement over `pass_bytes`; None for no limit."""
        return 1 if written_share(self.operation) else None


def plan_sweep(
    operation: str,
    size_bytes: int,
    base: IoOptions,
    *,
    passes: int,
    seconds: float,
    memory_bytes: int,
    most_written_bytes: int,
) -> SweepPlan:
    """Plan all settings that fit the file and the memory, and the part of the file that the write limit allows. Pure.

    Args:
        base: the default, which is one of the settings if it fits.

    Raises:
        ConfigError: no setting fits; the message gives sizes that would.
    """
    grid = [(block, depth) for block in BLOCK_SIZES_BYTES for depth in QUEUE_DEPTHS]
    shapes = sorted({*grid, shape_of(base)})
    settings = tuple(
        option
        for block, depth in shapes
        if _LEAST_BLOCKS * block <= size_bytes
        and ring_bytes(option := replace(base, block_size_bytes=block, queue_depth=depth)) <= memory_bytes
    )
    if not settings:
        raise ConfigError(
            f"nothing to sweep: --size is {size_bytes} (the least is 1MiB), and {format_size(memory_bytes)} of memory "
            "may be taken (the least is 8MiB)"
        )
    default = base if base in settings else None
    largest = settings[-1].block_size_bytes
    least_bytes = _LEAST_BLOCKS * largest
    times = _measurements(passes, settings, default) * written_share(operation)
    pass_bytes = size_bytes if not times else min(size_bytes, int(most_written_bytes / times))
    pass_bytes -= pass_bytes % largest
    if pass_bytes < least_bytes:
        raise ConfigError(
            f"--max-write leaves {format_size(max(0, most_written_bytes))} for this sweep of {operation}, which "
            f"writes at least {format_size(least_bytes * times)} ({passes} runs of {len(settings)} settings): raise "
            "--max-write, lower --runs, or sweep read"
        )
    return SweepPlan(operation, settings, default, passes, seconds, pass_bytes)


def _measurements(passes: int, settings: Sequence[IoOptions], default: IoOptions | None) -> int:
    finals = FINAL_PASSES * (1 + min(CHALLENGERS, len(settings) - 1)) if default is not None else 0
    return passes * len(settings) + finals


def shape_of(options: IoOptions) -> tuple[int, int]:
    return options.block_size_bytes, options.queue_depth
