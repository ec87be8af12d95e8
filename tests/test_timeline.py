"""The event log: kept, written, read back, the same byte for byte, and refused by line where it is damaged."""

from __future__ import annotations

import json
import random
import tempfile
import unittest
from collections import Counter
from contextlib import suppress
from itertools import count
from math import inf, nan
from pathlib import Path
from threading import Event as Flag
from threading import Thread

from starter.base.fault_kinds import MemoryCut
from starter.engine import InferenceEngine
from starter.errors import RequestError, SchemaError
from starter.metrics import MetricsCollector
from starter.model import Loaded
from starter.schema import MODEL_SHAPE, REQUEST_SHAPE, Request, SamplingParams, TokenEvent, load_scenario
from starter.timeline import Event, Recorder, Timeline, VirtualClock
from tests.paths import FIXTURE
from tests.support import CONFIG, HEALTHY, json_lines, make_engine, prompt_of
from tests.timelines import as_read
from tests.wings import has_wing, needs_wing

if has_wing("observe"):
    from starter.observe.audit import Audit
    from starter.observe.timeline_file import read_timeline

HEAD: Event = {"event": "header", "step": 0, "time": 0.0, "version": 2, "step_seconds": 1.0, "engine": "0",
               "backend": "cpu", "settings": {}, "model": MODEL_SHAPE.dump(CONFIG), "page_bytes": 64, "num_pages": 4,
               "weight_bytes": 10}


class FolderTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name) / "run.jsonl"


def busy_engine(seed: int) -> InferenceEngine:
    """An engine after a random run: requests of all kinds in too few pages, cancels, preemptions, a refusal."""
    dice = random.Random(seed)
    engine = make_engine(page_size=dice.randint(1, 4), num_pages=dice.randint(24, 30), budget_tokens=dice.randint(2, 9),
                         max_running=4)
    for i in range(8):
        sampling = SamplingParams(dice.choice((0.0, 1.0)), n=dice.choice((1, 1, 3)))
        engine.submit(prompt_of(dice, dice.randint(1, 9)), dice.randint(0, 9), request_id=f"r{i}", sampling=sampling)
        for _ in range(dice.randint(0, 3)):
            engine.step()
        if dice.random() < 0.2 and engine.active:
            engine.cancel(dice.choice(engine.active))
    with suppress(RequestError):
        engine.submit([], 1)
    engine.run()
    return engine


class VirtualClockTest(unittest.TestCase):
    def test_it_stands_still_until_a_step_has_passed(self) -> None:
        clock = VirtualClock(0.5)
        times = [clock(), clock()]
        clock.tick()
        clock.tick()
        self.assertEqual([*times, clock()], [0.0, 0.0, 1.0])
        engine = make_engine()
        engine.submit([1, 2], 3)
        engine.run()
        self.assertEqual([event["time"] for event in engine.timeline if event["event"] == "token"], [1.0, 2.0, 3.0])


class RealClockTest(unittest.TestCase):
    @needs_wing("observe")
    def test_time_never_goes_back(self) -> None:
        """A clock that moves on with every look, as a real one does; requests end at every possible moment."""
        ticks = count()
        engine = InferenceEngine(HEALTHY, clock=lambda: float(next(ticks)))
        free = engine.generate([[1, 2]], 12)[0]
        for at, token in enumerate(free):
            engine.submit([1, 2], 12, request_id=f"token {at}", stop_tokens=[token])
            engine.submit([1, 2], 12, request_id=f"text {at}",
                          sampling=SamplingParams(stop=engine.tokenizer.decode([token])))
        engine.run()
        times = [event["time"] for event in engine.timeline]
        self.assertEqual(times, sorted(times))
        self.assertEqual(Audit.of(engine.timeline.events).violations, [])


    def test_readings_that_are_no_time_are_passed_over(self) -> None:
        """A timeline that holds one could not be written as JSON."""
        readings = [3.0, nan, 2.0, inf, 5.0, -inf, 4.0, 6.0]
        recorder = Recorder(iter(readings).__next__, MetricsCollector())
        for number in range(len(readings) - 1):
            recorder.event("note", number=number)
        self.assertEqual([event["time"] for event in recorder.timeline], [3.0, 3.0, 3.0, 5.0, 5.0, 5.0, 6.0])
        for wrong in (nan, inf):
            with self.assertRaisesRegex(SchemaError, "expected a function that returns seconds"):
                InferenceEngine(HEALTHY, clock=lambda wrong=wrong: wrong)


