"""Can every wing be deleted? Makes copies of the project without one or all of them, and checks what is left.

    python3 scripts/check_wings.py               every wing, every package inside starter/backends, and all at once
    python3 scripts/check_wings.py --jobs 2      two copies at a time
    python3 scripts/check_wings.py observe backends/cuda    only these, each in a copy of its own

A wing is a package of ``starter`` other than ``base`` and ``command``. In each copy:

    C1         scripts/verify_scaffold.py finds everything that the handout asks for
    C3         all files compile
    C4         the driver runs the fixture, and its output equals the golden tokens
    C5         the acceptance tests pass
    spine      the tests of the spine, of base and of command pass; those that need the wing skip and say so
    refusals   what the wing gave is refused in one sentence that names the package, with exit code 2

Without all wings every test of the spine is run. In the other copies only those are that it skipped there for want of
a wing (see tests/wings.py): all others have passed without any. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = (".git", "__pycache__", "*.egg-info", ".venv", ".*_cache", "build", "dist", "out", "grades")
DRIVER = ("starter/driver.py", "--fixture")
FIXTURE = "fixtures/tiny_model.json"
FAULTY = "faulty.json"  # written into a copy: the fixture with a fault
TIMELINE = "fixtures/tiny_model.timeline.jsonl"
# Prints the names of those tests in some modules that are skipped for want of a wing.
LIST_SKIPPED = """
import sys, unittest

def show(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            show(test)
        else:
            method = getattr(test, test._testMethodName)
            reasons = [getattr(thing, "__unittest_skip_why__", "") for thing in (type(test), method)]
            if any("needs the package starter/" in reason for reason in reasons):
                print(test.id())

show(unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:]))
"""

# The commands that are refused where a package was deleted. Without lanes or numpy none is: plainer backends step in.
REFUSED: Mapping[str, Sequence[Sequence[str]]] = {
    "backends": ((*DRIVER, FIXTURE, "--kv-quantization", "int8"), (*DRIVER, FIXTURE, "--workers", "2")),
    "backends/lanes": (),
    "backends/numpy": (),
    "backends/workers": ((*DRIVER, FIXTURE, "--workers", "2"),),
    "backends/cuda": ((*DRIVER, FIXTURE, "--backend", "cuda"),),
    "calibration": ((*DRIVER, FIXTURE, "--quantization", "int4-search"),),
    "checkpoints": (("starter/driver.py", "--checkpoint", "model.gguf", "--prompt", "x"),
                    (*DRIVER, "fixtures/quatrains.json")),
    "observe": ((*DRIVER, FIXTURE, "--trace", "trace.json"), (*DRIVER, FIXTURE, "--report", "report.html"),
                ("-m", "starter", "check", TIMELINE), ("-m", "starter", "replay", TIMELINE)),
    "serving": (("-m", "starter", "serve", "--fixture", FIXTURE),),
    "workloads": ((*DRIVER, FAULTY),),
}
# Backend "cuda" is refused for want of Warp first, where that is not installed.
ALSO_RIGHT = "backend 'cuda' needs warp, which is not installed"


def find_wings(root: Path) -> list[str]:
    """The wings of a project, and the packages inside ``backends``."""
    folder = root / "starter"
    pages = [*folder.glob("*/__init__.py"), *folder.glob("backends/*/__init__.py")]
    names = [page.parent.relative_to(folder).as_posix() for page in pages]
    return sorted(name for name in names if name not in ("base", "command"))


def copy_without(wings: Sequence[str], target: Path) -> None:
    """A copy of the project without some packages of ``starter``, and a scenario with a fault."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*NOT_COPIED))
    for wing in wings:
        shutil.rmtree(target / "starter" / wing)
    scenario = json.loads((target / FIXTURE).read_text(encoding="utf-8"))
    scenario["faults"] = [{"kind": "memory_cut", "step": 1, "pages": 1, "until": 2}]
    (target / FAULTY).write_text(json.dumps(scenario), encoding="utf-8")


def spine_tests(root: Path) -> list[str]:
    """The modules that test the spine, base and command."""
    paths = [path for folder in (".", "base", "command")
             for path in sorted((root / "tests" / folder).glob("test_*.py"))]
    return [".".join(path.relative_to(root).with_suffix("").parts) for path in paths]


