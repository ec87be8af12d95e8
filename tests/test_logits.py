"""Rows whose likeliest token is known: the sampler reads no number of them unless it needs to."""

from __future__ import annotations

import random
import unittest
import warnings
from array import array
from math import exp, fsum, inf, log, nan

from starter.sampling import Choice, Draws, Logits, choose_token, greedy
from starter.schema import SamplingParams
from tests.extras import needs
from tests.wings import needs_wing

NUMBERS = array("f", [0.5, 3.0, -1.0, 2.5])


class Untouchable:
    def tolist(self) -> list[float]:
        raise AssertionError("the numbers were read")


class LogitsTest(unittest.TestCase):
    def test_it_is_the_sequence_of_its_numbers(self) -> None:
        row = Logits(Choice(1, -0.5), NUMBERS)
        self.assertEqual((len(row), list(row), row), (4, [0.5, 3.0, -1.0, 2.5], [0.5, 3.0, -1.0, 2.5]))
        self.assertNotEqual(row, [0.5, 3.0, -1.0, 2.0])

    def test_greedy_sampling_reads_no_number(self) -> None:
        row = Logits(Choice(1, -0.5), Untouchable())
        self.assertEqual(greedy(row), Choice(1, -0.5))
        self.assertEqual(choose_token(row, SamplingParams(), Draws(SamplingParams(), "r", 0, 1)), Choice(1, -0.5))

    def test_what_needs_the_numbers_gets_them(self) -> None:
        """A best token that is wrong on purpose: whoever reads the numbers finds the right one."""
        wrong = Logits(Choice(0, 0.0), NUMBERS)
        for params in (SamplingParams(logprobs=2), SamplingParams(logit_bias={2: 0.5}), SamplingParams(min_tokens=1),
                       SamplingParams(repetition_penalty=1.1), SamplingParams(presence_penalty=0.1),
                       SamplingParams(frequency_penalty=0.1), SamplingParams(temperature=1e-9)):
            with self.subTest(params=params):
                self.assertEqual(choose_token(wrong, params, Draws(SamplingParams(), "r", 0, 1)).token, 1)


@needs("numpy", "numpy")
@needs_wing("backends/numpy")
class NumpyTest(unittest.TestCase):
    def setUp(self) -> None:
        import numpy as np

        from starter.backend import load_backend
        self.np, self.backend = np, load_backend("numpy")

    def rows(self, numbers: list[list[float]]) -> list[object]:
        return list(self.backend.logits(self.np.array(numbers, dtype=self.np.float32)))

    def test_best_and_logprob_against_the_formula(self) -> None:
        dice = random.Random(1)
        for vocabulary in (1, 2, 33, 3000):
            for spread in (0.1, 5.0, 1000.0):
                numbers = [[dice.gauss(0, spread) for _ in range(vocabulary)] for _ in range(3)]
                for row, found in zip(numbers, self.rows(numbers), strict=True):
                    assert isinstance(found, Logits)
                    highest = max(row)
                    self.assertEqual(found.greedy.token, row.index(highest))
                    self.assertAlmostEqual(found.greedy.logprob, -log(fsum(exp(x - highest) for x in row)), places=5)

    def test_of_equals_the_first(self) -> None:
        self.assertEqual([row.greedy.token for row in self.rows([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])  # type: ignore[attr-defined]
                          ], [1, 0])

    def test_what_has_no_likeliest_token_stays_a_list(self) -> None:
        """So that the sampler refuses it in its own words, and the row beside it is as it was."""
        for poison in (nan, inf):
            spoilt, good = self.rows([[0.0, poison, 1.0], [0.0, 2.0, 1.0]])
            self.assertIsInstance(spoilt, list)
            self.assertEqual(good.greedy.token, 1)  # type: ignore[attr-defined]

    def test_a_token_of_probability_0_disturbs_nobody(self) -> None:
        [row] = self.rows([[-inf, 0.0, 0.0]])
        self.assertAlmostEqual(row.greedy.logprob, -log(2), places=6)  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            [row] = self.rows([[-3e38, 3e38, 0.0]])  # their difference is no float32
        self.assertEqual(row.greedy, Choice(1, 0.0))  # type: ignore[attr-defined]


if __name__ == "__main__":
    unittest.main()
