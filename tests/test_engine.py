"""The service: batch equals solo bit by bit, streams, cancels, ids, failures, metrics."""

from __future__ import annotations

import random
import unittest
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count, product
from math import exp, fsum, log, nan
from threading import Thread
from typing import NamedTuple

from starter.engine import InferenceEngine
from starter.errors import (
    BackendError,
    CapacityError,
    DuplicateRequestError,
    EngineError,
    RequestError,
    SchemaError,
    UnknownRequestError,
)
from starter.play import play, tokens_of
from starter.reference import reference_logits
from starter.scheduler import REFUSAL_LIMIT
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
from support import CONFIG, CONTEXT, HEALTHY, VOCABULARY, FaultyBackend, make_engine, oracle, outcome, prompt_of, solo


class Ask(NamedTuple):
    """A request to be: what ``submit`` is given."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_tokens: tuple[int, ...] = ()


FIVE = {"a": Ask((3, 1, 4), 6), "b": Ask((1,), 9), "c": Ask((2, 7, 1, 8, 2, 8, 1, 8), 5), "d": Ask((5, 5), 1),
        "e": Ask((9, 9, 9, 9), 7)}
TIGHT = {"page_size": 2, "num_pages": 9, "budget_tokens": 6, "max_running": 4}  # five in here need preemption
ROOMY = {"page_size": 4, "num_pages": 64, "budget_tokens": 8, "max_running": 8}
POISON = 19  # a token that no prompt above holds


class Case(unittest.TestCase):
    def submit(self, engine: InferenceEngine, asks: Mapping[str, Ask]) -> None:
        for name, ask in asks.items():
            engine.submit(ask.prompt, ask.max_tokens, request_id=name, sampling=ask.sampling,
                          stop_tokens=ask.stop_tokens)

    def check_events(self, events: Sequence[TokenEvent], reasons: Iterable[str]) -> None:
        """Indices 0, 1, 2, ... once each; one terminal event, the last."""
        self.assertIn(events[-1].finish_reason, reasons)
        self.assertTrue(all(event.finish_reason is None and event.token is not None for event in events[:-1]))
        self.assertEqual([event.index for event in events], list(range(len(events))))
        self.assertEqual(events[-1].error is not None, events[-1].finish_reason == "error")

    def check_outcomes(self, engine: InferenceEngine, asks: Mapping[str, Ask], failed: Iterable[str] = ()) -> None:
        """Run to the end: tokens equal solo bit by bit; those of the failed are a beginning of it; all is given back."""
        engine.run()
        for name, ask in asks.items():
            events, expected = engine.poll(name), solo(*ask, request_id=name)
            if name in failed:
                self.check_events(events, ("cancelled", "error"))
                self.assertEqual(outcome(events), expected[:len(outcome(events))], name)
            else:
                self.check_events(events, ("length", "stop"))
                self.assertEqual(outcome(events), expected, name)
        self.check_empty(engine)

    def check_empty(self, engine: InferenceEngine) -> None:
        engine.kv.check()
        self.assertEqual((engine.kv.free_pages, engine.active), (engine.kv.total_pages, ()))
        self.assertFalse(engine._streams)  # the request table is empty too: K001, K003

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
                tokens = solo(prompt, 8)
                self.assertEqual([token for token, _ in tokens], oracle(prompt, 8))
                logits = reference_logits(CONFIG, parameters, prompt)
                self.assertAlmostEqual(tokens[0][1], logits[tokens[0][0]] - log(fsum(map(exp, logits))), places=10)

    def test_random_arrivals_budgets_pages_samplings_and_stops(self) -> None:
        """K062, K071, K073: alone, batched, chunked, preempted and resumed: the same bits."""
        preempted = chunked = stopped = 0
        for seed in range(50):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                page_size = dice.randint(1, 17)
                engine = make_engine(page_size=page_size, num_pages=-(-25 // page_size) + dice.randint(0, 3),
                                     budget_tokens=dice.randint(1, 12), max_running=dice.randint(1, 5))
                samplings = (SamplingParams(), SamplingParams(1.0), SamplingParams(2.0, seed=7),
                             SamplingParams(1.5, top_k=5), SamplingParams(1.5, top_p=0.6, min_p=0.01))
                asks = {f"r{i}": Ask(prompt_of(dice, dice.randint(1, 14)), dice.randint(1, 12), dice.choice(samplings),
                                     prompt_of(dice, dice.choice((0, 0, 2)))) for i in range(7)}
                for name, ask in asks.items():
                    self.submit(engine, {name: ask})
                    for _ in range(dice.randint(0, 3)):
                        decision = engine.step()
                        preempted += len(decision.preempted)
                        chunked += any(chunk.start and chunk.phase == "prefill" for chunk in decision.chunks)
                stopped += sum(len(solo(*ask, request_id=name)) < ask.max_tokens for name, ask in asks.items())
                self.check_outcomes(engine, asks)
                preempted += engine.metrics().preemptions
        self.assertGreater(min(preempted, chunked, stopped), 20)  # the test tests what it says

    def test_chunks_and_pages_of_every_size(self) -> None:
        for budget, page_size in product((1, 2, 3, 5, 8, 13), (1, 2, 3, 4, 7, 8, 16, 17)):
            with self.subTest(budget=budget, page_size=page_size):
                engine = make_engine(budget_tokens=budget, page_size=page_size)
                self.submit(engine, FIVE)
                self.check_outcomes(engine, FIVE)

    def test_preemption_at_every_step(self) -> None:
        """After k steps all free pages are taken from outside for one step: the youngest that runs must go."""
        preemptions = 0
        for k in range(1, 16):
            with self.subTest(k=k):
                engine = make_engine(page_size=1, num_pages=40, budget_tokens=7)
                self.submit(engine, FIVE)
                for _ in range(k):
                    engine.step()
                outside = engine.kv.allocate("outside", engine.kv.free_pages)
                preemptions += len(engine.step().preempted)
                engine.kv.release(outside)
                self.check_outcomes(engine, FIVE)
        self.assertGreater(preemptions, 15)

    def test_no_cache_and_other_batchings_give_the_same_tokens(self) -> None:
        for settings in ({"use_cache": False}, {"batching": "static"}, {"batching": "none"},
                         {"batching": "static", "use_cache": False, "budget_tokens": 3}):
            with self.subTest(settings=settings):
                engine = make_engine(**{**TIGHT, **settings})
                self.submit(engine, FIVE)
                self.check_outcomes(engine, FIVE)

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
        """B3, K047, K056: exactly so many tokens; 0 gives the terminal event alone."""
        for max_tokens in (0, 1, 2, 4, 5):
            engine = make_engine(page_size=4)
            name = engine.submit([1, 2, 3], max_tokens)
            self.assertEqual(bool(engine.active), max_tokens > 0)
            events = list(engine.stream(name))
            self.check_events(events, ("length",))
            self.assertEqual(outcome(events), solo((1, 2, 3), max_tokens))
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

    def test_text_is_what_the_tokens_spell(self) -> None:
        engine = make_engine()
        events = list(engine.stream(engine.submit([3, 1, 4], 6)))
        self.assertEqual("".join(event.text for event in events), "".join("abcdefghijklmnopqrst"[t] for t in oracle((3, 1, 4), 6)))

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
                    self.check_events(events, ("length",))
                    self.assertEqual(outcome(events), solo(*FIVE[name]))
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

    def test_eight_threads(self) -> None:
        """K118: each submits, streams and cancels its own, and all read from one more."""
        engine = make_engine(page_size=2, num_pages=24, budget_tokens=9, max_running=6)
        engine.submit([6, 6, 6], 20, request_id="shared")
        results: dict[str, list[TokenEvent]] = {}
        shared: list[TokenEvent] = []

        def work(number: int) -> None:
            for round_ in range(4):
                name = f"{number}.{round_}"
                engine.submit([number, round_ + 1], 5, request_id=name)
                doomed = engine.submit([number] * 4, 9)
                if "shared" in engine.active:
                    try:
                        shared.append(next(engine.stream("shared")))
                    except (UnknownRequestError, StopIteration):
                        pass  # another thread read its last event in between
                results[name] = list(engine.stream(name))
                engine.cancel(doomed)
                engine.poll(doomed)

        threads = [Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        engine.run()
        if "shared" in engine._streams:
            shared += engine.poll("shared")
        self.assertEqual(len(results), 32)
        for name, events in results.items():
            number, round_ = map(int, name.split("."))
            self.check_events(events, ("length",))
            self.assertEqual(outcome(events), solo((number, round_ + 1), 5))
        shared.sort(key=lambda event: event.index)
        self.check_events(shared, ("length",))
        self.assertEqual(outcome(shared), solo((6, 6, 6), 20))
        self.check_empty(engine)

    def test_a_thousand_short_requests_leave_nothing_behind(self) -> None:
        """K003"""
        engine = make_engine(page_size=2, num_pages=4)
        for number in range(1000):
            tokens = outcome(engine.stream(engine.submit([number % VOCABULARY], 1)))
            self.assertEqual(tokens, solo((number % VOCABULARY,), 1))
        self.check_empty(engine)
        self.assertEqual((engine.kv.stats().peak_pages, engine.scheduler.live), (1, ()))


class Cancel(Case):
    def test_any_request_after_any_number_of_steps(self) -> None:
        """V3, K001: no token after it, pages free at once, the others unchanged."""
        for settings, name in product((TIGHT, ROOMY), FIVE):
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
        """K046: the terminal event goes on from what was read."""
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
            self.assertEqual(outcome(events), solo(*FIVE["a"])[:last + 1])
            self.check_outcomes(engine, {name: ask for name, ask in FIVE.items() if name != "a"})

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
        """K073: A with a seed; B beside it without one, with one, cancelled, absent."""
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
        engine.submit([1, 2, 3], 4, request_id="live")
        engine.step()
        engine.submit([1], 0, request_id="unread")
        before = self.picture(engine)
        too_long = [0] * CONTEXT
        for error, prompt, max_tokens, further in (
                (RequestError, [], 4, {}), (RequestError, "text", 4, {}), (RequestError, 5, 4, {}),
                (RequestError, [VOCABULARY], 4, {}), (RequestError, [-1], 4, {}), (RequestError, [2**40], 4, {}),
                (RequestError, [True], 4, {}), (RequestError, [1.0], 4, {}), (RequestError, [None], 4, {}),
                (RequestError, [1], -1, {}), (RequestError, [1], True, {}), (RequestError, [1], 2.0, {}),
                (RequestError, [1], "5", {}), (RequestError, [1], None, {}), (RequestError, [1], 1e18, {}),
                (CapacityError, [1], 2**31 - 1, {}), (CapacityError, [1], 10**18, {}), (CapacityError, too_long, 1, {}),
                (CapacityError, [1] * 32, 2, {}), (CapacityError, [1] * 30, 4, {}),  # 33 slots, the pool has 32
                (DuplicateRequestError, [1], 1, {"request_id": "live"}),
                (DuplicateRequestError, [1], 1, {"request_id": "unread"}),
                (RequestError, [1], 1, {"request_id": ""}), (RequestError, [1], 1, {"request_id": 7}),
                (RequestError, [1], 1, {"stop_tokens": [VOCABULARY]}), (RequestError, [1], 1, {"stop_tokens": [-1]}),
                (RequestError, [1], 1, {"sampling": "greedy"}), (RequestError, [1], 1, {"priority": 1.5})):
            with self.subTest(prompt=prompt, max_tokens=max_tokens, further=further):
                with self.assertRaises(error):
                    engine.submit(prompt, max_tokens, **further)
                self.assertEqual(self.picture(engine), before)
        self.assertEqual(engine.submit([1] * 32, 1), "request-2")  # the largest that fits; the refused took no number
        self.assertEqual(len(list(engine.stream("request-2"))), 1)
        self.assertEqual(outcome(engine.stream("live")), solo((1, 2, 3), 4))

    def test_an_id_lives_until_its_terminal_event_was_read_or_it_was_cancelled(self) -> None:
        """K043"""
        engine = make_engine()
        engine.submit([1, 2], 3, request_id="x")
        for _ in range(3):  # live, then finished and unread
            self.assertRaises(DuplicateRequestError, engine.submit, [3], 2, request_id="x")
            engine.run()
        list(engine.stream("x"))
        engine.submit([3], 2, request_id="x")
        self.assertEqual(outcome(engine.stream("x")), solo((3,), 2))

    def test_the_old_request_never_touches_the_new_one(self) -> None:
        """K044: cancel and submit again at once, after any number of steps; the old reader reads the old stream."""
        for k in range(6):
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
            self.check_events(events, ("length",))
            self.assertEqual(outcome(events), solo((7, 7), 4))
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

        for error, prompt, backend in ((RequestError, [VOCABULARY], None), (BackendError, [POISON], failing_on(POISON)),
                                       (KeyboardInterrupt, [1], FaultyBackend(interrupt))):
            with self.subTest(error=error):
                engine = make_engine(backend, **TIGHT)
                engine.submit([3, 1, 4], 6, request_id="other")
                with self.assertRaises(error):
                    engine.generate([[1, 2], prompt, [3]], 4)
                self.assertEqual(engine.active, ("other",))
                if backend:
                    backend.fault = lambda moment, tokens: None
                self.check_outcomes(engine, {"other": FIVE["a"]})


def failing_on(token: int) -> FaultyBackend:
    """A backend that raises when a token is in the batch."""
    def fault(moment: str, tokens: Sequence[int]) -> None:
        if moment == "middle" and token in tokens:
            raise OSError(f"no luck with token {token}")

    return FaultyBackend(fault)


def failing_at(calls: Iterable[int], moment: str, error: BaseException) -> FaultyBackend:
    """A backend that raises in its k-th forward pass, for each k in ``calls``."""
    numbers = count()

    def fault(now: str, tokens: Sequence[int]) -> None:
        if now == moment and next(numbers) in calls:
            raise error

    return FaultyBackend(fault)


class Failures(Case):
    """A request that fails ends with finish_reason "error" and the reason; its neighbours' tokens stay the same."""

    def test_a_passing_fault_of_the_backend_is_not_noticed(self) -> None:
        """The k-th forward pass fails before it began, or with keys and values half written."""
        for moment, k in product(("start", "middle"), range(0, 40, 3)):
            with self.subTest(moment=moment, k=k):
                engine = make_engine(failing_at([k], moment, OSError("passing")), **TIGHT)
                self.submit(engine, FIVE)
                if k == 0:  # the first step's batch fails, then each is computed alone
                    engine.step()
                    self.assertEqual([e.finish_reason for name in FIVE for e in engine.poll(name) if e.error], [])
                    engine = make_engine(failing_at([k], moment, OSError("passing")), **TIGHT)
                    self.submit(engine, FIVE)
                self.check_outcomes(engine, FIVE)

    def test_only_the_request_at_fault_ends(self) -> None:
        asks = {**FIVE, "bad": Ask((1, 2, POISON, 4), 5), "late": Ask((8, 8), 7)}
        for settings in (TIGHT, {**TIGHT, "budget_tokens": 2}, {**ROOMY, "use_cache": False}):
            with self.subTest(settings=settings):
                healthy = {name: ask for name, ask in asks.items() if POISON not in oracle(ask.prompt, ask.max_tokens)}
                engine = make_engine(failing_on(POISON), **settings)
                self.submit(engine, healthy)
                self.submit(engine, {"bad": asks["bad"]})
                events = list(engine.stream("bad"))
                self.check_events(events, ("error",))
                self.assertEqual(events[-1].error, f"OSError: no luck with token {POISON}")
                self.check_outcomes(engine, healthy)

    def test_a_backend_that_always_fails_ends_everybody_once(self) -> None:
        engine = make_engine(failing_at(range(10**6), "start", MemoryError("no memory")), **TIGHT)
        self.submit(engine, FIVE)
        engine.run()
        for name in FIVE:
            (event,) = engine.poll(name)
            self.assertEqual((event.index, event.token, event.finish_reason, event.error),
                             (0, None, "error", "MemoryError: no memory"))
        self.check_empty(engine)
        self.assertEqual(engine.metrics().finished, {"stop": 0, "length": 0, "cancelled": 0, "error": 5})

    def test_logits_without_a_distribution_end_that_request_alone(self) -> None:
        """K076: rows that follow the token POISON are NaN."""
        for sampling in (SamplingParams(), SamplingParams(1.0)):
            engine = make_engine(FaultyBackend(spoiled=[POISON]), **TIGHT)
            healthy = {name: ask for name, ask in FIVE.items() if POISON not in oracle(ask.prompt, ask.max_tokens)}
            self.assertGreater(len(healthy), 2)
            self.submit(engine, healthy)
            self.submit(engine, {"bad": Ask((1, POISON), 5, sampling)})
            (event,) = engine.stream("bad")
            self.assertRegex(event.error, "BackendError: the logits hold NaN")
            self.check_outcomes(engine, healthy)

    def test_logits_that_are_no_row_at_all(self) -> None:
        class Headless(FaultyBackend):
            def to_lists(self, x):
                return [[] if token in self.spoiled else row for token, row in zip(self.picked, x)]

        engine = make_engine(Headless(spoiled=[POISON]))
        self.submit(engine, {"bad": Ask((1, POISON), 5), "d": FIVE["d"]})
        self.check_events(list(engine.stream("bad")), ("error",))
        self.check_outcomes(engine, {"d": FIVE["d"]})

    def test_an_interrupt_loses_nothing(self) -> None:
        """KeyboardInterrupt in the k-th forward pass; whoever goes on gets the right tokens."""
        for moment, k in product(("start", "middle"), range(0, 22, 2)):
            with self.subTest(moment=moment, k=k):
                engine = make_engine(failing_at([k], moment, KeyboardInterrupt()), **TIGHT)
                self.submit(engine, FIVE)
                interrupts = 0
                while engine.active:
                    try:
                        engine.run()
                    except KeyboardInterrupt:
                        interrupts += 1
                        engine.kv.check()
                self.check_outcomes(engine, FIVE)
                self.assertEqual(interrupts, 1)

    def test_an_interrupt_while_sampling_draws_the_same_numbers_again(self) -> None:
        class Interrupted(FaultyBackend):
            def to_lists(self, x):
                return [InterruptingRow(row) if token == POISON else row for token, row in zip(self.picked, x)]

        class InterruptingRow(list):
            def index(self, *arguments):
                raise KeyboardInterrupt

        backend = Interrupted()
        engine = make_engine(backend)
        sampled = {"A": Ask((1, 2), 9, SamplingParams(1.0)), "B": Ask((3,), 9, SamplingParams(1.0, seed=3))}
        self.submit(engine, sampled)
        engine.submit([POISON], 1, request_id="last")  # greedy: it is chosen after A and B were drawn
        self.assertRaises(KeyboardInterrupt, engine.step)
        engine.cancel("last")
        engine.poll("last")
        self.check_outcomes(engine, sampled)

    def test_a_timeline_listener_that_fails_loses_no_token(self) -> None:
        """A full disk, say: whatever event it fails on, whoever goes on gets the right tokens."""
        for kind, k in product(("step", "pages", "token", "finish"), range(5)):
            with self.subTest(kind=kind, k=k):
                engine = make_engine(**TIGHT)
                self.submit(engine, FIVE)
                numbers = count()

                def listener(event, kind=kind, k=k, numbers=numbers):
                    if event["event"] == kind and next(numbers) == k:
                        raise OSError("disk full")

                engine.timeline.listen(listener)
                failures = 0
                while engine.active:
                    try:
                        engine.run()
                    except OSError:
                        failures += 1
                self.check_outcomes(engine, FIVE)
                self.assertEqual(failures, 1)

    def test_pages_released_from_outside(self) -> None:
        """B16: an engine's own handle, after any number of steps: that request ends with an error."""
        for settings, name, k in product((TIGHT, {**ROOMY, "budget_tokens": 3}), FIVE, range(1, 9)):
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
        self.submit(engine, {"big": Ask((1, 2, 3), 4), "small": Ask((4,), 2)})
        events = list(engine.stream("big"))
        self.check_events(events, ("error",))
        self.assertRegex(events[-1].error, "OutOfPagesError")
        self.assertLessEqual(engine.steps, 2 + REFUSAL_LIMIT)
        engine.kv.release(outside)
        self.check_outcomes(engine, {"small": Ask((4,), 2)})

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
                      {"policy": "lifo"}, {"no_such_setting": 1}):
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
        for use in (engine.step, lambda: engine.submit([1], 1), lambda: engine.stream("b")):
            self.assertRaisesRegex(EngineError, "closed", use)


