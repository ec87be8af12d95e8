"""starter/quantization.py: the error bound over every kind of group, the packed bytes, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
import unittest
from array import array
from collections.abc import Callable
from fractions import Fraction

from starter.base.model_config import QuantizationConfig
from starter.errors import QuantizationError
from starter.quantization import QuantizedTensor, dequantize, matvec, quantize

LARGEST = sys.float_info.max
SMALLEST = 5e-324
FORMATS = [(bits, symmetric) for bits in (8, 4) for symmetric in (True, False)]

Draw = Callable[[random.Random], float]
KINDS: dict[str, Draw] = {  # one number of a group
    "gaussian": lambda rng: rng.gauss(0, 1),
    "one-sided": lambda rng: rng.uniform(3, 4),
    "negative": lambda rng: -rng.expovariate(1),
    "zeros": lambda rng: 0.0,
    "ones": lambda rng: 1.0,
    "constant no float32 holds": lambda rng: -0.1,
    "mostly zero": lambda rng: rng.choice([0.0, 0.0, 0.0, rng.gauss(0, 1)]),
    "rectified": lambda rng: max(0.0, rng.gauss(0, 1)),
    "outliers": lambda rng: rng.choice([1e-3, -1e-3, 1e-3, -1e4]) * rng.random(),
    "far, narrow": lambda rng: 1e6 + rng.uniform(0, 1e-3),
    "far, negative": lambda rng: -3e9 - rng.random(),
    "neighbours": lambda rng: rng.choice([0.1, math.nextafter(0.1, 1)]),
    "below float16": lambda rng: rng.gauss(0, 1e-30),
    "below float32": lambda rng: rng.gauss(0, 1e-44),
    "subnormal": lambda rng: rng.randint(-300, 300) * SMALLEST,
    "beyond float32": lambda rng: rng.gauss(0, 1e40),
    "huge": lambda rng: rng.uniform(-1.0, 1.0) * LARGEST,
    "largest": lambda rng: rng.choice([LARGEST, -LARGEST, LARGEST / 2]),
    "huge, one-sided": lambda rng: rng.uniform(0.5, 1.0) * LARGEST,
    "every magnitude": lambda rng: rng.choice([-1, 1]) * 10.0 ** rng.uniform(-320, 308),
    "half steps": lambda rng: rng.randint(-30, 30) / 2,
}


def draw_rows(rng: random.Random, draw: Draw, rows: int, columns: int) -> list[list[float]]:
    return [[draw(rng) for _ in range(columns)] for _ in range(rows)]


def quantized(rows: list[list[float]], bits: int = 8, group_size: int | None = 32,
              symmetric: bool = True) -> QuantizedTensor:
    return quantize(rows, QuantizationConfig(bits, group_size, symmetric))


def cut(row: list[float], group_size: int | None) -> list[list[float]]:
    size = group_size or len(row)
    return [row[i:i + size] for i in range(0, len(row), size)]


def raw(columns: int, bits: int, symmetric: bool, packed: bytes, rows: int = 1) -> QuantizedTensor:
    """A tensor made of bytes, with scale 1 and zero point 0."""
    return QuantizedTensor((rows, columns), bits, None, symmetric, array("f", [1.0] * rows),
                           array("h", [] if symmetric else [0] * rows), packed)


class ErrorBound(unittest.TestCase):
    def test_every_kind_of_group_in_every_format(self) -> None:
        """|x - x'| <= scale / 2 + 2**-50 max|group|, in exact arithmetic; and the grid is as fine as it can be."""
        for seed, (kind, draw) in enumerate(KINDS.items()):
            for bits, symmetric in FORMATS:
                for columns, group_size in ((1, 1), (7, 3), (17, 8), (33, 32), (5, None), (6, 100)):
                    with self.subTest(seed=seed, kind=kind, bits=bits, symmetric=symmetric, columns=columns):
                        rows = draw_rows(random.Random(seed), draw, 2, columns)
                        self.check(rows, bits, group_size, symmetric)

    def test_kinds_mixed_in_one_matrix(self) -> None:
        for seed in range(20):
            rng = random.Random(seed)
            columns, group_size = rng.randint(1, 40), rng.choice([1, 2, 5, 16, None])
            rows = [draw_rows(rng, rng.choice(list(KINDS.values())), 1, columns)[0] for _ in range(4)]
            for bits, symmetric in FORMATS:
                with self.subTest(seed=seed, bits=bits, symmetric=symmetric):
                    self.check(rows, bits, group_size, symmetric)

    def test_half_a_step_at_the_bottom_leaves_the_top_covered(self) -> None:
        """low / scale = 1/2 rounds to the even 0, so the grid begins and ends half a step below the group."""
        for bits, steps in ((8, 255), (4, 15)):
            for width in range(1, 40):
                nearest = array("f", [width / steps])[0]  # as a float32, above or below the exact quotient
                with self.subTest(bits=bits, width=width):
                    self.check([[nearest / 2, nearest / 2 + width]], bits, None, False)

    def check(self, rows: list[list[float]], bits: int, group_size: int | None, symmetric: bool) -> None:
        q = quantized(rows, bits, group_size, symmetric)
        pairs = [pair for row, back in zip(rows, dequantize(q), strict=True)
                 for pair in zip(cut(row, group_size), cut(back, group_size), strict=True)]
        self.assertEqual(len(q.scales), len(pairs))
        for (group, back), scale in zip(pairs, q.scales):
            self.assertEqual(len(group), len(back))
            self.assertTrue(all(map(math.isfinite, back)), back)
            self.assertLessEqual(len(set(back)), 2**bits)
            bound = Fraction(scale) / 2 + max(abs(Fraction(x)) for x in group) / 2**50
            for x, y in zip(group, back):
                self.assertLessEqual(abs(Fraction(x) - Fraction(y)), bound, (x, y, scale))
            if symmetric or max(group) > min(group):
                exact = [Fraction(x) for x in group]
                step = max(map(abs, exact)) / (2 ** (bits - 1) - 1) if symmetric else (
                    (max(exact) - min(exact)) / (2**bits - 1))
                if step:
                    self.assertLessEqual(Fraction(scale), step * (1 + Fraction(1, 2**22)) + 2 * Fraction(SMALLEST))

    def test_constant_and_zero_groups_are_exact(self) -> None:
        for bits, symmetric in FORMATS:
            for value in (0.0, -0.0, 1.0, -2.5, 1e6):
                with self.subTest(bits=bits, symmetric=symmetric, value=value):
                    row = quantized([[value] * 5], bits, 2, symmetric).row(0)
                    for x in row:
                        self.assertTrue(math.isclose(x, value, rel_tol=2**-22, abs_tol=0.0), row)
            # 0.1 is no float32: exact only up to the rounding of the scale
            self.assertAlmostEqual(quantized([[0.1] * 3], bits, 3, symmetric).row(0)[1], 0.1, delta=3e-8)

    def test_a_zero_row_among_others_has_a_finite_scale_and_changes_nobody(self) -> None:
        rng = random.Random(1)
        first, last = draw_rows(rng, KINDS["gaussian"], 2, 9)
        for bits, symmetric in FORMATS:
            with self.subTest(bits=bits, symmetric=symmetric):
                q = quantized([first, [0.0] * 9, last], bits, 4, symmetric)
                alone = quantized([first, last], bits, 4, symmetric)
                self.assertEqual([q.row(0), q.row(1), q.row(2)], [alone.row(0), [0.0] * 9, alone.row(1)])
                product = matvec(q, [1.0] * 9)
                self.assertTrue(all(map(math.isfinite, [*q.scales, *product])))
                self.assertEqual(product[1], 0.0)

    def test_an_outlier_spoils_its_own_group_only(self) -> None:
        for outlier in (1e4, 65_504.0, 1e7, 8.4e6):
            for bits, symmetric in FORMATS:
                with self.subTest(outlier=outlier, bits=bits, symmetric=symmetric):
                    calm = [1e-3 * (-1) ** i * (1 + i % 5) for i in range(24)]
                    loud = [*calm[:8], outlier, *calm[9:]]
                    a, b = quantized([calm, calm], bits, 8, symmetric), quantized([loud, calm], bits, 8, symmetric)
                    self.assertEqual((a.row(0)[:8], a.row(0)[16:], a.row(1)), (b.row(0)[:8], b.row(0)[16:], b.row(1)))
                    self.assertLess(abs(b.row(0)[8] - outlier), 1e-6 * outlier if symmetric else 0.04 * outlier)

    def test_zero_is_a_grid_point_wherever_the_group_holds_it(self) -> None:
        for bits, symmetric in FORMATS:
            with self.subTest(bits=bits, symmetric=symmetric):
                self.assertEqual(quantized([[-0.37, 0.0, 1.91]], bits, None, symmetric).row(0)[1], 0.0)

    def test_symmetric_codes_saturate_at_127_and_7(self) -> None:
        just_above = 1.0 + 1e-7
        rows = [[1.0, -just_above, just_above, -1.0], [-128.0, 128.0, 127.0, -127.5], [-1.0, 1.0, 0.5, -0.5]]
        for bits, highest in ((8, 127), (4, 7)):
            q = quantized(rows, bits, None)
            for r, row in enumerate(rows):
                codes = q.row_codes(r)
                self.assertEqual((min(codes), max(codes)), (-highest, highest))
                self.assertTrue(all((code > 0) == (x > 0) for code, x in zip(codes, row)), (row, codes))


