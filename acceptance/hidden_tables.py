"""A page manager and a plain model of it, side by side: after every operation all that can be seen must agree.

    Tables(case, scenario).play()       ``operations`` draws scenarios

The model knows nothing of page numbers: a table is a list of page objects, and two tables that hold the same object
share a page. Operations name a live table by a number in [0, 1). A second manager, which makes all tables too, gives
out the foreign handles.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

from m4_paged_kv import NO_ROOM

import starter

WIDTH = 3
MISUSES = ("released twice", "read of a released one", "append to a released one", "read past the end",
           "read before the beginning", "narrow key", "wide value", "no count", "read of a foreign one",
           "release of a foreign one")


def operations(rng, number, forks):
    """Operations on a pool of a drawn size."""
    weights = {"allocate": 4, "append": 11, "release": 2, "misuse": 5, "fork": 5 * forks}
    size = rng.randint(1, 7)
    drawn = []
    for kind in rng.choices(list(weights), weights.values(), k=number):
        which = rng.random()
        numbers = [[rng.uniform(-4, 4) for _ in range(WIDTH)] for _ in "kv"]
        drawn.append([kind, which, {
            "allocate": rng.choice([0, 0, 2 * size, 3 * size, rng.randint(0, 4 * size)]), "append": numbers,
            "misuse": [rng.choice(MISUSES), numbers, rng.choice([-1, -3, 2.0, True, "3", None])]}.get(kind)])
    return {"pages": rng.randint(4, 9), "page_size": size, "operations": drawn}


class Tables:
    """``tables``: by handle's number, (request id, handle, foreign handle, pages, stored numbers)."""

    def __init__(self, case, scenario):
        self.case, self.scenario = case, scenario
        self.size, self.total = scenario["page_size"], scenario["pages"]
        self.kv = starter.KVCacheManager(num_pages=self.total, page_size=self.size, width=WIDTH)
        self.other = starter.KVCacheManager(num_pages=10 * len(scenario["operations"]), page_size=self.size,
                                            width=WIDTH)
        self.live, self.released = [], []
        self.counts: Counter[str] = Counter()

    def play(self):
        number = len(self.scenario["operations"])
        for i, (kind, which, more) in enumerate(self.scenario["operations"], 1):
            table = self.live[int(which * len(self.live))] if self.live else None
            if table or kind == "allocate":
                name = f" of {table.name}" if table and kind != "allocate" else ""
                self.case.case = f"operation {i} of {number}: {kind}{name} {more or ''}"
                getattr(self, kind)(table, more)
                self.compare()
        self.case.case = "after all operations"
        for table in list(self.live):
            self.release(table, None)
        self.compare()

    # -------------------------------------------------------------------------------------------- the operations

    @property
    def used(self):
        """All page objects in use, each once."""
        return {page for table in self.live for page in table.pages}

    def needs(self, number, call):
        """The call takes so many fresh pages, or is refused when they are not free; its result, or None."""
        if number > self.total - len(self.used):
            self.case.refuses(NO_ROOM, call, f"{number} pages are needed, {self.total - len(self.used)} are free")
            return None
        return call()

    def open(self, handle, pages, stored, name):
        self.live.append(Table(name, handle, self.other.allocate(name, 1), pages, stored))
        self.counts["allocations"] += 1

    def allocate(self, table, tokens):
        name = next(f"r{i}" for i in count() if f"r{i}" not in [table.name for table in self.live])
        number = -(-tokens // self.size)
        if (handle := self.needs(number, lambda: self.kv.allocate(name, tokens))) is not None:
            self.open(handle, [object() for _ in range(number)], [], name)

    def append(self, table, numbers):
        place = len(table.stored) // self.size
        fresh = place == len(table.pages)
        shared = not fresh and sum(table.pages[place] in other.pages for other in self.live) > 1
        before = len(table.stored)

        def call():
            self.kv.append(table.handle, *[list(part) for part in numbers])
            return True

        self.needs(fresh or shared, call)
        if self.kv.length(table.handle) > before:
            table.pages[place:place + 1] = [object()] if fresh or shared else table.pages[place:place + 1]
            table.stored.append(numbers)
            self.counts["misses"] += 1

    def fork(self, table, more):
        if len(table.pages) > -(-len(table.stored) // self.size):
            return  # whether empty pages are shared is left open
        name = next(f"r{i}" for i in count() if f"r{i}" not in [table.name for table in self.live])
        self.open(self.kv.fork(table.handle, name), list(table.pages), list(table.stored), name)
        self.counts["hits"] += len(table.stored)

    def release(self, table, more):
        self.kv.release(table.handle)
        self.live.remove(table)
        self.released.append(table)
        self.counts["releases"] += 1

    def misuse(self, table, more):
        kind, (key, value), number = more
        old: Any = self.released[-1].handle if self.released else None
        length, kv, stale = len(table.stored), self.kv, starter.StaleHandleError
        error, call = {
            "released twice": (stale, lambda: kv.release(old)),
            "read of a released one": (stale, lambda: kv.read(old, 0)),
            "append to a released one": (stale, lambda: kv.append(old, key, value)),
            "read past the end": (IndexError, lambda: kv.read(table.handle, length)),
            "read before the beginning": (IndexError, lambda: kv.read(table.handle, -1)),
            "narrow key": (starter.EngineError, lambda: kv.append(table.handle, key[1:], value)),
            "wide value": (starter.EngineError, lambda: kv.append(table.handle, key, value * 2)),
            "no count": (starter.EngineError, lambda: kv.allocate("new", number)),
            "read of a foreign one": (stale, lambda: kv.read(table.foreign, 0)),
            "release of a foreign one": (stale, lambda: kv.release(table.foreign))}[kind]
        if "released" not in kind or self.released:
            self.case.refuses(error, call, kind)

    # ------------------------------------------------------------------------------------------- the comparison

    def compare(self):
        """Free pages, counts, and of each table its length, pages, users and numbers."""
        kv, case, used = self.kv, self.case, self.used
        kv.check()
        self.counts["peak_pages"] = max(self.counts["peak_pages"], len(used))
        case.same(kv.free_pages, self.total - len(used), "free + used pages = all pages, a shared page used once")
        filled: Counter[Any] = Counter()
        for table in self.live:
            pages = kv.pages(table.handle)
            case.same((kv.length(table.handle), len(pages)), (len(table.stored), len(table.pages)),
                      f"(tokens stored, pages) of {table.name}")
            for place, (number, page) in enumerate(zip(pages, table.pages)):
                users = sorted(other.name for other in self.live if page in other.pages)
                case.same((kv.page(number).refcount, sorted(kv.page(number).users)), (len(users), users),
                          f"users of page {number}")
                filled[page] = max(0, min(self.size, len(table.stored) - place * self.size))
            case.same([[list(part) for part in kv.read(table.handle, i)] for i in range(len(table.stored))],
                      table.stored, f"numbers of {table.name}: position p is in page table[p // page_size]")
        stats, counts = kv.stats(), self.counts
        case.same((stats.allocations, stats.releases, stats.hits, stats.misses, stats.peak_pages),
                  tuple(counts[name] for name in ("allocations", "releases", "hits", "misses", "peak_pages")),
                  "(allocations, releases, hits, misses, peak_pages): misses are tokens stored, hits tokens that a "
                  "fork found")
        case.same(stats.internal_fragmentation, sum(self.size - filled[page] for page in used),
                  "slots of used pages that hold no token, a shared page once")


class Table:
    def __init__(self, name, handle, foreign, pages, stored):
        self.name, self.handle, self.foreign, self.pages, self.stored = name, handle, foreign, pages, stored
