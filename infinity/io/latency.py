"""Latencies of blocks: histograms, and percentiles for which there are enough samples."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
_SAMPLES_BEYOND = 10  # with fewer samples above it, a percentile would depend on a single outlier


@dataclass(frozen=True)
class Histogram:
    """Counts by duration.

    Attributes:
        counts: pairs of seconds and number of samples; in any order, each duration once.
    """

    counts: tuple[tuple[float, int], ...]

    @property
    def samples(self) -> int:
        return sum(count for _, count in self.counts)

    def plus(self, other: Histogram) -> Histogram:
        """Return the samples of both."""
        return Histogram(tuple((Counter(dict(self.counts)) + Counter(dict(other.counts))).items()))

    def since(self, earlier: Histogram) -> Histogram:
        """Return the samples that came after `earlier`, a state of the same histogram."""
        return Histogram(tuple((Counter(dict(self.counts)) - Counter(dict(earlier.counts))).items()))

    def percentile_s(self, share: float) -> float:
        """Return the most seconds that a `share` of the samples, 0 to 1, took; 0 without samples."""
        wanted = share * self.samples
        passed = 0
        for taken_s, count in sorted(self.counts):
            passed += count
            if passed >= wanted:
                return taken_s
        return 0.0

    def percentiles_s(self) -> dict[str, float]:
        """Return the percentiles with enough samples above them, by name: p50, p90, p99, p999."""
        samples = self.samples
        return {
            name: self.percentile_s(share)
            for name, share in PERCENTILES.items()
            if round(samples * (1 - share), 6) >= _SAMPLES_BEYOND
        }


@dataclass(frozen=True)
class Latencies:
    """Histograms of reads and of writes."""

    read: Histogram
    write: Histogram

    def plus(self, other: Latencies) -> Latencies:
        """Return the samples of both."""
        return Latencies(self.read.plus(other.read), self.write.plus(other.write))

    def since(self, earlier: Latencies) -> Latencies:
        """Return the samples that came after `earlier`, a state of the same histograms."""
        return Latencies(self.read.since(earlier.read), self.write.since(earlier.write))


NO_LATENCIES = Latencies(Histogram(()), Histogram(()))
