"""A model of a useful size whose weights mean nothing: for speed alone. Drawn by NumPy, as quantized codes where asked.

    loaded = drawn_model(MIDDLE, backend, "int8")         never quantized, which would take minutes: drawn so
"""

from __future__ import annotations

from array import array
from math import prod
from typing import Any

import numpy as np

from starter.backend import Backend
from starter.base.tokenizer import CharacterTokenizer
from starter.base.weights import Tensor, tensor_shapes
from starter.model import Loaded, Model
from starter.quantization import QuantizedTensor
from starter.schema import CharacterVocabulary, ModelConfig

MIDDLE = ModelConfig(vocab_size=8_192, width=1_024, layers=8, heads=16, kv_heads=4, ffn_width=2_816, max_context=1_024)
LITTLE = ModelConfig(vocab_size=256, width=64, layers=2, heads=4, kv_heads=2, ffn_width=96, max_context=256)
GROUP = 32


def drawn_model(config: ModelConfig, backend: Backend, quantization: str | None) -> Loaded:
    """``quantization``: None, "int8" or "int4", of every matrix."""
    rng = np.random.default_rng(219)
    bits = {"int8": 8, "int4": 4}.get(quantization or "")
    weights: dict[str, Any] = {
        name: _codes(rng, shape, bits) if bits and len(shape) == 2 else _floats(rng, shape)
        for name, shape in tensor_shapes(config).items()}
    words = CharacterVocabulary("".join(chr(0x4E00 + i) for i in range(config.vocab_size)))
    return Loaded(Model(config, weights, backend), CharacterTokenizer(words), {})


def parameters(config: ModelConfig) -> int:
    """Numbers in the weights of a model."""
    return sum(map(prod, tensor_shapes(config).values()))


def _floats(rng: Any, shape: tuple[int, ...]) -> Tensor:
    scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.1
    numbers = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale) + np.float32(len(shape) == 1)
    return Tensor(shape, array("f", numbers.tobytes()))


def _codes(rng: Any, shape: tuple[int, ...], bits: int) -> QuantizedTensor:
    """Symmetric codes in groups of 32; the columns are a multiple of 32."""
    rows, columns = shape
    half = 1 << (bits - 1)
    codes = rng.integers(1 - half, half, shape, dtype=np.int8).view(np.uint8)
    packed = codes if bits == 8 else codes[:, 0::2] & 15 | codes[:, 1::2] << 4
    scale = np.float32(1.7 / half * columns ** -0.5)
    return QuantizedTensor((rows, columns), bits, GROUP, True, array("f", [scale]) * (rows * columns // GROUP),
                           array("h"), packed.tobytes())
