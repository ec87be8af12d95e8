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
names them: on Linux with util-linux namespaces and resource limits, elsewhere an audit hook, time and disk limits, so
that a class that means harm is best graded on Linux, in a container or under a user of its own.

Exit code 0: graded, whatever the points. 1: something could not be graded, or --check found a wrong mark. 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.grading import gradescope, results
from scripts.grading.class_run import grade_class
from scripts.grading.form import FormError
from scripts.grading.grade import Grade
from scripts.grading.sandbox import Limits
from scripts.release_student import release
from starter.console import EXIT_BAD_INPUT, EXIT_DIFFERS, EXIT_OK, guarded, run_program
from starter.errors import RequestError


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("submissions", nargs="*", type=Path, metavar="SUBMISSION", help="a folder or a zip file")
    parser.add_argument("--seed", metavar="SECRET", help="what tests are drawn from; - reads it from standard input")
    parser.add_argument("--out", type=Path, default=Path("grades"), metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), metavar="N",
                        help="submissions at a time; each keeps two cores busy")
    parser.add_argument("--time", type=int, default=Limits.all, metavar="SECONDS", help="for all tests of a submission")
    parser.add_argument("--memory", type=int, default=Limits.memory >> 20, metavar="MIB")
    parser.add_argument("--tests", action="append", default=[], metavar="PART", help="only tests with this in the name")
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
    seed = sys.stdin.readline().strip() if options.seed == "-" else options.seed
    if not seed:
        parser.error("--seed is missing: any text that students do not know, or - to read it from standard input")
    if options.gradescope:
        return guarded(lambda: build(options.gradescope, seed))
    if not options.submissions or options.jobs < 1:
        parser.error("name at least one submission, and at least one job")
    return guarded(lambda: grade(options, seed))


def grade(options, seed):
    """Grade all, write each as soon as it is done, then what is seen in them together."""
    limits = Limits(all=options.time, memory=options.memory << 20)

    def done(one):
        results.write(one, options.out / one.name)
        came_to = one.problem or f"{one.automatic:g} of {one.automatic_most:g} automatic points"
        print(f"{one.name}: {came_to}", flush=True)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        given = Path(folder, "given")
        release(given)
        found = grade_class(options.submissions, ROOT, seed, pool, limits, tuple(options.tests), options.show_seed,
                            given / "starter", done)
    if len(found.grades) == 1:
        print(results.text(found.grades[0]), end="")
    else:
        (options.out / "class.csv").write_text(found.csv(), encoding="utf-8", newline="\n")
        (options.out / "summary.txt").write_text(found.summary(), encoding="utf-8", newline="\n")
        print(found.summary(), end="")
    return EXIT_DIFFERS if any(one.problem for one in found.grades) else EXIT_OK


def merge(folder):
    """Let every filled-in form below a folder join its result."""
    graded, problems = [], 0
    for path in sorted(folder.rglob("marker.json")):
        one = Grade.from_dict(json.loads(path.with_name("result.json").read_text(encoding="utf-8")))
        try:
            one.merge(json.loads(path.read_text(encoding="utf-8")))
        except (FormError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            problems += 1
            continue
        results.write(one, path.parent)
        graded.append(one)
        print(f"{one.name}: {one.total:g} of 100")
    if not graded and not problems:
        raise RequestError(f"there is no marker.json below {folder}: grade first")
    if len(graded) > 1:
        (folder / "class.csv").write_text(results.table(graded), encoding="utf-8", newline="\n")
    return EXIT_BAD_INPUT if problems else EXIT_OK


def build(out, seed):
    """The autograder for Gradescope."""
    number = gradescope.build(out, ROOT, seed)
    print(f"{out}: {number} files; upload it as the assignment's autograder. It holds the seed: keep it to yourself.")
    return EXIT_OK


if __name__ == "__main__":
    run_program(main)
