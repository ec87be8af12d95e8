"""How large the project is, part by part, and whether its imports run downward.

    python3 scripts/house.py           tables; exit code 1 if a bound is broken
    python3 scripts/house.py --json    the same as one JSON document

The parts of ``starter``: the *spine* is the modules at its top level, ``base`` is what the spine builds on, ``command``
is the command line above it, and every other package is a *wing*. The order of the spine is written down once, in the
first contract of pyproject.toml, which import-linter checks as well; this script needs no package.

Imports for type checkers only and imports inside functions count like any other. A *knot* is a group of modules that
import each other in a circle. An import is *upward* if it does not lead to a lower layer, if it leads from the spine
into a wing or from one wing into another, or if it leads to one of the programs.

The files that a request crosses are measured: one request of the fixture runs through an engine while a profiler notes
every function that is entered between ``submit`` and the last event.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, Union

ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "fixtures" / "tiny_model.json"

# No count may be larger than its bound.
BOUNDS = {
    "knots": 0,
    "upward_imports": 0,
    "spine_files": 17,  # the goal is 14
    "spine_lines": 5_800,  # the goal is 2,600
    "request_files": 16,
    "largest_spine_file_kb": 54,
}

PACKAGE = "starter"
PROGRAMS = ("driver", "__main__")
ROOMS = ("base", "command")  # packages that are no wings
LAYERS = re.compile(rf'^containers = \["{PACKAGE}"\]\nlayers = (\[.*?^\])', re.DOTALL | re.MULTILINE)

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]


@dataclass(frozen=True)
class Module:
    """A source file of the package. Its name leaves the package's own out: "engine", "base.weights"; "" is the page of
    the package itself."""

    name: str
    path: Path
    source: str

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def part(self) -> str:
        """"spine", "base", "command", or the wing's name."""
        inner = "." in self.name or (self.is_package and self.name != "")
        return self.name.partition(".")[0] if inner else "spine"

    @property
    def lines(self) -> int:
        return len(self.source.splitlines())


# ---------------------------------------------------------------------------------------------------- what is there


def read_modules(root: Path) -> dict[str, Module]:
    """Every module of ``root/starter``, by name."""
    folder, found = root / PACKAGE, {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, path.read_text(encoding="utf-8"))
    return found


def read_layers(root: Path) -> list[list[str]]:
    """The layers of the spine, the highest first; several modules in one layer do not import each other."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    if (found := LAYERS.search(text)) is None:
        raise ValueError(f"pyproject.toml has no contract with the layers of {PACKAGE}")
    return [[name.strip() for name in layer.split("|")] for layer in ast.literal_eval(found.group(1))]


def imports_of(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """The modules of the package that this one imports, anywhere in its text.

    ``from starter import __version__`` does not count: Python runs the page of a package before any of its modules.
    """
    package = [PACKAGE, *module.name.split(".")] if module.name else [PACKAGE]
    package = package if module.is_package else package[:-1]
    found = set()
    for node in ast.walk(ast.parse(module.source, str(module.path))):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[:len(package) - node.level + 1] if node.level else []
            home = above + (node.module.split(".") if node.module else [])
            targets = [[*home, alias.name] for alias in node.names if not alias.name.startswith("__")
                       or ".".join([*home, alias.name][1:]) in modules]
        else:
            continue
        for target in targets:
            if target[0] == PACKAGE:
                inside = target[1:]
                while ".".join(inside) not in modules:  # the last names are not modules, but something in one
                    inside.pop()
                found.add(".".join(inside))
    return found - {module.name}


# --------------------------------------------------------------------------------------------------- what is judged


def knots(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of modules that reach each other, sorted. O(modules * imports)."""
    reached = {name: set(_walk(graph, name)) for name in graph}
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other]))
              for name in graph if name in reached[name]}
    return sorted(map(list, groups))


def _walk(graph: Mapping[str, Iterable[str]], start: str) -> Iterator[str]:
    """Everything that ``start`` imports, directly or not; itself only if it is in a circle."""
    seen, todo = set(), list(graph[start])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
            yield name


def upward_imports(graph: Mapping[str, Iterable[str]], modules: Mapping[str, Module],
                   layers: Sequence[Sequence[str]]) -> list[str]:
    """Each import that does not run downward, as "schema -> kv_cache"."""
    heights = {name: float(len(layers) - i) for i, layer in enumerate(layers) for name in layer}
    heights[""] = heights[PROGRAMS[0]] - 0.5  # the package's page offers the engine's names to the programs and wings

    def height(module: Module) -> float:
        if module.part not in ("spine", *ROOMS):
            return inf  # wings are above everything that they import
        layer = module.name if module.part == "spine" else module.part
        if layer not in heights:
            raise ValueError(f"the layers in pyproject.toml have no {layer}; give it its place there")
        return heights[layer]

    def is_upward(module: Module, imported: Module) -> bool:
        if imported.name in PROGRAMS:
            return True
        same_package = module.part == imported.part != "spine"
        return not same_package and height(imported) >= height(module)

    return sorted(f"{name or PACKAGE} -> {other or PACKAGE}" for name, imported in graph.items() for other in imported
                  if is_upward(modules[name], modules[other]))


