"""Packed matrices on NumPy: the numbers of ``quantization.py``, a tile at a time (extra ``numpy``)."""

from __future__ import annotations

import random
import unittest
from itertools import product
from math import fsum
from unittest import mock

from starter.backend import load_backend
from starter.base.model_config import QuantizationConfig
from starter.base.weights import seeded_weights
from starter.model import Model
from starter.quantization import HEADER_BYTES, QuantizedTensor, dequantize, quantize
from tests.extras import needs
from tests.models import random_config

FORMATS = [QuantizationConfig(bits, group, symmetric)
           for bits, group, symmetric in product((8, 4), (1, 3, 4, None), (True, False))]


def random_tensor(dice: random.Random, config: QuantizationConfig, shift: float = 0.0) -> QuantizedTensor:
    rows, columns = dice.randint(1, 9), dice.randint(1, 11)
    return quantize([[shift + dice.gauss(0, 1) for _ in range(columns)] for _ in range(rows)], config)


@needs("numpy", "numpy")
class PackedMatrixTest(unittest.TestCase):
    def setUp(self) -> None:
        import numpy as np

        from starter.backends.numpy import matrices as numpy_matrices
        self.np, self.module, self.made = np, numpy_matrices, numpy_matrices.PackedMatrix

    def test_rows_are_the_dequantized_ones(self) -> None:
        """Every format, with odd columns and a last group that is shorter; also far from zero."""
        for seed, config in enumerate(FORMATS):
            with self.subTest(seed=seed, config=config):
                dice = random.Random(seed)
                for shift in (0.0, 1000.0):
                    tensor = random_tensor(dice, config, shift)
                    wanted = dequantize(tensor)
                    packed = self.made(tensor)
                    few = [dice.randrange(len(wanted)) for _ in range(4)]
                    for got, rows in ((packed.rows(slice(None)), wanted), (packed.rows(few), [wanted[r] for r in few])):
                        self.assertEqual((got.dtype, got.flags.c_contiguous), (self.np.float32, True))
                        for mine, row in zip(got.tolist(), rows, strict=True):
                            for a, b in zip(mine, row, strict=True):
                                self.assertAlmostEqual(a, b, delta=1e-6 * (1 + abs(b)))

    def test_rows_keep_their_numbers_when_the_next_tile_is_made(self) -> None:
        packed = self.made(quantize([[1.0, -1.0], [0.5, 0.25]], QuantizationConfig(8, None)))
        first = packed.rows([0])
        as_it_was = first.tolist()
        packed.rows([1])
        self.assertEqual(first.tolist(), as_it_was)

    def test_products_in_tiles_of_any_size(self) -> None:
        """And with few rows of x or many, which are multiplied in two ways."""
        for seed, (config, tile, few) in enumerate(product(FORMATS, (1, 25, 10_000), (0, 2))):
            with (self.subTest(seed=seed, config=config, tile=tile, few=few),
                  mock.patch.multiple(self.module, TILE=tile, FEW=few)):
                dice = random.Random(seed)
                tensor = random_tensor(dice, config)
                x = [[dice.gauss(0, 1) for _ in range(tensor.shape[1])] for _ in range(dice.randint(1, 3))]
                got = self.made(tensor).times(self.np.array(x, dtype=self.np.float32))
                self.assertEqual((got.dtype, got.shape), (self.np.float32, (len(x), tensor.shape[0])))
                rows = dequantize(tensor)
                for mine, vector in zip(got.tolist(), x):
                    for value, row in zip(mine, rows, strict=True):
                        self.assertAlmostEqual(value, fsum(a * b for a, b in zip(row, vector)), delta=2e-5)

    def test_a_group_of_zeros_leaves_no_trace_in_the_others_sums(self) -> None:
        """Its scale is 1 and its zero point 8: large, beside what the others hold."""
        dice = random.Random(3)
        row = [0.0] * 1000 + [dice.gauss(0, 1e-3) for _ in range(10)] + [0.0] * 7
        x = [dice.uniform(0.5, 3.5) for _ in row]
        for config in (QuantizationConfig(4, 10), QuantizationConfig(4, 10, symmetric=False), QuantizationConfig(4, 3)):
            tensor = quantize([row, [0.0] * len(row)], config)
            got = self.made(tensor).times(self.np.array([x], dtype=self.np.float32))[0]
            self.assertAlmostEqual(got[0], fsum(a * b for a, b in zip(dequantize(tensor)[0], x)), delta=1e-8)
            self.assertEqual(got[1], 0.0)

    def test_groups_that_need_float64(self) -> None:
        """Zero points beyond int16 make a tensor keep float64 scales; they lose nothing here either."""
        tensor = quantize([[1e6 + 1e-3 * c for c in range(6)], [0.5] * 6], QuantizationConfig(8, 3, symmetric=False))
        self.assertEqual(tensor.scales.typecode, "d")
        x = [[1.0, -1.0, 1.0, -1.0, 1.0, -1.0]]
        got = self.made(tensor).times(self.np.array(x, dtype=self.np.float32))
        self.assertAlmostEqual(got[0, 0], fsum(a * b for a, b in zip(dequantize(tensor)[0], x[0])), delta=1e-6)

    def test_it_is_as_small_as_the_tensor(self) -> None:
        for config in (*FORMATS, QuantizationConfig(8, 32), QuantizationConfig(4, 32)):
            with self.subTest(config=config):
                tensor = quantize([[0.1 * r + c for c in range(64)] for r in range(8)], config)
                spare = 2 if config.bits == 4 and config.symmetric else 0  # the one zero point of all
                self.assertEqual(self.made(tensor).nbytes, tensor.nbytes - HEADER_BYTES + spare)


@needs("numpy", "numpy")
class QuantizedModelTest(unittest.TestCase):
    def test_logits_are_those_of_the_plain_backend(self) -> None:
        """Tied output or not: the embedding is looked up and multiplied with from the same codes."""
        for seed, config in enumerate((QuantizationConfig(8, 4), QuantizationConfig(4, 4), QuantizationConfig(8, None),
                                       QuantizationConfig(4, 3, symmetric=False))):
            with self.subTest(seed=seed, config=config):
                shape = random_config(random.Random(seed), tied=seed % 2 == 0)
                weights = seeded_weights(shape, seed)
                plain, fast = (Model(shape, weights, load_backend(name), config) for name in ("reference", "numpy"))
                tokens = [token % shape.vocab_size for token in (1, 2, 0, 1)]
                for a, b in zip(plain.forward_uncached(tokens), fast.forward_uncached(tokens), strict=True):
                    self.assertAlmostEqual(a, b, delta=1e-4)
                self.assertLess(fast.weight_bytes, Model(shape, weights, load_backend("numpy")).weight_bytes)


if __name__ == "__main__":
    unittest.main()
