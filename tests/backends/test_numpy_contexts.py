"""What is kept of a decode for the next one changes no number, whatever happens in between (extra ``numpy``)."""

from __future__ import annotations

import random
import unittest
from collections.abc import Callable
from dataclasses import replace
from math import nan
from typing import Any
from unittest import mock

from starter import load_backend
from starter.backend import Batch, Piece
from tests.extras import needs
from tests.support import CONFIG

LAYERS, KV_HEADS, WIDTH = 2, 2, 4
SHAPE = replace(CONFIG, width=2 * KV_HEADS * WIDTH, heads=2 * KV_HEADS, kv_heads=KV_HEADS, layers=LAYERS)
PAGE_SIZE = 3
PAGES = 60


class Pair:
    """The plain backend and the one on arrays, told the same; some requests on pages of their own."""

    def __init__(self, dice: random.Random, kv_quantization: str | None) -> None:
        import numpy as np
        self.np, self.dice = np, dice
        self.plain, self.fast = load_backend("reference"), load_backend("numpy")
        self.stores: list[Any] = [backend.kv_store(SHAPE, PAGES, PAGE_SIZE, (), kv_quantization)
                                  for backend in (self.plain, self.fast)]
        self.free = dice.sample(range(PAGES), PAGES)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def grow(self, name: str, count: int) -> Piece:
        """The request's next tokens, on new pages where it needs them."""
        table, start = self.tables.setdefault(name, []), self.lengths.get(name, 0)
        while len(table) * PAGE_SIZE < start + count:
            table.append(self.free.pop())
        self.lengths[name] = start + count
        return Piece([0] * count, start, tuple(table), True)

    def again(self, name: str) -> Piece:
        """The newest token, which was lost, and one more: they end a position later, but are no decode."""
        piece = self.grow(name, 1)
        return Piece([0, 0], piece.start - 1, piece.pages, True)

    def busy(self, pieces: list[Piece]) -> list[str]:
        """Whose pieces these are."""
        return [name for name, table in self.tables.items() for piece in pieces if piece.pages[0] == table[0]]

    def end(self, name: str) -> None:
        self.free += self.tables.pop(name)
        for page in self.free:
            self.drop_tail(page)
        del self.lengths[name]

    def move(self, name: str) -> None:
        """Somebody copies a page of a request to another, and that takes its place."""
        table = self.tables[name]
        i = self.dice.randrange(len(table))
        target = self.free.pop()
        for store in self.stores:
            store.copy_page(table[i], target)
        self.free.append(table[i])
        self.drop_tail(table[i])
        table[i] = target

    def overwrite(self, name: str) -> None:
        """Somebody writes the newest position anew, past the decoder."""
        page, offset = divmod(self.lengths[name] - 1, PAGE_SIZE)
        key, value = ([self.number() for _ in range(LAYERS * KV_HEADS * WIDTH)] for _ in range(2))
        for store in self.stores:
            store.write(self.tables[name][page], offset, key, value)

    def drop_tail(self, page: int) -> None:
        for store in self.stores:
            store.drop_tail(page)

    def number(self) -> float:
        return float(self.np.float32(self.dice.gauss(0, 1)))

    def compute(self, pieces: list[Piece], layers: int = LAYERS) -> list[float]:
        """How far the two are apart, layer by layer."""
        batch = Batch.of(pieces, PAGE_SIZE)
        apart = []
        for layer in range(layers):
            q, k, v = ([[self.number() for _ in range(width)] for _ in batch.tokens]
                       for width in (SHAPE.q_width, SHAPE.kv_width, SHAPE.kv_width))
            wanted = self.plain.attend(q, k, v, layer, self.stores[0], batch)
            got = self.fast.attend(*(self.np.array(x, dtype=self.np.float32) for x in (q, k, v)), layer,
                                   self.stores[1], batch).tolist()
            apart.append(max(abs(a - b) for mine, row in zip(got, wanted, strict=True)
                             for a, b in zip(mine, row, strict=True)))
        for piece in pieces:
            for page in piece.pages[piece.start // PAGE_SIZE:(piece.start + len(piece.tokens)) // PAGE_SIZE]:
                self.drop_tail(page)
        return apart


@needs("numpy", "numpy")
class KeptContextsTest(unittest.TestCase):
    def setUp(self) -> None:
        from starter.backends.numpy import attention as numpy_attention
        from starter.backends.numpy import contexts as numpy_contexts
        self.attention, self.contexts = numpy_attention, numpy_contexts
        small = mock.patch.object(numpy_contexts, "WORTH", 0)
        small.start()
        self.addCleanup(small.stop)

    def kept(self, pair: Pair) -> list[Any]:
        return [group.kept for group in pair.stores[1].plan.groups]

    def test_decodes_agree_with_the_plain_backend_whatever_happens_in_between(self) -> None:
        """Requests come, decode together, are interrupted in mid-layer and computed again, have pages copied and
        overwritten, end, and leave their pages to others."""
        went_on = 0
        for seed in range(60):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                pair = Pair(dice, dice.choice((None, None, "int8")))
                kept = dice.choice((0, 10_000, 10**6, 10**6))
                with mock.patch.multiple(self.attention, TILE=dice.choice((100, 10**6)),
                                         PADDING=dice.choice((0, 10**6))), \
                        mock.patch.multiple(self.contexts, KEPT=kept, WORTH=dice.choice((0, 0, 100)),
                                            GROWTH=dice.choice((5, 64))):
                    for step in range(25):
                        went_on += self.random_step(pair, f"r{step}", kept)
        self.assertGreater(went_on, 300)

    def random_step(self, pair: Pair, newcomer: str, limit: int) -> int:
        dice, pieces = pair.dice, []
        for name in list(pair.tables):
            what = dice.random()
            if what < 0.04:
                pair.end(name)
            elif what < 0.06:
                pair.move(name)
            elif what < 0.08:
                pair.overwrite(name)
        if len(pair.tables) < dice.randint(0, 4) and len(pair.free) > 20:
            pieces.append(pair.grow(newcomer, dice.randint(1, 7)))
        pieces += [pair.again(name) for name in pair.tables if dice.random() < 0.02 and pair.lengths[name] % PAGE_SIZE]
        pieces += [pair.grow(name, 1) for name in pair.tables
                   if name not in pair.busy(pieces) and dice.random() < 0.95 and pair.lengths[name] < 30]
        if not pieces:
            return 0
        if dice.random() < 0.1:  # interrupted, and planned again
            pair.compute(pieces, layers=1)
        if dice.random() < 0.1:  # or failed, and each tried alone
            for piece in pieces:
                self.assertLess(max(pair.compute([piece])), 1e-5)
        self.assertLess(max(pair.compute(pieces)), 1e-5)
        kept = list(filter(None, self.kept(pair)))
        self.assertLessEqual(sum(numbers.nbytes for one in kept for layer in one._layers.values() for numbers in layer),
                             limit)
        return bool(kept)

    def test_a_steady_decode_reads_only_the_newest_positions(self) -> None:
        """What lies in the pages may be spoilt: nobody looks, until the plan is forgotten."""
        pair = Pair(random.Random(1), None)
        pair.compute([pair.grow("a", 4), pair.grow("b", 2)])
        seen: list[tuple[int, ...]] = []
        store = pair.stores[1]
        gather = store.gather
        store.gather = lambda layer, group: seen.append(layer) or gather(layer, group)
        with mock.patch.multiple(self.contexts, WORTH=100, GROWTH=5):
            for longest, gathers in ((5, 2), (6, 2), (7, 2), (8, 0), (9, 0), (10, 0), (11, 2)):
                seen.clear()
                self.assertLess(max(pair.compute([pair.grow("a", 1), pair.grow("b", 1)])), 1e-5)
                with self.subTest(longest=longest):  # at first; while it is not worth it; when it is; when all is full
                    self.assertEqual((pair.lengths["a"], len(seen)), (longest, gathers))
            store.keys[:], store.values[:] = nan, nan
            seen.clear()
            self.assertLess(max(pair.compute([pair.grow("a", 1), pair.grow("b", 1)])), 1e-5)
            self.assertEqual(seen, [])

    def check_forgotten(self, happens: Callable[[Pair], None], kv_quantization: str | None = None) -> None:
        """After two decodes something happens, and the third sees it."""
        pair = Pair(random.Random(2), kv_quantization)
        pair.compute([pair.grow("a", 3)])
        for _ in range(2):
            pair.compute([pair.grow("a", 1)])
        self.assertTrue(all(self.kept(pair)))
        happens(pair)
        self.assertLess(max(pair.compute([pair.grow("a", 1)])), 1e-5)

    def test_a_page_that_was_written_or_copied_to_is_gathered_anew(self) -> None:
        for kv_quantization in (None, "int8"):
            with self.subTest(pages=kv_quantization):
                self.check_forgotten(lambda pair: pair.overwrite("a"), kv_quantization)
                self.check_forgotten(self.copy_over, kv_quantization)

    def copy_over(self, pair: Pair) -> None:
        """Another page's numbers take the place of the last one's, whose table stays."""
        pair.compute([pair.grow("other", PAGE_SIZE - 1)])
        pair.compute([pair.grow("a", 1)])
        for _ in range(2):
            pair.compute([pair.grow("a", 1)])
        self.assertTrue(all(self.kept(pair)))
        for store in pair.stores:
            store.copy_page(pair.tables["other"][0], pair.tables["a"][-1])

    def test_two_that_go_on_from_one_do_not_write_into_the_same_contexts(self) -> None:
        """Forks, or follow-ups of one transcript: the same full pages, then each its own."""
        for kv_quantization in (None, "int8"):
            with self.subTest(pages=kv_quantization), mock.patch.object(self.attention, "TILE", 1):
                pair = Pair(random.Random(4), kv_quantization)
                pair.compute([pair.grow("a", PAGE_SIZE - 2)])
                for _ in range(2):
                    pair.compute([pair.grow("a", 1)])
                pair.tables["b"], pair.lengths["b"] = list(pair.tables["a"]), pair.lengths["a"]
                for _ in range(3):
                    self.assertLess(max(pair.compute([pair.grow("a", 1), pair.grow("b", 1)])), 1e-5)
                self.assertEqual(len(set(map(id, filter(None, self.kept(pair))))), 2)

    def test_other_requests_of_equal_length_are_not_mistaken(self) -> None:
        """Two in turn, each a position longer than the other was."""
        pair = Pair(random.Random(3), None)
        for name, count in (("a", 4), ("b", 5)):
            pair.compute([pair.grow(name, count)])
        for _ in range(4):
            for name in ("a", "b"):
                pair.compute([pair.grow(name, 1)])
                self.assertEqual(self.kept(pair), [None])
                self.assertLess(max(pair.compute([pair.grow(name, 1)])), 1e-5)


if __name__ == "__main__":
    unittest.main()
