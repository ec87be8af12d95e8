"""Every metric's definition on events written by hand, and on real runs as a function of the timeline alone."""

from __future__ import annotations

import json
import random
import tempfile
import unittest
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from starter.base.statistics import Summary
from starter.engine import InferenceEngine
from starter.errors import EngineError, SchemaError
from starter.metrics import Metrics, MetricsCollector
from starter.schema import EngineSettings, SamplingParams
from starter.timeline import Event
from tests.support import HEALTHY, FaultyBackend, failing_at, json_lines, make_engine, oracle, prompt_of

HEADER: Event = {"event": "header", "step": 0, "time": 0.0, "page_bytes": 100, "weight_bytes": 7}


def event(kind: str, time: float, request: str = "a", **fields: Any) -> Event:
    return {"event": kind, "step": 0, "time": time, "request": request, **fields}


def submit(time: float, request: str = "a", prompt: int = 3) -> Event:
    return event("submit", time, request, prompt_tokens=[0] * prompt, max_tokens=9)


def step(time: float, chunks: dict[str, int], admitted: str = "", preempted: str = "", **fields: Any) -> Event:
    """A step that computes ``chunks`` (request -> tokens); "ab" admits a and b."""
    listed = [[request, 0, count, "prefill"] for request, count in chunks.items()]
    return {"event": "step", "step": 0, "time": time, "budget": 8, "computed": sum(chunks.values()), "chunks": listed,
            "admitted": list(admitted), "preempted": list(preempted), "found": {}, "empty_slots": 0, **fields}


def pages(time: float, used: int) -> Event:
    return event("pages", time, change="allocate", pages=[], used_pages=used)


def tokens(request: str, *times: float) -> list[Event]:
    return [event("token", time, request, index=i, token=0) for i, time in enumerate(times)]


def finish(time: float, request: str = "a", reason: str = "length", generated: int = 0) -> Event:
    return event("finish", time, request, reason=reason, tokens=generated)


class SummaryTest(unittest.TestCase):
    def test_percentiles_are_nearest_ranks(self) -> None:
        self.assertEqual(Summary.of([]), Summary(0, None, None, None, None, None))
        self.assertEqual(Summary.of([7.0]), Summary(1, 7.0, 7.0, 7.0, 7.0, 7.0))
        self.assertEqual(Summary.of([2.0, 1.0]), Summary(2, 1.5, 1.0, 2.0, 2.0, 2.0))
        self.assertEqual(Summary.of([3.0, 1.0, 2.0]), Summary(3, 2.0, 2.0, 3.0, 3.0, 3.0))
        self.assertEqual(Summary.of(list(range(10, 0, -1))), Summary(10, 5.5, 5, 9, 10, 10))
        self.assertEqual(Summary.of(range(1, 101)), Summary(100, 50.5, 50, 90, 99, 100))
        self.assertEqual(Summary.of(range(1, 102)), Summary(101, 51.0, 51, 91, 100, 101))

    def test_the_least_sample_that_so_many_do_not_exceed(self) -> None:
        for seed in range(50):
            dice = random.Random(seed)
            samples = [dice.randrange(20) for _ in range(dice.randint(1, 250))]
            summary = Summary.of(samples)
            for percent, got in ((50, summary.p50), (90, summary.p90), (99, summary.p99)):
                with self.subTest(seed=seed, percent=percent):
                    enough = [s for s in samples if 100 * sum(t <= s for t in samples) >= percent * len(samples)]
                    self.assertEqual(got, min(enough))


