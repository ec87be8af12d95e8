"""Runs acceptance tests against a submission that lives in another process: python3 judge.py, a job on standard input.

The tests are the ordinary ones, and so is their code; but ``starter``, as they import it, is a package of remote
objects (``wire.py``), and what the oracle's weights are drawn with is the teacher's. So nothing that the submission
patches, prints, writes or ends has to do with how a test comes out. Nor is any process of the submission told what is
drawn from here. For each test it prints [id, state, message], a line of JSON.

A job: {"tree", "teacher", "scratch": folders, "ids": tests, "seed", "hang": seconds a test may take, "worker": command
of the submission's process, "python": what stands for Python where a test starts a program}.
"""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Timer
from types import ModuleType, SimpleNamespace

sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from scripts.grading.guard import end_with_parent
from scripts.grading.judge_wire import JudgeWire
from scripts.grading.sandbox import ended
from scripts.grading.wire import Gone

TRUSTED = ("starter.base.weights",)  # what the oracle computes with
ENDED = "it has ended"
GENUINE = {"time": ("perf_counter", "monotonic", "time"), "os": ("_exit",), "sys": ("exit",),
           "json": ("loads", "dumps")}


class RemoteModule(ModuleType):
    """A module of the submission. Its names are asked for when they are used."""

    def __init__(self, name, wire):
        super().__init__(name)
        self.__path__ = []
        self._wire, self._remote = wire, None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if self._remote is None:
            self._remote = self._wire.module(self.__name__)
        return getattr(self._remote, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports every other module of ``starter`` as a remote one."""

    def __init__(self, wire):
        self._wire = wire

    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name.startswith("starter.") else None

    def create_module(self, spec):
        return RemoteModule(spec.name, self._wire)

    def exec_module(self, module):
        pass


def install(wire, teacher):
    """From here on ``starter`` is the submission's, but for what is trusted."""
    sys.path.insert(0, teacher)
    trusted = {name: importlib.import_module(name) for name in TRUSTED}
    sys.path.remove(teacher)
    for name in [name for name in sys.modules if name.partition(".")[0] == "starter"]:
        del sys.modules[name]
    sys.modules.update(trusted)
    sys.modules["starter"] = RemoteModule("starter", wire)
    sys.meta_path.insert(0, Finder(wire))


def measure_remotely(wire, genuine):
    """What tests measure in their own process is measured in the submission's."""
    names = "hidden_service", "m5_quantization", "m6_end_to_end"
    hidden_service, m5_quantization, m6_end_to_end = (vars(importlib.import_module(name)) for name in names)
    hidden_service["GENUINE"] = m6_end_to_end["GENUINE"] = genuine
    m5_quantization["tracemalloc"] = wire.module("tracemalloc")
    remote_gc = wire.module("gc")
    m5_quantization["gc"] = SimpleNamespace(collect=lambda: (gc.collect(), remote_gc.collect()))


class Watched:
    """Stands for a module of the submission's process in the check that nothing in it was replaced."""

    def __init__(self, wire, name):
        self.__name__, self._module = name, wire.module(name)

    def __getattr__(self, name):
        return getattr(self._module, name)


def main():
    if not sys.platform.startswith("linux"):  # there guard.py has seen to it
        end_with_parent()
    job = json.loads(sys.stdin.readline())
    limit_memory(job["memory"])
    output = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    try:
        judge(job, output)
    except Gone as error:
        output.write(json.dumps([None, "ended", str(error)]) + "\n")


def judge(job, output):
    """Make ``starter`` remote, then run the tests."""
    os.environ.update(P07_SEED=job["seed"], P07_HANG_SECONDS=str(job["hang"]))
    tempfile.tempdir = job["scratch"]
    errors = teachers_errors(job["teacher"])
    worker = subprocess.Popen(job["worker"], cwd=job["tree"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env=clean_environment())
    wire = JudgeWire(worker.stdout, worker.stdin)
    watched = [(Watched(wire, module), name) for module, names in GENUINE.items() for name in names]
    genuine = [(module, name, getattr(module, name)) for module, name in watched]  # before anything of it is imported
    install(wire, job["teacher"])
    sys.path[:0] = [job["tree"], str(Path(job["tree"], "acceptance"))]
    check_errors(errors)
    import harness
    wire.lent = (harness.Meter, harness.Clock)
    from acceptance.child import run_here
    measure_remotely(wire, genuine)
    for name in ("P07_SEED", "P07_HANG_SECONDS"):
        del os.environ[name]
    if job["python"]:
        sys.executable = job["python"]
    try:
        for test_id in job["ids"]:
            watchdog = Timer(job["hang"] + 1, worker.kill)
            watchdog.start()
            [(_, outcome)] = run_here([test_id])
            watchdog.cancel()
            state, message = outcome.state, outcome.message
            if wire.broken.endswith(ENDED):
                message = message.replace(wire.broken, f"{wire.broken}: it {how(worker)}")
            if wire.broken and state == "passed":
                state, message = "failed", f"happened: {wire.broken}"
            output.write(json.dumps([test_id, state, message]) + "\n")
            if wire.broken or worker.poll() is not None:
                break
    finally:
        worker.kill()


def how(worker):
    """How the submission's process ended, in words."""
    try:
        return ended(worker.wait(2))
    except subprocess.TimeoutExpired:
        return "closed its end of the wire"


def limit_memory(most):
    """What the submission sends is bounded, and so is what becomes of it here."""
    try:
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (ImportError, ValueError, OSError):  # Windows; macOS keeps no such limit
        return


def teachers_errors(teacher):
    """Names of the error classes and of their bases, read without an import of what will be remote."""
    tree = ast.parse(Path(teacher, "starter", "errors.py").read_text(encoding="utf-8"))
    return {node.name: list(map(ast.unparse, node.bases)) for node in tree.body if isinstance(node, ast.ClassDef)}


def check_errors(errors):
    """A test that something is refused is worth what its error is: were that Exception itself, a stub would refuse."""
    import starter
    for name, bases in errors.items():
        kind = getattr(starter, name)
        if not isinstance(kind, type) or [base.__name__ for base in kind.__bases__] != bases:
            raise Gone(f"starter/errors.py is given, and its {name} is not what it was")


def clean_environment():
    """What the submission's process gets to know of this one's environment."""
    kept = ("PATH", "HOME", "LANG", "LC_ALL", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR")
    return {**{name: os.environ[name] for name in kept if name in os.environ},
            "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}


if __name__ == "__main__":
    main()
