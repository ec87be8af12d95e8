"""The counts of scripts/house.py, on small packages that are made up here, and on this project."""

from __future__ import annotations

import io
import json
import tempfile
import unittest
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

from scripts import house
from tests.paths import ROOT

PYPROJECT = '''
[[tool.importlinter.contracts]]
containers = ["starter"]
layers = [
  "driver | __main__",
  "engine",
  "sampling | scheduler",
  "base",
  "errors",
]
'''


class Case(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = Path(temporary.name)
        (self.root / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")

    def write(self, **sources: str) -> None:
        """Modules with their sources; "base_weights" is starter/base/weights.py."""
        for name, source in sources.items():
            parts = (name,) if name.startswith("__") else name.split("_")
            path = self.root.joinpath("starter", *parts).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in (path.parent, self.root / "starter"):
                (folder / "__init__.py").touch()
            path.write_text(source, encoding="utf-8")

    def graph(self) -> dict[str, set[str]]:
        modules = house.read_modules(self.root)
        return {name: house.imports_of(module, modules) for name, module in modules.items()}

    def upward(self) -> list[str]:
        return house.upward_imports(self.graph(), house.read_modules(self.root), house.read_layers(self.root))


class ImportsTest(Case):
    def test_every_way_to_write_an_import(self) -> None:
        self.write(errors="", engine="", base_weights="", base_rope="", base_user="")
        for source, imported in (
                ("import starter.engine", {"engine"}), ("import starter.base.weights as w, json", {"base.weights"}),
                ("from starter import engine, errors", {"engine", "errors"}),
                ("from starter.errors import SomeError", {"errors"}), ("from ..errors import SomeError", {"errors"}),
                ("from . import rope", {"base.rope"}), ("from .rope import turn", {"base.rope"}),
                ("from .. import InferenceEngine", {""}), ("from starter import InferenceEngine", {""}),
                ("from starter import __version__", set()), ("from . import user", set()),
                ("import starter_of_others, sys", set()), ("from json import dumps", set()),
                ("def f():\n    if x:\n        from ..engine import y", {"engine"}),
                ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..engine import y", {"engine"})):
            with self.subTest(source=source):
                self.write(base_user=source)
                self.assertEqual(self.graph()["base.user"], imported)

    def test_a_program_is_found_like_any_module(self) -> None:
        self.write(__main__="", engine="from starter import __main__")
        self.assertEqual(self.graph()["engine"], {"__main__"})

    def test_the_page_of_a_package(self) -> None:
        self.write(observe_report="", engine="from .observe import report, nothing")
        (self.root / "starter" / "observe" / "__init__.py").write_text("from .report import x", encoding="utf-8")
        self.assertEqual((self.graph()["engine"], self.graph()["observe"]),
                         ({"observe.report", "observe"}, {"observe.report"}))


class KnotsTest(unittest.TestCase):
    def test_groups_that_reach_each_other(self) -> None:
        for graph, groups in (
                ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
                ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, []),
                ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [["a", "b"]]),
                ({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}}, [["a", "b", "c"], ["d", "e"]])):
            with self.subTest(graph=graph):
                self.assertEqual(house.knots(graph), groups)

    def test_a_long_chain_needs_no_recursion(self) -> None:
        graph = {str(i): {str(i + 1)} for i in range(3_000)} | {"3000": set()}
        self.assertEqual(house.knots(graph), [])


class UpwardTest(Case):
    def test_downward(self) -> None:
        self.write(errors="", base_rope="from ..errors import x", base_weights="from .rope import x",
                   sampling="from .base.rope import x", scheduler="from .errors import x",
                   engine="from starter import __version__\nfrom .sampling import x\nfrom .scheduler import y",
                   driver="from .engine import x\nfrom starter import InferenceEngine", __main__="import starter.base",
                   observe_report="from ..engine import x\nfrom .files import y\nfrom starter import InferenceEngine",
                   observe_files="")
        (self.root / "starter" / "__init__.py").write_text("from .engine import InferenceEngine", encoding="utf-8")
        self.assertEqual(self.upward(), [])

    def test_upward(self) -> None:
        for name, source, found in (
                ("errors", "from .base import rope", "errors -> base.rope"),
                ("base_rope", "from ..scheduler import x", "base.rope -> scheduler"),
                ("base_rope", "def f():\n    from ..observe import report", "base.rope -> observe.report"),
                ("sampling", "from .scheduler import x", "sampling -> scheduler"),
                ("scheduler", "import starter.engine", "scheduler -> engine"),
                ("engine", "from .observe.report import x", "engine -> observe.report"),
                ("engine", "from starter import InferenceEngine", "engine -> starter"),
                ("driver", "from .observe.report import x", "driver -> observe.report"),
                ("__main__", "from .driver import x", "__main__ -> driver"),
                ("observe_report", "from ..workloads import draw", "observe.report -> workloads.draw"),
                ("observe_report", "from ..driver import main", "observe.report -> driver")):
            with self.subTest(source=source):
                others = ("errors", "base_rope", "sampling", "scheduler", "engine", "driver", "__main__",
                          "observe_report", "workloads_draw")
                self.write(**{**dict.fromkeys(others, ""), name: source})
                self.assertEqual(self.upward(), [found])

    def test_the_page_of_the_project_imports_no_wing(self) -> None:
        self.write(engine="", observe_report="")
        (self.root / "starter" / "__init__.py").write_text("from .observe import report", encoding="utf-8")
        self.assertEqual(self.upward(), ["starter -> observe.report"])

    def test_a_module_without_a_place(self) -> None:
        self.write(engine="from .newcomer import x", newcomer="")
        self.assertRaisesRegex(ValueError, "have no newcomer", self.upward)
        (self.root / "pyproject.toml").write_text("", encoding="utf-8")
        self.assertRaisesRegex(ValueError, "no contract with the layers", self.upward)


