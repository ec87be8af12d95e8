"""Public traces: reading both formats, refusing malformed rows, and making requests of them."""

from __future__ import annotations

import json
import tempfile
import unittest
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from starter.errors import SchemaError
from starter.schema import ModelConfig, Request
from starter.workloads.draw import DEFAULT_MODEL, requests_from_trace
from starter.workloads.traces import read_trace
from tests.paths import ROOT

PUBLIC = ROOT.parent / "shared" / "traces"
AZURE = ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
         "2023-11-16 23:59:59.9799600,4808,10\r\n"
         "2023-11-17 00:00:00.1000000,64,640\r\n"
         "2023-11-17 00:00:00,63,0\r\n"
         "2023-11-17 00:00:00.2799600,129,65\r\n")
MOONCAKE: list[dict[str, Any]] = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 128, "hash_ids": [0, 7, 8]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 64, "hash_ids": [0, 7, 9]},
    {"timestamp": 3099, "input_length": 600, "output_length": 1, "hash_ids": [0, 8]},
    {"timestamp": 3100, "input_length": 512, "output_length": 200, "hash_ids": [5]},
]


def model(vocab_size: int, max_context: int) -> ModelConfig:
    return ModelConfig(vocab_size, width=2, layers=1, heads=1, kv_heads=1, ffn_width=1, max_context=max_context,
                       bos_token=0)


WIDE = model(200_000, 4_096)


class Case(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name) / "trace"

    def write(self, content: str | list[dict[str, Any]]) -> Path:
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        self.path.write_bytes(text.encode())
        return self.path

    def lengths(self, content: str, config: ModelConfig = WIDE, **options: Any) -> list[tuple[int, int]]:
        """(prompt length, max_tokens) of every request."""
        requests = requests_from_trace(self.write(content), config, **options)
        return [(len(request.prompt_tokens), request.max_tokens) for request in requests]

    def arrivals(self, content: str | list[dict[str, Any]], **options: Any) -> list[float]:
        return [request.arrival for request in requests_from_trace(self.write(content), DEFAULT_MODEL, **options)]