class KeepTest(FolderTest):
    def test_the_last_events_are_kept_and_listeners_get_all(self) -> None:
        timeline, heard, late = Timeline(keep=3), [], []
        timeline.listen(heard.append)
        timeline.append(HEAD)
        for i in range(5):
            timeline.append({"event": "cancel", "step": i, "time": float(i), "request": f"r{i}"})
        timeline.listen(late.append)
        timeline.append({"event": "finish", "step": 5, "time": 5.0, "request": "r"})
        kept = [{"event": "cancel", "step": i, "time": float(i), "request": f"r{i}"} for i in (3, 4)]
        self.assertEqual(list(timeline), [*kept, {"event": "finish", "step": 5, "time": 5.0, "request": "r"}])
        self.assertEqual(timeline.events, tuple(timeline))
        self.assertEqual((len(timeline), timeline.recorded, len(heard), len(late)), (3, 7, 7, 1))
        self.assertEqual(timeline.header, HEAD)
        self.assertEqual(repr(timeline), "<Timeline: 7 events, 3 kept>")

    def test_a_token_is_kept_as_its_reader_gets_it_and_shown_as_an_event(self) -> None:
        timeline, heard = Timeline(), []
        timeline.tokens([TokenEvent("r", 0, 5, "x", 2, 3.0)])
        timeline.listen(heard.append)
        timeline.tokens([TokenEvent("r", 4, 6, "y", 7, 8.5, -0.5, "length", sample=2)])
        first = {"event": "token", "step": 3, "time": 3.0, "request": "r", "index": 0, "token": 5, "text": "x"}
        second = {"event": "token", "step": 8, "time": 8.5, "request": "r#2", "index": 4, "token": 6, "text": "y"}
        self.assertEqual((list(timeline), timeline.events, heard), ([first, second], (first, second), [second]))
        self.assertEqual((len(timeline), timeline.recorded), (2, 2))

    def test_the_likeliest_tokens_are_not_kept(self) -> None:
        """A vocabulary of them for each of 100,000 tokens would be too much."""
        engine = make_engine()
        engine.submit([1, 2], 3, request_id="r", sampling=SamplingParams(logprobs=5))
        [first, *_] = engine.stream("r")
        kept = [TokenEvent._make(entry) for entry in engine.timeline._events if isinstance(entry, tuple)]
        self.assertEqual((len(first.top_logprobs), [entry.top_logprobs for entry in kept]), (5, [(), (), ()]))

    def test_a_file_opened_while_events_come_in_has_them_all(self) -> None:
        timeline, ready = Timeline(), Flag()

        def record() -> None:
            for i in range(3_000):
                timeline.append({"event": "cancel", "step": i, "time": 0.0, "request": "r"})
                if i == 100:
                    ready.set()

        timeline.append(HEAD)
        thread = Thread(target=record)
        thread.start()
        ready.wait()
        with timeline.written_to(self.path):
            thread.join()
        self.assertEqual([event["step"] for event in json_lines(self.path)[1:]], list(range(3_000)))

    @needs_wing("observe")
    def test_what_is_written_can_be_read_even_when_the_header_was_dropped(self) -> None:
        timeline = Timeline(keep=2)
        timeline.append(HEAD)
        for i in range(4):
            timeline.write(self.path)
            kept = list(timeline)[i == 0 or i == 1:]
            mark = [{"event": "dropped", "step": i - 2, "time": 0.0, "events": i - 2}] if i > 2 else []
            self.assertEqual(read_timeline(self.path, whole=False), [timeline.header, *mark, *kept])
            if mark:
                with self.assertRaisesRegex(SchemaError, f"lacks {i - 2} events after its header"):
                    read_timeline(self.path)
            timeline.append({"event": "cancel", "step": i, "time": 0.0, "request": "r"})

    def test_what_is_handed_out_is_a_copy(self) -> None:
        """Down to the last list: callers change what they get, and write the timeline afterwards."""
        engine, heard = make_engine(), []

        def spoil(value: object) -> None:
            if isinstance(value, dict):
                for item in list(value.values()):
                    spoil(item)
                value.clear()
            elif isinstance(value, list):
                for item in value:
                    spoil(item)
                value.clear()

        def listener(event: Event) -> None:
            heard.append(event["event"])
            spoil(event)

        engine.timeline.listen(listener)
        engine.submit([1, 2], 3, sampling=SamplingParams(logit_bias={3: 1.0}), stop_tokens=[7])
        decisions = [engine.step() for _ in range(4)]
        before = json.dumps([engine.timeline.header, *engine.timeline.events])
        for handed_out in (engine.timeline.header, *engine.timeline.events, *engine.timeline, decisions[0].reasons,
                           decisions[0].found, engine.metrics().finished):
            spoil(handed_out)
        self.assertEqual(json.dumps([engine.timeline.header, *engine.timeline.events]), before)
        self.assertLessEqual({"submit", "step", "pages", "token", "finish"}, {*heard})
        self.assertEqual(engine.metrics().finished["length"], 1)

    def test_a_listener_cannot_change_what_the_others_hear(self) -> None:
        """Nor, above all, what is written to a file."""
        engine, heard = make_engine(), []
        engine.timeline.listen(lambda event: event.pop("time"))
        with engine.timeline.written_to(self.path):
            engine.timeline.listen(lambda event: event.clear())
            engine.timeline.listen(heard.append)
            engine.generate([[1, 2]], 3)
        self.assertEqual(heard, list(engine.timeline)[1:])
        self.assertEqual(json_lines(self.path), as_read(engine.timeline))

    def test_what_was_given_is_copied(self) -> None:
        """What the header says of a model, and what a caller records."""
        about: Event = {"weights": {"source": "seeded", "seed": 7}}
        engine = InferenceEngine(Loaded(HEALTHY.model, HEALTHY.tokenizer, about))
        given: list[int] = [1, 2]
        engine.record("note", numbers=given)
        about["weights"].clear()
        given.clear()
        self.assertEqual(engine.timeline.header["weights"], {"source": "seeded", "seed": 7})
        self.assertEqual(engine.timeline.events[-1]["numbers"], [1, 2])

    def test_a_refusal_is_recorded_in_few_characters(self) -> None:
        engine = make_engine()
        for wrong in ({"prompt_tokens": ["a" * 100_000]}, {"prompt_tokens": [1], "request_id": ["a"] * 100_000},
                      {"prompt_tokens": [-1], "request_id": "b" * 100_000}):
            self.assertRaises(RequestError, engine.submit, max_tokens=1, **wrong)
            refuse = engine.timeline.events[-1]
            self.assertEqual((refuse["event"], len(refuse["request"]) <= 200, len(refuse["error"]) <= 1_000),
                             ("refuse", True, True))
        self.assertEqual((refuse["request"], refuse["error"]),
                         ("b" * 199 + "…", "a prompt token must be an integer from 0, not -1"))

    def test_keep_events_bounds_memory_and_0_keeps_none(self) -> None:
        for keep in (0, 1, 5):
            engine, heard = make_engine(keep_events=keep), []
            engine.timeline.listen(heard.append)
            engine.generate([[1, 2]], 4)
            self.assertEqual((len(engine.timeline), engine.timeline.recorded), (keep, len(heard) + 1))
            self.assertEqual(engine.timeline.header["event"], "header")
            self.assertEqual("keep_events" in engine.timeline.header["settings"], True)
        self.assertNotIn("keep_events", make_engine().timeline.header["settings"])  # only where it is not the default

    def test_a_step_event_does_not_grow_with_the_queue(self) -> None:
        engine = make_engine(max_running=1)
        for _ in range(256):
            engine.submit([1], 1)
        self.assertEqual(len(engine.step().waiting), 255)
        for _ in range(700):
            engine.submit([1], 1)
        decision = engine.step()
        [*_, step] = [event for event in engine.timeline if event["event"] == "step"]
        self.assertEqual((len(decision.waiting), decision.waiting_count), (256, 954))
        self.assertEqual((tuple(step["waiting"]), step["waiting_count"]), (decision.waiting, 954))
        self.assertNotIn("waiting_count", next(event for event in engine.timeline if event["event"] == "step"))

    @needs_wing("observe")
    def test_a_long_queue_is_proved_like_a_short_one(self) -> None:
        engine = make_engine(max_running=2)
        for _ in range(600):
            engine.submit([1], 2)
        engine.run()
        engine.timeline.write(self.path)
        self.assertEqual(Audit.of(read_timeline(self.path)).violations, [])

    def test_a_listener_that_fails_is_let_go_and_the_others_still_hear(self) -> None:
        def fail(event: Event) -> None:
            raise OSError(f"disk full at {event['event']}")

        timeline, heard = Timeline(), []
        for listener in (fail, heard.append, fail):
            timeline.listen(listener)
        for kind in ("header", "token"):
            timeline.append({"event": kind})
        self.assertEqual([event["event"] for event in heard], ["header", "token"])
        self.assertEqual(list(map(str, timeline.troubles)), ["disk full at header"] * 2)

    def test_events_may_come_while_they_are_looked_at(self) -> None:
        timeline = Timeline()
        timeline.append(HEAD)
        for _ in timeline:
            timeline.append({"event": "lift", "step": 1, "time": 1.0})
        self.assertEqual(len(timeline), 2)


