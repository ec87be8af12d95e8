"""M1 · The weights of a model: their names and shapes, random ones from a seed, checks and a fingerprint.

Weights are a mapping of names to float32 tensors. The names are those that Hugging Face gives the tensors of a Llama:

    model.embed_tokens.weight                           [vocab, width]
    model.layers.<i>.input_layernorm.weight             [width]
    model.layers.<i>.self_attn.q_proj.weight            [q_width, width]
    model.layers.<i>.self_attn.{k,v}_proj.weight        [kv_width, width]
    model.layers.<i>.self_attn.{q,k,v}_proj.bias        [q_width or kv_width]   only with attention_bias
    model.layers.<i>.self_attn.{q,k}_norm.weight        [head_width]            only with qk_norm
    model.layers.<i>.self_attn.o_proj.weight            [width, q_width]
    model.layers.<i>.post_attention_layernorm.weight    [width]
    model.layers.<i>.mlp.{gate,up}_proj.weight          [ffn_width, width]
    model.layers.<i>.mlp.down_proj.weight               [width, ffn_width]
    model.norm.weight                                   [width]
    lm_head.weight                                      [vocab, width]          only without tied_output

A matrix is [out, in]: y = W x. The two numbers of a rotary pair are neighbours, (2i, 2i + 1) of each head, as in
RoFormer and llama2.c. Hugging Face stores q_proj and k_proj with the pairs as halves, (i, i + head_width / 2); the
reader of such a file reorders their rows, not the decoder.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, prod, sqrt
from typing import Any

from starter.base.model_config import ModelConfig
from starter.errors import SchemaError


@dataclass(frozen=True)
class Tensor:
    """A tensor of float32, row after row: element [r, c] of a matrix is values[r * columns + c]. SchemaError unless
    the shape fits the values."""

    shape: tuple[int, ...]
    values: array[float]

    def __post_init__(self) -> None:
        if self.values.typecode != "f":
            raise SchemaError(f"a tensor's values must be an array of type 'f', not {self.values.typecode!r}")
        if any(size < 0 for size in self.shape) or prod(self.shape) != len(self.values):
            raise SchemaError(f"the shape {list(self.shape)} does not describe {len(self.values)} values")

    def rows(self) -> list[list[float]]:
        """A matrix as a list of rows; SchemaError for any other tensor."""
        if len(self.shape) != 2:
            raise SchemaError(f"only a 2-D tensor has rows; this one has the shape {list(self.shape)}")
        rows, columns = self.shape
        return [self.values[r * columns:(r + 1) * columns].tolist() for r in range(rows)]

    def tolist(self) -> list[float]:
        """All values, flat."""
        return self.values.tolist()

    def fingerprint(self) -> bytes:
        """The bytes that distinguish two tensors of one shape."""
        return little_endian(self.values)


Weights = Mapping[str, Tensor]
StoredWeights = Mapping[str, Any]  # ``Tensor`` or, for a matrix of codes, ``quantization.QuantizedTensor``


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a model of this configuration."""
    width, ffn_width, q_width, kv_width = config.width, config.ffn_width, config.q_width, config.kv_width
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (q_width, width),
        "self_attn.k_proj.weight": (kv_width, width),
        "self_attn.v_proj.weight": (kv_width, width),
        "self_attn.o_proj.weight": (width, q_width),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (ffn_width, width),
        "mlp.up_proj.weight": (ffn_width, width),
        "mlp.down_proj.weight": (width, ffn_width),
    }
    if config.attention_bias:
        layer.update({f"self_attn.{part}_proj.bias": layer[f"self_attn.{part}_proj.weight"][:1] for part in "qkv"})
    if config.qk_norm:
        layer.update({f"self_attn.{part}_norm.weight": (config.head_width,) for part in "qk"})
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for i in range(config.layers):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (width,)
    if not config.tied_output:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


# --------------------------------------------------------------------------------------------------- drawn from a seed


