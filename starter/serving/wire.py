"""HTTP/1.1 as bytes: a request is read strictly, within limits of size and time; an answer is written in one piece, or
in chunks.

What two readers could understand differently is refused (RFC 9112): a header folded over lines, a space before its
colon, two lengths, a length beside chunks, a line end that is not CR LF. After such an error nobody knows where the
next request begins, so the connection is closed. Errors are ``ApiError``, in the same shape as any other.

    wire = Wire(socket)
    head = wire.head(limits)              None: the client is silent, or has closed the connection between two requests
    body = wire.body(head, limits)        Content-Length or chunks; "Expect: 100-continue" is answered here
    wire.send(answer_head(200, [...]) + b"...")
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

from starter.base.version import __version__
from starter.serving.problems import ApiError

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (/[!-~]*|\*) HTTP/(\d)\.(\d)")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_ONCE = ("host", "content-length", "transfer-encoding", "content-type", "authorization", "expect")
_CHUNK_LINE = 256  # bytes of the line with a chunk's size


class Closed(Exception):
    """The client closed the connection in the middle of a request, or it is broken."""


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, times in seconds. A slow client is given ``head_seconds`` for a whole head and ``body_seconds``
    for a whole body, however it spreads the bytes."""

    head: int = 32_768
    body: int = 2 * 1024 * 1024
    idle_seconds: float = 60.0  # between two requests
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    send_seconds: float = 20.0  # for an answer, or for an event of a stream, to be taken


@dataclass(frozen=True)
class Head:
    """Of a request. Header names are in lower case; several of a name are joined by commas."""

    method: str
    target: str
    minor: int  # HTTP/1.minor
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        """Without the query."""
        return self.target.partition("?")[0]

    @property
    def keeps_alive(self) -> bool:
        """May another request follow?"""
        options = [option.strip().lower() for option in self.headers.get("connection", "").split(",")]
        return self.minor >= 1 and "close" not in options


def bad(message: str, status: int = 400, code: str = "bad_http") -> ApiError:
    """A request that cannot be read."""
    return ApiError(status, message, code=code)


def parse_head(raw: bytes) -> Head:
    """The lines up to the empty one. ApiError for anything ambiguous."""
    first, *lines = raw.split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(first)
    if match is None:
        raise bad("the first line must be METHOD /path HTTP/1.1")
    if match[3] != b"1":
        raise bad(f"HTTP/{match[3].decode()}.{match[4].decode()} is not spoken here; use HTTP/1.1", 505)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise bad("a header must be NAME: value on one line, without control characters")
        key, text = name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")
        if key in headers and key in _ONCE:
            raise bad(f"the header {key} must be there once")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    head = Head(match[1].decode("ascii"), match[2].decode("ascii"), int(match[4]), headers)
    _check_framing(head)
    return head


def _check_framing(head: Head) -> None:
    headers = head.headers
    if "host" not in headers and head.minor >= 1:
        raise bad("HTTP/1.1 needs the header Host")
    if "transfer-encoding" in headers:
        if "content-length" in headers or head.minor == 0:
            raise bad("Transfer-Encoding cannot stand beside Content-Length, or in HTTP/1.0")
        if headers["transfer-encoding"].lower() != "chunked":
            raise bad("the only Transfer-Encoding is chunked", 501)
    elif "content-length" in headers:
        if not _LENGTH.fullmatch(headers["content-length"]):
            raise bad("Content-Length must be a number of bytes")
    elif head.method in ("POST", "PUT", "PATCH"):
        raise bad("how long is the body? send Content-Length, or Transfer-Encoding: chunked", 411)
    if "content-encoding" in headers:
        raise bad("compressed bodies are not read; send no Content-Encoding", 415)


# ------------------------------------------------------------------------------------------------------- reading


