"""What no engine needs, in the files of a submission: for the marker to look at, no verdict.

    look(starter, ours, teacher)    sentences: file, line, what

The files are a student's, so this runs behind the walls, with their limits (``read_code.py``), and in time that grows
with the size of the files alone.
"""

from __future__ import annotations

import ast
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from .confine import MODULES

LONGEST = 300  # characters of a sentence

UNUSUAL = {"gc", "inspect", "ctypes", "socket", "subprocess", "unittest", "acceptance", "tests", "harness", "oracle",
           "observed", "child", "signal", "builtins", "faulthandler", "atexit", "urllib", "http", "requests", "vllm",
           "torch", "transformers", "pickle", "marshal", "multiprocessing", "runpy", "traceback", "importlib", "imp",
           "pkgutil", "zipimport", "posix", "nt", "_socket", "_signal", "_thread", "_imp", "_io", "_winapi", "pty",
           "fcntl", "sqlite3", "dbm", "mmap", "resource", "code", "codeop", "dis", *MODULES}
CALLS = {"exec", "eval", "compile", "__import__", "globals", "_getframe", "_exit", "_current_frames", "settrace",
         "setprofile", "modules", "__subclasses__", "__globals__", "__code__", "__closure__", "f_globals", "f_locals",
         "meta_path", "addaudithook", "environ", "argv", "kill", "abort", "import_module", "SourceFileLoader",
         "SourcelessFileLoader", "spec_from_file_location", "exec_module", "load_module", "run_path", "run_module",
         "__path__", "__loader__", "__spec__"}
WORDS = {"golden", "fixtures", "tiny_model.json", "fixtures/tiny_model.json", "P07_SEED"}  # as texts of their own
OWNERS = {"time", "json", "random", "os", "sys", "unittest", "math", "threading", "tracemalloc"}
OF_THE_SYSTEM = {"write", "pwrite", "writev", "open", "dup", "dup2", "fdopen", "pipe", "fork", "forkpty", "system",
                 "popen", "killpg", "posix_spawn", "execv", "execve", "execvp", "mkfifo", "mknod", "symlink", "link",
                 "getppid", "ptsname", "openpty", "memfd_create", "pidfd_open", "unshare", "setns"}  # of os or posix
PLACES = ("/proc", "/dev/", "/etc/", "/home", "/root", "/tmp")  # as the beginning of a text
GOLDEN = 6  # so many of a golden output's tokens in a row are no accident


def look(starter: Path, ours: Path, teacher: Path) -> list[str]:
    """What no engine needs, in the student's files and not in the same file of ours: to be looked at, no verdict."""
    golden = _golden(teacher)
    notes: list[str] = []
    for path in sorted(starter.rglob("*.py")):
        name, model = path.relative_to(starter.parent).as_posix(), ours / path.relative_to(starter)
        if model.is_file() and model.read_bytes() == path.read_bytes():
            continue
        try:
            found = _unusual(ast.parse(path.read_bytes()))  # bytes: read as Python reads them, in their own coding
            if any(run in golden for row in _rows(path) for run in _runs(row)):
                found["holds tokens of a golden output"] = 1
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            notes.append(f"{name} is not Python: {error}"[:LONGEST])
            continue
        usual = _unusual(ast.parse(model.read_bytes())) if model.is_file() else {}
        notes += [f"{name}, line {line}: {what}" for what, line in found.items() if what not in usual]
    return notes


def _rows(path: Path) -> Iterator[list[str]]:
    """Numbers with nothing but commas and space between them, at least GOLDEN in a row. One pass: the pattern matches
    from every digit it meets, so none is looked at twice."""
    with tokenize.open(path) as file:
        source = "".join(file.read().split())
    for row in re.findall(r"[0-9]+(?:,[0-9]+)*", source):
        numbers = row.split(",")
        if len(numbers) >= GOLDEN:
            yield numbers


def _golden(teacher: Path) -> set[tuple[str, ...]]:
    """Every run of so many tokens of the fixtures' golden outputs."""
    found: set[tuple[str, ...]] = set()
    for path in sorted((teacher / "fixtures").glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        golden = document.get("golden") if isinstance(document, dict) else None
        for row in (golden or {}).get("tokens", {}).values():
            found |= {run for run in _runs([str(token) for token in row]) if len(set(run)) > 2}
    return found


def _runs(row: list[str]) -> Iterator[tuple[str, ...]]:
    return (tuple(row[i:i + GOLDEN]) for i in range(len(row) - GOLDEN + 1))


def _unusual(tree: ast.AST) -> dict[str, int]:
    """{what: first line}."""
    found: dict[str, int] = {}
    systems = {"os", "posix", "nt", "_os", "_posix"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            systems |= {alias.asname for alias in node.names if alias.asname and alias.name in systems}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(node.module or "").partition(".")[0]]
        else:
            names = []
        for name in names:
            if name in UNUSUAL:
                found.setdefault(f"imports {name}", line)
        if isinstance(node, ast.ImportFrom) and not node.level and node.module in ("os", "posix", "nt"):
            for alias in node.names:
                if alias.name in OF_THE_SYSTEM | CALLS:
                    found.setdefault(f"uses {node.module}.{alias.name}", line)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (
                node.value in WORDS or node.value.startswith(PLACES)):
            found.setdefault(f"speaks of {node.value[:60]!r}", line)
        if isinstance(node, ast.Attribute) and node.attr in OF_THE_SYSTEM and isinstance(node.value, ast.Name) \
                and node.value.id in systems:
            found.setdefault(f"uses os.{node.attr}", line)
        if isinstance(node, ast.Attribute) and node.attr in CALLS:
            found.setdefault(f"uses .{node.attr}", line)
        elif isinstance(node, ast.Name) and node.id in CALLS and (isinstance(node.ctx, ast.Load)
                                                                  or node.id == "__path__"):
            found.setdefault(f"uses {node.id}", line)
        if isinstance(node, ast.Attribute) and node.attr == "path" and isinstance(node.value, ast.Name) \
                and node.value.id in ("sys", "_sys"):
            found.setdefault("uses sys.path", line)
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in OWNERS:
                found.setdefault(f"replaces {target.value.id}.{target.attr}", line)
    return found