class CountsTest(Case):
    def test_all_of_a_small_package(self) -> None:
        self.write(errors="x = 1\n", engine="def f():\n    pass\n\n\nclass C:\n    def g(self):\n        def h():\n"
                                            "            return 1\n        return h\n",
                   __main__="1\n2\n", base_rope="1\n2\n3\n", observe_report="1\n")
        counts = house.measure(self.root, ["base/rope.py", "engine.py", "observe/report.py"])
        self.assertEqual(counts["parts"], {
            "spine": {"files": 2, "lines": 10}, "spine with __init__ and __main__": {"files": 4, "lines": 12},
            "base": {"files": 2, "lines": 3}, "observe": {"files": 2, "lines": 1}, "all": {"files": 8, "lines": 16}})
        self.assertEqual((counts["spine_files"], counts["spine_lines"], counts["knots"], counts["upward_imports"]),
                         (2, 10, 0, 0))
        self.assertEqual(counts["longest_function"], {"lines": 4, "name": "engine.C.g"})
        self.assertEqual((counts["largest_spine_file"], counts["largest_spine_file_kb"]), ("engine.py", 0.1))
        self.assertEqual((counts["request_files"], counts["request_files_are"]), (
            3, {"spine": ["engine.py"], "base": ["base/rope.py"], "wings": ["observe/report.py"]}))
        self.assertEqual(house.broken(counts), [])

    def test_a_broken_bound_says_what_breaks_it(self) -> None:
        self.write(errors="from . import engine", engine="from . import errors", base_rope="")
        counts = house.measure(self.root, [])
        self.assertEqual(house.broken(counts), [
            "knots: 1, but at most 0 allowed\n    engine <-> errors",
            "upward imports: 1, but at most 0 allowed\n    errors -> engine"])
        with mock.patch.dict(house.BOUNDS, spine_lines=1, request_files=0):
            self.assertIn("spine lines: 2, but at most 1 allowed", house.broken(counts))
            self.assertIn("request files: 1, but at most 0 allowed\n    engine.py",
                          house.broken(house.measure(self.root, ["engine.py"])))


class ThisProjectTest(unittest.TestCase):
    def run_main(self, *arguments: str) -> tuple[int, str]:
        out = io.StringIO()
        with mock.patch("sys.argv", ["house.py", *arguments]), redirect_stdout(out):
            return house.main(), out.getvalue()

    def test_what_a_request_crosses_exists_and_has_the_path_of_a_token_in_it(self) -> None:
        files = house.files_of_a_request()
        self.assertEqual([name for name in files if not (ROOT / "starter" / name).is_file()], [])
        self.assertLessEqual({"engine.py", "scheduler.py", "kv_cache.py", "model.py", "backend.py"}, set(files))
        self.assertFalse({"driver.py", "reference.py", "numpy_backend.py"} & set(files))

    def test_the_program(self) -> None:
        code, text = self.run_main("--json")
        document = json.loads(text)
        self.assertEqual((document["knots_are"], document["upward_imports_are"]), ([], []))
        self.assertEqual(code, int(bool(document["broken"])))
        self.assertEqual(document["parts"]["all"]["files"], len(list((ROOT / "starter").rglob("*.py"))))
        self.assertIn("knots of imports: 0; upward imports: 0\n", self.run_main()[1])
        with mock.patch.dict(house.BOUNDS, spine_files=0):
            code, text = self.run_main()
        self.assertEqual((code, "but at most 0 allowed" in text), (1, True))


if __name__ == "__main__":
    unittest.main()