class TimesTest(unittest.TestCase):
    def test_ttft_counts_from_submit_queueing_included(self) -> None:
        """K097, K098: one sample for each request that produced a token, ended or not."""
        metrics = Metrics.of([
            HEADER, submit(1.0, "a"), submit(2.0, "b"), submit(2.5, "c"), submit(3.0, "d"), event("refuse", 3.0, "e"),
            step(3.0, {"a": 3}, admitted="a"), *tokens("a", 4.0),  # 3 after its submit
            finish(4.0, "c", "cancelled"), step(4.0, {"b": 3}, admitted="b"), *tokens("b", 8.0)])  # 6 after
        self.assertEqual(metrics.ttft, Summary(2, 4.5, 3.0, 6.0, 6.0, 6.0))

    def test_ttft_survives_preemption(self) -> None:
        """K097, K098: what is computed again does not make the first token later, nor twice."""
        first, *later = tokens("a", 2.0, 9.0, 10.0)
        metrics = Metrics.of([HEADER, submit(0.5), step(1.0, {"a": 3}, admitted="a"), first,
                              step(3.0, {}, preempted="a"), step(5.0, {"a": 2}, admitted="a"),
                              step(6.0, {"a": 2}), *later, finish(10.0, generated=3)])
        self.assertEqual(metrics.ttft, Summary(1, 1.5, 1.5, 1.5, 1.5, 1.5))
        self.assertEqual(metrics.tpot, Summary(1, 4.0, 4.0, 4.0, 4.0, 4.0))  # (10 - 2) / 2
        self.assertEqual((metrics.preemptions, metrics.output_tokens, metrics.computed_tokens), (1, 3, 7))

    def test_tpot_needs_two_tokens(self) -> None:
        """K096: outputs of 0, 1, 2 and 4 tokens; the mean is over those that have one."""
        events = [HEADER, *(submit(0.0, name) for name in "abcde"), *tokens("b", 1.0), *tokens("c", 1.0, 3.0),
                  *tokens("d", 1.0, 2.0, 2.5, 7.0), *tokens("e", 1.0, 2.0)]
        self.assertEqual(Metrics.of(events).tpot, Summary())  # nobody has ended
        short = [*events, finish(8.0, "a"), finish(8.0, "b", generated=1)]
        self.assertEqual(Metrics.of(short).tpot, Summary())
        metrics = Metrics.of([*short, finish(8.0, "c", "cancelled", 2), finish(8.0, "d", generated=4)])
        self.assertEqual(metrics.tpot, Summary(2, 2.0, 2.0, 2.0, 2.0, 2.0))  # (3 - 1) / 1 and (7 - 1) / 3

    def test_elapsed_from_the_first_submit_to_the_last_event(self) -> None:
        events = [{**HEADER, "time": 3.0}, submit(5.0), submit(6.0, "b"), *tokens("a", 7.0, 8.0, 9.0)]
        metrics = Metrics.of([*events, finish(11.0, generated=3)])
        self.assertEqual((metrics.elapsed_seconds, metrics.tokens_per_second), (6.0, 0.5))
        for begun in ([], events[:1], events[:2]):
            self.assertEqual((Metrics.of(begun).elapsed_seconds, Metrics.of(begun).tokens_per_second), (0.0, None))

    def test_inter_token_latency_is_between_two_tokens_of_one_request(self) -> None:
        """Bounds of buckets belong to them: (0.5, 0.75] holds 0.75."""
        events = [HEADER, submit(0.0, "a"), submit(0.0, "b"), *tokens("a", 1.0, 1.75, 4.0), *tokens("b", 2.0, 92.0)]
        shown = Metrics.of(events).histograms["itl"]
        self.assertEqual((shown.count, shown.sum), (3, 0.75 + 2.25 + 90.0))
        at_most = dict(zip(shown.bounds, shown.counts))
        self.assertEqual([at_most[bound] for bound in (0.5, 0.75, 1.0, 2.5, 80.0, None)], [0, 1, 1, 2, 2, 3])

    def test_from_submit_to_the_end_and_to_the_first_admission(self) -> None:
        """However it ended; a resumed request has been admitted before; samples are no further requests."""
        metrics = Metrics.of([
            HEADER, submit(1.0, "a"), submit(1.0, "b"), step(3.0, {}, admitted="a"), step(4.0, {}, preempted="a"),
            step(6.0, {}, admitted="a"), event("fork", 6.0, "a#1", parent="a"), finish(7.0, "a#1"), finish(8.0, "a"),
            finish(11.0, "b", "cancelled")])
        self.assertEqual(metrics.queue, Summary(1, 2.0, 2.0, 2.0, 2.0, 2.0))
        self.assertEqual(metrics.e2e, Summary(2, 8.5, 7.0, 10.0, 10.0, 10.0))
        self.assertEqual((metrics.histograms["e2e"].count, metrics.histograms["queue"].sum), (2, 2.0))

    def test_a_further_sample_of_a_request_is_no_further_request(self) -> None:
        """It has tokens and their times, but no first token of its own, and ends no request."""
        fork = event("fork", 2.0, "a#1", parent="a")
        metrics = Metrics.of([HEADER, submit(0.0), step(0.0, {"a": 3}, admitted="a"), fork, *tokens("a", 2.0, 3.0),
                              *tokens("a#1", 2.0, 5.0), finish(3.0, generated=2),
                              finish(5.0, "a#1", "stop", 2)])
        self.assertEqual((metrics.submitted, metrics.output_tokens, sum(metrics.finished.values())), (1, 4, 1))
        self.assertEqual((metrics.ttft.count, metrics.tpot), (1, Summary(2, 2.0, 1.0, 3.0, 3.0, 3.0)))


    def test_an_interrupt_between_two_first_tokens_of_a_step(self) -> None:
        """What was counted can be asked for, and a request that was not counted whole can end."""
        for k in range(1, 9):
            with self.subTest(k=k):
                collector, calls = MetricsCollector(), count(1)
                for event in (HEADER, submit(0.0, "a"), submit(0.0, "b"), step(0.0, {"a": 3, "b": 3}, admitted="ab")):
                    collector.observe(event)

                def place(*arguments: Any, k: int = k, calls: count[int] = calls) -> int:
                    if next(calls) == k:
                        raise KeyboardInterrupt
                    return 0

                with patch("starter.base.statistics.bisect_left", place), suppress(KeyboardInterrupt):
                    for names, time in (("ab", 1.0), ("ab", 2.0), ("a", 3.0), ("ab", 4.0)):
                        collector.tokens(dict.fromkeys(names).keys(), time)
                collector.snapshot()
                for name in "ab":
                    collector.observe(finish(5.0, name, generated=2))
                self.assertEqual(collector.snapshot().finished["length"], 2)


