"""HTTP over raw sockets: what is read strictly, what closes a connection, and what slow or rude clients get."""

from __future__ import annotations

import json
import time
import unittest
import unittest.mock
from typing import Any

from starter.serving.problems import ApiError
from starter.serving.wire import Limits, answer_head, parse_head
from tests.serving.support import Reply, ServerCase, post, read_all, read_replies, read_until

GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
POST = "POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "abc"}'
BAD_HEADS = (  # the head, and the status
    (b"GET /health\r\n\r\n", 400), (b"GET  /health HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\r\n\r\n", 400),
    (b"GET health HTTP/1.1\r\nHost: a\r\n\r\n", 400), (b"GET http://a/health HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n", 505), (b"GET /health HTTP/1.1\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400), (b"GET /health HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400),
    (b"GET /h\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n", 400), (b"GET /health HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n", 400))
BAD_FRAMES = (  # headers of a POST, and the status
    ("", 411), ("Content-Length: x\r\n", 400), ("Content-Length: -1\r\n", 400), ("Content-Length: +5\r\n", 400),
    ("Content-Length: 17\r\nContent-Length: 17\r\n", 400), ("Content-Length: 17, 17\r\n", 400),
    ("Content-Length: 17\r\nTransfer-Encoding: chunked\r\n", 400), ("Transfer-Encoding: gzip, chunked\r\n", 501),
    ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400), ("Content-Length: 104857600\r\n", 413),
    ("Content-Length: 999999999999999999\r\n", 413), ("Content-Length: 17\r\nContent-Encoding: gzip\r\n", 415),
    ("Content-Length: 17\r\nExpect: the-impossible\r\n", 417))
BAD_CHUNKS = (b"x\r\n", b"-1\r\n", b"5\r\nabcdefg\r\n", b"0x5\r\nabcde\r\n", b"fffffffff\r\n", b"ffffffff\r\n",
              b"5 5\r\n", b"1" * 300, b"\r\n")


