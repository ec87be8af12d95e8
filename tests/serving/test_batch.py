"""A file of requests: the server's answers, each once, wherever they are computed and however often it is started."""

from __future__ import annotations

import json
import os
import tempfile
import unittest
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from starter import load_scenario
from starter.base.console import guarded
from starter.engine import InferenceEngine
from starter.serving import batch as program
from tests.extras import needs
from tests.paths import FIXTURE
from tests.support import Run, run_main

SCENARIO = load_scenario(FIXTURE)


def request(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions",
            "body": {"prompt": [1, 2], "max_tokens": 4, **body}}


REQUESTS = [*(request(f"r{i}", prompt=[i % 30 + 1, 2], temperature=i % 2) for i in range(70)), request("wrong", mood=1)]


class BatchCase(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.source, self.target = Path(folder.name, "in.jsonl"), Path(folder.name, "out.jsonl")
        self.write(REQUESTS)

    def write(self, requests: list[Any]) -> None:
        self.source.write_text("".join(json.dumps(one) + "\n" for one in requests), encoding="utf-8")

    def run_batch(self, *options: object) -> Run:
        return run_main(lambda arguments: guarded(lambda: program.batch(arguments)), self.source, self.target,
                        "--fixture", FIXTURE, *options)

    def answers(self) -> dict[str, Any]:
        """By custom_id; none is there twice."""
        lines = [json.loads(line) for line in self.target.read_text(encoding="utf-8").splitlines()]
        self.assertEqual(len({line["custom_id"] for line in lines}), len(lines))
        for line in lines:
            line["response"]["body"].pop("created", None)
        return {line["custom_id"]: line for line in lines}

    def refused(self, words: str, *options: object) -> None:
        result = self.run_batch(*options)
        self.assertEqual((result.code, result.err.count("\n")), (2, 1), result)
        self.assertRegex(result.err, words)


class AnswersTest(BatchCase):
    def test_each_request_is_answered_once_as_the_engine_would(self) -> None:
        result = self.run_batch()
        self.assertEqual((result.code, result.err), (1, ""))
        self.assertEqual(result.out, f"70 answers and 1 errors were added to {self.target}\n")
        answers = self.answers()
        self.assertEqual(answers.keys(), {one["custom_id"] for one in REQUESTS})
        with InferenceEngine.from_scenario(SCENARIO) as engine:
            for one in REQUESTS[:70:2]:
                tokens = engine.generate([one["body"]["prompt"]], 4)[0]
                response = answers[one["custom_id"]]["response"]
                self.assertEqual(response["status_code"], 200)
                self.assertEqual(response["body"]["choices"][0]["text"], engine.tokenizer.decode(tokens))
        wrong = answers["wrong"]["response"]
        self.assertEqual((wrong["status_code"], wrong["body"]["error"]["param"]), (400, "mood"))

    def test_a_run_that_was_stopped_goes_on(self) -> None:
        """Cut off at any byte: between lines, or within one."""
        self.write(REQUESTS[:5])
        self.run_batch()
        whole, expected = self.target.read_bytes(), self.answers()
        for cut in (0, 1, len(whole) // 3, whole.index(b"\n"), whole.index(b"\n") + 1, len(whole) - 1, len(whole)):
            self.target.write_bytes(whole[:cut])
            result = self.run_batch()
            self.assertEqual(result.code, 0, result)
            self.assertEqual(self.answers(), expected)
            self.assertEqual("were answered before" in result.out, whole[:cut].count(b"\n") > 0)

    def test_it_does_not_matter_where_it_runs(self) -> None:
        self.run_batch()
        expected = self.answers()
        self.target.unlink()
        result = self.run_batch("--processes", 2)
        self.assertEqual((result.code, result.err), (1, ""))
        self.assertEqual(self.answers(), expected)

    @needs("cluster", "distributed")
    def test_on_a_cluster(self) -> None:
        from distributed import LocalCluster
        self.write(REQUESTS[:40])
        self.run_batch()
        expected = self.answers()
        self.target.unlink()
        with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as cluster:
            result = self.run_batch("--cluster", cluster.scheduler_address)
        self.assertEqual((result.code, result.err), (0, ""))
        self.assertEqual(self.answers(), expected)

    def test_a_worker_that_dies_loses_nothing(self) -> None:
        dying = iter((True, False))
        result = self.with_pools(dying)
        self.assertEqual(result.code, 1, result)
        self.assertEqual(len(self.answers()), 71)

    def test_workers_that_keep_dying(self) -> None:
        """It ends, says where, and what was answered is kept."""
        result = self.with_pools(iter([True] * 100))
        self.assertEqual((result.code, result.err.count("\n")), (2, 1), result)
        self.assertRegex(result.err, "3 workers died while they answered 'r32' and the next requests; .*start again")
        self.assertIn(len(self.answers()), (32, 39))
        result = self.run_batch()
        self.assertEqual((result.code, len(self.answers())), (1, 71))

    def with_pools(self, dying: Any) -> Run:
        """Each pool breaks, where ``dying`` says so, at the part that begins with r32."""
        class Pool(ThreadPoolExecutor):
            def __init__(self) -> None:
                super().__init__(1)
                self.dies = next(dying)

            def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
                if self.dies and arguments[1][0].custom_id == "r32":
                    broken: Future[Any] = Future()
                    broken.set_exception(BrokenProcessPool("killed"))
                    return broken
                return super().submit(function, *arguments, **named)

        @contextmanager
        def place(options: object) -> Iterator[tuple[Pool, int]]:
            with Pool() as pool:
                yield pool, 1

        with mock.patch.object(program, "_place", place):
            return self.run_batch()


class RefusedTest(BatchCase):
    def test_what_is_wrong_with_the_file_is_said_before_anything_is_computed(self) -> None:
        good = request("a")
        for wrong, words in (
            ([good, good], "line 2: line 1 has the custom_id 'a', too"), ([7], "line 1 must be an object"),
            ([{**good, "custom_id": ""}], "custom_id must be a text"), ([{**good, "custom_id": 3}], "custom_id"),
            ([{**good, "method": "GET"}], "method must be 'POST', not"),
            ([{**good, "url": "/v1/embeddings"}], "url must be"),
            ([{**good, "body": []}], "body must be an object"), ([{**good, "body": {"stream": True}}], "not streamed"),
        ):
            with self.subTest(words=words):
                self.write(wrong)
                self.refused(words)
                self.assertFalse(self.target.exists())
        for raw, words in ((b"{", "line 1: not JSON"), (b"\xff", "line 1 is not UTF-8"), (b'{"a": NaN}', "NaN")):
            self.source.write_bytes(raw)
            self.refused(words)
        self.source.unlink()
        self.refused("cannot read .*in.jsonl: No such file")

    def test_empty_lines_and_a_byte_order_mark(self) -> None:
        self.source.write_bytes(b"\xef\xbb\xbf" + json.dumps(request("a")).encode() + b"\r\n\r\n \n")
        self.assertEqual((self.run_batch().code, list(self.answers())), (0, ["a"]))

    def test_the_file_of_answers_must_be_one(self) -> None:
        for text in ("a poem\n", '{"custom_id": "a"}\n', "[]\n", '{"custom_id": 1, "response": {}}\n'):
            self.target.write_text(text, encoding="utf-8")
            self.refused("out.jsonl, line 1 is no answer of a batch")
            self.assertEqual(self.target.read_text(encoding="utf-8"), text)
        self.target = self.source
        self.refused("is given twice")
        self.target = self.source.parent / "none" / "out.jsonl"
        self.refused("cannot write")

    def test_the_requests_are_never_replaced(self) -> None:
        """By whatever name the file of answers has."""
        self.source.write_text(json.dumps(request("a")), encoding="utf-8")  # without a line end, as a torn answer
        before = self.source.read_bytes()
        link = self.source.with_name("link.jsonl")
        try:
            link.symlink_to(self.source)
        except OSError:  # Windows, without the right to make one
            link = self.source.parent / ".." / self.source.parent.name / self.source.name
        self.target = link
        self.refused("is given twice")
        self.assertEqual(self.source.read_bytes(), before)

    def test_a_file_that_is_something_else_stays_as_it_is(self) -> None:
        for text in ('{"my": "precious config"}', "a poem", "{", '{"id": "mine"'):
            self.target.write_text(text, encoding="utf-8")
            if program.BEGINNING.startswith(text.encode()):
                continue
            self.refused("out.jsonl, line 1 is no answer of a batch")
            self.assertEqual(self.target.read_text(encoding="utf-8"), text)

    def test_what_is_no_file(self) -> None:
        folder = self.source.parent / "folder"
        folder.mkdir()
        target, self.target = self.target, folder
        self.refused("folder is not a file")
        self.target, self.source = target, folder
        self.refused("folder is not a file")
        if Path(os.devnull).exists() and os.name != "nt":
            self.write_to(REQUESTS[:1])
            self.target = Path(os.devnull)
            self.refused("is not a file")

    def write_to(self, requests: list[Any]) -> None:
        self.source = self.target.with_name("again.jsonl")
        self.write(requests)

    def test_two_runs_do_not_share_a_file(self) -> None:
        self.target.touch()
        with program.open_answers(self.target) as file:
            program.lock(file, self.target)
            self.refused("another run is adding to")
        self.write(REQUESTS[:2])
        self.assertEqual(self.run_batch().code, 0)

    def test_a_body_may_not_name_its_request(self) -> None:
        """What a sample draws depends on the custom_id alone; and two lines may not clash."""
        self.write([request("a", request_id="same", temperature=1), request("b", request_id="same", temperature=1)])
        self.assertEqual(self.run_batch().code, 0)
        named = self.answers()
        self.target.unlink()
        self.write([request("a", temperature=1), request("b", temperature=1)])
        self.run_batch()
        self.assertEqual(self.answers(), named)

    def test_options(self) -> None:
        self.refused("--processes must be from 1 to 64", "--processes", 0)
        self.refused("--backend: there is no backend 'x'", "--backend", "x")


if __name__ == "__main__":
    unittest.main()
