"""Sizes that fit together, sizes that do not, and ways to quantize."""

from __future__ import annotations

import unittest
from typing import Any

from starter.base.model_config import ModelConfig, QuantizationConfig
from starter.errors import QuantizationError, SchemaError

SIZES: dict[str, Any] = {"vocab_size": 5, "width": 8, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_width": 6,
                         "max_context": 9}


class ModelConfigTest(unittest.TestCase):
    def test_widths_follow(self) -> None:
        config = ModelConfig(**SIZES)
        self.assertEqual((config.head_width, config.q_width, config.kv_width), (2, 8, 4))
        config = ModelConfig(**{**SIZES, "width": 9, "head_dim": 6})  # heads need not share out the width
        self.assertEqual((config.head_width, config.q_width, config.kv_width), (6, 24, 12))

    def test_sizes_that_do_not_fit_together(self) -> None:
        for change, path in (({"width": 9}, "/width"), ({"kv_heads": 3}, "/kv_heads"), ({"heads": 8}, "/width"),
                             ({"head_dim": 3}, "/head_dim"), ({"bos_token": 5}, "/bos_token"),
                             ({"eos_tokens": (1, 5)}, "/eos_tokens")):
            with self.subTest(change=change), self.assertRaises(SchemaError) as caught:
                ModelConfig(**{**SIZES, **change})
            self.assertEqual(caught.exception.path, path)

    def test_quantization(self) -> None:
        wrong: dict[str, tuple[Any, ...]] = {
            "bits": (2, 16, True, "8", None, 8.0), "group_size": (0, -1, 1.5, True), "symmetric": (1, None),
            "method": ("gptq", None),
        }
        for name, values in wrong.items():
            for value in values:
                with self.subTest(name=name, value=value), self.assertRaises(QuantizationError):
                    QuantizationConfig(**{name: value})
        QuantizationConfig(4, None, False)


if __name__ == "__main__":
    unittest.main()
