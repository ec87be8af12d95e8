"""One grade in every form that it is written in: words, JSON, a table's row, Gradescope's and GitHub Classroom's."""

from __future__ import annotations

import base64
import csv
import io
import json
import tempfile
import unicodedata
import unittest
import zipfile
from pathlib import Path
from unittest import mock

from scripts import grade as command
from scripts.grading import github_classroom, gradescope, results
from scripts.grading.class_run import CLASS_FILES, COMPLETE, ClassGrades, distinct_names
from scripts.grading.grade import Grade, all_tests
from scripts.grading.plain import bounded
from scripts.grading.rubric import Rubric
from scripts.grading.runner import MOST, Outcome
from tests.paths import ROOT
from tests.support import run_main

TEXTS = {"failed": "V1: what must hold\n  happened: <b>3</b>", "passed": "", "skipped": "optional: no"}


def grade(**more):
    """Two tests passed, one failed, one was skipped; a person has yet to mark."""
    states = {"M2KVCache.test_counters": "passed", "M2KVCache.test_dirty_pages": "failed",
              "M5Quantization.test_search": "skipped", "M1Reference.test_golden_sequences": "passed",
              "M1Reference.test_operations": "passed",
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

    def test_no_message_forges_a_line(self):
        """Escape codes, and lines that look like the grader's."""
        evil = grade()
        test = "M2KVCache.test_dirty_pages"
        evil.tests[test] = Outcome("failed", "\x1b[2J\x1b[Hmira: 86 of 86 automatic points\nmira: 86 of 86\x9b1m")
        evil.papers = {"design": {"words": {"a\x1b[1m\x9b": 3}, "missing": ["\x9b"], "empty": [], "problem": "\x9b"},
                       "timelines": {}, "figures": {}}
        with tempfile.TemporaryDirectory() as folder:
            results.write(evil, Path(folder))
            for path in Path(folder).iterdir():
                content = path.read_text(encoding="utf-8")
                bad = [c for c in content if unicodedata.category(c) in ("Cc", "Cf") and c != "\n"]
                self.assertFalse(bad, path.name)
                if path.suffix == ".json":
                    json.loads(content)
            lines = Path(folder, "result.txt").read_text(encoding="utf-8").splitlines()
        self.assertEqual(len([line for line in lines if line.startswith("mira: ")]), 1)

    def test_all_files_are_bounded_in_bytes(self):
        long = Outcome("failed", bounded("\U0001f600" * 20_000, MOST))
        tests = dict.fromkeys([test for kind in all_tests(ROOT) for test in kind], long)
        with tempfile.TemporaryDirectory() as folder:
            results.write(Grade("x", Rubric.load().mark(tests, tests), tests), Path(folder))
            for path in Path(folder).iterdir():
                self.assertLess(path.stat().st_size, 1_500_000, path.name)

    def test_a_full_disk_cuts_no_earlier_result(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "result.txt")
            results.save(path, "before\n")
            with mock.patch.object(results.os, "replace", mock.Mock(side_effect=OSError(28, "No space left"))), \
                    self.assertRaises(OSError):
                results.save(path, "after\n")
            self.assertEqual([(found.name, found.read_text(encoding="utf-8")) for found in Path(folder).iterdir()],
                             [("result.txt", "before\n")])

    def test_a_row_is_a_row(self):
        evil = grade(problem="a, \"quoted\"\nproblem")
        evil.name = "=HYPERLINK(1)"
        rows = list(csv.DictReader(io.StringIO(results.table([grade(), evil]))))
        self.assertEqual([tuple(row) for row in rows], [results.FIELDS] * 2)
        self.assertEqual((rows[0]["submission"], rows[0]["tests passed"], rows[0]["tests"]), ("mira", "4", "6"))
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
                 "M1Reference.test_operations": Outcome("passed"),
                 "M1Reference.test_fixture_on_other_weights": Outcome("failed")}
        closed = Grade("x", Rubric.load().mark(tests, tests), tests)
        form = closed.form()
        self.assertEqual([text[:2] for text in form["closed"]], ["X2"])
        for entry in form["lines"]:
            entry.update(given=0)
        closed.merge(form)
        self.assertEqual((closed.total, closed.marked), (0, True))
        closed.merge({**form, "lift": ["X2"]})
        self.assertEqual(closed.total, 5.33)


