"""The search for the least squared error: what it promises for every group and every importance."""

from __future__ import annotations

import math
import random
import unittest
from array import array
from fractions import Fraction

from starter.base.model_config import QuantizationConfig
from starter.calibration.grid_search import squared_error
from starter.errors import QuantizationError
from starter.quantization import Grid, QuantizedTensor, quantize
from tests.test_quantization import FORMATS, KINDS, cut, draw_rows

Rows = list[list[float]]


def searched(rows: Rows, bits: int = 4, group_size: int | None = 32, symmetric: bool = True,
             importance: list[float] | None = None) -> QuantizedTensor:
    return quantize(rows, QuantizationConfig(bits, group_size, symmetric, "search"), importance)


def errors(q: QuantizedTensor, rows: Rows, importance: list[float]) -> list[Fraction]:
    """Of every group: sum(importance * (x - x')**2), exact but for the rounding of x' itself."""
    per_element = [[Fraction(w) * (Fraction(x) - Fraction(y)) ** 2 for x, y, w in zip(row, q.row(r), importance)]
                   for r, row in enumerate(rows)]
    return [sum(group) for row in per_element for group in cut(row, q.group_size)]


class Search(unittest.TestCase):
    def test_no_group_has_a_larger_error_than_by_nearest(self) -> None:
        for seed, (kind, draw) in enumerate(KINDS.items()):
            for bits, symmetric in FORMATS:
                for columns, group_size in ((1, 1), (7, 3), (33, 32), (9, None)):
                    rng = random.Random(f"{seed}{columns}")
                    rows = draw_rows(rng, draw, 2, columns)
                    weights = rng.choice([None, [rng.random() for _ in range(columns)],
                                          [rng.choice([0.0, 1e-3, 50.0]) for _ in range(columns)]])
                    with self.subTest(seed=seed, kind=kind, bits=bits, symmetric=symmetric, columns=columns):
                        self.check(rows, bits, group_size, symmetric, weights)

    def check(self, rows: Rows, bits: int, group_size: int | None, symmetric: bool,
              importance: list[float] | None) -> None:
        weights = importance or [1.0] * len(rows[0])
        q = searched(rows, bits, group_size, symmetric, importance)
        nearest = quantize(rows, QuantizationConfig(bits, group_size, symmetric))
        groups = [group for row in rows for group in cut(row, group_size)]
        spans = [span for _ in rows for span in cut(weights, group_size)]
        for group, span, ours, theirs in zip(groups, spans, errors(q, rows, weights), errors(nearest, rows, weights)):
            rounding = Fraction(sum(span)) * Fraction(max(map(abs, group))) ** 2 / 2**100
            self.assertLessEqual(ours, theirs * (1 + Fraction(1, 10**9)) + rounding)
        self.check_elements(q, groups)

    def check_elements(self, q: QuantizedTensor, groups: Rows) -> None:
        """Inside the grid a number moves by half a step at most; outside it becomes the end; 0 stays 0."""
        lowest, steps = (1 - 2 ** (q.bits - 1), 2**q.bits - 2) if q.symmetric else (0, 2**q.bits - 1)
        stored = [group for r in range(q.shape[0]) for group in q.groups(r)]
        for group, (scale, zero, codes) in zip(groups, stored, strict=True):
            step, slack = Fraction(scale), Fraction(max(map(abs, group))) / 2**50
            low, high = step * (lowest - zero), step * (lowest - zero + steps)
            for x, code in zip(group, codes, strict=True):
                inside = min(max(Fraction(x), low), high)
                self.assertLessEqual(abs(inside - step * (code - zero)), step / 2 + slack, (x, scale, zero))
                if x == 0.0:
                    self.assertEqual(code, zero)

    def test_what_it_gains_on_gaussian_weights(self) -> None:
        """int4 in groups of 32: about 6% of the root mean square error, symmetric, and 4%, asymmetric; a row more."""
        rows = draw_rows(random.Random(2), KINDS["gaussian"], 20, 256)
        for group_size, symmetric, most in ((32, True, 0.96), (32, False, 0.98), (None, True, 0.90),
                                            (None, False, 0.95)):
            nearest = quantize(rows, QuantizationConfig(4, group_size, symmetric)).error(rows).rmse
            self.assertLess(searched(rows, 4, group_size, symmetric).error(rows).rmse, most * nearest)

    def test_by_hand(self) -> None:
        """Fourteen numbers at whole steps and one a little above 7: keeping the steps costs 0.2**2, by search less."""
        row = [float(i) for i in range(-7, 7)] + [7.2]
        q = searched([row], 4, None)
        self.assertEqual(q.row_codes(0), list(range(-7, 8)))
        best = sum(x * i for x, i in zip(row, range(-7, 8))) / sum(i * i for i in range(-7, 8))
        self.assertEqual(q.scales[0], array("f", [best])[0])
        self.assertLess(q.error([row]).rmse, quantize([row], QuantizationConfig(4, None)).error([row]).rmse / 2)

    def test_the_important_column_is_the_exact_one(self) -> None:
        rng = random.Random(4)
        rows = draw_rows(rng, KINDS["gaussian"], 8, 32)
        for symmetric in (True, False):
            for column in range(0, 32, 5):
                plain = searched(rows, symmetric=symmetric)
                aware = searched(rows, symmetric=symmetric, importance=[1e6 if c == column else 1.0 for c in range(32)])
                miss = [sum(abs(row[column] - q.row(r)[column]) for r, row in enumerate(rows)) for q in (plain, aware)]
                self.assertLess(miss[1], miss[0] / 2)

    def test_only_the_ratios_of_the_importance_count(self) -> None:
        rng = random.Random(5)
        rows = draw_rows(rng, KINDS["one-sided"], 3, 20)
        weights = [float(rng.randint(0, 9)) for _ in range(20)]
        for symmetric in (True, False):
            expected = searched(rows, 4, 8, symmetric, weights)
            for factor in (2.0**-1000, 2.0**-20, 2.0**1000):
                self.assertEqual(searched(rows, 4, 8, symmetric, [w * factor for w in weights]), expected)
            self.assertEqual(searched(rows, 4, 8, symmetric, [0.25] * 20), searched(rows, 4, 8, symmetric))

    def test_what_is_exact_or_unweighted_stays_as_it_is(self) -> None:
        whole = [[float(i) for i in range(-7, 8)], [0.0] * 15, [3.0] * 15]
        gaussian = draw_rows(random.Random(6), KINDS["gaussian"], 2, 15)
        for rows, importance in ((whole, None), (gaussian, [0.0] * 15)):
            self.assertEqual(searched(rows, importance=importance), quantize(rows, QuantizationConfig(4)))

    def test_zero_stays_zero_even_where_it_does_not_count(self) -> None:
        """The grid 1 .. 16 would be exact for all the columns that count."""
        for sign in (1.0, -1.0):
            row = [sign * i for i in range(17)]
            self.assertEqual(searched([row], 4, None, False, [0.0] + [1.0] * 16).row(0)[0], 0.0)

    def test_zero_points_at_the_end_of_int16_stay_in_it(self) -> None:
        for first in (32_767, 32_766, 32_760, -32_767, -32_760):
            row = [float(first), first + 15.0, first + 0.4, first + 7.3]
            self.assertEqual(searched([row], 4, None, False).zero_points.typecode, "h")

    def test_importance_that_is_none(self) -> None:
        config = QuantizationConfig(4, method="search")
        for importance, message in (([1.0], "2 numbers from 0, .* not 1 numbers"), ([1.0] * 3, "not 3"),
                                    ([1.0, -0.5], "from -0.5"), ([1.0, math.nan], "finite"), ([], "0 columns"),
                                    ([1.0, "1"], "string"), ([math.inf, 1.0], "finite")):
            with self.subTest(importance=importance), self.assertRaisesRegex(QuantizationError, message):
                quantize([[1.0, 2.0]], config, importance)  # type: ignore[arg-type]
        with self.assertRaisesRegex(QuantizationError, "importance is for method 'search'"):
            quantize([[1.0, 2.0]], QuantizationConfig(4), [1.0, 1.0])
        for method in ("", "Search", None, 1, []):
            with self.assertRaisesRegex(QuantizationError, "method must be 'nearest' or 'search'"):
                QuantizationConfig(method=method)  # type: ignore[arg-type]


class GridPoints(unittest.TestCase):
    def test_by_hand(self) -> None:
        grid = Grid(0.5, -2, 2)
        numbers = [-5.0, -1.0, -0.8, 0.0, 0.2, 0.3, 1.2, 9.0]
        self.assertEqual(grid.nearest(numbers), [-2, -2, -2, 0, 0, 1, 2, 2])
        self.assertAlmostEqual(squared_error(grid, numbers, [1.0] * 8), 16 + 0.04 + 0.04 + 0.04 + 0.04 + 64)
        self.assertAlmostEqual(squared_error(grid, [-5.0, 1.2], [0.5, 10.0]), 8 + 0.4)


if __name__ == "__main__":
    unittest.main()
