"""Make the students' project out of the complete one.

    python3 scripts/release_student.py OUT                   the skeleton
    python3 scripts/release_student.py OUT --through M3      M1 to M3 are solved: for a team that fell behind
    python3 scripts/release_student.py --check               make all seven, and run C1, C3, C4 and C5 on each

``student_release.json`` says which functions are whose work:

    stubs         by milestone: signature and docstring stay, the body becomes ``raise NotImplementedError("M2: ...")``
    placeholders  functions that earlier milestones need in some form, with their milestone: until it is solved, they
                  have a simple body from ``student_placeholders.py`` (one request at a time, for example)
    roots         modules of ``starter`` that students get, with everything these import; the others are left out
    edits         lines that differ in the students' files: old and new
    written       files with another text for students
    templates     blank forms that students fill in, with their names in the students' project
    files         everything else that students get

Private functions and constants to which nothing in a changed module refers any more are removed: only the solution
needed them.
What is given: the reference decoder, schema, tokenizer, weights, loaders, the loop of the engine, the record (timeline,
report, replay, audit) and the driver. Left out: lanes (backend "cpu" is the plain one in the students' project), the
engines that are wrong on purpose, the teacher's manual, and our own design report.

Works on the syntax tree's positions, so that everything outside the replaced bodies is as it was, letter by letter; a
name that is in the table and not in the source is an error.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Union

if sys.version_info < (3, 10):  # noqa: UP036  # before any line that such a Python could not run
    sys.exit(f"Python 3.10 or newer is needed; this is {'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "scripts" / "student_release.json"
PLACEHOLDERS = ROOT / "scripts" / "student_placeholders.py"
MILESTONES = ("M1", "M2", "M3", "M4", "M5", "M6")
DYNAMIC = ("__", "_on_")  # private names that are looked up by a computed name, or by Python itself

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]


class ReleaseError(Exception):
    """What is wrong with the table or the target, in one sentence."""


def release(out: Path, through: int = 0) -> None:
    """Write the students' project into the empty folder ``out``, the first ``through`` milestones solved."""
    if out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty; name a folder that does not exist yet")
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    open_work = open_functions(table, through)
    for module in given_modules(table["roots"]):
        path = source_of(module)
        source = path.read_text(encoding="utf-8")
        mine = {function: body for name, body in open_work.items()
                for home, function in [apart(name)] if home == module}
        write(out / path.relative_to(ROOT), without_orphans(with_bodies(source, mine, module)) if mine else source)
    for pattern in table["files"]:
        found = [path for path in sorted(ROOT.glob(pattern)) if path.is_file() and "__pycache__" not in path.parts]
        if not found:
            raise ReleaseError(f"there is no file {pattern}; correct {TABLE.name}")
        for path in found:
            target = out / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    for name, edits in table["edits"].items():
        text = (out / name).read_text(encoding="utf-8")
        for old, new in edits:
            if text.count(old) != 1:
                raise ReleaseError(f"{name} holds {old!r} {text.count(old)} times, not once; correct {TABLE.name}")
            text = text.replace(old, new)
        write(out / name, text)
    for name, lines in table["written"].items():
        write(out / name, "\n".join(lines) + "\n")
    for name, template in table["templates"].items():
        shutil.copyfile(ROOT / template, out / name)


def open_functions(table: dict[str, Any], through: int) -> dict[str, str]:
    """Body of each function that is still to be written: {"kv_cache.KVCacheManager.allocate": "raise ..."}."""
    solved = MILESTONES[:through]
    bodies = {name: f'raise NotImplementedError("{milestone}: {apart(name)[1]} is still to be written")'
              for milestone, names in table["stubs"].items() if milestone not in solved for name in names}
    source = PLACEHOLDERS.read_text(encoding="utf-8")
    simple = dict(functions(ast.parse(source)))
    for name, milestone in table["placeholders"].items():
        if milestone not in solved:
            if name not in simple:
                raise ReleaseError(f"{PLACEHOLDERS.name} has no {name}")
            bodies[name] = body_text(source, simple[name])
    return bodies


def source_of(module: str) -> Path:
    """The file of a module of ``starter``, "kv_cache" or "base.weights"; of a package, its page."""
    path = ROOT.joinpath("starter", *module.split(".")).with_suffix(".py")
    return path if path.is_file() else path.with_suffix("") / "__init__.py"


def apart(name: str) -> tuple[str, str]:
    """"backends.int8_pages.encode_keys" -> its module, and the function's name within it."""
    parts = name.split(".")
    starter = ROOT / "starter"
    length = next((i for i in range(1, len(parts)) if starter.joinpath(*parts[:i]).with_suffix(".py").is_file()), 1)
    return ".".join(parts[:length]), ".".join(parts[length:])


def given_modules(roots: Iterable[str]) -> list[str]:
    """The modules of ``starter`` that these and their imports consist of, and the packages that they are in."""
    found: list[str] = []
    todo = list(roots)
    while todo:
        name = todo.pop()
        path = source_of(name)
        if name not in found and path.is_file():
            found.append(name)
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            todo += imported(path.read_text(encoding="utf-8"), package)
            todo += [package] if package else []
    return sorted(found)