class CountsTest(unittest.TestCase):
    def test_nothing_happened(self) -> None:
        metrics = Metrics.of([])
        values = metrics.to_dict()
        self.assertEqual(values.pop("finished"), {"stop": 0, "length": 0, "cancelled": 0, "error": 0})
        for name in ("ttft", "tpot", "e2e", "queue"):
            self.assertEqual(values.pop(name), {"count": 0, **dict.fromkeys(("mean", "p50", "p90", "p99", "max"))})
        for histogram in values.pop("histograms").values():
            self.assertEqual((set(histogram["counts"]), histogram["sum"]), ({0}, 0.0))
        self.assertEqual((values.pop("active_requests"), values.pop("model_name")), ((), ""))
        self.assertEqual({name for name, value in values.items() if value is None},
                         {"tokens_per_second", "batch_utilization", "fragmentation_mean"})
        self.assertEqual({value for value in values.values() if value is not None}, {0})

    def test_every_submitted_request_ends_in_one_way(self) -> None:
        """K095"""
        reasons = ["length", "stop", "cancelled", "error", "cancelled", "length", "length"]
        events = [HEADER, *(submit(0.0, name, prompt=i) for i, name in enumerate("abcdefg"))]
        events += [finish(1.0, name, reason) for name, reason in zip("abcdefg", reasons)]
        metrics = Metrics.of([*events, event("refuse", 2.0, "h"), event("refuse", 2.0, "h")])
        self.assertEqual(metrics.finished, {"stop": 1, "length": 3, "cancelled": 2, "error": 1})
        self.assertEqual((metrics.submitted, metrics.refused, metrics.running, metrics.waiting), (7, 2, 0, 0))
        self.assertEqual(metrics.prompt_tokens, 0 + 1 + 2 + 3 + 4 + 5 + 6)

    def test_running_and_waiting(self) -> None:
        events = [HEADER, submit(0.0, "a"), submit(0.0, "b"), submit(0.0, "c")]
        for further, wanted in (
                (step(0.0, {}), (0, 3)), (step(1.0, {"a": 3, "b": 3}, admitted="ab"), (2, 1)),
                (step(2.0, {"a": 1}, preempted="b"), (1, 2)), (step(3.0, {"b": 4}, admitted="b"), (2, 1)),
                (finish(4.0), (1, 1))):
            events.append(further)
            metrics = Metrics.of(events)
            self.assertEqual((metrics.running, metrics.waiting), wanted)

    def test_a_clock_that_is_set_back_makes_nothing_negative(self) -> None:
        dice = random.Random(1)
        engine = InferenceEngine(HEALTHY, EngineSettings(), lambda: dice.uniform(0.0, 100.0))
        engine.generate([[1, 2], [3]], 4)
        times = [event["time"] for event in engine.timeline]
        self.assertEqual(times, sorted(times))
        metrics = engine.metrics()
        for name in ("ttft", "tpot", "e2e", "queue"):
            summary = getattr(metrics, name)
            self.assertGreaterEqual(min(summary.mean, summary.p50), 0.0, name)
        self.assertEqual(min(metrics.histograms["itl"].sum, metrics.elapsed_seconds, 0.0), 0.0)

    def test_memory_is_bounded_by_the_live_requests(self) -> None:
        collector = MetricsCollector()
        for number in range(20_000):
            time = float(number)
            collector.observe({"event": "submit", "step": number, "time": time, "request": "r", "prompt_tokens": [1]})
            collector.observe({"event": "step", "step": number, "time": time, "admitted": ["r"], "preempted": [],
                               "found": {}, "chunks": [["r", 0, 1, "prefill"]], "computed": 1, "budget": 1,
                               "empty_slots": 0})
            collector.tokens(["r"], time + 0.5)
            collector.observe({"event": "finish", "step": number, "time": time + 1.0, "request": "r",
                               "reason": "length", "tokens": 1})
        metrics = collector.snapshot()
        self.assertEqual((metrics.submitted, metrics.ttft.count, metrics.steps), (20_000, 20_000, 20_000))
        self.assertAlmostEqual(metrics.ttft.p99 or 0.0, 0.5, delta=0.005)
        self.assertEqual((metrics.ttft.mean, metrics.e2e.max, len(metrics.active_requests)), (0.5, 1.0, 10_000))
        self.assertEqual((metrics.running, metrics.waiting), (0, 0))
        self.assertEqual((len(collector.requests), len(collector.durations["ttft"]._percentiles._samples)), (0, 0))

    def test_the_peak_is_that_of_all_steps(self) -> None:
        """Also of those whose numbers are no longer kept."""
        collector = MetricsCollector()
        for happening in (submit(0.0, "a"), submit(0.0, "b"), step(0.0, {"a": 3, "b": 3}, admitted="ab"),
                          *(step(float(time), {"a": 1}) for time in range(1, 12_000))):
            collector.observe(happening)
        metrics = collector.snapshot()
        self.assertEqual((metrics.active_peak, max(metrics.active_requests), metrics.steps), (2, 1, 12_000))

    def test_a_frozen_collector_stays_as_it_is(self) -> None:
        """A lock is held only while it is made."""
        collector = MetricsCollector()
        for happening in (HEADER, submit(0.0, "a"), submit(0.0, "b"), step(1.0, {"a": 3}, admitted="a", empty_slots=3)):
            collector.observe(happening)
        frozen, then = collector.frozen(), collector.snapshot()
        for happening in (*tokens("a", 2.0, 3.0), step(3.0, {"b": 3}, admitted="b", empty_slots=9), pages(3.0, 7),
                          finish(4.0, "a", "stop", 2), event("refuse", 5.0, "c")):
            collector.observe(happening)
        self.assertEqual(frozen.snapshot(), then)
        self.assertNotEqual(collector.snapshot(), then)

    def test_utilization_and_active_requests(self) -> None:
        """Of the budget of steps that scheduled something: (8 + 2 + 3) / (8 + 8 + 4)."""
        metrics = Metrics.of([HEADER, submit(0.0, "a"), submit(0.0, "b"), step(0.0, {"a": 3, "b": 5}, admitted="ab"),
                              step(1.0, {}), step(2.0, {"a": 1, "b": 1}), step(3.0, {}, budget=0),
                              step(4.0, {"b": 3}, budget=4)])
        self.assertEqual(metrics.batch_utilization, 13 / 20)
        self.assertEqual((metrics.active_requests, metrics.active_peak), ((2, 0, 2, 0, 1), 2))
        self.assertEqual((metrics.steps, metrics.computed_tokens), (5, 13))
        self.assertIsNone(Metrics.of([HEADER, submit(0.0), step(0.0, {})]).batch_utilization)

    def test_an_abandoned_step_counts_with_what_planning_it_changed_alone(self) -> None:
        """Whoever was admitted by it runs, and found what it found; what it was to compute is counted once."""
        events = [HEADER, submit(0.0, "a"), submit(0.0, "b"), step(1.0, {"b": 2}, admitted="b", empty_slots=2)]
        first = step(2.0, {"a": 3, "b": 1}, admitted="a", found={"a": 1}, empty_slots=4)
        abandon = {"event": "abandon", "step": 0, "time": 2.5}
        metrics = Metrics.of([*events, first, abandon])
        self.assertEqual((metrics.steps, metrics.computed_tokens, metrics.active_requests), (1, 2, (1,)))
        self.assertEqual((metrics.batch_utilization, metrics.fragmentation_mean), (2 / 8, 2.0))
        self.assertEqual((metrics.running, metrics.found_tokens, metrics.queue.count), (2, 1, 2))
        self.assertEqual((metrics.active_peak, metrics.fragmentation_peak), (1, 2))
        again = Metrics.of([*events, first, abandon, step(3.0, {"a": 3, "b": 1}, empty_slots=4)])
        self.assertEqual((again.steps, again.computed_tokens, again.active_requests), (2, 6, (1, 2)))
        self.assertEqual((again.batch_utilization, again.fragmentation_mean, again.found_tokens), (6 / 16, 3.0, 1))
        self.assertEqual(Metrics.of([*events, first, abandon, abandon]).steps, 1)  # a damaged timeline

    def test_pages_and_fragmentation(self) -> None:
        metrics = Metrics.of([HEADER, submit(0.0), pages(0.0, 3), step(0.0, {"a": 3}, admitted="a", empty_slots=5),
                              pages(1.0, 8), pages(1.0, 6), step(1.0, {"a": 1}, empty_slots=2),
                              step(2.0, {}, empty_slots=90), pages(3.0, 2)])
        self.assertEqual((metrics.kv_pages, metrics.kv_bytes), (2, 200))
        self.assertEqual((metrics.kv_peak_pages, metrics.kv_peak_bytes), (8, 800))
        self.assertEqual((metrics.fragmentation_mean, metrics.fragmentation_peak), (3.5, 5))
        self.assertEqual(metrics.weight_bytes, 7)

    def test_prompt_tokens_found_in_shared_pages(self) -> None:
        metrics = Metrics.of([HEADER, submit(0.0, "a"), submit(0.0, "b"),
                              step(0.0, {"a": 1, "b": 2}, admitted="ab", found={"a": 2, "b": 1}), step(1.0, {"a": 1})])
        self.assertEqual(metrics.found_tokens, 3)

    def test_prompt_tokens_looked_up_and_processed(self) -> None:
        """Looked up once, at the first admission, where prefixes are shared; processed with the first token."""
        events = [submit(0.0, "a", 5), submit(0.0, "b", 3), step(0.0, {}, admitted="a"), step(1.0, {}, preempted="a"),
                  step(2.0, {}, admitted="a"), *tokens("a", 3.0, 4.0)]
        for sharing, queried in ((True, 5), (False, 0)):
            metrics = Metrics.of([{**HEADER, "settings": {"prefix_sharing": sharing}}, *events])
            self.assertEqual((metrics.queried_tokens, metrics.prefilled_tokens, metrics.prompt_tokens), (queried, 5, 8))

    def test_the_share_of_the_pool_in_use(self) -> None:
        self.assertEqual(Metrics.of([{**HEADER, "num_pages": 8}, pages(0.0, 6)]).kv_usage, 0.75)
        self.assertEqual(Metrics.of([HEADER, pages(0.0, 6)]).kv_usage, 0.0)

    def test_a_timeline_with_a_hole_is_bad_input(self) -> None:
        for wrong in (event("token", 0.0, index=0), finish(0.0), event("fork", 0.0, "b", parent="a"),
                      step(0.0, {}, admitted="a")):
            with self.assertRaisesRegex(SchemaError, "event 2, .*is the timeline whole"):
                Metrics.of([HEADER, wrong])

    def test_events_of_unknown_kinds_carry_nothing_that_is_measured(self) -> None:
        events = [HEADER, submit(0.0), *tokens("a", 1.0)]
        self.assertEqual(Metrics.of([*events, event("fault", 1.0, call=3)]), Metrics.of(events))


