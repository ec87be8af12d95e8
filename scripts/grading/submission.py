"""From what a student hands in, a folder or a zip file, to the tree that is graded and the papers that are read.

    submission = take("class/mira.zip", teacher, work)
    submission.tree      the student's starter/, and of the teacher the acceptance tests, fixtures and commands
    submission.papers    DESIGN.md, REPORT.md, timelines and figures, as they were handed in
    submission.notes     what the marker should look at, in words

Only starter/ counts as code: tests, fixtures and scripts that were handed in are left out. Nothing is unpacked outside
of the work folder, no link is followed, and there are limits on the number and size of files.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

GIVEN = ("acceptance/*.py", "fixtures/*", "scripts/verify_scaffold.py", "tests/test_scaffold.py", "tests/paths.py",
         "pyproject.toml", "rubric.md")
PAPERS = (".md", ".jsonl", ".json", ".svg")
MAX_FILES, MAX_FILE, MAX_ALL = 2_000, 32 << 20, 128 << 20
MAX_SOURCE = 1 << 20


Files = dict[PurePosixPath, Callable[[], bytes]]  # names, and functions that read


class BadSubmission(Exception):
    """Why it cannot be graded, in one sentence."""


@dataclass
class Submission:
    """One student's work, ready to be graded."""

    name: str
    tree: Path
    papers: Path
    notes: list[str] = field(default_factory=list)


def take(source: Path, teacher: Path, work: Path) -> Submission:
    """Lay out a submission in the empty folder ``work``. BadSubmission if there is no starter/ in it."""
    found = Submission(source.stem if source.suffix.lower() == ".zip" else source.name, work / "tree", work / "papers")
    with ExitStack() as stack:
        files = _zip_files(source, stack) if source.suffix.lower() == ".zip" else _folder_files(source)
        _lay_out(files, found)
    for pattern in GIVEN:
        for path in sorted(teacher.glob(pattern)):
            if path.is_file():
                target = found.tree / path.relative_to(teacher)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    if (found.papers / "DESIGN.md").is_file():  # C1 wants to see it
        shutil.copyfile(found.papers / "DESIGN.md", found.tree / "DESIGN.md")
    found.notes += look(found.tree / "starter", teacher / "starter", teacher)
    return found


def _lay_out(files: Files, found: Submission) -> None:
    """Write what counts into its place."""
    root, total = _root(files), 0
    found.papers.mkdir(parents=True, exist_ok=True)
    for name, read in files.items():
        if not name.is_relative_to(root):
            continue
        place = name.relative_to(root)
        code = place.parts[0] == "starter" and "__pycache__" not in place.parts and len(place.parts) > 1
        if not code and (place.suffix.lower() not in PAPERS or place.parts[0] in ("acceptance", "fixtures", "tests")):
            continue
        content = read()
        total += len(content)
        if total > MAX_ALL:
            raise BadSubmission(f"it holds more than {MAX_ALL >> 20} MiB")
        if code and place.suffix == ".py" and len(content) > MAX_SOURCE:
            raise BadSubmission(f"{place} has {len(content)} bytes; a source file may have {MAX_SOURCE}")
        target = (found.tree if code else found.papers).joinpath(*place.parts)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise BadSubmission(f"it cannot be unpacked: at {place} a file and a folder have the same name") from None
        except OSError as error:
            raise BadSubmission(f"it cannot be unpacked: {str(place)[:80]}: {error.strerror}") from None


def _root(names: Iterable[PurePosixPath]) -> PurePosixPath:
    """The outermost folder that holds starter/."""
    roots = {name.parent.parent for name in names if name.parts[-2:] == ("starter", "__init__.py")}
    if not roots:
        raise BadSubmission("there is no starter/__init__.py in it: hand in the folder that holds starter/")
    return min(roots, key=lambda root: (len(root.parts), str(root)))


def _folder_files(folder: Path) -> Files:
    """Every file of a folder. Links are left out, also to folders."""
    if not folder.is_dir():
        raise BadSubmission(f"{folder} is neither a folder nor a zip file")
    files: Files = {}
    todo = [folder]
    while todo:
        for path in sorted(todo.pop().iterdir()):
            if path.is_symlink() or path.name.startswith("."):
                continue
            if path.is_dir():
                todo.append(path)
            elif path.is_file() and path.stat().st_size <= MAX_FILE:
                files[PurePosixPath(path.relative_to(folder).as_posix())] = path.read_bytes
            if len(files) > MAX_FILES:
                raise BadSubmission(f"it holds more than {MAX_FILES} files")
    return files


