"""Finds the best block size and queue depth for a drive.

[Note: the choice of a sweep]
If forty settings are equally good, noise makes a different one the fastest in every sweep. So the default is kept
unless another setting is faster by more than the spread of the measurements, and by 15%, since a drive's rate differs
more from one minute to the next than within a minute. The few settings that looked better are measured again, in turn
with the default, because luck has raised the first figures of the settings that stand out.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infinity.errors import ConfigError
from infinity.io.bench import BenchSession, ring_bytes
from infinity.io.interface import IoOptions, Span
from infinity.io.sweep_log import SweepLog
from infinity.io.sweep_plan import CHALLENGERS, FINAL_PASSES, SweepPlan, SweepPoint

_GOOD_ENOUGH = 0.97  # of the best rate; among these, the shallowest queue of the smallest blocks wins
_WORTHWHILE = 1.15  # times the default's rate; a smaller gain is not worth another setting
_BEHIND = 1.5  # times the depth: blocks in flight or queued when the time of a measurement ends
_HUGE_PAGE_BYTES = 2 << 20
PROBES = 6  # settings that are measured before a sweep estimates its time
_ENDLESS = 1 << 62  # passes: only the clock ends them


@dataclass(frozen=True)
class SweepProgress:
    """`done` of `total` measurements have ended.

    Attributes:
        left_s: estimated time of the others.
    """

    done: int
    total: int
    points: tuple[SweepPoint, ...]
    left_s: float


# Measuring #


def sweep(path: Path, plan: SweepPlan, backend: str, buffers: Span, log: SweepLog) -> Iterator[SweepProgress]:
    """Measure every setting of a plan. Yield the known results, first the ones of `log`, then after each measurement.

    Each pass measures all settings once, so that a drive that becomes slower or faster meanwhile does not favour a
    setting. At the end the best are measured in turn with the default; see [Note: the choice of a sweep].
    """
    yield from _Sweep(path, plan, backend, buffers, log).run()


class _Sweep:
    """A running sweep."""

    def __init__(self, path: Path, plan: SweepPlan, backend: str, buffers: Span, log: SweepLog) -> None:
        self._path, self._plan, self._backend, self._buffers, self._log = path, plan, backend, buffers, log
        self._rates = {options: self._known(options, plan.passes, final=False) for options in plan.settings}
        self._finalists: tuple[IoOptions, ...] | None = None  # None: not known yet
        self._final_rates: dict[IoOptions, tuple[float, ...]] = {}
        self._spent_s = 0.0  # time of the measurements beyond the estimates
        self._measured = 0

    def _known(self, options: IoOptions, most: int, *, final: bool) -> tuple[float, ...]:
        return self._log.rates(str(self._path.parent), self._plan, options, final=final)[:most]

    def run(self) -> Iterator[SweepProgress]:
        plan = self._plan
        yield self.progress()
        for number in range(plan.passes):
            for options in self._in_order():
                if len(self._rates[options]) <= number:
                    self._rates[options] += (self._measure(options, final=False),)
                    yield self.progress()
        self._finalists = finalists = _finalists(self._points(), plan.default)
        self._final_rates = {options: self._known(options, FINAL_PASSES, final=True) for options in finalists}
        yield self.progress()
        for number in range(FINAL_PASSES):
            for options in finalists:
                if len(self._final_rates[options]) <= number:
                    self._final_rates[options] += (self._measure(options, final=True),)
                    yield self.progress()

    def _in_order(self) -> list[IoOptions]:
        """Return all settings, beginning with some different ones, from which the time of the others is estimated."""
        by_bytes = sorted(self._plan.settings, key=lambda options: options.block_size_bytes * options.queue_depth)
        count = len(by_bytes)
        probes = [by_bytes[round(i * (count - 1) / (PROBES - 1))] for i in range(PROBES)]
        return list(dict.fromkeys([*probes, *self._plan.settings]))

    def _measure(self, options: IoOptions, *, final: bool) -> float:
        plan, begin_s = self._plan, time.perf_counter()
        with BenchSession(self._path, plan.pass_bytes, self._backend, options, self._some_memory(options)) as session:
            until_s = time.perf_counter() + plan.seconds
            run = session.run(plan.operation, passes=_ENDLESS, most_passes=plan.most_passes, until_s=until_s)
            written_bytes = session.engine.stats().bytes_written
        self._log.add(str(self._path.parent), plan, options, run.bytes_per_s, written_bytes, final=final)
        self._spent_s += time.perf_counter() - begin_s - expected_s(plan, options, run.bytes_per_s)
        self._measured += 1
        return run.bytes_per_s

    def _some_memory(self, options: IoOptions) -> Span:
        """Return a random part of the buffers, so that the rate of a setting does not depend on one place in memory."""
        nbytes = ring_bytes(options)
        places = (self._buffers.nbytes - nbytes) // _HUGE_PAGE_BYTES
        address = self._buffers.address + random.randint(0, max(0, places)) * _HUGE_PAGE_BYTES
        return Span(address, min(nbytes, self._buffers.nbytes), self._buffers.owner)

    # Results #

    def _points(self) -> tuple[SweepPoint, ...]:
        return tuple(
            SweepPoint(options, seen, self._final_rates.get(options, ()))
            for options, seen in self._rates.items()
            if seen
        )

    def progress(self) -> SweepProgress:
        """Return the present results."""
        points = self._points()
        total = self._plan.measurements
        if self._finalists is not None:
            total = self._plan.passes * len(self._plan.settings) + FINAL_PASSES * len(self._finalists)
        done = sum(map(len, self._rates.values())) + sum(map(len, self._final_rates.values()))
        return SweepProgress(done, total, points, self._left_s(points, total - done))

    def _left_s(self, points: Sequence[SweepPoint], left: int) -> float:
        """Estimate the time that is left: each setting by its rate, the final measurements by the median setting."""
        if not points:
            return left * self._plan.seconds
        seconds = {options: expected_s(self._plan, options, _rate_of(options, points)) for options in self._rates}
        each = [(options, self._plan.passes - len(seen)) for options, seen in self._rates.items()]
        over_all = sum(count for _, count in each)
        beyond_s = self._spent_s / self._measured if self._measured else 0.0
        finals_s = (left - over_all) * statistics.median(seconds.values())
        return sum(seconds[options] * count for options, count in each) + finals_s + beyond_s * left


def expected_s(plan: SweepPlan, options: IoOptions, bytes_per_s: float) -> float:
    """Return the time of a measurement at a rate: its time or its bytes, and then the requests in flight. Pure."""
    in_flight_s = _BEHIND * options.block_size_bytes * options.queue_depth / bytes_per_s
    if plan.most_passes is None:
        return plan.seconds + in_flight_s
    return min(plan.seconds + in_flight_s, plan.pass_bytes / bytes_per_s)


def _rate_of(options: IoOptions, points: Sequence[SweepPoint]) -> float:
    """Return the rate of a setting, measured or interpolated over the bytes in flight."""
    known = next((point for point in points if point.options == options), None)
    if known is not None:
        return known.bytes_per_s
    seen = sorted((math.log2(point.in_flight_bytes), math.log2(point.bytes_per_s)) for point in points)
    in_flight = math.log2(options.block_size_bytes * options.queue_depth)
    return float(2 ** np.interp(in_flight, [at for at, _ in seen], [rate for _, rate in seen]))


# Choosing #


def _finalists(points: Sequence[SweepPoint], default: IoOptions | None) -> tuple[IoOptions, ...]:
    """Return the default and the best settings that look better; empty if none does, or without a default."""
    kept = next((point for point in points if point.options == default), None)
    if kept is None:
        return ()
    better = [point for point in points if point.bytes_per_s > kept.bytes_per_s]
    best = sorted(better, key=lambda point: -point.bytes_per_s)[:CHALLENGERS]
    return (kept.options, *(point.options for point in best)) if best else ()


def best_point(points: Sequence[SweepPoint], default: IoOptions | None = None) -> SweepPoint:
    """Return the default, unless another setting was faster by more than the spread in the final measurements.

    Without a default among the points, return the cheapest that is practically as fast as the fastest.
    """
    kept = next((point for point in points if point.options == default), None)
    if kept is None:
        return _cheapest(points)
    winners = [point for point in points if point is not kept and _beats(point, kept)]
    return _cheapest(winners) if winners else kept


def _beats(point: SweepPoint, kept: SweepPoint) -> bool:
    """Whether a setting is faster by 15%, and by more than the spread of the measurements of both."""
    if not point.final_rates or not kept.final_rates:
        return False
    one, other = statistics.median(point.final_rates), statistics.median(kept.final_rates)
    spread = max(point.final_spread_bytes_per_s, kept.final_spread_bytes_per_s)
    return one >= _WORTHWHILE * other and one - other > spread


def _cheapest(points: Sequence[SweepPoint]) -> SweepPoint:
    """Return the setting with the fewest bytes in flight among those that are practically as fast as the fastest."""
    fastest = max(point.bytes_per_s for point in points)
    good = [point for point in points if point.bytes_per_s >= _GOOD_ENOUGH * fastest]
    return min(good, key=lambda point: (point.in_flight_bytes, point.options.block_size_bytes))


def best_for_all(sweeps: Sequence[Sequence[SweepPoint]], default: IoOptions | None = None) -> SweepPoint:
    """Return the setting that is the best compromise of several sweeps.

    A setting counts by the fraction of each sweep's fastest rate that it reaches; settings that a sweep lacks are
    omitted. With a default, the choices of the sweeps are compared with it, and it is kept unless one is better by 15%.

    Raises:
        ConfigError: the sweeps have no setting in common.
    """
    shares: dict[IoOptions, list[float]] = {}
    for points in sweeps:
        fastest = max(point.bytes_per_s for point in points)
        for point in points:
            shares.setdefault(point.options, []).append(point.bytes_per_s / fastest)
    common = {
        options: SweepPoint(options, (statistics.geometric_mean(seen),))
        for options, seen in shares.items()
        if len(seen) == len(sweeps)
    }
    if not common:
        raise ConfigError("the sweeps have no setting in common; sweep one path at a time")
    if default not in common:
        return _cheapest(list(common.values()))
    kept = common[default]
    chosen = {best_point(points, default).options for points in sweeps}
    better = [common[options] for options in chosen if options in common]
    better = [point for point in better if point.bytes_per_s >= _WORTHWHILE * kept.bytes_per_s]
    return _cheapest(better) if better else kept
