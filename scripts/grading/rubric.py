"""The marking scheme as a program reads it (``rubric.json``; ``rubric.md`` is the same for people), and points by it.

    rubric = Rubric.load()
    lines = rubric.mark({"M2KVCache.test_counters": Outcome("passed"), ...}, scored)

A line is worth ``points`` times the share of its tests that passed; a test that was skipped or did not run has failed.
``needs``: tests without which a line is worth nothing, so that what a skeleton can do earns nothing. A gate takes all
points of a section when one test passes and another fails, with ``hint`` in its message, which together show what is
forbidden (X2, X4, X5). Lines with ``marker`` are left to a person: see ``form.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parent / "rubric.json"
SECTIONS = {"functional": ("Functional correctness", 40), "faults": ("Faults and boundaries", 25),
            "performance": ("Performance and resources", 15), "structure": ("Structure and documents", 10),
            "report": ("Report and reflection", 10)}


@dataclass(frozen=True)
class Line:
    """A line of the marking scheme, and what a submission gets by it. ``earned`` is None until a person marked it."""

    section: str
    name: str
    points: float
    earned: float | None
    passed: int = 0
    tests: int = 0
    failed: tuple[str, ...] = ()
    note: str = ""
    marker: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _cause(outcome: Any) -> str:
    """What ended the process at a test, as a part of a note; "" if nothing did."""
    happened: str = getattr(outcome, "message", "").partition("happened: ")[2].partition("\n")[0]
    return f" ({happened[:160]})" if "process" in happened and ("ended" in happened or "stopped" in happened) else ""


@dataclass(frozen=True)
class Rubric:
    """All lines, as they stand in the table."""

    lines: list[dict[str, Any]]
    gates: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path = TABLE) -> Rubric:
        """Read the table."""
        table = json.loads(path.read_text(encoding="utf-8"))
        return cls(table["lines"], table["gates"])

    def tests_of(self, line: Mapping[str, Any], ids: Iterable[str]) -> list[str]:
        """Which of these tests a line counts."""
        return [test for test in ids if any(fnmatchcase(test, pattern) for pattern in line.get("tests", ()))]

    def mark(self, outcomes: Mapping[str, Any], ids: Iterable[str], lifted: tuple[str, ...] = ()) -> list[Line]:
        """Every line, with what was earned. ``ids``: all tests that count; one without outcome has failed. ``lifted``:
        gates that stay open."""
        ids = list(ids)
        passed = {test for test in ids if test in outcomes and outcomes[test].state == "passed"}
        closed: dict[str, str] = {}
        for gate in self.gates:
            shut = gate["passed"] in passed and gate["failed"] in ids and gate["failed"] not in passed
            if shut and gate["rule"] not in lifted and gate["hint"] in outcomes[gate["failed"]].message:
                closed.setdefault(gate["section"], f"{gate['rule']}: {gate['says']}")
        lines = []
        for line in self.lines:
            if line.get("marker"):
                lines.append(Line(line["section"], line["name"], line["points"], None, marker=True))
                continue
            mine = self.tests_of(line, ids)
            good = [test for test in mine if test in passed]
            missing = [test for test in line.get("needs", ()) if test not in passed]
            note = closed.get(line["section"]) or (
                f"nothing counts before {missing[0]} passes{_cause(outcomes.get(missing[0]))}" if missing else "")
            earned = 0.0 if note or not mine else round(line["points"] * len(good) / len(mine), 2)
            lines.append(Line(line["section"], line["name"], line["points"], earned, len(good), len(mine),
                              tuple(test for test in mine if test not in passed), note))
        return lines
