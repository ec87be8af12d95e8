"""M1 · The oracle: generate from a Llama-shaped decoder in the plainest possible form. Read this before ``model.py``.

No cache, no batch, no pages, no backend: for every new token the whole sequence is computed again, position by
position, in Python floats. It is quadratically slow and easy to believe, which is the point: whatever the engine
does with pages, batches and preemption, its tokens must equal these (V6).

    tokens --embedding--> x ---+--> norm -> attention over positions 0..p --+--> x
                               |                                           (+)
                               +-------------------------------------------'
                          x ---+--> norm -> down( silu(gate) * up ) --------+--> x      (for every layer)
                               +-------------------------------------------'
    last x -> norm -> output projection -> logits -> the largest wins
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import cos, exp, sin, sqrt
from typing import Protocol

from .schema import ModelConfig

Vector = list[float]
Matrix = list[list[float]]
Parameters = Mapping[str, Matrix]  # by checkpoint name (``weights.tensor_shapes``); a norm's gain is a one-row matrix


class HasParameters(Protocol):
    """What the oracle needs of a model: its sizes, and its weights as plain floats."""

    config: ModelConfig

    def parameters(self) -> Parameters:
        """All weights by checkpoint name."""


def reference_generate(model: HasParameters, prompt_tokens: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy continuation of at most max_tokens, ended by an end-of-sequence token (which is included).

    O((prompt + max_tokens)^2) decoder passes over one token each.
    """
    parameters = model.parameters()
    tokens = list(prompt_tokens)
    while len(tokens) < len(prompt_tokens) + max_tokens:
        logits = reference_logits(model.config, parameters, tokens)
        tokens.append(logits.index(max(logits)))  # the first of equal maxima
        if tokens[-1] in model.config.eos_tokens:
            break
    return tokens[len(prompt_tokens):]


def reference_logits(config: ModelConfig, parameters: Parameters, tokens: Sequence[int]) -> Vector:
    """Logits [vocab_size] of the token after ``tokens``."""
    hidden = [list(parameters["model.embed_tokens.weight"][token]) for token in tokens]
    for layer in range(config.layers):
        weights = {name.split(f".layers.{layer}.")[1]: matrix
                   for name, matrix in parameters.items() if f".layers.{layer}." in name}
        hidden = _layer(config, weights, hidden)
    last = rms_norm(hidden[-1], parameters["model.norm.weight"][0], config.norm_eps)
    output = "model.embed_tokens.weight" if config.tied_output else "lm_head.weight"
    return times(parameters[output], last)


def _layer(config: ModelConfig, weights: Parameters, hidden: list[Vector]) -> list[Vector]:
    keys: list[Vector] = []
    values: list[Vector] = []
    result = []
    for position, x in enumerate(hidden):
        normed = rms_norm(x, weights["input_layernorm.weight"][0], config.norm_eps)
        query, key, value = (projected(config, weights, part, normed) for part in "qkv")
        if config.qk_norm:
            query = head_norm(config, query, weights["self_attn.q_norm.weight"][0])
            key = head_norm(config, key, weights["self_attn.k_norm.weight"][0])
        query = rotary(config, query, position)
        keys.append(rotary(config, key, position))
        values.append(value)
        x = plus(x, times(weights["self_attn.o_proj.weight"], attention(config, query, keys, values)))
        normed = rms_norm(x, weights["post_attention_layernorm.weight"][0], config.norm_eps)
        gate = times(weights["mlp.gate_proj.weight"], normed)
        up = times(weights["mlp.up_proj.weight"], normed)
        # silu(gate) * up; below -700 exp(-g) would overflow, and silu is zero to 300 digits
        activated = [0.0 if g < -700.0 else g / (1.0 + exp(-g)) * u for g, u in zip(gate, up)]
        result.append(plus(x, times(weights["mlp.down_proj.weight"], activated)))
    return result


def projected(config: ModelConfig, weights: Parameters, part: str, x: Vector) -> Vector:
    """The query, key or value ("q", "k", "v") of one token."""
    y = times(weights[f"self_attn.{part}_proj.weight"], x)
    return plus(y, weights[f"self_attn.{part}_proj.bias"][0]) if config.attention_bias else y


def head_norm(config: ModelConfig, x: Vector, gain: Vector) -> Vector:
    """Each head of a query or key normed by itself."""
    width = config.head_width
    return [number for start in range(0, len(x), width)
            for number in rms_norm(x[start:start + width], gain, config.norm_eps)]


def attention(config: ModelConfig, query: Vector, keys: list[Vector], values: list[Vector]) -> Vector:
    """One token's attention over all positions so far; each key/value head serves heads/kv_heads query heads."""
    width = config.head_width
    out: Vector = []
    for head in range(config.heads):
        mine = slice(head * width, (head + 1) * width)
        kv_head = head * config.kv_heads // config.heads
        shared = slice(kv_head * width, (kv_head + 1) * width)
        scores = [dot(query[mine], key[shared]) / sqrt(width) for key in keys]
        highest = max(scores)
        weights = [exp(score - highest) for score in scores]
        total = sum(weights)
        for i in range(shared.start, shared.stop):
            out.append(sum(weight * value[i] for weight, value in zip(weights, values)) / total)
    return out


def rotary(config: ModelConfig, x: Vector, position: int) -> Vector:
    """Turn each pair (2i, 2i + 1) of each head by position * theta ** (-2i / head_width) (see ``base/rope.py``)."""
    frequencies, turned = config.rope_frequencies, []
    for i in range(0, len(x), 2):
        angle = position * frequencies[i % config.head_width // 2]
        c, s = cos(angle), sin(angle)
        turned += [x[i] * c - x[i + 1] * s, x[i] * s + x[i + 1] * c]
    return turned


def rms_norm(x: Vector, gain: Vector, epsilon: float) -> Vector:
    """x / sqrt(mean of squares + epsilon) * gain."""
    scale = 1.0 / sqrt(dot(x, x) / len(x) + epsilon)
    return [value * scale * g for value, g in zip(x, gain)]


def times(matrix: Matrix, x: Vector) -> Vector:
    """Matrix [rows][columns] times vector [columns] -> [rows]."""
    return [dot(row, x) for row in matrix]


def dot(x: Vector, y: Vector) -> float:
    """Inner product."""
    return sum(a * b for a, b in zip(x, y))


def plus(x: Vector, y: Vector) -> Vector:
    """Element-wise sum."""
    return [a + b for a, b in zip(x, y)]
