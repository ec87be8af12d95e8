"""The scheduler's rules, watched from outside: budget, order, fairness, waits, preemption, ends, reasons, policies."""

from __future__ import annotations

import random
import unittest
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from unittest import mock

from starter.errors import CapacityError, DuplicateRequestError, RequestError, UnknownRequestError
from starter.kv_cache import KVCacheManager
from starter.scheduler import AGING, BYPASS_LIMIT, POLICIES, REFUSAL_LIMIT, ContinuousBatchScheduler, ScheduleDecision
from starter.schema import Request


def request(name: str, prompt: int, max_tokens: int = 1, priority: int = 0) -> Request:
    return Request(name, [0] * prompt, max_tokens, priority=priority)


def rank(policy: str, asked: Request, arrival: int, generated: int) -> float:
    """The definitions in policies.py, with its A = 16."""
    if policy == "priority":
        return arrival - 16 * asked.priority
    if policy == "shortest":
        return arrival + (len(asked.prompt_tokens) + asked.max_tokens - generated) / 16
    return arrival


class Life:
    """What an observer knows of a live request."""

    def __init__(self, asked: Request, serial: int, arrival: int, policy: str) -> None:
        self.asked, self.serial, self.arrival, self.policy = asked, serial, arrival, policy
        self.computed = self.generated = self.waited = self.overtaken = self.longest = 0
        self.served = -1  # step of its last chunk
        self.before: set[int] = set()  # serials of those that were live before it in order while it waited
        self.rank = rank(policy, asked, arrival, 0)

    @property
    def order(self) -> tuple[float, int]:
        return self.rank, self.serial

    @property
    def known(self) -> int:
        return len(self.asked.prompt_tokens) + self.generated

    @property
    def size(self) -> int:
        return len(self.asked.prompt_tokens) + self.asked.max_tokens

    @property
    def decoding(self) -> bool:
        return self.generated > 0 and self.computed == self.known - 1