def longest_function(modules: Iterable[Module]) -> tuple[int, str]:
    """Lines of the longest function, signature and docstring included, and its name as "engine.Class.method"."""
    return max((((node.end_lineno or 0) - node.lineno + 1, f"{module.name or PACKAGE}.{name}")
                for module in modules for name, node in functions(ast.parse(module.source))), default=(0, ""))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """All functions, methods and functions inside functions, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from functions(node, f"{prefix}{node.name}." if named else prefix)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------- what a request crosses


def files_of_a_request() -> list[str]:
    """The files of ``starter/`` in which a function was entered while one request was served, backend "reference".

    Code that Python writes for a class, such as the ``__init__`` of a dataclass, counts for the class's module.
    """
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from starter.engine import InferenceEngine
    from starter.schema import load_scenario

    scenario = load_scenario(FIXTURE)
    request = scenario.requests[0]
    entered: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            written = frame.f_code.co_filename
            entered.add(frame.f_globals.get("__file__", "") if written.startswith("<") else written)

    with InferenceEngine.from_scenario(scenario, "reference") as engine:
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            engine.submit(request.prompt_tokens, request.max_tokens, request_id="r", sampling=request.sampling)
            ends = [event.finish_reason for event in engine.stream("r")]
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    if ends[-1] not in ("length", "stop"):
        raise RuntimeError(f"the request ended with {ends[-1]!r}, so this is not the way that a request takes")
    folder = ROOT / PACKAGE
    return sorted(path.relative_to(folder).as_posix() for path in map(Path, entered) if folder in path.parents)


# ----------------------------------------------------------------------------------------------------------- program


def measure(root: Path, request_files: Sequence[str]) -> dict[str, Any]:
    """All counts."""
    modules = read_modules(root)
    graph = {name: imports_of(module, modules) for name, module in modules.items()}
    pages = [module for module in modules.values() if module.name in ("", "__main__")]
    spine = [module for module in modules.values() if module.part == "spine" and module not in pages]
    parts: dict[str, list[Module]] = {"spine": spine, "spine with __init__ and __main__": spine + pages, "base": []}
    for module in modules.values():
        if module.part != "spine":
            parts.setdefault(module.part, []).append(module)
    parts["all"] = list(modules.values())
    length, name = longest_function(spine)
    largest = max(spine, key=lambda module: module.path.stat().st_size)
    found_knots, found_upward = knots(graph), upward_imports(graph, modules, read_layers(root))
    return {
        "parts": {part: {"files": len(some), "lines": sum(module.lines for module in some)}
                  for part, some in parts.items()},
        "knots": len(found_knots), "knots_are": found_knots,
        "upward_imports": len(found_upward), "upward_imports_are": found_upward,
        "spine_files": len(spine), "spine_lines": sum(module.lines for module in spine),
        "longest_function": {"lines": length, "name": name},
        "largest_spine_file_kb": round(largest.path.stat().st_size / 1024, 1), "largest_spine_file": largest.path.name,
        "request_files": len(request_files),
        "request_files_are": {"spine": [name for name in request_files if "/" not in name],
                              "base": [name for name in request_files if name.startswith("base/")],
                              "wings": [name for name in request_files
                                        if "/" in name and not name.startswith("base/")]},
    }


def broken(counts: Mapping[str, Any]) -> list[str]:
    """A sentence for each bound that does not hold."""
    return [f"{name.replace('_', ' ')}: {counts[name]}, but at most {bound} allowed" + "".join(
        f"\n    {entry if isinstance(entry, str) else ' <-> '.join(entry)}" for entry in details(counts, name))
        for name, bound in BOUNDS.items() if counts[name] > bound]


def details(counts: Mapping[str, Any], name: str) -> list[Any]:
    """What was counted, where there is a list of it."""
    found = counts.get(f"{name}_are", [])
    return [entry for some in found.values() for entry in some] if isinstance(found, dict) else found


def show(counts: Mapping[str, Any]) -> None:
    """The counts as text."""
    width = max(map(len, counts["parts"]))
    print(f"{'part of starter/':{width}}  {'files':>5}  {'lines':>6}")
    for part, sizes in counts["parts"].items():
        print(f"{part:{width}}  {sizes['files']:5}  {sizes['lines']:6,}")
    longest, crossed = counts["longest_function"], counts["request_files_are"]
    print()
    print(f"knots of imports: {counts['knots']}; upward imports: {counts['upward_imports']}")
    print(f"longest function of the spine: {longest['lines']} lines, {longest['name']}")
    print(f"largest file of the spine: {counts['largest_spine_file_kb']} KB, {counts['largest_spine_file']}")
    print(f"files that one request crosses from submit to its last event: {counts['request_files']}")
    for part, names in crossed.items():
        if names:
            print(f"    {part}, {len(names)}: {', '.join(names)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    options = parser.parse_args()
    counts = measure(ROOT, files_of_a_request())
    problems = broken(counts)
    if options.json:
        print(json.dumps({**counts, "bounds": BOUNDS, "broken": problems}, indent=2))
    else:
        show(counts)
        print()
        print("\n".join(problems) if problems else "All bounds hold: " + ", ".join(
            f"{name.replace('_', ' ')} {counts[name]:,} of {bound:,}" for name, bound in BOUNDS.items()))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
