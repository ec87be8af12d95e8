"""How large a decoder's keys and values can become, whatever the input: a store of integers chooses its units by it.

A normed vector x of D numbers has |x| <= sqrt(D) before its gain g, so |row . (g x)| <= |row * g| sqrt(D)
(Cauchy-Schwarz), and a bias adds its size. If each key head is normed as well, it has |k| <= sqrt(d) before that norm's
gain. Rotation mixes the two numbers of a pair, so both get the bound of the pair.

Where hidden states are small beside the norm's epsilon, these bounds would be far too large: x / sqrt(mean(x^2) + eps)
then is much shorter than sqrt(D), and integers in units of the bound would be 0. So the longest embedding is followed
through the layers, each of which adds what its matrices can make of it at most, until epsilon no longer matters; that
is at once in a model as they are trained. A bound is not what occurs, and the distance grows with each layer; a store
can tell by how far ``share`` grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import hypot, inf, sqrt
from operator import add, mul
from typing import Any

from starter.base.model_config import ModelConfig
from starter.base.weights import StoredWeights, Tensor


@dataclass(frozen=True)
class KVBounds:
    """Of one layer: the largest absolute value that each number of a token's key and value can have, [K * d]; and the
    share of sqrt(D) that a normed hidden state can reach there, at most 1."""

    keys: Sequence[float]
    values: Sequence[float]
    share: float = 1.0


def kv_bounds(config: ModelConfig, weights: StoredWeights) -> list[KVBounds]:
    """For each layer. O(numbers of k_proj and v_proj), and O(parameters) where hidden states are small."""
    longest, found = _longest_embedding(config, weights), []
    for layer in range(config.layers):
        named = _Layer(config, weights, f"model.layers.{layer}.")
        share = _share(longest, config.width, config.norm_eps)
        found.append(KVBounds(named.keys(share), named.values(share), share))
        longest = named.longest_after(longest, found[-1])
    return found


def _share(length: float, width: int, epsilon: float) -> float:
    """Of sqrt(width), how much a vector of at most this length can have after a norm."""
    return 1.0 if length == inf else length / hypot(length, sqrt(width * epsilon))


def _known(length: float, config: ModelConfig) -> float:
    """Infinity for a length beside which epsilon does not matter: the bound is then less than half a bit too large."""
    return length if length * length < config.width * config.norm_eps else inf


def _longest_embedding(config: ModelConfig, weights: StoredWeights) -> float:
    longest = 0.0
    for row in _rows(weights["model.embed_tokens.weight"]):
        longest = max(longest, _known(hypot(*row), config))
        if longest == inf:  # as a rule the first row
            break
    return longest


def _rows(matrix: Any) -> Iterator[Sequence[float]]:
    """Row after row, not all at once: a table of embeddings may be large."""
    rows, columns = matrix.shape
    for r in range(rows):
        yield matrix.values[r * columns:(r + 1) * columns] if isinstance(matrix, Tensor) else matrix.row(r)


@dataclass(frozen=True)
class _Layer:
    config: ModelConfig
    weights: StoredWeights
    prefix: str

    def _vector(self, name: str) -> Sequence[float]:
        tensor = self.weights[self.prefix + name]
        assert isinstance(tensor, Tensor)  # only matrices are stored as codes
        return tensor.values

    def _reach(self, name: str, norm: str, share: float) -> list[float]:
        """Bounds of the products of a matrix with a normed hidden state."""
        gain, length = self._vector(f"{norm}.weight"), share * sqrt(self.config.width)
        return [hypot(*map(mul, row, gain)) * length for row in _rows(self.weights[f"{self.prefix}{name}.weight"])]

    def _projected(self, part: str, share: float) -> list[float]:
        reach = self._reach(f"self_attn.{part}_proj", "input_layernorm", share)
        if not self.config.attention_bias:
            return reach
        return list(map(add, reach, map(abs, self._vector(f"self_attn.{part}_proj.bias"))))

    def values(self, share: float) -> list[float]:
        return self._projected("v", share)

    def keys(self, share: float) -> list[float]:
        config, d = self.config, self.config.head_width
        keys = self._projected("k", share) if share < 1.0 or not config.qk_norm else [inf] * config.kv_width
        if config.qk_norm:
            of_heads = [_share(hypot(*keys[i:i + d]), d, config.norm_eps) * sqrt(d) for i in range(0, len(keys), d)]
            keys = [abs(g) * reach for reach in of_heads for g in self._vector("self_attn.k_norm.weight")]
        pairs = [hypot(a, b) for a, b in zip(keys[0::2], keys[1::2])]
        return [pair for pair in pairs for _ in range(2)]

    def longest_after(self, longest: float, bounds: KVBounds) -> float:
        """The longest hidden state after this layer, if ``longest`` is that before it."""
        config = self.config
        if longest < inf:  # attention mixes values, so its numbers are no larger than theirs
            mixed = hypot(*bounds.values) * sqrt(config.heads / config.kv_heads)
            longest = _known(longest + self._norm("self_attn.o_proj") * mixed, config)
        if longest < inf:  # |silu(z)| <= |z|
            share = _share(longest, config.width, config.norm_eps)
            gate, up = (self._reach(f"mlp.{part}_proj", "post_attention_layernorm", share) for part in ("gate", "up"))
            longest = _known(longest + self._norm("mlp.down_proj") * hypot(*map(mul, gate, up)), config)
        return longest

    def _norm(self, name: str) -> float:
        """How much longer a matrix can make a vector, at most (its Frobenius norm)."""
        return hypot(*(hypot(*row) for row in _rows(self.weights[f"{self.prefix}{name}.weight"])))
