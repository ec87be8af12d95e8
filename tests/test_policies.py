"""Who goes first: ranks, who may overtake whom and for how long, how long anybody waits, and how long decodes stop."""

from __future__ import annotations

import random
import unittest
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from starter.kv_cache import KVCacheManager
from starter.scheduler import AGING, BYPASS_LIMIT, POLICIES, ContinuousBatchScheduler, ScheduleDecision
from starter.schema import POLICY_NAMES, Request


def request(name: str, prompt: int, max_tokens: int = 1, priority: int = 0) -> Request:
    return Request(name, [0] * prompt, max_tokens, priority=priority)


def size(asked: Request) -> int:
    return len(asked.prompt_tokens) + asked.max_tokens


RANK: dict[str, Callable[[Request, int], float]] = {  # from the table in policies.py, with its A = 16
    "fcfs": lambda asked, arrival: arrival,
    "priority": lambda asked, arrival: arrival - 16 * asked.priority,
    "shortest": lambda asked, arrival: arrival + size(asked) / 16,
    "prefill-first": lambda asked, arrival: arrival,
}
MAY_OVERTAKE: dict[str, Callable[[Request, Request, int], bool]] = {  # (later, earlier, steps between): what k counts
    "fcfs": lambda later, earlier, steps: False,
    "priority": lambda later, earlier, steps: steps < 16 * (later.priority - earlier.priority),
    "shortest": lambda later, earlier, steps: steps < (size(earlier) - size(later)) / 16,
    "prefill-first": lambda later, earlier, steps: False,
}


