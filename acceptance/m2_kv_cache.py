"""M2 · The KV cache: append, read, release, counting; and an engine that uses it instead of computing again."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness import PATIENCE, Case, Meter, item_bytes, tiny_scenario
from observed import Run
from stored import Change

import starter

ANY = starter.EngineError


def cache(num_pages=8, page_size=4, width=3):
    return starter.KVCacheManager(num_pages=num_pages, page_size=page_size, width=width)


def numbers(rng, width=3):
    """A key or a value."""
    return [rng.uniform(-4, 4) for _ in range(width)]


class M2KVCache(Case):
    def test_append_then_read(self):
        """M2: read gives back exactly what append stored, whatever happens to the caller's lists."""
        for page_size in (1, 3, 4, 16):
            kv = cache(32, page_size)
            handle, stored = kv.allocate("r", 1), []
            for position in range(17):  # far beyond what was reserved
                key, value = numbers(self.rng), numbers(self.rng)
                stored.append((list(key), list(value)))
                kv.append(handle, key, value)
                key[0] = value[0] = 99.0
                self.same(kv.length(handle), position + 1, "length counts appended tokens")
            self.same([tuple(map(list, kv.read(handle, i))) for i in range(17)], stored,
                      f"page_size {page_size}: slot of "
                      "position p is page table[p // page_size], offset p % page_size")
            for outside in (17, 1_000, -1):
                self.refuses(IndexError, partial(kv.read, handle, outside), "only appended positions can be read")

    def test_reserving_is_not_storing(self):
        """M2: allocate reserves pages; a reserved position that nothing was appended to cannot be read."""
        kv = cache()
        handle = kv.allocate("r", 6)
        self.same((len(kv.pages(handle)), kv.length(handle)), (2, 0), "6 tokens need 2 pages of 4; none is stored yet")
        self.refuses(IndexError, lambda: kv.read(handle, 0), "position 0 was never written")

    def test_wrong_width(self):
        """M2: a key or value of another width is refused and nothing is stored."""
        kv = cache(width=3)
        handle = kv.allocate("r", 1)
        for key, value in (([1.0] * 2, [1.0] * 3), ([1.0] * 3, [1.0] * 4), ([], [])):
            self.refuses(ANY, lambda k=key, v=value: kv.append(handle, k, v), "width is fixed for the whole cache")
        self.same((kv.length(handle), kv.free_pages), (0, 7), "a refused append leaves everything as it was")

    def test_access_after_release(self):
        """B9: after release a handle reaches nothing, also when its request id is used again."""
        kv = cache()
        old = kv.allocate("r", 5)
        kv.append(old, [1.0] * 3, [2.0] * 3)
        kv.release(old)
        self.same(kv.free_pages, 8, "release returns the pages")
        new = kv.allocate("r", 5)
        kv.append(new, [3.0] * 3, [4.0] * 3)
        for call in (lambda: kv.read(old, 0), lambda: kv.append(old, [0.0] * 3, [0.0] * 3), lambda: kv.release(old),
                     lambda: kv.length(old), lambda: kv.pages(old)):
            self.refuses(starter.StaleHandleError, call, "give every allocation an identity of its own")
        self.same(list(kv.read(new, 0)[0]), [3.0] * 3, "the new owner of the id is untouched")
        self.same(kv.free_pages, 6, "a second release frees nothing twice")
        kv.check()

    def test_foreign_handle(self):
        """V1: a handle of another cache manager is refused, even when the numbers inside look the same."""
        mine, other = cache(), cache()
        mine.append(mine.allocate("r", 1), [1.0] * 3, [1.0] * 3)
        foreign = other.allocate("r", 1)
        other.append(foreign, [2.0] * 3, [2.0] * 3)
        for call in (lambda: mine.read(foreign, 0), lambda: mine.release(foreign)):
            self.refuses(starter.StaleHandleError, call, "handles of two managers must never be equal")

    def test_bad_arguments(self):
        """M2: negative or non-integer token counts are refused and reserve nothing."""
        kv = cache()
        for count in (-1, 2.0, True, "3", None):
            self.refuses(ANY, lambda count=count: kv.allocate("r", count), f"token_count {count!r}")
        self.same(kv.free_pages, 8, "nothing was reserved")

    def test_counters(self):
        """V2, P: allocations, releases, hits, misses and the peak are counted as they happen."""
        kv = cache(8, 4)
        first = kv.allocate("a", 8)
        for _ in range(6):
            kv.append(first, numbers(self.rng), numbers(self.rng))
        stored = [number for i in range(6) for row in kv.read(first, i) for number in row]
        second = kv.allocate("c", 9)
        stats = kv.stats()
        self.same((stats.allocations, stats.releases, stats.misses, stats.hits), (2, 0, 6, 0),
                  "allocations: handles given out; misses: tokens stored; hits: tokens found, of which there are none")
        self.same(stats.peak_pages, 5, "2 pages and 3 more")
        for handle in (first, second):
            kv.release(handle)
        self.same((kv.stats().releases, kv.stats().peak_pages), (2, 5), "releases are counted, the peak stays")
        self.that(kv.stats().peak_bytes > 0 and kv.stats().peak_bytes % 5 == 0, f"peak_bytes {kv.stats().peak_bytes}",
                  "peak_bytes = peak_pages * bytes of a page")
        least = 5 * 4 * 2 * 3 * item_bytes(stored)  # pages, slots, key and value, width
        self.that(kv.stats().peak_bytes >= least, f"peak_bytes {kv.stats().peak_bytes}; what is read back needs "
                  f"{item_bytes(stored)} bytes a number: {least}", "claim the bytes that the numbers take")

    def test_prefill_and_decode(self):
        """M2: the prompt's positions are computed as prefill, every later one as a decode token, each once."""
        run = Run(self, budget_tokens=5)
        run.submit(run.prompt(12), 6)
        run.finish()
        chunks = [(c.start, c.count, c.phase) for decision in run.decisions for c in decision.chunks]
        self.that(all(phase == ("prefill" if start < 12 else "decode") for start, _, phase in chunks), f"{chunks}",
                  "positions of the prompt are prefill, the others decode")
        self.that(all(count == 1 for start, count, _ in chunks if start >= 12), f"{chunks}", "decode is token by token")
        self.same(sum(count for _, count, _ in chunks), 12 + 6 - 1, "the last token is delivered, never computed")

    def test_work_grows_linearly(self):
        """M2: with the cache n tokens cost n positions through the decoder; without it about n * n / 2."""
        cost = {}
        for use_cache in (True, False):
            run = Run(self, use_cache=use_cache)
            run.submit(run.prompt(4), 20)
            run.finish()
            cost[use_cache] = run.meter.tokens
        self.same(cost, {True: 23, False: sum(range(4, 24))}, "read earlier keys and values, do not compute them again")

    def test_work_is_done_by_the_backend(self):
        """M2: tokens come from the decoder's steps over the cache: a backend that embeds other rows changes them."""
        scenario = tiny_scenario(self.rng, tied_output=False)

        class Shifted(Meter):
            def embed(self, table, tokens):
                return super().embed(table, [(token - 1) % scenario.model.vocab_size for token in tokens])

        run = Run(self, scenario, meter=Shifted())
        embedding = run.oracle.weights["model.embed_tokens.weight"]
        embedding.insert(0, embedding.pop())
        run.submit(run.prompt(6), 12)
        run.finish()

    def test_stored_numbers_are_what_counts(self):
        """M2, V1: a request's tokens come from what is stored in its own pages, and from nothing stored elsewhere."""
        run = Run(self, num_pages=28)
        names = [run.submit(run.prompt(self.rng.randint(5, 9)), 14) for _ in range(4)]
        left = {name: [(3, {"key": 1.0, "value": -1.0}), (8, {"key": -1.0, "value": 1.0})] for name in names[:2]}
        while run.engine.active and len(run.decisions) < PATIENCE:
            run.step()
            for name in left:
                if left[name] and len(run.lives[name].token_times) == left[name][0][0]:  # so many tokens were generated
                    Change(run, name, **left[name].pop(0)[1]).apply()
        run.finish()
        self.same(list(left.values()), [[], []], "both were changed twice; two neighbours kept their numbers")

    def test_cache_changes_no_token(self):
        """V6: tokens with the cache equal tokens without it, in any chunking of the prompt."""
        ways: list[dict[str, Any]] = [{"use_cache": False}, *({"budget_tokens": n} for n in (1, 2, 3, 7, 64))]
        for settings in ways:
            self.case = str(settings)
            run = Run(self, **settings)
            run.submit(run.prompt(15), 8)
            run.submit(run.prompt(1), 8)
            run.finish()

    def test_dirty_pages(self):
        """V1: what earlier users left in a page is never read, not even multiplied by zero."""
        run = Run(self, page_size=8, num_pages=8)
        kv, model = run.engine.kv, run.scenario.model
        width = model.layers * model.kv_heads * model.width // model.heads
        handle = kv.allocate("vandal", 64)
        for _ in range(64):
            kv.append(handle, [float("nan")] * width, [float("nan")] * width)
        kv.release(handle)
        for length in (3, 8, 11):
            run.submit(run.prompt(length), 6)
        run.finish()

    def test_cancel_returns_pages(self):
        """M2, V3: cancel returns all pages at once, while a request waits, is in its prompt, or is generating."""
        for steps in (0, 1, 4, 9):
            run = Run(self, budget_tokens=5)
            name = run.submit(run.prompt(16), 20)
            for _ in range(steps):
                run.step()
            run.cancel(name)
            self.same((run.engine.kv.free_pages, run.engine.active), (64, ()),
                      f"cancelled after {steps} steps: the pages are back without another step")
            run.finish()
