"""Weights: names and shapes, seeded drawing, checks, fingerprint."""

from __future__ import annotations

import hashlib
import random
import struct
import unittest
from array import array
from math import inf, nan, prod
from unittest import mock

from starter.base.weights import (
    Tensor,
    check_digest,
    check_weights,
    float32_array,
    little_endian,
    seeded_weights,
    tensor_shapes,
    weights_digest,
)
from starter.errors import SchemaError
from starter.schema import ModelConfig

SMALL = ModelConfig(vocab_size=11, width=8, layers=2, heads=4, kv_heads=2, ffn_width=12, max_context=16)
UNTIED = ModelConfig(vocab_size=11, width=8, layers=2, heads=4, kv_heads=2, ffn_width=12, max_context=16,
                     tied_output=False)
SMALL_SEED_7 = "3f382256adf6673a66cfb83a89c5b6b68859b0ab3fcfabcc237d2df406271c04"


def tensor(*values: float) -> Tensor:
    return Tensor((len(values),), array("f", values))


class TensorTest(unittest.TestCase):
    def test_element_r_c_lies_at_r_times_columns_plus_c(self) -> None:
        matrix = Tensor((2, 3), array("f", [0, 1, 2, 10, 11, 12]))
        self.assertEqual(matrix.rows(), [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]])
        self.assertEqual(matrix.tolist(), [0.0, 1.0, 2.0, 10.0, 11.0, 12.0])
        self.assertEqual(Tensor((), array("f", [5])).tolist(), [5.0])
        self.assertEqual(Tensor((2, 0), array("f")).rows(), [[], []])

    def test_shape_and_values_must_agree(self) -> None:
        for shape, count in (((2, 3), 5), ((2, 3), 7), ((-2, -3), 6), ((), 0), ((0,), 1)):
            with self.subTest(shape=shape, count=count), self.assertRaisesRegex(SchemaError, "shape"):
                Tensor(shape, array("f", bytes(4 * count)))
        with self.assertRaisesRegex(SchemaError, "'d'"):
            Tensor((1,), array("d", [1.0]))
        with self.assertRaisesRegex(SchemaError, r"\[3\]"):
            tensor(1, 2, 3).rows()


class ShapesTest(unittest.TestCase):
    def test_names_and_shapes(self) -> None:
        shapes = tensor_shapes(SMALL)
        self.assertEqual(shapes["model.embed_tokens.weight"], (11, 8))
        self.assertEqual({name.split(".1.")[1]: shape for name, shape in shapes.items() if ".layers.1." in name}, {
            "input_layernorm.weight": (8,), "post_attention_layernorm.weight": (8,),
            "self_attn.q_proj.weight": (8, 8), "self_attn.o_proj.weight": (8, 8),
            "self_attn.k_proj.weight": (4, 8), "self_attn.v_proj.weight": (4, 8),
            "mlp.gate_proj.weight": (12, 8), "mlp.up_proj.weight": (12, 8), "mlp.down_proj.weight": (8, 12)})
        self.assertEqual(len(shapes), 1 + 2 * 9 + 1)
        self.assertEqual(set(tensor_shapes(UNTIED)) - set(shapes), {"lm_head.weight"})
        self.assertEqual(tensor_shapes(UNTIED)["lm_head.weight"], (11, 8))

    def test_what_successors_of_llama_add(self) -> None:
        config = ModelConfig(**{**vars(SMALL), "head_dim": 6, "attention_bias": True, "qk_norm": True})
        shapes = {name.split(".1.self_attn.")[1]: shape for name, shape in tensor_shapes(config).items()
                  if ".1.self_attn." in name}
        self.assertEqual(shapes, {
            "q_proj.weight": (24, 8), "k_proj.weight": (12, 8), "v_proj.weight": (12, 8), "o_proj.weight": (8, 24),
            "q_proj.bias": (24,), "k_proj.bias": (12,), "v_proj.bias": (12,), "q_norm.weight": (6,),
            "k_norm.weight": (6,)})
        for name, drawn in seeded_weights(config, 3).items():
            if name.endswith(".bias"):
                self.assertTrue(min(drawn.values) < 0.0 < max(drawn.values) < 0.25, name)

    def test_parameters_of_a_published_model(self) -> None:
        stories260k = tensor_shapes(ModelConfig(
            vocab_size=512, width=64, layers=5, heads=8, kv_heads=4, ffn_width=172, max_context=512))
        self.assertEqual(sum(map(prod, stories260k.values())), 260_032)


