"""Scenarios: what loads, what is refused and where the error points, the way back to JSON, the JSON Schema."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import random
import re
import tempfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from starter.base.rope import Llama3Scaling
from starter.errors import SchemaError
from starter.schema import (
    EngineSettings,
    Golden,
    ModelConfig,
    QuantizationConfig,
    Request,
    SamplingParams,
    Scenario,
    compact_json,
    load_scenario,
    main,
    parse_scenario,
    scenario_json_schema,
)
from tests.extras import needs
from tests.paths import FIXTURE, ROOT

SCHEMA = ROOT / "fixtures" / "scenario.schema.json"
# Every key, none null.
DOCUMENT: dict[str, Any] = {
    "version": 1, "name": "all", "description": "h\u00e9",
    "model": {"vocab_size": 5, "width": 8, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_width": 6, "max_context": 9,
              "rope_theta": 100.5, "norm_eps": 0.5, "tied_output": False, "bos_token": 0, "eos_tokens": [1],
              "head_dim": 2, "attention_bias": True, "qk_norm": True,
              "rope_scaling": {"kind": "llama3", "factor": 8.5, "low_freq_factor": 0.5, "high_freq_factor": 16.5,
                               "original_context": 64.5}},
    "weights": {"source": "seeded", "seed": 3, "sha256": "f" * 64},
    "tokenizer": {"characters": "abc", "specials": ["<b>", "<e>"]},
    "engine": {"page_size": 2, "num_pages": 9, "kv_budget_bytes": 1000, "budget_tokens": 4, "max_running": 2,
               "batching": "static", "max_waiting": 7, "keep_events": 5, "max_unread": 6,
               "unread_seconds": 7.5, "policy": "shortest", "preemption": "swap", "host_pages": 3,
               "prefix_sharing": True,
               "use_cache": False, "kv_quantization": None, "workers": 1, "seed": 5},
    "quantization": {"bits": 4, "group_size": 4, "symmetric": False, "method": "search"},
    "requests": [{"request_id": "a/b", "prompt_tokens": [2, 3], "max_tokens": 4, "arrival": 1.5, "priority": -1,
                  "sampling": {"temperature": 0.5, "top_k": 2, "top_p": 0.5, "min_p": 0.25, "seed": 3,
                               "logit_bias": [[2, -1.5]], "repetition_penalty": 1.5, "presence_penalty": 0.5,
                               "frequency_penalty": -0.5, "min_tokens": 2, "ignore_eos": True, "stop": ["ab"],
                               "logprobs": 3, "n": 2},
                  "stop_tokens": [4], "cache_salt": "s"},
                 {"request_id": "c", "prompt_tokens": [4], "max_tokens": 8}],
    "events": [{"step": 3, "cancel": "c"}],
    "faults": [{"kind": "backend", "call": 1, "request_id": "c"}, {"kind": "nan_logits", "call": 2, "request_id": "c"},
               {"kind": "refused_pages", "ask": 3}, {"kind": "abnormal_release", "step": 4, "request_id": "c"},
               {"kind": "memory_cut", "step": 5, "pages": 2, "until": 9}, {"kind": "slow_consumer", "request_id": "c"}],
    "golden": {"tokens": {"a/b": [2, 3]}, "smallest_margin": 0.125, "made_by": "hand"},
}
SMALLEST: dict[str, Any] = {
    "version": 1, "name": "small", "weights": {"source": "safetensors", "path": "w"},
    "model": {"vocab_size": 5, "width": 8, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_width": 6, "max_context": 9},
    "tokenizer": {"characters": "abcde"}, "requests": [{"request_id": "r", "prompt_tokens": [0], "max_tokens": 0}],
}
FAULT_KEYS = (("call",), ("call",), ("ask",), ("step", "request_id"), ("step", "pages", "until"), ("request_id",))
Place = tuple[Any, ...]  # the keys on the way to a value
REQUIRED: set[Place] = {
    *((key,) for key in ("version", "name", "model", "weights", "tokenizer", "requests")),
    *(("model", key) for key in SMALLEST["model"]), *(("requests", 0, key) for key in SMALLEST["requests"][0]),
    *(("requests", 1, key) for key in SMALLEST["requests"][0]), ("weights", "source"), ("weights", "seed"),
    ("tokenizer", "characters"), ("events", 0, "step"), ("events", 0, "cancel"), ("golden", "tokens"),
    ("golden", "smallest_margin"),
    *(("model", "rope_scaling", key) for key in DOCUMENT["model"]["rope_scaling"]),
    *(("faults", i, key) for i, keys in enumerate(FAULT_KEYS) for key in ("kind", *keys)),
}
NULLABLE: set[Place] = {
    ("model", "bos_token"), ("model", "head_dim"), ("model", "rope_scaling"), ("weights", "sha256"),
    ("engine", "kv_budget_bytes"), ("engine", "kv_quantization"), ("engine", "unread_seconds"),
    ("quantization",), ("quantization", "group_size"), ("requests", 0, "sampling", "seed"),
    ("requests", 0, "cache_salt"), ("requests", 0, "sampling", "logprobs"), ("golden",),
    ("faults", 0, "request_id"), ("faults", 1, "request_id"),
}


def places(value: object, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every value of a document."""
    yield place, value
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*place, key))


