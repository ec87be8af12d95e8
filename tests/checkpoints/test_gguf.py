"""gguf.py: files written here byte by byte, by llama.cpp's package, and every way to be malformed."""

from __future__ import annotations

import random
import struct
import tempfile
import tracemalloc
import unittest
from pathlib import Path
from unittest import mock

from starter.checkpoints import gguf
from starter.checkpoints.gguf import open_gguf
from starter.checkpoints.gguf_blocks import FORMATS, dequantize_blocks
from starter.errors import QuantizationError, SchemaError
from starter.quantization import dequantize
from tests.extras import needs
from tests.gguf_files import floats, gguf_file, text, value

MATRIX = ("m", (2, 3), "F32", floats(0, 1, 2, 10, 11, 12))
VECTOR = ("v", (5,), "F16", struct.pack("<5e", 1, 2, 3, 4, 5))
BLOCKS = ("q", (2, 32), "Q8_0", b"\x00\x3c" + bytes(range(32)) + b"\x00\xb8" + b"\x80" * 32)
METADATA = {"general.architecture": "llama", "a.b": 7, "c": 0.5, "d": True, "e": ["x", "", "世界"], "f": [1, 2],
            "g": []}
WHOLE = gguf_file(METADATA, [MATRIX, VECTOR, BLOCKS])


class FileCase(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name) / "file.gguf"

    def refused(self, raw: bytes, *words: str) -> None:
        """One sentence that names the file, and no more memory than the file deserves."""
        self.path.write_bytes(raw)
        tracemalloc.start()
        try:
            with self.assertRaises(SchemaError) as caught, open_gguf(self.path):
                pass
            self.assertLess(tracemalloc.get_traced_memory()[1], 10 * len(raw) + 200_000)
        finally:
            tracemalloc.stop()
        for word in (str(self.path), *words):
            self.assertIn(word, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))


class Reading(FileCase):
    def test_metadata_and_tensors(self) -> None:
        for version in (2, 3):
            self.path.write_bytes(gguf_file(METADATA, [MATRIX, VECTOR, BLOCKS], version=version))
            with open_gguf(self.path) as file:
                self.assertEqual(file.metadata, METADATA)
                self.assertEqual(list(file.tensors), ["m", "v", "q"])
                self.assertEqual(file.tensor("m").rows(), [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]])
                self.assertEqual(file.tensor("v").tolist(), [1.0, 2.0, 3.0, 4.0, 5.0])
                wanted = [[float(i) for i in range(32)], [64.0] * 32]
                self.assertEqual(file.tensor("q").rows(), wanted)
                self.assertEqual(dequantize(file.quantized("q")), wanted)
                self.assertRaisesRegex(QuantizationError, "F32", file.quantized, "m")
                self.assertRaisesRegex(QuantizationError, "only a matrix", file.quantized, "v")

    def test_every_type_of_number(self) -> None:
        numbers = {0: ("B", 200), 1: ("b", -7), 2: ("H", 60_000), 3: ("h", -300), 4: ("I", 2**32 - 1),
                   5: ("i", -(2**31)), 6: ("f", 0.25), 10: ("Q", 2**64 - 1), 11: ("q", -(2**63)), 12: ("d", 0.1)}
        raw = {f"k{kind}": struct.pack("<I" + code, kind, number) for kind, (code, number) in numbers.items()}
        self.path.write_bytes(gguf_file(raw))
        with open_gguf(self.path) as file:
            self.assertEqual(file.metadata, {f"k{kind}": number for kind, (_, number) in numbers.items()})

    def test_another_alignment(self) -> None:
        for alignment in (8, 256):
            self.path.write_bytes(gguf_file({"general.alignment": alignment}, [VECTOR, MATRIX], alignment=alignment))
            with open_gguf(self.path) as file:
                self.assertEqual(file.tensor("m").tolist(), [0.0, 1.0, 2.0, 10.0, 11.0, 12.0])

    def test_with_and_without_numpy(self) -> None:
        self.path.write_bytes(WHOLE)
        for found in (None, object()) if gguf.find_spec("numpy") else (None,):
            with mock.patch("starter.checkpoints.gguf.find_spec", return_value=found), open_gguf(self.path) as file:
                self.assertEqual(file.tensor("v").tolist(), [1.0, 2.0, 3.0, 4.0, 5.0])


