"""Many submissions side by side, on whatever runs functions: threads here, or the executor of a cluster.

    outcome = grade_class(paths, teacher, seed, executor, on_grade=print)

``executor`` is any ``concurrent.futures.Executor``: each submission is one call of a function with plain arguments and
a plain result, so a process pool, Dask (``Client(...).get_executor()``) or MPI will do; the workers need the teacher's
tree and the submissions under the same paths. Whatever happens to one submission, the others are graded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .grade import LIMITS, Grade, grade_one
from .plain import one_line
from .results import number, sheet, table
from .rubric import Rubric
from .sandbox import Limits
from .similarity import Fingerprint, Pair, fingerprint, grouped, near_pairs

COMPLETE = "(the complete engine)"
SHOWN = 40  # lines about those that are alike
CLASS_FILES = ("class.csv", "summary.txt", "alike.csv")  # beside the folders of the submissions
LONGEST = 100  # characters of a folder's name


@dataclass
class ClassGrades:
    """All grades, in the order of the submissions, and what is seen in them together."""

    grades: list[Grade]
    pairs: list[Pair] = field(default_factory=list)
    seconds: float = 0.0

    def csv(self) -> str:
        """The table."""
        return table(self.grades)

    def alike(self) -> str:
        """All pairs that are alike, as a table."""
        return sheet(("share", "one", "other"),
                     ({"share": f"{share:.3f}", "one": a, "other": b} for share, a, b in self.pairs))

    def files(self) -> dict[str, str]:
        """What is said of the class: names of files, and what is in them."""
        return dict(zip(CLASS_FILES, (self.csv(), self.summary(), self.alike())))

    def summary(self) -> str:
        """How the class did, which tests fail most, and which submissions are alike."""
        points = sorted(grade.automatic for grade in self.grades if grade.tests or not grade.problem) or [0.0]
        rows = list(dict.fromkeys(grade.warning for grade in self.grades if grade.warning))
        rows += [f"{len(self.grades)} submissions in {self.seconds:.0f} seconds; automatic points: lowest "
                f"{number(points[0])}, median {number(points[len(points) // 2])}, highest {number(points[-1])}"]
        if bad := [grade for grade in self.grades if grade.problem]:
            rows += ["", "Not graded", *(f"  {grade.name}: {grade.problem}" for grade in bad)]
        failed = Counter(test for grade in self.grades for test, outcome in grade.tests.items()
                         if outcome.state != "passed")
        if failed:
            most = sorted(failed.items(), key=lambda item: (-item[1], item[0]))[:25]
            rows += ["", "Tests that fail most", *(f"  {count:4}  {test}" for test, count in most)]
        if self.pairs:
            alike = grouped(self.pairs, COMPLETE)
            rows += ["", f"Alike, to be read side by side (all {len(self.pairs)} pairs: alike.csv)"]
            rows += [f"  {share:4.0%}  {names}" for share, names in alike[:SHOWN]]
            rows += [f"  and {len(alike) - SHOWN} more lines"] * (len(alike) > SHOWN)
        if noted := [grade for grade in self.grades if grade.notes]:
            rows += ["", "To look at"]
            rows += [f"  {grade.name}: {note}" for grade in noted for note in grade.notes[:20]]
        return "\n".join(map(one_line, rows)) + "\n"


def grade_class(paths: Iterable[Path], teacher: Path, seed: str, executor: Executor, limits: Limits = LIMITS,
                only: tuple[str, ...] = (), show_seed: bool = False, given: Path | None = None,
                on_grade: Callable[[Grade], None] = lambda grade: None, out: Path | None = None) -> ClassGrades:
    """Grade all; ``on_grade`` hears of each when it is done. ``given``: the students' starter/ as it was handed out;
    ``out``: the folder of the results, which is there already and which no submission may read."""
    began, names = time.monotonic(), distinct_names(list(paths))
    given = given or teacher / "starter"
    more: dict[str, Any] = {"out": out} if out else {}
    futures = {executor.submit(grade_one, path, teacher, seed, limits, only, show_seed, given, **more): name
               for path, name in names.items()}
    grades: dict[str, Grade] = {}
    for future in as_completed(futures):
        name = futures[future]
        try:
            grade = future.result()
        except Exception as error:  # a worker that died, say
            grade = Grade(name, Rubric.load().mark({}, []),
                          problem=f"its worker failed: {type(error).__name__}: {error}")
        grade.name = name
        grades[name] = grade
        on_grade(grade)
    prints: dict[str, Fingerprint] = {grade.name: grade.prints for grade in grades.values() if grade.prints}
    prints[COMPLETE] = fingerprint(teacher / "starter", given)
    return ClassGrades([grades[name] for name in names.values()], near_pairs(prints, COMPLETE),
                       time.monotonic() - began)


def distinct_names(paths: list[Path]) -> dict[Path, str]:
    """A name for each submission, which its folder of results can have: that of its own folder or file, with its
    parent's where two have the same. One that is taken all the same, by a file of the class, say, gets a number. Upper
    and lower case are one: they are on many file systems."""
    plain = {path: _safe(path.stem if path.suffix.lower() == ".zip" else path.resolve().name) for path in paths}
    times = Counter(name.casefold() for name in plain.values())
    taken, found = {name.casefold() for name in CLASS_FILES}, {}
    for path, name in plain.items():
        if times[name.casefold()] > 1:
            name = _safe(f"{path.resolve().parent.name}-{path.name}")
        free, tries = name, 1
        while free.casefold() in taken:
            tries += 1
            free = f"{name}-{tries}"
        taken.add(free.casefold())
        found[path] = free
    return found


def _safe(name: str) -> str:
    """A name without control characters, that leads nowhere else."""
    return one_line(name).replace("?", "_").strip(". ")[:LONGEST] or "submission"
