"""llama2.c models: every tensor from its place in the file, and one clear error for every malformed file."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import struct
import tempfile
import tracemalloc
import unittest
from array import array
from math import cos, prod, sin
from pathlib import Path

from starter.base.weights import Tensor, seeded_weights, tensor_shapes
from starter.checkpoints.llama2c import find_llama2c, read_llama2c, write_llama2c
from starter.errors import SchemaError
from starter.schema import ModelConfig

STORIES = Path(__file__).resolve().parents[2].parent / "shared" / "models" / "stories260K"
# The seven numbers of a header: width, ffn_width, layers, heads, kv_heads, vocab_size, max_context
TIED, UNTIED = (8, 6, 2, 4, 2, 5, 3), (8, 6, 2, 4, 2, -5, 3)


def model_file(header: tuple[int, ...] = TIED) -> bytes:
    """A file whose numbers are 0, 1, 2, ...: the value of an element tells its place."""
    width, ffn_width, layers, heads, kv_heads, vocab_size, max_context = header
    kv_width = width // heads * kv_heads
    layer = width + 2 * width * width + 2 * kv_width * width + width + 3 * ffn_width * width
    count = abs(vocab_size) * width + layers * layer + width + max_context * (width // heads)
    count += -vocab_size * width if vocab_size < 0 else 0
    return struct.pack("<7i", *header) + array("f", range(count)).tobytes()


class FolderTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.path = self.folder / "model.bin"

    def read(self, content: bytes) -> tuple[ModelConfig, dict[str, Tensor]]:
        self.path.write_bytes(content)
        return read_llama2c(self.path)

    def refused(self, content: bytes, *words: str) -> None:
        with self.assertRaises(SchemaError) as caught:
            self.read(content)
        for word in (str(self.path), *words):
            self.assertIn(word, str(caught.exception))


class ReadTest(FolderTest):
    def test_configuration(self) -> None:
        config, _ = self.read(model_file(TIED))
        self.assertEqual(config, ModelConfig(
            vocab_size=5, width=8, layers=2, heads=4, kv_heads=2, ffn_width=6, max_context=3, rope_theta=10_000.0,
            norm_eps=1e-5, tied_output=True, bos_token=1, eos_tokens=(1, 2)))
        self.assertEqual(self.read(model_file(UNTIED))[0], dataclasses.replace(config, tied_output=False))

    def test_every_tensor_comes_from_its_place(self) -> None:
        """By hand: embedding 40; of each of 2 layers gains 8, q 64, k 32, v 32, o 64, gains 8, w1 48, w2 48, w3 48."""
        first = {"input_layernorm": 40, "self_attn.q_proj": 56, "self_attn.k_proj": 184, "self_attn.v_proj": 248,
                 "self_attn.o_proj": 312, "post_attention_layernorm": 440, "mlp.gate_proj": 456, "mlp.down_proj": 552,
                 "mlp.up_proj": 648}
        sizes = {"input_layernorm": 8, "self_attn.q_proj": 64, "self_attn.k_proj": 32, "self_attn.v_proj": 32,
                 "self_attn.o_proj": 64, "post_attention_layernorm": 8, "mlp.gate_proj": 48, "mlp.down_proj": 48,
                 "mlp.up_proj": 48}
        wanted = {f"model.layers.{i}.{name}.weight": first[name] + i * sizes[name] for name in first for i in (0, 1)}
        wanted.update({"model.embed_tokens.weight": 0, "model.norm.weight": 744})
        for header, more in ((TIED, {}), (UNTIED, {"lm_head.weight": 752 + 3 * 2})):  # behind 3 positions x 2 angles
            config, weights = self.read(model_file(header))
            self.assertEqual({name: tensor.values[0] for name, tensor in weights.items()}, {**wanted, **more})
            for name, tensor in weights.items():
                start = int(tensor.values[0])
                self.assertEqual(tensor.tolist(), [float(i) for i in range(start, start + len(tensor.values))], name)
            self.assertEqual({name: tensor.shape for name, tensor in weights.items()}, tensor_shapes(config))

    def test_cut_short_at_any_byte(self) -> None:
        for header in ((2, 1, 1, 1, 1, 3, 1), (2, 1, 1, 1, 1, -3, 1)):
            content = model_file(header)
            self.assertEqual(self.read(content)[0].vocab_size, 3)
            for length in range(len(content)):
                self.refused(content[:length], "header" if length < 28 else "cut short")

    def test_anything_behind_the_end(self) -> None:
        for more in (1, 4, 5_000):
            self.refused(model_file() + bytes(more), "goes on behind its end")

    def test_absurd_headers_take_no_memory(self) -> None:
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        for i, field in enumerate(("width", "ffn_width", "layers", "heads", "kv_heads", "vocab_size", "max_context")):
            for value in (0, -1, -(2**31), 2**31 - 1):
                if (field, value) != ("vocab_size", -1):  # that is a vocabulary of 1, see below
                    with self.subTest(field=field, value=value):
                        self.refused(model_file()[:4 * i] + struct.pack("<i", value) + model_file()[4 * i + 4:], field)
        for header, word in (((9, 6, 2, 4, 2, 5, 3), "/width"), ((8, 6, 2, 4, 3, 5, 3), "/kv_heads"),
                             ((8, 6, 2, 4, 8, 5, 3), "/kv_heads"), ((12, 6, 2, 4, 2, 5, 3), "/width"),
                             ((8, 6, 2, 4, 2, 1, 3), "/bos_token"), ((8, 6, 2, 4, 2, -2, 3), "/eos_tokens"),
                             ((65_536, 262_144, 1_024, 1_024, 1_024, 1_000_000, 1_048_576), "cut short"),
                             ((0x616B3432, 1, 64, 172, 5, 8, 4), "version 0")):
            with self.subTest(header):
                self.refused(struct.pack("<7i", *header) + bytes(3_000), word)
        self.assertLess(tracemalloc.get_traced_memory()[1], 10_000_000)

    def test_random_damage_to_the_header_gives_a_model_or_a_schema_error(self) -> None:
        content = model_file()
        for seed in range(300):
            draw = random.Random(seed)
            header = bytearray(content[:28])
            for _ in range(draw.randrange(1, 4)):
                header[draw.randrange(28)] = draw.choice([draw.randrange(256), draw.randrange(9)])
            with self.subTest(seed=seed):
                try:
                    config, weights = self.read(bytes(header) + content[28:])
                except SchemaError as error:
                    self.assertIn(str(self.path), str(error))
                else:
                    self.assertEqual({name: tensor.shape for name, tensor in weights.items()}, tensor_shapes(config))


class WriteTest(FolderTest):
    def test_round_trip(self) -> None:
        for header in (TIED, UNTIED):
            config, _ = self.read(model_file(header))
            weights = seeded_weights(config, 5)
            write_llama2c(self.path, config, weights)
            self.assertEqual(read_llama2c(self.path), (config, weights))
            self.assertEqual(self.path.stat().st_size, len(model_file(header)))

    def test_the_rotary_tables(self) -> None:
        config, _ = self.read(model_file(UNTIED))
        config = dataclasses.replace(config, heads=2, kv_heads=1, layers=1)
        write_llama2c(self.path, config, seeded_weights(config, 5))
        tables = struct.unpack("<12f", self.path.read_bytes()[-4 * (12 + 40):-4 * 40])  # before the output projection
        angles = [0.0, 0.0, 1.0, 0.01, 2.0, 0.02]  # of pairs 0 and 1 of 4 numbers: position / 10000 ** (0 or 1/2)
        for given, wanted in zip(tables, [*map(cos, angles), *map(sin, angles)], strict=True):
            self.assertAlmostEqual(given, wanted, places=6)

    def test_what_the_format_cannot_hold_is_refused(self) -> None:
        config, weights = self.read(model_file())
        for change in ({"rope_theta": 500_000.0}, {"norm_eps": 1e-6}, {"bos_token": None}, {"eos_tokens": (2,)}):
            with self.subTest(change), self.assertRaisesRegex(SchemaError, f"/{next(iter(change))}"):
                write_llama2c(self.folder / "new.bin", dataclasses.replace(config, **change), weights)
        del weights["model.norm.weight"]
        with self.assertRaisesRegex(SchemaError, "missing"):
            write_llama2c(self.folder / "new.bin", config, weights)
        self.assertEqual(list(self.folder.iterdir()), [self.path])


class FindTest(FolderTest):
    def test_folder_or_model_file(self) -> None:
        for name in ("model.bin", "tok512.bin", "README.md", "model.txt"):
            (self.folder / name).write_bytes(b"")
        (self.folder / "old.bin").mkdir()
        pair = (self.path, self.folder / "tok512.bin")
        for path in (self.folder, str(self.folder), self.path, str(self.path)):
            self.assertEqual(find_llama2c(path), pair)
        (self.folder / "other.bin").write_bytes(b"")  # two models: the file says which
        self.assertEqual(find_llama2c(self.path), pair)
        with self.assertRaisesRegex(SchemaError, "exactly one .* model .*model.bin, other.bin"):
            find_llama2c(self.folder)

    def test_what_is_missing_or_ambiguous_is_said(self) -> None:
        with self.assertRaisesRegex(SchemaError, "model .* none"):
            find_llama2c(self.folder)
        with self.assertRaisesRegex(SchemaError, "no file or folder"):
            find_llama2c(self.path)
        self.path.write_bytes(b"")
        for path in (self.folder, self.path):
            with self.assertRaisesRegex(SchemaError, "tokenizer .* none"):
                find_llama2c(path)
        for name in ("tok1.bin", "tokenizer.bin"):
            (self.folder / name).write_bytes(b"")
        for path in (self.folder, self.path):
            with self.assertRaisesRegex(SchemaError, "tok1.bin, tokenizer.bin"):
                find_llama2c(path)
        (self.folder / "tok1.bin").unlink()
        with self.assertRaisesRegex(SchemaError, "tokenizer by its name"):
            find_llama2c(self.folder / "tokenizer.bin")


@unittest.skipUnless(STORIES.is_dir(), "the published model stories260K is not beside this repository")
class PublishedModelTest(FolderTest):
    def test_stories260k(self) -> None:
        model, tokenizer = find_llama2c(STORIES)
        self.assertEqual((model.name, tokenizer.name), ("stories260K.bin", "tok512.bin"))
        config, weights = read_llama2c(model)
        self.assertEqual((config.vocab_size, config.width, config.layers, config.kv_width), (512, 64, 5, 32))
        self.assertEqual(sum(prod(tensor.shape) for tensor in weights.values()), 260_032)
        write_llama2c(self.path, config, weights)
        given, written = model.read_bytes(), self.path.read_bytes()
        tables = 4 * 512 * 8  # bytes at the end: cos and sin of 512 positions x 4 pairs
        self.assertEqual(hashlib.sha256(written[:-tables]).digest(), hashlib.sha256(given[:-tables]).digest())
        for ours, theirs in zip(*(struct.unpack("<4096f", raw[-tables:]) for raw in (written, given)), strict=True):
            self.assertAlmostEqual(ours, theirs, delta=3e-6)


if __name__ == "__main__":
    unittest.main()
