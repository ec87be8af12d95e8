"""Run the notebooks in a fresh kernel, and keep the outputs that stand in them current.

    pip install '.[notebooks]'
    python3 scripts/run_notebooks.py             run them and write what they show now
    python3 scripts/run_notebooks.py --check     ... and compare: exit code 1 names the first cell that shows another
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from starter.base.console import Console

NOTEBOOKS = (ROOT / "notebooks" / "tour.ipynb", ROOT / "notebooks" / "break_it.ipynb")
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}  # of no particular version
SECONDS = 300  # that a cell may take


def execute(path: Path) -> dict[str, Any]:
    """The notebook as it is after running every cell. nbclient's CellExecutionError where one raises."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=SECONDS, record_timing=False, coalesce_streams=True,
                   resources={"metadata": {"path": str(path.parent)}}).execute()
    notebook.metadata = METADATA
    made: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return made


def as_text(notebook: dict[str, Any]) -> str:
    """The file's form: a line of a cell a line."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def first_change(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """The source of the first cell that shows something else than before."""
    for before, after in zip(old["cells"], new["cells"]):
        if before.get("outputs") != after.get("outputs"):
            return "".join(after["source"])
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for package in ("nbclient", "ipykernel"):
        if find_spec(package) is None:
            parser.error(f"{package} is not installed: pip install '.[notebooks]'")
    console, stale = Console(sys.stderr), False
    for path in NOTEBOOKS:
        with console.working(f"running {path.name} ..."):
            notebook = execute(path)
        changed = first_change(json.loads(path.read_text(encoding="utf-8")), notebook)
        if not check:
            path.write_text(as_text(notebook), encoding="utf-8", newline="\n")
        elif changed is not None:
            print(f"{path.name} is not current: run python3 scripts/run_notebooks.py\n{changed}")
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
