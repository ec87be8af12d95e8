"""Hidden tests of M1: answers, bad requests, ids; one request at a time, without a cache."""

from __future__ import annotations

from functools import partial
from random import Random

from harness import ROOT
from hidden_case import Hidden, drawn, model, tokens
from hidden_readers import Readers, visits
from oracle import Oracle

import starter

NO_CACHE = {"use_cache": False}


def answers(rng):
    """A few requests, each continued to the model's end of sequence, to its length, or to the token that comes at the
    given place, which is made a stop token."""
    made = model(rng, eos_tokens=rng.sample(range(24), rng.randint(0, 2)))
    asked = [[tokens(rng, made, rng.randint(1, 12)), rng.randint(3, 14), stop]
             for stop in (None, 0, rng.randint(1, 2), rng.choice([None, 0, 1]))]
    return {**made, "asked": asked, "settings": NO_CACHE}


def short_answers(rng):
    """Prompts of one token, answers of none or one."""
    made = model(rng, eos_tokens=rng.sample(range(24), 8))
    return {**made, "asked": [[tokens(rng, made, 1), i % 3, None] for i in range(6)], "settings": NO_CACHE}


def fixture_requests(rng):
    """Some of the fixture's requests, on weights that the fixture does not have."""
    return {"weights_seed": rng.randrange(2**31), "order": rng.random(), "most": rng.randint(4, 6)}


def two_models(rng):
    """One prompt under one id, and two models of one shape."""
    shape = rng.random()
    made = [model(Random(shape), tied_output=False, vocab_size=40) | {"weights_seed": rng.randrange(2**31)}
            for _ in range(2)]
    return {"models": made, "prompt": tokens(rng, made[0], rng.randint(1, 9)), "max_tokens": 16}


def bad(rng, requests):
    """Bad requests between two good ones. ``requests(rng, vocabulary, context)`` -> (prompt, max_tokens, error)."""
    made = model(rng, layers=1, max_context=rng.randint(30, 90))
    sizes = made["scenario"]["model"]
    return {**made, "bad": requests(rng, sizes["vocab_size"], sizes["max_context"]),
            "good": [[tokens(rng, made, rng.randint(1, 9)), rng.randint(2, 6)] for _ in range(2)],
            "settings": NO_CACHE}


def no_prompts(rng, vocabulary, context):
    """Things that are no prompt, and lengths that are no number of tokens."""
    few = rng.randint(1, 5)
    wrong = [[[], few], [{"1": few}, few], [[float(few)], few], [[1, None], few], [[str(few)], few]]
    wrong += [[[few], most] for most in (-few, float(few), True, None, str(few))]
    return [[prompt, most, "RequestError"] for prompt, most in rng.sample(wrong, len(wrong))]


def strange_tokens(rng, vocabulary, context):
    """Numbers that are no token, somewhere in a prompt that is good but for them."""
    wrong = [vocabulary, vocabulary + rng.randint(1, 50), 2**40, -1, -rng.randint(2, 50), True, False]
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randint(0, 6))] for _ in wrong]
    for prompt, token in zip(prompts, wrong):
        prompt.insert(rng.randint(0, len(prompt)), token)
    return [[prompt, rng.randint(1, 5), "RequestError"] for prompt in prompts]


def too_long(rng, vocabulary, context):
    """Prompts that leave no room for what is asked: by one token, by some, by far."""
    beyond = [1, rng.randint(2, 30), 10**9]
    lengths = [rng.randint(1, context) for _ in beyond]
    return [[[1] * length, context - length + more, "CapacityError"] for length, more in zip(lengths, beyond)]


