"""Playing a scenario: everything happens at its step, everything is read, and a refusal stops nobody."""

from __future__ import annotations

import dataclasses
import unittest
from collections.abc import Iterable, Sequence
from unittest import mock

from starter.base.fault_kinds import MemoryCut, SlowConsumer
from starter.command.play import Played, play, tokens_of
from starter.engine import InferenceEngine
from starter.errors import UnknownRequestError
from starter.schema import (
    CharacterVocabulary,
    EngineSettings,
    Request,
    SamplingParams,
    Scenario,
    ScenarioEvent,
    SeededWeights,
    TokenEvent,
)
from starter.timeline import VirtualClock
from tests.support import CONFIG, oracle
from tests.wings import needs_wing

A, B, C = Request("a", (3, 1, 4), 6), Request("b", (1,), 9), Request("c", (2, 7, 1, 8), 5)


def scenario(requests: Iterable[Request], cancels: Sequence[ScenarioEvent] = (), **more: object) -> Scenario:
    """A scenario over the tests' tiny model."""
    return Scenario(1, "test", CONFIG, SeededWeights(71), CharacterVocabulary("abcdefghijklmnopqrst"), tuple(requests),
                    engine=EngineSettings(page_size=4, num_pages=32, budget_tokens=8), events=tuple(cancels), **more)


def at(request: Request, arrival: float) -> Request:
    return dataclasses.replace(request, arrival=arrival)


