"""Walls that a process puts up around itself before the submission's code runs in it: python3 confine.py JOB SCRIPT ...

JOB is a JSON object: {"memory": bytes, "file": bytes, "processes": n or null, "writable": [folders], "hidden":
[folders], "readable": [folders]}. A readable folder in a hidden one can be read, a hidden one in a readable one cannot.

    everywhere      an audit hook (PEP 578), which Python code cannot take away again, refuses sockets, new processes,
                    signals, ctypes, writing outside of the writable folders, reading what is hidden or another process
                    has in memory, and looking for other objects in one's own
    POSIX           resource limits: address space (not kept by macOS), size of a file, open files, core dumps
    Linux           the namespaces that ``sandbox.py`` has made, which hold whatever the process does

The hook alone is no wall against somebody who looks for a hole in it; on Windows and macOS it is what there is.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

REFUSED = ("socket.__new__", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname",
           "socket.sendto", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
           "os.forkpty", "os.startfile", "os.kill", "os.killpg", "signal.pthread_kill", "ctypes.dlopen", "ctypes.dlsym",
           "gc.get_objects", "gc.get_referrers", "gc.get_referents", "resource.setrlimit",
           "sys.setprofile", "webbrowser.open", "code.__new__", "fcntl.ioctl", "pty.spawn", "setopencodehook",
           "cpython.PyInterpreterState_New", "os.setxattr", "os.removexattr", "os.unshare", "os.setns")
REFUSED_KINDS = ("ctypes.", "sqlite3.", "syslog.", "winreg.", "_winapi.", "msvcrt.")
# C modules that open files, start processes, reach into memory or run another interpreter, and say nothing of it to a
# hook: docs/integrity.md has the whole list of CPython's modules that we went through
MODULES = frozenset((
    "_posixsubprocess", "_posixshmem", "_multiprocessing", "_ctypes", "_ctypes_test", "readline", "_sqlite3", "_dbm",
    "_gdbm", "_tkinter", "_curses", "_curses_panel", "nis", "spwd", "_crypt", "ossaudiodev", "syslog", "_interpreters",
    "_xxsubinterpreters", "_interpchannels", "_interpqueues", "_xxinterpchannels", "_testcapi", "_testinternalcapi",
    "_testlimitedcapi", "_testbuffer", "_testmultiphase", "_testsinglephase", "_testimportmultiple", "_testclinic",
    "_testclinic_limited", "_testconsole", "_testexternalinspection", "_remote_debugging", "xxlimited",
    "xxlimited_35", "xxsubtype", "_msi", "_overlapped", "_scproxy"))
LOADED = ("_posixsubprocess", "_multiprocessing")  # of these, what the standard library imports before it is used
UNSEEN = ("mkfifo", "mknod", "chroot", "unshare", "setns", "pidfd_open", "nice", "setpriority", "sched_setaffinity",
          "sched_setscheduler", "memfd_create", "acct", "swapon", "reboot")  # in os and posix; no hook hears of them
LISTS = ("os.listdir", "os.scandir")
SECOND = {"os.rename": 3, "os.link": 3, "os.symlink": 2, "shutil.move": -1}  # two places, and the folder of the second
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.utime", "shutil.rmtree", "shutil.move")
FOLDERS = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}  # where the event's arguments name an open folder


def put_up(job):
    """From here on this process, and what it starts, is confined."""
    limit_resources(job)
    writable = tuple(os.path.realpath(place) + os.sep for place in job["writable"])
    rules = sorted([(whole(place), kind == "readable") for kind in ("hidden", "readable") for place in job[kind]],
                   key=lambda rule: len(rule[0]), reverse=True)  # the innermost folder's is found first
    me = whole("/proc/self")

    def may_change(place, folder=-1):
        path = os.fsdecode(place)
        if folder >= 0 and os.path.exists("/proc/self/fd"):  # a name in an open folder
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        return (os.path.realpath(path) + os.sep).startswith(writable) or path == os.devnull

    def may_read(place, is_open):
        path = whole(place)
        if path.startswith("/proc/") and path.split("/")[2].isdigit() and not path.startswith(me):
            return False
        if is_open and any(folder.startswith(path) for folder, readable in rules if not readable):
            return False  # an open folder is a way into what is in it
        return next((readable for folder, readable in rules if path.startswith(folder)), True)

    def hook(event, arguments):
        if event == "import" and arguments[1] and arguments[0] in MODULES:  # from a file; those built in: ``silence``
            raise ImportError(f"{arguments[0]} is not there: an engine needs neither network nor other processes")
        if event in REFUSED or event.startswith(REFUSED_KINDS) or (
                event == "object.__setattr__" and arguments[1] == "__code__"):
            raise PermissionError(f"{event} is not allowed here: an engine needs neither network nor other processes")
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in (mode or "") for letter in "wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            if writes and not isinstance(path, int) and not may_change(path):
                raise PermissionError(f"{path} may not be written here")
            if not isinstance(path, int) and not may_read(path, True):
                raise PermissionError(f"{path} may not be read here")
        elif event in LISTS and not isinstance(arguments[0], int):
            if not may_read(arguments[0] or ".", False):
                raise PermissionError(f"{arguments[0]} may not be read here")
        elif event in CHANGES and not isinstance(arguments[0], int):
            folder = arguments[FOLDERS[event]] if event in FOLDERS else -1
            if not may_change(arguments[0], -1 if folder is None else folder):
                raise PermissionError(f"{arguments[0]} may not be changed here")
            if event in SECOND and not may_change(arguments[1], arguments[SECOND[event]] if SECOND[event] > 0 else -1):
                raise PermissionError(f"{arguments[1]} may not be changed here")

    silence()
    sys.addaudithook(hook)


def silence():
    """Take away what does its work without a word to the hook: functions of os, and modules that are built in."""
    import _imp
    import posixpath  # noqa: F401  os has what it needs of posix by now

    def refuse(*arguments, **keywords):
        raise PermissionError("this is not allowed here: an engine needs neither network nor other processes")

    for module in (os, sys.modules.get("posix"), sys.modules.get("nt")):
        for name in UNSEEN:
            if hasattr(module, name):
                found = getattr(module, name)
                for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
                    known.discard(found)
                setattr(module, name, refuse)
    for name in LOADED:
        try:
            module = __import__(name)
        except ImportError:
            continue
        for what in ("fork_exec", "SemLock", "sem_unlink"):
            if hasattr(module, what):
                setattr(module, what, refuse)
    make = _imp.create_builtin

    def create_builtin(spec):
        if spec.name in MODULES or spec.name in ("posix", "nt", "_imp", "_signal"):
            raise ImportError(f"{spec.name} is not there: an engine needs neither network nor other processes")
        return make(spec)

    _imp.create_builtin = create_builtin


def whole(place):
    """A place without links, as it is compared."""
    return os.path.normcase(os.path.join(os.path.realpath(os.fsdecode(place)), ""))


def limit_resources(job):
    """What the platform keeps of the limits."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for name, value in (("RLIMIT_AS", job["memory"]), ("RLIMIT_FSIZE", job["file"]), ("RLIMIT_CORE", 0),
                        ("RLIMIT_NOFILE", 256), ("RLIMIT_NPROC", job["processes"])):
        kind = getattr(resource, name, None)
        if kind is not None and value is not None:
            _, most = resource.getrlimit(kind)
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            try:
                resource.setrlimit(kind, (value, value))
            except (ValueError, OSError):  # macOS refuses some; the watcher of sandbox.py is left
                continue


def main():
    job = json.loads(sys.argv[1])
    del sys.argv[:2]
    if not sys.platform.startswith("linux"):  # there guard.py has seen to it
        from guard import end_with_parent
        end_with_parent()
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    put_up(job)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
