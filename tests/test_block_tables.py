"""Block tables of sequences: what each call does with pages, and that without a page manager it does nothing."""

from __future__ import annotations

import unittest

from starter.errors import OutOfPagesError
from starter.kv_cache import KVCacheManager
from starter.scheduler import BlockTables, SequenceState
from starter.schema import Request


def sequence(name: str, prompt: int = 5) -> SequenceState:
    return SequenceState(Request(name, (1,) * prompt, 4), 0, (0.0, 0))


class BlockTablesTest(unittest.TestCase):
    def test_from_its_opening_to_its_end(self) -> None:
        kv = KVCacheManager(4, 2)
        tables, mine = BlockTables(kv, False, lambda name: [1] * 5), sequence("r")
        tables.open(mine)
        self.assertEqual((tables.page_count(mine), kv.length(mine.handle)), (3, 0))
        self.assertRaises(OutOfPagesError, tables.open, sequence("other"))
        self.assertEqual(tables.lack(sequence("other")), "needs 3 pages, 1 free")
        mine.computed = 5
        tables.fill(mine)
        mine.known = 7
        tables.reserve(mine)
        self.assertEqual((tables.page_count(mine), kv.length(mine.handle)), (4, 5))
        self.assertFalse(tables.swap_out(mine))  # not asked for
        tables.close(mine)
        tables.close(mine)
        self.assertEqual((kv.free_pages, mine.handle, tables.page_count(mine)), (4, None, 0))

    def test_a_prefix_that_is_found_counts_as_computed(self) -> None:
        kv = KVCacheManager(9, 2, prefix_sharing=True)
        tables, first, second = BlockTables(kv, False, lambda name: [1] * 5), sequence("a"), sequence("b")
        tables.open(first)
        first.computed = 5
        tables.fill(first)
        tables.open(second)
        self.assertEqual((second.computed, kv.free_pages), (4, 5))
        third = sequence("c")
        tables.fork(first, third)
        self.assertEqual((kv.length(third.handle), kv.free_pages), (5, 5))

    def test_out_to_host_pages_and_back(self) -> None:
        kv = KVCacheManager(4, 2, host_pages=2)
        tables, mine = BlockTables(kv, True, lambda name: [1] * 5), sequence("r")
        tables.open(mine)
        mine.computed = 3
        tables.fill(mine)
        self.assertTrue(tables.swap_out(mine))
        self.assertEqual((mine.swapped, kv.free_pages, kv.free_host_pages), (True, 4, 0))
        other = sequence("other")
        tables.open(other)
        other.computed = 1
        tables.fill(other)
        self.assertFalse(tables.swap_out(other))  # the host pool is full
        tables.close(other)
        tables.open(mine)
        self.assertEqual((mine.swapped, mine.computed, tables.page_count(mine), kv.free_host_pages), (False, 3, 3, 2))

    def test_pages_that_somebody_outside_gave_back(self) -> None:
        kv = KVCacheManager(4, 2)
        tables, mine = BlockTables(kv, False, lambda name: [1] * 5), sequence("r")
        tables.open(mine)
        kv.release(mine.handle)
        self.assertEqual(tables.page_count(mine), 0)
        tables.close(mine)
        kv.check()

    def test_who_may_have_to_reserve(self) -> None:
        """Whoever outgrows its pages or has lost them; everybody, while a page is shared that might be written."""
        kv = KVCacheManager(9, 2, host_pages=3)
        tables, mine, other = BlockTables(kv, True, lambda name: [1] * 5), sequence("r"), sequence("other")
        for each in (mine, other):
            tables.open(each)
            tables.reserve(each)
        self.assertEqual(tables.lacking([mine, other]), [])
        mine.known = 6
        self.assertEqual(tables.lacking([mine, other]), [])
        mine.known = 7
        self.assertEqual(tables.lacking([mine, other]), [mine])
        tables.reserve(mine)
        self.assertEqual(tables.lacking([mine, other]), [])
        mine.computed = 5
        tables.fill(mine)
        outside = kv.fork(mine.handle, "outside")
        self.assertEqual(tables.lacking([mine, other]), [mine, other])
        kv.release(outside)
        kv.release(other.handle)
        self.assertEqual(tables.lacking([mine, other]), [other])
        kv.swap_out(mine.handle)
        self.assertEqual(tables.lacking([mine]), [mine])
        kv.swap_in(mine.handle, 5)
        self.assertEqual((mine.known, tables.lacking([mine])), (7, [mine]))  # it has fewer pages than before
        tables.reserve(mine)
        self.assertEqual(tables.lacking([mine]), [])

    def test_without_pages(self) -> None:
        tables, mine = BlockTables(None, True, lambda name: []), sequence("r")
        for call in (tables.open, tables.reserve, tables.fill, tables.close):
            call(mine)
        tables.fork(mine, sequence("s"))
        self.assertEqual((tables.swap_out(mine), tables.page_count(mine), mine.handle), (False, 0, None))
        self.assertEqual(tables.lacking([mine]), [])


if __name__ == "__main__":
    unittest.main()
