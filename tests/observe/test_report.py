"""The report: one file that fetches nothing, holds the run and its numbers exactly, and survives any text."""

from __future__ import annotations

import json
import re
import tempfile
import unittest
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from starter.__main__ import main
from starter.base.fault_kinds import MemoryCut
from starter.command.play import play
from starter.engine import InferenceEngine
from starter.errors import SchemaError
from starter.metrics import Metrics
from starter.observe import report
from starter.observe.report import build_model, report_html, write_report
from starter.schema import SamplingParams, load_scenario
from starter.timeline import Event, VirtualClock
from tests.paths import FIXTURE, ROOT
from tests.support import FIVE, SERVINGS, TIGHT, Ask, Run, make_engine, run_main
from tests.timelines import full_engine

VIEWER = ROOT / "starter" / "observe" / "viewer"
NASTY = ("</script><script>alert(1)</script>", "<!--<script>", "\"'`&amp;", "请求\u2028一", "\ud800half",
         "\\u003c{{MODEL}}", "\0 7")


@cache
def fixture_run() -> str:
    scenario = load_scenario(FIXTURE)
    with InferenceEngine.from_scenario(scenario, clock=VirtualClock()) as engine:
        for _ in play(engine, scenario):
            pass
        return json.dumps(engine.timeline.events)


def fixture_events() -> list[Event]:
    """The fixture's run, a fresh copy."""
    events: list[Event] = json.loads(fixture_run())
    return events


def events_of(asks: dict[str, Ask], **settings: object) -> list[Event]:
    with make_engine(**settings) as engine:
        for name, ask in asks.items():
            ask.submit(engine, name)
        engine.run()
        return list(engine.timeline.events)


def island(html: str) -> Any:
    """The model, as a browser finds it: up to the first thing that ends a script."""
    text = html.split('<script id="model" type="application/json">')[1].split("</script")[0]
    return json.loads(text)


def without_comments(text: str) -> str:
    return re.sub(r"^\s*//.*$|/\*.*?\*/", "", text, flags=re.MULTILINE)


class FixtureReportTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.events = fixture_events()
        cls.html = report_html(cls.events)
        cls.model = island(cls.html)

    def steps(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "step"]

    def test_one_file_that_fetches_nothing(self) -> None:
        frame = re.sub(r'<script id="model".*?</script>', "", self.html, flags=re.DOTALL)
        for way in (r"https?:", r"\bsrc=", r"\burl\(", r"\bfetch\(", r"@import", r"\bimport\b[ (]", r"XMLHttpRequest",
                    r"{{"):
            self.assertIsNone(re.search(way, without_comments(frame)), way)
        self.assertEqual(re.findall(r'href="([^"]*)"', frame), ["data:,"])
        self.assertIn("default-src 'none'", frame)  # and the browser would not let it

    def test_every_file_of_the_viewer_is_in_it(self) -> None:
        self.assertEqual({path.name for path in VIEWER.iterdir()}, {"report.html", "report.css", *report.SCRIPTS})
        for name in ("report.css", *report.SCRIPTS):
            self.assertIn((VIEWER / name).read_text(encoding="utf-8"), self.html)

    def test_the_island_is_the_model(self) -> None:
        self.assertEqual(self.model, json.loads(json.dumps(build_model(self.events))))

    def test_the_same_events_give_the_same_text(self) -> None:
        self.assertEqual(report_html(fixture_events()), self.html)

    def test_metrics_are_those_of_the_timeline(self) -> None:
        self.assertEqual(self.model["metrics"], json.loads(json.dumps(Metrics.of(self.events).to_dict())))

    def test_times_of_each_request(self) -> None:
        for life in self.model["requests"]:
            with self.subTest(life["id"]):
                mine = [event for event in self.events if event.get("request") == life["id"]]
                [submitted] = [event["time"] for event in mine if event["event"] == "submit"]
                told = [event["time"] for event in mine if event["event"] == "token"]
                self.assertEqual(life["tokens"], len(told))
                self.assertEqual(life.get("ttft"), told[0] - submitted if told else None)
                self.assertEqual(life.get("tpot"), (told[-1] - told[0]) / (len(told) - 1) if len(told) > 1 else None)

    def test_a_frame_for_each_step_and_the_end(self) -> None:
        frames = self.model["frames"]
        self.assertEqual([frame["step"] for frame in frames[:-1]], [event["step"] for event in self.steps()])
        self.assertEqual([frame.get("end", False) for frame in frames], [False] * (len(frames) - 1) + [True])

    def test_a_step_that_was_abandoned_is_a_frame_that_computes_nothing(self) -> None:
        at = next(i for i, event in enumerate(self.events) if event["event"] == "step" and event["chunks"])
        step = self.events[at]
        abandon = {"event": "abandon", "step": step["step"], "time": step["time"]}
        model = build_model([*self.events[:at + 1], abandon, step])
        empty, full = model["frames"][-3:-1]
        self.assertEqual((empty["chunks"], len(full["chunks"]), full["step"]),
                         ([], 4 * len(step["chunks"]), empty["step"]))
        self.assertEqual(model["metrics"]["steps"], step["step"] + 1)

    def test_reasons_and_batches_are_word_for_word(self) -> None:
        ids = [life["id"] for life in self.model["requests"]]
        for frame, event in zip(self.model["frames"], self.steps()):
            said = {ids[request]: unfold(self.model, *folded) for request, *folded in frame["why"]}
            self.assertEqual(said, event["reasons"])
            flat = iter(frame["chunks"])
            chunks = [[ids[request], start, count, self.model["phases"][phase]]
                      for request, start, count, phase in zip(*[flat] * 4)]
            self.assertEqual(chunks, event["chunks"])

    def test_spans_say_where_each_request_was_in_each_step(self) -> None:
        preempted = set()
        for number, event in enumerate(self.steps()):
            preempted |= set(event["preempted"])
            phases = {request: phase for request, _, _, phase in event["chunks"]}
            for life in self.model["requests"]:
                name = life["id"]
                spans = [self.model["phases"][phase] for first, last, phase in life["spans"] if first <= number <= last]
                waits = "preempted" if name in preempted else "waiting"
                wanted = waits if name in event["waiting"] else phases.get(name)
                self.assertEqual(spans, [wanted] if wanted else [], (name, number))

    def test_spans_are_the_same_where_a_step_lists_only_the_first_of_its_queue(self) -> None:
        """Requests that are preempted, cancelled or still waiting when the timeline ends, listed or not."""
        def run(listed: int) -> dict[str, Any]:
            with patch("starter.scheduler.WAITING_LISTED", listed):
                engine = make_engine(page_size=2, num_pages=16, budget_tokens=6, max_running=4)
                for number in range(30):
                    engine.submit([number % 20, 1, 2], 7, request_id=f"r{number}", priority=number % 3,
                                  sampling=SamplingParams(n=1 + (number % 5 == 0)))
                    if number % 4 == 0:
                        engine.step()
                for number in (4, 17, 29):
                    engine.cancel(f"r{number}")
                for _ in range(20):
                    engine.step()
                return build_model(engine.timeline.events)

        short, full = run(3), run(1_000)
        self.assertEqual([life["spans"] for life in short["requests"]], [life["spans"] for life in full["requests"]])
        phases = {full["phases"][phase] for life in full["requests"] for _, _, phase in life["spans"]}
        self.assertGreaterEqual(phases, {"waiting", "preempted", "prefill", "decode"})
        queues, queue = [], []
        for frame in full["frames"][:-1]:
            queue = frame.get("waiting", queue)
            queues.append(len(queue))
        self.assertEqual([max(frame.get("waiting_count", 0), min(length, 3)) for frame, length in
                          zip(short["frames"], queues)], queues)
        self.assertGreater(max(queues), 20)

    def test_tokens_belong_to_the_step_that_computed_them(self) -> None:
        for frame, event in zip(self.model["frames"], self.steps()):
            texts = {event["request"]: event["text"] for event in self.events
                     if event["event"] == "token" and event["step"] == frame["step"] + 1}
            out = {self.model["requests"][request]["id"]: text for request, _, text in frame["out"]}
            self.assertEqual(out, texts, event["step"])

    def test_prompts_can_be_read(self) -> None:
        [late] = [life for life in self.model["requests"] if life["id"] == "late"]
        self.assertEqual(late["text"], "it was the best of times for the fox")


def unfold(model: dict[str, Any], sentence: int, *numbers: int) -> str:
    """What the viewer does: each gap is filled by the next number, or stays."""
    rest = iter(numbers)
    return re.sub("\0", lambda gap: str(next(rest, gap[0])), model["sentences"][sentence])