class WireTest(ServerCase):
    limits = Limits(head=2_000, body=5_000, idle_seconds=20.0, head_seconds=0.6, body_seconds=0.6)

    def last(self, data: bytes) -> Reply:
        """The one answer to these bytes, after which the server closes the connection."""
        client = self.raw(data)
        received = read_all(client)
        head, _, body = received.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        reply = Reply(int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:]), body)  # type: ignore[arg-type]
        self.assertEqual((reply.headers["connection"], int(reply.headers["content-length"])), ("close", len(body)))
        return reply

    def test_a_head_that_is_not_read(self) -> None:
        for data, status in BAD_HEADS:
            with self.subTest(data=data):
                reply = self.last(data)
                self.assertEqual(reply.status, status)
                self.error_of(reply)
        self.assertEqual(self.ask("GET", "/health").status, 200)

    def test_a_body_of_unclear_length(self) -> None:
        for headers, status in BAD_FRAMES:
            with self.subTest(headers=headers):
                reply = self.last(f"{POST}{headers}\r\n".encode() + BODY)
                self.assertEqual(reply.status, status, reply.body)
                self.error_of(reply)

    def test_chunks(self) -> None:
        whole = {"count": 3, "max_model_len": 128, "tokens": [0, 1, 2], "token_strs": None}
        for chunks in (b"11\r\n%s\r\n0\r\n\r\n" % BODY,
                       b"5;a=b\r\n%s\r\nC\r\n%s\r\n000\r\nTrailer: x\r\n\r\n" % (BODY[:5], BODY[5:])):
            client = self.raw(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + GET)
            first, second = read_replies(client, 2)
            self.assertEqual((first.status, first.document, second.status), (200, whole, 200))
        for chunks in BAD_CHUNKS:
            with self.subTest(chunks=chunks):
                reply = self.last(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks)
                self.assertEqual(reply.status, 413 if chunks == b"ffffffff\r\n" else 400)
        many = b"1\r\n \r\n" * 5_001
        self.assertEqual(self.last(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode() + many).status, 413)
        self.assertEqual(self.last(b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n").status, 400)

    def test_too_large(self) -> None:
        self.assertEqual(self.last(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000).status, 431)
        self.assertEqual(self.last(b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 10_000).status, 431)
        self.assertEqual(self.last(b"G" * 100_000).status, 431)
        reply = self.last(post(b" " * 300_000))  # sent whole: the answer arrives all the same
        self.assertEqual((reply.status, self.error_of(reply)["code"]), (413, "body_too_large"))
        padded = b'{"prompt": "abc"}'.ljust(5_000)
        self.assertEqual(read_replies(self.raw(post(padded, "/tokenize")), 1)[0].status, 200)

    def test_a_client_that_expects_to_be_asked(self) -> None:
        client = self.raw(f"{POST}Content-Length: {len(BODY)}\r\nExpect: 100-continue\r\n\r\n".encode())
        self.assertEqual(read_until(client, b"\r\n\r\n"), b"HTTP/1.1 100 Continue\r\n\r\n")
        client.sendall(BODY)
        self.assertEqual(read_replies(client, 1)[0].status, 200)
        reply = self.last(f"{POST}Content-Length: 999999\r\nExpect: 100-continue\r\n\r\n".encode())
        self.assertEqual(reply.status, 413)  # it is told before it sends

    def test_the_connection_goes_on(self) -> None:
        """After answers and after errors of the API; early requests wait for their turn."""
        errors = (post(b"{", "/tokenize"), post({"prompt": "Z"}, "/tokenize"), post({}, "/no"), post({}, "/health"))
        client = self.raw(b"".join(errors) + b"\r\n" + post({"prompt": "abc", "max_tokens": 2}) + GET)
        replies = read_replies(client, 6)
        self.assertEqual([reply.status for reply in replies], [400, 400, 404, 405, 200, 200])
        self.assertTrue(all("connection" not in reply.headers for reply in replies))

    def test_a_stream_and_what_follows_it(self) -> None:
        body = {"prompt": "abc", "max_tokens": 3, "stream": True}
        client = self.raw(post(body) + GET)
        received = read_until(client, b'{"status": "ok"}')
        stream, _, health = received.partition(b"0\r\n\r\n")
        self.assertEqual(stream.count(b"data: "), 4)
        self.assertTrue(health.startswith(b"HTTP/1.1 200 OK\r\n"))

    def test_who_closes(self) -> None:
        for data in (b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n"):
            self.assertEqual(self.last(data).status, 200)

    def test_http_1_0_has_no_chunks(self) -> None:
        raw = json.dumps({"prompt": "abc", "max_tokens": 3, "stream": True}).encode()
        client = self.raw(b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
                          b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw))
        head, _, body = read_all(client).partition(b"\r\n\r\n")
        self.assertNotIn(b"chunked", head)
        self.assertEqual(len(Reply(200, {}, body).events), 3)

    def test_slow_clients(self) -> None:
        """However the bytes are spread: the whole head, and the whole body, have their time."""
        for data in (b"GET /health HTTP/1.1\r\nHost: a\r\nX: ", f"{POST}Content-Length: 100\r\n\r\n".encode()):
            client, started = self.raw(data), time.monotonic()
            client.settimeout(0.05)
            received = b""
            while b"\r\n\r\n" not in received and time.monotonic() - started < 10:
                try:
                    client.sendall(b"x")
                    received += client.recv(65_536)
                except TimeoutError:
                    continue
            self.assertTrue(received.startswith(b"HTTP/1.1 408 "), received)
            self.assertLess(time.monotonic() - started, 5)

    def test_leaving_midway(self) -> None:
        for data in (b"", b"\r", b"GET /hea", f"{POST}Content-Length: 100\r\n\r\n".encode() + b"{",
                     f"{POST}Transfer-Encoding: chunked\r\n\r\n5\r\nab".encode()):
            self.raw(data).close()
        self.assertTrue(self.quiet())

    def test_a_silent_client(self) -> None:
        self.server.limits = Limits(idle_seconds=0.2)
        self.assertEqual(read_all(self.raw()), b"")

    def quiet(self) -> bool:
        deadline = time.monotonic() + 10
        while self.server.clients and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.server.clients


class OneWriteTest(ServerCase):
    def test_each_event_is_one_write(self) -> None:
        """And each chunk of HTTP holds whole events, whole characters, and its own size."""
        writes: list[bytes] = []
        send = self.server_wire_send

        def note(wire: Any, data: bytes, limits: Limits) -> None:
            writes.append(data)
            send(wire, data, limits)

        with unittest.mock.patch("starter.serving.wire.Wire.send", note):
            self.stream("abc", max_tokens=5, stream_options={"include_usage": True})
        head, *events, end = writes
        self.assertTrue(head.startswith(b"HTTP/1.1 200 OK\r\n") and b"\r\nTransfer-Encoding: chunked\r\n" in head)
        self.assertEqual((len(events), end), (5 + 1 + 1, b"0\r\n\r\n"))
        for event in events:
            size, _, data = event.partition(b"\r\n")
            self.assertEqual(data[int(size, 16):], b"\r\n")
            self.assertRegex(data.decode("utf-8"), r"\Adata: [^\n]+\n\n\r\n\Z")

    @property
    def server_wire_send(self) -> Any:
        from starter.serving.wire import Wire
        return Wire.send


class HeadTest(unittest.TestCase):
    def test_what_is_read(self) -> None:
        head = parse_head(b"POST /a%20b?c=d HTTP/1.1\r\nHost: x\r\nX-Y:  \xe9 \r\nx-y: 2\r\nCONNECTION: Close , x\r\n"
                          b"Content-Length: 0")
        self.assertEqual((head.method, head.path, head.minor, head.keeps_alive), ("POST", "/a%20b", 1, False))
        self.assertEqual(head.headers["x-y"], "é, 2")

    def test_no_header_begins_within_another(self) -> None:
        raw = answer_head(400, [("X-Request-Id", "a\r\nSet-Cookie: b"), ("Y", "中")])
        self.assertIn(b"\r\nX-Request-Id: a??Set-Cookie: b\r\nY: ?\r\n\r\n", raw)

    def test_any_bytes(self) -> None:
        """Never another exception."""
        for position in range(len(GET)):
            for byte in (0, 9, 10, 13, 32, 58, 127, 200):
                raw = GET[:position] + bytes([byte]) + GET[position + 1:-4]
                try:
                    parse_head(raw)
                except ApiError as error:
                    self.assertIn(error.status, (400, 405, 505))


if __name__ == "__main__":
    unittest.main()
