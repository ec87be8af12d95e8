"""How many pages a budget in bytes buys, and what a page pool is made of."""

from __future__ import annotations

import unittest
from dataclasses import replace
from itertools import product
from unittest import mock

from starter.core import make_cache, most_tails, pages_within
from starter.errors import CapacityError
from starter.schema import EngineSettings
from tests.support import HEALTHY
from tests.wings import has_wing, needs_wing

if has_wing("backends"):
    from starter.backends.int8_pages import Int8KVStore

MODEL = HEALTHY.model
SETTINGS = EngineSettings(page_size=4, num_pages=6, max_running=3, budget_tokens=8)
PAGE = MODEL.new_store(1, 4).page_bytes


class PageBudgetTest(unittest.TestCase):
    def test_as_many_as_fit_and_not_one_more(self) -> None:
        for budget, pages in ((PAGE, 1), (2 * PAGE - 1, 1), (2 * PAGE, 2), (7 * PAGE + 5, 7)):
            self.assertEqual(pages_within(budget, MODEL, SETTINGS), pages)
        with self.assertRaisesRegex(CapacityError, f"{PAGE - 1} is less than one page of 4 tokens .{PAGE} bytes."):
            pages_within(PAGE - 1, MODEL, SETTINGS)

    @needs_wing("backends")
    def test_int8_pages_and_every_tail_there_can_be_stay_within(self) -> None:
        """Three requests run, and each of them can begin a page more in a step: six tails, or one a page."""
        int8 = replace(SETTINGS, kv_quantization="int8")
        page = MODEL.new_store(1, 4, "int8")
        for budget in range(page.page_bytes + page.tail_bytes, 20 * page.page_bytes, 37):
            pages = pages_within(budget, MODEL, int8)
            self.assertLessEqual(pages * page.page_bytes + min(6, pages) * page.tail_bytes, budget)
            self.assertGreater((pages + 1) * page.page_bytes + min(6, pages + 1) * page.tail_bytes, budget)

    def test_no_step_needs_more_tails(self) -> None:
        """Every way to share a budget among running requests, each anywhere in its page."""
        for running, budget, size in product(range(1, 4), range(1, 8), range(1, 5)):
            tails = [(0, 0 if size == 1 else 1)]  # (tokens, tails) of a request: with none, its page is being filled
            tails += [(count, -(-(size - 1 + count) // size)) for count in range(1, budget + 1)]  # the last slot first
            needed = max(sum(tail for _, tail in some) for some in product(tails, repeat=running)
                         if sum(count for count, _ in some) <= budget)
            settings = EngineSettings(page_size=size, max_running=running, budget_tokens=budget)
            self.assertGreaterEqual(most_tails(settings), needed)
            self.assertLessEqual(most_tails(settings), needed + (running if size == 1 else 0))

    @needs_wing("backends")
    def test_a_store_that_reserves_is_told_how_many_tails_there_can_be(self) -> None:
        """Six as above, or one a page; not the host's store, which no step fills."""
        for num_pages, tails in ((9, 6), (3, 3)):
            settings = replace(SETTINGS, kv_quantization="int8", num_pages=num_pages, preemption="swap")
            with mock.patch.object(Int8KVStore, "reserve_tails", create=True) as reserve:
                make_cache(MODEL, settings, lambda change, request_id, numbers: None)
            reserve.assert_called_once_with(tails)

    def test_the_pool(self) -> None:
        """Host pages only for preemption by swap; bytes go before a number of pages."""
        told: list[str] = []
        for settings, pages, host_pages in (
                (SETTINGS, 6, 0), (replace(SETTINGS, kv_budget_bytes=9 * PAGE), 9, 0),
                (replace(SETTINGS, preemption="swap", host_pages=5), 6, 5)):
            kv = make_cache(MODEL, settings, lambda change, request_id, numbers: told.append(change))
            self.assertEqual((kv.total_pages, kv.total_host_pages, kv.page_size), (pages, host_pages, 4))
            kv.release(kv.allocate("r", 5))
        self.assertEqual(told, ["allocate", "release"] * 3)


if __name__ == "__main__":
    unittest.main()
