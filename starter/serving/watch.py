"""Notices clients that go away while their request runs: one thread looks at all of their sockets.

A thread that waits for the engine cannot wait for its socket as well, and a socket that was closed shows it only to
those who look. Here one selector looks at all, and calls at once what ends the request: its pages are free before the
next step.

A client that closes only its sending side counts as gone: nothing distinguishes it from one that closed both. One that
sends its next request early (pipelining) is no longer watched; that it went away shows when an event cannot be sent. So
it does for clients beyond the first 500 on Windows, whose selector can look at 512 sockets.
"""

from __future__ import annotations

import select
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Thread

_LIVE = tuple(getattr(selectors, name) for name in ("EpollSelector", "KqueueSelector") if hasattr(selectors, name))
_MOST_BY_SELECT = 500


def _readable(client: socket.socket) -> bool:
    """Would ``recv`` return at once? Without asking, it would wait for as long as the socket's time-out, and everybody
    with it."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(client, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([client], [], [], 0)[0])


class Watch:
    """The thread and its selector; ``close`` ends them."""

    def __init__(self) -> None:
        self._lock = Lock()  # never taken by a thread that holds the engine's lock
        self._selector = selectors.DefaultSelector()
        self._sees_new_ones = isinstance(self._selector, _LIVE)  # also while it waits
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._watched: dict[socket.socket, selectors.SelectorKey] = {}
        self._closed = False
        self._thread = Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, client: socket.socket, gone: Callable[[], None]) -> Iterator[None]:
        """Within the block, call ``gone`` once if the client closes its connection; never after the block."""
        with self._lock:
            if self._sees_new_ones or len(self._watched) < _MOST_BY_SELECT:
                self._watched[client] = self._selector.register(client, selectors.EVENT_READ, gone)
        if not self._sees_new_ones:
            self._wake()
        try:
            yield
        finally:
            with self._lock:
                self._forget(client)

    def _forget(self, client: socket.socket) -> None:
        if self._watched.pop(client, None):  # None: it went away, and was forgotten then
            self._selector.unregister(client)

    def _wake(self) -> None:
        with suppress(OSError):  # it is full of wake-up calls
            self._ring.send(b"\0")

    def _run(self) -> None:
        while not self._closed:
            try:
                ready = self._selector.select()
            except OSError:  # a socket was closed just before this call
                continue
            for key, _ in ready:
                if key.fileobj is self._bell:
                    with suppress(OSError):
                        self._bell.recv(4096)
                else:
                    self._look(key)

    def _look(self, key: selectors.SelectorKey) -> None:
        with self._lock:
            client: socket.socket = key.fileobj  # type: ignore[assignment]
            if self._watched.get(client) is not key:
                return  # its block has ended
            if not _readable(client):
                return  # the news was of an earlier client, whose socket had the same number
            try:
                closed = not client.recv(1, socket.MSG_PEEK)
            except OSError:
                closed = True
            self._forget(client)
            if closed:
                key.data()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake()
        self._thread.join()
        self._selector.close()
        self._bell.close()
        self._ring.close()
