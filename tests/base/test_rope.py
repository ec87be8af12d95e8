"""Rotary frequencies: by hand, and llama3's by wavelengths, as its authors wrote them."""

from __future__ import annotations

import unittest
from math import pi

from starter.base.model_config import MODEL_SHAPE
from starter.base.rope import ROPE_SCALING_SHAPE, FactorScaling, LinearScaling, Llama3Scaling, rotary_frequencies
from starter.errors import SchemaError
from tests.base.test_model_config import SIZES


def by_wavelength(frequency: float, factor: float, low: float, high: float, original: float) -> float:
    """Llama 3.1's own code (models/llama3/reference_impl/model.py), one frequency."""
    wavelength = 2 * pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


class Frequencies(unittest.TestCase):
    def test_by_hand(self) -> None:
        plain = rotary_frequencies(8, 10_000.0)
        for got, wanted in zip(plain, (1.0, 0.1, 0.01, 0.001), strict=True):
            self.assertAlmostEqual(got, wanted, places=15)
        self.assertEqual(rotary_frequencies(8, 10_000.0, LinearScaling(4.0)), tuple(f / 4 for f in plain))
        self.assertEqual(rotary_frequencies(8, 10_000.0, FactorScaling((1.0, 2.0, 4.0, 8.0))),
                         (plain[0], plain[1] / 2, plain[2] / 4, plain[3] / 8))

    def test_llama3(self) -> None:
        """Llama 3.1's numbers: some pairs keep their frequency, some have an eighth of it, some are in between."""
        plain = rotary_frequencies(128, 500_000.0)
        scaled = rotary_frequencies(128, 500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8_192.0))
        for old, new in zip(plain, scaled, strict=True):
            self.assertAlmostEqual(new / by_wavelength(old, 8.0, 1.0, 4.0, 8_192.0), 1.0, places=12)
        ratios = [new / old for old, new in zip(plain, scaled)]
        self.assertEqual((ratios[0], ratios[-1]), (1.0, 0.125))
        self.assertGreater(sum(0.13 < ratio < 0.99 for ratio in ratios), 3)


class Shape(unittest.TestCase):
    def test_there_and_back(self) -> None:
        for scaling in (LinearScaling(2.0), Llama3Scaling(8.0, 1.0, 4.0, 64.0), FactorScaling((1.0, 2.5))):
            self.assertEqual(ROPE_SCALING_SHAPE.parse(ROPE_SCALING_SHAPE.dump(scaling), ""), scaling)

    def test_what_is_refused(self) -> None:
        llama3 = {"kind": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_context": 64}
        for scaling, path in (
            ({"kind": "yarn", "factor": 4}, "/kind"), ({"kind": "linear"}, "/factor"),
            ({"kind": "linear", "factor": 0}, "/factor"), ({**llama3, "high_freq_factor": 1}, "/high_freq_factor"),
            ({"kind": "factors", "factors": []}, "/factors"), ({"kind": "factors", "factors": [0]}, "/factors/0"),
            ({"kind": "factors", "factors": [1, 1]}, "/factors"),  # heads of the model below have one pair
        ):
            with self.subTest(scaling=scaling), self.assertRaises(SchemaError) as caught:
                MODEL_SHAPE.parse({**SIZES, "rope_scaling": scaling}, "")
            self.assertEqual(caught.exception.path, "/rope_scaling" + path)


if __name__ == "__main__":
    unittest.main()
