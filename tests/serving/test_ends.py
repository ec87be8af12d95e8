"""Limits and ends: too many clients, a generation that takes too long or fails, an engine that dies, a server that
drains. Never a hang."""

from __future__ import annotations

import json
import threading
import time
import unittest
import unittest.mock
from dataclasses import replace
from typing import Any, ClassVar

from starter.serving.api import Settings
from starter.serving.wire import Limits
from tests.serving.support import (
    Reply,
    ServerCase,
    engine_of,
    eventually,
    post,
    read_all,
    read_replies,
    read_until,
)
from tests.support import FaultyBackend

LONG = {"prompt": "abc", "max_tokens": 120, "temperature": 0}
ENGINE_HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


class ConnectionsTest(ServerCase):
    max_connections = 2

    def test_one_too_many(self) -> None:
        """503 in OpenAI's shape, at once; when one leaves, the next may come."""
        first, second = self.raw(ENGINE_HEALTH), self.raw(ENGINE_HEALTH)
        for client in (first, second):
            self.assertEqual(read_replies(client, 1)[0].status, 200)
        for data in (ENGINE_HEALTH, post(LONG), b"", b"x" * 10_000):
            received = read_all(self.raw(data))
            head, _, body = received.partition(b"\r\n\r\n")
            self.assertTrue(head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n"), received)
            self.assertIn(b"\r\nRetry-After: 1\r\n", head)
            self.assertEqual(self.error_of(Reply(503, {}, body))["code"], "too_many_connections")
        first.close()
        self.assertTrue(eventually(lambda: self.server.clients == 1))
        self.assertEqual(self.ask("GET", "/health").status, 200)


class TimeTest(ServerCase):
    settings = Settings("tiny", seconds=0.3)
    limits = Limits(send_seconds=0.3)

    def test_a_generation_that_takes_too_long(self) -> None:
        self.gate.open.clear()
        reply = self.ask("POST", "/v1/completions", LONG)
        self.assertEqual((reply.status, self.error_of(reply)["code"]), (504, "timeout"))
        reply = self.ask("POST", "/v1/completions", {**LONG, "stream": True})
        (event,) = reply.events
        self.assertEqual((reply.status, event["error"]["code"]), (200, "timeout"))
        self.gate.open.set()
        self.assertTrue(eventually(self.all_free))

    def test_a_client_that_does_not_read(self) -> None:
        """Once its buffers are full, an event cannot be sent in time, and its request ends."""
        self.server.api.settings = replace(self.settings, seconds=60.0)
        client = self.raw()
        chunks = 0

        def full(wire: Any, data: bytes, limits: Limits) -> None:
            nonlocal chunks
            chunks += 1
            send(wire, data if chunks < 10 else data * 100_000, limits)

        from starter.serving.wire import Wire
        send = Wire.send
        with unittest.mock.patch.object(Wire, "send", full):
            client.sendall(post({**LONG, "stream": True}))
            self.assertTrue(eventually(lambda: chunks >= 10 and self.all_free()))
            self.assertTrue(eventually(lambda: not self.server.clients))


class FaultsTest(ServerCase):
    def test_a_request_that_fails(self) -> None:
        """Its neighbours do not; streamed, the error is the last event before [DONE]."""
        self.engine.close()
        self.server.api.engine = self.engine = engine_of(FaultyBackend(spoiled=[19]))
        self.engine.start()
        reply = self.ask("POST", "/v1/completions", {"prompt": "t"})
        self.assertEqual((reply.status, self.error_of(reply)["type"]), (500, "server_error"))
        reply = self.ask("POST", "/v1/completions", {"prompt": ["abc", "t"], "stream": True, "temperature": 0})
        *tokens, last = reply.events
        self.assertEqual(last["error"]["code"], "internal_error")
        self.assertTrue(all("choices" in event for event in tokens))
        self.assertTrue(eventually(self.all_free))
        self.complete("abc", max_tokens=1, temperature=0)

    def test_each_end_has_its_reason(self) -> None:
        """Exactly one in each choice, then one [DONE]."""
        whole = self.complete("abc", max_tokens=30, temperature=0)["choices"][0]["text"]
        for fields, reason in (({"max_tokens": 3}, "length"), ({"stop": whole[4]}, "stop"),
                               ({"stop_token_ids": [self.engine.tokenizer.encode(whole[4])[0]]}, "stop")):
            chunks = self.stream("abc", **{"max_tokens": 30, "temperature": 0, "n": 2, **fields})
            ends = [(chunk["choices"][0]["index"], chunk["choices"][0]["finish_reason"]) for chunk in chunks
                    if chunk["choices"][0]["finish_reason"]]
            self.assertEqual(sorted(ends), [(0, reason), (1, reason)])

    def test_a_cancel_from_inside_the_process(self) -> None:
        self.gate.open.clear()
        client = self.raw(post({**LONG, "stream": True, "request_id": "x"}))
        self.gate.allowed.release()
        read_until(client, b"data: ")
        self.engine.cancel("cmpl-x")
        received = read_until(client, b"0\r\n\r\n")
        self.assertEqual((received.count(b'"finish_reason": "abort"'), received.count(b"[DONE]")), (1, 1))

    def test_the_engine_dies(self) -> None:
        """503, and the last event of a stream says so; nobody hangs."""
        self.gate.open.clear()
        stream, whole = self.raw(post({**LONG, "stream": True})), self.raw(post(LONG))
        self.assertTrue(eventually(lambda: len(self.engine.active) == 2))
        with unittest.mock.patch.object(self.engine._core, "settle", side_effect=SystemExit("half recorded")):
            self.gate.open.set()
            received = read_until(stream, b"0\r\n\r\n")
        events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
        self.assertEqual(events[-1]["error"]["code"], "engine_stopped")
        self.assertIn(b"data: [DONE]\n\n", received)
        reply = read_replies(whole, 1)[0]
        self.assertEqual((reply.status, self.error_of(reply)["code"]), (503, "engine_stopped"))
        for method, path, body in (("GET", "/health", None), ("POST", "/v1/completions", LONG)):
            reply = self.ask(method, path, body)
            self.assertEqual((reply.status, self.error_of(reply)["code"]), (503, "engine_stopped"))
        self.assertEqual(self.ask("GET", "/v1/models").status, 200)


class DrainTest(ServerCase):
    engine_settings: ClassVar = {"max_running": 4}

    def drain(self, seconds: float) -> list[int]:
        """In a thread; the list gets the number of cancelled generations when it has ended."""
        done: list[int] = []
        self.drainer = threading.Thread(target=lambda: done.append(self.server.drain(seconds)))
        self.drainer.start()
        self.assertTrue(eventually(lambda: self.server.draining > 0))
        return done

    def tearDown(self) -> None:
        self.gate.open.set()
        self.drainer.join()
        self.assertEqual(self.server.clients, 0)
        self.server.drain = lambda seconds: 0  # type: ignore[method-assign, assignment]  # it has drained
        super().tearDown()

    def test_what_runs_may_end(self) -> None:
        """Idle connections close, new ones are refused, streams come to their end."""
        expected = self.complete("abc", max_tokens=50, temperature=0)["choices"][0]["text"]
        self.gate.open.clear()
        idle, stream = self.raw(), self.raw(post({**LONG, "max_tokens": 50, "stream": True}))
        self.assertTrue(eventually(lambda: bool(self.engine.active) and self.server.clients == 2))
        done = self.drain(30.0)
        self.assertEqual(read_all(idle), b"")
        with self.assertRaises(OSError):
            self.raw(ENGINE_HEALTH)
        self.assertEqual(done, [])
        self.gate.open.set()
        received = read_all(stream)
        events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
        self.assertEqual("".join(event["choices"][0]["text"] for event in events), expected)
        self.drainer.join()
        self.assertEqual(done, [0])

    def test_what_takes_too_long_is_cancelled(self) -> None:
        self.gate.open.clear()
        stream, whole = self.raw(post({**LONG, "stream": True})), self.raw(post(LONG))
        self.assertTrue(eventually(lambda: len(self.engine.active) == 2))
        started = time.monotonic()
        done = self.drain(0.2)
        received, reply = read_all(stream), read_replies(whole, 1)[0]
        self.assertIn(b'"finish_reason": "abort"', received)
        self.assertTrue(received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), received)
        self.assertEqual((reply.status, self.error_of(reply)["code"]), (503, "shutting_down"))
        self.drainer.join()
        self.assertEqual(done, [2])
        self.assertLess(time.monotonic() - started, 10.0)

    def test_a_client_that_never_ends_its_request(self) -> None:
        client = self.raw(b"GET /hea")
        self.assertTrue(eventually(lambda: self.server.clients == 1))
        time.sleep(0.05)
        self.drain(0.1)
        read_all(client)
        self.drainer.join()


if __name__ == "__main__":
    unittest.main()