class SeededWeightsTest(unittest.TestCase):
    def test_bits_are_the_same_everywhere(self) -> None:
        self.assertEqual(weights_digest(seeded_weights(SMALL, 7)), SMALL_SEED_7)

    def test_follows_its_description(self) -> None:
        """Recomputed from the docstring: a generator by SHA-256 of "seed/name", uniform, rounded to float32."""
        weights = seeded_weights(SMALL, 7)
        for name, centre, reach in (("model.layers.1.mlp.down_proj.weight", 0.0, (3 / 12) ** 0.5),
                                    ("model.embed_tokens.weight", 0.0, (3 / 8) ** 0.5),
                                    ("model.norm.weight", 1.0, 0.25)):
            generator = random.Random(int(hashlib.sha256(f"7/{name}".encode()).hexdigest(), 16))
            for value in weights[name].values:
                exact = centre - reach + 2 * reach * generator.random()
                self.assertEqual(value, struct.unpack("<f", struct.pack("<f", exact))[0], name)

    def test_variance_is_one_over_columns_and_gains_are_near_one(self) -> None:
        config = ModelConfig(vocab_size=100, width=32, layers=1, heads=2, kv_heads=2, ffn_width=96, max_context=8)
        for name, drawn in seeded_weights(config, 3).items():
            mean = sum(drawn.values) / len(drawn.values)
            if len(drawn.shape) == 2:
                variance = sum(value * value for value in drawn.values) / len(drawn.values)
                self.assertAlmostEqual(variance * drawn.shape[1], 1.0, delta=0.1, msg=name)
                self.assertAlmostEqual(mean * drawn.shape[1] ** 0.5, 0.0, delta=0.1, msg=name)
            else:
                self.assertTrue(all(0.75 <= value <= 1.25 for value in drawn.values), name)
                self.assertGreater(max(drawn.values) - min(drawn.values), 0.2, name)

    def test_tensors_do_not_depend_on_each_other(self) -> None:
        one, two = seeded_weights(SMALL, 7), seeded_weights(ModelConfig(**{**vars(UNTIED), "layers": 3}), 7)
        self.assertTrue(all(two[name] == drawn for name, drawn in one.items()))
        self.assertEqual(len({drawn.values.tobytes()[:32] for drawn in two.values()}), len(two))

    def test_the_seed_changes_every_tensor(self) -> None:
        one, two = seeded_weights(SMALL, 7), seeded_weights(SMALL, 8)
        self.assertFalse([name for name in one if one[name] == two[name]])


class CheckWeightsTest(unittest.TestCase):
    def refused(self, config: ModelConfig, weights: dict[str, Tensor], *words: str) -> None:
        with self.assertRaises(SchemaError) as caught:
            check_weights(config, weights)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_exact_weights_pass(self) -> None:
        for config in (SMALL, UNTIED):
            check_weights(config, seeded_weights(config, 1))

    def test_any_dropped_tensor_is_named(self) -> None:  # K111
        for config in (SMALL, UNTIED):
            for name in tensor_shapes(config):
                weights = seeded_weights(config, 1)
                del weights[name]
                with self.subTest(name):
                    self.refused(config, weights, "missing", name)
        self.refused(SMALL, {}, "missing", "model.embed_tokens.weight", "and 15 more")

    def test_tensors_of_no_part_are_named(self) -> None:
        weights = {**seeded_weights(SMALL, 1), "model.layers.2.mlp.up_proj.weight": tensor(1.0), "extra": tensor(1.0)}
        self.refused(SMALL, weights, "no part", "model.layers.2.mlp.up_proj.weight", "extra")

    def test_an_output_matrix_beside_a_tied_one_is_refused(self) -> None:
        self.refused(SMALL, seeded_weights(UNTIED, 1), "lm_head.weight", "tied_output")

    def test_wrong_shape_is_named_with_both(self) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        weights = seeded_weights(SMALL, 1)
        weights[name] = Tensor((12, 8), weights[name].values)
        self.refused(SMALL, weights, name, "[12, 8]", "[8, 12]")

    def test_values_that_are_not_finite_are_located(self) -> None:
        for name, index in (("model.norm.weight", 0), ("model.embed_tokens.weight", 87)):
            for value in (nan, inf, -inf):
                weights = seeded_weights(SMALL, 1)
                weights[name].values[index] = value
                with self.subTest(name=name, value=value):
                    self.refused(SMALL, weights, name, f"index {index}", str(value))
        weights["model.embed_tokens.weight"].values[3] = inf  # inf - inf = NaN must not hide in the sum
        self.refused(SMALL, weights, "index 3")

    def test_huge_finite_values_pass(self) -> None:
        weights = seeded_weights(SMALL, 1)
        weights["model.norm.weight"] = Tensor((8,), array("f", [3.4e38] * 8))
        check_weights(SMALL, weights)


class DigestTest(unittest.TestCase):
    def test_is_sha256_of_names_shapes_and_little_endian_bits(self) -> None:
        weights = {"b": Tensor((2, 1), array("f", [1.5, -0.0])), "a": tensor(2.0)}
        by_hand = b'["a", [1]]' + bytes.fromhex("00000040") + b'["b", [2, 1]]' + bytes.fromhex("0000c03f 00000080")
        self.assertEqual(weights_digest(weights), hashlib.sha256(by_hand).hexdigest())

    def test_changes_with_name_shape_and_every_bit(self) -> None:
        variants = [{"a": tensor(0.0, 1.0)}, {"b": tensor(0.0, 1.0)}, {"a": Tensor((2, 1), array("f", [0, 1]))},
                    {"a": Tensor((1, 2), array("f", [0, 1]))}, {"a": tensor(-0.0, 1.0)}, {"a": tensor(1.0, 0.0)},
                    {"a": tensor(0.0), "b": tensor(1.0)}]
        self.assertEqual(len(set(map(weights_digest, variants))), len(variants))

    def test_check(self) -> None:
        weights = {"a": tensor(1.0)}
        check_digest(weights, None)
        check_digest(weights, weights_digest(weights))
        with self.assertRaisesRegex(SchemaError, "sha256") as caught:
            check_digest({"a": tensor(1.5)}, weights_digest(weights))
        self.assertEqual(caught.exception.path, "/weights/sha256")

    def test_bytes_are_swapped_where_the_machine_is_big_endian(self) -> None:
        values = array("f", [1.5, -2.0])
        bits = little_endian(values)
        self.assertEqual(bits, struct.pack("<2f", 1.5, -2.0))
        with mock.patch("sys.byteorder", "big"):  # this machine plays the other kind: everything comes out swapped
            self.assertEqual(little_endian(values), struct.pack(">2f", 1.5, -2.0))
            self.assertEqual(float32_array(struct.pack(">2f", 1.5, -2.0)), values)
        self.assertEqual(values.tolist(), [1.5, -2.0])


if __name__ == "__main__":
    unittest.main()
