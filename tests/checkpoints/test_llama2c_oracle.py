"""Other decoders agree with ours on llama2.c models: llama2-py (extra ``peers``), transformers (``oracle``).

    pip install '.[oracle]' '.[peers]'        without them these tests skip; with P07_REQUIRE_EXTRAS=1 they fail
"""

from __future__ import annotations

import random
import tempfile
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from scripts.peers import Llama2Py, Transformers, ungrouped
from starter.backend import ReferenceBackend
from starter.base.weights import Tensor, seeded_weights
from starter.checkpoints.llama2c import UNSAID, read_llama2c, write_llama2c
from starter.engine import InferenceEngine
from starter.model import Model
from starter.reference import reference_generate
from starter.schema import ModelConfig
from tests.extras import needs
from tests.models import random_config
from tests.paths import ROOT

Weights = Mapping[str, Tensor]
STORIES = ROOT.parent / "shared" / "models" / "stories260K"
needs_stories = unittest.skipUnless(STORIES.is_dir(), "SKIPPED: needs ../shared/models/stories260K")


def our_greedy(config: ModelConfig, weights: Weights, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Past ends of sequence, as the others go on too."""
    return reference_generate(Model(replace(config, eos_tokens=()), weights, ReferenceBackend()), prompt, max_tokens)


@needs("oracle", "torch", "transformers")
class TransformersTest(unittest.TestCase):
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
