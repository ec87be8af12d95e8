"""Preemption by swapping: tokens come back as they went, host pages are conserved, and everybody gets to the end."""

from __future__ import annotations

import random
import unittest
from collections import Counter
from collections.abc import Mapping
from itertools import product

from starter.engine import InferenceEngine
from starter.errors import EngineError
from starter.scheduler import BYPASS_LIMIT
from starter.schema import SamplingParams
from starter.sequences import SequenceState
from tests.support import FIVE, TIGHT, Ask, EngineCase, make_engine, prompt_of

SWAP = {**TIGHT, "preemption": "swap"}


class Case(EngineCase):
    def swapped(self, engine: InferenceEngine) -> list[SequenceState]:
        """Sequences that wait with their tokens in host pages."""
        sequences = map(engine.scheduler._find, engine.scheduler.live)
        return [sequence for sequence in sequences if sequence.swapped]

    def check_host(self, engine: InferenceEngine) -> None:
        """The host pool holds just what was swapped out and is not back."""
        kv = engine.kv
        kv.check()
        self.assertEqual(kv.total_host_pages - kv.free_host_pages,
                         sum(kv.pages_for(sequence.computed) for sequence in self.swapped(engine)))

    def step(self, engine: InferenceEngine) -> int:
        """One step; the tokens it scheduled."""
        decision = engine.step()
        self.check_host(engine)
        return decision.scheduled_tokens

    def finish(self, engine: InferenceEngine, asks: Mapping[str, Ask]) -> int:
        """To the end; the number of steps. No step may go by without work."""
        steps = engine.steps
        while engine.active:
            self.assertGreater(self.step(engine), 0)
        self.check_outcomes(engine, asks)
        return engine.steps - steps


