"""The same API under uvicorn: the same tokens, errors and ends; clients that leave."""

from __future__ import annotations

import os
import threading
import unittest
import unittest.mock
from importlib.util import find_spec
from typing import Any, ClassVar

from starter.engine import InferenceEngine
from starter.errors import SchemaError
from starter.serving.api import Api, Settings
from starter.serving.wire import Limits
from tests.extras import needs
from tests.paths import FIXTURE
from tests.serving.support import ServerCase, eventually, post, read_until
from tests.serving.test_clients_leave import LONG
from tests.serving.test_completions import PROMPT

if find_spec("starlette") and find_spec("uvicorn"):
    import uvicorn

    from starter.serving.asgi import application, make_app

    class Uvicorn:
        """A server in a thread, with as much of ``serving.server.Server`` as the tests use."""

        def __init__(self, app: Any) -> None:
            config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=5)
            self._server = uvicorn.Server(config)
            self._thread = threading.Thread(target=self._server.run, name="uvicorn")

        def start(self) -> None:
            self._thread.start()
            assert eventually(lambda: self._server.started)
            self.port = self._server.servers[0].sockets[0].getsockname()[1]

        def drain(self, seconds: float) -> None:
            self._server.should_exit = True
            self._thread.join()

        def server_close(self) -> None:
            """It has closed its sockets."""


@needs("server", "starlette", "uvicorn")
class AsgiTest(ServerCase):
    settings = Settings("tiny", seconds=20.0)
    engine_settings: ClassVar = {"max_running": 16}

    def serve(self, engine: InferenceEngine, **options: Any) -> None:
        self.threads = threading.active_count() + 8  # asyncio keeps worker threads
        self.engine, self.clients, self.ended = engine, [], False
        self.api = Api(engine, self.settings)
        engine.start()
        self.server = Uvicorn(application(self.api, Limits(body=5_000), self.end))  # type: ignore[assignment]
        self.server.start()

    def end(self) -> None:
        self.ended = True

    def tearDown(self) -> None:
        super().tearDown()
        self.assertTrue(self.ended)

    def test_tokens(self) -> None:
        for fields in ({"temperature": 0}, {"temperature": 0.9, "seed": 3, "n": 2, "logprobs": 2}):
            whole = self.complete(PROMPT, max_tokens=9, **fields)
            expected = self.engine.result(self.engine.submit(PROMPT, 9, **fields))
            self.assertEqual([choice["text"] for choice in whole["choices"]], [each.text for each in expected.samples])
            texts = [""] * len(whole["choices"])
            for chunk in self.stream(PROMPT, max_tokens=9, **fields):
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
            self.assertEqual(texts, [choice["text"] for choice in whole["choices"]])

    def test_many_at_once(self) -> None:
        """No worker thread is held while a generation waits: more of them than there are threads."""
        self.gate.open.clear()
        clients = [self.raw(post({**LONG, "max_tokens": 3, "stream": True})) for _ in range(60)]
        self.assertTrue(eventually(lambda: len(self.engine.active) == 60))
        self.assertEqual(self.ask("GET", "/health").status, 200)
        self.gate.open.set()
        for client in clients:
            self.assertEqual(read_until(client, b"0\r\n\r\n").count(b"data: "), 4)

    def test_errors(self) -> None:
        for body, status in ((b"{", 400), ({"prompt": "Z"}, 400), ({"prompt": "a", "model": "x"}, 404),
                             (b" " * 6_000, 413)):
            self.refused(status, body)
        self.assertEqual(self.ask("GET", "/v1/models/x%2Fy").status, 404)
        self.assertEqual(self.ask("DELETE", "/v1/completions").status, 405)
        self.assertEqual(self.ask("OPTIONS", "/v1/completions").headers["allow"], "POST, OPTIONS")
        self.assertEqual(self.ask("HEAD", "/health").body, b"")

    def test_clients_that_leave(self) -> None:
        for stream in (True, False):
            self.gate.open.clear()
            client = self.raw(post({**LONG, "stream": stream}))
            self.assertTrue(eventually(lambda: bool(self.engine.active)))
            client.close()
            self.assertTrue(eventually(lambda: not self.engine.active))
            self.gate.open.set()
            self.assertTrue(eventually(self.all_free))

    def test_the_engine_dies(self) -> None:
        with unittest.mock.patch.object(self.engine._core, "settle", side_effect=SystemExit("half recorded")):
            events = self.ask("POST", "/v1/completions", {**LONG, "stream": True}).events
        self.assertEqual(events[-1]["error"]["code"], "engine_stopped")
        self.assertEqual(self.ask("GET", "/health").status, 503)
        self.assertEqual(self.ask("POST", "/v1/completions", LONG).status, 503)

    def test_viewers(self) -> None:
        client = self.raw(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
        read_until(client, b'"event": "now"')
        self.complete(max_tokens=3)
        self.assertEqual(read_until(client, b'"event": "finish"').count(b'"event": "token"'), 3)
        client.close()
        self.assertTrue(eventually(lambda: not self.engine.timeline.listeners))

    def test_time(self) -> None:
        self.api.settings = Settings("tiny", seconds=0.1)
        self.gate.open.clear()
        self.assertEqual(self.ask("POST", "/v1/completions", LONG).status, 504)
        self.gate.open.set()


@needs("server", "starlette", "uvicorn")
class FactoryTest(unittest.TestCase):
    def test_the_environment_names_the_model(self) -> None:
        with unittest.mock.patch.dict(os.environ, {"P07_FIXTURE": str(FIXTURE)}):
            server = Uvicorn(make_app())
            server.start()
            server.drain(5.0)
        with unittest.mock.patch.dict(os.environ, {"P07_FIXTURE": "", "P07_CHECKPOINT": ""}), \
                self.assertRaisesRegex(SchemaError, "P07_FIXTURE"):
            make_app()


if __name__ == "__main__":
    unittest.main()