def _zip_files(path: Path, stack: ExitStack) -> Files:
    """Every file of a zip file, which stays open as long as ``stack``. Names that lead out of it make it a bad one."""
    try:
        archive = stack.enter_context(zipfile.ZipFile(path))
    except (zipfile.BadZipFile, OSError) as error:
        raise BadSubmission(f"the zip file cannot be read: {error}") from None
    entries = archive.infolist()
    if len(entries) > MAX_FILES:
        raise BadSubmission(f"it holds more than {MAX_FILES} files")
    files: Files = {}
    for entry in entries:
        name = PurePosixPath(entry.filename.replace("\\", "/"))
        if name.is_absolute() or ".." in name.parts or ":" in entry.filename:
            raise BadSubmission(f"it holds the name {entry.filename!r}, which leads out of it")
        link = (entry.external_attr >> 16) & 0o170000 == 0o120000
        if not (entry.is_dir() or link or "__MACOSX" in name.parts or any(part.startswith(".") for part in name.parts)):
            files[name] = partial(_unpack, archive, entry)
    return files


def _unpack(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """One file of it, counted while it is unpacked: what it says of its size may be wrong."""
    try:
        with archive.open(entry) as file:
            content = file.read(MAX_FILE + 1)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError) as error:  # the last: it has a password
        raise BadSubmission(f"{entry.filename} in the zip file cannot be read: {error}") from None
    if len(content) > MAX_FILE:
        raise BadSubmission(f"{entry.filename} holds more than {MAX_FILE >> 20} MiB")
    return content


# ------------------------------------------------------------------------------------------- what to look at


UNUSUAL = {"gc", "inspect", "ctypes", "socket", "subprocess", "unittest", "acceptance", "tests", "harness", "oracle",
           "observed", "child", "signal", "builtins", "faulthandler", "atexit", "urllib", "http", "requests", "vllm",
           "torch", "transformers", "pickle", "marshal", "multiprocessing", "runpy", "traceback", "importlib", "imp",
           "pkgutil", "zipimport"}
CALLS = {"exec", "eval", "compile", "__import__", "globals", "_getframe", "_exit", "_current_frames", "settrace",
         "setprofile", "modules", "__subclasses__", "__globals__", "__code__", "__closure__", "f_globals", "f_locals",
         "meta_path", "addaudithook", "environ", "argv", "kill", "abort", "import_module", "SourceFileLoader",
         "SourcelessFileLoader", "spec_from_file_location", "exec_module", "load_module", "run_path", "run_module",
         "__path__", "__loader__", "__spec__"}
WORDS = {"golden", "fixtures", "tiny_model.json", "fixtures/tiny_model.json", "P07_SEED"}  # as texts of their own
OWNERS = {"time", "json", "random", "os", "sys", "unittest", "math", "threading", "tracemalloc"}
GOLDEN = 6  # so many of a golden output's tokens in a row are no accident


def changed(starter: Path, given: Path, ours: Path) -> list[str]:
    """Files that were handed out complete, and are not what they were."""
    notes = []
    for path in sorted(given.rglob("*.py")):
        name = path.relative_to(given)
        whole = (ours / name).is_file() and (ours / name).read_bytes() == path.read_bytes()
        if whole and not (starter / name).is_file():
            notes.append(f"starter/{name.as_posix()} was given, and is gone")
        elif whole and (starter / name).read_bytes() != path.read_bytes():
            notes.append(f"starter/{name.as_posix()} was given complete, and is changed")
    return notes


def look(starter: Path, ours: Path, teacher: Path) -> list[str]:
    """What no engine needs, in the student's files and not in the same file of ours: to be looked at, no verdict."""
    golden = _golden(teacher)
    notes = []
    for path in sorted(starter.rglob("*.py")):
        name, model = path.relative_to(starter.parent).as_posix(), ours / path.relative_to(starter)
        if model.is_file() and model.read_bytes() == path.read_bytes():
            continue
        try:
            source = path.read_text(encoding="utf-8")
            found = _unusual(ast.parse(source))
            if any(run in golden for row in re.findall(r"\d+(?:,\d+)+", re.sub(r"\s", "", source))
                   for run in _runs(row.split(","))):
                found["holds tokens of a golden output"] = 1
        except (SyntaxError, ValueError, RecursionError) as error:
            notes.append(f"{name} is not Python: {error}")
            continue
        usual = _unusual(ast.parse(model.read_text(encoding="utf-8"))) if model.is_file() else {}
        notes += [f"{name}, line {line}: {what}" for what, line in found.items() if what not in usual]
    return notes


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
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in WORDS:
            found.setdefault(f"speaks of {node.value!r}", line)
        if isinstance(node, ast.Attribute) and node.attr in CALLS:
            found.setdefault(f"uses .{node.attr}", line)
        elif isinstance(node, ast.Name) and node.id in CALLS and (isinstance(node.ctx, ast.Load)
                                                                  or node.id == "__path__"):
            found.setdefault(f"uses {node.id}", line)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path":
            found.setdefault("uses sys.path", line)
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in OWNERS:
                found.setdefault(f"replaces {target.value.id}.{target.attr}", line)
    return found
