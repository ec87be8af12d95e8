"""The page pool and the prefix index, each held against a model so plain that it cannot be wrong."""

from __future__ import annotations

import random
import unittest
from collections import Counter
from itertools import product

from starter.errors import OutOfPagesError
from starter.kv_cache import Node, PagePool, PlainStore, PrefixIndex


class Store(PlainStore):
    """Remembers which tails it was to drop."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.dropped: list[int] = []

    def drop_tail(self, page: int) -> None:
        self.dropped.append(page)


class PoolModel:
    """Lists and sums instead of counters: what the pool must answer."""

    def __init__(self, num_pages: int) -> None:
        self.users: Counter[int] = Counter()
        self.dropped: list[int] = []
        self.cached: list[int] = []  # least recently used first
        self.num_pages, self.peak, self.evictions = num_pages, 0, 0

    @property
    def used(self) -> list[int]:
        return [page for page, users in self.users.items() if users]

    def take(self, pages: list[int]) -> None:
        for page in pages:
            if page in self.cached:
                self.cached.remove(page)
                self.evictions += 1
            self.users[page] = 1
        self.peak = max(self.peak, len(self.used))

    def share(self, page: int) -> None:
        if page in self.cached:
            self.cached.remove(page)
        self.users[page] += 1
        self.peak = max(self.peak, len(self.used))

    def drop(self, page: int, published: bool) -> None:
        self.users[page] -= 1
        if not self.users[page]:
            self.dropped.append(page)
            if published:
                self.cached.append(page)


class Pool(unittest.TestCase):
    def check(self, pool: PagePool, model: PoolModel) -> None:
        equal = self.assertEqual
        equal(pool.faults([[*model.users.elements()]]), [])
        equal(pool.used, len(model.used))
        equal(pool.available, model.num_pages - len(model.used))
        equal(list(pool.cached), model.cached)
        equal(pool.shared, sum(users > 1 for users in model.users.values()))
        equal(pool.store.dropped, model.dropped)  # each page when its last user has left it, and no other
        equal((pool.peak, pool.evictions), (model.peak, model.evictions))
        for page in range(model.num_pages):
            state = "used" if model.users[page] else "cached" if page in model.cached else "free"
            equal((pool.state(page), pool.refcounts[page]), (state, model.users[page]))
            equal(page in pool.index, page in model.cached or page in self.published)

    def test_random_operations(self) -> None:
        """K004, K009: after every one the pool is what the model says, and no findable page is handed out."""
        seen: Counter[str] = Counter()
        for seed in range(40):
            dice = random.Random(seed)
            pool, model = PagePool(dice.choice((1, 2, 5, 12)), Store()), PoolModel(0)
            model.num_pages = pool.total
            self.published: set[int] = set()  # findable pages in use
            for number in range(100):
                operation = dice.choice(("take", "take", "share", "drop", "drop", "drop", "publish"))
                with self.subTest(seed=seed, number=number, operation=operation):
                    self.operate(dice, pool, model, operation, number)
                    self.check(pool, model)
                seen[operation] += 1
            seen["evicted"] += pool.evictions
        self.assertGreater(seen["evicted"], 100)  # the test tests what it says

    def operate(self, dice: random.Random, pool: PagePool, model: PoolModel, operation: str, number: int) -> None:
        if operation == "take":
            self.take(pool, model, dice.randint(0, 4))
        elif operation == "share" and (pages := model.used + model.cached):
            page = dice.choice(pages)
            self.published |= {page} & {*model.cached}
            pool.share(page)
            model.share(page)
        elif operation == "drop" and model.used:
            page = dice.choice(model.used)
            pool.drop(page)
            model.drop(page, page in self.published)
            self.published -= {*model.cached}
        elif operation == "publish" and (pages := [page for page in model.used if page not in self.published]):
            page = dice.choice(pages)
            pool.index.publish(pool.index.root(None), [number], page)
            self.published.add(page)

    def take(self, pool: PagePool, model: PoolModel, number: int) -> None:
        free = [page for page in range(pool.total) if pool.state(page) == "free"]
        if number > pool.available:
            with self.assertRaisesRegex(OutOfPagesError, f"r needs {number} pages, {pool.available} of {pool.total}"):
                pool.take(number, "r")
            return
        victims = model.cached[:max(0, number - len(free))]  # free pages first, then the least recently used
        pages = pool.take(number, "r")
        self.assertEqual(len({*pages}), number)
        self.assertLessEqual({*pages}, {*free, *victims})
        self.assertFalse([page for page in pages if page in pool.index])
        self.assertEqual({*pages} - {*free}, {*victims})
        model.take(pages)

    def test_the_page_released_last_is_taken_first(self) -> None:
        pool = PagePool(4, Store())
        pages = pool.take(4, "r")
        for page in (pages[2], pages[0], pages[3]):
            pool.drop(page)
        self.assertEqual(pool.take(3, "r"), [pages[3], pages[0], pages[2]])

    def test_sharing_a_cached_page_makes_it_the_most_recently_used(self) -> None:
        pool = PagePool(3, Store())
        pages = pool.take(3, "r")
        for page in pages:
            pool.index.publish(pool.index.root(None), [page], page)
            pool.drop(page)
        pool.share(pages[0])
        pool.drop(pages[0])
        self.assertEqual(list(pool.cached), [pages[1], pages[2], pages[0]])
        self.assertEqual(pool.take(2, "r"), [pages[1], pages[2]])
        self.assertIsNone(pool.index.find(pool.index.root(None), [pages[1]]))  # K020
        self.assertEqual(pool.index.find(pool.index.root(None), [pages[0]])[0], pages[0])

    def test_cached_pages_that_are_to_be_shared_are_not_there_to_be_taken(self) -> None:
        pool = PagePool(3, Store())
        pages = pool.take(3, "r")
        for page in pages[:2]:
            pool.index.publish(pool.index.root(None), [page], page)
            pool.drop(page)
        pool.require(2, "r")
        pool.require(1, "r", sharing=[pages[0]])
        pool.require(2, "r", sharing=[pages[2]])  # in use already: sharing it takes nothing
        self.assertRaises(OutOfPagesError, pool.require, 1, "r", sharing=pages[:2])
        self.assertRaises(OutOfPagesError, pool.require, 2, "r", sharing=[pages[1], pages[2]])


class Index(unittest.TestCase):
    def walk(self, index: PrefixIndex, salt: str | None, tokens: tuple[int, ...], size: int) -> list[int]:
        """The pages that are found for the beginning of a prompt."""
        node, pages = index.root(salt), []
        for start in range(0, len(tokens) - size + 1, size):
            hit = index.find(node, tokens[start:start + size])
            if hit is None:
                break
            pages.append(hit[0])
            node = hit[1]
        return pages

    def test_against_a_list_that_is_searched_from_end_to_end(self) -> None:
        """Without evictions, a prefix is found exactly where the list holds the same salt and the same tokens."""
        for seed in range(60):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                size, index = dice.randint(1, 3), PrefixIndex()
                known: list[tuple[str | None, tuple[int, ...], int]] = []  # salt, all tokens up to the page's end, page
                for page in range(0, 400, 8):
                    salt = dice.choice((None, "a", "b"))
                    tokens = tuple(dice.choice((0, 0, 1, -1, -2)) for _ in range(size * dice.randint(1, 4)))
                    ends = range(size, len(tokens) + 1, size)
                    wanted = [mine for end in ends for where, prefix, mine in known
                              if (where, prefix) == (salt, tokens[:end])]
                    self.assertEqual(self.walk(index, salt, tokens, size), wanted)
                    node: Node = index.root(salt)
                    for number, end in enumerate(ends):
                        node = index.publish(node, tokens[end - size:end], page + number)
                        if not any((where, prefix) == (salt, tokens[:end]) for where, prefix, _ in known):
                            known.append((salt, tokens[:end], page + number))
                    self.assertEqual({page for page in range(400) if page in index}, {page for _, _, page in known})

    def test_equal_hashes_are_no_equal_tokens(self) -> None:
        """K023, K024: CPython gives -1 and -2 one hash, and 0 and 2**61 - 1; and each page is named by those before."""
        for one, two in ((-1, -2), (0, 2**61 - 1)):
            self.assertEqual(hash((one,)), hash((two,)))
            index = PrefixIndex()
            first = index.publish(index.root(None), [one], 0)
            index.publish(first, [7], 1)
            self.assertIsNone(index.find(index.root(None), [two]))
            second = index.publish(index.root(None), [two], 2)
            self.assertNotEqual(first, second)
            self.assertIsNone(index.find(second, [7]))
            self.assertEqual(index.find(first, [7])[0], 1)

    def test_a_constant_hash_of_salts_and_tokens_changes_nothing(self) -> None:
        """K023: comparison decides, not the hash."""
        class Token(int):
            def __hash__(self) -> int:
                return 1

        class Salt(str):
            def __hash__(self) -> int:
                return 1

        index = PrefixIndex()
        for number, (salt, token) in enumerate(product("abc", range(8))):
            self.assertIsNone(index.find(index.root(Salt(salt)), [Token(token)]))
            index.publish(index.root(Salt(salt)), [Token(token)], number)
        for number, (salt, token) in enumerate(product("abc", range(8))):
            self.assertEqual(index.find(index.root(Salt(salt)), [Token(token)])[0], number)

    def test_no_salt_equals_another_or_none(self) -> None:
        """K025: equal strings elsewhere, too; a root is no node of a page."""
        index = PrefixIndex()
        salts = (None, "", "None", "root", "a", "('root', 'a')", "0", "1")
        self.assertEqual(len({index.root(salt) for salt in salts}), len(salts))
        for page, salt in enumerate(salts):
            self.assertIsNone(index.find(index.root(salt), [5]))
            self.assertNotIn(index.publish(index.root(salt), [5], page), {index.root(other) for other in salts})

    def test_what_is_published_twice_stays_where_it_was_first(self) -> None:
        index = PrefixIndex()
        node = index.publish(index.root(None), [1, 2], 3)
        self.assertEqual(index.publish(index.root(None), [1, 2], 4), node)
        self.assertEqual(index.find(index.root(None), [1, 2]), (3, node))
        self.assertNotIn(4, index)

    def test_forgotten_content_gets_a_new_name(self) -> None:
        """What followed the forgotten page is not reached through the page that replaces it."""
        index = PrefixIndex()
        first = index.publish(index.root(None), [1], 0)
        index.publish(first, [2], 1)
        index.forget(0)
        self.assertNotIn(0, index)
        self.assertIsNone(index.find(index.root(None), [1]))
        again = index.publish(index.root(None), [1], 5)
        self.assertNotEqual(again, first)
        self.assertIsNone(index.find(again, [2]))
        index.forget(1)
        index.publish(again, [2], 1)
        self.assertEqual(self.walk(index, None, (1, 2), 1), [5, 1])

    def test_forgetting_leaves_nothing_behind(self) -> None:
        index = PrefixIndex()
        for round_ in range(50):
            node: Node = index.root(None)
            for page in range(4):
                node = index.publish(node, [round_, page], page)
            for page in range(4):
                index.forget(page)
        self.assertEqual((len(index._found), len(index._keys)), (0, 0))


if __name__ == "__main__":
    unittest.main()
