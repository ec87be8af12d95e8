"""The decoder over pages: equal to the cache-less reference, and bitwise the same however the work is cut."""

from __future__ import annotations

import random
import unittest
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, nan

from starter.backend import Batch, Piece, ReferenceBackend
from starter.base.weights import Tensor, seeded_weights, tensor_shapes
from starter.errors import SchemaError
from starter.kv_cache import KVStore
from starter.model import Model
from starter.reference import reference_logits
from starter.schema import ModelConfig, QuantizationConfig
from tests.models import random_config

PAGES = 24


def made(config: ModelConfig, seed: int, quantization: QuantizationConfig | None = None) -> Model:
    return Model(config, seeded_weights(config, seed), ReferenceBackend(), quantization)


def fill(store: KVStore, page_size: int, number: float) -> KVStore:
    """Leave a number in every slot, as earlier users of the pages do."""
    for slot in range(PAGES * page_size):
        store.write(*divmod(slot, page_size), [number] * store.width, [number] * store.width)
    return store


def pieces_of(tokens: Sequence[int], pages: Sequence[int], cuts: Sequence[int]) -> list[Piece]:
    """Tokens 0 .. cuts[0] - 1, cuts[0] .. cuts[1] - 1, ...; every piece asks for logits."""
    edges = [0, *cuts, len(tokens)]
    return [Piece(tokens[start:end], start, pages, wants_logits=True) for start, end in pairwise(edges)]


def random_cuts(dice: random.Random, length: int) -> list[int]:
    return sorted(dice.sample(range(1, length), dice.randint(0, length - 1)))


