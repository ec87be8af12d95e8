"""From GGUF files to models: rows as they lie in each architecture, and what is refused."""

from __future__ import annotations

import random
import struct
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import sub
from typing import Any, ClassVar
from unittest import mock

from starter.backend import load_backend
from starter.base.rope import FactorScaling, LinearScaling
from starter.base.tokenizer import CharacterTokenizer, CharacterVocabulary
from starter.base.weights import StoredWeights, Tensor, check_weights, float32_array, weights_digest
from starter.checkpoints import gguf_model as gguf_checkpoint
from starter.checkpoints.checkpoint import neighbours
from starter.checkpoints.gguf_blocks import FORMATS
from starter.checkpoints.gguf_model import read_gguf_checkpoint
from starter.errors import EngineError, SchemaError
from starter.model import Model
from starter.quantization import QuantizedTensor
from starter.schema import ModelConfig
from tests.checkpoints.test_gguf import FileCase
from tests.extras import needs
from tests.gguf_files import Entry, floats, gguf_file

SIZES = {"embedding_length": 8, "block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 2,
         "feed_forward_length": 6, "context_length": 32, "attention.layer_norm_rms_epsilon": 0.5,
         "rope.freq_base": 100.0}
NORMS = ("attn_norm", "ffn_norm")
LAYER = {"attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8), "ffn_gate": (6, 8),
         "ffn_up": (6, 8), "ffn_down": (8, 6), "attn_norm": (8,), "ffn_norm": (8,)}


def metadata(architecture: str = "llama", changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Of a tiny model; a change to None leaves a key out."""
    found = {"general.architecture": architecture, **{f"{architecture}.{key}": v for key, v in SIZES.items()},
             "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 4, **(changes or {})}
    return {key: v for key, v in found.items() if v is not None}


def tensors(more: Mapping[str, Sequence[int]] | None = None, more_of_layers: Mapping[str, Sequence[int]] | None = None,
            without: str = "") -> list[Entry]:
    """Random ones under GGUF's names."""
    shapes: dict[str, Sequence[int]] = {"token_embd.weight": (5, 8), "output_norm.weight": (8,), **(more or {})}
    for i in range(2):
        shapes.update({f"blk.{i}.{name}.weight": shape for name, shape in LAYER.items()})
        shapes.update({f"blk.{i}.{name}": shape for name, shape in (more_of_layers or {}).items()})
    shapes.pop(without, None)
    dice = random.Random(1)
    return [(name, shape, "F32", floats(*(dice.uniform(0.5, 2.0) for _ in range(prod(shape)))))
            for name, shape in shapes.items()]


class Case(FileCase):
    """Reads without the package tokenizers."""

    def setUp(self) -> None:
        super().setUp()
        tokenizer = CharacterTokenizer(CharacterVocabulary("abcde"))
        patch = mock.patch("starter.checkpoints.gguf_model.read_gguf_tokenizer", return_value=tokenizer)
        self.addCleanup(patch.stop)
        patch.start()

    def read(self, given: Mapping[str, Any], entries: Sequence[Entry]) -> tuple[ModelConfig, StoredWeights]:
        self.path.write_bytes(gguf_file(given, entries))
        checkpoint = read_gguf_checkpoint(self.path)
        check_weights(checkpoint.config, checkpoint.weights)
        return checkpoint.config, checkpoint.weights

    def refused_model(self, given: Mapping[str, Any], entries: Sequence[Entry], *words: str) -> None:
        with self.assertRaises(SchemaError) as caught:
            self.read(given, entries)
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))


