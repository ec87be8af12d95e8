"""Attention in lanes from int8 pages: the reference's attention on the same pages is the oracle."""

from __future__ import annotations

import random
import unittest
from math import inf, isnan, nan, sqrt

from starter.backend import Batch, Piece, ReferenceBackend
from starter.backends.lanes.int8_pages import LanesInt8KVStore, mixed, spread
from starter.backends.lanes.lanes import pack

REFERENCE = ReferenceBackend()
Rows = list[list[float]]


def rows(dice: random.Random, count: int, width: int, size: float = 1.0) -> Rows:
    return [[dice.gauss(0.0, size) for _ in range(width)] for _ in range(count)]


def attended(store: LanesInt8KVStore, pieces: list[Piece], q: Rows, k: Rows, v: Rows, lanes: bool) -> Rows:
    """Write and attend, in lanes or as the reference does."""
    batch = Batch.of(pieces, store.page_size)
    if not lanes:
        return REFERENCE.attend(q, k, v, 0, store, batch)
    store.write_layer(0, batch.slots, k, v)
    return store.attend(q, 0, batch)


class AttentionTest(unittest.TestCase):
    def compare(self, got: Rows, wanted: Rows, delta: float) -> None:
        self.assertEqual([len(row) for row in got], [len(row) for row in wanted])
        self.assertLess(max(abs(a - b) for mine, other in zip(got, wanted) for a, b in zip(mine, other)), delta)

    def test_equal_to_the_reference_on_the_same_pages(self) -> None:
        """Head widths, groups, page sizes, lengths around a page's end, permuted block tables, prefill and decode."""
        for seed in range(40):
            dice = random.Random(seed)
            width, kv_heads, group = dice.choice((2, 4, 8, 16, 48)), dice.choice((1, 2, 3)), dice.choice((1, 2, 4))
            size = dice.choice((1, 2, 3, 8, 16))
            length = dice.choice((1, size, size + 1, 2 * size, 3 * size + 1, 40))
            pages = list(range(-(-length // size) + 1))
            dice.shuffle(pages)
            numbers = (rows(dice, length, group * kv_heads * width, dice.choice((0.1, 1.0, 9.0))),
                       rows(dice, length, kv_heads * width, dice.choice((0.1, 1.0, 9.0))),
                       rows(dice, length, kv_heads * width, dice.choice((1e-3, 1.0, 1e3))))
            largest = max(abs(number) for row in numbers[2] for number in row)
            results = []
            with self.subTest(seed=seed):
                for lanes in (True, False):
                    store = LanesInt8KVStore(1, kv_heads, width, len(pages), size)
                    results.append(attended(store, [Piece([0] * length, 0, pages, False)], *numbers, lanes))
                self.compare(*results, delta=1e-4 * largest)

    def test_chunks_and_neighbours_change_no_bit(self) -> None:
        for seed in range(10):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                size, width, length = dice.choice((2, 5, 8)), 4, 21
                q, k, v = (rows(dice, length, n * width) for n in (4, 2, 2))
                other = tuple(rows(dice, 3, n * width) for n in (4, 2, 2))
                whole = attended(LanesInt8KVStore(1, 2, width, 20, size), [Piece([0] * length, 0, range(11), False)],
                                 q, k, v, True)
                store, start, pieces = LanesInt8KVStore(1, 2, width, 20, size), 0, []
                while start < length:
                    end = min(length, start + dice.randint(1, 6))
                    together = [Piece([0] * 3, 0, (12, 13), False), Piece([0] * (end - start), start, range(11), False)]
                    pieces += attended(store, together, *([*theirs, *ours[start:end]] for theirs, ours in
                                                          zip(other, (q, k, v))), True)[3:]
                    start = end
                self.assertEqual(pieces, whole)

    def test_extremes_fill_the_lanes_and_spill_nowhere(self) -> None:
        """All codes at an end of their range, queries along the keys, one token with nearly all of the weight."""
        width, size = 8, 4
        for sign in (1.0, -1.0):
            for peak in (0.0, 50.0):
                k = [[sign * (9.0 if i % size else -9.0)] * width for i in range(12)]
                v = [[sign * (-1.0) ** i * 7.0] * width for i in range(12)]
                q = [[sign * peak] * width for _ in range(12)]
                results = [attended(LanesInt8KVStore(1, 1, width, 3, size), [Piece([0] * 12, 0, (2, 0, 1), False)],
                                    q, k, v, lanes) for lanes in (True, False)]
                with self.subTest(sign=sign, peak=peak):
                    self.compare(*results, delta=2e-3)  # scores go up to 1,272, known to a millionth

    def test_room_for_rounding(self) -> None:
        """Every number of the query is rounded up by a half, which takes the score of a key of 255s from just below a
        lane's end to beyond it, unless there is room."""
        fit = {side * side: (2**31 - 1) / (255 * side * side) for side in range(2, 100, 2)}  # the root is exact
        width = next(w for w, number in fit.items() if int(number) % 2 and number % 1 > 0.5)
        query = [(int(fit[width]) + 0.5) * sqrt(width)] * width
        k, v = [[number] * width for number in (255.0, 0.0, 0.0)], [[number] * width for number in (1.0, 2.0, 2.0)]
        got = attended(LanesInt8KVStore(1, 1, width, 2, 2), [Piece([0] * 3, 0, (0, 1), False)], [query] * 3, k, v, True)
        self.compare(got[2:], [[1.0] * width], delta=1e-3)

    def test_what_is_not_finite_stays_in_its_row(self) -> None:
        dice = random.Random(1)
        for bad in (nan, inf):
            q, k, v = (rows(dice, 9, n * 4) for n in (2, 1, 1))
            q[4][1] = bad
            got = attended(LanesInt8KVStore(1, 1, 4, 3, 4), [Piece([0] * 9, 0, (0, 1, 2), False)], q, k, v, True)
            self.assertEqual([any(map(isnan, row)) for row in got], [i == 4 for i in range(9)])
        k[1][0] = nan  # then every row that sees it
        got = attended(LanesInt8KVStore(1, 1, 4, 3, 4), [Piece([0] * 9, 0, (0, 1, 2), False)],
                       [row * 2 for row in v], k, v, True)
        self.assertEqual([all(map(isnan, row)) for row in got], [i >= 1 for i in range(9)])


class PartsTest(unittest.TestCase):
    def test_spread_is_pack_of_unsigned_bytes(self) -> None:
        codes = bytes(random.Random(2).choices(range(256), k=60))
        self.assertEqual(spread(codes, 20), [pack(list(codes[i:i + 20]), 32) for i in (0, 20, 40)])

    def test_mixed_weighs_by_softmax_and_scale(self) -> None:
        """Two tokens of equal score, codes 3 and -5 at scales 1 and 2: (3 - 10) / 2; a third one is not seen."""
        tokens = [pack([code + 128] * 2, 32) for code in (3, -5, 100)]
        for number in mixed([4.0, 4.0], tokens, [1.0, 2.0, 1.0], 2):
            self.assertAlmostEqual(number, -3.5, places=5)


if __name__ == "__main__":
    unittest.main()
