"""What a failure tells a student: file, line and text of their code, how a process ended; and no more than a screen."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from scripts.release_student import release
from tests.paths import ROOT

SCREEN = 50  # lines


class Failures(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name)

    def tree(self, file, old, new):
        """A project with a mistake."""
        for name in ("starter", "acceptance", "fixtures"):
            shutil.copytree(ROOT / name, self.place / name, ignore=shutil.ignore_patterns("__pycache__", "wrong"))
        path = self.place / "starter" / file
        text = path.read_text(encoding="utf-8")
        self.assertIn(old, text)
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        return next((number for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
                     if new.strip() and new.strip().splitlines()[-1] in line), 0)

    def run_tests(self, *arguments):
        done = subprocess.run([sys.executable, "-m", "acceptance", *arguments], cwd=self.place, capture_output=True,
                              encoding="utf-8", errors="replace", check=False)
        return done.returncode, done.stdout + done.stderr

    def test_an_error_that_the_engine_caught(self):
        line = self.tree("backend.py", "rows = self._products(matrix, x)", "rows = self._produkts(matrix, x)")
        for test in ("test_greedy_generation", "test_golden_sequences"):
            code, said = self.run_tests(test)
            self.assertEqual(code, 1)
            self.assertRegex(said, "first:    AttributeError: '.*Backend' object has no attribute '_produkts'")
            self.assertIn(f"where:    starter/backend.py, line {line}, in linear: rows = self._produkts(matrix, x)",
                          said)

    def test_an_error_that_reaches_the_test(self):
        head = "    def stats(self) -> CacheStats:"
        mistake = "    def stats(self):\n        return nothing\n\n"
        self.tree("kv_cache.py", head, mistake + head.replace("stats", "old"))
        _, said = self.run_tests("M2KVCache.test_counters")
        self.assertRegex(said, r"NameError: name 'nothing' is not defined\n  where:    starter/kv_cache.py, line \d+, "
                               "in stats: return nothing")

    def test_an_import_that_fails(self):
        line = self.tree("__init__.py", "from __future__ import annotations\n",
                         "from __future__ import annotations\nimport nothing_there\n")
        _, said = self.run_tests("test_greedy_generation")
        self.assertRegex(said, f'starter.__init__.py", line {line}')
        self.assertIn("No module named 'nothing_there'", said)

    def test_a_process_that_crashes(self):
        self.tree("engine.py", "        for request_id in", "        for request_id in")
        path = self.place / "starter" / "engine.py"
        path.write_text(path.read_text(encoding="utf-8") + "\n\ndef _crash(self, *more, **named):\n"
                        "    import faulthandler\n    faulthandler._read_null()\n\n\nInferenceEngine.submit = _crash\n",
                        encoding="utf-8")
        _, said = self.run_tests("test_greedy_generation")
        self.assertIn("hint:     an engine raises errors; it ends no process", said)
        self.assertRegex(said, r"engine.py\", line \d+ in _crash")
        if sys.platform != "win32":
            self.assertIn("was ended by SIGSEGV (", said)

    def test_the_skeletons_first_run(self):
        release(self.place / "student")
        self.place /= "student"
        code, said = self.run_tests()
        self.assertEqual(code, 1)
        self.assertLess(len(said.splitlines()), SCREEN)
        for milestone in ("M1 ", "M2 ", "M3 ", "M4 ", "M5 ", "M6 "):
            self.assertIn(f"\n{milestone}", said)
        self.assertRegex(said, r"starter/\w+\.py, line \d+, in \w+: raise NotImplementedError")
        code, said = self.run_tests("wrong", "--help")
        self.assertEqual(code, 2)
        self.assertIn("they are not in this project", said)
        self.assertNotIn("acceptance wrong", self.run_tests("--help")[1])
        _, said = self.run_tests("M1", "--all")
        self.assertGreater(said.count("FAILED M1Reference"), 5)

    def test_every_number_is_explained_where_failures_say(self):
        glossaries = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("glossary.md", "glossary.zh.md")]
        numbers = set()
        for path in (ROOT / "acceptance").glob("*.py"):
            for rule in re.findall(r'"""((?:[A-Z]\d*(?:, )?)+): ', path.read_text(encoding="utf-8")):
                numbers |= set(rule.split(", "))
        self.assertGreater(len(numbers), 30)
        for glossary in glossaries:
            for number in sorted(numbers):
                self.assertRegex(glossary, rf"(?m)^\| {number} \|", number)


if __name__ == "__main__":
    unittest.main()
