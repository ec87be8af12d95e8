"""Every kind of fault: it hits whom it names, nobody else notices, nothing is lost, and the timeline tells."""

from __future__ import annotations

import json
import unittest

from starter.base.fault_kinds import (
    AbnormalRelease,
    BackendFault,
    Fault,
    MemoryCut,
    NanLogits,
    RefusedPages,
    SlowConsumer,
)
from starter.command.play import play
from starter.engine import InferenceEngine
from starter.errors import RequestError
from starter.scheduler import REFUSAL_LIMIT
from starter.schema import CharacterVocabulary, EngineSettings, Request, Scenario, SeededWeights, parse_scenario
from starter.timeline import VirtualClock
from tests.support import CONFIG, FIVE, SERVINGS, TIGHT, EngineCase, failing_at, make_engine


class FaultsTest(EngineCase):
    def check(self, faults: list[Fault], failed: tuple[str, ...], error: str = "",
              **settings: object) -> InferenceEngine:
        """FIVE with these faults: those named end with the error, the others are as alone, pages are conserved."""
        engine = make_engine(**{**TIGHT, **settings})
        self.submit(engine, FIVE)
        injector = engine.inject(faults)
        while engine.active:
            engine.step()
            engine.kv.check()
        injector.end()
        errors = {name: events[-1].error for name in FIVE if (events := engine._core.streams[name].events)}
        self.assertEqual({name for name, text in errors.items() if text}, set(failed))
        for name in failed:
            self.assertIn(error, str(errors[name]))
        self.check_outcomes(engine, FIVE, failed)
        return engine

    def fired(self, engine: InferenceEngine) -> list[str]:
        return [event["kind"] for event in engine.timeline if event["event"] == "fault"]

    def test_a_backend_that_fails_once_is_asked_again(self) -> None:
        for call in range(0, 12, 4):
            for serving in SERVINGS:
                with self.subTest(call=call, serving=serving):
                    self.assertEqual(self.fired(self.check([BackendFault(call)], (), **serving)), ["BackendFault"])

    def test_a_backend_that_cannot_compute_one_request(self) -> None:
        for call in (0, 3, 7):
            for serving in ({}, {"prefix_sharing": True}, {"preemption": "swap"}):
                with self.subTest(call=call, serving=serving):
                    engine = self.check([BackendFault(call, "c")], ("c",), "BackendError: failed on purpose", **serving)
                    self.assertGreaterEqual(len(self.fired(engine)), 2)  # in the batch, and alone

    def test_nan_for_one_request(self) -> None:
        for call in (1, 2):
            with self.subTest(call=call):
                self.check([NanLogits(call, "b")], ("b",), "BackendError: the logits hold NaN")

    def test_nan_for_all_that_are_due(self) -> None:
        engine = make_engine()
        self.submit(engine, FIVE)
        engine.inject([NanLogits(0)])
        engine.step(8)  # who gets a first token in it is hit, who is still being prefilled is not
        hit = {name for name in FIVE if any(event.error for event in engine.poll(name))}
        self.assertTrue(hit and hit < set(FIVE))
        self.check_outcomes(engine, {name: ask for name, ask in FIVE.items() if name not in hit})

    def test_refused_pages_delay_and_harm_nobody(self) -> None:
        for ask in range(0, 9, 2):
            for serving in SERVINGS:
                with self.subTest(ask=ask, serving=serving):
                    self.check([RefusedPages(ask), RefusedPages(ask + 2)], (), **serving)

    def test_pages_that_are_refused_for_ever_end_the_request(self) -> None:
        engine = self.check([RefusedPages(ask) for ask in range(1000)], tuple(FIVE), "refused on purpose")
        self.assertEqual(engine.metrics().finished["error"], len(FIVE))

    def test_an_abnormal_release_ends_that_request(self) -> None:
        for step in (2, 3, 4):
            for serving in ({}, {"prefix_sharing": True}, {"preemption": "swap"}):
                with self.subTest(step=step, serving=serving):
                    self.check([AbnormalRelease(step, "a")], ("a",), "StaleHandleError", num_pages=30, **serving)

    def test_memory_that_is_cut_and_comes_back(self) -> None:
        for step in range(0, 12, 4):
            for serving in SERVINGS:
                with self.subTest(step=step, serving=serving):
                    self.check([MemoryCut(step, 6, step + 4)], (), **serving)

    def test_memory_that_stays_away_ends_who_cannot_go_on(self) -> None:
        engine = make_engine(**TIGHT)
        self.submit(engine, {"b": FIVE["b"]})
        engine.inject([MemoryCut(2, 9, 10**6)])
        engine.run()
        self.assertIn("OutOfPagesError", str(engine.poll("b")[-1].error))
        engine.close()
        self.check_empty(engine)

    def test_each_kind_from_a_scenario_file(self) -> None:
        """Its JSON says what the code says; played, it does what the code does."""
        kinds = (({"kind": "backend", "call": 1, "request_id": "c"}, BackendFault(1, "c"), "c"),
                 ({"kind": "backend", "call": 2, "request_id": None}, BackendFault(2), ""),
                 ({"kind": "nan_logits", "call": 1, "request_id": "b"}, NanLogits(1, "b"), "b"),
                 ({"kind": "refused_pages", "ask": 1}, RefusedPages(1), ""),
                 ({"kind": "abnormal_release", "step": 2, "request_id": "a"}, AbnormalRelease(2, "a"), "a"),
                 ({"kind": "memory_cut", "step": 1, "pages": 2, "until": 5}, MemoryCut(1, 2, 5), ""),
                 ({"kind": "slow_consumer", "request_id": "e"}, SlowConsumer("e"), ""))
        requests = tuple(Request(name, ask.prompt, ask.max_tokens) for name, ask in FIVE.items())
        quiet = Scenario(1, "faults", CONFIG, SeededWeights(71), CharacterVocabulary("abcdefghijklmnopqrst"), requests,
                         engine=EngineSettings(**TIGHT))
        for written, fault, failed in kinds:
            with self.subTest(written):
                scenario = parse_scenario(json.dumps({**quiet.to_dict(), "faults": [written]}))
                self.assertEqual((scenario.faults, scenario.to_dict()["faults"]), ((fault,), [written]))
                with InferenceEngine.from_scenario(scenario, backend="reference", clock=VirtualClock()) as engine:
                    steps = [played.events for played in play(engine, scenario)]
                events = [event for step in steps for event in step]
                for name, ask in FIVE.items():
                    self.check_ask([event for event in events if event.request_id == name], name, ask, name == failed)
                self.check_empty(engine)
                if isinstance(fault, SlowConsumer):  # nothing goes wrong in the engine: its reader comes last
                    self.assertEqual({event.request_id for event in events[-7:]}, {"e"})
                else:
                    self.assertIn(type(fault).__name__, self.fired(engine))

    def test_everything_counts_from_the_injection(self) -> None:
        """On an engine that has worked, the k-th step, call and ask are the k-th from now; so it is in a scenario."""
        engine = make_engine(page_size=1, num_pages=40)
        for _ in range(3):
            self.submit(engine, {"d": FIVE["d"]})
            self.check_outcomes(engine, {"d": FIVE["d"]})
        self.submit(engine, {"b": FIVE["b"], "c": FIVE["c"]})
        engine.inject([MemoryCut(1, 5, 3), NanLogits(2, "c"), RefusedPages(3), BackendFault(3)])
        engine.run()
        fired = [(event["kind"], event["step"] - 3) for event in engine.timeline if event["event"] == "fault"]
        self.assertEqual(fired, [("MemoryCut", 1), ("RefusedPages", 1), ("NanLogits", 2), ("BackendFault", 3)])
        self.check_outcomes(engine, {"b": FIVE["b"], "c": FIVE["c"]}, failed=["c"])

    def test_a_step_that_is_interrupted_takes_no_memory_twice(self) -> None:
        """The next one plans it again; what was cut in the first is given back all the same."""
        for call in range(8):
            engine = make_engine(failing_at(call, "start", KeyboardInterrupt()), **TIGHT)
            self.submit(engine, FIVE)
            engine.inject([MemoryCut(2, 2, 4), MemoryCut(2, 2, 4), MemoryCut(4, 1, 9)])  # equal ones are two
            with self.assertRaises(KeyboardInterrupt):
                engine.run()
            self.check_outcomes(engine, FIVE)

    def test_what_hits_nobody_is_not_told(self) -> None:
        engine = self.check([NanLogits(0, "nobody"), AbnormalRelease(1, "nobody"), BackendFault(0, "nobody")], ())
        self.assertEqual(self.fired(engine), [])

    def test_taken_away_from_one_that_was_refused_often_ends_it_once(self) -> None:
        engine = make_engine(page_size=1, num_pages=40)
        self.submit(engine, {"a": FIVE["a"], "b": FIVE["b"]})
        engine.inject([AbnormalRelease(2, "a")])
        engine.step()
        engine.scheduler._find("a").refusals = REFUSAL_LIMIT - 1
        ended = [name for _ in range(4) for name in engine.step().finished]
        self.assertEqual(ended, ["a"])
        self.assertIn("StaleHandleError", str(engine._core.streams["a"].events[-1].error))
        self.check_outcomes(engine, {"a": FIVE["a"], "b": FIVE["b"]}, failed=["a"])

    def test_a_cut_that_ends_before_it_begins(self) -> None:
        self.assertRaisesRegex(RequestError, "until must be after step 5", MemoryCut, 5, 1, 5)

    def test_requests_and_endings_add_up(self) -> None:
        """K095, with faults, cancels and samples."""
        engine = make_engine(**TIGHT)
        self.submit(engine, FIVE)
        engine.inject([BackendFault(3, "c"), NanLogits(5, "b")])
        engine.step()
        engine.cancel("e")
        engine.run()
        metrics = engine.metrics()
        self.assertEqual(sum(metrics.finished.values()), metrics.submitted)
        self.assertEqual((metrics.finished["cancelled"], metrics.running, metrics.waiting), (1, 0, 0))


if __name__ == "__main__":
    unittest.main()
