"""Runs acceptance tests in a process of their own, a line of JSON for each: what an engine does to its process, an exit
with status 0 included, then costs it the tests that it kept from running, and nothing else.

    outcomes = run_apart(["M2KVCache.test_dirty_pages", ...])     {test id: Outcome}, in order

Against an engine that means harm (one that writes the lines itself, say) this is no protection; a grader needs walls.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from harness import HANG_SECONDS, SEED
from hidden import HIDDEN
from test_student_acceptance import MILESTONES

LINES = 12  # of standard error that are shown
START_SECONDS = 60  # that a process may take beside its tests


@dataclass(frozen=True)
class Outcome:
    """"passed", "failed" or "skipped", and the message."""

    state: str
    message: str = ""


def all_tests():
    """Ids of all acceptance tests: "M1Reference.test_golden_sequences", ..."""
    return [f"{case.__name__}.{name}" for case in MILESTONES
            for name in unittest.defaultTestLoader.getTestCaseNames(case)]


def is_given(test_id):
    """Is what it tests given to the students?"""
    case, name = test_id.split(".")
    return any(hasattr(getattr(owner, name), "given") for owner in MILESTONES if owner.__name__ == case)


def run_here(ids, variant=None):
    """Yield (id, Outcome) of each test, with the engine as it is, or with a variant of it (acceptance/wrong)."""
    cases = {case.__name__: case for case in (*MILESTONES, *HIDDEN)}
    with variant.installed() if variant else nullcontext():
        for test_id in ids:
            case, name = test_id.split(".")
            result = unittest.TestResult()
            cases[case](name).run(result)
            yield test_id, _outcome(result)


def _outcome(result):
    if result.failures or result.errors:
        [(_, report), *_] = result.failures + result.errors
        message = report.partition("AssertionError: ")[2].strip()
        return Outcome("failed", message or "happened: " + "\n  ".join(report.strip().splitlines()[-1:-4:-1]))
    return Outcome("skipped", result.skipped[0][1]) if result.skipped else Outcome("passed")


def run_apart(ids, variant="", environment=None):
    """Run the tests in a child process; in a further one what a test that ended its process left over."""
    outcomes, left = {}, list(ids)
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "outcomes.jsonl")
        while left:
            lines.write_text("", encoding="utf-8")
            ended = _run_child(lines, variant, left, {"P07_SEED": SEED, **(environment or {})})
            for line in lines.read_text(encoding="utf-8").splitlines():
                test_id, state, message = json.loads(line)
                outcomes[test_id] = Outcome(state, message)
            left = [test_id for test_id in left if test_id not in outcomes]
            if left:
                how, said = ended
                outcomes[left.pop(0)] = Outcome("failed", f"happened: the process {how} before this test did\n"
                                                f"  hint:     an engine raises errors; it ends no process{said}")
    return {test_id: outcomes[test_id] for test_id in ids}


def _run_child(lines, variant, ids, environment):
    try:
        done = subprocess.run([sys.executable, str(HERE / "child.py"), str(lines), variant, *ids], cwd=HERE.parent,
                              env={**os.environ, **environment}, capture_output=True, check=False,
                              timeout=START_SECONDS + 2 * HANG_SECONDS * len(ids))
    except subprocess.TimeoutExpired as late:
        return "did not end in time and was stopped", last_lines(late.stderr or b"")
    return ended(done.returncode), last_lines(done.stderr)


def ended(status):
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name} ({(signal.strsignal(-status) or '').lower()})"
    except ValueError:
        return f"was ended by signal {-status}"


def last_lines(raw):
    """The last lines on standard error, as a part of a message. What a crash leaves there names the line of Python."""
    rows = raw[-8_000:].decode(errors="replace").rstrip().splitlines()
    crash = next((i for i, row in enumerate(rows) if row.startswith("Fatal Python error")), len(rows) - LINES)
    rows = rows[max(0, crash):][:LINES]  # what a crash leaves there begins with the innermost call
    rows = ["".join(c if c.isprintable() or c == "\t" else "?" for c in row)[:200] for row in rows]
    return "".join(f"\n  {row}" for row in ["stderr:   the last lines of it:", *rows]) if rows else ""


def main(lines, variant, *ids):
    """In the child."""
    faulthandler.enable()  # after a crash standard error says where in Python it was
    chosen = None
    if variant:
        from acceptance.wrong.mistake import find
        chosen = find(variant)
    with open(lines, "a", encoding="utf-8") as file:
        for test_id, outcome in run_here(ids, chosen):
            file.write(json.dumps([test_id, outcome.state, outcome.message]) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
