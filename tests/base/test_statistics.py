"""Percentiles in bounded memory against a sorted list; units."""

from __future__ import annotations

import random
import unittest
from math import ceil

from starter.base.statistics import Durations, Percentiles, Summary, duration

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
DRAWS = {
    "uniform": lambda dice: dice.random(),
    "exponential": lambda dice: dice.expovariate(3.0),
    "heavy tail": lambda dice: dice.paretovariate(0.5) * 1e-3,
    "five orders of magnitude": lambda dice: 10 ** dice.uniform(-6, -1),
    "two values": lambda dice: dice.choice((0.001, 40.0)),
    "one value": lambda dice: 0.0125,
    "many zeros": lambda dice: dice.choice((0.0, 0.0, 0.0, 2.0)),
}


class PercentilesTest(unittest.TestCase):
    def test_exact_while_there_are_few(self) -> None:
        dice = random.Random(1)
        samples, sketch = [], Percentiles()
        for _ in range(Percentiles.EXACT):
            samples.append(dice.random())
            sketch.add(samples[-1])
        self.assertEqual(sketch.summary(), Summary.of(samples))
        self.assertEqual(Percentiles().summary(), Summary())

    def test_within_one_percent_of_the_sorted_list_when_there_are_many(self) -> None:
        for name, draw in DRAWS.items():
            with self.subTest(name):
                dice, sketch = random.Random(2), Percentiles()
                samples = [draw(dice) for _ in range(3 * Percentiles.EXACT)]
                for sample in samples:
                    sketch.add(sample)
                ordered, summary = sorted(samples), sketch.summary()
                self.assertEqual((summary.count, summary.max), (len(samples), ordered[-1]))
                self.assertAlmostEqual(summary.mean or 0.0, sum(samples) / len(samples), delta=1e-9 * ordered[-1])
                for field, share in SHARES.items():
                    exact = ordered[ceil(len(ordered) * share) - 1]
                    self.assertLessEqual(abs(getattr(summary, field) - exact), 0.0101 * exact, (field, exact))

    def test_memory_is_bounded_whatever_comes(self) -> None:
        dice, sketch = random.Random(3), Percentiles()
        for _ in range(60_000):
            sketch.add(10 ** dice.uniform(-300, 300))
        self.assertEqual(len(sketch._samples), 0)
        self.assertLess(len(sketch._buckets), 2_100)

    def test_a_copy_goes_its_own_way(self) -> None:
        for kept in (3, Percentiles.EXACT + 3):  # samples, and buckets
            durations = Durations((0.5,))
            for _ in range(kept):
                durations.add(0.25)
            copy, before = durations.copy(), (durations.summary(), durations.histogram())
            for _ in range(kept):
                durations.add(8.0)
            self.assertEqual((copy.summary(), copy.histogram()), before)
            copy.add(1.0)
            self.assertEqual((copy.summary().count, durations.summary().count), (kept + 1, 2 * kept))

    def test_durations_bring_both(self) -> None:
        durations = Durations((0.1, 1.0))
        for seconds in (0.05, 0.1, 0.5, 3.0):
            durations.add(seconds)
        durations.count(0.2)  # in the histogram alone
        self.assertEqual((durations.summary().count, durations.histogram().counts), (4, (2, 4, 5)))


class DurationTest(unittest.TestCase):
    def test_three_digits_and_a_unit(self) -> None:
        for seconds, text in ((None, "-"), (0.0, "0 s"), (12.3456, "12.3 s"), (1.0, "1 s"), (0.0123456, "12.3 ms"),
                              (0.000_104_9, "105 µs"), (5e-7, "0.5 µs"), (1234.5, "1,230 s"), (999.6, "1,000 s"),
                              (86_400.0, "86,400 s"), (0.9996, "1 s"), (0.000_999_6, "1 ms"), (0.9994, "999 ms")):
            self.assertEqual(duration(seconds), text)
        self.assertEqual(repr(Summary.of([0.001, 0.002])), "<Summary: 2 samples, mean 1.5 ms, p50 1 ms, p90 2 ms, "
                                                           "p99 2 ms, max 2 ms>")
        durations = Durations((0.1, 1.0))
        self.assertEqual(repr(durations.histogram()), "<Histogram: 0 samples in 3 buckets, mean ->")
        durations.add(0.25)
        durations.add(0.75)
        self.assertEqual(repr(durations.histogram()), "<Histogram: 2 samples in 3 buckets, mean 500 ms>")


if __name__ == "__main__":
    unittest.main()
