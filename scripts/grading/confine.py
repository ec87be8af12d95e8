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

REFUSED = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
           "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
           "os.startfile", "os.kill", "os.killpg", "signal.pthread_kill", "ctypes.dlopen", "ctypes.dlsym",
           "gc.get_objects", "gc.get_referrers", "gc.get_referents", "resource.setrlimit", "sys.settrace",
           "sys.setprofile", "webbrowser.open", "winreg.OpenKey")
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
        if event in REFUSED or (event == "object.__setattr__" and arguments[1] == "__code__"):
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

    sys.addaudithook(hook)


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
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    put_up(job)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
