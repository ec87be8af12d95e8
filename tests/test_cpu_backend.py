"""The decoder's operations against their formulas, written here in another way and summed without rounding (fsum)."""

from __future__ import annotations

import random
import unittest
from array import array
from cmath import rect
from collections.abc import Sequence
from math import exp, fsum, inf, isnan, nan, sqrt

from starter.backend import Batch, Piece, ReferenceBackend, ReferenceKVStore, Span, silu
from starter.base.rope import rotary_frequencies
from starter.base.weights import Tensor
from starter.quantization import dequantize
from starter.schema import ModelConfig, QuantizationConfig

CPU = ReferenceBackend()


def numbers(dice: random.Random, count: int) -> list[float]:
    return [dice.uniform(-2.0, 2.0) for _ in range(count)]


def matrix(dice: random.Random, rows: int, columns: int) -> list[list[float]]:
    return [numbers(dice, columns) for _ in range(rows)]


def tensor(rows: Sequence[Sequence[float]]) -> Tensor:
    return Tensor((len(rows), len(rows[0])), array("f", [number for row in rows for number in row]))


def inner(x: Sequence[float], y: Sequence[float]) -> float:
    return fsum(a * b for a, b in zip(x, y, strict=True))


class Case(unittest.TestCase):
    def check(self, got: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> None:
        """Equal but for rounding: 1e-12 of the largest number in the row."""
        self.assertEqual([len(row) for row in got], [len(row) for row in wanted])
        for mine, row in zip(got, wanted):
            for a, b in zip(mine, row):
                self.assertLessEqual(abs(a - b), 1e-12 * max(1.0, *map(abs, row)))


class OperationsTest(Case):
    def test_norm(self) -> None:
        for seed in range(10):
            dice = random.Random(seed)
            x, gain, epsilon = matrix(dice, 3, 1 + seed), numbers(dice, 1 + seed), 10.0 ** -dice.randint(1, 9)
            with self.subTest(seed=seed):
                self.check(CPU.norm(x, gain, epsilon), [
                    [v * g / sqrt(inner(row, row) / len(row) + epsilon) for v, g in zip(row, gain)] for row in x])
        self.assertEqual(CPU.norm([[0.0, 0.0]], [3.0, 4.0], 1e-5), [[0.0, 0.0]])
        self.check(CPU.norm([[3e100, -4e100]], [1.0, 1.0], 1e-5), [[0.6 * sqrt(2), -0.8 * sqrt(2)]])

    def test_linear_is_x_times_the_transpose(self) -> None:
        dice = random.Random(1)
        weights, x = matrix(dice, 4, 3), matrix(dice, 5, 3)
        loaded = CPU.matrix(tensor(weights), None)
        self.assertEqual(CPU.linear(loaded, [[1.0, 0.0, 0.0]]), [[row[0] for row in CPU.rows(loaded)]])
        self.check(CPU.linear(loaded, x), [[inner(w, row) for w in tensor(weights).rows()] for row in x])

    def test_rotate_is_complex_multiplication(self) -> None:
        for seed in range(10):
            dice = random.Random(seed)
            head_width, heads, theta = 2 * dice.randint(1, 5), dice.randint(1, 3), dice.choice((100.0, 1e4, 5e5))
            positions = [0, 1, dice.randrange(2**20)]
            x = matrix(dice, 3, heads * head_width)
            wanted = []
            for row, position in zip(x, positions):
                turned: list[float] = []
                for i in range(0, len(row), 2):
                    angle = position * theta ** -((i % head_width) / head_width)
                    pair = complex(row[i], row[i + 1]) * rect(1.0, angle)
                    turned += [pair.real, pair.imag]
                wanted.append(turned)
            with self.subTest(seed=seed):
                turns = rotary_frequencies(head_width, theta)
                self.check(CPU.rotate(x, positions, turns), wanted)
                self.assertEqual(CPU.rotate(x, [0, 0, 0], turns), x)

    def test_norm_heads_and_bias(self) -> None:
        """Each head by itself: (3, 4) has the root mean square 5 / sqrt(2), whatever its neighbour is."""
        normed = CPU.norm_heads([[3.0, 4.0, 0.0, 2.0]], [1.0, 10.0], 0.0)
        self.check(normed, [[0.6 * sqrt(2), 8.0 * sqrt(2), 0.0, 10.0 * sqrt(2)]])
        loaded = CPU.matrix(tensor([[1.0, 2.0], [0.0, -1.0]]), None)
        self.assertEqual(CPU.linear(loaded, [[3.0, 4.0], [0.0, 0.0]], [0.5, -0.5]), [[11.5, -4.5], [0.5, -0.5]])

    def test_swiglu(self) -> None:
        gate, up = [numbers(random.Random(1), 9)], [numbers(random.Random(2), 9)]
        self.check(CPU.swiglu(gate, up), [[z * u / (1.0 + exp(-z)) for z, u in zip(gate[0], up[0])]])

    def test_swiglu_of_extremes(self) -> None:
        """exp(-z) leaves the range of a float below -709; the result is zero long before."""
        for z in (-inf, -1e308, -1e4, -746.0, -709.8, -700.1, -700.0):
            self.assertLess(abs(silu(z)), 1e-300)
            self.assertLess(abs(CPU.swiglu([[z]], [[1e200]])[0][0]), 1e-100)
        for z in (40.0, 700.0, 1e308, inf):
            self.assertEqual(CPU.swiglu([[z]], [[1.0]]), [[z]])
        for z in (0.0, -0.0, 5e-324, -1e-300):
            self.assertEqual(silu(z), z / 2)
        for z in (-600.0, -100.0, -36.7, -5.0):  # z exp(z) / (1 + exp(z)): the same without exp of a positive number
            self.assertAlmostEqual(silu(z) / (z * exp(z) / (1.0 + exp(z))), 1.0, places=12)

    def test_add_pick_to_lists(self) -> None:
        x = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
        self.assertEqual(CPU.add(x, [[0.5, 0.5], [-3.0, 1e300], [0.0, -0.0]]), [[1.5, 2.5], [0.0, 1e300], [5.0, 6.0]])
        self.assertEqual(CPU.pick(x, [2, 0, 2]), [[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]])
        self.assertEqual(CPU.pick(x, []), [])
        self.assertEqual(CPU.to_lists(x), [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def test_nothing_that_is_not_a_number_gets_lost(self) -> None:
        """NaN in one row reaches that row's results and no other's."""
        clean, weights, gain = [0.5, -1.0, 2.0, 1.5], [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0]], [1.0] * 4
        for place in range(4):
            bad = [nan if i == place else number for i, number in enumerate(clean)]
            for name, operation in {
                    "norm": lambda x: CPU.norm(x, gain, 1e-5), "linear": lambda x: CPU.linear(weights, x),
                    "rotate": lambda x: CPU.rotate(x, [3, 3, 3], (1.0,)), "add": lambda x: CPU.add(x, [clean] * 3),
                    "swiglu(x, _)": lambda x: CPU.swiglu(x, [clean] * 3),
                    "swiglu(_, x)": lambda x: CPU.swiglu([[-1e9] * 4] * 3, x)}.items():
                with self.subTest(name=name, place=place):
                    first, spoilt, last = operation([clean, bad, clean])
                    self.assertTrue(any(map(isnan, spoilt)))
                    self.assertEqual(first, last)
                    self.assertFalse(any(map(isnan, first)))


class MatrixTest(Case):
    def test_float_matrices_are_float32(self) -> None:
        rows = matrix(random.Random(1), 3, 5)
        loaded = CPU.matrix(tensor(rows), None)
        self.assertEqual(CPU.rows(loaded), tensor(rows).rows())
        self.assertEqual(CPU.matrix_bytes(loaded), 3 * 5 * 4)
        self.assertEqual(CPU.vector(Tensor((3,), array("f", [1, 2, 3]))), [1.0, 2.0, 3.0])
        embedded = CPU.embed(loaded, [2, 0, 2])
        self.assertEqual(embedded, [CPU.rows(loaded)[token] for token in (2, 0, 2)])
        embedded[0][0] = 99.0
        self.assertNotEqual(CPU.rows(loaded)[2][0], 99.0)

    def test_quantized_matrices_compute_with_what_they_store(self) -> None:
        for bits, group_size, symmetric in ((8, 4, True), (8, None, False), (4, 3, True), (4, 32, False)):
            with self.subTest(bits=bits, group_size=group_size, symmetric=symmetric):
                dice = random.Random(bits)
                given = tensor(matrix(dice, 6, 7))
                loaded = CPU.matrix(given, QuantizationConfig(bits, group_size, symmetric))
                stored, x = dequantize(loaded), matrix(dice, 3, 7)
                self.assertEqual(CPU.rows(loaded), stored)
                self.assertNotEqual(stored, given.rows())
                self.check(CPU.embed(loaded, [5, 0]), [stored[5], stored[0]])
                self.check(CPU.linear(loaded, x), [[inner(row, vector) for row in stored] for vector in x])
                self.assertEqual(CPU.matrix_bytes(loaded), loaded.nbytes)


class AttendTest(Case):
    HEAD_WIDTH, PAGE_SIZE, PAGES = 4, 3, 12

    def setUp(self) -> None:
        self.tokens: dict[tuple[int, int], tuple[list[float], list[float]]] = {}  # (request, position): key, value

    def make(self, dice: random.Random, kv_heads: int, layers: int = 2, fill: float = nan) -> ReferenceKVStore:
        """A store in which every slot holds ``fill``."""
        store = ReferenceKVStore(layers, kv_heads, self.HEAD_WIDTH, self.PAGES, self.PAGE_SIZE)
        for slot in range(self.PAGES * self.PAGE_SIZE):
            store.write(*divmod(slot, self.PAGE_SIZE), [fill] * store.width, [fill] * store.width)
        return store

    def softmax_attention(self, query: list[float], request: int, position: int, kv_heads: int) -> list[float]:
        out: list[float] = []
        heads = len(query) // self.HEAD_WIDTH
        for head in range(heads):
            start = head // (heads // kv_heads) * self.HEAD_WIDTH
            part = slice(start, start + self.HEAD_WIDTH)
            mine = query[head * self.HEAD_WIDTH:][:self.HEAD_WIDTH]
            seen = [self.tokens[request, p] for p in range(position + 1)]
            weights = [exp(inner(mine, key[part]) / sqrt(self.HEAD_WIDTH)) for key, _ in seen]
            out += [fsum(w * value[part][i] for w, (_, value) in zip(weights, seen)) / fsum(weights)
                    for i in range(self.HEAD_WIDTH)]
        return out

    def test_each_row_attends_to_its_own_past(self) -> None:
        """Grouped heads, several requests, chunks that begin anywhere, shuffled pages, NaN in every other slot."""
        for seed in range(30):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                kv_heads, group, layer = dice.choice((1, 2, 3)), dice.choice((1, 2, 4)), dice.randrange(2)
                store, pages = self.make(dice, kv_heads), dice.sample(range(self.PAGES), self.PAGES)
                kv_width, pieces, q, k, v, wanted = kv_heads * self.HEAD_WIDTH, [], [], [], [], []
                for request in range(3):
                    start, count = dice.randint(0, 6), dice.randint(1, 6)
                    table = [pages.pop() for _ in range(-(-(start + count) // self.PAGE_SIZE))]
                    pieces.append(Piece([0] * count, start, table, wants_logits=False))
                    for position in range(start + count):
                        key, value = numbers(dice, kv_width), numbers(dice, kv_width)
                        self.tokens[request, position] = key, value
                        if position < start:  # stored by an earlier step
                            slot = table[position // self.PAGE_SIZE] * self.PAGE_SIZE + position % self.PAGE_SIZE
                            store.write_layer(layer, [slot], [key], [value])
                            continue
                        query = numbers(dice, kv_width * group)
                        wanted.append(self.softmax_attention(query, request, position, kv_heads))
                        for rows, row in ((q, query), (k, key), (v, value)):
                            rows.append(row)
                batch = Batch.of(pieces, self.PAGE_SIZE)
                got = CPU.attend(q, k, v, layer, store, batch)
                self.check(got, wanted)
                for slot, key, value in zip(batch.slots, k, v):  # and the new keys and values are where they belong
                    part = slice(layer * kv_width, (layer + 1) * kv_width)
                    stored = store.read(*divmod(slot, self.PAGE_SIZE))
                    self.assertEqual((stored[0][part], stored[1][part]), (key, value))

    def test_scores_too_large_for_exp(self) -> None:
        """The largest score is subtracted first: 1e6 against 0 is a choice, not an overflow."""
        store = self.make(random.Random(0), kv_heads=1, layers=1)
        batch = Batch.of([Piece([0, 0], 0, [1], wants_logits=False)], self.PAGE_SIZE)
        keys, values = [[1e3, 0.0, 0.0, 0.0], [0.0] * 4], [[1.0] * 4, [2.0] * 4]
        got = CPU.attend([[0.0] * 4, [2e3, 0.0, 0.0, 0.0]], keys, values, 0, store, batch)
        self.assertEqual(got, [[1.0] * 4, [1.0] * 4])
        got = CPU.attend([[0.0] * 4, [-2e3, 0.0, 0.0, 0.0]], keys, values, 0, store, batch)
        self.assertEqual(got, [[1.0] * 4, [2.0] * 4])

    def test_nothing_that_is_not_a_number_gets_lost(self) -> None:
        """NaN in a query, key or value that is looked at reaches the rows that look, and no row before it."""
        for spoilt in ("q", "k", "v"):
            for row in range(3):
                with self.subTest(spoilt=spoilt, row=row):
                    store = self.make(random.Random(0), kv_heads=1, layers=1)
                    batch = Batch.of([Piece([0] * 3, 0, [1], wants_logits=False)], self.PAGE_SIZE)
                    given = {name: matrix(random.Random(1), 3, 4) for name in "qkv"}
                    given[spoilt][row][1] = nan
                    got = CPU.attend(given["q"], given["k"], given["v"], 0, store, batch)
                    reached = {row} if spoilt == "q" else set(range(row, 3))
                    self.assertEqual({i for i, out in enumerate(got) if any(map(isnan, out))}, reached)


class StoreTest(Case):
    MODEL = ModelConfig(vocab_size=5, width=12, layers=3, heads=6, kv_heads=2, ffn_width=4, max_context=9)

    def test_sizes(self) -> None:
        store = CPU.kv_store(self.MODEL, num_pages=4, page_size=5)
        self.assertEqual(store.width, 3 * 2 * 2)
        self.assertEqual(store.page_bytes, 2 * 8 * 5 * store.width)  # a key and a value, doubles
        self.assertEqual(store.keys[0][0][0].itemsize, 8)

    def test_what_is_written_is_read_and_stays_where_it_is(self) -> None:
        store, dice = CPU.kv_store(self.MODEL, num_pages=3, page_size=2), random.Random(1)
        written = {slot: (numbers(dice, store.width), numbers(dice, store.width)) for slot in range(6)}
        for slot, (key, value) in written.items():
            store.write(*divmod(slot, 2), key, value)
        for slot, token in written.items():
            self.assertEqual(store.read(*divmod(slot, 2)), token)
        store.read(0, 0)[0][0] = nan
        self.assertEqual(store.read(0, 0), written[0])

    def test_a_token_is_its_layers_one_after_the_other(self) -> None:
        store = CPU.kv_store(self.MODEL, num_pages=1, page_size=1)
        store.write(0, 0, [float(i) for i in range(12)], [float(-i) for i in range(12)])
        span = Span(first_row=0, count=1, end=1, pages=(0,), page_size=1)
        self.assertEqual(store.context(1, 0, span), ([array("d", [4, 5])], [(-4.0,), (-5.0,)]))
        self.assertEqual(store.context(2, 1, span), ([array("d", [10, 11])], [(-10.0,), (-11.0,)]))

    def test_a_page_comes_over_from_another_store(self) -> None:
        """As swapping does; and the other store keeps its own."""
        here, there = (CPU.kv_store(self.MODEL, num_pages=2, page_size=2) for _ in range(2))
        dice = random.Random(1)
        token, other = ((numbers(dice, here.width), numbers(dice, here.width)) for _ in range(2))
        there.write(1, 1, *token)
        here.copy_page(1, 0, there)
        here.write(0, 0, *other)
        self.assertEqual((here.read(0, 0), here.read(0, 1), there.read(1, 1)), (other, token, token))
        self.assertNotEqual(there.read(0, 0), other)

    def test_a_copied_page_is_a_copy(self) -> None:
        store, dice = CPU.kv_store(self.MODEL, num_pages=3, page_size=2), random.Random(1)
        tokens = [(numbers(dice, store.width), numbers(dice, store.width)) for _ in range(4)]
        for offset in range(2):
            store.write(0, offset, *tokens[offset])
        store.copy_page(0, 2)
        store.write(0, 1, *tokens[2])
        store.write(2, 0, *tokens[3])
        self.assertEqual([store.read(page, offset) for page in (0, 2) for offset in (0, 1)],
                         [tokens[0], tokens[2], tokens[3], tokens[1]])


if __name__ == "__main__":
    unittest.main()
