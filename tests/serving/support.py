"""A server over the tiny model, in this process, and a client that is a socket and nothing else."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import unittest
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from starter.backend import ReferenceBackend
from starter.engine import InferenceEngine
from starter.model import Loaded, Model
from starter.schema import EngineSettings
from starter.serving.api import Api, Settings
from starter.serving.server import Server
from starter.serving.wire import Limits
from tests.support import CONFIG, TOKENIZER, WEIGHTS

JSON = {"Content-Type": "application/json"}
SECONDS = 20.0  # more than any answer here takes


class Reply(NamedTuple):
    """An answer, read to its end."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def document(self) -> Any:
        """The body as strict JSON."""
        return json.loads(self.body, parse_constant=_refuse)

    @property
    def events(self) -> list[Any]:
        """The server-sent events of the body, without the last, which must be [DONE]."""
        *events, last, nothing = self.body.decode("utf-8").split("\n\n")
        assert (last, nothing) == ("data: [DONE]", ""), (last, nothing)
        assert all(event.startswith("data: ") and "\n" not in event for event in events), events
        return [json.loads(event.removeprefix("data: "), parse_constant=_refuse) for event in events]


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


class Gate(ReferenceBackend):
    """A backend whose steps wait while it is shut, so that a test decides when tokens come."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.allowed = threading.Semaphore(0)  # steps, while it is shut

    def embed(self, table: Any, tokens: Sequence[int]) -> Any:
        while not self.open.is_set() and not self.allowed.acquire(timeout=0.01):
            pass
        return super().embed(table, tokens)


def engine_of(backend: ReferenceBackend | None = None, **settings: object) -> InferenceEngine:
    """Over the tiny model, which has no end-of-sequence token; its clock is real."""
    loaded = Loaded(Model(CONFIG, WEIGHTS, backend or ReferenceBackend()), TOKENIZER, {"scenario": "tiny"})
    return InferenceEngine(loaded, EngineSettings().override({"keep_events": 0, **settings}), time.monotonic)


def eventually(holds: Callable[[], bool], seconds: float = SECONDS) -> bool:
    """Whether it holds within this time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


class ServerCase(unittest.TestCase):
    """A server for each test, gone at its end with all of its threads and pages."""

    limits = Limits(idle_seconds=SECONDS)
    settings = Settings("tiny")
    engine_settings: ClassVar[dict[str, object]] = {}
    max_connections = 64

    def setUp(self) -> None:
        self.broken: list[object] = []  # exceptions that ended a thread
        hook, threading.excepthook = threading.excepthook, lambda arguments: self.broken.append(arguments)
        self.addCleanup(setattr, threading, "excepthook", hook)
        self.log: list[str] = []
        self.gate = Gate()
        self.serve(engine_of(self.gate, **self.engine_settings))

    def serve(self, engine: InferenceEngine, **options: Any) -> None:
        self.threads = threading.active_count()
        self.engine = engine
        self.server = Server(("127.0.0.1", 0), Api(engine, self.settings), self.limits,
                             max_connections=self.max_connections, log=self.log.append, **options)
        self.clients: list[socket.socket] = []
        engine.start()
        self.server.start()

    def tearDown(self) -> None:
        self.gate.open.set()
        for client in self.clients:
            client.close()
        self.assertEqual(self.broken, [])
        self.assertFalse([line for line in self.log if "Traceback" in line], self.log)
        self.server.drain(5.0)
        self.server.server_close()
        self.engine.close()
        self.assertEqual(self.engine.kv.free_pages, self.engine.kv.total_pages)
        self.assertTrue(eventually(lambda: threading.active_count() <= self.threads), threading.enumerate())

    # ------------------------------------------------------------------------------------------- clients

    def ask(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Reply:
        """One request on a connection of its own; ``body`` is bytes, or is written as JSON."""
        client = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=SECONDS)
        try:
            raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            client.request(method, path, raw, {**(JSON if raw is not None else {}), **(headers or {})})
            answer = client.getresponse()
            return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            client.close()

    def complete(self, prompt: object = "abc", **fields: object) -> Any:
        """The completion object for a prompt."""
        reply = self.ask("POST", "/v1/completions", {"prompt": prompt, **fields})
        self.assertEqual(reply.status, 200, reply.body)
        return reply.document

    def stream(self, prompt: object = "abc", **fields: object) -> list[Any]:
        """The chunks for a prompt."""
        reply = self.ask("POST", "/v1/completions", {"prompt": prompt, "stream": True, **fields})
        self.assertEqual((reply.status, reply.headers["content-type"]), (200, "text/event-stream; charset=utf-8"))
        return reply.events

    def refused(self, status: int, body: object, path: str = "/v1/completions") -> dict[str, Any]:
        """The error object of a request that is refused."""
        reply = self.ask("POST", path, body)
        self.assertEqual(reply.status, status, reply.body)
        return self.error_of(reply)

    def error_of(self, reply: Reply) -> dict[str, Any]:
        """The error object, which must have OpenAI's shape."""
        self.assertEqual(list(reply.document), ["error"])
        error: dict[str, Any] = reply.document["error"]
        self.assertEqual(list(error), ["message", "type", "param", "code"])
        self.assertTrue(error["message"] and error["type"], error)
        return error

    def raw(self, data: bytes = b"") -> socket.socket:
        """A socket that has sent these bytes."""
        client = socket.create_connection(("127.0.0.1", self.server.port), timeout=SECONDS)
        self.clients.append(client)
        client.sendall(data)
        return client

    def all_free(self) -> bool:
        """No request, no page in use."""
        return not self.engine.active and self.engine.kv.free_pages == self.engine.kv.total_pages


def post(body: object, path: str = "/v1/completions", *headers: str) -> bytes:
    """A POST as bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", f"Content-Length: {len(raw)}",
             *headers, "", ""]
    return "\r\n".join(lines).encode() + raw


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while data := client.recv(65_536):
            received += data
    return received


def read_until(client: socket.socket, mark: bytes) -> bytes:
    """Everything up to these bytes, and what came with them."""
    received = b""
    while mark not in received:
        data = client.recv(65_536)
        if not data:
            raise AssertionError(f"closed after {received!r}")
        received += data
    return received


def read_replies(client: socket.socket, count: int) -> list[Reply]:
    """This many answers with a Content-Length, from one connection."""
    received, replies = b"", []
    while len(replies) < count:
        head, found, rest = received.partition(b"\r\n\r\n")
        if found:
            lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
            length = int(headers.get("content-length", 0))
            if len(rest) >= length:
                replies.append(Reply(int(lines[0].split()[1]), headers, rest[:length]))
                received = rest[length:]
                continue
        data = client.recv(65_536)
        if not data:
            raise AssertionError(f"closed after {received!r}")
        received += data
    return replies
