"""Finds the block size and queue depth that a drive likes best.

[Note: the choice of a sweep]
Of forty settings that a drive likes alike, noise makes some other one the fastest in every sweep. The default is
therefore kept unless another setting is faster by more than the spread of the measurements, and by 15%, since a
drive's rate differs more from one minute to the next than within one. The few settings that looked better are measured
again in turn with the default: the figures that made them stand out are those that luck has raised.
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

_GOOD_ENOUGH = 0.97  # of the best rate; among these the shallowest queue of the smallest blocks wins
_WORTHWHILE = 1.15  # of the default's rate; less is not worth another setting
_BEHIND = 1.5  # depths of blocks that are in flight or wait when the time of a measurement is over
_HUGE_PAGE_BYTES = 2 << 20
PROBES = 6  # settings that are measured before a sweep says how long it takes
_ENDLESS = 1 << 62  # passes: the clock ends them


@dataclass(frozen=True)
class SweepProgress:
    """`done` of `total` measurements are over.

    Attributes:
        left_s: about what the others will take.
    """

    done: int
    total: int
    points: tuple[SweepPoint, ...]
    left_s: float


# Measuring #


def sweep(path: Path, plan: SweepPlan, backend: str, buffers: Span, log: SweepLog) -> Iterator[SweepProgress]:
    """Measure every setting of a plan; yields what is known, first of all from before, and then after each one.

    All settings are measured once before any is measured again, so that a drive that slows down or speeds up
    meanwhile is not taken for a setting that is worse or better. At the end the best are measured in turn with the
    default; see [Note: the choice of a sweep].
    """
    yield from _Sweep(path, plan, backend, buffers, log).run()


class _Sweep:
    """A sweep under way."""

    def __init__(self, path: Path, plan: SweepPlan, backend: str, buffers: Span, log: SweepLog) -> None:
        self._path, self._plan, self._backend, self._buffers, self._log = path, plan, backend, buffers, log
        self._rates = {options: self._known(options, plan.passes, final=False) for options in plan.settings}
        self._finalists: tuple[IoOptions, ...] | None = None  # not known yet
        self._final_rates: dict[IoOptions, tuple[float, ...]] = {}
        self._spent_s = 0.0  # by measurements, beyond what was expected of them
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
        """First some that are unlike one another, from which the time of the others is estimated."""
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
        """A part of the buffers at random: a setting must not owe its rate to where its few bytes happen to lie."""
        nbytes = ring_bytes(options)
        places = (self._buffers.nbytes - nbytes) // _HUGE_PAGE_BYTES
        address = self._buffers.address + random.randint(0, max(0, places)) * _HUGE_PAGE_BYTES
        return Span(address, min(nbytes, self._buffers.nbytes), self._buffers.owner)

    # What is known #

    def _points(self) -> tuple[SweepPoint, ...]:
        return tuple(
            SweepPoint(options, seen, self._final_rates.get(options, ()))
            for options, seen in self._rates.items()
            if seen
        )

    def progress(self) -> SweepProgress:
        """As far as it is now."""
        points = self._points()
        total = self._plan.measurements
        if self._finalists is not None:
            total = self._plan.passes * len(self._plan.settings) + FINAL_PASSES * len(self._finalists)
        done = sum(map(len, self._rates.values())) + sum(map(len, self._final_rates.values()))
        return SweepProgress(done, total, points, self._left_s(points, total - done))

    def _left_s(self, points: Sequence[SweepPoint], left: int) -> float:
        """Expected of the settings that have measurements left; those of the end as the slowest of them."""
        if not points:
            return left * self._plan.seconds
        seconds = {options: expected_s(self._plan, options, _rate_of(options, points)) for options in self._rates}
        each = [(options, self._plan.passes - len(seen)) for options, seen in self._rates.items()]
        over_all = sum(count for _, count in each)
        beyond_s = self._spent_s / self._measured if self._measured else 0.0
        finals_s = (left - over_all) * statistics.median(seconds.values())
        return sum(seconds[options] * count for options, count in each) + finals_s + beyond_s * left


def expected_s(plan: SweepPlan, options: IoOptions, bytes_per_s: float) -> float:
    """What a measurement takes at a rate: its time or what it may write, and then what is still in flight. Pure."""
    in_flight_s = _BEHIND * options.block_size_bytes * options.queue_depth / bytes_per_s
    if plan.most_passes is None:
        return plan.seconds + in_flight_s
    return min(plan.seconds + in_flight_s, plan.pass_bytes / bytes_per_s)


def _rate_of(options: IoOptions, points: Sequence[SweepPoint]) -> float:
    """Of a setting, measured or estimated from those with more and with less in flight."""
    known = next((point for point in points if point.options == options), None)
    if known is not None:
        return known.bytes_per_s
    seen = sorted((math.log2(point.in_flight_bytes), math.log2(point.bytes_per_s)) for point in points)
    in_flight = math.log2(options.block_size_bytes * options.queue_depth)
    return float(2 ** np.interp(in_flight, [at for at, _ in seen], [rate for _, rate in seen]))


# Choosing #


def _finalists(points: Sequence[SweepPoint], default: IoOptions | None) -> tuple[IoOptions, ...]:
    """The default and the settings that look better; none if nothing does, or there is no default to compare with."""
    kept = next((point for point in points if point.options == default), None)
    if kept is None:
        return ()
    better = [point for point in points if point.bytes_per_s > kept.bytes_per_s]
    best = sorted(better, key=lambda point: -point.bytes_per_s)[:CHALLENGERS]
    return (kept.options, *(point.options for point in best)) if best else ()


def best_point(points: Sequence[SweepPoint], default: IoOptions | None = None) -> SweepPoint:
    """The setting to use: the default, unless another was faster by more than the spread when both were in turn.

    Without a default among the points it is the cheapest that is practically as fast as the fastest.
    """
    kept = next((point for point in points if point.options == default), None)
    if kept is None:
        return _cheapest(points)
    winners = [point for point in points if point is not kept and _beats(point, kept)]
    return _cheapest(winners) if winners else kept


def _beats(point: SweepPoint, kept: SweepPoint) -> bool:
    """Faster by 15%, and by more than measurements of either differ among themselves."""
    if not point.final_rates or not kept.final_rates:
        return False
    one, other = statistics.median(point.final_rates), statistics.median(kept.final_rates)
    spread = max(max(rates) - min(rates) for rates in (point.final_rates, kept.final_rates))
    return one >= _WORTHWHILE * other and one - other > spread


def _cheapest(points: Sequence[SweepPoint]) -> SweepPoint:
    """Of those that are practically as fast as the fastest, that with fewer bytes in flight, then smaller blocks."""
    fastest = max(point.bytes_per_s for point in points)
    good = [point for point in points if point.bytes_per_s >= _GOOD_ENOUGH * fastest]
    return min(good, key=lambda point: (point.in_flight_bytes, point.options.block_size_bytes))


def best_for_all(sweeps: Sequence[Sequence[SweepPoint]], default: IoOptions | None = None) -> SweepPoint:
    """The setting that is practically the best compromise of several sweeps.

    Each counts by what share of its own fastest rate a setting reaches; those that some sweep has not are left out.
    With a default, it and what the sweeps choose are compared, and it is kept unless another is better by 15%.

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
