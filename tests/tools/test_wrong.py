"""The acceptance suite catches what it was written to catch: each engine that is wrong on purpose (acceptance/wrong)
fails the tests meant for it, with the message meant; each test is meant for at least one; and docs/wrong.md names them
all. ``python3 -m acceptance wrong --check`` runs everything against everything, which takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from tests.paths import ROOT

with mock.patch.dict(os.environ, P07_SEED="1"), mock.patch.object(sys, "path", [str(ROOT / "acceptance"), *sys.path]):
    from acceptance.child import all_tests, run_apart, run_here
    from acceptance.matrix import DOCUMENT, broken_promises
    from acceptance.wrong.mistake import DIFFERENT, MISTAKES, load_all

load_all()
ENDS_THE_PROCESS = "process_ends_with_status_0"
LINES = 37  # in the list that the suite was written against


class WrongTest(unittest.TestCase):
    def test_each_mistake_fails_the_tests_meant_for_it(self) -> None:
        for name, variant in MISTAKES.items():
            with self.subTest(name=name, summary=variant.summary):
                run = run_apart(variant.meant, name) if name == ENDS_THE_PROCESS else dict(
                    run_here(variant.meant, variant))
                failed = {test: outcome for test, outcome in run.items() if outcome.state == "failed"}
                self.assertEqual(broken_promises(variant, failed), [])

    def test_the_engine_itself_passes_those_tests(self) -> None:
        """A sample of them: all of C5 has a command of its own. What the patches replaced is back."""
        meant = ["M2KVCache.test_counters", "M3ContinuousBatching.test_decode_gap", "M4PagedKV.test_copy_on_write",
                 "M5Quantization.test_extreme_groups", "M6EndToEnd.test_a_fault_ends_one_request"]
        self.assertEqual({test: outcome.message for test, outcome in run_here(meant)}, dict.fromkeys(meant, ""))

    def test_other_right_engines_pass(self) -> None:
        """A sample of the milestones that they concern."""
        samples = {"M2KVCache": ["counters", "dirty_pages", "stored_numbers_are_what_counts"],
                   "M3ContinuousBatching": ["decode_gap", "requests_are_batched"],
                   "M4PagedKV": ["copy_on_write", "random_operations", "shared_prefixes"],
                   "M5Quantization": ["error_bound", "extreme_groups"]}
        for name, variant in DIFFERENT.items():
            tests = [f"{case}.test_{test}" for case in variant.meant for test in samples[case]]
            with self.subTest(name=name):
                self.assertTrue(tests)
                self.assertEqual([outcome.message for _, outcome in run_here(tests, variant)
                                  if outcome.state == "failed"], [])

    def test_every_line_is_there(self) -> None:
        self.assertEqual({variant.line for variant in MISTAKES.values()} - {None}, set(range(1, LINES + 1)))
        self.assertGreaterEqual(len(DIFFERENT), 3)

    def test_every_test_is_meant_for_a_mistake(self) -> None:
        meant = {test for variant in MISTAKES.values() for test in variant.meant}
        self.assertEqual(meant - set(all_tests()), set())
        self.assertEqual(set(all_tests()) - meant, set())

    def test_the_table_names_them_all(self) -> None:
        table = DOCUMENT.read_text(encoding="utf-8")
        for name, variant in {**MISTAKES, **DIFFERENT}.items():
            self.assertIn(f"`{name}` {variant.summary}", table, "python3 -m acceptance wrong --write")


class CommandTest(unittest.TestCase):
    """python3 -m acceptance"""

    def run_command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "acceptance", *arguments], cwd=ROOT, capture_output=True,
                              encoding="utf-8", check=False)

    def test_progress_seed_and_timelines(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_command("test_counters", "test_fixture_is", "test_dirty_pages", "--seed", "4711",
                                    "--timelines", folder)
            [timeline] = Path(folder).iterdir()
            self.assertIn('"event":"finish"', timeline.read_text(encoding="utf-8"))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        first, *milestones, last = [line for line in done.stdout.splitlines() if line]
        self.assertIn("--seed 4711", first)
        self.assertEqual([" ".join(line.split()) for line in milestones],
                         ["M1 schema and reference 0 of 0, and 1 of what is given done", "M2 KV cache 2 of 2 done"])
        self.assertEqual(last, "all done")

    def test_an_unknown_name(self) -> None:
        done = self.run_command("test_no_such")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("test_no_such", done.stderr)

    def test_a_failure_says_all_there_is_to_say(self) -> None:
        test = "M3ContinuousBatching.test_decode_gap"
        outcome = dict(run_here([test], MISTAKES["prefill_starves_decode"]))[test]
        rule, *lines = outcome.message.splitlines()
        self.assertTrue(rule.startswith("V4: "))
        self.assertEqual([line.split()[0] for line in lines], ["happened:", "hint:", "why:", "numbers:", "replay:"])
        self.assertIn("python3 -m acceptance M3ContinuousBatching.test_decode_gap --seed 1 --timelines", lines[-1])


if __name__ == "__main__":
    unittest.main()
