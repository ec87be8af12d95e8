"""The walls: what a submission's process may not do, it cannot; and it ends when its time is over.

Each script runs as a submission would. Where there are no namespaces the audit hook alone has to hold.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

from scripts.grading import sandbox
from scripts.grading.sandbox import Limits, Sandbox, has_namespaces, out_of_sight, run_lines
from tests.paths import ROOT

LIMITS = Limits(memory=512 << 20, file=1 << 20, disk=3 << 20, files=20)
TRIES = """
import json, os, sys, tempfile
def tried(name, act):
    try:
        act()
        print(json.dumps([name, "done"]), flush=True)
    except BaseException as error:
        print(json.dumps([name, type(error).__name__]), flush=True)
def connect():
    import socket
    with socket.socket() as one:
        one.connect(("127.0.0.1", {port}))
def fork_exec():
    import subprocess
    subprocess.run([sys.executable, "-c", ""])
def kill():
    os.kill(os.getppid(), 9)
def outside():
    open({outside!r}, "w")
def remove():
    os.remove({inside!r})
def inside():
    with tempfile.TemporaryDirectory() as folder:
        open(os.path.join(folder, "a"), "w").close()
def memory():
    bytearray(1 << 30)
def big_file():
    with open("{scratch}/big", "wb") as file:
        file.write(bytes(2 << 20))
def library():
    import ctypes
    ctypes.CDLL(None)
def objects():
    import gc
    gc.get_objects()
def hooked():
    (lambda: 0).__code__ = (lambda: 1).__code__
for act in (connect, fork_exec, kill, outside, remove, inside, memory, big_file, library, objects, hooked):
    tried(act.__name__, act)
print(json.dumps(["environment", sorted(os.environ)]))
print(json.dumps(["read", open(__file__).read()[:1] is not None]))
"""


class Walls(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name).resolve()
        self.scratch = self.place / "scratch"
        self.scratch.mkdir()

    def run_script(self, code, seconds=30.0, limits=LIMITS, job=None, hide=()):
        """What it said, line by line, and how it ended."""
        script = self.place / "script.py"
        script.write_text(code, encoding="utf-8")
        said = []
        box = Sandbox(self.place, self.scratch, limits, hide)
        ended = run_lines(box.command(str(script)), job, seconds, said.append, box)
        return [line.decode().rstrip() for line in said], ended

    def try_all(self):
        kept = self.place / "kept"
        kept.write_text("", encoding="utf-8")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            lines, ended = self.run_script(TRIES.format(
                port=listener.getsockname()[1], outside=str(self.place / "outside"), inside=str(kept),
                scratch=self.scratch.as_posix()))
        self.assertEqual(ended, "ended with status 0")
        self.assertTrue(kept.exists())
        self.assertFalse((self.place / "outside").exists())
        return dict(map(json.loads, lines))

    def check(self, told):
        for name in ("connect", "fork_exec", "kill", "outside", "remove", "library", "objects", "hooked"):
            self.assertNotEqual(told[name], "done", f"{name} was done")
        self.assertEqual(told["inside"], "done")
        self.assertTrue(told["read"])
        self.assertFalse([name for name in told["environment"] if name.startswith(("P07", "SECRET"))])

    @mock.patch.dict(os.environ, SECRET="x", P07_SEED="x")
    def test_all_walls(self):
        told = self.try_all()
        self.check(told)
        if sys.platform.startswith("linux"):
            self.assertEqual((told["memory"], told["big_file"]), ("MemoryError", "OSError"))

    @mock.patch.dict(os.environ, SECRET="x", P07_SEED="x")
    def test_the_audit_hook_alone(self):
        with mock.patch.object(sandbox, "has_namespaces", lambda: False):
            told = self.try_all()
        self.check(told)
        for name in ("connect", "fork_exec", "kill", "outside", "remove", "objects", "hooked"):
            self.assertEqual(told[name], "PermissionError", name)

    @unittest.skipUnless(has_namespaces(), "SKIPPED: needs namespaces: Linux with util-linux")
    def test_others_are_out_of_sight(self):
        with tempfile.TemporaryDirectory() as other:
            Path(other, "work.py").write_text("secret", encoding="utf-8")
            lines, ended = self.run_script(f"import os\nprint(os.path.exists({other + '/work.py'!r}), os.path.exists("
                                           f"{str(ROOT / 'starter')!r}))\n", hide=(Path(other),))
        self.assertEqual((lines, ended), (["False True"], "ended with status 0"))

    def test_what_can_be_hidden(self):
        inner = self.place / "a" / "b"
        inner.mkdir(parents=True)
        folders = (inner, self.place / "a", ROOT, Path(sys.prefix), self.place / "no", self.scratch)
        self.assertEqual(out_of_sight(folders, self.scratch), [self.place / "a"])

    def test_time(self):
        lines, ended = self.run_script("print('begun', flush=True)\nwhile True: pass\n", seconds=1.5)
        self.assertEqual(lines, ["begun"])
        self.assertEqual(ended, "was stopped: it took more than 1.5 seconds")

    def test_disk(self):
        code = (f"import time, pathlib\nfor i in range(200):\n"
                f"    pathlib.Path(r'{self.scratch}', str(i)).write_bytes(bytes(200_000))\ntime.sleep(60)\n")
        _, ended = self.run_script(code, limits=replace(LIMITS, files=10_000))
        self.assertRegex(ended, "was stopped: it wrote .* files of")

    def test_an_early_end_is_told(self):
        self.assertEqual(self.run_script("import os\nos._exit(0)\n"), ([], "ended with status 0"))
        self.assertEqual(self.run_script("raise SystemExit(3)\n"), ([], "ended with status 3"))

    def test_the_job_comes_on_standard_input(self):
        lines, _ = self.run_script("import sys\nprint(sys.stdin.readline(), end='')\n", job={"a": 1})
        self.assertEqual(lines, ['{"a": 1}'])

    def test_the_walls_are_named(self):
        walls = Sandbox(self.place, self.scratch, LIMITS).walls
        self.assertIn("time", walls)
        self.assertEqual(any("namespaces" in wall for wall in walls), has_namespaces())


if __name__ == "__main__":
    unittest.main()
