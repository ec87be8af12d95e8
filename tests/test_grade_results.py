"""One grade in every form that it is written in: words, JSON, a table's row, Gradescope's and GitHub Classroom's."""

from __future__ import annotations

import base64
import csv
import io
import json
import tempfile
import unittest
import zipfile
from pathlib import Path

from scripts.grading import github_classroom, gradescope, results
from scripts.grading.grade import Grade
from scripts.grading.rubric import Rubric
from scripts.grading.runner import Outcome
from tests.paths import ROOT

TEXTS = {"failed": "V1: what must hold\n  happened: <b>3</b>", "passed": "", "skipped": "optional: no"}


def grade(**more):
    """Two tests passed, one failed, one was skipped; a person has yet to mark."""
    states = {"M2KVCache.test_counters": "passed", "M2KVCache.test_dirty_pages": "failed",
              "M5Quantization.test_search": "skipped", "M1Reference.test_golden_sequences": "passed",
              "M2KVCache.test_append_then_read": "passed"}
    tests = {test: Outcome(state, TEXTS[state]) for test, state in states.items()}
    return Grade("mira", Rubric.load().mark(tests, tests), tests, notes=["starter/engine.py, line 3: imports gc"],
                 walls=["time"], seconds=12.5, **more)


# What gradescope-autograders.readthedocs.io, "Specifications", allows: key -> types, or the values there are.
TOP = {"score": (int, float), "execution_time": (int, float), "output": str, "output_format": gradescope.FORMATS,
       "test_output_format": gradescope.FORMATS, "test_name_format": gradescope.FORMATS, "visibility":
       gradescope.VISIBILITIES, "stdout_visibility": gradescope.VISIBILITIES, "extra_data": dict, "tests": list,
       "leaderboard": list}
TEST = {"score": (int, float), "max_score": (int, float), "status": ("passed", "failed"), "name": str, "name_format":
        gradescope.FORMATS, "number": str, "output": str, "output_format": gradescope.FORMATS, "tags": list,
        "visibility": gradescope.VISIBILITIES, "extra_data": dict}


