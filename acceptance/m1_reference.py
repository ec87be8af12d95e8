"""M1 · Schema and reference generation: what comes in is checked, what comes out is what the model says.

There is no cache yet (``use_cache=False``), and nothing here asks for more than one request at a time.
"""

from __future__ import annotations

import json
from cmath import rect
from functools import partial
from math import exp, fsum, sqrt
from pathlib import Path
from random import Random

import observed
from harness import ROOT, Case, given, load_document, plain_backend, tiny_scenario
from oracle import Oracle

import starter

FIXTURE = ROOT / "fixtures" / "tiny_model.json"
Run = partial(observed.Run, use_cache=False)


class M1Reference(Case):
    @given
    def test_fixture_is_a_complete_scenario(self):
        """M1, F8: fixtures/tiny_model.json parses to a model, requests with ids of their own, and a golden output."""
        scenario = starter.load_scenario(FIXTURE)
        ids = [request.request_id for request in scenario.requests]
        self.that(len(ids) >= 2 and len(set(ids)) == len(ids), f"request ids {ids}",
                  "several requests, each with its id")
        self.that(bool(scenario.golden and scenario.golden.tokens), f"golden: {scenario.golden}",
                  "keep the golden output")

    @given
    def test_malformed_scenarios_are_refused(self):
        """M1: load_scenario raises SchemaError, which says where, on anything malformed, and nothing else ever."""
        good = json.loads(FIXTURE.read_text(encoding="utf-8"))
        bad = {"": [], "/model": {**good, "model": None}, "/surprise": {**good, "surprise": 1},
               "/model/layers": {**good, "model": {**good["model"], "layers": "2"}},
               "/version": {**good, "version": True},
               "/requests/0/max_tokens": {**good, "requests": [{**good["requests"][0], "max_tokens": -1}]},
               "/requests/0/prompt_tokens": {**good, "requests": [{**good["requests"][0], "prompt_tokens": []}]}}
        for path, document in bad.items():
            self.case = f"the value at {path!r} is wrong"
            try:
                load_document(document)
            except starter.SchemaError as error:
                self.same(error.path, path, "SchemaError.path is a JSON pointer to the offending value")
            else:
                self.that(False, "the document was accepted", "check every value while parsing")
        for file in (ROOT / "no such file.json", ROOT, Path(__file__)):
            self.refuses(starter.SchemaError, lambda file=file: starter.load_scenario(file),
                         "a file that is missing or is not JSON is a SchemaError as well")

    def test_golden_sequences(self):
        """M1: the fixture's requests produce the fixture's golden tokens (here the first ones of the shorter half)."""
        scenario = starter.load_scenario(FIXTURE)
        golden = scenario.golden.tokens if scenario.golden else {}
        requests = sorted(scenario.requests, key=lambda request: len(request.prompt_tokens))
        with starter.InferenceEngine.from_scenario(scenario, backend="cpu", use_cache=False) as engine:
            self.engines.append(engine)
            for request in requests[:len(requests) // 2]:
                name = engine.submit(request.prompt_tokens, min(request.max_tokens, 6), request_id=request.request_id,
                                     stop_tokens=request.stop_tokens)
                tokens = [event.token for event in engine.stream(name) if event.token is not None]
                self.same(tokens, list(golden[name][:6]), f"{name} differs from its golden output")

    def test_fixture_on_other_weights(self):
        """X2: with fresh weights the fixture's requests produce what those weights say, not the golden output again."""
        scenario = starter.load_scenario(FIXTURE)
        seed = self.rng.randrange(2**31)
        from starter.base.weights import seeded_weights
        oracle = Oracle(scenario.model, seeded_weights(scenario.model, seed))
        with starter.InferenceEngine.from_scenario(scenario, backend="cpu", weights_seed=seed,
                                                   use_cache=False) as engine:
            self.engines.append(engine)
            for request in sorted(scenario.requests, key=lambda request: len(request.prompt_tokens))[:3]:
                few = min(request.max_tokens, 4)
                name = engine.submit(request.prompt_tokens, few, request_id=request.request_id)
                tokens = [event.token for event in engine.stream(name) if event.token is not None]
                got, right = oracle.comparable(tokens, request.prompt_tokens, few)
                self.same(got, right, "an engine computes; it does not look tokens up by prompt or by request id")

    @given
    def test_reference_equals_independent_decoder(self):
        """V6: reference_generate, the cache-less reference, equals a decoder written independently of it."""
        from starter.reference import reference_generate
        for length in (1, 2, 9):
            run = Run(self)
            prompt = run.prompt(length)
            self.same(list(reference_generate(run.engine.model, prompt, 6)), run.oracle.tokens(prompt, 6),
                      "check rotary pairs (2i, 2i+1), grouped heads, the norm's epsilon and the order of operations")

    def test_greedy_generation(self):
        """V6: greedy tokens and their log-probabilities equal the reference, for one request at a time."""
        for length, max_tokens in ((1, 1), (1, 12), (7, 5), (30, 2)):
            run = Run(self)
            run.submit(run.prompt(length), max_tokens)
            run.finish()

    def test_operations(self):
        """M1: norm, linear, rotate, swiglu and attention of the plain backend compute what their formulas say."""
        from starter.backend import attention
        backend, rng = plain_backend(), self.rng

        def rows(count, columns):
            return [[rng.gauss(0, 1.5) for _ in range(columns)] for _ in range(count)]

        def near(name, got, wanted):
            self.case = name
            got = [list(map(float, row)) for row in got]
            self.same([len(row) for row in got], [len(row) for row in wanted], "one row of numbers for each row")
            far = max(abs(a - b) for one, other in zip(got, wanted) for a, b in zip(one, other))
            self.that(far < 1e-6, f"{got[0][:4]}..., not {wanted[0][:4]}...", "the docstring has the formula")

        x, matrix, gain = rows(3, 8), rows(5, 8), rows(1, 8)[0]
        near("norm", backend.norm(x, gain, 1e-5), [
            [v / sqrt(fsum(w * w for w in row) / 8 + 1e-5) * g for v, g in zip(row, gain)] for row in x])
        near("linear", backend.linear(matrix, x), [
            [fsum(a * b for a, b in zip(weights, row)) for weights in matrix] for row in x])
        near("rotate", backend.rotate(x, [0, 3, 11], (1.0, 0.25)), [
            [part for i in range(0, 8, 2) for number in [complex(row[i], row[i + 1]) * rect(
                1, position * (1.0, 0.25)[i // 2 % 2])] for part in (number.real, number.imag)]
            for row, position in zip(x, (0, 3, 11))])
        near("swiglu", backend.swiglu(x, x[::-1]), [
            [z / (1 + exp(-z)) * u for z, u in zip(gates, ups)] for gates, ups in zip(x, x[::-1])])
        query, keys, values = gain, rows(4, 8), rows(4, 8)
        shares = [exp(fsum(a * b for a, b in zip(query, key)) / sqrt(8)) for key in keys]
        near("attention", [attention(query, keys, [list(column) for column in zip(*values)])], [
            [fsum(share * value[i] for share, value in zip(shares, values)) / fsum(shares) for i in range(8)]])

    def test_text_of_a_stream(self):
        """T3: the texts of a request's events, joined, are the decoded tokens."""
        run = Run(self)
        name = run.submit(run.prompt(3), 10)
        tokens = run.finish()[name]
        self.same("".join(event.text for event in run.lives[name].events), run.engine.tokenizer.decode(tokens),
                  "an event's text is what its token adds")

    def test_same_prompt_on_two_models(self):
        """V1: two engines with different weights answer the same prompt, under the same id, each in its own way."""
        runs = [Run(self, tiny_scenario(Random(1), tied_output=False)) for _ in range(2)]
        prompt = runs[0].prompt(6)
        for run in runs:
            run.submit(prompt, 16, request_id="same")
        outputs = [run.finish()["same"] for run in runs]
        self.that(outputs[0] != outputs[1], f"both gave {outputs[0]}", "nothing may be remembered across engines")

    def test_end_of_sequence(self):
        """M1: generation stops with the model's end-of-sequence token, which is delivered; so does a stop token."""
        shape, weights_seed = self.rng.random(), self.rng.randrange(2**31)
        plain = Run(self, tiny_scenario(Random(shape)), weights_seed)
        prompt = plain.prompt(5)
        tokens = plain.oracle.tokens(prompt, 20)
        for token in dict.fromkeys(tokens):
            run = Run(self, tiny_scenario(Random(shape), eos_tokens=[token]), weights_seed)
            by_model = run.submit(prompt, 20)
            run.finish()
            by_request = plain.submit(prompt, 20, stop_tokens=[token])
            plain.finish()
            self.same((run.lives[by_model].reason, plain.lives[by_request].reason), ("stop", "stop"), "finish_reason")

    def test_no_tokens_wanted(self):
        """B3: max_tokens=0 is accepted, gives no token, and ends with finish_reason "length"."""
        run = Run(self)
        name = run.submit(run.prompt(3), 0)
        run.submit(run.prompt(3), 2)
        run.finish()
        self.same((run.lives[name].tokens, run.lives[name].reason), ([], "length"),
                  "one terminal event without a token")

    def test_bad_requests_change_nothing(self):
        """B1, B5, B6: a bad request is refused with RequestError or CapacityError, and the engine is as before."""
        run = Run(self)
        vocabulary, context = run.scenario.model.vocab_size, run.scenario.model.max_context
        kept = run.submit(run.prompt(4), 4, request_id="kept")
        before = (run.engine.active, run.engine.kv.free_pages)
        for name, prompt, max_tokens, error in [
                ("empty prompt", [], 4, starter.RequestError),
                ("token beyond the vocabulary", [1, vocabulary], 4, starter.RequestError),
                ("negative token", [-1], 4, starter.RequestError),
                ("boolean token", [True], 4, starter.RequestError),
                ("float token", [1.0], 4, starter.RequestError),
                ("a mapping as prompt", {1: 2}, 4, starter.RequestError),
                ("negative max_tokens", [1], -1, starter.RequestError),
                ("float max_tokens", [1], 2.0, starter.RequestError),
                ("boolean max_tokens", [1], True, starter.RequestError),
                ("beyond the context", [1] * context, 1, starter.CapacityError),
                ("far beyond the context", [1], 10**9, starter.CapacityError)]:
            self.case = name
            self.refuses(error, lambda p=prompt, m=max_tokens: run.engine.submit(p, m, request_id="bad"),
                         "check at the door")
            self.same((run.engine.active, run.engine.kv.free_pages), before, "a refused request leaves no trace")
            self.refuses(starter.UnknownRequestError, lambda: list(run.engine.stream("bad")), "it has no stream")
        run.finish()
        self.same(run.lives[kept].reason, "length", "the neighbour of a refused request goes on")
        run.submit([1] * (context - 2), 2)  # exactly the context
        run.finish()

    def test_duplicate_ids(self):
        """B4: an id is taken while its request is live or its stream unread, and free again after that."""
        run = Run(self)
        prompt = run.prompt(3)
        name = run.submit(prompt, 3, request_id="x")
        for state, move in (("waits", run.step), ("runs", run.drain), ("has ended, unread", run.finish)):
            self.refuses(starter.DuplicateRequestError, lambda: run.engine.submit([1], 1, request_id="x"), f"x {state}")
            move()
        run.submit(run.prompt(4), 2, request_id=name)
        run.finish()

    def test_unknown_ids(self):
        """M1: an id never seen raises UnknownRequestError; cancelling a finished request does nothing."""
        run = Run(self)
        for call in (run.engine.cancel, lambda name: list(run.engine.stream(name))):
            self.refuses(starter.UnknownRequestError, lambda call=call: call("nobody"), "no request has this id")
        run.submit(run.prompt(2), 2, request_id="done")
        run.drain()
        run.engine.cancel("done")  # finished, not yet read: nothing happens, the tokens stay readable
        run.finish()
