"""Every backend beside the reference where numbers are very large or small, and after the caller has reused its arrays.

The reference computes in doubles, which do not overflow here; its numbers are the right values. NumPy warns of an
overflow once a place, so warnings are errors in all of these tests.
"""

from __future__ import annotations

import random
import unittest
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite, sqrt
from typing import Any

from starter import InferenceEngine, load_backend
from starter.backend import Backend, Batch, Piece
from starter.base.tokenizer import CharacterTokenizer, CharacterVocabulary
from starter.base.weights import Tensor, seeded_weights
from starter.errors import BackendError
from starter.model import Loaded, Model
from starter.quantization import quantize
from starter.schema import EngineSettings, ModelConfig, QuantizationConfig
from tests.extras import needs

CONFIG = ModelConfig(vocab_size=40, width=32, layers=3, heads=4, kv_heads=2, ffn_width=48, max_context=64,
                     tied_output=False)

SQRT_WIDTH = sqrt(CONFIG.width)  # over the root mean square of the embeddings drawn


def scaled(factors: Mapping[str, float], config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    """Weights of seed 5; those whose names hold one of these words times its factor."""
    weights = seeded_weights(config, 5)
    for word, factor in factors.items():
        for name, tensor in weights.items():
            if word in name:
                weights[name] = Tensor(tensor.shape, array("f", [factor * value for value in tensor.values]))
    return weights


def logits(model: Model, prompt: Sequence[int], chunk: int = 64, kv_quantization: str | None = None) -> list[float]:
    """After the prompt, in chunks, on pages of 8."""
    pages = range(-(-len(prompt) // 8))
    store = model.new_store(len(pages), 8, kv_quantization)
    for start in range(0, len(prompt), chunk):
        piece = Piece(prompt[start:start + chunk], start, pages, start + chunk >= len(prompt))
        rows = [list(row) for row in model.forward(Batch.of([piece], 8), store)]
    return rows[0]


class Extremes:
    """Tests for one backend; subclasses name it."""

    tolerance = 1e-4  # of the range of the logits

    def backend(self) -> Backend:
        raise NotImplementedError

    def setUp(self) -> None:
        catcher = warnings.catch_warnings()
        catcher.__enter__()
        self.addCleanup(catcher.__exit__, None, None, None)  # type: ignore[attr-defined]
        warnings.simplefilter("error", RuntimeWarning)

    def check(self: Any, factors: Mapping[str, float], config: ModelConfig = CONFIG,
              kv_quantization: str | None = None) -> None:
        """Logits as of the reference, for a prompt whole and token by token."""
        weights, dice = scaled(factors, config), random.Random(1)
        right = Model(config, weights, load_backend("reference"))
        model = Model(config, weights, self.backend())
        for length in (1, 2, 20):
            prompt = [dice.randrange(config.vocab_size) for _ in range(length)]
            wanted = logits(right, prompt, kv_quantization=kv_quantization)
            tolerance = max(self.tolerance, 1e-2) if kv_quantization else self.tolerance  # a code may be the next one
            allowed = tolerance * (max(wanted) - min(wanted))
            for chunk in (64, 1):
                got = logits(model, prompt, chunk, kv_quantization)
                self.assertLess(max(abs(a - b) for a, b in zip(wanted, got)), allowed, (factors, length, chunk))

    def test_hidden_states_whose_squares_are_beyond_float32(self) -> None:
        for factors in ({"embed": 1e18}, {"embed": 1e20}, {"embed": 1e37}, {"down_proj": 1e19}, {"o_proj": 1e30},
                        {"v_proj": 1e30}):
            for qk_norm in (False, True):
                self.check(factors, replace(CONFIG, qk_norm=qk_norm))
        for factors in ({"k_proj": 1e20}, {"q_proj": 1e37}):  # the heads' own norms
            self.check(factors, replace(CONFIG, qk_norm=True))

    def test_what_cannot_be_held_ends_its_request_alone(self: Any) -> None:
        """Token 7 alone has a number at 0, which is all that gate and up look at, so that their product is 1e75."""
        weights = scaled({})
        for name, tensor in weights.items():
            width, values = CONFIG.width, tensor.values
            if "embed" in name:
                values[::width] = array("f", [10.0 if token == 7 else 0.0 for token in range(CONFIG.vocab_size)])
            if "o_proj" in name:
                values[:width] = array("f", bytes(4 * width))
            if "gate_proj" in name or "up_proj" in name:
                looks = array("f", [3e37, *[0.0] * (width - 1)])
                values[:] = looks * CONFIG.ffn_width
        self.check_isolated(weights)

    def check_isolated(self: Any, weights: dict[str, Tensor]) -> None:
        tokenizer = CharacterTokenizer(CharacterVocabulary("".join(map(chr, range(97, 137)))))
        ends = []
        for prompts in ([[1, 2, 3]], [[7], [1, 2, 3]]):
            loaded = Loaded(Model(CONFIG, weights, self.backend()), tokenizer, {})
            with InferenceEngine(loaded, EngineSettings(num_pages=16, page_size=8)) as engine:
                names = [engine.submit(prompt, 1) for prompt in prompts]
                ends.append([list(engine.stream(name))[-1] for name in names])
        self.assertEqual(ends[1][1].token, ends[0][0].token)
        self.check_end(ends[1][0])

    def check_end(self: Any, event: Any) -> None:
        self.assertEqual(event.finish_reason, "error")
        self.assertIn("hold NaN or infinity", event.error)

    def test_small_embeddings(self: Any) -> None:
        """Beside norm_eps, so that normed hidden states are short; and keys of int8, which find their own units."""
        for rms in (1e-3, 1e-4, 2.5e-5):
            self.check({"embed": rms * SQRT_WIDTH})
        for rms in (1e-4, 2.5e-6, 2.5e-7, 1e-20):
            self.check({"embed": rms * SQRT_WIDTH}, kv_quantization=self.int8)

    int8: str | None = "int8"

    def test_nothing_of_the_caller_is_kept(self: Any) -> None:
        """Its arrays are overwritten after loading: floats of any size, and codes with their scales."""
        def rows(backend: Backend, matrix: Any) -> list[list[float]]:
            return backend.rows(matrix) + backend.to_lists(backend.embed(matrix, [0, 1]))

        for shape in ((8, 4), (2**10, 2**8)):
            count = shape[0] * shape[1]
            tensor = Tensor(shape, array("f", [i % 7 - 3.0 for i in range(count)]))
            backend = self.backend()
            matrix, vector = backend.matrix(tensor, None), backend.vector(Tensor((count,), tensor.values))
            before, numbers = rows(backend, matrix), backend.to_lists([vector])
            tensor.values[:] = array("f", bytes(4 * count))
            self.assertEqual((rows(backend, matrix), backend.to_lists([vector])), (before, numbers))
            self.assertAlmostEqual(max(map(max, before)), 3.0, delta=1e-3)
        for form in (QuantizationConfig(8), QuantizationConfig(8, 2, False), QuantizationConfig(4, 2, False)):
            made = quantize([[1.0, -2.0, 3.0, 0.5], [4.0, 3.0, -1.0, 2.0]], form)
            codes = replace(made, packed=bytearray(made.packed))  # type: ignore[arg-type]
            backend = self.backend()
            matrix = backend.matrix(codes, None)
            before = rows(backend, matrix)
            codes.scales[:] = array(codes.scales.typecode, [9.0] * len(codes.scales))
            codes.zero_points[:] = array(codes.zero_points.typecode, [0] * len(codes.zero_points))
            codes.packed[:] = bytes(len(codes.packed))  # type: ignore[index]
            self.assertEqual(rows(backend, matrix), before)


class ReferenceTest(Extremes, unittest.TestCase):
    def backend(self) -> Backend:
        return load_backend("reference")

    def check_end(self, event: Any) -> None:
        """In doubles it can be held."""
        self.assertEqual(event.finish_reason, "length")


class LanesTest(ReferenceTest):
    tolerance = 1e-2  # weights of 14 bits; of a fixture's logits 2e-3 is usual

    def backend(self) -> Backend:
        return load_backend("cpu")

    def test_embeddings_too_small_for_the_lanes_are_refused(self) -> None:
        """They were rounded to 0, and other tokens came out without a word. Where o_proj and down_proj are small as
        well, later layers are no larger, and nothing is lost."""
        says = "this model's embeddings are so small beside norm_eps .* take kv_quantization='int8', or backend='refer"
        for rms in (2.5e-6, 2.5e-7, 1e-9, 1e-20):
            model = Model(CONFIG, scaled({"embed": rms * SQRT_WIDTH}), load_backend("cpu"))
            with self.assertRaisesRegex(BackendError, says):
                model.new_store(4, 8)
            self.check({"embed": rms * SQRT_WIDTH, "o_proj": 1e-4, "down_proj": 1e-4})

    def test_no_model_with_embeddings_of_a_usual_size_is_refused(self) -> None:
        for rms in (1e-2, 1.0, 1e3):
            for eps in (1e-6, 1e-5):
                model = Model(replace(CONFIG, norm_eps=eps), scaled({"embed": rms * SQRT_WIDTH}), load_backend("cpu"))
                self.assertEqual([bounds.share for bounds in model.kv_bounds], [1.0] * CONFIG.layers)


@needs("numpy", "numpy")
class NumpyTest(Extremes, unittest.TestCase):
    def backend(self) -> Backend:
        return load_backend("numpy")


@needs("numpy", "numpy")
class PlainNumpyTest(Extremes, unittest.TestCase):
    int8 = None  # it has no int8 pages

    def backend(self) -> Backend:
        from starter.numpy_backend import NumpyBackend
        return NumpyBackend()

    def test_norm_by_hand(self) -> None:
        """3, 4 times 1e30: the mean of the squares is 12.5e60."""
        import numpy as np

        from starter.backends.numpy.backend import FastNumpyBackend
        gain = np.array([1.0, 2.0], np.float32)
        for backend in (self.backend(), FastNumpyBackend()):
            for scale in (1e-20, 1.0, 1e18, 1e19, 1e30, 5e37):
                for rows in (1, 2):
                    x = np.array([[3.0, 4.0]] * rows, np.float32) * np.float32(scale)
                    with backend.step():
                        got = backend.norm(x, gain, 1e-30)
                    self.assertEqual(got.dtype, np.float32)
                    wanted = [[3 / sqrt(12.5 + 1e-30 / scale**2), 8 / sqrt(12.5 + 1e-30 / scale**2)]] * rows
                    np.testing.assert_allclose(got, wanted, rtol=3e-7)
            with backend.step():  # a row that is no number stays none, and leaves its neighbour alone
                for wrong in (float("inf"), float("nan")):
                    got = backend.norm(np.array([[wrong, 1.0], [3.0, 4.0]], np.float32), gain, 0.0).tolist()
                    self.assertFalse(isfinite(got[0][0]))
                    self.assertAlmostEqual(got[1][1], 8 / sqrt(12.5), places=6)


@needs("cuda", "warp")
class CudaTest(Extremes, unittest.TestCase):
    def backend(self) -> Backend:
        return load_backend("cuda", device="cpu")


if __name__ == "__main__":
    unittest.main()
