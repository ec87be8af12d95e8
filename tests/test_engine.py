"""The service: batch equals solo bit by bit, events, cancels, ids, samples, failures, threads."""

from __future__ import annotations

import random
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count, product
from math import exp, fsum, log, nan
from threading import Event, Thread

from starter.engine import InferenceEngine
from starter.errors import (
    BackendError,
    CapacityError,
    DuplicateRequestError,
    EngineError,
    QueueFullError,
    RequestError,
    SchemaError,
    UnknownRequestError,
)
from starter.policies import POLICIES
from starter.reference import reference_logits
from starter.scheduler import REFUSAL_LIMIT
from starter.schema import SamplingParams, TokenEvent
from support import CONFIG, CONTEXT, HEALTHY, VOCABULARY, Ask, FaultyBackend, make_engine, oracle, outcome, prompt_of, solo

FIVE = {"a": Ask((3, 1, 4), 6), "b": Ask((1,), 9), "c": Ask((2, 7, 1, 8, 2, 8, 1, 8), 5), "d": Ask((5, 5), 1),
        "e": Ask((9, 9, 9, 9), 7)}
TIGHT = {"page_size": 2, "num_pages": 9, "budget_tokens": 6, "max_running": 4}  # five in here need preemption
ROOMY = {"page_size": 4, "num_pages": 64, "budget_tokens": 8, "max_running": 8}
SERVINGS: Sequence[dict[str, object]] = (
    {}, {"prefix_sharing": True}, {"preemption": "swap"}, {"preemption": "swap", "prefix_sharing": True},
    {"preemption": "swap", "host_pages": 3}, *({"policy": policy} for policy in POLICIES if policy != "fcfs"))
POISON = 19  # no prompt above holds this token
HEALTHY_FIVE = {name: ask for name, ask in FIVE.items() if POISON not in oracle(ask.prompt, ask.max_tokens)}


class Case(unittest.TestCase):
    def submit(self, engine: InferenceEngine, asks: Mapping[str, Ask]) -> None:
        for name, ask in asks.items():
            ask.submit(engine, name)

    def check_events(self, events: Sequence[TokenEvent], reasons: Iterable[str], number: int = 0) -> None:
        """Of a sample: indices 0, 1, 2, ... once each; one last event with a reason, and nothing after it."""
        events = [event for event in events if event.sample == number]
        self.assertIn(events[-1].finish_reason, reasons)
        self.assertTrue(all(event.finish_reason is None and event.token is not None for event in events[:-1]))
        self.assertEqual([event.index for event in events], list(range(len(events))))
        self.assertEqual(events[-1].error is not None, events[-1].finish_reason == "error")

    def check_outcomes(self, engine: InferenceEngine, asks: Mapping[str, Ask], failed: Iterable[str] = ()) -> None:
        """Run to the end: tokens equal solo bit by bit; those of the failed are a beginning of it; all is given back."""
        engine.run()
        for name, ask in asks.items():
            self.check_ask(engine.poll(name), name, ask, name in failed)
        self.check_empty(engine)

    def check_ask(self, events: Sequence[TokenEvent], name: str, ask: Ask, failed: bool = False) -> None:
        for number, expected in enumerate(solo(ask, name)):
            got = outcome(events, number)
            self.check_events(events, ("cancelled", "error") if failed else ("length", "stop"), number)
            self.assertEqual(got, expected[:len(got)] if failed else expected, f"{name}, sample {number}")

    def check_empty(self, engine: InferenceEngine) -> None:
        engine.kv.check()
        self.assertEqual((engine.kv.free_pages, engine.active), (engine.kv.total_pages, ()))
        self.assertEqual(engine.kv.free_host_pages, engine.kv.total_host_pages)
        self.assertFalse(engine._streams or engine._samples)  # the tables of requests are empty too: K001, K003

    def picture(self, engine: InferenceEngine) -> object:
        """All that can be observed, the count of refusals aside."""
        streams = {name: engine.status(name) for name in engine._streams}
        return engine.active, engine.steps, engine.kv.stats(), streams, replace(engine.metrics(), refused=0)