class WriteTest(FolderTest):
    def test_a_file_that_could_not_be_written_is_left_like_any_other(self) -> None:
        """Its listener was let go already; the trouble is told, and nothing else goes wrong."""
        timeline = Timeline()
        with timeline.written_to(self.path):
            timeline.append({"event": "lift", "step": 0, "time": 0.0, "odd": object()})  # no JSON
            timeline.append({"event": "lift", "step": 1, "time": 0.0})
        self.assertEqual(list(map(type, timeline.troubles)), [TypeError])

    def test_a_file_that_is_left_while_an_event_is_told_is_no_trouble(self) -> None:
        timeline, told, left = Timeline(), Flag(), Flag()

        def slow(event: Event) -> None:
            told.set()
            left.wait(0.05)  # the writer, which comes after this listener, waits for the event's end

        timeline.append(HEAD)
        timeline.listen(slow)
        thread = Thread(target=timeline.append, args=({"event": "lift", "step": 0, "time": 0.0},))
        with timeline.written_to(self.path):
            thread.start()
            told.wait()
        left.set()
        thread.join()
        self.assertEqual((timeline.troubles, len(json_lines(self.path))), ([], 2))

    @needs_wing("observe")
    def test_any_text_comes_back(self) -> None:
        """Unicode's line separators end no line; half a surrogate pair, which UTF-8 cannot hold, is escaped."""
        timeline = Timeline()
        timeline.append(HEAD)
        for text in ("世界 😀", "a\nb\r\nc\x0b\x0c\x1c\x1e\x85\u2028\u2029d", '\x00"\\', "\ud800", "\udfff\ud800", ""):
            timeline.append({"event": "refuse", "step": 1, "time": 0.1 + 0.2, "request": "r", "error": text})
        timeline.write(self.path)
        self.assertEqual(read_timeline(self.path), as_read(timeline))
        self.assertIn("世界 😀".encode(), self.path.read_bytes())
        self.assertNotIn(b"\r", self.path.read_bytes())

    def test_further_events_are_written_as_they_happen(self) -> None:
        engine = make_engine()
        engine.submit([1, 2], 3)
        with engine.timeline.written_to(self.path):
            self.assertEqual(json_lines(self.path), as_read(engine.timeline))
            for _ in range(3):
                engine.step()
                self.assertEqual(json_lines(self.path), as_read(engine.timeline))
        before = self.path.read_bytes()
        engine.run()
        engine.submit([3], 1)
        self.assertEqual(self.path.read_bytes(), before)
        self.assertEqual(engine.timeline.troubles, [])

    def test_an_interrupted_block_lets_go_of_the_file(self) -> None:
        engine = make_engine()
        engine.submit([1, 2], 3)
        with self.assertRaises(KeyboardInterrupt), engine.timeline.written_to(self.path):
            raise KeyboardInterrupt
        engine.close()  # cancels, which is an event
        self.assertEqual(engine.timeline.troubles, [])

    def test_a_place_that_cannot_be_written_to(self) -> None:
        for path in (self.path.parent, self.path / "run.jsonl", "a\0b"):
            with self.subTest(path=path), self.assertRaisesRegex(SchemaError, "cannot write the timeline"):
                Timeline().write(path)


