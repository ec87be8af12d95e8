"""Runs a submission's code where it can do no harm, and for a limited time.

    box = Sandbox(tree, scratch, Limits())
    box.command("starter/driver.py", ...)       the command that runs a Python script behind all walls that there are
    box.own("worker.py")                        a script of the grader, for ``command``: a copy, beside the tree
    box.walls                                   what these are, in words, for the report

    Linux with util-linux   namespaces: no network; own process table, so that nobody outside can be seen, signalled or
                            traced, and all dies with the first process; every file system read-only but the scratch
                            folder; no rights to change that; the teacher's tree, with its complete engine,
                            other submissions, results, the home and the temporary folder are out of sight, but for
                            Python where it lies in them. Beside them all that follows
    Linux with seccomp      no system call that starts a process or program, opens a socket or signals others
                            (``guard.py``)
    POSIX                   resource limits: memory (not on macOS), size of a file
    everywhere              an audit hook against network, processes, writing elsewhere and reading what is to be out of
                            sight (``confine.py``); a clean environment; a watcher that ends the process tree at the end
                            of its time, when the scratch folder holds too much, or when the grader is stopped; where
                            the grader itself is killed, the kernel (Linux) or a thread in each process ends it

Without namespaces the hook alone keeps the teacher's tree from being read, and a submission may see that files exist:
``scripts/grade.py`` then wants --unsafe.
The judge and the reader of papers do see that tree: none of a submission's code runs in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import site
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Event, Thread
from time import monotonic

HERE = Path(__file__).resolve().parent
TEACHER = HERE.parent.parent
# What runs beside a submission
OWN = ("confine.py", "guard.py", "run_in_process.py", "worker.py", "worker_wire.py", "wire.py", "syntax.py")
PYTHON = tuple(dict.fromkeys(Path(place).resolve() for place in (
    sys.prefix, sys.base_prefix, Path(os.__file__).parent, Path(sys.executable).parent,
    Path(sys.executable).resolve().parent)))
TAIL = 8_000  # bytes of what a process said last on standard error
GUARD = (sys.executable, "-I", "-S")  # how guard.py is run: it needs nothing that is installed
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "SYSTEMROOT", "WINDIR")
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--net", "--ipc",
           "--kill-child")
# In the new namespaces: what stays in sight (the work folder, and Python or the teacher's tree where they lie in what
# goes) is put aside; the hidden folders are covered by empty ones; then what was put aside returns to its place. The
# scratch folder stays writable, all else becomes read-only; the current folder is entered anew, since from the old one
# ".." may lead to what is covered; then one more user namespace, whose rights do not reach the mounts of this one.
ENTER = r"""
mount --make-rprivate / && mount -t tmpfs -o size=64k,mode=755 aside /sys || exit 97
{aside}
{hidden}
{back}
umount -l /sys && mount --bind {scratch} {scratch} || exit 97
while read -r _ _ _ _ place _; do
  case $place in {scratch}|/proc) ;; *) mount -o remount,bind,ro "$place" 2>/dev/null ;; esac