class Metrics(Case):
    def test_every_request_is_counted_once(self) -> None:
        """K042, K095, K098: under preemption, cancels and errors."""
        healthy = {name: ask for name, ask in FIVE.items() if POISON not in oracle(ask.prompt, ask.max_tokens)}
        engine = make_engine(failing_on(POISON), **TIGHT)
        self.submit(engine, healthy)
        self.submit(engine, {"bad": Ask((POISON,), 5), "doomed": Ask((1,), 9), "none": Ask((1,), 0)})
        for _ in range(3):
            engine.step()
        engine.cancel("doomed")
        engine.run()
        self.assertGreater(engine.metrics().preemptions, 0)
        metrics, tokens = engine.metrics(), sum(event["event"] == "token" for event in engine.timeline)
        self.assertEqual(metrics.finished, {"stop": 0, "length": len(healthy) + 1, "cancelled": 1, "error": 1})
        self.assertEqual((metrics.submitted, metrics.output_tokens), (len(healthy) + 3, tokens))
        started = {event["request"] for event in engine.timeline if event["event"] == "token"}
        self.assertEqual(metrics.ttft.count, len(started))

    def test_times_are_in_order(self) -> None:
        """K096, K097: outputs of 0, 1 and 2 tokens; TPOT only from two tokens on."""
        engine = make_engine(max_running=1)
        self.submit(engine, {f"{n}": Ask((1,), n) for n in range(3)})
        engine.run()
        metrics = engine.metrics()
        self.assertEqual((metrics.ttft.count, metrics.tpot.count, metrics.tpot.mean), (2, 1, 1.0))
        self.assertEqual(metrics.ttft.max, 2.0)  # one step of waiting for "1", one of its own
        times = [event.time for n in range(3) for event in engine.poll(f"{n}")]
        self.assertEqual(times, sorted(times))