class BatchEqualsSolo(Case):
    def test_solo_equals_the_cacheless_reference(self) -> None:
        """V6"""
        parameters = HEALTHY.model.parameters()
        for seed in range(12):
            with self.subTest(seed=seed):
                prompt = prompt_of(random.Random(seed), 1 + seed)
                (tokens,) = solo(Ask(prompt, 8))
                self.assertEqual([token for token, _ in tokens], oracle(prompt, 8))
                logits = reference_logits(CONFIG, parameters, prompt)
                self.assertAlmostEqual(tokens[0][1], logits[tokens[0][0]] - log(fsum(map(exp, logits))), places=10)

    def random_ask(self, dice: random.Random) -> Ask:
        sampling = dice.choice((
            SamplingParams(), SamplingParams(), SamplingParams(1.0), SamplingParams(2.0, seed=7),
            SamplingParams(1.5, top_k=5), SamplingParams(1.5, top_p=0.6, min_p=0.01), SamplingParams(1.2, n=3),
            SamplingParams(0.8, repetition_penalty=1.5, presence_penalty=0.5, logit_bias={3: 2.0}, n=2),
            SamplingParams(min_tokens=3, stop="ab", logprobs=2)))
        prompt = (1, 2, 3, 1, 2, 3)[:dice.randint(0, 6)] + prompt_of(dice, dice.randint(1, 8))
        return Ask(prompt, dice.randint(1, 12), sampling, prompt_of(dice, dice.choice((0, 0, 2))), dice.randint(-1, 1))

    def test_random_arrivals_budgets_pages_policies_and_samplings(self) -> None:
        """K012, K062, K071, K073: alone, batched, chunked, preempted and resumed, prefix-shared: the same bits."""
        preempted = chunked = stopped = found = swapped = 0
        for seed in range(24):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                page_size = dice.randint(1, 17)
                engine = make_engine(page_size=page_size, num_pages=-(-25 // page_size) + dice.randint(0, 3),
                                     budget_tokens=dice.randint(1, 12), max_running=dice.randint(1, 5),
                                     **dice.choice(SERVINGS))
                asks = {f"r{i}": self.random_ask(dice) for i in range(7)}
                for name, ask in asks.items():
                    ask.submit(engine, name)
                    for _ in range(dice.randint(0, 3)):
                        decision = engine.step()
                        engine.kv.check()
                        chunked += any(chunk.start and chunk.phase == "prefill" for chunk in decision.chunks)
                stopped += sum(len(solo(ask, name)[0]) < ask.max_tokens for name, ask in asks.items())
                self.check_outcomes(engine, asks)
                preempted += engine.metrics().preemptions
                found += engine.metrics().found_tokens
                swapped += engine.kv.stats().swaps_in
        self.assertGreater(min(preempted, chunked, stopped, found, swapped), 10)  # the test tests what it says

    def test_chunks_and_pages_of_every_size(self) -> None:
        for budget, page_size in product((1, 2, 3, 5, 8, 13), (1, 2, 3, 4, 8, 17)):
            with self.subTest(budget=budget, page_size=page_size):
                engine = make_engine(budget_tokens=budget, page_size=page_size)
                self.submit(engine, FIVE)
                self.check_outcomes(engine, FIVE)

    def test_preemption_at_every_step(self) -> None:
        """After k steps all free pages are taken from outside for one step: whoever is last in order must go."""
        for serving in ({}, {"preemption": "swap"}, {"prefix_sharing": True}):
            preemptions = 0
            for k in range(1, 16):
                with self.subTest(serving=serving, k=k):
                    engine = make_engine(page_size=1, num_pages=40, budget_tokens=7, **serving)
                    self.submit(engine, FIVE)
                    for _ in range(k):
                        engine.step()
                    outside = engine.kv.allocate("outside", engine.kv.free_pages)
                    preemptions += len(engine.step().preempted)
                    engine.kv.release(outside)
                    self.check_outcomes(engine, FIVE)
            self.assertGreater(preemptions, 5)

    def test_no_cache_and_other_batchings_give_the_same_tokens(self) -> None:
        for settings in ({"use_cache": False}, {"batching": "static"}, {"batching": "none"},
                         {"batching": "static", "use_cache": False, "budget_tokens": 3}):
            with self.subTest(settings=settings):
                engine = make_engine(**{**TIGHT, **settings})
                self.submit(engine, FIVE)
                self.check_outcomes(engine, FIVE)

    def test_shared_prefixes(self) -> None:
        """K013, K021, K026, K040: whole pages in common, submitted together and later, evicted meanwhile."""
        prompt = (1, 2, 3, 4, 5, 6, 7, 8)
        for length, num_pages in product((3, 4, 5, 7, 8), (5, 6, 40)):
            engine = make_engine(page_size=4, num_pages=num_pages, prefix_sharing=True, budget_tokens=40)
            asks = {f"r{i}": Ask(prompt[:length] + (9,) * (i % 3), 4) for i in range(8)}
            self.submit(engine, asks)
            self.submit(engine, {"other": Ask((11,) * 9, 5)})
            self.check_ask(list(engine.stream("other")), "other", Ask((11,) * 9, 5))
            self.check_outcomes(engine, asks)
            self.submit(engine, asks)
            self.check_outcomes(engine, asks)

    def test_numbers_left_in_free_pages_do_no_harm(self) -> None:
        """K066: NaN in every free slot, before the run and again in every step."""
        engine = make_engine(**TIGHT)
        self.submit(engine, FIVE)
        spoilt = [nan] * engine.kv.width
        while engine.active:
            for page, offset in product(range(engine.kv.total_pages), range(engine.kv.page_size)):
                if engine.kv.page(page).state == "free":
                    engine.kv.store.write(page, offset, spoilt, spoilt)
            engine.step()
        self.check_outcomes(engine, FIVE)


class Events(Case):
    def test_max_tokens(self) -> None:
        """B3, K047, K056: exactly so many tokens; 0 gives the last event alone."""
        for max_tokens in (0, 1, 2, 4, 5):
            engine = make_engine(page_size=4)
            name = engine.submit([1, 2, 3], max_tokens)
            self.assertEqual(bool(engine.active), max_tokens > 0)
            events = list(engine.stream(name))
            self.check_events(events, ("length",))
            self.assertEqual((outcome(events),), solo(Ask((1, 2, 3), max_tokens)))
            self.check_empty(engine)

    def test_stop_tokens_end_a_request_and_are_included(self) -> None:
        """K060; also as the first token, and where it is also the last by length."""
        tokens = oracle((3, 1, 4), 6)
        for stop in sorted(set(tokens)):
            length = tokens.index(stop) + 1
            for max_tokens in (6, length):
                engine = make_engine()
                events = list(engine.stream(engine.submit([3, 1, 4], max_tokens, stop_tokens=[stop])))
                self.check_events(events, ("stop",))
                self.assertEqual([event.token for event in events], tokens[:length])
                self.check_empty(engine)

    def test_text_is_what_the_tokens_spell_up_to_a_stop_string(self) -> None:
        """K053 to K056: nothing of the stop string is shown, nothing before it is lost."""
        text = "".join("abcdefghijklmnopqrst"[token] for token in oracle((3, 1, 4), 8))
        for start, end in [(None, None), *((i, j) for i in range(8) for j in range(i + 1, 9))]:
            stop = () if start is None else (text[start:end], "zz")
            engine = make_engine()
            events = list(engine.stream(engine.submit([3, 1, 4], 8, sampling=SamplingParams(stop=stop))))
            self.check_events(events, ("length",) if start is None else ("stop",))
            shown = "".join(event.text for event in events)
            self.assertEqual(shown, text if start is None else text[:text.index(stop[0])])
            self.check_empty(engine)
        almost = text[-2:] + "a"  # the end of the text might have become a stop string
        engine = make_engine()
        events = list(engine.stream(engine.submit([3, 1, 4], 8, sampling=SamplingParams(stop=almost))))
        self.assertEqual("".join(event.text for event in events), text)

    def test_streams_in_any_order_from_several_readers_or_never(self) -> None:
        for seed in range(20):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                engine = make_engine(**TIGHT)
                self.submit(engine, FIVE)
                read: dict[str, list[TokenEvent]] = {name: [] for name in FIVE}
                unread = dice.choice([*FIVE])
                readers = [(name, engine.stream(name)) for name in FIVE for _ in range(2) if name != unread]
                while readers:  # two readers of each stream share its events between them
                    reader = dice.choice(readers)
                    event = next(reader[1], None)
                    if event is None:
                        readers.remove(reader)
                    else:
                        read[reader[0]].append(event)
                engine.run()
                read[unread] = engine.poll(unread)
                for name, events in read.items():
                    self.check_ask(events, name, FIVE[name])
                self.check_empty(engine)

    def test_a_stream_goes_on_where_the_reader_stopped(self) -> None:
        engine = make_engine()
        self.submit(engine, {"a": FIVE["a"]})
        events = [next(engine.stream("a")), next(engine.stream("a"))]
        engine.step()
        events += engine.poll("a")
        self.assertEqual((len(events), engine.poll("a")), (3, []))
        events += engine.stream("a")
        self.check_events(events, ("length",))
        for use in (engine.stream, engine.poll, engine.cancel, engine.status):
            for name in ("a", "never", "", 7, None):
                self.assertRaises(UnknownRequestError, use, name)

    def test_polling_runs_no_step(self) -> None:
        engine = make_engine()
        self.submit(engine, FIVE)
        self.assertEqual([engine.poll(name) for name in FIVE], [[]] * 5)
        self.assertEqual(engine.steps, 0)

    def test_a_thousand_short_requests_leave_nothing_behind(self) -> None:
        """K003"""
        engine = make_engine(page_size=2, num_pages=4)
        for number in range(1000):
            ask = Ask((number % VOCABULARY,), 1)
            self.assertEqual(outcome(engine.stream(engine.submit(ask.prompt, 1))), solo(ask)[0])
        self.check_empty(engine)
        self.assertEqual((engine.kv.stats().peak_pages, engine.scheduler.live), (1, ()))


class Cancel(Case):
    def test_any_request_after_any_number_of_steps(self) -> None:
        """V3, K001: no token after it, pages free at once, the others unchanged."""
        for settings, name in product((ROOMY, {**TIGHT, "preemption": "swap", "prefix_sharing": True}), FIVE):
            for k in count():
                engine = make_engine(**settings)
                self.submit(engine, FIVE)
                for _ in range(k):
                    engine.step()
                if not engine.active:
                    break
                with self.subTest(settings=settings, name=name, k=k):
                    ended = engine.status(name).finish_reason
                    engine.cancel(name)
                    engine.kv.check()
                    self.assertNotIn(name, engine.active)
                    if not ended:
                        self.assertEqual([(e.token, e.index, e.finish_reason) for e in engine.poll(name)],
                                         [(None, 0, "cancelled")])  # unread tokens are withheld
                    others = {other: ask for other, ask in FIVE.items() if ended or other != name}
                    self.check_outcomes(engine, others)

    def test_inside_a_stream_loop(self) -> None:
        """K046: the last event's index goes on from what was read."""
        for last in range(5):
            engine = make_engine(**TIGHT)
            self.submit(engine, FIVE)
            events = []
            for event in engine.stream("a"):
                events.append(event)
                if event.index == last:
                    engine.cancel("a")
                    engine.cancel("a")  # again: does nothing
            self.check_events(events, ("cancelled",))
            self.assertEqual(outcome(events), solo(FIVE["a"])[0][:last + 1])
            self.check_outcomes(engine, {name: ask for name, ask in FIVE.items() if name != "a"})

    def test_while_the_decoder_computes(self) -> None:
        """K046, K044: also when the id is used again at once; the row that is being computed goes to nobody."""
        for k, again in product(range(8), (False, True)):
            engine = make_engine(backend := FaultyBackend(), **TIGHT)
            self.submit(engine, FIVE)
            for _ in range(k):
                engine.step()
            if engine.status("a").finish_reason:
                break

            def cancel(moment: str, tokens: Sequence[int], engine=engine, backend=backend, again=again) -> None:
                backend.fault = lambda moment, tokens: None
                engine.cancel("a")
                if again:
                    engine.submit([7, 7], 4, request_id="a")

            backend.fault = cancel
            old = engine.stream("a")
            engine.step()
            self.assertEqual([event.finish_reason for event in old], ["cancelled"])
            others = {**FIVE, "a": Ask((7, 7), 4)}
            self.check_outcomes(engine, others if again else {n: ask for n, ask in FIVE.items() if n != "a"})
        self.assertGreater(k, 4)

    def test_of_a_finished_request_does_nothing(self) -> None:
        engine = make_engine()
        self.submit(engine, FIVE)
        engine.run()
        before = self.picture(engine)
        for name in FIVE:
            engine.cancel(name)
        self.assertEqual(self.picture(engine), before)
        self.check_outcomes(engine, FIVE)

    def test_neighbours_that_are_sampled_draw_the_same(self) -> None:
        """K073: A with a seed; B beside it without one, cancelled at any time."""
        asks = {"A": Ask((1, 2), 12, SamplingParams(1.0, seed=42)), "B": Ask((3,), 12, SamplingParams(1.0))}
        for k in range(12):
            engine = make_engine()
            self.submit(engine, asks)
            for _ in range(k):
                engine.step()
            engine.cancel("B")
            self.check_outcomes(engine, asks, failed="B")

    def test_all_at_once_leaves_no_stale_gauge(self) -> None:
        """K094"""
        engine = make_engine(**TIGHT)
        self.submit(engine, FIVE)
        for _ in range(4):
            engine.step()
        for name in engine.active:
            engine.cancel(name)
        metrics = engine.metrics()
        self.assertEqual((metrics.running, metrics.waiting, metrics.kv_pages, metrics.kv_bytes), (0, 0, 0, 0))
        self.assertGreater(metrics.kv_peak_bytes, 0)


class Submit(Case):
    def test_errors_leave_everything_as_it_was(self) -> None:
        """B1, B4 to B6, K049, K050, K052"""
        engine = make_engine(page_size=4, num_pages=8)
        engine.submit([1, 2, 3], 4, request_id="live", sampling=SamplingParams(n=2))
        engine.step()
        engine.submit([1], 0, request_id="unread")
        before = self.picture(engine)
        for error, prompt, max_tokens, further in (
                (RequestError, [], 4, {}), (RequestError, "text", 4, {}), (RequestError, 5, 4, {}),
                (RequestError, [VOCABULARY], 4, {}), (RequestError, [-1], 4, {}), (RequestError, [2**40], 4, {}),
                (RequestError, [True], 4, {}), (RequestError, [1.0], 4, {}), (RequestError, [None], 4, {}),
                (RequestError, [1], -1, {}), (RequestError, [1], True, {}), (RequestError, [1], 2.0, {}),
                (RequestError, [1], "5", {}), (RequestError, [1], None, {}), (RequestError, [1], 1e18, {}),
                (CapacityError, [1], 2**31 - 1, {}), (CapacityError, [1], 10**18, {}),
                (CapacityError, [0] * CONTEXT, 1, {}), (CapacityError, [1] * 32, 2, {}),  # 33 slots, the pool has 32
                (CapacityError, [1] * 30, 4, {}), (DuplicateRequestError, [1], 1, {"request_id": "live"}),
                (DuplicateRequestError, [1], 1, {"request_id": "live#1"}),  # the id of its second sample
                (DuplicateRequestError, [1], 1, {"request_id": "unread"}),
                (RequestError, [1], 1, {"request_id": ""}), (RequestError, [1], 1, {"request_id": 7}),
                (RequestError, [1], 1, {"stop_tokens": [VOCABULARY]}), (RequestError, [1], 1, {"stop_tokens": [-1]}),
                (RequestError, [1], 1, {"sampling": "greedy"}), (RequestError, [1], 1, {"priority": 1.5}),
                (RequestError, [1], 1, {"sampling": SamplingParams(logit_bias={VOCABULARY: 1.0})}),
                (RequestError, [1], 1, {"sampling": SamplingParams(logprobs=VOCABULARY + 1)})):
            with self.subTest(prompt=prompt, max_tokens=max_tokens, further=further):
                with self.assertRaises(error):
                    engine.submit(prompt, max_tokens, **further)
                self.assertEqual(self.picture(engine), before)
        self.assertEqual(engine.submit([1] * 32, 1), "request-2")  # the largest that fits; the refused took no number
        self.assertEqual(len(list(engine.stream("request-2"))), 1)
        self.check_ask(list(engine.stream("live")), "live", Ask((1, 2, 3), 4, SamplingParams(n=2)))

    def test_the_queue_is_bounded(self) -> None:
        engine = make_engine(max_running=1, max_waiting=2)
        for _ in range(2):
            engine.submit([1], 3)
        before = self.picture(engine)
        self.assertRaisesRegex(QueueFullError, "2 requests wait, and max_waiting is 2", engine.submit, [1], 3)
        self.assertEqual(self.picture(engine), before)
        engine.step()  # one runs now
        engine.submit([1], 3)
        self.assertRaises(QueueFullError, engine.submit, [1], 3)
        engine.run()
        engine.submit([1], 3)

    def test_an_id_lives_until_its_last_event_was_read_or_it_was_cancelled(self) -> None:
        """K043"""
        engine = make_engine()
        engine.submit([1, 2], 3, request_id="x")
        for _ in range(3):  # live, then finished and unread
            self.assertRaises(DuplicateRequestError, engine.submit, [3], 2, request_id="x")
            engine.run()
        list(engine.stream("x"))
        engine.submit([3], 2, request_id="x")
        self.assertEqual((outcome(engine.stream("x")),), solo(Ask((3,), 2)))

    def test_the_old_request_never_touches_the_new_one(self) -> None:
        """K044: cancel and submit again at once, after any number of steps; the old reader reads the old stream."""
        for k in range(5):
            engine = make_engine()
            engine.submit([1, 2, 3], 5, request_id="x")
            old = engine.stream("x")
            first = [next(old)] if k > 2 else []
            while engine.steps < k:
                engine.step()
            engine.cancel("x")
            engine.submit([7, 7], 4, request_id="x")
            new = engine.stream("x")
            events = [next(new)]
            self.check_events(first + list(old), ("cancelled",))
            events += new
            self.check_ask(events, "x", Ask((7, 7), 4))
            self.check_empty(engine)

    def test_made_up_ids_are_free_ones(self) -> None:
        engine = make_engine()
        engine.submit([1], 1, request_id="request-1")
        self.assertEqual([engine.submit([1], 1) for _ in range(3)], ["request-2", "request-3", "request-4"])

    def test_status(self) -> None:
        engine = make_engine(max_running=1)
        self.submit(engine, {"a": Ask((1, 2), 2), "b": Ask((3,), 2)})
        engine.step()
        self.assertEqual([(engine.status(n).state, engine.status(n).generated_tokens) for n in "ab"],
                         [("running", 1), ("waiting", 0)])
        engine.run()
        self.assertEqual((engine.status("a").state, engine.status("a").finish_reason), ("finished", "length"))


class Samples(Case):
    def test_each_has_its_own_tokens_indices_and_end(self) -> None:
        """K075: deterministic, not all equal; those that end early take nothing from the others."""
        sampling = SamplingParams(1.5, seed=7, n=4)
        for stop in ((), (3, 11)):
            ask = Ask((1, 2, 3), 8, sampling, stop)
            alone = solo(ask)
            self.assertGreater(len(set(alone)), 2)
            self.assertEqual(alone[0], solo(Ask((1, 2, 3), 8, replace(sampling, n=1), stop))[0])
            for settings in (TIGHT, ROOMY, {**TIGHT, "preemption": "swap"}, {**ROOMY, "use_cache": False}):
                engine = make_engine(**settings)
                self.submit(engine, {"x": ask, **FIVE})
                self.check_outcomes(engine, {"x": ask, **FIVE})
        self.assertGreater(len({len(tokens) for tokens in alone}), 1)

    def test_greedy_ones_are_equal_and_share_the_prompts_pages(self) -> None:
        engine = make_engine(page_size=4)
        engine.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], 3, request_id="x", sampling=SamplingParams(n=5))
        engine.step()
        engine.step()
        self.assertEqual(engine.kv.total_pages - engine.kv.free_pages, 2 + 5)  # two full pages for all, a tail each
        events = list(engine.stream("x"))
        self.assertEqual({outcome(events, i) for i in range(5)}, {solo(Ask((1, 2, 3, 4, 5, 6, 7, 8, 9), 3))[0]})
        self.check_empty(engine)

    def test_short_ones(self) -> None:
        for max_tokens in (0, 1, 2):
            ask = Ask((1, 2), max_tokens, SamplingParams(1.0, n=3))
            engine = make_engine()
            self.submit(engine, {"x": ask})
            events = list(engine.stream("x"))
            for number, expected in enumerate(solo(ask, "x")):
                self.check_events(events, ("length",), number)
                self.assertEqual((outcome(events, number), len(expected)), (expected, max_tokens))
            self.check_empty(engine)

    def test_cancel_ends_all(self) -> None:
        """K001: after any number of steps; the id is free again, whichever sample had ended before."""
        for seed, first_to_end in ((5, 0), (3, 1), (7, 2)):
            ask = Ask((1, 2, 3), 6, SamplingParams(1.5, seed=seed, n=3), (3, 11))
            lengths = [len(tokens) for tokens in solo(ask, "x")]
            self.assertEqual(lengths.index(min(lengths)), first_to_end)
            for k in range(max(lengths)):
                engine = make_engine(**TIGHT)
                self.submit(engine, {"x": ask, "a": FIVE["a"]})
                for _ in range(k):
                    engine.step()
                if engine.status("x").finish_reason:
                    break
                engine.cancel("x")
                engine.kv.check()
                self.assertEqual(engine.active, () if engine.status("a").finish_reason else ("a",))
                old = engine.stream("x")
                self.submit(engine, {"x": ask})
                events = list(old)
                for number in range(3):
                    self.check_events(events, ("cancelled", "stop", "length"), number)
                    if [event for event in events if event.sample == number][-1].finish_reason == "cancelled":
                        self.assertEqual(outcome(events, number), ())
                self.check_outcomes(engine, {"x": ask, "a": FIVE["a"]})

    def test_a_failure_of_the_prompt_ends_all(self) -> None:
        engine = make_engine(failing_on(POISON), **TIGHT)
        self.submit(engine, {"x": Ask((1, POISON), 4, SamplingParams(1.0, n=3)), **HEALTHY_FIVE})
        events = list(engine.stream("x"))
        self.assertEqual([(e.sample, e.index, e.finish_reason) for e in events], [(i, 0, "error") for i in range(3)])
        self.check_outcomes(engine, HEALTHY_FIVE)