class ToldTest(FolderTest):
    """What version 2 tells so that a run can be done again."""

    def test_the_header_holds_the_scenario(self) -> None:
        fixture = load_scenario(FIXTURE)
        with InferenceEngine.from_scenario(fixture, clock=VirtualClock(0.5), seed=7, page_size=4) as engine:
            header = as_read(engine.timeline)[0]
        self.assertEqual(header["settings"], {**fixture.to_dict()["engine"], "seed": 7, "page_size": 4})
        for key in ("model", "weights", "tokenizer", "quantization"):
            self.assertEqual(header[key], fixture.to_dict()[key])
        self.assertEqual((header["version"], header["scenario"], header["step_seconds"], header["weights_sha256"]),
                         (2, "tiny_model", 0.5, fixture.weights.sha256))
        self.assertEqual(InferenceEngine(HEALTHY).timeline.header["step_seconds"], None)

    def test_a_submit_holds_the_request(self) -> None:
        sampling = SamplingParams(0.5, top_p=0.9, seed=3, logit_bias={2: 1.5}, stop=("ab",), n=2, logprobs=1)
        engine = make_engine()
        engine.submit((1, 2), 3, request_id="all", sampling=sampling, priority=-2, stop_tokens=(4,), cache_salt="s")
        engine.submit((1,), 2, request_id="none")
        _, full, bare = as_read(engine.timeline)
        fields = {key: value for key, value in full.items() if key not in ("event", "step", "time", "request")}
        self.assertEqual(REQUEST_SHAPE.parse({**fields, "request_id": "all"}, ""), Request(
            "all", (1, 2), 3, sampling=sampling, priority=-2, stop_tokens=(4,), cache_salt="s"))
        self.assertEqual(bare, {"event": "submit", "step": 0, "time": 0.0, "request": "none", "prompt_tokens": [1],
                                "max_tokens": 2})

    @needs_wing("workloads")
    def test_faults_are_told_when_they_are_injected_when_they_happen_and_when_they_are_lifted(self) -> None:
        engine = make_engine()
        engine.inject([MemoryCut(0, 2, 9)])
        engine.step()
        engine.inject([])
        told = [(event["event"], event.get("faults", event.get("change"))) for event in engine.timeline][1:]
        cut = {"kind": "memory_cut", "step": 0, "pages": 2, "until": 9}
        self.assertEqual(told, [("inject", [cut]), ("pages", "allocate"), ("fault", None), ("step", None),
                                ("lift", None), ("pages", "release"), ("inject", [])])

    def test_publish_and_evict(self) -> None:
        """A page that was published and belongs to nobody is evicted before it is handed out."""
        engine = make_engine(page_size=2, num_pages=4, prefix_sharing=True)
        engine.generate([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [1, 2, 3, 4, 5]], 2)
        published: set[int] = set()
        seen = Counter()
        for event in engine.timeline:
            if event["event"] == "pages":
                seen[event["change"]] += 1
                if event["change"] == "publish":
                    published.update(event["pages"])
                elif event["change"] == "evict":
                    self.assertLessEqual(set(event["pages"]), published)
                    published.difference_update(event["pages"])
                elif event["change"] == "allocate":
                    self.assertFalse(set(event["pages"]) & published)
        self.assertTrue(seen["evict"] and seen["publish"], seen)


