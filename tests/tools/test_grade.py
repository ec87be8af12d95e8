"""The grader: a class through any executor, one bad submission among good ones, forms merged, and one real submission.

``python3 scripts/grade.py --check`` proves the marks of a class of good, unfinished and cheating submissions.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from unittest import mock

from scripts import grade as command
from scripts.grading import class_run, results, runner
from scripts.grading import grade as grading
from scripts.grading.class_run import distinct_names, grade_class
from scripts.grading.grade import Grade, grade_one, hidden_digest, inner, sha
from scripts.grading.plain import warning
from scripts.grading.rubric import Rubric
from scripts.grading.runner import Draw, Outcome, _take, as_told, run_tests, told
from scripts.grading.sandbox import Limits, Sandbox, has_namespaces
from scripts.grading.similarity import Fingerprint, fingerprint
from scripts.grading.submission import Submission
from tests.extras import needs
from tests.paths import ROOT
from tests.support import run_main

SEED = "a seed that nobody knows"


class Folders(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name).resolve()

    def submissions(self, *names):
        for name in names:
            (self.place / name).mkdir(parents=True)
        return [self.place / name for name in names]


def marked(source, teacher, seed, limits, only, show_seed, given, **more):
    """In place of ``grade_one``: no submission is run. The workers of a pool can be handed it."""
    if source.name == "breaks":
        raise OSError("the worker is gone")
    tests = {"M2KVCache.test_counters": Outcome("passed" if source.name < "c" else "failed"),
             "M2KVCache.test_dirty_pages": Outcome("failed"), "M2KVCache.test_append_then_read": Outcome("passed")}
    prints = range(100) if source.name in ("anna", "bert") else range(5_000, 9_999)
    return Grade(source.name, Rubric.load().mark(tests, tests), tests, prints=Fingerprint(frozenset(prints)))


class Inline(Executor):
    """The simplest executor there is."""

    def submit(self, call, *arguments, **keywords):
        future = Future()
        try:
            future.set_result(call(*arguments, **keywords))
        except Exception as error:
            future.set_exception(error)
        return future


class Four(Folders):
    """Four submissions, of which one takes its worker with it."""

    def grade(self, executor):
        with mock.patch.object(class_run, "grade_one", marked), \
                mock.patch.object(class_run, "fingerprint", lambda *folders: Fingerprint(frozenset())):
            heard = []
            found = grade_class(self.submissions("zoe", "anna", "breaks", "bert"), ROOT, SEED, executor,
                                on_grade=heard.append)
        self.assertEqual([grade.name for grade in found.grades], ["zoe", "anna", "breaks", "bert"])
        self.assertEqual({grade.name for grade in heard}, {"zoe", "anna", "breaks", "bert"})
        self.assertEqual([bool(grade.problem) for grade in found.grades], [False, False, True, False])
        return found


class Class(Four):
    def test_one_bad_submission_stops_nobody(self):
        found = self.grade(Inline())
        rows = list(csv.DictReader(io.StringIO(found.csv())))
        self.assertEqual([row["problem"] for row in rows],
                         ["", "", "its worker failed: OSError: the worker is gone", ""])
        self.assertGreater(float(rows[1]["total"]), float(rows[0]["total"]))
        summary = found.summary()
        self.assertIn("   3  M2KVCache.test_dirty_pages", summary)
        self.assertIn("   1  M2KVCache.test_counters", summary)
        self.assertIn("100%  anna  bert", summary)

    def test_pools(self):
        for pool in (ThreadPoolExecutor(2), ProcessPoolExecutor(2)):
            with self.subTest(pool=type(pool).__name__), pool, tempfile.TemporaryDirectory() as folder:
                self.place = Path(folder)
                self.grade(pool)

    def test_names(self):
        paths = [Path("one/mira"), Path("two/mira"), Path("leo.zip"), Path("three/mira.zip")]
        names = list(distinct_names(paths).values())
        self.assertEqual(len(set(names)), 4)
        self.assertEqual(names[2], "leo")


@needs("cluster", "distributed")
class Cluster(Four):
    """The same through Dask, as on many machines."""

    def test_dask(self):
        from dask.distributed import Client, LocalCluster
        logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)  # it would report the failure that is wanted
        with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster, \
                Client(cluster) as client:
            self.grade(client.get_executor())


class Believing(unittest.TestCase):
    def test_lines_that_are_none(self):
        outcomes, why = {}, []
        for line in (b"", b"nonsense\n", b"[]\n", b'["other", "passed", ""]\n', b'["t", "great", ""]\n',
                     b'["t", "passed", 3]\n', b'{"t": 1}\n', b"[" * 10**5):
            _take(list, ["t"], outcomes, why, line)
        self.assertEqual((outcomes, why), ({}, []))
        _take(list, ["t"], outcomes, why, b'["t", "failed", "why"]\n')
        _take(list, ["t"], outcomes, why, b'["t", "passed", ""]\n')
        self.assertEqual(outcomes, {"t": Outcome("failed", "why")})

    def test_messages_are_bounded_and_obeyed_by_no_terminal(self):
        """Nor do they hold the places of this machine."""
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder).resolve() / "tree"
            box = Sandbox(tree, tree.parent / "scratch", Limits())
            said = as_told(f"{tree}/starter/a.py, {ROOT.resolve()}/acceptance/b.py, {Path.home()}/c \x1b[2J\x9b\u202e\r"
                           + "\U0001f600" * 20_000 + "the end", box, ROOT)
        self.assertTrue(said.startswith("starter/a.py, acceptance/b.py, ~/c \\x1b[2J\\x9b\\u202e\\r"), said[:100])
        self.assertTrue(said.endswith("the end"))
        self.assertLessEqual(len(said.encode()), runner.MOST)
        self.assertIn("bytes left out", said)
        self.assertEqual(said.count("\ufffd"), 0)

    def test_the_last_words_of_a_crash_begin_with_the_innermost_call(self):
        calls = "".join(f'  File "{i}.py", line 1 in f\n' for i in range(50))
        self.assertIn('"0.py"', runner.last(["noise\n" * 20, f"Fatal Python error: Segmentation fault\n{calls}"]))
        self.assertIn('"49.py"', runner.last([calls]))
        self.assertEqual(runner.last([""]), "")

    def test_without_time_everything_has_failed(self):
        with tempfile.TemporaryDirectory() as folder:
            box = Sandbox(Path(folder), Path(folder, "scratch"), Limits(all=0))
            found = run_tests(box, ROOT, ["a", "b"], Draw("mine"), Draw("judges"), monotonic())
        self.assertEqual([outcome.state for outcome in found.values()], ["failed", "failed"])
        self.assertIn("may take 0 seconds", found["a"].message)

    def test_messages_hold_no_seed_unless_the_teacher_wants_it(self):
        for test, plain, shown in (
                ("M2KVCache.test_x", "python3 -m acceptance M2KVCache.test_x --timelines replay",
                 "python3 -m acceptance M2KVCache.test_x --seed DIGEST --timelines replay"),
                ("HiddenCache.test_x_2", "python3 -m acceptance hidden HiddenCache.test_x --seed <one of your own> "
                 "--timelines replay", "python3 -m acceptance hidden HiddenCache.test_x_2 --seed 's' --show-seed "
                 "--timelines replay")):
            message = f"replay: python3 -m acceptance {test} --seed DIGEST --timelines replay"
            self.assertEqual(told(message, test, Draw("DIGEST")), f"replay: {plain}")
            self.assertEqual(told(message, test, Draw("DIGEST", "s")), f"replay: {shown}")
            self.assertNotIn("DIGEST", told("see DIGEST here", test, Draw("DIGEST")))

    def test_the_hidden_seed_is_that_of_the_command(self):
        sys.path.insert(0, str(ROOT / "acceptance"))
        try:
            from hidden import digest
        finally:
            sys.path.remove(str(ROOT / "acceptance"))
        self.assertEqual(hidden_digest("x"), digest("x"))


class Real(Folders):
    """The complete engine, for one test, and one that cheats."""

    def test_what_a_submission_can_see_draws_other_scenarios(self):
        """The digest that it finds inside, and says backwards, is another than the judge's, which none of its processes
        is told."""
        grade = self.grade("""
