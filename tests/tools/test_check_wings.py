"""The deletion test itself: it finds the wings, leaves out what it says, and sees a wing that cannot be deleted."""

from __future__ import annotations

import io
import subprocess
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from scripts import check_wings
from tests.paths import ROOT

TESTS_THAT_PASS = "import sys; sys.stderr.write('Ran 3 tests in 1s\\n\\nOK (skipped=2)\\n')"


class WingsTest(unittest.TestCase):
    def test_every_package_is_a_wing_and_is_listed(self) -> None:
        wings = check_wings.find_wings(ROOT)
        self.assertEqual([wing for wing in wings if "/" not in wing],
                         ["backends", "calibration", "checkpoints", "observe", "serving", "workloads"])
        self.assertEqual(set(wings), set(check_wings.REFUSED))

    def test_a_new_package_must_be_listed(self) -> None:
        for found, arguments, words in ((["newcomer", *check_wings.REFUSED], [], "REFUSED what is refused without new"),
                                        (list(check_wings.REFUSED), ["nothing"], "there is no wing nothing")):
            said = io.StringIO()
            with mock.patch.object(check_wings, "find_wings", return_value=found), redirect_stderr(said), \
                    self.assertRaises(SystemExit) as end:
                check_wings.main(arguments)
            self.assertEqual(end.exception.code, 2)
            self.assertIn(words, said.getvalue())

    def test_a_copy(self) -> None:
        with check_wings.a_copy(["observe", "backends/lanes"]) as copy:
            left = {path.relative_to(copy.root).as_posix() for path in (copy.root / "starter").rglob("*.py")}
            self.assertTrue((copy.root / "faulty.json").is_file())
            self.assertFalse((copy.root / ".git").exists())
            skipped = copy.skipped_tests()
        mine = {path.relative_to(ROOT).as_posix() for path in (ROOT / "starter").rglob("*.py")}
        self.assertEqual({path.split("/")[1] for path in mine - left}, {"observe", "backends"})
        self.assertEqual({path for path in mine - left if "backends" in path},
                         {path for path in mine if "backends/lanes" in path})
        self.assertFalse(copy.root.exists())
        self.assertIn("tests.test_backend.LoadTest.test_by_name", skipped)
        self.assertFalse([name for name in skipped if "test_page_budget" in name])

    def test_tests_of_the_spine(self) -> None:
        names = check_wings.spine_tests(ROOT)
        self.assertLessEqual({"tests.test_engine", "tests.base.test_wings"}, set(names))
        self.assertFalse([name for name in names if ".tools." in name or ".observe." in name])


    def test_an_interpreter_that_does_not_have_this_project(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            python = check_wings.make_python(Path(folder))
            code = "from importlib.util import find_spec; print(*map(bool, map(find_spec, ('starter', 'numpy'))))"
            said = subprocess.run([python, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout
        self.assertEqual(said.split(), ["False", str(bool(find_spec("numpy")))])


class VerdictTest(unittest.TestCase):
    def test_a_refusal_is_one_sentence_that_names_the_package(self) -> None:
        good = "error: --report needs the package starter/observe, which this copy does not have\n"
        for code, text, problem in (
                (2, good, ""), (0, good, "ends with code 0, not 2"), (1, good, "ends with code 1"),
                (2, "", "does not say in one line"), (2, good * 2, "does not say in one line"),
                (2, "Traceback\n", "does not say in one line"), (2, "error: no such file\n", "does not name"),
                (2, good.replace("observe", "observed"), "does not name")):
            with self.subTest(code=code, text=text):
                said = check_wings.not_refused("observe", subprocess.CompletedProcess([], code, "", text))
                self.assertTrue(said.startswith(problem) if problem else not said, said)
        warp = subprocess.CompletedProcess([], 2, "", f"error: {check_wings.ALSO_RIGHT}: pip install\n")
        self.assertEqual(check_wings.not_refused("backends/cuda", warp), "")
        self.assertTrue(check_wings.not_refused("observe", warp).startswith("does not name"))

    def test_commands_that_fail_are_told(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            copy = check_wings.Copy(["observe"], Path(folder))
            copy.root.mkdir()
            copy.expect_success("C0", "-c", "print(1)")
            copy.expect_success("tests", "-c", TESTS_THAT_PASS)
            copy.expect_success("C9", "-c", "import sys; sys.exit('that is bad')")
        self.assertEqual(copy.passed, ["C0", "tests (3 tests, 2 skipped)"])
        self.assertEqual(copy.problems, ["C9 ends with code 1:\nthat is bad\n"])

    def test_a_wing_that_the_spine_imports_cannot_be_deleted(self) -> None:
        def spoilt(wings: list[str], target: Path) -> None:
            original(wings, target)
            driver = target / "starter" / "driver.py"
            text = driver.read_text(encoding="utf-8")
            driver.write_text(text.replace("from starter.command", "import starter.calibration.importance\n"
                                           "from starter.command", 1), encoding="utf-8")

        original, said = check_wings.copy_without, io.StringIO()
        with mock.patch.object(check_wings, "copy_without", spoilt), redirect_stdout(said), \
                mock.patch.object(check_wings.Copy, "check", self.quick_check):
            self.assertEqual(check_wings.main(["calibration"]), 1)
        self.assertIn("FAIL  without calibration: C1, refusals (0)\n    C4 ends with code 1:\n", said.getvalue())
        self.assertIn("No module named 'starter.calibration'", said.getvalue())
        self.assertIn("int4-search ends with code 1, not 2", said.getvalue())

    @staticmethod
    def quick_check(copy: check_wings.Copy, tests: object) -> None:
        copy.expect_success("C1", "scripts/verify_scaffold.py")
        copy.expect_success("C4", *check_wings.DRIVER, check_wings.FIXTURE)
        copy.check_refusals()


if __name__ == "__main__":
    unittest.main()
