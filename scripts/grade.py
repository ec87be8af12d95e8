"""Grade submissions by rubric.md: a folder or zip file with starter/ and the papers, or a class of them.

    python3 scripts/grade.py SUBMISSION --seed SECRET                   one, into grades/SUBMISSION/
    python3 scripts/grade.py CLASS/* --seed SECRET --jobs 4 --out F     a class: F/class.csv, F/summary.txt, F/NAME/...
    printf '%s\\n' SECRET | python3 scripts/grade.py CLASS/* --seed -   the seed in no command line
    python3 scripts/grade.py --merge F                                  marker.json is filled in: its points join
    python3 scripts/grade.py --gradescope OUT.zip --seed SECRET         an autograder to upload
    python3 scripts/grade.py --check                                    proves the marks of a class of good and bad ones

Written for each: result.txt (people), result.json (all), results.json (Gradescope), github.json (GitHub Classroom),
row.csv, marker.json (the form for what a person judges) and notes.txt (for the marker alone). No seed is in any of them
without --show-seed.

Only starter/ of a submission counts; tests and fixtures are the teacher's. Each test runs twice: in one process with
the submission, as students run it, and with the submission in a process of its own, watched by a judge that none of its
code runs in (scripts/grading/wire.py). It counts if it passes both times. What is skipped, missing, late or crashed has
failed. The walls around the submission are those that the system offers (scripts/grading/sandbox.py), and result.txt
names them: on Linux with util-linux namespaces, a filter of system calls and resource limits, elsewhere an audit hook,
time and disk limits. Without namespaces nothing is graded but with --unsafe, and every output begins by saying so.

Exit code 0: graded, whatever the points. 1: something could not be graded, or --check found a wrong mark. 2: bad input.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036  # before any line that such a Python could not run
    sys.exit(f"Python 3.10 or newer is needed; this is {'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from acceptance.seeds import plain_seed
from scripts.grading import gradescope, results
from scripts.grading.class_run import grade_class
from scripts.grading.form import FormError, OpenForm, checked
from scripts.grading.grade import Grade, all_tests
from scripts.grading.plain import one_line
from scripts.grading.plain import warning as warning_of
from scripts.grading.sandbox import Limits, has_namespaces, stop_all
from scripts.release_student import release
from starter.base.console import EXIT_BAD_INPUT, EXIT_DIFFERS, EXIT_OK, Console, guarded, run_program
from starter.errors import RequestError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("submissions", nargs="*", type=Path, metavar="SUBMISSION", help="a folder or a zip file")
    parser.add_argument("--seed", metavar="SECRET", help="what tests are drawn from; - reads it from standard input")
    parser.add_argument("--out", type=Path, default=Path("grades"), metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), metavar="N",
                        help="submissions at a time; each keeps two cores busy")
    parser.add_argument("--time", type=int, default=Limits.all, metavar="SECONDS", help="for all tests of a submission")
    parser.add_argument("--memory", type=int, default=Limits.memory >> 20, metavar="MIB")
    parser.add_argument("--tests", action="append", default=[], metavar="PART", help="only tests with this in the name")
    parser.add_argument("--unsafe", action="store_true",
                        help="grade although this system has no namespaces: what is graded could read and change what "
                             "you can")
    parser.add_argument("--show-seed", action="store_true", help="messages hold what was drawn from: for teachers only")
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="add the points of filled-in forms in this folder")
    parser.add_argument("--gradescope", type=Path, metavar="OUT.zip", help="write an autograder for Gradescope")
    parser.add_argument("--check", action="store_true", help="grade a class whose marks are known")
    options = parser.parse_args(arguments)
    if options.merge:
        return guarded(lambda: merge(options.merge))
    if options.check:
        from scripts.grading.proof import check
        return guarded(lambda: check(options.jobs))
    try:
        seed = plain_seed(options.seed)
    except ValueError as error:
        parser.error(str(error))
    if not seed:
        parser.error("--seed is missing: any text that students do not know, or - to read it from standard input")
    if options.gradescope:
        return guarded(lambda: build(options.gradescope, seed))
    if not options.submissions or options.jobs < 1:
        parser.error("name at least one submission, and at least one job")
    if options.time < 1 or options.memory < 1:
        parser.error(f"--time {options.time} --memory {options.memory}: both must be at least 1")
    if not has_namespaces() and not options.unsafe:
        print("this system has no namespaces (Linux with util-linux has; in a container they may be forbidden), so a "
              "submission could read and change what you can: grade on one that has, or add --unsafe where you trust "
              "all submissions or the machine holds nothing else", file=sys.stderr)
        return EXIT_BAD_INPUT
    with stopping():
        return guarded(lambda: grade(options, seed))


@contextmanager
def stopping() -> Iterator[None]:
    """SIGTERM, as from a time limit of a CI job, ends the grader as Ctrl-C does: whatever runs behind walls ends first,
    and what was unpacked is removed."""
    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def grade(options: argparse.Namespace, seed: str) -> int:
    """Grade all, write each as soon as it is done, then what is seen in them together."""
    submissions, only = expanded(options.submissions), known(options.tests)
    options.out.mkdir(parents=True, exist_ok=True)
    limits = Limits(all=options.time, memory=options.memory << 20)

    console, unwritten = Console(sys.stdout), list[str]()
    warning = warning_of(not has_namespaces(), only)
    if warning:
        console.write(warning + "\n")

    def done(one: Grade) -> None:
        try:
            results.write(one, options.out / one.name)
        except OSError as error:  # a full disk, or a file in its folder's place: the others are graded all the same
            unwritten.append(one_line(f"{one.name}: its results cannot be written: {error}"))
            console.write(unwritten[-1] + "\n")
        points = f"{one.automatic:g} of {one.automatic_most:g} automatic points"
        came_to = "; ".join([one.problem] * bool(one.problem) + [points] * (bool(one.tests) or not one.problem))
        console.write(one_line(f"{one.name}: {came_to}") + "\n")

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        given = Path(folder, "given")
        release(given)
        try:
            found = grade_class(submissions, ROOT, seed, pool, limits, only, options.show_seed, given / "starter", done,
                                options.out.resolve())
        except BaseException:  # the pool waits for its threads
            stop_all()
            pool.shutdown(cancel_futures=True)
            raise
    if len(found.grades) == 1:
        console.write(results.text(found.grades[0]))
    else:
        for name, content in found.files().items():
            try:
                results.save(options.out / name, content)
            except OSError as error:
                unwritten.append(f"{name} cannot be written: {error}")
        console.write(found.summary())
    for problem in unwritten:
        print(one_line(problem), file=sys.stderr)
    return EXIT_DIFFERS if unwritten or any(one.problem for one in found.grades) else EXIT_OK


def expanded(paths: Iterable[Path]) -> list[Path]:
    """The submissions. The shell of Windows leaves * and ? to the program."""
    found: list[Path] = []
    for path in paths:
        if path.exists() or not set("*?") & set(str(path)):
            found.append(path)
        elif places := sorted(glob.glob(str(path))):
            found += map(Path, places)
        else:
            raise RequestError(f"{path}: there is no such folder or zip file")
    return found


def known(parts: Sequence[str]) -> tuple[str, ...]:
    """Parts of names of tests, if there are tests with each of them."""
    tests = [test for kind in all_tests(ROOT) for test in kind] if parts else []
    for part in parts:
        if part not in "Commands" and not any(part in test for test in tests):
            kinds = sorted({test.partition(".")[0] for test in tests})
            raise RequestError(f"--tests {part}: no test has this in its name; there are {', '.join(kinds)}, each with "
                               "its tests (M1Reference.test_greedy_generation), and Commands, which run together")
    return tuple(parts)


def merge(folder: Path) -> int:
    """Let every filled-in form below a folder join its result. Every submission keeps its row in the class's table."""
    grades = {path.parent: graded(path) for path in sorted(folder.rglob("result.json"))}
    forms = [place for place in grades if (place / "marker.json").is_file()]
    if not forms:
        raise RequestError(f"there is no marker.json below {folder}: grade first")
    still_open: list[str] = []
    problems = merged = 0
    for place in forms:
        one, path = grades[place], place / "marker.json"
        try:
            one.merge(checked(json.loads(path.read_text(encoding="utf-8-sig"))))
        except OpenForm:
            grades[place] = graded(place / "result.json")
            still_open += [one.name] * (not one.problem)
        except (FormError, ValueError) as error:
            grades[place] = graded(place / "result.json")
            print(f"{path}: {error}", file=sys.stderr)
            problems += 1
        else:
            results.write(one, place)
            merged += 1
            Console(sys.stdout).write(f"{one_line(one.name)}: {one.total:g} of 100\n")
    if len(grades) > 1 or (folder / "class.csv").is_file():
        results.save(folder / "class.csv", results.table(grades.values()))
    if still_open:
        print(f"still open, since lines have no points yet: {', '.join(still_open)}",
              file=sys.stdout if merged else sys.stderr)
    return EXIT_BAD_INPUT if problems or (still_open and not merged) else EXIT_OK


def graded(path: Path) -> Grade:
    """A result as it was written."""
    try:
        return Grade.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(f"{path} is no result of this program ({error}): grade that submission again") from None


def build(out: Path, seed: str) -> int:
    """The autograder for Gradescope."""
    number = gradescope.build(out, ROOT, seed)
    print(f"{out}: {number} files; upload it as the assignment's autograder. It holds the seed: keep it to yourself.")
    return EXIT_OK


if __name__ == "__main__":
    run_program(main)
