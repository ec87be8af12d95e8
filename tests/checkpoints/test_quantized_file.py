"""starter/checkpoints/quantized_file.py: every tensor comes back from a file, and no malformed file is believed."""

from __future__ import annotations

import json
import random
import struct
import tempfile
import unittest
from array import array
from pathlib import Path

from starter.base.model_config import QuantizationConfig
from starter.base.weights import Tensor
from starter.checkpoints.quantized_file import read_quantized, write_quantized
from starter.checkpoints.safetensors import RawTensor, read_raw, read_safetensors, write_raw
from starter.errors import SchemaError
from starter.quantization import QuantizedTensor, quantize
from tests.test_quantization import FORMATS, KINDS, draw_rows


def sample(seed: int, bits: int = 4, symmetric: bool = False) -> QuantizedTensor:
    rows = draw_rows(random.Random(seed), KINDS["gaussian"], 2, 7)
    return quantize(rows, QuantizationConfig(bits, 3, symmetric))


class InAFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "q.safetensors"


class RoundTrip(InAFolder):
    def test_every_kind_of_group_in_every_format(self) -> None:
        """Scales in float32 and float64, zero points in int16 and int64, odd lengths, whole rows."""
        for seed, (kind, draw) in enumerate(KINDS.items()):
            with self.subTest(seed=seed, kind=kind):
                rows = draw_rows(random.Random(seed), draw, 2, 7)
                configs = [QuantizationConfig(bits, size, symmetric)
                           for bits, symmetric in FORMATS for size in (1, 3, None)]
                tensors = {str(config): quantize(rows, config) for config in configs}
                write_quantized(self.path, tensors)
                self.assertEqual(read_quantized(self.path), tensors)

    def test_nothing_and_notes(self) -> None:
        write_quantized(self.path, {}, {"license": "none", "format": "pt"})
        self.assertEqual(read_quantized(self.path), {})
        self.assertEqual(read_raw(self.path)[0]["license"], "none")

    def test_the_file_by_hand(self) -> None:
        rows = [[-5.0, 10.0, 0.0], [0.0, 30.0, 2.0]]
        write_quantized(self.path, {"w": quantize(rows, QuantizationConfig(4, None, False))})
        raw = self.path.read_bytes()
        [size] = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8:8 + size])
        self.assertEqual(json.loads(header.pop("__metadata__")["quantized"]),
                         {"w": {"shape": [2, 3], "bits": 4, "group_size": None, "symmetric": False}})
        self.assertEqual(header, {"w": {"dtype": "U8", "shape": [2, 2], "data_offsets": [0, 4]},
                                  "w.scales": {"dtype": "F32", "shape": [2, 1], "data_offsets": [4, 12]},
                                  "w.zero_points": {"dtype": "I16", "shape": [2, 1], "data_offsets": [12, 16]}})
        self.assertEqual(raw[8 + size:], bytes.fromhex("f005 f001") + struct.pack("<ffhh", 1.0, 2.0, 5, 0))

    def test_files_of_floats_and_of_codes_are_told_apart(self) -> None:
        write_quantized(self.path, {"w": sample(1)})
        with self.assertRaisesRegex(SchemaError, "/w/dtype.*U8 is no format of weights; F32, F16, BF16"):
            read_safetensors(self.path)
        write_raw(self.path, {"w": RawTensor("F32", (1,), bytes(4))}, {})
        self.assertEqual(read_safetensors(self.path), {"w": Tensor((1,), array("f", [0.0]))})
        with self.assertRaisesRegex(SchemaError, "no note 'quantized'; read_safetensors reads"):
            read_quantized(self.path)


