"""Runs the tests of a submission, first inside its process, then outside of it: {test: Outcome}.

A test passes if both say so. Each draws its scenarios from a digest of its own: the one inside can be read by the
submission, and says nothing about the other, whose scenarios count. What was not run for want of time, or not said, has
failed. When a process ends before it should, the test that it was at has failed, and the others go on in another one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from time import monotonic

from .plain import bounded, clean
from .sandbox import HERE, PYTHON, Sandbox, run_lines

JUDGE = 1 << 30  # bytes that the judge has at least
LINES = 12  # of standard error that are shown
STATES = ("passed", "failed", "skipped")
MOST = 4_000  # bytes of a message
ALONE = ("M6EndToEnd.test_driver",)  # starts the submission's driver as a program, which only the judge may


@dataclass(frozen=True)
class Outcome:
    """"passed", "failed" or "skipped", and what there is to say."""

    state: str
    message: str = ""


@dataclass(frozen=True)
class Draw:
    """What tests draw from. ``shown``: the secret that the digest was made of, if the teacher wants to see it."""

    seed: str
    shown: str | None = None


def run_tests(box: Sandbox, teacher: Path, ids: list[str], mine: Draw, judges: Draw, until: float,
              progress=lambda text: None) -> dict[str, Outcome]:
    """Run tests against the submission in a sandbox; there is time ``until`` then, by the monotonic clock. ``mine``:
    what the submission's own process may know."""
    progress(f"{len(ids)} tests inside its process")
    outcomes = _run(_inside, [test for test in ids if test not in ALONE], box, teacher, mine, until)
    left = [test for test in ids if test in ALONE or outcomes[test].state == "passed"]
    progress(f"{len(left)} tests from outside")
    for test, outcome in _run(_outside, left, box, teacher, judges, until).items():
        if test not in ALONE and outcome.state != "passed":
            outcome = replace(outcome, message="happened: it passes in one process with the tests, and not when it is "
                              f"watched from another, on other draws\n  {outcome.message}")
        outcomes[test] = outcome
    return {test: outcomes[test] for test in ids}


def told(message: str, test: str, draw: Draw) -> str:
    """A message with the command that its reader can run; what was drawn from stands in it only where the teacher wants
    to see it."""
    seed, shown = draw.seed, draw.shown
    command, hidden = f"acceptance {test} --seed {seed}", test.startswith("Hidden")
    if shown:
        return message.replace(command, f"acceptance hidden {test} --seed {shown!r} --show-seed") if hidden else message
    open_command = f"acceptance hidden {test.rpartition('_')[0]} --seed <one of your own>"
    return message.replace(command, open_command if hidden else f"acceptance {test}").replace(seed, "(hidden)")


def _run(way, ids, box, teacher, draw, until):
    outcomes: dict[str, Outcome] = {}
    left, limits = list(ids), box.limits
    while left:
        seconds = min(until - monotonic(), limits.start + (limits.test + 5) * len(left))
        if seconds <= 0:
            return {**outcomes, **{test: Outcome("failed", f"happened: not run: all tests together may take "
                                                 f"{limits.all} seconds") for test in left}}
        shutil.rmtree(box.scratch, ignore_errors=True)
        box.scratch.mkdir(parents=True)
        command, job, accept = way(box, teacher, left, draw.seed)
        why: list[str] = []
        errors: list[str] = []
        ended = run_lines(command, job, seconds, partial(_take, accept, left, outcomes, why), box,
                          limits.start + 2 * limits.test, errors)
        for test in left:  # one that ended the submission's process, beside the judge's
            if test in outcomes and "the submission's process: it has ended" in outcomes[test].message:
                outcomes[test] = replace(outcomes[test], message=outcomes[test].message + last(errors))
        left = [test for test in left if test not in outcomes]
        if left:
            happened = "".join(why) or f"the process {ended} before this test did"
            outcomes[left.pop(0)] = Outcome("failed", f"happened: {happened}\n"
                                            f"  hint:     an engine raises errors; it ends no process{last(errors)}")
    return {test: replace(outcome, message=as_told(told(outcome.message, test, draw), box, teacher))
            for test, outcome in outcomes.items()}


def as_told(message: str, box: Sandbox, teacher: Path) -> str:
    """A message for the submission's owners: of a bounded size, without control characters and without the places of
    this machine. Files of theirs are named as they handed them in."""
    work = box.scratch.parent
    for place, name in ((box.tree, ""), (box.scratch, "scratch/"), (work, "work/"), (teacher.resolve(), ""),
                        *((python, "python/") for python in PYTHON), (Path.home(), "~/")):
        if len(place.parts) > 1:
            message = message.replace(f"{place}{os.sep}", name).replace(str(place), name.rstrip("/") or ".")
    return bounded(clean(message), MOST)


def last(errors: list[str]) -> str:
    """The last lines on standard error, as a part of a message."""
    rows = "".join(errors).rstrip().splitlines()
    crash = next((i for i, row in enumerate(rows) if row.startswith("Fatal Python error")), len(rows) - LINES)
    rows = rows[max(0, crash):][:LINES]  # what a crash leaves there begins with the innermost call
    return "".join(f"\n  {row[:200]}" for row in ["stderr:   the last lines of it:", *rows]) if rows else ""


def _take(accept, ids, outcomes, why, line):
    """Believe a line if it is one: the first that is said of a test. A line about no test says why it was the last."""
    try:
        test, state, message = accept(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return
    if test is None:
        why.append(str(message)[:MOST])
    elif test in ids and test not in outcomes and state in STATES and isinstance(message, str):
        outcomes[test] = Outcome(state, message[:MOST])


def _inside(box, teacher, ids, seed):
    token = token_hex(16)
    job = {"token": token, "tree": str(box.tree), "ids": ids, "seed": seed, "hang": box.limits.test, "python": None}

    def accept(said):
        if said[0] != token:
            raise ValueError
        return said[1:]

    return box.command(box.own("run_in_process.py")), job, accept


def _outside(box, teacher, ids, seed):
    job = {"tree": str(box.tree), "teacher": str(teacher), "scratch": str(box.scratch), "ids": ids, "seed": seed,
           "hang": box.limits.test, "memory": max(box.limits.memory, JUDGE),
           "worker": box.command(box.own("worker.py"), str(box.tree), nested=True),
           "python": box.python()}
    return box.enclose([sys.executable, str(HERE / "judge.py")]), job, list
