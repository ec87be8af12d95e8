"""One client: its requests, one after the other, until it leaves, breaks a rule of HTTP, or the server drains.

A request that arrives early (pipelining) waits for its turn. After an error of the API the connection goes on, since
the request was read whole; after an error of HTTP it is closed.
"""

from __future__ import annotations

import socket
import time
import traceback
from contextlib import AbstractContextManager, closing
from socketserver import BaseRequestHandler
from typing import Any, Protocol
from urllib.parse import quote

from starter.serving.answers import Answer, HttpRequest, Work
from starter.serving.api import Api
from starter.serving.completions import to_json
from starter.serving.generation import Source
from starter.serving.problems import ApiError
from starter.serving.watch import Watch
from starter.serving.wire import Closed, Head, Limits, Wire, answer_head, chunk


class Host(Protocol):
    """What a connection needs of its server; ``server.Server`` says more."""

    api: Api
    limits: Limits
    watch: Watch
    draining: int

    def known(self, connection: Connection) -> AbstractContextManager[None]:
        """Within the block, the server's end reaches the connection."""

    def log(self, line: str, body: bytes = b"") -> None:
        """A line about a request."""


class Connection(BaseRequestHandler):
    """``socketserver`` calls ``handle`` in a thread of the connection's own."""

    request: socket.socket
    server: Host  # type: ignore[assignment]

    def setup(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # an event is not held back for the next
        self._wire, self._limits = Wire(self.request), self.server.limits
        self.source: Source[Any] | None = None  # of the answer that grows now
        self.waiting = True  # for a request
        self._answered = False  # has anything been sent for the request at hand?

    def handle(self) -> None:
        with self.server.known(self):
            try:
                while self._next():
                    pass
                self._wire.linger()
            except Closed:
                pass

    def _next(self) -> bool:
        """Answer a request. False when the connection is to be closed, Closed when it is."""
        self.waiting = True
        if self.server.draining or not self._wire.wait(self._limits.idle_seconds):
            return False
        self.waiting, self._answered = False, False
        started, head, status = time.monotonic(), None, 500
        try:
            head = self._wire.head(self._limits)
            body = self._wire.body(head, self._limits)
            answer = self.server.api.handle(HttpRequest(head.method, head.path, head.headers, body))
            status = self._work(head, answer) if isinstance(answer, Work) else self._send(answer, head)
            self.server.log(self._line(head, status, started), body)
            return self._goes_on(head)
        except TimeoutError:
            problem = ApiError(408, "the request did not arrive in time", code="timeout")
        except ApiError as error:  # of the wire: where the next request begins is not known
            problem = error
        except Closed:
            self.server.log(self._line(head, 499, started))
            raise
        except Exception:  # a bug; other clients must not suffer from it
            self.server.log(traceback.format_exc())
            problem = ApiError(500, "this is a fault of the server; its log says more", kind="server_error",
                               code="internal_error")
        if not self._answered:
            self._send(Answer.of(problem), None)
        self.server.log(self._line(head, problem.status, started))
        return False

    def _line(self, head: Head | None, status: int, started: float) -> str:
        """For the log: no prompt, no key, no query."""
        what = f"{head.method} {quote(head.path, safe='/-_.~%')[:200]}" if head else "-"
        return f"{self.client_address[0]} {what} {status} {time.monotonic() - started:.3f}s"

    def _goes_on(self, head: Head) -> bool:
        return head.keeps_alive and not self.server.draining

    # --------------------------------------------------------------------------------------------- answers

    def _send(self, answer: Answer, head: Head | None) -> int:
        """A complete answer in one write; ``head`` is None if the request could not be read. Returns the status."""
        headers = [*answer.headers.items()]
        if answer.status != 204:
            headers += [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body))),
                        ("X-Content-Type-Options", "nosniff")]
        if head is None or not self._goes_on(head):
            headers.append(("Connection", "close"))
        body = b"" if head is not None and head.method == "HEAD" else answer.body
        self._answered = True
        self._wire.send(answer_head(answer.status, headers) + body, self._limits)
        return answer.status

    def _work(self, head: Head, work: Work) -> int:
        """An answer that grows. Returns the status; Closed if the client has gone away, with its request cancelled."""
        with work.source as self.source:
            try:
                if self.server.draining > (not work.source.endless):  # such were cancelled just before this one began
                    self.source.cancel()
                with self.server.watch.over(self.request, self._gone):
                    if work.streams:
                        self._stream(head, work)
                        return 200
                    answer = work.whole()
                if self._left:
                    raise Closed
                return self._send(answer, head)
            finally:
                self.source = None

    _left = False

    def _gone(self) -> None:
        """The client has closed its connection. Called by the watch, in its thread."""
        self._left = True
        if source := self.source:
            source.cancel()

    def _stream(self, head: Head, work: Work) -> None:
        """Server-sent events, each in one write."""
        framed = head.minor >= 1  # HTTP/1.0 knows no chunks: there the end of the connection ends the answer
        headers = [("Content-Type", "text/event-stream; charset=utf-8"), ("Cache-Control", "no-cache"),
                   ("X-Accel-Buffering", "no"), *work.headers.items()]
        headers.append(("Transfer-Encoding", "chunked") if framed else ("Connection", "close"))
        if framed and not self._goes_on(head):
            headers.append(("Connection", "close"))
        self._answered = True
        self._wire.send(answer_head(200, headers), self._limits)
        with closing(work.stream()) as events:
            for event in events:
                if self._left:
                    raise Closed
                self._wire.send(chunk(event) if framed else event, self._limits)
        if framed:
            self._wire.send(chunk(b""), self._limits)


def refusal(seconds: int) -> bytes:
    """What a client is told when there are too many of them."""
    problem = ApiError(503, f"too many clients are connected; try again in {seconds} s", kind="server_error",
                       code="too_many_connections")
    body = to_json(problem.to_dict())
    return answer_head(503, [("Retry-After", str(seconds)), ("Content-Type", "application/json"),
                             ("Content-Length", str(len(body))), ("Connection", "close")]) + body