class Watch:
    """Follows a scheduler by its decisions alone, and holds every decision against the rules in its docstring."""

    def __init__(self, test: unittest.TestCase, scheduler: ContinuousBatchScheduler) -> None:
        self.test, self.scheduler = test, scheduler
        self.policy = next(name for name, kind in POLICIES.items() if type(scheduler.policy) is kind)
        self.lives: dict[str, Life] = {}
        self.running: list[str] = []
        self.ended: list[str] = []  # to be told in the next decision's ``finished``
        self.serial = self.steps = 0
        self.smallest_budget = 10**9
        self.produced: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    def submit(self, asked: Request) -> None:
        self.scheduler.submit(asked)
        if asked.max_tokens == 0:
            self.ended.append(asked.request_id)
            return
        self.lives[asked.request_id] = Life(asked, self.serial, self.steps, self.policy)
        self.serial += 1

    def cancel(self, name: str) -> None:
        self.scheduler.cancel(name)
        self.forget(name)

    def forget(self, name: str) -> None:
        del self.lives[name]
        if name in self.running:
            self.running.remove(name)
        self.ended.append(name)

    def step(self, budget: int) -> ScheduleDecision:
        equal = self.test.assertEqual
        self.complete()
        before = list(self.running)
        decoding = [name for name in before if self.lives[name].decoding]
        decision = self.scheduler.step(budget)
        if self.scheduler.kv:
            self.scheduler.kv.check()
        equal((decision.step, decision.budget_tokens), (self.steps, budget))
        equal(sorted(decision.finished), sorted(self.ended))
        self.ended = []
        self.check_budget(decision)
        self.check_preemption(decision, before)
        self.running = [name for name in before if name not in decision.preempted] + list(decision.admitted)
        equal(sorted(decision.running), sorted(self.running))
        equal(set(decision.waiting), set(self.lives) - set(self.running))
        self.check_admission(decision)
        self.check_decodes(decision, decoding)
        self.check_prefills(decision)
        self.check_reasons(decision)
        self.check_waits(decision)
        for chunk in decision.chunks:
            life = self.lives[chunk.request_id]
            self.test.assertIn(chunk.request_id, self.running)
            equal(chunk.start, life.computed)  # every position once, in order
            life.computed += chunk.count
            self.test.assertLessEqual(life.computed, life.known)
            life.served = self.steps
        self.steps += 1
        return decision

    def complete(self) -> None:
        """What was handed out counts as computed; a chunk that reaches the known tokens yields the next one."""
        for name in list(self.running):
            life = self.lives[name]
            if life.served == self.steps - 1 and life.computed == life.known:
                life.generated += 1
                self.produced[name] += 1
                if life.generated == life.asked.max_tokens:
                    self.forget(name)

    def check_budget(self, decision: ScheduleDecision) -> None:
        counts = [chunk.count for chunk in decision.chunks]
        self.test.assertTrue(all(count > 0 for count in counts))
        self.test.assertEqual(decision.scheduled_tokens, sum(counts))
        self.test.assertLessEqual(sum(counts), decision.budget_tokens)
        names = [chunk.request_id for chunk in decision.chunks]
        self.test.assertEqual(len(set(names)), len(names))
        self.test.assertLessEqual(len(decision.running), self.scheduler.max_running)
        self.test.assertLessEqual(set(decision.admitted), set(names))  # the budget leaves the admitted a token

    def check_preemption(self, decision: ScheduleDecision, before: list[str]) -> None:
        """The last running request gives up its pages; the first live one is never preempted once it runs."""
        last_first = sorted(before, key=lambda name: self.lives[name].order, reverse=True)
        self.test.assertEqual(list(decision.preempted), last_first[:len(decision.preempted)])
        if decision.preempted:
            self.seen["preempted"] += 1
            self.test.assertFalse(decision.admitted)
            self.test.assertNotIn(min(self.lives, key=lambda name: self.lives[name].order), decision.preempted)
        for name in decision.preempted:
            life = self.lives[name]
            life.rank = rank(self.policy, life.asked, life.arrival, life.generated)
            if "host pages" in decision.reasons[name]:
                self.seen["swapped"] += 1
            else:
                life.computed = 0

    def check_admission(self, decision: ScheduleDecision) -> None:
        """In order; who lacks pages is overtaken at most BYPASS_LIMIT times; nobody waits without need."""
        kv = self.scheduler.kv
        if kv and kv.prefix_sharing:
            for name in decision.admitted:
                self.lives[name].computed = kv.length(self.scheduler.handle(name))
                self.seen["found"] += self.lives[name].computed
        if not decision.waiting or not decision.budget_tokens:
            return
        first = min((self.lives[name] for name in decision.waiting), key=lambda life: life.order)
        lacks_pages = kv is not None and kv.pages_for(first.known) > kv.free_pages
        for name in decision.admitted:
            if self.lives[name].order > first.order:
                self.test.assertTrue(lacks_pages)
                first.overtaken += 1
                self.seen["overtaken"] += 1
        self.test.assertLessEqual(first.overtaken, BYPASS_LIMIT)
        decodes = sum(self.lives[name].decoding for name in self.running)
        tight = decision.budget_tokens <= len(self.running) or decodes >= decision.budget_tokens
        if not (tight or lacks_pages or decision.preempted or self.scheduler.batching != "continuous"):
            self.test.assertEqual(len(self.running), self.scheduler.max_running)

    def check_decodes(self, decision: ScheduleDecision, decoding: list[str]) -> None:
        """One token each; decodes first, all of them where the budget covers them, else the least recently served."""
        served = [chunk for chunk in decision.chunks if chunk.phase == "decode"]
        self.test.assertTrue(all(chunk.count == 1 for chunk in served))
        names = {chunk.request_id for chunk in served} - set(decision.admitted)  # those were swapped in just now
        self.test.assertLessEqual(names, set(decoding))
        orders = [self.lives[chunk.request_id].order for chunk in served if chunk.request_id in names]
        self.test.assertEqual(orders, sorted(orders))
        left_out = set(decoding) - names - set(decision.preempted)
        if self.policy != "prefill-first":
            self.test.assertEqual({chunk.request_id for chunk in decision.chunks[:len(names)]}, names)
            self.test.assertFalse(left_out and decision.budget_tokens >= len(decoding))
        self.check_turns(names, left_out)

    def check_turns(self, served: Iterable[str], left_out: Iterable[str]) -> None:
        self.test.assertLessEqual(max((self.lives[name].served for name in served), default=-1),
                                  min((self.lives[name].served for name in left_out), default=10**9))

    def check_prefills(self, decision: ScheduleDecision) -> None:
        """What is left is shared evenly: a prompt that got all it needs got no more than one that did not."""
        chunks = {chunk.request_id: chunk.count for chunk in decision.chunks if chunk.phase == "prefill"}
        partial = [count for name, count in chunks.items()
                   if self.lives[name].computed + count < self.lives[name].known]
        if partial:
            self.test.assertLessEqual(max(partial) - min(partial), 1)
            self.test.assertGreaterEqual(min(partial), max(chunks.values()) - 1)
            self.test.assertEqual(decision.scheduled_tokens, decision.budget_tokens)
        prefilling = {name for name in self.running if not self.lives[name].decoding}
        self.test.assertLessEqual(set(chunks), prefilling)
        if prefilling - set(chunks):
            self.test.assertEqual(decision.scheduled_tokens, decision.budget_tokens)
            self.check_turns(chunks, prefilling - set(chunks))

    def check_reasons(self, decision: ScheduleDecision) -> None:
        head = sorted(decision.waiting, key=lambda name: self.lives[name].order)[:BYPASS_LIMIT]
        for name in (*decision.running, *decision.preempted, *head):
            self.test.assertIn(name, decision.reasons)
        self.test.assertTrue(all(decision.reasons.values()))

    def check_waits(self, decision: ScheduleDecision) -> None:
        """A request with k before it is admitted within (k + 1) * (BYPASS_LIMIT + 2) * L steps."""
        if not decision.budget_tokens:
            return
        self.smallest_budget = min(self.smallest_budget, decision.budget_tokens)
        turns = -(-self.scheduler.max_running // self.smallest_budget)
        longest = max((life.size for life in self.lives.values()), default=0)
        for name in decision.waiting:
            life = self.lives[name]
            if life.served < 0:  # never admitted
                life.waited += 1
                life.longest = max(life.longest, longest)
                life.before |= {other.serial for other in self.lives.values() if other.order < life.order}
                bound = (len(life.before) + 1) * (BYPASS_LIMIT + 2) * life.longest * turns
                self.test.assertLessEqual(life.waited, bound, name)

    def drain(self, budget: int | Callable[[], int], limit: int = 20_000) -> None:
        """Step until nobody is live. Everybody's turn comes: no livelock."""
        for _ in range(limit):
            if self.scheduler.idle:
                break
            self.step(budget if isinstance(budget, int) else budget())
        self.complete()
        self.test.assertTrue(self.scheduler.idle)
        self.test.assertFalse(self.lives)


class RandomArrivals(unittest.TestCase):
    def play(self, seed: int, with_pages: bool, policy: str = "fcfs", prefix_sharing: bool = False,
             host_pages: int = 0) -> Counter[str]:
        dice = random.Random(seed)
        max_running = dice.randint(1, 6)
        page_size, num_pages = dice.randint(1, 6), dice.randint(3, 14)
        kv = None
        if with_pages:
            kv = KVCacheManager(num_pages, page_size, prefix_sharing=prefix_sharing, host_pages=host_pages)
        watch = Watch(self, ContinuousBatchScheduler(max_running, policy, kv, "continuous",
                                                     "swap" if host_pages else "recompute"))
        capacity = num_pages * page_size + 1
        expected = {}
        budgets = dice.choice(([max_running], [max_running, 3 * max_running], [1], [1, 2, 20], [0, max_running + 3]))
        for number in range(20):
            for _ in range(dice.choice((0, 0, 1, 1, 3))):
                prompt = dice.randint(1, max(1, dice.choice((3, capacity // 2, capacity - 1))))
                asked = request(f"{number}-{len(expected)}", prompt, dice.randint(0, max(0, capacity - prompt)),
                                dice.choice((-1, 0, 0, 2)))
                watch.submit(asked)
                expected[asked.request_id] = asked.max_tokens
            watch.step(dice.choice(budgets))
            if watch.lives and dice.random() < 0.1:
                name = dice.choice([*watch.lives])
                watch.cancel(name)
                expected[name] = watch.produced[name]
        watch.drain(max(budgets))
        self.assertEqual(watch.produced, Counter(expected))
        if kv:
            self.assertEqual((kv.free_pages, kv.free_host_pages), (kv.total_pages, host_pages))
        return watch.seen

    def test_every_rule_with_unlimited_pages(self) -> None:
        for policy, seed in product(POLICIES, range(5)):
            with self.subTest(policy=policy, seed=seed):
                self.play(seed, with_pages=False, policy=policy)

    def test_every_rule_with_few_pages(self) -> None:
        seen: Counter[str] = Counter()
        for policy, seed in product(POLICIES, range(6)):
            with self.subTest(policy=policy, seed=seed):
                seen += self.play(seed, with_pages=True, policy=policy)
        self.assertGreater(min(seen["preempted"], seen["overtaken"]), 100)  # the test tests what it says

    def test_every_rule_with_swapping_and_shared_prefixes(self) -> None:
        seen: Counter[str] = Counter()
        for policy, seed in product(POLICIES, range(4)):
            with self.subTest(policy=policy, seed=seed):
                seen += self.play(seed, True, policy, host_pages=6)
                seen += self.play(seed, True, policy, host_pages=3, prefix_sharing=True)
        self.assertGreater(min(seen["preempted"], seen["swapped"], seen["found"]), 50)


class Budget(unittest.TestCase):
    def test_budget_0_schedules_nothing_and_loses_nothing(self) -> None:
        """B10, K034"""
        watch = Watch(self, ContinuousBatchScheduler(2, kv=KVCacheManager(4, 4)))
        watch.submit(request("a", 3, 2))
        watch.submit(request("b", 9, 2))
        watch.submit(request("c", 1, 1))
        for budget in (0, 4, 0, 0, 4, 0):
            decision = watch.step(budget)
            self.assertEqual(bool(decision.chunks), bool(budget))
        watch.drain(4)
        self.assertEqual(watch.produced, {"a": 2, "b": 2, "c": 1})

    def test_a_budget_below_the_prompt_ends_in_completion(self) -> None:
        """K034"""
        for budget in (1, 7, 19, 20, 21):
            watch = Watch(self, ContinuousBatchScheduler(kv=KVCacheManager(8, 4)))
            watch.submit(request("long", 20, 3))
            watch.submit(request("short", 1, 1))
            watch.drain(budget, limit=60)
            self.assertEqual(watch.produced, {"long": 3, "short": 1})

    def test_what_is_no_budget_is_refused_and_changes_nothing(self) -> None:
        scheduler = ContinuousBatchScheduler()
        scheduler.submit(request("a", 2, 1))
        for wrong in (-1, True, 1.0, "8", None):
            with self.subTest(wrong=wrong), self.assertRaisesRegex(RequestError, "budget_tokens"):
                scheduler.step(wrong)
        self.assertEqual([chunk.count for chunk in scheduler.step(9).chunks], [2])

    def test_a_small_budget_goes_round(self) -> None:
        """With a smaller budget turns go round: least recently served first."""
        watch = Watch(self, ContinuousBatchScheduler(4))
        for name in "abcd":
            watch.submit(request(name, 1, 10))
        watch.step(4)
        turns = [chunk.request_id for _ in range(12) for chunk in watch.step(1).chunks]
        self.assertEqual(turns, list("abcd" * 3))


class Fairness(unittest.TestCase):
    def test_a_long_prompt_stops_neither_decodes_nor_short_prompts(self) -> None:
        """K032: A decodes, B's prompt is 50 budgets long, C's has 3 tokens."""
        for length in (400, 4000):
            watch = Watch(self, ContinuousBatchScheduler(8))
            watch.submit(request("a", 1, 40))
            watch.step(8)
            watch.submit(request("b", length, 1))
            watch.step(8)
            watch.submit(request("c", 3, 1))
            for _ in range(6):
                decision = watch.step(8)
                self.assertEqual([c.request_id for c in decision.chunks if c.phase == "decode"], ["a"])
            watch.complete()
            self.assertEqual(watch.produced["c"], 1)  # in the very next step, however long B is

    def test_the_budget_left_by_decodes_is_shared_evenly(self) -> None:
        scheduler = ContinuousBatchScheduler(8)
        for name, prompt in (("a", 50), ("b", 2), ("c", 50)):
            scheduler.submit(request(name, prompt, 5))
        counts = {chunk.request_id: chunk.count for chunk in scheduler.step(16).chunks}
        self.assertEqual(counts, {"a": 7, "b": 2, "c": 7})  # b's third, 5, is more than it needs

    def test_endless_short_requests_do_not_starve_a_heavy_one(self) -> None:
        """K031, K033: shorts overtake the heavy one BYPASS_LIMIT times, then it is served; and the reverse."""
        for heavies, shorts in ((1, 3), (3, 1), (1, 1)):
            with self.subTest(heavies=heavies, shorts=shorts):
                kv = KVCacheManager(8, 4)
                watch = Watch(self, ContinuousBatchScheduler(4, kv=kv))
                watch.submit(request("first", 17, 8))
                watch.step(8)
                for step in range(150):
                    if step % 10 == 1:
                        for i in range(heavies):
                            watch.submit(request(f"heavy{step}.{i}", 28, 4))
                    for i in range(shorts):
                        if len(watch.lives) < 40:
                            watch.submit(request(f"short{step}.{i}", 2, 2))
                    watch.step(8)
                self.assertTrue(any(name.startswith("heavy") for name in watch.produced))
                watch.drain(8)
                if shorts > 1:
                    self.assertGreater(watch.seen["overtaken"], BYPASS_LIMIT)

    def test_small_requests_pass_a_heavy_one_but_not_for_ever(self) -> None:
        """K031"""
        watch = Watch(self, ContinuousBatchScheduler(16, kv=KVCacheManager(25, 2)))
        watch.submit(request("running", 2, 40))
        watch.step(16)
        watch.submit(request("heavy", 48, 2))
        for i in range(BYPASS_LIMIT + 2):
            watch.submit(request(f"light{i}", 2, 2))
        decision = watch.step(16)
        self.assertEqual(decision.admitted, tuple(f"light{i}" for i in range(BYPASS_LIMIT)))
        self.assertRegex(decision.reasons["heavy"], r"needs 24 pages, 23 free; running frees \d+ at its end")
        self.assertRegex(decision.reasons[f"light{BYPASS_LIMIT}"], "heavy lacks pages and was overtaken 8 times")
        watch.drain(16)
        self.assertEqual(watch.produced["heavy"], 2)

    def test_arrivals_in_every_step_with_budgets_below_max_running(self) -> None:
        for seed in range(4):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                watch = Watch(self, ContinuousBatchScheduler(5, kv=KVCacheManager(9, 3)))
                for step in range(100):
                    if len(watch.lives) < 25:
                        watch.submit(request(f"r{step}", dice.choice((1, 2, 20)), dice.randint(1, 8)))
                    watch.step(dice.randint(1, 4))
                watch.drain(lambda dice=dice: dice.randint(1, 4))


class Preemption(unittest.TestCase):
    def test_the_one_that_arrived_last_goes_and_loses_no_token(self) -> None:
        watch = Watch(self, ContinuousBatchScheduler(3, kv=KVCacheManager(6, 2)))
        for name in ("old", "middle", "young"):
            watch.submit(request(name, 4, 8))
        victims = []
        while not watch.scheduler.idle:
            decision = watch.step(16)
            victims += decision.preempted
            for name in decision.preempted:
                self.assertRegex(decision.reasons[name], r"preempted: \w+ needs a page and none is free")
        self.assertNotIn("old", victims)
        self.assertEqual(victims[0], "young")
        watch.drain(16)
        self.assertEqual(watch.produced, {"old": 8, "middle": 8, "young": 8})

    def test_no_livelock_in_any_pool_that_fits_the_largest_request_alone(self) -> None:
        """K037: pools from exactly enough for one request up."""
        for page_size in (1, 2, 5):
            for prompt, max_tokens in ((8, 4), (1, 11), (5, 1), (9, 2)):
                enough = -(-(prompt + max_tokens - 1) // page_size)
                for pages in range(enough, enough + 3):
                    watch = Watch(self, ContinuousBatchScheduler(4, kv=KVCacheManager(pages, page_size)))
                    for i in range(4):
                        watch.submit(request(f"r{i}", prompt, max_tokens))
                    watch.drain(8, limit=4 * (prompt + max_tokens) * 4)
                    self.assertEqual(set(watch.produced.values()), {max_tokens})

    def test_admission_is_open_again_after_any_history(self) -> None:
        """K035: ten times max_running requests through preemption, deferral and cancel; then a new one gets in."""
        dice = random.Random(35)
        watch = Watch(self, ContinuousBatchScheduler(4, kv=KVCacheManager(8, 2)))
        for i in range(40):
            watch.submit(request(f"r{i}", dice.randint(1, 8), dice.randint(1, 8)))
            for _ in range(3):
                watch.step(6)
            if i % 2 and watch.lives:
                watch.cancel(dice.choice([*watch.lives]))
        for name in [*watch.lives]:
            watch.cancel(name)
        self.assertEqual(watch.scheduler.kv.free_pages, 8)
        watch.submit(request("new", 3, 1))
        self.assertEqual(watch.step(6).admitted, ("new",))


class Policies(unittest.TestCase):
    def first_served(self, policy: str, *asked: tuple[Request, int]) -> list[str]:
        """Order of admission, one at a time; each request with the step before which it arrives."""
        watch = Watch(self, ContinuousBatchScheduler(1, policy))
        admitted: list[str] = []
        for step in range(200):
            for each, arrival in asked:
                if arrival == step:
                    watch.submit(each)
            admitted += watch.step(4).admitted
        return admitted

    def test_order(self) -> None:
        low, high = request("low", 8, 2), request("high", 8, 2, priority=1)
        long, short = request("long", 64, 2), request("short", 4, 2)
        runs = request("runs", 4, 30), 0
        self.assertEqual(self.first_served("fcfs", runs, (low, 1), (high, 2)), ["runs", "low", "high"])
        self.assertEqual(self.first_served("priority", runs, (low, 1), (high, 16)), ["runs", "high", "low"])
        self.assertEqual(self.first_served("priority", runs, (low, 1), (high, 18)), ["runs", "low", "high"])  # aged
        self.assertEqual(self.first_served("shortest", runs, (long, 1), (short, 4)), ["runs", "short", "long"])
        self.assertEqual(self.first_served("shortest", runs, (long, 1), (short, 5)), ["runs", "long", "short"])

    def test_aging_ends_the_wait_of_a_low_priority(self) -> None:
        """An endless stream of urgent requests that alone keeps the scheduler busy."""
        for policy, patient in (("priority", request("patient", 2, 2)), ("shortest", request("patient", 100, 2))):
            watch = Watch(self, ContinuousBatchScheduler(1, policy))
            watch.submit(request("runs", 4, 4, priority=5))
            watch.step(8)
            watch.submit(patient)
            for step in range(400):
                if step % 2 == 0:
                    watch.submit(request(f"urgent{step}", 1, 2, priority=3))
                if "patient" in watch.step(8).admitted:
                    break
            self.assertIn(step, range(10, 200))

    def test_prefill_first_stops_decodes_while_prompts_arrive(self) -> None:
        """The bad example: "runs" gets nothing for as long as prompts fill the budget; decode-first serves it."""
        for policy, tokens in (("prefill-first", 1), ("fcfs", 11)):
            watch = Watch(self, ContinuousBatchScheduler(4, policy))
            watch.submit(request("runs", 2, 40))
            watch.step(4)
            watch.submit(request("long", 1000, 1))
            for _ in range(10):
                watch.step(4)
            watch.complete()
            self.assertEqual(watch.produced["runs"], tokens)

    def test_a_fork_waits_for_prompts_no_less_than_its_parent(self) -> None:
        """It takes turns from where its parent stands: being new, it has not waited since the beginning."""
        scheduler = ContinuousBatchScheduler(4, "prefill-first")
        scheduler.submit(request("parent", 1, 90))
        for _ in range(AGING + 9):
            scheduler.step(4)
        scheduler.complete_step()
        scheduler.fork("parent", request("child", 1, 90))
        scheduler.submit(request("prompt", 4, 1))
        self.assertEqual([chunk.request_id for chunk in scheduler.step(4).chunks], ["prompt"])

    def test_a_policy_of_ones_own(self) -> None:
        class LastComeFirstServed:
            decode_first = True

            def rank(self, request: Request, arrival_step: int, generated: int) -> float:
                return -arrival_step

        scheduler = ContinuousBatchScheduler(1, LastComeFirstServed())
        for name in "abc":
            scheduler.submit(request(name, 1))
            scheduler.step(0)
        self.assertEqual([scheduler.step(4).admitted for _ in range(3)], [("c",), ("b",), ("a",)])


class Told(unittest.TestCase):
    def test_who_waits_in_order_of_beginning_and_why_in_the_policys_order(self) -> None:
        scheduler = ContinuousBatchScheduler(1, "priority")
        for priority in (50, *range(BYPASS_LIMIT + 4)):
            scheduler.submit(request(f"p{priority}", 2, 9, priority))
        decision = scheduler.step(8)
        self.assertEqual(decision.waiting, tuple(f"p{priority}" for priority in range(BYPASS_LIMIT + 4)))
        self.assertEqual(set(decision.reasons), {"p50", *(f"p{4 + i}" for i in range(BYPASS_LIMIT))})

    def test_a_decision_lists_the_last_that_ended(self) -> None:
        """However many ended since the last step."""
        with mock.patch("starter.scheduler.FINISHED_LISTED", 3):
            scheduler = ContinuousBatchScheduler(2)
        for number in range(5):
            scheduler.submit(request(f"r{number}", 3, 2))
            scheduler.cancel(f"r{number}")
        self.assertEqual([scheduler.step(8).finished, scheduler.step(8).finished], [("r2", "r3", "r4"), ()])


class Swapping(unittest.TestCase):
    def run_two(self, host_pages: int) -> tuple[list[str], KVCacheManager]:
        kv = KVCacheManager(6, 2, host_pages=host_pages)
        watch = Watch(self, ContinuousBatchScheduler(2, kv=kv, preemption="swap"))
        watch.submit(request("old", 4, 8))
        watch.submit(request("young", 4, 8))
        told = []
        while not watch.scheduler.idle:
            decision = watch.step(16)
            told += [decision.reasons[name] for name in decision.preempted]
        watch.drain(16)
        self.assertEqual(watch.produced, {"old": 8, "young": 8})
        return told, kv

    def test_a_victim_keeps_its_tokens_in_host_pages(self) -> None:
        told, kv = self.run_two(host_pages=6)
        self.assertRegex(told[0], "preempted: old needs a page and none is free; young is last in order, gives back 3 "
                                  "pages and keeps its 6 tokens in host pages")
        self.assertEqual((kv.stats().swaps_out, kv.stats().swaps_in), (len(told), len(told)))
        self.assertEqual(kv.stats().misses, 2 * (4 + 8 - 1))  # nothing was computed twice

    def test_where_host_pages_do_not_last_they_are_computed_again(self) -> None:
        told, kv = self.run_two(host_pages=2)
        self.assertRegex(told[0], r"will compute its \d tokens again")
        self.assertEqual(kv.stats().swaps_out, 0)
        self.assertGreater(kv.stats().misses, 2 * (4 + 8 - 1))

    def test_cancel_while_swapped_out(self) -> None:
        kv = KVCacheManager(6, 2, host_pages=6)
        watch = Watch(self, ContinuousBatchScheduler(2, kv=kv, preemption="swap"))
        watch.submit(request("old", 4, 8))
        watch.submit(request("young", 4, 8))
        while not watch.step(16).preempted:
            pass
        self.assertLess(kv.free_host_pages, 6)
        watch.cancel("young")
        self.assertEqual(kv.free_host_pages, 6)
        watch.submit(request("young", 1, 2))
        watch.drain(16)
        self.assertEqual(kv.free_pages, 6)


class SharedPrefixes(unittest.TestCase):
    def test_what_is_found_is_not_computed_again(self) -> None:
        """K013, K021: eight at once find nothing; later ones all but the last page, one token at least is computed."""
        kv = KVCacheManager(64, 2, prefix_sharing=True)
        watch = Watch(self, ContinuousBatchScheduler(8, kv=kv))
        for i in range(8):
            watch.submit(request(f"first{i}", 6, 2))
        decision = watch.step(100)
        self.assertEqual(({chunk.count for chunk in decision.chunks}, decision.found), ({6}, {}))
        watch.drain(100)
        watch.submit(request("later", 6, 2))
        decision = watch.step(100)
        self.assertEqual([(c.start, c.count) for c in decision.chunks], [(4, 2)])
        self.assertEqual(decision.found, {"later": 4})

    def test_a_preempted_request_finds_its_own_pages(self) -> None:
        """K038"""
        kv = KVCacheManager(10, 2, prefix_sharing=True)
        watch = Watch(self, ContinuousBatchScheduler(2, kv=kv))
        watch.submit(request("a", 4, 6))
        watch.scheduler.sequence("a").tokens += [0] * 16  # what it will generate
        watch.step(16)
        for _ in range(3):
            watch.step(16)
        outside = kv.allocate("outside", 2 * kv.free_pages)
        while watch.scheduler.is_running("a"):
            watch.scheduler.step(16)
        kv.release(outside)
        decision = watch.scheduler.step(16)
        self.assertEqual([(c.start, c.count) for c in decision.chunks], [(8, 1)])  # nothing but its newest token
        self.assertEqual(decision.found, {})  # coming back does not count


class Handles(unittest.TestCase):
    def test_of_running_requests_only(self) -> None:
        kv = KVCacheManager(4, 4)
        scheduler = ContinuousBatchScheduler(2, kv=kv)
        for name in "abc":
            scheduler.submit(request(name, 4, 2))
        scheduler.step(16)
        self.assertEqual([scheduler.handle(name).request_id for name in "ba"], ["b", "a"])
        for name in "cx":
            with self.assertRaisesRegex(UnknownRequestError, f"request '{name}' is not running"):
                scheduler.handle(name)


class PagesReserved(unittest.TestCase):
    """Which running sequences a step asks the page manager for."""

    def setUp(self) -> None:
        self.kv = KVCacheManager(12, 2, host_pages=3)
        self.scheduler = ContinuousBatchScheduler(2, kv=self.kv, preemption="swap")
        for name in "ab":
            self.scheduler.submit(request(name, 5, 6))
        self.scheduler.step(16)

    def asked(self) -> list[str]:
        """Of the next step."""
        with mock.patch.object(self.kv, "reserve", wraps=self.kv.reserve) as reserve:
            self.scheduler.step(16)
        return [call.args[0].request_id for call in reserve.call_args_list]

    def test_those_that_outgrow_their_pages(self) -> None:
        self.assertEqual([self.asked() for _ in range(4)], [[], ["a", "b"], [], ["a", "b"]])  # 6, 7, 8 and 9 tokens

    def test_all_while_a_page_is_shared_that_might_be_written(self) -> None:
        self.scheduler.complete_step()
        outside = self.kv.fork(self.scheduler.handle("a"), "outside")
        self.assertEqual(self.asked(), ["a", "b"])
        self.kv.release(outside)
        self.assertEqual(self.asked(), ["a", "b"])  # 7 tokens: both outgrow their pages
        self.assertEqual(self.asked(), [])

    def test_those_whose_pages_were_taken_away(self) -> None:
        self.kv.release(self.scheduler.handle("b"))
        self.assertEqual(self.asked(), [])  # what was in flight is committed first, and b ends there
        self.assertEqual(list(self.scheduler.take_failures()), ["b"])
        self.scheduler.complete_step()
        self.kv.swap_out(self.scheduler.handle("a"))
        self.assertEqual(self.asked(), ["a"])
        self.assertEqual(list(self.scheduler.take_failures()), ["a"])
        self.assertEqual((self.kv.free_pages, self.kv.free_host_pages), (12, 3))

    def test_none_without_a_page_manager(self) -> None:
        scheduler = ContinuousBatchScheduler(2, preemption="swap")
        scheduler.submit(request("a", 3, 2))
        scheduler.step(8)
        self.assertRaises(UnknownRequestError, scheduler.handle, "a")
        scheduler.complete_step()
        scheduler.fork("a", request("a#1", 3, 2))
        self.assertEqual(len(scheduler.step(8).chunks), 2)
        self.assertEqual(scheduler.step(8).finished, ("a", "a#1"))


class Forks(unittest.TestCase):
    def test_a_fork_runs_at_once_on_the_same_pages_and_copies_when_it_writes(self) -> None:
        kv = KVCacheManager(8, 4)
        scheduler = ContinuousBatchScheduler(2, kv=kv)
        scheduler.submit(request("a", 6, 4))
        scheduler.step(16)
        scheduler.complete_step()
        scheduler.fork("a", request("a#1", 6, 4))
        self.assertEqual(kv.pages(scheduler.handle("a")), kv.pages(scheduler.handle("a#1")))
        decision = scheduler.step(16)
        self.assertEqual([(c.request_id, c.start, c.phase) for c in decision.chunks],
                         [("a", 6, "decode"), ("a#1", 6, "decode")])
        self.assertEqual((kv.stats().copies, kv.free_pages), (1, 5))
        tokens = Counter({"a": 1, "a#1": 1})
        while not scheduler.idle:
            tokens.update(chunk.request_id for chunk in decision.chunks)
            decision = scheduler.step(16)
            kv.check()
        self.assertEqual((tokens, kv.free_pages), ({"a": 4, "a#1": 4}, 8))

    def test_forks_are_preempted_like_others_and_end_with_all_their_tokens(self) -> None:
        for pages in range(4, 10):
            for preemption in ("recompute", "swap"):
                kv = KVCacheManager(pages, 2, host_pages=2, prefix_sharing=pages % 2 > 0)
                scheduler = ContinuousBatchScheduler(4, kv=kv, preemption=preemption)
                scheduler.submit(request("a", 3, 6))
                scheduler.step(16)
                scheduler.complete_step()
                for i in (1, 2, 3):
                    scheduler.fork("a", request(f"a#{i}", 3, 6))
                steps, finished = 0, []
                while not scheduler.idle and steps < 200:
                    decision = scheduler.step(16)
                    kv.check()
                    finished += decision.finished
                    steps += 1
                finished += scheduler.step(1).finished
                self.assertEqual((sorted(finished), kv.free_pages), (["a", "a#1", "a#2", "a#3"], pages))
                self.assertEqual(scheduler.take_failures(), {})

    def test_what_cannot_be_forked(self) -> None:
        scheduler = ContinuousBatchScheduler(1, kv=KVCacheManager(8, 2))
        scheduler.submit(request("runs", 2, 4))
        scheduler.submit(request("waits", 2, 4))
        scheduler.step(8)
        for parent, child, error in (("never", "x", UnknownRequestError), ("waits", "x", UnknownRequestError),
                                     ("runs", "runs", DuplicateRequestError), ("runs", "waits", DuplicateRequestError)):
            with self.subTest(parent=parent, child=child):
                self.assertRaises(error, scheduler.fork, parent, request(child, 2, 4))
                self.assertEqual(scheduler.live, ("runs", "waits"))


class Batching(unittest.TestCase):
    def lengths(self, batching: str) -> list[tuple[str, ...]]:
        watch = Watch(self, ContinuousBatchScheduler(2, batching=batching))
        for name, max_tokens in (("a", 1), ("b", 4), ("c", 2), ("d", 1)):
            watch.submit(request(name, 2, max_tokens))
        running = []
        while not watch.scheduler.idle:
            running.append(watch.step(8).running)
        watch.drain(8)
        return running[:-1]  # the last step finds all finished

    def test_continuous_fills_a_freed_slot_at_once(self) -> None:
        self.assertEqual(self.lengths("continuous"), [("a", "b"), ("b", "c"), ("b", "c"), ("b", "d")])

    def test_static_waits_for_the_whole_batch(self) -> None:
        self.assertEqual(self.lengths("static"), [("a", "b"), *[("b",)] * 3, ("c", "d"), ("c",)])

    def test_none_runs_one_at_a_time(self) -> None:
        self.assertEqual(self.lengths("none"), [("a",), *[("b",)] * 4, *[("c",)] * 2, ("d",)])

    def test_settings_are_checked(self) -> None:
        for wrong in ({"max_running": 0}, {"max_running": True}, {"policy": "lifo"}, {"batching": "dynamic"}):
            with self.subTest(wrong=wrong), self.assertRaisesRegex(RequestError, next(iter(wrong))):
                ContinuousBatchScheduler(**wrong)


class Ends(unittest.TestCase):
    def test_max_tokens(self) -> None:
        """K047: exactly so many tokens; 0 finishes at once and holds nothing."""
        for max_tokens in (0, 1, 2, 4):
            kv = KVCacheManager(4, 4)
            watch = Watch(self, ContinuousBatchScheduler(kv=kv))
            watch.submit(request("r", 4, max_tokens))
            self.assertEqual(watch.scheduler.idle, max_tokens == 0)
            watch.step(8)
            watch.drain(8)
            self.assertEqual((watch.produced["r"], kv.free_pages), (max_tokens, 4))
            self.assertEqual(kv.stats().misses, 4 + max_tokens - 1 if max_tokens else 0)  # the last is never stored

    def test_capacity_is_what_the_pool_can_really_give(self) -> None:
        """K018, K029: P + M - 1 slots; the boundary is exact, and what is behind a refused request goes on."""
        for page_size, pages in ((4, 4), (1, 16), (16, 1), (5, 3)):
            slots = page_size * pages
            for prompt in (1, page_size, slots):
                watch = Watch(self, ContinuousBatchScheduler(kv=KVCacheManager(pages, page_size)))
                account = f"need {pages + 1} pages of {page_size}; the pool has {pages}"
                with self.assertRaisesRegex(CapacityError, account):
                    watch.submit(request("big", prompt, slots - prompt + 2))
                self.assertTrue(watch.scheduler.idle)
                watch.submit(request("fits", prompt, slots - prompt + 1))
                watch.submit(request("small", 1, 1))
                watch.drain(8, limit=3 * slots)
                self.assertEqual(watch.produced, {"fits": slots - prompt + 1, "small": 1})

    def test_a_huge_max_tokens_allocates_nothing(self) -> None:
        """K050"""
        for huge in (2**31 - 1, 2**31, 10**18):
            kv = KVCacheManager(4, 4)
            with self.assertRaises(CapacityError):
                ContinuousBatchScheduler(kv=kv).submit(request("r", 4, huge))
            scheduler = ContinuousBatchScheduler()  # without pages there is no capacity to exceed
            scheduler.submit(request("r", 4, huge))
            self.assertEqual(scheduler.step(8).scheduled_tokens, 4)

    def test_finish_and_cancel_free_pages_at_once(self) -> None:
        kv = KVCacheManager(8, 2)
        scheduler = ContinuousBatchScheduler(2, kv=kv)
        for name in "abc":
            scheduler.submit(request(name, 4, 4))
        scheduler.step(16)
        self.assertEqual((kv.free_pages, scheduler.live, scheduler.is_running("c")), (4, ("a", "b", "c"), False))
        scheduler.finish("a", "stop")
        scheduler.cancel("c")  # waiting: holds none
        self.assertEqual((kv.free_pages, scheduler.live), (6, ("b",)))
        for name in ("a", "c", "never"):
            for end in (scheduler.cancel, lambda name: scheduler.finish(name, "stop"), scheduler.handle):
                self.assertRaises(UnknownRequestError, end, name)
        decision = scheduler.step(16)
        self.assertEqual((decision.finished, decision.running), (("a", "c"), ("b",)))
        self.assertEqual(len(kv.pages(scheduler.handle("b"))), 3)

    def test_an_id_can_be_used_again_and_the_old_request_is_no_danger_to_the_new(self) -> None:
        """K044: cancel, then submit before the next step; and again right after the finish."""
        kv = KVCacheManager(8, 2)
        watch = Watch(self, ContinuousBatchScheduler(kv=kv))
        watch.submit(request("x", 5, 3))
        self.assertRaises(DuplicateRequestError, watch.scheduler.submit, request("x", 1, 1))
        watch.step(16)  # x's first token is in flight
        watch.cancel("x")
        watch.submit(request("x", 2, 2))
        decision = watch.step(16)
        self.assertEqual([(c.request_id, c.start, c.count) for c in decision.chunks], [("x", 0, 2)])
        watch.drain(16)
        watch.submit(request("x", 3, 1))
        watch.drain(16)
        self.assertEqual((watch.produced["x"], kv.free_pages), (3, 8))

    def test_an_abandoned_step_is_handed_out_again(self) -> None:
        scheduler = ContinuousBatchScheduler(kv=KVCacheManager(8, 2))
        scheduler.submit(request("a", 3, 3))
        first = scheduler.step(2).chunks
        scheduler.abandon_step()
        self.assertEqual(scheduler.step(2).chunks, first)
        scheduler.complete_step()
        scheduler.complete_step()  # idempotent
        self.assertEqual([(c.start, c.count) for c in scheduler.step(2).chunks], [(2, 1)])


class OutsideHolder(unittest.TestCase):
    """A request that is refused pages REFUSAL_LIMIT times while no other request runs is ended as failed."""

    def test_a_waiting_request_fails_when_waiting_would_not_end(self) -> None:
        kv = KVCacheManager(4, 4)
        outside = kv.allocate("outside", 9)
        scheduler = ContinuousBatchScheduler(kv=kv)
        scheduler.submit(request("big", 8, 2))
        scheduler.submit(request("small", 2, 1))
        decision = scheduler.step(16)
        self.assertEqual(decision.admitted, ("small",))  # the big one is no obstacle
        while scheduler.live:
            self.assertFalse(scheduler.take_failures())
            decision = scheduler.step(16)
            self.assertLess(decision.step, 2 * REFUSAL_LIMIT)
        self.assertEqual(decision.step, REFUSAL_LIMIT - 1)  # it was refused in every step from 0 on
        self.assertRegex(scheduler.take_failures()["big"], "OutOfPagesError: big needs 2 pages, 1 of 4 are free")
        self.assertEqual(scheduler.take_failures(), {})
        kv.release(outside)
        scheduler.submit(request("big", 8, 2))
        self.assertEqual(scheduler.step(16).admitted, ("big",))

    def test_a_running_request_fails_too_and_recovers_if_pages_come_back_in_time(self) -> None:
        for patience in (1, REFUSAL_LIMIT - 1, REFUSAL_LIMIT):
            with self.subTest(patience=patience):
                kv = KVCacheManager(4, 2)
                scheduler = ContinuousBatchScheduler(kv=kv)
                scheduler.submit(request("r", 2, 6))
                scheduler.step(16)
                outside = kv.allocate("outside", 6)
                tokens = 1
                for _ in range(patience):
                    scheduler.step(16)
                    kv.check()
                self.assertEqual(scheduler.idle, patience == REFUSAL_LIMIT)
                kv.release(outside)
                for _ in range(20):
                    for chunk in scheduler.step(16).chunks:
                        tokens += chunk.start + chunk.count == 2 + tokens
                self.assertEqual((tokens, kv.free_pages), (1 if patience == REFUSAL_LIMIT else 6, 4))
                self.assertEqual([*scheduler.take_failures()], ["r"] if patience == REFUSAL_LIMIT else [])

    def test_prompts_whose_pages_are_forked_from_outside_do_not_wait_for_each_other(self) -> None:
        """Both need a page to write on, none is free, and neither gives back one that the other could have."""
        kv = KVCacheManager(3, 9)
        scheduler = ContinuousBatchScheduler(3, kv=kv)
        scheduler.submit(request("a", 12, 4))
        scheduler.submit(request("b", 5, 4))
        scheduler.step(4)
        scheduler.complete_step()
        outside = [kv.fork(scheduler.handle(name), "outside") for name in "ab"]
        for _ in range(4 * REFUSAL_LIMIT):
            decision = scheduler.step(4)
            kv.check()
        self.assertTrue(scheduler.idle, decision.reasons)
        self.assertIn("a", scheduler.take_failures())  # it needs two pages, of which one is left
        for handle in outside:
            kv.release(handle)
        self.assertEqual(kv.free_pages, 3)

    def test_a_failed_id_used_again_is_an_ordinary_request(self) -> None:
        kv = KVCacheManager(4, 16)
        scheduler = ContinuousBatchScheduler(4, kv=kv)
        outside = kv.allocate("outside", 64)
        scheduler.submit(request("x", 50, 1))
        for _ in range(REFUSAL_LIMIT):
            scheduler.step(16)
        self.assertTrue(scheduler.idle)
        kv.release(outside)  # the failure is not taken
        scheduler.submit(request("runs", 2, 14))
        scheduler.step(16)
        scheduler.submit(request("x", 50, 1))
        overtaken = 0
        for step in range(60):
            scheduler.submit(request(f"s{step}", 1, 2))
            decision = scheduler.step(16)
            if "x" in decision.waiting:
                overtaken += len(decision.admitted)
        self.assertEqual(overtaken, BYPASS_LIMIT)

    def test_pages_taken_away_end_that_request_alone(self) -> None:
        """B16; a's next token is its last, b's is not"""
        kv = KVCacheManager(8, 2)
        watch = Watch(self, ContinuousBatchScheduler(kv=kv))
        scheduler = watch.scheduler
        for name, max_tokens in (("a", 1), ("b", 4), ("c", 4)):
            watch.submit(request(name, 3, max_tokens))
        watch.step(16)
        for name in "ab":
            kv.release(scheduler.handle(name))
            watch.forget(name)
        self.assertEqual(watch.step(16).running, ("c",))
        failures = scheduler.take_failures()
        self.assertEqual([*failures], ["a", "b"])
        self.assertRegex(failures["a"], "StaleHandleError")
        watch.drain(16)
        self.assertEqual((watch.produced, kv.free_pages), ({"c": 4}, 8))


if __name__ == "__main__":
    unittest.main()
