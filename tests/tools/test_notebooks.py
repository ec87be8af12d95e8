"""The notebooks: they run on a fresh clone with nothing installed, and show what their files say they show.

Without packages the cells are run by the few lines of ``run_cells`` below; with the extra ``notebooks``, in a kernel.
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
import unittest
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any
from unittest.mock import patch

from scripts import run_notebooks
from tests.extras import needs
from tests.paths import ROOT

LINES, COLUMNS = 25, 120  # of a cell, at most
HINT = "not current: run python3 scripts/run_notebooks.py"


def read(path: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@contextmanager
def fresh_python() -> Iterator[None]:
    """As in a kernel that was started in notebooks/: the package is not on the path yet."""
    folder = os.getcwd()
    os.chdir(ROOT / "notebooks")
    try:
        with patch.object(sys, "path", [entry for entry in sys.path if entry not in ("", str(ROOT))]):
            yield
    finally:
        os.chdir(folder)


def run_cells(notebook: dict[str, Any]) -> Iterator[tuple[str, str | None, str | None]]:
    """(printed, HTML of the last expression, its repr) of every cell of code."""
    names: dict[str, Any] = {}
    for cell in code_cells(notebook):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        printed, value = io.StringIO(), None
        with redirect_stdout(printed):
            exec(compile(tree, "cell", "exec"), names)
            if last:
                value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        html = value._repr_html_() if hasattr(value, "_repr_html_") else None
        yield printed.getvalue(), html, None if value is None else repr(value)


def committed(cell: dict[str, Any]) -> tuple[str, str | None, str | None]:
    """The same of a cell's outputs in the file."""
    printed = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
    shown = [output["data"] for output in cell["outputs"] if output["output_type"] == "execute_result"]
    html, plain = ("".join(shown[0][kind]) if shown and kind in shown[0] else None
                   for kind in ("text/html", "text/plain"))
    return printed, html, plain


class NotebooksTest(unittest.TestCase):
    def test_they_show_what_their_cells_show(self) -> None:
        for path in run_notebooks.NOTEBOOKS:
            with fresh_python():
                notebook = read(path)
                for cell, got in zip(code_cells(notebook), run_cells(notebook), strict=True):
                    with self.subTest(notebook=path.name, cell=cell["id"]):
                        for now, before in zip(got, committed(cell)):
                            self.assertTrue(now == before, f"{HINT}\n{now!s:.500}\n{before!s:.500}")  # no slow diff

    def test_cells_are_small_and_all_of_them_work(self) -> None:
        for path in run_notebooks.NOTEBOOKS:
            cells = read(path)["cells"]
            self.assertEqual(len({cell["id"] for cell in cells}), len(cells))
            for cell in cells:
                with self.subTest(notebook=path.name, cell=cell["id"]):
                    lines = "".join(cell["source"]).split("\n")
                    if cell["cell_type"] == "code":
                        self.assertLessEqual(len(lines), LINES)
                        self.assertLessEqual(max(map(len, lines)), COLUMNS)
                    kinds = {output["output_type"] for output in cell.get("outputs", ())}
                    self.assertLessEqual(kinds, {"stream", "execute_result"})

    def test_nothing_in_them_belongs_to_one_machine(self) -> None:
        for path in run_notebooks.NOTEBOOKS:
            notebook, text = read(path), path.read_text(encoding="utf-8")
            self.assertEqual(text, run_notebooks.as_text(notebook), HINT)
            self.assertEqual(notebook["metadata"], run_notebooks.METADATA)
            self.assertNotIn(str(ROOT), text)
            self.assertNotRegex(text, r"0x[0-9a-f]{6,}")  # an address: somebody has no repr

    def test_a_change_is_found(self) -> None:
        old = read(run_notebooks.NOTEBOOKS[0])
        new = json.loads(json.dumps(old))
        self.assertIsNone(run_notebooks.first_change(old, new))
        cell = code_cells(new)[3]
        cell["outputs"][0]["text"] = ["something else\n"]
        self.assertEqual(run_notebooks.first_change(old, new), "".join(cell["source"]))


@needs("notebooks", "nbclient", "ipykernel")
class KernelTest(unittest.TestCase):
    def test_a_kernel_shows_what_the_files_say(self) -> None:
        for path in run_notebooks.NOTEBOOKS:
            with self.subTest(notebook=path.name):
                self.assertIsNone(run_notebooks.first_change(read(path), run_notebooks.execute(path)), HINT)


if __name__ == "__main__":
    unittest.main()