import os
def found(self):
    raise RuntimeError(os.environ["P07_SEED"][::-1])
KVCacheManager.stats = found
""")
        said = grade.tests["M2KVCache.test_counters"].message
        self.assertIn(sha("public", inner(SEED))[::-1], said)
        self.assertNotIn(sha("public", SEED)[::-1], said)
        jobs = []

        def listen(command, job, *more):
            jobs.append((job["seed"], json.dumps([command, job["worker"]]) if "worker" in job else ""))
            return "ended"

        ids = ["M2KVCache.test_counters"]
        with mock.patch.object(runner, "run_lines", listen):
            box = Sandbox(self.place, self.place / "scratch", Limits())
            for way, draw in ((runner._inside, Draw("mine")), (runner._outside, Draw("judges"))):
                runner._run(way, ids, box, ROOT, draw, monotonic() + 60)
        self.assertEqual([seed for seed, _ in jobs], ["mine", "judges"])
        self.assertNotIn("judges", jobs[1][1])

    def test_code_is_read_behind_walls(self):
        """Also what stops the parser: the marker is told, and the submission is graded all the same."""
        [starter] = self.submissions("s/starter")
        (starter / "__init__.py").write_text("import subprocess\n" + "def f(a):\n    return [a, a + 1, a * 2]\n" * 40,
                                             encoding="utf-8")
        box = Sandbox(self.place / "s", self.place / "scratch", Limits())
        one = Submission("s", self.place / "s", self.place / "papers")
        given = self.place / "handout"
        given.mkdir()
        found = grading.read_code(one, ROOT, given, box)
        self.assertEqual((found, one.notes), (fingerprint(starter, given), ["starter/__init__.py, line 1: imports "
                                                                            "subprocess"]))
        one.notes.clear()
        with mock.patch.object(grading, "run_lines", lambda *more: "was stopped: it took more than 60 seconds"):
            self.assertIsNone(grading.read_code(one, ROOT, given, box))
        self.assertIn("was not read to the end", one.notes[0])

    def test_points_that_were_known_stay(self):
        """The grader fails while it reads the papers."""
        def fail(*where):
            raise RuntimeError("a full disk")

        shutil.copytree(ROOT / "starter", self.place / "s" / "starter", ignore=shutil.ignore_patterns("__pycache__"))
        ids = ["M2KVCache.test_counters", "M2KVCache.test_append_then_read"]
        with mock.patch.object(grading, "read_papers", fail), \
                mock.patch.object(grading, "run_tests", lambda box, teacher, ids, *more: dict.fromkeys(
                    ids, Outcome("passed"))), mock.patch.object(grading, "all_tests", lambda teacher: (ids, [])):
            grade = grade_one(self.place / "s", ROOT, SEED, only=tuple(ids))
        self.assertEqual(grade.problem, "the grader failed: RuntimeError: a full disk")
        self.assertGreater(grade.automatic, 0)
        self.assertNotEqual(results.row(grade)["automatic"], "")
        unknown = Grade("x", Rubric.load().mark({}, []), problem="the grader failed")
        self.assertEqual((results.row(unknown)["total"], results.row(unknown)["automatic"]), ("", ""))

    def test_results_are_hidden(self):
        [source] = self.submissions("s/starter")
        (source / "__init__.py").write_text("", encoding="utf-8")
        out = self.place / "out"
        with mock.patch.object(grading, "_grade") as run:
            grade_one(self.place / "s", ROOT, SEED, out=out)
        box = run.call_args.args[3]
        self.assertTrue({out, self.place} <= set(box.secret), box.secret)

    def grade(self, code=""):
        shutil.copytree(ROOT / "starter", self.place / "s" / "starter", ignore=shutil.ignore_patterns("__pycache__"))
        with open(self.place / "s" / "starter" / "kv_cache.py", "a", encoding="utf-8") as file:
            file.write(code)
        with mock.patch.object(grading, "read_papers", lambda *where: grading.NO_PAPERS), \
                mock.patch.object(grading, "all_tests", lambda teacher: (["M2KVCache.test_counters"], [])):
            return grade_one(self.place / "s", ROOT, SEED, Limits(test=10, all=60), ("M2KVCache.test_counters",))

    def test_a_crash_that_only_the_judge_sees(self):
        grade = self.grade("""