class PackedBytes(unittest.TestCase):
    def test_bytes_written_by_hand(self) -> None:
        for bits, symmetric, rows, packed, scales, zero_points in (
            (8, True, [[127, -127, 1, -1, 0]], "7f 81 01 ff 00", [1], []),
            (8, False, [[-1, 254, 0, 100]], "00 ff 01 65", [1], [1]),
            (8, False, [[0, 510], [300, 555]], "00 ff 00 ff", [2, 1], [0, -300]),
            (4, True, [[7, -7, 1, -1, 3]], "97 f1 03", [1], []),
            (4, True, [[7, 0, -7], [1, 2, 7]], "07 09 21 07", [1, 1], []),
            (4, False, [[0, 15, 1, 14, 7]], "f0 e1 07", [1], [0]),
            (4, False, [list(range(16))], "10 32 54 76 98 ba dc fe", [1], [0]),
            (4, False, [[*range(16), 15]], "10 32 54 76 98 ba dc fe 0f", [1], [0]),
            (4, False, [[-5, 10, 0]], "f0 05", [1], [5]),
        ):
            with self.subTest(bits=bits, symmetric=symmetric, rows=rows):
                q = quantized([list(map(float, row)) for row in rows], bits, None, symmetric)
                self.assertEqual(q.packed, bytes.fromhex(packed))
                self.assertEqual((q.scales.tolist(), q.zero_points.tolist()), (scales, zero_points))
                self.assertEqual(dequantize(q), rows)

    def test_groups_have_their_own_scales_in_row_order(self) -> None:
        q = quantized([[127.0, 0.0, -254.0], [381.0, 3.0, 508.0]], 8, 2)
        self.assertEqual(q.scales.tolist(), [1, 2, 3, 4])
        self.assertEqual(q.packed, bytes.fromhex("7f 00 81 7f 01 7f"))
        self.assertEqual(list(q.groups(1)), [(3.0, 0, [127, 1]), (4.0, 0, [127])])

    def test_all_nibble_pairs_unpack_to_themselves(self) -> None:
        for last in (512, 511):  # even and odd length
            packed = bytes(range(255)) + bytes([255 if last == 512 else 15])
            expected = [n for byte in range(256) for n in (byte % 16, byte // 16)][:last]
            self.assertEqual(raw(last, 4, False, packed).row_codes(0), expected)
        signed = [(low, high) for low in range(-7, 8) for high in range(-7, 8)]
        packed = bytes(low % 16 + 16 * (high % 16) for low, high in signed)
        self.assertEqual(raw(450, 4, True, packed).row_codes(0), [n for pair in signed for n in pair])

    def test_all_bytes_unpack_to_themselves(self) -> None:
        self.assertEqual(raw(256, 8, False, bytes(range(256))).row_codes(0), list(range(256)))
        signed = list(range(-127, 128))
        self.assertEqual(raw(255, 8, True, bytes(n % 256 for n in signed)).row_codes(0), signed)

    def test_every_zero_point_within_and_without_the_codes_survives(self) -> None:
        for bits, highest in ((4, 15), (8, 255)):
            for zero in (*range(highest + 1), -1, -2, highest + 1, 1_000, -1_000, 32_767, -32_767, 32_768, 10**9):
                row = [float(-zero), float(highest - zero)]
                q = quantized([row], bits, None, False)
                self.assertEqual((q.zero_points.tolist(), q.scales.tolist(), q.row(0)), ([zero], [1.0], row))
                self.assertEqual(QuantizedTensor.from_dict(q.to_dict()), q)

    def test_a_last_shorter_group_is_kept(self) -> None:
        for columns, group_size in ((4304, 32), (4304, 64), (192, 128), (33, 32), (5, 2), (3, 7)):
            with self.subTest(columns=columns, group_size=group_size):
                row = [1.0] * (columns - 1) + [2.0]
                for bits, symmetric in FORMATS:
                    q = quantized([row], bits, group_size, symmetric)
                    self.assertEqual(len(q.scales), math.ceil(columns / group_size))
                    self.assertEqual(len(q.row(0)), columns)
                    self.assertAlmostEqual(q.row(0)[-1], 2.0, delta=0.15)
                    self.assertAlmostEqual(matvec(q, [0.0] * (columns - 1) + [1.0])[0], 2.0, delta=0.15)


class Memory(unittest.TestCase):
    def test_bytes_by_formula(self) -> None:
        for bits, symmetric in FORMATS:
            for rows, columns, group_size in ((3, 7, 2), (2, 64, 32), (5, 1, None), (1, 33, 32)):
                with self.subTest(bits=bits, symmetric=symmetric, columns=columns):
                    groups = rows * math.ceil(columns / (group_size or columns))
                    codes = rows * math.ceil(columns * bits / 8)
                    for size, (scale, zero) in ((1.0, (4, 2)), (1e300, (8, 8))):
                        matrix = [[size * (1 + c % 2) for c in range(columns)] for _ in range(rows)]
                        q = quantized(matrix, bits, group_size, symmetric)
                        self.assertEqual(len(q.packed), codes)
                        self.assertEqual(q.nbytes, 16 + codes + groups * (scale + (0 if symmetric else zero)))

    def test_ratio_to_float32_in_groups_of_32(self) -> None:
        matrix = draw_rows(random.Random(5), KINDS["gaussian"], 16, 288)
        float32 = array("f", matrix[0]).itemsize * 16 * 288
        for bits, limit in ((8, 0.30), (4, 0.18)):
            for symmetric in (True, False):
                self.assertLess(quantized(matrix, bits, 32, symmetric).nbytes / float32, limit)

    def test_nothing_but_the_declared_fields_is_kept(self) -> None:
        q = quantized([[0.5, -1.0]])
        dequantize(q)
        matvec(q, [1.0, 2.0])
        self.assertEqual(set(vars(q)), {"shape", "bits", "group_size", "symmetric", "scales", "zero_points", "packed"})

    def test_one_changed_byte_changes_what_is_computed(self) -> None:
        """By exactly (new code - old code) * scale: the packed bytes are what is used, even after earlier uses."""
        for bits, symmetric in FORMATS:
            with self.subTest(bits=bits, symmetric=symmetric):
                q = quantized([[0.5, -1.0, 2.0], [3.0, 1.0, -4.0]], bits, 2, symmetric)
                x = [1.0, 10.0, 100.0]
                row, product, old = q.row(1), matvec(q, x), q.row_codes(1)[0]
                code = old - 1  # lies in the low bits of the row's first byte in either format
                changed = bytearray(q.packed)
                mask = 2**bits - 1
                changed[q.row_bytes] = changed[q.row_bytes] & ~mask & 255 | code & mask
                damaged = dataclasses.replace(q, packed=bytes(changed))
                scale = q.scales[2]
                self.assertEqual(damaged.row(0), q.row(0))
                self.assertAlmostEqual(damaged.row(1)[0], row[0] - scale)
                self.assertEqual(damaged.row(1)[1:], row[1:])
                self.assertEqual(matvec(damaged, x)[0], product[0])
                self.assertAlmostEqual(matvec(damaged, x)[1], product[1] - scale * x[0])

    def test_a_tensor_cannot_be_reassigned(self) -> None:
        with self.assertRaises(dataclasses.FrozenInstanceError):
            quantized([[1.0]]).packed = b""  # type: ignore[misc]


class Product(unittest.TestCase):
    def test_equals_multiplying_with_the_dequantized_matrix(self) -> None:
        kinds = ("gaussian", "one-sided", "zeros", "ones", "outliers", "far, narrow", "below float16", "half steps")
        for seed in range(24):
            rng = random.Random(seed)
            columns, group_size = rng.randint(1, 70), rng.choice([1, 3, 32, None])
            matrix = draw_rows(rng, KINDS[kinds[seed % len(kinds)]], 3, columns)
            x = [rng.gauss(0, 1) for _ in range(columns)]
            for bits, symmetric in FORMATS:
                with self.subTest(seed=seed, bits=bits, symmetric=symmetric):
                    q = quantized(matrix, bits, group_size, symmetric)
                    for row, y in zip(dequantize(q), matvec(q, x), strict=True):
                        exact = sum(Fraction(w) * Fraction(z) for w, z in zip(row, x))
                        roundings = (columns + 8) * 2.0**-52
                        largest = max(map(abs, row)) + max(q.scales) * 2**bits
                        self.assertLessEqual(abs(float(exact) - y), roundings * largest * sum(map(abs, x)))

    def test_is_near_the_product_of_the_floats(self) -> None:
        """Half a step in each number: off by sum(scale / 2 * |x|) at most, whatever the shape."""
        for seed in range(24):
            rng = random.Random(seed)
            rows, columns, group_size = rng.randint(1, 12), rng.randint(1, 150), rng.choice([1, 5, 32, None])
            matrix = draw_rows(rng, KINDS["gaussian"], rows, columns)
            x = [rng.gauss(0, 1) for _ in range(columns)]
            for bits, symmetric in FORMATS:
                with self.subTest(seed=seed, bits=bits, symmetric=symmetric):
                    q = quantized(matrix, bits, group_size, symmetric)
                    parts = cut(x, group_size)
                    for r, (row, y) in enumerate(zip(matrix, matvec(q, x), strict=True)):
                        scales = q.scales[r * len(parts):(r + 1) * len(parts)]
                        bound = math.fsum(s / 2 * abs(z) for s, part in zip(scales, parts) for z in part)
                        exact = math.fsum(w * z for w, z in zip(row, x))
                        self.assertLessEqual(abs(exact - y), bound * (1 + 1e-9))
                        self.assertGreater(bound, 0.0)

    def test_by_hand(self) -> None:
        q = quantized([[127.0, -1.0, 4.0], [0.0, 0.0, 127.0]], 8, None)
        self.assertEqual(matvec(q, [1.0, 2.0, 0.5]), [127.0, 63.5])

    def test_vector_of_the_wrong_length(self) -> None:
        for length in (0, 2, 4):
            with self.assertRaisesRegex(QuantizationError, f"1 x 3 .* 3 numbers, not {length}"):
                matvec(quantized([[1.0, 2.0, 3.0]]), [1.0] * length)

    def test_row_outside_the_matrix(self) -> None:
        for r in (-1, 1):
            with self.assertRaises(IndexError):
                quantized([[1.0, 2.0]]).row(r)


class Statistics(unittest.TestCase):
    def test_by_hand(self) -> None:
        stats = quantized([[127.0, 0.25, -0.25, 0.5]], 8, None).error([[127.0, 0.25, -0.25, 0.5]])
        self.assertEqual(stats.max_abs, 0.5)  # 0.5 rounds to the even 0
        self.assertAlmostEqual(stats.rmse, math.sqrt((0.25**2 + 0.25**2 + 0.5**2) / 4))
        self.assertAlmostEqual(stats.relative, math.sqrt(0.375 / (127**2 + 0.375)))

    def test_zeros_and_extremes_stay_finite(self) -> None:
        zeros = quantized([[0.0, 0.0]])
        self.assertEqual(dataclasses.astuple(zeros.error([[0.0, 0.0]])), (0.0, 0.0, 0.0))
        self.assertEqual(zeros.error([[1.0, 0.0]]).relative, 1.0)
        for row in ([LARGEST, 1e308, -LARGEST], [SMALLEST, 100 * SMALLEST, 0.0]):
            for bits, symmetric in FORMATS:
                stats = quantized([row], bits, None, symmetric).error([row])
                self.assertTrue(0.0 <= stats.relative <= 1.0, stats)
                self.assertTrue(0.0 <= stats.rmse <= stats.max_abs < math.inf, stats)

    def test_more_bits_and_smaller_groups_err_less(self) -> None:
        rows = draw_rows(random.Random(3), KINDS["gaussian"], 8, 64)
        errors = [quantized(rows, bits, size).error(rows).rmse for bits, size in ((8, 8), (8, None), (4, 8), (4, None))]
        self.assertEqual(errors, sorted(errors))
        self.assertLess(errors[0], 0.01)

    def test_another_shape_is_refused(self) -> None:
        with self.assertRaisesRegex(QuantizationError, "1 x 2 numbers with 2 x 1"):
            quantized([[1.0, 2.0]]).error([[1.0], [2.0]])


class Document(unittest.TestCase):
    def test_json_round_trip_is_the_identity(self) -> None:
        for seed, (kind, draw) in enumerate(KINDS.items()):
            for bits, symmetric in FORMATS:
                with self.subTest(seed=seed, kind=kind, bits=bits, symmetric=symmetric):
                    q = quantized(draw_rows(random.Random(seed), draw, 2, 7), bits, 3, symmetric)
                    text = json.dumps(q.to_dict(), allow_nan=False)
                    back = QuantizedTensor.from_dict(json.loads(text))
                    self.assertEqual(back, q)
                    self.assertEqual(dequantize(back), dequantize(q))
        self.assertIsNone(QuantizedTensor.from_dict(quantized([[1.0]], 8, None).to_dict()).group_size)

    def test_what_contradicts_itself_is_refused(self) -> None:
        symmetric8 = quantized([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]], 8, 2).to_dict()
        symmetric4 = quantized([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]], 4, 2).to_dict()
        asymmetric8 = quantized([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]], 8, 2, False).to_dict()
        for document in (symmetric8, symmetric4, asymmetric8):
            QuantizedTensor.from_dict(document)  # as they are they are fine
        packed8, packed4 = str(symmetric8["packed"]), str(symmetric4["packed"])
        wide = 2.0**-200
        for base, changes, message in (
            (symmetric8, {"bits": 4}, "packed bytes"),
            (symmetric4, {"bits": 8}, "packed bytes"),
            (symmetric8, {"bits": 6}, "bits must be 8 or 4"),
            (symmetric8, {"bits": 8.0}, "/bits"),
            (symmetric8, {"bits": True}, "/bits"),
            (symmetric8, {"group_size": 1}, "have 6 scales, not 4"),
            (symmetric8, {"group_size": None}, "have 2 scales, not 4"),
            (symmetric8, {"group_size": 0}, "/group_size"),
            (symmetric8, {"symmetric": False}, "have 4 zero points, not 0"),
            (asymmetric8, {"symmetric": True}, "have 0 zero points, not 4"),
            (symmetric8, {"symmetric": 1}, "/symmetric"),
            (symmetric8, {"shape": [2, 4]}, "packed bytes"),
            (symmetric8, {"shape": [6]}, "/shape"),
            (symmetric8, {"shape": [0, 3]}, "/shape"),
            (symmetric8, {"packed": packed8[:-2]}, "have 6 packed bytes, not 5"),
            (symmetric8, {"packed": packed8 + "00"}, "have 6 packed bytes, not 7"),
            (symmetric8, {"packed": "zz" * 6}, "hexadecimal"),
            (symmetric8, {"packed": [1, 2]}, "/packed"),
            (symmetric8, {"packed": "80" + packed8[2:]}, "-128"),
            (symmetric4, {"packed": "8" + packed4[1:]}, "-8"),
            (symmetric4, {"packed": packed4[0] + "8" + packed4[2:]}, "-8"),
            (symmetric4, {"packed": packed4[:2] + "1" + packed4[3:]}, "high nibble"),
            (symmetric8, {"scales": [1.0, 1.0, 1.0]}, "have 4 scales, not 3"),
            (symmetric8, {"scales": [1.0, 1.0, 1.0, -1.0]}, "/scales/3"),
            (symmetric8, {"scales": [1.0, 1.0, 0.0, 1.0]}, "scale 2"),
            (symmetric8, {"scales": [1.0, math.nan, 1.0, 1.0]}, "/scales/1"),
            (symmetric8, {"scales": [math.inf, 1.0, 1.0, 1.0]}, "/scales/0"),
            (symmetric8, {"scales": ["1", 1.0, 1.0, 1.0]}, "/scales/0"),
            (symmetric8, {"scales": [wide] * 4}, "float32"),
            (symmetric8, {"scales": [1e39] * 4}, "float32"),
            (symmetric8, {"scale_format": "e"}, "/scale_format"),
            (asymmetric8, {"zero_points": [0, 0, 0]}, "have 4 zero points, not 3"),
            (asymmetric8, {"zero_points": [0, 0, 0, 2**15]}, "not a quantized tensor"),
            (asymmetric8, {"zero_points": [0, 0, 0, 0.5]}, "/zero_points/3"),
            (asymmetric8, {"zero_points": [0, 0, 0, True]}, "/zero_points/3"),
            (symmetric8, {"colour": "red"}, "exactly the keys"),
        ):
            with self.subTest(changes=changes), self.assertRaisesRegex(QuantizationError, message):
                QuantizedTensor.from_dict({**base, **changes})
        for missing in symmetric8:
            with self.subTest(missing=missing), self.assertRaisesRegex(QuantizationError, "exactly the keys"):
                QuantizedTensor.from_dict({key: value for key, value in symmetric8.items() if key != missing})
        nonsenses: tuple[object, ...] = (None, [], "q", 1)
        for nonsense in nonsenses:
            with self.subTest(nonsense=nonsense), self.assertRaises(QuantizationError):
                QuantizedTensor.from_dict(nonsense)  # type: ignore[arg-type]

    def test_parts_of_the_wrong_type_are_refused(self) -> None:
        q = quantized([[1.0, 2.0]])
        for changes in ({"scales": [1.0]}, {"scales": array("d", [1.0])}, {"zero_points": ()}, {"shape": (0, 2)},
                        {"scales": array("f", [math.nan])}, {"scales": array("f", [math.inf])}, {"bits": 2}):
            with self.subTest(changes=changes), self.assertRaises(QuantizationError):
                dataclasses.replace(q, **changes)
        for shape in ((0, 3), (3, 0)):
            with self.subTest(shape=shape), self.assertRaisesRegex(QuantizationError, "at least 1 row and 1 column"):
                QuantizedTensor(shape, 8, 2, True, array("f"), array("h"), b"")


