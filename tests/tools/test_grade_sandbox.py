"""The walls: what a submission's process may not do, it cannot; and it ends when its time is over.

Each script runs as a submission would. Where there are no namespaces the audit hook alone has to hold.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from unittest import mock

from scripts.grading import sandbox
from scripts.grading.sandbox import Limits, Sandbox, ended, has_filter, has_namespaces, out_of_sight, run_lines
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


AROUND = """
import json, os, sys
def tried(name, act):
    try:
        act()
        print(json.dumps([name, "done"]), flush=True)
    except BaseException as error:
        print(json.dumps([name, type(error).__name__]), flush=True)
def module(name):
    return lambda: __import__(name)
def again(name):
    def act():
        import importlib.util, importlib.machinery, _imp
        sys.modules.pop(name, None)
        spec = importlib.machinery.BuiltinImporter.find_spec(name) or importlib.util.find_spec(name)
        return importlib.util.module_from_spec(spec).fork_exec
    return act
def fork_exec():
    import _posixsubprocess
    _posixsubprocess.fork_exec([b"/bin/true"], [b"/bin/true"], True, (), None, [], -1, -1, -1, -1, -1, -1, -1, -1,
                               True, False, -1, None, None, -1, None, True)
def socket():
    import socket
    socket.socket().listen()
def fifo():
    os.mkfifo({outside!r})
def posix_fifo():
    import posix
    posix.mkfifo({outside!r})
def code():
    (lambda: 0).__code__.replace(co_code=b"")
def harmless():
    import subprocess, tempfile, unittest, threading, json, dataclasses, concurrent.futures
    one = threading.Thread(target=int)
    one.start()
    one.join()
tried("harmless", harmless)
for name in ("_posixshmem", "_ctypes", "ctypes", "readline", "sqlite3", "_dbm", "_tkinter", "_testcapi",
             "_xxsubinterpreters"):
    tried(name, module(name))
tried("fork_exec", fork_exec)
tried("fork_exec again", again("_posixsubprocess"))
for act in (socket, fifo, posix_fifo, code):
    tried(act.__name__, act)
