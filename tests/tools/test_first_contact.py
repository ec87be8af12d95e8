"""What every program says first: its help with nothing installed and no wing present, what it lacks, and one sentence
on a Python that is too old."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from scripts.check_wings import copy_without, find_wings
from tests.paths import ROOT, TIMELINE

PLACES = ("scripts", "scripts/grading", "scripts/gpu")
PROGRAMS = sorted(path for place in PLACES for path in ROOT.glob(f"{place}/*.py")
                  if '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")
                  and "argparse" in path.read_text(encoding="utf-8"))
OLD = """import runpy, sys
sys.version_info = (3, 9, 1, "final", 0)
sys.argv = ['program']
{}
"""
ENTRIES = {"python -m starter": "runpy.run_module('starter', run_name='__main__', alter_sys=True)",
           "python -m starter.driver": "runpy.run_module('starter.driver', run_name='__main__', alter_sys=True)",
           "starter/driver.py": "runpy.run_path('starter/driver.py', run_name='__main__')",
           "import starter": "import starter",
           "python -m acceptance": "runpy.run_module('acceptance', run_name='__main__', alter_sys=True)",
           "scripts/grade.py": "sys.path[0] = 'scripts'; runpy.run_path('scripts/grade.py', run_name='__main__')",
           "scripts/release_student.py":
               "sys.path[0] = 'scripts'; runpy.run_path('scripts/release_student.py', run_name='__main__')"}


LACKING_A_PACKAGE = {"run_notebooks.py": "notebooks", "screenshot_report.py": "browser", "train_quatrains.py": "train",
                     "compile_kernels.py": "cuda"}
LACKING_A_WING = (
    ("accuracy.py",), ("report.py", TIMELINE), ("quant_report.py",), ("serve_load.py", "streams"),
    *(("bench.py", "--suite", suite) for suite in ("stdlib", "ladder", "peers", "checkpoint")))


def run(*arguments: object, python: str = sys.executable, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *map(str, arguments)], cwd=root, capture_output=True, text=True, check=False,
                          encoding="utf-8", stdin=subprocess.DEVNULL)


class HelpTest(unittest.TestCase):
    def test_every_script_helps_without_any_package(self) -> None:
        """-S: none that pip installed is found."""
        self.assertGreater(len(PROGRAMS), 15)
        for path in PROGRAMS:
            with self.subTest(script=path.name):
                done = run("-S", path, "--help")
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertRegex(done.stdout, r"\Ausage: ")

    def test_a_package_that_is_missing(self) -> None:
        """One sentence with the command that installs it, and exit code 2; argparse's come after a line of usage."""
        for name, extra in LACKING_A_PACKAGE.items():
            with self.subTest(script=name):
                done = run("-S", ROOT / "scripts" / name)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                said = [line for line in done.stderr.splitlines() if not line.startswith("usage: ")]
                self.assertEqual(len(said), 1, done.stderr)
                self.assertRegex(said[0], rf"error: .* pip install '\.\[{extra}\]'\Z")

    def test_wings_that_were_deleted(self) -> None:
        """In a copy without any: help all the same, and then one sentence that names the package, and exit code 2."""
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder, "project")
            copy_without([wing for wing in find_wings(ROOT) if "/" not in wing], root)
            for path in PROGRAMS:
                if path.parent.name != "scripts":
                    continue
                with self.subTest(script=path.name):
                    done = run("-S", f"scripts/{path.name}", "--help", root=root)
                    self.assertEqual((done.returncode, done.stderr), (0, ""))
            for name, *arguments in LACKING_A_WING:
                with self.subTest(script=name, arguments=arguments):
                    done = run("-S", f"scripts/{name}", *arguments, root=root)
                    self.assertEqual(done.returncode, 2, done.stderr)
                    self.assertRegex(done.stderr, r"\Aerror: [^\n]* needs the package starter/\w+, which this copy "
                                                  r"does not have[^\n]*\n\Z")

    def test_acceptance_helps(self) -> None:
        for arguments in (("--help",), ("wrong", "--help"), ("hidden", "--help")):
            done = run("-S", "-m", "acceptance", *arguments)
            self.assertEqual((done.returncode, done.stderr), (0, ""), arguments)


class OldPythonTest(unittest.TestCase):
    def test_one_sentence(self) -> None:
        for name, code in ENTRIES.items():
            with self.subTest(entry=name):
                done = run("-c", OLD.format(code))
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                self.assertRegex(done.stderr, r"\APython 3\.10 or newer is needed; this is 3\.9\.1, \S+\n\Z")

    def test_an_old_python_can_compile_what_runs_before(self) -> None:
        """What comes before the check is in the grammar of Python 3.8."""
        import ast
        for name in ("starter/__init__.py", "starter/__main__.py", "starter/driver.py", "acceptance/__main__.py",
                     "scripts/grade.py", "scripts/release_student.py"):
            ast.parse(Path(ROOT, name).read_text(encoding="utf-8"), feature_version=(3, 8))


if __name__ == "__main__":
    unittest.main()
