"""The proof of the grader: python3 scripts/grade.py --check grades a class whose marks are known.

Good work gets its points; unfinished work those of what is there; and every cheat below, none. ``MEMBERS`` says how
each submission is made: how many milestones of the students' tree are solved, and what is then done to it. All are run
for a part of the tests, except the complete engine, which has to get every automatic point.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.release_student import release

from . import cheats, github_classroom, gradescope, results
from .class_run import ClassGrades, grade_class
from .grade import Grade, hidden_digest, inner, sha
from .sandbox import Limits, has_namespaces

ROOT = Path(__file__).resolve().parent.parent.parent
SEED = "the seed of the proof"
SOME = ("M1Reference", "HiddenRequests", "M2KVCache.test_counters", "M5Quantization.test_bad_input", "Commands")
FEW = ("M1Reference.test_g", "HiddenRequests.test_answers_1")
QUICK = Limits(test=10, start=20, all=240, memory=512 << 20, disk=8 << 20)
SLEEPY = Limits(test=2, start=6, all=20)

Check = Callable[[Grade], bool]


def nothing(grade: Grade) -> bool:
    """No automatic point."""
    return grade.automatic == 0


def everything(grade: Grade) -> bool:
    """All automatic points, on the tests that were run."""
    return not grade.problem and all(outcome.state == "passed" for outcome in grade.tests.values())


@dataclass(frozen=True)
class Member:
    """One submission. ``code`` is appended to a file of starter/."""

    name: str
    through: int | None  # milestones that are solved; None: the complete engine itself
    code: str = ""
    file: str = "__init__.py"
    check: Check = nothing
    tests: tuple[str, ...] = SOME
    limits: Limits = QUICK
    note: str = ""  # that the marker must be told
    change: Callable[[Path], None] | None = None


def fails(*wanted: str) -> Check:
    """These tests fail, and others do not."""
    return lambda grade: all(grade.tests[test].state == "failed" for test in wanted) and grade.automatic > 0


def no_functional(grade: Grade) -> bool:
    """Golden tokens were recognised: no functional point (X2)."""
    lines = [line for line in grade.lines if line.section == "functional"]
    return sum(line.earned or 0 for line in lines) == 0 and any(line.note.startswith("X2") for line in lines)


def pages_for_show(grade: Grade) -> bool:
    """Pages were written and never read: no point for performance (X4)."""
    lines = [line for line in grade.lines if line.section == "performance"]
    return (sum(line.earned or 0 for line in lines) == 0 and all(line.note.startswith("X4") for line in lines)
            and grade.tests["M2KVCache.test_work_grows_linearly"].state == "passed")


def reference_alone(grade: Grade) -> bool:
    """The golden tokens come out, and the operations are not written: no point."""
    return grade.automatic == 0 and grade.tests["M1Reference.test_golden_sequences"].state == "passed"


def edited_tests(folder: Path) -> None:
    """Tests of the student's own that always pass."""
    for path in (folder / "acceptance").glob("*.py"):
        path.write_text("def all_tests():\n    return []\n", encoding="utf-8")
    (folder / "scripts" / "verify_scaffold.py").write_text("print('ok')\n", encoding="utf-8")


def renamed_copy(folder: Path) -> None:
    """Somebody else's work under other names, with comments of one's own."""
    for path in (folder / "starter").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text("# all mine\n" + text.replace("pages", "sheets_of_memory"), encoding="utf-8")


def members(port: int) -> list[Member]:
    """The class."""
    return [
        Member("complete", None, check=everything, tests=()),
        Member("skeleton", 0, tests=(*SOME, "M5Quantization", "M4PagedKV.test_f")),
        Member("through-m2", 2, check=fails("M3ContinuousBatching.test_requests_are_batched"),
               tests=("M1Reference", "M2KVCache", "HiddenCache.test_cached", "test_requests_are_batched")),
        Member("copy-of-through-m2", 2, change=renamed_copy, check=lambda grade: True,
               tests=("M2KVCache.test_counters",)),
        Member("static", None, cheats.STATIC, "scheduler.py",
               fails("M3ContinuousBatching.test_freed_slot_is_used_at_once"),
               ("M1Reference.test_g", "M1Reference.test_operations", "test_freed_slot")),
        Member("double-free", None, cheats.DOUBLE_FREE, "kv_cache.py", fails("M4PagedKV.test_random_operations"),
               ("M4PagedKV.test_random_operations", "M1Reference.test_golden", "M1Reference.test_operations")),
        Member("goldens", 0, cheats.GOLDENS, "engine.py", no_functional, note="speaks of 'golden'"),
        Member("pages-for-show", None, cheats.SHADOW, "backend.py", pages_for_show,
               ("M1Reference.test_g", "M2KVCache", "HiddenCache.test_stored")),
        Member("given-reference", 0, cheats.REFERENCE, "model.py", reference_alone,
               ("M1Reference", "HiddenRequests.test_answers_1")),
        Member("claimed-bytes", None, cheats.QUARTER, "backend.py",
               fails("M2KVCache.test_counters", "M6EndToEnd.test_memory_budget_in_bytes"),
               ("M1Reference.test_go", "M2KVCache.test_append", "M2KVCache.test_counters", "M4PagedKV.test_copy",
                "test_memory_budget_in_bytes")),
        Member("watched-memory", None, cheats.WATCHED, "backend.py", fails("M5Quantization.test_memory_really_falls"),
               ("M5Quantization.test_memory", "M5Quantization.test_error_bound")),
        Member("reserves", None, cheats.RESERVES, "scheduler.py", fails("M4PagedKV.test_pages_are_taken_as_they_fill"),
               ("M4PagedKV.test_pages_are", "M4PagedKV.test_copy", "M2KVCache.test_append")),
        Member("teachers-engine", 0, cheats.TEACHERS.format(root=str(ROOT)), note="uses __path__",
               tests=("M1Reference", "M2KVCache.test_counters", "HiddenRequests.test_answers_1")),
        Member("exit-0", 0, cheats.EXIT, tests=FEW, note="_exit"),
        Member("result-lines", 0, cheats.LINES),
        Member("edited-tests", 0, change=edited_tests),
        Member("patched-unittest", 0, cheats.PATCHED, note="imports unittest"),
        Member("patched-wire", 0, cheats.WIRE, note="uses .modules"),
        Member("errors-are-all-one", 0, cheats.ERRORS, "errors.py", note="errors.py was given complete"),
        Member("refuses-everything", 0, cheats.REFUSALS, "quantization.py",
               tests=("M5Quantization", "HiddenQuantization")),
        Member("sleeps", 0, cheats.SLEEP, tests=FEW, limits=SLEEPY),
        Member("sleeps-when-asked", None, cheats.SUBMITTED, "engine.py", fails("M1Reference.test_greedy_generation"),
               ("M2KVCache.test_append", "M1Reference.test_gr"), Limits(test=4, start=20, all=120)),
        Member("memory-hog", 0, cheats.HOG, tests=FEW),
        Member("full-disk", 0, cheats.DISK, tests=FEW),
        Member("kills", None, cheats.KILL, check=everything, note="uses .kill",
               tests=("M1Reference.test_greedy", "M2KVCache.test_counters")),
        Member("fork-bomb", 0, cheats.FORKS, tests=FEW),
        Member("network", None, cheats.NETWORK.format(port=port), check=everything, tests=("M1Reference.test_greedy",),
               note="imports socket"),
        Member("snoops", None, cheats.SNOOP, "scheduler.py", tests=FEW),
    ]


