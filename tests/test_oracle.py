"""Another decoder agrees with ours: transformers' LlamaForCausalLM (extra ``oracle``).

    pip install '.[oracle]'        without it these tests skip; with P07_REQUIRE_EXTRAS=1 they fail

It confirms the fixture's golden tokens, every logit on the way there, and the margin that is recorded with them.
"""

from __future__ import annotations

import random
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, fsum, log

from scripts.peers import Transformers
from starter.backend import Batch, Piece, ReferenceBackend
from starter.base.weights import Tensor, seeded_weights
from starter.command.play import play
from starter.engine import InferenceEngine
from starter.model import Model, scenario_weights
from starter.reference import reference_generate
from starter.schema import ModelConfig, Scenario, load_scenario
from tests.extras import needs
from tests.models import random_config
from tests.paths import FIXTURE

Weights = Mapping[str, Tensor]
TOLERANCE = 1e-4  # transformers computes in float32
LANE_TOLERANCE = 5e-3  # the default backend's weights have 14 bits


def our_logits(config: ModelConfig, weights: Weights, tokens: Sequence[int]) -> list[list[float]]:
    """Logits after every position: [len(tokens), vocab_size]."""
    model = Model(config, weights, ReferenceBackend())
    batch = Batch.of([Piece(tokens, 0, (0,), wants_logits=len(tokens))], len(tokens))
    return model.forward(batch, model.new_store(1, len(tokens)))


def our_greedy(config: ModelConfig, weights: Weights, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Past ends of sequence, as the others go on too."""
    return reference_generate(Model(replace(config, eos_tokens=()), weights, ReferenceBackend()), prompt, max_tokens)


@needs("oracle", "torch", "transformers")
class TransformersTest(unittest.TestCase):
    def check_close(self, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> None:
        self.assertEqual(len(ours), len(theirs))
        for mine, other in zip(ours, theirs):
            self.assertLess(max(abs(a - b) for a, b in zip(mine, other, strict=True)), TOLERANCE)

    def test_the_fixture_token_by_token_and_logit_by_logit(self) -> None:
        scenario = load_scenario(FIXTURE)
        weights = scenario_weights(scenario, scenario.weights)
        theirs, margins = Transformers(scenario.model, weights), []
        for request in scenario.requests:
            with self.subTest(request=request.request_id):
                golden = scenario.golden.tokens[request.request_id]
                known = [*request.prompt_tokens, *golden]
                logits = theirs.logits(known)
                self.check_close(our_logits(scenario.model, weights, known), logits)
                deciding = logits[len(request.prompt_tokens) - 1:-1]
                self.assertEqual(tuple(row.index(max(row)) for row in deciding), golden)
                margins += [best - second for second, best in (sorted(row)[-2:] for row in deciding)]
                ends = [i for i, token in enumerate(golden, start=1) if token in scenario.model.eos_tokens]
                self.assertEqual(len(golden), min([*ends, request.max_tokens]))
        self.assertAlmostEqual(min(margins), scenario.golden.smallest_margin, delta=TOLERANCE)
        self.assertGreater(scenario.golden.smallest_margin, 2 * TOLERANCE)

    def test_the_engine_in_chunks_batches_and_pages(self) -> None:
        """Small pages, a small budget, preemptions: each token's logarithm of probability is theirs."""
        scenario = load_scenario(FIXTURE)
        theirs = Transformers(scenario.model, scenario_weights(scenario, scenario.weights))
        for backend, tolerance in (("reference", TOLERANCE), ("cpu", LANE_TOLERANCE)):
            with self.subTest(backend=backend):
                self.check_engine(backend, scenario, theirs, tolerance)

    def check_engine(self, backend: str, scenario: Scenario, theirs: Transformers, tolerance: float) -> None:
        prompts = {request.request_id: request.prompt_tokens for request in scenario.requests}
        with InferenceEngine.from_scenario(scenario, backend, page_size=3, num_pages=40, budget_tokens=7) as engine:
            events = [event for played in play(engine, scenario) for event in played.events]
            self.assertGreater(engine.metrics().preemptions, 0)
        for request_id, prompt in prompts.items():
            mine = [event for event in events if event.request_id == request_id and event.token is not None]
            rows = theirs.logits([*prompt, *(event.token for event in mine)])[len(prompt) - 1:]
            for event, row in zip(mine, rows):
                best = max(row)
                self.assertEqual(event.token, row.index(best))
                self.assertAlmostEqual(event.logprob, -log(fsum(exp(logit - best) for logit in row)), delta=tolerance)

    def test_random_models(self) -> None:
        """1, 2 and 4 query heads for each key/value head, the output tied or not."""
        for seed in range(12):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                config = random_config(dice, group=(1, 2, 4)[seed % 3], tied=seed % 2 == 0)
                weights = seeded_weights(config, seed)
                theirs = Transformers(config, weights)
                tokens = dice.choices(range(config.vocab_size), k=30)
                self.check_close(our_logits(config, weights, tokens), theirs.logits(tokens))
                self.assertEqual(our_greedy(config, weights, tokens[:3], 8), theirs.greedy(tokens[:3], 8))


if __name__ == "__main__":
    unittest.main()
