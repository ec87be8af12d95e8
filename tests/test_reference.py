"""The oracle itself: against a decoder written in another way, and against numbers worked out by hand."""

from __future__ import annotations

import random
import unittest
from array import array
from cmath import rect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import cos, exp, fsum, isnan, nan, prod, sin, sqrt, tau

from starter.backend import ReferenceBackend
from starter.base.rope import FactorScaling, LinearScaling, Llama3Scaling
from starter.base.weights import Tensor, seeded_weights, tensor_shapes
from starter.model import Model
from starter.reference import reference_generate, reference_logits, rotary
from starter.schema import ModelConfig
from tests.models import random_config

Row = Sequence[float]


class Decoder:
    """The same network from the papers: exactly rounded sums, rotation of complex numbers, and all positions of a
    layer before the next layer's."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, Sequence[Row]]) -> None:
        self.config, self.parameters = config, parameters

    def logits(self, tokens: Sequence[int]) -> Row:
        x = [self.parameters["model.embed_tokens.weight"][token] for token in tokens]
        for i in range(self.config.layers):
            layer = f"model.layers.{i}."
            h = [self.norm(row, layer + "input_layernorm") for row in x]
            q, k, v = ([self.project(f"{layer}self_attn.{name}_proj", row) for row in h] for name in "qkv")
            if self.config.qk_norm:
                q, k = ([self.norm_heads(row, f"{layer}self_attn.{name}_norm") for row in rows]
                        for name, rows in (("q", q), ("k", k)))
            q, k = ([self.turn(row, position) for position, row in enumerate(rows)] for rows in (q, k))
            mixed = [self.mix(row, k[:p + 1], v[:p + 1]) for p, row in enumerate(q)]
            x = [add(row, self.times(layer + "self_attn.o_proj", other)) for row, other in zip(x, mixed)]
            h = [self.norm(row, layer + "post_attention_layernorm") for row in x]
            gates, ups = ([self.times(f"{layer}mlp.{name}_proj", row) for row in h] for name in ("gate", "up"))
            h = [[z * u / (1 + exp(-z)) for z, u in zip(gate, up)] for gate, up in zip(gates, ups)]
            x = [add(row, self.times(layer + "mlp.down_proj", other)) for row, other in zip(x, h)]
        head = "model.embed_tokens" if self.config.tied_output else "lm_head"
        return self.times(head, self.norm(x[-1], "model.norm"))

    def times(self, name: str, x: Row) -> Row:
        return [fsum(a * b for a, b in zip(row, x)) for row in self.parameters[name + ".weight"]]

    def norm(self, x: Row, name: str) -> Row:
        size = sqrt(fsum(v * v for v in x) / len(x) + self.config.norm_eps)
        return [v / size * gain for v, gain in zip(x, self.parameters[name + ".weight"][0])]

    def project(self, name: str, x: Row) -> Row:
        bias = self.parameters[name + ".bias"][0] if self.config.attention_bias else [0.0] * len(x)
        rows = self.parameters[name + ".weight"]
        return [fsum([*(a * b for a, b in zip(row, x)), b]) for row, b in zip(rows, [*bias, *[0.0] * len(rows)])]

    def norm_heads(self, x: Row, name: str) -> Row:
        d = self.config.head_width
        return [number for head in zip(*[iter(x)] * d) for number in self.norm(head, name)]

    def turn(self, x: Row, position: int) -> Row:
        d = self.config.head_width
        pairs = [complex(a, b) * rect(1, position / self.wave(2 * i % d) * tau)
                 for i, (a, b) in enumerate(zip(x[::2], x[1::2]))]
        return [part for pair in pairs for part in (pair.real, pair.imag)]

    def wave(self, i: int) -> float:
        """Tokens in a full turn of the pair at numbers i and i + 1 of a head."""
        wave, scaling = tau * self.config.rope_theta ** (i / self.config.head_width), self.config.rope_scaling
        if isinstance(scaling, FactorScaling):
            return wave * scaling.factors[i // 2]
        if isinstance(scaling, LinearScaling):
            return wave * scaling.factor
        if isinstance(scaling, Llama3Scaling):
            turns = scaling.original_context / wave
            if turns <= scaling.low_freq_factor:
                return wave * scaling.factor
            if turns < scaling.high_freq_factor:
                share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
                return 1 / ((1 - share) / (scaling.factor * wave) + share / wave)
        return wave

    def mix(self, q: Row, keys: Sequence[Row], values: Sequence[Row]) -> Row:
        d, out = self.config.head_width, []
        for head in range(self.config.heads):
            at = head // (self.config.heads // self.config.kv_heads) * d
            weights = [exp(fsum(q[head * d + i] * key[at + i] for i in range(d)) / sqrt(d)) for key in keys]
            out += [fsum(w * value[at + i] for w, value in zip(weights, values)) / fsum(weights) for i in range(d)]
        return out


def add(x: Row, y: Row) -> Row:
    return [a + b for a, b in zip(x, y)]


def model(config: ModelConfig, **matrices: Sequence[Row]) -> Model:
    """A model whose matrices are zero and whose gains are one, but for those given; "__" in a name is a dot."""
    weights = {name: Tensor(shape, array("f", [float(len(shape) == 1)] * prod(shape)))
               for name, shape in tensor_shapes(config).items()}
    for name, rows in matrices.items():
        name = name.replace("__", ".") + ".weight"
        weights[name] = Tensor(weights[name].shape, array("f", [number for row in rows for number in row]))
    return Model(config, weights, ReferenceBackend())


UNIT = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
FOUR = ModelConfig(vocab_size=4, width=4, layers=1, heads=1, kv_heads=1, ffn_width=4, max_context=32, norm_eps=1e-12,
                   tied_output=False)


class LogitsTest(unittest.TestCase):
    def test_equal_to_the_other_decoder(self) -> None:
        shared = set()
        for seed in range(60):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                config = random_config(dice, plain=seed % 2 == 0)
                shared.add((config.heads // config.kv_heads, config.tied_output))
                parameters = Model(config, seeded_weights(config, seed), ReferenceBackend()).parameters()
                tokens = dice.choices(range(config.vocab_size), k=dice.randint(1, 10))
                for mine, other in zip(reference_logits(config, parameters, tokens),
                                       Decoder(config, parameters).logits(tokens), strict=True):
                    self.assertAlmostEqual(mine, other, delta=1e-11)
        self.assertEqual(shared, {(group, tied) for group in (1, 2, 4) for tied in (False, True)})

    def test_by_hand_uniform_attention(self) -> None:
        """Queries and keys are 0, so every position so far counts the same. A unit vector normed is doubled; tokens
        0, 1, 1: x = (0, 1, 0, 0) + (2/3, 4/3, 0, 0), divided by its root mean square, sqrt(53) / 6."""
        made = model(FOUR, model__embed_tokens=UNIT, lm_head=UNIT, model__layers__0__self_attn__v_proj=UNIT,
                     model__layers__0__self_attn__o_proj=UNIT)
        logits = reference_logits(FOUR, made.parameters(), [0, 1, 1])
        for got, wanted in zip(logits, (4 / sqrt(53), 14 / sqrt(53), 0.0, 0.0), strict=True):
            self.assertAlmostEqual(got, wanted, places=11)

    def test_by_hand_feed_forward(self) -> None:
        """No attention; gate and up are 2 where x is 1: x = 1 + 4 / (1 + exp(-2)) there, so its norm is 2 again."""
        made = model(FOUR, model__embed_tokens=UNIT, lm_head=[[0.5] * 4, [1.0, 0, 0, 0], [0, 0, 1.0, 0], [0] * 4],
                     model__layers__0__mlp__gate_proj=UNIT, model__layers__0__mlp__up_proj=UNIT,
                     model__layers__0__mlp__down_proj=[UNIT[1], UNIT[2], UNIT[3], UNIT[0]])
        big = 4 / (1 + exp(-2))  # lands one further: down maps 2 to 1
        size = sqrt((1 + big * big) / 4)
        for got, wanted in zip(reference_logits(FOUR, made.parameters(), [3, 2]),
                               ((1 + big) / 2 / size, 0.0, 1 / size, 0.0), strict=True):
            self.assertAlmostEqual(got, wanted, places=11)

    def test_rotary_turns_pairs_by_position(self) -> None:
        config = replace(FOUR, rope_theta=100.0)  # one head of 4: angles p and p / 10
        for position in (0, 1, 7):
            a, b = position, position / 10
            for got, wanted in zip(rotary(config, [1.0, 0.0, 0.0, 2.0], position),
                                   (cos(a), sin(a), -2 * sin(b), 2 * cos(b)), strict=True):
                self.assertAlmostEqual(got, wanted, places=12)

    def test_a_gate_far_below_zero_is_shut_and_one_that_is_no_number_is_seen(self) -> None:
        for gate in (-1e4, -1e30):
            made = model(FOUR, model__embed_tokens=UNIT, lm_head=UNIT, model__layers__0__mlp__up_proj=UNIT,
                         model__layers__0__mlp__gate_proj=[[gate] * 4] * 4, model__layers__0__mlp__down_proj=UNIT)
            for got, wanted in zip(reference_logits(FOUR, made.parameters(), [1]), (0.0, 2.0, 0.0, 0.0), strict=True):
                self.assertAlmostEqual(got, wanted, places=11)
        for name in tensor_shapes(FOUR):
            parameters = Model(FOUR, seeded_weights(FOUR, 1), ReferenceBackend()).parameters()
            parameters[name] = [[nan] * len(row) for row in parameters[name]]
            with self.subTest(name=name):
                self.assertTrue(all(map(isnan, reference_logits(FOUR, parameters, [1, 2]))))


class GenerateTest(unittest.TestCase):
    """With lm_head rolled by one, the model counts: after token t comes t + 1, after 3 comes 0."""

    ROLLED = (UNIT[3], *UNIT[:3])

    def generate(self, config: ModelConfig, prompt: Sequence[int], max_tokens: int) -> list[int]:
        return reference_generate(model(config, model__embed_tokens=UNIT, lm_head=self.ROLLED), prompt, max_tokens)

    def test_as_many_as_asked_for(self) -> None:
        self.assertEqual(self.generate(FOUR, [2], 7), [3, 0, 1, 2, 3, 0, 1])
        self.assertEqual(self.generate(FOUR, (3, 1), 1), [2])
        self.assertEqual(self.generate(FOUR, [2], 0), [])

    def test_an_end_of_sequence_token_is_included_and_ends_it(self) -> None:
        config = replace(FOUR, eos_tokens=(3,))
        self.assertEqual(self.generate(config, [0], 9), [1, 2, 3])
        self.assertEqual(self.generate(config, [2], 9), [3])
        self.assertEqual(self.generate(config, [3], 9), [0, 1, 2, 3])  # in the prompt it ends nothing

    def test_the_first_of_equal_maxima_wins(self) -> None:
        twice = model(FOUR, model__embed_tokens=UNIT, lm_head=[[0] * 4, [1] * 4, [1] * 4, [0.5] * 4])
        self.assertEqual(reference_generate(twice, [0], 3), [1, 1, 1])

    def test_the_prompt_is_left_alone(self) -> None:
        prompt = [2]
        self.generate(FOUR, prompt, 3)
        self.assertEqual(prompt, [2])


if __name__ == "__main__":
    unittest.main()
