"""The NumPy backend computes what the plain one computes (extra ``numpy``)."""

from __future__ import annotations

import random
import unittest

from starter import InferenceEngine, load_backend, load_scenario
from starter.batch import Batch, Piece
from starter.model import Model
from starter.play import play, tokens_of
from starter.schema import QuantizationConfig
from starter.weights import seeded_weights
from tests.extras import needs
from tests.models import random_config
from tests.paths import FIXTURE


@needs("numpy", "numpy")
class NumpyBackendTest(unittest.TestCase):
    def test_logits_agree_with_the_plain_backend_in_a_mixed_batch(self) -> None:
        """A prefill from 0, a chunk in the middle and a decode in one batch, on permuted pages: within 1e-4."""
        for seed in range(20):
            with self.subTest(seed=seed):
                rng = random.Random(seed)
                config, page_size = random_config(rng), rng.randint(1, 5)
                weights = seeded_weights(config, seed)
                pages = rng.sample(range(60), 60)
                prompts = [[rng.randrange(config.vocab_size) for _ in range(rng.randint(2, 12))] for _ in range(3)]
                tables = [pages[20 * i:20 * i + -(-len(prompt) // page_size)] for i, prompt in enumerate(prompts)]
                cuts = [0, rng.randrange(1, len(prompts[1])), len(prompts[2]) - 1]
                results = []
                for name in ("cpu", "numpy"):
                    model = Model(config, weights, load_backend(name))
                    store = model.new_store(60, page_size)
                    early = [Piece(prompt[:cut], 0, table, wants_logits=False)
                             for prompt, cut, table in zip(prompts, cuts, tables) if cut]
                    late = [Piece(prompt[cut:], cut, table, wants_logits=True)
                            for prompt, cut, table in zip(prompts, cuts, tables)]
                    self.assertEqual(model.forward(Batch.of(early, page_size), store), [])
                    results.append(model.forward(Batch.of(late, page_size), store))
                for plain, fast in zip(*results):
                    self.assertLess(max(abs(a - b) for a, b in zip(plain, fast)), 1e-4)

    def test_fixture_gives_the_golden_tokens(self) -> None:
        scenario = load_scenario(FIXTURE)
        with InferenceEngine.from_scenario(scenario, "numpy", num_pages=40) as engine:
            tokens = tokens_of([event for played in play(engine, scenario) for event in played.events])
        assert scenario.golden
        for request_id, golden in scenario.golden.tokens.items():
            got = tokens[request_id]
            self.assertEqual(got, list(golden)[:len(got)] if request_id == "cancelled" else list(golden))

    def test_nan_in_free_pages_reaches_no_output(self) -> None:
        """K066: unwritten slots hold NaN; 0 * NaN would poison the values of a padded attention."""
        config = random_config(random.Random(1))
        model = Model(config, seeded_weights(config, 1), load_backend("numpy"))
        piece = Piece([1, 2, 3], 0, (2,), wants_logits=True)
        clean, dirty = model.new_store(4, 4), model.new_store(4, 4)
        dirty.keys[:], dirty.values[:] = float("nan"), float("nan")  # type: ignore[attr-defined]
        self.assertEqual(model.forward(Batch.of([piece], 4), clean), model.forward(Batch.of([piece], 4), dirty))

    def test_store_reads_back_what_was_written_and_copies_pages(self) -> None:
        config = random_config(random.Random(2))
        store = Model(config, seeded_weights(config, 2), load_backend("numpy")).new_store(3, 2)
        key, value = [float(i) for i in range(store.width)], [0.5 * i for i in range(store.width)]
        store.write(0, 1, key, value)
        store.copy_page(0, 2)
        self.assertEqual(store.read(2, 1), (key, value))
        self.assertEqual(store.page_bytes, 2 * 4 * 2 * store.width)

    def test_quantized_weights_are_those_of_the_plain_backend(self) -> None:
        config = random_config(random.Random(3))
        weights = seeded_weights(config, 3)
        models = [Model(config, weights, load_backend(name), QuantizationConfig(bits=4, group_size=4))
                  for name in ("cpu", "numpy")]
        logits = [model.forward_uncached([1, 2, 3, 4]) for model in models]
        self.assertLess(max(abs(a - b) for a, b in zip(*logits)), 1e-4)
        quantized, plain = (Model(config, weights, load_backend("numpy"), q).forward_uncached([1, 2, 3, 4])
                            for q in (QuantizationConfig(bits=4, group_size=4), None))
        self.assertNotEqual(quantized, plain)


if __name__ == "__main__":
    unittest.main()
