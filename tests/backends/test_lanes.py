"""Lanes: exact against products of plain integers, whatever the vector; the stated errors of weights and products."""

from __future__ import annotations

import pickle
import random
import sys
import unittest
from array import array
from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import product
from math import frexp, fsum, hypot, inf, isnan, nan, sqrt

from starter.backends.lanes.lanes import (
    BLOCK_ROWS,
    UNITS,
    LaneMatrix,
    lane,
    largest_exponent,
    ones,
    pack,
    to_integers,
    unpack,
)
from starter.base.model_config import QuantizationConfig
from starter.quantization import quantize

ROUNDING = 1 + 2.0**-40  # of doubles, generously
Rows = Sequence[Sequence[int]]


def float32(number: float) -> float:
    return array("f", [number])[0]


def extremes(count: int, bits: int, dice: random.Random) -> list[list[int]]:
    """``count`` numbers of which none, some or all are as far from 0 as a lane can hold."""
    most = 2 ** (bits - 1) - 1
    return [[0] * count, [most] * count, [-most] * count, [(-1) ** i * most for i in range(count)],
            [-1] * (count - 1) + [most], [most] + [-most] * (count - 1),
            [dice.choice((-most, -1, 0, 1, most)) for _ in range(count)],
            [dice.randint(-most, most) for _ in range(count)]]


class PackTest(unittest.TestCase):
    def test_the_sum_of_shifted_numbers_and_back(self) -> None:
        dice = random.Random(1)
        for bits, count in product(UNITS, range(1, 71)):
            for numbers in extremes(count, bits, dice):
                with self.subTest(bits=bits, count=count, numbers=numbers[:3]):
                    total = pack(numbers, bits)
                    self.assertEqual(total, sum(number * 2 ** (bits * i) for i, number in enumerate(numbers)))
                    self.assertEqual([n * UNITS[bits] for n in unpack(total, count, bits)], numbers)
                    self.assertEqual([lane(total, i, bits) for i in range(count)], numbers)

    def test_ones(self) -> None:
        for bits, count in product(UNITS, range(1, 71)):
            self.assertEqual(ones(count, bits), sum(2 ** (bits * i) for i in range(count)))

    def test_lanes_of_a_sum_of_products(self) -> None:
        """Lanes that have been negative and positive on the way, and end at an extreme."""
        for bits in UNITS:
            most = 2 ** (bits - 1) - 1
            columns = [pack(column, bits) for column in ([most, -most, 0], [-most, most, 1], [most, -most, -1])]
            total = 3 * columns[0] + 5 * columns[1] + 3 * columns[2]
            self.assertEqual([n * UNITS[bits] for n in unpack(total, 3, bits)], [most, -most, 2])


class ToIntegersTest(unittest.TestCase):
    def test_it_is_round(self) -> None:
        """Halves go to the even neighbour, as with round()."""
        dice = random.Random(2)
        most = 2**31 - 1
        numbers = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999999999999994, 5e-324, -5e-324, most, -most,
                   most - 0.5, 0.5 - most, most + 0.49, *(dice.uniform(-most, most) for _ in range(200))]
        self.assertEqual(to_integers(numbers, 1.0), list(map(round, numbers)))
        for factor in (2.0**-9, 2.0**-40, 0.3, -1.0):
            self.assertEqual(to_integers(numbers, factor), [round(number * factor) for number in numbers])

    def test_the_largest_exponent(self) -> None:
        dice = random.Random(3)
        for _ in range(1000):
            length, reach = 10 ** dice.uniform(-300, 300), 10 ** dice.uniform(0, 9)
            length, reach = dice.choice(((length, reach), (reach * 2.0 ** dice.randint(-99, 99), reach)))
            e = largest_exponent(length, reach)
            below, above = (Fraction(length) * Fraction(2) ** power for power in (e, e + 1))
            self.assertLess(below, reach, (length, reach))
            self.assertTrue(above >= Fraction(reach) * Fraction(ROUNDING) ** -1 or e == 1022, (length, reach))
        for length in (5e-324, 1e-310, 0.0):
            self.assertEqual(2.0 ** largest_exponent(length, 1e9) * 0.0, 0.0)  # it can be used at all


