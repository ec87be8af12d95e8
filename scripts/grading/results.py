"""A grade in words, as JSON and as a row of a class's table.

    write(grade, folder)     result.txt, result.json, results.json, github.json, row.csv, marker.json
"""

from __future__ import annotations

import csv
import io
import json
import os
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import github_classroom, gradescope
from .grade import Grade
from .plain import clean, one_line
from .rubric import SECTIONS, Line

FIELDS = ("submission", "total", "automatic", *SECTIONS, "tests passed", "tests", "to look at", "seconds", "problem",
          "warning")


def number(value: float) -> str:
    """8.0 as 8."""
    return f"{value:g}"


def text(grade: Grade) -> str:
    """For people. No seed is in it unless the messages hold one."""
    rows = [grade.warning] * bool(grade.warning)
    rows += [f"{one_line(grade.name)}: {number(grade.automatic)} of {number(grade.automatic_most)} automatic points"
            + (f", {number(grade.total)} of 100 in all" if grade.marked else
               f"; {number(100 - grade.automatic_most)} are the marker's")]
    if grade.problem:
        rows += ["", f"Not graded: {one_line(grade.problem)}"]
    for section, (title, points) in SECTIONS.items():
        rows += ["", f"{title} ({points})"]
        for line in grade.lines:
            if line.section == section:
                rows.append(f"  {_points(line):>14}  {line.name}{_tests(line)}{f': {line.note}' if line.note else ''}")
    failed = [(test, outcome) for test, outcome in grade.tests.items() if outcome.state != "passed"]
    if failed:
        rows += ["", "Tests that did not pass"]
        for test, outcome in failed:
            message = textwrap.indent(clean(outcome.message).rstrip(), "  ")  # no line of it is one of these
            rows += ["", f"{outcome.state.upper()} {test}", message]
    if grade.walls:
        rows += ["", f"Run behind these walls: {', '.join(grade.walls)}. {number(grade.seconds)} seconds."]
    return "\n".join(rows) + "\n"


def _points(line: Line) -> str:
    return f"{'...' if line.earned is None else number(line.earned)} of {number(line.points)}"


def _tests(line: Line) -> str:
    return "" if line.marker else f", {line.passed} of {line.tests} tests"


def notes(grade: Grade) -> str:
    """What is for the marker's eyes, and in no file for students."""
    rows = [f"To look at in {grade.name}", "", *(f"- {note}" for note in grade.notes)] if grade.notes else []
    rows = [one_line(row) for row in rows]
    return "\n".join(rows) + "\n" * bool(rows)


def row(grade: Grade) -> dict[str, Any]:
    """A submission's row in the table of a class."""
    by_section = {section: number(sum(line.earned or 0 for line in grade.lines if line.section == section))
                  for section in SECTIONS}
    passed = sum(outcome.state == "passed" for outcome in grade.tests.values())
    points = {"total": number(grade.total), "automatic": number(grade.automatic), **by_section}
    if grade.problem and not grade.tests:
        points = dict.fromkeys(points, "")  # nothing is known of it: that is no zero
    return {"submission": grade.name, **points, "tests passed": passed, "tests": len(grade.tests),
            "to look at": len(grade.notes), "seconds": number(grade.seconds), "problem": grade.problem,
            "warning": grade.warning}


def table(grades: Iterable[Grade]) -> str:
    """CSV of a class."""
    return sheet(FIELDS, map(row, grades))


def sheet(fields: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """CSV. A cell that a spreadsheet would take for a formula begins with an apostrophe."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(fields), lineterminator="\n")
    writer.writeheader()
    for cells in rows:
        writer.writerow({name: f"'{value}" if str(value)[:1] in ("=", "+", "-", "@") else value
                         for name, value in cells.items()})
    return file.getvalue()


def write(grade: Grade, folder: Path) -> None:
    """All forms of one grade. A form that the marker has begun stays as it is; what was not graded needs none."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"result.txt": text(grade), "result.json": _json(grade.to_dict()),
             "results.json": _json(gradescope.results(grade)), "github.json": _json(github_classroom.results(grade)),
             "row.csv": table([grade]), "notes.txt": notes(grade)}
    if not (folder / "marker.json").exists() and not grade.marked and not grade.problem:
        files["marker.json"] = _json(grade.form())
    for name, content in files.items():
        save(folder / name, content)


def save(path: Path, content: str) -> None:
    """Write text, beside the file and then in its place, so that a full disk cuts no earlier result. Control characters
    that are still in it, in names, say, become question marks."""
    content = "\n".join(one_line(row.replace("\t", " ")) for row in content.split("\n"))
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(content, encoding="utf-8", errors="backslashreplace", newline="\n")
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


def _json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
