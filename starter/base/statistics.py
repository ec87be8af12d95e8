"""M3 · Samples of durations, summed up in two ways: a summary with percentiles, and a histogram with fixed buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil


@dataclass(frozen=True)
class Summary:
    """Count, mean, nearest-rank percentiles and largest of a list of samples; None where there is no sample."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

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

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.counts[-1]


class Durations:
    """Collects samples. The histogram takes constant space; the list is only for the summary."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: upper bounds of the histogram's buckets in seconds, ascending; one bucket more lies above."""
        self.samples: list[float] = []
        self._bounds, self._buckets, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Take a sample into both. O(log buckets)."""
        self.samples.append(seconds)
        self.count(seconds)

    def count(self, seconds: float) -> None:
        """Take a sample into the histogram alone."""
        self._buckets[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def histogram(self) -> Histogram:
        """All samples so far. O(buckets)."""
        return Histogram((*self._bounds, None), tuple(accumulate(self._buckets)), self._sum)
