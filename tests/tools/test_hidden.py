"""Hidden tests: the same seed draws the same, no message tells the seed, and a few engines that are wrong on purpose
are caught by the tests meant for them (``python3 scripts/hidden_rates.py`` measures all, with many seeds)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from collections.abc import Iterable
from unittest import mock

from tests.paths import ROOT

with mock.patch.dict(os.environ, P07_SEED="1"), mock.patch.object(sys, "path", [str(ROOT / "acceptance"), *sys.path]):
    import harness
    import hidden
    import hidden_case

    from acceptance.child import run_here
    from acceptance.wrong.mistake import DIFFERENT, MISTAKES, load_all
    from scripts import hidden_rates

load_all()
SECRET = "a seed that nobody guesses"


def run(tests: Iterable[str], variant: object = None, seed: str = SECRET) -> dict[str, str]:
    """In this process: messages of what failed."""
    with mock.patch.object(harness, "SEED", hidden.digest(seed)):
        return {test: outcome.message for test, outcome in run_here(tests, variant) if outcome.state == "failed"}


def command(*arguments: str, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "acceptance", "hidden", *arguments], cwd=ROOT, capture_output=True,
                          input=given, encoding="utf-8", check=False, env={**os.environ, **environment})


class DrawingTest(unittest.TestCase):
    def test_the_same_seed_draws_the_same_bytes_in_any_process(self) -> None:
        shown = [command("--seed", "-", "--show", given=SECRET + "\n", PYTHONHASHSEED=number).stdout
                 for number in "12"]
        here = [json.dumps(line) + "\n" for line in map(list, hidden.drawn_scenarios(SECRET).items())]
        self.assertEqual(shown, ["".join(here)] * 2)
        self.assertEqual(len(here), len(hidden.listed()))

    def test_another_seed_draws_something_else_for_every_test(self) -> None:
        first, second = hidden.drawn_scenarios(SECRET), hidden.drawn_scenarios(SECRET + ".")
        self.assertEqual(first.keys(), second.keys())
        self.assertEqual([test for test in first if first[test] == second[test]], [])

    def test_the_draws_of_one_seed_differ(self) -> None:
        drawn = [json.dumps(each) for each in hidden.drawn_scenarios(SECRET).values()]
        self.assertEqual(len(set(drawn)), len(drawn))

    def test_a_test_gets_what_is_shown_whatever_the_engine_did_before(self) -> None:
        got = []

        class Drawn(hidden_case.Hidden):
            def ready(self) -> None:
                got.append("ready")

            @hidden_case.drawn("B14", "M3", lambda rng: (rng.random(), rng.choice("abc")), times=2)
            def test_draw(self, scenario: object) -> None:
                """B14: a rule."""
                got.append(scenario)

        with mock.patch.object(harness, "SEED", "s"):
            for name in ("test_draw_1", "test_draw_2"):
                Drawn(name).run(unittest.TestResult())
        ids = ["Drawn.test_draw_1", "Drawn.test_draw_2"]
        self.assertEqual(got, [part for test in ids for part in (
            "ready", hidden_case.document("s", test, getattr(Drawn, test.partition(".")[2]).draw))])
        self.assertFalse(hasattr(Drawn, "test_draw"))


class ListTest(unittest.TestCase):
    def test_what_is_listed(self) -> None:
        listed = hidden.listed()
        named = {what["requirement"] for what in listed.values()}
        self.assertLessEqual({f"B{number}" for number in range(1, 20) if number != 3}, named)
        self.assertEqual({what["milestone"] for what in listed.values()}, {f"M{number}" for number in range(1, 7)})
        self.assertEqual(listed["HiddenLoads.test_random_arrivals_3"],
                         {"kind": "random_arrivals", "requirement": "B14", "milestone": "M3"})
        self.assertEqual(json.loads(command("--list", "--json").stdout), listed)

    def test_bad_commands(self) -> None:
        for arguments, said in ((["--json"], "--seed is missing"), (["no_such", "--seed", "1"], "no_such")):
            done = command(*arguments)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn(said, done.stderr)


class SecrecyTest(unittest.TestCase):
    TEST = "HiddenRequests.test_strange_tokens_1"

    def test_no_message_tells_the_seed_unless_asked_to(self) -> None:
        [told] = hidden.run_hidden(SECRET, [self.TEST], variant="true_taken_for_1").values()
        self.assertEqual(told.state, "failed")
        self.assertIn("expected: RequestError", told.message)
        for part in (SECRET, hidden.digest(SECRET)):
            self.assertNotIn(part, told.message)
        rule, *lines = told.message.splitlines()
        self.assertTrue(rule.startswith("B1, B5: "))
        self.assertEqual([line.split()[0] for line in lines],
                         ["expected:", "happened:", "hint:", "case:", "why:", "numbers:", "replay:"])
        self.assertIn("hidden HiddenRequests.test_strange_tokens --seed ANY", lines[-1])

    def test_the_teacher_may_see_it(self) -> None:
        message = next(iter(run([self.TEST], MISTAKES["true_taken_for_1"]).values()))
        told = hidden.told(message, self.TEST, SECRET, show_seed=True)
        self.assertIn(f"hidden {self.TEST} --seed '{SECRET}' --show-seed --timelines", told.splitlines()[-1])

    def test_an_engine_that_prints_its_environment(self) -> None:
        digest = hidden.digest(SECRET)
        for message in (f"happened: P07_SEED={digest}", f"a\n  b: {digest}\n  replay:   c", f"a\n  replay: {digest}\n"):
            self.assertNotIn(digest, hidden.told(message, self.TEST, SECRET))


class WorthTest(unittest.TestCase):
    def test_every_mistake_is_meant_for_a_test_or_has_a_reason(self) -> None:
        meant = hidden_rates.meant()
        self.assertEqual({*meant, *hidden_rates.NOT_MEANT}, set(MISTAKES))
        self.assertFalse(meant.keys() & hidden_rates.NOT_MEANT.keys())
        kinds = {test.rpartition("_")[0] for test in hidden.listed()}
        self.assertEqual(set(meant.values()) - kinds, set())

    def test_some_mistakes_are_caught_by_the_tests_meant_for_them(self) -> None:
        for name, said in {"golden_tokens_hard_coded": "does not look tokens up", "double_free": "free|users|numbers",
                           "positions_counted_from_the_chunk": "tokens of", "positions_end_at_40": "tokens of|logits",
                           "static_batching": "has a slot", "preemption_loses_a_token": "computed once, in order",
                           "salt_ignored": "salt",
                           "page_size_written_into_the_code": "tokens", "unread_tokens_dropped": "next event",
                           "zero_point_clamped": "off by", "metadata_not_checked": "QuantizationError",
                           "shadow_cache": "pages are for show", "two_terminal_events": "terminal event",
                           "seeds_from_the_system": "random numbers"}.items():
            with self.subTest(mistake=name):
                ids = hidden_rates.ids_of(hidden_rates.meant()[name])
                self.assertRegex(next((message for test in ids for message in run([test], MISTAKES[name]).values()),
                                      "passed"), said)

    def test_right_engines_pass(self) -> None:
        """A sample: of each test the first draw."""
        sample = [test for test in hidden.listed() if test.endswith("_1")]
        self.assertEqual(run(sample), {})
        for name, tests in {"pages_in_turn": "forks leaving families", "prompts_share_alike": "random_arrivals crowd",
                            "newest_first_within_a_step": "tight_memory long_prompt",
                            "grids_that_hold_zero": "strange_groups formats"}.items():
            with self.subTest(name=name):
                chosen = [test for test in sample if any(word in test for word in tests.split())]
                self.assertEqual(run(chosen, DIFFERENT[name]), {})


if __name__ == "__main__":
    unittest.main()