class Play(Case):
    def scenario(self, requests: Sequence[Request], events: Sequence[ScenarioEvent] = ()) -> Scenario:
        return Scenario(1, "test", CONFIG, SeededWeights(71), CharacterVocabulary("abcdefghijklmnopqrst"), tuple(requests),
                        engine=EngineSettings(**ROOMY), events=tuple(events))

    def test_arrivals_and_cancels_happen_at_their_steps(self) -> None:
        scenario = self.scenario([Request("late", (5, 5), 4, arrival=6.0), Request("a", (3, 1, 4), 6),
                                  Request("b", (1,), 9, arrival=1.5)], [ScenarioEvent(5, "b"), ScenarioEvent(9, "a")])
        engine = InferenceEngine.from_scenario(scenario, clock=VirtualClock())
        engine.step()  # arrivals count from where the engine is
        played = list(play(engine, scenario))
        started = {}
        for number, step in enumerate(played):
            for chunk in step.decision.chunks:
                started.setdefault(chunk.request_id, number)
        self.assertEqual(started, {"a": 0, "b": 2, "late": 6})
        tokens = tokens_of([event for step in played for event in step.events])
        self.assertEqual(tokens, {"a": oracle((3, 1, 4), 6), "b": oracle((1,), 9)[:3], "late": oracle((5, 5), 4)})
        self.check_empty(engine)

    def test_a_refused_request_is_reported_and_the_run_goes_on(self) -> None:
        scenario = self.scenario([Request("big", (1,) * 40, 50), Request("d", (5, 5), 1, arrival=2.0)])
        engine = InferenceEngine.from_scenario(scenario, num_pages=4)
        played = list(play(engine, scenario))
        self.assertRegex(played[0].refused["big"], "need 23 pages of 4; the pool has 4")
        self.assertEqual(tokens_of(played[-1].events), {"d": oracle((5, 5), 1)})

    def test_the_same_scenario_and_seed_give_the_same_timeline(self) -> None:
        sampled = [Request(name, ask.prompt, ask.max_tokens, i, sampling=SamplingParams(1.0))
                   for i, (name, ask) in enumerate(FIVE.items())]
        timelines = []
        for seed in (1, 1, 2):
            engine = InferenceEngine.from_scenario(self.scenario(sampled), clock=VirtualClock(), **TIGHT, seed=seed)
            list(play(engine, self.scenario(sampled)))
            timelines.append(engine.timeline.events[1:])
        self.assertEqual(timelines[0], timelines[1])
        self.assertNotEqual(timelines[0], timelines[2])


if __name__ == "__main__":
    unittest.main()