def make_python(folder: Path) -> Path:
    """A Python with the packages of this one, but without this project, even where it is installed in editable form:
    what such an installation finds in place of a deleted wing would be the wing."""
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python3")
    tell = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    place = subprocess.run(tell, capture_output=True, text=True, check=True).stdout.strip()
    Path(place, "packages.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


# ----------------------------------------------------------------------------------------------------- in one copy


class Copy:
    """A copy without some wings, the checks that it has passed, and what is wrong with it."""

    def __init__(self, wings: Sequence[str], folder: Path, python: Path = Path(sys.executable)) -> None:
        self.wings, self.root, self.python = wings, folder / "project", python
        self.passed: list[str] = []
        self.problems: list[str] = []

    @property
    def name(self) -> str:
        return f"without {', '.join(self.wings)}"

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A Python command in the copy, which must not see the complete project."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and name[:4] != "P07_"}
        kept.pop("PYTHONDONTWRITEBYTECODE", None)  # a copy's own cache makes its many short programs start faster
        return subprocess.run([str(self.python), *command], cwd=self.root, capture_output=True, encoding="utf-8",
                              errors="replace", check=False,
                              env={**kept, "PYTHONUTF8": "1", "PYTHONPYCACHEPREFIX": str(self.root.parent / "cache"),
                                   **environment})

    def skipped_tests(self) -> list[str]:
        """The tests of the spine that are skipped here for want of a wing."""
        done = self.run("-c", LIST_SKIPPED, *spine_tests(self.root))
        done.check_returncode()
        return done.stdout.split()

    def check(self, tests: Sequence[str]) -> None:
        """All checks, with these tests of the spine."""
        sources = [str(path.relative_to(self.root)) for folder in ("starter", "acceptance")
                   for path in sorted((self.root / folder).rglob("*.py"))]
        self.expect_success("C1", "scripts/verify_scaffold.py")
        self.expect_success("C3", "-m", "py_compile", *sources, "scripts/verify_scaffold.py", "tests/test_scaffold.py")
        self.expect_success("C4", *DRIVER, FIXTURE)
        self.expect_success("C5", "-m", "unittest", "discover", "-s", "acceptance", RUN_STUDENT_ACCEPTANCE="1")
        self.expect_success("spine", "-m", "unittest", *tests)
        self.check_refusals()

    def expect_success(self, check: str, *command: str, **environment: str) -> None:
        """A command that must end with code 0. Tests say how many there were and how many were skipped."""
        done = self.run(*command, **environment)
        if done.returncode:
            self.problems.append(f"{check} ends with code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
            return
        counts = re.search(r"^Ran (\d+) tests? .*\n\nOK(?: \(skipped=(\d+)\))?", done.stderr, re.MULTILINE)
        self.passed.append(f"{check} ({counts[1]} tests, {counts[2] or 0} skipped)" if counts else check)

    def check_refusals(self) -> None:
        """Whatever these packages gave is refused."""
        refused = 0
        for wing, command in [(name, command) for name in self.wings for command in REFUSED[name]]:
            problem = not_refused(wing, self.run(*command))
            refused += not problem
            self.problems += [f"python3 {' '.join(command)} {problem}"] if problem else []
        self.passed.append(f"refusals ({refused})")


def not_refused(wing: str, done: subprocess.CompletedProcess[str]) -> str:
    """What is wrong with the way in which a command was refused; "" if nothing is."""
    if done.returncode != 2:
        return f"ends with code {done.returncode}, not 2:\n{(done.stdout + done.stderr)[-1000:]}"
    if done.stderr.count("\n") != 1 or not done.stderr.startswith("error: "):
        return f"does not say in one line what is wrong:\n{done.stderr[-1000:]}"
    if f"needs the package starter/{wing}, " not in done.stderr and not (
            wing == "backends/cuda" and ALSO_RIGHT in done.stderr):
        return f"does not name starter/{wing}:\n{done.stderr}"
    return ""


# --------------------------------------------------------------------------------------------------------- program


@contextmanager
def a_copy(wings: Sequence[str], python: Path = Path(sys.executable)) -> Iterator[Copy]:
    """A copy of the project without these packages, for a while."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = Copy(wings, Path(folder), python)
        copy_without(wings, copy.root)
        yield copy


def check_wings(wings: Sequence[str], all_at_once: bool, jobs: int) -> Iterator[Copy]:
    """Each of these packages deleted on its own and, first since it takes longest, all wings at once if that is
    asked for."""
    every_wing = [wing for wing in find_wings(ROOT) if "/" not in wing]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(jobs) as pool:
        python = make_python(Path(folder))
        with a_copy(every_wing, python) as bare:
            every_test, some_tests = spine_tests(bare.root), bare.skipped_tests()

        def check(task: tuple[Sequence[str], Sequence[str]]) -> Copy:
            wings, tests = task
            with a_copy(wings, python) as copy:
                copy.check(tests)
            return copy

        tasks = [(every_wing, every_test)] if all_at_once else []
        yield from pool.map(check, [*tasks, *(([wing], some_tests) for wing in wings)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wings", nargs="*", metavar="WING", help="observe, backends/cuda, ...; none: all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies that are checked at a time")
    options = parser.parse_args(arguments)
    known = find_wings(ROOT)
    for wing in [*options.wings, *REFUSED]:
        if wing not in known:
            parser.error(f"there is no wing {wing}; there are {', '.join(known)}")
    if unlisted := [wing for wing in known if wing not in REFUSED]:
        parser.error(f"say in REFUSED what is refused without {', '.join(unlisted)}")
    start, failed = perf_counter(), 0
    for copy in check_wings(options.wings or known, not options.wings, max(1, options.jobs)):
        failed += bool(copy.problems)
        print(f"{'FAIL' if copy.problems else 'ok  '}  {copy.name}: {', '.join(copy.passed)}", flush=True)
        for problem in copy.problems:
            print("    " + problem.replace("\n", "\n    "), flush=True)
    print(f"{failed} copies failed, after {perf_counter() - start:.0f} seconds")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
