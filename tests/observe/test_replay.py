"""Replays: the same events come of the same acts, and the first event that does not fit is named."""

from __future__ import annotations

import copy
import tempfile
import unittest
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from scripts import fuzz
from starter.base.fault_kinds import BackendFault, MemoryCut
from starter.base.weights import seeded_weights, weights_digest
from starter.checkpoints.safetensors import write_safetensors
from starter.command.play import play
from starter.engine import InferenceEngine
from starter.errors import EngineError, RequestError, SchemaError
from starter.model import Loaded
from starter.observe.audit import Audit
from starter.observe.replay import Outcome, Replay, load_recorded
from starter.observe.timeline_file import read_timeline
from starter.schema import EngineSettings, SafetensorsWeights, SamplingParams, load_scenario
from starter.timeline import Event, VirtualClock
from tests.paths import FIXTURE, TIMELINE
from tests.support import HEALTHY, FaultyBackend, make_engine
from tests.timelines import as_read, can_be_told, full_engine, random_run

FUZZED = Loaded(fuzz.MODEL, fuzz.TOKENIZER, {})


class ReplayCase(unittest.TestCase):
    def assert_same(self, events: Sequence[Event], loaded: Loaded = HEALTHY) -> None:
        self.assertEqual(Replay(events, loaded).run(), Outcome(len(events), 0, None))

    def differs(self, events: Sequence[Event], *words: str, loaded: Loaded = HEALTHY) -> Outcome:
        """A replay that does not come to the end; ``words`` are in what it says."""
        outcome = Replay(events, loaded).run()
        self.assertIsNotNone(outcome.difference)
        for word in words:
            self.assertIn(word, str(outcome.difference))
        return outcome


class SameTest(ReplayCase):
    def test_the_fixtures_timeline(self) -> None:
        events = read_timeline(TIMELINE)
        self.assert_same(events, load_recorded(events[0]))

    def test_what_submit_takes_beyond_the_limits_of_a_file(self) -> None:
        engine = make_engine()
        engine.submit([1, 2], 3, request_id="x" * 201, priority=-1_700_000_000,
                      sampling=SamplingParams(1.0, seed=2**64 - 1, min_tokens=2**40))
        engine.submit([3], 2, priority=2_000_000, stop_tokens=range(20), sampling=SamplingParams(stop=["q"] * 65))
        engine.run()
        self.assert_same(as_read(engine.timeline))

    def test_one_of_everything(self) -> None:
        events = as_read(full_engine().timeline)
        self.assert_same(events)
        seen = Counter(event["event"] + event.get("change", "") for event in events)
        self.assertLessEqual({"refuse", "cancel", "inject", "fault", "fork", "pagesshare", "pagescopy", "pagesappend",
                              "pagespublish", "pagesevict", "pagesswap_out", "pagesswap_in"}, set(seen))

    def test_random_runs(self) -> None:
        seen: Counter[str] = Counter()
        for seed in range(3000, 3009):
            events = random_run(seed)
            if can_be_told(events):
                with self.subTest(seed=seed):
                    self.assert_same(events, FUZZED)
                    seen += Counter(event["event"] + event.get("change", "") for event in events)
        self.assertTrue(all(seen[kind] for kind in (
            "fault", "fork", "cancel", "refuse", "pagesappend", "pagesevict", "pagesswap_in", "pagescopy")), seen)

    def test_a_listener_that_cancels_in_the_middle_of_a_step(self) -> None:
        """Whichever token it hears of: the audit agrees, and the same comes again."""
        for samples, index in ((1, 0), (1, 2), (2, 0), (2, 2), (3, 1)):
            for heard, cancelled in (("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")):
                with self.subTest(samples=samples, index=index, heard=heard, cancelled=cancelled):
                    engine = make_engine(page_size=4, num_pages=32)
                    for name in "abc":
                        engine.submit([2, 3], 3, request_id=name, sampling=SamplingParams(n=samples, ignore_eos=True))

                    def listener(event: Event, engine=engine, which=(heard, index), cancelled=cancelled) -> None:
                        if event["event"] == "token" and (event["request"], event["index"]) == which:
                            engine.cancel(cancelled)

                    engine.timeline.listen(listener)
                    engine.run()
                    events = as_read(engine.timeline)
                    self.assert_same(events)
                    self.assertEqual(Audit.of(events).violations, [])

    def test_on_a_real_clock_the_times_do_not_count(self) -> None:
        engine = InferenceEngine(HEALTHY, EngineSettings(page_size=2, num_pages=9, budget_tokens=6, max_running=4))
        engine.generate([[1, 2, 3], [4], [5, 6, 7, 8]], 7)
        events = as_read(engine.timeline)
        self.assertIsNone(events[0]["step_seconds"])
        self.assert_same(events)
        events[-1]["time"] += 5.0
        self.assert_same(events)
        events[-1]["tokens"] += 1
        self.differs(events, f"line {len(events)}", "finish events differ in tokens")

    def test_what_other_threads_do_while_a_step_is_computed(self) -> None:
        acts: list[Callable[[], object]] = []

        def act(moment: str, tokens: object) -> None:
            if moment == "middle" and acts:
                acts.pop(0)()

        engine = make_engine(FaultyBackend(act), page_size=2, num_pages=12)
        outside = []
        acts += [lambda: None, lambda: engine.submit([1, 2], 12, request_id="b"),
                 lambda: outside.append(engine.kv.fork(engine.scheduler.handle("a"), "outsider")),
                 lambda: engine.cancel("a"), lambda: engine.inject([MemoryCut(1, 2, 99)]),
                 lambda: engine.kv.release(outside[0])]
        engine.submit([3, 1, 4], 5, request_id="a")
        engine.run()
        engine.inject([])
        self.assertFalse(acts)
        self.assertEqual(sum(event["event"] == "lift" for event in engine.timeline), 1)
        self.assert_same(as_read(engine.timeline))

    def test_steps_that_were_interrupted(self) -> None:
        moments = iter(range(10**6))

        def interrupt(moment: str, tokens: object) -> None:
            if next(moments) % 7 == 3:
                raise KeyboardInterrupt

        engine = make_engine(FaultyBackend(interrupt), page_size=2)
        engine.submit([3, 1, 4], 6, request_id="a")
        while engine.active:
            with suppress(KeyboardInterrupt):
                engine.step()
                engine.submit([2, 7], 3) if engine.steps == 3 else None
        events = as_read(engine.timeline)
        steps = [event["step"] for event in events if event["event"] == "step"]
        self.assertLess(len(set(steps)), len(steps))
        self.assertEqual(sum(event["event"] == "abandon" for event in events), len(steps) - len(set(steps)))
        self.assert_same(events)

    def test_a_name_may_come_again(self) -> None:
        engine = make_engine()
        for _ in range(2):
            engine.submit([1, 2], 3, request_id="again")
            engine.run()
            engine.poll("again")
        self.assert_same(as_read(engine.timeline))

    def test_a_fault_in_the_computation_and_a_submit_after_it(self) -> None:
        engine = make_engine()
        engine.inject([BackendFault(1, "a")])
        engine.submit([1, 2], 4, request_id="a")
        engine.submit([3, 4], 4, request_id="b")
        engine.run()
        self.assert_same(as_read(engine.timeline))

    def test_a_timeline_that_breaks_off(self) -> None:
        """Wherever a crash has cut it: what is there is the same, and no more is asked for."""
        events = as_read(full_engine().timeline)
        for end in range(2, len(events), 8):
            with self.subTest(end=end):
                outcome = Replay(events[:end], HEALTHY).run()
                self.assertEqual((outcome.compared, outcome.difference), (end, None))