def exact(rows: Rows, scales: Sequence[float], x: Sequence[float], bits: int) -> list[float]:
    """What the docstring promises, in exact arithmetic: x in integers of length (2**(bits - 1) - 1) / max|row|, with
    room for their rounding, as large as a power of two makes them."""
    with localcontext() as context:
        context.prec = 60
        longest = Decimal(max(max(sum(w * w for w in row) for row in rows), 1)).sqrt()
        reach = (2 ** (bits - 1) - 1) / longest - Decimal(len(x)).sqrt() / 2
        square = sum(Fraction(v) ** 2 for v in x)
        exponent = frexp(float(reach))[1] - frexp(hypot(*x))[1] - 2  # too small, but not by much
        while square * Fraction(4) ** (exponent + 1) < Fraction(reach) ** 2:
            exponent += 1
    unit = Fraction(2) ** exponent
    integers = [round(Fraction(v) * unit) for v in x]
    sums = [sum(w * n for w, n in zip(row, integers)) for row in rows]
    assert max(map(abs, sums)) < 2 ** (bits - 1)
    return [float(Fraction(scale) * total / unit) for scale, total in zip(scales, sums)]


def vectors(rows: Rows, columns: int, dice: random.Random) -> dict[str, list[float]]:
    longest = max(rows, key=lambda row: hypot(*row))
    return {
        "parallel to the longest row": [0.7 * w for w in longest], "and against it": [-1e-9 * w for w in longest],
        "of its signs": [float((w > 0) - (w < 0)) for w in longest],
        "alternating": [(-1.0) ** c for c in range(columns)],
        "one huge": [1e-3] * (columns - 1) + [1e30], "one tiny": [1.0] * (columns - 1) + [1e-200],
        "all halves of a unit": [dice.choice((1.5, 2.5, 0.5)) for _ in range(columns)],
        "huge": [dice.gauss(0, 1e290) for _ in range(columns)], "tiny": [dice.gauss(0, 1e-280) for _ in range(columns)],
        "usual": [dice.gauss(0, 1) for _ in range(columns)]}


