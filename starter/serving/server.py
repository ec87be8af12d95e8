"""All clients: accept them up to a limit, refuse those beyond it, and drain when the server is to end.

    with engine, Server(("127.0.0.1", 8000), Api(engine, settings)) as server:
        engine.start()
        server.start()                    in a thread of its own
        ...
        server.drain(30.0)                accept no more, let what runs end, cancel the rest
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from threading import Condition, Event, Thread
from typing import Any

from starter.serving.api import Api
from starter.serving.connection import Connection, refusal
from starter.serving.problems import RETRY_SECONDS
from starter.serving.watch import Watch
from starter.serving.wire import Limits

_REFUSED_SECONDS = 1.0  # how long the socket of a refused client is kept, so that it can read why
_REFUSED_KEPT = 128


class Server(ThreadingHTTPServer):
    """A thread for each client. ``draining`` is 0 while requests are accepted, 1 while those at hand may end, and 2
    once they are cancelled."""

    request_queue_size = 512
    allow_reuse_address = os.name != "nt"  # there it would let two servers share a port
    daemon_threads = True

    def __init__(self, address: tuple[str, int], api: Api, limits: Limits | None = None, *, max_connections: int = 512,
                 log: Callable[[str], None] = lambda line: None, log_prompts: bool = False) -> None:
        """Bind and listen; port 0 takes a free one. OSError if the address cannot be had."""
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.api, self.limits = api, limits or Limits()
        self._most, self._log, self._log_prompts = max_connections, log, log_prompts
        self._change = Condition()  # guards what follows; notified when a connection has ended
        self._connections: set[Connection] = set()
        self._clients = 0  # of clients, begun and not ended
        self.draining = 0
        self._refused: deque[tuple[float, socket.socket]] = deque()
        self._loop: Thread | None = None
        super().__init__(address, Connection)
        self.watch = Watch()

    def server_bind(self) -> None:
        """Without asking for the host's full name, as HTTPServer does: that can take seconds."""
        TCPServer.server_bind(self)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def clients(self) -> int:
        """Connections now, each with its thread."""
        with self._change:
            return self._clients

    def start(self) -> None:
        """Accept clients, in a thread of its own."""
        self._loop = Thread(target=self.serve_forever, args=(0.1,), name="accept", daemon=True)
        self._loop.start()

    # ----------------------------------------------------------------------------------------- connections

    def process_request(self, request: Any, client_address: Any) -> None:
        """A client has connected: give it a thread, or tell it to come back."""
        with self._change:
            full = self._clients >= self._most
            self._clients += not full
        if full:
            self._refuse(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._ended()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended()

    def _ended(self) -> None:
        with self._change:
            self._clients -= 1
            self._change.notify_all()

    def _refuse(self, client: socket.socket) -> None:
        with suppress(OSError):
            client.settimeout(0.0)  # the answer is small, or the client gets none
            client.send(refusal(RETRY_SECONDS))
            client.shutdown(socket.SHUT_WR)
        self._refused.append((time.monotonic(), client))
        self._let_go(len(self._refused) > _REFUSED_KEPT)

    def _let_go(self, one_at_least: bool) -> None:
        while self._refused and (one_at_least or self._refused[0][0] + _REFUSED_SECONDS < time.monotonic()):
            self._refused.popleft()[1].close()
            one_at_least = False

    def service_actions(self) -> None:
        """Between two clients, and ten times a second."""
        self._let_go(False)

    @contextmanager
    def known(self, connection: Connection) -> Iterator[None]:
        """Within the block, ``drain`` knows the connection."""
        with self._change:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._change:
                self._connections.discard(connection)

    def log(self, line: str, body: bytes = b"") -> None:
        """A line; with the body only where that was asked for."""
        shown = ascii(body.decode("utf-8", "replace"))[:2_000] if body and self._log_prompts else ""
        self._log(f"{line} {shown}".rstrip())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that could not be handled has a log line already, or there was no thread for it."""
        self.log(f"{client_address[0]} could not be served")

    # ------------------------------------------------------------------------------------------------- end

    def drain(self, seconds: float, hurry: Event | None = None) -> int:
        """Accept no more, wait until what runs has ended, at most this long and until ``hurry`` is set, then cancel
        the rest. Returns how many generations were cancelled."""
        self.draining = 1
        if self._loop:
            self.shutdown()
            self._loop.join()
        self.socket.close()
        with self._change:
            for connection in self._connections:
                if connection.waiting:
                    with suppress(OSError):  # it has just left
                        connection.request.shutdown(socket.SHUT_RD)
                elif (source := connection.source) and source.endless:
                    source.cancel()
            deadline = time.monotonic() + seconds
            while self._clients and time.monotonic() < deadline and not (hurry and hurry.is_set()):
                self._change.wait(min(0.2, max(0.0, deadline - time.monotonic())))
            self.draining = 2
            late = [source for connection in self._connections if (source := connection.source)]
        for source in late:
            source.cancel()
        with self._change:
            if not self._change.wait_for(lambda: not self._clients, self.limits.send_seconds if late else 1.0):
                for connection in self._connections:  # clients that do not read, or send a request byte by byte
                    with suppress(OSError):
                        connection.request.shutdown(socket.SHUT_RDWR)
                self._change.wait_for(lambda: not self._clients, 1.0)
        return len(late)

    def server_close(self) -> None:
        """Close the listening socket, the refused clients and the watch."""
        super().server_close()
        while self._refused:
            self._refused.popleft()[1].close()
        if hasattr(self, "watch"):  # not where the address could not be had
            self.watch.close()