@dataclass
class Log:
    """A scheduler and what an observer writes down of it."""

    scheduler: ContinuousBatchScheduler
    asked: dict[str, Request] = field(default_factory=dict)
    arrival: dict[str, int] = field(default_factory=dict)
    admitted: dict[str, int] = field(default_factory=dict)  # step of the first admission, in order
    chunks: dict[str, list[int]] = field(default_factory=dict)  # steps since the last preemption
    decoding: dict[str, bool] = field(default_factory=dict)  # its first token came since the last preemption
    steps: int = 0

    def submit(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.submit(each)
            self.asked[each.request_id], self.arrival[each.request_id] = each, self.steps

    def step(self, budget: int) -> ScheduleDecision:
        decision = self.scheduler.step(budget)
        for name in decision.admitted:
            self.admitted.setdefault(name, self.steps)
        for name in decision.preempted:
            self.decoding.pop(name, None)
        for chunk in decision.chunks:
            name = chunk.request_id
            if self.decoding.get(name):
                self.chunks[name].append(self.steps)
            elif chunk.start + chunk.count >= len(self.asked[name].prompt_tokens):
                self.decoding[name], self.chunks[name] = True, [self.steps]
        self.steps += 1
        return decision

    def drain(self, budget: int) -> None:
        while not self.scheduler.idle:
            self.step(budget)

    def longest_gap(self) -> int:
        """Steps from one token of a decoding request to its next, at most."""
        return max((two - one for steps in self.chunks.values() for one, two in pairwise(steps)), default=0)


class Ranks(unittest.TestCase):
    def test_every_policy_has_its_name_and_its_rank(self) -> None:
        self.assertEqual((tuple(POLICIES), AGING), (POLICY_NAMES, 16))
        dice = random.Random(1)
        for name, policy in POLICIES.items():
            for _ in range(50):
                asked = request("r", dice.randint(1, 200), dice.randint(1, 200), dice.randint(-9, 9))
                arrival = dice.randint(0, 1000)
                self.assertEqual(policy().rank(asked, arrival, 0), RANK[name](asked, arrival))
            self.assertEqual(policy.decode_first, name != "prefill-first")

    def test_a_rank_never_grows(self) -> None:
        for name, policy in POLICIES.items():
            ranks = [policy().rank(request("r", 5, 40, 2), 7, generated) for generated in range(41)]
            self.assertEqual(ranks, sorted(ranks, reverse=True))
            self.assertEqual(ranks[16], RANK[name](request("r", 5, 24, 2), 7))  # what was generated is not to come

    def test_whoever_waits_is_admitted_in_order_of_rank_then_of_arrival(self) -> None:
        for name in POLICIES:
            for seed in range(20):
                with self.subTest(policy=name, seed=seed):
                    dice = random.Random(seed)
                    log = Log(ContinuousBatchScheduler(1, name))
                    log.submit(request("runs", 1, 60, priority=100))
                    for number in range(40):
                        log.step(4)
                        if dice.random() < 0.3:
                            prompt, priority = dice.choice((1, 17, 33, 99)), dice.choice((0, 0, 1, -1))
                            log.submit(request(f"r{number}", prompt, 2, priority))
                    log.drain(64)
                    waited = [each for each in log.asked if each != "runs"]
                    wanted = sorted(waited, key=lambda each: RANK[name](log.asked[each], log.arrival[each]))
                    self.assertEqual([*log.admitted], ["runs", *wanted])  # sorted() is stable: ties in order of arrival


class Overtaking(unittest.TestCase):
    """Only those that policies.py counts go before a request that waits, though they arrived later."""

    def overtakers(self, log: Log) -> list[tuple[str, str]]:
        """(later, earlier) of requests that were admitted in another order than they arrived."""
        order = {name: i for i, name in enumerate(log.asked)}
        names = [*log.admitted]
        return [(later, earlier) for i, later in enumerate(names) for earlier in names[i + 1:]
                if order[later] > order[earlier]]

    def allowed(self, log: Log, policy: str, later: str, earlier: str) -> bool:
        return MAY_OVERTAKE[policy](log.asked[later], log.asked[earlier], log.arrival[later] - log.arrival[earlier])

    def play(self, dice: random.Random, policy: str) -> Log:
        log = Log(ContinuousBatchScheduler(dice.randint(1, 3), policy))
        for number in range(80):
            if dice.random() < 0.5:
                log.submit(request(f"r{number}", dice.choice((1, 2, 8, 120)), dice.choice((1, 4, 8)),
                                   dice.choice((-2, 0, 0, 1, 3))))
            log.step(8)
        log.drain(8)
        return log

    def test_random_arrivals(self) -> None:
        for policy in POLICIES:
            seen = 0
            for seed in range(12):
                with self.subTest(policy=policy, seed=seed):
                    log = self.play(random.Random(seed), policy)
                    overtakers = self.overtakers(log)
                    self.assertTrue(all(self.allowed(log, policy, *pair) for pair in overtakers))
                    seen += len(overtakers)
            self.assertEqual(seen > 50, policy in ("priority", "shortest"), (policy, seen))

    def test_past_one_that_lacks_pages_at_most_so_many_more(self) -> None:
        """Against the order, BYPASS_LIMIT small ones pass a heavy one; then all hold for it, whatever the policy."""
        for policy in POLICIES:
            with self.subTest(policy=policy):
                log = Log(ContinuousBatchScheduler(4, policy, KVCacheManager(8, 4)))
                log.submit(request("runs", 4, 26))
                log.step(8)
                log.submit(request("heavy", 28))
                for number in range(60):
                    log.submit(request(f"small{number}", 1, 2))
                    log.step(8)
                log.drain(8)
                against = [later for later, earlier in self.overtakers(log)
                           if earlier == "heavy" and not self.allowed(log, policy, later, earlier)]
                self.assertEqual(len(against), BYPASS_LIMIT)

    def test_the_last_step_at_which_a_later_one_goes_before(self) -> None:
        """Priority: A steps for each level; shortest: a step for each A tokens. Neither one step more."""
        for policy, patient, later, last in (
                ("priority", request("patient", 4), request("later", 4, priority=1), 15),
                ("priority", request("patient", 4, priority=-2), request("later", 4, priority=1), 47),
                ("shortest", request("patient", 63), request("later", 15), 2),
                ("shortest", request("patient", 64), request("later", 15), 3)):
            for delay in range(1, 60):
                log = Log(ContinuousBatchScheduler(1, policy))
                log.submit(request("runs", 1, 70, priority=100))
                log.step(8)
                log.submit(patient)
                for _ in range(delay):
                    log.step(8)
                log.submit(later)
                log.drain(64)
                self.assertEqual([*log.admitted][1], "later" if delay <= last else "patient", (policy, delay))


class Waiting(unittest.TestCase):
    """A request with k requests before it is admitted within (k + 1) * (BYPASS_LIMIT + 2) * L steps."""

    LAST = 70  # step of the last arrival

    def wait(self, policy: str, genes: Sequence[tuple[int, ...]], patient: Request) -> tuple[int, float]:
        """Steps that the patient waits among the others, one in each step, and what part of its bound that is."""
        kv = KVCacheManager(12, 2)
        log = Log(ContinuousBatchScheduler(3, policy, kv))
        for number, (prompt, max_tokens, priority) in enumerate(genes):
            if number == 5:
                log.submit(patient)
            log.submit(request(f"r{number}", prompt, max_tokens, priority))
            log.step(3)
            if "patient" in log.admitted:
                break
        while "patient" not in log.admitted:
            log.step(3)
        arrival, waited = log.arrival["patient"], log.admitted["patient"] - log.arrival["patient"]
        others = [name for name in log.asked if name != "patient"]
        before = [name for name in others if log.arrival[name] <= arrival and log.asked[name] is not patient]
        before += [name for name in others if log.arrival[name] > arrival
                   and MAY_OVERTAKE[policy](log.asked[name], patient, log.arrival[name] - arrival)]
        longest = max(size(asked) for asked in log.asked.values())
        return waited, waited / ((len(before) + 1) * (BYPASS_LIMIT + 2) * longest)

    def gene(self, dice: random.Random) -> tuple[int, ...]:
        prompt = dice.choice((1, 2, 2, 8, 18))
        return prompt, dice.choice((1, 2, 4, 7)), dice.choice((-1, 0, 1, 2, 3))

    def test_an_adversary_who_chooses_the_arrivals(self) -> None:
        """Start at random; keep whatever lengthens the wait. It grows, and the bound holds for all that was tried."""
        for policy in POLICIES:
            patient = request("patient", 20, 4, priority=-1)
            dice = random.Random(policy)
            best: list[tuple[int, ...]] = [self.gene(dice) for _ in range(self.LAST)]
            longest, _ = first, _ = self.wait(policy, best, patient)
            for attempt in range(40):
                genes = list(best)
                for _ in range(dice.choice((1, 4, 16))):
                    genes[dice.randrange(len(genes))] = self.gene(dice)
                waited, share = self.wait(policy, genes, patient)
                self.assertLessEqual(share, 1.0, (policy, attempt, genes))
                if waited >= longest:
                    best, longest = genes, waited
            self.assertGreater(longest, first + 5, policy)  # the adversary is not harmless

    def test_urgent_ones_for_ever(self) -> None:
        """They alone would keep the scheduler busy. The patient one is admitted once A steps for each level are over,
        as soon as the running one has ended."""
        for levels in (1, 2, 4):
            log = Log(ContinuousBatchScheduler(1, "priority"))
            log.submit(request("patient", 2, 2), request("u", 1, 4, levels))
            while "patient" not in log.admitted:
                log.submit(request(f"u{log.steps}", 1, 4, levels))
                log.step(8)
            self.assertIn(log.admitted["patient"], range(16 * levels, 16 * levels + 4 * 16 * levels))
            overtakers = [name for name in log.admitted if name not in ("patient", "u")]
            self.assertTrue(all(log.arrival[name] < 16 * levels for name in overtakers))
            self.assertGreater(len(overtakers), 3 * levels)


class DecodeGap(unittest.TestCase):
    def arrivals(self, dice: random.Random, number: int) -> Iterable[Request]:
        for i in range(dice.choice((0, 1, 2))):
            yield request(f"r{number}.{i}", dice.choice((1, 3, 30)), dice.randint(1, 12), dice.choice((0, 1)))

    def test_a_token_in_every_step_whose_budget_covers_the_running(self) -> None:
        """For all policies but prefill-first: whoever decodes and is not preempted gets a token in every step."""
        for policy in POLICIES:
            longest = 0
            for seed in range(4):
                dice = random.Random(seed)
                log = Log(ContinuousBatchScheduler(4, policy, KVCacheManager(24, 2)))
                for number in range(40):
                    log.submit(*self.arrivals(dice, number))
                    log.step(dice.choice((4, 5, 9)))
                log.drain(4)
                longest = max(longest, log.longest_gap())
            if policy == "prefill-first":
                self.assertIn(longest, range(10, AGING + 2))
            else:
                self.assertEqual(longest, 1, policy)

    def test_prefill_first_stops_decodes_while_prompts_arrive_but_not_for_ever(self) -> None:
        """Every AGING + 1 steps they get a token. Decode-first, the same prompts stop nobody."""
        for arrivals in (5, 20, 80):
            for policy in POLICIES:
                log = Log(ContinuousBatchScheduler(2, policy))
                log.submit(request("runs", 1, 200, priority=1))
                log.step(4)
                log.step(4)
                for number in range(arrivals):  # each fills the budget of one step and ends with it
                    log.submit(request(f"r{number}", 4))
                    log.step(4)
                log.drain(4)
                if policy == "prefill-first":
                    self.assertEqual(log.longest_gap(), min(arrivals, AGING) + 1)
                else:
                    self.assertEqual(log.longest_gap(), 1)


if __name__ == "__main__":
    unittest.main()