done < /proc/self/mountinfo
cd "$PWD" 2>/dev/null || cd {work} || exit 97
exec unshare --user --map-current-user -- "$@"
"""


@dataclass(frozen=True)
class Limits:
    """What a submission may use. Seconds: ``test`` of one test, ``start`` of a process before its first, ``all`` of all
    tests together."""

    test: int = 30
    start: int = 60
    all: int = 1_200
    memory: int = 2 << 30
    file: int = 32 << 20
    disk: int = 128 << 20
    files: int = 2_000
    processes: int | None = None  # RLIMIT_NPROC counts all of a user's; the audit hook allows none at all


def out_of_sight(folders, work: Path) -> list[Path]:
    """Those that can be hidden. One in another goes with that; one that is the work folder, or the root, stays."""
    found = [place for place in dict.fromkeys(Path(folder).resolve() for folder in folders)
             if place.is_dir() and place not in (work, Path(place.anchor))]
    return [place for place in found if not any(other in place.parents for other in found)]


@lru_cache
def has_namespaces() -> bool:
    """Can this user make namespaces here, and such ones inside of them, as the judge does for the submission?"""
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve() / "scratch"
        scratch.mkdir()
        hidden = out_of_sight((tempfile.gettempdir(),), scratch.parent)
        command = enclosed(enclosed(["touch", str(scratch / "written")], scratch, hidden, ()), scratch, hidden, ())
        try:
            probe = subprocess.run(command, capture_output=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return probe.returncode == 0 and (scratch / "written").exists()


@lru_cache
def has_filter() -> bool:
    """Does Python start behind the filter of ``guard.py`` here, and can it start nothing more?"""
    if not sys.platform.startswith("linux"):
        return False
    code = "import os\ntry: os.fork()\nexcept PermissionError: print('held')"
    try:
        probe = subprocess.run([*GUARD, str(HERE / "guard.py"), "0", "1", sys.executable, "-c", code],
                               capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.stdout.strip() == b"held"


def enclosed(command: list[str], scratch: Path, hidden: Iterable[Path], kept: Iterable[Path]) -> list[str]:
    """A command in namespaces of its own, which can change nothing but the scratch folder, and sees of the folders
    ``hidden`` only the work folder and what of ``kept`` lies in them."""
    hidden = list(hidden)
    inside = [place for place in dict.fromkeys((scratch.parent, *kept))
              if any(place.is_relative_to(folder) for folder in hidden) or place == scratch.parent]
    places = [(shlex.quote(str(place)), f"/sys/{number}") for number, place in enumerate(inside)]
    script = ENTER.format(
        aside="\n".join(f"mkdir {to} && mount --rbind {place} {to} || exit 97" for place, to in places),
        hidden="\n".join(f"mount -t tmpfs -o size=64k,mode=755 hidden {shlex.quote(str(place))} || exit 97"
                         for place in hidden),
        back="\n".join(f"mkdir -p {place} && mount --rbind {to} {place} || exit 97" for place, to in places),
        scratch=shlex.quote(str(scratch)), work=shlex.quote(str(scratch.parent)))
    return [*UNSHARE, "sh", "-c", script, "sh", *command]


class Sandbox:
    """The walls around one submission: it may read ``tree``, and write to ``scratch``, both in one work folder. What is
    in the folders ``hide`` is none of its business, and no more is the teacher's tree."""

    def __init__(self, tree: Path, scratch: Path, limits: Limits, hide: tuple[Path, ...] = ()) -> None:
        self.tree, self.scratch, self.limits = tree, scratch, limits
        self.namespaces, self.filter = has_namespaces(), has_filter()
        others = (Path(tempfile.gettempdir()), Path.home(), *hide)
        installed = (Path(place, "starter") for place in sys.path)  # a complete engine, too
        secret = (place.resolve() for place in (*others, TEACHER, *installed))
        self.secret = [place for place in secret if place != Path(place.anchor)]
        self.hidden = out_of_sight(others, scratch.parent)  # from the judge, too
        self.out_of_sight = out_of_sight((*others, TEACHER, *self.secret), scratch.parent)
        self._own = scratch.parent / "own"
        self._own.mkdir(exist_ok=True)
        for name in OWN:
            shutil.copyfile(HERE / name, self._own / name)

    @property
    def walls(self) -> list[str]:
        """What holds the submission here."""
        found = ["audit hook", "time", "disk", *["system calls"] * self.filter]
        if os.name == "posix":
            found += ["file size"] if sys.platform == "darwin" else ["memory", "file size"]
        return sorted(found + ["network, processes and files by namespaces"] * self.namespaces)

    def own(self, name: str) -> str:
        """A script of the grader's, where a submission's process can read it."""
        return str(self._own / name)

    def command(self, *script: str, alone: bool = False, trusted: bool = False, nested: bool = False) -> list[str]:
        """A Python script and its arguments, behind the walls. ``alone``: without packages that are installed here;
        ``trusted``: with the teacher's tree in sight, for a script that runs none of the submission's code; ``nested``:
        for another process than this one to start."""
        job = {"memory": self.limits.memory, "file": self.limits.file, "processes": self.limits.processes,
               "writable": [str(self.scratch)], "hidden": [] if trusted else list(map(str, self.secret)),
               "readable": [str(self.scratch.parent), site.getusersitepackages(), *map(str, PYTHON)]}
        inner = [sys.executable, *["-S"] * alone, self.own("confine.py"), json.dumps(job), *script]
        if not self.namespaces:
            return self._guarded(inner, not nested, self.filter)
        inner = self._guarded(inner, False, self.filter)
        hidden, kept = (self.hidden, (TEACHER, *PYTHON)) if trusted else (self.out_of_sight, PYTHON)
        return self._guarded(enclosed(inner, self.scratch, hidden, kept), not nested, False)

    def enclose(self, command: list[str]) -> list[str]:
        """The judge's command, which can change nothing but the scratch folder, where there are namespaces: it writes
        into that folder, where the submission might put a link to somewhere else."""
        if not self.namespaces:
            return self._guarded(command, True, False)
        return self._guarded(enclosed(command, self.scratch, self.hidden, (TEACHER, *PYTHON)), True, False)

    def _guarded(self, command: list[str], mine: bool, filtered: bool) -> list[str]:
        """A command that ends with who starts it; ``mine``: that is this process. Elsewhere than on Linux it looks
        after that itself (``confine.py``, ``judge.py``)."""
        if not sys.platform.startswith("linux"):
            return command
        return [*GUARD, self.own("guard.py"), str(os.getpid() * mine), str(int(filtered)), *command]

    def python(self) -> str | None:
        """A program that stands for Python and runs a script behind the walls, for the test that starts the driver;
        None on Windows, where the driver then runs as any program does, for the seconds that the test gives it."""
        if os.name != "posix":
            return None
        path = self.scratch.parent / "confined-python"
        path.write_text(f"#!/bin/sh\nexec {shlex.join(self.command(nested=True))} \"$@\"\n", encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    def environment(self) -> dict[str, str]:
        """What the submission gets to know of this process's environment."""
        return {**{name: os.environ[name] for name in KEPT if name in os.environ}, "TMPDIR": str(self.scratch),
                "TEMP": str(self.scratch), "TMP": str(self.scratch), "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONUTF8": "1"}

    def too_much(self) -> str | None:
        """What is wrong with the scratch folder, in words."""
        size = count = 0
        for folder, _, names in os.walk(self.scratch):
            count += len(names)
            for name in names:
                with contextlib.suppress(OSError):
                    size += os.lstat(os.path.join(folder, name)).st_size
        if size > self.limits.disk or count > self.limits.files:
            return f"it wrote {count} files of {size} bytes; {self.limits.files} of {self.limits.disk} are allowed"
        return None


class Stopped(BaseException):
    """The grader is to end."""


_stop = Event()


def stop_all() -> None:
    """End whatever runs behind walls, and let nothing more begin: for a grader that is told to end."""
    _stop.set()


def ended(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name, words = signal.Signals(-status).name, signal.strsignal(-status) or ""
    except ValueError:
        return f"was ended by signal {-status}"
    return f"was ended by {name} ({words.lower()})"


def run_lines(command, job, seconds, on_line, box, silence=None, said=None):
    """Run a command that is told its job in one line and answers in lines; how it ended, in words. ``said``: a list
    that gets what came last on standard error, as text.

    The whole process tree is ended when its time is over, when there was no line for ``silence`` seconds, when the
    scratch folder holds too much, and at the end. Raises Stopped after ``stop_all``."""
    if _stop.is_set():
        raise Stopped
    process = subprocess.Popen(command, cwd=box.tree, env=box.environment(), stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    stopped: list[str] = []
    done, heard = Event(), monotonic()

    def watch():
        end = monotonic() + seconds
        while not done.wait(0.25):
            if _stop.is_set():
                problem = "the grader was stopped"
            elif monotonic() > end:
                problem = f"it took more than {seconds:g} seconds"
            elif silence and monotonic() > heard + silence:
                problem = f"nothing was heard of it for {silence:g} seconds"
            else:
                problem = box.too_much()
            if problem:
                stopped.append(f"was stopped: {problem}")
                end_tree(process)
                return

    tail: deque[bytes] = deque(maxlen=2)

    def listen():
        assert process.stderr
        last = b""
        with contextlib.suppress(OSError, ValueError):
            while part := os.read(process.stderr.fileno(), 1 << 16):
                last = (last + part)[-TAIL:]
        tail.append(last)

    watcher, listener = Thread(target=watch, daemon=True), Thread(target=listen, daemon=True)
    watcher.start()
    listener.start()
    try:
        assert process.stdin and process.stdout  # both are pipes
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.close()
        while line := process.stdout.readline(1 << 20):
            heard = monotonic()
            on_line(line)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed its output; now it should end by itself
            process.wait(5)
    finally:
        done.set()
        watcher.join()
        end_tree(process)
        process.wait()
        listener.join(5)
        if process.stdout:
            process.stdout.close()
        if process.stderr and not listener.is_alive():
            process.stderr.close()
    if _stop.is_set():
        raise Stopped
    if said is not None:
        said += [part.decode(errors="replace") for part in tail]
    return stopped[0] if stopped else ended(process.returncode)


def end_tree(process):
    """End a process and what it started."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        subprocess.run(["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True, check=False)