class DifferenceTest(ReplayCase):
    def setUp(self) -> None:
        self.events = as_read(full_engine().timeline)

    def find(self, kind: str, **fields: object) -> int:
        """Where the last event with these fields is."""
        return max(i for i, event in enumerate(self.events)
                   if event["event"] == kind and all(event[key] == value for key, value in fields.items()))

    def changed(self, at: int, **fields: object) -> list[Event]:
        events = copy.deepcopy(self.events)
        events[at].update(fields)
        return events

    def test_every_field_of_every_event_counts(self) -> None:
        """Another value anywhere is noticed there, or, where it is an act, at what comes of it."""
        acts = {"header": ("engine", "event", "settings", "version", "step_seconds"), "step": ("budget",),
                "refuse": ("request", "error"), "inject": ("faults",), "cancel": ("request",), "submit": ("request",)}
        for at in range(0, len(self.events), 24):
            event = self.events[at]
            for key, value in event.items():
                if key in acts.get(event["event"], ()):
                    continue
                other = value + 1 if isinstance(value, (int, float)) else f"{value}x" if isinstance(value, str) else \
                    [*value, 1] if isinstance(value, list) else {**value, "x": 1}
                with self.subTest(at=at, event=event["event"], key=key):
                    outcome = self.differs(self.changed(at, **{key: other}))
                    self.assertGreaterEqual(outcome.compared + 1, at if event["event"] == "submit" else 1)
                    if event["event"] not in ("submit", "step", "pages", "header"):
                        self.assertEqual(outcome.compared, at)

    def test_the_difference_names_its_line_its_step_and_both_sides(self) -> None:
        at = self.find("token", request="f")
        event = self.events[at]
        outcome = self.differs(self.changed(at, token=(event["token"] + 1) % 20))
        assert outcome.difference
        self.assertEqual((outcome.difference.number, outcome.difference.step), (at + 1, event["step"]))
        self.assertEqual((outcome.difference.recorded, outcome.difference.replayed),
                         ({**event, "token": (event["token"] + 1) % 20}, event))
        self.assertIn("token events differ in token", str(outcome.difference))

    def test_an_event_less_or_more(self) -> None:
        for kind in ("token", "finish", "fork", "fault", "step"):
            at = self.find(kind)
            with self.subTest(kind=kind):
                events = self.events[:at] + self.events[at + 1:]
                outcome = self.differs(events) if at + 1 < len(self.events) else Replay(events, HEALTHY).run()
                self.assertEqual(outcome.compared, at)
                twice = self.differs([*self.events[:at + 1], *self.events[at:]])
                self.assertEqual(twice.compared, at + 1)
        last = self.differs([*self.events, self.events[self.find("token")]], "a token event in the timeline, a step")
        self.assertEqual(last.compared, len(self.events))

    def test_an_act_that_the_replay_cannot_do(self) -> None:
        unknown = {"event": "cancel", "step": 0, "time": 0.0, "request": "nobody"}
        self.differs([self.events[0], unknown], "line 2", "no request 'nobody'")
        again = self.events[1]
        self.differs([*self.events[:2], again], "a submit event in the timeline, a refuse event in the replay")
        for change, pages, words in (("release", [3], "holds no table"), ("share", [3], "none can have been forked"),
                                     ("append", [3], "holds no table")):
            act = {"event": "pages", "step": 0, "time": 0.0, "change": change, "request": "outsider", "pages": pages,
                   "used_pages": 0}
            self.differs([self.events[0], act], words)

    def test_an_act_within_a_step_that_comes_to_nothing(self) -> None:
        at = self.find("token")
        lift = {"event": "lift", "step": self.events[at]["step"] - 1, "time": self.events[at]["time"] - 1}
        outcome = self.differs([*self.events[:at], lift, *self.events[at:]], "a lift event in the timeline")
        self.assertEqual(outcome.compared, at)

    def test_an_append_that_makes_no_sense(self) -> None:
        at = self.find("pages", change="append")
        self.assertEqual(self.events[at - 1]["change"], "copy")
        events = copy.deepcopy(self.events)
        events[at - 1]["pages"].append(7)
        self.differs(events, "a copy is a page and its copy, not")

    def test_other_weights_or_settings_are_other_events(self) -> None:
        other = Replay(self.events, replace(HEALTHY, about={"weights_sha256": "0" * 64})).run()
        self.assertEqual((other.compared, other.difference and other.difference.problem),
                         (0, "header events differ in weights_sha256"))
        self.differs(self.changed(0, settings={**self.events[0]["settings"], "max_running": 1}))

    def test_a_newer_engine_is_what_a_replay_is_for(self) -> None:
        self.assert_same(self.changed(0, engine="0.0.7"))