class ExactTest(unittest.TestCase):
    """``times`` equals the exact integer product, bit for bit: no lane has overflowed or lent to its neighbour."""

    def check(self, rows: Rows, bits: int, seed: int) -> None:
        dice = random.Random(seed)
        scales = [2.0 ** dice.randint(-9, 9) * dice.uniform(0.5, 1) for _ in rows]
        matrix = LaneMatrix(rows, scales, bits)
        self.assertEqual(matrix.shape, (len(rows), len(rows[0])))
        for name, x in vectors(rows, len(rows[0]), dice).items():
            with self.subTest(rows=len(rows), columns=len(rows[0]), bits=bits, seed=seed, vector=name):
                self.assertEqual(matrix.times(x), exact(rows, scales, x, bits) if any(x) else [0.0] * len(rows))

    def test_codes_of_every_size(self) -> None:
        for (bits, most), seed in product(((32, 8191), (24, 127), (16, 7)), range(6)):
            dice = random.Random(seed)
            count, columns = dice.randint(1, 40), dice.randint(1, 40)
            self.check([[dice.randint(-most, most) for _ in range(columns)] for _ in range(count)], bits, seed)

    def test_codes_as_large_as_they_get(self) -> None:
        for bits, most in ((32, 8191), (24, 127), (16, 7)):
            for columns in (1, 2, 30, 64):
                rows = [[most] * columns, [-most] * columns, [(-1) ** c * most for c in range(columns)],
                        [most] + [0] * (columns - 1), [0] * columns, [-1] * columns]
                self.check(rows, bits, columns)

    def test_lanes_as_full_as_they_get(self) -> None:
        """x runs along the longest row and is just short of the reach: a factor two more and it would overflow."""
        for bits, seed in product(UNITS, range(40)):
            dice = random.Random(seed)
            rows = [[dice.randint(-7, 7) or 7 for _ in range(dice.randint(2, 3) + 2)]]
            matrix = LaneMatrix(rows, [1.0], bits)
            reach = (2 ** (bits - 1) - 1) / hypot(*rows[0]) - sqrt(len(rows[0])) / 2
            x = [w / hypot(*rows[0]) * reach * (1 - 1e-9) for w in rows[0]]
            with self.subTest(bits=bits, seed=seed):
                self.assertEqual(matrix.times(x), [sum(w * round(v) for w, v in zip(rows[0], x))])
                self.assertGreater(matrix.times(x)[0], (2 ** (bits - 1) - 1) * 0.96)

    def test_room_for_rounding(self) -> None:
        """Every number of x is rounded up by a half, which takes W x from just below a lane's end to beyond it, unless
        there is room: 16 bits, 98 codes of 7: 47.5 * 7 * 98 = 32,585 and 48 * 7 * 98 = 32,928."""
        for bits, code in ((32, 8191), (24, 127), (16, 7)):
            fit = {columns: (2 ** (bits - 1) - 1) / (code * columns) for columns in range(20, 400)}
            columns = next(c for c, number in fit.items() if int(number) % 2 and number % 1 > 0.5)
            for sign in (1, -1):
                x = [sign * (int(fit[columns]) + 0.5)] * columns
                got = LaneMatrix([[code] * columns, [0] * columns], [1.0, 1.0], bits).times(x)
                with self.subTest(bits=bits, columns=columns, sign=sign):
                    self.assertEqual(got, exact([[code] * columns, [0] * columns], [1.0, 1.0], x, bits))
                    self.assertGreater(got[0] * sign, 0)

    def test_more_rows_than_a_block_and_a_single_column(self) -> None:
        for count, columns in ((BLOCK_ROWS + 1, 3), (BLOCK_ROWS, 1), (2 * BLOCK_ROWS + 5, 1), (1, 1)):
            dice = random.Random(count)
            rows = [[dice.randint(-9, 9) for _ in range(columns)] for _ in range(count)]
            rows[-1] = [-127] * columns  # the longest is alone in the last block
            for bits in (32, 24):
                x = [dice.uniform(0.5, 1) for _ in range(columns)]
                matrix = LaneMatrix(rows, [0.5] * count, bits)
                self.assertEqual(matrix.times(x), exact(rows, [0.5] * count, x, bits))
                for r in (0, 1, BLOCK_ROWS - 1, BLOCK_ROWS, count - 1):
                    if r < count:
                        self.assertEqual(matrix.row(r), tuple(0.5 * w for w in rows[r]))

    def test_rows_of_any_iterable(self) -> None:
        self.assertEqual(LaneMatrix(iter([[1, -2], [3, 4]]), [1.0, 2.0], 32).times([1.0, 1.0]), [-1.0, 14.0])


class SpecialNumbersTest(unittest.TestCase):
    def setUp(self) -> None:
        self.matrix = LaneMatrix.of_floats([[1.0, -2.0], [0.5, 3.0], [0.0, 0.0]])

    def test_what_is_no_number_makes_every_row_nan(self) -> None:
        for wrong, place in product((nan, inf, -inf), range(2)):
            x = [1.0, 1.0]
            x[place] = wrong
            self.assertTrue(all(map(isnan, self.matrix.times(x))), x)

    def test_zeros(self) -> None:
        self.assertEqual(self.matrix.times([0.0, -0.0]), [0.0] * 3)
        self.assertEqual(LaneMatrix.of_floats([[0.0, 0.0]] * 2).times([1e300, -1.0]), [0.0, 0.0])
        self.assertEqual(LaneMatrix.of_floats([[0.0, 0.0]] * 2).row(1), (0.0, 0.0))

    def test_vectors_of_every_size(self) -> None:
        for power in range(-323, 308):
            x = [10.0**power, 0.0]
            for got, wanted in zip(self.matrix.times(x), (10.0**power, 0.5 * 10.0**power, 0.0)):
                self.assertLessEqual(abs(got - wanted), 2e-4 * wanted + 1e-299, power)


