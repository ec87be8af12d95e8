"""Other people's decoders agree with ours: transformers' LlamaForCausalLM (extra ``oracle``), llama2-py (``peers``).

    pip install '.[oracle]' '.[peers]'        without them these tests skip; with P07_REQUIRE_EXTRAS=1 they fail

transformers confirms the fixture's golden tokens, every logit on the way there, and the margin that is recorded with
them.
"""

from __future__ import annotations

import random
import tempfile
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, fsum, log
from pathlib import Path

from scripts.peers import Llama2Py, Transformers, ungrouped
from starter.backend import Batch, Piece, ReferenceBackend
from starter.base.weights import Tensor, seeded_weights
from starter.checkpoints.llama2c import UNSAID, read_llama2c, write_llama2c
from starter.engine import InferenceEngine, play
from starter.model import Model, scenario_weights
from starter.reference import reference_generate
from starter.schema import ModelConfig, Scenario, load_scenario
from tests.extras import needs
from tests.models import random_config
from tests.paths import FIXTURE, ROOT

Weights = Mapping[str, Tensor]
STORIES = ROOT.parent / "shared" / "models" / "stories260K"
needs_stories = unittest.skipUnless(STORIES.is_dir(), "SKIPPED: needs ../shared/models/stories260K")
TOLERANCE = 1e-4  # transformers computes in float32
LANE_TOLERANCE = 5e-3  # the default backend's weights have 14 bits


def our_logits(config: ModelConfig, weights: Weights, tokens: Sequence[int]) -> list[list[float]]:
    """Logits after every position: [len(tokens), vocab_size]."""
    model = Model(config, weights, ReferenceBackend())
    batch = Batch.of([Piece(tokens, 0, (0,), wants_logits=True)], len(tokens))
    batch.logit_rows = list(range(len(tokens)))
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

    @needs_stories
    def test_stories260k(self) -> None:
        config, weights = read_llama2c(STORIES / "stories260K.bin")
        story = Transformers(config, weights).greedy([config.bos_token], 64)
        with InferenceEngine.from_checkpoint(STORIES, "cpu", budget_tokens=5, page_size=7) as engine:
            self.assertEqual(engine.generate([[config.bos_token]], 64), [story])
            # The same, its first half as a prompt that is computed in chunks
            self.assertEqual(engine.generate([[config.bos_token, *story[:32]]], 32), [story[32:]])


@needs("peers", "llama2_py")
class Llama2PyTest(unittest.TestCase):
    def check(self, config: ModelConfig, weights: Weights, prompt: Sequence[int], max_tokens: int) -> None:
        """Our tokens from the model, its own from a file that we wrote."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.bin"
            write_llama2c(path, *ungrouped(config, weights))
            theirs = Llama2Py(path).greedy(prompt, max_tokens)
            self.assertEqual(our_greedy(*read_llama2c(path), prompt, max_tokens), theirs)
        with self.subTest("grouped"):
            self.assertEqual(our_greedy(config, weights, prompt, max_tokens), theirs)

    def test_random_models(self) -> None:
        for seed in range(12):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                shape = random_config(dice, group=(1, 2, 4)[seed % 3], tied=seed % 2 == 0)
                config = replace(shape, **UNSAID)
                prompt = dice.choices(range(config.vocab_size), k=dice.randint(1, 6))
                self.check(config, seeded_weights(config, seed), prompt, 10)

    @needs_stories
    def test_stories260k(self) -> None:
        config, weights = read_llama2c(STORIES / "stories260K.bin")
        with InferenceEngine.from_checkpoint(STORIES, "cpu", budget_tokens=5, page_size=7) as engine:
            [story] = engine.generate([[config.bos_token]], 64)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.bin"
            write_llama2c(path, *ungrouped(config, weights))
            self.assertEqual(Llama2Py(path).greedy([config.bos_token], 64), story)


if __name__ == "__main__":
    unittest.main()
