"""Folders as Hugging Face has them: what is read, from one file or several, and what is refused by name."""

from __future__ import annotations

import json
import tempfile
import unittest
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from starter.base.rope import LinearScaling, Llama3Scaling
from starter.base.tokenizer import CharacterTokenizer
from starter.base.weights import Tensor, check_weights, seeded_weights
from starter.checkpoints.hf_model import read_hf_checkpoint
from starter.checkpoints.safetensors import write_safetensors
from starter.errors import SchemaError
from starter.schema import CharacterVocabulary, ModelConfig

MODEL = ModelConfig(vocab_size=5, width=8, layers=2, heads=2, kv_heads=1, ffn_width=6, max_context=32, rope_theta=100.0,
                    norm_eps=0.5, tied_output=False, bos_token=0, eos_tokens=(2,))
# SmolLM2's own config.json, its sizes made small
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 8, "initializer_range": 0.04, "intermediate_size": 6,
    "is_llama_config": True, "max_position_embeddings": 32, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1, "pad_token_id": 2, "pretraining_tp": 1,
    "rms_norm_eps": 0.5, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 5}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
GONE = object()


def halves(tensor: Tensor, width: int) -> Tensor:
    """Rows as Hugging Face wants them: of each head of 4, the numbers 0, 2, 1, 3."""
    rows = [tensor.values[i:i + width] for i in range(0, len(tensor.values), width)]
    order = [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(len(rows))]
    return Tensor(tensor.shape, sum((rows[i] for i in order[1:]), rows[order[0]]))


WEIGHTS = seeded_weights(MODEL, 1)
STORED = {name: halves(tensor, 8) if "q_proj" in name or "k_proj" in name else tensor
          for name, tensor in WEIGHTS.items()}


class Case(unittest.TestCase):
    """Reads without the package tokenizers."""

    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.write("config.json", CONFIG)
        write_safetensors(self.folder / "model.safetensors", STORED)
        patch = mock.patch("starter.checkpoints.hf_model.read_folder_tokenizer",
                           return_value=CharacterTokenizer(CharacterVocabulary("abcde")))
        self.addCleanup(patch.stop)
        self.tokenizer = patch.start()

    def write(self, name: str, document: object) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        (self.folder / name).write_text(text, encoding="utf-8")

    def config(self, **changes: Any) -> ModelConfig:
        """What is read from a changed config.json."""
        self.write("config.json", {key: value for key, value in {**CONFIG, **changes}.items() if value is not GONE})
        return read_hf_checkpoint(self.folder).config

    def refused(self, *words: str) -> SchemaError:
        with self.assertRaises(SchemaError) as caught:
            checkpoint = read_hf_checkpoint(self.folder)
            check_weights(checkpoint.config, checkpoint.weights)
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))
        return caught.exception