class ReadTest(Case):
    def test_azure(self) -> None:
        rows = read_trace(self.write(AZURE))
        self.assertEqual([row.input_length for row in rows], [4808, 64, 63, 129])
        self.assertEqual([row.output_length for row in rows], [10, 640, 0, 65])
        gaps = [row.timestamp - rows[0].timestamp for row in rows]
        self.assertEqual(gaps, [0, Fraction("120.04"), Fraction("20.04"), 300])
        ids = [hash_id for row in rows for hash_id in row.hash_ids]
        self.assertEqual(len(ids), len(set(ids)))  # nothing is shared
        self.assertEqual(read_trace(self.write(AZURE.replace("\r\n", "\n")[:-1])), rows)

    def test_mooncake(self) -> None:
        rows = read_trace(self.write(MOONCAKE))
        self.assertEqual([vars(row) for row in rows], [{**row, "hash_ids": tuple(row["hash_ids"])} for row in MOONCAKE])

    def test_no_more_is_read_than_asked_for(self) -> None:
        for content in (AZURE, [*MOONCAKE]):
            text = self.write(content).read_text(encoding="utf-8") + "garbage\n"
            for limit in (1, 4):
                self.assertEqual(len(read_trace(self.write(text), limit)), limit)
            with self.assertRaises(SchemaError):
                read_trace(self.write(text), 5)

    def refused(self, content: str | bytes, line: int, path: str = "") -> None:
        self.path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with self.assertRaises(SchemaError) as caught:
            read_trace(self.path)
        self.assertEqual(caught.exception.path, path)
        self.assertIn(f"{self.path}, line {line}: ", str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def test_malformed_azure_rows(self) -> None:
        good = "2023-11-16 18:17:03.9799600,4808,10"
        for old, new in ((",10", ""), (",10", ",10,1"), ("4808", "-1"), ("4808", "1.5"), ("4808", ""), ("4808", "x"),
                         ("4808", "9" * 5_000), ("4808", "\u0664"), ("-11-", "-13-"), ("-16", "-31"), ("18:", "24:"),
                         ("2023", "0000"), (" ", "T"), (".9", ",9"), ("03.9799600", "03."), (good, "0,1,2"),
                         (good, "{}"), (good, AZURE.splitlines()[0])):
            row = good.replace(old, new)
            with self.subTest(row=row[:50]):
                self.refused(f"{AZURE}{row}\r\n{good}\r\n", 6)
        self.refused(AZURE.encode() + b"\xff\n", 6)

    def test_malformed_mooncake_rows(self) -> None:
        good = MOONCAKE[0]
        before = json.dumps(good) + "\n"
        wrong: dict[str, tuple[Any, ...]] = {
            "timestamp": (-1, 1.5, "1"), "input_length": (None, -5, 10**12), "output_length": (True, 2.0),
            "hash_ids": ([], [1, 2], 7), "hash_ids/2": ([1, 2, "3"], [1, 2, -3]), "prompt": ("x",),
        }
        for path, values in wrong.items():
            for value in values:
                with self.subTest(path=path, value=value):
                    self.refused(before + json.dumps({**good, path.split("/")[0]: value}), 2, f"/{path}")
        self.refused(before + json.dumps({**good, "input_length": 0, "hash_ids": []}), 2, "/hash_ids")
        for key in good:
            with self.subTest(missing=key):
                self.refused(before + json.dumps({k: v for k, v in good.items() if k != key}), 2, f"/{key}")
        self.refused(before + before.replace("3000", "NaN"), 2, "/timestamp")
        for row in ("[]", "{", "1", before[:-2], before.strip() + "}", "[" * 100_000, AZURE):
            with self.subTest(row=row[:50]):
                self.refused(before + row, 2)
        self.refused(before.encode() + b"\xff\n", 2)

    def test_a_file_of_another_kind(self) -> None:
        for content in ("a,b,c\n1,2,3\n", "[]", "\n", "TIMESTAMP,ContextTokens\n", "\ufeff" + AZURE, "timestamp"):
            with self.subTest(content=content[:30]):
                self.refused(content, 1)
        for content in ("", AZURE.splitlines()[0]):
            with self.assertRaisesRegex(SchemaError, "no request"):
                read_trace(self.write(content))

    def test_files_that_cannot_be_read(self) -> None:
        for path in (self.path, self.path.parent, "a\0b"):
            with self.subTest(path=path), self.assertRaises(SchemaError):
                read_trace(path)


class RequestsTest(Case):
    def test_lengths_are_divided_and_at_least_one(self) -> None:
        for divide, wanted in ((64, [(75, 1), (1, 10), (1, 1), (2, 1)]), (10, [(480, 1), (6, 64), (6, 1), (12, 6)]),
                               (10**6, [(1, 1)] * 4)):
            self.assertEqual(self.lengths(AZURE, divide_lengths=divide), wanted)

    def test_lengths_are_cut_to_the_context(self) -> None:
        """The output to half of the context or what the prompt leaves, the prompt to the rest."""
        for context, wanted in ((1, [(1, 0), (1, 0)]), (2, [(1, 1), (1, 1)]), (11, [(6, 5), (6, 5)]),
                                (20, [(10, 10), (10, 10)]), (200, [(190, 10), (64, 136)]),
                                (5448, [(4808, 10), (64, 640)])):
            with self.subTest(context=context):
                self.assertEqual(self.lengths(AZURE, model(9, context), divide_lengths=1, limit=2), wanted)

    def test_arrival_steps_are_exact(self) -> None:
        for step, wanted in ((0.1, [0, 1, 0, 3]), (0.02004, [0, 5, 1, 14]), (0.3, [0, 0, 0, 1]), (1, [0, 0, 0, 0]),
                             (1e-6, [0, 120_040, 20_040, 300_000])):
            with self.subTest(step=step):
                self.assertEqual(self.arrivals(AZURE, step_seconds=step), wanted)
        self.assertEqual(self.arrivals(MOONCAKE), [0, 0, 0, 1])

    def test_a_row_before_the_first(self) -> None:
        rows = [{**MOONCAKE[0], "timestamp": time} for time in (500, 300, 700)]
        self.assertEqual(self.arrivals(rows), [2, 0, 4])

    def prefix(self, one: Request, other: Request) -> int:
        """How many leading tokens are equal."""
        pairs = list(zip(one.prompt_tokens, other.prompt_tokens))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))

    def test_equal_leading_ids_are_equal_leading_tokens(self) -> None:
        """The vocabulary is so large that other tokens are equal by no chance worth mentioning."""
        self.write(MOONCAKE)
        for divide in (1, 7, 64, 100, 512, 600):
            with self.subTest(divide=divide):
                a, b, c, d = requests_from_trace(self.path, WIDE, divide_lengths=divide)
                shared = -(-1024 // divide)  # how many multiples of divide lie in the two blocks that a and b share
                self.assertEqual(self.prefix(a, b), min(shared, len(a.prompt_tokens)))
                self.assertEqual(self.prefix(a, c), min(-(-512 // divide), len(c.prompt_tokens)))
                self.assertEqual(self.prefix(a, d), 0)
                other_seed = requests_from_trace(self.path, WIDE, divide_lengths=divide, seed=1)
                self.assertEqual(self.prefix(a, other_seed[0]), 0)
        a, _, c, _ = requests_from_trace(self.path, WIDE, divide_lengths=1)
        self.assertEqual(a.prompt_tokens[1024:1100], c.prompt_tokens[512:588])  # block 8 is the same wherever it stands

    def test_azure_prompts_share_nothing(self) -> None:
        requests = requests_from_trace(self.write(AZURE), WIDE, divide_lengths=1)
        tokens = [token for request in requests for token in request.prompt_tokens]
        self.assertGreater(len(set(tokens)), 0.95 * len(tokens))  # of 4,300 draws from 200,000 about 46 meet by chance

    def test_tokens_are_in_the_vocabulary_and_special_to_nobody(self) -> None:
        for content in (AZURE, MOONCAKE):
            for i, request in enumerate(requests_from_trace(self.write(content), DEFAULT_MODEL, divide_lengths=3), 1):
                request.check_against(DEFAULT_MODEL)
                self.assertFalse({0, 1} & set(request.prompt_tokens))
                self.assertEqual(request.request_id, f"r{i}")

    def test_options(self) -> None:
        self.write(MOONCAKE)
        wrong: dict[str, tuple[Any, ...]] = {
            "divide_lengths": (0, -1, 1.5, True, "64", None), "step_seconds": (0, -1, float("nan"), "1", None),
            "limit": (0, -1, 2.0, True),
        }
        for name, values in wrong.items():
            for value in values:
                with self.subTest(name=name, value=value), self.assertRaises(SchemaError) as caught:
                    requests_from_trace(self.path, DEFAULT_MODEL, **{name: value})
                self.assertEqual(caught.exception.path, f"/{name}")
        rows = [{**MOONCAKE[0], "timestamp": time} for time in (0, 2_000_000)]
        self.assertEqual(self.arrivals(rows, step_seconds=2e-6), [0, 1e9])
        with self.assertRaisesRegex(SchemaError, "step 2000000000; .*longer"):
            self.arrivals(rows, step_seconds=1e-6)


@unittest.skipUnless(PUBLIC.is_dir(), "SKIPPED: the public traces are not beside this repository")
class PublicTracesTest(unittest.TestCase):
    def test_azure(self) -> None:
        for name, rows, seconds in (("conv", 8_057, 1_526), ("code", 8_264, 3_145)):
            path = PUBLIC / f"azure_llm_2023_{name}_head.csv"
            lines = path.read_text(encoding="utf-8").splitlines()[1:]
            requests = requests_from_trace(path, DEFAULT_MODEL, step_seconds=1)
            self.assertEqual(len(requests), rows)
            self.assertIn(requests[-1].arrival, (seconds - 1, seconds))
            for line, request in list(zip(lines, requests))[::500]:
                time, prompt, output = line.split(",")
                elapsed = datetime.fromisoformat(time[:26]) - datetime.fromisoformat(lines[0][:26])
                self.assertLessEqual(abs(request.arrival - elapsed.total_seconds()), 1)
                self.assertEqual(request.max_tokens, max(1, int(output) // 64))
                self.assertEqual(len(request.prompt_tokens), min(max(1, int(prompt) // 64), 256 - request.max_tokens))

    def test_mooncake(self) -> None:
        path = PUBLIC / "mooncake_fast25_conversation_head.jsonl"
        requests = requests_from_trace(path, WIDE)
        self.assertEqual(len(requests), 1_168)
        self.assertEqual(len({request.prompt_tokens[:8] for request in requests}), 1)  # all share block 0
        self.assertEqual(requests_from_trace(path, WIDE, limit=20), requests[:20])


if __name__ == "__main__":
    unittest.main()