class Generate(Case):
    def test_tokens_of_each(self) -> None:
        engine = make_engine(**TIGHT)
        prompts = [ask.prompt for ask in FIVE.values()]
        self.assertEqual(engine.generate(prompts, 6), [oracle(prompt, 6) for prompt in prompts])
        self.assertEqual(engine.generate([], 6), [])
        self.check_empty(engine)

    def test_all_or_none(self) -> None:
        def interrupt(moment: str, tokens: Sequence[int]) -> None:
            raise KeyboardInterrupt

        for error, prompt, backend in ((RequestError, [VOCABULARY], FaultyBackend()),
                                       (BackendError, [POISON], failing_on(POISON)),
                                       (KeyboardInterrupt, [1], FaultyBackend(interrupt))):
            with self.subTest(error=error):
                engine = make_engine(backend, **TIGHT)
                engine.submit([3, 1, 4], 6, request_id="other")
                with self.assertRaises(error):
                    engine.generate([[1, 2], prompt, [3]], 4)
                self.assertEqual(engine.active, ("other",))
                backend.fault = lambda moment, tokens: None
                self.check_outcomes(engine, {"other": FIVE["a"]})


def failing_on(token: int) -> FaultyBackend:
    """A backend that raises when a token is in the batch."""
    def fault(moment: str, tokens: Sequence[int]) -> None:
        if moment == "middle" and token in tokens:
            raise OSError(f"no luck with token {token}")

    return FaultyBackend(fault)


