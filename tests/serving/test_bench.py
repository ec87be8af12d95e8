"""A scenario against a server: what is sent, what is measured, and what is said where something is wrong."""

from __future__ import annotations

import json
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from starter import load_scenario
from starter.base.console import guarded
from starter.engine import InferenceEngine
from starter.serving import bench as program
from starter.serving.api import Api, Settings
from starter.serving.bench import Answered, Target
from starter.serving.server import Server
from tests.paths import FIXTURE
from tests.support import Run, run_main

SCENARIO = load_scenario(FIXTURE)
OURS = [request for request in SCENARIO.requests if request.max_tokens]


def run_bench(*arguments: object) -> Run:
    return run_main(lambda given: guarded(lambda: program.bench(given)), *arguments)


class AgainstOurServer(unittest.TestCase):
    def setUp(self) -> None:
        self.engine = InferenceEngine.from_scenario(SCENARIO)
        self.addCleanup(self.engine.close)
        self.engine.start()
        self.server = Server(("127.0.0.1", 0), Api(self.engine, Settings("tiny")))
        self.server.start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.drain, 5.0)
        self.url = f"http://127.0.0.1:{self.server.port}/v1"

    def bench(self, *options: object) -> tuple[int, dict[str, Any]]:
        result = run_bench("--target", self.url, FIXTURE, "--step-seconds", 0.001, "--json", *options)
        self.assertEqual(result.err, "")
        return result.code, json.loads(result.out)

    def test_every_request_is_sent_and_counted(self) -> None:
        for send in ("text", "tokens"):
            code, figures = self.bench("--send", send)
            self.assertEqual((code, figures["model"], figures["errors"]), (0, "tiny", {}))
            self.assertEqual((figures["requests"], figures["answered"]), (len(OURS), len(OURS)))
            self.assertGreater(figures["output_tokens"], 150)
            self.assertAlmostEqual(figures["tokens_per_second"], figures["output_tokens"] / figures["seconds"])
            self.assertEqual(figures["latency"]["count"], len(OURS))
            self.assertLessEqual(figures["ttft"]["p50"], figures["latency"]["p50"])
            self.assertIsNone(figures["goodput"])
        self.assertEqual((self.engine.active, self.engine.kv.used_pages), ((), 0))

    def test_the_tokens_are_those_of_the_scenario(self) -> None:
        """Sent as numbers, with the scenario's options: as many tokens as the golden run has."""
        assert SCENARIO.golden
        _, figures = self.bench("--send", "tokens")
        golden = sum(len(SCENARIO.golden.tokens[request.request_id]) for request in OURS)
        self.assertEqual(figures["output_tokens"], golden)

    def test_goodput_counts_those_within_the_limits(self) -> None:
        generous, strict = (self.bench("--ttft", limit)[1] for limit in (1e5, 0.0))
        self.assertAlmostEqual(generous["goodput"], len(OURS) / generous["seconds"])
        self.assertLess(strict["goodput"], generous["goodput"])

    def test_few_connections_make_requests_late(self) -> None:
        figures = self.bench("--connections", 1)[1]
        self.assertEqual(figures["answered"], len(OURS))
        self.assertGreater(figures["late"], 0)

    def test_what_is_printed(self) -> None:
        result = run_bench("--target", self.url, FIXTURE, "--step-seconds", 0, "--ttft", 100)
        self.assertEqual((result.code, result.err), (0, ""))
        self.assertRegex(result.out, rf"(?s)ttft +[\d.]+ .*tpot.*latency.*\n{len(OURS)} of {len(OURS)} requests were "
                                     r"answered in .*tokens/s.*\ngoodput ")

    def test_errors_are_counted_by_what_was_wrong(self) -> None:
        code, figures = self.bench("--model", "other")
        self.assertEqual((code, figures["answered"]), (1, 0))
        self.assertEqual(figures["errors"], {"404: there is no model 'other'; this server has 'tiny'": len(OURS)})


class AgainstOddServers(unittest.TestCase):
    def serve(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                with suppress(OSError):
                    answer(self)

            def do_GET(self) -> None:
                answer(self)

            def log_message(self, *arguments: object) -> None:
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return f"http://127.0.0.1:{server.server_address[1]}/v1"

    def errors(self, raw: bytes, status: int = 200, wait: float = 0.0, patience: float = 30.0) -> dict[str, int]:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(status)
            handler.end_headers()
            handler.wfile.write(raw)
            time.sleep(wait)

        result = run_bench("--target", self.serve(answer), FIXTURE, "--model", "m", "--step-seconds", 0, "--json",
                           "--timeout", patience)
        self.assertEqual((result.code, result.err), (1, ""))
        errors: dict[str, int] = json.loads(result.out)["errors"]
        self.assertEqual(sum(errors.values()), len(OURS))
        return errors

    def test_what_is_wrong_with_an_answer_is_said(self) -> None:
        text = b'data: {"choices": [{"text": "a"}]}\n\n'
        for raw, status, words in (
            (text, 200, "the stream ended without [DONE]"), (b"data: {\n\n", 200, "an event that is not JSON"),
            (b"data: 7\n\n", 200, "an event that is no object"),
            (b"data: [DONE]\n\n", 200, "an answer without a token"),
            (text + b'data: {"error": {"message": "out of\\nluck"}}\n\n', 200, "in the stream: out of luck"),
            (b'{"error": {"message": "slow down"}}', 429, "429: slow down"), (b"<html>", 502, "502: <html>"),
        ):
            with self.subTest(words=words):
                self.assertEqual(list(self.errors(raw, status)), [words])

    def test_a_server_that_falls_silent(self) -> None:
        self.assertEqual(list(self.errors(b'data: {"choices": [{"text": "a"}]}\n\n', wait=2.0, patience=0.5)),
                         ["no news for 0.5 seconds"])

    def test_models(self) -> None:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(b'{"data": [{"id": "a"}, {"id": "b"}]}')

        result = run_bench("--target", self.serve(answer), FIXTURE)
        self.assertEqual((result.code, result.err),
                         (2, "error: the server has the models a, b; say which by --model\n"))


class WrongUse(unittest.TestCase):
    def test_it_is_said_in_a_line(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            none = Path(folder, "none.json")
            for arguments, words in (
                (("--target", "ftp://x", FIXTURE), "--target must be such as http"),
                (("--target", "http://x:y/v1", FIXTURE), "--target http://x:y/v1: "),
                (("--target", "127.0.0.1:8000", FIXTURE), "--target must be such as"),
                (("--target", "http://127.0.0.1:9/v1", FIXTURE), "is the server running?"),
                (("--target", "http://x/v1", none), "cannot read"),
                (("--target", "http://x/v1", FIXTURE, "--connections", 0), "--connections must be from 1"),
                (("--target", "http://x/v1", FIXTURE, "--ttft", -1), "--ttft must be from 0"),
            ):
                result = run_bench(*arguments)
                self.assertEqual((result.code, result.out, result.err.count("\n")), (2, "", 1), result)
                self.assertIn(words, result.err)

    def test_times(self) -> None:
        answer = Answered(0.0, first=1.0, last=3.0, end=3.5, tokens=5)
        self.assertEqual(answer.tpot, 0.5)
        self.assertEqual([answer.within(*limits) for limits in ((1.0, 0.5), (0.9, None), (None, 0.4), (None, None))],
                         [True, False, False, True])
        self.assertIsNone(Answered(0.0, first=1.0, last=1.0, tokens=1).tpot)
        self.assertEqual(Target.of("https://host/v1/", None, 1.0), Target(True, "host", None, "/v1", None, 1.0))


if __name__ == "__main__":
    unittest.main()