class Refused(InAFolder):
    def test_what_contradicts_itself(self) -> None:
        write_quantized(self.path, {"w": sample(2)})
        metadata, parts = read_raw(self.path)
        form = json.loads(metadata["quantized"])["w"]
        packed, scales, zeros = parts["w"], parts["w.scales"], parts["w.zero_points"]
        for changes, note, message in (
            ({}, {"bits": 8}, "w: .* packed bytes, not 8"),
            ({}, {"bits": 5}, "w: bits must be 8 or 4"),
            ({}, {"group_size": 2}, "w: .* have 8 scales, not 6"),
            ({}, {"shape": [2, 9]}, "w: .* have 10 packed bytes"),
            ({}, {"shape": [1, 14]}, "w: .* scales|packed bytes"),
            ({}, {"shape": [2]}, "note 'quantized': .*"),
            ({}, {"shape": [2, 0]}, "note 'quantized': .*"),
            ({}, {"symmetric": 1}, "note 'quantized': expected true or false"),
            ({}, {"colour": 1}, "note 'quantized': unknown key"),
            ({}, {"symmetric": True}, "symmetric codes go from|w.zero_points belongs to no"),
            ({"w": None}, {}, "w: the tensor w is missing"),
            ({"w.scales": None}, {}, "w: the tensor w.scales is missing"),
            ({"w.zero_points": None}, {}, "w: the tensor w.zero_points is missing"),
            ({"more": packed}, {}, "more belongs to no quantized matrix"),
            ({"w": packed._replace(dtype="I16", shape=(2, 2))}, {}, r"w must be U8 of shape \[2, 4\], not I16"),
            ({"w": packed._replace(shape=(8,))}, {}, r"w must be U8 of shape \[2, 4\], not U8 of shape \[8\]"),
            ({"w": packed._replace(shape=(7,), data=packed.data[:-1])}, {}, "packed bytes, not 7"),
            ({"w.scales": scales._replace(shape=(3, 2))}, {}, r"w.scales must be F32 of shape \[2, 3\]"),
            ({"w.scales": scales._replace(dtype="U8", shape=(24,))}, {}, "w.scales must be one of F32, F64"),
            ({"w.scales": scales._replace(dtype="F64", shape=(3,))}, {}, "must be arrays of types"),
            ({"w.scales": scales._replace(data=bytes(24))}, {}, "scale 0 must be a finite number above 0"),
            ({"w.scales": scales._replace(data=bytes.fromhex("0000c07f") * 6)}, {}, "scale 0 must be .* not nan"),
            ({"w.zero_points": zeros._replace(dtype="BF16")}, {}, "w.zero_points must be one of"),
        ):
            with self.subTest(changes=changes, note=note):
                changed = {name: raw for name, raw in {**parts, **changes}.items() if raw is not None}
                write_raw(self.path, changed, {"quantized": json.dumps({"w": {**form, **note}})})
                with self.assertRaisesRegex(SchemaError, message) as caught:
                    read_quantized(self.path)
                self.assertIn(self.path.name, str(caught.exception))

    def test_notes_that_are_none(self) -> None:
        parts = {"w": RawTensor("U8", (1,), b"\0")}
        for note in ("", "{", "[]", "1", '{"w": null}', '{"w": {}, "w": {}}', '{"w": {"bits": NaN}}'):
            with self.subTest(note=note):
                write_raw(self.path, parts, {"quantized": note})
                with self.assertRaisesRegex(SchemaError, "q.safetensors: the note 'quantized'"):
                    read_quantized(self.path)

    def test_damaged_bytes_are_read_or_refused(self) -> None:
        """Any one byte changed or the file cut anywhere: a SchemaError, or tensors that are whole."""
        write_quantized(self.path, {"v": sample(3, 8, True), "w": sample(4)})
        raw = self.path.read_bytes()
        for seed in range(300):
            dice = random.Random(seed)
            damaged = bytearray(raw)
            damaged[dice.randrange(len(raw))] = dice.randrange(256)
            self.path.write_bytes(damaged[:dice.choice((len(raw), dice.randrange(len(raw))))])
            with self.subTest(seed=seed):
                try:
                    for q in read_quantized(self.path).values():
                        self.assertEqual(QuantizedTensor.from_dict(q.to_dict()), q)
                except SchemaError as error:
                    self.assertIn(self.path.name, str(error))

    def test_two_matrices_that_would_share_a_name(self) -> None:
        with self.assertRaisesRegex(SchemaError, "two tensors would have the name w.scales"):
            write_quantized(self.path, {"w": sample(5), "w.scales": sample(6)})
        self.assertFalse(self.path.exists())


if __name__ == "__main__":
    unittest.main()
