"""One submission, from what was handed in to its ``Grade``.

    grade = grade_one(Path("class/mira.zip"), teacher, seed="a secret")

Never raises because of a submission: what cannot be graded gets a grade that says why.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import form as forms
from .plain import bounded, clean, one_line, warning
from .rubric import Line, Rubric
from .runner import Draw, Outcome, as_told, run_tests
from .sandbox import HERE, TEACHER, Limits, Sandbox, run_lines
from .similarity import Fingerprint
from .submission import BadSubmission, Submission, changed, take

NO_PAPERS: dict[str, Any] = {"design": {"words": {}, "missing": [], "empty": [], "problem": "the papers were not read"},
                             "timelines": {}, "figures": {}}
PAPER_SECONDS, CODE_SECONDS = 180, 60
TOLD = 2_000  # characters of what a command said last
LIMITS = Limits()


@dataclass
class Grade:
    """What a submission came to. ``lines``: of the marking scheme; those of the marker are None until merged."""

    name: str
    lines: list[Line] = field(default_factory=list)
    tests: dict[str, Outcome] = field(default_factory=dict)
    problem: str = ""  # why it could not be graded
    notes: list[str] = field(default_factory=list)  # what the marker should look at
    papers: dict[str, Any] = field(default_factory=lambda: NO_PAPERS)
    walls: list[str] = field(default_factory=list)
    seconds: float = 0.0
    warning: str = ""  # what every output begins with: no namespaces, or a part of the tests
    prints: Fingerprint | None = None

    @property
    def automatic(self) -> float:
        """Points that no person gives."""
        return round(sum(line.earned or 0 for line in self.lines if not line.marker), 2)

    @property
    def automatic_most(self) -> float:
        return sum(line.points for line in self.lines if not line.marker)

    @property
    def marked(self) -> bool:
        """Have all lines their points?"""
        return all(line.earned is not None for line in self.lines)

    @property
    def total(self) -> float:
        """All points so far."""
        return round(sum(line.earned or 0 for line in self.lines), 2)

    def form(self) -> dict[str, Any]:
        """The form for the marker."""
        return forms.blank(self.lines, self.papers, self.notes)

    def merge(self, form: dict[str, Any]) -> None:
        """Take over what the marker filled in."""
        lifted = tuple(form.get("lift", ()))
        if lifted:
            self.lines = Rubric.load().mark(self.tests, self.tests, lifted)
        self.lines = forms.merged(self.lines, form)

    def to_dict(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in ("name", "problem", "notes", "papers", "walls", "seconds")}
        return {"warning": self.warning, **data,
                "automatic": self.automatic, "automatic_most": self.automatic_most, "total": self.total,
                "marked": self.marked, "lines": [asdict(line) for line in self.lines],
                "tests": {test: asdict(outcome) for test, outcome in self.tests.items()}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Grade:
        return cls(data["name"], [Line(**{**line, "failed": tuple(line["failed"])}) for line in data["lines"]],
                   {test: Outcome(**outcome) for test, outcome in data["tests"].items()}, data["problem"],
                   data["notes"], data["papers"], data["walls"], data["seconds"], data.get("warning", ""))


def grade_one(source: Path, teacher: Path, seed: str, limits: Limits = LIMITS, only: tuple[str, ...] = (),
              show_seed: bool = False, given: Path | None = None,
              progress: Callable[[str], None] = lambda text: None, out: Path | None = None) -> Grade:
    """Grade a folder or a zip file. ``only``: parts of names of the tests to run, for trying things out; ``given``: the
    students' starter/ as it was handed out, whose functions are nobody's own; ``out``: where results go, which no
    submission may read (make the folder before: what is not there cannot be covered)."""
    began = time.monotonic()
    grade = Grade(source.stem if source.suffix.lower() == ".zip" else source.resolve().name)
    try:
        with tempfile.TemporaryDirectory(prefix="grade-", ignore_cleanup_errors=True) as folder:
            work = Path(folder).resolve()
            submission = take(source, teacher, work)
            if given:
                submission.notes += changed(submission.tree / "starter", given, teacher / "starter")
            hide = (source.resolve().parent, out or source.resolve().parent)  # where the others and their results lie
            box = Sandbox(submission.tree, work / "scratch", limits, hide)
            progress("its code")
            grade.prints = read_code(submission, teacher, given, box)
            _grade(grade, submission, teacher, box, seed, only, show_seed, progress)
    except BadSubmission as error:
        grade.problem, grade.tests = str(error), {}
    except Exception as error:  # a class goes on, and the teacher is told; points that are known by then stay
        grade.problem = f"the grader failed: {type(error).__name__}: {error}"
    grade.problem = bounded(clean(grade.problem), 1_000)
    if not grade.lines:
        grade.lines = Rubric.load().mark(grade.tests, grade.tests)
    grade.seconds = round(time.monotonic() - began, 1)
    return grade


def _grade(grade: Grade, submission: Submission, teacher: Path, box: Sandbox, seed: str, only: tuple[str, ...],
           show_seed: bool, progress: Callable[[str], None]) -> None:
    grade.notes, grade.walls = [one_line(note) for note in submission.notes], box.walls
    grade.warning = warning(not box.namespaces, only)
    before = digest(submission.tree)
    public, hidden = all_tests(teacher)
    until = time.monotonic() + box.limits.all
    for ids, purpose in ((public, "public"), (hidden, "hidden")):
        ids = [test for test in ids if not only or any(word in test for word in only)]
        mine, judges = (Draw(sha(purpose, secret), secret if show_seed else None) for secret in (inner(seed), seed))
        grade.tests |= run_tests(box, teacher, ids, mine, judges, until, progress)
    if not only or any(word in "Commands" for word in only):
        progress("its commands")
        grade.tests |= commands(box)
    if digest(submission.tree) != before:
        raise BadSubmission("it changed the copy of the tests while it ran")
    grade.lines = Rubric.load().mark(grade.tests, grade.tests)
    progress("its papers")
    grade.papers = read_papers(submission.papers, teacher, box)


def all_tests(teacher: Path) -> tuple[list[str], list[str]]:
    """Ids of the public tests, without those of what is given, and of the hidden ones."""
    code = ("import json, sys; sys.path.insert(0, 'acceptance'); from acceptance.child import all_tests, is_given; "
            "from hidden import listed; "
            "print(json.dumps([[test for test in all_tests() if not is_given(test)], list(listed())]))")
    done = subprocess.run([sys.executable, "-c", code], cwd=teacher, capture_output=True, encoding="utf-8", check=True)
    public, hidden = json.loads(done.stdout)
    return public, hidden


def sha(purpose: str, seed: str) -> str:
    return hashlib.sha256(f"{purpose} tests/{seed}".encode()).hexdigest()


def hidden_digest(seed: str) -> str:
    """As ``acceptance/hidden.py`` makes it, so that its command draws the same tests."""
    return sha("hidden", seed)


def inner(seed: str) -> str:
    """What is drawn from inside the submission's process, where its digest can be read: another secret."""
    return f"inside/{seed}"