ROWS: dict[str, list[list[float]]] = {
    "normal": [[random.Random(r).gauss(0, 1) + c for c in range(20)] for r in range(5)],
    "one outlier": [[1e-3] * 9 + [1e3], [1e-3] * 10], "unequal": [[1e-30] * 4, [1e30, 0.0, 1.0, 2e29], [0.0] * 4],
    "tiny": [[2.0**-149, -(2.0**-149), 0.0]], "subnormal": [[2.0**-149 * n for n in (-5, 3, 700)]],
    "huge": [[3.4e38, -3.4e38, 1e38]], "constant": [[-0.3] * 7], "a single number": [[0.1], [-0.1], [0.0]]}


class FloatsTest(unittest.TestCase):
    """Float weights on 14 bits."""

    def test_the_stated_error(self) -> None:
        for name, numbers in ROWS.items():
            rows = [[float32(number) for number in row] for row in numbers]
            matrix = LaneMatrix.of_floats(iter(rows))
            for r, row in enumerate(rows):
                with self.subTest(name, row=r):
                    most = max(map(abs, row))
                    bound = Fraction(most) / (2**14 - 2) * Fraction(ROUNDING)
                    for w, got in zip(row, matrix.row(r), strict=True):
                        self.assertLessEqual(abs(Fraction(w) - Fraction(got)), bound)
                        self.assertLessEqual(abs(got), most * ROUNDING)
                    self.assertEqual(matrix.row(r), matrix.row(r))
                    largest = row.index(max(row, key=abs))
                    self.assertAlmostEqual(matrix.row(r)[largest], row[largest], delta=1e-12 * most)

    def test_products_within_the_derived_bound(self) -> None:
        """|W x - W' x'| <= |W - W'| |x| + |W'| |x - x'|: half a step for each weight, half a unit for each number."""
        for seed in range(30):
            dice = random.Random(seed)
            count, columns = dice.randint(1, 30), dice.randint(1, 50)
            rows = [[dice.gauss(0, 10.0 ** dice.randint(-2, 2)) for _ in range(columns)] for _ in range(count)]
            matrix = LaneMatrix.of_floats(rows)
            x = [dice.gauss(0, 1) ** 3 * 10 ** dice.uniform(-9, 9) for _ in range(columns)]
            codes = [[round(w / scale) for w in matrix.row(r)] for r, scale in enumerate(matrix.scales)]
            reach = (2**31 - 1) / max(hypot(*row) for row in codes) - sqrt(columns) / 2
            unit = 2 * hypot(*x) / reach  # of x's integers, at most: its length is at least half the reach
            for r, (row, got) in enumerate(zip(rows, matrix.times(x), strict=True)):
                wanted = fsum(w * v for w, v in zip(row, x))
                bound = max(map(abs, row)) / (2**14 - 2) * sum(map(abs, x)) + unit / 2 * sum(map(abs, matrix.row(r)))
                with self.subTest(seed=seed, row=r):
                    self.assertLessEqual(abs(got - wanted), bound * ROUNDING)

    def test_a_row_does_not_suffer_from_its_neighbours(self) -> None:
        """Rows of very unequal norms are equally exact, each on its own scale."""
        rows = [[10.0**power * (1 + c % 3) * (-1) ** c for c in range(16)] for power in range(-30, 31, 5)]
        x = [random.Random(5).gauss(0, 1) for _ in range(16)]
        for row, got in zip(rows, LaneMatrix.of_floats(rows).times(x), strict=True):
            wanted = fsum(w * v for w, v in zip(row, x))
            self.assertLessEqual(abs(got - wanted), 3e-4 * hypot(*row) * hypot(*x))


