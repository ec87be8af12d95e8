"""The audit: good timelines pass, and every single broken promise is noticed, by name."""

from __future__ import annotations

import copy
import random
import unittest
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

from starter.engine import InferenceEngine
from starter.kv_cache import KVCacheManager, PagePool, PrefixIndex
from starter.observe.audit import Audit, Violation
from starter.observe.timeline_file import read_timeline
from starter.scheduler import AGING, POLICIES
from starter.schema import MODEL_SHAPE
from starter.timeline import Event
from tests.paths import TIMELINE
from tests.support import CONFIG, FIVE, SERVINGS, TIGHT, VOCABULARY, failing_at, make_engine
from tests.timelines import as_read, full_engine, random_run

TOKEN = {"event": "token", "token": 1, "text": "b"}


class GoodTest(unittest.TestCase):
    def assert_good(self, events: list[Event]) -> Audit:
        audit = Audit.of(events)
        self.assertEqual([str(violation) for violation in audit.violations], [])
        return audit

    def test_the_fixtures_timeline(self) -> None:
        events = read_timeline(TIMELINE)
        audit = self.assert_good(events)
        kinds = Counter(event["event"] for event in events)
        self.assertEqual([audit.proven[what] for what in ("tokens", "ends", "steps", "requests")],
                         [kinds[kind] for kind in ("token", "finish", "step", "submit")])
        chunks = [chunk for event in events if event["event"] == "step" for chunk in event["chunks"]]
        self.assertEqual(audit.proven["chunks"], len(chunks))
        self.assertEqual(audit.proven["page accesses"], sum(-(-(start + count) // 8) for _, start, count, _ in chunks))
        waited, work, bound = audit.longest_wait
        self.assertEqual((waited, bound), (17, 3960))
        self.assertLessEqual(work, 10 * waited)  # F043: a bound of the run's own, within an order of magnitude

    def test_random_runs(self) -> None:
        for seed in range(4000, 4016):
            with self.subTest(seed=seed):
                self.assert_good(random_run(seed))

    def test_work_in_front_bounds_every_wait(self) -> None:
        """Of crowds in small pools, by every policy and preemption; it is often far below the general bound."""
        tight = 0
        for seed in range(120):
            dice = random.Random(seed)
            engine = make_engine(page_size=dice.choice((2, 4)), num_pages=dice.randint(10, 14), host_pages=8,
                                 budget_tokens=dice.choice((1, 2, 5, 16)), max_running=dice.choice((1, 3, 5)),
                                 policy=dice.choice(sorted(POLICIES)), preemption=dice.choice(("recompute", "swap")),
                                 batching=dice.choice(("continuous", "continuous", "static")),
                                 prefix_sharing=dice.random() < 0.5)
            for number in range(9):
                engine.submit(dice.choices(range(VOCABULARY), k=dice.randint(1, 12)), dice.randint(1, 8),
                              request_id=f"r{number}", priority=dice.randint(0, 2), temperature=1.0, seed=number,
                              n=dice.choice((1, 1, 2)))
                for _ in range(dice.randint(0, 3)):
                    engine.step()
            engine.run()
            waited, work, bound = self.assert_good(as_read(engine.timeline)).longest_wait
            tight += waited > 0 and 10 * work < bound
        self.assertGreater(tight, 60)

    def test_all_ways_to_serve(self) -> None:
        for serving in (*SERVINGS, {"batching": "static"}, {"batching": "none"}, {"use_cache": False}):
            with self.subTest(serving=serving):
                engine = make_engine(**{**TIGHT, **serving})
                engine.generate([[3, 1, 4], [1], [2, 7, 1, 8, 2, 8, 1, 8], [5, 5], [9, 9, 9, 9]], 6)
                self.assert_good(as_read(engine.timeline))

    def test_interrupted_steps(self) -> None:
        for serving, moment in product(SERVINGS, ("start", "middle")):
            with self.subTest(serving=serving, moment=moment):
                engine = make_engine(failing_at(3, moment, KeyboardInterrupt()), **{**TIGHT, **serving})
                for name, ask in FIVE.items():
                    ask.submit(engine, name)
                self.assertRaises(KeyboardInterrupt, engine.run)
                engine.run()
                events = as_read(engine.timeline)
                self.assertEqual(sum(event["event"] == "abandon" for event in events), 1)
                self.assert_good(events)

    def test_steps_without_a_budget_and_small_ones_hold_nobody_to_the_bound(self) -> None:
        engine = make_engine()
        for i in range(3):
            engine.submit([1, 2], 2, request_id=f"r{i}")
        for budget in (0,) * 500 + (1,) * 30:
            engine.step(budget)
        self.assertLess(self.assert_good(as_read(engine.timeline)).longest_wait[0], 30)


class BrokenTest(unittest.TestCase):
    """One change each to a good timeline."""

    def setUp(self) -> None:
        self.events = as_read(full_engine().timeline)

    def find(self, kind: str, condition: Callable[[Event], object] = lambda event: True, **fields: object) -> int:
        """Where the first such event is."""
        return next(i for i, event in enumerate(self.events) if event["event"] == kind and condition(event)
                    and all(event[key] == value for key, value in fields.items()))

    def broken(self, promise: str, words: str, events: list[Event] | None = None, line: int | None = None) -> None:
        """The first violation is of this promise, says these words, and stands at this line, if one is given."""
        violations = Audit.of(self.events if events is None else events).violations
        self.assertTrue(violations, "nothing was noticed")
        first = violations[0]
        self.assertEqual(first.promise, promise, str(first))
        self.assertRegex(first.problem, words)
        if line is not None:
            self.assertEqual(first.line, line + 1, str(first))

    def change(self, at: int, **fields: Any) -> int:
        self.events[at].update(fields)
        return at

    def chunk(self, event: Event, field: int, difference: int) -> list[list[object]]:
        """The event's chunks, with a number of the first of them changed."""
        chunks = copy.deepcopy(event["chunks"])
        chunks[0][field] += difference
        return chunks

    # ---------------------------------------------------------------------------------------------- V1

    def test_a_chunk_that_leaves_a_position_out(self) -> None:
        at = self.find("step", lambda event: event["chunks"] and event["chunks"][0][3] == "decode")
        self.change(at, chunks=self.chunk(self.events[at], 1, -1))
        self.broken("V1", "computes positions")

    def test_a_chunk_of_who_waits(self) -> None:
        at = self.find("step", lambda event: event["waiting"] and event["chunks"])
        self.events[at]["chunks"][0][0] = self.events[at]["waiting"][0]
        self.broken("V1", "a chunk of .*, which does not run")

    def test_a_chunk_beyond_what_is_known(self) -> None:
        at = self.find("step", lambda event: event["chunks"] and event["chunks"][0][3] == "decode")
        self.change(at, chunks=self.chunk(self.events[at], 2, 1), computed=self.events[at]["computed"] + 1, budget=9)
        self.broken("V1", "computes positions .* to")

    def test_a_shared_page_that_holds_something_else(self) -> None:
        at = self.find("submit", request="b")
        self.events[at]["prompt_tokens"][0] += 1
        self.broken("V1", "page .* is shared with b, but holds other tokens than it begins with")

    def test_another_salt_is_another_beginning(self) -> None:
        self.change(self.find("submit", request="b"), cache_salt="pepper")
        self.broken("V1", "is shared with b, but holds other tokens")

    def test_a_write_to_a_page_that_another_has(self) -> None:
        at = self.find("pages", lambda event: event["request"] != "outsider", change="copy")
        name, (source, target) = self.events[at]["request"], self.events[at]["pages"]
        del self.events[at]
        for event in self.events[at:]:
            if event["event"] == "pages" and event["request"] == name:
                event["pages"] = [source if page == target else page for page in event["pages"]]
        self.assertTrue(any("writes to page" in violation.problem and violation.promise == "V1"
                            for violation in Audit.of(self.events).violations))

    def test_a_token_before_all_was_computed(self) -> None:
        at = self.find("step", lambda event: any(chunk[0] == "b" for chunk in event["chunks"]))
        self.assertNotIn("token", [event["event"] for event in self.events[at:at + 3] if event.get("request") == "b"])
        self.events.insert(at, {**self.events[at], **TOKEN, "request": "b", "index": 0})
        self.broken("V1", "b gets a token, but 0 of its 7 tokens", line=at)

    def test_a_token_outside_the_vocabulary(self) -> None:
        self.broken("V1", "vocabulary of 20", line=self.change(self.find("token"), token=20))

    # ---------------------------------------------------------------------------------------------- V2

    def test_a_page_that_somebody_has_is_given_away(self) -> None:
        at = self.find("pages", lambda event: event["pages"], change="allocate", request="c")
        self.events[at]["pages"][0] = self.events[self.find("pages", change="allocate", request="a")]["pages"][0]
        self.broken("V2", "is given to c, but a.* has it", line=at)

    def test_used_pages_that_are_not_what_the_events_come_to(self) -> None:
        for kind in ("pages", "step"):
            self.setUp()
            at = self.find(kind)
            self.change(at, used_pages=self.events[at]["used_pages"] + 1)
            self.broken("V2", "used.pages")

    def test_empty_slots_that_are_not_what_the_events_come_to(self) -> None:
        at = self.find("step", lambda event: event["step"] == 4)
        self.change(at, empty_slots=self.events[at]["empty_slots"] + 1)
        self.broken("V2", "empty slots")

    def test_a_release_of_other_pages(self) -> None:
        at = self.find("pages", lambda event: len(event["pages"]) > 1, change="release", request="a")
        self.events[at]["pages"].pop()
        self.broken("V2", "a releases the pages", line=at)

    def test_pages_that_are_never_released(self) -> None:
        del self.events[self.find("pages", change="release", request="c")]
        self.broken("V2", "c has ended, but still has the pages")

    def test_a_page_beyond_the_pool(self) -> None:
        at = self.find("pages", lambda event: event["pages"], change="allocate")
        self.events[at]["pages"][0] = 10
        self.broken("V2", "no page 10; the pool has 10", line=at)

    def test_a_page_twice_in_a_table(self) -> None:
        at = self.find("pages", lambda event: len(event["pages"]) > 1, change="allocate")
        self.events[at]["pages"][0] = self.events[at]["pages"][1]
        self.broken("V2", "is twice in", line=at)

    def test_a_findable_page_is_given_away(self) -> None:
        del self.events[self.find("pages", change="evict")]
        self.broken("V2", "although its content can still be found")

    def test_an_eviction_of_what_is_not_cached(self) -> None:
        at = self.find("pages", change="evict")
        self.events[at]["pages"] = self.events[self.find("pages", change="allocate", request="a")]["pages"][:1]
        self.broken("V2", "is evicted, but was not cached|although", line=at)

    def test_a_page_is_published_that_is_not_full_of_its_tokens(self) -> None:
        at = self.find("pages", change="publish", request="a")
        self.events.insert(at, {**self.events[at], "pages": [self.events[self.find(
            "pages", change="allocate", request="a")]["pages"][-1]]})
        self.broken("V2", "a publishes page .*, which is not full of its tokens", line=at)

    def test_a_page_that_nobody_has_or_can_find_is_shared(self) -> None:
        for at in reversed([i for i, event in enumerate(self.events)
                            if event["event"] == "pages" and event["change"] == "publish"]):
            del self.events[at]
        self.assertTrue(any("no table has it and its content cannot be found" in violation.problem
                            for violation in Audit.of(self.events).violations))

    def test_tables_that_are_opened_copied_or_appended_to_in_no_way(self) -> None:
        at = self.find("pages", change="share", request="b")
        self.events.insert(at + 1, self.events[at])
        self.broken("V1", "b shares pages for a new table, but has the pages", line=at + 1)
        for change, words in (("copy", r"a copies pages \[9, 8\], but has the pages"),
                              ("append", r"a appends to \[9, 8\]; requests append by their chunks")):
            self.setUp()
            at = self.find("pages", change="allocate", request="a")
            self.events.insert(at + 1, {**self.events[at], "change": change, "pages": [9, 8]})
            self.broken("V1" if change == "append" else "V2", words, line=at + 1)

    def test_swapped_in_without_having_been_swapped_out(self) -> None:
        at = self.find("pages", change="swap_out")
        self.change(at, change="release")
        self.broken("V2", "is swapped in, but was not swapped out")

    def test_more_pages_swapped_out_than_there_are_host_pages(self) -> None:
        self.events[0]["settings"]["host_pages"] = 1
        self.broken("V2", "pages are swapped out, but there are 1 host pages")

    def test_more_tokens_found_than_its_pages_hold(self) -> None:
        at = self.find("step", lambda event: event["found"])
        name = next(iter(self.events[at]["found"]))
        self.events[at]["found"][name] += 2
        self.broken("V2", f"{name} found")

    # ---------------------------------------------------------------------------------------------- V3

    def test_a_token_twice(self) -> None:
        at = self.find("token", request="a")
        self.events.insert(at, self.events[at])
        self.broken("V3", "a gets token 0 after 1 tokens", line=at + 1)

    def test_a_token_less(self) -> None:
        at = self.find("token", request="a", index=2)
        del self.events[at]
        self.broken("V3", "a has all computed, but no token followed")

    def test_another_index(self) -> None:
        self.broken("V3", "a gets token 3", line=self.change(self.find("token", request="a", index=2), index=3))

    def test_a_token_after_the_cancel(self) -> None:
        at = self.find("cancel", request="c")
        self.events.insert(at + 1, {**self.events[at], **TOKEN, "request": "c", "index": 3})
        self.broken("V3", "c gets a token after its cancel", line=at + 1)

    def test_a_token_after_the_end(self) -> None:
        at = self.find("finish", request="c")
        self.events.insert(at + 1, {**self.events[at], **TOKEN, "request": "c", "index": 3})
        self.broken("V3", "a token event of c, which is not live", line=at + 1)

    def test_more_tokens_than_were_asked_for(self) -> None:
        self.change(self.find("submit", request="g"), max_tokens=5)
        self.broken("V3", "g gets token 5 after 5 tokens of at most 5")

    def test_two_ends(self) -> None:
        at = self.find("finish", request="a")
        self.events.insert(at, self.events[at])
        self.broken("V3", "a finish event of a, which is not live", line=at + 1)

    def test_no_end(self) -> None:
        for name in ("a", "c", "g"):
            self.setUp()
            del self.events[self.find("finish", request=name)]
            violations = Audit.of(self.events).violations
            self.assertTrue(any(violation.problem.startswith(f"{name} ") for violation in violations), name)

    def test_a_timeline_that_breaks_off(self) -> None:
        self.events.pop()
        self.broken("V3", "g has not ended when the timeline does")

    def test_an_end_that_counts_other_tokens(self) -> None:
        at = self.find("finish", request="a")
        self.broken("V3", "a ends with 7 tokens, but got 6", line=self.change(at, tokens=7))

    def test_an_end_for_another_reason(self) -> None:
        self.broken("V3", "ends as 'stop', and was cancelled", line=self.change(
            self.find("finish", request="c"), reason="stop"))
        self.setUp()
        self.broken("V3", "c ends at its length with 3 of 9 tokens", line=self.change(
            self.find("finish", request="c"), reason="length"))
        self.setUp()
        self.broken("V3", "a ends as 'cancelled', and was not", line=self.change(
            self.find("finish", request="a"), reason="cancelled"))

    def test_a_cancel_without_an_end(self) -> None:
        at = self.find("finish", request="c")
        del self.events[at]
        self.broken("V3", "c was cancelled, but no end followed")

    def test_somebody_unknown(self) -> None:
        for kind in ("token", "finish"):
            self.setUp()
            self.broken("V3", "which is not live", line=self.change(self.find(kind), request="nobody"))
        self.setUp()
        at = self.find("cancel")
        self.broken("V3", "nobody is cancelled, but is not live", line=self.change(at, request="nobody"))
        self.setUp()
        self.broken("V3", "forked from nobody", line=self.change(self.find("fork"), parent="nobody"))

    def test_a_name_twice(self) -> None:
        at = self.find("submit", request="b")
        self.broken("V3", "a begins, but is live already", line=self.change(at, request="a"))

    # ---------------------------------------------------------------------------------------------- V4

    def test_more_than_the_budget(self) -> None:
        at = self.find("step", lambda event: event["chunks"])
        scheduled = sum(chunk[2] for chunk in self.events[at]["chunks"])
        self.change(at, budget=scheduled - 1)
        self.broken("V4", f"{scheduled} tokens are scheduled; the budget is {scheduled - 1}", line=at)

    def test_two_chunks_of_one_or_an_empty_one(self) -> None:
        at = self.find("step", lambda event: event["chunks"])
        self.events[at]["chunks"].append([self.events[at]["chunks"][0][0], 0, 0, "prefill"])
        self.broken("V4", "a chunk is empty, or a request has two", line=at)

    def test_positions_computed_that_were_not_scheduled(self) -> None:
        at = self.find("step", lambda event: event["chunks"])
        self.change(at, computed=self.events[at]["computed"] + 1)
        self.broken("V4", "positions computed", line=at)

    def test_a_phase_that_is_the_other_one(self) -> None:
        at = self.find("step", lambda event: event["chunks"])
        self.events[at]["chunks"][0][3] = "decode"
        self.broken("V4", "is called decode")

    def test_more_run_than_may(self) -> None:
        self.events[0]["settings"]["max_running"] = 1
        self.broken("V4", "run after an admission; at most 1 may")

    def test_admitted_or_preempted_out_of_turn(self) -> None:
        for key in ("admitted", "preempted"):
            self.setUp()
            at = self.find("step", lambda event, key=key: event[key])
            later = next(i for i in range(at + 1, len(self.events)) if self.events[i]["event"] == "step")
            self.events[later][key] = [*self.events[later][key], *self.events[at][key]]
            self.broken("V4", f"is {key}, but", line=later)

    def test_who_is_in_no_list(self) -> None:
        at = self.find("step", lambda event: event["waiting"])
        self.events[at]["waiting"].pop()
        self.broken("V4", "is live, but the step lists it neither")

    def test_who_is_in_the_wrong_list(self) -> None:
        at = self.find("step", lambda event: event["waiting"])
        self.events[at]["running"].append(self.events[at]["waiting"].pop())
        self.broken("V4", "is listed as running, but is not|run after an admission")

    def test_who_decodes_is_left_out(self) -> None:
        at = self.find("step", lambda event: len(event["chunks"]) > 1 and event["chunks"][0][3] == "decode"
                       and len(event["running"]) < event["budget"])
        name = self.events[at]["chunks"].pop(0)[0]
        self.change(at, computed=self.events[at]["computed"] - 1)
        self.broken("V4", f"{name} does not decode in a step whose budget")

    # ------------------------------------------------------------------------------------------- order

    def test_steps_that_jump_or_go_back(self) -> None:
        at = self.find("step", step=3)
        for step in (2, 5):
            self.setUp()
            self.change(at, step=step)
            self.broken("order", f"an event of step {step} after step 3", line=at)

    def abandoned(self) -> int:
        """Abandon a step whose plan changed nothing, and plan it again; where the abandon event stands."""
        at = self.find("step", lambda event: event["chunks"] and not event["admitted"] and not event["preempted"]
                       and self.events[self.events.index(event) + 1]["step"] > event["step"])
        self.events[at + 1:at + 1] = [{key: self.events[at][key] for key in ("step", "time")} | {"event": "abandon"},
                                      copy.deepcopy(self.events[at])]
        return at + 1

    def test_a_step_that_was_abandoned_is_planned_again(self) -> None:
        self.abandoned()
        self.assertEqual(Audit.of(self.events).violations, [])

    def test_a_step_twice_that_was_not_abandoned(self) -> None:
        at = self.abandoned()
        del self.events[at]
        self.broken("order", "step .* is planned twice, and was not abandoned in between", line=at)

    def test_a_step_is_abandoned_that_was_not_planned(self) -> None:
        at = self.abandoned()
        self.events.insert(at, self.events[at])
        self.broken("order", "step .* is abandoned, but was not planned", line=at + 1)

    def test_what_an_abandoned_step_was_to_compute_was_not(self) -> None:
        del self.events[self.abandoned() + 1]
        self.broken("order", "which was not planned")

    def test_every_event_that_stands_twice(self) -> None:
        """Of faults alone any number may come, and an outsider may do one thing twice."""
        for at, event in enumerate(self.events[1:], start=1):
            if event["event"] in ("refuse", "inject", "lift", "fault") or event.get("request") == "outsider":
                continue
            with self.subTest(event=event):
                events = [*self.events[:at + 1], *copy.deepcopy(self.events[at:])]
                self.assertTrue(Audit.of(events).violations)

    def test_a_page_is_published_twice(self) -> None:
        at = self.find("pages", change="publish")
        self.events.insert(at, copy.deepcopy(self.events[at]))
        self.broken("V2", "publishes page .*, which can be found already", line=at + 1)

    def test_a_cancel_twice(self) -> None:
        at = self.find("cancel")
        self.events.insert(at, copy.deepcopy(self.events[at]))
        self.broken("V3", "c is cancelled again before its end came", line=at + 1)

    def test_time_that_goes_back(self) -> None:
        at = self.find("step", step=3)
        self.change(at, time=1.0)
        self.broken("order", "time goes back from 3.0 to 1.0", line=at)

    def test_a_step_that_was_not_planned(self) -> None:
        del self.events[self.find("step", step=3)]
        self.broken("order", "an event of step 4 after step 3, which was not planned")


class BrokenEngineTest(unittest.TestCase):
    """Engines with a fault built in: what they write down betrays them."""

    def notices(self, promise: str, words: str) -> None:
        with patch.object(KVCacheManager, "check"):  # which would notice, too
            audits = [Audit.of(random_run(seed)) for seed in range(7000, 7007)]
        violations = [violation for audit in audits for violation in audit.violations]
        self.assertTrue(any(violation.promise == promise and words in violation.problem for violation in violations))

    def test_shared_pages_are_written_without_a_copy(self) -> None:
        with patch.object(KVCacheManager, "_needs_copy", lambda *given: False):
            self.notices("V1", "writes to page")

    def test_a_page_is_found_by_its_own_tokens_whatever_came_before(self) -> None:
        def find(index: PrefixIndex, node: object, tokens: Sequence[int]) -> object:
            return next((found for (_, other), found in index._found.items() if other == tuple(tokens)), None)

        with patch.object(PrefixIndex, "find", find):
            self.notices("V1", "holds other tokens than it begins with")

    def test_pages_are_evicted_and_nobody_is_told(self) -> None:
        with patch.object(PagePool, "next_evicted", lambda *given: ()):
            self.notices("V2", "although its content can still be found")


class WaitTest(unittest.TestCase):
    """V4's bound on written timelines: (k + 1) * 10 * L * ceil(max_running / budget) steps."""

    def audit(self, waits: int, budget: int = 8, before: int = 0, policy: str = "fcfs",
              abandoned: int = -1) -> list[Violation]:
        header = {"event": "header", "step": 0, "time": 0.0, "num_pages": 4, "model": MODEL_SHAPE.dump(CONFIG),
                  "settings": {"policy": policy, "max_running": 4}}
        names = [f"r{i}" for i in range(before + 1)]
        events: list[Event] = [header, *({"event": "submit", "step": 0, "time": 0.0, "request": name, "max_tokens": 2,
                                          "prompt_tokens": [1, 2, 3]} for name in names)]
        events += [{"event": "step", "step": step, "time": 0.0, "budget": budget, "computed": 0, "chunks": [],
                    "admitted": [], "preempted": [], "waiting": names, "running": [], "reasons": {}, "found": {},
                    "used_pages": 0, "empty_slots": 0} for step in range(waits)]
        again = [at + 1 for at, event in enumerate(events) if event["event"] == "step" and event["step"] == abandoned]
        for at in again:
            events[at:at] = [{"event": "abandon", "step": abandoned, "time": 0.0}, events[at - 1]]
        return [violation for violation in Audit.of(events).violations if violation.promise == "V4"]

    def test_the_bound_is_exact(self) -> None:
        for budget, turns in ((8, 1), (4, 1), (3, 2), (1, 4)):
            with self.subTest(budget=budget):
                self.assertEqual(self.audit(10 * 5 * turns, budget), [])
                late = self.audit(10 * 5 * turns + 1, budget)
                self.assertEqual(len(late), 1)
                self.assertIn(f"r0 has waited {50 * turns + 1} steps; at most {50 * turns} are promised", str(late[0]))

    def test_an_abandoned_step_starts_the_count_again(self) -> None:
        self.assertEqual(self.audit(50, abandoned=10), [])
        self.assertEqual(len(self.audit(51, abandoned=0)), 1)

    def test_behind_others_it_may_wait_longer(self) -> None:
        for policy in POLICIES:
            times = AGING + 1 if policy == "prefill-first" else 1
            late = self.audit(times * 100 + 2, before=2, policy=policy)
            self.assertEqual(Counter(violation.problem.split()[0] for violation in late),
                             {"r0": times * 50 + 2, "r1": 2})

    def test_no_step_without_a_budget_counts(self) -> None:
        self.assertEqual(self.audit(500, budget=0), [])


class TextTest(unittest.TestCase):
    def test_a_violation_is_one_sentence_with_line_and_step(self) -> None:
        self.assertEqual(str(Violation(7, 3, "V2", "a page is lost")), "line 7, step 3: V2: a page is lost")

    def test_it_reads_while_an_engine_runs(self) -> None:
        engine: InferenceEngine = make_engine()
        audit = Audit(as_read(engine.timeline)[0])
        engine.timeline.listen(audit.observe)
        engine.generate([[1, 2, 3]], 3)
        audit.end()
        self.assertEqual((audit.violations, audit.proven["tokens"]), ([], 3))


if __name__ == "__main__":
    unittest.main()
