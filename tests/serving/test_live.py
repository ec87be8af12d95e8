"""GET / and GET /live: the timeline as it happens, without texts; viewers that are slow, that leave, that are many."""

from __future__ import annotations

import json
import os
import socket
import threading
import unittest
import unittest.mock
from dataclasses import replace
from typing import Any, ClassVar

from starter.serving import live
from starter.serving.live import Feed, shown
from tests.extras import needs
from tests.serving.support import ServerCase, eventually, read_until
from tests.wings import needs_wing

VIEW = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"


def events_in(received: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]


class LiveTest(ServerCase):
    def view(self) -> socket.socket:
        """A viewer that has got its first event."""
        before = len(self.engine.timeline.listeners)
        client = self.raw(VIEW)
        self.assertTrue(eventually(lambda: len(self.engine.timeline.listeners) > before))
        return client

    def test_the_page(self) -> None:
        reply = self.ask("GET", "/")
        self.assertEqual((reply.status, reply.headers["content-type"]), (200, "text/html; charset=utf-8"))
        self.assertIn("default-src 'none'", reply.headers["content-security-policy"])
        text = reply.body.decode("utf-8")
        self.assertIn('fetch("live"', text)
        for elsewhere in ("http://", "https://", "src=", "@import"):
            self.assertNotIn(elsewhere, text)

    def test_what_happens(self) -> None:
        """Everything from "now" on, in order: the counts are those of the answer."""
        client = self.view()
        self.complete("abc", max_tokens=5, request_id="x", stop=["qqq"], cache_salt="salt")
        events = events_in(read_until(client, b'"event": "finish"'))
        kinds = [event["event"] for event in events]
        self.assertEqual(kinds[0], "now")
        self.assertEqual(kinds.count("token"), 5)
        self.assertEqual((events[0]["num_pages"], events[0]["used_pages"]), (self.engine.kv.total_pages, 0))
        (submit,) = (event for event in events if event["event"] == "submit")
        self.assertEqual((submit["request"], submit["prompt_length"], submit["max_tokens"]), ("cmpl-x", 3, 5))
        text = json.dumps(events)
        for private in ('"text"', '"token":', "prompt_tokens", "qqq", "salt"):
            self.assertNotIn(private, text)
        client.close()
        self.assertTrue(eventually(lambda: not self.engine.timeline.listeners))

    def test_texts_where_they_are_asked_for(self) -> None:
        self.server.api.settings = replace(self.settings, texts=True)
        client = self.view()
        text = self.complete("abc", max_tokens=5)["choices"][0]["text"]
        events = events_in(read_until(client, b'"event": "finish"'))
        self.assertEqual("".join(event.get("text", "") for event in events), text)

    def test_why_a_request_was_refused_is_private(self) -> None:
        """The reason may quote the prompt."""
        self.assertEqual(shown({"event": "refuse", "step": 1, "request": "a", "error": "the character 'Z'"}, False),
                         {"event": "refuse", "step": 1, "request": "a"})

    def test_a_viewer_that_is_too_slow(self) -> None:
        """It is told how much it has missed; the engine does not wait."""
        with unittest.mock.patch.object(live, "MOST", 50), Feed(self.engine, False) as feed:
            first = feed.take()
            self.complete(max_tokens=100)
            events = events_in(b"".join(feed.take()))
        self.assertEqual(events_in(first[0])[0]["event"], "now")
        self.assertEqual(events[0]["event"], "dropped")
        self.assertLessEqual(len(events), 51)
        self.assertGreater(events[0]["events"], 100)
        self.assertEqual(events[-1]["event"], "finish" if events[-1]["event"] == "finish" else "pages")

    def test_viewers_leave(self) -> None:
        for client in [self.view() for _ in range(5)]:
            client.close()
        self.assertTrue(eventually(lambda: not (self.engine.timeline.listeners or self.server.clients)))

    def test_the_server_does_not_wait_for_them(self) -> None:
        client = self.view()
        threading.Thread(target=self.server.drain, args=(60.0,)).start()
        self.assertTrue(read_until(client, b"0\r\n\r\n").endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"))
        self.assertTrue(eventually(lambda: not self.server.clients))

    def test_the_engine_dies(self) -> None:
        client = self.view()
        with unittest.mock.patch.object(self.engine._core, "settle", side_effect=SystemExit("half recorded")), \
                unittest.mock.patch.object(Feed, "seconds_left", 0.05):
            self.ask("POST", "/v1/completions", {"prompt": "abc"})
            received = read_until(client, b"0\r\n\r\n")
        self.assertEqual(events_in(received)[-1]["error"]["code"], "engine_stopped")


class KeyTest(ServerCase):
    settings = replace(ServerCase.settings, key="secret")

    def test_what_needs_a_key(self) -> None:
        self.assertEqual(self.ask("GET", "/").status, 200)
        self.assertEqual(self.ask("GET", "/live").status, 401)
        self.assertEqual(self.ask("HEAD", "/live", headers={"Authorization": "Bearer secret"}).status, 200)


@needs("browser", "selenium")
@needs_wing("observe")
class BrowserTest(ServerCase):
    engine_settings: ClassVar = {"page_size": 4, "num_pages": 40}

    def test_tokens_and_pages_move(self) -> None:
        """Headless Chromium opens the page; a request shows with its tokens and pages, and ends."""
        from scripts.screenshot_report import Browser, programs  # which needs the wing observe
        if None in programs() and os.environ.get("P07_REQUIRE_EXTRAS") != "1":
            self.skipTest("SKIPPED: needs chromium and chromedriver on the PATH")
        with Browser() as browser:
            browser.driver.get(f"http://127.0.0.1:{self.server.port}/")
            self.assertTrue(eventually(lambda: bool(self.engine.timeline.listeners)))
            self.gate.open.clear()
            request = self.engine.submit("abc", 30, request_id="seen")
            for _ in range(12):
                self.gate.allowed.release()

            def told(script: str) -> Any:
                return browser.driver.execute_script(f"return {script}")

            self.assertTrue(eventually(lambda: "seen" in told("document.getElementById('requests').textContent")))
            self.assertTrue(eventually(lambda: told("requests.get('seen').tokens") >= 8))
            self.assertTrue(eventually(lambda: told("pages.filter(p => p.size).length") >= 2))
            self.gate.open.set()
            self.engine.result(request)
            self.assertTrue(eventually(lambda: told("requests.get('seen').state") == "length"))
            self.assertTrue(eventually(lambda: told("pages.filter(p => p.size).length") == 0))
            self.assertEqual(told("requests.get('seen').tokens"), 30)
            self.assertEqual([trouble for trouble in browser.troubles() if "favicon" not in trouble], [])


if __name__ == "__main__":
    unittest.main()