class PlayTest(unittest.TestCase):
    def play(self, played: Scenario, **settings: object) -> list[Played]:
        """Play to the end on a new engine, which must then be empty."""
        self.engine = InferenceEngine.from_scenario(played, clock=VirtualClock(), **settings)
        steps = list(play(self.engine, played))
        self.assertEqual((self.engine.active, self.engine.kv.free_pages), ((), self.engine.kv.total_pages))
        for request in played.requests:
            self.assertRaises(UnknownRequestError, self.engine.poll, request.request_id)  # everything was read
        return steps

    def tokens(self, steps: Iterable[Played]) -> dict[str, list[int]]:
        return tokens_of([event for played in steps for event in played.events])

    def happened(self, kind: str) -> list[tuple[str, int]]:
        return [(event["request"], event["step"]) for event in self.engine.timeline if event["event"] == kind]

    def test_arrivals_in_order_and_at_their_step(self) -> None:
        """A fraction of a step rounds up; requests of one step come in the order of the file."""
        steps = self.play(scenario([at(C, 2.0), at(A, 0.0), at(B, 1.5), at(Request("d", (5,), 1), 0.0)]))
        self.assertEqual(self.happened("submit"), [("a", 0), ("d", 0), ("b", 2), ("c", 2)])
        self.assertEqual(self.tokens(steps), {"a": oracle((3, 1, 4), 6), "b": oracle((1,), 9),
                                              "c": oracle((2, 7, 1, 8), 5), "d": oracle((5,), 1)})
        self.assertEqual([played.decision.step for played in steps], list(range(2 + 9)))

    def test_idle_time_takes_no_step(self) -> None:
        """However long it is; what comes later comes so much earlier, and what was to happen in it does not."""
        for gap in (1, 5, 10**9):
            with self.subTest(gap=gap):
                steps = self.play(scenario([at(Request("d", (5,), 1), 3.0), at(B, 3.5 + gap), at(A, 6.0 + gap)],
                                           [ScenarioEvent(step, "b") for step in (1, 3 + gap, 8 + gap)]))
                self.assertEqual([(event, step) for event, step in self.happened("submit")],
                                 [("d", 0), ("b", 1), ("a", 3)])
                self.assertEqual(self.happened("cancel"), [("b", 5)])
                self.assertEqual(self.tokens(steps)["b"], oracle((1,), 4))
                self.assertEqual(self.tokens(steps)["a"], oracle((3, 1, 4), 6))
        self.assertEqual(self.play(scenario([])), [])

    @needs_wing("workloads")
    def test_with_faults_idle_steps_are_run(self) -> None:
        """Their steps count from the injection on."""
        steps = self.play(scenario([at(Request("d", (5,), 1), 0.0), at(B, 6.0)], faults=(MemoryCut(8, 1, 10),)))
        self.assertEqual([played.decision.scheduled_tokens for played in steps], [1, 0, 0, 0, 0, 0] + [1] * 9)
        self.assertEqual([event["step"] for event in self.engine.timeline if event["event"] == "fault"], [8])

    def test_steps_go_by_while_others_are_served(self) -> None:
        engine = InferenceEngine.from_scenario(scenario([]), clock=VirtualClock())
        engine.submit([1], 9, request_id="other")
        list(play(engine, scenario([at(A, 5.0)])))
        self.assertEqual([(event["request"], event["step"]) for event in engine.timeline
                          if event["event"] == "submit"], [("other", 0), ("a", 5)])

    def test_arrivals_count_from_now_on_an_engine_that_has_worked(self) -> None:
        played = scenario([at(A, 1.0)], [ScenarioEvent(3, "a")])
        engine = InferenceEngine.from_scenario(played, clock=VirtualClock())
        other = engine.submit([1], 9)
        for _ in range(5):
            engine.step()
        events = [event for step in play(engine, played) for event in step.events]
        self.assertEqual([(event.request_id, event.token, event.step) for event in events],
                         [("a", token, 6 + i) for i, token in enumerate(oracle((3, 1, 4), 6)[:2])] + [("a", None, 8)])
        self.assertEqual([event.token for event in engine.stream(other)], oracle((1,), 9))  # left to its own reader

    def test_cancels_at_their_step(self) -> None:
        """After it no token; before the request is there, or after its end, it does nothing."""
        for step in range(9):
            with self.subTest(step=step):
                steps = self.play(scenario([at(A, 1.0), B], [ScenarioEvent(step, "a")]))
                got = self.tokens(steps)
                delivered = 6 if step == 0 or step > 6 else step - 1
                self.assertEqual(got, {"a": oracle((3, 1, 4), 6)[:delivered], "b": oracle((1,), 9)})
                self.assertEqual(self.happened("cancel"), [("a", step)] if delivered < 6 else [])

    def test_a_refused_request_is_reported_and_the_others_go_on(self) -> None:
        """So large a request passes the scenario's checks, but not those of a smaller pool."""
        large = Request("large", (1,) * 30, 30, arrival=1.0)
        steps = self.play(scenario([A, large, at(B, 2.0)], [ScenarioEvent(3, "large")]), num_pages=6)
        self.assertEqual({i: list(played.refused) for i, played in enumerate(steps) if played.refused}, {1: ["large"]})
        self.assertIn("59 tokens need 15 pages", steps[1].refused["large"])
        self.assertEqual(self.tokens(steps), {"a": oracle((3, 1, 4), 6), "b": oracle((1,), 9)})
        self.assertEqual(list(self.play(scenario([large]), num_pages=6)[-1].refused), ["large"])  # nobody else is there

    def test_no_tokens_wanted(self) -> None:
        steps = self.play(scenario([at(Request("none", (1, 2), 0), 1.0)]))
        self.assertEqual([[(event.token, event.finish_reason) for event in played.events] for played in steps],
                         [[(None, "length")]])
        self.assertEqual(self.tokens(steps), {"none": []})

    def test_all_samples_are_read_to_their_ends(self) -> None:
        """Three samples that end at different steps, and one request that ends before them."""
        sampling = SamplingParams(temperature=2.0, seed=4, n=3)
        steps = self.play(scenario([Request("r", (3, 1), 12, sampling=sampling, stop_tokens=(5, 6, 7, 8)), at(A, 0.0)]))
        got = self.tokens(steps)
        self.assertEqual(list(got), ["a", "r", "r#1", "r#2"])
        lengths = [len(got[name]) for name in ("r", "r#1", "r#2")]
        self.assertGreater(len(set(lengths)), 1, lengths)
        ends = [event for played in steps for event in played.events if event.finish_reason]
        self.assertEqual(sorted((event.request_id, event.sample) for event in ends),
                         [("a", 0), ("r", 0), ("r", 1), ("r", 2)])
        for name, tokens in got.items():
            self.assertEqual(len([1 for event in self.happened("token") if event[0] == name]), len(tokens))

    @needs_wing("workloads")
    def test_a_slow_consumer_reads_when_everybody_else_has_ended(self) -> None:
        steps = self.play(scenario([A, B, C], faults=(SlowConsumer("a"),)))
        readers = [{event.request_id for event in played.events} for played in steps]
        self.assertNotIn("a", set().union(*readers[:-1]))
        self.assertEqual(readers[-1], {"a"})
        self.assertEqual(self.tokens(steps)["a"], oracle((3, 1, 4), 6))

    def test_it_runs_as_far_as_it_is_asked_to(self) -> None:
        played = scenario([A, B])
        engine = InferenceEngine.from_scenario(played, clock=VirtualClock())
        running = play(engine, played)
        self.assertEqual((engine.steps, engine.active), (0, ()))
        next(running)
        self.assertEqual((engine.steps, engine.active), (1, ("a", "b")))
        running.close()
        self.assertEqual([event.token for event in engine.stream("a")], oracle((3, 1, 4), 6)[1:])

    def test_everything_a_request_says_is_passed_on(self) -> None:
        request = Request("r", (1, 2), 3, 0.0, 7, SamplingParams(0.5, seed=3), (9,), "salt")
        played = scenario([request])
        engine = InferenceEngine.from_scenario(played, clock=VirtualClock())
        with mock.patch.object(engine, "submit", wraps=engine.submit) as submit:
            list(play(engine, played))
        (prompt, max_tokens), further = submit.call_args
        self.assertEqual({"prompt_tokens": prompt, "max_tokens": max_tokens, "arrival": 0.0, **further}, vars(request))


class TokensOfTest(unittest.TestCase):
    def test_by_request_and_sample(self) -> None:
        events = [TokenEvent("a", 0, 5, "x", 0, 0.0), TokenEvent("b", 0, None, "", 0, 0.0, None, "cancelled"),
                  TokenEvent("a", 0, 7, "y", 1, 1.0, sample=1), TokenEvent("a", 1, 6, "z", 2, 2.0, None, "length"),
                  TokenEvent("a", 1, None, "", 2, 2.0, None, "error", "broken", 1)]
        self.assertEqual(tokens_of(events), {"a": [5, 6], "b": [], "a#1": [7]})
        self.assertEqual(tokens_of([]), {})


if __name__ == "__main__":
    unittest.main()