class Forms(unittest.TestCase):
    def keeps(self, document, rules):
        for key, value in document.items():
            self.assertIn(key, rules)
            rule = rules[key]
            if isinstance(rule, tuple) and isinstance(rule[0], str):
                self.assertIn(value, rule)
            else:
                self.assertIsInstance(value, rule)
                self.assertNotIsInstance(value, bool)

    def test_gradescope(self):
        document = gradescope.results(grade())
        self.keeps(document, TOP)
        for test in document["tests"]:
            self.keeps(test, TEST)
        self.assertAlmostEqual(document["score"], sum(test["score"] for test in document["tests"]))
        self.assertEqual(document["score"], grade().automatic)
        shown = [test for test in document["tests"] if test["visibility"] == "visible"]
        self.assertEqual(sum(test["max_score"] for test in shown), grade().automatic_most)
        self.assertNotIn("imports gc", json.dumps(shown))

    def test_github_classroom(self):
        document = github_classroom.results(grade())
        self.assertEqual(set(document), {"version", "status", "max_score", "tests"})
        self.assertEqual((document["version"], document["status"], document["max_score"]), (1, "fail", 86))
        for test in document["tests"]:
            self.assertEqual({key: type(value) for key, value in test.items()} | {"message": str, "score": float}, {
                "name": str, "status": str, "score": float, "message": str, "test_code": str, "filename": str,
                "line_no": int, "execution_time": int})
            self.assertIn(test["status"], ("pass", "fail", "error"))
        self.assertAlmostEqual(sum(test["score"] for test in document["tests"]), grade().automatic)
        self.assertEqual(json.loads(base64.b64decode(github_classroom.encoded(grade()))), document)
        self.assertEqual(github_classroom.results(grade(problem="no starter/"))["status"], "error")

    def test_words(self):
        text = results.text(grade())
        for words in ("mira: ", "of 86 automatic points; 14 are the marker's", "... of 4  choices", "2 of 3 tests",
                      "FAILED M2KVCache.test_dirty_pages", "SKIPPED M5Quantization.test_search", "these walls: time"):
            self.assertIn(words, text)
        self.assertNotIn("imports gc", text)
        self.assertIn("imports gc", results.notes(grade()))
        self.assertIn("Not graded: too big", results.text(grade(problem="too big")))

    def test_a_row_is_a_row(self):
        evil = grade(problem="a, \"quoted\"\nproblem")
        evil.name = "=HYPERLINK(1)"
        rows = list(csv.DictReader(io.StringIO(results.table([grade(), evil]))))
        self.assertEqual([tuple(row) for row in rows], [results.FIELDS] * 2)
        self.assertEqual((rows[0]["submission"], rows[0]["tests passed"], rows[0]["tests"]), ("mira", "3", "5"))
        self.assertEqual((rows[1]["submission"], rows[1]["problem"]), ("'=HYPERLINK(1)", "a, \"quoted\"\nproblem"))

    def test_json_gives_the_grade_back(self):
        before = grade()
        after = Grade.from_dict(json.loads(json.dumps(before.to_dict())))
        self.assertEqual(after.to_dict(), before.to_dict())

    def test_files_and_a_form_that_was_begun(self):
        with tempfile.TemporaryDirectory() as folder:
            results.write(grade(), Path(folder))
            self.assertEqual({path.name for path in Path(folder).iterdir()},
                             {"result.txt", "result.json", "results.json", "github.json", "row.csv", "notes.txt",
                              "marker.json"})
            Path(folder, "marker.json").write_text("mine", encoding="utf-8")
            results.write(grade(), Path(folder))
            self.assertEqual(Path(folder, "marker.json").read_text(encoding="utf-8"), "mine")

    def test_gates_are_lifted_by_the_marker(self):
        tests = {"M1Reference.test_golden_sequences": Outcome("passed"),
                 "M1Reference.test_fixture_on_other_weights": Outcome("failed")}
        closed = Grade("x", Rubric.load().mark(tests, tests), tests)
        form = closed.form()
        self.assertEqual([text[:2] for text in form["closed"]], ["X2"])
        for entry in form["lines"]:
            entry.update(given=0)
        closed.merge(form)
        self.assertEqual((closed.total, closed.marked), (0, True))
        closed.merge({**form, "lift": ["X2"]})
        self.assertEqual(closed.total, 4.0)


class Autograder(unittest.TestCase):
    def test_the_zip_file_holds_all_that_the_grader_needs(self):
        with tempfile.TemporaryDirectory() as folder:
            places = [Path(folder, name) for name in ("a.zip", "b.zip")]
            for place in places:
                gradescope.build(place, ROOT, "secret")
            self.assertEqual(places[0].read_bytes(), places[1].read_bytes())
            with zipfile.ZipFile(places[0]) as archive:
                names = set(archive.namelist())
                self.assertEqual(archive.read("secret.txt"), b"secret\n")
                self.assertEqual(archive.getinfo("run_autograder").external_attr >> 16, 0o755)
                self.assertTrue(archive.read("setup.sh").startswith(b"#!"))
                run = archive.read("run_autograder").decode().splitlines()
                self.assertLess(run.index("rm secret.txt"), next(i for i, line in enumerate(run) if "grade.py" in line))
        table = json.loads((ROOT / "scripts" / "student_release.json").read_text(encoding="utf-8"))
        needed = {path.relative_to(ROOT).as_posix() for pattern in table["files"] for path in ROOT.glob(pattern)
                  if path.is_file() and "__pycache__" not in path.parts}
        self.assertLessEqual(needed | {"scripts/grade.py", "scripts/grading/rubric.json", "starter/engine.py"}, names)

    def test_the_workflow_hands_the_result_over(self):
        text = (ROOT / "scripts" / "grading" / "classroom_workflow.yml").read_text(encoding="utf-8")
        self.assertIn("GRADE_RESULTS: ${{ steps.grade.outputs.result }}", text)
        self.assertIn("runners: grade", text)
        self.assertIn("--seed -", text)


if __name__ == "__main__":
    unittest.main()