def pointer(place: Place) -> str:
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in place)


def get(document: Any, place: Place) -> Any:
    for key in place:
        document = document[key]
    return document


def edited(place: Place, value: object, document: dict[str, Any] = DOCUMENT) -> dict[str, Any]:
    """A copy with one value replaced or added."""
    document = copy.deepcopy(document)
    get(document, place[:-1])[place[-1]] = value
    return document


def without(place: Place, document: dict[str, Any] = DOCUMENT) -> dict[str, Any]:
    document = copy.deepcopy(document)
    del get(document, place[:-1])[place[-1]]
    return document


def text_with(place: Place, raw: str) -> str:
    """The document's JSON text with ``raw`` in the place of one value."""
    return json.dumps(edited(place, "@@@") if place else "@@@").replace('"@@@"', raw)


class Case(unittest.TestCase):
    def refused(self, document: object, path: str, *words: str) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        with self.assertRaises(SchemaError) as caught:
            parse_scenario(text)
        self.assertEqual(caught.exception.path, path, str(caught.exception))
        for word in words:
            self.assertIn(word, str(caught.exception))


class RoundTripTest(Case):
    def test_every_key_arrives(self) -> None:
        scenario = parse_scenario(json.dumps(DOCUMENT))
        self.assertEqual(scenario.model, ModelConfig(
            5, 8, 1, 4, 2, 6, 9, 100.5, 0.5, False, 0, (1,), 2, True, True, Llama3Scaling(8.5, 0.5, 16.5, 64.5)))
        self.assertEqual((scenario.model.head_width, scenario.model.kv_width), (2, 4))
        self.assertEqual(scenario.engine, EngineSettings(
            page_size=2, num_pages=9, kv_budget_bytes=1000, budget_tokens=4, max_running=2, batching="static",
            max_waiting=7, policy="shortest", preemption="swap", host_pages=3, prefix_sharing=True, use_cache=False,
            kv_quantization=None, seed=5, keep_events=5, max_unread=6, unread_seconds=7.5))
        self.assertEqual(scenario.quantization, QuantizationConfig(4, 4, False, "search"))
        sampling = SamplingParams(
            temperature=0.5, top_k=2, top_p=0.5, min_p=0.25, seed=3, logit_bias={2: -1.5}, repetition_penalty=1.5,
            presence_penalty=0.5, frequency_penalty=-0.5, min_tokens=2, ignore_eos=True, stop=("ab",), logprobs=3, n=2)
        self.assertEqual(scenario.requests[0], Request("a/b", (2, 3), 4, 1.5, -1, sampling, (4,), "s"))
        self.assertEqual(scenario.golden, Golden({"a/b": (2, 3)}, 0.125, "hand"))
        written = scenario.to_dict()
        del written["requests"][1]
        self.assertEqual(written, without(("requests", 1)))  # so that DOCUMENT indeed has every key

    def test_there_and_back(self) -> None:
        for document in (DOCUMENT, SMALLEST):
            scenario = parse_scenario(json.dumps(document))
            loose = json.dumps(document, indent=3, ensure_ascii=False)
            for text in (scenario.to_json(), json.dumps(scenario.to_dict()), loose):
                self.assertEqual(parse_scenario(text), scenario)
            self.assertEqual(parse_scenario(scenario.to_json()).to_json(), scenario.to_json())

    def test_what_is_left_out_has_its_default(self) -> None:
        scenario = parse_scenario(json.dumps(SMALLEST))
        self.assertEqual((scenario.engine, scenario.quantization, scenario.events), (EngineSettings(), None, ()))
        self.assertEqual((scenario.golden, scenario.description), (None, ""))
        self.assertEqual(scenario.requests, (Request("r", (0,), 0),))
        self.assertEqual((scenario.requests[0].arrival, scenario.requests[0].sampling), (0.0, SamplingParams()))

    def test_the_fixture(self) -> None:
        scenario = load_scenario(FIXTURE)
        self.assertEqual(parse_scenario(scenario.to_json()), scenario)
        self.assertEqual(scenario.folder, FIXTURE.parent)
        self.assertEqual(load_scenario(str(FIXTURE)), scenario)

    def test_compact_json_has_a_line_an_item(self) -> None:
        document = {"a": 1, "b": {"c": [1, 2], "d": {"e": {}}}, "f": [{"g": 1}, [2]], "h": {}, "i": [],
                    "j": "\u00e9\"\n"}
        text = compact_json(document)
        self.assertEqual(json.loads(text), document)
        self.assertTrue(text.startswith('{\n  "a": 1,\n  "b": {\n    "c": [1, 2],\n    "d": {"e": {}}\n  },\n'), text)


