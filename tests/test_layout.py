"""From a decision to a batch: whose tokens, at which positions, on which pages; and who cannot be computed."""

from __future__ import annotations

import unittest

from starter.backend import Batch, Piece
from starter.engine import Layout, RequestTable
from starter.kv_cache import KVCacheManager
from starter.scheduler import ContinuousBatchScheduler
from starter.schema import Request
from tests.support import CONFIG, TOKENIZER


class LayoutTest(unittest.TestCase):
    def setUp(self) -> None:
        self.kv = KVCacheManager(16, 4, host_pages=4)
        self.table = RequestTable(CONFIG, TOKENIZER, seed=3)
        self.scheduler = ContinuousBatchScheduler(8, kv=self.kv)
        self.layout = Layout(self.table, self.scheduler, self.kv, use_cache=True)

    def submit(self, request_id: str, *prompt: int) -> None:
        request = Request(request_id, prompt, 5)
        self.scheduler.submit(request)
        self.table.add(self.table.make_stream(request))

    def lay(self, budget: int) -> tuple[list[str], Batch]:
        samples, batch = self.layout.batch(self.scheduler.step(budget).planned)
        return [sample.id for sample in samples], batch

    def test_chunks_of_prompts_and_decodes(self) -> None:
        self.submit("a", 1, 2)
        self.lay(8)
        self.table.samples["a"].tokens.append(9)  # its first token
        self.submit("b", 3, 4, 5, 6, 7)
        ids, batch = self.lay(4)
        a, b = (self.kv.pages(self.scheduler.handle(name)) for name in "ab")
        self.assertEqual((ids, batch.pieces()), (["a", "b"], [Piece([9], 2, a, True), Piece([3, 4, 5], 0, b, False)]))
        self.assertEqual((batch.page_size, self.layout.positions(batch)), (4, 4))

    def test_tokens_are_copied(self) -> None:
        self.submit("a", 1, 2)
        for layout in (self.layout, Layout(self.table, self.scheduler, self.kv, use_cache=False)):
            _, batch = layout.batch(self.scheduler.step(8).planned)
            self.table.samples["a"].tokens[0] = 8
            self.assertEqual(batch.tokens, [1, 2])
            self.table.samples["a"].tokens[0] = 1
            self.scheduler.abandon_step()

    def test_whose_pages_do_not_reach_fails_alone(self) -> None:
        for name, prompt in (("a", (1, 2)), ("b", (3, 4, 5, 6, 7)), ("c", (5,)), ("d", (6,))):
            self.submit(name, *prompt)
        decision = self.scheduler.step(16)
        handles = {name: self.scheduler.handle(name) for name in "abc"}
        self.kv.release(handles["a"])
        handles["b"].pages = handles["b"].pages[:1]
        self.kv.swap_out(handles["c"])
        samples, batch = self.layout.batch(decision.planned)
        self.assertEqual(([sample.id for sample in samples], batch.tokens), (["d"], [6]))
        failures = self.scheduler.take_failures()
        self.assertEqual(sorted(failures), ["a", "b", "c"])
        self.assertRegex(failures["a"], "StaleHandleError")
        self.assertRegex(failures["b"], "b is to compute position 4, and its 1 pages of 4 end before it")
        self.assertRegex(failures["c"], "c is swapped out")

    def test_without_a_cache(self) -> None:
        """All tokens each time, computed when the next one is due."""
        self.scheduler = ContinuousBatchScheduler(8)
        self.layout = Layout(self.table, self.scheduler, self.kv, use_cache=False)
        self.submit("a", 1, 2, 3, 4)
        self.submit("b", 5)
        ids, batch = self.lay(3)
        self.assertEqual((sorted(ids), batch.slots, self.layout.positions(batch)), (["a", "b"], [], 1))
        wanted = dict(zip(ids, batch.pieces()))
        self.assertEqual(wanted, {"a": Piece([1, 2, 3, 4], 0, (), False), "b": Piece([5], 0, (), True)})
        self.table.samples["b"].tokens.append(6)
        ids, batch = self.lay(3)
        self.assertEqual(self.layout.positions(batch), 6)


if __name__ == "__main__":
    unittest.main()
