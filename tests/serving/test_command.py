"""``python3 -m starter serve`` as a process: a fresh clone answers, a signal drains it, bad options are one line."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import unittest
from collections.abc import Iterator
from contextlib import contextmanager

from starter import __main__ as program
from tests.paths import FIXTURE, ROOT
from tests.support import run_main
from tests.wings import needs_wing

QUATRAINS = ROOT / "fixtures" / "quatrains.json"


@contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process, and its port."""
    command = [sys.executable, "-m", "starter", "serve", "--port", "0", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
                          env={**os.environ, "PYTHONUTF8": "1"}) as process:
        try:
            line = process.stdout.readline()  # type: ignore[union-attr]
            found = re.search(r" is served at http://127\.0\.0\.1:(\d+)/v1 ", line)
            if not found:
                raise AssertionError(line + process.communicate(timeout=20)[1])
            yield process, int(found[1])
        finally:
            process.kill()


@contextmanager
def completing(port: int, **fields: object) -> Iterator[http.client.HTTPResponse]:
    """The answer, whose body is not read yet."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    client.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
    try:
        with client.getresponse() as answer:
            yield answer
    finally:
        client.close()


@unittest.skipIf(os.name == "nt", "a process cannot be sent SIGTERM there")
class ProcessTest(unittest.TestCase):
    @needs_wing("checkpoints")
    def test_a_poem_and_a_signal(self) -> None:
        """A poem streams; SIGTERM lets another come to its end; exit code 0."""
        with serving("--fixture", str(QUATRAINS)) as (process, port):
            fields = {"prompt": "春", "max_tokens": 40, "temperature": 0.8, "seed": 5}
            with completing(port, **fields) as answer:
                whole = json.loads(answer.read())["choices"][0]
            with completing(port, **fields, stream=True) as answer:
                first = answer.read(1)
                process.send_signal(signal.SIGTERM)
                body = (first + answer.read()).decode("utf-8")
            chunks = [json.loads(line[6:])["choices"][0] for line in body.split("\n") if line.startswith("data: {")]
            self.assertEqual("".join(chunk["text"] for chunk in chunks), whole["text"])
            self.assertEqual(chunks[-1]["finish_reason"], whole["finish_reason"])
            out, err = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 0)
        self.assertTrue(out.endswith("\nended\n"), out)
        self.assertNotIn("春", err)
        self.assertEqual(err.count("POST /v1/completions 200"), 2)

    def test_two_signals_cancel(self) -> None:
        with serving("--fixture", str(FIXTURE), "--backend", "reference", "--model-name", "mine") as (process, port):
            client = socket.create_connection(("127.0.0.1", port), timeout=30)
            body = b'{"prompt": "once", "max_tokens": 120, "n": 8, "stream": true, "model": "mine", "ignore_eos": true}'
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            received = client.recv(1)
            process.send_signal(signal.SIGTERM)
            self.assertRegex(process.stdout.readline(), r"\Adraining: \d requests")  # type: ignore[union-attr]
            process.send_signal(signal.SIGTERM)
            while data := client.recv(65_536):
                received += data
            client.close()
            self.assertIn(b"data: [DONE]", received)
            process.communicate(timeout=30)
            self.assertEqual(process.returncode, 0)


class OptionsTest(unittest.TestCase):
    def test_what_is_refused(self) -> None:
        """In one line that names the option or the file."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            for options, problem in (
                    (("--fixture", "nowhere.json"), "nowhere.json"),
                    (("--fixture", FIXTURE, "--port", 70_000), "--port must be from 0 to 65535, not 70000"),
                    (("--fixture", FIXTURE, "--max-connections", 0), "--max-connections"),
                    (("--fixture", FIXTURE, "--max-seconds", "nan"), "--max-seconds"),
                    (("--fixture", FIXTURE, "--api-key", ""), "--api-key is empty"),
                    (("--fixture", FIXTURE, "--num-pages", 0), "--num-pages"),
                    (("--fixture", FIXTURE, "--quantization", "stored"), "--quantization stored"),
                    (("--fixture", FIXTURE, "--no-cache", "--prefix-sharing"), "--no-cache"),
                    (("--fixture", FIXTURE, "--host", "203.0.113.7"), "--host 203.0.113.7"),
                    (("--fixture", FIXTURE, "--port", taken.getsockname()[1]), "--port ")):
                with self.subTest(options=options):
                    result = run_main(program.main, "serve", *options)
                    self.assertEqual((result.code, result.out), (2, ""))
                    self.assertTrue(result.err.startswith("error: ") and problem in result.err, result.err)
                    self.assertEqual(result.err.count("\n"), 1, result.err)

    def test_help(self) -> None:
        result = run_main(program.main, "serve", "--help")
        self.assertEqual(result.code, 0)
        for option in ("--fixture", "--checkpoint", "--backend", "--api-key", "--max-waiting", "curl -N"):
            self.assertIn(option, result.out)


if __name__ == "__main__":
    unittest.main()