class RefusalTest(Case):
    def test_unknown_keys(self) -> None:
        objects = [place for place, value in places(DOCUMENT) if isinstance(value, dict)]
        objects.remove(("golden", "tokens"))  # the one whose keys are free
        self.assertEqual(len(objects), 18)
        for place in objects:
            for key in ("extra", "", "Name", "a/b~c", "\ud800", "x" * 1000):
                with self.subTest(place=place, key=key[:9]):
                    self.refused(edited((*place, key), 1), pointer((*place, key)), "unknown key; allowed: ")

    def test_missing_keys(self) -> None:
        for place, _ in places(DOCUMENT):
            if not place or isinstance(place[-1], int) or place == ("tokenizer", "specials"):
                continue  # without its specials the vocabulary has another size
            with self.subTest(place=place):
                if place in REQUIRED:
                    self.refused(without(place), pointer(place), "required and missing")
                else:
                    parse_scenario(json.dumps(without(place)))

    def test_wrong_types(self) -> None:
        others: tuple[Any, ...] = (True, 7, 7.5, "5", "", [], {}, [[]], {"a": 1})
        for place, value in places(DOCUMENT):
            for other in others:
                fits = type(other) is type(value) or (type(other), type(value)) == (int, float)
                if not fits:
                    with self.subTest(place=place, other=other):
                        self.refused(text_with(place, json.dumps(other)), pointer(place), "not")

    def test_null_only_where_it_means_something(self) -> None:
        for place, _ in places(DOCUMENT):
            with self.subTest(place=place):
                if place in NULLABLE:
                    parse_scenario(json.dumps(edited(place, None)))
                else:
                    self.refused(text_with(place, "null"), pointer(place), "not null")

    def test_three_point_zero_is_no_integer_and_sizes_are_bounded(self) -> None:
        integers = [place for place, value in places(DOCUMENT) if type(value) is int]
        self.assertGreater(len(integers), 25)
        for place in integers:
            for raw in ("3.0", "1e0", "1e18", "-10000000", str(2**63), str(10**31), "-" + "9" * 31, "9" * 5_000,
                        "1" + "0" * 100_000):
                with self.subTest(place=place, raw=raw[:9]):
                    self.refused(text_with(place, raw), pointer(place))

    def test_max_tokens(self) -> None:
        place = ("requests", 1, "max_tokens")
        for raw in (str(2**31 - 1), str(2**31), str(10**18), "1e18", "-1", "true", '"5"', "4.0", "null", "[4]"):
            with self.subTest(raw=raw):
                self.refused(text_with(place, raw), "/requests/1/max_tokens", "1048576")
        self.refused(edited(place, 9), "/requests/1", "prompt 1 + max_tokens 9 = 10", "context of 9", "at most 8")
        self.assertEqual(parse_scenario(json.dumps(edited(place, 0))).requests[1].max_tokens, 0)

    def test_numbers_that_are_none(self) -> None:
        for place, _ in places(DOCUMENT):
            for raw in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"):
                with self.subTest(place=place, raw=raw):
                    self.refused(text_with(place, raw), pointer(place))

    def test_duplicate_keys_at_any_depth(self) -> None:
        for place, value in places(DOCUMENT):
            if isinstance(value, dict):
                for key in value:
                    members = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
                    members.append(f"{json.dumps(key)}: {json.dumps(value[key])}")
                    with self.subTest(place=place, key=key):
                        raw = "{" + ", ".join(members) + "}"
                        self.refused(text_with(place, raw), pointer((*place, key)), "twice")

    def test_nesting(self) -> None:
        for place in ((), ("description",), ("requests", 0, "prompt_tokens"), ("golden", "tokens", "a/b")):
            for raw in ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 100_000):
                with self.subTest(place=place, raw=raw[:5]):
                    self.refused(text_with(place, raw), "", "levels deep")
        self.assertEqual(parse_scenario(json.dumps(edited(("description",), "[" * 60_000))).description, "[" * 60_000)
        self.refused(edited(("description",), "[" * 100_000), "/description", "100000")

    def test_lone_surrogates(self) -> None:
        for place, value in places(DOCUMENT):
            if isinstance(value, str):
                with self.subTest(place=place):
                    self.refused(edited(place, value[:-1] + "\ud800"), pointer(place))

    def test_values_outside_their_range(self) -> None:
        wrong: dict[Place, dict[str | int, tuple[Any, ...]]] = {
            (): {"version": (0, 2), "name": ("", "x" * 201)},
            ("model",): {"vocab_size": (0,), "heads": (0,), "kv_heads": (0,), "width": (0, 1), "layers": (0,),
                         "max_context": (0,), "norm_eps": (0, 1.5), "rope_theta": (0.5,)},
            ("weights",): {"source": ("url", "Seeded"), "sha256": ("f" * 63, "f" * 65)},
            ("tokenizer",): {"characters": ("",)},
            ("engine",): {"page_size": (0,), "num_pages": (0,), "kv_budget_bytes": (0,), "budget_tokens": (0,),
                          "max_running": (0,), "batching": ("Continuous",), "policy": ("lifo",),
                          "kv_quantization": ("int4", "int8"), "workers": (0, 65, 2), "seed": (-1,)},
            ("quantization",): {"bits": (3, 9), "group_size": (0,)},
            ("requests", 0): {"request_id": ("", "x" * 201), "prompt_tokens": ([],), "arrival": (-0.5,)},
            ("requests", 0, "prompt_tokens"): {1: (-1,)},
            ("requests", 0, "sampling"): {"temperature": (-1,), "top_p": (1.01,), "min_p": (-0.01,)},
            ("events", 0): {"step": (-1,), "cancel": ("",)},
            ("golden",): {"smallest_margin": (-1,)},
            ("golden", "tokens", "a/b"): {0: (-1,)},
        }
        for place, fields in wrong.items():
            for key, values in fields.items():
                for value in values:
                    with self.subTest(place=place, key=key, value=value):
                        self.refused(edited((*place, key), value), pointer((*place, key)))

    def test_rules_that_join_fields(self) -> None:
        for place, value, path, words in (
                (("model", "width"), 10, "/model/width", "multiple of heads 4"),
                (("model", "head_dim"), 3, "/model/head_dim", "even"),
                (("model", "rope_scaling", "high_freq_factor"), 0.5, "/model/rope_scaling/high_freq_factor", "above"),
                (("model", "rope_scaling"), {"kind": "factors", "factors": [1, 2]}, "/model/rope_scaling/factors", "1"),
                (("model", "kv_heads"), 3, "/model/kv_heads", "divide heads 4"),
                (("model", "width"), 4, "/model/width", "even"),
                (("model", "bos_token"), 5, "/model/bos_token", "vocabulary of 5"),
                (("model", "eos_tokens"), [1, 5], "/model/eos_tokens", "vocabulary of 5"),
                (("quantization", "bits"), 6, "/quantization", "8 or 4"),
                (("tokenizer", "characters"), "aba", "/tokenizer/characters", "'a'"),
                (("tokenizer", "specials"), ["<b>", "<b>"], "/tokenizer/specials", "twice"),
                (("tokenizer", "characters"), "abcd", "/tokenizer", "names 6 tokens"),
                (("requests", 1, "request_id"), "a/b", "/requests/1/request_id", "two requests have the id 'a/b'"),
                (("requests", 0, "prompt_tokens"), [2, 5], "/requests/0", "token 5 is outside"),
                (("requests", 0, "stop_tokens"), [5], "/requests/0", "token 5 is outside"),
                (("requests", 0, "prompt_tokens"), [2] * 6, "/requests/0", "prompt 6 + max_tokens 4 = 10"),
                (("events", 0, "cancel"), "d", "/events/0/cancel", "'d'"),
                (("golden", "tokens"), {"d": [1]}, "/golden/tokens/d", "no request"),
                (("golden", "tokens"), {"a/b": [5]}, "/golden/tokens/a~1b", "outside the vocabulary")):
            with self.subTest(place=place, value=value):
                document = without(("model", "head_dim")) if place == ("model", "width") else DOCUMENT
                self.refused(edited(place, value, document), path, words)

    def test_an_exact_fit_is_allowed(self) -> None:
        document = edited(("requests", 0, "prompt_tokens"), [4] * 5)
        self.assertEqual(parse_scenario(json.dumps(document)).requests[0].prompt_tokens, (4, 4, 4, 4, 4))

    def test_a_document_that_is_no_object(self) -> None:
        for text in ("[]", "1", '"x"', "null", "true"):
            self.refused(text, "", "expected an object")


