"""Does the CUDA backend keep its promises on a GPU? Waits for a machine that has one; docs/gpu.md says what to do.

    P07_WIN_4060TI=1 python3 -m unittest discover -s acceptance -p "test_win_4060ti.py" -v      RTX 4060 Ti, Windows
    P07_GPU=1 python3 -m unittest discover -s acceptance -p "test_win_4060ti.py" -v             another NVIDIA card
    P07_GPU=cpu python3 -m unittest discover -s acceptance -p "test_win_4060ti.py" -v           a rehearsal, no GPU

First what the machine must have, each want a test that fails by its name; then the job, part by part. What comes out is
written to gpu-record.json and gpu-record.md in the folder P07_RECORD (by default a new one in acceptance/records/, for
a rehearsal in out/), whatever fails.
"""

from __future__ import annotations

import os
import sys
import unittest
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def kind_of_run(environment=os.environ):
    """"target", "gpu" or "cpu", by the variables; None where nobody asks. ValueError for a value that is none."""
    for variable, kinds in (("P07_WIN_4060TI", {"1": "target"}), ("P07_GPU", {"1": "gpu", "cpu": "cpu"})):
        value = environment.get(variable, "")
        if value and value not in kinds:
            raise ValueError(f"{variable} must be {' or '.join(kinds)}, not {value!r}")
        if value:
            return kinds[value]
    return None


def record_folder(kind, environment=os.environ):
    """Where the record goes: P07_RECORD, or a folder of this minute's own."""
    if named := environment.get("P07_RECORD"):
        return Path(named)
    name = f"{kind}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    return ROOT / "out" / f"gpu-{name}" if kind == "cpu" else ROOT / "acceptance" / "records" / name


@unittest.skip("SKIPPED: needs a GPU; set P07_WIN_4060TI=1 (RTX 4060 Ti, Windows), P07_GPU=1 (another NVIDIA card) or "
               "P07_GPU=cpu (a rehearsal without one)")
class SwitchedOff(unittest.TestCase):
    def test_gpu(self):
        """Stands for all of them."""


@unittest.skip("SKIPPED: this project has no CUDA backend; nothing of it is asked of students")
class NotHere(unittest.TestCase):
    def test_gpu(self):
        """Stands for all of them."""


class Machine(unittest.TestCase):
    """What the machine must have. ``machine`` may be set to another than this one."""

    machine: Any = None

    def needs(self, name):
        from scripts.gpu.machine import NEEDS, look
        if Machine.machine is None:
            Machine.machine = look()
        if sentence := NEEDS[name](Machine.machine):
            self.fail(sentence)

    def test_windows(self):
        self.needs("windows")

    def test_packages(self):
        self.needs("packages")

    def test_cuda(self):
        self.needs("cuda")

    def test_card(self):
        self.needs("card")

    def test_capability(self):
        self.needs("capability")

    def test_memory(self):
        self.needs("memory")

    def test_driver(self):
        self.needs("driver")


class Run(unittest.TestCase):
    """The job. Its parts are independent: one that fails leaves the others their turn, and all stand in the record."""

    effort: Any = None
    folder: Path
    job: Any

    @classmethod
    def setUpClass(cls):
        from scripts.gpu.machine import NEEDED, NEEDS, look
        from scripts.gpu.record import check_folder
        kind = kind_of_run()
        machine = Machine.machine or look()
        if unmet := [name for name in NEEDED[kind] if NEEDS[name](machine)]:
            raise unittest.SkipTest(f"SKIPPED: not run, as this machine lacks: {', '.join(unmet)}")
        cls.folder = record_folder(kind)
        check_folder(cls.folder)
        from scripts.gpu.job import Job
        cls.job = Job(kind, machine, cls.effort)

    @classmethod
    def tearDownClass(cls):
        if hasattr(cls, "job"):
            print(f"\nrecord: {cls.job.write(cls.folder)}", file=sys.stderr)

    def part(self, name):
        for problem in self.job.run(name):
            with self.subTest(problem):
                self.fail(problem)

    def test_kernel_checks(self):
        """Every kernel against the formula in float64, in every length, blocks of several sizes."""
        self.part("kernel_checks")

    def test_kernels(self):
        """Every kernel at size: right, 50 times the same bits, timed."""
        self.part("kernels")

    def test_engine(self):
        """Both fixtures in float32, float16, int8 and int4, and on int8 pages, against the CPU oracle."""
        self.part("engine")

    def test_memory(self):
        """Too much is refused, out of memory ends one request, and the next is served."""
        self.part("memory")

    def test_speed(self):
        """Tokens a second, beside NumPy and the standard library."""
        self.part("speed")


def load_tests(loader, tests, pattern):
    """What the run needs, then its parts in their order; or one line that says how to switch them on."""
    if not (ROOT / "scripts" / "gpu").is_dir():
        return loader.loadTestsFromTestCase(NotHere)
    kind = kind_of_run()
    if kind is None:
        return loader.loadTestsFromTestCase(SwitchedOff)
    from scripts.gpu.job import PARTS
    from scripts.gpu.machine import NEEDED
    return unittest.TestSuite([*(Machine(f"test_{name}") for name in NEEDED[kind]),
                               unittest.TestSuite(Run(f"test_{part}") for part in PARTS)])


if __name__ == "__main__":
    unittest.main()
