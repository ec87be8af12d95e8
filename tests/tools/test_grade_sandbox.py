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
from scripts.grading.sandbox import Limits, Sandbox, beside, has_namespaces, out_of_sight, run_lines
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
def move():
    path = os.path.join("{scratch}", "moved")
    open(path, "w").close()
    try:
        os.rename(path, {outside!r})
    finally:
        os.remove(path)
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
for act in (connect, fork_exec, kill, outside, remove, move, inside, memory, big_file, library, objects, hooked):
    tried(act.__name__, act)
print(json.dumps(["environment", sorted(os.environ)]))
print(json.dumps(["read", open(__file__).read()[:1] is not None]))
"""


READS = """
import json, os, sys
from importlib.machinery import SourceFileLoader
said = open("/proc/self/cmdline").read() if os.path.exists("/proc/self/cmdline") else ""
root = {root!r}
def opened(*parts):
    return lambda: open(os.path.join(root, *parts), "rb").close()
def leads_in():
    top = os.path.abspath(os.sep)
    model = os.path.join(os.path.relpath(root, top), "starter", "model.py")
    os.close(os.open(model, os.O_RDONLY, dir_fd=os.open(top, os.O_RDONLY)))
def moved_in():
    os.chdir(os.path.join(root, "starter"))
    open("model.py").close()
def linked():
    os.symlink(os.path.join(root, "starter"), {link!r})
    open(os.path.join({link!r}, "model.py")).close()
tries = dict(module=SourceFileLoader("m", os.path.join(root, "starter", "model.py")).load_module,
             listing=lambda: os.listdir(os.path.join(root, "starter"))[0], design=opened("DESIGN.md"),
             wrong=opened("acceptance", "wrong", "__init__.py"), tests=opened("tests", "paths.py"),
             leads_in=leads_in, moved_in=moved_in, linked=linked, other={other}.open, mine=open(__file__).close)
for name, act in tries.items():
    try:
        act()
        print(json.dumps([name, "done"]))
    except Exception as error:
        print(json.dumps([name, type(error).__name__]))
print(json.dumps(["told", root in said.partition("{{")[0]]))
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
        for name in ("connect", "fork_exec", "kill", "outside", "remove", "move", "library", "objects", "hooked"):
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
        for name in ("connect", "fork_exec", "kill", "outside", "remove", "move", "objects", "hooked"):
            self.assertEqual(told[name], "PermissionError", name)

    @unittest.skipUnless(has_namespaces(), "SKIPPED: needs namespaces: Linux with util-linux")
    def test_others_are_out_of_sight(self):
        with tempfile.TemporaryDirectory() as other:
            Path(other, "work.py").write_text("secret", encoding="utf-8")
            lines, ended = self.run_script(f"import os\nprint(os.path.exists({other + '/work.py'!r}), os.path.exists("
                                           f"{str(ROOT / 'starter')!r}))\n", hide=(Path(other),))
        self.assertEqual((lines, ended), (["False False"], "ended with status 0"))

    def test_the_teachers_tree_is_out_of_reach(self):
        """Also the results, or whatever else is to be hidden; by the audit hook alone, too."""
        with tempfile.TemporaryDirectory() as out:
            secret = Path(out, "result.json")
            secret.write_text("{}", encoding="utf-8")
            code = READS.format(root=str(ROOT.resolve()), link=str(self.scratch / "link"),
                                other=f"__import__('pathlib').Path({str(secret)!r})")
            for namespaces in {has_namespaces(), False}:
                with self.subTest(namespaces=namespaces), \
                        mock.patch.object(sandbox, "has_namespaces", lambda: namespaces):  # noqa: B023
                    lines, ended = self.run_script(code, hide=(Path(out),))
                    told = dict(map(json.loads, lines))
                    self.assertEqual((ended, told.pop("mine")), ("ended with status 0", "done"))
                    self.assertFalse(told.pop("told"))
                    self.assertEqual(len(told), 9)
                    self.assertNotIn("done", told.values(), told)

    def test_python_in_the_teachers_tree_stays(self):
        for name in ("starter", "env/lib", "docs"):
            (self.place / "t" / name).mkdir(parents=True)
        tree = self.place / "t"
        self.assertEqual(beside(tree, (tree / "env",)), [tree / "docs", tree / "starter"])
        self.assertEqual(beside(tree, (ROOT,)), [tree])

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