class LoadTest(unittest.TestCase):
    """No exception but SchemaError escapes load_scenario."""

    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name) / "scenario.json"

    def load(self, content: bytes) -> Scenario | None:
        """What the file holds; None if it was refused, in one printable line."""
        self.path.write_bytes(content)
        try:
            return load_scenario(self.path)
        except SchemaError as error:
            self.assertTrue(str(error))
            return None

    def test_files_that_are_none(self) -> None:
        for path in (self.path, self.path.parent, self.path / "x", "", "a\0b", "x" * 5_000, None, 3, b"x", True):
            with self.subTest(path=path), self.assertRaises(SchemaError) as caught:
                load_scenario(path)  # type: ignore[arg-type]
            self.assertEqual(caught.exception.path, "")

    def test_encodings(self) -> None:
        text = json.dumps(DOCUMENT, ensure_ascii=False)
        self.assertEqual(self.load(text.encode()), parse_scenario(text))
        for content in (b"", b"\0", b"\xff", text.encode("latin-1"), text.encode("utf-16"), text.encode("utf-8-sig")):
            with self.subTest(content[:9]):
                self.assertIsNone(self.load(content))

    def test_every_truncation(self) -> None:
        content = parse_scenario(json.dumps(SMALLEST)).to_json().replace("small", "sm\u00e4ll").encode()
        self.assertEqual(self.load(content), self.load(content[:-1]))  # the last newline
        for length in range(len(content) - 1):
            self.assertIsNone(self.load(content[:length]), content[:length])

    def test_every_byte_deleted_doubled_or_replaced(self) -> None:
        """What still loads survives the round trip; the rest is a SchemaError whose path begins at the document."""
        text = json.dumps(SMALLEST, separators=(",", ":"))
        accepted = refused = 0
        for at in range(len(text)):
            for put in ("", text[at] * 2, *'"{}[]:,0-eN\\ \n', "\0", "\u00e9", "\ud800"):
                mutant = text[:at] + put + text[at + 1:]
                try:
                    scenario = parse_scenario(mutant)
                except SchemaError as error:
                    refused += 1
                    self.assertRegex(error.path, "^(/|$)")
                else:
                    accepted += 1
                    self.assertEqual(parse_scenario(scenario.to_json()), scenario, mutant)
        self.assertGreater(accepted, 100)
        self.assertGreater(refused, 1_000)

    def test_random_splices(self) -> None:
        """Pieces of the document moved, removed and repeated."""
        content = json.dumps(DOCUMENT, ensure_ascii=False).encode()
        for seed in range(400):
            rng = random.Random(seed)
            a, b, c = sorted(rng.randrange(len(content) + 1) for _ in range(3))
            moved = content[:a] + content[b:c] + content[a:b] + content[c:]
            for mutant in (content[:a] + content[b:], content[:b] + content[a:], moved):
                with self.subTest(seed=seed):
                    if scenario := self.load(mutant):
                        self.assertEqual(parse_scenario(scenario.to_json()), scenario)