class ForwardTest(unittest.TestCase):
    def test_equal_to_the_reference_at_every_position(self) -> None:
        """V6: prefill in one piece, then one token at a time: within 1e-9 of computing it all anew."""
        for seed in range(48):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                config = random_config(dice, group=(1, 2, 4)[seed % 3], tied=seed % 2 == 0, plain=seed < 24)
                model, parameters = made(config, seed), made(config, seed).parameters()
                tokens = dice.choices(range(config.vocab_size), k=dice.randint(2, 9))
                store = model.new_store(num_pages=9, page_size=1)
                cuts = range(dice.randint(1, len(tokens)), len(tokens))
                for piece in pieces_of(tokens, range(9), cuts):
                    end = piece.start + len(piece.tokens)
                    [got] = model.forward(Batch.of([piece], 1), store)
                    wanted = reference_logits(config, parameters, tokens[:end])
                    self.assertEqual(len(got), config.vocab_size)
                    self.assertLess(max(abs(a - b) for a, b in zip(got, wanted)), 1e-9)
                self.assertEqual(model.forward_uncached(tokens), got)

    def test_chunks_pages_and_old_numbers_change_no_bit(self) -> None:
        """K066: any chunking, page size and permutation of pages, with NaN or infinity in every unused slot."""
        for seed in range(40):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                config = random_config(dice, plain=seed % 2 == 0)
                model, page_size = made(config, seed), dice.randint(1, 5)
                tokens = dice.choices(range(config.vocab_size), k=dice.randint(2, 14))
                store = fill(model.new_store(PAGES, page_size), page_size, dice.choice((nan, inf, -inf, 7.0)))
                pages = dice.sample(range(PAGES), -(-len(tokens) // page_size) + dice.randint(0, 2))
                for piece in pieces_of(tokens, pages, random_cuts(dice, len(tokens))):
                    got = model.forward(Batch.of([piece], page_size), store)
                self.assertEqual(got, [model.forward_uncached(tokens)])

    def test_neighbours_change_no_bit(self) -> None:
        """Guarantee 1: three requests at different positions in every batch, each as if it were alone."""
        for seed in range(20):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                config = random_config(dice)
                model, page_size, free = made(config, seed), dice.randint(1, 4), dice.sample(range(PAGES), PAGES)
                store = fill(model.new_store(PAGES, page_size), page_size, nan)
                sequences = [dice.choices(range(config.vocab_size), k=dice.randint(2, 8)) for _ in range(3)]
                queues = []
                for tokens in sequences:
                    pages = [free.pop() for _ in range(-(-len(tokens) // page_size))]
                    queues.append(pieces_of(tokens, pages, random_cuts(dice, len(tokens))))
                results: dict[int, list[list[float]]] = {0: [], 1: [], 2: []}
                while any(queues):
                    turn = dice.sample([i for i in range(3) if queues[i]], dice.randint(1, sum(map(bool, queues))))
                    batch = Batch.of([queues[i].pop(0) for i in turn], page_size)
                    for i, logits in zip(turn, model.forward(batch, store)):
                        results[i].append(logits)
                for i, tokens in enumerate(sequences):
                    self.assertEqual(results[i][-1], model.forward_uncached(tokens))

    def test_logits_only_for_those_who_want_them(self) -> None:
        config = random_config(random.Random(1))
        model = made(config, 1)
        store = model.new_store(3, 4)
        batch = Batch.of([Piece([0, 1], 0, [0], False), Piece([1, 2], 0, [1], True), Piece([2], 0, [2], False)], 4)
        self.assertEqual(model.forward(batch, store), [model.forward_uncached([1, 2])])
        self.assertEqual(model.forward(Batch.of([Piece([1], 2, [0], False)], 4), store), [])
        self.assertEqual(model.forward(Batch.of([Piece([2], 3, [0], True)], 4), store),
                         [model.forward_uncached([0, 1, 1, 2])])  # what asked for nothing was computed all the same

    def test_the_present_token_sees_itself_and_no_later_one(self) -> None:
        config = random_config(random.Random(2), tied=False)
        model = made(config, 2)
        store = model.new_store(1, 4)
        first = model.forward(Batch.of([Piece([1], 0, [0], True)], 4), store)
        model.forward(Batch.of([Piece([2, 0], 1, [0], True)], 4), store)
        self.assertEqual(model.forward(Batch.of([Piece([1], 0, [0], True)], 4), store), first)
        self.assertNotEqual(model.forward_uncached([1]), model.forward_uncached([2]))


class KVBoundsTest(unittest.TestCase):
    """A store may lay its grid by the bounds, so no key and no value may ever be larger."""

    def test_nothing_is_larger(self) -> None:
        for seed in range(30):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                config = random_config(dice, plain=seed % 3 == 0)
                model = made(config, seed)
                tokens = dice.choices(range(config.vocab_size), k=20)
                for layer, (keys, values) in self.stored(model, tokens):
                    bounds = model.kv_bounds[layer]
                    for numbers, most in ((keys, bounds.keys), (values, bounds.values)):
                        self.assertTrue(all(abs(n) <= bound * (1 + 1e-9) for n, bound in zip(numbers, most)))

    def test_they_are_reached(self) -> None:
        """The first layer's value 0 of a token whose embedding points where its weights, and its bias, do."""
        for bias in (False, True):
            config = replace(random_config(random.Random(1)), attention_bias=bias)
            weights = seeded_weights(config, 1)
            prefix, width = "model.layers.0.", config.width
            row = weights[f"{prefix}self_attn.v_proj.weight"].values[:width]
            direction = [1e4 * a * b for a, b in zip(row, weights[f"{prefix}input_layernorm.weight"].values)]
            if bias and weights[f"{prefix}self_attn.v_proj.bias"].values[0] < 0:
                direction = [-number for number in direction]
            embedding = weights["model.embed_tokens.weight"]
            weights["model.embed_tokens.weight"] = Tensor(
                embedding.shape, array("f", direction) + embedding.values[width:])
            model = Model(config, weights, ReferenceBackend())
            _, (_, values) = next(self.stored(model, [0]))
            self.assertAlmostEqual(abs(values[0]) / model.kv_bounds[0].values[0], 1.0, places=5)

    def stored(self, model: Model, tokens: Sequence[int]) -> Iterator[tuple[int, tuple[list[float], list[float]]]]:
        """Layer, and a token's key and value in it."""
        store = model.new_store(1, len(tokens))
        model.forward(Batch.of([Piece(tokens, 0, [0], False)], len(tokens)), store)
        width = model.config.kv_width
        for offset in range(len(tokens)):
            key, value = store.read(0, offset)
            for layer in range(model.config.layers):
                part = slice(layer * width, (layer + 1) * width)
                yield layer, (key[part], value[part])


class WeightsTest(unittest.TestCase):
    def test_a_quantized_model_computes_with_the_stored_numbers(self) -> None:
        for bits, group_size in ((8, 4), (4, None)):
            with self.subTest(bits=bits, group_size=group_size):
                config = random_config(random.Random(3), group=2)
                model, exact = made(config, 3, QuantizationConfig(bits, group_size)), made(config, 3)
                got = model.forward_uncached([1, 2, 0])
                wanted = reference_logits(config, model.parameters(), [1, 2, 0])
                self.assertLess(max(abs(a - b) for a, b in zip(got, wanted)), 1e-9)
                self.assertNotEqual(got, exact.forward_uncached([1, 2, 0]))
                self.assertEqual(model.parameters()["model.norm.weight"], exact.parameters()["model.norm.weight"])

    def test_parameters_are_the_weights_that_were_given(self) -> None:
        for tied in (True, False):
            config = replace(random_config(random.Random(4), tied=tied), attention_bias=not tied, qk_norm=not tied)
            weights, parameters = seeded_weights(config, 4), made(config, 4).parameters()
            self.assertEqual(set(parameters), set(weights))
            for name, shape in tensor_shapes(config).items():
                self.assertEqual([number for row in parameters[name] for number in row], list(weights[name].values))
                self.assertEqual((len(parameters[name]), len(parameters[name][0])), (1, *shape)[-2:])

    def test_weight_bytes(self) -> None:
        """4 bytes a number of every matrix; a tied output is the embedding and counts once."""
        for tied, heads in ((True, 1), (False, 2)):
            config = ModelConfig(vocab_size=10, width=8, layers=2, heads=2, kv_heads=1, ffn_width=6, max_context=9,
                                 tied_output=tied)
            numbers = heads * 10 * 8 + 2 * (2 * 8 * 8 + 2 * 4 * 8 + 3 * 6 * 8)
            self.assertEqual(made(config, 1).weight_bytes, 4 * numbers)
            quantized = made(config, 1, QuantizationConfig(8, 8)).weight_bytes
            self.assertTrue(numbers < quantized < 4 * numbers)

    def test_weights_that_are_not_the_models_are_refused(self) -> None:
        config = random_config(random.Random(5))
        for name, weights in ((name, seeded_weights(config, 1)) for name in tensor_shapes(config)):
            del weights[name]
            with self.subTest(name=name), self.assertRaisesRegex(SchemaError, name):
                Model(config, weights, ReferenceBackend())


if __name__ == "__main__":
    unittest.main()
