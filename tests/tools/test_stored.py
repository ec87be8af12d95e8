"""What the acceptance tests change in a request's pages (acceptance/stored.py): these numbers, no others, in an order
that every store allows; and an oracle whose cache is changed alike."""

from __future__ import annotations

import os
import random
import sys
import unittest
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

from starter.base.weights import seeded_weights
from starter.kv_cache import KVCacheManager, PlainStore
from tests.models import random_config
from tests.paths import ROOT

with mock.patch.dict(os.environ, P07_SEED="1"), mock.patch.object(sys, "path", [str(ROOT / "acceptance"), *sys.path]):
    import harness
    import oracle
    import stored

MODEL = SimpleNamespace(layers=2, kv_heads=1, heads=2, width=4)  # 2 numbers a layer, 4 a key
SIZE, LENGTH = 4, 6


class InOrder(PlainStore):
    """Notes which slots are written."""

    def __init__(self) -> None:
        super().__init__(SIZE, 4)
        self.written: list[tuple[int, int]] = []

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        self.written.append((page, offset))
        super().write(page, offset, key, value)


def case() -> harness.Case:
    class Nothing(harness.Case):
        def test_nothing(self) -> None:
            """V1: a rule."""

    return Nothing("test_nothing")


class ChangeTest(unittest.TestCase):
    def setUp(self) -> None:
        self.store = InOrder()
        self.kv = KVCacheManager(5, SIZE, 4, store=self.store)
        self.mine, self.other = self.kv.allocate("mine", LENGTH), self.kv.allocate("other", LENGTH)
        for handle, sign in ((self.mine, 1.0), (self.other, -1.0)):
            for position in range(LENGTH):
                self.kv.append(handle, [sign * (position + 1)] * 4, [sign * (position + 11)] * 4)
        self.life = SimpleNamespace(computed=LENGTH, pages=self.kv.pages(self.mine), changes=[])
        self.run_ = SimpleNamespace(
            lives={"mine": self.life}, scenario=SimpleNamespace(model=MODEL), settings={"page_size": SIZE}, case=case(),
            engine=SimpleNamespace(kv=self.kv), meter=SimpleNamespace(store=self.store))
        self.store.written.clear()

    def read(self, handle: object) -> list[tuple[list[float], list[float]]]:
        return [self.kv.read(handle, position) for position in range(LENGTH)]  # type: ignore[arg-type, misc]

    def test_some_positions_of_a_layer(self) -> None:
        others = self.read(self.other)
        stored.Change(self.run_, "mine", key=-1.0, value=0.5, layers=[1], positions=range(1, LENGTH, 2)).apply()
        self.assertEqual(self.read(self.mine), [
            ([p, p, -p, -p], [p + 10, p + 10, (p + 10) / 2, (p + 10) / 2]) if p in (2, 4, 6) else
            ([p] * 4, [p + 10] * 4) for p in map(float, range(1, LENGTH + 1))])
        self.assertEqual(self.read(self.other), others)
        self.assertEqual(self.kv.free_pages, 1)
        self.kv.check()

    def test_slots_of_a_page_are_written_in_their_order(self) -> None:
        stored.Change(self.run_, "mine", key=1.0, value=-1.0, positions=[3]).apply()
        for page in self.life.pages:
            offsets = [offset for written, offset in self.store.written if written == page]
            self.assertEqual(offsets, list(range(len(offsets))))
        [free] = [page for page in range(5) if not self.kv.page(page).refcount]
        self.assertEqual([self.store.read(free, offset) for offset in range(SIZE)], [([-1.0] * 4, [-11.0] * 4)] * SIZE)

    def test_a_second_store_is_found(self) -> None:
        self.run_.meter.store = second = InOrder()
        for page in self.life.pages:
            for offset in range(SIZE):
                second.write(page, offset, [1.0] * 4, [2.0] * 4)
        with self.assertRaisesRegex(AssertionError, "pages are for show"):
            stored.Change(self.run_, "mine", key=1.0, value=-1.0).apply()

    def test_the_hint_knows_whether_the_change_was_seen(self) -> None:
        life = SimpleNamespace(tokens=[1, 2, 3], changes=[SimpleNamespace(moment=7), SimpleNamespace(moment=9)])
        self.assertIn("pages are for show", stored.hint(life, "r", [1, 2, 3]))
        self.assertNotIn("for show", stored.hint(life, "r", [1, 2, 4]))
        self.assertIn("pages of r were changed when 7 and 9 positions", stored.hint(life, "r", []))


Cache = list[tuple[list[list[float]], list[list[float]]]]  # the oracle's: a layer's keys and values, by position


def turn_round(cache: Cache) -> None:
    """The last position first."""
    for layer in cache:
        for rows in layer:
            rows.reverse()


def negate_values(cache: Cache) -> None:
    for _, values in cache:
        values[:] = [[-number for number in row] for row in values]


class OracleTest(unittest.TestCase):
    def test_attention_is_a_sum_over_what_is_in_the_cache(self) -> None:
        """Its order is nothing, its signs are something, from the moment on when they are changed."""
        for seed in range(5):
            rng = random.Random(seed)
            config = replace(random_config(rng), eos_tokens=(), max_context=64)
            right = oracle.Oracle(config, seeded_weights(config, seed))
            prompt = [rng.randrange(config.vocab_size) for _ in range(6)]
            plain, turned, twice, at_once, changed = (
                [step.logprob for step in right.generate(prompt, 8, changes=[
                    SimpleNamespace(moment=moment, of_oracle=change) for change in changes])]
                for moment, changes in ((8, []), (8, [turn_round]), (8, [negate_values] * 2), (0, [negate_values]),
                                        (8, [negate_values])))
            with self.subTest(seed=seed):
                for same in (turned, twice, at_once):
                    self.assertLess(max(abs(a - b) for a, b in zip(plain, same, strict=True)), 1e-9)
                self.assertEqual(changed[:3], plain[:3])  # 6 + 2 positions are stored when the third token is known
                self.assertGreater(abs(changed[3] - plain[3]), 1e-6)


if __name__ == "__main__":
    unittest.main()
