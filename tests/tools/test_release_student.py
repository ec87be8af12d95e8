"""The students' project, made from this one: what is given is given whole, what is to be written is gone, and a solved
milestone is solved. ``python3 scripts/release_student.py --check`` proves the last point with all of C5."""

from __future__ import annotations

import ast
import json
import re
import tempfile
import textwrap
import unittest
from pathlib import Path
from unittest import mock

from scripts import check_docs, release_student
from scripts.release_student import (
    PLACEHOLDERS,
    ROOT,
    TABLE,
    ReleaseError,
    apart,
    body_text,
    functions,
    given_modules,
    open_functions,
    release,
    source_of,
    with_bodies,
    without_orphans,
)

OWN_VERSION = {"numpy_backend"}  # modules that are others in the students' project


def tree(folder: Path, module: str) -> ast.Module:
    return ast.parse((folder / source_of(module).relative_to(ROOT)).read_text(encoding="utf-8"))


def names(body: ast.Module) -> set[str]:
    """Public classes and functions."""
    return {node.name for node in ast.walk(body) if isinstance(node, (ast.ClassDef, ast.FunctionDef))
            if not node.name.startswith("_")}


def signatures(body: ast.Module) -> dict[str, str]:
    """Decorators, parameters and result of every public function."""
    return {name: " ".join([*map(ast.unparse, node.decorator_list), ast.unparse(node.args),
                            ast.unparse(node.returns) if node.returns else ""])
            for name, node in functions(body) if not node.name.startswith("_") or node.name == "__init__"}


def field_lines(body: ast.Module) -> dict[str, list[str]]:
    """Annotated fields of every public class."""
    return {node.name: [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)]
            for node in ast.walk(body) if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


