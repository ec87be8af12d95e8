"""The plain NumPy backend computes what the reference computes (extra ``numpy``)."""

from __future__ import annotations

import random
import unittest
from array import array
from math import inf, nan
from pathlib import Path

from starter.backend import Batch, Piece, ReferenceBackend
from starter.base.weights import Tensor, seeded_weights
from starter.command.play import play, tokens_of
from starter.engine import InferenceEngine, load_scenario_model
from starter.errors import BackendError
from starter.model import Model
from starter.quantization import quantize
from starter.schema import QuantizationConfig, load_scenario
from tests.extras import needs
from tests.models import random_config, split_prompts
from tests.paths import FIXTURE
from tests.wings import needs_wing

FORMS = (None, QuantizationConfig(bits=8), QuantizationConfig(bits=8, group_size=3, symmetric=False),
         QuantizationConfig(bits=4, group_size=4), QuantizationConfig(bits=4, group_size=None, symmetric=False))


@needs("numpy", "numpy")
class PlainNumpyBackendTest(unittest.TestCase):
    def setUp(self) -> None:
        from starter.numpy_backend import NumpyBackend
        self.backend = NumpyBackend()

    def test_logits_are_those_of_the_reference(self) -> None:
        """A prefill from 0, a chunk in the middle and a decode in one batch, on permuted pages: within 1e-4; with float
        weights, and with int8 and int4 codes, symmetric or not."""
        for seed in range(20):
            for form in FORMS:
                with self.subTest(seed=seed, form=form):
                    rng = random.Random(seed)
                    config, page_size = random_config(rng, plain=seed % 2 == 0), rng.randint(1, 5)
                    weights = seeded_weights(config, seed)
                    early, late = split_prompts(rng, config, page_size)
                    results = []
                    for backend in (ReferenceBackend(), self.backend):
                        model = Model(config, weights, backend, form)
                        store = model.new_store(60, page_size)
                        self.assertEqual(model.forward(Batch.of(early, page_size), store), [])
                        results.append(model.forward(Batch.of(late, page_size), store))
                    for plain, fast in zip(*results, strict=True):
                        self.assertLess(max(abs(a - b) for a, b in zip(plain, fast, strict=True)), 1e-4)

    def test_the_fixture_gives_the_golden_tokens(self) -> None:
        self.check_golden_tokens(FIXTURE)

    @needs_wing("checkpoints")
    def test_the_quatrains_give_the_golden_tokens(self) -> None:
        self.check_golden_tokens(FIXTURE.with_name("quatrains.json"))

    def check_golden_tokens(self, path: Path) -> None:
        scenario = load_scenario(path)
        assert scenario.golden
        with InferenceEngine(load_scenario_model(scenario, self.backend), scenario.engine) as engine:
            tokens = tokens_of([event for played in play(engine, scenario) for event in played.events])
        for request_id, golden in scenario.golden.tokens.items():
            with self.subTest(path=path.name, request_id=request_id):
                got = tokens[request_id]
                self.assertEqual(got, list(golden)[:len(got)] if request_id == "cancelled" else list(golden))

    def test_quantized_matrices_are_the_numbers_of_their_codes(self) -> None:
        """To the last bit of a float32, and with bytes as they are stored; numbers of every size, too."""
        dice = random.Random(1)
        for scale in (1.0, 1e-30, 1e30):
            rows = [[dice.uniform(-scale, 2 * scale) for _ in range(7)] for _ in range(5)]
            for form in FORMS[1:]:
                with self.subTest(scale=scale, form=form):
                    codes = quantize(rows, form)
                    matrix = self.backend.matrix(codes, None)
                    self.assertEqual(self.backend.matrix_bytes(matrix), codes.nbytes)
                    for got, wanted in zip(self.backend.rows(matrix), codes.rows(), strict=True):
                        for a, b in zip(got, wanted, strict=True):
                            self.assertAlmostEqual(a, b, delta=2e-6 * scale)
                    picked = self.backend.to_lists(self.backend.embed(matrix, [4, 0, 4]))
                    self.assertEqual(picked, [self.backend.rows(matrix)[r] for r in (4, 0, 4)])

    def test_float_matrices(self) -> None:
        tensor = Tensor((2, 3), array("f", [1, 2, 3, 4, 5, 6]))
        matrix = self.backend.matrix(tensor, None)
        self.assertEqual(self.backend.rows(matrix), tensor.rows())
        self.assertEqual((self.backend.matrix_bytes(matrix), self.backend.working_bytes(matrix)), (24, 0))

    def test_int8_pages_are_refused(self) -> None:
        config = random_config(random.Random(1))
        model = Model(config, seeded_weights(config, 1), self.backend)
        says = "^the plain NumPy backend keeps pages of floats only, and int8 pages need the package starter.backends"
        with self.assertRaisesRegex(BackendError, says):
            model.new_store(4, 4, "int8")

    def test_swiglu_of_extremes(self) -> None:
        """As the reference, without an overflow (a warning is an error here) and without losing what is no number."""
        import numpy as np
        gate = [[-inf, -1e30, -800.0, -90.0, -1.0, -0.0, 0.5, 90.0, 1e30, nan]]
        up = [[1.0] * 10]
        wanted, = ReferenceBackend().swiglu(gate[:1], up)
        with np.errstate(over="raise"):
            got, = self.backend.swiglu(np.array(gate, np.float32)[:, 1:], np.array(up, np.float32)[:, 1:]).tolist()
        for a, b in zip(got[:-1], wanted[1:-1]):
            self.assertAlmostEqual(a, b, delta=1e-6 * max(1.0, abs(b)))
        self.assertNotEqual(got[-1], got[-1])

    def test_nan_in_free_pages_reaches_no_output(self) -> None:
        config = random_config(random.Random(1))
        model = Model(config, seeded_weights(config, 1), self.backend)
        piece = Piece([1, 2, 3], 0, (2,), wants_logits=True)
        clean, dirty = model.new_store(4, 4), model.new_store(4, 4)
        dirty.keys[:], dirty.values[:] = nan, nan  # type: ignore[attr-defined]
        self.assertEqual(model.forward(Batch.of([piece], 4), clean), model.forward(Batch.of([piece], 4), dirty))

    def test_pages_are_read_back_and_copied(self) -> None:
        config = random_config(random.Random(2))
        model = Model(config, seeded_weights(config, 2), self.backend)
        store, other = model.new_store(3, 2), model.new_store(2, 2, host=True)
        key, value = [float(i) for i in range(store.width)], [0.5 * i for i in range(store.width)]
        store.write(0, 1, key, value)
        store.copy_page(0, 2)
        other.copy_page(2, 1, store)
        store.write(0, 1, value, key)
        self.assertEqual([store.read(2, 1), other.read(1, 1), store.read(0, 1)],
                         [(key, value), (key, value), (value, key)])
        self.assertEqual(store.page_bytes, 2 * 4 * 2 * store.width)


if __name__ == "__main__":
    unittest.main()
