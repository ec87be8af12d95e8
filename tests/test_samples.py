"""Several samples of one prompt: each its own numbers and its own end, one prompt computed, all gone with a cancel."""

from __future__ import annotations

import random
import unittest
from collections.abc import Sequence
from itertools import accumulate, product
from math import exp

from starter.errors import DuplicateRequestError, RequestError, UnknownRequestError
from starter.metrics import Metrics
from starter.reference import reference_logits
from starter.sampling import Draws
from starter.schema import SamplingParams, TokenEvent
from tests.support import (
    CONFIG,
    FIVE,
    HEALTHY,
    POISON,
    SERVINGS,
    TIGHT,
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

PROMPT = (3, 1, 4, 1, 5)


def sampled(n: int, max_tokens: int = 6, **more: object) -> Ask:
    return Ask(PROMPT, max_tokens, SamplingParams(**{"temperature": 1.0, "seed": 7, **more}, n=n))


def tokens(got: Sequence[tuple[int, float]]) -> list[int]:
    return [token for token, _ in got]


def unpoisoned(n: int, max_tokens: int) -> Ask:
    """Samples none of which ever holds the token POISON."""
    asks = (sampled(n, max_tokens, seed=seed) for seed in range(99))
    return next(ask for ask in asks if not any(POISON in tokens(one) for one in solo(ask)))


class Numbers(EngineCase):
    def test_the_same_seed_gives_the_same_samples_and_not_all_alike(self) -> None:
        """K075: and the first is the one that a request with one sample gets, with or without a seed of its own."""
        for n, seed in product(range(1, 6), (7, None)):
            with self.subTest(n=n, seed=seed):
                runs = []
                for _ in range(2):
                    engine = make_engine(page_size=2)
                    sampled(n, seed=seed).submit(engine, "r")
                    events = list(engine.stream("r"))
                    runs.append([outcome(events, number) for number in range(n)])
                self.assertEqual(runs[0], runs[1])
                self.assertEqual(runs[0][0], solo(sampled(1, seed=seed), "r")[0])
                self.assertEqual(len({*map(str, runs[0])}) > 1, n > 1)

    def test_each_is_drawn_from_its_own_numbers(self) -> None:
        """Against plain sampling from the reference's logits: cumulative weights, one number for each token."""
        params = SamplingParams(temperature=1.5, seed=3, n=4)
        engine = make_engine(page_size=2)
        Ask(PROMPT, 5, params).submit(engine, "r")
        events = list(engine.stream("r"))
        for number in range(4):
            draws, known = Draws(params, "r", number, 0), list(PROMPT)
            for _ in range(5):
                logits = reference_logits(CONFIG, HEALTHY.model.parameters(), known)
                reached = list(accumulate(exp((logit - max(logits)) / 1.5) for logit in logits))
                known.append(next(i for i, total in enumerate(reached) if draws.random() * reached[-1] < total))
                draws.accept()
            self.assertEqual(tokens(outcome(events, number)), known[len(PROMPT):])

    def test_greedy_ones_are_all_equal(self) -> None:
        engine = make_engine(page_size=2)
        sampled(3, temperature=0.0).submit(engine, "r")
        events = list(engine.stream("r"))
        self.assertEqual([tokens(outcome(events, number)) for number in range(3)], [oracle(PROMPT, 6)] * 3)

    def test_text_status_and_generate(self) -> None:
        engine = make_engine()
        sampled(3).submit(engine, "r")
        engine.run()
        self.assertEqual(engine.status("r").generated_tokens, 18)
        events = engine.poll("r")
        for number in range(3):
            mine = [event for event in events if event.sample == number]
            self.assertEqual("".join(event.text for event in mine), engine.tokenizer.decode(
                [event.token for event in mine]))
        self.assertEqual(engine.generate([PROMPT], 6, sampled(1).sampling), [tokens(solo(sampled(1))[0])])
        with self.assertRaisesRegex(RequestError, "n must be 1; for several samples"):
            engine.generate([PROMPT], 6, sampled(2).sampling)  # it once returned the first and dropped the second


class Ends(EngineCase):
    def test_at_different_times_each_delivered_in_full(self) -> None:
        """K075: by stop token, stop string and length; the first to end ends nobody else."""
        lengths = set()
        for stop_tokens, stop in (((5, 6, 7), ()), ((), ("a", "f", "n")), ((2, 3, 4), ("s",))):
            ask = Ask(PROMPT, 12, SamplingParams(2.0, seed=1, n=5, stop=stop), stop_tokens)
            plain = solo(Ask(PROMPT, 12, SamplingParams(2.0, seed=1, n=5)))
            engine = make_engine(page_size=2)
            ask.submit(engine, "r")
            events = list(engine.stream("r"))
            for number, whole in enumerate(plain):
                text = ["abcdefghijklmnopqrst"[token] for token, _ in whole]
                end = next((i + 1 for i, (token, _) in enumerate(whole) if token in stop_tokens or text[i] in stop), 12)
                self.assertEqual(outcome(events, number), whole[:end])
                self.check_events(events, ("stop", "length"), number)
                lengths.add(end)
            self.check_empty(engine)
        self.assertGreater(len(lengths), 4)

    def test_max_tokens_0_and_1(self) -> None:
        for n, max_tokens in product((2, 5), (0, 1)):
            engine = make_engine(page_size=2)
            sampled(n, max_tokens).submit(engine, "r")
            self.assertEqual(bool(engine.active), max_tokens > 0)
            events = list(engine.stream("r"))
            self.assertEqual(len(events), n)
            for number in range(n):
                self.check_events(events, ("length",), number)
                self.assertEqual(outcome(events, number), solo(sampled(n, 6))[number][:max_tokens])
            self.check_empty(engine)
            metrics = engine.metrics()
            self.assertEqual((metrics.submitted, metrics.finished["length"], metrics.output_tokens),
                             (1, 1, n * max_tokens))

    def test_one_that_cannot_go_on_ends_the_request_once_for_each(self) -> None:
        """The token POISON makes NaN of the next logits, or stops the backend: all samples end, with what they have."""
        for backend, error in ((FaultyBackend(spoiled=[POISON]), "NaN"), (failing_on(POISON), "no luck")):
            hit = 0
            for seed in range(12):
                ask = Ask(PROMPT, 9, SamplingParams(2.0, seed=seed, n=3))
                alone = solo(ask)
                engine = make_engine(backend, page_size=2)
                self.submit(engine, {"r": ask, "a": Ask((1, 2), 3)})
                engine.run()
                events = engine.poll("r")
                failed = any(POISON in tokens(one)[:-1] for one in alone)
                for number, expected in enumerate(alone):
                    self.check_events(events, ("error",) if failed else ("length",), number)
                    got = outcome(events, number)
                    self.assertEqual(got, expected[:len(got)])
                self.assertEqual(sum(error in (event.error or "") for event in events), 3 if failed else 0)
                self.assertEqual(outcome(engine.poll("a")), solo(Ask((1, 2), 3))[0])
                self.check_empty(engine)
                hit += failed
            self.assertIn(hit, range(3, 12))


class Cancel(EngineCase):
    def test_ends_all_after_any_number_of_steps(self) -> None:
        """K001: nobody emits again, pages and host pages are free, the request tables are empty."""
        for serving in ({"num_pages": 40}, {"num_pages": 9}, {"num_pages": 9, "preemption": "swap"}):
            for k in range(12):
                with self.subTest(serving=serving, k=k):
                    engine = make_engine(page_size=2, budget_tokens=3, **serving)
                    self.submit(engine, {"r": sampled(4, 9), "other": Ask((1, 2), 9)})
                    for _ in range(k):
                        engine.step()
                    before = engine.poll("r")
                    ended = {event.sample for event in before if event.finish_reason}
                    engine.cancel("r")
                    engine.kv.check()
                    self.assertEqual(engine.active, ("other",) if "other" in engine.active else ())
                    after = engine.poll("r")
                    self.assertEqual({(event.sample, event.token, event.finish_reason) for event in after},
                                     {(number, None, "cancelled") for number in range(4) if number not in ended})
                    for number in range(4):
                        self.check_events(before + after, ("cancelled", "length"), number)
                    self.assertRaises(UnknownRequestError, engine.poll, "r")
                    self.check_outcomes(engine, {"other": Ask((1, 2), 9)})

    def test_the_id_is_free_at_once_whoever_had_ended_before(self) -> None:
        """K044: of three samples, some end by themselves before the cancel; the new request is untouched by the old."""
        ended_before = set()
        for seed, k in product(range(4), range(1, 9)):
            ask = Ask(PROMPT, 9, SamplingParams(2.0, seed=seed, n=3), stop_tokens=(0, 1, 2, 3, 4, 5))
            engine = make_engine(page_size=2)
            self.submit(engine, {"r": ask})
            for _ in range(k):
                engine.step()
            if engine.status("r").finish_reason:
                continue
            old = engine._core.streams["r"]
            ended_before |= {sample.number for sample in old.samples if sample.finish_reason}
            reader = engine.stream("r")
            engine.cancel("r")
            self.submit(engine, {"r": sampled(3)})
            self.assertEqual(len([event for event in reader if event.finish_reason]), 3)
            self.check_outcomes(engine, {"r": sampled(3)})
        self.assertEqual(ended_before, {0, 1, 2})

    def test_what_finished_samples_said_stays_to_be_read(self) -> None:
        """As of a finished request; of the others only the end."""
        engine = make_engine()
        ask = Ask(PROMPT, 9, SamplingParams(2.0, seed=1, n=3), stop_tokens=(5, 6, 7))
        lengths = [len(one) for one in solo(ask)]
        self.submit(engine, {"r": ask})
        for _ in range(min(lengths)):
            engine.step()
        engine.cancel("r")
        events = engine.poll("r")
        for number, length in enumerate(lengths):
            self.check_events(events, ("stop",) if length == min(lengths) else ("cancelled",), number)
            self.assertEqual(len(outcome(events, number)), length if length == min(lengths) else 0)


class Pages(EngineCase):
    def test_the_prompt_is_computed_and_stored_once(self) -> None:
        """K101: full pages are shared; who writes into a common page that is not full copies it first."""
        for size, n in product((1, 2, 5, 8), (2, 5)):
            with self.subTest(size=size, n=n):
                engine = make_engine(page_size=size, num_pages=64, budget_tokens=32, max_running=8)
                sampled(n).submit(engine, "r")
                engine.step()
                self.assertEqual(engine.metrics().computed_tokens, 5)
                shared = -(-5 // size)
                self.assertEqual(engine.metrics().kv_pages, shared)
                engine.step()
                full = 5 // size
                self.assertEqual(engine.metrics().kv_pages, full + n)  # position 5 of each is in a page of its own
                self.assertEqual(engine.kv.stats().copies, n - 1 if full < shared else 0)
                engine.kv.check()
                engine.run()
                self.assertEqual(engine.metrics().computed_tokens, 5 + n * 5)

    def test_tokens_survive_any_pool_preemption_and_policy(self) -> None:
        preempted = 0
        for seed, serving in product(range(2), SERVINGS):
            with self.subTest(seed=seed, serving=serving):
                dice = random.Random(seed)
                size = dice.randint(1, 4)
                asks = {f"r{i}": Ask(prompt_of(dice, dice.randint(1, 8)), dice.randint(1, 8),
                                     SamplingParams(1.5, seed=i, n=dice.randint(1, 4))) for i in range(4)}
                engine = make_engine(page_size=size, num_pages=-(-15 // size) + dice.randint(0, 3),
                                     budget_tokens=dice.randint(2, 9), max_running=3, **serving)
                self.submit(engine, asks)
                while engine.active:
                    engine.step()
                    engine.kv.check()
                self.check_outcomes(engine, asks)
                preempted += engine.metrics().preemptions
        self.assertGreater(preempted, 40)  # the test tests what it says

    def test_more_samples_than_may_run_or_than_the_budget_covers(self) -> None:
        for serving in ({"max_running": 1}, {"budget_tokens": 1}, {"batching": "none"}, {"batching": "static"},
                        {"use_cache": False}):
            with self.subTest(serving=serving):
                engine = make_engine(page_size=2, **serving)
                asks = {"r": sampled(5), **FIVE}
                self.submit(engine, asks)
                self.check_outcomes(engine, asks)


class Ids(EngineCase):
    def test_a_samples_id_is_taken_while_it_lives(self) -> None:
        """In both directions; a refusal changes nothing; afterwards the ids are free."""
        engine = make_engine(page_size=2)
        self.submit(engine, {"r": sampled(2), "s#1": Ask((1, 2), 4)})
        for k in range(3):
            before = self.picture(engine)
            for ask, name in ((Ask((1,), 1), "r#1"), (sampled(2), "s"), (sampled(3), "s"), (sampled(2), "r")):
                with self.subTest(k=k, name=name), self.assertRaises(DuplicateRequestError):
                    ask.submit(engine, name)
                self.assertEqual(self.picture(engine), before)
            engine.step()
        self.submit(engine, {"r#2": Ask((4,), 2), "s#2": Ask((5,), 2)})  # nobody's
        self.check_outcomes(engine, {"r": sampled(2), "s#1": Ask((1, 2), 4), "r#2": Ask((4,), 2), "s#2": Ask((5,), 2)})
        self.submit(engine, {"r#1": Ask((1,), 1), "s": sampled(3)})
        self.check_outcomes(engine, {"r#1": Ask((1,), 1), "s": sampled(3)})

    def test_of_a_sample_that_has_ended_before_the_others(self) -> None:
        """Its id is free when the whole request has ended."""
        ask = Ask(PROMPT, 9, SamplingParams(2.0, seed=1, n=3), stop_tokens=(5, 6, 7))
        first = min(range(1, 3), key=lambda number: len(solo(ask)[number]))
        engine = make_engine(page_size=2)
        self.submit(engine, {"r": ask})
        while engine._core.streams["r"].samples[first].finish_reason is None:
            engine.step()
        self.assertIsNone(engine.status("r").finish_reason)
        with self.assertRaisesRegex(DuplicateRequestError, f"is sample {first} of the live request 'r'"):
            self.submit(engine, {f"r#{first}": FIVE["b"]})
        self.check_outcomes(engine, {"r": ask})
        self.submit(engine, {f"r#{first}": FIVE["b"]})
        self.check_outcomes(engine, {f"r#{first}": FIVE["b"]})


class Counted(EngineCase):
    def test_requests_and_endings_add_up(self) -> None:
        """K095: a request counts once, however many samples it has and however it ends; its tokens all count."""
        for k in range(8):
            engine = make_engine(failing_on(POISON), **TIGHT)
            asks = {"good": unpoisoned(2, 4), "bad": Ask((1, POISON), 4, SamplingParams(1.0, n=3)),
                    "doomed": unpoisoned(4, 9), "none": sampled(3, 0)}
            self.submit(engine, asks)
            for _ in range(k):
                engine.step()
            engine.cancel("doomed")
            engine.run()
            events: list[TokenEvent] = [event for name in asks for event in engine.poll(name)]
            metrics = engine.metrics()
            self.assertEqual(metrics.finished, {"stop": 0, "length": 2, "cancelled": 1, "error": 1})
            self.assertEqual((metrics.submitted, metrics.running, metrics.waiting), (4, 0, 0))
            self.assertGreaterEqual(metrics.output_tokens, sum(event.token is not None for event in events))
            self.assertEqual(metrics.ttft.count, len({event["request"].split("#")[0] for event in engine.timeline
                                                      if event["event"] == "token"}))
            self.assertEqual(Metrics.of(engine.timeline), metrics)


class Order(EngineCase):
    def test_random_numbers_do_not_depend_on_who_was_submitted_before(self) -> None:
        ask = Ask(PROMPT, 8, SamplingParams(temperature=1.0))
        first, second = make_engine(), make_engine()
        Ask((2,), 3).submit(second, "other")
        for engine in (first, second):
            ask.submit(engine, "r")
        self.assertEqual(outcome(first.stream("r")), outcome(second.stream("r")))


if __name__ == "__main__":
    unittest.main()