class HiddenRequests(Hidden):
    def ask(self, run, asked):
        for prompt, max_tokens, place in asked:
            stop = [] if place is None else run.oracle.tokens(prompt, max_tokens)[:place + 1][-1:]
            self.case = f"prompt {prompt}, max_tokens {max_tokens}, stop_tokens {stop}"
            run.submit(prompt, max_tokens, stop_tokens=stop)
            run.finish()
        self.texts(run)

    @drawn("M1", "M1", answers, times=3)
    def test_answers(self, scenario):
        """V6: greedy tokens, their log-probabilities, their texts and the reason of the end are the model's."""
        self.ask(self.make(scenario), scenario["asked"])

    @drawn("B2", "M1", short_answers)
    def test_single_tokens(self, scenario):
        """B2, B3: prompts of one token are answered, also with one token, or with none."""
        self.ask(self.make(scenario), scenario["asked"])

    @drawn("X2", "M1", fixture_requests, times=2)
    def test_fixture_on_fresh_weights(self, scenario):
        """X2: the fixture's requests produce what other weights say, not the golden output again."""
        from starter.base.weights import seeded_weights
        fixture = starter.load_scenario(ROOT / "fixtures" / "tiny_model.json")
        requests = sorted(fixture.requests, key=lambda request: len(request.prompt_tokens))[:6]
        oracle = Oracle(fixture.model, seeded_weights(fixture.model, scenario["weights_seed"]))
        with starter.InferenceEngine.from_scenario(fixture, backend="cpu", use_cache=False,
                                                   weights_seed=scenario["weights_seed"]) as engine:
            self.engines.append(engine)
            for request in Random(scenario["order"]).sample(requests, 3):
                few = min(request.max_tokens, scenario["most"])
                name = engine.submit(request.prompt_tokens, few, request_id=request.request_id)
                tokens = [event.token for event in engine.stream(name) if event.token is not None]
                got, right = oracle.comparable(tokens, request.prompt_tokens, few)
                self.same(got, right, "an engine computes; it does not look tokens up by prompt or by request id")

    @drawn("V1", "M1", two_models)
    def test_two_models(self, scenario):
        """V1: two engines with different weights answer one prompt, under one id, each in its own way."""
        runs = [self.make(each, **NO_CACHE) for each in scenario["models"]]
        for run in runs:
            run.submit(scenario["prompt"], scenario["max_tokens"], request_id="same")
        outputs = [run.finish()["same"] for run in runs]
        self.that(outputs[0] != outputs[1], f"both gave {outputs[0]}", "nothing may be remembered across engines")

    def refused(self, scenario):
        """Every bad request is refused and changes nothing; what is good before and after it is answered."""
        run = self.make(scenario)
        (first, most), (last, more) = scenario["good"]
        run.submit(first, most)
        before = (run.engine.active, run.engine.kv.free_pages)
        for prompt, max_tokens, error in scenario["bad"]:
            self.case = f"prompt {str(prompt)[:60]}, max_tokens {max_tokens!r}"
            self.refuses(getattr(starter, error), partial(run.engine.submit, prompt, max_tokens, request_id="bad"),
                         "check at the door")
            self.same((run.engine.active, run.engine.kv.free_pages), before, "a refused request leaves no trace")
            self.refuses(starter.UnknownRequestError, lambda: list(run.engine.stream("bad")), "it has no stream")
        self.case = "the good requests"
        run.submit(last, more, request_id="bad")
        context = run.scenario.model.max_context
        run.submit([1] * (context - 1), 1)
        run.finish()

    @drawn("B1", "M1", partial(bad, requests=no_prompts))
    def test_no_prompts(self, scenario):
        """B1: what is no prompt, or no length, is refused with RequestError, and the engine is as before."""
        self.refused(scenario)

    @drawn("B5", "M1", partial(bad, requests=strange_tokens))
    def test_strange_tokens(self, scenario):
        """B1, B5: what is no token of the vocabulary is refused with RequestError, and the engine is as before."""
        self.refused(scenario)

    @drawn("B6", "M1", partial(bad, requests=too_long))
    def test_too_long(self, scenario):
        """B1, B6: what goes beyond the context is refused with CapacityError, and the engine is as before."""
        self.refused(scenario)

    @drawn("B4", "M1", partial(visits, moves=50, ids=3, settings=NO_CACHE), times=3)
    def test_ids(self, scenario):
        """B4: an id is taken while its request lives or its stream is unread, and unknown otherwise."""
        Readers(self, scenario).play()
