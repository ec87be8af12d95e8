"""From what a student hands in, a folder or a zip file, to the tree that is graded and the papers that are read.

    submission = take("class/mira.zip", teacher, work)
    submission.tree      the student's starter/, and of the teacher the acceptance tests, fixtures and commands
    submission.papers    DESIGN.md, REPORT.md, timelines and figures, as they were handed in
    submission.notes     what the marker should look at, in words

Only starter/ counts as code: tests, fixtures and scripts that were handed in are left out. Nothing is unpacked outside
of the work folder, no link is followed, and there are limits on the number and size of files.
"""

from __future__ import annotations

import lzma
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

GIVEN = ("acceptance/*.py", "fixtures/*", "scripts/verify_scaffold.py", "tests/test_scaffold.py", "tests/paths.py",
         "pyproject.toml", "rubric.md")
PAPERS = (".md", ".jsonl", ".json", ".svg")
MAX_FILES, MAX_FILE, MAX_ALL = 2_000, 32 << 20, 128 << 20
MAX_SOURCE = 1 << 20


IGNORED = frozenset(("venv", "env", "virtualenv", "node_modules", "site-packages", "__pycache__", "__MACOSX"))
MAX_ENTRIES = 100_000  # of a zip file, those in ignored folders included
# What zipfile raises on a file that is none, or that it cannot read: unknown versions and ways of packing
# (NotImplementedError), passwords (RuntimeError), names that are not in their coding, sizes that cannot be
FAULTS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, OSError, EOFError, NotImplementedError,
          RuntimeError, UnicodeError, ValueError, IndexError, KeyError, OverflowError)


@dataclass(frozen=True)
class Entry:
    """A file of a submission: a function that reads it, and when it was changed, in a form that can be compared."""

    read: Callable[[], bytes]
    changed: tuple[float, ...]


Files = dict[PurePosixPath, Entry]


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
        files = (_zip_files(source, stack, found.notes) if source.suffix.lower() == ".zip" else
                 _folder_files(source, found.notes))
        _lay_out(files, found)
    for pattern in GIVEN:
        for path in sorted(teacher.glob(pattern)):
            if path.is_file():
                target = found.tree / path.relative_to(teacher)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    if (found.papers / "DESIGN.md").is_file():  # C1 wants to see it
        shutil.copyfile(found.papers / "DESIGN.md", found.tree / "DESIGN.md")
    return found


def _lay_out(files: Files, found: Submission) -> None:
    """Write what counts into its place."""
    root, total = _root(files, found.notes), 0
    found.papers.mkdir(parents=True, exist_ok=True)
    for name, entry in files.items():
        if not name.is_relative_to(root):
            continue
        place = name.relative_to(root)
        if not place.parts:
            continue
        code = place.parts[0] == "starter" and "__pycache__" not in place.parts and len(place.parts) > 1
        if not code and (place.suffix.lower() not in PAPERS or place.parts[0] in ("acceptance", "fixtures", "tests")):
            continue
        content = entry.read()
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
        except (OSError, ValueError) as error:  # ValueError: a name that this system cannot write
            reason = error.strerror if isinstance(error, OSError) else "it is no name for a file here"
            if code:
                raise BadSubmission(f"it cannot be unpacked: {_named(place)}: {reason}") from None
            found.notes.append(f"{_named(place)} was left out: {reason}")


def _named(place: PurePosixPath) -> str:
    return str(place)[:80]


def _root(files: Files, notes: list[str]) -> PurePosixPath:
    """The outermost folder that holds starter/; of several as far out, the one with the newest file. The marker is told
    of the others."""
    roots = {name.parent.parent for name in files if name.parts[-2:] == ("starter", "__init__.py")}
    if not roots:
        raise BadSubmission("there is no starter/__init__.py in it: hand in the folder that holds starter/")

    def newest(root: PurePosixPath) -> tuple[float, ...]:
        return max(entry.changed for name, entry in files.items() if name.is_relative_to(root / "starter"))

    nearest = min(len(root.parts) for root in roots)
    chosen = max((root for root in roots if len(root.parts) == nearest), key=lambda root: (newest(root), str(root)))
    if len(roots) > 1:
        others = ", ".join(_named(root / "starter") for root in sorted(roots - {chosen})[:5])
        why = "the newest of those as far out" if any(
            len(root.parts) == nearest for root in roots - {chosen}) else "the outermost"
        notes.append(f"starter/ is in it {len(roots)} times: graded is {_named(chosen / 'starter')}, {why}; "
                     f"not {others}")
    return chosen


