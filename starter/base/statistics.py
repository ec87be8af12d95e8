"""M3 · Samples of durations, summed up in two ways: a summary with percentiles, and a histogram with fixed buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, log


def duration(seconds: float | None) -> str:
    """Three digits and a unit: "12.3 ms", "1,230 s"; "-" for None."""
    if not seconds:
        return "-" if seconds is None else "0 s"
    digits = float(f"{seconds:.3g}")  # before the unit is chosen: 0.9996 s are 1 s, not 1e+03 ms
    unit, scale = next(((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e3)) if abs(digits) * scale >= 1.0),
                       ("µs", 1e6))
    return f"{digits:,.0f} s" if abs(digits) >= 1000.0 else f"{digits * scale:.3g} {unit}"


@dataclass(frozen=True)
class Summary:
    """Count, mean, nearest-rank percentiles and largest of a list of samples; None where there is no sample."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

    def __repr__(self) -> str:
        return (f"<Summary: {self.count} samples, mean {duration(self.mean)}, p50 {duration(self.p50)}, "
                f"p90 {duration(self.p90)}, p99 {duration(self.p99)}, max {duration(self.max)}>")

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """O(n log n)."""
        if not samples:
            return cls()
        ordered = sorted(samples)
        p50, p90, p99 = (ordered[max(0, ceil(len(ordered) * share) - 1)] for share in (0.5, 0.9, 0.99))
        return cls(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True)
class Histogram:
    """Samples by size: ``counts[i]`` of them are at most ``bounds[i]``; the last bound is infinite (None)."""

    bounds: tuple[float | None, ...]
    counts: tuple[int, ...]
    sum: float

    def __repr__(self) -> str:
        mean = duration(self.sum / self.count if self.count else None)
        return f"<Histogram: {self.count} samples in {len(self.bounds)} buckets, mean {mean}>"

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.counts[-1]


class Percentiles:
    """Samples from 0 up, for a summary in bounded memory.

    Up to EXACT samples are kept, and the summary is exact. From then on they are counted in buckets, each GROWTH times
    as wide as the one before, so that a percentile is off by at most 1% of itself, whatever the samples (Masson, Rim
    and Lee 2019, "DDSketch"; bounds between 1 ns and 30 years). Count, mean and largest stay exact.
    """

    EXACT = 4096
    GROWTH = 1.01 / 0.99
    _SMALLEST, _LARGEST = 1e-9, 1e9

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._buckets: Counter[int] = Counter()  # by number; used once there are too many samples
        self._count, self._sum, self._max = 0, 0.0, 0.0

    def add(self, sample: float) -> None:
        """O(1)."""
        self._count += 1
        self._sum += sample
        self._max = max(self._max, sample)
        if self._buckets:
            self._buckets[self._bucket(sample)] += 1
            return
        self._samples.append(sample)
        if len(self._samples) > self.EXACT:
            self._buckets.update(map(self._bucket, self._samples))
            self._samples.clear()

    def copy(self) -> Percentiles:
        """One that goes its own way. O(samples or buckets that are kept)."""
        copy = Percentiles()
        copy._samples, copy._buckets = self._samples.copy(), self._buckets.copy()
        copy._count, copy._sum, copy._max = self._count, self._sum, self._max
        return copy

    def _bucket(self, sample: float) -> int:
        """Bucket i holds the samples from GROWTH ** (i - 1) to GROWTH ** i."""
        return ceil(log(min(max(sample, self._SMALLEST), self._LARGEST)) / log(self.GROWTH))

    def summary(self) -> Summary:
        """O(n log n) in the samples or buckets that are kept, at most some thousand."""
        if not self._buckets:
            return Summary.of(self._samples)
        numbers = sorted(self._buckets)
        reached = list(accumulate(self._buckets[number] for number in numbers))

        def percentile(share: float) -> float:
            number = numbers[bisect_left(reached, ceil(self._count * share))]
            middle = 2 * self.GROWTH**number / (self.GROWTH + 1)  # within 1% of everything in the bucket
            return 0.0 if middle <= self._SMALLEST else min(middle, self._max)

        return Summary(self._count, self._sum / self._count, percentile(0.5), percentile(0.9), percentile(0.99),
                       self._max)


class Durations:
    """Collects samples for a summary and for a histogram, both in bounded memory."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: upper bounds of the histogram's buckets in seconds, ascending; one bucket more lies above."""
        self._percentiles = Percentiles()
        self._bounds, self._buckets, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Take a sample into both. O(log buckets)."""
        self._percentiles.add(seconds)
        self.count(seconds)

    def copy(self) -> Durations:
        """One that goes its own way. O(samples or buckets that are kept)."""
        copy = Durations(self._bounds)
        copy._percentiles, copy._buckets, copy._sum = self._percentiles.copy(), self._buckets.copy(), self._sum
        return copy

    def summary(self) -> Summary:
        """Of the samples that were added."""
        return self._percentiles.summary()

    def count(self, seconds: float) -> None:
        """Take a sample into the histogram alone."""
        self._buckets[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def histogram(self) -> Histogram:
        """All samples so far. O(buckets)."""
        return Histogram((*self._bounds, None), tuple(accumulate(self._buckets)), self._sum)