class ClockOfTheWall:
    """Time that passes by odd amounts, between any two looks."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.now = dice, 1e6

    def __call__(self) -> float:
        self.now += self.dice.choice((0.0, 0.001, 0.37))
        return self.now


class RunTest(unittest.TestCase):
    def check(self, engine: InferenceEngine) -> Metrics:
        """The metrics are those of the timeline on disk, and fit what the engine knows elsewhere."""
        metrics = engine.metrics()
        with tempfile.TemporaryDirectory() as folder:
            engine.timeline.write(Path(folder) / "run.jsonl")
            self.assertEqual(Metrics.of(json_lines(Path(folder) / "run.jsonl")), metrics)
        self.assertEqual(json.loads(metrics.to_json()), json.loads(json.dumps(metrics.to_dict())))
        self.assertEqual(metrics.kv_usage, metrics.kv_pages / engine.kv.total_pages)
        self.assertEqual(metrics.kv_pages, engine.kv.total_pages - engine.kv.free_pages)
        self.assertEqual(metrics.kv_peak_pages, engine.kv.stats().peak_pages)
        self.assertEqual(metrics.kv_peak_bytes, engine.kv.stats().peak_bytes)
        self.assertEqual(metrics.weight_bytes, engine.model.weight_bytes)
        return metrics

    def test_a_function_of_the_timeline_alone(self) -> None:
        """Random runs with cancels, refusals, samples, failures and preemptions, looked at again and again."""
        totals: Counter[str] = Counter()
        for seed in range(12):
            with self.subTest(seed=seed):
                dice = random.Random(seed)

                def fault(moment: str, batch: object, dice: random.Random = dice) -> None:
                    if dice.random() < 0.03:
                        raise RuntimeError("a broken cable")

                engine = make_engine(FaultyBackend(fault), page_size=2, num_pages=18, budget_tokens=6, max_running=4)
                engine._core.recorder.clock = ClockOfTheWall(dice)
                accepted, read = 0, []
                for i in range(12):
                    with suppress(EngineError):
                        engine.submit(prompt_of(dice, dice.choice((1, 3, 9, 40))), dice.randint(0, 9),
                                      request_id=f"r{i}", sampling=SamplingParams(n=dice.choice((1, 1, 2))))
                        accepted += 1
                    for _ in range(dice.randint(0, 3)):
                        engine.step()
                    if dice.random() < 0.2 and engine.active:
                        engine.cancel(dice.choice(engine.active))
                    self.assertEqual(self.check(engine).submitted, accepted)
                engine.run()
                metrics = self.check(engine)
                for name in list(engine._core.streams):
                    read += engine.poll(name)
                self.assertEqual(sum(metrics.finished.values()), accepted)
                self.assertEqual((metrics.running, metrics.waiting, metrics.kv_pages), (0, 0, 0))
                self.assertEqual(metrics.refused, 12 - accepted)
                self.assertGreaterEqual(metrics.output_tokens, sum(one.token is not None for one in read))
                totals.update(metrics.finished, preempted=metrics.preemptions, refused=metrics.refused)
        self.assertTrue(all(totals[name] for name in ("length", "cancelled", "error", "preempted", "refused")), totals)

    def test_tokens_computed_again_are_not_counted_again(self) -> None:
        """K042: forced preemptions; the sum of the outputs is the total."""
        engine = make_engine(page_size=2, num_pages=9, budget_tokens=6, max_running=4)
        prompts = [(1, 2, 3), (4,), (5, 6, 7, 8), (9, 10)]
        outputs = engine.generate(prompts, 7)
        metrics = self.check(engine)
        self.assertGreater(metrics.preemptions, 0)
        self.assertEqual(outputs, [oracle(prompt, 7) for prompt in prompts])
        self.assertEqual(metrics.output_tokens, 4 * 7)
        self.assertGreater(metrics.computed_tokens, sum(len(prompt) + 7 - 1 for prompt in prompts))
        self.assertEqual((metrics.ttft.count, metrics.tpot.count, metrics.finished["length"]), (4, 4, 4))

    def test_steps_are_those_that_the_engine_has_completed_interrupts_or_not(self) -> None:
        engine = make_engine(failing_at(2, "start", KeyboardInterrupt()), page_size=2)
        engine.submit([3, 1, 4], 6)
        self.assertRaises(KeyboardInterrupt, engine.run)
        for steps in (2, 6):
            metrics = self.check(engine)
            self.assertEqual((engine.steps, metrics.steps, len(metrics.active_requests)), (steps,) * 3)
            engine.run()
        self.assertEqual((metrics.computed_tokens, metrics.output_tokens), (3 + 5, 6))

    def test_gauges_fall_at_once_when_everything_is_cancelled(self) -> None:
        """K094, K095: no further step is needed."""
        engine = make_engine(page_size=2, num_pages=30, budget_tokens=4, max_running=3)
        for i in range(5):
            engine.submit([1, 2, 3, i], 9, request_id=f"r{i}")
        for _ in range(3):
            engine.step()
        before = engine.metrics()
        self.assertEqual((before.running + before.waiting, before.kv_pages > 0), (5, True))
        for name in engine.active:
            engine.cancel(name)
        after = self.check(engine)
        self.assertEqual((after.running, after.waiting, after.kv_pages, after.kv_bytes), (0, 0, 0, 0))
        self.assertEqual((after.finished["cancelled"], after.submitted), (5, 5))
        self.assertEqual(after.kv_peak_pages, before.kv_peak_pages)

    def test_a_shared_page_counts_once(self) -> None:
        """K101: three samples of one prompt on its two full pages, and a tail of their own each."""
        engine = make_engine(page_size=4, num_pages=16, budget_tokens=16)
        engine.submit([1, 2, 3, 4, 5, 6, 7, 8], 3, sampling=SamplingParams(1.0, n=3, ignore_eos=True))
        engine.step()
        self.assertEqual(engine.metrics().kv_pages, 2)
        engine.step()
        metrics = self.check(engine)
        self.assertEqual(metrics.kv_pages, 2 + 3)
        self.assertEqual(metrics.kv_bytes, 5 * 2 * 8 * 4 * engine.kv.width)
        self.assertEqual(metrics.kv_pages + engine.kv.free_pages, engine.kv.total_pages)

    def test_by_hand_two_requests_one_slot(self) -> None:
        """b waits for a: with a clock of one second a step, a has its tokens at 1, 2, 3 and b at 4, 5."""
        engine = make_engine(max_running=1, page_size=4, budget_tokens=10)
        engine.submit([1, 2], 3, request_id="a")
        engine.submit([3], 2, request_id="b")
        engine.run()
        metrics = self.check(engine)
        self.assertEqual(metrics.ttft, Summary(2, 2.5, 1.0, 4.0, 4.0, 4.0))
        self.assertEqual(metrics.tpot, Summary(2, 1.0, 1.0, 1.0, 1.0, 1.0))
        self.assertEqual((metrics.elapsed_seconds, metrics.tokens_per_second), (5.0, 1.0))
        self.assertEqual((metrics.steps, metrics.active_requests), (5, (1,) * 5))
        self.assertEqual(metrics.batch_utilization, (2 + 1 + 1 + 1 + 1) / 50)
        self.assertEqual((metrics.prompt_tokens, metrics.output_tokens, metrics.computed_tokens), (3, 5, 6))
        self.assertEqual((metrics.kv_peak_pages, metrics.kv_peak_bytes), (1, 2 * 8 * 4 * engine.kv.width))


if __name__ == "__main__":
    unittest.main()
