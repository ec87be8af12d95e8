"""Vectors and matrices that callers pass: what is taken, and what each refusal says."""

from __future__ import annotations

import unittest
from fractions import Fraction
from math import inf, nan

from starter.base.vectors import checked_rows, checked_vector, root_mean_square
from starter.errors import QuantizationError, RequestError


class Vectors(unittest.TestCase):
    def test_numbers_of_any_kind_become_floats(self) -> None:
        self.assertEqual(checked_vector("key", (1, True, Fraction(1, 4), inf), 4), [1.0, 1.0, 0.25, inf])
        self.assertEqual(checked_vector("key", range(2), 2), [0.0, 1.0])

    def test_refusals_name_the_vector(self) -> None:
        for vector, width, words in (([1.0], 2, "the key must have 2 numbers, not 1"), ([], 1, "1 numbers, not 0"),
                                     (["a"], 1, "the key must be a sequence of numbers, not"), (None, 1, "not None"),
                                     ([10**400], 1, "must be a sequence of numbers"), (3.0, 1, "not 3.0")):
            with self.subTest(vector=str(vector)[:20]), self.assertRaisesRegex(RequestError, words):
                checked_vector("key", vector, width)  # type: ignore[arg-type]


class Matrices(unittest.TestCase):
    def test_rows_become_lists_of_floats(self) -> None:
        self.assertEqual(checked_rows(((1, 2.5), [Fraction(1, 2), -0.0])), [[1.0, 2.5], [0.5, -0.0]])

    def test_refusals_name_row_and_column(self) -> None:
        for rows, words in ((3, "rows must be a sequence of rows, not the number 3"), ([], "there is no row"),
                            ([[1.0], 2.0], "row 1 must be a sequence of numbers, not the number 2.0"),
                            ([[1.0], [1.0, 2.0]], "row 1 has 2 columns"), ([[]], "row 0 has 0 columns"),
                            ([[1.0, nan]], "row 0, column 1 must be a finite number, not the number nan"),
                            ([[True]], "row 0, column 0 must be a finite number, not a boolean true"),
                            ([[10**400]], "row 0, column 0 .* not the number of 1329 bits"),
                            ([["1"]], "row 0, column 0 .* not a string")):
            with self.subTest(rows=str(rows)[:20]), self.assertRaisesRegex(QuantizationError, words):
                checked_rows(rows)  # type: ignore[arg-type]


class RootMeanSquare(unittest.TestCase):
    def test_by_hand(self) -> None:
        self.assertEqual(root_mean_square([3.0, -4.0, 0.0, 0.0]), 2.5)  # sqrt(25 / 4)
        self.assertEqual(root_mean_square([0.0]), 0.0)
        self.assertEqual(root_mean_square([1e300, -1e300]), 1e300)  # no square overflows, nor vanishes below
        self.assertEqual(root_mean_square([5e-324] * 3), 5e-324)


if __name__ == "__main__":
    unittest.main()
