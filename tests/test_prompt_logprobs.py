"""Logprobs of the prompt's own tokens: those of a decoder without a cache, however the prompt was cut, shared or
preempted on its way."""

from __future__ import annotations

import random
import unittest
from collections.abc import Sequence
from functools import cache
from math import exp, fsum, log

from starter.backend import load_backend
from starter.engine import InferenceEngine
from starter.errors import EngineError, RequestError
from starter.model import Loaded, Model
from starter.reference import reference_logits
from starter.sampling import Choice
from starter.schema import EngineSettings, SamplingParams
from starter.timeline import VirtualClock
from tests.extras import needs
from tests.support import (
    CONFIG,
    HEALTHY,
    TOKENIZER,
    VOCABULARY,
    WEIGHTS,
    FaultyBackend,
    failing_at,
    make_engine,
    oracle,
)
from tests.wings import needs_wing

EXACT = 1e-9
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9)


@cache
def logprobs_after(tokens: tuple[int, ...]) -> list[float]:
    """The logarithm of each next token's probability, by the reference."""
    row = reference_logits(CONFIG, HEALTHY.model.parameters(), tokens)
    best = max(row)
    total = log(fsum(exp(logit - best) for logit in row))
    return [logit - best - total for logit in row]


class PromptLogprobs(unittest.TestCase):
    def check(self, scores: Sequence[Choice | None], prompt: Sequence[int], number: int,
              tolerance: float = EXACT) -> None:
        self.assertEqual(len(scores), len(prompt))
        self.assertIsNone(scores[0])
        for position in range(1, len(prompt)):
            expected, score = logprobs_after(tuple(prompt[:position])), scores[position]
            assert score is not None
            self.assertEqual(score.token, prompt[position])
            self.assertAlmostEqual(score.logprob, expected[score.token], delta=tolerance)
            likeliest = sorted(range(VOCABULARY), key=lambda token: (-expected[token], token))[:number]
            listed = [token for token, _ in score.top_logprobs]
            self.assertEqual(listed, likeliest + [score.token] * (score.token not in likeliest))
            for token, logprob in score.top_logprobs:
                self.assertAlmostEqual(logprob, expected[token], delta=tolerance)

    def test_they_are_those_of_the_reference(self) -> None:
        """In chunks of every size, without a cache, and next to the tokens that follow."""
        for settings in ({"use_cache": False}, {"use_cache": False, "budget_tokens": 5},
                         *({"budget_tokens": budget, "page_size": 4} for budget in (1, 2, 5, 12, 13, 64))):
            with self.subTest(**settings), make_engine(**settings) as engine:
                result = engine.result(engine.submit(PROMPT, 6, prompt_logprobs=3))
                self.check(result.prompt_logprobs, PROMPT, 3)
                self.assertEqual(list(result.tokens), oracle(PROMPT, 6))

    def test_none_unless_asked_for(self) -> None:
        engine = make_engine()
        self.assertEqual(engine.generate("dbe", 2).prompt_logprobs, ())
        self.assertEqual(engine.generate("d", 2, prompt_logprobs=2).prompt_logprobs, (None,))
        self.check(engine.generate("dbe", 2, prompt_logprobs=0).prompt_logprobs, (3, 1, 4), 0)

    def test_they_are_complete_with_the_first_event(self) -> None:
        engine = make_engine(budget_tokens=4)
        events = engine.stream(engine.submit(PROMPT, 3, prompt_logprobs=1))
        self.assertEqual(events.prompt_logprobs, (None,))
        next(events)
        self.check(events.prompt_logprobs, PROMPT, 1)

    def test_samples_share_them(self) -> None:
        result = make_engine(budget_tokens=4).generate("dbe", 4, prompt_logprobs=1, n=3, temperature=1.5, seed=3)
        self.check(result.prompt_logprobs, (3, 1, 4), 1)
        self.assertEqual([len(sample.tokens) for sample in result.samples], [4, 4, 4])

    def test_in_crowds_of_every_kind(self) -> None:
        """Shared prefixes, too few pages, both preemptions, every policy; others that ask for none."""
        preemptions = found = 0
        for seed in range(60):
            dice = random.Random(seed)
            settings = {"page_size": dice.choice((2, 3, 4)), "num_pages": dice.randint(10, 16), "host_pages": 8,
                        "budget_tokens": dice.choice((3, 6, 20)), "max_running": 5,
                        "policy": dice.choice(("fcfs", "shortest", "prefill-first")),
                        "preemption": dice.choice(("recompute", "swap")), "prefix_sharing": dice.random() < 0.7}
            prompts = [(*PROMPT[:dice.randint(1, 10)], *dice.choices(range(VOCABULARY), k=dice.randint(0, 4)))
                       for _ in range(7)]
            asked = [dice.choice((None, 0, 2)) for _ in prompts]
            with self.subTest(seed=seed), make_engine(**settings) as engine:
                ids = [engine.submit(prompt, 6, prompt_logprobs=number) for prompt, number in zip(prompts, asked)]
                for request_id, prompt, number in zip(ids, prompts, asked):
                    result = engine.result(request_id)
                    self.assertEqual(list(result.tokens), oracle(prompt, 6))
                    if number is None:
                        self.assertEqual(result.prompt_logprobs, ())
                    else:
                        self.check(result.prompt_logprobs, prompt, number)
                engine.kv.check()
                metrics = engine.metrics()
                preemptions, found = preemptions + metrics.preemptions, found + metrics.found_tokens
        self.assertGreater(preemptions, 20)  # so that the test has seen what it is for
        self.assertGreater(found, 100)

    def test_a_prompt_in_shared_pages_is_computed_again_and_can_be_shared_by_others(self) -> None:
        engine = make_engine(page_size=4, prefix_sharing=True)
        engine.submit(PROMPT, 8)
        engine.step()
        scored = engine.submit(PROMPT, 8, prompt_logprobs=0)
        engine.step()
        self.assertEqual(engine.metrics().found_tokens, 0)
        engine.submit(PROMPT, 8)
        engine.step()
        self.assertEqual(engine.metrics().found_tokens, 12)
        self.check(engine.result(scored).prompt_logprobs, PROMPT, 0)

    def test_an_interrupted_step_counts_once(self) -> None:
        for moment in ("start", "middle"):
            for call in range(4):
                engine = make_engine(failing_at(call, moment, KeyboardInterrupt()), budget_tokens=4)
                request_id = engine.submit(PROMPT, 2, prompt_logprobs=0)
                with self.assertRaises(KeyboardInterrupt):
                    engine.run()
                self.check(engine.result(request_id).prompt_logprobs, PROMPT, 0)

    def test_a_row_that_is_no_distribution_ends_this_request_alone(self) -> None:
        """Also a row that nobody would have looked at without the logprobs."""
        engine = make_engine(FaultyBackend(spoiled=[9]))
        plain, scored, other = (engine.submit(prompt, 2, prompt_logprobs=number)
                                for prompt, number in ((PROMPT[:8], None), (PROMPT[:8], 0), (PROMPT[:5], 0)))
        engine.run()
        self.assertEqual([engine.poll(request_id)[-1].finish_reason for request_id in (plain, scored, other)],
                         ["length", "error", "length"])

    def test_what_cannot_be_given_is_refused(self) -> None:
        engine = make_engine()
        for number, max_tokens, words in ((VOCABULARY + 1, 2, "prompt_logprobs 21 is more than the vocabulary of 20"),
                                          (1, 0, "prompt_logprobs are computed with the prompt"),
                                          (-1, 2, "prompt_logprobs"), (True, 2, "prompt_logprobs")):
            with self.assertRaisesRegex(RequestError, words):
                engine.submit(PROMPT, max_tokens, prompt_logprobs=number)
        self.assertEqual(engine.active, ())

    def test_too_few_rows_are_an_error_of_the_backend(self) -> None:
        class Short(FaultyBackend):
            def to_lists(self, x: Sequence[Sequence[float]]) -> list[list[float]]:
                return list(map(list, x))[:1]

        engine = make_engine(Short())
        with self.assertRaisesRegex(EngineError, "returned 1 rows of logits; 13 were asked for"):
            engine.result(engine.submit(PROMPT, 1, prompt_logprobs=0))

    def backend(self, name: str, tolerance: float, **settings: object) -> None:
        loaded = Loaded(Model(CONFIG, WEIGHTS, load_backend(name)), TOKENIZER, {})
        with InferenceEngine(loaded, EngineSettings().override({"budget_tokens": 5, **settings}),
                             VirtualClock()) as engine:
            ids = [engine.submit(PROMPT[:length], 3, sampling=SamplingParams(prompt_logprobs=0)) for length in (13, 7)]
            for request_id, length in zip(ids, (13, 7)):
                self.check(engine.result(request_id).prompt_logprobs, PROMPT[:length], 0, tolerance)

    @needs_wing("backends/lanes")
    def test_lanes(self) -> None:
        self.backend("cpu", 5e-3)

    @needs("numpy", "numpy")
    def test_numpy(self) -> None:
        self.backend("numpy", 1e-4)

    @needs_wing("backends/workers")
    def test_several_processes(self) -> None:
        self.backend("reference", EXACT, workers=2)


if __name__ == "__main__":
    unittest.main()
