"""The NumPy backend computes what the plain one computes (extra ``numpy``)."""

from __future__ import annotations

import random
import tracemalloc
import unittest
import warnings
from array import array
from math import fsum, nan, sqrt
from typing import Any

from starter import InferenceEngine, load_backend, load_scenario
from starter.backend import Batch, Piece
from starter.backends.int8_pages import Int8KVStore
from starter.base.weights import Tensor, seeded_weights
from starter.command.play import play, tokens_of
from starter.kv_cache import KVStore
from starter.model import Model
from starter.schema import ModelConfig, QuantizationConfig
from tests.extras import needs
from tests.models import random_config, split_prompts
from tests.paths import FIXTURE
from tests.test_backend import check_operations


@needs("numpy", "numpy")
class NumpyBackendTest(unittest.TestCase):
    def test_logits_agree_with_the_plain_backend_in_a_mixed_batch(self) -> None:
        """A prefill from 0, a chunk in the middle and a decode in one batch, on permuted pages: within 1e-4."""
        for seed in range(20):
            with self.subTest(seed=seed):
                rng = random.Random(seed)
                config, page_size = random_config(rng, plain=seed % 2 == 0), rng.randint(1, 5)
                weights = seeded_weights(config, seed)
                early, late = split_prompts(rng, config, page_size)
                results = []
                for name in ("reference", "numpy"):
                    model = Model(config, weights, load_backend(name))
                    store = model.new_store(60, page_size)
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

    def test_rotation_is_that_of_the_plain_backend_call_after_call(self) -> None:
        """What is kept for the next call must not be used when positions, frequencies or the width differ."""
        import numpy as np
        plain, fast = load_backend("reference"), load_backend("numpy")
        dice, positions = random.Random(1), [3, 0, 700]
        calls = [(1, (1.0, 0.01)), (3, (1.0, 0.01)), (2, (1.0, 0.01)), (2, (1.0, 0.5)), (1, (0.3,)), (2, (1.0, 0.5))]
        for number, (heads, frequencies) in enumerate((*calls, *calls)):
            x = [[float(dice.randint(-9, 9)) for _ in range(2 * heads * len(frequencies))] for _ in positions]
            wide = np.array([[0.0, *row, 0.0] for row in x], dtype=np.float32)[:, 1:-1]  # as ``split`` leaves it
            for mine, row in zip(fast.rotate(wide, positions, frequencies).tolist(),
                                 plain.rotate(x, positions, frequencies), strict=True):
                for a, b in zip(mine, row, strict=True):
                    self.assertAlmostEqual(a, b, places=5)
            positions[0] += number == len(calls)
            positions[2] = 700 if number % 3 else 20_000  # beyond those whose angles are kept

    def test_a_row_is_normed_alone_as_among_others(self) -> None:
        import numpy as np
        backend, dice = load_backend("numpy"), np.random.default_rng(4)
        gain = dice.normal(size=48).astype(np.float32)
        rows = (dice.normal(size=(6, 48)) * [[1e-18], [1e-3], [1.0], [30.0], [1e4], [5e18]]).astype(np.float32)
        rows[0, :] *= 0.0
        together = backend.norm(rows, gain, 1e-5)
        for row, expected in zip(rows, together):
            exact = row.astype(np.float64) / np.sqrt((row.astype(np.float64) ** 2).mean() + 1e-5) * gain
            for found in (backend.norm(row[None], gain, 1e-5)[0], expected):
                np.testing.assert_allclose(found, exact, rtol=2e-6, atol=1e-7)

    def test_numbers_whose_squares_are_no_float(self) -> None:
        """F085: the norm of such a row is a number like any other, alone and beside others, without a warning."""
        import numpy as np

        from starter.numpy_backend import NumpyBackend
        rows = [[2e19, -3e19, 1e18, 0.0], [3e38, 3e38, -3e38, 1e30], [1.0, 2.0, 3.0, 4.0], [nan, 1.0, 1.0, 1.0]]
        exact = [[x / sqrt(fsum(y * y for y in row) / 4 + 1e-5) * 2.0 for x in row] for row in rows]
        for backend in (load_backend("numpy"), NumpyBackend()):
            with warnings.catch_warnings(), backend.step():
                warnings.simplefilter("error")
                gain = np.full(4, 2.0, np.float32)
                together = backend.norm(np.array(rows, np.float32), gain, 1e-5)
                for row, wanted, found in zip(rows, exact, together):
                    alone = backend.norm(np.array([row], np.float32), gain, 1e-5)
                    for normed in (alone[0], found):
                        np.testing.assert_allclose(normed, wanted, rtol=2e-6)
                        self.assertEqual(normed.dtype, np.float32)

    def test_the_callers_numbers_may_change_afterwards(self) -> None:
        """F070: also those of a large matrix; every backend has its own."""
        for name in ("reference", "cpu", "numpy"):
            for rows in (4, 9000):
                if rows * 64 >= 2**18 or name == "numpy":
                    values = array("f", [1.0]) * (rows * 64)
                    backend = load_backend(name)
                    matrix = backend.matrix(Tensor((rows, 64), values), None)
                    gain = array("f", values[:64])
                    vector = backend.vector(Tensor((64,), gain))
                    gain[:] = array("f", [0.0]) * 64
                    values[:] = array("f", [0.0]) * len(values)
                    self.assertEqual({x for row in backend.rows(matrix)[:3] for x in row}, {1.0}, (name, rows))
                    self.assertEqual(backend.to_lists([vector]), [[1.0] * 64])

    def test_looking_up_tokens_copies_no_table(self) -> None:
        """That of a real model has 100 MB and more, and every step looks tokens up."""
        backend = load_backend("numpy")
        for rows in (1000, 9000):  # a small table lies one way in memory, a large one the other
            with self.subTest(rows=rows):
                table = backend.matrix(Tensor((rows, 64), array("f", range(rows * 64))), None)
                tracemalloc.start()
                try:
                    found = backend.embed(table, [3, rows - 1])
                    self.assertLess(tracemalloc.get_traced_memory()[1], 50_000)
                finally:
                    tracemalloc.stop()
                self.assertEqual([row[0] for row in found.tolist()], [3 * 64, (rows - 1) * 64])

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
                  for name in ("reference", "numpy")]
        logits = [model.forward_uncached([1, 2, 3, 4]) for model in models]
        self.assertLess(max(abs(a - b) for a, b in zip(*logits)), 1e-4)
        quantized, plain = (Model(config, weights, load_backend("numpy"), q).forward_uncached([1, 2, 3, 4])
                            for q in (QuantizationConfig(bits=4, group_size=4), None))
        self.assertNotEqual(quantized, plain)