class SameTokens(Case):
    def test_nothing_is_computed_twice(self) -> None:
        """With host pages enough: every position of every request is computed once, whatever was swapped."""
        for size in (1, 2, 3, 4, 8):
            with self.subTest(size=size):
                engine = make_engine(**{**SWAP, "page_size": size, "num_pages": -(-13 // size) + 1})
                self.submit(engine, FIVE)
                self.finish(engine, FIVE)
                self.assertGreater(engine.kv.stats().swaps_out, 0)
                self.assertEqual(engine.kv.stats().swaps_out, engine.metrics().preemptions)
                stored = sum(len(ask.prompt) + ask.max_tokens - 1 for ask in FIVE.values())
                self.assertEqual((engine.kv.stats().misses, engine.metrics().computed_tokens), (stored, stored))

    def test_random_requests_pools_and_host_pools(self) -> None:
        """Greedy and sampled, one sample or several: bit by bit what each yields alone."""
        seen: Counter[str] = Counter()
        for seed in range(16):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                samplings = (SamplingParams(), SamplingParams(1.0), SamplingParams(1.3, seed=5, n=2))
                asks = {f"r{i}": Ask(prompt_of(dice, dice.randint(1, 10)), dice.randint(1, 12), dice.choice(samplings))
                        for i in range(6)}
                size = dice.randint(1, 5)
                engine = make_engine(page_size=size, num_pages=-(-21 // size) + dice.randint(0, 3), preemption="swap",
                                     host_pages=dice.choice((2, 6, 30)), budget_tokens=dice.randint(2, 12),
                                     max_running=dice.randint(2, 5))
                for name, ask in asks.items():
                    self.submit(engine, {name: ask})
                    for _ in range(dice.randint(0, 2)):
                        self.step(engine)
                self.finish(engine, asks)
                seen["out"] += engine.kv.stats().swaps_out
                seen["recomputed"] += engine.metrics().preemptions - engine.kv.stats().swaps_out
        self.assertGreater(min(seen["out"], seen["recomputed"]), 15, seen)  # the test tests what it says

    def test_at_every_step(self) -> None:
        """After k steps every free page is taken from outside for one step: the last one must go, and comes back."""
        swaps = 0
        for k in range(1, 16):
            with self.subTest(k=k):
                engine = make_engine(page_size=1, num_pages=40, budget_tokens=7, preemption="swap")
                self.submit(engine, FIVE)
                for _ in range(k):
                    self.step(engine)
                outside = engine.kv.allocate("outside", engine.kv.free_pages)
                self.step(engine)
                engine.kv.release(outside)
                swaps += engine.kv.stats().swaps_out
                self.finish(engine, FIVE)
        self.assertGreater(swaps, 5)

    def test_the_numbers_in_host_pages_are_those_that_were_stored(self) -> None:
        """Read before, while and after a request is swapped out, with every page overwritten in between."""
        engine = make_engine(page_size=2, num_pages=8, preemption="swap")
        self.submit(engine, {"r": Ask((3, 1, 4), 9)})
        for _ in range(4):
            self.step(engine)
        handle = engine.scheduler.handle("r")
        stored = [engine.kv.read(handle, i) for i in range(engine.kv.length(handle))]
        engine.kv.swap_out(handle)
        outside = engine.kv.allocate("outside", 16)
        for _ in range(16):
            engine.kv.append(outside, [7.0] * engine.kv.width, [7.0] * engine.kv.width)
        engine.kv.release(outside)
        self.assertEqual([engine.kv.read(handle, i) for i in range(len(stored))], stored)
        engine.kv.swap_in(handle, len(stored))
        self.assertEqual([engine.kv.read(handle, i) for i in range(len(stored))], stored)
        self.finish(engine, {"r": Ask((3, 1, 4), 9)})


class HostPool(Case):
    def test_too_small_falls_back_to_recompute(self) -> None:
        """From none at all to enough for everybody: the same tokens; a victim that does not fit is computed again."""
        swapped = []
        for host_pages in range(8):
            with self.subTest(host_pages=host_pages):
                engine = make_engine(**SWAP, host_pages=host_pages)
                self.submit(engine, FIVE)
                self.finish(engine, FIVE)
                told = [event["reasons"][name] for event in engine.timeline if event["event"] == "step"
                        for name in event["preempted"]]
                swapped.append(sum("in host pages" in reason for reason in told))
                self.assertEqual(swapped[-1], engine.kv.stats().swaps_out)
                self.assertEqual(len(told) - swapped[-1], sum("again" in reason for reason in told))
        self.assertEqual(swapped[0], 0)
        self.assertGreater(swapped[-1], 1)

    def test_cancel_while_swapped_out(self) -> None:
        """Its host pages are free at once, and the others do not notice; whichever is cancelled after any step."""
        cancelled = 0
        for k in range(24):
            engine = make_engine(**SWAP)
            self.submit(engine, FIVE)
            for _ in range(k):
                self.step(engine)
            for sequence in self.swapped(engine)[:1]:
                cancelled += 1
                free = engine.kv.free_host_pages
                engine.cancel(sequence.id)
                self.assertEqual(engine.kv.free_host_pages - free, engine.kv.pages_for(sequence.computed))
                self.check_host(engine)
                self.assertEqual([event.finish_reason for event in engine.poll(sequence.id)], ["cancelled"])
                self.finish(engine, {name: ask for name, ask in FIVE.items() if name != sequence.id})
        self.assertGreater(cancelled, 5)

    def test_closing_gives_host_pages_back(self) -> None:
        engine = make_engine(**SWAP)
        self.submit(engine, FIVE)
        while engine.kv.free_host_pages == engine.kv.total_host_pages:
            self.step(engine)
        engine.close()
        self.assertEqual((engine.kv.free_host_pages, engine.kv.free_pages),
                         (engine.kv.total_host_pages, engine.kv.total_pages))
        engine.kv.check()

    def test_an_unused_kind_of_preemption_takes_no_host_pages(self) -> None:
        self.assertEqual(make_engine(host_pages=9).kv.total_host_pages, 0)
        self.assertEqual(make_engine(host_pages=9, preemption="swap").kv.total_host_pages, 9)

    def test_the_check_sees_a_host_page_that_is_lost_or_held_twice(self) -> None:
        def lost(kv, handle): kv._host._free.pop()
        def twice(kv, handle): kv._table(handle).host_pages.append(kv._table(handle).host_pages[0])
        def freed(kv, handle): kv._host._free.append(kv._table(handle).host_pages[0])

        for damage, account in ((lost, "host: page .* nowhere"), (twice, "host: page .* listed by 2"),
                                (freed, "host: page .* free and used")):
            with self.subTest(damage=damage.__name__):
                engine = make_engine(page_size=2, num_pages=8, preemption="swap", host_pages=4)
                self.submit(engine, {"r": Ask((3, 1, 4), 9)})
                self.step(engine)
                handle = engine.scheduler.handle("r")
                engine.kv.swap_out(handle)
                engine.kv.check()
                damage(engine.kv, handle)
                with self.assertRaisesRegex(EngineError, account):
                    engine.kv.check()

    def test_somebody_outside_swaps_a_running_request_out_and_back(self) -> None:
        """Back come pages for what is stored alone, which may be fewer than it had: it reserves the others again."""
        for steps in range(1, 10):
            with self.subTest(steps=steps):
                engine = make_engine(page_size=4, num_pages=12, preemption="swap", host_pages=8, budget_tokens=3)
                self.submit(engine, {"a": Ask((2, 3, 4, 5, 6, 7, 8, 9, 10), 8)})
                for _ in range(steps):
                    self.step(engine)
                handle = engine.scheduler.handle("a")
                engine.scheduler.complete_step()
                engine.kv.swap_out(handle)
                engine.kv.swap_in(handle, engine.kv.length(handle))
                self.finish(engine, {"a": Ask((2, 3, 4, 5, 6, 7, 8, 9, 10), 8)})

    def test_a_host_pool_that_cannot_be_written(self) -> None:
        """The copy fails: the victim is computed again."""
        def fail(source: int, target: int, origin: object = None) -> None:
            raise MemoryError("no host memory")

        engine = make_engine(**SWAP)
        engine.kv.host_store.copy_page = fail
        self.submit(engine, FIVE)
        self.finish(engine, FIVE)
        self.assertGreater(engine.metrics().preemptions, 0)
        self.assertEqual(engine.kv.stats().swaps_out, 0)

    def test_a_victim_whose_pages_somebody_outside_released(self) -> None:
        """There is nothing to swap out: it is computed again, and neither it nor the needy one notices."""
        for policy in ("fcfs", "prefill-first"):
            engine = make_engine(page_size=1, num_pages=24, preemption="swap", policy=policy)
            asks = {"first": Ask((3, 1, 4), 9), "victim": Ask((1, 2), 6)}
            self.submit(engine, asks)
            engine.step()
            engine.kv.release(engine.scheduler.handle("victim"))
            outside = engine.kv.allocate("outside", engine.kv.free_pages)
            self.assertEqual(engine.step().preempted[0], "victim")
            engine.kv.release(outside)
            self.check_outcomes(engine, asks)


class Progress(Case):
    def test_any_pool_that_fits_the_largest_request_alone(self) -> None:
        """Every step does work, and n requests end within n * (BYPASS_LIMIT + 2) * L steps, as the scheduler says."""
        for size, (prompt, max_tokens), preemption, more in product(
                (1, 3), ((8, 5), (1, 12)), ("recompute", "swap"), range(3)):
            with self.subTest(size=size, prompt=prompt, preemption=preemption, more=more):
                asks = {f"r{i}": Ask(prompt_of(random.Random(i), prompt), max_tokens) for i in range(4)}
                engine = make_engine(page_size=size, num_pages=-(-(prompt + max_tokens - 1) // size) + more,
                                     budget_tokens=8, preemption=preemption, host_pages=(0, 3, 64)[more])
                self.submit(engine, asks)
                self.assertLessEqual(self.finish(engine, asks), len(asks) * (BYPASS_LIMIT + 2) * (prompt + max_tokens))

    def test_samples_that_do_not_fit_together(self) -> None:
        """The pool fits one sample alone, barely: three of them take turns."""
        for size, preemption, host_pages in product((1, 2, 4), ("recompute", "swap"), (0, 5, 64)):
            with self.subTest(size=size, preemption=preemption, host_pages=host_pages):
                ask = Ask((3, 1, 4), 10, SamplingParams(1.0, n=3))
                engine = make_engine(page_size=size, num_pages=-(-12 // size), preemption=preemption,
                                     host_pages=host_pages)
                self.submit(engine, {"r": ask})
                self.assertLessEqual(self.finish(engine, {"r": ask}), 3 * (BYPASS_LIMIT + 2) * 13)


if __name__ == "__main__":
    unittest.main()