class NounsTest(unittest.TestCase):
    """The dataclasses check what Python callers give them, without a JSON file in between."""

    def test_settings_are_overridden_like_the_file_they_come_from(self) -> None:
        settings = EngineSettings(page_size=4, seed=7)
        self.assertEqual(settings.override({"page_size": 8}), dataclasses.replace(settings, page_size=8))
        self.assertEqual(settings.override({}), settings)
        wrong: tuple[tuple[dict[str, Any], str], ...] = (
            ({"page_size": 0}, "/engine/page_size"), ({"page_size": True}, "/engine/page_size"),
            ({"pages": 1}, "/engine/pages"), ({"batching": None}, "/engine/batching"),
            ({"seed": 2**63}, "/engine/seed"))
        for change, path in wrong:
            with self.subTest(change=change), self.assertRaises(SchemaError) as caught:
                settings.override(change)
            self.assertEqual(caught.exception.path, path)


# ------------------------------------------------------------------------------------------ the JSON Schema


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """The part of JSON Schema, draft 2020-12, that our schema uses; a keyword outside that part fails the test."""
    number = type(value) in (int, float)
    types: dict[str, bool] = {
        "object": isinstance(value, dict), "array": isinstance(value, list), "string": isinstance(value, str),
        "boolean": isinstance(value, bool), "null": value is None, "number": number,
        "integer": number and value == value // 1}
    members = value if isinstance(value, dict) else {}
    properties = schema.get("properties", {})
    rules: dict[str, Callable[[Any], bool]] = {
        "type": lambda name: types[name],
        "enum": lambda options: value in options,
        "const": lambda option: value == option,
        "minimum": lambda low: not number or value >= low,
        "maximum": lambda high: not number or value <= high,
        "minLength": lambda least: not isinstance(value, str) or len(value) >= least,
        "maxLength": lambda most: not isinstance(value, str) or len(value) <= most,
        "minItems": lambda least: not isinstance(value, list) or len(value) >= least,
        "maxItems": lambda most: not isinstance(value, list) or len(value) <= most,
        "prefixItems": lambda items: not isinstance(value, list) or all(map(fits, value, items)),
        "items": lambda item: not isinstance(value, list) or all(fits(v, item) for v in value),
        "required": lambda keys: not isinstance(value, dict) or all(key in members for key in keys),
        "properties": lambda of: all(fits(members[key], of[key]) for key in of if key in members),
        "additionalProperties": lambda rule: all(rule and fits(members[k], rule) for k in members.keys() - properties),
        "anyOf": lambda schemas: any(fits(value, s) for s in schemas),
        "oneOf": lambda schemas: sum(fits(value, s) for s in schemas) == 1,
        "$schema": lambda _: True, "title": lambda _: True, "$defs": lambda _: True,
    }
    return all(rules[keyword](argument) for keyword, argument in schema.items())


def mutants() -> Iterator[dict[str, Any]]:
    """Documents with one value replaced, removed or added."""
    others: tuple[Any, ...] = (None, True, -1, 0, 1, 4, 7.5, 1e30, "", "5", "f" * 64, "x" * 300, [], [0], {}, {"a": 1})
    for place, value in places(DOCUMENT):
        if place:
            yield from (edited(place, other) for other in others)
            yield without(place)
        if isinstance(value, dict):
            yield edited((*place, "extra"), [1])


class JsonSchemaTest(unittest.TestCase):
    schema: Any = scenario_json_schema()

    def test_the_file_is_current(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            self.assertEqual(main([]), 0)
        self.assertEqual(SCHEMA.read_text(encoding="utf-8"), output.getvalue(), "run python3 scripts/make_fixture.py")
        self.assertEqual(json.loads(output.getvalue()), self.schema)

    def test_valid_documents_fit(self) -> None:
        for document in (DOCUMENT, SMALLEST, json.loads(FIXTURE.read_text(encoding="utf-8"))):
            self.assertTrue(fits(document, self.schema))

    def test_schema_and_parser_agree(self) -> None:
        """What does not fit does not load; what fits and does not load breaks a rule that joins fields or values."""
        joins = re.compile("vocabulary|multiple of|must divide|must be even|8 or 4|no request|twice|exceed the context|"
                           "names . tokens|until must|one process")
        loaded = neither = 0
        for document in mutants():
            try:
                parse_scenario(json.dumps(document))
            except SchemaError as error:
                neither += 1
                self.assertTrue(not fits(document, self.schema) or joins.search(str(error)), str(error))
            else:
                loaded += 1
                self.assertTrue(fits(document, self.schema), document)
        self.assertGreater(loaded, 150)
        self.assertGreater(neither, 600)

    def test_token_events(self) -> None:
        event = {"request_id": "r", "index": 0, "token": 3, "text": "a", "step": 1, "time": 0.5}
        shape = self.schema["$defs"]["token_event"]
        self.assertTrue(fits(event, shape))
        self.assertTrue(fits({**event, "token": None, "finish_reason": "cancelled"}, shape))
        for key, value in (("finish_reason", "bored"), ("logprob", 0.5), ("index", -1), ("extra", 1)):
            self.assertFalse(fits({**event, key: value}, shape))


@needs("dev", "jsonschema")
class SecondReaderTest(unittest.TestCase):
    def test_jsonschema_agrees_with_the_small_reader_above(self) -> None:
        from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

        schema = scenario_json_schema()
        Draft202012Validator.check_schema(schema)
        reader = Draft202012Validator(schema)
        for document in (DOCUMENT, SMALLEST, *mutants()):
            self.assertEqual(reader.is_valid(document), fits(document, schema), document)


if __name__ == "__main__":
    unittest.main()
