"""Gradescope (gradescope-autograders.readthedocs.io, "Specifications"): a grade as its results.json, and the zip file
to upload as an autograder.

    results(grade)                     the document
    build(out, teacher, seed)          OUT.zip: setup.sh, run_autograder, and the teacher's tree with the seed

Gradescope runs each submission in a container of its own, as root: the walls of ``sandbox.py`` stand inside of it.
Where it allows no namespaces, it is the container that holds the submission (--unsafe), and the result says so. What a
student sees are points, and messages without a seed; what the marker should look at goes to a test that stays hidden.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from .plain import bounded, clean
from .rubric import SECTIONS

SETUP = """#!/usr/bin/env bash
# Runs once, when the image is built. Python 3.10 or newer is all that is needed; util-linux brings the namespaces.
set -e
apt-get install -y python3 util-linux
"""
RUN = """#!/usr/bin/env bash
# Runs for each submission, in a container of its own. The seed is removed before the submission can look for it.
set -e
cd /autograder/source
seed=$(cat secret.txt)
rm secret.txt
printf '%s\\n' "$seed" |
    python3 scripts/grade.py /autograder/submission --seed - --unsafe --out /autograder/grade || true
cp /autograder/grade/*/results.json /autograder/results/results.json
"""
FILES = ("acceptance/*.py", "fixtures/*", "starter/**/*", "scripts/**/*", "docs/*.md", "tests/**/*.py", "*.md",
         "pyproject.toml", "LICENSE", ".gitignore")  # the teacher's tree: what is graded with, and what is handed out
MOST = 30_000  # bytes of a test's output
FORMATS = ("text", "html", "simple_format", "md", "ansi")
VISIBILITIES = ("hidden", "after_due_date", "after_published", "visible")
STAMP = (2000, 1, 1, 0, 0, 0)  # the same tree and seed give the same zip file


def results(grade) -> dict[str, Any]:
    """The document for Gradescope."""
    tests: list[dict[str, Any]] = []
    for line in grade.lines:
        if line.marker and line.earned is None:
            continue  # Gradescope's own rubric is for these
        failed = [f"{test}\n{grade.tests[test].message}" for test in line.failed if test in grade.tests]
        tests.append({
            "name": f"{SECTIONS[line.section][0]}: {line.name}", "score": line.earned, "max_score": line.points,
            "status": "passed" if line.earned == line.points else "failed", "output_format": "text",
            "output": bounded(clean("\n\n".join([line.note] * bool(line.note) + failed)), MOST),
            "visibility": "visible", "tags": [line.section]})
    if grade.notes:
        tests.append({"name": "To look at, for the marker", "score": 0, "max_score": 0, "output_format": "text",
                      "output": bounded(clean("\n".join(grade.notes)), MOST), "visibility": "hidden"})
    return {"score": grade.total, "execution_time": int(grade.seconds), "visibility": "visible",
            "stdout_visibility": "hidden", "output_format": "text", "tests": tests,
            "output": "\n".join([grade.warning] * bool(grade.warning) + [
                grade.problem or f"{grade.automatic:g} of {grade.automatic_most:g} automatic points"])}


def build(out: Path, teacher: Path, seed: str) -> int:
    """Write the autograder; how many files are in it."""
    files = {path for pattern in FILES for path in teacher.glob(pattern) if path.is_file()}
    content = {path.relative_to(teacher).as_posix(): path.read_bytes() for path in files
               if "__pycache__" not in path.parts}
    content.update({"setup.sh": SETUP.encode(), "run_autograder": RUN.encode(), "secret.txt": seed.encode() + b"\n"})
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(content):
            entry = zipfile.ZipInfo(name, STAMP)
            entry.external_attr = (0o755 if name in ("setup.sh", "run_autograder") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content[name])
    return len(content)
