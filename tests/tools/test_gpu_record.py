"""The job for a GPU: what a machine lacks is named, the record is complete, a short rehearsal finds nothing wrong."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from scripts.gpu import machine as machines
from scripts.gpu import record as records
from scripts.gpu.machine import NEEDED, NEEDS, Card, Machine
from starter.backend import load_backend
from starter.errors import BackendError, SchemaError
from tests.extras import needs
from tests.paths import ROOT

TARGET = Card("cuda:0", "NVIDIA GeForce RTX 4060 Ti", "8.9", 17_175_150_592, "GPU-0")
OTHER = Card("cuda:0", "NVIDIA A100", "8.0", 85_899_345_920, "GPU-1")
GOOD = Machine("Windows", "10.0.22631", 22631, "Intel64", "3.12.1", {"numpy": "2.0.0", "warp-lang": "1.19.0"}, "13.0",
               "13.0", (TARGET,))


def load_acceptance() -> Any:
    """The test file of the acceptance folder, as a module."""
    spec = importlib.util.spec_from_file_location("gpu_acceptance", ROOT / "acceptance" / "test_win_4060ti.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NeedsTest(unittest.TestCase):
    """On machines that are made up: each lack is told by its own test, in one sentence."""

    def lacks(self, machine: Machine, driver: str | None = "591.1") -> dict[str, str]:
        with mock.patch.object(machines, "ask_smi", return_value={"driver": driver}):
            return {name: sentence for name in NEEDED["target"] if (sentence := NEEDS[name](machine))}

    def test_nothing_is_lacking(self) -> None:
        self.assertEqual(self.lacks(GOOD), {})

    def test_each_lack_is_one_sentence(self) -> None:
        for name, machine, words in (
                ("windows", replace(GOOD, system="Linux"), "Windows is wanted, and this is Linux; .* P07_GPU=1"),
                ("packages", replace(GOOD, packages={"numpy": "2.0.0", "warp-lang": None}),
                 r"^warp-lang is not installed: pip install \.\[cuda\]$"),
                ("packages", replace(GOOD, packages={"numpy": None, "warp-lang": None}),
                 "^numpy and warp-lang are not installed"),
                ("memory", replace(GOOD, cards=(replace(TARGET, memory_bytes=8 * 2**30),)),
                 "15 GiB of memory are wanted, and NVIDIA GeForce RTX 4060 Ti has 8.0 GiB; .*8 GB"),
                ("capability", replace(GOOD, cards=(replace(TARGET, capability="8.6"),)),
                 r"compute capability 8\.9 \(sm_89\) is wanted, and .* has 8\.6"),
                ("cuda", replace(GOOD, cuda_driver=None),
                 "no CUDA device: it was built with CUDA 13.0, and the driver offers none; install NVIDIA's driver")):
            with self.subTest(name=name):
                lacks = self.lacks(machine)
                self.assertEqual([*lacks], [name, "cuda"] if name == "packages" else [name])
                self.assertRegex(lacks[name], words)
                self.assertNotIn("\n", lacks[name])

    def test_another_card(self) -> None:
        lacks = self.lacks(replace(GOOD, cards=(OTHER,)))
        self.assertEqual([*lacks], ["card", "capability"])
        self.assertIn("a GeForce RTX 4060 Ti is wanted, and Warp finds NVIDIA A100; set P07_GPU=1", lacks["card"])

    def test_the_card_may_be_the_second_one(self) -> None:
        both = replace(GOOD, cards=(OTHER, replace(TARGET, device="cuda:1")))
        self.assertEqual((self.lacks(both), both.card()), ({}, both.cards[1]))

    def test_no_card_at_all(self) -> None:
        self.assertEqual([*self.lacks(replace(GOOD, cards=()), None)],
                         ["cuda", "card", "capability", "memory", "driver"])

    def test_a_driver_that_does_not_tell_its_version(self) -> None:
        self.assertIn("nvidia-smi does not tell the driver's version", self.lacks(GOOD, None)["driver"])

    def test_bandwidth_is_known_of_the_target_alone(self) -> None:
        self.assertEqual((TARGET.bandwidth, OTHER.bandwidth), (288e9, None))

    def test_this_machine_can_be_looked_at(self) -> None:
        found = machines.look()
        self.assertEqual((found.python, {*found.packages}), (sys.version.split()[0], {"numpy", "warp-lang"}))


class SmiTest(unittest.TestCase):
    def ask(self, out: str, code: int = 0, program: str | None = "nvidia-smi") -> dict[str, str | float | None]:
        done = subprocess.CompletedProcess([], code, out, "")
        with (mock.patch.object(machines.shutil, "which", return_value=program),
              mock.patch.object(machines.subprocess, "run", return_value=done) as run):
            found = machines.ask_smi(TARGET)
        for call in run.call_args_list:
            self.assertEqual((type(call.args[0]), call.kwargs.get("shell")), (list, None))
            self.assertIn("--id=GPU-0", call.args[0])
        return found

    def test_what_it_tells(self) -> None:
        self.assertEqual(self.ask("591.44, 165.00, 9001\n"),
                         {"driver": "591.44", "power_limit_w": 165.0, "memory_clock_mhz": 9001.0})

    def test_what_it_does_not_tell_is_none(self) -> None:
        self.assertEqual(self.ask("591.44, [N/A], 9001\n")["power_limit_w"], None)
        unknown = {"driver": None, "power_limit_w": None, "memory_clock_mhz": None}
        self.assertEqual(self.ask("No devices were found\n", 6), unknown)
        self.assertEqual(self.ask("", program=None), unknown)


class CommitTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def put(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")

    def test_a_branch_its_packed_form_and_no_branch(self) -> None:
        self.assertIsNone(machines.commit(self.root))
        self.put(".git/HEAD", "ref: refs/heads/main")
        self.put(".git/packed-refs", "# pack-refs with: peeled\n" + "b" * 40 + " refs/heads/main")
        self.assertEqual(machines.commit(self.root), "b" * 40)
        self.put(".git/refs/heads/main", "a" * 40)
        self.assertEqual(machines.commit(self.root), "a" * 40)
        self.put(".git/HEAD", "c" * 40)
        self.assertEqual(machines.commit(self.root), "c" * 40)

    def test_a_second_working_tree(self) -> None:
        self.put("tree/.git", "gitdir: ../main/.git/worktrees/tree")
        self.put("main/.git/worktrees/tree/HEAD", "ref: refs/heads/side")
        self.put("main/.git/worktrees/tree/commondir", "../..")
        self.put("main/.git/refs/heads/side", "d" * 40)
        self.assertEqual(machines.commit(self.root / "tree"), "d" * 40)

    def test_line_ends_do_not_change_a_hash(self) -> None:
        for name, text in (("a", b"x\ny\n"), ("b", b"x\r\ny\r\n"), ("c", b"x\nz\n")):
            (self.root / name).write_bytes(text)
        a, b, c = (machines.digest([self.root / name]) for name in "abc")
        self.assertEqual((a == b, a == c), (True, False))


class SwitchTest(unittest.TestCase):
    """acceptance/test_win_4060ti.py: who asked for what, and where the record goes."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.module = load_acceptance()

    module: Any

    def test_who_asked(self) -> None:
        for environment, kind in (({}, None), ({"P07_WIN_4060TI": "1"}, "target"), ({"P07_GPU": "1"}, "gpu"),
                                  ({"P07_GPU": "cpu"}, "cpu"), ({"P07_WIN_4060TI": "1", "P07_GPU": "1"}, "target")):
            self.assertEqual(self.module.kind_of_run(environment), kind)
        with self.assertRaisesRegex(ValueError, "P07_GPU must be 1 or cpu, not 'yes'"):
            self.module.kind_of_run({"P07_GPU": "yes"})

    def test_a_project_without_the_backend_skips_it(self) -> None:
        """The students' project has this file and not what it needs."""
        with tempfile.TemporaryDirectory() as name, mock.patch.object(self.module, "ROOT", Path(name)):
            result = self.run_suite(P07_GPU="1")
        self.assertIn("this project has no CUDA backend", str(result.skipped))
        self.assertTrue(result.wasSuccessful())

    def test_where_the_record_goes(self) -> None:
        self.assertEqual(self.module.record_folder("gpu", {"P07_RECORD": "here"}), Path("here"))
        for kind, parent in (("target", ROOT / "acceptance" / "records"), ("cpu", ROOT / "out")):
            self.assertEqual(self.module.record_folder(kind, {}).parent, parent)

    def test_there_is_a_test_for_every_need_and_every_part(self) -> None:
        from scripts.gpu.job import PARTS
        for case, names in ((self.module.Machine, NEEDS), (self.module.Run, PARTS)):
            self.assertEqual({name for name in vars(case) if name.startswith("test_")}, {f"test_{x}" for x in names})

    def run_suite(self, **environment: str) -> unittest.TestResult:
        with mock.patch.dict(os.environ, environment):
            suite = self.module.load_tests(unittest.defaultTestLoader, None, None)
            return unittest.TextTestRunner(io.StringIO()).run(suite)

    def test_what_is_lacking_fails_by_name_and_the_job_is_not_run(self) -> None:
        with (mock.patch.object(self.module.Machine, "machine", replace(GOOD, system="Linux", cards=())),
              mock.patch("scripts.gpu.job.Job") as never):
            result = self.run_suite(P07_WIN_4060TI="1")
        failed = {test.id().rpartition("_")[2]: text for test, text in result.failures}
        self.assertEqual({*failed}, {"windows", "cuda", "card", "capability", "memory", "driver"})
        self.assertIn("Windows is wanted, and this is Linux", failed["windows"])
        self.assertIn("not run, as this machine lacks: windows, cuda", str(result.skipped))
        never.assert_not_called()

    def test_a_folder_with_a_record_is_told_before_the_work(self) -> None:
        with tempfile.TemporaryDirectory() as name, mock.patch("scripts.gpu.job.Job") as never:
            Path(name, "gpu-record.json").write_text("{}", encoding="utf-8")
            with mock.patch.object(self.module.Machine, "machine", GOOD):
                result = self.run_suite(P07_WIN_4060TI="", P07_GPU="cpu", P07_RECORD=name)
        self.assertIn("holds a record already", result.errors[0][1])
        never.assert_not_called()

    def test_switched_off_it_costs_nothing_and_says_so(self) -> None:
        """As the acceptance suite finds it: nothing imported, one skip that names the switches."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("P07_")}
        done = subprocess.run([sys.executable, "-X", "importtime", "-m", "unittest", "discover", "-s", "acceptance",
                               "-p", "test_win_4060ti.py", "-v"], cwd=ROOT, env=environment, text=True,
                              capture_output=True, check=False)
        self.assertIn(done.returncode, (0, 5))  # 5: from Python 3.12 on, where no test has run
        self.assertIn("SKIPPED: needs a GPU; set P07_WIN_4060TI=1", done.stderr)
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        self.assertIn("test_win_4060ti", imported)
        self.assertFalse({"warp", "numpy", "starter"} & imported)


TIMES = {"repeats": 2, "median_s": 1e-3, "lowest_s": 1e-3, "highest_s": 2e-3, "spread": 0.1}
RECORD: dict[str, Any] = {
    "version": 1, "kind": "not the target card", "began": "2026-01-01T00:00:00+00:00", "seconds": 1.5,
    "code": {"commit": None, "kernels_sha256": "0" * 64, "engine_sha256": "1" * 64},
    "machine": {"system": "Linux", "system_version": "6", "windows_build": None, "processor": "", "python": "3.11.7",
                "numpy": "2.0.0", "warp": "1.19.0", "cuda_driver": "13.0", "cuda_toolkit": "13.0", "driver": None},
    "card": {"device": "cuda:0", "name": "NVIDIA A100", "capability": "8.0", "memory_bytes": 1, "free_bytes": 1,
             "power_limit_w": None, "memory_clock_mhz": None, "bandwidth": None},
    "kernel_checks": {"blocks": [128], "tests": 1, "cases": {"add": 1}, "tolerance": 2e-6},
    "kernels": [{"kernel": "add", "case": "2 x 2", "error": 0.0, "tolerance": 2e-5, "runs": 50, "runs_equal": True,
                 "time": TIMES, "bytes": 48, "operations": 4, "bytes_per_s": 48e3, "of_bandwidth": None,
                 "numpy": None}],
    "engine": [], "refused": None, "out_of_memory": {"in_the_runs": False, "injected": None, "real": None},
    "speed": [{"model": "m", "backend": "cuda", "form": "float32", "phase": "decode", "batch": 1, "tokens": 1, **TIMES,
               "tokens_per_s": 1e3, "bytes_per_s": None}],
    "errors": [{"part": "memory", "error": "something"}]}


class RecordTest(unittest.TestCase):
    def test_it_replaces_no_other(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            path = records.write(RECORD, Path(name, "new"))
            self.assertEqual(json.loads(path.read_text(encoding="utf-8")), RECORD)
            before = path.read_bytes()
            with self.assertRaisesRegex(FileExistsError, "holds a record already, which is not replaced; name another"):
                records.write({**RECORD, "seconds": 2.0}, path.parent)
            self.assertEqual(path.read_bytes(), before)

    def test_a_field_that_is_missing_unknown_or_strange(self) -> None:
        for change, words in ((lambda r: r.pop("code"), "/code: this key is missing"),
                              (lambda r: r.update(more=1), "/more: this key is unknown; allowed: version, kind"),
                              (lambda r: r["kernels"][0].update(error=float("nan")), "/kernels/0/error: must be from"),
                              (lambda r: r.update(kind="a card"), "/kind: must be one of")):
            strange = copy.deepcopy(RECORD)
            change(strange)
            with self.subTest(words=words), tempfile.TemporaryDirectory() as name:
                with self.assertRaisesRegex(SchemaError, words):
                    records.write(strange, Path(name))
                self.assertTrue(Path(name, "gpu-record.json").exists())  # a long run is not lost for that

    def test_summary(self) -> None:
        """What is unknown is called so; errors stand at the top; tables have as many cells in every row."""
        text = records.summary(RECORD)
        self.assertTrue(text.startswith("# not the target card\n"))
        for words in ("1 error.", "- **memory**: something", "| power limit | unknown W |", "1,000.0 µs", "50: yes"):
            self.assertIn(words, text)
        widths: set[int] = set()
        for line in (*text.splitlines(), ""):
            if line.startswith("|"):
                widths.add(line.count("|"))
            else:
                self.assertLessEqual(len(widths), 1, line)
                widths.clear()


@needs("cuda", "warp", "numpy")
class RehearsalTest(unittest.TestCase):
    """The whole job on the processor, as short as can be: through the acceptance file, to the record."""

    def test_rehearsal(self) -> None:
        import warp as wp

        from scripts.gpu.job import Effort
        from starter.backends.cuda import int8_kernels as warp_int8_kernels
        from starter.backends.cuda import kernels as warp_kernels
        module = load_acceptance()
        effort = Effort(blocks=(1,), small=True, equal_runs=3, repeats=2, warm_up=1, poems=1, oracle_poems=1,
                        batches=(2,), forms=("float32", "int4 and float16 pages", "int8 pages"))
        with (tempfile.TemporaryDirectory() as name, mock.patch.object(module.Run, "effort", effort),
              mock.patch.dict(os.environ, {"P07_GPU": "cpu", "P07_RECORD": name}),
              contextlib.redirect_stderr(io.StringIO())):
            os.environ.pop("P07_WIN_4060TI", None)
            suite = module.load_tests(unittest.defaultTestLoader, None, None)
            result = unittest.TextTestRunner(io.StringIO()).run(suite)
            record = json.loads(Path(name, "gpu-record.json").read_text(encoding="utf-8"))
        self.assertEqual((result.failures, result.errors, result.skipped, result.testsRun), ([], [], [], 6))
        records.SHAPE.parse(record, "")
        self.assertEqual((record["kind"], record["card"], record["errors"]), ("rehearsal on CPU, no GPU", None, []))
        kernels = {name for module in (warp_kernels, warp_int8_kernels) for name, made in vars(module).items()
                   if isinstance(made, wp.Kernel)}
        self.assertEqual({row["kernel"] for row in record["kernels"]}, kernels | {"copy"})
        self.assertLess({*record["kernel_checks"]["cases"]}, kernels)
        self.assertEqual({(row["fixture"], row["form"]) for row in record["engine"]}, {
            (fixture, form) for fixture in ("tiny_model", "quatrains") for form in effort.forms})
        self.assertEqual({row["form"] for row in record["engine"] if row["kv_peak_tail_bytes"]}, {"int8 pages"})
        self.assertIn("attend_int8", record["kernel_checks"]["cases"])
        self.assertEqual({row["backend"] for row in record["speed"]}, {"cuda", "numpy", "cpu"})
        memory = record["out_of_memory"]
        self.assertEqual((memory["in_the_runs"], memory["injected"]["ended"], memory["real"]["given"]),
                         (False, "error", False))


@needs("cuda", "warp", "numpy")
class FoundTest(unittest.TestCase):
    """What goes wrong is found: the job is given broken parts."""

    def problems(self, part: str, *patches: Any) -> list[str]:
        from scripts.gpu.job import Effort, Job
        effort = Effort(blocks=(1,), small=True, equal_runs=2, repeats=2, warm_up=1, poems=1, oracle_poems=1,
                        batches=(1,), forms=("float32",))
        self.job = job = Job("cpu", machines.look(), effort)
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            problems = job.run(part)
        self.assertEqual(job.record["errors"], [{"part": part, "error": problem} for problem in problems])
        return problems

    def test_figures_of_a_card_stand_beside_what_it_can_do(self) -> None:
        """A processor in the place of a card: its memory and its share of the bandwidth are in the record."""
        from scripts.gpu import job as jobs
        smi = {"driver": "591.44", "power_limit_w": 165.0, "memory_clock_mhz": None}
        effort = jobs.Effort(small=True, equal_runs=2, repeats=2, warm_up=1)
        with (mock.patch.object(jobs, "ask_smi", return_value=smi), self.one(lambda work: None),
              mock.patch.object(jobs.Job, "_backend", lambda self, **_: load_backend(
                  "cuda", device="cpu", free_bytes=10**9))):
            job = jobs.Job("target", replace(machines.look(), cards=(replace(TARGET, device="cpu"),)), effort)
            self.assertEqual(job.run("kernels"), [])
        records.SHAPE.parse(job.record, "")
        card, [row] = job.record["card"], job.record["kernels"]
        self.assertEqual((card["name"], card["free_bytes"], card["power_limit_w"], job.record["machine"]["driver"]),
                         (TARGET.name, 10**9, 165.0, "591.44"))
        self.assertAlmostEqual(row["of_bandwidth"], row["bytes"] / row["time"]["median_s"] / 288e9)

    def test_an_exception_is_in_the_record(self) -> None:
        from scripts.gpu import engines, job
        made = job.Job("cpu", machines.look())
        error = BackendError("out of memory: 5 bytes more")
        with (mock.patch.object(engines, "run_forms", side_effect=error), self.assertRaises(BackendError)):
            made.run("engine")
        self.assertEqual(made.record["errors"], [{"part": "engine", "error": f"BackendError: {error}"}])
        self.assertTrue(made.record["out_of_memory"]["in_the_runs"])

    def one(self, change: Any) -> Any:
        """A patch: only the first workload, changed."""
        from scripts.gpu import workloads
        first = workloads.workloads

        def changed(device: Any, size: Any) -> Any:
            work = next(first(device, size))
            change(work)
            yield work

        return mock.patch.object(workloads, "workloads", changed)

    def test_a_wrong_number_and_changing_bits(self) -> None:
        wanted = lambda work: setattr(work, "wanted", lambda: work.fetch() + 1.0)  # noqa: E731
        self.assertRegex("".join(self.problems("kernels", self.one(wanted))), r"^copy, .* off; at most")
        bits = iter((b"a", b"b"))
        changing = lambda work: setattr(work, "bits", lambda: next(bits))  # noqa: E731
        self.assertRegex("".join(self.problems("kernels", self.one(changing))), "not the same bits in 2 runs$")

    def test_a_kernel_that_fails_its_checks(self) -> None:
        from starter.backends.cuda import kernels as warp_kernels
        patch = mock.patch.object(warp_kernels, "swiglu", warp_kernels.add)
        self.assertTrue(any("test_element_by_element" in problem for problem in self.problems("kernel_checks", patch)))

    def test_golden_tokens_distances_and_memory(self) -> None:
        from scripts.gpu import engines
        row = {"fixture": "f", "form": "float32", "requests": 2, "errors": ["out of memory: 5 bytes"], "golden": 2,
               "as_golden": 1, "as_numpy": 2, "kv_peak_pages": 1, "kv_peak_bytes": 1, "kv_peak_tail_bytes": 0,
               "planned_bytes": 1, "peak_bytes": 2, "driver_peak_bytes": None,
               "logits": {"largest": float("nan"), "rms": 0.0, "compared": 1}, "loss": 4.0, "loss_of_backend_cpu": 4.1}
        problems = self.problems("engine", mock.patch.object(engines, "run_forms", return_value=[row]))
        records.SHAPE.parse(self.job.record, "")  # NaN is null there
        wanted = ("out of memory", "1 of 2 outputs are the golden", "2 bytes were held, 1 planned",
                  "a logit is nan off", "the loss is 4.00000, on backend cpu 4.10000")
        for problem, words in zip(problems, wanted, strict=True):
            self.assertIn(words, problem)

    def test_a_refusal_that_did_not_come(self) -> None:
        from scripts.gpu import engines
        nothing = {"limit_bytes": 1, "pages_error": None, "served_after_pages": True, "request_error": None,
                   "served_after_request": True}
        given = {"injected": {"ended": "length", "error": None, "other_request_same": True, "served_after": True},
                 "real": {"asked_bytes": 9, "given": True, "error": None, "served_after": True}}
        problems = self.problems("memory", mock.patch.object(engines, "refusals", return_value=nothing),
                                 mock.patch.object(engines, "out_of_memory", return_value=given))
        self.assertEqual(len(problems), 4)


if __name__ == "__main__":
    unittest.main()