class ReleasedTest(unittest.TestCase):
    """The skeleton, made once."""

    @classmethod
    def setUpClass(cls) -> None:
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.out = Path(temporary.name, "student")
        release(cls.out)
        cls.table = json.loads(TABLE.read_text(encoding="utf-8"))
        cls.modules = set(given_modules(cls.table["roots"])) - OWN_VERSION

    def test_the_public_face_is_the_same(self) -> None:
        self.assertGreater(len(self.modules), 40)
        for module in self.modules:
            with self.subTest(module=module):
                mine, theirs = tree(ROOT, module), tree(self.out, module)
                self.assertEqual(signatures(theirs), signatures(mine))
                self.assertEqual(field_lines(theirs), field_lines(mine))
                self.assertEqual(names(theirs), names(mine))

    def test_listed_functions_are_stubs_that_name_their_milestone(self) -> None:
        stubs = [(milestone, name) for milestone, listed in self.table["stubs"].items() for name in listed]
        self.assertGreater(len(stubs), 40)
        for milestone, name in stubs:
            module, function = apart(name)
            node = dict(functions(tree(self.out, module))).get(function)
            with self.subTest(name=name):
                if node is None:  # only a solution called it
                    self.assertTrue(function.rpartition(".")[2].startswith("_"))
                    continue
                statement = node.body[-1]
                self.assertEqual(len(node.body), 1 + (ast.get_docstring(node) is not None))
                self.assertEqual(ast.unparse(statement), "raise NotImplementedError("
                                 f"'{milestone}: {function} is still to be written')")
                original = dict(functions(tree(ROOT, module)))[function]
                self.assertEqual(ast.get_docstring(node), ast.get_docstring(original))

    def test_private_helpers_of_solutions_are_gone(self) -> None:
        for module, helpers in {"scheduler": "_plan_admissions _plan_decodes _plan_prefills _preempt _held",
                                "kv_cache": "_needs_copy _grow _find_prefix", 
                                "quantization": "_pack_row _round_up_to_float32 _scale",
                                "backend": "_attend_part"}.items():
            self.assertLessEqual(set(helpers.split()), {name.rpartition(".")[2] for name, _ in functions(
                tree(ROOT, module))})
            text = (self.out / source_of(module).relative_to(ROOT)).read_text(encoding="utf-8")
            self.assertEqual([name for name in helpers.split() if name in text], [], module)

    def test_what_is_outside_of_the_bodies_stays_letter_by_letter(self) -> None:
        untouched = self.modules - {apart(name)[0] for name in open_functions(self.table, 0)}
        for module in untouched:
            self.assertEqual((self.out / source_of(module).relative_to(ROOT)).read_bytes(),
                             source_of(module).read_bytes(), module)
        for module in self.modules - untouched:  # nothing but whole lines gone, and the new bodies
            mine = set(source_of(module).read_text(encoding="utf-8").splitlines())
            theirs = (self.out / source_of(module).relative_to(ROOT)).read_text(encoding="utf-8").splitlines()
            new = {line.strip() for line in theirs if line not in mine and "still to be written" not in line}
            written = PLACEHOLDERS.read_text(encoding="utf-8") + json.dumps(self.table)
            self.assertEqual({line for line in new if json.dumps(line)[1:-1] not in written and line not in written},
                             set(), module)

    def test_no_line_of_a_solution_is_left_in_words(self) -> None:
        """Not in a docstring, a comment or a document, either."""
        solutions = set()
        for name in open_functions(self.table, 0):
            module, function = apart(name)
            source = source_of(module).read_text(encoding="utf-8")
            lines = body_text(source, dict(functions(ast.parse(source)))[function]).splitlines()
            solutions |= {line.strip() for line in lines if len(line.strip()) >= 24}
        self.assertGreater(len(solutions), 150)
        for path in self.out.rglob("*"):
            if path.suffix in (".py", ".md", ".ipynb", ".json", ".toml"):
                text = path.read_text(encoding="utf-8")
                if path.suffix == ".py":
                    text = "\n".join([*(node.value for node in ast.walk(ast.parse(text)) if isinstance(
                        node, ast.Constant) and isinstance(node.value, str)),
                        *(line.partition("#")[2] for line in text.splitlines())])
                for line in solutions:
                    self.assertFalse(line in text, f"{path.relative_to(self.out)} tells: {line}")

    def test_what_gives_solutions_away_stays_here(self) -> None:
        released = {str(path.relative_to(self.out).as_posix()) for path in self.out.rglob("*") if path.is_file()}
        self.assertFalse([name for name in released if "lane" in name or "wrong" in name or ".git/" in name])
        self.assertFalse([name for name in released if "student" in name and "acceptance" not in name])
        self.assertNotIn("acceptance/matrix.py", released)
        self.assertNotIn("docs/teacher.md", released)

    def test_reports_are_blank_forms(self) -> None:
        """Our own design report is a solution, too."""
        for name in ("DESIGN.md", "REPORT.md"):
            form = (ROOT / "docs" / name.replace(".md", ".template.md")).read_bytes()
            self.assertEqual((self.out / name).read_bytes(), form)

    def test_documents_name_what_is_there(self) -> None:
        """Links, files, tests and commands are those of the students' project, not of this one."""
        documents = sorted([*self.out.glob("*.md"), *self.out.glob("docs/*.md")])
        self.assertEqual([path.name for path in documents], [
            "DESIGN.md", "README.md", "REPORT.md", "glossary.md", "glossary.zh.md", "handout.md", "handout.zh.md",
            "integrity.md", "rubric.md"])
        for path in documents:
            text = path.read_text(encoding="utf-8")
            with self.subTest(path=path.name):
                self.assertEqual(list(check_docs.missing_names(path, text, self.out)), [])
                self.assertEqual(list(check_docs.wrong_commands(text, self.out)), [])

    def test_the_handout_names_all_that_is_to_be_written(self) -> None:
        """In the chapter of its milestone, beside its file."""
        work = [(milestone, name) for milestone, names in self.table["stubs"].items() for name in names]
        work += [(milestone, name) for name, milestone in self.table["placeholders"].items()]
        for document in ("handout.md", "handout.zh.md"):
            text = (self.out / "docs" / document).read_text(encoding="utf-8")
            chapters = {chapter[:2]: chapter for chapter in text.split("\n## ")}
            for milestone, name in work:
                row = next((line for line in chapters[milestone].splitlines()
                            if line.startswith(f"| `{source_of(apart(name)[0]).relative_to(ROOT).as_posix()}`")), "")
                self.assertIn(f"`{name.rpartition('.')[2]}`", row, f"{document}, {milestone}, {name}")

    def test_c1_c3_c4_pass_and_c5_fails_with_a_pointer(self) -> None:
        """Of C5 one of each milestone."""
        self.assertEqual(release_student.check_commands(self.out), [])
        self.assertEqual(release_student.check_milestones(self.out, 0, [
            "test_greedy_generation", "test_append_then_read", "test_budget_zero", "test_copy_on_write",
            "test_error_bound", "test_close_with_live_requests"]), [])