def make(member: Member, folder: Path) -> None:
    """Write a submission into a folder."""
    if member.through is None:
        shutil.copytree(ROOT / "starter", folder / "starter", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(ROOT / "DESIGN.md", folder / "DESIGN.md")
    else:
        release(folder, member.through)
    if member.code:
        path = folder / "starter" / member.file
        path.write_text(path.read_text(encoding="utf-8") + member.code, encoding="utf-8")  # an error if it is not there
    if member.change:
        member.change(folder)


def check(jobs: int) -> int:
    """Grade the class; what is wrong is printed. 0 if nothing is."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.1)
        school = Path(folder)
        all_members = members(listener.getsockname()[1])
        for member in all_members:
            make(member, school / member.name)
        with zipfile.ZipFile(school / "climbs-out.zip", "w") as archive:
            archive.writestr("starter/__init__.py", "")
            archive.writestr("../outside.py", "")
        release(school / "given")
        found = _grade_all(all_members, school, jobs)
        for member, grade in found.items():
            problems += wrong(member, grade)
            print(f"{grade.name}: {grade.automatic:g} points, {grade.seconds:g} seconds", flush=True)
        problems += together(found, school, jobs)
        try:
            listener.accept()
            problems.append("network: a submission reached the network")
        except TimeoutError:
            pass
    print("\n".join([*problems, f"{len(found)} submissions, {len(problems)} problems; namespaces: {has_namespaces()}"]))
    return bool(problems)


def _grade_all(all_members: list[Member], school: Path, jobs: int) -> dict[Member, Grade]:
    """Each on its own tests, the longest first."""
    def one(member: Member) -> Grade:
        with ThreadPoolExecutor(1) as alone:
            limits = member.limits if member.tests else Limits()
            return grade_class([school / member.name], ROOT, SEED, alone, limits, member.tests,
                               given=school / "given" / "starter").grades[0]

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(all_members, pool.map(one, all_members)))


def wrong(member: Member, grade: Grade) -> list[str]:
    """What is not as it should be with one."""
    told = results.text(grade) + str(gradescope.results(grade)) + str(github_classroom.results(grade))
    problems = []
    if not member.check(grade):
        failed = [f"{test}: {outcome.message}" for test, outcome in grade.tests.items() if outcome.state != "passed"]
        problems.append(f"{member.name}: {grade.automatic:g} points, {grade.problem}\n" + "\n".join(failed[:3]))
    if member.note and not any(member.note in note for note in grade.notes):
        problems.append(f"{member.name}: the marker is not told {member.note!r}, but {grade.notes}")
    secrets = (sha(purpose, secret) for purpose in ("public", "hidden") for secret in (SEED, inner(SEED)))
    if any(secret in told for secret in (SEED, hidden_digest(SEED), *secrets)):
        problems.append(f"{member.name}: the seed is in the output")
    return problems


def together(found: dict[Member, Grade], school: Path, jobs: int) -> list[str]:
    """What is seen in the class as a whole; a bad zip file does not stop it."""
    with ThreadPoolExecutor(jobs) as pool:
        small: ClassGrades = grade_class([school / "climbs-out.zip", school / "skeleton"], ROOT, SEED, pool, QUICK,
                                         ("M1Reference.test_golden",), given=school / "given" / "starter")
    problems = []
    if "leads out of it" not in small.grades[0].problem or small.grades[1].problem:
        problems.append(f"a bad zip file: {[grade.problem for grade in small.grades]}")
    from .similarity import near_pairs
    pairs = near_pairs({grade.name: grade.prints for member, grade in found.items()
                        if grade.prints and member.through in (0, 2)})
    if [{a, b} for _, a, b in pairs] != [{"through-m2", "copy-of-through-m2"}]:
        problems.append(f"alike: {pairs}")
    return problems


if __name__ == "__main__":
    sys.exit(check(2))