class BadInput(unittest.TestCase):
    def test_unsupported_settings(self) -> None:
        for settings in ({"bits": 2}, {"bits": 3}, {"bits": 16}, {"bits": 0}, {"bits": -8}, {"bits": True},
                         {"bits": "8"}, {"bits": None}, {"group_size": 0}, {"group_size": -1}, {"group_size": 2.5},
                         {"group_size": True}, {"group_size": "32"}, {"symmetric": 1}, {"symmetric": None}):
            with self.subTest(settings=settings), self.assertRaisesRegex(QuantizationError, next(iter(settings))):
                QuantizationConfig(**settings)
        with self.assertRaisesRegex(QuantizationError, "must be a QuantizationConfig"):
            quantize([[1.0]], "int8")  # type: ignore[arg-type]

    def test_what_is_no_matrix_of_finite_numbers(self) -> None:
        huge = 10**5000  # longer than Python is willing to print
        for rows, message in (
            ([], "no row"), ([[]], "row 0 has 0 columns"), ([[], [1.0]], "row 0 has 0 columns"),
            ([[1.0, 2.0], [1.0]], "row 1 has 1 columns"), ([[1.0], [1.0, 2.0]], "row 1 has 2 columns"),
            ([1.0, 2.0], "row 0 must be a sequence"), ([[1.0], None], "row 1 must be a sequence"),
            ([[1.0, math.nan]], "row 0, column 1 .* nan"), ([[1.0], [math.inf]], "row 1, column 0 .* inf"),
            ([[-math.inf]], "row 0, column 0 .* -inf"), ([[huge]], "row 0, column 0 .* bits"),
            ([[1.0, True]], "row 0, column 1 .* boolean"), ([["1"]], "row 0, column 0 .* string"),
            (["12"], "row 0, column 0 .* string"), ([[None]], "row 0, column 0 .* null"),
            ([[1j]], "row 0, column 0 .* complex"), ([[[1.0]]], "row 0, column 0 .* list"),
        ):
            with self.subTest(message=message), self.assertRaisesRegex(QuantizationError, message):
                quantize(rows, QuantizationConfig())  # type: ignore[arg-type]

    def test_integers_arrays_and_tuples_are_rows_too(self) -> None:
        expected = quantized([[1.0, -2.0, 3.0]])
        for row in ([1, -2, 3], (1.0, -2.0, 3.0), array("f", [1.0, -2.0, 3.0]), [Fraction(1), -2, 3.0]):
            self.assertEqual(quantize([row], QuantizationConfig()), expected)  # type: ignore[list-item]

    def test_the_input_is_left_alone(self) -> None:
        rows = [[1.0, -0.3], [0.2, 5.0]]
        quantized(rows, 4, 1, False)
        self.assertEqual(rows, [[1.0, -0.3], [0.2, 5.0]])


if __name__ == "__main__":
    unittest.main()