import os, sys
if "worker_wire" in sys.modules:
    import faulthandler
    KVCacheManager.stats = lambda self: faulthandler._read_null()
""")
        message = grade.tests["M2KVCache.test_counters"].message
        self.assertIn("the submission's process", message)
        self.assertIn("kv_cache.py", message)
        if os.name == "posix":
            self.assertIn("was ended by SIGSEGV", message)
        for place in (ROOT, Path.home(), self.place):
            self.assertNotIn(f"{place}{os.sep}", message)

    def test_a_good_one(self):
        grade = self.grade()
        self.assertEqual((grade.problem, grade.tests), ("", {"M2KVCache.test_counters": Outcome("passed")}))

    def test_what_is_said_inside_earns_nothing(self):
        """Assertions are patched away and the counts are nonsense: inside the test passes, outside it does not."""
        grade = self.grade("""
import sys
if "harness" in sys.modules:
    case = sys.modules["harness"].Case
    case.same = case.that = case.refuses = lambda *arguments, **keywords: None
KVCacheManager.stats = lambda self: CacheStats(*[1] * 9)
""")
        outcome = grade.tests["M2KVCache.test_counters"]
        self.assertEqual(outcome.state, "failed")
        self.assertIn("not when it is watched from another", outcome.message)
        self.assertIn("uses .modules", "".join(grade.notes))


def of_this(script, folder):
    """Numbers of processes whose command lines name both."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            said = path.read_bytes()
            if script.encode() in said and str(folder).encode() in said:
                found.append(path.parent.name)
    return found


