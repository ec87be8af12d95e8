"""GitHub Classroom: a grade as what a grading action hands to ``classroom-resources/autograding-grading-reporter``.

    results(grade)       the document, version 1
    encoded(grade)       as an action's output ``result``: base64 of it

The workflow that does so is ``classroom_workflow.yml`` beside this file: copy it to .github/workflows/classroom.yml of
the students' template. The seed stands in a secret of the organization (P07_GRADING_SEED), which reaches the step that
grades and no file. On a runner a student's workflow is the student's to change: what counts is the teacher's own run.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

from .plain import clean
from .rubric import SECTIONS, Line

if TYPE_CHECKING:
    from .grade import Grade

STATUS = {"passed": "pass", "failed": "fail", "skipped": "fail"}


def results(grade) -> dict[str, Any]:
    """A test for each line of the marking scheme that no person marks."""
    tests: list[dict[str, Any]] = [{"name": f"{SECTIONS[line.section][0]}: {line.name}",
              "status": "pass" if line.earned == line.points else "fail",
              "score": line.earned, "message": _message(line, grade), "test_code": "", "filename": "", "line_no": 0,
              "execution_time": 0}
             for line in grade.lines if not line.marker]
    if grade.warning and tests:
        tests[0]["message"] = "\n".join([grade.warning] + [tests[0]["message"]] * bool(tests[0]["message"]))
    status = "error" if grade.problem else "pass" if all(test["status"] == "pass" for test in tests) else "fail"
    return {"version": 1, "status": status, "max_score": grade.automatic_most, "tests": tests}


def _message(line: Line, grade: Grade) -> str | None:
    """What is wrong first: the log of a runner is read from the top."""
    if grade.problem or line.note:
        return clean(grade.problem or line.note)
    told = [f"{test}: {grade.tests[test].message}" for test in line.failed[:1] if test in grade.tests]
    return f"{len(line.failed)} of {line.tests} tests failed\n{clean(told[0])}"[:4_000] if told else None


def encoded(grade) -> str:
    """For ``echo "result=..." >> "$GITHUB_OUTPUT"``."""
    return base64.b64encode(json.dumps(results(grade)).encode()).decode()
