"""C1 · Is everything there that the handout asks for? One line for each check; exit code 1 if one fails.

    python3 scripts/verify_scaffold.py

Looks at files, signatures and imports, and runs no method: a skeleton whose bodies raise NotImplementedError passes.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "F1": ("starter/schema.py",), "F2": ("starter/kv_cache.py",), "F3": ("starter/scheduler.py",),
    "F4": ("starter/quantization.py",), "F5": ("starter/engine.py",), "F6": ("starter/numpy_backend.py",),
    "F7": ("starter/driver.py",), "F8": ("fixtures/tiny_model.json",), "F9": ("tests/test_scaffold.py",),
    "F10": ("acceptance/test_student_acceptance.py",), "F11": ("scripts/verify_scaffold.py",),
    "F12": ("DESIGN.md", "rubric.md"),
}
FIXTURE_KEYS = ("model", "engine", "quantization", "requests")  # engine: scheduling and pages


# Interfaces as the handout prints them, without their types. More parameters are welcome if they have defaults.
INTERFACES: dict[str, dict[str, Callable[..., object]]] = {
    "KVCacheManager": {
        "allocate": lambda self, request_id, token_count: ...,
        "append": lambda self, handle, key, value: ...,
        "read": lambda self, handle, position: ...,
        "release": lambda self, handle: ...,
    },
    "ContinuousBatchScheduler": {
        "submit": lambda self, request: ...,
        "cancel": lambda self, request_id: ...,
        "step": lambda self, budget_tokens: ...,
    },
    "InferenceEngine": {
        "submit": lambda self, prompt_tokens, max_tokens, *, request_id=None: ...,
        "stream": lambda self, request_id: ...,
        "cancel": lambda self, request_id: ...,
    },
}


class CheckFailed(Exception):
    """What is wrong, in words."""


def checks(root: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every check: its label, and a function that raises if it fails."""
    for requirement, names in FILES.items():
        for name in names:
            yield f"{requirement} {name}", partial(check_file, root / name)
    yield "F6 `import starter` loads nothing but the standard library", check_imports  # before others import it
    yield "F8 the fixture is a scenario", partial(check_fixture, root / "fixtures" / "tiny_model.json")
    for owner, methods in INTERFACES.items():
        for name, wanted in methods.items():
            yield f"I {owner}.{name}{inspect.signature(wanted)}", partial(check_signature, owner, name, wanted)


def check_file(path: Path) -> None:
    """It exists, is not empty, and is what its name says: Python that parses, or JSON."""
    if not path.is_file():
        raise CheckFailed("is missing")
    content = path.read_text(encoding="utf-8")
    if not content.strip():
        raise CheckFailed("is empty")
    if path.suffix == ".py":
        ast.parse(content, str(path))
    if path.suffix == ".json":
        json.loads(content)


def check_fixture(path: Path) -> None:
    """It has all parts, and ``load_scenario`` reads it, unless that is still to be written."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if missing := [key for key in FIXTURE_KEYS if key not in document]:
        raise CheckFailed(f"has no {', '.join(missing)}")
    try:
        import_module("starter").load_scenario(path)
    except NotImplementedError:
        return


def check_imports() -> None:
    """Importing the package and every name it offers loads no third-party package."""
    before = set(sys.modules)
    starter = import_module("starter")
    for name in starter.__all__:
        getattr(starter, name)
    packages = {name.partition(".")[0] for name in set(sys.modules) - before}
    if foreign := packages - sys.stdlib_module_names - {"starter"}:
        raise CheckFailed(f"loads {', '.join(sorted(foreign))}")


def check_signature(owner: str, name: str, wanted: Callable[..., object]) -> None:
    """The method takes the handout's parameters, and needs no other."""
    given = getattr(getattr(import_module("starter"), owner), name)
    mine, theirs = (inspect.signature(method).parameters for method in (wanted, given))
    same = [(p.name, p.kind, p.default) for p in theirs.values() if p.name in mine]
    needed = [p.name for p in theirs.values() if p.name not in mine and p.default is p.empty
              and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed or same != [(p.name, p.kind, p.default) for p in mine.values()]:
        raise CheckFailed(f"takes {inspect.signature(given)}")


def main(root: Path = ROOT) -> bool:
    """Print a line for each check, and in the end what failed, if anything did."""
    sys.path.insert(0, str(root))
    failed, everything = [], list(checks(root))
    for label, check in everything:
        try:
            check()
            print(f"ok    {label}")
        except Exception as error:  # whatever goes wrong in a student's file is the answer to the check
            failed.append(label)
            what = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
            print(f"FAIL  {label}: {what}")
    print(f"{len(failed)} of {len(everything)} checks failed: {'; '.join(failed)}" if failed else "everything is there")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