@needs("numpy", "numpy")
class Int8PagesTest(unittest.TestCase):
    """The format of ``backends/int8_pages.py``; what it promises is tested there."""

    def setUp(self) -> None:
        import numpy as np

        from starter.backends.numpy.int8_pages import NumpyInt8KVStore
        self.np, self.made = np, NumpyInt8KVStore

    def check_same_bytes(self, plain: Int8KVStore, fast: Any) -> None:
        for name in ("key_codes", "key_lows", "key_scales", "value_codes", "value_scales"):
            self.assertEqual(bytes(memoryview(getattr(plain, name))), getattr(fast, name).tobytes(), name)
        self.assertEqual({page: bytes(memoryview(tail)) for page, tail in plain.tails.items()},
                         {page: tail.tobytes() for page, tail in fast.tails.items()})
        self.assertEqual((plain.width, plain.page_bytes, plain.tail_bytes, plain.peak_tails),
                         (fast.width, fast.page_bytes, fast.tail_bytes, fast.peak_tails))

    def test_it_has_every_operation_of_a_store(self) -> None:
        check_operations(self, self.made, KVStore)

    def test_the_same_bytes_as_the_plain_store_and_the_same_attention(self) -> None:
        """Random batches over pages that are reused, copied and settled, of numbers of every size."""
        draws = (lambda rng: rng.gauss(0, 1), lambda rng: 50 + rng.random(), lambda rng: rng.gauss(0, 1e-39),
                 lambda rng: 0.0, lambda rng: rng.choice((1e-3, 30.0)))
        plain_backend, fast_backend = load_backend("reference"), load_backend("numpy")
        for seed in range(10):
            with self.subTest(seed=seed):
                rng = random.Random(seed)
                layers, heads, group, width, size = (rng.randint(1, 3) for _ in range(5))
                plain, fast = (made(layers, heads, width, 8, size) for made in (Int8KVStore, self.made))
                lengths = [0, 0]
                for _ in range(12):
                    i, layer_draws = rng.randrange(2), [rng.choice(draws) for _ in range(heads * width)]
                    start, count = lengths[i], rng.randint(1, 2 * size)
                    if start + count > 4 * size:
                        lengths[i] = 0
                        continue
                    batch = Batch.of([Piece([0] * count, start, range(4 * i, 4 * i + 4), False)], size)
                    for layer in range(layers):
                        k, v = (self.np.array([[draw(rng) for draw in layer_draws] for _ in range(count)],
                                              dtype=self.np.float32) for _ in range(2))
                        q = self.np.array([[rng.gauss(0, 0.1) for _ in range(heads * group * width)]
                                           for _ in range(count)], dtype=self.np.float32)
                        wanted = plain_backend.attend(q.tolist(), k.tolist(), v.tolist(), layer, plain, batch)
                        got = fast_backend.attend(q, k, v, layer, fast, batch)
                        self.assertLess(abs(got - wanted).max(), 1e-4)
                    lengths[i] = start + count
                    for store in (plain, fast):
                        for page in range(4 * i, 4 * i + lengths[i] // size):
                            store.drop_tail(page)
                    self.check_same_bytes(plain, fast)
                source, target = rng.sample(range(8), 2)
                for store in (plain, fast):
                    store.copy_page(source, target)
                    store.write(3, size - 1, *[[0.5 * c for c in range(store.width)]] * 2)
                self.check_same_bytes(plain, fast)
                for slot in range(8 * size):
                    for mine, theirs in zip(plain.read(*divmod(slot, size)), fast.read(*divmod(slot, size))):
                        for a, b in zip(mine, theirs, strict=True):
                            self.assertAlmostEqual(a, b, delta=1e-5)

    def test_what_is_no_number_is_not_lost(self) -> None:
        """A channel of keys, or a token's values, that hold NaN come back as NaN; their neighbours as they were."""
        store = self.made(1, 1, 2, 1, 2)
        store.write(0, 0, [1.0, 5.0], [2.0, 2.0])
        store.write(0, 1, [float("inf"), 5.0], [float("nan"), 2.0])
        store.drop_tail(0)
        tokens = [[[number == number for number in row] for row in store.read(0, offset)] for offset in (0, 1)]
        self.assertEqual(tokens, [[[False, True], [True, True]], [[False, True], [False, False]]])

    def test_garbage_in_free_pages_reaches_no_output(self) -> None:
        config = random_config(random.Random(1))
        model = Model(config, seeded_weights(config, 1), load_backend("numpy"))
        rows = []
        for dirty in (False, True):
            store: Any = model.new_store(4, 4, "int8")
            if dirty:
                for numbers in (store.key_lows, store.key_scales, store.value_scales):
                    numbers[:] = float("nan")
                store.key_codes[:], store.value_codes[:] = 255, -127
                store._tail(3)[:] = float("nan")
            piece = Piece([1, 2, 0, 1, 2, 0], 0, (3, 2), wants_logits=True)
            rows.append(model.forward(Batch.of([piece], 4), store))
        self.assertEqual(*rows)

    def test_a_prompt_whole_and_token_by_token(self) -> None:
        """Where all codes are the same, logits within 1e-4. BLAS rounds a row among others differently, so now and then
        a number between two codes gets the other one, next to it: then within 1e-2, and seldom."""
        config = ModelConfig(vocab_size=20, width=16, layers=3, heads=4, kv_heads=2, ffn_width=24, max_context=64,
                             tied_output=False)
        other = 0
        for seed in range(150):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                model = Model(config, seeded_weights(config, seed % 7), load_backend("numpy"))
                size, tokens = dice.choice((4, 8, 14)), [dice.randrange(20) for _ in range(dice.randint(15, 60))]
                pages = range(-(-len(tokens) // size))
                results = []
                for chunk in (1, len(tokens)):
                    store: Any = model.new_store(len(pages), size, "int8")
                    for start in range(0, len(tokens), chunk):
                        end = start + chunk
                        rows = model.forward(Batch.of([Piece(tokens[start:end], start, pages, end == len(tokens))],
                                                      size), store)
                        for page in range(start // size, end // size):
                            store.drop_tail(page)  # it is full
                    results.append((list(rows[0]), store))
                (one, stepwise), (all_at_once, whole) = results
                apart = {name: abs(getattr(stepwise, name).astype(int) - getattr(whole, name).astype(int))
                         for name in ("key_codes", "value_codes")}
                same = not any(codes.any() for codes in apart.values())
                other += not same
                for codes in apart.values():
                    self.assertLessEqual(codes[:, 0].max(), 1)  # in the first layer; later ones compute with it
                self.assertLess(max(abs(a - b) for a, b in zip(one, all_at_once)), 1e-4 if same else 1e-2)
                self.assertLess(max(one) - one[all_at_once.index(max(all_at_once))], 1e-4 if same else 1e-2)
        self.assertLess(other, 15)

    def test_served_from_int8_pages(self) -> None:
        """Nearly the tokens of float pages: a long output may part, most do not."""
        scenario = load_scenario(FIXTURE)
        assert scenario.golden
        with InferenceEngine.from_scenario(scenario, "numpy", kv_quantization="int8", num_pages=40) as engine:
            tokens = tokens_of([event for played in play(engine, scenario) for event in played.events])
            self.assertIsInstance(engine.kv.store, self.made)
        equal = sum(tokens[name] == list(golden) for name, golden in scenario.golden.tokens.items())
        self.assertGreaterEqual(equal, len(tokens) // 2)


if __name__ == "__main__":
    unittest.main()