def failing_at(call: int, moment: str, error: BaseException) -> FaultyBackend:
    """A backend that raises once, at the call-th of the moments."""
    numbers = count()

    def fault(now: str, tokens: Sequence[int]) -> None:
        if now == moment and next(numbers) == call:
            raise error

    return FaultyBackend(fault)


class Failures(Case):
    """A request that fails ends with finish_reason "error" and the reason; its neighbours' tokens stay the same."""

    def test_a_passing_fault_of_the_backend_is_not_noticed(self) -> None:
        """The k-th time something is computed fails, before it began or with keys and values half written."""
        for moment, k in product(("start", "middle"), range(0, 20, 2)):
            with self.subTest(moment=moment, k=k):
                engine = make_engine(failing_at(k, moment, OSError("passing")), **TIGHT)
                self.submit(engine, FIVE)
                self.check_outcomes(engine, FIVE)

    def test_only_the_request_at_fault_ends(self) -> None:
        for settings in (TIGHT, {**TIGHT, "budget_tokens": 2}, {**ROOMY, "use_cache": False}):
            with self.subTest(settings=settings):
                engine = make_engine(failing_on(POISON), **settings)
                self.submit(engine, HEALTHY_FIVE)
                engine.submit([1, 2, POISON, 4], 5, request_id="bad")
                events = list(engine.stream("bad"))
                self.check_events(events, ("error",))
                self.assertEqual(events[-1].error, f"OSError: no luck with token {POISON}")
                self.check_outcomes(engine, HEALTHY_FIVE)
                self.assertGreater(len(HEALTHY_FIVE), 2)

    def test_a_backend_that_always_fails_ends_everybody_once(self) -> None:
        def fault(moment: str, tokens: Sequence[int]) -> None:
            raise MemoryError("no memory")

        engine = make_engine(FaultyBackend(fault), **TIGHT)
        self.submit(engine, FIVE)
        engine.run()
        for name in FIVE:
            (event,) = engine.poll(name)
            self.assertEqual((event.index, event.token, event.finish_reason, event.error),
                             (0, None, "error", "MemoryError: no memory"))
        self.check_empty(engine)
        self.assertEqual(engine.metrics().finished, {"stop": 0, "length": 0, "cancelled": 0, "error": 5})

    def test_rows_that_no_token_can_be_chosen_from_end_that_request_alone(self) -> None:
        """K076: NaN, or not even a row."""
        class Headless(FaultyBackend):
            def to_lists(self, x):
                return [[] if token in self.spoiled else row for token, row in zip(self.picked, x)]

        for kind, sampling in product((FaultyBackend, Headless), (SamplingParams(), SamplingParams(1.0))):
            engine = make_engine(kind(spoiled=[POISON]), **TIGHT)
            self.submit(engine, {**HEALTHY_FIVE, "bad": Ask((1, POISON), 5, sampling)})
            (event,) = engine.stream("bad")
            self.assertEqual((event.index, event.token, event.finish_reason), (0, None, "error"))
            if kind is FaultyBackend:
                self.assertRegex(event.error, "BackendError: the logits hold NaN")
            self.check_outcomes(engine, HEALTHY_FIVE)

    def test_an_interrupt_loses_nothing(self) -> None:
        """KeyboardInterrupt at any time before the tokens are chosen; whoever goes on gets the right ones."""
        asks = {**FIVE, "sampled": Ask((4, 4), 6, SamplingParams(1.0))}
        interrupts = 0
        for serving, moment, k in product(SERVINGS[:3], ("start", "middle"), range(0, 18, 3)):
            with self.subTest(serving=serving, moment=moment, k=k):
                engine = make_engine(failing_at(k, moment, KeyboardInterrupt()), **TIGHT, **serving)
                self.submit(engine, asks)
                while engine.active:
                    try:
                        engine.run()
                    except KeyboardInterrupt:
                        interrupts += 1
                        engine.kv.check()
                self.check_outcomes(engine, asks)
        self.assertEqual(interrupts, 3 * 2 * 6)

    def test_an_interrupt_while_tokens_are_chosen_or_pages_reserved_loses_nothing_either(self) -> None:
        class InterruptingRow(list):
            def index(self, *arguments):
                raise KeyboardInterrupt

            def __iter__(self):
                raise KeyboardInterrupt

        class Interrupting(FaultyBackend):
            def to_lists(self, x):
                return [InterruptingRow(row) if token == POISON else row for token, row in zip(self.picked, x)]

        sampled = {"A": Ask((1, 2), 9, SamplingParams(1.0)), "B": Ask((3,), 9, SamplingParams(1.0, seed=3))}
        engine = make_engine(Interrupting())
        self.submit(engine, {**sampled, "last": Ask((POISON,), 1)})  # it is chosen after A and B have drawn
        self.assertRaises(KeyboardInterrupt, engine.step)
        engine.cancel("last")
        engine.poll("last")
        self.check_outcomes(engine, sampled)
        for k in range(12):
            engine = make_engine(**TIGHT)
            self.submit(engine, FIVE)
            self.interrupt_once(engine, k)
            while engine.active:
                try:
                    engine.run()
                except KeyboardInterrupt:
                    engine.kv.check()
            self.check_outcomes(engine, FIVE)

    def interrupt_once(self, engine: InferenceEngine, call: int) -> None:
        """The call-th reservation of a page that is granted is followed by an interrupt."""
        reserve, numbers = engine.kv.reserve, count()

        def interrupted(*arguments) -> None:
            reserve(*arguments)
            if next(numbers) == call:
                raise KeyboardInterrupt

        engine.kv.reserve = interrupted

    def test_a_timeline_listener_that_fails_loses_no_token(self) -> None:
        """A full disk, say: it is told once, after the step, and is let go."""
        for kind, k in product(("step", "pages", "token", "finish"), range(4)):
            with self.subTest(kind=kind, k=k):
                engine = make_engine(**TIGHT)
                self.submit(engine, FIVE)
                numbers, failures = count(), 0

                def listener(event, kind=kind, k=k, numbers=numbers):
                    if event["event"] == kind and next(numbers) == k:
                        raise OSError("disk full")

                engine.timeline.listen(listener)
                while engine.active:
                    try:
                        engine.run()
                    except OSError:
                        failures += 1
                self.check_outcomes(engine, FIVE)
                self.assertEqual(failures, 1)

    def test_pages_released_from_outside(self) -> None:
        """B16: an engine's own handle, after any number of steps: that request ends with an error."""
        for settings, name, k in product((TIGHT, {**ROOMY, "budget_tokens": 3}), FIVE, range(1, 8)):
            with self.subTest(settings=settings, name=name, k=k):
                engine = make_engine(**settings)
                self.submit(engine, FIVE)
                for _ in range(k):
                    engine.step()
                if not engine.scheduler.is_running(name):
                    continue
                engine.kv.release(engine.scheduler.handle(name))
                self.check_outcomes(engine, FIVE, failed=name)

    def test_pages_held_outside_for_ever_end_a_request_with_an_error(self) -> None:
        engine = make_engine(page_size=2, num_pages=4)
        outside = engine.kv.allocate("outside", 6)
        small = Ask((4,), 2)
        self.submit(engine, {"big": Ask((1, 2, 3), 4), "small": small})
        events = list(engine.stream("big"))
        self.check_events(events, ("error",))
        self.assertRegex(events[-1].error, "OutOfPagesError")
        self.assertLessEqual(engine.steps, 2 + REFUSAL_LIMIT)
        engine.kv.release(outside)
        self.check_outcomes(engine, {"small": small})

    def test_a_table_forked_from_outside_is_only_read(self) -> None:
        """The engine's request goes on, and the fork keeps what it had."""
        for k in range(1, 8):
            with self.subTest(k=k):
                engine = make_engine(page_size=4, num_pages=32, budget_tokens=3)
                self.submit(engine, {"c": FIVE["c"]})
                for _ in range(k):
                    engine.step()
                if not engine.active:
                    continue
                fork = engine.kv.fork(engine.scheduler.handle("c"), "outside")
                stored = [engine.kv.read(fork, i) for i in range(engine.kv.length(fork))]
                engine.step()
                engine.kv.check()
                engine.kv.append(fork, [7.0] * engine.kv.width, [7.0] * engine.kv.width)
                engine.run()
                self.assertEqual([engine.kv.read(fork, i) for i in range(len(stored))], stored)
                engine.kv.release(fork)
                self.check_outcomes(engine, {"c": FIVE["c"]})