class CodesTest(unittest.TestCase):
    def test_codes_with_a_scale_a_row_come_back_as_they_are(self) -> None:
        for bits, method, seed in product((8, 4), ("nearest", "search"), range(3)):
            dice = random.Random(seed)
            rows = [[dice.gauss(0, 10.0 ** (r - 2)) for _ in range(7 + seed)] for r in range(5)]
            q = quantize(rows, QuantizationConfig(bits, None, True, method))
            matrix = LaneMatrix.of_codes(q)
            with self.subTest(bits=bits, method=method, seed=seed):
                self.assertEqual(matrix.bits, {8: 24, 4: 16}[bits])
                self.assertEqual([list(matrix.row(r)) for r in range(5)], [q.row(r) for r in range(5)])
                for x in vectors([q.row_codes(r) for r in range(5)], 7 + seed, dice).values():
                    self.assertEqual(matrix.times(x), exact([q.row_codes(r) for r in range(5)], q.scales, x,
                                                            matrix.bits))

    def test_other_formats_are_dequantized_to_14_bits(self) -> None:
        for bits, size, symmetric in ((8, 4, True), (4, 3, True), (8, None, False), (4, 5, False)):
            dice = random.Random(bits)
            rows = [[dice.gauss(1, 10.0 ** (r - 2)) for _ in range(11)] for r in range(5)]
            q = quantize(rows, QuantizationConfig(bits, size, symmetric))
            matrix = LaneMatrix.of_codes(q)
            with self.subTest(bits=bits, size=size, symmetric=symmetric):
                self.assertEqual(matrix.bits, 32)
                for r in range(5):
                    bound = max(map(abs, q.row(r))) / (2**14 - 2) * ROUNDING
                    for wanted, got in zip(q.row(r), matrix.row(r), strict=True):
                        self.assertLessEqual(abs(wanted - got), bound)

    def test_rows_too_long_for_narrow_lanes(self) -> None:
        """int4 in lanes of 16 bits leaves the vector 32767 / (|row| sqrt(columns)): too little for 5,000 codes of 7."""
        for columns in (500, 5_000, 10_000):
            codes = [(-1.0) ** c for c in range(columns)]
            matrix = LaneMatrix.of_codes(quantize([codes, [1.0] * columns], QuantizationConfig(4, None)))
            x = [v * (1 + 0.1 * (c % 7)) for c, v in enumerate(codes)]
            self.assertEqual(matrix.bits, 16 if columns == 500 else 32)
            got, wanted = matrix.times(x), [fsum(map(abs, x)), fsum(x)]
            for a, b in zip(got, wanted):
                self.assertAlmostEqual(a, b, delta=0.02 * columns)


class MemoryTest(unittest.TestCase):
    def test_bytes_are_those_of_the_columns(self) -> None:
        """sys.getsizeof less an integer's header of 24 bytes; where the last lane is small, a digit less."""
        for bits, count, columns in ((32, 1, 9), (24, 10, 3), (16, 70, 5), (32, BLOCK_ROWS + 3, 2)):
            most = {32: 8191, 24: 127, 16: 7}[bits]
            matrix = LaneMatrix([[most] * columns] * count, [1.0] * count, bits)
            real = sum(sys.getsizeof(column) - 24 for _, block in matrix._blocks for column in block)
            self.assertTrue(real <= matrix.nbytes <= real + 4 * columns * len(matrix._blocks), (bits, count))

    def test_bytes_a_weight(self) -> None:
        for bits, wanted in ((32, 4.3), (24, 3.2), (16, 2.1)):
            matrix = LaneMatrix([[1]] * BLOCK_ROWS, [1.0] * BLOCK_ROWS, bits)
            self.assertEqual(round(matrix.nbytes / BLOCK_ROWS, 1), wanted)

    def test_it_travels_to_another_process(self) -> None:
        matrix = LaneMatrix.of_floats([[1.0, -2.0], [0.5, 3.0]])
        matrix.row(1)
        copy = pickle.loads(pickle.dumps(matrix))
        self.assertEqual((copy.row(1), copy.times([0.3, 0.7])), (matrix.row(1), matrix.times([0.3, 0.7])))


if __name__ == "__main__":
    unittest.main()