class RunTest(FolderTest):
    def test_two_runs_write_the_same_bytes(self) -> None:
        """Guarantee 6; that the fixture's run is the same on every machine and Python is tested in test_driver.py."""
        seen = set()
        for seed in range(10):
            with self.subTest(seed=seed):
                contents = []
                for _ in range(2):
                    engine = busy_engine(seed)
                    engine.timeline.write(self.path)
                    contents.append(self.path.read_bytes())
                self.assertEqual(*contents)
                self.assertEqual(json_lines(self.path), as_read(engine.timeline))
                seen |= {event["event"] + event.get("change", "") for event in engine.timeline}
        self.assertEqual(seen, {"header", "submit", "refuse", "step", "pagesallocate", "pagesshare", "pagescopy",
                                "pagesrelease", "token", "fork", "cancel", "finish"})

    def test_a_request_is_submitted_gets_its_tokens_and_finishes_once(self) -> None:
        for seed in range(10):
            with self.subTest(seed=seed):
                events = list(busy_engine(seed).timeline)
                self.assertEqual([event["event"] for event in events].count("header"), 1)
                for key in ("step", "time"):
                    self.assertEqual([event[key] for event in events], sorted(event[key] for event in events))
                sequences = [event["request"] for event in events if event["event"] in ("submit", "fork")]
                self.assertEqual(len(sequences), len(set(sequences)))
                for name in sequences:
                    mine = [event for event in events if event.get("request") == name
                            and event["event"] in ("submit", "fork", "token", "finish")]
                    tokens = [event["index"] for event in mine[1:-1]]
                    self.assertEqual((mine[-1]["event"], mine[-1]["tokens"]), ("finish", len(tokens)))
                    self.assertEqual(tokens, list(range(len(tokens))))
                    self.assertEqual({event["event"] for event in mine[1:-1]} - {"token"}, set())

    def test_pages_can_be_replayed_from_the_events_alone(self) -> None:
        """V2: after every event the pages in some block table are as many as the event says are used."""
        for seed in range(10):
            with self.subTest(seed=seed):
                users: Counter[int] = Counter()
                for event in busy_engine(seed).timeline:
                    if event["event"] != "pages":
                        continue
                    if event["change"] == "copy":
                        source, target = event["pages"]
                        users.subtract([source])
                        users.update([target])
                    else:
                        change = users.subtract if event["change"] == "release" else users.update
                        change(event["pages"])
                    self.assertGreaterEqual(min(users.values()), 0)
                    self.assertEqual(len(+users), event["used_pages"])
                self.assertFalse(+users)


if __name__ == "__main__":
    unittest.main()