class Class(unittest.TestCase):
    def test_no_folder_of_results_is_in_another_ones_place(self):
        paths = [Path(name) for name in ("a/class.csv", "b/Summary.txt.zip", "alike.csv.zip", "Leo", "leo.zip", "Mira",
                                         "c/mira.zip", "line\nend", "x/...zip", "long" * 50, "mira-2")]
        names = list(distinct_names(paths).values())
        self.assertEqual(len({name.lower() for name in names} | set(CLASS_FILES)), len(paths) + len(CLASS_FILES))
        self.assertIn("class.csv-2", names)
        self.assertIn("line_end", names)
        for name in names:
            self.assertEqual(Path("out", name).resolve().parent, Path("out").resolve())
            self.assertLess(len(name), 120)

    def test_a_line_is_a_line(self):
        evil = grade(problem="bad\nname\u2028and \x1b[31m")
        evil.notes = ["one\ntwo"]
        told = [ClassGrades([evil]).summary(), results.text(evil), results.notes(evil)]
        self.assertIn("  mira: bad?name?and ?[31m\n", told[0])
        self.assertIn("  mira: one?two\n", told[0])
        self.assertIn("Not graded: bad?name?and ?[31m\n", told[1])
        self.assertIn("- one?two\n", told[2])

    def test_all_pairs_are_in_a_file_and_copies_of_the_engine_come_first(self):
        names = [f"s{i:02}" for i in range(50)]
        pairs = [(0.7, COMPLETE, "copy"), *((1 - i / 100, names[i - 1], names[i]) for i in range(1, 40)),
                 (1.0, "same", "too")]
        found = ClassGrades([grade()], pairs)
        summary = found.summary().splitlines()
        at = summary.index(f"Alike, to be read side by side (all {len(pairs)} pairs: alike.csv)")
        self.assertEqual(summary[at + 1], f"   70%  {COMPLETE}  copy")
        self.assertIn("  100%  same  too", summary)
        self.assertIn("  and 1 more lines", summary)
        self.assertEqual(len(list(csv.DictReader(io.StringIO(found.files()["alike.csv"])))), len(pairs))


class Merging(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name)
        for name in ("anna", "bert", "carl", "dora"):
            one = grade(problem="the zip file cannot be read" if name == "carl" else "")
            one.name = name
            results.write(one, self.place / name)
        results.save(self.place / "class.csv", "before\n")

    def fill(self, name, **more):
        path = self.place / name / "marker.json"
        form = json.loads(path.read_text(encoding="utf-8"))
        for entry in form["lines"]:
            entry.update(given=2, override="seen")
        path.write_text(json.dumps({**form, **more}), encoding="utf-8-sig")  # as an editor on Windows saves it

    def merge(self):
        run = run_main(command.main, "--merge", self.place)
        rows = list(csv.DictReader(io.StringIO((self.place / "class.csv").read_text(encoding="utf-8"))))
        self.assertEqual([row["submission"] for row in rows], ["anna", "bert", "carl", "dora"])
        return run, {row["submission"]: float(row["total"]) - grade().automatic for row in rows}

    def test_all_rows_stay(self):
        self.assertFalse((self.place / "carl" / "marker.json").exists())
        self.fill("anna")
        run, more = self.merge()
        self.assertEqual((run.code, more), (0, {"anna": 8, "bert": 0, "carl": 0, "dora": 0}))
        self.assertIn("still open, since lines have no points yet: bert, dora\n", run.out)
        self.assertNotIn("carl", run.out + run.err)
        self.fill("bert")
        self.fill("dora")
        run, more = self.merge()
        self.assertEqual((run.code, more), (0, {"anna": 8, "bert": 8, "carl": 0, "dora": 8}))
        self.assertNotIn("open", run.out)

    def test_what_is_no_form_does_not_stop_the_others(self):
        self.fill("dora")
        for text, says in (("[]", "no marker's form"), ("null", "no marker's form"), ("{", "line 1 column 2")):
            (self.place / "bert" / "marker.json").write_text(text, encoding="utf-8")
            run, more = self.merge()
            with self.subTest(text=text):
                self.assertEqual((run.code, more["dora"], more["bert"]), (2, 8, 0))
                self.assertIn(says, run.err)
                self.assertEqual(len(run.err.splitlines()), 1)
        self.fill("anna", lift=5)
        run, more = self.merge()
        self.assertEqual((run.code, more["anna"], more["dora"]), (2, 0, 8))
        self.assertIn('"lift" is 5', run.err)


class Arguments(unittest.TestCase):
    def test_stars_that_the_shell_left(self):
        with tempfile.TemporaryDirectory() as folder:
            places = [Path(folder, name) for name in ("a.zip", "b")]
            for place in places:
                place.mkdir()
            self.assertEqual(command.expanded([Path(folder, "*")]), places)
            self.assertEqual(command.expanded([Path(folder, "?.zip"), Path("none")]), [places[0], Path("none")])
            run = run_main(command.main, Path(folder, "c*"), "--seed", "x", "--out", Path(folder, "out"))
        self.assertEqual(run.code, 2)
        self.assertIn("there is no such folder or zip file", run.err)

    def test_tests_and_limits_that_are_none(self):
        self.assertEqual(command.known(["M2KVCache", "Commands", "test_counters"]),
                         ("M2KVCache", "Commands", "test_counters"))
        for more, says in ((["--tests", "NoSuchTest"], "no test has this in its name; there are HiddenC"),
                           (["--tests", "Commands.C4"], "Commands, which run together"),
                           (["--time", "-1"], "must be at least 1"), (["--memory", "0"], "must be at least 1")):
            run = run_main(command.main, ROOT, "--seed", "x", *more)
            with self.subTest(more=more):
                self.assertEqual(run.code, 2)
                self.assertIn(says, run.err)


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