class Command(Folders):
    def test_bad_input(self):
        for arguments, says in (([self.place], "--seed is missing"), (["--seed", "x"], "name at least one submission"),
                                (["--merge", self.place], "no marker.json")):
            run = run_main(command.main, *arguments)
            self.assertEqual(run.code, 2)
            self.assertIn(says, run.err)

    def test_without_namespaces_it_has_to_be_asked_for(self):
        with mock.patch.object(command, "has_namespaces", lambda: False):
            run = run_main(command.main, self.place, "--seed", SEED, "--out", self.place / "out")
        self.assertEqual((run.code, run.out), (2, ""))
        self.assertIn("add --unsafe", run.err)
        self.assertFalse((self.place / "out").exists())

    @unittest.skipUnless(has_namespaces() and Path("/proc/self").exists(), "SKIPPED: needs namespaces: Linux")
    def test_told_to_end_it_leaves_nothing_behind(self):
        """SIGTERM, as of a time limit of a CI job, while a submission loops."""
        [starter] = self.submissions("loops/starter")
        (starter / "__init__.py").write_text("while True:\n    pass\n", encoding="utf-8")
        temporary = self.place / "temporary"
        temporary.mkdir()
        run = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "grade.py"), str(self.place / "loops"), "--seed", SEED, "--out",
             str(self.place / "out"), "--tests", "M1Reference.test_golden_sequences"], stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(temporary)}, start_new_session=True)
        try:
            end = monotonic() + 60
            while not of_this("run_in_process.py", temporary):
                self.assertLess(monotonic(), end)
                sleep(0.1)
            run.terminate()
            _, said = run.communicate(timeout=60)
        finally:
            run.kill()
        self.assertEqual((run.returncode, said), (130, b"interrupted\n"))
        self.assertEqual((of_this("", temporary), list(temporary.iterdir())), ([], []))

    def run_class(self, *more, only=()):
        """Three submissions whose tests are not run."""
        def graded(path, *rest, **keywords):
            one = marked(path, *rest, **keywords)
            one.warning = warning(False, only)
            return one

        with mock.patch.object(class_run, "grade_one", graded), \
                mock.patch.object(class_run, "fingerprint", lambda *folders: Fingerprint(frozenset())), \
                mock.patch.object(command, "release", lambda out: (out / "starter").mkdir(parents=True)):
            return run_main(command.main, *self.submissions("anna", "bert", "zoe"), "--seed", SEED, "--unsafe", "--out",
                            self.place / "out", "--jobs", "1", *more)

    def test_a_result_that_cannot_be_written_stops_nobody(self):
        out = self.place / "out"
        out.mkdir()
        (out / "bert").write_text("a file where its folder should be", encoding="utf-8")
        run = self.run_class()
        self.assertEqual(run.code, 1)
        self.assertRegex(run.err, "^bert: its results cannot be written: .*\n$")
        self.assertTrue((out / "anna" / "result.txt").is_file() and (out / "zoe" / "result.txt").is_file())
        self.assertEqual([row["submission"] for row in csv.DictReader(io.StringIO((out / "class.csv").read_text(
            encoding="utf-8")))], ["anna", "bert", "zoe"])

    def test_a_part_is_called_so_everywhere(self):
        only = ("M2KVCache.test_counters",)
        run = self.run_class("--tests", *only, only=only)
        says = "A PART of the tests only (M2KVCache.test_counters)"
        self.assertTrue(run.out.startswith(says))
        for name in ("summary.txt", "anna/result.txt"):
            self.assertTrue((self.place / "out" / name).read_text(encoding="utf-8").startswith(says), name)
        folder = self.place / "out" / "anna"
        self.assertIn(says, (self.place / "out" / "class.csv").read_text(encoding="utf-8"))
        for name, first in (("result.json", lambda data: data["warning"]),
                            ("results.json", lambda data: data["output"]),
                            ("github.json", lambda data: data["tests"][0]["message"])):
            self.assertTrue(first(json.loads((folder / name).read_text(encoding="utf-8"))).startswith(says), name)

    def test_what_cannot_be_graded(self):
        with mock.patch.object(command, "release", lambda out: (out / "starter").mkdir(parents=True)):
            run = run_main(command.main, self.place, "--seed", SEED, "--unsafe", "--out", self.place / "out")
        self.assertEqual(run.code, 1)
        self.assertIn("there is no starter/__init__.py in it", run.out)
        self.assertTrue((self.place / "out" / self.place.name / "results.json").is_file())

    def test_merge(self):
        tests = dict.fromkeys(("M2KVCache.test_counters", "M2KVCache.test_append_then_read"), Outcome("passed"))
        grade = Grade("mira", Rubric.load().mark(tests, tests), tests)
        command.results.write(grade, self.place / "mira")
        path = self.place / "mira" / "marker.json"
        run = run_main(command.main, "--merge", self.place)
        self.assertEqual(run.code, 2)
        self.assertIn("no points yet", run.err)
        form = json.loads(path.read_text(encoding="utf-8"))
        for entry in form["lines"]:
            entry.update(given=2, override="seen")
        path.write_text(json.dumps(form), encoding="utf-8")
        run = run_main(command.main, "--merge", self.place)
        self.assertEqual((run.code, run.out), (0, "mira: 20 of 100\n"))  # 8 for M2, 4 for memory, 8 of the marker
        self.assertIn("20 of 100 in all", (self.place / "mira" / "result.txt").read_text(encoding="utf-8"))


if __name__ == "__main__":
    unittest.main()