class Refusing(FileCase):
    def test_cut_anywhere(self) -> None:
        """K109."""
        for size in range(len(WHOLE)):
            self.refused(WHOLE[:size])
        self.refused(WHOLE + bytes(32), "belong to no tensor")

    def test_any_byte_of_the_head_changed(self) -> None:
        """Either another file that is right, or one clear error."""
        head, refused = WHOLE.index(MATRIX[3]), 0
        for seed in range(600):
            dice = random.Random(seed)
            raw = bytearray(WHOLE)
            raw[dice.randrange(head)] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
            self.path.write_bytes(raw)
            with self.subTest(seed=seed):
                try:
                    with open_gguf(self.path) as file:
                        for name in file.tensors:
                            file.tensor(name)
                except SchemaError as error:
                    refused += 1
                    self.assertIn(str(self.path), str(error))
        self.assertGreater(refused, 100)

    def test_what_it_begins_with(self) -> None:
        self.refused(b"", "not a GGUF file")
        self.refused(gguf_file(magic=b"GGML"), "not a GGUF file")
        for version in (0, 1, 4, 2**32 - 1):
            self.refused(gguf_file(version=version), f"version {version}")
        self.refused(gguf_file(version=3 << 24), "big-endian")
        self.refused(gguf_file(magic=b"FUGG"), "big-endian")
        self.refused(b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer")
        self.refused(b"<!DOCTYPE html>", "an HTML page")

    def test_heads_of_more_parts_than_a_model_has(self) -> None:
        many = struct.pack("<IIQ", 9, 7, 3_000_000) + bytes(3_000_000)  # booleans
        self.refused(gguf_file({"many": many}), "the 3000000 items of many", "at most 2000000")
        half = struct.pack("<IIQ", 9, 0, 1_500_000) + bytes(1_500_000)
        with mock.patch.object(gguf, "MAX_ITEMS", 1_000):  # of all lists together
            self.refused(gguf_file({"a": [1] * 600, "b": [1] * 600}), "the 600 items of b", "1200")
        self.refused(gguf_file({"a": half}, counts=(70_000, 1), tail=bytes(2_000_000)),
                     "the file has 70000 tensors; at most 65536")
        self.refused(gguf_file({"a": half}, counts=(0, 70_000)), "the file has 70000 metadata; at most 65536")

    def test_counts_beyond_the_file(self) -> None:
        """K108."""
        for count in (5, 2**31, 2**63, 2**64 - 1):
            self.refused(gguf_file(counts=(count, 0)), f"claims {count} tensors")
            self.refused(gguf_file(counts=(0, count)), f"claims {count} metadata")
            self.refused(gguf_file([(b"k", struct.pack("<IIQ", 9, 4, count))]), f"claims {count} items in k")
            self.refused(gguf_file([(b"k", struct.pack("<IIQ", 9, 8, count))]), f"claims {count} items in k")
        for size in (99, 2**63, 2**64 - 1):
            self.refused(gguf_file({"k": struct.pack("<I", 8) + text("x", size)}), f"claims {size} bytes in k")
            self.refused(gguf_file(counts=(0, 1), tail=text("key", size) + bytes(20)))

    def test_keys_and_values(self) -> None:
        self.refused(gguf_file([("k", 1), ("k", 2)]), "k, occurs twice")
        self.refused(gguf_file([("", 1)]), "has 0 bytes")
        self.refused(gguf_file([("k" * 70_000, 1)]), "has 70000 bytes")
        self.refused(gguf_file([(b"\xff", 1)]), "not UTF-8")
        self.refused(gguf_file({"k": value("")[:4] + text(b"\xc3")}), "k is not UTF-8")
        self.refused(gguf_file({"k": struct.pack("<IB", 7, 2)}), "0 or 1, not 2")
        for kind in (13, 2**32 - 1):
            self.refused(gguf_file({"k": struct.pack("<II", kind, 0)}), f"of type {kind}")
        self.refused(gguf_file({"k": struct.pack("<IIQ", 9, 9, 1) + bytes(20)}), "no list inside a list")

    def test_alignment(self) -> None:
        for alignment in (0, 1, 3, 4, 48, 2**17, 2**31, -8, "32", True, 32.0):
            given = struct.pack("<Ii", 5, alignment) if alignment == -8 else alignment
            self.refused(gguf_file({"general.alignment": given}, [MATRIX]), "general.alignment must be a power of two")

    def test_tensors(self) -> None:
        self.refused(gguf_file((), [MATRIX, MATRIX]), "m, occurs twice")
        self.refused(gguf_file((), [("", (1,), "F32", floats(1))]), "has 0 bytes")
        for shape in ((), (1,) * 5):
            self.refused(gguf_file((), [("t", shape, "F32", floats(1))]), f"{len(shape)} dimensions")
        self.refused(gguf_file((), [("t", (2, 0), "F32", b"")]), "no dimension can be 0")
        self.refused(gguf_file((), [("t", (1,), 12, bytes(144))]), "Q4_K", "Q8_0")
        self.refused(gguf_file((), [("t", (1,), 4_000, bytes(4))]), "4000, which is unknown")
        self.refused(gguf_file((), [("t", (2, 48), "Q4_0", bytes(54))]), "not whole blocks of Q4_0")
        for offset in (0, 1, 33, 64, 2**64 - 32):
            self.refused(gguf_file((), [MATRIX, VECTOR], offsets={"v": offset}), f"start at {offset}, not at 32")

    def test_sizes_that_would_overflow(self) -> None:
        """K107, K108: with 64 bits these would be small."""
        for shape in ((1, 1_073_741_825, 1_073_741_823, 4), (2, 2**63 - 1), (2**62, 4), (2**32, 2**32), (2**64 - 1,)):
            self.refused(gguf_file((), [("t", shape, "F32", floats(1, 2, 3, 4))]), "cut short, or the shape is wrong")

    def test_a_head_that_is_too_long(self) -> None:
        with mock.patch("starter.checkpoints.gguf.MAX_HEAD_BYTES", 100):
            self.refused(WHOLE, "the head takes more than 100 bytes")

    def test_what_cannot_be_opened(self) -> None:
        for path in (self.path, self.path.parent, "\0"):
            with self.assertRaisesRegex(SchemaError, "cannot open"), open_gguf(path):
                pass

    def test_a_tensor_that_is_not_there(self) -> None:
        self.path.write_bytes(WHOLE)
        with self.assertRaisesRegex(SchemaError, "no tensor x"), open_gguf(self.path) as file:
            file.tensor("x")


@needs("checkpoints", "gguf", "numpy")
class Oracle(FileCase):
    def test_what_the_package_gguf_writes(self) -> None:
        import numpy as np
        from gguf import GGMLQuantizationType, GGUFWriter, quantize
        numbers = np.random.default_rng(1).normal(size=(6, 64)).astype(np.float32)
        writer = GGUFWriter(self.path, "llama")
        writer.add_block_count(3)
        writer.add_token_list(["a", "世"])
        wanted = {}
        for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
            raw = quantize(numbers, getattr(GGMLQuantizationType, kind))
            writer.add_tensor(kind, raw, raw_dtype=getattr(GGMLQuantizationType, kind))
            wanted[kind] = raw.tobytes()
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        with open_gguf(self.path) as file:
            self.assertEqual(file.metadata["llama.block_count"], 3)
            self.assertEqual(file.metadata["tokenizer.ggml.tokens"], ["a", "世"])
            for kind, raw in wanted.items():
                self.assertEqual((file.tensors[kind].kind, file.tensors[kind].shape), (kind, (6, 64)))
                plain = numbers.ravel().tolist() if kind == "F32" else dequantize_blocks(kind, raw, 384).tolist()
                self.assertEqual(file.tensor(kind).tolist(), plain)


@needs("numpy", "numpy")
class NumpyBlocks(unittest.TestCase):
    def test_bit_by_bit_the_pure_ones(self) -> None:
        from starter.checkpoints import gguf_blocks_numpy as numpy_blocks
        from tests.checkpoints.test_gguf_blocks import random_blocks
        for seed in range(10):
            for kind, form in FORMATS.items():
                with self.subTest(seed=seed, kind=kind):
                    dice = random.Random(seed)
                    data = (random_blocks(kind, dice, 20) if form.numbers == 32 else
                            b"".join(struct.pack("<e", dice.gauss(0, 1)) for _ in range(20)))
                    count = len(data) // form.nbytes * form.numbers
                    self.assertEqual(numpy_blocks.dequantize_blocks(kind, data, count).tobytes(),
                                     dequantize_blocks(kind, data, count).tobytes())
                    self.assertRaises(QuantizationError, numpy_blocks.dequantize_blocks, kind, data, count + 32)
        self.assertRaises(QuantizationError, numpy_blocks.dequantize_blocks, "Q6_K", b"", 0)


if __name__ == "__main__":
    unittest.main()
