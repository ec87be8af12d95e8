"""Shared prefixes: what is found is what was computed, never less than the index knows, and no token depends on it."""

from __future__ import annotations

import random
import unittest
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from starter.engine import InferenceEngine
from starter.errors import OutOfPagesError
from starter.kv_cache import KVCacheManager, KVHandle
from starter.schema import SamplingParams
from tests.support import VOCABULARY, Ask, EngineCase, make_engine, outcome, prompt_of, solo

Tokens = tuple[int, ...]

# ------------------------------------------------------------------------------- the manager and its oracle


@dataclass(eq=False)
class Record:
    """A published page: which tokens it holds, after which other record."""

    salt: str | None
    parent: Record | None
    tokens: Tokens
    page: int


@dataclass(eq=False)
class Table:
    """A block table: the tokens stored so far, and the records its leading pages are known by."""

    salt: str | None
    tokens: list[int]
    known: list[Record] = field(default_factory=list)
    swapped: bool = False


class Oracle:
    """The prefix cache as two lists that are searched from end to end: living records, and unused pages by last use."""

    def __init__(self, test: unittest.TestCase, num_pages: int, page_size: int, host_pages: int) -> None:
        self.test, self.size = test, page_size
        self.kv = KVCacheManager(num_pages, page_size, prefix_sharing=True, host_pages=host_pages)
        self.records: list[Record] = []
        self.cached: list[int] = []  # least recently used first
        self.tables: dict[KVHandle, Table] = {}
        self.hits = self.misses = 0
        self.seen: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------- predictions

    def find(self, salt: str | None, parent: Record | None, tokens: Sequence[int]) -> Record | None:
        return next((record for record in self.records if record.salt == salt and record.parent is parent
                     and list(record.tokens) == list(tokens)), None)

    def prefix(self, salt: str | None, prompt: Sequence[int]) -> list[Record]:
        """The longest run of records that hold the beginning of a prompt, short of its last token."""
        found: list[Record] = []
        while (len(found) + 1) * self.size < len(prompt):
            start = len(found) * self.size
            record = self.find(salt, found[-1] if found else None, prompt[start:start + self.size])
            if record is None:
                break
            found.append(record)
        return found

    def evict(self, fresh: Iterable[int], available: Iterable[int]) -> None:
        """Pages handed out as fresh ones; ``available`` were free before. The oldest cached ones had to go."""
        fresh = list(fresh)
        victims = [page for page in fresh if page not in available]
        self.test.assertEqual(victims, self.cached[:len(victims)])
        self.test.assertTrue(not victims or {*available} <= {*fresh})  # free pages go first
        self.cached = self.cached[len(victims):]
        self.records = [record for record in self.records if record.page not in victims]
        self.seen["evicted"] += len(victims)

    def free(self) -> list[int]:
        return [page for page in range(self.kv.total_pages) if self.kv.page(page).state == "free"]

    def numbers(self, salt: str | None, tokens: Sequence[int]) -> list[tuple[list[float], list[float]]]:
        """What must be stored for tokens: numbers that depend on all tokens up to each, as a decoder's do."""
        chain, stored = float(len(salt or "")), []
        for token in tokens:
            chain = (chain * 31 + token + 3) % 100_003
            stored.append(([chain], [float(token)]))
        return stored

    # -------------------------------------------------------------------------------------- operations

    def allocate(self, prompt: Sequence[int], salt: str | None) -> KVHandle:
        found, free = self.prefix(salt, prompt), self.free()
        handle = self.kv.allocate("r", len(prompt), prompt, salt)
        pages = self.kv.pages(handle)
        self.test.assertEqual(list(pages[:len(found)]), [record.page for record in found])
        self.test.assertEqual(self.kv.length(handle), len(found) * self.size)
        self.cached = [page for page in self.cached if page not in pages[:len(found)]]
        self.evict(pages[len(found):], free)
        self.tables[handle] = Table(salt, list(prompt[:len(found) * self.size]), found)
        self.hits += len(found) * self.size
        self.seen["found"] += len(found)
        return handle

    def compute(self, handle: KVHandle, tokens: Sequence[int]) -> None:
        """Store tokens up to these, and say so."""
        table, free, before = self.tables[handle], self.free(), self.kv.pages(handle)
        self.kv.reserve(handle, len(tokens))
        pages = self.kv.pages(handle)
        self.evict([page for page in pages if page not in before], free)
        for position, (key, value) in enumerate(self.numbers(table.salt, tokens)):
            if position >= len(table.tokens):
                self.kv.store.write(pages[position // self.size], position % self.size, key, value)
        self.kv.commit(handle, len(tokens), tokens)
        self.misses += len(tokens) - len(table.tokens)
        table.tokens = list(tokens)
        self.publish(table, pages)

    def publish(self, table: Table, pages: Sequence[int]) -> None:
        for i in range(len(table.known), len(table.tokens) // self.size):
            parent = table.known[-1] if table.known else None
            content = table.tokens[i * self.size:(i + 1) * self.size]
            record = self.find(table.salt, parent, content)
            if record is None:
                record = Record(table.salt, parent, tuple(content), pages[i])
                self.records.append(record)
            table.known.append(record)

    def fork(self, handle: KVHandle) -> None:
        table = self.tables[handle]
        self.tables[self.kv.fork(handle, "fork")] = Table(table.salt, list(table.tokens), list(table.known))
        self.hits += len(table.tokens)

    def release(self, handle: KVHandle) -> None:
        pages = self.kv.pages(handle)
        self.kv.release(handle)
        del self.tables[handle]
        self.unused(pages)

    def unused(self, pages: Sequence[int]) -> None:
        """A table gave up its pages, the last one first."""
        held = {page for handle in self.tables for page in self.kv.pages(handle)}
        published = {record.page for record in self.records}
        self.cached += [page for page in reversed(pages) if page in published and page not in held]

    def swap_out(self, handle: KVHandle) -> None:
        pages = self.kv.pages(handle)
        self.kv.swap_out(handle)
        self.tables[handle].swapped = True
        self.unused(pages)

    def swap_in(self, handle: KVHandle) -> None:
        free = self.free()
        self.kv.swap_in(handle, len(self.tables[handle].tokens) + 1)
        self.evict(self.kv.pages(handle), free)
        self.tables[handle].swapped, self.tables[handle].known = False, []

    # ------------------------------------------------------------------------------------- the walker

    def check(self) -> None:
        """After every operation: pages conserved, the index and its order as predicted, every number in its place."""
        kv, equal = self.kv, self.test.assertEqual
        kv.check()
        equal({page for page in range(kv.total_pages) if page in kv._pool.index},
              {record.page for record in self.records})
        equal([page for page in range(kv.total_pages) if kv.page(page).state == "cached"], sorted(self.cached))
        equal((list(kv._pool.cached), kv.cached_pages), (self.cached, len(self.cached)))
        equal((kv.stats().hits, kv.stats().misses, kv.stats().evictions),
              (self.hits, self.misses, self.seen["evicted"]))
        for handle, table in self.tables.items():
            equal([kv.read(handle, i) for i in range(kv.length(handle))], self.numbers(table.salt, table.tokens))
        for record in self.records:  # a findable page holds what it is found by, whoever uses it
            chain = [record]
            while chain[0].parent:
                chain.insert(0, chain[0].parent)
            tokens = [token for each in chain for token in each.tokens]
            for offset, stored in enumerate(self.numbers(record.salt, tokens)[-self.size:]):
                equal(kv.store.read(record.page, offset), stored)


class ManagerAndOracle(unittest.TestCase):
    def play(self, seed: int) -> Counter[str]:
        dice = random.Random(seed)
        size = dice.randint(1, 4)
        oracle = Oracle(self, dice.choice((4, 8, 16, 24)), size, host_pages=dice.choice((0, 4)))
        for _ in range(80):
            resident = [handle for handle, table in oracle.tables.items() if not table.swapped]
            swapped = [handle for handle, table in oracle.tables.items() if table.swapped]
            operation = dice.choice(("allocate", "allocate", "compute", "release", "release", "fork", "swap"))
            if len(oracle.tables) > 5:
                operation = "release"
            try:
                if operation == "allocate":
                    prompt = [dice.choice((0, 0, 0, 0, 0, -1, -2)) for _ in range(dice.randint(1, 4 * size))]
                    handle = oracle.allocate(prompt, dice.choice((None, None, "salt", "None")))
                    if dice.random() < 0.8:
                        oracle.compute(handle, prompt)
                elif operation == "compute" and resident:
                    handle = dice.choice(resident)
                    oracle.compute(handle, [*oracle.tables[handle].tokens, dice.choice((0, 0, 1))])
                elif operation == "release" and oracle.tables:
                    oracle.release(dice.choice([*oracle.tables]))
                elif operation == "fork" and resident:
                    oracle.fork(dice.choice(resident))
                elif operation == "swap" and swapped:
                    oracle.swap_in(dice.choice(swapped))
                elif operation == "swap" and resident:
                    oracle.swap_out(dice.choice(resident))
            except OutOfPagesError:
                oracle.seen["refused"] += 1
            oracle.check()
        return oracle.seen

    def test_every_allocation_is_what_a_search_through_lists_finds(self) -> None:
        """K004, K009, K010: with forks, swaps, evictions in order of last use, refusals; all walked after every one."""
        seen: Counter[str] = Counter()
        for seed in range(40):
            with self.subTest(seed=seed):
                seen += self.play(seed)
        self.assertGreater(min(seen["found"], seen["evicted"], seen["refused"]), 150, seen)

    def test_equal_hashes_are_never_shared(self) -> None:
        """K024: -1 and -2, 0 and 2**61 - 1 have equal hashes; and what follows a page depends on it."""
        for one, two in ((-1, -2), (0, 2**61 - 1)):
            kv = KVCacheManager(40, 2, prefix_sharing=True)
            first = kv.allocate("r", 5, [one, one, 5, 5, 9])
            kv.commit(first, 5, [one, one, 5, 5, 9])
            for prompt, found in (([two, two, 5, 5, 9], 0), ([one, two, 5, 5, 9], 0), ([one, one, 5, 5, 7], 4),
                                  ([one, one, two, 5, 9], 2), ([5, 5, 9], 0)):
                self.assertEqual(kv.length(kv.allocate("s", len(prompt), prompt)), found)

    def test_shared_by_three_released_in_any_order_read_by_the_last(self) -> None:
        """K010, K101: two pages shared by three tables are counted once, and end only with the last of them."""
        prompt = [1, 2, 3, 4]
        for order in permutations(range(3)):
            with self.subTest(order=order):
                oracle = Oracle(self, 8, 2, 0)
                handles = []
                for last in range(3):
                    handles.append(oracle.allocate([*prompt, last], None))
                    oracle.compute(handles[-1], [*prompt, last])
                    oracle.check()
                    self.assertEqual(oracle.kv.total_pages - oracle.kv.free_pages, 2 + len(handles))
                self.assertEqual([oracle.kv.page(page).refcount for page in oracle.kv.pages(handles[0])], [3, 3, 1])
                for left, number in enumerate(order, start=1):
                    oracle.release(handles[number])
                    oracle.check()
                    self.assertEqual(oracle.kv.total_pages - oracle.kv.free_pages, (2 + 3 - left) if left < 3 else 0)


# ------------------------------------------------------------------------------------------------ the engine


class Case(EngineCase):
    def step(self, engine: InferenceEngine) -> None:
        """One step, and the walker behind it."""
        decision = engine.step()
        self.assertLessEqual(decision.scheduled_tokens, decision.budget_tokens)
        self.walk(engine.kv)

    def walk(self, kv: KVCacheManager) -> None:
        kv.check()
        states = Counter(kv.page(page).state for page in range(kv.total_pages))
        self.assertEqual((states["free"] + states["cached"], states["cached"]), (kv.free_pages, kv.cached_pages))
        for page in range(kv.total_pages):
            if page in kv._pool.index:
                self.assertNotEqual(kv.page(page).state, "free")
        for table in kv._tables:
            for end, page in enumerate(table.pages, 1):
                if page in kv._pool.index:
                    self.assertGreaterEqual(table.length, end * kv.page_size)  # only full pages are published

    def finish(self, engine: InferenceEngine, asks: Mapping[str, Ask]) -> None:
        """To the end; tokens and logprobs are those of each request alone without sharing, bit by bit."""
        while engine.active:
            self.step(engine)
        self.check_outcomes(engine, asks)

    def serve(self, engine: InferenceEngine, asks: Mapping[str, Ask]) -> None:
        self.submit(engine, asks)
        self.finish(engine, asks)

    def found(self, engine: InferenceEngine) -> dict[str, int]:
        """How many prompt tokens each request found."""
        return {name: tokens for event in engine.timeline if event["event"] == "step"
                for name, tokens in event["found"].items()}

    def take_all(self, engine: InferenceEngine) -> None:
        """Somebody outside takes every free page for a moment: nothing of the cache survives."""
        outside = engine.kv.allocate("outside", engine.kv.free_pages * engine.kv.page_size)
        self.assertEqual(engine.kv.cached_pages, 0)
        engine.kv.release(outside)


class Found(Case):
    def test_a_prompt_of_whole_pages_that_is_all_there(self) -> None:
        """K013: at least one token is computed, and its logits are the same."""
        for size in (1, 2, 4):
            for pages in (1, 2, 3):
                with self.subTest(size=size, pages=pages):
                    prompt = prompt_of(random.Random(size + pages), size * pages)
                    engine = make_engine(page_size=size, num_pages=16, prefix_sharing=True)
                    for name in ("first", "second", "third"):
                        self.serve(engine, {name: Ask(prompt, 3)})
                    wanted = {"second": (pages - 1) * size, "third": (pages - 1) * size} if pages > 1 else {}
                    self.assertEqual(self.found(engine), wanted)
                    starts = [event["chunks"][0][1:3] for event in engine.timeline if event["event"] == "step"
                              and event["admitted"]]
                    self.assertEqual(starts[1:], [[(pages - 1) * size, size]] * 2)

    def test_less_than_a_page_is_never_found(self) -> None:
        """K015: and when all is evicted nothing remains, no empty node."""
        engine = make_engine(page_size=16, num_pages=8, prefix_sharing=True)
        for length in range(1, 16):
            ask = Ask(prompt_of(random.Random(length), length), 1)
            self.serve(engine, {f"{length}a": ask})
            self.serve(engine, {f"{length}b": ask})
        self.assertEqual((self.found(engine), engine.kv.cached_pages, engine.kv.stats().hits), ({}, 0, 0))
        self.serve(engine, {"whole": Ask((3,) * 40, 2)})
        self.assertEqual(engine.kv.cached_pages, 2)
        self.take_all(engine)
        self.assertEqual((engine.kv.cached_pages, engine.kv.free_pages), (0, 8))
        self.assertEqual(len(engine.kv._pool.index._found), 0)
        self.serve(engine, {"again": Ask((3,) * 40, 2)})
        self.assertNotIn("again", self.found(engine))

    def test_what_was_generated_is_found_too(self) -> None:
        engine = make_engine(page_size=2, num_pages=20, prefix_sharing=True)
        first = Ask((1, 2, 3), 6)
        self.serve(engine, {"first": first})
        (tokens,) = solo(first, "first")
        self.serve(engine, {"second": Ask((1, 2, 3, *(token for token, _ in tokens)), 2)})
        self.assertEqual(self.found(engine)["second"], 8)  # all that was stored: of 9 tokens the last never is

    def test_three_requests_with_two_common_pages(self) -> None:
        """K101: used pages and kv_bytes count a shared page once."""
        engine = make_engine(page_size=4, num_pages=16, budget_tokens=32, prefix_sharing=True)
        prompt = (1, 2, 3, 4, 5, 6, 7, 8)
        self.serve(engine, {"first": Ask((*prompt, 9), 1)})
        asks = {name: Ask((*prompt, token), 3) for name, token in (("a", 10), ("b", 11), ("c", 12))}
        self.submit(engine, asks)
        self.step(engine)
        self.assertEqual(self.found(engine), {"a": 8, "b": 8, "c": 8})
        self.assertEqual(engine.metrics().kv_pages, 2 + 3)
        self.assertEqual(engine.metrics().kv_bytes, 5 * engine.kv.store.page_bytes)
        self.assertEqual(engine.kv.total_pages - engine.kv.free_pages, 5)
        self.assertEqual(engine.kv.internal_fragmentation(), 3 * 3)
        self.finish(engine, asks)

    def test_hits_and_misses_count_tokens(self) -> None:
        """Without preemptions they add up to all that was stored: prompt + output - 1 of each sample."""
        for seed in range(3):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                asks = shared_asks(dice, 8)
                engine = make_engine(page_size=dice.randint(1, 5), num_pages=200, prefix_sharing=True)
                for name, ask in asks.items():
                    self.submit(engine, {name: ask})
                    self.step(engine)
                self.finish(engine, asks)
                stored = sum((len(ask.prompt) + ask.max_tokens - 1) * (ask.sampling.n if ask.max_tokens > 1 else 1)
                             for ask in asks.values())
                self.assertEqual(engine.metrics().preemptions, 0)
                stats = engine.kv.stats()
                self.assertGreater(stats.hits, 0)
                self.assertEqual(stats.hits + stats.misses, stored)
                self.assertEqual(stats.misses, engine.metrics().computed_tokens)
                forked = sum((ask.sampling.n - 1) * len(ask.prompt) for ask in asks.values() if ask.max_tokens > 1)
                self.assertEqual(engine.metrics().found_tokens, stats.hits - forked)


class Isolated(Case):
    def test_the_page_they_write_to_is_their_own(self) -> None:
        """K011: pages of 4, a prompt of 6; B and C find one page and part at token 7."""
        engine = make_engine(page_size=4, num_pages=16, prefix_sharing=True)
        prompt = (1, 2, 3, 4, 5, 6)
        self.serve(engine, {"a": Ask(prompt, 1)})
        asks = {"b": Ask((*prompt, 7), 6), "c": Ask((*prompt, 8), 6)}
        self.submit(engine, asks)
        self.step(engine)
        tables = [engine.kv.pages(engine.scheduler.handle(name)) for name in "bc"]
        self.assertEqual(tables[0][0], tables[1][0])
        self.assertFalse({*tables[0][1:]} & {*tables[1][1:]})
        self.finish(engine, asks)

    def test_one_goes_and_all_is_evicted_the_other_keeps_its_numbers(self) -> None:
        """K010"""
        engine = make_engine(page_size=2, num_pages=12, prefix_sharing=True)
        prompt = (5, 6, 7, 8)
        asks = {"a": Ask((*prompt, 1), 8), "b": Ask((*prompt, 2), 8)}
        self.submit(engine, {"a": asks["a"]})
        self.step(engine)
        self.submit(engine, {"b": asks["b"]})
        self.step(engine)
        self.assertEqual(self.found(engine), {"b": 4})
        handle = engine.scheduler.handle("b")
        before = [engine.kv.read(handle, i) for i in range(engine.kv.length(handle))]
        engine.cancel("a")
        engine.poll("a")
        self.take_all(engine)
        self.assertEqual([engine.kv.read(handle, i) for i in range(len(before))], before)
        self.finish(engine, {"b": asks["b"]})

    def test_salts_and_equal_strings_in_other_fields(self) -> None:
        """K025: something is found only under the same salt, whatever ids or stop strings are equal to it."""
        for one, other in permutations((None, "a", "b", "None", "root"), 2):
            with self.subTest(one=one, other=other):
                engine = make_engine(page_size=2, num_pages=32, prefix_sharing=True)
                for number, (salt, found) in enumerate(((one, 0), (other, 0), (one, 4), (other, 4))):
                    name = f"{other}" if number == 0 else f"{one}#{number}"
                    engine.submit([1, 2, 3, 4, 5], 2, request_id=name, cache_salt=salt,
                                  sampling=SamplingParams(stop=["root", f"{other}"]))
                    self.assertEqual(outcome(engine.stream(name)), solo(Ask((1, 2, 3, 4, 5), 2))[0])
                    self.assertEqual(engine.kv.stats().hits, found * max(0, number - 1))

    def test_tokens_that_all_hash_alike(self) -> None:
        """K023: the comparison decides."""
        class Token(int):
            def __hash__(self) -> int:
                return 0

        engine = make_engine(page_size=2, num_pages=64, prefix_sharing=True)
        asks = shared_asks(random.Random(23), 10)
        for name, ask in asks.items():
            engine.submit([Token(token) for token in ask.prompt], ask.max_tokens, request_id=name,
                          sampling=ask.sampling)
        self.finish(engine, asks)
        again = {f"{name} again": Ask(ask.prompt, 2) for name, ask in asks.items()}
        for name, ask in again.items():
            engine.submit([Token(token) for token in ask.prompt], 2, request_id=name)
        self.finish(engine, again)
        self.assertGreater(engine.kv.stats().hits, 0)

    def test_a_short_prompt_beside_a_long_one(self) -> None:
        """K026: nothing but real tokens is kept."""
        for size in (1, 2, 3, 4, 8):
            with self.subTest(size=size):
                engine = make_engine(page_size=size, num_pages=64, budget_tokens=32, prefix_sharing=True)
                self.serve(engine, {"long": Ask(tuple(range(1, 13)), 1), "short": Ask((7, 8, 9), 1)})
                self.serve(engine, {"more": Ask((7, 8, 9, 4, 5), 4)})
                self.assertEqual(self.found(engine).get("more", 0), 3 // size * size)


class Pressure(Case):
    def test_eight_with_one_prefix_in_one_step(self) -> None:
        """K021: nobody reads what is computed only in this step."""
        for size, budget in ((2, 64), (3, 72), (3, 8), (1, 5)):
            with self.subTest(size=size, budget=budget):
                asks = {f"r{i}": Ask((4, 2, 4, 2, 4, 2, 9, 9, 9, i), 4) for i in range(8)}
                engine = make_engine(page_size=size, num_pages=8 * 14, budget_tokens=budget, prefix_sharing=True)
                self.submit(engine, asks)
                self.step(engine)
                if budget > 64:
                    self.assertEqual(len(engine.scheduler.live), sum(map(engine.scheduler.is_running, asks)))
                    self.assertEqual(self.found(engine), {})
                self.finish(engine, asks)

    def test_evicted_and_taken_by_a_page_that_is_not_full(self) -> None:
        """K020: the old prefix is not found, its page belongs to somebody who has not even filled it."""
        engine = make_engine(page_size=4, num_pages=4, budget_tokens=32, prefix_sharing=True)
        old = Ask((1, 2, 3, 4, 5, 6, 7, 8, 9), 1)
        self.serve(engine, {"old": old})
        self.assertEqual(engine.kv.cached_pages, 2)
        new = Ask((*range(10, 20), 12, 13, 14), 4)  # 4 pages, the last one not full
        self.submit(engine, {"new": new})
        self.step(engine)
        self.assertEqual((engine.kv.cached_pages, engine.kv.stats().evictions), (0, 2))
        self.submit(engine, {"again": old})
        self.finish(engine, {"new": new, "again": old})
        self.assertNotIn("again", self.found(engine))

    def test_a_preempted_request_finds_its_own_pages(self) -> None:
        """K038: more generated tokens than a page has; they stay cached, it comes back to them."""
        for preemption in ("recompute", "swap"):
            for size in (1, 2, 3):
                with self.subTest(preemption=preemption, size=size):
                    ask = Ask((3, 1, 4), 12)
                    engine = make_engine(page_size=size, num_pages=30, prefix_sharing=True, preemption=preemption)
                    self.submit(engine, {"r": ask})
                    for _ in range(6):
                        self.step(engine)
                    outside = engine.kv.allocate("outside", engine.kv.free_pages * size)
                    while engine.scheduler.is_running("r"):
                        self.step(engine)
                    cached = engine.kv.cached_pages
                    self.assertGreater(cached, 1)
                    engine.kv.release(outside)
                    misses = engine.kv.stats().misses
                    self.step(engine)
                    self.assertLessEqual(engine.kv.stats().misses - misses, size)  # of 9 or more
                    self.finish(engine, {"r": ask})
                    self.assertEqual(self.found(engine), {})  # coming back does not count as found

    def test_a_prefix_that_the_same_step_evicts(self) -> None:
        """K039: D takes the end of what E was to share; E finds the rest, waits, and is served."""
        engine = make_engine(page_size=2, num_pages=4, budget_tokens=32, prefix_sharing=True)
        prefix = Ask((1, 2, 3, 4, 5), 1)
        self.serve(engine, {"x": prefix})
        self.assertEqual(engine.kv.cached_pages, 2)
        asks = {"d": Ask((9, 8, 7, 6, 5), 2), "e": prefix}
        self.submit(engine, asks)
        self.step(engine)
        self.assertEqual((engine.kv.stats().evictions, engine.kv.cached_pages), (1, 1))
        self.assertEqual(engine.scheduler.live, ("d", "e"))
        self.finish(engine, asks)
        self.assertEqual(self.found(engine), {"e": 2})

    def test_a_prefix_evicted_while_its_reader_waits(self) -> None:
        """K040"""
        for evicted in (False, True):
            engine = make_engine(page_size=2, num_pages=16, max_running=1, prefix_sharing=True)
            ask = Ask((1, 2, 3, 4, 5, 6, 7), 3)
            self.serve(engine, {"x": ask})
            self.submit(engine, {"runs": Ask((9,), 5)})
            self.step(engine)
            self.submit(engine, {"b": ask})  # X is there when B begins to wait
            self.step(engine)
            if evicted:
                self.take_all(engine)
            self.finish(engine, {"runs": Ask((9,), 5), "b": ask})
            self.assertEqual(self.found(engine).get("b", 0), 0 if evicted else 6)

    def test_sixty_four_requests_in_a_pool_of_little_more_than_they_need(self) -> None:
        """K012: 1.2 times the working set of four running requests; greedy, prefixes shared or not."""
        dice = random.Random(12)
        prefixes = [prompt_of(dice, 8) for _ in range(3)]
        asks = {}
        for i in range(64):
            prompt = (*(dice.choice(prefixes) if dice.random() < 0.7 else ()), *prompt_of(dice, dice.randint(1, 6)))
            asks[f"r{i}"] = Ask(prompt, dice.randint(1, 8))
        working_set = 4 * -(-(14 + 8 - 1) // 4)
        engine = make_engine(page_size=4, num_pages=working_set * 6 // 5, max_running=4, budget_tokens=24,
                             prefix_sharing=True)
        self.serve(engine, asks)
        self.assertGreater(len(self.found(engine)), 20)
        self.assertGreater(engine.kv.stats().evictions, 20)

    def test_tokens_and_logprobs_are_the_same_with_and_without(self) -> None:
        """Tight pools, arrivals at any time, forks, both preemptions, cancels: bit by bit."""
        seen: Counter[str] = Counter()
        for seed in range(24):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                asks = shared_asks(dice, 9)
                size = dice.randint(1, 6)
                largest = max(len(ask.prompt) + ask.max_tokens for ask in asks.values())
                engine = make_engine(page_size=size, num_pages=-(-largest // size) + dice.randint(0, 6),
                                     budget_tokens=dice.randint(2, 20), max_running=dice.randint(1, 5),
                                     prefix_sharing=True, preemption=dice.choice(("recompute", "swap")),
                                     host_pages=dice.choice((3, 20)))
                for name, ask in asks.items():
                    self.submit(engine, {name: ask})
                    for _ in range(dice.randint(0, 4)):
                        self.step(engine)
                    if dice.random() < 0.2:
                        self.cancel_one(dice, engine, asks)
                self.finish(engine, {name: ask for name, ask in asks.items() if name not in self.cancelled(engine)})
                seen["preempted"] += engine.metrics().preemptions
                seen["swapped"] += engine.kv.stats().swaps_in
                seen["found"] += len(self.found(engine))
                seen["forked"] += sum(event["event"] == "fork" for event in engine.timeline)
                seen["cancelled"] += len(self.cancelled(engine))
        for name in ("preempted", "swapped", "found", "forked"):
            self.assertGreater(seen[name], 20, seen)  # the test tests what it says
        self.assertGreater(seen["cancelled"], 10)

    def cancel_one(self, dice: random.Random, engine: InferenceEngine, asks: Mapping[str, Ask]) -> None:
        """Cancel a live request; what was read of it is a beginning of what it yields alone."""
        if not engine.active:
            return
        name = dice.choice(engine.active)
        events = engine.poll(name)
        engine.cancel(name)
        self.walk(engine.kv)
        events += engine.poll(name)
        for number, expected in enumerate(solo(asks[name], name)):
            self.assertEqual(outcome(events, number), expected[:len(outcome(events, number))])

    def cancelled(self, engine: InferenceEngine) -> set[str]:
        return {event["request"] for event in engine.timeline if event["event"] == "cancel"}


def shared_asks(dice: random.Random, number: int) -> dict[str, Ask]:
    """Requests of which most begin like another: greedy and sampled, some with several samples."""
    trunk = prompt_of(dice, 12)
    asks = {}
    for i in range(number):
        beginning = trunk[:dice.choice((0, 3, 6, 8, 12))]
        sampling = dice.choice((SamplingParams(), SamplingParams(), SamplingParams(1.0),
                                SamplingParams(1.5, seed=3, n=3)))
        asks[f"r{i}"] = Ask((*beginning, *(dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 4)))),
                            dice.randint(1, 9), sampling)
    return asks


if __name__ == "__main__":
    unittest.main()
