"""Hidden tests of M4: forks, other page sizes, too little memory, shared prefixes, callers who leave."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import SkipPart, tiny_scenario
from hidden_case import Hidden, drawn, load, model, moves_of, tokens
from hidden_readers import Readers, visits
from hidden_tables import Tables, operations
from m3_continuous_batching import M3ContinuousBatching

import starter


def page_sizes(rng):
    """Lengths just before, at and behind the end of a page."""
    size = rng.randint(1, 24)
    made = load(rng, 6, (1, 4), (1, size + 1), 0.1, sizes={"layers": 1}, page_size=size,
                budget_tokens=rng.randint(3, 30))
    for move in moves_of(made["moves"], "submit"):
        move[2] = tokens(rng, made, max(1, size * rng.randint(1, max(1, 24 // size)) + rng.randint(-1, 1)))
    made["settings"]["num_pages"] = rng.randint(2, 4) * -(-60 // size)
    return made


def tight_memory(rng):
    """A pool that the largest request fills, if it fits at all."""
    size = rng.randint(1, 6)
    made = load(rng, 12, (1, 12), (4, 16), 0.15, page_size=size, max_running=rng.randint(2, 6),
                budget_tokens=rng.randint(3, 20), preemption=rng.choice(["recompute", "swap"]))
    slots = [len(prompt) + most - 1 for _, _, prompt, most, _ in moves_of(made["moves"], "submit")]
    edge = sorted(slots)[-rng.randint(1, 2)]  # one or two of them are at the edge of what fits
    made["settings"]["num_pages"] = max(1, rng.choice([edge, edge - 1]) // size)
    return made


def never_fits(rng):
    """Requests just within and just beyond what an empty pool holds, in any order."""
    size, pages = rng.randint(1, 6), rng.randint(2, 5)
    made = load(rng, 8, sizes={"layers": 1}, page_size=size, num_pages=pages)
    for move in moves_of(made["moves"], "submit"):
        total = size * pages + 1 + rng.choice([-2, -1, 0, 1, 2, 3, 20])  # one of them needs no slot
        length = rng.randint(1, max(1, total - 1))
        move[2:4] = [tokens(rng, made, length), max(1, total - length)]
    return made


def crowd(rng):
    """A request that needs all pages, one that needs one, and an endless number that need two."""
    size, pages = rng.randint(3, 6), rng.randint(7, 10)
    made = model(rng, layers=1)
    return {**made, "first": [tokens(rng, made, size + 2), 2 * size + rng.randint(0, 2)],
            "heavy": [tokens(rng, made, (pages - 1) * size - rng.randint(0, 2)), 4],
            "light": [tokens(rng, made, 2), 3],
            "others": [[tokens(rng, made, 2), size + 2] for _ in range(5)],
            "settings": {"page_size": size, "num_pages": pages, "max_running": 3, "budget_tokens": rng.randint(20, 40)}}


def interrupted_samples(rng):
    """Sampled requests in a pool that holds about two of them."""
    made, size = model(rng), rng.randint(2, 4)
    asked = [[tokens(rng, made, rng.randint(2, 5)), rng.randint(12, 16), {
        "temperature": rng.choice([0.9, 1.4]), "seed": rng.randrange(1000)}] for _ in range(5)]
    return {**made, "asked": asked, "settings": {
        "page_size": size, "max_running": 4, "preemption": rng.choice(["recompute", "swap"])}}


def families(rng):
    """Prompts that begin alike: together before anything is computed, one by one later, and after others needed all
    pages."""
    size = rng.randint(2, 5)
    made = model(rng, layers=1, vocab_size=40)
    beginnings = [tokens(rng, made, size * rng.randint(2, 4)) for _ in range(2)]

    def relative():
        whole = rng.choice(beginnings)
        cut = rng.choice([len(whole), len(whole), len(whole) - size, len(whole) - 1])
        return whole[:cut] + rng.choice([[], [], tokens(rng, made, 1), tokens(rng, made, rng.randint(2, 2 * size))])

    moves: list[list[Any]] = []
    for _ in range(3):
        moves += [["submit", f"r{len(moves) + i}", relative(), rng.randint(2, 7), {}] for i in range(4)] + [["drain"]]
        for _ in range(2):
            moves += [["submit", f"r{len(moves)}", relative(), rng.randint(2, 6), {}], ["drain"]]
        moves += [["submit", f"r{len(moves)}", tokens(rng, made, 11 * size), size, {}], ["drain"]]
    return {**made, "moves": moves, "settings": {
        "page_size": size, "num_pages": 13 + rng.randint(0, 4), "max_running": 8,
        "budget_tokens": rng.choice([64, 64, 8]), "prefix_sharing": True}}


def salts(rng):
    """One prompt under one salt after another."""
    made, size = model(rng, layers=1), rng.randint(2, 6)
    length = size * rng.randint(1, 4) + rng.randint(1, size - 1)
    return {**made, "prompt": tokens(rng, made, length), "salts": [rng.choice(["a", "b", None]) for _ in range(9)],
            "settings": {"page_size": size, "prefix_sharing": True}}


def leaving(rng):
    """Callers who leave, and requests that live when the engine is closed."""
    size = rng.randint(1, 5)
    made = visits(rng, 60, 6, (1, 9), (0, 12), settings={
        "page_size": size, "num_pages": -(-21 // size) + rng.randint(0, 6), "max_running": rng.randint(2, 5),
        "budget_tokens": rng.randint(2, 16)})
    return {**made, "last": [[tokens(rng, made, rng.randint(1, 9)), 12] for _ in range(4)]}


class HiddenMemory(Hidden):
    def ready(self):
        """Two requests that need three pages each end in a pool of three, and requests are batched; nothing in this
        milestone counts before."""
        M3ContinuousBatching.ready(self)  # type: ignore[arg-type]  # it uses nothing but what every case has
        scenario = tiny_scenario(Random(0), layers=1)
        with starter.InferenceEngine.from_scenario(scenario, page_size=4, num_pages=3, max_running=2) as engine:
            self.engines.append(engine)
            for name in [engine.submit([1, 2], 8) for _ in "ab"]:
                *_, last = engine.stream(name)
                self.that(last.finish_reason == "length", f"of two requests in too small a pool one ended with "
                          f"{last.finish_reason}: {last.error}", "somebody has to wait, or to give pages back")

    @drawn("B7", "M4", partial(operations, number=120, forks=True), times=5)
    def test_forks(self, scenario):
        """B7: whatever is forked, appended to, released and misused, pages, users, counts and numbers are right."""
        Tables(self, scenario).play()

    @drawn("B18", "M4", page_sizes, times=4)
    def test_page_sizes(self, scenario):
        """B18: no token depends on the page size, or on how a prompt lies across pages."""
        self.served(scenario)

    @drawn("B17", "M4", tight_memory, times=6)
    def test_tight_memory(self, scenario):
        """B17: when pages run out, requests wait, or go on later; no token is lost, repeated or changed."""
        self.served(scenario)

    @drawn("B17", "M4", never_fits, times=2)
    def test_never_fits(self, scenario):
        """B17: what fits an empty pool is served, what does not is refused at the door, and holds up nobody."""
        self.served(scenario)

    def served(self, scenario):
        run = self.play(scenario)
        run.finish()
        self.measures(run)
        return run

    @drawn("V4", "M4", crowd, times=2)
    def test_crowd(self, scenario):
        """V4: neither does a request that needs all pages block light ones, nor do endless light ones keep it out."""
        run = self.make(scenario)
        first = run.submit(*scenario["first"])
        run.step()
        heavy, light = run.submit(*scenario["heavy"]), run.submit(*scenario["light"])
        for i in range(250):
            if heavy not in run.engine.active:
                break
            run.submit(*scenario["others"][i % 5])
            run.step()
        self.that(heavy not in run.engine.active, f"{heavy} still waits after 250 steps", "bound the overtaking")
        run.finish()
        began, ended = run.lives[light].token_times[0], run.lives[first].token_times[-1]
        self.that(began < ended, f"the light request waited until {began}; the first one ended at {ended}",
                  "a request that lacks pages must not hold back one that fits")

    @drawn("V1", "M4", interrupted_samples, times=2)
    def test_interrupted_samples(self, scenario):
        """V1: a sampled request draws the same tokens when it is interrupted for want of pages."""
        size = scenario["settings"]["page_size"]
        outputs = []
        for pages in (100, -(-21 // size) + 1):
            run = self.make(scenario, num_pages=pages)
            for i, (prompt, most, how) in enumerate(scenario["asked"]):
                run.submit(prompt, most, request_id=str(i), sampling=starter.SamplingParams(**how))
            outputs.append(run.finish())
        self.same(outputs[1], outputs[0], "resume where the request was; draw no number twice")

    def sharing(self, act):
        """What ``act()`` returns, unless prefix sharing, which is optional, is refused."""
        try:
            return act()
        except starter.EngineError as error:
            raise SkipPart(f"optional: {error}") from None

    @drawn("V1", "M4", families, times=3)
    def test_families(self, scenario):
        """V1: with prefix sharing, prompts that begin alike get the tokens that they would get alone."""
        self.sharing(lambda: self.make(scenario))
        run = self.play(scenario)
        run.finish()
        self.that(run.engine.kv.stats().hits > 0, "no token was shared", "share full pages or refuse the setting")

    @drawn("V1", "M4", salts)
    def test_salts(self, scenario):
        """V1: requests with different cache_salt share nothing; with the same one they do."""
        run = self.sharing(lambda: self.make(scenario))
        seen: set[str | None] = set()
        for salt in scenario["salts"]:
            before = run.engine.kv.stats().hits
            run.submit(scenario["prompt"], 3, cache_salt=salt)
            run.finish()
            size = scenario["settings"]["page_size"]
            self.same(run.engine.kv.stats().hits - before, len(scenario["prompt"]) // size * size * (salt in seen),
                      f"tokens shared by a request with the salt {salt!r}, after others with {sorted(map(str, seen))}")
            seen.add(salt)

    @drawn("B16", "M4", leaving, times=4)
    def test_leaving(self, scenario):
        """B16: whoever cancels, stops reading, asks for what is gone, or never comes back: all pages come back."""
        readers = Readers(self, scenario)
        readers.play()
        engine = readers.engine
        for prompt, most in scenario["last"]:
            engine.submit(prompt, most)
        engine.step()
        engine.close()
        engine.close()
        self.same((engine.active, engine.kv.free_pages), ((), engine.kv.total_pages),
                  "close ends what lives and returns every page; it may be called twice")
        self.refuses(starter.EngineError, lambda: engine.submit([1], 1), "the engine is closed")
