"""Starts a command that ends with whoever started it and, with a filter, may start no further program:

    python3 guard.py PARENT FILTER COMMAND ...

PARENT is the process that starts this one, or 0 where its number means nothing here (another process table). FILTER is
1 for a submission's command, else 0. On Linux the kernel keeps both promises, whatever the command does:

    PR_SET_PDEATHSIG     it is killed when the process that started it ends, also by SIGKILL
    seccomp              no new process or program, no socket but a pair, no signal to others, no special files, no way
                         into another namespace or another process's memory

Elsewhere ``end_with_parent`` watches from a thread. The command is another program, so what this one needs of ctypes is
not in the submission's process. One ``execve`` has to pass the filter: it is known by a random number in an argument
that the kernel ignores, and the number is gone with this program.
"""

from __future__ import annotations

import errno
import os
import platform
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
FILTER_MODE = 2
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
CLONE_THREAD = 0x10000
OTHER_ABI = 0x40000000  # x32 on x86-64
# By machine: its AUDIT_ARCH, then numbers of system calls. "own": allowed for the process itself
SYSTEM_CALLS: dict[str, dict[str, Any]] = {
    "x86_64": {"arch": 0xC000003E, "execve": 59, "clone": 56, "clone3": 435, "own": (62, 234), "refused": (
        41, 57, 58, 101, 129, 133, 155, 161, 165, 200, 248, 249, 250, 259, 272, 297, 298, 308, 310, 311, 321, 322, 323,
        424, 425, 428, 429, 434, 438)},
    "aarch64": {"arch": 0xC00000B7, "execve": 221, "clone": 220, "clone3": 435, "own": (129, 131), "refused": (
        33, 40, 41, 51, 97, 117, 130, 138, 198, 217, 218, 219, 240, 241, 268, 270, 271, 280, 281, 282, 424, 425, 428,
        429, 434, 438)},
}  # refused: socket, (v)fork, ptrace, sigqueue, mknod(at), pivot_root, chroot, mount, tkill, keys, unshare, perf,
#    setns, process_vm_*, bpf, execveat, userfaultfd, pidfd_*, io_uring_setup, open_tree


def main(parent: str, filtered: str, *command: str) -> None:
    """Become the command."""
    end_with_parent(int(parent))
    if filtered == "1":
        with suppress(ImportError, OSError, AttributeError, KeyError):  # no ctypes, or no seccomp: the other walls stay
            run_filtered(list(command))
    os.execvp(command[0], command)


def end_with_parent(parent: int = 0) -> None:
    """From here on this process ends when the one that started it does. Ends at once if that was already."""
    if sys.platform == "win32":
        _watch_windows(os.getppid())
        return
    before = os.getppid()
    with suppress(ImportError, OSError, AttributeError):
        if sys.platform.startswith("linux"):
            _libc().prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if parent and os.getppid() != parent:
                os._exit(1)
            return

    def watch() -> None:
        while os.getppid() == before:
            sleep(0.5)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _watch_windows(parent: int) -> None:
    """Wait for the parent in a thread, by a handle that names it for good."""
    import ctypes
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined, unused-ignore]
    synchronize, for_ever = 0x00100000, 0xFFFFFFFF
    kernel.OpenProcess.restype = ctypes.c_void_p
    handle = kernel.OpenProcess(synchronize, False, parent)
    if not handle:
        os._exit(1)

    def watch() -> None:
        kernel.WaitForSingleObject(ctypes.c_void_p(handle), for_ever)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _libc() -> Any:
    import ctypes
    return ctypes.CDLL(None, use_errno=True)


def program(machine: str, cookie: int, process: int) -> list[tuple[int, int, int, int]]:
    """The filter's instructions (code, jump if true, jump if false, k). KeyError for a machine that is not known."""
    calls = SYSTEM_CALLS[machine]
    refuse, missing, allow = ((RETURN, 0, 0, value) for value in (REFUSE | errno.EPERM, REFUSE | errno.ENOSYS, ALLOW))
    done = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, calls["arch"]), refuse,
            (LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, OTHER_ABI), refuse]
    for number in calls["refused"]:
        done += [(EQUAL, 0, 1, number), refuse]
    done += [(EQUAL, 0, 1, calls["clone3"]), missing]  # its flags cannot be seen; who calls it then uses clone
    done += [(EQUAL, 0, 4, calls["clone"]), (LOAD, 0, 0, ARGUMENTS), (ANY_BIT, 1, 0, CLONE_THREAD), refuse, allow]
    for number in calls["own"]:
        done += [(EQUAL, 0, 4, number), (LOAD, 0, 0, ARGUMENTS), (EQUAL, 1, 0, process), refuse, allow]
    fourth = ARGUMENTS + 3 * 8
    return [*done, (EQUAL, 0, 6, calls["execve"]), (LOAD, 0, 0, fourth), (EQUAL, 1, 0, cookie & 0xFFFFFFFF), refuse,
            (LOAD, 0, 0, fourth + 4), (EQUAL, 1, 0, cookie >> 32), refuse, allow]


def run_filtered(command: list[str]) -> None:
    """Put up the filter and become the command. OSError or KeyError, with nothing changed, where there is no seccomp;
    once the filter stands, a failure ends the process."""
    import ctypes
    libc, cookie = _libc(), int.from_bytes(os.urandom(8), "little")
    code = program(platform.machine(), cookie, os.getpid())
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    wanted = Program(len(code), ctypes.cast(instructions, ctypes.c_void_p))
    path = next((found for folder in os.get_exec_path() if os.access(found := Path(folder, command[0]), os.X_OK)),
                command[0])
    arguments = (ctypes.c_char_p * (len(command) + 1))(*map(os.fsencode, command), None)
    settings = [os.fsencode(name) + b"=" + os.fsencode(value) for name, value in os.environ.items()]
    environment = (ctypes.c_char_p * (len(settings) + 1))(*settings, None)
    call = SYSTEM_CALLS[platform.machine()]["execve"]
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, FILTER_MODE, ctypes.byref(wanted)):
        raise OSError(ctypes.get_errno(), "there is no seccomp")
    libc.syscall(ctypes.c_long(call), ctypes.c_char_p(os.fsencode(path)), arguments, environment,
                 ctypes.c_ulonglong(cookie), ctypes.c_long(0), ctypes.c_long(0))
    os._exit(126)


if __name__ == "__main__":
    main(*sys.argv[1:])