def _folder_files(folder: Path, notes: list[str]) -> Files:
    """Every file of a folder. Links are left out, also to folders, and folders that hold no work of a student's."""
    if not folder.is_dir():
        raise BadSubmission(f"{folder} is neither a folder nor a zip file")
    files: Files = {}
    ignored: set[PurePosixPath] = set()
    todo = [folder]
    while todo:
        place = todo.pop()
        try:
            for path in sorted(place.iterdir()):
                name = PurePosixPath(path.relative_to(folder).as_posix())
                if path.is_symlink() or path.name.startswith("."):
                    continue
                if path.is_dir():
                    if path.name.lower() in IGNORED or (path / "pyvenv.cfg").is_file():
                        ignored.add(name)
                    else:
                        todo.append(path)
                elif path.is_file() and path.stat().st_size <= MAX_FILE:
                    files[name] = Entry(partial(_read, path, name), (path.stat().st_mtime,))
                if len(files) > MAX_FILES:
                    raise BadSubmission(f"it holds more than {MAX_FILES} files")
        except OSError as error:  # no right to read it, or a path that is too long
            shown = _named(PurePosixPath(place.relative_to(folder).as_posix()))
            notes.append(f"{shown}/ was left out: {error.strerror}")
    _tell_ignored(ignored, notes)
    return files


def _tell_ignored(ignored: Iterable[PurePosixPath], notes: list[str]) -> None:
    """Name the folders that were left out, but for caches."""
    names = sorted(_named(name) for name in ignored if name.name not in ("__pycache__", "__MACOSX"))
    if names:
        notes.append(f"left out, since it holds installed packages: {', '.join(f'{name}/' for name in names[:5])}"
                     + f" and {len(names) - 5} more" * (len(names) > 5))


def _read(path: Path, name: PurePosixPath) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadSubmission(f"{_named(name)} cannot be read: {error.strerror}") from None


def _zip_files(path: Path, stack: ExitStack, notes: list[str]) -> Files:
    """Every file of a zip file, which stays open as long as ``stack``. Names that lead out of it make it a bad one."""
    try:
        archive = stack.enter_context(zipfile.ZipFile(path))
        entries = archive.infolist()
    except FAULTS as error:
        raise BadSubmission(f"the zip file cannot be read: {_reason(error)}") from None
    if len(entries) > MAX_ENTRIES:
        raise BadSubmission(f"it holds more than {MAX_ENTRIES} files")
    files: Files = {}
    names = [(PurePosixPath(entry.filename.replace("\\", "/")), entry) for entry in entries]
    environments = {name.parent for name, _ in names if name.name == "pyvenv.cfg"} - {PurePosixPath(".")}
    ignored: set[PurePosixPath] = set()
    for name, entry in names:
        if name.is_absolute() or ".." in name.parts or re.match(r"[A-Za-z]:", entry.filename):
            raise BadSubmission(f"it holds the name {entry.filename[:80]!r}, which leads out of it")
        link = (entry.external_attr >> 16) & 0o170000 == 0o120000
        if not name.parts or entry.is_dir() or link or any(part.startswith(".") for part in name.parts):
            continue
        outer = next((folder for folder in reversed(name.parents)
                      if folder.name.lower() in IGNORED or folder in environments), None)
        if outer is not None:
            ignored.add(outer)
            continue
        files[name] = Entry(partial(_unpack, archive, entry), tuple(map(float, entry.date_time)))
        if len(files) > MAX_FILES:
            raise BadSubmission(f"it holds more than {MAX_FILES} files")
    _tell_ignored(ignored, notes)
    return files


def _reason(error: BaseException) -> str:
    """Why a zip file cannot be read, in a few words."""
    if isinstance(error, UnicodeError):
        return "a name in it is not in the coding that it says"
    if isinstance(error, (IndexError, KeyError, struct.error, OverflowError)):
        return "its table of contents is damaged"
    return str(error)[:200] or type(error).__name__


def _unpack(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """One file of it, counted while it is unpacked: what it says of its size may be wrong."""
    try:
        with archive.open(entry) as file:
            content = file.read(MAX_FILE + 1)
    except FAULTS as error:
        raise BadSubmission(f"{entry.filename[:80]} in the zip file cannot be read: {_reason(error)}") from None
    if len(content) > MAX_FILE:
        raise BadSubmission(f"{entry.filename[:80]} holds more than {MAX_FILE >> 20} MiB")
    return content


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
