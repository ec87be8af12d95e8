"""Walls that a process puts up around itself before the submission's code runs in it: python3 confine.py JOB SCRIPT ...

JOB is a JSON object: {"memory": bytes, "file": bytes, "processes": n or null, "writable": [folders]}.

    everywhere      an audit hook (PEP 578), which Python code cannot take away again, refuses sockets, new processes,
                    signals, ctypes, writing outside of the writable folders, and looking for other objects in memory
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
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.utime", "shutil.rmtree", "shutil.move")
FOLDERS = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}  # where the event's arguments name an open folder


def put_up(job):
    """From here on this process, and what it starts, is confined."""
    limit_resources(job)
    writable = tuple(os.path.realpath(place) + os.sep for place in job["writable"])

    def may_change(place, folder=-1):
        path = os.fsdecode(place)
        if folder >= 0 and os.path.exists("/proc/self/fd"):  # a name in an open folder
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        return (os.path.realpath(path) + os.sep).startswith(writable) or path == os.devnull

    def hook(event, arguments):
        if event in REFUSED or (event == "object.__setattr__" and arguments[1] == "__code__"):
            raise PermissionError(f"{event} is not allowed here: an engine needs neither network nor other processes")
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in (mode or "") for letter in "wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            if writes and not isinstance(path, int) and not may_change(path):
                raise PermissionError(f"{path} may not be written here")
        elif event in CHANGES and not isinstance(arguments[0], int):
            folder = arguments[FOLDERS[event]] if event in FOLDERS else -1
            if not may_change(arguments[0], -1 if folder is None else folder):
                raise PermissionError(f"{arguments[0]} may not be changed here")

    sys.addaudithook(hook)


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
