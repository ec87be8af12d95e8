"""Attention of a batch in groups agrees with one request at a time, whatever the grouping (extra ``numpy``)."""

from __future__ import annotations

import random
import unittest
import warnings
from collections.abc import Sequence
from dataclasses import replace
from math import exp, fsum, inf, isnan, nan, sqrt
from typing import Any
from unittest import mock

from starter import InferenceEngine, load_backend
from starter.backend import Batch, Piece, Span
from starter.base.weights import seeded_weights
from starter.model import Loaded, Model
from starter.schema import EngineSettings
from tests.extras import needs
from tests.models import random_config
from tests.support import CONFIG, FIVE, SERVINGS, TIGHT, TOKENIZER, WEIGHTS, oracle

Vectors = Sequence[Sequence[float]]


def softmax_average(scores: Sequence[float], values: Vectors) -> list[float]:
    """The formula itself."""
    weights = [exp(score - max(scores)) for score in scores]
    return [fsum(w * v for w, v in zip(weights, column)) / fsum(weights) for column in zip(*values)]


class Scene:
    """Requests of random lengths on shuffled pages, and a batch that computes the last rows of each."""

    def __init__(self, dice: random.Random, counts: Sequence[int], page_size: int = 3) -> None:
        self.page_size = page_size
        self.pages = dice.sample(range(8 * len(counts)), 8 * len(counts))
        self.tables = [self.pages[8 * i:8 * i + 8] for i in range(len(counts))]
        self.counts = counts
        self.ends = [dice.randint(count, 8 * page_size) for count in counts]

    @property
    def before(self) -> Batch:
        """All but the rows of the batch."""
        return self._batch([end - count for end, count in zip(self.ends, self.counts)], [0] * len(self.ends))

    @property
    def batch(self) -> Batch:
        return self._batch(self.counts, [end - count for end, count in zip(self.ends, self.counts)])

    def _batch(self, counts: Sequence[int], starts: Sequence[int]) -> Batch:
        pieces = [Piece([0] * count, start, table[:-(-(start + count) // self.page_size)], True)
                  for count, start, table in zip(counts, starts, self.tables) if count]
        return Batch.of(pieces, self.page_size)


@needs("numpy", "numpy")
class GroupTest(unittest.TestCase):
    def setUp(self) -> None:
        import numpy as np

        from starter.backends.numpy import attention as numpy_attention
        from starter.backends.numpy import backend as numpy_backend
        self.np, self.module, self.backend_module = np, numpy_attention, numpy_backend

    def test_every_span_is_in_one_group_and_no_group_is_too_large(self) -> None:
        for seed in range(50):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                ends = [dice.randint(4, 400) for _ in range(dice.randint(1, 30))]
                spans = [Span(row, dice.choice((1, 1, 4)), end, (), 1) for row, end in enumerate(ends)]
                width, padding, tile = dice.choice((1, 8)), dice.choice((0, 40, 4000)), dice.choice((1, 900, 10_000))
                with mock.patch.multiple(self.module, PADDING=padding, TILE=tile):
                    groups = list(self.module.grouped(spans, width))
                found = sorted((span for group in groups for span in group), key=lambda span: span.first_row)
                self.assertEqual(found, spans)
                for group in groups:
                    longest = max(span.end for span in group)
                    self.assertEqual((len({span.count for span in group}), group[-1].end), (1, longest))
                    if len(group) > 1:
                        self.assertLessEqual(len(group) * longest * width, tile)
                        self.assertLessEqual(sum(longest - span.end for span in group) * width, padding)
        self.assertEqual(list(self.module.grouped([], 1)), [])

    def test_decodes_stay_in_their_groups_until_one_begins_a_page(self) -> None:
        """What is kept of a group is kept for these requests together."""
        compared = 0
        for seed in range(50):
            dice = random.Random(seed)
            ends = [dice.choice((30, 31, 60)) + dice.randint(0, 12) for _ in range(12)]
            limits = {"PADDING": dice.choice((0, 40, 4000)), "TILE": dice.randint(30, 900)}
            with mock.patch.multiple(self.module, **limits):
                before, after = ([[span.first_row for span in group] for group in self.module.grouped(
                    [Span(row, 1, end + step, (), 16) for row, end in enumerate(ends)], 1)] for step in (0, 1))
            if all(end % 16 for end in ends):
                compared += 1
                self.assertEqual(before, after)
        self.assertGreater(compared, 5)

    def test_equal_decodes_are_one_group_without_a_mask(self) -> None:
        """The steady state: nothing is padded, nothing hidden, the rows are a slice."""
        store = load_backend("numpy").kv_store(CONFIG, 8, 4)
        batch = Batch.of([Piece([0], 9, (i, i + 1, i + 2), True) for i in range(4)], 4)
        group, = self.module.AttentionPlan.of(batch, store).groups
        self.assertEqual((group.rows, group.hidden, group.slots.shape), (slice(0, 4), None, (4, 10)))

    def test_attention_agrees_with_the_plain_backend_however_it_is_grouped(self) -> None:
        """Decodes and chunks of one batch; groups from one for each span to all together, and cut chunks."""
        for seed in range(40):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                scene = Scene(dice, [dice.choice((1, 1, 1, 2, 7)) for _ in range(dice.randint(1, 7))])
                kv_heads, group, width = dice.randint(1, 2), dice.randint(1, 3), dice.choice((2, 4))
                limits = {"PADDING": dice.choice((0, 10**6)), "TILE": dice.choice((1, 10**6))}
                with mock.patch.multiple(self.module, **limits), \
                        mock.patch.object(self.backend_module, "MOST_ROWS", dice.choice((2, 128))):
                    self.check_agreement(dice, scene, kv_heads, group, width, size=1.0)
                    self.check_agreement(dice, scene, kv_heads, group, width, size=1.0, pages="int8")

    def test_scores_of_any_size(self) -> None:
        """Large ones would overflow exp, or all underflow, unless the largest of each row is subtracted."""
        for seed, size in enumerate((0.0, 3.0, 30.0, 100.0)):
            with self.subTest(seed=seed, size=size), warnings.catch_warnings():
                warnings.simplefilter("error")
                dice = random.Random(seed)
                self.check_agreement(dice, Scene(dice, [1, 1, 4, 1]), 2, 2, 4, size, delta=1e-3)

    def check_agreement(self, dice: random.Random, scene: Scene, kv_heads: int, group: int, width: int, size: float,
                        delta: float = 1e-5, pages: str | None = None) -> None:
        heads = kv_heads * group
        config = replace(CONFIG, width=heads * width, heads=heads, kv_heads=kv_heads, layers=2)
        plain, fast = load_backend("reference"), load_backend("numpy")
        stores: list[Any] = [backend.kv_store(config, len(scene.pages), scene.page_size, (), pages)
                             for backend in (plain, fast)]
        for name in ("key_lows", "key_scales", "value_scales") if pages else ("keys", "values"):
            getattr(stores[1], name)[:] = nan  # what is not written must not matter
        for batch in filter(lambda batch: batch.tokens, (scene.before, scene.batch)):
            for layer in range(2):
                q, k, v = ([[self.float32(dice.gauss(0, scale)) for _ in range(count)] for _ in batch.tokens]
                           for count, scale in ((heads * width, size), (kv_heads * width, size), (kv_heads * width, 1)))
                wanted = plain.attend(q, k, v, layer, stores[0], batch)
                arrays = (self.np.array(x, dtype=self.np.float32) for x in (q, k, v))
                got = fast.attend(*arrays, layer, stores[1], batch)
                for mine, row in zip(got.tolist(), wanted, strict=True):
                    for a, b in zip(mine, row, strict=True):
                        self.assertAlmostEqual(a, b, delta=delta)

    def float32(self, number: float) -> float:
        return float(self.np.float32(number))

    def test_all_scores_of_a_row_far_below_zero(self) -> None:
        """exp of each alone is 0, and 0 / 0 no average."""
        keys, values = [[30.0, 30.0], [31.0, 30.0]], [[1.0, 5.0], [2.0, 7.0]]
        query = [-30.0, -30.0]
        scores = [fsum(a * b for a, b in zip(query, key)) / sqrt(2) for key in keys]
        self.assertLess(max(scores), -1000)
        group = self.module.Group.of([Span(0, 1, 2, (0,), 2)], 2, self.np.array([1]))
        q, k, v = (self.np.array(x, dtype=self.np.float32)
                   for x in ([query], [[list(zip(*keys))]], [[values]]))
        for a, b in zip(self.module.attend(q, k, v, group)[0].tolist(), softmax_average(scores, values), strict=True):
            self.assertAlmostEqual(a, b, places=5)

    def test_a_request_of_nan_or_infinity_spoils_no_other(self) -> None:
        for poison in (nan, inf, -inf, 3e38):
            with self.subTest(poison=poison), self.np.errstate(all="ignore"):
                dice = random.Random(1)
                scene = Scene(dice, [1, 1, 3, 1])
                backend = load_backend("numpy")
                results = []
                for number in (1.0, poison):
                    store = backend.kv_store(CONFIG, len(scene.pages), scene.page_size)
                    draws = random.Random(2)
                    for batch in (scene.before, scene.batch):
                        q, k, v = (self.np.array([[draws.gauss(0, size) for _ in range(width)] for _ in batch.tokens],
                                                 dtype=self.np.float32) for width, size in ((8, 200), (4, 1), (4, 1)))
                        for span in batch.spans:
                            if span.pages[0] == scene.tables[-1][0]:
                                k[span.first_row:span.first_row + span.count] *= number
                        got = backend.attend(q, k, v, 0, store, batch)
                    results.append(got.tolist())
                for mine, alone in zip(*(rows[:-1] for rows in results)):
                    for a, b in zip(mine, alone, strict=True):
                        self.assertAlmostEqual(a, b, delta=1e-6)
                self.assertFalse(any(isnan(number) for row in results[0] for number in row))
                self.assertNotEqual(results[0][-1], results[1][-1])

    def test_a_plan_is_for_its_batch_alone(self) -> None:
        """Two batches of equal shape, in turn, on one store."""
        config = random_config(random.Random(3))
        model = Model(config, seeded_weights(config, 3), load_backend("numpy"))
        store = model.new_store(4, 4)
        batches = [Batch.of([Piece([token, 1], 0, (page,), True)], 4) for token, page in ((0, 2), (2, 1))]
        first, second = (model.forward(batch, store) for batch in batches)
        self.assertNotEqual(first, second)
        self.assertEqual([model.forward(batch, store) for batch in batches], [first, second])


@needs("numpy", "numpy")
class ServedTest(unittest.TestCase):
    def test_tokens_are_those_of_the_cache_less_reference(self) -> None:
        """Five requests with too few pages: chunked, preempted, swapped, sharing prefixes, under every policy."""
        model = Model(CONFIG, WEIGHTS, load_backend("numpy"))
        for serving in SERVINGS:
            with self.subTest(serving=serving):
                engine = InferenceEngine(Loaded(model, TOKENIZER, {}), EngineSettings().override({**TIGHT, **serving}))
                with engine:
                    for name, ask in FIVE.items():
                        ask.submit(engine, name)
                    engine.run()
                    for name, ask in FIVE.items():
                        self.assertEqual([event.token for event in engine.poll(name)],
                                         oracle(ask.prompt, ask.max_tokens))


if __name__ == "__main__":
    unittest.main()
