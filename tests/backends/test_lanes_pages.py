"""Attention in lanes: bit for bit what plain integers give, within the derived bound of doubles, and the same numbers
on pages of any size, shared, copied, swapped or used before."""

from __future__ import annotations

import random
import sys
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import exp, expm1, floor, fsum, hypot, inf, isnan, log2, nan, sqrt

from starter.backend import Batch, KVBounds, Piece, attention
from starter.backends.lanes.lanes import pack
from starter.backends.lanes.pages import FULL, MOST, STEPS, TABLE, LanesKVStore, exp_table
from starter.kv_cache import KVStore
from tests.test_backend import check_operations

Rows = list[list[float]]
PAGES = 8  # a request's block table has room for so many of the pages of a store, unless it needs more


@dataclass
class Tokens:
    """Queries, keys and values of one request in one layer, and the bounds that keys and values keep to."""

    kv_heads: int
    group: int
    head_width: int
    bounds: KVBounds
    q: Rows
    k: Rows
    v: Rows

    def __len__(self) -> int:
        return len(self.k)

    def store(self, page_size: int, layers: int = 1, num_pages: int = 0) -> LanesKVStore:
        needed = -(-len(self) // page_size)
        return LanesKVStore(layers, self.kv_heads, self.head_width, num_pages or needed + PAGES, page_size,
                           [self.bounds] * layers)

    def served(self, store: LanesKVStore, pages: Sequence[int], cuts: Sequence[int] = (), first: int = 0) -> Rows:
        """Attention of all rows from ``first`` on, in chunks that end at the cuts."""
        rows: Rows = []
        for start, end in pairwise((first, *cuts, len(self))):
            batch = Batch.of([Piece([0] * (end - start), start, pages, False)], store.page_size)
            store.write_layer(0, batch.slots, self.k[start:end], self.v[start:end])
            rows += store.attend(self.q[start:end], 0, batch)
        return rows

    def last(self, page_size: int) -> list[float]:
        """Attention of the last row on pages in reverse order."""
        store, end = self.store(page_size), len(self)
        pages = range(-(-end // page_size))[::-1]
        batch = Batch.of([Piece([0] * end, 0, pages, False)], page_size)
        store.write_layer(0, batch.slots, self.k, self.v)
        return store.attend(self.q[-1:], 0, Batch.of([Piece([0], end - 1, pages, False)], page_size))[0]

    def head(self, query_head: int, position: int, seen: int) -> tuple[list[float], Rows, Rows, int]:
        """One head's query, its keys and values, and where its numbers begin in a key."""
        width, first = self.head_width, query_head // self.group * self.head_width
        part = slice(first, first + width)
        return (self.q[position][query_head * width:(query_head + 1) * width],
                [key[part] for key in self.k[:seen]], [value[part] for value in self.v[:seen]], first)


def draw_tokens(seed: int, count: int, kv_heads: int, group: int, head_width: int, peak: float = 1.0) -> Tokens:
    """Every channel has a bound of its own. ``peak``: how large scores are, about."""
    dice = random.Random(seed)
    width = kv_heads * head_width
    bounds = KVBounds(*([10 ** dice.uniform(-1, 1) for _ in range(width)] for _ in range(2)))
    size = 3 * peak / fsum(bound * bound for bound in bounds.keys) ** 0.5 * sqrt(width)
    k, v = ([[dice.uniform(-1, 1) * bound for bound in numbers] for _ in range(count)]
            for numbers in (bounds.keys, bounds.values))
    q = [[dice.gauss(0, size) for _ in range(width * group)] for _ in range(count)]
    return Tokens(kv_heads, group, head_width, bounds, q, k, v)


def in_integers(tokens: Tokens, position: int) -> list[float]:
    """The fixed-point attention of the docstring in plain integers: no lane, no page."""
    d, seen, out = tokens.head_width, position + 1, []
    channel_units = [bound / MOST or 1.0 for bound in tokens.bounds.keys]
    units = [channel_units[i // d // tokens.group * d + i % d] for i in range(len(tokens.q[position]))]
    query = [number * unit / sqrt(d) for number, unit in zip(tokens.q[position], units)]
    reach = (2**31 - 1) / (MOST * sqrt(d)) - sqrt(d) / 2
    e = floor(log2(reach) - log2(hypot(*query)))
    for i in range(tokens.kv_heads * tokens.group):
        _, keys, values, first = tokens.head(i, position, seen)
        mine = [round(number * 2.0**e) for number in query[i * d:(i + 1) * d]]
        scores = [sum(round(number / unit) * n for number, unit, n in zip(key, channel_units[first:], mine))
                  for key in keys]
        assert max(map(abs, scores)) < 2**31
        gaps = [(max(scores) - score) * 2**STEPS for score in scores]
        steps = [gap >> e if e >= 0 else gap << -e for gap in gaps]
        shift = 0
        weights = [weight(step, 0) for step in steps]
        while sum(map(weight, steps, [0] * seen)) >= 2**shift * (FULL - seen):
            shift += 1
        weights = [weight(step, shift) for step in steps]
        assert sum(weights) <= FULL
        unit = max(tokens.bounds.values[first:first + d]) / MOST or 1.0
        out += [sum(w * round(value[c] / unit) for w, value in zip(weights, values)) * unit / sum(weights)
                for c in range(d)]
    return out


def weight(step: int, shift: int) -> int:
    """An attention weight: exp in the middle of a step."""
    return round(exp(-(step + 0.5) / 512) * 2.0 ** (15 - shift)) if step < 12 * 512 else 0


class Case(unittest.TestCase):
    def check_bound(self, tokens: Tokens, position: int, got: list[float]) -> float:
        """|o - o'| <= spread (e**(2 s) - 1 + n / P) + unit / 2, with s the error of a score (rounding of the key, of
        the query, half a step of the table), P what the weights, rounded to integers, add up to at least."""
        d, seen = tokens.head_width, position + 1
        units = [bound / MOST or 1.0 for bound in tokens.bounds.keys]
        length = hypot(*[n * units[i // d // tokens.group * d + i % d] for i, n in enumerate(tokens.q[position])])
        unit_q = 2 * length / ((2**31 - 1) / (MOST * sqrt(d)) - sqrt(d) / 2)  # at most, times sqrt(d)
        worst = 0.0
        for i in range(tokens.kv_heads * tokens.group):
            query, keys, values, first = tokens.head(i, position, seen)
            wanted = attention(query, keys, list(zip(*values)))
            error = max(fsum(abs(a) * unit / 2 for a, unit in zip(query, units[first:]))
                        + fsum(abs(b) / unit * unit_q / 2 for b, unit in zip(key, units[first:])) for key in keys)
            score = error / sqrt(d) + 0.5 / 512 if seen > 1 else 0.0
            rounding = seen / min(32_000, (FULL - seen) / 2 - seen) if seen > 1 else 0.0
            self.assertLess(score, 20.0)
            for c, number in enumerate(wanted):
                spread = max(value[c] for value in values) - min(value[c] for value in values)
                unit = max(tokens.bounds.values[first:first + d]) / MOST or 1.0
                bound = spread * (expm1(2 * score) + rounding) + unit / 2
                self.assertLessEqual(abs(got[i * d + c] - number), bound * (1 + 1e-9), (i, c))
                worst = max(worst, abs(got[i * d + c] - number) / (max(tokens.bounds.values[first:first + d]) or 1.0))
        return worst

    def check_close(self, got: Sequence[float], wanted: Sequence[float], tolerance: float = 1e-12) -> None:
        size = max(1e-300, *map(abs, wanted))
        for a, b in zip(got, wanted, strict=True):
            self.assertLessEqual(abs(a - b), tolerance * size)


class AttentionTest(Case):
    def test_every_row_of_random_shapes(self) -> None:
        """Against plain integers, exactly; against doubles, within the derived bound and 4e-3 of the values' bound."""
        for seed, (group, d) in enumerate(product((1, 2, 4), (2, 4, 6, 64))):
            dice = random.Random(seed)
            count = dice.randint(2, 6 if d == 64 else 20)
            tokens = draw_tokens(seed, count, dice.choice((1, 2, 3)), group, d)
            page_size = dice.choice((1, 2, 3, 8, 16))
            store = tokens.store(page_size)
            rows = tokens.served(store, dice.sample(range(len(store.keys[0])), -(-count // page_size)))
            for position, got in enumerate(rows):
                with self.subTest(seed=seed, group=group, d=d, position=position):
                    self.check_close(got, in_integers(tokens, position))
                    self.assertLess(self.check_bound(tokens, position, got), 4e-3)

    def test_lengths_around_a_page_and_long_ones(self) -> None:
        for page_size, count in ((8, 1), (8, 7), (8, 8), (8, 9), (1, 2), (16, 100), (3, 100), (16, 1000), (1000, 1000)):
            tokens = draw_tokens(count, count, 2, 2, 4)
            with self.subTest(page_size=page_size, count=count):
                got = tokens.last(page_size)
                self.check_close(got, in_integers(tokens, count - 1))
                self.assertLess(self.check_bound(tokens, count - 1, got), 2e-3)

    def test_flat_and_peaked_scores(self) -> None:
        """From scores that are all alike to scores beyond the table's end, 128, and beyond its steps: 2**-e > 1/512."""
        exponents = set()
        for peak in (1e-9, 1e-6, 1e-3, 0.1, 3.0, 30.0, 300.0, 3e3, 3e4, 3e6, 3e9):
            tokens = draw_tokens(7, 60, 1, 2, 4, peak)
            units = [bound / MOST / 2 for bound in tokens.bounds.keys] * 2
            length = hypot(*[number * unit for number, unit in zip(tokens.q[-1], units)])
            exponents.add(floor(log2(32_768 / length)))
            with self.subTest(peak=peak):
                got = tokens.last(16)
                self.check_close(got, in_integers(tokens, 59))
                if peak <= 300:
                    self.check_bound(tokens, 59, got)
        self.assertTrue(min(exponents) < 0 < STEPS < 32 + STEPS < max(exponents), exponents)

    def test_queries_of_any_size(self) -> None:
        """Tiny ones see the mean of the values, huge ones the best key's value."""
        tokens = draw_tokens(8, 5, 1, 1, 4)
        direction, keys, values = tokens.q[-1], tokens.k, tokens.v
        best = max(range(5), key=lambda t: fsum(map(lambda a, b: a * b, direction, keys[t])))
        for power in range(-320, 305, 5):
            tokens.q = [[number * 10.0**power for number in direction]] * 5
            wanted = [fsum(column) / 5 for column in zip(*values)] if power < 0 else values[best]
            if not -5 <= power < 3:
                with self.subTest(power=power):
                    self.check_close(tokens.last(2), wanted, 2e-4)
        tokens.q = [[0.0] * 4] * 5
        self.check_close(tokens.last(2), [fsum(column) / 5 for column in zip(*values)], 2e-4)

    def test_one_token_gives_its_value(self) -> None:
        tokens = draw_tokens(9, 1, 2, 2, 6)
        stored = tokens.store(4)
        row = tokens.served(stored, (3,))[0]
        _, value = stored.read(3, 0)
        self.check_close(row, [*value[:6] * 2, *value[6:] * 2], 1e-15)

    def test_zero_bounds(self) -> None:
        """A head whose weights are all 0."""
        tokens = Tokens(1, 1, 2, KVBounds([0.0, 0.0], [0.0, 0.0]), [[1.0, 2.0]] * 3, [[0.0, 0.0]] * 3, [[0.0, 0.0]] * 3)
        self.assertEqual(tokens.last(2), [0.0, 0.0])

    def test_keys_at_their_bounds_and_queries_along_them(self) -> None:
        """The largest scores there can be, all of the query in one head: no lane overflows."""
        for d, sign, turn in product((2, 6, 64), (1.0, -1.0), (1.0, -1.0)):
            tokens = draw_tokens(d, 5, 2, 1, d)
            tokens.k = [[(turn if t % 2 else 1.0) * sign * bound for bound in tokens.bounds.keys] for t in range(5)]
            tokens.v = [[(-1.0) ** t * sign * bound for bound in tokens.bounds.values] for t in range(5)]
            for size in (1.0, 1.23, 1.5, 1.77, 1.999):
                tokens.q = [[size / bound if i < d else 0.0 for i, bound in enumerate(tokens.bounds.keys)]] * 5
                with self.subTest(d=d, sign=sign, turn=turn, size=size):
                    self.check_close(tokens.last(4), in_integers(tokens, 4))

    def test_room_for_rounding(self) -> None:
        """Ten numbers of 6553.6 times 32767 fit into a lane; rounded to 6554 they would not."""
        tokens = Tokens(1, 1, 10, KVBounds([1.0] * 10, [1.0] * 10), [[6553.6 * MOST * sqrt(10)] * 10] * 3,
                        [[sign] * 10 for sign in (1.0, -1.0, 0.0)], [[number] * 10 for number in (0.25, 0.5, 0.75)])
        self.check_close(tokens.last(4), in_integers(tokens, 2))
        self.check_close(tokens.last(4), [0.25] * 10, 1e-4)


class SoftmaxTest(unittest.TestCase):
    def weights(self, gaps: Sequence[int], page_size: int = 0, exponent: int = STEPS) -> Sequence[int]:
        """Of tokens that lie so many steps of the table below the best."""
        store = LanesKVStore(1, 1, 1, 1, page_size or len(gaps), [KVBounds([1.0], [1.0])])
        size = store.page_size
        columns = [[pack([-gap for gap in gaps[i:i + size]], 32)] for i in range(0, len(gaps), size)]
        return store._softmax([1], exponent, columns, len(gaps))

    def test_the_table(self) -> None:
        for shift in range(16):
            table = exp_table(shift)
            self.assertEqual(len(table), TABLE)
            for step in (0, 1, 2, 177, 178, 511, 512, 3000, 5677, 12 * 512 - 1, 12 * 512, TABLE - 1):
                exact = exp(-(step + 0.5) / 512) * 2.0 ** (15 - shift)
                self.assertLessEqual(abs(table[step] - exact), 0.5 + 1e-9, (shift, step))
            self.assertTrue(all(a >= b for a, b in pairwise(table)))

    def test_they_never_add_up_to_more_than_full(self) -> None:
        """Nor to so little that the room is wasted; up to 32,768 tokens, for every kind of distribution."""
        dice = random.Random(1)
        kinds: Sequence[Callable[[int], int]] = (
            lambda t: 0, lambda t: 354 if t else 0, lambda t: 355 if t else 0, lambda t: 532 * (t > 0),
            lambda t: t % 700, lambda t: 5000 if t else 0, lambda t: TABLE + 5 if t else 0,
            lambda t: int(dice.expovariate(1 / 300)), lambda t: dice.randint(0, 6000))
        for count in (2, 3, 50, 1000, 32_767, 32_768):
            for kind, gap in enumerate(kinds):
                gaps = [gap(t) for t in range(count)]
                gaps[dice.randrange(count)] = 0
                weights = self.weights(gaps)
                with self.subTest(count=count, kind=kind):
                    self.assertEqual(len(weights), count)
                    self.assertLessEqual(sum(weights), FULL)
                    self.assertGreater(sum(weights), 0)
                    if count <= 1000:
                        self.assertGreaterEqual(sum(weights), min(32_700, (FULL - count) // 2 - count))
                        off = (1 + count / 2) / sum(weights)  # every weight is rounded
                        total = fsum(exp(-step / 512) for step in gaps)
                        for step, got in zip(gaps, weights):
                            self.assertAlmostEqual(got / sum(weights), exp(-step / 512) / total, delta=off)

    def test_full_leaves_the_sum_of_values_in_its_lane(self) -> None:
        self.assertLess(FULL * MOST, 2**31)

    def test_beyond_the_end_of_the_table(self) -> None:
        for exponent, gap in ((STEPS, TABLE - 1), (STEPS, TABLE), (STEPS, 2**31 - 1), (0, 128), (-30, 1), (-900, 2)):
            self.assertEqual(self.weights([0, gap, 0], exponent=exponent), (weight(0, 0), 0, weight(0, 0)))

    def test_steps_of_every_size(self) -> None:
        """Gaps in units of 2**-e, from far coarser than the table's steps to far finer."""
        for exponent in (-3, 0, 1, 8, 9, 10, 22, 39, 40, 41, 42, 60, 1022):
            for gap in (0, 1, 511, 512, 513, 2**20 + 1, 2**31 - 1):
                step = gap << 9 - exponent if exponent < 9 else gap >> exponent - 9
                wanted = (weight(0, 0), weight(step, 0))
                if sum(wanted) < FULL - 2:
                    self.assertEqual(self.weights([0, gap], 1, exponent), wanted, (exponent, gap))
                    self.assertEqual(self.weights([0, gap], 5, exponent), wanted, (exponent, gap))


class SameBitsTest(unittest.TestCase):
    """What is exact in integers does not depend on where it is stored and what it is computed with."""

    def setUp(self) -> None:
        self.tokens = draw_tokens(3, 20, 2, 2, 4)
        self.alone = self.tokens.served(self.tokens.store(32), (0,))
        self.dice = random.Random(3)

    def test_any_page_size_any_chunks_any_pages(self) -> None:
        for page_size in (1, 2, 3, 4, 8, 16, 19, 20, 21):
            store = self.tokens.store(page_size)
            for cuts in ((), range(1, 20), sorted(self.dice.sample(range(1, 20), 3))):
                pages = self.dice.sample(range(len(store.keys[0])), -(-20 // page_size))
                with self.subTest(page_size=page_size, cuts=cuts):  # the pages are dirty from the second time on
                    self.assertEqual(self.tokens.served(store, pages, cuts), self.alone)

    def test_several_requests_in_a_batch(self) -> None:
        others = [draw_tokens(seed, 5 + seed, 2, 2, 4) for seed in range(3)]
        for other in others:
            other.bounds = self.tokens.bounds
        everybody = [*others, self.tokens]
        wanted = [tokens.served(tokens.store(3), range(7)) for tokens in everybody]
        store = self.tokens.store(3, num_pages=28)
        pages = self.dice.sample(range(28), 28)
        pieces = [Piece([0] * len(tokens), 0, pages[7 * i:7 * i + 7], False) for i, tokens in enumerate(everybody)]
        batch = Batch.of(pieces, 3)
        store.write_layer(0, batch.slots, [k for t in everybody for k in t.k], [v for t in everybody for v in t.v])
        rows = store.attend([q for t in everybody for q in t.q], 0, batch)
        self.assertEqual(rows, [row for rows in wanted for row in rows])

    def test_slots_that_are_written_again(self) -> None:
        """A step that failed is computed again: other numbers in the same slots, some of them beyond the new end."""
        wrong = draw_tokens(4, 20, 2, 2, 4)
        wrong.bounds = self.tokens.bounds
        for page_size, again in product((1, 3, 8), (0, 1, 7, 13, 19)):
            store = self.tokens.store(page_size)
            pages = self.dice.sample(range(len(store.keys[0])), -(-20 // page_size))
            mixed = Tokens(2, 2, 4, self.tokens.bounds, self.tokens.q, self.tokens.k[:again] + wrong.k[again:],
                           self.tokens.v[:again] + wrong.v[again:])
            mixed.served(store, pages)
            with self.subTest(page_size=page_size, again=again):
                rows = self.tokens.served(store, pages, range(again + 1, 20), first=again)
                self.assertEqual(rows, self.alone[again:])

    def test_copies_go_their_own_way(self) -> None:
        """Fork, copy-on-write and swap: after any number of tokens, in the same store and in another."""
        for page_size, end, elsewhere in product((1, 4, 8), (1, 4, 7, 8, 19), (False, True)):
            store = self.tokens.store(page_size, num_pages=60)
            other = self.tokens.store(page_size, num_pages=60) if elsewhere else store
            pages = self.dice.sample(range(30), -(-20 // page_size))
            copies = self.dice.sample(range(30, 60), len(pages))
            early = Tokens(2, 2, 4, self.tokens.bounds, *(rows[:end] for rows in (
                self.tokens.q, self.tokens.k, self.tokens.v)))
            early.served(store, pages)
            for page, copy in zip(pages, copies[:-(-end // page_size)]):
                other.copy_page(page, copy, store if elsewhere else None)
            with self.subTest(page_size=page_size, end=end, elsewhere=elsewhere):
                wrong = Tokens(2, 2, 4, self.tokens.bounds, self.tokens.q, self.tokens.k[::-1], self.tokens.v[::-1])
                theirs = wrong.served(store, pages, first=end)  # the origin goes on otherwise
                self.assertEqual(self.tokens.served(other, copies, first=end), self.alone[end:])
                batch = Batch.of([Piece([0], 19, pages, False)], page_size)
                self.assertEqual(store.attend(wrong.q[19:], 0, batch), theirs[-1:])

    def test_layers_are_apart(self) -> None:
        tokens = draw_tokens(5, 6, 1, 1, 2)
        bounds = [tokens.bounds, KVBounds([5 * b for b in tokens.bounds.keys], [7 * b for b in tokens.bounds.values])]
        store = LanesKVStore(2, 1, 2, 2, 3, bounds)
        batch = Batch.of([Piece([0] * 6, 0, (1, 0), False)], 3)
        rows = []
        for layer in (0, 1):
            store.write_layer(layer, batch.slots, tokens.k, tokens.v)
            rows.append(store.attend(tokens.q, layer, batch))
        wanted = [Tokens(1, 1, 2, bound, tokens.q, tokens.k, tokens.v).served(tokens_store, (0,))
                  for bound in bounds for tokens_store in [LanesKVStore(1, 1, 2, 1, 6, [bound])]]
        self.assertEqual(rows, wanted)
        self.assertEqual(store.attend(tokens.q, 0, batch), wanted[0])


class StoreTest(Case):
    def test_it_has_every_operation_of_a_store(self) -> None:
        check_operations(self, LanesKVStore, KVStore)
        self.assertTrue(all(hasattr(LanesKVStore(1, 1, 2, 1, 1, [KVBounds([1.0] * 2, [1.0] * 2)]), name)
                            for name in ("width", "page_bytes", "tail_bytes", "peak_tails")))

    def test_numbers_come_back_within_half_a_unit(self) -> None:
        dice = random.Random(1)
        bounds = [KVBounds([10 ** dice.uniform(-3, 3) for _ in range(6)], [10 ** dice.uniform(-3, 3) for _ in range(6)])
                  for _ in range(2)]
        store = LanesKVStore(2, 2, 3, 3, 4, bounds)
        key_units = [bound / MOST for layer in bounds for bound in layer.keys]
        value_units = [max(layer.values[i:i + 3]) / MOST for layer in bounds for i in (0, 3) for _ in range(3)]
        written = {}
        for page, offset in product((2, 0), range(4)):
            key, value = ([dice.choice((-1.0, 1.0, dice.uniform(-1, 1))) * bound for bound in side]
                          for side in ([*bounds[0].keys, *bounds[1].keys], [*bounds[0].values, *bounds[1].values]))
            store.write(page, offset, key, value)
            written[page, offset] = key, value
        for place, (key, value) in written.items():
            for got, wanted, units in zip(store.read(*place), (key, value), (key_units, value_units)):
                for a, b, unit in zip(got, wanted, units, strict=True):
                    self.assertLessEqual(abs(a - b), unit / 2 * (1 + 1e-9))
            store.write(1, place[1], *store.read(*place))
            self.assertEqual(store.read(1, place[1]), store.read(*place))

    def test_what_lies_outside_the_bounds_is_cut_and_leaves_its_neighbours_alone(self) -> None:
        store = LanesKVStore(1, 1, 3, 1, 4, [KVBounds([2.0] * 3, [2.0] * 3)])
        for offset, outside in enumerate((2.1, -2.1, 1e4, -1e4)):
            store.write(0, offset, [0.5, outside, -0.5], [-0.25, outside, 0.25])
        for offset in range(4):
            key, value = store.read(0, offset)
            self.check_close(key, [0.5, (-1) ** offset * 2.0, -0.5], 1e-4)
            self.check_close(value, [-0.25, (-1) ** offset * 2.0, 0.25], 1e-4)

    def test_writing_the_first_slot_empties_the_page(self) -> None:
        tokens = draw_tokens(1, 8, 2, 1, 2)
        store = tokens.store(8)
        tokens.served(store, (0,))
        store.write(0, 0, tokens.k[0], tokens.v[0])
        self.assertEqual([len(head) for head in store.values[0][0]], [1, 1])
        self.assertLess(max(map(abs, store.keys[0][0])), 2**15)

    def test_what_is_no_number(self) -> None:
        """In a query it makes the row NaN, and no other row; in a key or a value it leaves its neighbours alone."""
        tokens = draw_tokens(2, 6, 1, 2, 2)
        healthy = tokens.served(tokens.store(4), (0, 1))
        for wrong in (nan, inf, -inf):
            store = tokens.store(4)
            tokens.served(store, (0, 1))
            batch = Batch.of([Piece([0, 0], 4, (0, 1), False)], 4)
            rows = store.attend([[*tokens.q[4][:3], wrong], tokens.q[5]], 0, batch)
            self.assertEqual((list(map(isnan, rows[0])), rows[1]), ([True] * 4, healthy[5]))
            for offset, number in ((0, wrong), (1, 0.5), (2, wrong), (3, -0.5)):
                store.write(3, offset, [number * 0.1, 0.05], [0.05, number * 0.1])
            for offset, number in ((1, 0.05), (3, -0.05)):
                key, value = store.read(3, offset)
                self.check_close([*key, *value], [number, 0.05, 0.05, number], 2e-2)

    def test_page_bytes_are_those_of_the_integers(self) -> None:
        """sys.getsizeof, and 8 for each reference to one; where the last lane is not full, a digit of 4 less."""
        for page_size, d, kv_heads in ((1, 2, 1), (3, 4, 2), (16, 6, 1), (30, 64, 2)):
            tokens = draw_tokens(1, page_size, kv_heads, 1, d)
            tokens.k = [list(tokens.bounds.keys)] * page_size
            tokens.v = [[-bound for bound in tokens.bounds.values]] * page_size
            store = tokens.store(page_size, layers=2)
            batch = Batch.of([Piece([0] * page_size, 0, (0,), False)], page_size)
            for layer in range(2):
                store.write_layer(layer, batch.slots, tokens.k, tokens.v)
            integers = [n for layer in store.keys for n in layer[0]]
            integers += [n for layer in store.values for head in layer[0] for n in head]
            real = sum(sys.getsizeof(n) + 8 for n in integers)
            with self.subTest(page_size=page_size, d=d, kv_heads=kv_heads):
                self.assertTrue(real <= store.page_bytes <= real + 4 * len(integers), (real, store.page_bytes))


if __name__ == "__main__":
    unittest.main()