def digest(folder: Path) -> str:
    """Of names and contents of all files."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def commands(box: Sandbox) -> dict[str, Outcome]:
    """C1, C3 and C4 on the standard library alone: do they end with status 0? (C2 is the students' own tests.)"""
    found = {}
    sources = [str(path.relative_to(box.tree)) for path in sorted(box.tree.glob("starter/*.py"))]
    for name, script in (("C1", ["scripts/verify_scaffold.py"]), ("C3", [box.own("syntax.py"), *sources]),
                         ("C4", ["starter/driver.py", "--fixture", "fixtures/tiny_model.json"])):
        said: deque[bytes] = deque(maxlen=8)  # a line is at most 1 MiB; who prints without end costs no more
        box.scratch.mkdir(exist_ok=True)
        errors: list[str] = []
        ended = run_lines(box.command(*script, alone=True), None, box.limits.start + box.limits.test, said.append, box,
                          said=errors)
        good = ended == "ended with status 0"
        text = b"".join(said).decode(errors="replace") + "".join(errors)
        message = "" if good else f"happened: {' '.join(script)} {ended}; it said last:\n{text[-TOLD:]}"
        found[f"Commands.{name}"] = Outcome("passed" if good else "failed", as_told(message, box, TEACHER))
    return found


def read_code(submission: Submission, teacher: Path, given: Path | None, box: Sandbox) -> Fingerprint | None:
    """The fingerprint of its code, and notes of what the marker should look at; behind walls, with their limits, since
    a parser can be made slow."""
    visible = teacher / "starter"
    if given and not given.resolve().is_relative_to(teacher.resolve()):  # what was handed out may be out of sight there
        visible = box.scratch.parent / "given"
        shutil.copytree(given, visible, ignore=shutil.ignore_patterns("__pycache__"))
    notes: list[str] = []
    numbers: set[int] = set()
    whole: list[bool] = []

    def take_line(line: bytes) -> None:
        kind, *content = json.loads(line)
        if kind == "notes":
            notes.extend(content[0])
        elif kind == "numbers":
            numbers.update(content[0])
        whole.extend([True] * (kind == "done"))

    box.scratch.mkdir(exist_ok=True)
    command = box.command(str(HERE / "read_code.py"), str(submission.tree / "starter"), str(visible), str(teacher),
                          trusted=True)
    ended = run_lines(command, None, CODE_SECONDS, take_line, box)
    if visible.parent == box.scratch.parent:
        shutil.rmtree(visible, ignore_errors=True)
    submission.notes += notes
    if not whole:
        submission.notes.append(f"its code was not read to the end, for notes and for likeness: reading it {ended}")
    return Fingerprint(frozenset(numbers)) if whole else None


def read_papers(papers: Path, teacher: Path, box: Sandbox) -> dict[str, Any]:
    """What ``check_papers.py`` finds, behind walls: the files are a student's."""
    said: deque[bytes] = deque(maxlen=8)
    box.scratch.mkdir(exist_ok=True)
    command = box.command(str(HERE / "check_papers.py"), str(papers), str(teacher), trusted=True)
    ended = run_lines(command, None, PAPER_SECONDS, said.append, box)
    try:
        found: dict[str, Any] = json.loads(b"".join(said))
        return found
    except ValueError:
        return {**NO_PAPERS, "design": {**NO_PAPERS["design"], "problem": f"reading the papers {ended}"}}