tried("multiprocessing", lambda: __import__("multiprocessing.synchronize").Lock())
"""
GRADER = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from scripts.grading import sandbox
place = Path({place!r})
sandbox.has_namespaces, sandbox.has_filter = lambda: {namespaces}, lambda: {filtered}
box = sandbox.Sandbox(place, place / "scratch", sandbox.Limits())
sandbox.run_lines(box.command(str(place / "script.py")), None, 600, print, box)
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

    @unittest.skipUnless(has_namespaces(), "SKIPPED: needs namespaces: Linux with util-linux")
    def test_of_a_hidden_folder_python_alone_stays(self):
        """A home in which Python lies, say."""
        home = self.place / "home"
        for name in ("python", "diary"):
            (home / name).mkdir(parents=True)
            (home / name / "file").write_text(name, encoding="utf-8")
        (home / "notes").write_text("mine", encoding="utf-8")
        work = self.place / "work"
        (work / "scratch").mkdir(parents=True)
        script = work / "script.py"
        script.write_text(f"import os\nhome = {str(home)!r}\nprint([name for name in ('python', 'diary', 'notes') if "
                          "os.path.exists(os.path.join(home, name))], open(home + '/python/file').read())\n",
                          encoding="utf-8")
        said = []
        with mock.patch.object(sandbox, "PYTHON", (*sandbox.PYTHON, home / "python")):
            box = Sandbox(work, work / "scratch", LIMITS, (home,))
            how = run_lines(box.command(str(script)), None, 30, said.append, box)
        self.assertEqual((said, how), ([b"['python'] python\n"], "ended with status 0"))

    def test_what_can_be_hidden(self):
        inner = self.place / "a" / "b"
        inner.mkdir(parents=True)
        folders = (inner, self.place / "a", self.place / "no", self.scratch, Path(self.place.anchor))
        self.assertEqual(out_of_sight(folders, self.scratch), [self.place / "a"])

    def test_ways_around_the_hook(self):
        """What CPython's C modules do without an audit event."""
        outside = self.place / "outside"
        code = AROUND.format(outside=str(outside))
        for namespaces in {has_namespaces(), False}:
            for filtered in {has_filter(), False}:
                with self.subTest(namespaces=namespaces, filtered=filtered), \
                        mock.patch.object(sandbox, "has_namespaces", lambda: namespaces), \
                        mock.patch.object(sandbox, "has_filter", lambda: filtered):  # noqa: B023
                    lines, how = self.run_script(code)
                    told = dict(map(json.loads, lines))
                    self.assertEqual((how, told.pop("harmless")), ("ended with status 0", "done"))
                    self.assertEqual(len(told), 16)
                    self.assertNotIn("done", told.values(), told)
                    self.assertFalse(outside.exists())

    @unittest.skipUnless(has_filter(), "SKIPPED: needs seccomp: Linux")
    def test_no_process_even_past_the_hook(self):
        """The filter alone, without any hook; the process ends with the one that started it."""
        script = self.place / "script.py"
        script.write_text("import os, signal, socket, sys, threading\n"
                          "for act in (os.fork, lambda: os.execv(sys.executable, ['x']), socket.socket,\n"
                          "            lambda: os.kill(os.getppid(), 0), lambda: os.mkfifo('x')):\n"
                          "    try: act(); print('done')\n    except PermissionError: print('held')\n"
                          "one = threading.Thread(target=print, args=('thread',)); one.start(); one.join()\n"
                          "socket.socketpair()\nos.kill(os.getpid(), 0)\n", encoding="utf-8")
        done = subprocess.run([*sandbox.GUARD, str(sandbox.HERE / "guard.py"), "0", "1", sys.executable, str(script)],
                              capture_output=True, encoding="utf-8", check=False, cwd=self.scratch)
        self.assertEqual((done.stdout.split(), done.stderr, done.returncode), (["held"] * 5 + ["thread"], "", 0))

    @unittest.skipUnless(sys.platform.startswith("linux"), "SKIPPED: needs Linux, whose kernel does it")
    def test_all_ends_with_the_grader(self):
        """Also by SIGKILL, which nobody can answer: the looping process is gone, with namespaces and without."""
        pid = self.scratch / "pid"
        (self.place / "script.py").write_text(f"import os, time\nopen({str(pid)!r}, 'w').close()\nwhile True: pass\n",
                                              encoding="utf-8")
        for namespaces, filtered in {(has_namespaces(), has_filter()), (False, has_filter()), (False, False)}:
            with self.subTest(namespaces=namespaces, filtered=filtered):
                pid.unlink(missing_ok=True)
                grader = subprocess.Popen([sys.executable, "-c", GRADER.format(
                    root=str(ROOT), place=str(self.place), namespaces=namespaces, filtered=filtered)])
                try:
                    self.wait_for(pid.exists)
                    self.assertTrue(self.loops())
                finally:
                    grader.kill()
                    grader.wait()
                self.wait_for(lambda: not self.loops())

    def wait_for(self, condition):
        end = monotonic() + 30
        while not condition():
            self.assertLess(monotonic(), end)
            sleep(0.05)

    def loops(self):
        """Numbers of the processes whose command line names this test's folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if int(path.parent.name) != os.getpid() and str(self.place / "script.py").encode() in path.read_bytes():
                    found.append(path.parent.name)
        return found

    def test_the_end_in_words(self):
        self.assertEqual(ended(3), "ended with status 3")
        if os.name == "posix":
            self.assertIn("SIGSEGV (segmentation fault", ended(-11))
            _, how = self.run_script("import faulthandler\nfaulthandler._read_null()\n")
            self.assertIn("SIGSEGV", how)

    def test_the_last_words(self):
        script = self.place / "script.py"
        script.write_text("import sys\nsys.stderr.write('x' * 100_000 + 'the end')\n", encoding="utf-8")
        box, said = Sandbox(self.place, self.scratch, LIMITS), []
        run_lines(box.command(str(script)), None, 30, print, box, said=said)
        self.assertEqual([text[-9:] for text in said], ["xxthe end"])
        self.assertLessEqual(len(said[0]), sandbox.TAIL)

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