class Steps(Case):
    def test_budgets_of_single_steps(self) -> None:
        engine = make_engine(**TIGHT)
        self.submit(engine, FIVE)
        for wrong in (-1, True, 1.5, "4"):
            self.assertRaises(RequestError, engine.step, wrong)
        self.assertEqual(engine.step(0).scheduled_tokens, 0)
        for budget in (3, 0, 1, 8):
            self.assertLessEqual(engine.step(budget).scheduled_tokens, budget)
        self.check_outcomes(engine, FIVE)

    def test_settings_are_checked(self) -> None:
        for wrong in ({"page_size": 0}, {"num_pages": True}, {"budget_tokens": 0}, {"batching": "dynamic"},
                      {"policy": "lifo"}, {"preemption": "drop"}, {"host_pages": -1}, {"no_such_setting": 1}):
            with self.subTest(wrong=wrong), self.assertRaisesRegex(SchemaError, next(iter(wrong))):
                make_engine(**wrong)

    def test_memory_budget(self) -> None:
        """B17: as many pages as fit; too small for one is an error, too small for a request refuses it."""
        page_bytes = make_engine(page_size=4).kv.store.page_bytes
        with self.assertRaisesRegex(CapacityError, f"less than one page of 4 tokens .{page_bytes} bytes"):
            make_engine(page_size=4, kv_budget_bytes=page_bytes - 1)
        engine = make_engine(page_size=4, kv_budget_bytes=3 * page_bytes - 1)
        self.assertEqual(engine.kv.total_pages, 2)
        self.assertRaises(CapacityError, engine.submit, [1] * 8, 2)
        self.assertEqual(engine.generate([[1] * 8], 1), [oracle((1,) * 8, 1)])

    def test_close_cancels_what_is_live(self) -> None:
        with make_engine(**TIGHT) as engine:
            self.submit(engine, FIVE)
            reader = engine.stream("a")
            events = [next(reader)]
        events += reader
        self.check_events(events, ("cancelled",))
        engine.close()
        self.assertEqual((engine.kv.free_pages, engine.active), (engine.kv.total_pages, ()))
        for use in (engine.step, engine.start, lambda: engine.submit([1], 1), lambda: engine.stream("b")):
            self.assertRaisesRegex(EngineError, "closed", use)