def imported(source: str, package: str = "") -> Iterator[str]:
    """Modules of ``starter`` that a module of one of its packages ("" for the top level) imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split(".")] if node.module else []
            if node.level:
                above = package.split(".") if package else []
                names = above[:len(above) - (node.level - 1)] + names
            elif names[:1] == ["starter"]:
                names = names[1:]
            else:
                continue
            if names:
                yield ".".join(names)
            yield from (".".join([*names, alias.name]) for alias in node.names)


# ------------------------------------------------------------------------------------------------ the syntax tree


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function outside other functions, with its qualified name; of a property its getter, and no overloads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not any(
                isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in node.decorator_list):
            yield prefix + node.name, node


def body_lines(source: str, function: Function) -> tuple[int, int]:
    """The lines [first, last) of a body, counted from 0, its docstring aside and comments before it included."""
    statements = function.body
    lines = source.splitlines()
    if ast.get_docstring(function) is not None:
        first = statements[0].end_lineno or 0
    else:
        first = statements[0].lineno - 1
        while lines[first - 1].strip().startswith("#"):
            first -= 1
    if lines[statements[0].lineno - 1][:statements[0].col_offset].strip():
        raise ReleaseError(f"{function.name} has its body on the line of its signature; write it below")
    return first, function.end_lineno or 0


def body_text(source: str, function: Function) -> str:
    """A body without its docstring, not indented."""
    first, last = body_lines(source, function)
    margin = function.body[-1].col_offset
    return "\n".join(line[margin:] for line in source.splitlines()[first:last])


def with_bodies(source: str, bodies: dict[str, str], module: str) -> str:
    """The source with other bodies for some functions."""
    found = dict(functions(ast.parse(source)))
    if missing := bodies.keys() - found.keys():
        raise ReleaseError(f"{source_of(module).relative_to(ROOT).as_posix()} has no {', '.join(sorted(missing))}; "
                           f"correct {TABLE.name}")
    lines = source.splitlines()
    for name in sorted(bodies, key=lambda name: found[name].lineno, reverse=True):
        first, last = body_lines(source, found[name])
        margin = " " * found[name].body[0].col_offset
        lines[first:last] = [f"{margin}{line}".rstrip() for line in bodies[name].splitlines()]
    return "\n".join(lines) + "\n"


def without_orphans(source: str) -> str:
    """The source without private functions and constants that nothing in it refers to, again and again."""
    while True:
        tree = ast.parse(source)
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        orphans = [node for name, node in private_things(tree) if name not in used and not name.startswith(DYNAMIC)]
        if not orphans:
            return source
        lines = source.splitlines()
        for node in sorted(orphans, key=lambda node: node.lineno, reverse=True):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))]) - 1
            while lines[first - 1].strip().startswith("#") and "-----" not in lines[first - 1]:
                first -= 1
            while lines[first - 1] == "":
                first -= 1
            del lines[first:node.end_lineno]
        source = "\n".join(lines) + "\n"


def private_things(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Functions, and constants of the module, that begin with an underscore."""
    yield from ((node.name, node) for _, node in functions(tree) if node.name.startswith("_"))
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [
            statement.target] if isinstance(statement, ast.AnnAssign) else []
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id.startswith("_"):
            yield targets[0].id, statement


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


# ------------------------------------------------------------------------------------------------------- the proof


def check() -> int:
    """Release with 0 to 6 milestones solved; C1, C3 and C4 must pass, and of C5 exactly those that are solved."""
    problems: list[str] = []
    for through in range(len(MILESTONES) + 1):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "student")
            release(out, through)
            found = check_commands(out) + check_milestones(out, through)
            problems += [f"through {through}: {problem}" for problem in found]
            print(f"{through} milestones solved: {len(problems)} problems so far", flush=True)
    print("\n".join(problems))
    return bool(problems)


def check_commands(out: Path) -> list[str]:
    """C1, C3 and C4 on a released project: which of them fail, and how."""
    problems = []
    sources = [str(path.relative_to(out)) for path in sorted(out.glob("starter/**/*.py"))]
    for name, command in (("C1", ["scripts/verify_scaffold.py"]), ("C3", ["-m", "py_compile", *sources]),
                          ("C4", ["starter/driver.py", "--fixture", "fixtures/tiny_model.json"])):
        done = run(out, *command)
        if done.returncode:
            problems.append(f"{name} exits with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return problems


def check_milestones(out: Path, through: int, tests: Iterable[str] = ()) -> list[str]:
    """C5, or some of its tests: do exactly the solved milestones pass, and do the others say what is missing?"""
    problems = []
    done = run(out, "-m", "acceptance", "--json", *tests)
    outcomes = json.loads(done.stdout)
    passed = {test for test, (state, _) in outcomes.items() if state == "passed"}
    for milestone in MILESTONES:
        mine = {test for test in outcomes if test.startswith(milestone)}
        if MILESTONES.index(milestone) < through:
            problems += [f"{test} fails: {outcomes[test][1]}" for test in sorted(mine - passed)]
        elif mine and mine <= passed:
            problems.append(f"{milestone} passes, although it is still to be written")
    if through == 0:
        problems += [f"{test} passes on the skeleton" for test in sorted(passed)]
        problems += [f"{test} does not say what is missing: {message}" for test, (_, message) in outcomes.items()
                     if "still to be written" not in message]
    return problems


def run(out: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A Python command in a released project, which must not see this one."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "P07_SEED")}
    return subprocess.run([sys.executable, *command], cwd=out, capture_output=True, encoding="utf-8", check=False,
                          env={**environment, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", help="a folder that does not exist yet")
    parser.add_argument("--through", choices=MILESTONES, help="the last milestone that is solved")
    parser.add_argument("--check", action="store_true", help="prove what is promised above, in temporary folders")
    options = parser.parse_args()
    if options.check:
        return check()
    if options.out is None:
        parser.error("name the folder to write to, or --check")
    try:
        release(options.out, MILESTONES.index(options.through) + 1 if options.through else 0)
    except (ReleaseError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
