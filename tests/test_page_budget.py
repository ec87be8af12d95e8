"""How many pages a budget in bytes buys, and what a page pool is made of."""

from __future__ import annotations

import unittest
from dataclasses import replace

from starter.errors import CapacityError
from starter.page_budget import make_cache, pages_within
from starter.schema import EngineSettings
from tests.support import HEALTHY

MODEL = HEALTHY.model
SETTINGS = EngineSettings(page_size=4, num_pages=6, max_running=3, budget_tokens=8)
PAGE = MODEL.new_store(1, 4).page_bytes


class PageBudgetTest(unittest.TestCase):
    def test_as_many_as_fit_and_not_one_more(self) -> None:
        for budget, pages in ((PAGE, 1), (2 * PAGE - 1, 1), (2 * PAGE, 2), (7 * PAGE + 5, 7)):
            self.assertEqual(pages_within(budget, MODEL, SETTINGS), pages)
        with self.assertRaisesRegex(CapacityError, f"{PAGE - 1} is less than one page of 4 tokens .{PAGE} bytes."):
            pages_within(PAGE - 1, MODEL, SETTINGS)

    def test_int8_pages_and_every_tail_there_can_be_stay_within(self) -> None:
        """Three requests run, and eight tokens of prefill fill two pages more: five tails, or one a page."""
        int8 = replace(SETTINGS, kv_quantization="int8")
        page = MODEL.new_store(1, 4, "int8")
        for budget in range(page.page_bytes + page.tail_bytes, 20 * page.page_bytes, 37):
            pages = pages_within(budget, MODEL, int8)
            self.assertLessEqual(pages * page.page_bytes + min(5, pages) * page.tail_bytes, budget)
            self.assertGreater((pages + 1) * page.page_bytes + min(5, pages + 1) * page.tail_bytes, budget)

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