class ThroughTest(unittest.TestCase):
    def test_a_solved_milestone_passes_and_the_next_does_not(self) -> None:
        """Again a few: with M2 solved, M2's pass, and M4's do not."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "student")
            release(out, 2)
            tests = ["test_text_of_a_stream", "test_counters", "test_dirty_pages", "test_budget_zero",
                     "test_copy_on_write"]
            self.assertEqual(release_student.check_milestones(out, 2, tests), [])
            self.assertIn("test_budget_zero fails",
                          "\n".join(release_student.check_milestones(out, 3, ["test_budget_zero"])))

    def test_examples_of_the_handout_hold_as_soon_as_their_milestone_is_solved(self) -> None:
        for through in (2, 4):
            with self.subTest(through=through), tempfile.TemporaryDirectory() as folder:
                out = Path(folder, "student")
                release(out, through)
                lines = (out / "docs" / "handout.md").read_text(encoding="utf-8").splitlines()
                end = next(number for number, line in enumerate(lines, 1) if line.startswith(f"## M{through + 1}"))
                told = release_student.run(out, "-m", "doctest", "docs/handout.md").stdout
                wrong = [int(number) for number in re.findall(r'^File .*, line (\d+), in', told, re.MULTILINE)]
                self.assertEqual([number for number in wrong if number < end], [], told)
                self.assertNotEqual(wrong, [])

    def test_everything_solved_is_this_project(self) -> None:
        edits = json.loads(TABLE.read_text(encoding="utf-8"))["edits"]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "student")
            release(out, 6)
            for path in sorted(out.glob("starter/**/*.py")):
                if path.stem not in OWN_VERSION:
                    name = path.relative_to(out).as_posix()
                    ours = (ROOT / name).read_text(encoding="utf-8")
                    for old, new in edits.get(name, ()):
                        ours = ours.replace(old, new)
                    self.assertEqual(path.read_text(encoding="utf-8"), ours, name)


class TableTest(unittest.TestCase):
    def test_a_name_that_is_gone_is_an_error(self) -> None:
        for change, said in (({"stubs": {"M2": ["kv_cache.KVCacheManager.alocate"]}}, "kv_cache.py has no .*alocate"),
                             ({"files": ["no such file"]}, "no file no such file"),
                             ({"placeholders": {"scheduler.gone": "M3"}}, "has no scheduler.gone"),
                             ({"edits": {"starter/engine.py": [["no such line", ""]]}}, "0 times")):
            table = {**json.loads(TABLE.read_text(encoding="utf-8")), **change}
            with self.subTest(said=said), tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "table.json")
                path.write_text(json.dumps(table), encoding="utf-8")
                with mock.patch.object(release_student, "TABLE", path), self.assertRaisesRegex(ReleaseError, said):
                    release(Path(folder, "student"))

    def test_a_folder_with_files_is_left_alone(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "mine.txt").write_text("mine", encoding="utf-8")
            self.assertRaisesRegex(ReleaseError, "not empty", release, Path(folder))
            self.assertEqual([path.name for path in Path(folder).iterdir()], ["mine.txt"])


class EditingTest(unittest.TestCase):
    SOURCE = textwrap.dedent('''
        LIMIT = 3  # stays
        _TABLE = {
            1: 2,
        }


        class A:
            @property
            def x(self) -> int:
                """Says
                what."""
                # how it is done
                return self._help(1)  # and why

            def _help(self, y):  # serves x alone
                return _TABLE[_inner(y)]

            def z(self,
                  y: int) -> int:
                # without a docstring
                return self._other(y)

            def _other(self, y):
                return y


        def _inner(y):
            return y
        ''')

    def test_bodies_go_and_so_does_what_served_them_alone(self) -> None:
        edited = without_orphans(with_bodies(self.SOURCE, {"A.x": "raise E", "A.z": "if y:\n    raise E"}, "a"))
        self.assertEqual(edited, textwrap.dedent('''
            LIMIT = 3  # stays


            class A:
                @property
                def x(self) -> int:
                    """Says
                    what."""
                    raise E

                def z(self,
                      y: int) -> int:
                    if y:
                        raise E
            '''))

    def test_a_body_on_the_line_of_its_signature(self) -> None:
        self.assertRaisesRegex(ReleaseError, "write it below", with_bodies, "def f(): return 1\n", {"f": "pass"}, "a")


if __name__ == "__main__":
    unittest.main()