class Reading(Case):
    def test_one_file(self) -> None:
        checkpoint = read_hf_checkpoint(self.folder)
        self.assertEqual((checkpoint.config, checkpoint.name), (MODEL, self.folder.resolve().name))
        self.assertEqual(checkpoint.weights, WEIGHTS)

    def test_several_files(self) -> None:
        (self.folder / "model.safetensors").unlink()
        names = sorted(STORED)
        parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
        for file, part in parts.items():
            write_safetensors(self.folder / file, {name: STORED[name] for name in part}, "F32")
        where = {name: file for file, part in parts.items() for name in part}
        self.write("model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": where})
        said: list[str] = []
        self.assertEqual(read_hf_checkpoint(self.folder, said.append).weights, WEIGHTS)
        self.assertIn("2 of 2", said[-1])
        for change, words in (
                ({"extra": "a.safetensors"}, "whether extra is there"), ({names[0]: "b.safetensors"}, names[0]),
                ({names[0]: "c.safetensors"}, "3 files, of which 1"), ({names[0]: "../x"}, "not the name of a file"),
                ({names[0]: ".."}, "not the name of a file"), ({names[0]: 5}, "/weight_map/"), (None, "/weight_map")):
            with self.subTest(change=change):
                self.write("model.safetensors.index.json", {"weight_map": change and {**where, **change}})
                self.refused(words)

    def test_an_output_matrix_that_is_the_embedding(self) -> None:
        embedding = STORED["model.embed_tokens.weight"]
        rest = {name: tensor for name, tensor in STORED.items() if name != "lm_head.weight"}
        self.write("config.json", {**CONFIG, "tie_word_embeddings": True})
        write_safetensors(self.folder / "model.safetensors", {
            **rest, "lm_head.weight": embedding, "model.layers.0.self_attn.rotary_emb.inv_freq": embedding})
        self.assertEqual(set(read_hf_checkpoint(self.folder).weights), set(rest))
        write_safetensors(self.folder / "model.safetensors", STORED)
        self.refused("lm_head.weight is given, but")

    def test_ends(self) -> None:
        self.assertEqual(self.config(eos_token_id=[2, 3]).eos_tokens, (2, 3))
        self.assertEqual(self.config(eos_token_id=None, bos_token_id=None).eos_tokens, ())
        self.write("generation_config.json", {"eos_token_id": [4, 2]})
        self.assertEqual(self.config().eos_tokens, (4, 2))
        self.write("generation_config.json", {})
        self.assertEqual(self.config().eos_tokens, (2,))

    def test_rotary_scaling(self) -> None:
        llama3 = Llama3Scaling(8.0, 1.0, 4.0, 16.0)
        for changes, theta, scaling in (
            ({}, 100.0, None), ({"rope_theta": GONE}, 10_000.0, None),
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 100.0, LinearScaling(2.0)),
            ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 100.0, llama3),
            ({"rope_theta": GONE, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
            ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0, **LLAMA3}}, 7.0, llama3),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 1.0}}, 7.0, None),
            ({"rope_parameters": {"rope_theta": 7.0}, "rope_scaling": {}}, 7.0, None),
            ({"rope_parameters": {}, "rope_scaling": {"type": "linear", "factor": 2.0}}, 100.0, LinearScaling(2.0)),
            ({"rope_parameters": {"type": "linear", "factor": 2.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
             100.0, LinearScaling(2.0)),
        ):
            with self.subTest(changes=changes):
                config = self.config(**changes)
                self.assertEqual((config.rope_theta, config.rope_scaling), (theta, scaling))

    def test_keys_that_change_nothing(self) -> None:
        for changes in ({"sliding_window": None}, {"use_sliding_window": False, "sliding_window": 4096}, {"zzz": None},
                        {"layer_types": ["full_attention"] * 2}, {"head_dim": 4}, {"num_key_value_heads": 1},
                        {"sliding_window": 4096}, {"use_mrope": False}, {"unsloth_version": "2025.1"},
                        {"auto_map": {"AutoModel": "x.Y"}}, {"max_length": 20}, {"unk_token_id": 0},
                        {"_attn_implementation": "sdpa"}, {"gradient_checkpointing": False}, {"torchscript": False},
                        {"tie_word_embeddings": None}, {"partial_rotary_factor": 1.0}):
            with self.subTest(changes=changes):
                self.assertEqual(self.config(**changes), self.config(head_dim=changes.get("head_dim")))

    def test_what_the_architectures_imply(self) -> None:
        model = MODEL
        for name, implied in (("Qwen2ForCausalLM", {"attention_bias": True}), ("Qwen3ForCausalLM", {"qk_norm": True})):
            with self.subTest(name):
                write_safetensors(self.folder / "model.safetensors", STORED)
                model = replace(MODEL, head_dim=4, **implied)
                self.write("config.json", {**CONFIG, "architectures": [name], "head_dim": 4})
                self.refused("the tensor model.layers.0.self_attn.q_", "which config.json demands, is in no file")
                write_safetensors(self.folder / "model.safetensors", seeded_weights(model, 1))
                self.assertEqual(read_hf_checkpoint(self.folder).config, model)
                self.write("config.json", CONFIG)
                self.refused("the tensor model.layers.0.self_attn.", "belongs to no part of the model")
        write_safetensors(self.folder / "model.safetensors", seeded_weights(replace(MODEL, kv_heads=2), 1))
        self.assertEqual(self.config(num_key_value_heads=GONE).kv_heads, 2)

    def test_the_chat_template(self) -> None:
        for name, document, wanted in (("tokenizer_config.json", {}, None),
                                       ("tokenizer_config.json", {"chat_template": "old"}, "old"),
                                       ("chat_template.jinja", "new", "new")):
            self.write(name, document)
            read_hf_checkpoint(self.folder)
            self.assertEqual(self.tokenizer.call_args[0][2:], (wanted, {}))
        self.write("tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None,
                                             "chat_template": [{"name": "default", "template": "x"}]})
        (self.folder / "chat_template.jinja").unlink()
        read_hf_checkpoint(self.folder)
        self.assertEqual(self.tokenizer.call_args[0][2:], ([{"name": "default", "template": "x"}],
                                                           {"bos_token": "<s>", "eos_token": "</s>"}))


