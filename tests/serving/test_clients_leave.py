"""A client that goes away ends its request at once: pages are free, and nobody else notices."""

from __future__ import annotations

import random
import selectors
import socket
import struct
import threading
import unittest
import unittest.mock
from typing import Any, ClassVar

from starter.engine import InferenceEngine
from tests.serving.support import ServerCase, engine_of, eventually, post, read_until

LONG = {"prompt": "abc", "max_tokens": 120, "temperature": 0}


class LeavingTest(ServerCase):
    engine_settings: ClassVar = {"page_size": 4, "num_pages": 80, "max_running": 16}

    def leave(self, client: socket.socket, how: str) -> None:
        """Close it: "close", "reset" (with pending data thrown away), or only the sending half."""
        if how == "half":
            client.shutdown(socket.SHUT_WR)
            return
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()

    def test_within_one_step(self) -> None:
        """The backend stands still, and pages are free all the same: no step has to end for that."""
        for stream in (True, False):
            for how in ("close", "reset", "half"):
                with self.subTest(stream=stream, how=how):
                    self.gate.open.clear()
                    client = self.raw(post({**LONG, "stream": stream, "n": 3}))
                    self.assertTrue(eventually(lambda: bool(self.engine.active)))
                    if stream:
                        read_until(client, b"\r\n\r\n")
                    self.gate.allowed.release()
                    self.assertTrue(eventually(lambda: self.engine.steps > 0))
                    self.leave(client, how)
                    self.assertTrue(eventually(lambda: not self.engine.active))
                    self.gate.open.set()
                    self.assertTrue(eventually(self.all_free))
        self.assertEqual(self.engine.metrics().finished["cancelled"], 6)

    def test_after_the_first_token(self) -> None:
        """And a follow-up with the same prefix, sent at once, gives what it gives alone."""
        expected = self.complete("abcab", max_tokens=20, temperature=0)["choices"]
        for how in ("close", "reset"):
            client = self.raw(post({**LONG, "prompt": "abc", "stream": True}))
            read_until(client, b"data: ")
            self.leave(client, how)
            self.assertEqual(self.complete("abcab", max_tokens=20, temperature=0)["choices"], expected)
            self.assertTrue(eventually(self.all_free))

    def test_neighbours_go_on(self) -> None:
        """Three others finish with the tokens that they have alone, while one client leaves in a long prefill."""
        prompts = ["abcdefgh", "ponm", "t"]
        alone = [self.complete(prompt, max_tokens=30, temperature=0)["choices"][0]["text"] for prompt in prompts]
        self.gate.open.clear()
        answers: dict[str, Any] = {}

        def ask(prompt: str) -> None:
            answers[prompt] = self.complete(prompt, max_tokens=30, temperature=0)["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        client = self.raw(post({"prompt": "abcd" * 25, "max_tokens": 20}))
        self.assertTrue(eventually(lambda: len(self.engine.active) == 4))
        for _ in range(3):
            self.gate.allowed.release()
        client.close()
        self.assertTrue(eventually(lambda: len(self.engine.active) == 3))
        self.gate.open.set()
        for thread in threads:
            thread.join()
        self.assertEqual([answers[prompt] for prompt in prompts], alone)

    def test_random_times(self) -> None:
        """300 clients leave at any moment, in any way: no page, no request, no thread stays."""
        dice = random.Random(5)

        def some(seed: int) -> None:
            own = random.Random(seed)
            for _ in range(30):
                body = {"prompt": "abc" * own.randint(1, 9), "max_tokens": own.randint(1, 60), "n": own.randint(1, 3),
                        "stream": own.random() < 0.6}
                data = post(body)
                client = socket.create_connection(("127.0.0.1", self.server.port), timeout=20)
                try:
                    client.sendall(data[:own.choice((0, 20, len(data) - 3, len(data), len(data), len(data)))])
                    if own.random() < 0.5:
                        client.settimeout(own.random() * 0.02 + 0.001)
                        client.recv(own.randint(1, 2_000))
                except OSError:
                    pass
                finally:
                    self.leave(client, own.choice(("close", "reset")))

        threads = [threading.Thread(target=some, args=(dice.random(),)) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertTrue(eventually(lambda: self.all_free() and not self.server.clients))
        self.assertEqual(len(self.engine.readers), 0)
        self.complete()

    def test_a_request_sent_early_does_not_hide_the_end(self) -> None:
        """A pipelining client is no longer watched; that it left shows when an event cannot be sent."""
        client = self.raw(post({**LONG, "stream": True}) + post({"prompt": "a"}))
        read_until(client, b"data: ")
        self.leave(client, "reset")
        self.assertTrue(eventually(self.all_free))

    def test_nothing_is_kept_of_finished_requests(self) -> None:
        for _ in range(100):
            self.complete("ab", max_tokens=1)
            self.stream("ab", max_tokens=1)
        self.assertTrue(self.all_free())
        self.assertEqual(len(self.engine._core.streams), 0)


class LeavingBySelectTest(LeavingTest):
    """The same with the only selector that Windows has, which does not see a new socket while it waits."""

    def serve(self, engine: InferenceEngine, **options: Any) -> None:
        with unittest.mock.patch.object(selectors, "DefaultSelector", selectors.SelectSelector):
            super().serve(engine, **options)


class ThirtyTwoTest(ServerCase):
    engine_settings: ClassVar = {"page_size": 4, "num_pages": 40, "max_running": 6, "budget_tokens": 8}

    def test_each_gets_its_own(self) -> None:
        """32 clients at once, streaming or not, in a pool that makes the engine preempt."""
        prompts = [[i % 20, i // 20, 7, i % 3] for i in range(32)]
        expected = []
        with engine_of(page_size=4, num_pages=40) as engine:
            for prompt in prompts:
                expected.append(engine.generate([prompt], 12)[0])
        texts: dict[int, str] = {}

        def ask(number: int) -> None:
            fields = {"max_tokens": 12, "temperature": 0, "request_id": str(number)}
            if number % 2:
                chunks = self.stream(prompts[number], **fields)
                self.assertEqual({chunk["id"] for chunk in chunks}, {f"cmpl-{number}"})
                texts[number] = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            else:
                whole = self.complete(prompts[number], **fields)
                self.assertEqual(whole["id"], f"cmpl-{number}")
                texts[number] = whole["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([texts[number] for number in range(32)], list(map(self.engine.tokenizer.decode, expected)))


if __name__ == "__main__":
    unittest.main()
