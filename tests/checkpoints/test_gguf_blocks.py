"""gguf_blocks.py: blocks written by hand, random blocks against the definition and against llama.cpp's gguf."""

from __future__ import annotations

import math
import random
import struct
import unittest
from array import array

from starter.base.model_config import QuantizationConfig
from starter.checkpoints.gguf_blocks import FORMATS, as_quantized_tensor, dequantize_blocks, to_blocks
from starter.errors import QuantizationError
from starter.quantization import QuantizedTensor, dequantize, quantize
from tests.extras import needs

SCALES = [0.0, -0.0, 1.0, -1.0, 0.125, -0.03, 2.0**-24, -(2.0**-24), 2.0**-15, 6.1e-5, 65_504.0, -65_504.0]


def half(x: float) -> bytes:
    return struct.pack("<e", x)


def random_blocks(kind: str, dice: random.Random, count: int) -> bytes:
    """Blocks of any codes, with scales of every kind that is finite."""
    blocks = []
    for _ in range(count):
        fields = [half(dice.choice([*SCALES, dice.gauss(0, 0.1)])) for _ in range(2 if kind == "Q4_1" else 1)]
        blocks.append(b"".join(fields) + dice.randbytes(FORMATS[kind].nbytes - 2 * len(fields)))
    return b"".join(blocks)


