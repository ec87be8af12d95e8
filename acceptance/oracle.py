"""An independent decoder to compare with: written from the papers, sharing no line with ``starter/``.

It is deliberately different inside: rotary embedding as complex multiplication, exactly rounded sums (``fsum``), one
token at a time with the keys and values of earlier tokens kept in plain lists. From ``starter`` it takes only the
model's sizes (``ModelConfig``) and its weights, by the names that ``starter/base/weights.py`` documents.
"""

from __future__ import annotations

from cmath import rect
from dataclasses import dataclass
from heapq import nlargest
from math import exp, fsum, log, sqrt
from operator import mul
from typing import Any

Cache = list[tuple[list[Any], list[Any]]]  # of each layer: keys and values, a row for each position
CLEAR = 0.03  # by which a logit must lead, for engines that round (numbers in 14 bits, say) to find the same token


@dataclass(frozen=True)
class Step:
    """A greedy token, the natural logarithm of its probability, and by how much its logit leads the next one."""

    token: int
    logprob: float
    lead: float


class Oracle:
    """``Oracle(config, weights).generate(prompt, max_tokens)``; ``change`` may replace each matrix (rows -> rows)."""

    def __init__(self, config, weights, change=lambda rows: rows):
        self.config = config
        self.weights = {}
        for name, tensor in weights.items():
            numbers = list(tensor.values)
            if len(tensor.shape) == 2:
                columns = tensor.shape[1]
                numbers = change([numbers[i:i + columns] for i in range(0, len(numbers), columns)])
            self.weights[name] = numbers

    def tokens(self, prompt, max_tokens, stop=()):
        """The greedy tokens alone."""
        return [step.token for step in self.generate(prompt, max_tokens, stop)]

    def comparable(self, tokens, prompt, max_tokens):
        """An engine's tokens and the right ones, both cut before the first near tie: there rounding may decide."""
        steps = self.generate(prompt, max_tokens)
        end = next((i for i, step in enumerate(steps) if step.lead < CLEAR), None)
        return tokens[:end], [step.token for step in steps][:end]

    def generate(self, prompt, max_tokens, stop=(), changes=()):
        """Continue greedily; the end-of-sequence or stop token that ends it is included.

        ``changes`` (``stored.py``) are made to the cache, which is a pair of lists for each layer, keys and values,
        with a row for each position; each at its moment, when so many positions are in it.
        """
        steps = []
        cache: Cache = [([], []) for _ in range(self.config.layers)]  # a layer's keys and values, a token each
        tokens = list(prompt)
        for position in range(len(prompt) + max_tokens - 1):
            for change in changes:
                if change.moment == position:
                    change.of_oracle(cache)
            logits = self._forward(tokens[position], position, cache)
            if position < len(prompt) - 1:
                continue
            best, second = nlargest(2, logits)
            tokens.append(logits.index(best))
            steps.append(Step(tokens[-1], -log(fsum(exp(logit - best) for logit in logits)), best - second))
            if tokens[-1] in self.config.eos_tokens or tokens[-1] in stop:
                break
        return steps

    def _forward(self, token, position, cache):
        """Logits after one more token; its keys and values join the cache."""
        config, weights = self.config, self.weights
        x = weights["model.embed_tokens.weight"][token]
        for i, (keys, values) in enumerate(cache):
            layer = {name.split(".", 3)[3]: w for name, w in weights.items() if name.startswith(f"model.layers.{i}.")}
            h = self._norm(x, layer["input_layernorm.weight"])
            query = self._rotate(_times(layer["self_attn.q_proj.weight"], h), position)
            keys.append(self._rotate(_times(layer["self_attn.k_proj.weight"], h), position))
            values.append(_times(layer["self_attn.v_proj.weight"], h))
            x = _plus(x, _times(layer["self_attn.o_proj.weight"], self._attend(query, keys, values)))
            h = self._norm(x, layer["post_attention_layernorm.weight"])
            gate, up = _times(layer["mlp.gate_proj.weight"], h), _times(layer["mlp.up_proj.weight"], h)
            x = _plus(x, _times(layer["mlp.down_proj.weight"], [z * u / (1 + exp(-z)) for z, u in zip(gate, up)]))
        output = "model.embed_tokens.weight" if config.tied_output else "lm_head.weight"
        return _times(weights[output], self._norm(x, weights["model.norm.weight"]))

    def _norm(self, x, gain):
        size = sqrt(fsum(v * v for v in x) / len(x) + self.config.norm_eps)
        return [v / size * g for v, g in zip(x, gain)]

    def _rotate(self, x, position):
        width, out = self.config.width // self.config.heads, []
        for i in range(0, len(x), 2):
            pair = complex(x[i], x[i + 1]) * rect(1, position / self.config.rope_theta ** (i % width / width))
            out += [pair.real, pair.imag]
        return out

    def _attend(self, query, keys, values):
        width, out = self.config.width // self.config.heads, []
        sharing = self.config.heads // self.config.kv_heads
        for head in range(self.config.heads):
            q, at = query[head * width:(head + 1) * width], head // sharing * width
            scores = [fsum(map(mul, q, key[at:at + width])) / sqrt(width) for key in keys]
            best = max(scores)
            weights = [exp(score - best) for score in scores]
            total = fsum(weights)
            out += [fsum(w * value[at + i] for w, value in zip(weights, values)) / total for i in range(width)]
        return out


def _times(matrix, x):
    return [fsum(map(mul, row, x)) for row in matrix]


def _plus(x, y):
    return [a + b for a, b in zip(x, y)]
