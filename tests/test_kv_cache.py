"""Pages: conservation, all or nothing, isolation, shared prefixes, swapping, stale handles, boundaries, counters."""

from __future__ import annotations

import copy
import pickle
import random
import unittest
from collections import Counter
from dataclasses import replace
from math import inf, nan

from starter.backend import ReferenceKVStore
from starter.errors import CapacityError, EngineError, OutOfPagesError, RequestError, StaleHandleError
from starter.kv_cache import KVCacheManager, KVHandle, PlainStore

Token = tuple[list[float], list[float]]


def token(generator: random.Random, width: int = 2) -> Token:
    return [generator.random() for _ in range(width)], [generator.random() for _ in range(width)]


def fill(kv: KVCacheManager, handle: KVHandle, tokens: list[Token]) -> None:
    for key, value in tokens:
        kv.append(handle, key, value)


def contents(kv: KVCacheManager, handle: KVHandle) -> list[Token]:
    return [(list(key), list(value)) for key, value in (kv.read(handle, i) for i in range(kv.length(handle)))]


def picture(kv: KVCacheManager, handles) -> object:
    """Everything that can be observed: tables, counts, stored numbers."""
    tables = [(handle, kv.pages(handle), contents(kv, handle)) for handle in handles]
    return tables, [kv.page(page) for page in range(kv.total_pages)], kv.free_pages, kv.stats()


class Life:
    """What a handle must hold: numbers of the tokens, which are known by their content."""

    def __init__(self, salt: str | None, tokens: list[int]) -> None:
        self.salt, self.tokens = salt, tokens  # of those that are stored
        self.swapped = False

    def numbers(self) -> list[Token]:
        """The key and the value of a position depend on everything before it, as in a decoder."""
        chain, stored = 0.0, []
        for token_id in self.tokens:
            chain = (chain * 31 + token_id + 1 + len(self.salt or "")) % 1009
            stored.append(([chain, float(token_id)], [-chain, 0.5]))
        return stored


