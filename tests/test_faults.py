"""Every kind of fault: it hits whom it names, nobody else notices, nothing is lost, and the timeline tells."""

from __future__ import annotations

import dataclasses
import json
import unittest

from starter import load_scenario
from starter.engine import InferenceEngine
from starter.errors import RequestError
from starter.faults import AbnormalRelease, BackendFault, Fault, MemoryCut, NanLogits, RefusedPages, SlowConsumer
from starter.play import play, tokens_of
from starter.schema import parse_scenario
from tests.paths import FIXTURE
from tests.support import FIVE, SERVINGS, TIGHT, EngineCase, make_engine


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
        errors = {name: events[-1].error for name in FIVE if (events := list(engine._streams[name].events))}
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

    def test_a_slow_consumer_gets_everything_in_the_end(self) -> None:
        fixture = load_scenario(FIXTURE)
        slow = dataclasses.replace(fixture, faults=(SlowConsumer("exact"),))
        with InferenceEngine.from_scenario(slow) as engine:
            steps = list(play(engine, slow))
        readers = [{event.request_id for event in played.events} for played in steps]
        self.assertFalse(any("exact" in names and len(names) > 1 for names in readers))
        self.assertIn({"exact"}, readers)
        tokens = tokens_of([event for played in steps for event in played.events])
        assert fixture.golden
        self.assertEqual(tokens["exact"], list(fixture.golden.tokens["exact"]))

    def test_from_a_scenario_file(self) -> None:
        document = load_scenario(FIXTURE).to_dict()
        document["faults"] = [{"kind": "backend", "call": 4, "request_id": "long"},
                              {"kind": "nan_logits", "call": 16, "request_id": "across"},
                              {"kind": "memory_cut", "step": 6, "pages": 5, "until": 12}]
        scenario = parse_scenario(json.dumps(document))
        self.assertEqual(scenario.faults, (BackendFault(4, "long"), NanLogits(16, "across"), MemoryCut(6, 5, 12)))
        with InferenceEngine.from_scenario(scenario) as engine:
            events = [event for played in play(engine, scenario) for event in played.events]
            engine.kv.check()
        ends = {event.request_id: event.finish_reason for event in events if event.finish_reason}
        self.assertEqual({name for name, reason in ends.items() if reason == "error"}, {"long", "across"})
        assert scenario.golden
        for name, tokens in tokens_of(events).items():
            golden = list(scenario.golden.tokens[name])
            self.assertEqual(tokens, golden[:len(tokens)] if name in ("long", "across", "cancelled") else golden)

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