class Threads(Case):
    """Every method may be called from any thread; the engine pulls, or runs steps in a thread of its own."""

    def in_threads(self, work: Callable[[int], None]) -> None:
        problems: list[BaseException] = []

        def guarded(number: int) -> None:
            try:
                work(number)
            except BaseException as problem:
                problems.append(problem)

        threads = [Thread(target=guarded, args=(number,), daemon=True) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            self.assertFalse(thread.is_alive(), "a reader waits for ever")
        if problems:
            raise problems[0]

    def test_eight_readers(self) -> None:
        """K118: each submits, streams and cancels its own, and all share one more stream."""
        for started in (False, True):
            with make_engine(page_size=2, num_pages=24, budget_tokens=9, max_running=6) as engine:
                if started:
                    engine.start()
                    engine.start()
                common = Ask((6, 6, 6), 20)
                self.submit(engine, {"common": common})
                reader_of_all = engine.stream("common")
                shared: list[TokenEvent] = []

                def work(number: int, engine=engine, shared=shared) -> None:
                    for i in range(3):
                        name, ask = f"{number}.{i}", Ask((number, i + 1), 5)
                        self.submit(engine, {name: ask})
                        doomed = engine.submit([number] * 4, 9)
                        reader = engine.stream(name)
                        try:
                            shared.append(next(engine.stream("common")))
                        except (UnknownRequestError, StopIteration):
                            pass  # another thread has read its last event
                        self.check_ask(list(reader), name, ask)
                        engine.cancel(doomed)
                        self.assertIn(engine.poll(doomed)[-1].finish_reason, ("cancelled", "length"))

                self.in_threads(work)
                shared += reader_of_all
                self.check_ask(sorted(shared, key=lambda event: event.index), "common", common)
                self.check_empty(engine)

    def test_nobody_waits_for_the_decoder(self) -> None:
        """Submit, cancel, poll, status and metrics return while a step is being computed."""
        computing, go_on = Event(), Event()

        def fault(moment: str, tokens: Sequence[int]) -> None:
            computing.set()
            self.assertTrue(go_on.wait(30))

        with make_engine(FaultyBackend(fault), **ROOMY) as engine:
            self.submit(engine, {"a": FIVE["a"]})
            engine.start()
            self.assertTrue(computing.wait(30))
            self.submit(engine, {"b": FIVE["b"], "c": FIVE["c"]})
            self.assertEqual((engine.active, engine.poll("a")), (("a", "b", "c"), []))
            engine.cancel("a")
            engine.cancel("b")
            self.assertEqual((engine.status("a").finish_reason, engine.metrics().finished["cancelled"]),
                             ("cancelled", 2))
            go_on.set()
            self.check_ask(list(engine.stream("c")), "c", FIVE["c"])
            self.assertEqual([event.token for name in "ab" for event in engine.poll(name)], [None, None])

    def test_a_thread_that_stops_tells_its_readers(self) -> None:
        def fault(moment: str, tokens: Sequence[int]) -> None:
            raise KeyboardInterrupt

        engine = make_engine(FaultyBackend(fault))
        self.submit(engine, {"a": FIVE["a"]})
        engine.start()
        with self.assertRaisesRegex(EngineError, "thread has stopped: KeyboardInterrupt"):
            list(engine.stream("a"))
        engine.close()
        self.assertEqual(engine.kv.free_pages, engine.kv.total_pages)

    def test_close_ends_the_thread_and_the_readers(self) -> None:
        engine = make_engine(budget_tokens=1, max_running=1)
        engine.start()
        self.submit(engine, {f"{number}": Ask((number,), 100) for number in range(8)})
        readers = [engine.stream(f"{number}") for number in range(8)]
        first = next(readers[0])
        engine.close()
        self.in_threads(lambda number: self.check_events(
            [*([first] if number == 0 else []), *readers[number]], ("cancelled", "length")))
        self.check_empty(engine)


if __name__ == "__main__":
    unittest.main()
