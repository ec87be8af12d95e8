"""M4 · Paged KV: fixed pages, references, copy-on-write, rollback, and isolation when there is too little memory."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness import Case, SkipPart, tiny_scenario
from m2_kv_cache import cache, numbers
from observed import Run

import starter

NO_ROOM = (starter.OutOfPagesError, starter.CapacityError)


def snapshot(kv, handles):
    """All that can be observed: pages, users, lengths and every stored number."""
    return (kv.free_pages, [(kv.page(p).refcount, sorted(kv.page(p).users)) for p in range(kv.total_pages)],
            [(kv.pages(h), [tuple(map(list, kv.read(h, i))) for i in range(kv.length(h))]) for h in handles])


def fill(case, kv, handle, count):
    for _ in range(count):
        kv.append(handle, numbers(case.rng), numbers(case.rng))


class M4PagedKV(Case):
    # -------------------------------------------------------------------------------------------- the page manager

    def test_exactly_full_pages(self):
        """B7: k * page_size tokens take k pages, one more takes one more, for allocate and for append alike."""
        for size in (1, 2, 4, 7):
            for tokens in (0, 1, size - 1, size, size + 1, 2 * size, 3 * size):
                kv = cache(8, size)
                wanted = -(-tokens // size)
                reserved, grown = kv.allocate("a", tokens), kv.allocate("b", 0)
                fill(self, kv, grown, tokens)
                self.same((len(kv.pages(reserved)), len(kv.pages(grown))), (wanted, wanted),
                          f"ceil({tokens} / {size}) pages: mind the exact multiples")

    def test_users_and_references(self):
        """V2: every page shows its reference count and its users; a free page has none."""
        kv = cache(6, 4)
        a, b = kv.allocate("a", 5), kv.allocate("b", 4)
        fill(self, kv, a, 5)
        c = kv.fork(a, "c")
        for handle, users in ((a, ["a", "c"]), (b, ["b"]), (c, ["a", "c"])):
            for page in kv.pages(handle):
                self.same((kv.page(page).refcount, sorted(kv.page(page).users)), (len(users), users), f"page {page}")
        self.same((kv.stats().allocations, kv.stats().hits, kv.stats().peak_pages), (3, 5, 3),
                  "a fork is an allocation, its 5 tokens are hits, and a shared page counts once")
        kv.release(a)
        self.refuses(starter.StaleHandleError, lambda: kv.fork(a, "d"), "a was released")
        self.same([kv.page(page).users for page in kv.pages(c)], [("c",), ("c",)], "c still uses the shared pages")
        kv.release(c)
        self.same(sorted(kv.page(page).refcount for page in range(6)), [0, 0, 0, 0, 0, 1], "only b holds a page")

    def test_copy_on_write(self):
        """V1: after a fork both sides read the shared tokens, and neither sees what the other writes, in any order."""
        for length in (6, 8):  # a shared page that is half full, and full ones only
            for first in (0, 1):
                kv = cache(12, 4)
                parent = kv.allocate("p", length)
                fill(self, kv, parent, length)
                sides = [parent, kv.fork(parent, "c")]
                self.same(kv.free_pages, 10, "a fork shares pages, it copies none yet")
                expected = [snapshot(kv, [side])[2][0][1] for side in sides]
                for i in (first, 1 - first, first):
                    key, value = numbers(self.rng), numbers(self.rng)
                    kv.append(sides[i], key, value)
                    expected[i] = [*expected[i], (key, value)]
                    self.same([snapshot(kv, [side])[2][0][1] for side in sides], expected,
                              "copy a shared page before writing")
                    kv.check()
                kv.release(sides[first])
                self.same(snapshot(kv, [sides[1 - first]])[2][0][1], expected[1 - first],
                          "the survivor keeps its tokens")

    def test_running_out_of_pages_changes_nothing(self):
        """M4: OutOfPagesError, whoever raises it, leaves every page, count and number as it was."""
        for pages in (4, 5):
            kv = cache(pages, 4)
            full = kv.allocate("full", 8)
            fill(self, kv, full, 7)
            child, rest = kv.fork(full, "child"), kv.allocate("rest", 8)
            fill(self, kv, rest, 8)
            before, counters = snapshot(kv, [full, child, rest]), kv.stats()
            calls = [lambda kv=kv: kv.allocate("late", 5), lambda kv=kv: kv.allocate("huge", 21)]  # one page is not two
            if pages == 4:
                calls += [partial(fill, self, kv, handle, 1) for handle in (rest, child)]
            for call in calls:
                self.refuses(NO_ROOM, call, "too few pages are free")
                self.same(snapshot(kv, [full, child, rest]), before, "all or nothing: take back what was taken")
                self.same(kv.stats(), counters, "a call that failed counts nothing")
            kv.release(rest)
            fill(self, kv, child, 2)
            kv.check()

    def test_last_slot_needs_no_page(self):
        """B7: with no page free, the fourth token of a page of four still fits, the fifth does not."""
        kv = cache(1, 4)
        handle = kv.allocate("r", 1)
        fill(self, kv, handle, 4)
        self.refuses(starter.OutOfPagesError, lambda: fill(self, kv, handle, 1), "the page is full")
        self.same(kv.length(handle), 4, "nothing was stored")

    def test_fragmentation(self):
        """P: internal fragmentation counts reserved slots that hold no token, a shared page once."""
        kv = cache(8, 4)
        handle = kv.allocate("r", 9)
        for stored, empty in ((0, 12), (8, 4), (12, 0), (13, 3)):
            fill(self, kv, handle, stored - kv.length(handle))
            self.same(kv.stats().internal_fragmentation, empty, f"{stored} tokens stored")
        other = kv.fork(handle, "s")
        self.same(kv.stats().internal_fragmentation, 3, "the fork shares the page with the empty slots")
        kv.release(handle)
        kv.release(other)
        self.same(kv.stats().internal_fragmentation, 0, "no page is used")

    def test_random_operations(self):
        """M4, B16: after any sequence of operations pages are conserved and every handle reads back its own numbers."""
        for size in (1, 3, 4):
            kv, names = cache(12, size), 0
            shadow: dict[Any, Any] = {}
            for _ in range(250):
                live = list(shadow)
                action = self.rng.choice(["allocate", "append", "append", "append", "fork", "release"])
                try:
                    if action == "allocate":
                        names += 1
                        shadow[kv.allocate(f"r{names}", self.rng.randint(0, 4 * size))] = []
                    elif live and action == "append":
                        handle, pair = self.rng.choice(live), (numbers(self.rng), numbers(self.rng))
                        kv.append(handle, *pair)
                        shadow[handle] = [*shadow[handle], pair]
                    elif live and action == "fork":
                        names += 1
                        parent = self.rng.choice(live)
                        shadow[kv.fork(parent, f"r{names}")] = shadow[parent]
                    elif live:
                        handle = self.rng.choice(live)
                        del shadow[handle]
                        kv.release(handle)
                        self.refuses(starter.StaleHandleError, partial(kv.release, handle), "released twice")
                except starter.OutOfPagesError:
                    pass  # nothing may have changed: checked below
                kv.check()
                held = {page for handle in shadow for page in kv.pages(handle)}
                self.same(kv.free_pages + len(held), 12, f"pages after {action}: free + held = total")
                for handle, stored in shadow.items():
                    read = [tuple(map(list, kv.read(handle, i))) for i in range(kv.length(handle))]
                    self.same(read, stored, f"numbers of {handle} after {action}")
            for handle in shadow:
                kv.release(handle)
            self.same(kv.free_pages, 12, "everything was released")

    # ------------------------------------------------------------------------------------------------- the engine

    def test_page_sizes(self):
        """B18: no token depends on the page size or on how prompts lie across pages."""
        for size in range(1, 18):
            run = Run(self, tiny_scenario(self.rng, layers=1), page_size=size, num_pages=-(-80 // size),
                      budget_tokens=9)
            for length in (max(1, size - 1), size, size + 1):
                run.submit(run.prompt(length), self.rng.choice([1, 3, size + 1]))
            run.finish()

    def test_tight_pools(self):
        """V1: when pages run out, requests wait or are computed again later; no token is lost, repeated or changed."""
        for pages, preemption in ((6, "recompute"), (8, "recompute"), (11, "recompute"), (6, "swap"), (8, "swap")):
            self.case = f"{pages} pages, preemption {preemption!r}"
            run = Run(self, num_pages=pages, max_running=6, preemption=preemption)
            for _ in range(8):
                run.submit(run.prompt(self.rng.randint(1, 10)), self.rng.randint(4, 14))
            outputs, metrics = run.finish(), run.engine.metrics()
            self.same((metrics.output_tokens, metrics.ttft.count), (sum(map(len, outputs.values())), 8),
                      "tokens computed again after a preemption are not counted again")

    def test_pages_are_taken_as_they_fill(self):
        """V1: two requests run side by side in a pool that holds both as they are, not both as they could become; when
        it is full one gives way and is computed again."""
        run = Run(self, num_pages=6, max_running=2, budget_tokens=16)
        names = [run.submit(run.prompt(4), 16) for _ in range(2)]  # 19 positions each: 5 pages of 4 in the end
        run.finish()
        served = [{chunk.request_id for chunk in decision.chunks} for decision in run.decisions]
        self.that(any(set(names) <= some for some in served), f"6 pages, served step by step: {served[:8]}",
                  "do not reserve the pages of max_tokens: take one when the last is full")
        self.that(any(decision.preempted for decision in run.decisions), "no request gave way, 10 pages were needed",
                  "when no page is free, preempt a request and put it back into the queue")

    def test_sampling_survives_preemption(self):
        """V1: a seeded sampling request draws the same tokens when it is interrupted for want of pages."""
        scenario, weights_seed, outputs = tiny_scenario(self.rng), self.rng.randrange(2**31), []
        prompts = [[i, i + 1, i + 2] for i in range(4)]
        for pages in (64, 7):
            run = Run(self, scenario, weights_seed, num_pages=pages)
            for i, prompt in enumerate(prompts):
                run.submit(prompt, 14, request_id=str(i), sampling=starter.SamplingParams(temperature=1.2, seed=i))
            outputs.append(run.finish())
        self.same(outputs[1], outputs[0], "resume where the request was; draw no number twice")

    def test_what_never_fits_is_refused(self):
        """B17: a request that no empty pool could hold is refused at submit; those behind it are served."""
        run = Run(self, num_pages=4)
        before = run.submit(run.prompt(5), 4)
        self.refuses(starter.CapacityError, lambda: run.engine.submit(run.prompt(20), 4, request_id="huge"),
                     "4 pages hold 16")
        self.refuses(starter.UnknownRequestError, lambda: list(run.engine.stream("huge")),
                     "a refused request leaves no stream")
        run.submit(run.prompt(8), 8)
        run.finish()
        self.same(run.lives[before].reason, "length", "the neighbours are served")

    def test_edge_of_capacity(self):
        """B17: a request that fits the whole pool is served alone; the boundary between served and refused is exact."""
        for max_tokens in range(4, 16):
            run, total = Run(self, num_pages=3), 5 + max_tokens  # 12 slots; the last token needs none
            try:
                accepted = bool(run.submit(run.prompt(5), max_tokens))
            except starter.CapacityError:
                accepted = False
            run.finish()
            self.that(total == 13 or accepted == (total < 13), f"{total} tokens on 12 slots: accepted {accepted}",
                      "accept what fits, serve what was accepted; counting a slot for the last token is allowed")

    def test_heavy_request_among_light_ones(self):
        """V4: neither does a request that needs most pages block light ones, nor do endless light ones keep it out."""
        run = Run(self, tiny_scenario(self.rng, layers=1), num_pages=8, max_running=3, budget_tokens=24)
        first = run.submit(run.prompt(6), 9)
        run.step()
        heavy, light = run.submit(run.prompt(26), 4), run.submit(run.prompt(2), 3)
        for _ in range(200):
            if heavy not in run.engine.active:
                break
            run.submit(run.prompt(2), 6)  # 2 pages, 6 steps: some always run, so 7 pages are never free by themselves
            run.step()
        self.that(heavy not in run.engine.active, f"{heavy} still waits after 200 steps", "bound the overtaking")
        run.finish()
        self.that(run.lives[light].token_times[0] < run.lives[first].token_times[-1],
                  f"the light request waited until {run.lives[light].token_times[0]}, when the first had ended",
                  "a request that lacks pages must not hold back one that fits")

    def test_shared_prefixes(self):
        """V1: with prefix sharing on, requests that begin alike get the tokens that they would get alone."""
        for budget in (64, 8):  # all prompts in one step; or some while the first is half computed
            try:
                run = Run(self, prefix_sharing=True, num_pages=20, max_running=8, budget_tokens=budget)
            except starter.EngineError as error:
                raise SkipPart(f"optional: {error}") from None
            prefix = run.prompt(12)
            for tail in ([], [], [1], [2], [1, 2, 3, 4], [1, 2, 3, 4]):  # nothing is computed yet
                run.submit(prefix + tail, 6)
            run.drain()
            for cut in (4, 8, 12, 11):  # whole prompts that are known, at and off the page boundary
                run.submit(prefix[:cut], 5)
            run.drain()
            for _ in range(3):  # pressure: one request uses nearly all pages, then the prefix must be computed again
                run.submit(run.prompt(60), 20)
                run.drain()
                run.submit(prefix + run.prompt(2), 4)
                run.drain()
            run.finish()
            self.that(run.engine.kv.stats().hits > 0, "no token was shared", "share full pages or refuse the setting")

    def test_cache_salt(self):
        """V1: requests with different cache_salt share nothing; with the same one they do."""
        try:
            run = Run(self, prefix_sharing=True)
        except starter.EngineError as error:
            raise SkipPart(f"optional: {error}") from None
        prompt = run.prompt(9)
        for salt, shared in (("a", 0), ("b", 0), (None, 0), ("a", 8)):
            run.submit(prompt, 3, cache_salt=salt)
            run.finish()
            self.same(run.engine.kv.stats().hits, shared, f"tokens shared after a request with the salt {salt!r}")