class Refusing(Case):
    def test_what_is_not_known_is_named(self) -> None:
        wrong: Mapping[str, tuple[Any, ...]] = {
            "architectures": (["MistralForCausalLM"], [], GONE, "LlamaForCausalLM", [["x"]],
                              ["LlamaForCausalLM", "Qwen2ForCausalLM"]),
            "use_sliding_window": (True,), "use_mrope": (True,), "torchscript": (True,),
            "layer_types": (["sliding_attention"], "full"),
            "attention_bias": (True,), "mlp_bias": (True,), "hidden_act": ("gelu",), "rope_interleaved": (True,),
            "attention_multiplier": (0.5,), "partial_rotary_factor": (0.5,), "quantization_config": ({"bits": 4},),
            "num_experts": (8,), "no_rope_layers": ([1],), "logits_scaling": (2.0,),
        }
        for key, values in wrong.items():
            for value in values:
                with self.subTest(key=key, value=value):
                    self.write("config.json", {k: v for k, v in {**CONFIG, key: value}.items() if v is not GONE})
                    error = self.refused(str(self.folder / "config.json"))
                    self.assertEqual(error.path, f"/{key}")

    def test_rotary_scaling_of_other_kinds(self) -> None:
        for rope in ({"type": "yarn", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0},
                     {"rope_type": "longrope"}, {"factor": 4.0}, {"rope_type": "linear"},
                     {"rope_type": "linear", "factor": 4.0, "extra": 1},
                     {"rope_type": "llama3", "factor": 4.0}, {"rope_type": ["linear"]}, [1],
                     {"rope_type": "default", "partial_rotary_factor": 0.5}):
            for key in ("rope_scaling", "rope_parameters"):
                with self.subTest(rope=rope, key=key):
                    self.write("config.json", {**CONFIG, key: rope})
                    self.assertTrue(self.refused("config.json").path.startswith(f"/{key}"))

    def test_rope_given_twice(self) -> None:
        """transformers 5 obeys rope_scaling and forgets rope_parameters, its theta included."""
        for kind in ("yarn", "linear", "dynamic"):
            self.write("config.json", {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
                                       "rope_scaling": {"rope_type": kind, "factor": 4.0}})
            self.assertEqual(self.refused("config.json", "beside rope_parameters").path, "/rope_scaling")

    def test_the_file_at_fault_is_named(self) -> None:
        self.write("generation_config.json", {"eos_token_id": [2]})
        self.write("tokenizer_config.json", {})
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            before = (self.folder / name).read_text(encoding="utf-8")
            for text in ("{", "[]", "", "\udcff", "version https://git-lfs.github.com/spec/v1", "<!DOCTYPE html>",
                         json.dumps({"x": "a" * 5_000_000})):
                with self.subTest(name=name, text=text[:20]):
                    (self.folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
                    error = self.refused(str(self.folder / name))
                    self.assertEqual(str(error).count("config.json"), 1)
            self.write(name, before)
        for ends in ("x", [2, "x"], 5, [-1], True, {}):
            with self.subTest(ends=ends):
                self.write("generation_config.json", {"eos_token_id": ends})
                self.assertTrue(self.refused("generation_config.json: ").path.startswith("/eos_token_id"))

    def test_an_error_points_at_the_key_of_the_file(self) -> None:
        for key, value in (("hidden_size", 2**40), ("eos_token_id", [9]), ("tie_word_embeddings", 1)):
            self.write("config.json", {**CONFIG, key: value})
            self.assertTrue(self.refused("config.json").path.startswith(f"/{key}"))

    def test_what_is_missing_or_malformed(self) -> None:
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                    "max_position_embeddings", "rms_norm_eps"):
            for value in (GONE, None):
                self.write("config.json", {k: v for k, v in {**CONFIG, key: value}.items() if v is not GONE})
                self.assertEqual(self.refused("required and missing").path, f"/{key}")
        for key, value in (("vocab_size", "5"), ("hidden_size", 2**40), ("eos_token_id", "x"), ("eos_token_id", 9),
                           ("tie_word_embeddings", 1), ("num_key_value_heads", 3), ("intermediate_size", 7)):
            with self.subTest(key=key, value=value):
                self.write("config.json", {**CONFIG, key: value})
                self.refused()
        for text in ("", "[]", "5", "{", '{"a": NaN}', "{}"):
            with self.subTest(text=text):
                self.write("config.json", text)
                self.refused()
        self.write("config.json", {**CONFIG, "architectures": ["Qwen3ForCausalLM"]})
        self.assertEqual(self.refused("required").path, "/head_dim")

    def test_weights_that_are_not_there(self) -> None:
        (self.folder / "model.safetensors").unlink()
        for name, words in ((None, "nor any other weights"), ("pytorch_model.bin", "save the model with transformers"),
                            ("consolidated.safetensors", "save the model with transformers"),
                            ("adapter_model.safetensors", "an adapter of another model"),
                            ("model-00001-of-00002.safetensors", "whose index model.safetensors.index.json is missing"),
                            ("model.safetensors", "a git-lfs pointer")):
            with self.subTest(name):
                if name:
                    self.write(name, "version https://git-lfs.github.com/spec/v1\noid sha256:0")
                self.refused(str(self.folder), words, name or "")
                if name:
                    (self.folder / name).unlink()

    def test_a_complete_file_beside_an_index_of_shards_that_are_gone(self) -> None:
        where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(STORED)}
        self.write("model.safetensors.index.json", {"weight_map": where})
        self.assertEqual(read_hf_checkpoint(self.folder).weights, WEIGHTS)
        (self.folder / "model.safetensors").unlink()
        self.refused("index.json: it names 2 files, of which 2 are not in this folder",
                     "model-00001-of-00002.safetensors")


if __name__ == "__main__":
    unittest.main()
