"""The marking scheme: the same for people and programs, complete, and worth nothing to a skeleton."""

from __future__ import annotations

import json
import re
import unittest
from fnmatch import fnmatchcase

from scripts.grading import form
from scripts.grading.form import FormError, OpenForm
from scripts.grading.grade import NO_PAPERS, all_tests
from scripts.grading.rubric import SECTIONS, Rubric
from scripts.grading.runner import Outcome
from tests.paths import ROOT

PASSED, FAILED, SKIPPED = (Outcome(state) for state in ("passed", "failed", "skipped"))
COMMANDS = ["Commands.C1", "Commands.C3", "Commands.C4"]


def ids():
    public, hidden = all_tests(ROOT)
    return [*public, *hidden, *COMMANDS]


def shown(cell):
    """The tests that a cell of rubric.md names, as rubric.json writes them."""
    if cell.startswith("marker:"):
        return ["marker"]
    names = re.findall(r"`((?:M\d|Hidden)\w*(?:\.[\w*]+)?)`", cell)
    return sorted([name if "." in name else f"{name}.*" for name in names] + ["Commands.*"] * cell.startswith("C1"))


class Scheme(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rubric, cls.ids = Rubric.load(), ids()

    def test_rubric_md_says_the_same(self):
        text = (ROOT / "rubric.md").read_text(encoding="utf-8")
        told = {}
        for part in text.split("\n## ")[1:]:
            if found := re.match(r"(.*) \((\d+)\)\n", part):
                rows = [(int(points), shown(tests))
                        for points, tests in re.findall(r"^\| +(\d+) \|.*\| (.*) \|$", part, re.MULTILINE)]
                told[found[1]] = (int(found[2]), rows)
        own = {title: (points, [(line["points"], sorted(line.get("tests", ["marker"])))
                                for line in self.rubric.lines if line["section"] == section])
               for section, (title, points) in SECTIONS.items()}
        self.assertEqual(told, own)
        self.assertEqual(sum(points for points, _ in own.values()), 100)
        for points, rows in own.values():
            self.assertEqual(sum(mine for mine, _ in rows), points)

    def test_every_test_counts_and_every_pattern_is_of_a_test(self):
        patterns = [pattern for line in self.rubric.lines for pattern in line.get("tests", ())]
        for test in self.ids:
            self.assertTrue(any(fnmatchcase(test, pattern) for pattern in patterns), f"{test} counts nowhere")
        for pattern in patterns + [test for line in self.rubric.lines for test in line.get("needs", ())]:
            self.assertTrue(any(fnmatchcase(test, pattern) for test in self.ids), f"{pattern} is no test")
        for gate in self.rubric.gates:
            self.assertLessEqual({gate["passed"], gate["failed"]}, set(self.ids))

    def test_all_and_nothing(self):
        best = self.rubric.mark(dict.fromkeys(self.ids, PASSED), self.ids)
        self.assertEqual([line.earned for line in best], [None if line.marker else line.points for line in best])
        for outcomes in ({}, dict.fromkeys(self.ids, SKIPPED), dict.fromkeys(self.ids, FAILED),
                         {**dict.fromkeys(COMMANDS, PASSED)}):  # as on the skeleton, whose commands work
            self.assertEqual(sum(line.earned or 0 for line in self.rubric.mark(outcomes, self.ids)), 0)

    def test_a_table_of_answers_is_no_engine(self):
        def points(section, *marked):
            return sum(line.earned for line in self.rubric.mark(*marked) if line.section == section)

        self.assertEqual([gate["rule"] for gate in self.rubric.gates], ["X2", "X5", "X4"])
        for gate in self.rubric.gates:
            section = gate["section"]
            nearly = 0.95 * SECTIONS[section][1]
            outcomes = {**dict.fromkeys(self.ids, PASSED), gate["failed"]: Outcome("failed", f"hint: {gate['hint']}")}
            lines = [line for line in self.rubric.mark(outcomes, self.ids) if line.section == section]
            self.assertEqual(sum(line.earned for line in lines), 0)
            self.assertTrue(all(line.note.startswith(gate["rule"]) for line in lines))
            if gate["hint"]:  # it fails, but for another reason
                self.assertGreater(points(section, {**outcomes, gate["failed"]: FAILED}, self.ids), nearly)
            self.assertGreater(points(section, outcomes, self.ids, (gate["rule"],)), nearly)

    def test_nothing_counts_before_something_works(self):
        """An engine that refuses everything passes tests of refusals, and one that does nothing leaks nothing."""
        for line in self.rubric.lines:
            self.assertTrue(line.get("marker") or line.get("needs"), line["name"])

    def test_a_line_is_worth_the_share_of_its_tests(self):
        rubric = Rubric([{"section": "faults", "name": "x", "points": 6, "tests": ["A.*"], "needs": ["B.b"]}])
        outcomes = {"A.a": PASSED, "A.b": FAILED, "A.c": SKIPPED, "B.b": PASSED}
        [line] = rubric.mark(outcomes, outcomes)
        self.assertEqual((line.earned, line.passed, line.tests, line.failed), (2.0, 1, 3, ("A.b", "A.c")))
        self.assertEqual(rubric.mark({**outcomes, "B.b": FAILED}, outcomes)[0].earned, 0)


class Marker(unittest.TestCase):
    def setUp(self):
        self.lines = Rubric.load().mark({}, [])
        design = {"words": {"Choices": 200}, "missing": ["Layout", "Lifecycles"], "empty": ["Failure cases"],
                  "problem": ""}
        self.papers = {**NO_PAPERS, "design": design, "figures": {"REPORT.md": {"links": 3, "wrong": ""}},
                       "timelines": {"a.jsonl": {"events": 5, "violations": 0, "wrong": []}}}

    def most(self):
        return {entry["name"]: entry["most"] for entry in form.blank(self.lines, self.papers, [])["lines"]}

    def test_what_is_missing_is_worth_nothing(self):
        self.assertEqual(self.most(), {"files": 0, "choices": 4, "figures": 3, "failure cases": 0})

    def test_forged_figures_are_worth_nothing(self):
        self.papers["timelines"]["a.jsonl"]["wrong"] = ["line 3: V3: r0 gets a token after its cancel"]
        filled = form.blank(self.lines, self.papers, [])
        [figures] = [entry for entry in filled["lines"] if entry["name"] == "figures"]
        self.assertEqual(figures["most"], 0)
        self.assertIn("a.jsonl: line 3", "".join(figures["found"]))

    def test_a_blank_template_is_worth_nothing(self):
        self.papers["design"]["problem"] = "it is the blank template"
        self.assertEqual(set(self.most().values()), {0})

    def test_filled_in(self):
        filled = json.loads(json.dumps(form.blank(self.lines, self.papers, ["look"])))
        with self.assertRaisesRegex(OpenForm, "no points yet"):
            form.merged(self.lines, filled)
        for entry in filled["lines"]:
            entry["given"] = entry["most"]
        merged = form.merged(self.lines, filled)
        self.assertEqual({line.name: line.earned for line in merged if line.marker},
                         {"files": 0, "choices": 4, "figures": 3, "failure cases": 0})
        filled["lines"][0]["given"] = 2
        with self.assertRaisesRegex(FormError, "at most 0"):
            form.merged(self.lines, filled)
        filled["lines"][0]["override"] = "it is in README.md"
        self.assertEqual(form.merged(self.lines, filled)[15].earned, 2)
        for bad in (-1, 5, "2", True, float("nan")):
            filled["lines"][0]["given"] = bad
            with self.subTest(bad=bad), self.assertRaises(FormError):
                form.merged(self.lines, filled)
        with self.assertRaisesRegex(FormError, "no marker's form"):
            form.merged(self.lines, {"lines": [1]})

    def test_what_is_no_form(self):
        filled = form.blank(self.lines, self.papers, [])
        self.assertIs(form.checked(filled), filled)
        for bad, says in (([], "no marker's form"), (None, "no marker's form"), ({"lines": 3}, "no marker's form"),
                          ({**filled, "lift": 5}, '"lift" is 5'), ({**filled, "lift": [2]}, r'"lift" is \[2\]')):
            with self.subTest(bad=bad), self.assertRaisesRegex(FormError, says):
                form.checked(bad)
        for entry in filled["lines"]:
            entry.update(given=1, most="all")
        with self.assertRaisesRegex(FormError, "'all' is not a number"):
            form.merged(self.lines, filled)


if __name__ == "__main__":
    unittest.main()