class Mirror:
    """Plain lists that must stay equal to what the manager stores, and a count of pages made by walking the tables."""

    def __init__(self, test: unittest.TestCase, kv: KVCacheManager) -> None:
        self.test, self.kv = test, kv
        self.lives: dict[KVHandle, Life] = {}
        self.released: list[KVHandle] = []
        self.peak = self.found = 0

    def check(self) -> None:
        kv, equal = self.kv, self.test.assertEqual
        kv.check()
        users: dict[int, list[str]] = {}
        filled: Counter[int] = Counter()
        for handle, life in self.lives.items():
            equal(contents(kv, handle), life.numbers())
            if life.swapped:
                equal(kv.pages(handle), ())
            for i, page in enumerate(kv.pages(handle)):
                users.setdefault(page, []).append(handle.request_id)
                filled[page] = max(0, min(kv.page_size, len(life.tokens) - i * kv.page_size))
        equal(kv.free_pages + len(users), kv.total_pages)  # those that can still be found are among the free
        cached = 0
        for page in range(kv.total_pages):
            info, mine = kv.page(page), users.get(page, [])
            equal((info.refcount, sorted(info.users)), (len(mine), sorted(mine)))
            self.test.assertIn(info.state, ("used",) if mine else ("free", "cached"))
            cached += info.state == "cached"
        equal(kv.cached_pages, cached)
        equal((kv.used_pages, kv.sharing), (len(users), any(len(mine) > 1 for mine in users.values())))
        host = sum(-(-len(life.tokens) // kv.page_size) for life in self.lives.values() if life.swapped)
        equal(kv.free_host_pages, HOST_PAGES - host)
        stats = kv.stats()
        equal(stats.internal_fragmentation, len(users) * kv.page_size - sum(filled.values()))
        equal(stats.allocations - stats.releases, len(self.lives))
        self.peak = max(self.peak, len(users))
        equal((stats.peak_pages, stats.peak_bytes), (self.peak, self.peak * kv.store.page_bytes))


HOST_PAGES = 3


class RandomOperations(unittest.TestCase):
    def play(self, seed: int) -> Counter[str]:
        """120 random operations on a pool that is often full, each compared with the mirror."""
        dice = random.Random(seed)
        page_size, num_pages = dice.randint(1, 5), dice.choice((1, 3, 6, 12, 20))
        store, host_store = (ReferenceKVStore(1, 1, 2, pages, page_size) if seed % 2 else None
                             for pages in (num_pages, HOST_PAGES))
        kv = KVCacheManager(num_pages, page_size, 2, seed % 3 > 0, store, HOST_PAGES, host_store)
        mirror, seen = Mirror(self, kv), Counter[str]()
        for number in range(120):
            operation = dice.choice(("allocate", "append", "append", "append", "reserve", "fork", "release", "stale",
                                     "swap out", "swap in", "swap in"))
            before = picture(kv, mirror.lives)
            try:
                self.operate(dice, mirror, operation, f"r{number}")
                seen[operation] += 1
            except OutOfPagesError:
                self.assertEqual(picture(kv, mirror.lives), before)
                seen["out of pages"] += 1
            mirror.check()
        seen["found"], seen["evicted"] = mirror.found, kv.stats().evictions
        for handle in [*mirror.lives]:
            kv.release(handle)
        self.assertEqual((kv.free_pages, kv.free_host_pages, kv.internal_fragmentation()), (num_pages, HOST_PAGES, 0))
        pages = kv.pages(kv.allocate("all", num_pages * page_size))
        self.assertEqual(sorted(pages), list(range(num_pages)))  # every page is handed out once
        self.assertEqual(kv.cached_pages, 0)
        return seen

    def operate(self, dice: random.Random, mirror: Mirror, operation: str, name: str) -> None:
        kv, lives = mirror.kv, mirror.lives
        if operation == "stale":
            for handle in mirror.released[-3:]:
                for use in (kv.length, kv.pages, kv.release, lambda h: kv.append(h, [1, 1], [1, 1]),
                            lambda h: kv.read(h, 0), lambda h: kv.fork(h, "x"), lambda h: kv.reserve(h, 1),
                            lambda h: kv.commit(h, 0), kv.swap_out, lambda h: kv.swap_in(h, 0)):
                    self.assertRaises(StaleHandleError, use, handle)
        elif operation == "allocate" or not lives:
            prompt = [dice.choice((0, 0, 0, 1)) for _ in range(dice.randint(0, kv.page_size * min(4, kv.total_pages)))]
            salt = dice.choice((None, None, "salt"))
            handle = kv.allocate(name, len(prompt), prompt, salt)
            mirror.found += kv.length(handle)
            self.assertLess(kv.length(handle), max(1, len(prompt)))  # at least one token is left to compute
            self.assertEqual(kv.length(handle) % kv.page_size, 0)
            lives[handle] = Life(salt, prompt[:kv.length(handle)])
            if dice.random() < 0.7:
                self.compute(kv, handle, lives[handle], prompt)
        else:
            handle = dice.choice([*lives])
            self.use(dice, mirror, operation, name, handle, lives[handle])

    def use(self, dice: random.Random, mirror: Mirror, operation: str, name: str, handle: KVHandle, life: Life) -> None:
        kv = mirror.kv
        if operation == "release":
            kv.release(handle)
            mirror.released.append(handle)
            del mirror.lives[handle]
        elif operation == "swap in":
            if life.swapped:
                kv.swap_in(handle, len(life.tokens) + dice.randint(-2, 5))
                life.swapped = False
            else:
                self.assertRaises(RequestError, kv.swap_in, handle, 1)
        elif life.swapped:
            for forbidden in (lambda: kv.append(handle, [1, 1], [1, 1]), lambda: kv.fork(handle, "x"),
                              lambda: kv.reserve(handle, 1), lambda: kv.commit(handle, 0), lambda: kv.swap_out(handle)):
                self.assertRaisesRegex(RequestError, "swapped out", forbidden)
        elif operation == "swap out":
            kv.swap_out(handle)
            life.swapped = True
        elif operation == "append":
            self.append(dice, kv, handle, life)
        elif operation == "reserve":
            kv.reserve(handle, len(life.tokens) + dice.randint(-2, 2 * kv.page_size))
        else:
            mirror.lives[kv.fork(handle, name)] = Life(life.salt, list(life.tokens))

    def append(self, dice: random.Random, kv: KVCacheManager, handle: KVHandle, life: Life) -> None:
        """One token, by ``append`` or as the decoder does it."""
        tokens = [*life.tokens, dice.randint(0, 1)]
        if dice.random() < 0.5:
            key, value = Life(life.salt, tokens).numbers()[-1]
            kv.append(handle, key, value)
            key[0] = value[0] = 99.0  # the caller's lists are the caller's
            life.tokens = tokens
            kv.commit(handle, len(tokens), tokens)
        else:
            kv.reserve(handle, len(tokens))
            self.compute(kv, handle, life, tokens)

    def compute(self, kv: KVCacheManager, handle: KVHandle, life: Life, tokens: list[int]) -> None:
        """Write all that is not yet stored through the pages, then say so."""
        numbers = Life(life.salt, tokens).numbers()
        for position in range(len(life.tokens), len(tokens)):
            page, offset = kv.pages(handle)[position // kv.page_size], position % kv.page_size
            kv.store.write(page, offset, *numbers[position])
        life.tokens = tokens
        kv.commit(handle, len(tokens), tokens)

    def test_conservation_isolation_and_all_or_nothing_after_every_call(self) -> None:
        seen: Counter[str] = Counter()
        for seed in range(60):
            with self.subTest(seed=seed):
                seen += self.play(seed)
        for operation in ("allocate", "append", "reserve", "fork", "release", "stale", "swap out", "swap in", "found",
                          "evicted", "out of pages"):
            self.assertGreater(seen[operation], 50, operation)  # the test tests what it says


class Conservation(unittest.TestCase):
    """After every call, returned or raised, free pages + pages in block tables = total; check() proves it."""

    def test_check_gives_a_full_account_of_any_damage(self) -> None:
        def free_twice(kv): kv._pool._free.append(kv._pool._free[0])
        def free_and_used(kv): kv._pool._free.append(kv.pages(self.handle)[0])
        def cached_and_used(kv): kv._pool.cached[kv.pages(self.handle)[0]] = None
        def lost(kv): kv._pool._free.pop()
        def free_but_found(kv): kv._pool.index.publish(0, [1] * 4, kv._pool._free[0])
        def counted_twice(kv): kv._pool.refcounts[kv.pages(self.handle)[0]] += 1
        def listed_twice(kv): self.handle.pages = self.handle.pages[:1] * 2
        def too_long(kv): kv._table(self.handle).length = 99
        def two_lengths(kv): kv.fork(self.handle, "child").length -= 1
        def shared_alone(kv): kv._pool.shared += 1
        def host_lost(kv): kv._host._free.pop()

        for damage, account in ((free_twice, "2 times"), (free_and_used, "free and used"), (lost, "nowhere"),
                                (cached_and_used, "used and cached"), (free_but_found, "can still be found"),
                                (counted_twice, "refcount 2, listed by 1"), (listed_twice, "twice"),
                                (too_long, "99 tokens in 2 pages"), (two_lengths, "1 tokens for child, 2 for others"),
                                (shared_alone, "1 pages are counted as shared, 0 are"),
                                (host_lost, "host: page . is nowhere")):
            with self.subTest(damage=damage.__name__):
                kv = KVCacheManager(4, 4, host_pages=2)
                self.handle = kv.allocate("r1", 8)
                fill(kv, self.handle, [([1.0], [1.0])] * 6)
                kv.check()
                damage(kv)
                with self.assertRaisesRegex(EngineError, account):
                    kv.check()

    def test_a_second_release_frees_nothing(self) -> None:
        """K006"""
        kv = KVCacheManager(4, 4)
        first, second = kv.allocate("a", 8), kv.allocate("b", 8)
        kv.release(first)
        for _ in range(2):
            self.assertRaises(StaleHandleError, kv.release, first)
            self.assertEqual(kv.free_pages, 2)
        kv.check()
        third = kv.allocate("c", 8)
        self.assertFalse(set(kv.pages(second)) & set(kv.pages(third)))

    def test_a_page_of_two_owners_is_freed_once(self) -> None:
        """K007, K101"""
        kv = KVCacheManager(6, 2)
        parent = kv.allocate("parent", 4)
        fill(kv, parent, [([float(i)], [0.0]) for i in range(4)])
        children = [kv.fork(parent, f"child{i}") for i in range(3)]
        self.assertEqual((kv.free_pages, kv.stats().peak_pages), (4, 2))
        for handle, free in ((children[0], 4), (parent, 4), (children[2], 4), (children[1], 6)):
            kv.release(handle)
            self.assertEqual(kv.free_pages, free)
            kv.check()
        new = [kv.pages(kv.allocate(f"new{i}", 4)) for i in range(3)]
        self.assertEqual(len({page for pages in new for page in pages}), 6)


class AllOrNothing(unittest.TestCase):
    """A call that raises OutOfPagesError has changed no table, no count and no stored number."""

    def test_allocate_reserve_append_and_copy_on_write(self) -> None:
        kv = KVCacheManager(4, 2)
        parent = kv.allocate("parent", 0)
        fill(kv, parent, [([float(i)], [-float(i)]) for i in range(5)])
        child = kv.fork(parent, "child")  # 3 pages, the last one partly filled; 1 page is free
        before = picture(kv, (parent, child))
        for attempt in (lambda: kv.allocate("new", 3), lambda: kv.reserve(child, 7), lambda: kv.reserve(parent, 9)):
            self.assertRaises(OutOfPagesError, attempt)
            self.assertEqual(picture(kv, (parent, child)), before)
        kv.allocate("last", 1)
        before = picture(kv, (parent, child))
        self.assertRaises(OutOfPagesError, kv.append, child, [9.0], [9.0])  # the copy needs a page
        self.assertEqual(picture(kv, (parent, child)), before)

    def test_a_store_that_fails_to_copy_leaves_both_tables_as_they_were(self) -> None:
        class Failing(PlainStore):
            broken = True

            def copy_page(self, source: int, target: int, origin=None) -> None:
                if self.broken:
                    raise OSError("copy failed")
                super().copy_page(source, target, origin)

        store = Failing(2, 1)
        kv = KVCacheManager(8, 2, store=store)
        parent = kv.allocate("parent", 4)
        fill(kv, parent, [([1.0], [1.0])])
        child = kv.fork(parent, "child")
        tables = [(kv.pages(handle), contents(kv, handle)) for handle in (parent, child)]
        users = [kv.page(page) for page in range(8)]
        self.assertRaises(OSError, kv.append, child, [3.0], [3.0])
        kv.check()
        self.assertEqual([(kv.pages(handle), contents(kv, handle)) for handle in (parent, child)], tables)
        self.assertEqual((kv.free_pages, [kv.page(page) for page in range(8)]), (6, users))
        store.broken = False
        kv.append(child, [3.0], [3.0])
        self.assertEqual(contents(kv, child), [([1.0], [1.0]), ([3.0], [3.0])])
        self.assertEqual(contents(kv, parent), [([1.0], [1.0])])

    def test_what_no_pool_state_could_hold_is_another_error(self) -> None:
        kv = KVCacheManager(3, 4)
        self.assertEqual(len(kv.pages(kv.allocate("all", 12))), 3)
        with self.assertRaisesRegex(CapacityError, "13 tokens need 4 pages of 4; the pool has 3"):
            kv.allocate("more", 13)
        self.assertRaises(OutOfPagesError, kv.allocate, "later", 1)


class Isolation(unittest.TestCase):
    """A slot is written only while its page is in exactly one table; a shared page is copied first."""

    def test_forks_diverge_and_survive_each_other(self) -> None:
        """K010, K011: page 4, 6 tokens: the tail page is private to each writer, the full page stays shared."""
        for release_first in (False, True):
            with self.subTest(release_first=release_first):
                kv = KVCacheManager(8, 4)
                a = kv.allocate("a", 6)
                prompt = [([float(i)], [i + 0.5]) for i in range(6)]
                fill(kv, a, prompt)
                b, c = kv.fork(a, "b"), kv.fork(a, "c")
                if release_first:
                    kv.release(a)
                for name, handle in (("b", b), ("c", c)):
                    fill(kv, handle, [([ord(name) + i], [-i]) for i in range(3)])
                    kv.check()
                self.assertEqual(kv.pages(b)[0], kv.pages(c)[0])
                self.assertNotEqual(kv.pages(b)[1], kv.pages(c)[1])
                kv.release(b)
                self.assertEqual(contents(kv, c), prompt + [([99.0 + i], [-float(i)]) for i in range(3)])
                if not release_first:
                    self.assertEqual(contents(kv, a), prompt)
                    self.assertEqual(kv.stats().copies, 2)
                else:
                    self.assertEqual(kv.stats().copies, 1)  # the last user writes in place

    def test_nothing_is_copied_unless_it_would_be_written(self) -> None:
        kv = KVCacheManager(8, 4)
        parent = kv.allocate("parent", 6)
        fill(kv, parent, [([1.0], [1.0])] * 6)
        child = kv.fork(parent, "child")
        for token_count in (0, 3, 6):
            kv.reserve(child, token_count)
            self.assertEqual((kv.pages(child), kv.stats().copies), (kv.pages(parent), 0))
        kv.reserve(child, 7)
        self.assertEqual(kv.stats().copies, 1)
        aligned = kv.allocate("aligned", 4)
        fill(kv, aligned, [([1.0], [1.0])] * 4)
        other = kv.fork(aligned, "other")
        kv.append(other, [2.0], [2.0])  # begins a page of its own: K011 at the boundary
        self.assertEqual((kv.pages(other)[0], kv.stats().copies), (kv.pages(aligned)[0], 1))

    def test_reserved_empty_pages_are_not_shared(self) -> None:
        kv = KVCacheManager(8, 4)
        parent = kv.allocate("parent", 16)
        fill(kv, parent, [([1.0], [1.0])] * 5)
        child = kv.fork(parent, "child")
        self.assertEqual(kv.pages(child), kv.pages(parent)[:2])

    def test_commit_refuses_what_was_not_reserved(self) -> None:
        kv = KVCacheManager(8, 4)
        parent = kv.allocate("parent", 8)
        fill(kv, parent, [([1.0], [1.0])] * 5)
        child = kv.fork(parent, "child")
        for count in (4, 9, 6):  # less than stored; more than reserved; in a page that the parent still reads
            with self.subTest(count=count):
                self.assertRaises(RequestError, kv.commit, child, count)
                kv.check()
        kv.reserve(child, 6)
        kv.commit(child, 6)
        kv.check()


class SharedPrefixes(unittest.TestCase):
    """A page that can still be found is never handed out; at least one token of a prompt is left to compute."""

    def compute(self, kv: KVCacheManager, tokens: list[int], salt: str | None = None, name: str = "r") -> KVHandle:
        handle = kv.allocate(name, len(tokens), tokens, salt)
        for position in range(kv.length(handle), len(tokens)):
            page = kv.pages(handle)[position // kv.page_size]
            kv.store.write(page, position % kv.page_size, [float(tokens[position])], [float(position)])
        kv.commit(handle, len(tokens), tokens)
        return handle

    def test_whole_pages_of_what_is_in_common_are_shared(self) -> None:
        """K013, K015: never a part of a page, never the whole prompt."""
        for size in (1, 2, 4):
            for length in range(1, 4 * size + 2):
                kv = KVCacheManager(40, size, prefix_sharing=True)
                prompt = list(range(length))
                first = self.compute(kv, prompt)
                second = kv.allocate("again", length, prompt)
                shared = (length - 1) // size
                self.assertEqual(kv.length(second), shared * size)
                self.assertEqual(kv.pages(second)[:shared], kv.pages(first)[:shared])
                longer = kv.allocate("longer", length + size, prompt + [99] * size)
                self.assertEqual(kv.length(longer), length // size * size)
                other = kv.allocate("other", length, [*prompt[:-1], 99])
                self.assertEqual(kv.length(other), shared * size)
                self.assertEqual(kv.length(kv.allocate("first differs", length, [99, *prompt[1:]])), 0)
                kv.check()

    def test_what_was_released_is_found_until_it_is_evicted(self) -> None:
        kv = KVCacheManager(4, 2, prefix_sharing=True)
        kv.release(self.compute(kv, [1, 2, 3, 4, 5]))
        self.assertEqual((kv.free_pages, kv.cached_pages), (4, 2))
        again = kv.allocate("again", 5, [1, 2, 3, 4, 5])
        self.assertEqual((kv.length(again), kv.read(again, 3)), (4, ([4.0], [3.0])))
        kv.release(again)
        kv.release(kv.allocate("other", 6))  # needs three pages: evicts the end of the cached prefix, not its beginning
        self.assertEqual((kv.cached_pages, kv.stats().evictions), (1, 1))
        self.assertEqual(kv.length(kv.allocate("again", 5, [1, 2, 3, 4, 5])), 2)

    def test_the_least_recently_used_goes_first(self) -> None:
        kv = KVCacheManager(3, 2, prefix_sharing=True)
        for prompt in ([1, 1], [2, 2], [3, 3]):
            kv.release(self.compute(kv, prompt))
        kv.release(kv.allocate("use", 3, [1, 1, 9]))  # evicts [2, 2] for its last page, and [1, 1] is fresh again
        kv.release(kv.allocate("two", 4))
        self.assertEqual(kv.length(kv.allocate("x", 3, [1, 1, 9])), 2)
        self.assertEqual(kv.stats().evictions, 2)

    def test_a_page_that_was_taken_for_another_use_is_not_found(self) -> None:
        """K020: not even while its new owner has computed nothing."""
        kv = KVCacheManager(2, 2, prefix_sharing=True)
        kv.release(self.compute(kv, [1, 2, 3, 4]))
        owner = kv.allocate("owner", 4)
        self.assertRaises(OutOfPagesError, kv.allocate, "r", 4, [1, 2, 3, 4])
        kv.release(owner)
        self.assertEqual(kv.length(kv.allocate("r", 4, [1, 2, 3, 4])), 0)

    def test_nothing_is_found_before_it_was_computed(self) -> None:
        """K021: eight requests with one prefix in one step."""
        kv = KVCacheManager(40, 2, prefix_sharing=True)
        handles = [kv.allocate(f"r{i}", 5, [1, 2, 3, 4, 5]) for i in range(8)]
        self.assertEqual([kv.length(handle) for handle in handles], [0] * 8)
        kv.commit(handles[0], 3, [1, 2, 3, 4, 5])
        self.assertEqual(kv.length(kv.allocate("late", 5, [1, 2, 3, 4, 5])), 2)
        for handle in handles:  # equal content computed twice: the page published first stays the one that is found
            kv.commit(handle, 5, [1, 2, 3, 4, 5])
        kv.check()
        self.assertEqual(kv.pages(kv.allocate("last", 5, [1, 2, 3, 4, 5]))[0], kv.pages(handles[0])[0])

    def test_only_equal_tokens_after_equal_tokens_are_equal(self) -> None:
        """K023, K024: tokens of equal hash are told apart, and a page's name depends on the pages before it."""
        for one, two in ((-1, -2), (0, 2**61 - 1)):
            self.assertEqual(hash(one), hash(two))
            kv = KVCacheManager(40, 1, prefix_sharing=True)
            self.compute(kv, [one, 5, 6])
            self.assertEqual(kv.length(kv.allocate("r", 3, [two, 5, 6])), 0)
            self.assertEqual(kv.length(kv.allocate("r", 3, [one, 5, 7])), 2)
            self.assertEqual(kv.length(kv.allocate("r", 3, [5, 6, 7])), 0)

    def test_salts_do_not_mix(self) -> None:
        """K025"""
        salts = (None, "a", "b", "", "root", "None")
        kv = KVCacheManager(40, 2, prefix_sharing=True)
        for salt in salts:
            self.assertEqual(kv.length(self.compute(kv, [1, 2, 3], salt)), 3)
            self.assertEqual(kv.stats().hits, 0)
        for salt in salts:
            self.assertEqual(kv.length(kv.allocate("again", 3, [1, 2, 3], salt)), 2)

    def test_a_refused_allocation_takes_no_shared_page(self) -> None:
        """The cached pages it found count as taken, not as pages to be had; K039."""
        kv = KVCacheManager(4, 2, prefix_sharing=True)
        kv.release(self.compute(kv, [1, 2, 3, 4]))
        holder = kv.allocate("holder", 4)
        before = picture(kv, [holder])
        self.assertRaises(OutOfPagesError, kv.allocate, "r", 6, [1, 2, 3, 4, 5, 6])
        self.assertEqual(picture(kv, [holder]), before)
        self.assertEqual(kv.cached_pages, 2)

    def test_pages_in_use_are_shared_at_no_cost(self) -> None:
        kv = KVCacheManager(4, 2, prefix_sharing=True)
        self.compute(kv, [1, 2, 3, 4, 5])
        self.assertEqual(kv.free_pages, 1)
        second = kv.allocate("second", 6, [1, 2, 3, 4, 5, 6])  # three pages, two of them shared
        self.assertEqual((kv.length(second), kv.free_pages, kv.stats().peak_pages), (4, 0, 4))

    def test_forks_that_diverge_are_found_each_by_its_own_content(self) -> None:
        kv = KVCacheManager(40, 2, prefix_sharing=True)
        parent = self.compute(kv, [1, 2])
        child = kv.fork(parent, "child")
        for handle, branch in ((child, [5, 6]), (parent, [7, 8])):
            kv.reserve(handle, 6)
            kv.commit(handle, 6, [1, 2, *branch, 9, 9])
        for tokens, found in (([1, 2, 5, 6, 9, 9], 6), ([1, 2, 7, 8, 9, 9], 6), ([1, 2, 9, 9, 9, 9], 2)):
            self.assertEqual(kv.length(kv.allocate("r", 7, [*tokens, 0])), found)
        pages = [kv.pages(kv.allocate("r", 7, [1, 2, *branch, 9, 9, 0]))[2] for branch in ([5, 6], [7, 8])]
        self.assertEqual(pages, [kv.pages(child)[2], kv.pages(parent)[2]])

    def test_without_the_setting_nothing_is_shared(self) -> None:
        kv = KVCacheManager(8, 2)
        self.compute(kv, [1, 2, 3, 4])
        self.assertEqual(kv.length(kv.allocate("r", 4, [1, 2, 3, 4])), 0)

    def test_hits_and_misses(self) -> None:
        kv = KVCacheManager(8, 2, prefix_sharing=True)
        self.compute(kv, [1, 2, 3, 4, 5])
        self.compute(kv, [1, 2, 3, 4, 6])
        self.assertEqual((kv.stats().hits, kv.stats().misses), (4, 6))


class Swapping(unittest.TestCase):
    def test_out_and_back(self) -> None:
        kv = KVCacheManager(6, 2, host_pages=3)
        handle = kv.allocate("r", 9)
        tokens = [([float(i)], [-float(i)]) for i in range(5)]
        fill(kv, handle, tokens)
        kv.swap_out(handle)
        self.assertEqual((kv.free_pages, kv.free_host_pages, kv.pages(handle), kv.length(handle)), (6, 0, (), 5))
        other = kv.allocate("other", 12)
        fill(kv, other, [([9.0], [9.0])] * 12)
        self.assertEqual(contents(kv, handle), tokens)
        before = picture(kv, [handle, other])
        self.assertRaises(OutOfPagesError, kv.swap_in, handle, 5)
        self.assertEqual(picture(kv, [handle, other]), before)
        kv.release(other)
        kv.swap_in(handle, 6)
        self.assertEqual((len(kv.pages(handle)), kv.free_host_pages, contents(kv, handle)), (3, 3, tokens))
        fill(kv, handle, [([7.0], [7.0])] * 2)
        self.assertEqual((kv.stats().swaps_out, kv.stats().swaps_in), (1, 1))
        kv.check()

    def test_host_pages_that_do_not_suffice_change_nothing(self) -> None:
        for host_pages in (0, 1):
            kv = KVCacheManager(6, 2, host_pages=host_pages)
            handle = kv.allocate("r", 4)
            fill(kv, handle, [([1.0], [1.0])] * 3)
            before = picture(kv, [handle])
            self.assertRaises(OutOfPagesError, kv.swap_out, handle)
            self.assertEqual(picture(kv, [handle]), before)
            kv.check()

    def test_a_copy_that_fails_changes_nothing(self) -> None:
        class Failing(PlainStore):
            def copy_page(self, source: int, target: int, origin=None) -> None:
                raise OSError("copy failed")

        kv = KVCacheManager(6, 2, host_pages=6, host_store=Failing(2, 1))
        handle = kv.allocate("r", 4)
        fill(kv, handle, [([1.0], [1.0])] * 3)
        self.assertRaises(OSError, kv.swap_out, handle)
        kv.check()
        self.assertEqual((len(kv.pages(handle)), kv.free_host_pages, kv.length(handle)), (2, 6, 3))

    def test_released_while_swapped_out(self) -> None:
        kv = KVCacheManager(6, 2, host_pages=2)
        handle = kv.allocate("r", 4)
        fill(kv, handle, [([1.0], [1.0])] * 4)
        kv.swap_out(handle)
        kv.release(handle)
        kv.check()
        self.assertEqual((kv.free_pages, kv.free_host_pages), (6, 2))

    def test_a_shared_page_stays_with_those_who_share_it(self) -> None:
        kv = KVCacheManager(6, 2, prefix_sharing=True, host_pages=4)
        parent = kv.allocate("parent", 4)
        fill(kv, parent, [([float(i)], [0.0]) for i in range(4)])
        kv.commit(parent, 4, [1, 2, 3, 4])
        child = kv.fork(parent, "child")
        kv.swap_out(child)
        self.assertEqual((kv.free_pages, contents(kv, parent)), (4, contents(kv, child)))
        kv.release(parent)  # its pages can still be found
        kv.swap_in(child, 5)
        kv.append(child, [9.0], [9.0])
        kv.check()
        self.assertEqual(kv.length(kv.allocate("new", 5, [1, 2, 3, 4, 5])), 4)

    def test_what_came_back_can_be_found_again(self) -> None:
        """The pages it was published in were taken for another use meanwhile."""
        kv = KVCacheManager(3, 2, prefix_sharing=True, host_pages=2)
        handle = kv.allocate("r", 4)
        fill(kv, handle, [([1.0], [1.0])] * 4)
        kv.commit(handle, 4, [1, 2, 3, 4])
        kv.swap_out(handle)
        kv.release(kv.allocate("other", 6))
        kv.swap_in(handle, 4)
        kv.commit(handle, 4, [1, 2, 3, 4])
        self.assertEqual(kv.length(kv.allocate("new", 5, [1, 2, 3, 4, 5])), 4)


class StaleHandles(unittest.TestCase):
    """A released or foreign handle reaches nothing: StaleHandleError."""

    def test_foreign_and_made_up_handles(self) -> None:
        mine, other = KVCacheManager(4, 4), KVCacheManager(4, 4)
        mine.allocate("r", 4)
        for foreign in (other.allocate("r", 4), KVHandle("r"), None, 0, "r", []):
            with self.subTest(handle=foreign):
                for use in (mine.length, mine.pages, mine.release, lambda h: mine.read(h, 0)):
                    self.assertRaises(StaleHandleError, use, foreign)
        mine.check()
        self.assertEqual((mine.free_pages, other.free_pages), (3, 3))

    def test_owns(self) -> None:
        mine, other = KVCacheManager(4, 4), KVCacheManager(4, 4)
        handle = mine.allocate("r", 4)
        self.assertTrue(mine.owns(handle))
        self.assertFalse(other.owns(handle))
        mine.release(handle)
        self.assertFalse(mine.owns(handle))

    def test_a_handle_shows_its_pages_while_it_has_any(self) -> None:
        kv, other = KVCacheManager(4, 2, host_pages=2), KVCacheManager(4, 2)
        handle = kv.allocate("r", 3)
        pages = kv.pages(handle)
        self.assertEqual((handle.pages, kv.resident_pages(handle), len(pages)), (pages, pages, 2))
        self.assertRaises(StaleHandleError, other.resident_pages, handle)
        kv.swap_out(handle)
        self.assertEqual((handle.pages, kv.pages(handle)), ((), ()))
        self.assertRaisesRegex(RequestError, "r is swapped out", kv.resident_pages, handle)
        kv.swap_in(handle, 3)
        self.assertEqual((handle.pages, len(handle.pages)), (kv.pages(handle), 2))
        kv.release(handle)
        self.assertEqual((handle.pages, repr(handle)), ((), "KVHandle(request_id='r')"))
        self.assertRaises(StaleHandleError, kv.resident_pages, handle)

    def test_pages_handed_out_stay_as_they_were(self) -> None:
        """Whoever computes with a block table while it changes, in another thread, sees the one of before."""
        kv = KVCacheManager(6, 2)
        handle = kv.allocate("r", 3)
        fill(kv, handle, [([1.0], [1.0])] * 3)
        before = kv.pages(handle)
        child = kv.fork(handle, "child")
        kv.reserve(handle, 5)  # a copy of the shared page that it writes, and a fresh one
        self.assertEqual((len(before), len(kv.pages(handle)), kv.pages(child)), (2, 3, before))
        self.assertNotEqual(kv.pages(handle)[1], before[1])

    def test_no_copy_is_a_handle(self) -> None:
        kv = KVCacheManager(4, 4, host_pages=4)
        handle = kv.allocate("r", 4)
        copies = (copy.copy(handle), copy.deepcopy(handle), replace(handle), replace(handle, request_id="s"),
                  pickle.loads(pickle.dumps(handle)))
        for twin in copies:
            self.assertFalse(kv.owns(twin))
            for use in (kv.length, kv.pages, kv.release, kv.swap_out, lambda h: kv.append(h, [1.0], [1.0]),
                        lambda h: kv.reserve(h, 9), lambda h: kv.commit(h, 1), lambda h: kv.fork(h, "child")):
                self.assertRaises(StaleHandleError, use, twin)
            kv.check()
        kv.release(handle)
        self.assertEqual(kv.free_pages, 4)

    def test_a_copied_manager_has_handles_of_its_own(self) -> None:
        kv = KVCacheManager(4, 4)
        handle = kv.allocate("r", 4)
        kv2, handle2 = copy.deepcopy((kv, handle))
        kv2.append(handle2, [1.0], [1.0])
        self.assertEqual((kv.length(handle), kv2.length(handle2)), (0, 1))
        self.assertRaises(StaleHandleError, kv.length, handle2)
        kv2.release(handle2)
        self.assertEqual((kv.free_pages, kv2.free_pages), (3, 4))
        kv.check()
        kv2.check()


class PageBoundaries(unittest.TestCase):
    def test_the_last_slot_of_a_page_needs_no_new_page(self) -> None:
        """K016: page 4 and no free page: the 4th token fits, the 5th does not and changes nothing."""
        kv = KVCacheManager(1, 4)
        handle = kv.allocate("r", 3)
        fill(kv, handle, [([float(i)], [0.0]) for i in range(3)])
        self.assertEqual(kv.free_pages, 0)
        kv.append(handle, [3.0], [0.0])
        before = picture(kv, [handle])
        self.assertRaises(OutOfPagesError, kv.append, handle, [4.0], [0.0])
        self.assertEqual(picture(kv, [handle]), before)

    def test_pages_used_are_tokens_over_page_size_rounded_up(self) -> None:
        """K017"""
        for size in (1, 2, 3, 4, 16):
            for length in {max(1, size - 1), size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1}:
                kv = KVCacheManager(8 * size, size)
                handle = kv.allocate("r", length)
                self.assertEqual(len(kv.pages(handle)), (length + size - 1) // size)
                for stored in range(1, length + size + 2):
                    kv.append(handle, [float(stored)], [0.0])
                    expected = (max(length, stored) + size - 1) // size
                    self.assertEqual((len(kv.pages(handle)), kv.length(handle)), (expected, stored))

    def test_read_outside_what_was_appended(self) -> None:
        kv = KVCacheManager(4, 4)
        handle = kv.allocate("r", 8)
        self.assertRaises(IndexError, kv.read, handle, 0)
        kv.append(handle, [nan], [-inf])  # any float is stored as it is
        self.assertEqual(str(kv.read(handle, 0)), "([nan], [-inf])")
        for position in (1, 7, -1, 10**9):
            self.assertRaises(IndexError, kv.read, handle, position)

    def test_zero_tokens_open_an_empty_table(self) -> None:
        kv = KVCacheManager(1, 4)
        handle, other = kv.allocate("r", 0), kv.allocate("r", 0)  # ids may repeat, handles do not
        self.assertNotEqual(handle, other)
        self.assertEqual((kv.pages(handle), kv.free_pages), ((), 1))
        kv.release(handle)
        kv.append(other, [1.0], [1.0])
        kv.check()


class Arguments(unittest.TestCase):
    def test_wrong_arguments_are_refused_and_change_nothing(self) -> None:
        for wrong in (0, -1, True, 2.0, "4", None):
            for name in ("num_pages", "page_size", "width"):
                with self.subTest(name=name, wrong=wrong), self.assertRaisesRegex(RequestError, name):
                    KVCacheManager(**{"num_pages": 4, "page_size": 4, "width": 1, name: wrong})
        kv = KVCacheManager(4, 4, width=2)
        handle = kv.allocate("r", 4)
        before = picture(kv, [handle])
        for wrong in (-1, True, 1.0, "1", None):
            self.assertRaises(RequestError, kv.allocate, "x", wrong)
        for key, value in (([1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0]), ([], []), ([1.0] * 3, [1.0] * 3)):
            self.assertRaises(RequestError, kv.append, handle, key, value)
        for page in (-1, 4, True, 1.0, "1", None):
            self.assertRaises(RequestError, kv.page, page)
        self.assertEqual(picture(kv, [handle]), before)

    def test_the_observer_is_told_of_every_change_to_a_table(self) -> None:
        told = []
        kv = KVCacheManager(4, 2, observer=lambda *change: told.append(change))
        parent = kv.allocate("parent", 3)
        fill(kv, parent, [([1.0], [1.0])] * 3)
        first, second = kv.pages(parent)
        child = kv.fork(parent, "child")
        fill(kv, child, [([2.0], [2.0])] * 2)
        _, copy, added = kv.pages(child)
        kv.release(parent)
        kv.release(child)
        self.assertEqual(told, [
            ("allocate", "parent", (first, second)), *[("append", "parent", (first, second))] * 3,
            ("share", "child", (first, second)), ("copy", "child", (second, copy)), ("append", "child", (first, copy)),
            ("allocate", "child", (added,)), ("append", "child", (first, copy, added)),
            ("release", "parent", (first, second)), ("release", "child", (first, copy, added))])

    def test_an_observer_that_fails_at_a_fork_leaves_the_references_right(self) -> None:
        def observer(kind: str, request_id: str, pages: tuple[int, ...]) -> None:
            if kind == "share":
                raise KeyboardInterrupt

        kv = KVCacheManager(4, 2, observer=observer)
        parent = kv.allocate("parent", 3)
        kv.commit(parent, 3)
        self.assertRaises(KeyboardInterrupt, kv.fork, parent, "child")
        kv.check()

    def test_the_observer_is_told_what_can_be_found_and_what_is_evicted(self) -> None:
        told = []
        kv = KVCacheManager(3, 2, prefix_sharing=True, observer=lambda *change: told.append(change))
        tokens = (5, 6, 7, 8, 9)
        first = kv.allocate("a", 5, tokens)
        a, b, c = kv.pages(first)
        kv.commit(first, 5, tokens)
        kv.release(first)
        kv.allocate("b", 3, tokens)  # finds a; c is free
        kv.allocate("c", 1)  # takes what only a later beginning would find
        self.assertEqual(told, [
            ("allocate", "a", (a, b, c)), ("publish", "a", (a,)), ("publish", "a", (b,)), ("release", "a", (a, b, c)),
            ("share", "b", (a,)), ("allocate", "b", (c,)), ("evict", "c", (b,)), ("allocate", "c", (b,))])

    def test_hits_and_misses_count_tokens(self) -> None:
        kv = KVCacheManager(4, 2)
        parent = kv.allocate("parent", 3)
        fill(kv, parent, [([1.0], [1.0])] * 3)
        child = kv.fork(parent, "child")
        fill(kv, child, [([1.0], [1.0])])
        stats = kv.stats()
        self.assertEqual((stats.hits, stats.misses, stats.copies, stats.allocations), (3, 4, 1, 2))


class FailingObservers(unittest.TestCase):
    def play(self, seed: int, fails_at: int) -> set[str]:
        """Forty random operations; the observer raises at its call of this number. The kinds of change at which it
        did."""
        dice, calls, raised = random.Random(seed), [0], set()

        def observe(kind: str, request_id: str, pages: tuple[int, ...]) -> None:
            kv.check()  # at every change, not only after the call
            calls[0] += 1
            if calls[0] == fails_at:
                raised.add(kind)
                raise OSError(kind)

        kv = KVCacheManager(7, 2, prefix_sharing=True, host_pages=6, observer=observe)
        prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7]]
        live: list[tuple[KVHandle, list[int]]] = []
        for number in range(40):
            operation = dice.choice(["allocate", "allocate", "fork", "append", "append", "commit", "commit",
                                     "out", "in", "release", "release"])
            handle, tokens = dice.choice(live) if live else (None, [])
            before = kv.stats(), len(live)
            try:
                if operation == "allocate":
                    tokens = dice.choice(prompts)
                    live.append((kv.allocate(f"r{number}", len(tokens), tokens), tokens))
                elif handle is None:
                    continue
                elif operation == "fork":
                    live.append((kv.fork(handle, f"r{number}"), tokens))
                elif operation == "append":
                    kv.append(handle, [1.0], [1.0])
                elif operation == "commit":
                    kv.reserve(handle, len(tokens))
                    kv.commit(handle, max(kv.length(handle), len(tokens)), tokens)
                elif operation == "out":
                    kv.swap_out(handle)
                elif operation == "in":
                    kv.swap_in(handle, kv.length(handle))
                else:
                    live = [other for other in live if other[0] is not handle]
                    kv.release(handle)
            except (OSError, OutOfPagesError, RequestError):
                if operation in ("allocate", "fork"):  # nothing was opened, and nothing is counted as if it had been
                    after = kv.stats()
                    self.assertEqual((after.allocations, after.releases, after.hits, len(live)),
                                     (before[0].allocations, before[0].releases, before[0].hits, before[1]))
            kv.check()
        calls[0] = fails_at  # from here on it does not raise
        for handle, _ in live:
            kv.release(handle)
        kv.check()
        self.assertEqual((kv.free_pages, kv.free_host_pages), (7, 6))
        return raised

    def test_lose_no_page_whichever_change_they_fail_at(self) -> None:
        raised = {kind for seed in range(30) for fails_at in range(1, 40) for kind in self.play(seed, fails_at)}
        self.assertEqual(raised, {"allocate", "share", "copy", "append", "publish", "evict", "release", "swap_out",
                                  "swap_in"})

    def test_an_allocate_or_fork_that_was_observed_by_one_has_opened_nothing(self) -> None:
        def observe(kind: str, request_id: str, pages: tuple[int, ...]) -> None:
            if request_id == "bad":
                raise OSError(kind)

        kv = KVCacheManager(4, 2, observer=observe)
        self.assertRaises(OSError, kv.allocate, "bad", 3)
        self.assertEqual(kv.free_pages, 4)
        good = kv.allocate("good", 3)
        kv.commit(good, 3)
        self.assertRaises(OSError, kv.fork, good, "bad")
        self.assertEqual([kv.page(page).refcount for page in kv.pages(good)], [1, 1])
        self.assertEqual((kv.stats().allocations, kv.stats().releases, kv.stats().hits), (1, 0, 0))

    def test_any_other_call_ends_with_the_change_that_was_observed_by_one(self) -> None:
        """3 tokens in pages of 2, the second page shared. To get to 5 tokens it is copied and one is added."""
        def observe(kind: str, request_id: str, pages: tuple[int, ...]) -> None:
            if kind == bad:
                raise OSError(kind)

        bad = ""
        for change, call, pages, length, copies, swapped in (
                ("copy", lambda kv, child: kv.reserve(child, 5), 2, 3, 1, False),
                ("allocate", lambda kv, child: kv.reserve(child, 5), 3, 3, 1, False),
                ("copy", lambda kv, child: kv.append(child, [1.0], [1.0]), 2, 3, 1, False),
                ("append", lambda kv, child: kv.append(child, [1.0], [1.0]), 2, 4, 1, False),
                ("publish", lambda kv, child: kv.commit(child, 3, (1, 2, 3)), 2, 3, 0, False),
                ("swap_out", lambda kv, child: kv.swap_out(child), 0, 3, 0, True)):
            with self.subTest(change=change):
                kv = KVCacheManager(6, 2, prefix_sharing=True, host_pages=2, observer=observe)
                parent = kv.allocate("parent", 3)
                kv.commit(parent, 3)
                child = kv.fork(parent, "child")
                bad = change
                self.assertRaisesRegex(OSError, change, call, kv, child)
                bad = ""
                kv.check()
                self.assertEqual((len(kv.pages(child)), kv.length(child), kv.stats().copies, kv.stats().swaps_out),
                                 (pages, length, copies, swapped))
                if swapped:
                    kv.swap_in(child, 3)
                kv.reserve(child, 5)  # and so it goes on
                kv.release(child)
                kv.release(parent)
                self.assertEqual((kv.free_pages, kv.free_host_pages), (6, 2))

    def test_the_observer_hears_of_a_copy_before_more_pages_are_taken(self) -> None:
        """Each change by itself: after the copy 3 pages are in use, after the growth 4."""
        seen = []
        kv = KVCacheManager(6, 2, observer=lambda kind, request_id, pages: seen.append((kind, kv.used_pages)))
        parent = kv.allocate("parent", 3)
        kv.commit(parent, 3)
        kv.reserve(kv.fork(parent, "child"), 5)
        self.assertEqual(seen, [("allocate", 2), ("share", 2), ("copy", 3), ("allocate", 4)])


if __name__ == "__main__":
    unittest.main()
