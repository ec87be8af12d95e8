"""safetensors: exact number formats, exact layout, and one clear error for every malformed file."""

from __future__ import annotations

import json
import random
import struct
import tempfile
import tracemalloc
import unittest
from array import array
from math import inf, nan, prod
from pathlib import Path

from starter.base.weights import Tensor, float32_array
from starter.checkpoints.safetensors import MAX_HEADER_BYTES, read_safetensors, write_safetensors
from starter.errors import SchemaError


def file_of(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    """A file with this header (an object, or raw bytes) and, perhaps, a wrong size before it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(start: object, end: object, shape: object = (1,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def flat(*values: float) -> Tensor:
    return Tensor((len(values),), array("f", values))


def float32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


class FolderTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name) / "model.safetensors"

    def read(self, content: bytes) -> dict[str, Tensor]:
        self.path.write_bytes(content)
        return read_safetensors(self.path)

    def refused(self, content: bytes, *words: str) -> None:
        with self.assertRaises(SchemaError) as caught:
            self.read(content)
        for word in (str(self.path), *words):
            self.assertIn(word, str(caught.exception))

    def written(self, weights: dict[str, Tensor], dtype: str) -> bytes:
        """The data part of the file written."""
        write_safetensors(self.path, weights, dtype)
        raw = self.path.read_bytes()
        return raw[8 + int.from_bytes(raw[:8], "little"):]


class NumbersTest(FolderTest):
    def test_every_f16_is_read_exactly(self) -> None:
        halves = range(65_536)
        got = self.read(file_of({"x": entry(0, 131_072, [65_536], "F16")}, struct.pack("<65536H", *halves)))["x"].values
        for half in halves:
            sign, exponent, fraction = -1.0 if half >> 15 else 1.0, half >> 10 & 31, half & 1023
            if exponent == 31:
                self.assertTrue(got[half] == sign * inf if fraction == 0 else got[half] != got[half], half)
            elif exponent:
                self.assertEqual(got[half], sign * (1024 + fraction) * 2.0 ** (exponent - 25), half)
            else:
                self.assertEqual(got[half], sign * fraction * 2.0**-24, half)

    def test_every_bf16_is_the_upper_half_of_a_float32(self) -> None:
        header = {"x": entry(0, 131_072, [65_536], "BF16")}
        got = self.read(file_of(header, struct.pack("<65536H", *range(65_536))))["x"].values
        wanted = float32_array(struct.pack("<65536I", *range(0, 2**32, 65_536)))
        self.assertEqual(got.tobytes(), wanted.tobytes())

    def test_half_precision_rounds_to_nearest_and_ties_to_even(self) -> None:
        """Of neighbours a < b of the format: their midpoint becomes the even one, its float32 neighbours a and b."""
        for dtype, top in (("F16", 0x7BFF), ("BF16", 0x7F7F)):
            for seed in range(3):
                lows = [0, 1, top - 1, *random.Random(seed).sample(range(top), 300)]
                read = self.read(file_of({"x": entry(0, 2 * top + 2, [top + 1], dtype)},
                                         struct.pack(f"<{top + 1}H", *range(top + 1))))["x"].values
                values, wanted = array("f"), []
                for low in lows:
                    middle = (read[low] + read[low + 1]) / 2  # exact in float32: one bit more than the format's
                    bits = struct.unpack("<I", struct.pack("<f", middle))[0]
                    self.assertEqual(float32(bits), middle)
                    for sign in (1, -1):
                        given = read[low], float32(bits - 1), middle, float32(bits + 1)
                        values.extend(sign * value for value in given)
                        minus = 0x8000 if sign < 0 else 0
                        wanted += [low | minus, low | minus, (low + (low & 1)) | minus, (low + 1) | minus]
                with self.subTest(dtype=dtype, seed=seed):
                    got = self.written({"x": Tensor((len(values),), values)}, dtype)
                    self.assertEqual(list(struct.unpack(f"<{len(wanted)}H", got)), wanted)

    def test_beyond_the_range_of_the_format_is_refused(self) -> None:
        write_safetensors(self.path, {"old": flat(1.0)})
        old = self.path.read_bytes()
        for dtype, largest, limit in (("F16", 65_504.0, 65_520.0), ("BF16", float32(0x7F7F0000), float32(0x7F7F8000))):
            below = float32(struct.unpack("<I", struct.pack("<f", limit))[0] - 1)
            for sign in (1.0, -1.0):
                with self.subTest(dtype=dtype, sign=sign):
                    write_safetensors(self.path, {"x": flat(sign * below)}, dtype)
                    self.assertEqual(read_safetensors(self.path)["x"].tolist(), [sign * largest])
                    self.path.write_bytes(old)
                    with self.assertRaisesRegex(SchemaError, "layer.x holds .* at index 2"):
                        write_safetensors(self.path, {"layer.x": flat(0, 1, sign * limit)}, dtype)
        for dtype in ("F32", "F16", "BF16"):
            for value in (nan, inf, -inf):
                with self.subTest(dtype=dtype, value=value), self.assertRaisesRegex(SchemaError, "x holds .* index 1"):
                    write_safetensors(self.path, {"x": flat(0, value)}, dtype)
        self.assertEqual(self.path.read_bytes(), old)
        self.assertEqual(list(self.path.parent.iterdir()), [self.path])

    def test_f32_keeps_every_bit(self) -> None:
        bits = [0, 1 << 31, 1, 0x7F7FFFFF, 0xFF7FFFFF, 0x00800000, *random.Random(5).sample(range(0x7F800000), 1000)]
        values = float32_array(struct.pack(f"<{len(bits)}I", *bits))
        self.assertEqual(self.written({"x": Tensor((len(bits),), values)}, "F32"), struct.pack(f"<{len(bits)}I", *bits))
        self.assertEqual(read_safetensors(self.path)["x"].values.tobytes(), values.tobytes())


class LayoutTest(FolderTest):
    def test_a_file_by_hand(self) -> None:
        header = {"none": entry(12, 12, [0, 7], "F16"), "a": entry(8, 12, [], "F32"), "__metadata__": {"format": "pt"},
                  "b": entry(0, 8, [2, 2], "BF16")}  # in any order
        got = self.read(file_of(header, bytes.fromhex("803f 0040 40c0 0000 0000c03f")))
        self.assertEqual({name: (tensor.shape, tensor.tolist()) for name, tensor in got.items()}, {
            "b": ((2, 2), [1.0, 2.0, -3.0, 0.0]), "a": ((), [1.5]), "none": ((0, 7), [])})
        self.assertEqual(self.read(file_of(b"{}")), {})
        self.assertEqual(self.read(file_of(b"{}       ")), {})

    def test_a_written_file_byte_for_byte(self) -> None:
        weights = {"w": Tensor((1, 2), array("f", [1.0, -2.0])), "a": flat(0.5)}
        write_safetensors(self.path, weights, metadata={"é": "1"})
        header = ('{"__metadata__":{"é":"1"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                  '"w":{"dtype":"F32","shape":[1,2],"data_offsets":[4,12]}}').encode()
        header += b" " * (-len(header) % 8)
        self.assertEqual(self.path.read_bytes(), file_of(header, struct.pack("<3f", 0.5, 1.0, -2.0)))

    def test_round_trip(self) -> None:
        for seed in range(20):
            draw = random.Random(seed)
            weights = {}
            for i in range(draw.randrange(6)):
                shape = tuple(draw.randrange(5) for _ in range(draw.randrange(4)))
                values = [draw.randrange(-255, 256) * 2.0 ** draw.randrange(-6, 7)  # 8 bits: exact in every format
                          for _ in range(prod(shape))]
                weights[draw.choice("ab~/.\"\\世") + str(i)] = Tensor(shape, array("f", values))
            for dtype in ("F32", "F16", "BF16"):
                with self.subTest(seed=seed, dtype=dtype):
                    write_safetensors(self.path, weights, dtype, {"seed": str(seed)})
                    self.assertEqual(read_safetensors(self.path), weights)
                    self.assertEqual(int.from_bytes(self.path.read_bytes()[:8], "little") % 8, 0)

    def test_what_cannot_be_read_is_not_written(self) -> None:
        for weights, dtype, metadata, word in (
                ({"x": flat(1)}, "F64", None, "F64"), ({"x": flat(1)}, "f32", None, "f32"),
                ({"__metadata__": flat(1)}, "F32", None, "keeps it for notes"),
                ({"\ud800": flat(1)}, "F32", None, "surrogate"),
                ({"x": flat(1)}, "F32", {"k": 1}, "/__metadata__/k"), ({"x" * 1001: flat(1)}, "F32", None, "1000"),
                ({f"{i:0999}": flat(1) for i in range(1100)}, "F32", None, str(MAX_HEADER_BYTES))):
            with self.subTest(word), self.assertRaisesRegex(SchemaError, word):
                write_safetensors(self.path, weights, dtype, metadata)
        self.assertEqual(list(self.path.parent.iterdir()), [])


class MalformedTest(FolderTest):
    GOOD = file_of({"a": entry(0, 8, [2]), "b": entry(8, 12, [2], "F16")}, struct.pack("<2f2e", 1, 2, 3, 4))

    def test_cut_short_at_any_byte(self) -> None:
        self.assertEqual(len(self.read(self.GOOD)), 2)
        for length in range(len(self.GOOD)):
            with self.subTest(length):
                self.refused(self.GOOD[:length])

    def test_anything_behind_the_data(self) -> None:
        self.refused(self.GOOD + b"\0", "bytes of no tensor")

    def test_offsets_and_sizes(self) -> None:  # K104
        four = bytes(4)
        for fault, header, data, words in (
                ("much too small", {"w": entry(0, 4, [1000, 1000])}, four, ("/w/", "4000000")),
                ("too large", {"w": entry(0, 8, [1])}, bytes(8), ("/w/", "8 bytes")),
                ("beyond the end", {"w": entry(0, 4_000_000, [1_000_000])}, four, ("cut short",)),
                ("negative", {"w": entry(-4, 0, [1])}, four, ("/w/data_offsets/0",)),
                ("both negative", {"w": entry(-4, -8, [1])}, four, ("/w/data_offsets/0",)),
                ("float", {"w": entry(0.0, 4, [1])}, four, ("/w/data_offsets/0",)),
                ("bool", {"w": entry(False, 4, [1])}, four, ("/w/data_offsets/0",)),
                ("text", {"w": entry("0", 4, [1])}, four, ("/w/data_offsets/0",)),
                ("null", {"w": entry(0, None, [1])}, four, ("/w/data_offsets/1",)),
                ("one offset", {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, four, ("/w/data_offsets",)),
                ("three", {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, four, ("/w/data_offsets",)),
                ("no list", {"w": {"dtype": "F32", "shape": [1], "data_offsets": 4}}, four, ("/w/data_offsets",)),
                ("backwards", {"w": entry(4, 0, [1])}, four, ("/w/",)),
                ("backwards later", {"v": entry(0, 4), "w": entry(4, 0)}, four, ("/w/",)),
                ("overlap", {"v": entry(0, 8, [2]), "w": entry(4, 12, [2])}, bytes(12), ("/w/", "overlaps")),
                ("same place", {"v": entry(0, 4), "w": entry(0, 4)}, four, ("/w/", "overlaps")),
                ("gap before", {"w": entry(4, 8)}, bytes(8), ("/w/", "gap")),
                ("gap between", {"v": entry(0, 4), "w": entry(8, 12)}, bytes(12), ("/w/", "gap")),
                ("gap behind", {"w": entry(0, 4)}, bytes(8), ("bytes of no tensor",)),
                ("data of nothing", {}, four, ("bytes of no tensor",)),
                ("huge dimension", {"w": entry(0, 4, [2**63])}, four, ("/w/shape/0",)),
                ("huge product", {"w": entry(0, 4, [2**31 - 1] * 8)}, four, ("/w/",)),
                ("product 2**64", {"w": entry(0, 0, [2**16, 2**16, 2**16, 2**16])}, b"", ("/w/",)),
                ("huge offsets", {"w": entry(0, 2**64, [1])}, four, ("/w/data_offsets/1",)),
                ("dimension true", {"w": entry(0, 4, [True])}, four, ("/w/shape/0", "true")),
                ("dimension 1.0", {"w": entry(0, 4, [1.0])}, four, ("/w/shape/0", "1.0")),
                ("dimension -1", {"w": entry(0, 4, [-1])}, four, ("/w/shape/0",)),
                ("two negative", {"w": entry(0, 4, [-1, -1])}, four, ("/w/shape/0",)),
                ("nine dimensions", {"w": entry(0, 4, [1] * 9)}, four, ("/w/shape",)),
                ("no shape list", {"w": entry(0, 4, 1)}, four, ("/w/shape",)),
                ("odd bytes", {"w": entry(0, 3, [1], "F16")}, bytes(3), ("/w/", "3 bytes"))):
            with self.subTest(fault):
                self.refused(file_of(header, data), *words)

    def test_entries(self) -> None:
        four = bytes(4)
        for fault, header, words in (
                ("other number format", {"w": entry(0, 4, [1], "I32")}, ("/w/dtype", "I32", "F16")),
                ("no format", {"w": entry(0, 4, [1], 32)}, ("/w/dtype",)),
                ("unknown key", {"w": {**entry(0, 4), "strides": [1]}}, ("/w/strides", "unknown key")),
                ("missing key", {"w": {"dtype": "F32", "shape": [1]}}, ("/w/data_offsets", "missing")),
                ("a list", {"w": [1]}, ("/w",)), ("null", {"w": None}, ("/w",)),
                ("notes are a list", {"__metadata__": []}, ("/__metadata__",)),
                ("notes are null", {"__metadata__": None}, ("/__metadata__",)),
                ("a note is a number", {"__metadata__": {"k": 1}}, ("/__metadata__/k",)),
                ("surrogate", b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', ("surrogate",))):
            with self.subTest(fault):
                self.refused(file_of(header, four), *words)

    def test_duplicate_names(self) -> None:  # K102
        one = '"layer.w": {"dtype": "F32", "shape": [1], "data_offsets": [%d, %d]}'
        for second in ((0, 4), (4, 8)):
            self.refused(file_of(f"{{{one % (0, 4)}, {one % second}}}".encode(), bytes(8)), "layer.w", "twice")
        self.refused(file_of(b'{"w": {"dtype": "F32", "dtype": "F32", "shape": [], "data_offsets": [0, 4]}}', bytes(4)),
                     "/w/dtype", "twice")
        self.refused(file_of(b'{"__metadata__": {"k": "1", "k": "2"}}'), "/__metadata__/k", "twice")

    def test_headers_that_are_none(self) -> None:  # K105
        for header, word in ((b"[]", "begin with"), (b'""', "begin with"), (b"  ", "begin with"),
                             (b" {}", "begin with"), (b"\0\0", "begin with"), (b'"[]"', "begin with"),
                             (b"\xef\xbb\xbf{}", "begin with"),
                             (b"{ ", "not JSON"), (b'"{"', "begin with"), (b"{}x", "not JSON"), (b"{}\0", "not JSON"),
                             (b'{"\xff": 1}', "not UTF-8"), (b'{"w": NaN}', "NaN"), (b'{"w": 1e999}', "1e999"),
                             (b'{"w": ' + b"9" * 5000 + b"}", "5000 digits"),
                             (b'{"w": ' + b"[" * 100_000, "levels"),
                             (b'{"w": ' + b'{"w": ' * 100 + b"1" + b"}" * 101, "levels")):
            with self.subTest(header=header[:20]):
                self.refused(file_of(header), word)

    def test_header_sizes_that_lie_take_no_memory(self) -> None:  # K105
        data = b"{}" + bytes(200)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        for size in (0, 1, 203, 210, len(data) + 8, 2**20, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1):
            with self.subTest(size):
                self.refused(file_of(data, size=size), "header")
        for length in range(9):
            with self.subTest(length=length):
                self.refused(bytes(length), "not a safetensors file", "alone takes 8" if length < 8 else "header of 0")
        self.refused(file_of(b"{" + b" " * MAX_HEADER_BYTES), str(MAX_HEADER_BYTES))  # a true size, but too large
        huge = {f"t{i}": entry(2**40 * i, 2**40 * (i + 1), [2**20, 2**18]) for i in range(8)}
        self.refused(file_of(huge, bytes(4)), "cut short")
        self.assertLess(tracemalloc.get_traced_memory()[1], 10_000_000)

    def test_random_damage_gives_tensors_or_a_schema_error(self) -> None:
        outcomes = set()
        for seed in range(400):
            draw = random.Random(seed)
            content = bytearray(self.GOOD)
            for _ in range(draw.randrange(1, 4)):
                content[draw.randrange(len(content))] = draw.choice([draw.randrange(256), *b'{}[],:"0123456789-.'])
            with self.subTest(seed=seed):
                try:
                    tensors = self.read(bytes(content))
                    self.assertTrue(all(isinstance(tensor, Tensor) for tensor in tensors.values()))
                    outcomes.add("read")
                except SchemaError as error:
                    self.assertIn(str(self.path), str(error))
                    outcomes.add("refused")
        self.assertEqual(outcomes, {"read", "refused"})

    def test_files_that_cannot_be_opened(self) -> None:
        for path in (self.path, self.path.parent):
            with self.subTest(path=path), self.assertRaisesRegex(SchemaError, "cannot"):
                read_safetensors(path)


if __name__ == "__main__":
    unittest.main()