class Reading(Case):
    def test_the_sizes(self) -> None:
        config, weights = self.read(metadata(), tensors())
        self.assertEqual(config, ModelConfig(5, 8, 2, 4, 2, 6, 32, 100.0, 0.5, True, None, (2, 4)))
        raw = {name: data for name, _, _, data in tensors()}
        self.assertEqual(weights["model.layers.1.mlp.down_proj.weight"].values,
                         float32_array(raw["blk.1.ffn_down.weight"]))
        config, weights = self.read(metadata(), tensors({"output.weight": (5, 8)}))
        self.assertFalse(config.tied_output)
        self.assertIn("lm_head.weight", weights)

    def test_pairs_are_neighbours_in_llama_and_halves_elsewhere(self) -> None:
        widths = {"q": 8, "k": 4, "v": 4}
        biases = {f"attn_{part}.bias": (width,) for part, width in widths.items()}
        norms = {f"attn_{part}_norm.weight": (4,) for part in "qk"}
        sizes = {"attention.head_count": 2, "attention.head_count_kv": 1}
        for architecture, order in (("llama", [0, 1, 2, 3]), ("qwen2", [0, 2, 1, 3]), ("qwen3", [0, 2, 1, 3])):
            with self.subTest(architecture=architecture):
                entries = tensors(more_of_layers=norms if architecture == "qwen3" else biases)
                raw = {name: float32_array(data).tolist() for name, _, _, data in entries}
                changes = {f"{architecture}.{key}": heads for key, heads in sizes.items()}
                config, weights = self.read(metadata(architecture, changes), entries)
                self.assertEqual((config.attention_bias, config.qk_norm),
                                 (architecture != "qwen3", architecture == "qwen3"))
                ours, theirs = (("k_norm.weight", "k_norm.weight") if architecture == "qwen3" else
                                ("k_proj.bias", "k.bias"))
                self.assertEqual(weights[f"model.layers.1.self_attn.{ours}"].tolist(),
                                 [raw[f"blk.1.attn_{theirs}"][i] for i in order])
                if architecture != "qwen3":
                    self.assertEqual(weights["model.layers.1.self_attn.v_proj.bias"].tolist(), raw["blk.1.attn_v.bias"])
                rows = weights["model.layers.1.self_attn.q_proj.weight"].rows()
                wanted = [raw["blk.1.attn_q.weight"][8 * (4 * head + i):8 * (4 * head + i) + 8]
                          for head in range(2) for i in order]
                self.assertEqual(rows, wanted)

    def test_neighbours(self) -> None:
        rows = Tensor((12, 1), float32_array(floats(*range(12))))
        self.assertEqual(neighbours(rows, 6).tolist(), [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
        self.assertEqual(neighbours(rows, 2), rows)

    def test_heads_of_another_width_and_their_norms(self) -> None:
        entries = [entry for entry in tensors(more_of_layers={"attn_q_norm.weight": (4,), "attn_k_norm.weight": (4,)})
                   if entry[0].split(".")[-2] not in ("attn_q", "attn_k", "attn_v", "attn_output")]
        for i in range(2):
            entries += [(f"blk.{i}.{name}.weight", shape, "F32", floats(*range(prod(shape)))) for name, shape in (
                ("attn_q", (16, 8)), ("attn_k", (8, 8)), ("attn_v", (8, 8)), ("attn_output", (8, 16)))]
        widths = {"qwen3.attention.key_length": 4, "qwen3.attention.value_length": 4, "qwen3.rope.dimension_count": 4}
        config, _ = self.read(metadata("qwen3", widths), entries)
        self.assertEqual((config.head_width, config.qk_norm, config.attention_bias), (4, True, False))

    def test_rotary_scaling(self) -> None:
        linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        self.assertEqual(self.read(metadata(changes=linear), tensors())[0].rope_scaling, LinearScaling(4.0))
        for none in ({"llama.rope.scaling.type": "none"}, {"llama.expert_count": 0}, {}):
            self.assertIsNone(self.read(metadata(changes=none), tensors())[0].rope_scaling)
        config, weights = self.read(metadata(), tensors({"rope_freqs.weight": (1,)}))
        self.assertIsInstance(config.rope_scaling, FactorScaling)
        self.assertNotIn("rope_freqs.weight", weights)

    def test_progress(self) -> None:
        said: list[str] = []
        self.path.write_bytes(gguf_file(metadata(), tensors()))
        read_gguf_checkpoint(self.path, said.append)
        self.assertEqual((len(said), said[-1]), (20, "reading file.gguf: tensor 20 of 20"))


class Refusing(Case):
    def test_what_is_not_known_is_named(self) -> None:
        for key, given in (("llama.expert_count", 8), ("llama.attention.sliding_window", 4096),
                           ("llama.attention.logit_softcapping", 50.0), ("llama.rope.dimension_count", 1),
                           ("llama.attention.value_length", 4), ("llama.rope.scaling.attn_factor", 2.0),
                           ("llama.attention.causal", False)):
            with self.subTest(key=key):
                self.refused_model(metadata(changes={key: given}), tensors(), key)
        self.refused_model(metadata(changes={"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}),
                           tensors(), "'yarn'")
        self.refused_model(metadata("gemma3"), tensors(), "'gemma3'", "llama, qwen2, qwen3")
        self.refused_model(metadata(changes={"general.architecture": None}), tensors(), "the architecture is None")
        self.refused_model(metadata(changes={"general.architecture": ["llama"]}), tensors(), "the architecture is")
        for name in ("blk.0.attn_output.bias", "blk.0.ffn_gate_exps.weight", "blk.x.attn_q.weight", "extra"):
            self.refused_model(metadata(), tensors({name: (8,)}), f"the tensor {name} has no place")

    def test_what_is_missing_or_of_the_wrong_size(self) -> None:
        for key in SIZES:
            if key not in ("attention.head_count_kv", "rope.freq_base"):
                self.refused_model(metadata(changes={f"llama.{key}": None}), tensors(), f"llama.{key} is missing")
        self.refused_model(metadata(), tensors(without="token_embd.weight"), "token_embd.weight is missing")
        self.refused_model(metadata(), tensors(without="blk.1.ffn_up.weight"),
                           "the tensor blk.1.ffn_up.weight is missing")
        self.refused_model(metadata(), tensors({"blk.2.ffn_up.weight": (6, 8)}),
                           "the tensor blk.2.ffn_up.weight belongs to no part of a llama of 2 layers")
        self.refused_model(metadata(), tensors(more_of_layers={"attn_q.bias": (8,)}), "blk.0.attn_k.bias")
        for changes, words in (
                ({"llama.attention.head_count": [4, 4]}, "a list"), ({"llama.block_count": "2"}, "a string"),
                ({"llama.embedding_length": 2**31}, "65536"), ({"tokenizer.ggml.eos_token_id": 5}, "token 5"),
                ({"llama.rope.scaling.factor": -1.0}, "positive"), ({"llama.feed_forward_length": 7}, "shape")):
            with self.subTest(changes=changes):
                self.refused_model(metadata(changes=changes), tensors(), words)


    def test_the_architecture_decides_which_parts_there_are(self) -> None:
        norms = {"attn_q_norm.weight": (2,), "attn_k_norm.weight": (2,)}
        biases = {"attn_q.bias": (8,), "attn_k.bias": (4,), "attn_v.bias": (4,)}
        sizes = {"qwen3.attention.key_length": 2}
        self.assertTrue(self.read(metadata("qwen2"), tensors(more_of_layers=biases))[0].attention_bias)
        self.assertTrue(self.read(metadata("qwen3", sizes), tensors(more_of_layers=norms))[0].qk_norm)
        for architecture, given, words in (
                ("qwen3", tensors(), "the tensor blk.0.attn_q_norm.weight and 3 more are missing"),
                ("qwen3", tensors(more_of_layers=norms, without="blk.0.attn_q_norm.weight"),
                 "the tensor blk.0.attn_q_norm.weight is missing"),
                ("qwen3", tensors(more_of_layers={**norms, **biases}), "the tensor blk.0.attn_q.bias belongs to no"),
                ("qwen2", tensors(), "the tensor blk.0.attn_q.bias and 5 more are missing"),
                ("qwen2", tensors(more_of_layers=biases, without="blk.1.attn_v.bias"), "blk.1.attn_v.bias is missing"),
                ("qwen2", tensors(more_of_layers={**norms, **biases}), "the tensor blk.0.attn_q_norm.weight belongs"),
                ("llama", tensors(more_of_layers=norms), "the tensor blk.0.attn_q_norm.weight belongs to no part")):
            with self.subTest(architecture=architecture, words=words):
                self.refused_model(metadata(architecture), given, words, architecture)
        for name in ("blk.01.attn_q.weight", f"blk.{'1' * 5000}.attn_q.weight"):
            self.refused_model(metadata(), tensors({name: (8,)}), "has no place in this decoder")

    def test_a_part_of_a_split_file(self) -> None:
        split = {"split.no": 0, "split.count": 3}
        self.refused_model(metadata(changes=split), tensors(), "part 1 of 3", "llama-gguf-split --merge")
        second = self.path.parent / "m-00002-of-00003.gguf"
        second.write_bytes(gguf_file({"split.no": 1, "split.count": 3}))
        with self.assertRaisesRegex(SchemaError, "part 2 of 3 of a split GGUF; of its parts 1, 3 are missing here"):
            read_gguf_checkpoint(second)


class WithoutThePackage(FileCase):
    def test_one_sentence_says_how_to_get_it(self) -> None:
        tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
                  "tokenizer.ggml.tokens": ["a", "b", "c", "d", "ab"], "tokenizer.ggml.merges": ["a b"]}
        self.path.write_bytes(gguf_file(metadata(changes=tokens), tensors()))
        with (mock.patch("starter.checkpoints.hf_tokenizer.import_module", side_effect=ImportError),
              self.assertRaisesRegex(EngineError, r"needs the package tokenizers.*pip install '\.\[checkpoints\]'")):
            read_gguf_checkpoint(self.path)
        self.assertNotIn("tokenizers", vars(gguf_checkpoint))


class Codes(Case):
    """Matrices stay the codes of their blocks; what is computed is what the dequantized file gives."""

    CHANGES: ClassVar = {"embedding_length": 64, "feed_forward_length": 32}
    SHAPES: ClassVar = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
              "ffn_gate": (32, 64), "ffn_up": (32, 64), "ffn_down": (64, 32)}

    def entries(self, kinds: Mapping[str, str], biases: bool) -> list[Entry]:
        dice = random.Random(4)

        def blocks(kind: str, numbers: int) -> bytes:
            if kind == "F16":
                return b"".join(struct.pack("<e", dice.gauss(0, 0.1)) for _ in range(numbers))
            fields = 2 if kind == "Q4_1" else 1
            return b"".join(struct.pack(f"<{fields}e", *(dice.gauss(0, 0.02) for _ in range(fields)))
                            + dice.randbytes(FORMATS[kind].nbytes - 2 * fields) for _ in range(numbers // 32))

        matrices = {"token_embd": (5, 64), **{f"blk.{i}.{name}": shape for i in range(2)
                                              for name, shape in self.SHAPES.items()}}
        vectors = ["output_norm", *(f"blk.{i}.{name}" for i in range(2) for name in NORMS)]
        return [(f"{name}.weight", shape, kind := kinds.get(name.split(".")[-1], "Q4_1"), blocks(kind, prod(shape)))
                for name, shape in matrices.items()] + [
            (f"blk.{i}.attn_{part}.bias", (rows,), "F32", floats(*(dice.uniform(-0.1, 0.1) for _ in range(rows))))
            for i in range(2 if biases else 0) for part, rows in (("q", 64), ("k", 32), ("v", 32))] + [
            (f"{name}.weight", (64,), "F32", floats(*(dice.uniform(0.5, 2.0) for _ in range(64)))) for name in vectors]

    def models(self, architecture: str, kinds: Mapping[str, str], backend: str) -> list[Model]:
        """With the file's codes, and with its dequantized numbers."""
        changes = {f"{architecture}.{key}": size for key, size in self.CHANGES.items()}
        self.path.write_bytes(gguf_file(metadata(architecture, changes), self.entries(kinds, architecture == "qwen2")))
        checkpoints = [read_gguf_checkpoint(self.path, codes=codes) for codes in (True, False)]
        return [Model(each.config, each.weights, load_backend(backend)) for each in checkpoints]

    def test_they_compute_what_the_dequantized_file_does(self) -> None:
        for architecture in ("llama", "qwen2"):
            for kinds, share in (({}, 0.2), ({"token_embd": "Q8_0", "attn_output": "Q8_0"}, 0.25),
                                 ({"attn_q": "Q4_0", "ffn_down": "F16"}, 0.7)):  # q, k, v of two kinds: floats
                with self.subTest(architecture=architecture, kinds=kinds):
                    codes, floats = self.models(architecture, kinds, "reference")
                    for a, b in zip(codes.forward_uncached([1, 4, 2]), floats.forward_uncached([1, 4, 2]), strict=True):
                        self.assertAlmostEqual(a, b, delta=1e-4)
                    self.assertLess(codes.weight_bytes, share * floats.weight_bytes)
                    for name, rows in codes.parameters().items():
                        for mine, theirs in zip(rows, floats.parameters()[name], strict=True):
                            self.assertLess(max(map(abs, map(sub, mine, theirs))), 1e-6)

    def test_in_lanes(self) -> None:
        codes, floats = self.models("llama", {}, "cpu")
        for a, b in zip(codes.forward_uncached([1, 4, 2]), floats.forward_uncached([1, 4, 2]), strict=True):
            self.assertAlmostEqual(a, b, delta=0.01)  # 14 bits a weight, rounded apart
        self.assertLess(codes.weight_bytes, 0.25 * codes.working_bytes)

    @needs("numpy", "numpy")
    def test_on_numpy(self) -> None:
        codes, floats = self.models("llama", {"token_embd": "Q8_0"}, "numpy")
        for a, b in zip(codes.forward_uncached([1, 4, 2]), floats.forward_uncached([1, 4, 2]), strict=True):
            self.assertAlmostEqual(a, b, delta=1e-4)
        self.assertLess(codes.weight_bytes, 0.25 * floats.weight_bytes)

    def test_the_digest_tells_codes_apart(self) -> None:
        codes, floats = (read_gguf_checkpoint(self.path, codes=codes).weights for codes in (True, False)
                         if self.models("llama", {}, "reference"))
        self.assertNotEqual(weights_digest(codes), weights_digest(floats))
        name = "model.embed_tokens.weight"
        q = codes[name]
        assert isinstance(q, QuantizedTensor)
        for change in ({"packed": bytes([q.packed[0] ^ 1]) + q.packed[1:]}, {"scales": q.scales[1:] + q.scales[:1]},
                       {"zero_points": q.zero_points[1:] + q.zero_points[:1]}):
            self.assertNotEqual(weights_digest({**codes, name: replace(q, **change)}), weights_digest(codes))


if __name__ == "__main__":
    unittest.main()
