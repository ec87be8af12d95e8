"""The service: batch equals solo bit by bit; events, submit and ids, generate, steps."""

from __future__ import annotations

import random
import unittest
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import exp, fsum, log, nan

from starter.backend import ReferenceBackend
from starter.base.tokenizer import CharacterTokenizer, TextStream
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
from starter.model import Loaded, Model
from starter.reference import reference_logits
from starter.sampling import Draws, choose_token
from starter.schema import CharacterVocabulary, SamplingParams, TokenEvent
from starter.streams import RequestStatus
from tests.support import (
    CONFIG,
    CONTEXT,
    FIVE,
    HEALTHY,
    POISON,
    SERVINGS,
    TIGHT,
    VOCABULARY,
    WEIGHTS,
    Ask,
    EngineCase,
    FaultyBackend,
    failing_on,
    make_engine,
    oracle,
    outcome,
    prompt_of,
    solo,
)


class BatchEqualsSolo(EngineCase):
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

    def test_the_next_token_is_drawn_with_the_next_random_number(self) -> None:
        parameters, params = HEALTHY.model.parameters(), SamplingParams(1.5, seed=5)
        tokens, draws = [1, 2, 3], Draws(params, "x", 0, 0)
        while len(tokens) < 3 + 12:
            tokens.append(choose_token(reference_logits(CONFIG, parameters, tokens), params, draws).token)
            draws.accept()
        self.assertEqual([token for token, _ in solo(Ask((1, 2, 3), 12, params))[0]], tokens[3:])

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
                                     **SERVINGS[seed % len(SERVINGS)])
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
        self.assertGreater(min(preempted, chunked, stopped, found, swapped), 2)  # the test tests what it says

    def test_chunks_and_pages_of_every_size(self) -> None:
        for budget, page_size in product((1, 2, 3, 5, 13), (1, 2, 3, 4, 17)):
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

    def test_without_a_cache_positions_are_computed_when_a_token_is_due(self) -> None:
        """All of them each time, and none for a part of a prompt."""
        asks = {"a": Ask((3, 1, 4, 1, 5), 3), "b": Ask((2, 7), 4)}
        lengths = [len(ask.prompt) + i for ask in asks.values() for i in range(ask.max_tokens)]
        for budget in (2, 3, 64):
            with self.subTest(budget=budget):
                engine = make_engine(use_cache=False, budget_tokens=budget, max_running=4)
                self.submit(engine, asks)
                engine.run()
                self.assertEqual(engine.metrics().computed_tokens, sum(lengths))
                chunks = [chunk for event in engine.timeline if event["event"] == "step" for chunk in event["chunks"]]
                self.assertEqual(sum(count for _, _, count, _ in chunks),
                                 sum(len(ask.prompt) + ask.max_tokens - 1 for ask in asks.values()))
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


class Events(EngineCase):
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

    def test_end_of_sequence(self) -> None:
        """Also right after the prompt; ignored where that is asked for, and without a chance before min_tokens."""
        tokens = oracle((3, 1, 4), 8)
        for end in sorted(set(tokens)):
            model = Model(replace(CONFIG, eos_tokens=(end,)), WEIGHTS, ReferenceBackend())
            loaded = Loaded(model, HEALTHY.tokenizer, {})
            for sampling, expected in ((SamplingParams(), tokens[:tokens.index(end) + 1]),
                                       (SamplingParams(ignore_eos=True), tokens)):
                engine = InferenceEngine(loaded)
                events = list(engine.stream(engine.submit([3, 1, 4], 8, sampling=sampling)))
                self.check_events(events, ("stop", "length"))
                self.assertEqual([event.token for event in events], expected)
            engine = InferenceEngine(loaded)
            events = list(engine.stream(engine.submit([3, 1, 4], 8, sampling=SamplingParams(min_tokens=8))))
            self.assertEqual((len(events), {event.token for event in events} & {end}), (8, set()))

    def test_the_text_goes_on_from_the_prompts(self) -> None:
        class Pairs(CharacterTokenizer):
            """Spells a token otherwise at the beginning of a text, which is after 4."""

            def stream(self) -> TextStream:
                return TextStream([f" {i}" for i in range(40)], [str(i) for i in range(40)], (4,))

        engine = InferenceEngine(Loaded(HEALTHY.model, Pairs(CharacterVocabulary("a")), {}))
        text = "".join(event.text for event in engine.stream(engine.submit([3, 1, 4], 2)))
        first, second = oracle((3, 1, 4), 2)
        self.assertNotEqual(first, 4)
        self.assertEqual(text, f"{first} {second}")

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
        engine.run()
        while len(events) < 6:
            events.append(next(engine.stream("a")))
        self.check_events(events, ("length",))
        for use in (engine.stream, engine.poll):
            self.assertRaises(UnknownRequestError, use, "a")
        engine.cancel("a")  # a disconnected client's cancel may come after the last event: nothing happens
        self.assertEqual(engine.status("a"), RequestStatus("a", "finished", len(FIVE["a"].prompt), 6, "length"))
        for use in (engine.stream, engine.poll, engine.cancel, engine.status):
            for name in ("never", "", 7, None):
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


class Submit(EngineCase):
    def test_errors_leave_everything_as_it_was(self) -> None:
        """B1, B4 to B6, K049, K050, K052"""
        engine = make_engine(page_size=4, num_pages=8)
        engine.submit([1, 2, 3], 4, request_id="live", sampling=SamplingParams(n=2))
        engine.step()
        engine.submit([1], 0, request_id="unread")
        engine.submit([1, 2], 3, request_id="y#1")
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
                (DuplicateRequestError, [1], 1, {"request_id": "y", "sampling": SamplingParams(n=2)}),
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
        self.assertEqual(engine.submit([1] * 32, 1), "request-3")  # the largest that fits; the refused took no number
        self.assertEqual(len(list(engine.stream("request-3"))), 1)
        self.check_ask(list(engine.stream("y#1")), "y#1", Ask((1, 2), 3))
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


class Generate(EngineCase):
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


class Steps(EngineCase):
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

if __name__ == "__main__":
    unittest.main()
