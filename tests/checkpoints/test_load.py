"""From a scenario or a checkpoint to a model."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from starter import InferenceEngine, load_scenario
from starter.base.tokenizer import CharacterTokenizer
from starter.base.weights import seeded_weights, weights_digest
from starter.checkpoints.gguf_model import read_gguf_checkpoint
from starter.checkpoints.load import load_checkpoint_model
from starter.checkpoints.safetensors import write_safetensors
from starter.errors import BackendError, EngineError, RequestError, SchemaError
from starter.model import load_scenario_model, quantization_config
from starter.reference import reference_generate
from starter.schema import CharacterVocabulary, QuantizationConfig, SafetensorsWeights, SeededWeights
from tests.checkpoints.test_gguf_model import metadata, tensors
from tests.checkpoints.test_hf_model import CONFIG, STORED, WEIGHTS
from tests.gguf_files import gguf_file
from tests.paths import FIXTURE


class ScenarioModels(unittest.TestCase):
    def setUp(self) -> None:
        self.scenario = load_scenario(FIXTURE)

    def test_the_scenarios_own_weights(self) -> None:
        loaded = load_scenario_model(self.scenario, "cpu")
        assert isinstance(self.scenario.weights, SeededWeights)
        self.assertEqual(loaded.about["weights_sha256"], self.scenario.weights.sha256)
        self.assertEqual((loaded.about["scenario"], loaded.about["quantization"]), ("tiny_model", None))
        self.assertEqual(loaded.tokenizer.eos_tokens, self.scenario.model.eos_tokens)

    def test_another_seed_gives_other_weights_and_other_tokens(self) -> None:
        one, two = (load_scenario_model(self.scenario, "cpu", weights_seed=seed).about for seed in (1, 2))
        self.assertNotEqual(one["weights_sha256"], two["weights_sha256"])
        outputs = [InferenceEngine.from_scenario(self.scenario, weights_seed=seed).generate([[5, 6]], 8)
                   for seed in (1, 2)]
        self.assertNotEqual(*outputs)

    def test_weights_that_are_not_those_recorded_are_refused(self) -> None:
        wrong = dataclasses.replace(self.scenario, weights=SeededWeights(1, "0" * 64))
        with self.assertRaises(SchemaError) as caught:
            load_scenario_model(wrong, "cpu")
        self.assertEqual(caught.exception.path, "/weights/sha256")

    def test_weights_from_a_file_beside_the_scenario(self) -> None:
        weights = seeded_weights(self.scenario.model, 4)
        with tempfile.TemporaryDirectory() as folder:
            write_safetensors(Path(folder) / "w.safetensors", weights)
            source = SafetensorsWeights("w.safetensors", weights_digest(weights))
            scenario = dataclasses.replace(self.scenario, weights=source, folder=Path(folder))
            tokens = InferenceEngine.from_scenario(scenario).generate([[5, 6, 7]], 6)
        self.assertEqual(tokens, InferenceEngine.from_scenario(self.scenario, weights_seed=4).generate([[5, 6, 7]], 6))

    def test_quantization_by_name_by_config_or_as_in_the_scenario(self) -> None:
        sizes = [load_scenario_model(self.scenario, "cpu", quantization).model.weight_bytes
                 for quantization in (None, "int8", "int4")]
        self.assertLess(sizes[1], 0.30 * sizes[0])
        self.assertLess(sizes[2], 0.18 * sizes[0])
        config = QuantizationConfig(bits=4, group_size=8)
        loaded = load_scenario_model(dataclasses.replace(self.scenario, quantization=config), "cpu")
        self.assertEqual(loaded.model.quantization, config)
        self.assertEqual(quantization_config("int8"), QuantizationConfig(8))
        for wrong in ("int2", 8, True, {}):
            self.assertRaisesRegex(RequestError, "'int4-search', a QuantizationConfig or a function",
                                   quantization_config, wrong)

    def test_corrupting_one_packed_byte_changes_the_output(self) -> None:
        """No float copy of the weights is what is really used."""
        with InferenceEngine.from_scenario(self.scenario, backend="reference", quantization="int8") as engine:
            before = engine.model.forward_uncached([5, 6, 7])
            matrix = engine.model.layers[0].gate_up
            object.__setattr__(matrix, "packed", bytes([matrix.packed[0] ^ 0x40]) + matrix.packed[1:])
            self.assertNotEqual(engine.model.forward_uncached([5, 6, 7]), before)

    def test_settings_out_of_range_are_named(self) -> None:
        for name, value, path in (("page_size", 0, "/engine/page_size"), ("policy", "lifo", "/engine/policy"),
                                  ("kv_quantization", "int4", "/engine/kv_quantization"),
                                  ("pages", 3, "/engine/pages")):
            with self.subTest(name), self.assertRaises(SchemaError) as caught:
                InferenceEngine.from_scenario(self.scenario, **{name: value})
            self.assertEqual(caught.exception.path, path)
        self.assertRaises(BackendError, InferenceEngine.from_scenario, self.scenario, "tpu")


class Checkpoints(unittest.TestCase):
    def test_the_reader_is_chosen_by_what_the_path_is(self) -> None:
        tokenizer = CharacterTokenizer(CharacterVocabulary("abcde"))
        with (tempfile.TemporaryDirectory() as name,
              mock.patch("starter.checkpoints.gguf_model.read_gguf_tokenizer", return_value=tokenizer),
              mock.patch("starter.checkpoints.hf_model.read_folder_tokenizer", return_value=tokenizer)):
            folder = Path(name)
            for file in ("m.gguf", "any.name"):
                (folder / file).write_bytes(gguf_file(metadata(), tensors()))
            path = folder / "m.gguf"
            for given, wanted in ((folder / "any.name", "any.name"), (folder, "m.gguf")):
                self.assertEqual(load_checkpoint_model(given, "cpu").about["checkpoint"], wanted)
            stored = load_checkpoint_model(folder, "cpu", "stored")
            self.assertEqual(stored.about["weights_sha256"], weights_digest(read_gguf_checkpoint(path).weights))  # F32
            (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
            write_safetensors(folder / "model.safetensors", STORED)
            said: list[str] = []
            loaded = load_checkpoint_model(folder, "cpu", "int8", said.append)
            self.assertEqual((loaded.about["checkpoint"], loaded.tokenizer), (folder.resolve().name, tokenizer))
            self.assertEqual(loaded.about["weights_sha256"], weights_digest(WEIGHTS))
            self.assertIn("into backend cpu", said[-1])
            with self.assertRaisesRegex(RequestError, "'stored' keeps the codes of a GGUF file"):
                load_checkpoint_model(folder, "cpu", "stored")
            with InferenceEngine.from_checkpoint(str(folder), "reference") as engine:
                self.assertEqual(engine.generate([[1, 3]], 6), [reference_generate(engine.model, [1, 3], 6)])

    def test_folders_of_gguf_files(self) -> None:
        gguf = gguf_file(metadata(), tensors())
        with tempfile.TemporaryDirectory() as name, mock.patch(
                "starter.checkpoints.gguf_model.read_gguf_tokenizer",
                return_value=CharacterTokenizer(CharacterVocabulary("abcde"))):
            folder = Path(name)
            for file in ("README.md", "config.json"):  # without weights of Hugging Face's form, the GGUF file is meant
                (folder / file).write_text("{}", encoding="utf-8")
            upper = folder / "M.GGUF"
            upper.write_bytes(gguf)
            for path in (folder, upper):
                self.assertEqual(load_checkpoint_model(path, "cpu").about["checkpoint"], "M.GGUF")
            (folder / "other.gguf").write_bytes(gguf)
            with self.assertRaisesRegex(SchemaError, r"holds 2 GGUF files, M\.GGUF, other\.gguf; give the path of one"):
                load_checkpoint_model(folder, "cpu")
            for file in (upper, folder / "other.gguf"):
                file.unlink()
            for part in (1, 2):
                (folder / f"m-0000{part}-of-00003.gguf").write_bytes(gguf)
            with self.assertRaisesRegex(SchemaError, "holds 2 of the 3 parts of m, a split GGUF; merge its parts"):
                load_checkpoint_model(folder, "cpu")

    def test_each_thing_that_is_no_model_is_said_to_be_what_it_is(self) -> None:
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        kinds = "give a GGUF file, a Hugging Face folder"
        for file, raw, words in (
            ("junk.gguf", bytes(range(256)), ("no model file of any known kind", kinds)),
            ("README.md", b"# A model\n", ("is a text file", kinds)),
            ("m.gguf", pointer, ("git-lfs pointer", "git lfs pull")),
            ("m.gguf", b"<!DOCTYPE html><html>", ("HTML page", "download it again")),
            ("m.gguf", b"\n<html>", ("HTML page",)), ("m.gguf", b"", ("an empty file", kinds)),
            ("m.gguf", b"FUGG" + bytes(20), ("big-endian",)), ("m.gguf", b"GGUF\0\0\0\3" + bytes(16), ("big-endian",)),
            ("m.safetensors", pointer, ("git-lfs pointer",)), ("m.bin", b"PK\3\4" + bytes(9), ("PyTorch", kinds)),
            ("m.bin", pointer, ("git-lfs pointer",)), ("any.json", b"{}", ("is a JSON file", kinds)),
        ):
            with self.subTest(file=file, raw=raw[:10]), tempfile.TemporaryDirectory() as name:
                path = Path(name) / file
                path.write_bytes(raw)
                given = [path] if path.suffix in (".md", ".bin", ".json", ".safetensors") else [path, path.parent]
                for each in given:
                    with self.assertRaises(SchemaError) as caught:
                        load_checkpoint_model(each, "cpu")
                    for word in (words if each == path else words[:1] if "known kind" not in words[0] else ()):
                        self.assertIn(word, str(caught.exception))
                    self.assertIn(str(path), str(caught.exception))
                    self.assertNotIn("llama2.c tokenizer", str(caught.exception))

    def test_parts_of_a_folder_from_hugging_face(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "notes.txt").write_text("x", encoding="utf-8")
            with self.assertRaisesRegex(SchemaError, r"holds no model but notes\.txt; give a GGUF file"):
                load_checkpoint_model(folder, "cpu")
            write_safetensors(folder / "model.safetensors", STORED)
            with self.assertRaisesRegex(SchemaError, r"holds model\.safetensors and no config\.json"):
                load_checkpoint_model(folder, "cpu")
            (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
            for file in ("config.json", "model.safetensors"):
                with self.assertRaises(SchemaError) as caught:
                    load_checkpoint_model(folder / file, "cpu")
                self.assertIn(f"{folder / file} is a part of a Hugging Face folder; give the folder, {folder}",
                              str(caught.exception))

    def test_what_is_no_checkpoint_is_refused_in_one_sentence(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "model.bin").write_bytes(b"x" * 10)
            (Path(folder) / "tok.bin").write_bytes(b"x" * 10)
            for path in (folder, Path(folder) / "model.bin", Path(folder) / "none", Path(folder) / ("x" * 5_000),
                         FIXTURE):
                with self.subTest(path=path), self.assertRaises(EngineError) as caught:
                    load_checkpoint_model(path, "cpu")
                self.assertNotIn("\n", str(caught.exception))
            weights = Path(folder) / "model.safetensors"
            weights.write_bytes(b"x" * 10)
            with self.assertRaisesRegex(EngineError, "holds weights alone; give the folder in which it lies"):
                load_checkpoint_model(weights, "cpu")


if __name__ == "__main__":
    unittest.main()
