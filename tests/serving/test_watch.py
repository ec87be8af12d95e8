"""The watch, with sockets of its own: whom it calls, whom it does not, and that it never waits."""

from __future__ import annotations

import selectors
import socket
import time
import unittest
import unittest.mock

from starter.serving.watch import Watch
from tests.serving.support import SECONDS, eventually


class WatchTest(unittest.TestCase):
    selector: type[selectors.BaseSelector] = selectors.DefaultSelector

    def setUp(self) -> None:
        with unittest.mock.patch.object(selectors, "DefaultSelector", self.selector):
            self.watch = Watch()
        self.addCleanup(self.watch.close)
        self.server, self.client = socket.socketpair()
        self.addCleanup(self.server.close)
        self.addCleanup(self.client.close)
        self.server.settimeout(SECONDS)
        self.calls: list[str] = []

    def gone(self) -> None:
        self.calls.append("gone")

    def test_who_leaves_is_called_once(self) -> None:
        with self.watch.over(self.server, self.gone):
            self.client.close()
            self.assertTrue(eventually(lambda: self.calls == ["gone"]))
        self.assertEqual(self.calls, ["gone"])

    def test_after_the_block_nobody_is(self) -> None:
        with self.watch.over(self.server, self.gone):
            pass
        self.client.close()
        time.sleep(0.05)
        self.assertEqual(self.calls, [])

    def test_who_sends_is_not(self) -> None:
        with self.watch.over(self.server, self.gone):
            self.client.sendall(b"x")
            time.sleep(0.05)
        self.assertEqual((self.calls, self.server.recv(1)), ([], b"x"))

    def test_news_of_an_earlier_socket_of_the_same_number(self) -> None:
        """It is found to be none at once, though the socket's own time-out is long: others wait for the lock."""
        with self.watch.over(self.server, self.gone):
            started = time.monotonic()
            self.watch._look(self.watch._watched[self.server])
            self.assertLess(time.monotonic() - started, SECONDS / 2)
            self.assertEqual(self.calls, [])
            self.client.close()
            self.assertTrue(eventually(lambda: self.calls == ["gone"]))


class SelectTest(WatchTest):
    selector = selectors.SelectSelector


if __name__ == "__main__":
    unittest.main()