def by_definition(kind: str, data: bytes) -> list[float]:
    """The drawing in the module's docstring, a block and a number at a time."""
    numbers = []
    for start in range(0, len(data), FORMATS[kind].nbytes):
        block = data[start:start + FORMATS[kind].nbytes]
        d = struct.unpack("<e", block[:2])[0]
        if kind == "Q8_0":
            numbers += [d * (byte - 256 if byte > 127 else byte) for byte in block[2:]]
        elif kind == "Q4_0":
            numbers += [d * (byte % 16 - 8) for byte in block[2:]] + [d * (byte // 16 - 8) for byte in block[2:]]
        else:
            m = struct.unpack("<e", block[2:4])[0]
            numbers += [d * (byte % 16) + m for byte in block[4:]] + [d * (byte // 16) + m for byte in block[4:]]
    return array("f", numbers).tolist()


class Golden(unittest.TestCase):
    def test_blocks_written_by_hand(self) -> None:
        for kind, data, first, rest in (
            ("Q8_0", "0038 80 7f 01 ff" + "00" * 28, {0: -64.0, 1: 63.5, 2: 0.5, 3: -0.5}, 0.0),
            ("Q8_0", "00bc 80 7f" + "02" * 30, {0: 128.0, 1: -127.0}, -2.0),
            ("Q8_0", "0100 01" + "00" * 31, {0: 2.0**-24}, 0.0),
            ("Q4_0", "0040 0f f0" + "88" * 14, {0: 14.0, 16: -16.0, 1: -16.0, 17: 14.0}, 0.0),
            ("Q4_0", "00c0 9f" + "77" * 15, {0: -14.0, 16: -2.0}, 2.0),
            ("Q4_1", "0034 00bc 4f" + "00" * 15, {0: 2.75, 16: 0.0}, -1.0),
            ("Q4_1", "0080 003c f0" + "00" * 15, {16: 1.0}, 1.0),
        ):
            with self.subTest(kind=kind, data=data):
                expected = [first.get(i, rest) for i in range(32)]
                self.assertEqual(dequantize_blocks(kind, bytes.fromhex(data), 32).tolist(), expected)

    def test_floats_written_by_hand(self) -> None:
        for kind, data, expected in (
            ("F16", "003c 00c0 0100 ff7b 0080", [1.0, -2.0, 2.0**-24, 65_504.0, 0.0]),
            ("BF16", "803f 00c0 0100 7f7f 0080", [1.0, -2.0, 2.0**-133, 255.0 * 2.0**120, 0.0]),
        ):
            values = dequantize_blocks(kind, bytes.fromhex(data), 5).tolist()
            self.assertEqual(values, expected)
            self.assertEqual(math.copysign(1.0, values[4]), -1.0)

    def test_many_numbers_are_unpacked_in_pieces(self) -> None:
        numbers = [float(i % 2_048) for i in range(70_001)]
        data = struct.pack(f"<{len(numbers)}e", *numbers)
        self.assertEqual(dequantize_blocks("F16", data, len(numbers)).tolist(), numbers)


class RandomBlocks(unittest.TestCase):
    def test_against_the_definition(self) -> None:
        for seed in range(10):
            for kind in ("Q8_0", "Q4_0", "Q4_1"):
                with self.subTest(seed=seed, kind=kind):
                    data = random_blocks(kind, random.Random(seed), 17)
                    for given in (data, bytearray(data), memoryview(data)):
                        self.assertEqual(dequantize_blocks(kind, given, 17 * 32).tolist(), by_definition(kind, data))

    def test_a_quantized_tensor_is_exact_and_so_is_the_way_back(self) -> None:
        for seed in range(10):
            for kind in ("Q8_0", "Q4_0"):
                with self.subTest(seed=seed, kind=kind):
                    data = random_blocks(kind, random.Random(seed), 12)
                    values = by_definition(kind, data)
                    q = as_quantized_tensor(kind, data, 4, 96)
                    self.assertEqual([x for row in dequantize(q) for x in row], values)
                    self.assertEqual(QuantizedTensor.from_dict(q.to_dict()), q)
                    self.assertEqual(by_definition(kind, to_blocks(kind, q)), values)

    def test_a_minimum_becomes_a_real_zero_point(self) -> None:
        """Q4_1: the codes as they are (turned around where d is below 0), each number within 2**-23 (|m| + 15 |d|)."""
        for seed in range(10):
            with self.subTest(seed=seed):
                data = random_blocks("Q4_1", random.Random(seed), 12)
                q = as_quantized_tensor("Q4_1", data, 4, 96)
                self.assertEqual(QuantizedTensor.from_dict(q.to_dict()), q)
                self.assertEqual(q.nbytes, 16 + 4 * 48 + 12 * 8)
                found = [x for row in dequantize(q) for x in row]
                for block in range(12):
                    d, m = struct.unpack("<2e", data[20 * block:20 * block + 4])
                    part = slice(32 * block, 32 * block + 32)
                    for a, b in zip(found[part], by_definition("Q4_1", data)[part], strict=True):
                        self.assertLessEqual(abs(a - b), 2.0**-23 * (abs(m) + 15 * abs(d)) * (d != 0.0))

    def test_what_llama_cpp_itself_writes_is_symmetric_int8(self) -> None:
        """Its d is max|x| / 127, never negative, and its codes go from -127 to 127: no zero point is stored."""
        dice = random.Random(3)
        data = b"".join(half(d) + bytes(dice.randint(-127, 127) & 255 for _ in range(32))
                        for d in (0.5, 0.0, 2.0**-24, 3.0))
        q = as_quantized_tensor("Q8_0", data, 2, 64)
        self.assertTrue(q.symmetric)
        self.assertEqual([x for row in dequantize(q) for x in row], by_definition("Q8_0", data))
        self.assertEqual(q.nbytes, 16 + 128 + 4 * 4)
        for change in (half(-0.5) + data[2:], data[:2] + b"\x80" + data[3:]):
            self.assertFalse(as_quantized_tensor("Q8_0", change, 2, 64).symmetric)

    def test_our_own_tensors_go_out_where_their_scales_are_float16(self) -> None:
        for kind, bits in (("Q8_0", 8), ("Q4_0", 4)):
            for symmetric in (True, False):
                highest = 2 ** (bits - 1) - 1
                row = [0.25 * ((i * 7) % (2 * highest + 1) - highest) for i in range(64)]
                row[::32] = [-0.25 * highest] * 2
                row[1::32] = [0.25 * (highest if symmetric else highest + 1)] * 2  # one beyond: turned around
                q = quantize([row, row[::-1]], QuantizationConfig(bits, 32, symmetric))
                self.assertEqual(by_definition(kind, to_blocks(kind, q)), row + row[::-1])


class Refused(unittest.TestCase):
    def test_blocks(self) -> None:
        data = random_blocks("Q8_0", random.Random(1), 2)
        for call, message in (
            (lambda: dequantize_blocks("Q5_K", data, 64), "'Q5_K'.* known are F16, BF16, Q8_0, Q4_0, Q4_1"),
            (lambda: dequantize_blocks("Q8_0", data, 63), "63 numbers are not whole blocks of 32"),
            (lambda: dequantize_blocks("Q8_0", data[:-1], 64), "64 numbers in Q8_0 take 68 bytes, not 67"),
            (lambda: dequantize_blocks("F16", data[:7], 4), "4 numbers in F16 take 8 bytes, not 7"),
            (lambda: as_quantized_tensor("F16", data, 1, 34), "only Q8_0, Q4_0, Q4_1 hold codes, not 'F16'"),
            (lambda: as_quantized_tensor("Q4_1", half(1.0) + half(math.inf) + bytes(16), 1, 32), "zero points must be"),
            (lambda: as_quantized_tensor("Q8_0", data, 4, 16), "16 numbers are not whole blocks"),
            (lambda: as_quantized_tensor("Q8_0", data, 3, 32), "96 numbers in Q8_0 take 102 bytes, not 68"),
            (lambda: as_quantized_tensor("Q8_0", b"", 0, 32), "at least 1 row"),
            (lambda: as_quantized_tensor("Q8_0", half(math.nan) + data[2:], 2, 32), "scale 0 .* not nan"),
            (lambda: as_quantized_tensor("Q8_0", half(-math.inf) + data[2:], 2, 32), "scale 0 .* not inf"),
        ):
            with self.subTest(message=message), self.assertRaisesRegex(QuantizationError, message):
                call()

    def test_tensors(self) -> None:
        exact = [float(i % 8) for i in range(32)]
        for kind, row, config, message in (
            ("Q4_0", exact, QuantizationConfig(4, 16), "groups of 32, not groups of 16"),
            ("Q4_0", exact[:31], QuantizationConfig(4), "in rows of 31"),
            ("Q4_0", exact, QuantizationConfig(8), "holds -8 to 7 times d or -d, not -127 to "),
            ("Q8_0", [x + 300.0 for x in exact], QuantizationConfig(4, symmetric=False), "-128 to 127 times"),
            ("Q4_0", [0.1 * x for x in exact], QuantizationConfig(4), "a float16 scale, which cannot be 0.1"),
            ("Q4_0", [1e6 * x for x in exact], QuantizationConfig(4), "a float16 scale, which cannot be 1000000"),
            ("Q4_1", exact, QuantizationConfig(4), "a way back to Q8_0 and Q4_0, not to 'Q4_1'"),
        ):
            with self.subTest(message=message), self.assertRaisesRegex(QuantizationError, message):
                to_blocks(kind, quantize([row], config))
        whole_row = quantize([exact], QuantizationConfig(4, None))  # one group of 32 by its width
        self.assertEqual(by_definition("Q4_0", to_blocks("Q4_0", whole_row)), exact)


@needs("checkpoints", "gguf", "numpy")
class AgainstGguf(unittest.TestCase):
    def test_random_blocks_dequantize_to_the_same_bits(self) -> None:
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as oracle

        for seed in range(5):
            for kind, form in FORMATS.items():
                with self.subTest(seed=seed, kind=kind):
                    dice = random.Random(seed)
                    count = 32 * 40
                    data = (random_blocks(kind, dice, 40) if form.numbers > 1 else
                            b"".join(half(dice.choice([*SCALES, dice.gauss(0, 1)])) for _ in range(count)))
                    expected = oracle(np.frombuffer(data, np.uint8), GGMLQuantizationType[kind]).astype(np.float32)
                    self.assertEqual(dequantize_blocks(kind, data, count).tobytes(), expected.tobytes())

    def test_what_it_writes_is_read(self) -> None:
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as oracle
        from gguf.quants import quantize as write

        numbers = np.random.default_rng(8).normal(0, 0.02, (6, 64)).astype(np.float32)
        for kind in ("Q8_0", "Q4_0"):
            data = write(numbers, GGMLQuantizationType[kind])
            q = as_quantized_tensor(kind, data.tobytes(), 6, 64)
            self.assertEqual(dequantize(q), oracle(data, GGMLQuantizationType[kind]).tolist())
            again = np.frombuffer(to_blocks(kind, q), np.uint8).reshape(data.shape)
            np.testing.assert_array_equal(oracle(again, GGMLQuantizationType[kind]), dequantize(q))


if __name__ == "__main__":
    unittest.main()