class LoadTest(ReplayCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def test_safetensors_beside_the_timeline_or_where_one_says(self) -> None:
        fixture = load_scenario(FIXTURE)
        weights = seeded_weights(fixture.model, 3)
        write_safetensors(self.folder / "w.safetensors", weights)
        source = SafetensorsWeights("w.safetensors", weights_digest(weights))
        scenario = replace(fixture, weights=source, requests=fixture.requests[2:3], events=(), golden=None,
                           folder=self.folder)
        with InferenceEngine.from_scenario(scenario, clock=VirtualClock()) as engine:
            list(play(engine, scenario))
            events = as_read(engine.timeline)
        self.assert_same(events, load_recorded(events[0], self.folder))
        self.assertRaisesRegex(RequestError, "--checkpoint PATH", load_recorded, events[0], self.folder / "elsewhere")
        for place in (self.folder / "w.safetensors", self.folder):
            self.assert_same(events, load_recorded(events[0], checkpoint=place))

    def test_what_cannot_be_loaded_is_said(self) -> None:
        header = read_timeline(TIMELINE)[0]
        nameless = {key: value for key, value in header.items() if key not in ("weights", "scenario")}
        for wrong, error, words in (
                (nameless, RequestError, "names neither a scenario nor a checkpoint"),
                ({**nameless, "checkpoint": "m.bin"}, RequestError, "--checkpoint PATH"),
                ({**header, "backend": "tpu"}, EngineError, "tpu"),
                ({**header, "weights": {"source": "seeded", "seed": 1, "sha256": "0" * 64}}, SchemaError, "sha256"),
                ({**header, "tokenizer": {"characters": "ab"}}, SchemaError, "names 2 tokens")):
            with self.subTest(words=words), self.assertRaisesRegex(error, words):
                load_recorded(wrong)


if __name__ == "__main__":
    unittest.main()