class Wire:
    """One client's socket."""

    def __init__(self, client: socket.socket) -> None:
        self._socket = client
        self._buffer = bytearray()  # received and not consumed

    def _receive(self, deadline: float) -> None:
        """More bytes. TimeoutError at the deadline (of ``time.monotonic``); Closed if there will be no more."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        try:
            received = self._socket.recv(65_536)
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed from error
        if not received:
            raise Closed
        self._buffer += received

    def wait(self, seconds: float) -> bool:
        """Wait for the first byte of a request. False: there will be none."""
        deadline = time.monotonic() + seconds
        try:
            while True:
                while self._buffer[:2] == b"\r\n":  # an empty line before a request is allowed
                    del self._buffer[:2]
                if self._buffer and self._buffer != b"\r":
                    return True
                self._receive(deadline)
        except (TimeoutError, Closed):
            return False

    def head(self, limits: Limits) -> Head:
        """The head of a request of which ``wait`` has seen a byte. ApiError, TimeoutError or Closed."""
        deadline, start = time.monotonic() + limits.head_seconds, 0
        while (end := self._buffer.find(b"\r\n\r\n", start)) < 0:
            start = max(0, len(self._buffer) - 3)
            if len(self._buffer) > limits.head:
                break
            self._receive(deadline)
        if end < 0 or end > limits.head:
            raise bad(f"the head of a request may have {limits.head} bytes", 431)
        raw = bytes(self._buffer[:end])
        del self._buffer[:end + 4]
        return parse_head(raw)

    def body(self, head: Head, limits: Limits) -> bytes:
        """The body that follows the head. ApiError, TimeoutError or Closed."""
        deadline = time.monotonic() + limits.body_seconds
        length = int(head.headers.get("content-length", "0"))
        if length > limits.body:
            raise _too_long(limits)
        if expected := head.headers.get("expect"):
            if expected.lower() != "100-continue":
                raise bad(f"cannot do what is expected: {expected[:40]}", 417)
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n", limits)
        if "transfer-encoding" in head.headers:
            return self._chunks(deadline, limits)
        return self._exactly(length, deadline)

    def _exactly(self, length: int, deadline: float) -> bytes:
        while len(self._buffer) < length:
            self._receive(deadline)
        taken = bytes(self._buffer[:length])
        del self._buffer[:length]
        return taken

    def _line(self, deadline: float) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _CHUNK_LINE:
                raise bad("a chunk must begin with its size in hexadecimal digits")
            self._receive(deadline)
        line = bytes(self._buffer[:end])
        del self._buffer[:end + 2]
        return line

    def _chunks(self, deadline: float, limits: Limits) -> bytes:
        parts, total = [], 0
        while True:
            match = _CHUNK.fullmatch(self._line(deadline))
            if match is None:
                raise bad("a chunk must begin with its size in hexadecimal digits")
            size = int(match[1], 16)
            total += size
            if total > limits.body:
                raise _too_long(limits)
            if size == 0:
                break
            parts.append(self._exactly(size, deadline))
            if self._exactly(2, deadline) != b"\r\n":
                raise bad("a chunk is longer than its size says")
        for _ in range(32):  # trailers: read, and of no consequence
            if not self._line(deadline):
                return b"".join(parts)
        raise bad("too many trailers", 431)

    # --------------------------------------------------------------------------------------------------- writing

    def send(self, data: bytes, limits: Limits) -> None:
        """All of it, in ``send_seconds``. Closed if the client does not take it."""
        self._socket.settimeout(limits.send_seconds)
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise Closed from error

    def linger(self, seconds: float = 2.0, most: int = 4 * 1024 * 1024) -> None:
        """Say that nothing more comes, and read what the client still sends, for a while: closing a socket with unread
        bytes would reset the connection, and the client might never see the answer."""
        deadline = time.monotonic() + seconds
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while most > 0:
                self._buffer.clear()
                self._receive(deadline)
                most -= len(self._buffer)
        except (OSError, Closed):
            return


def _too_long(limits: Limits) -> ApiError:
    return bad(f"the body may have {limits.body} bytes", 413, "body_too_large")


def answer_head(status: int, headers: Iterable[tuple[str, str]]) -> bytes:
    """The head of an answer, its empty line included."""
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Date: {formatdate(usegmt=True)}",
             f"Server: starter/{__version__}", *(f"{name}: {_one_line(value)}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def _one_line(value: str) -> str:
    """A header's value that cannot begin another header."""
    return re.sub(r"[\x00-\x1f\x7f]", "?", value)


def chunk(data: bytes) -> bytes:
    """A chunk of an answer; the empty one ends it."""
    return b"%x\r\n%s\r\n" % (len(data), data)