def seeded_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Random weights, the same bits on every platform and Python version: O(parameters), about 0.1 us each.

    A matrix is uniform with variance 1 / columns, so that a normed vector keeps its scale through it; a gain is
    uniform in [0.75, 1.25), so that a decoder that leaves it out gives other results; a bias in [-0.25, 0.25). Each
    tensor has a generator of its own, seeded by the seed and its name: adding a layer changes none of the others.
    """
    return {name: _draw(name, shape, seed) for name, shape in tensor_shapes(config).items()}


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    # Only steps that are exact everywhere: SHA-256, the Mersenne Twister's random(), and IEEE 754's own operations
    # (+ * sqrt, rounding to float32). No gauss(): its log() and cos() differ in the last bit between C libraries.
    uniform = random.Random(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest(), "big")).random
    centre, reach = (0.0, sqrt(3.0 / shape[1])) if len(shape) == 2 else (0.0 if name.endswith("bias") else 1.0, 0.25)
    low, span = centre - reach, 2.0 * reach
    return Tensor(shape, array("f", [low + span * uniform() for _ in range(prod(shape))]))


# --------------------------------------------------------------------------------------------- checks and fingerprints


def check_weights(config: ModelConfig, weights: StoredWeights) -> None:
    """SchemaError unless ``weights`` are exactly the tensors that the model needs, all finite. O(parameters)."""
    needed = tensor_shapes(config)
    if missing := [name for name in needed if name not in weights]:
        raise SchemaError(f"these tensors are missing: {_listed(missing)}", "/weights")
    if config.tied_output and "lm_head.weight" in weights:
        raise SchemaError("lm_head.weight is given, but with tied_output the model uses model.embed_tokens.weight in "
                          "its place; leave the tensor out, or set tied_output to false", "/weights")
    if unexpected := [name for name in weights if name not in needed]:
        raise SchemaError(f"these tensors belong to no part of the model: {_listed(unexpected)}", "/weights")
    for name, shape in needed.items():
        tensor = weights[name]
        if tensor.shape != shape:
            raise SchemaError(f"{name} has the shape {list(tensor.shape)}; the model needs {list(shape)}", "/weights")
        if isinstance(tensor, Tensor):  # a QuantizedTensor is finite by construction
            check_finite(name, tensor)


def check_finite(name: str, tensor: Tensor) -> None:
    """SchemaError that names the first value that is NaN or infinite."""
    # A fast test first: only NaN, infinity and numbers beyond 2**127 have 7f or ff as their highest byte. If there is
    # one, the sum decides: float32 values cannot overflow a double, and NaN and infinity stay in the sum.
    highest = little_endian(tensor.values)[3::4]
    if (b"\x7f" in highest or b"\xff" in highest) and not isfinite(sum(tensor.values)):
        index = next(i for i, value in enumerate(tensor.values) if not isfinite(value))
        raise SchemaError(f"{name} holds {tensor.values[index]} at index {index}; weights must be finite", "/weights")


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def weights_digest(weights: StoredWeights) -> str:
    """SHA-256, in hexadecimal, of all names, shapes and float32 bits (for codes: codes, scales and zero points). The
    same on every machine, whatever the order of the mapping."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(json.dumps([name, weights[name].shape]).encode())
        digest.update(weights[name].fingerprint())
    return digest.hexdigest()


def check_digest(weights: Weights, sha256: str | None) -> None:
    """SchemaError unless ``weights_digest`` gives the recorded value (None: none was recorded)."""
    if sha256 is not None and (given := weights_digest(weights)) != sha256:
        raise SchemaError(f"not the weights that the scenario was made with: their sha256 is {given}, not {sha256}; "
                          "restore the file or seed, or record the new value", "/weights/sha256")


# ---------------------------------------------------------------------------------------------------- bytes of a file


def little_endian(values: array[Any]) -> bytes:
    """The values in little-endian byte order, that of every file format read here, on any machine."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def float32_array(raw: bytes | bytearray) -> array[float]:
    """The float32 numbers in little-endian bytes."""
    values = array("f")
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values
