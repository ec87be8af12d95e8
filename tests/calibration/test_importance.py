"""starter/calibration/importance.py: the mean squares of what each matrix meets, against inputs computed by hand."""

from __future__ import annotations

import random
import unittest
from collections.abc import Sequence
from math import sqrt

from starter.backend import ReferenceBackend, load_backend
from starter.base.weights import seeded_weights, tensor_shapes
from starter.calibration.importance import WatchedBackend, column_importance
from starter.errors import RequestError
from starter.model import Model
from starter.reference import reference_generate
from starter.schema import QuantizationConfig
from tests.extras import needs
from tests.models import random_config

Columns = Sequence[float]


def made(seed: int, tied: bool | None = None, backend: str = "reference") -> Model:
    config = random_config(random.Random(seed), tied=tied)
    return Model(config, seeded_weights(config, seed), load_backend(backend))


def first_inputs(model: Model, tokens: Sequence[int]) -> list[list[float]]:
    """What the first layer's q, k and v meet: the normed rows of the embedding."""
    parameters = model.parameters()
    gain = parameters["model.layers.0.input_layernorm.weight"][0]
    rows = [parameters["model.embed_tokens.weight"][token] for token in tokens]
    sizes = [sqrt(sum(x * x for x in row) / len(row) + model.config.norm_eps) for row in rows]
    return [[x / size * g for x, g in zip(row, gain)] for row, size in zip(rows, sizes)]


class ColumnImportance(unittest.TestCase):
    def assert_close(self, got: Columns, wanted: Columns, places: int = 9) -> None:
        self.assertEqual(len(got), len(wanted))
        for a, b in zip(got, wanted):
            self.assertAlmostEqual(a, b, places)

    def test_the_first_layer_by_hand(self) -> None:
        for seed in range(5):
            with self.subTest(seed=seed):
                model, dice = made(seed), random.Random(seed)
                texts = [dice.choices(range(model.config.vocab_size), k=length) for length in (1, 7, 3)]
                got = column_importance(model, texts)
                inputs = first_inputs(model, [token for text in texts for token in text])
                wanted = [sum(x * x for x in column) / 11 for column in zip(*inputs)]
                for name in "qkv":
                    self.assert_close(got[f"model.layers.0.self_attn.{name}_proj.weight"], wanted)

    def test_every_matrix_has_a_number_from_0_for_each_column(self) -> None:
        for seed, tied in ((1, True), (2, False)):
            model = made(seed, tied)
            got = column_importance(model, [[0, 1, 2, 1]])
            shapes = tensor_shapes(model.config)
            # an untied embedding is looked up, not multiplied
            wanted = {name: shape[1] for name, shape in shapes.items()
                      if len(shape) == 2 and (tied or name != "model.embed_tokens.weight")}
            self.assertEqual({name: len(columns) for name, columns in got.items()}, wanted)
            self.assertTrue(all(x >= 0.0 for columns in got.values() for x in columns))

    def test_the_output_matrix_meets_every_position(self) -> None:
        """Its inputs of a text are those of each beginning of the text, whose last position alone gives logits."""
        model = made(3, tied=False)
        text = [1, 0, 2, 2, 1]
        watched = WatchedBackend(ReferenceBackend())
        model_of_watched = made(3, tied=False)
        model_of_watched.backend = watched  # type: ignore[assignment]
        for end in range(1, 6):
            model_of_watched.forward_uncached(text[:end])
        self.assert_close(column_importance(model, [text])["lm_head.weight"],
                          watched.mean_squares(model_of_watched.head))

    def test_a_text_longer_than_the_context_is_read_in_parts(self) -> None:
        model, dice = made(4), random.Random(4)
        text = dice.choices(range(model.config.vocab_size), k=150)  # the context is 64
        parts = column_importance(model, [text[:64], text[64:128], text[128:]])
        self.assertEqual(column_importance(model, [text]), parts)

    def test_the_model_stays_as_it_is(self) -> None:
        model = made(5)
        backend, before = model.backend, reference_generate(model, [1, 2], 5)
        column_importance(model, [[1, 2, 0]])
        self.assertIs(model.backend, backend)
        self.assertEqual(reference_generate(model, [1, 2], 5), before)

    def test_a_quantized_model_can_be_watched(self) -> None:
        config = random_config(random.Random(6))
        model = Model(config, seeded_weights(config, 6), ReferenceBackend(), QuantizationConfig(8))
        name = "model.layers.0.self_attn.q_proj.weight"
        exact = Model(config, seeded_weights(config, 6), ReferenceBackend())
        for a, b in zip(column_importance(model, [[0, 1]])[name], column_importance(exact, [[0, 1]])[name]):
            self.assertAlmostEqual(a, b, delta=0.05 * b + 0.01)

    def test_bad_texts(self) -> None:
        model = made(7)
        size = model.config.vocab_size
        for texts, message in (([], "at least one text"), ([[]], "at least one token"),
                               ([[0], [size]], f"token {size} is outside"), ([[-1]], "token -1 is outside")):
            with self.subTest(texts=texts), self.assertRaisesRegex(RequestError, message):
                column_importance(model, texts)


@needs("numpy", "numpy")
class OnNumPy(unittest.TestCase):
    def test_about_the_same_as_on_the_cpu_backend(self) -> None:
        cpu, numpy = (column_importance(made(8, backend=name), [[0, 1, 2], [2, 2]]) for name in ("reference", "numpy"))
        self.assertEqual(set(cpu), set(numpy))
        for name, columns in cpu.items():
            for a, b in zip(columns, numpy[name]):
                self.assertAlmostEqual(a, b, delta=1e-4 * (1 + a))


if __name__ == "__main__":
    unittest.main()