class ModelTest(unittest.TestCase):
    def test_the_pages_of_every_frame_are_those_the_engine_counted(self) -> None:
        with full_engine() as engine:
            runs = [list(engine.timeline.events)]
        three = Ask((2, 7, 1, 8, 2, 8), 6, SamplingParams(temperature=1.0, seed=1, n=3))
        asks = {**FIVE, "f": FIVE["c"], "g": three}
        runs += [events_of(asks, **{**TIGHT, "num_pages": 12, **settings}) for settings in SERVINGS]
        for events in runs:
            with self.subTest(events[0]["settings"]):
                steps = [event for event in events if event["event"] == "step"]
                tables: dict[int, list[int]] = {}
                frames = build_model(events)["frames"]
                self.assertEqual(len(frames), len(steps) + 1)
                for frame, step in zip(frames, steps):
                    for op in frame["ops"]:
                        change_tables(tables, op)
                    used = {page for table in tables.values() for page in table}
                    self.assertEqual(len(used), step["used_pages"], step["step"])

    def test_times_of_samples_and_of_unfinished_requests_are_those_of_the_metrics(self) -> None:
        three = Ask((2, 7, 1, 8, 2, 8), 6, SamplingParams(temperature=1.0, seed=1, n=3))
        events = events_of({"three": three, **FIVE})
        for length in (len(events), len(events) // 2):
            model = build_model(events[:length])
            for name in ("ttft", "tpot"):
                values = [life[name] for life in model["requests"] if name in life]
                summary = model["metrics"][name]
                self.assertEqual((len(values), max(values, default=None)), (summary["count"], summary["max"]), name)

    def test_an_id_used_again_is_another_request(self) -> None:
        with make_engine() as engine:
            for _ in range(2):
                engine.submit([1, 2], 2, request_id="again")
                list(engine.stream("again"))
            lives = build_model(engine.timeline.events)["requests"]
        self.assertEqual([(life["id"], life["tokens"]) for life in lives], [("again", 2), ("again", 2)])

    def test_holders_from_outside_are_no_requests(self) -> None:
        with make_engine(num_pages=16) as engine:
            engine.inject([MemoryCut(step=1, pages=3, until=4)])
            engine.submit([1, 2, 3], 8, request_id="r")
            engine.run()
            model = build_model(engine.timeline.events)
        [holder] = [number for number, life in enumerate(model["requests"]) if life.get("outside")]
        changes = [op for frame in model["frames"] for op in frame["ops"] if op[0] in ("allocate", "release")]
        held = [op for op in changes if op[1] == holder]
        self.assertEqual([(kind, len(pages)) for kind, _, pages in held], [("allocate", 3), ("release", 3)])

    def test_what_it_does_not_know_is_passed_over(self) -> None:
        events = fixture_events()
        polish = {"change": "polish", "request": "exact", "pages": [0], "used_pages": 20}
        strange = [{"event": "weather", "step": 3, "time": 3.0, "request": "nobody"},
                   {"event": "pages", "step": 3, "time": 3.0, **polish}]
        place = next(i for i, event in enumerate(events) if event["event"] == "token")
        more = [*events[:place], *strange, *({**event, "colour": "blue"} for event in events[place:])]
        self.assertEqual(build_model(more), build_model(events))

    def test_any_text_survives(self) -> None:
        text = json.dumps(events_of({f"name {number}": Ask((number + 1, 2, 3), 3) for number in range(len(NASTY))}))
        for number, name in enumerate(NASTY):  # an engine refuses some of them; a file may hold them
            text = text.replace(f'"name {number}"', json.dumps(name))
        events = json.loads(text)
        for event in events:
            if event["event"] == "token":
                event["text"] = event["request"]
            if event["event"] == "step":
                event["reasons"] = {request: f"{request} 007 1\0 {10**20} -3 0.5" for request in event["reasons"]}
        html = report_html([{**events[0], "scenario": NASTY[0]}, *events[1:]])
        model = island(html)
        html.encode("utf-8")
        self.assertEqual(html.count("<script"), report_html(fixture_events()).count("<script"))
        self.assertEqual(tuple(life["id"] for life in model["requests"]), NASTY)
        self.assertEqual({text for frame in model["frames"][:-1] for _, _, text in frame["out"]}, set(NASTY))
        said = {unfold(model, *folded) for frame in model["frames"][:-1] for _, *folded in frame["why"]}
        self.assertEqual(said, {f"{request} 007 1\0 {10**20} -3 0.5" for request in NASTY})

    def test_numbers_are_folded_and_come_back(self) -> None:
        events = fixture_events()
        sentences = ["a 1 b", "a 2 b", "a 12 b", "a 012 b", "a 0 b", "a 0.5 b", f"a {10**30} b", "a ٣ b", "1", ""]
        step = next(event for event in events if event["event"] == "step")
        for sentence in sentences:
            step["reasons"] = {"exact": sentence}
            model = build_model(events)
            [[_, *folded]] = model["frames"][0]["why"]
            self.assertEqual(unfold(model, *folded), sentence)


def change_tables(tables: dict[int, list[int]], op: list[Any]) -> None:
    """The block tables after one more change, by what timeline.py says of each."""
    kind, request, *rest = op
    pages = rest[0] if rest else []
    table = tables.setdefault(request, []) if kind in report.TABLE_CHANGES else []
    if kind in ("allocate", "share", "swap_in"):
        table += pages
    elif kind == "copy":
        table[table.index(pages[0])] = pages[1]
    elif kind in ("release", "swap_out"):
        for page in pages:
            table.remove(page)


class BadInputTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.events = fixture_events()

    def refused(self, events: list[Event], *words: str) -> None:
        with self.assertRaises(SchemaError) as caught:
            report_html(events)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def changed(self, kind: str, **fields: object) -> list[Event]:
        place = next(i for i, event in enumerate(self.events) if event["event"] == kind)
        return [*self.events[:place], {**self.events[place], **fields}, *self.events[place + 1:]]

    def test_events_that_are_no_timeline(self) -> None:
        self.refused([], "there are none")
        self.refused(self.events[1:], "must be the header")
        self.refused([*self.events, self.events[0]], "second header")
        self.refused([event for event in self.events if event["event"] != "submit"], "'single' was never submitted")

    def test_damage_names_the_event(self) -> None:
        for events, words in (
            (self.changed("header", num_pages=0), ("num_pages", "1 to")),
            (self.changed("header", settings={}), ("event 1", "page_size")),
            (self.changed("pages", pages=[20]), ("0 to 19", "[20]")),
            (self.changed("pages", pages=["x"]), ("0 to 19",)),
            (self.changed("pages", pages=3), ("event 6", "TypeError")),
            (self.changed("step", chunks=[["exact", 1]]), ("event 5", "ValueError")),
            (self.changed("step", chunks=[["exact", 0, 1, "sleep"]]), ("event 5", "ValueError")),
            (self.changed("step", reasons={"exact": 5}), ("event 5", "TypeError")),
            (self.changed("submit", prompt_tokens=[99]), ("event 2", "IndexError")),
        ):
            with self.subTest(words):
                self.refused(events, *words)

    def test_a_path_that_cannot_be_written(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for path in (folder, Path(folder) / "no" / "report.html", f"{folder}/a\0b"):
                with self.subTest(str(path)), self.assertRaisesRegex(SchemaError, "cannot write the report"):
                    write_report(self.events, path)


class CommandTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def command(self, *arguments: str) -> Run:
        return run_main(main, "report", *arguments)

    def test_writes_the_report_of_a_file(self) -> None:
        with make_engine() as engine, engine.timeline.written_to(self.folder / "run.jsonl"):
            engine.generate([[1, 2, 3]], 4)
            events = engine.timeline.events
        target = self.folder / "out.html"
        code, out, err = self.command(str(self.folder / "run.jsonl"), "-o", str(target))
        self.assertEqual((code, err), (0, ""))
        self.assertIn(str(target), out)
        self.assertEqual(target.read_bytes().decode("utf-8"), report_html(events))

    def test_bad_input_is_one_line_and_2(self) -> None:
        (self.folder / "bad.jsonl").write_text("{", encoding="utf-8")
        for path in ("no.jsonl", str(self.folder / "bad.jsonl")):
            with self.subTest(path):
                code, out, err = self.command(path)
                self.assertEqual((code, out, err.count("\n"), err[:7]), (2, "", 1, "error: "))


if __name__ == "__main__":
    unittest.main()
